"""One row of the ablation: a run of the engine, with its reads and time per token."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from typing import Any, Literal

import numpy as np

from ondevice.backends.base import Bytes
from ondevice.budget.sizes import STREAM_SLOT_BYTES, STREAM_SLOTS
from ondevice.bundle.layout import neuron_file_name
from ondevice.bundle.reader import Bundle, CheckedFile
from ondevice.callbacks import never_cancelled
from ondevice.config import SamplingConfig
from ondevice.flash.read_ahead import Extent, ReadAhead
from ondevice.flash.reader import FlashReader, FlashStats
from ondevice.kernels import _native
from ondevice.meter import Counters
from ondevice.records import dataclass
from ondevice.runtime.engine import Engine
from ondevice.runtime.resolving import ResolvedModel
from ondevice.sparsity.fetch import FetchOptions
from ondevice.stats import per_second
from ondevice.units import PAGE_BYTES

TEMPERATURE = 0.8
"""Sampling temperature. Greedy text repeats itself, which would flatter every cache."""

IoMode = Literal["auto", "direct", "buffered"]


@dataclass(frozen=True)
class AblationRow:
    """The run of one configuration. Reads and times are means per token, in bytes and seconds."""

    name: str
    sparsity: str
    io: str
    kernel_target: str
    feed_forward_bytes: int
    """Memory that holds neurons at the end of the run."""
    resident_bytes: int
    """Memory that holds the other weights and what selects neurons; 0 if they are read for every token."""
    flash_bytes: float
    flash_reads: float
    io_seconds: float
    """Wall time with a read in flight, including time that overlaps computing."""
    waited_seconds: float
    """Part of the total that is spent waiting for reads."""
    managed_seconds: float
    """Part of the total that is spent managing the neuron cache."""
    total_seconds: float
    prefetch_recall: float
    """Share of the neurons missing from memory that were being prefetched when they were needed."""
    prefetch_wasted_bytes: float
    tokens: tuple[int, ...]
    """Ids of the generated text, including the warm-up tokens."""

    @property
    def compute_seconds(self) -> float:
        """Seconds per token without waiting for reads and without managing the cache."""
        return self.total_seconds - self.waited_seconds - self.managed_seconds

    @property
    def bytes_per_second(self) -> float:
        """Bytes per second, over the time in which at least one read is in flight."""
        return per_second(self.flash_bytes, self.io_seconds)

    def to_dict(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "tokens": list(self.tokens),
            "compute_seconds": self.compute_seconds,
            "bytes_per_second": self.bytes_per_second,
            "tokens_per_second": per_second(1, self.total_seconds),
        }


@dataclass(frozen=True)
class Reread:
    """Reads a set of files completely before every token, and counts the bytes and seconds."""

    next_token: Callable[[], None]
    """Reads all of them once. Raises FlashReadError."""
    stats: Callable[[], FlashStats]
    seconds: list[float]
    """Wall time of each call of `next_token`, in seconds."""


@contextmanager
def rereading(files: Sequence[CheckedFile], io: IoMode) -> Iterator[Reread]:
    if not files:
        yield Reread(lambda: None, lambda: FlashStats(0, 0.0, 0.0, 0), [])
        return
    extents, slot_bytes = _extents(files)
    seconds: list[float] = []
    slots = min(STREAM_SLOTS, 1 + len(extents))
    with (
        FlashReader(files, io) as reader,
        ReadAhead(reader, extents, slot_bytes, slots, cyclic=True) as stream,
    ):

        def next_token() -> None:
            started = time.perf_counter()
            for _ in extents:
                stream.next()
                stream.release()
            seconds.append(time.perf_counter() - started)

        yield Reread(next_token, lambda: reader.stats, seconds)


def sampling_of(bundle: Bundle, tokens: int) -> SamplingConfig:
    """A config that samples at random and bans end-of-text tokens."""
    ends = bundle.manifest.tokenizer.eos_ids
    return SamplingConfig(
        temperature=TEMPERATURE,
        seed=0,
        logit_bias=tuple((token, -math.inf) for token in ends),
        max_tokens=tokens,
    )


def measured_row(
    name: str,
    resolved: ResolvedModel,
    fetch: FetchOptions,
    prompt: Sequence[int],
    sampling: SamplingConfig,
    warm_up_tokens: int,
    reread: Reread,
) -> AblationRow:
    """One row of the table: a run of the engine for `sampling.max_tokens` tokens, without the first
    `warm_up_tokens`.
    """
    plan, max_tokens = resolved.plan, sampling.max_tokens - warm_up_tokens
    tokens: list[int] = []
    marks: list[tuple[float, Counters, FlashStats]] = []
    with closing(Engine(resolved, never_cancelled, fetch)) as engine:
        for event in engine.generate(None, prompt, sampling, never_cancelled):
            if event.token is not None:
                tokens.append(event.token)
                if len(tokens) in (warm_up_tokens, sampling.max_tokens):
                    marks.append((time.perf_counter(), engine.counters(), reread.stats()))
                if len(tokens) < sampling.max_tokens:
                    reread.next_token()
        io, kernel_target, feed_forward_bytes = engine.io, engine.kernel_target, engine.feed_forward_bytes
    (started, before, reread_before), (ended, after, reread_after) = marks
    absent = after.neuron_cache_lookups - before.neuron_cache_lookups
    absent -= after.neuron_cache_hits - before.neuron_cache_hits
    prefetched = after.prefetched_used - before.prefetched_used

    def per_token(counter: Callable[[Counters], float]) -> float:
        return (counter(after) - counter(before)) / max_tokens

    def reread_per_token(counter: Callable[[FlashStats], float]) -> float:
        return (counter(reread_after) - counter(reread_before)) / max_tokens

    return AblationRow(
        name=name,
        sparsity=resolved.runtime.sparsity,
        io=io,
        kernel_target=kernel_target,
        feed_forward_bytes=feed_forward_bytes,
        resident_bytes=0 if reread.seconds else plan.resident_weights_bytes + plan.predictor_bytes,
        flash_bytes=per_token(lambda it: it.flash_bytes_read) + reread_per_token(lambda it: it.bytes_read),
        flash_reads=per_token(lambda it: it.flash_reads) + reread_per_token(lambda it: it.reads),
        io_seconds=per_token(lambda it: it.flash_read_seconds) + reread_per_token(lambda it: it.read_seconds),
        waited_seconds=per_token(lambda it: it.waited_seconds)
        + sum(reread.seconds[-max_tokens:]) / max_tokens,
        managed_seconds=per_token(lambda it: it.managed_seconds),
        total_seconds=(ended - started) / max_tokens,
        prefetch_recall=prefetched / absent if absent > 0 else 0.0,
        prefetch_wasted_bytes=per_token(lambda it: it.prefetch_wasted_bytes),
        tokens=tuple(tokens),
    )


def row_checksums(bundle: Bundle, io: IoMode) -> dict[str, CheckedFile]:
    """The neuron files by name, each with one checksum for every row: gate, up if gated, and down with its
    padding.

    Reads and checks all of the files once. Raises FlashReadError.
    """
    layout = bundle.record_layout
    starts = layout.row_offsets
    units = tuple(end - start for start, end in zip(starts, (*starts[1:], layout.stride), strict=True))
    files = {}
    for layer in range(bundle.config.num_layers):
        file = bundle.neuron_file(layer)
        with FlashReader([file], io) as reader:
            crcs = [_native.crc32c(piece, units) for piece in _read_through(reader, [file])]
        files[neuron_file_name(layer)] = replace(file, crc_units=units, crcs=np.concatenate(crcs))
    return files


def _extents(files: Sequence[CheckedFile]) -> tuple[list[Extent], int]:
    """The parts of `files` that have checksums, in pieces of full checksum units, and the bytes of a slot for
    a piece.
    """
    extents, slot_bytes = [], 0
    for index, file in enumerate(files):
        unit = sum(file.crc_units)
        step = min(max(1, STREAM_SLOT_BYTES // unit) * unit, file.nbytes - file.crc_start)
        slot_bytes = max(slot_bytes, step + 2 * PAGE_BYTES)
        extents += [
            Extent(index, first, min(step, file.nbytes - first))
            for first in range(file.crc_start, file.nbytes, step)
        ]
    return extents, slot_bytes


def _read_through(reader: FlashReader, files: Sequence[CheckedFile]) -> Iterator[Bytes]:
    """Yields the bytes of each piece of `_extents`, valid until the next one."""
    extents, slot_bytes = _extents(files)
    slots = min(STREAM_SLOTS, 1 + len(extents))
    with ReadAhead(reader, extents, slot_bytes, slots, cyclic=False) as stream:
        for _ in extents:
            yield stream.next()
            stream.release()
