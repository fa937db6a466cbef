"""Learned positions: in a bundle, at every place of a text and of a tree, and in the plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from ondevice.backends.kv_layout import KVLayout
from ondevice.backends.token_tree import TokenTree
from ondevice.budget.cpu_memory import CpuMemory
from ondevice.bundle.layout import RESIDENT
from ondevice.bundle.reader import Bundle
from ondevice.config import QuantConfig, RuntimeConfig
from ondevice.converters.architectures.tensors import POSITIONS
from ondevice.converters.convert import convert
from ondevice.model.sequence_state import SequenceState
from tests.support.engines import BackendName, all_logits, running
from tests.support.models import add_tensor, change_family, write_checkpoint

CONTEXT = 96
TOKENS = [int(token) for token in np.random.default_rng(2).integers(0, 256, CONTEXT)]


@pytest.fixture(scope="module")
def table() -> np.ndarray:
    return np.random.default_rng(1).standard_normal((CONTEXT, 64)).astype(np.float32)


@pytest.fixture(scope="module")
def positioned(tmp_path_factory: pytest.TempPathFactory, table: np.ndarray) -> Path:
    """A Llama at 4 bits with learned positions, which no family has beside rotary ones."""
    folder = tmp_path_factory.mktemp("positions")
    source = write_checkpoint(folder / "source", max_position_embeddings=CONTEXT)
    add_tensor(source, POSITIONS, table)
    with pytest.MonkeyPatch.context() as patch:
        change_family(patch, learned_positions=True)
        return convert(source, folder / "bundle", "q4")


def test_a_bundle_holds_them_as_they_are(positioned: Path, table: np.ndarray) -> None:
    assert Bundle.open(positioned).config.learned_positions
    assert (load_file(positioned / RESIDENT)["positions"] == table).all()


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_each_token_gets_its_own(positioned: Path, table: np.ndarray, backend: BackendName) -> None:
    with running(positioned, backend) as model:
        x = model.backend.embedding(model.weights.embedding, np.array(TOKENS, np.int32)) + table
        kv, other = (SequenceState(KVLayout(model.config, 16)) for _ in range(2))
        expected = np.array(model.hidden_states(TOKENS, kv, x=x.copy()))
        found = [np.array(model.hidden_states(TOKENS[at : at + 29], other)) for at in range(0, CONTEXT, 29)]
        np.testing.assert_allclose(np.concatenate(found), expected, rtol=1e-3, atol=1e-3)
        if backend == "cpu":
            assert np.concatenate(found).tobytes() == expected.tobytes()
        assert (model.embedding(TOKENS[5:7], 5) == x[5:7]).all()


def test_a_tree_has_those_of_its_depths_and_may_lie_past_the_end(positioned: Path) -> None:
    """Past the context's end nothing is computed that counts, but the rest of the tree does."""
    tree = TokenTree([-1, 0, 0, 1, 3])
    tokens, start = TOKENS[: len(tree)], CONTEXT - 3
    with running(positioned, "cpu") as model:
        kv = SequenceState(KVLayout(model.config, 16))
        model.forward(TOKENS[:start], kv, "none")
        found = np.array(model.hidden_states(tokens, kv, tree=tree))
        for path in ([0, 1, 3], [0, 2]):
            kv.truncate(start)
            alone = np.array(model.hidden_states([tokens[node] for node in path], kv))
            assert found[path].tobytes() == alone.tobytes()


def test_mlx_adds_them_too(positioned: Path) -> None:
    pytest.importorskip("mlx.core")
    from ondevice.backends.mlx_float import MlxFloatBackend
    from ondevice.backends.mlx_kv import MlxKV, no_block
    from ondevice.flash.reader import FlashReader
    from ondevice.model.loading import bundle_files, load_weights
    from ondevice.model.transformer import Transformer

    bundle = Bundle.open(positioned)
    with running(positioned) as model:
        expected = all_logits(model, TOKENS, 32)
    with FlashReader(bundle_files(bundle)) as reader:
        backend = MlxFloatBackend()
        loaded = Transformer(bundle.config, backend, load_weights(bundle, reader, backend))
        layout = KVLayout(bundle.config, 32)
        kv = SequenceState(layout, no_block, arrays=MlxKV(layout))
        mine = np.array(loaded.logits(loaded.hidden_states(TOKENS, kv)))
    assert np.abs(mine - expected).max() < 1e-3 * np.abs(expected).max()


def test_the_plan_counts_them(positioned: Path) -> None:
    config = Bundle.open(positioned).config
    with_them, without = (
        CpuMemory(found, QuantConfig(4), RuntimeConfig()).weights_bytes
        for found in (config, replace(config, learned_positions=False))
    )
    # With a checksum of 4 bytes for each 16 KiB.
    assert with_them - without == 4 * CONTEXT * config.hidden_size + 2 * 4
