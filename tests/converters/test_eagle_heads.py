"""EAGLE-3 heads: converted for a bundle, equal to plain PyTorch, and refused where they are hostile."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from ondevice.backends.forward_batch import ForwardBatch
from ondevice.bundle.draft_layers import EAGLE_SIDECAR
from ondevice.bundle.reader import Bundle
from ondevice.converters.draft_layers.eagle import convert_eagle
from ondevice.flash.reader import FlashReader
from ondevice.model.draft_layer import load_draft_layer
from ondevice.model.kv_cache import KVCache, KVLayout
from tests.support.bundles import convert_bundle, copy_files, write_chat_checkpoint
from tests.support.eagle_heads import head_config, head_tensors, twin_rows, write_eagle_head
from tests.support.engines import BackendName, running
from tests.support.models import transformers_model

TOKENS = [3, 250, 7, 7, 90, 14, 200, 3, 41, 5, 66, 250, 1]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_checkpoint(tmp_path_factory.mktemp("target") / "checkpoint", dtype="F16")


@pytest.fixture(scope="module")
def target(checkpoint: Path) -> Path:
    return convert_bundle(checkpoint, checkpoint.parent / "target", "f16")


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize(
    ("options", "embeddings"),
    [
        ({}, False),
        ({"norm_before_residual": True, "attention_bias": True, "rope_theta": 500.0}, True),
        ({"draft_vocab_size": 272, "head_dim": 24, "eagle_aux_hidden_state_layer_ids": [2, 0, 2]}, False),
    ],
)
def test_logits_are_those_of_plain_pytorch(
    checkpoint: Path,
    target: Path,
    tmp_path: Path,
    backend: BackendName,
    options: dict[str, Any],
    embeddings: bool,
) -> None:
    """Rows of a text in pieces of several lengths, then three that go on from the layer's own output."""
    torch = pytest.importorskip("torch")
    folder = copy_files(target, tmp_path / "bundle")
    config = head_config(**options)
    tensors = head_tensors(config, embeddings=embeddings)
    layer = convert_eagle(write_eagle_head(tmp_path / "head", tensors, **options), folder, 16)
    model = transformers_model(checkpoint)
    with torch.no_grad():
        states = model(torch.tensor([TOKENS]), output_hidden_states=True).hidden_states
    taps = config["eagle_aux_hidden_state_layer_ids"]
    entering = [states[tap][0].numpy() for tap in taps]
    kv_bits: Literal[32, 16] = 32 if backend == "reference" else 16
    with running(folder, backend) as transformer:
        transformer.taps = tuple(sorted(set(taps)))
        kv = KVCache(KVLayout(transformer.config, kv_bits))
        output = transformer.run(ForwardBatch(TOKENS), kv)
        assert len(output.tapped) == len(set(taps))
        bundle = Bundle.open(folder)
        with FlashReader([bundle.added_file(EAGLE_SIDECAR.tensors)], "buffered") as reader:
            loaded = load_draft_layer(bundle, layer, reader, transformer.backend, transformer.weights, 0, 256)
        own = KVCache(KVLayout(loaded.config, kv_bits))
        mixed = loaded.mixed(output.tapped)
        rows, found = TOKENS[1:], []
        for start, stop in ((0, 1), (1, 6), (6, len(rows))):
            hidden = loaded.run(rows[start:stop], transformer.backend.rows(mixed, range(start, stop)), own)
            found.append(loaded.logits(hidden))
        fed = [17, 33, 8]
        for token in fed:
            last = transformer.backend.rows(hidden, [hidden.shape[0] - 1])
            hidden = loaded.run([token], last, own)
            found.append(loaded.logits(hidden))
    own_table = model.get_input_embeddings().weight.detach().numpy()
    table = tensors["embed_tokens.weight"] if embeddings else own_table
    fc = np.concatenate(entering, 1) @ tensors["fc.weight"].astype(np.float64).T
    expected_hidden = fc[:-1]
    after, logits = twin_rows(tensors, config, table, rows, expected_hidden)
    for count in range(1, len(fed) + 1):
        expected_hidden = np.vstack([expected_hidden, after[-1:]])
        after, logits = twin_rows(tensors, config, table, [*rows, *fed[:count]], expected_hidden)
    got = np.concatenate(found)
    assert got.shape == logits.shape
    assert np.abs(got - logits).max() < 1e-3 * np.abs(logits).max()
    # The token of each place of the head.
    chosen = np.arange(config["draft_vocab_size"]) + tensors["d2t"]
    assert (chosen == (np.arange(272) if loaded.tokens is None else loaded.tokens)).all()
