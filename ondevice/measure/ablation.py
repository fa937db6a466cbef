"""What each idea of "LLM in a flash" (arXiv 2312.11514, table 2) is worth on this machine, one row at a time.

Every row is the production engine, configured by `FetchOptions`, on the same prompt, tokens and budget. Only
the first row adds something to a run: what every token needs, really read from flash once per token.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from ondevice.api import Name, open_model
from ondevice.backends.base import Bytes
from ondevice.budget.sizes import STREAM_SLOT_BYTES, STREAM_SLOTS
from ondevice.bundle.layout import RESIDENT, neuron_file_name
from ondevice.bundle.reader import Bundle, CheckedFile
from ondevice.callbacks import OnProgress, ignore_progress, never_cancelled
from ondevice.config import RuntimeConfig, SamplingConfig, Sparsity
from ondevice.errors import UsageError
from ondevice.flash.extent_stream import Extent, ExtentStream
from ondevice.flash.reader import FlashReader
from ondevice.kernels import _native
from ondevice.measure.profiling import read_doubts
from ondevice.meter import Counters
from ondevice.runtime.backend_choice import on_kernels
from ondevice.runtime.engine import Engine
from ondevice.runtime.resolving import ResolvedModel, check_tokens, resolve
from ondevice.scoring import benchmark_prompt, machine
from ondevice.sparsity.fetch import FetchOptions
from ondevice.stats import per_second
from ondevice.units import PAGE_BYTES, format_bytes

TEMPERATURE = 0.8
"""The likeliest text repeats itself, which would flatter every cache."""
_NOTHING_KEPT = FetchOptions(keep=False, fill_ahead=False, prefetch=False)
_KEPT = FetchOptions(fill_ahead=False, prefetch=False)
SPARSE_ROWS = {
    "predictor": replace(_NOTHING_KEPT, bundled=False),
    "windowing": replace(_KEPT, policy="window", bundled=False),
    "bundling": _NOTHING_KEPT,
    "all": _KEPT,
    "overlap": FetchOptions(),
}
BEFORE = {
    "hybrid": "naive",
    "predictor": "hybrid",
    "windowing": "predictor",
    "bundling": "predictor",
    "all": "windowing",
    "overlap": "all",
}
"""The row that each is compared with: `all` adds bundling and the default policy to `windowing`."""

IoMode = Literal["auto", "direct", "buffered"]


@dataclass(frozen=True)
class AblationRow:
    """One configuration; means per token, in bytes and seconds.

    feed_forward_bytes: memory that holds neurons at the end; resident_bytes: weights of every token, and what
    selects neurons. io_seconds: wall time with a read in flight, beside compute or not; waited_seconds: of
    the pass, for reads; managed_seconds: of the pass, for what is in memory and what isn't.
    prefetch_recall: share of the neurons that weren't in memory whose read had begun from a guess.
    tokens: ids of the text, those that warmed up included.
    """

    name: str
    sparsity: str
    io: str
    kernel_target: str
    feed_forward_bytes: int
    resident_bytes: int
    flash_bytes: float
    flash_reads: float
    io_seconds: float
    waited_seconds: float
    managed_seconds: float
    total_seconds: float
    prefetch_recall: float
    prefetch_wasted_bytes: float
    tokens: tuple[int, ...]

    @property
    def compute_seconds(self) -> float:
        """What is left of the pass."""
        return self.total_seconds - self.waited_seconds - self.managed_seconds

    @property
    def bytes_per_second(self) -> float:
        """While a read is in flight."""
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
class Ablation:
    """Rows in the table's order; of a model that every neuron counts in, the first two.

    max_tokens: of every row, measured behind warm_up_tokens others. notes: what is missing or doubtful, and
    why, in sentences for people.
    """

    model: str
    budget_bytes: int
    prompt_tokens: int
    warm_up_tokens: int
    max_tokens: int
    rows: tuple[AblationRow, ...]
    notes: tuple[str, ...]

    def row(self, name: str) -> AblationRow:
        return next(row for row in self.rows if row.name == name)

    @property
    def overlap_ratio(self) -> float | None:
        """What a token takes with overlap, over the longer of `all`'s reading and computing; None without."""
        if len(self.rows) <= 2:
            return None
        apart = self.row("all")
        return self.row("overlap").total_seconds / max(apart.io_seconds, apart.compute_seconds)

    @property
    def own_overlap_ratio(self) -> float | None:
        """The same over the longer of its own; reads that are begun ahead of the text are among them."""
        if len(self.rows) <= 2:
            return None
        row = self.row("overlap")
        return row.total_seconds / max(row.io_seconds, row.compute_seconds)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "model": self.model,
            "dram_budget_bytes": self.budget_bytes,
            "prompt_tokens": self.prompt_tokens,
            "warm_up_tokens": self.warm_up_tokens,
            "max_tokens": self.max_tokens,
            "rows": [row.to_dict() for row in self.rows],
            "overlap_ratio": self.overlap_ratio,
            "own_overlap_ratio": self.own_overlap_ratio,
            "notes": list(self.notes),
            "machine": machine(self.rows[0].kernel_target),
        }


