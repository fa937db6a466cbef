"""Measures what each idea of "LLM in a flash" (arXiv 2312.11514, table 2) is worth on this machine, row by
row.

Every row is a run of the production engine, configured by `FetchOptions`. All rows have the same prompt,
number of tokens and budget. `naive` is `hybrid` with one addition: before every token, all weights that stay
in memory are read from flash as well. `half` is the paper's hybrid: it keeps half of the neurons in memory,
or as many as the budget has room for.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from typing import Any

from ondevice.api import Name, open_model
from ondevice.budget.sizes import DECODE_TOKENS
from ondevice.bundle.layout import RESIDENT
from ondevice.bundle.reader import Bundle, CheckedFile
from ondevice.callbacks import OnProgress, ignore_progress
from ondevice.config import RuntimeConfig, Sparsity
from ondevice.errors import UnsupportedModelError, UsageError
from ondevice.measure.ablation_rows import (
    AblationRow,
    measured_row,
    rereading,
    row_checksums,
    sampling_of,
)
from ondevice.measure.profiling import read_doubts
from ondevice.records import dataclass
from ondevice.runtime.backend_choice import on_kernels
from ondevice.runtime.resolving import ResolvedModel, check_tokens, resolve
from ondevice.scoring import benchmark_prompt, machine
from ondevice.sparsity.fetch import FetchOptions
from ondevice.units import format_bytes

DENSE_ROWS = 3
"""Number of rows without selection of neurons. A model whose every neuron counts has no others."""
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
    "half": "hybrid",
    "predictor": "hybrid",
    "windowing": "predictor",
    "bundling": "predictor",
    "all": "windowing",
    "overlap": "all",
}
"""The row that each row is compared with. `all` adds bundling and the default policy to `windowing`."""


@dataclass(frozen=True)
class Ablation:
    """The rows of an ablation, in the table's order; only the first DENSE_ROWS if the model selects no
    neurons.

    Every row measures max_tokens tokens after warm_up_tokens others. notes: sentences on what is missing or
    doubtful, and why.
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
        """Time per token in row `overlap`, divided by the longer of reading and computing in row `all`.

        None if there are only dense rows.
        """
        if len(self.rows) <= DENSE_ROWS:
            return None
        apart = self.row("all")
        return self.row("overlap").total_seconds / max(apart.io_seconds, apart.compute_seconds)

    @property
    def own_overlap_ratio(self) -> float | None:
        """Time per token in row `overlap`, divided by the longer of its reading (with prefetches) and its
        computing.

        None if there are only dense rows.
        """
        if len(self.rows) <= DENSE_ROWS:
            return None
        row = self.row("overlap")
        return row.total_seconds / max(row.io_seconds, row.compute_seconds)

    def to_dict(self) -> dict[str, Any]:
        """The ablation as an object for JSON."""
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
    """Run every row over one synthetic prompt. End-of-text tokens are banned.

    Args:
        model: a path, a name or an alias.
        runtime: options of the model. Its `sparsity` selects neurons; `auto` takes predictors if the bundle
            has them, else exact gates, else no selection.
        prompt_tokens: length of the prompt.
        max_tokens: number of measured tokens, 1 or more.
        warm_up_tokens: number of tokens before them, 1 or more.
        on_progress: called with the progress.

    Checksums of single rows, 12 bytes per neuron, count as memory of the process. Raises UsageError for a
    count that is too small, BackendUnavailableError for another backend than cpu, BudgetError before anything
    is read, and what `load` and a generation raise.
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
    configurations = _dense_rows(dense)
    if sparse.runtime.sparsity != "dense":
        on_progress(0.0, "checksums of rows")
        by_rows = bundle.with_files(row_checksums(bundle, runtime.io))
        # Plan again: the checksums are now part of the process's own memory, in every row alike.
        sparse, dense = _planned(by_rows, sparse.runtime), _planned(bundle, dense.runtime)
        bundled = replace(sparse, bundle=bundle)
        configurations = _dense_rows(dense) | {
            name: (bundled if fetch.bundled else sparse, fetch) for name, fetch in SPARSE_ROWS.items()
        }
    prompt = benchmark_prompt(prompt_tokens, bundle.config.vocab_size)
    rows: list[AblationRow] = []
    for name, (resolved, fetch) in configurations.items():
        on_progress((1 + len(rows)) / (1 + len(configurations)), name)
        sampling = sampling_of(bundle, warm_up_tokens + max_tokens)
        files = _always_needed(bundle) if name == "naive" else []
        with rereading(files, runtime.io) as reread:
            rows.append(measured_row(name, resolved, fetch, prompt, sampling, warm_up_tokens, reread))
    on_progress(1.0, "done")
    return Ablation(
        model=bundle.name,
        budget_bytes=dense.plan.budget_bytes,
        prompt_tokens=prompt_tokens,
        warm_up_tokens=warm_up_tokens,
        max_tokens=max_tokens,
        rows=tuple(rows),
        notes=_notes(sparse, configurations["half"][0], rows[0].io),
    )


def _dense_rows(dense: ResolvedModel) -> dict[str, tuple[ResolvedModel, FetchOptions]]:
    """The rows of the table in which every neuron is multiplied, by name: the model and its fetch options."""
    nothing_kept = FetchOptions(keep=False)
    return {
        "naive": (dense, nothing_kept),
        "hybrid": (dense, nothing_kept),
        "half": (_keeping_half(dense), FetchOptions()),
    }


def _keeping_half(dense: ResolvedModel) -> ResolvedModel:
    """The model under the smallest budget that keeps half of the neurons in memory, or under its budget if
    that is smaller.
    """
    plan = dense.plan
    wanted = plan.segment.least + (plan.segment.total - plan.segment.least) // 2

    def kept(budget_bytes: int) -> int:
        return plan.with_budget(budget_bytes).segments_for(plan.kv_block_bytes, DECODE_TOKENS)

    budgets = range(plan.minimum_budget_bytes, plan.budget_bytes)
    return replace(dense, plan=plan.with_budget(budgets.start + bisect_left(budgets, wanted, key=kept)))


def _always_needed(bundle: Bundle) -> list[CheckedFile]:
    """The files of the weights that every token needs, apart from neurons. They include the head."""
    tied = bundle.config.tie_embeddings
    return [bundle.file(RESIDENT), *([bundle.embedding_file] if tied else [])]


def _resolved(model: Name | None, runtime: RuntimeConfig) -> tuple[ResolvedModel, ResolvedModel]:
    """The model with and without selection of neurons, under one budget; both dense if nothing selects."""
    if runtime.speculation not in ("auto", "off"):
        raise UsageError(
            f"--speculation {runtime.speculation}: an ablation compares single tokens; leave it off"
        )
    runtime = replace(runtime, speculation="off")
    opened = open_model(model, runtime)
    opened.warn()
    bundle = opened.bundle
    if bundle.config.experts is not None:
        raise UnsupportedModelError(
            f"--ablation isn't possible with {bundle.name}: it selects neurons of dense feed-forwards, and "
            "this model has experts; `ondevice bench` measures it as it runs"
        )
    sparsity = runtime.sparsity
    if sparsity == "auto":
        sparsity = _selecting(bundle)
    sparse = _planned(bundle, replace(runtime, sparsity=sparsity))
    return sparse, _planned(bundle, replace(sparse.runtime, sparsity="dense"))


def _selecting(bundle: Bundle) -> Sparsity:
    """The sparsity mode by which the bundle's neurons are selected by default."""
    if bundle.predictors is not None:
        return "predicted"
    return "exact" if bundle.config.has_exact_zeros else "dense"


