"""Matrices of every token that come from flash: no bit depends on which of them are in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Lock

import numpy as np
import pytest

import ondevice.bundle.matrix_units
from ondevice.api import load
from ondevice.backends.cpu import CpuBackend
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.budget.sizes import MATRIX_SLOTS
from ondevice.bundle.matrix_units import head_rows, matrix_units
from ondevice.bundle.reader import Bundle
from ondevice.config import QuantConfig
from ondevice.converters.convert import convert
from ondevice.errors import FlashReadError, OndeviceError
from ondevice.flash.read_ahead import ReadAhead
from ondevice.flash.reader import FlashReader
from ondevice.model.loading import bundle_files, load_weights
from ondevice.model.sequence_state import KVLayout, SequenceState
from ondevice.model.transformer import Transformer
from ondevice.sparsity.matrix_stream import MatrixStream
from tests.support.engines import random_tokens, running
from tests.support.families import CASES, write_model
from tests.support.trained_models import TWIN

PIECE_BYTES, SLOT_BYTES = 8 << 10, 128 << 10
FAST = ("gemma2", "deepseek v2 moe", "qwen3.5", "falcon h1", "opt wide embeddings")
"""Tied heads; latent attention with experts; delta rules; mixers beside attention; wide embeddings."""


@contextmanager
def streamed(model: Transformer, bundle: Bundle) -> Iterator[tuple[Transformer, MatrixStream]]:
    """The model with the same neurons, and its matrices on flash."""
    backend = model.backend
    assert isinstance(backend, CpuBackend)
    kept, backend.feed_forwards = backend.feed_forwards, []
    with FlashReader(bundle_files(bundle), "buffered", 2) as reader:
        weights = load_weights(bundle, reader, backend, streams_matrices=True)
        for layer, own in zip(weights.layers, kept, strict=True):
            object.__setattr__(layer, "feed_forward", own)
        backend.feed_forwards = kept
        stream = MatrixStream(
            backend.streamed, reader, piece_bytes=PIECE_BYTES, slot_bytes=SLOT_BYTES, slots=MATRIX_SLOTS
        )
        yield Transformer(bundle.config, backend, weights), stream
        stream.close()


def logits(model: Transformer, tokens: list[int]) -> bytes:
    """Of a prompt whose head isn't wanted, of three passes over one token, and of four rows at once."""
    kv, parts = SequenceState(KVLayout(model.config, 16)), []
    model.forward(tokens[:9], kv, "none")
    for token in tokens[9:12]:
        last = model.forward([token], kv)
        assert last is not None
        parts.append(last.tobytes())
    hidden = model.run(ForwardBatch(tokens[12:16]), kv).hidden
    return b"".join([*parts, model.checked_logits(hidden).tobytes()])


