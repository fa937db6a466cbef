"""A pass of several sequences: every row has the bits that it has in a pass of its own sequence alone."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from ondevice.backends.forward_batch import ForwardBatch, joint_batch
from ondevice.backends.token_tree import TokenTree
from ondevice.callbacks import Cancelled
from ondevice.converters.convert import convert
from ondevice.errors import UsageError
from ondevice.model.layer_range import SequencePart
from ondevice.model.sequence_state import KVLayout, SequenceState
from ondevice.model.transformer import Transformer
from tests.support.engines import random_tokens, running
from tests.support.families import CASES, write_model

PREFIXES = (0, 3, 70, 64, 1)
ROWS = (5, 1, 1, 2, 30)


def begun(model: Transformer, seed: int = 7) -> list[SequenceState]:
    """Caches of sequences of different lengths."""
    found = []
    for at, length in enumerate(PREFIXES):
        kv = SequenceState(KVLayout(model.config, 8))
        if length:
            model.forward(random_tokens(model.config, length, seed + at), kv, "none")
        found.append(kv)
    return found


def bits(model: Transformer) -> tuple[list[bytes], list[bytes]]:
    """The hidden states of two passes of each sequence alone, and of two passes of all together."""
    apart, shared = begun(model), begun(model)
    found: tuple[list[bytes], list[bytes]] = [], []
    for turn in range(2):
        given = [random_tokens(model.config, count, 90 + 9 * turn + at) for at, count in enumerate(ROWS)]
        alone = [
            np.array(model.backend.to_numpy(model.hidden_states(tokens, kv)))
            for tokens, kv in zip(given, apart, strict=True)
        ]
        parts = [SequencePart(ForwardBatch(tokens), kv) for tokens, kv in zip(given, shared, strict=True)]
        found[0].append(np.concatenate(alone).tobytes())
        found[1].append(model.backend.to_numpy(model.run_each(parts)).tobytes())
        assert [kv.tokens for kv in shared] == [kv.tokens for kv in apart]
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Transformer]:
    folder = tmp_path_factory.mktemp("gemma")
    write_model(folder / "source", *CASES["gemma2"])
    with running(convert(folder / "source", folder / "bundle", "q4"), "cpu") as found:
        yield found


def test_nodes_of_a_draft_have_the_bits_of_their_sequence_alone(model: Transformer) -> None:
    """Trees, chains and prompts in one pass; then the paths that their texts take."""
    trees = [TokenTree([-1, 0, 0, 1, 2]), None, TokenTree([-1, 0, 1]), TokenTree([-1, 0, 0]), None]
    paths = [[0, 2, 4], [0], [0, 1], [0, 2], [0, 1]]
    apart, shared = begun(model), begun(model)
    for turn in range(2):
        batches = []
        for at, tree in enumerate(trees):
            count = 2 if tree is None else len(tree)
            tokens = random_tokens(model.config, count, 50 + 9 * turn + at)
            batches.append(ForwardBatch(tokens, tree, drafted=() if tree is None else range(1, count)))
        alone = [np.array(model.run(batch, kv).hidden) for batch, kv in zip(batches, apart, strict=True)]
        parts = [SequencePart(batch, kv) for batch, kv in zip(batches, shared, strict=True)]
        assert np.array(model.run_each(parts)).tobytes() == np.concatenate(alone).tobytes()
        whole = joint_batch(batches)
        assert [whole.tokens[row] for row in whole.drafted] == [
            batch.tokens[row] for batch in batches for row in batch.drafted
        ]
        for kvs in (apart, shared):
            for kv, batch, path in zip(kvs, batches, paths, strict=True):
                kv.keep(kv.length - len(batch.tokens), path, partial(model.backend.kv_move, kv))


def test_rows_have_the_bits_of_their_sequence_alone(model: Transformer) -> None:
    alone, together = bits(model)
    assert together == alone


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_sequences_run_together_give_each_family_s_bits_alone(tmp_path: Path, case: str) -> None:
    write_model(tmp_path / "source", *CASES[case])
    with running(convert(tmp_path / "source", tmp_path / "bundle", "q4"), "cpu") as found:
        alone, together = bits(found)
    assert together == alone


def test_what_fails_leaves_every_cache_as_it_was(monkeypatch: pytest.MonkeyPatch, model: Transformer) -> None:
    # A pass is cancelled between native calls.
    monkeypatch.setattr(model._plain, "_layers_at_once", 1)
    caches = begun(model)
    before = [list(kv.tokens) for kv in caches]
    parts = [SequencePart(ForwardBatch([5, 6]), kv) for kv in caches]
    asked: list[int] = []

    def cancelled() -> bool:
        asked.append(1)
        return len(asked) == 2

    with pytest.raises(Cancelled):
        model.run_each(parts, cancelled)
    with pytest.raises(UsageError, match="token id"):
        model.run_each([*parts[1:], SequencePart(ForwardBatch([model.config.vocab_size]), caches[0])])
    assert [kv.tokens for kv in caches] == before