def _planned(bundle: Bundle, runtime: RuntimeConfig) -> ResolvedModel:
    """The model under a settled budget. Its tokenizer, which isn't needed, is left out to save memory."""
    resolved = replace(resolve(bundle, runtime), tokenizer=None)
    budget = resolved.plan.budget_bytes
    return replace(resolved, runtime=replace(resolved.runtime, dram_budget=budget))


def _notes(resolved: ResolvedModel, half: ResolvedModel, io: str) -> tuple[str, ...]:
    bundle, plan, sparsity = resolved.bundle, resolved.plan, resolved.runtime.sparsity
    notes = [
        "naive reads every weight from flash for every token; what it multiplies of those that hybrid keeps "
        "are copies in memory"
    ]
    segment = half.plan.segment
    kept = half.plan.segments_for(half.plan.kv_block_bytes, DECODE_TOKENS) - segment.least
    if 2 * kept < segment.total - segment.least - 1:
        notes.append("the budget has room for less than half of the neurons, so half keeps as many as fit")
    if sparsity == "dense":
        config = bundle.config
        because = f"{config.activation} gates are hardly ever exactly zero:"
        notes.append(
            f"{'with --sparsity dense' if config.has_exact_zeros else because} every neuron counts for every "
            "token, so nothing is selected and there are no more rows"
        )
    elif not plan.offloads_weights:
        notes.append(
            f"a budget of {format_bytes(plan.budget_bytes)} has room for every neuron: what is kept is read "
            "once and never again. A lower --dram-budget shows what a cache saves"
        )
    if sparsity not in ("dense", "exact"):
        notes.append(
            f"from the row `predictor` on, the text is that of --sparsity {sparsity}, not the dense one"
        )
    nbytes = sum(bundle.neuron_file(layer).nbytes for layer in range(bundle.config.num_layers))
    return (*notes, *read_doubts(io, nbytes))