def ablation(
    model: Name | None,
    runtime: RuntimeConfig,
    *,
    prompt_tokens: int,
    max_tokens: int,
    warm_up_tokens: int,
    on_progress: OnProgress = ignore_progress,
) -> Ablation:
    """Run every row over one made-up prompt, with the ends of text ruled out.

    runtime.sparsity: what selects neurons; `auto` is predictors where the bundle has them, else exact gates,
    else thresholds where it has them, else nothing. max_tokens, warm_up_tokens: 1 or more. on_progress gets
    the share done, and what is being done. Checksums of rows, 12 bytes per neuron, count as the process's.

    Raises UsageError for a count that is too small, BackendUnavailableError for another backend than cpu,
    BudgetError before anything is read, and what `load` and a generation raise.
    """
    if max_tokens < 1 or warm_up_tokens < 1:
        raise UsageError(
            f"{max_tokens} tokens behind {warm_up_tokens} that aren't counted: an ablation takes at least "
            "one of each; raise --max-tokens"
        )
    runtime = on_kernels(runtime, "an ablation")
    sparse, dense = _resolved(model, runtime)
    bundle = dense.bundle
    check_tokens(dense, range(prompt_tokens), warm_up_tokens + max_tokens)
    for resolved in (sparse, dense):
        resolved.require_fit()
    configurations = {"hybrid": (dense, FetchOptions(keep=False))}
    if sparse.runtime.sparsity != "dense":
        on_progress(0.0, "checksums of rows")
        by_rows = bundle.with_files(row_checksums(bundle, runtime.io))
        # Planned again: what these checksums hold is the process's own now, in every row alike.
        sparse, dense = _planned(by_rows, sparse.runtime), _planned(bundle, dense.runtime)
        whole = replace(sparse, bundle=bundle)
        configurations = {"hybrid": (dense, FetchOptions(keep=False))} | {
            name: (whole if fetch.bundled else sparse, fetch) for name, fetch in SPARSE_ROWS.items()
        }
    prompt = benchmark_prompt(prompt_tokens, bundle.config.vocab_size)
    rows: list[AblationRow] = []
    for name, (resolved, fetch) in configurations.items():
        on_progress((1 + len(rows)) / (2 + len(configurations)), name)
        rows.append(_measured(name, resolved, fetch, prompt, warm_up_tokens, max_tokens))
    on_progress((1 + len(rows)) / (2 + len(configurations)), "naive")
    rows.insert(0, with_all_read(rows[0], bundle, runtime.io, max_tokens))
    on_progress(1.0, "done")
    return Ablation(
        model=bundle.name,
        budget_bytes=dense.plan.budget_bytes,
        prompt_tokens=prompt_tokens,
        warm_up_tokens=warm_up_tokens,
        max_tokens=max_tokens,
        rows=tuple(rows),
        notes=_notes(sparse, rows[0].io),
    )


