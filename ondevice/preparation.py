"""What can be known of a model before a weight is read: its options settled, its memory planned."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from ondevice.backend_choice import is_row_invariant, operand_bytes, settled_backend
from ondevice.bundle.predictors import PREDICTORS_SIDECAR
from ondevice.bundle.reader import Bundle
from ondevice.bundle.streams import STREAMS_SIDECAR
from ondevice.bundle.thresholds import THRESHOLDS_SIDECAR
from ondevice.bundle.verify import without_damage
from ondevice.config import RuntimeConfig, Speculation
from ondevice.draft_model import PreparedDraft, open_draft, plan_draft
from ondevice.generate import check_prompt
from ondevice.kernels import _native
from ondevice.memory_plan import Plan, auto_budget, plan_memory
from ondevice.memory_sizes import context_tokens
from ondevice.models import automatic_modes, check_runtime
from ondevice.settings import check_choices
from ondevice.speculation.registry import runs_streams
from ondevice.tokenizer import Tokenizer, load_tokenizer
from ondevice.units import memory_available, parse_size, process_memory, usable_cores

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """A model that could be loaded: opened, checked against the options and planned, nothing read."""

    bundle: Bundle
    tokenizer: Tokenizer | None
    runtime: RuntimeConfig
    """With `auto` and 0 settled."""
    plan: Plan
    draft: PreparedDraft | None = None
    """The second model that drafts, if one does."""
    least: Prepared | None = None
    """What `auto` would take under a budget that is too small for this; None where that is this."""

    warnings: tuple[str, ...] = ()
    """What is damaged of the additions that `auto` may choose: it goes without."""

    def warn(self) -> None:
        """Log the warnings."""
        for warning in self.warnings:
            log.warning("%s", warning)

    @property
    def frugal(self) -> Prepared:
        """What the options allow that runs in the smallest budget."""
        return self.least or self


def prepare(bundle: Bundle, runtime: RuntimeConfig) -> Prepared:
    """Settle the options and plan the memory. A budget that is too small gives a plan that says so.

    Raises UsageError for an impossible option, UnsupportedModelError and BackendUnavailableError for one
    that this model or machine can't have, BundleError for one whose files are damaged, and what reading the
    tokenizer raises.
    """
    check_choices(runtime)
    bundle = _without_damage(bundle, runtime)
    added = bundle.predictors, bundle.thresholds, bundle.streams, bundle.damaged
    check_runtime(bundle.config, runtime, *added)
    if bundle.incomplete is not None:
        raise bundle.incomplete
    runtime = replace(
        runtime,
        backend=settled_backend(runtime.backend),
        speculation=_speculation(runtime),
        threads=runtime.threads or usable_cores(),
    )
    tokenizer = open_tokenizer(bundle)
    draft = _prepared_draft(bundle, tokenizer, runtime) if runtime.speculation == "model" else None
    warnings = _warnings(bundle, runtime)
    # Imports what it asks: the process is measured with it.
    operands = operand_bytes(runtime.backend)
    process_bytes = process_memory().current_bytes
    choices = [runtime.sparsity] if runtime.sparsity != "auto" else automatic_modes(bundle.config, runtime)
    if not is_row_invariant(runtime.backend):
        # Their last bits may differ, and no budget may change a text.
        del choices[1:]
    drafts: list[Speculation] = ["auto", "off"] if runtime.speculation == "auto" else [runtime.speculation]
    possible = []
    for sparsity, speculation in product(choices, drafts):
        settled = replace(runtime, sparsity=sparsity, speculation=speculation)
        plan = _plan(bundle, settled, process_bytes, draft, operands)
        possible.append(Prepared(bundle, tokenizer, settled, plan, draft, warnings=warnings))
    # The first that needs no flash, else the first that fits; where none does, the one that needs least.
    # Drafting comes before none: only where what it holds is what is missing, it isn't worth having.
    chosen = min(possible, key=lambda it: (not it.plan.fits, it.plan.streams))
    least = min(possible, key=lambda it: it.plan.minimum_budget_bytes)
    if not chosen.plan.fits or chosen is least:
        return least
    return replace(chosen, least=least)


def _without_damage(bundle: Bundle, runtime: RuntimeConfig) -> Bundle:
    """Without the additions that these options may use and whose tensors, read once for it, are damaged."""
    speculation = _speculation(runtime)
    for sidecar, used in (
        (PREDICTORS_SIDECAR, runtime.sparsity == "predicted"),
        (THRESHOLDS_SIDECAR, runtime.sparsity == "threshold"),
        (STREAMS_SIDECAR, runs_streams(speculation, bundle.streams)),
    ):
        if used:
            bundle = without_damage(bundle, sidecar, _native.crc32c)
    return bundle


def _warnings(bundle: Bundle, runtime: RuntimeConfig) -> tuple[str, ...]:
    """What is damaged and not ruled out by an option that leaves it alone."""
    may_use = {
        "predictors": runtime.sparsity == "auto",
        "thresholds": runtime.sparsity == "auto",
        "hotness": runtime.sparsity != "dense",
        "streams": runtime.speculation == "auto",
    }
    return tuple(str(error) for key, error in bundle.damaged.items() if may_use[key])


def _plan(
    bundle: Bundle, runtime: RuntimeConfig, process_bytes: int, draft: PreparedDraft | None, operands: int
) -> Plan:
    """The plan of a model whose options are settled, under its budget."""
    plan = plan_memory(
        bundle.config,
        bundle.quant,
        runtime,
        budget_bytes=0,
        process_bytes=process_bytes,
        threads=runtime.threads,
        predictors=bundle.predictors,
        streams=bundle.streams,
        draft_model_bytes=0 if draft is None else draft.nbytes,
        operand_bytes=operands,
    )
    return plan.with_budget(budget_bytes(runtime.dram_budget, plan))


def _speculation(runtime: RuntimeConfig) -> Speculation:
    """What `auto` means: the second model, if one is named; nothing where guesses could change a text."""
    if runtime.speculation != "auto":
        return runtime.speculation
    if settled_backend(runtime.backend) != "cpu":
        return "off"
    return "model" if runtime.draft_model else "auto"


def _prepared_draft(bundle: Bundle, tokenizer: Tokenizer | None, runtime: RuntimeConfig) -> PreparedDraft:
    draft = open_draft(runtime)
    context = context_tokens(bundle.config, runtime)
    return plan_draft(draft, open_tokenizer(draft), tokenizer, runtime, context)


def open_tokenizer(bundle: Bundle) -> Tokenizer | None:
    """The bundle's tokenizer, if it has one. Raises BundleError for a damaged or hostile file."""
    info = bundle.manifest.tokenizer
    if info.kind is None or info.file is None:
        return None
    data = bundle.read_small(info.file)
    return load_tokenizer(
        info.kind, data, info.bos_id, info.eos_ids, info.add_bos, vocab_size=bundle.config.vocab_size
    )


def check_tokens(prepared: Prepared, tokens: Sequence[int], wanted: int = 0) -> None:
    """Refuse before loading what `generate` would refuse after it: UsageError and ContextOverflowError.

    wanted: tokens that there must be room for behind these.
    """
    check_prompt(tokens, prepared.plan.max_context, prepared.bundle.config.max_context, wanted)


def budget_bytes(budget: str | int, plan: Plan) -> int:
    """The budget that `budget` means for the planned model, loaded or not. Raises UsageError for no size."""
    if str(budget).strip().lower() == "auto":
        # What a loaded model holds already is as good as free to it.
        held = max(0, process_memory().current_bytes - plan.process_bytes)
        return auto_budget(plan, memory_available() + held)
    return parse_size(budget)