@pytest.mark.fast(*FAST)
@pytest.mark.parametrize("case", CASES)
def test_every_family_has_the_same_bits(tmp_path: Path, case: str) -> None:
    write_model(tmp_path / "source", *CASES[case])
    bundle = Bundle.open(convert(tmp_path / "source", tmp_path / "bundle", "q4"))
    units = matrix_units(bundle.config, bundle.quant)
    with running(bundle, "cpu") as model:
        tokens = random_tokens(bundle.config, 16)
        expected = logits(model, tokens)
        with streamed(model, bundle) as (other, stream):
            sizes = [sum(matrix.nbytes for linear in unit for matrix in linear) for unit in units]
            assert [sum(it.nbytes for it in stream._units[unit]) for unit in range(len(units))] == sizes
            for quota in (0, 1, len(units), len(units) - 1, 2, 0):
                stream.resize(quota)
                assert logits(other, tokens) == expected, quota
                held = sum(sizes[:quota])
                assert (stream.filled_bytes, stream.is_complete) == (held, quota == len(units))
            stream.resize(0)
            stream.close()
            with pytest.raises(OndeviceError, match="it is closed"):
                logits(other, tokens)


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of small models are cut, so that reading their matrices takes less memory than holding them."""
    monkeypatch.setattr(ondevice.bundle.matrix_units, "HEAD_UNIT_BYTES", 64 << 10)


@pytest.mark.parametrize(
    ("vocab", "units"), [(1000, 1), (40_000, 2), (128_256, 8), (300_000, 10), (299_984, 12)]
)
def test_the_head_is_cut_into_runs_of_whole_tiles(vocab: int, units: int) -> None:
    config = replace(Bundle.open(TWIN).config, vocab_size=vocab)
    parts = head_rows(config, QuantConfig(8))
    assert len(parts) == units
    assert [part.first for part in parts] == list(np.cumsum([0, *(part.matrix.rows for part in parts[:-1])]))
    assert sum(part.matrix.rows for part in parts) == vocab
    assert all(part.first % 16 == 0 for part in parts)


@pytest.mark.usefixtures("small_units")
def test_texts_and_reads_of_every_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token's pass reads what isn't held, and the text is the same, budgets changing while it is made."""
    options = {"sparsity": "dense", "speculation": "off", "max_context": 128, "threads": 1}
    with load(TWIN, **options) as model:
        prompt = model.tokenizer.encode("How many students are there?")
        expected = model.generate(tokens=prompt, max_tokens=24).tokens
        plan = model.plan
        shape = plan.matrices
        assert shape is not None
        assert plan.holds_matrices
        least, most = plan.least_budget_bytes, plan.resident_budget_bytes
        total = len(shape.unit_bytes)
        layer = shape.unit_bytes[0]
        budgets = [model.replanned.least_budget_bytes + more for more in (0, 3 * layer, most - least, layer)]
        reads = []
        for budget in budgets:
            plan = model.set_dram_budget(budget)
            text = model.generate(tokens=prompt, max_tokens=24)
            assert text.tokens == expected
            first = text.stats.flash_bytes_read
            text = model.generate(tokens=prompt, max_tokens=24)
            assert text.tokens == expected
            reads.append((plan.held_units, text.stats.flash_bytes_read))
            assert text.stats.flash_bytes_read <= first
            missing = sum(shape.unit_bytes[plan.held_units :])
            # Layers come once more for the prompt's chunk, which has 24 tokens at most.
            assert text.stats.flash_bytes_read >= 24 * missing
        assert [held for held, _ in reads] == [0, reads[1][0], total, reads[3][0]]
        assert 0 < reads[3][0] <= reads[1][0] < total
        assert reads[0][1] > reads[1][1] > reads[2][1]
        stream, tokens = model.stream(tokens=prompt, max_tokens=24), []
        for index, event in enumerate(stream):
            tokens.append(event.token)
            model.set_dram_budget(budgets[index % 4])
        assert tuple(tokens[:-1]) == expected


@pytest.mark.usefixtures("small_units")
@pytest.mark.parametrize("held", [False, True])
def test_a_read_that_fails_is_told_and_the_next_text_is_right(
    held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Matrices come once more after an error, whether passes read them or a thread fills memory with them."""
    options = {"sparsity": "dense", "speculation": "off", "max_context": 128, "threads": 1}
    with load(TWIN, **options) as model:
        prompt, most = model.tokenizer.encode("Hi!"), model.plan.budget_bytes
        expected = model.generate(tokens=prompt, max_tokens=6).tokens
        taken, plain, lock = [0], ReadAhead.next, Lock()

        def failing(ahead: ReadAhead) -> np.ndarray:
            with lock:
                taken[0] += 1
                fails = taken[0] in at
            if fails:
                raise FlashReadError("resident.safetensors: the device is gone")
            return plain(ahead)

        for failed in ({1}, {9}, {12, 13}):
            taken[0], at = 0, failed
            model.set_dram_budget(model.replanned.minimum_budget_bytes)
            if held:
                model.set_dram_budget(most)
            monkeypatch.setattr(ReadAhead, "next", failing)
            with pytest.raises(FlashReadError, match="the device is gone"):
                model.generate(tokens=prompt, max_tokens=6)
            monkeypatch.setattr(ReadAhead, "next", plain)
            assert model.generate(tokens=prompt, max_tokens=6).tokens == expected