def row_checksums(bundle: Bundle, io: IoMode) -> dict[str, CheckedFile]:
    """The neuron files, by name, in units of one row: gate, up, and down with what pads it.

    All of them are read once, and checked as they are. Raises FlashReadError.
    """
    layout = bundle.neuron_layout
    up_bytes = layout.parts[1][0].nbytes
    units = (layout.part_bytes[0], up_bytes, layout.part_bytes[1] - up_bytes)
    found = {}
    for layer in range(bundle.config.num_layers):
        file = bundle.neuron_file(layer)
        with FlashReader([file], io) as reader:
            crcs = [_native.crc32c(piece, units) for piece in _read_through(reader, [file])]
        found[neuron_file_name(layer)] = replace(file, crc_units=units, crcs=np.concatenate(crcs))
    return found


def with_all_read(hybrid: AblationRow, bundle: Bundle, io: IoMode, tokens: int) -> AblationRow:
    """The row `naive`: `hybrid`, but all that is resident there is read ahead of each of `tokens` tokens.

    The head is among that where it is the embedding table. Raises FlashReadError.
    """
    files = [bundle.file(RESIDENT), *([bundle.embedding_file] if bundle.config.tie_embeddings else [])]
    with FlashReader(files, io) as reader:
        started = time.perf_counter()
        for _ in _read_through(reader, files, tokens):
            pass
        seconds = (time.perf_counter() - started) / tokens
        stats = reader.stats
    return replace(
        hybrid,
        name="naive",
        resident_bytes=0,
        flash_bytes=hybrid.flash_bytes + stats.bytes_read / tokens,
        flash_reads=hybrid.flash_reads + stats.reads / tokens,
        io_seconds=hybrid.io_seconds + stats.read_seconds / tokens,
        waited_seconds=hybrid.waited_seconds + seconds,
        total_seconds=hybrid.total_seconds + seconds,
    )


def _resolved(model: Name | None, runtime: RuntimeConfig) -> tuple[ResolvedModel, ResolvedModel]:
    """The model with its neurons selected and without, under one budget; the same where nothing selects."""
    if runtime.speculation not in ("auto", "off"):
        raise UsageError(
            f"--speculation {runtime.speculation}: an ablation compares single tokens; leave it off"
        )
    runtime = replace(runtime, speculation="off")
    opened = open_model(model, runtime)
    opened.warn()
    bundle = opened.bundle
    sparsity = runtime.sparsity
    if sparsity == "auto":
        sparsity = _selecting(bundle)
    sparse = _planned(bundle, replace(runtime, sparsity=sparsity))
    return sparse, _planned(bundle, replace(sparse.runtime, sparsity="dense"))


def _selecting(bundle: Bundle) -> Sparsity:
    """What selects neurons where nobody says."""
    if bundle.predictors is not None:
        return "predicted"
    if bundle.config.zeros_gates:
        return "exact"
    return "dense" if bundle.thresholds is None else "threshold"


def _planned(bundle: Bundle, runtime: RuntimeConfig) -> ResolvedModel:
    """Without its tokenizer, which takes memory and isn't needed; the budget is settled, too."""
    resolved = replace(resolve(bundle, runtime), tokenizer=None)
    budget = resolved.plan.budget_bytes
    return replace(resolved, runtime=replace(resolved.runtime, dram_budget=budget))


def _measured(
    name: str,
    resolved: ResolvedModel,
    fetch: FetchOptions,
    prompt: Sequence[int],
    warm_up_tokens: int,
    max_tokens: int,
) -> AblationRow:
    plan = resolved.plan
    ends = resolved.bundle.manifest.tokenizer.eos_ids
    sampling = SamplingConfig(
        temperature=TEMPERATURE,
        seed=0,
        logit_bias=tuple((token, -math.inf) for token in ends),
        max_tokens=warm_up_tokens + max_tokens,
    )
    tokens: list[int] = []
    marks: list[tuple[float, Counters]] = []
    with closing(Engine(resolved, never_cancelled, fetch)) as engine:
        for event in engine.generate(None, prompt, sampling, never_cancelled):
            if event.token is not None:
                tokens.append(event.token)
                if len(tokens) in (warm_up_tokens, warm_up_tokens + max_tokens):
                    marks.append((time.perf_counter(), engine.counters()))
        io, kernel_target, feed_forward_bytes = engine.io, engine.kernel_target, engine.feed_forward_bytes
    (started, before), (ended, after) = marks
    absent = after.neuron_cache_lookups - before.neuron_cache_lookups
    absent -= after.neuron_cache_hits - before.neuron_cache_hits
    guessed = after.prefetched_used - before.prefetched_used
    return AblationRow(
        name=name,
        sparsity=resolved.runtime.sparsity,
        io=io,
        kernel_target=kernel_target,
        feed_forward_bytes=feed_forward_bytes,
        resident_bytes=plan.resident_weights_bytes + plan.predictor_bytes,
        flash_bytes=(after.flash_bytes_read - before.flash_bytes_read) / max_tokens,
        flash_reads=(after.flash_reads - before.flash_reads) / max_tokens,
        io_seconds=(after.flash_read_seconds - before.flash_read_seconds) / max_tokens,
        waited_seconds=(after.waited_seconds - before.waited_seconds) / max_tokens,
        managed_seconds=(after.managed_seconds - before.managed_seconds) / max_tokens,
        total_seconds=(ended - started) / max_tokens,
        prefetch_recall=guessed / absent if absent > 0 else 0.0,
        prefetch_wasted_bytes=(after.prefetch_wasted_bytes - before.prefetch_wasted_bytes) / max_tokens,
        tokens=tuple(tokens),
    )


def _read_through(reader: FlashReader, files: Sequence[CheckedFile], times: int = 1) -> Iterator[Bytes]:
    """Pieces, of whole units, of all that is checked of files, `times` over; each is valid until the next."""
    extents, slot_bytes = [], 0
    for index, file in enumerate(files):
        unit = sum(file.crc_units)
        step = min(max(1, STREAM_SLOT_BYTES // unit) * unit, file.nbytes - file.crc_start)
        slot_bytes = max(slot_bytes, step + 2 * PAGE_BYTES)
        extents += [
            Extent(index, first, min(step, file.nbytes - first))
            for first in range(file.crc_start, file.nbytes, step)
        ]
    extents *= times
    slots = min(STREAM_SLOTS, 1 + len(extents))
    with ExtentStream(reader, extents, slot_bytes, slots, cyclic=False) as stream:
        for _ in extents:
            yield stream.next()
            stream.release()


def _notes(resolved: ResolvedModel, io: str) -> tuple[str, ...]:
    bundle, plan, sparsity = resolved.bundle, resolved.plan, resolved.runtime.sparsity
    notes = []
    if sparsity == "dense":
        config = bundle.config
        because = f"{config.hidden_act} gates are hardly ever exactly zero:"
        notes.append(
            f"{'with --sparsity dense' if config.zeros_gates else because} every neuron counts for every "
            "token, so there is nothing to select, and no more rows"
        )
    elif not plan.offloads_weights:
        notes.append(
            f"a budget of {format_bytes(plan.budget_bytes)} has room for every neuron: what is kept is read "
            "once and never again. A lower --dram-budget shows what a cache is worth"
        )
    if sparsity not in ("dense", "exact"):
        notes.append(
            f"from the row `predictor` on, the text is that of --sparsity {sparsity}, not the dense one"
        )
    nbytes = sum(bundle.neuron_file(layer).nbytes for layer in range(bundle.config.num_layers))
    return (*notes, *read_doubts(io, nbytes))
