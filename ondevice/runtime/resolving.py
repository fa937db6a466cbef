"""What can be known of a model before a weight is read: its options settled, its memory planned."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from ondevice.budget.claims import others
from ondevice.budget.limits import (
    Allowance,
    allowance,
    auto_budget,
    budget_warnings,
    context_words,
    group_limit,
    require_fit,
)
from ondevice.budget.plan import Plan, plan_memory
from ondevice.budget.sizes import context_tokens
from ondevice.bundle.predictors import PREDICTORS_SIDECAR
from ondevice.bundle.reader import Bundle
from ondevice.bundle.streams import STREAMS_SIDECAR
from ondevice.bundle.thresholds import THRESHOLDS_SIDECAR
from ondevice.bundle.verify import without_damage
from ondevice.config import RuntimeConfig, Speculation
from ondevice.errors import BudgetError, ContextOverflowError
from ondevice.generate import check_prompt
from ondevice.kernels import _native
from ondevice.runtime.backend_choice import is_row_invariant, operand_bytes, settled_backend
from ondevice.runtime.draft_model import ResolvedDraft, open_draft, plan_draft
from ondevice.runtime.models import automatic_modes, check_runtime
from ondevice.speculation.registry import runs_streams
from ondevice.tokenizer import Tokenizer, import_library, load_tokenizer, loading_bytes
from ondevice.units import MemoryRoom, memory_rooms, parse_budget, process_memory, trim_heap, usable_cores

log = logging.getLogger(__name__)

LEAST_CONTEXT = 512
"""Tokens of the default context that no budget takes away: as many as pieces of text for training have."""
CONTEXT_STEP = 256
TINY_CONTEXTS = (64, 128)
"""What a user may still ask for by name."""


@dataclass(frozen=True)
class ResolvedModel:
    """A model that could be loaded: opened, checked against the options and planned, nothing read."""

    bundle: Bundle
    tokenizer: Tokenizer | None
    """None where the bundle has none, and where the budget has no room for reading it."""
    runtime: RuntimeConfig
    """With `auto` and 0 settled."""
    plan: Plan
    draft: ResolvedDraft | None = None
    """The second model that drafts, if one does."""
    least: ResolvedModel | None = None
    """What `auto` would take under a budget that is too small for this; None where that is this."""
    whole: ResolvedModel | None = None
    """With the default context, where that doesn't fit and this one's is shorter."""
    fitting_context: int = 0
    """Where the plan doesn't fit: the longest context with which one would, 0 for none."""
    budget_origin: str = ""
    """What `auto` made the budget of, in words; empty for the user's own."""
    warnings: tuple[str, ...] = ()
    """What is damaged of the additions that `auto` may choose: it goes without."""
    budget_warnings: tuple[str, ...] = ()
    """Why the user's budget may be more than there is."""

    def require_fit(self) -> None:
        """Raises BudgetError, with the smallest budget and the longest context that work, if it doesn't."""
        require_fit(self.plan, self.bundle.name, self.budget_origin, self.fitting_context)

    def require_whole_context(self) -> None:
        """Raises BudgetError where the budget has shortened the default context."""
        if self.whole is None:
            return
        try:
            self.whole.require_fit()
        except BudgetError as error:
            error.add_note(
                "scoring reads windows as long as the context, so that one isn't shortened unasked"
            )
            raise

    def warn(self) -> None:
        """Log all warnings."""
        for warning in (*self.warnings, *self.budget_warnings):
            log.warning("%s", warning)

    @property
    def frugal(self) -> ResolvedModel:
        """What the options allow that runs in the smallest budget."""
        return self.least or self


def resolve(bundle: Bundle, runtime: RuntimeConfig) -> ResolvedModel:
    """Settle the options and plan the memory. A budget that is too small gives a plan that says so.

    Raises UsageError for an impossible option, UnsupportedModelError and BackendUnavailableError for one
    that this model or machine can't have, BundleError for one whose files are damaged, and what reading the
    tokenizer raises.
    """
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
    warnings = _warnings(bundle, runtime)
    # What is imported anyway is measured with the process.
    operands = operand_bytes(runtime.backend)
    import_library(bundle.manifest.tokenizer.kind or "")
    # What was freed before isn't held against anybody.
    trim_heap()
    before, reading = _measured(), tokenizer_bytes(bundle)
    opening = before.process_bytes + reading
    unread = _Planner(bundle, None, runtime, None, operands, before, opening, reading, warnings)
    if reading and not unread.may_open:
        return unread.resolved()
    planner = replace(unread, tokenizer=open_tokenizer(bundle), unread_bytes=0)
    if runtime.speculation == "model":
        drafting, before = open_draft(runtime), _measured()
        opening = max(opening, before.process_bytes + tokenizer_bytes(drafting))
        planner = replace(planner, opening_bytes=opening, measured=before)
        if not planner.may_open:
            return replace(planner, tokenizer=None).resolved()
        context = context_tokens(bundle.config, runtime)
        draft = plan_draft(drafting, open_tokenizer(drafting), planner.tokenizer, runtime, context)
        planner = replace(planner, draft=draft)
    return replace(planner, measured=_measured()).resolved()


@dataclass(frozen=True)
class _Measured:
    """What there is and what is taken, before a model is planned."""

    held_bytes: int
    """By this process, its models included."""
    process_bytes: int
    """Of that, what no model holds."""
    others_bytes: int
    """What models that are loaded hold, or have claimed."""
    rooms: tuple[MemoryRoom, ...]
    limit: MemoryRoom | None


def _measured() -> _Measured:
    before = others()
    held_bytes = process_memory().current_bytes
    after = others()
    # A model that fills or closes meanwhile must not seem to have held what the process still counts.
    of_models = min(before.held_bytes, after.held_bytes)
    process_bytes = max(0, held_bytes - of_models)
    return _Measured(held_bytes, process_bytes, after.claimed_bytes, tuple(memory_rooms()), group_limit())


@dataclass(frozen=True)
class _Planner:
    """One model's plans under one budget. runtime: settled but for `auto` modes and the context."""

    bundle: Bundle
    tokenizer: Tokenizer | None
    runtime: RuntimeConfig
    draft: ResolvedDraft | None
    operand_bytes: int
    measured: _Measured
    opening_bytes: int
    """The process while the tokenizer is read."""
    unread_bytes: int
    """What the tokenizer may take, where it hasn't been read."""
    warnings: tuple[str, ...]

    @property
    def may_open(self) -> bool:
        """Whether the budget has room for reading the tokenizer, before anything is planned."""
        needed = self.opening_bytes + self.measured.others_bytes
        budget = self.runtime.dram_budget
        return needed <= (self._allowance.usable_bytes if self._is_auto else parse_budget(budget))

    def resolved(self) -> ResolvedModel:
        """With the context asked for; with the longest that fits where none was, down to LEAST_CONTEXT."""
        wanted = context_tokens(self.bundle.config, self.runtime)
        floor = wanted if self.runtime.max_context else min(wanted, LEAST_CONTEXT)
        whole = found = self._at(wanted)
        if not whole.plan.fits:
            fitting = self._fitting_context(wanted)
            whole = replace(whole, fitting_context=fitting)
            found = self._at(fitting, wanted) if fitting >= floor else whole
        least = whole.frugal if floor == wanted else self._at(floor, wanted).frugal
        if not found.plan.fits:
            return replace(least, fitting_context=whole.fitting_context)
        return replace(
            found,
            least=None if least.plan == found.plan else least,
            whole=None if found.plan.max_context == wanted else whole,
            budget_warnings=self._doubts(found.plan),
        )

    def _fitting_context(self, wanted: int) -> int:
        """The longest context below `wanted` with which something fits; 0 for none."""
        lengths = [*TINY_CONTEXTS, *range(CONTEXT_STEP, wanted, CONTEXT_STEP)]
        shorter = [length for length in lengths if length < wanted]
        fitting = bisect_left(shorter, True, key=lambda length: not self._at(length).plan.fits)
        return shorter[fitting - 1] if fitting else 0

    def _at(self, max_context: int, wanted: int = 0) -> ResolvedModel:
        """The modes to take with such a context: those that need least where none fit.

        wanted: the default one, if this isn't what was asked for.
        """
        runtime = replace(self.runtime, max_context=max_context)
        draft = None if self.draft is None else self.draft.within(max_context)
        config, sparsity, speculation = self.bundle.config, runtime.sparsity, runtime.speculation
        choices = [sparsity] if sparsity != "auto" else automatic_modes(config, runtime)
        if not is_row_invariant(runtime.backend):
            # Their last bits may differ, and no budget may change a text.
            del choices[1:]
        drafts: list[Speculation] = ["auto", "off"] if speculation == "auto" else [speculation]
        origin = self._allowance.words if self._is_auto else ""
        possible = []
        for chosen_sparsity, chosen_drafts in product(choices, drafts):
            settled = replace(runtime, sparsity=chosen_sparsity, speculation=chosen_drafts)
            plan = replace(self._plan(settled, draft), wanted_context=wanted)
            possible.append(
                ResolvedModel(
                    self.bundle,
                    self.tokenizer,
                    settled,
                    plan,
                    draft,
                    budget_origin=origin,
                    warnings=self.warnings,
                )
            )
        # The first that needs no flash, else the first that fits; where none does, the one that needs least.
        # Drafting comes before none: only where what it holds is what is missing, it isn't worth having.
        chosen = min(possible, key=lambda it: (not it.plan.fits, it.plan.offloads_weights))
        least = min(possible, key=lambda it: it.plan.minimum_budget_bytes)
        if not chosen.plan.fits or chosen is least:
            return least
        return replace(chosen, least=least)

    def _plan(self, runtime: RuntimeConfig, draft: ResolvedDraft | None) -> Plan:
        """The plan of a model whose options are settled, under its budget."""
        plan = plan_memory(
            self.bundle.config,
            self.bundle.quant,
            runtime,
            budget_bytes=0,
            process_bytes=self.measured.process_bytes,
            threads=runtime.threads,
            predictors=self.bundle.predictors,
            streams=self.bundle.streams,
            draft_model_bytes=0 if draft is None else draft.nbytes,
            operand_bytes=self.operand_bytes,
        )
        plan = replace(
            plan,
            opening_bytes=self.opening_bytes,
            unread_bytes=self.unread_bytes,
            others_bytes=self.measured.others_bytes,
            limit=self.measured.limit,
        )
        if self._is_auto:
            return plan.with_budget(auto_budget(plan, self._allowance))
        return plan.with_budget(parse_budget(runtime.dram_budget))

    @property
    def _is_auto(self) -> bool:
        return is_auto(self.runtime.dram_budget)

    @property
    def _allowance(self) -> Allowance:
        return allowance(self.measured.held_bytes, self.measured.rooms)

    def _doubts(self, plan: Plan) -> tuple[str, ...]:
        """Whether there is as much as the user's budget allows."""
        name, measured = self.bundle.name, self.measured
        if self._is_auto:
            return ()
        return tuple(budget_warnings(plan, name, measured.held_bytes, measured.rooms))


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
    return tuple(error.for_command_line for key, error in bundle.damaged.items() if may_use[key])


def _speculation(runtime: RuntimeConfig) -> Speculation:
    """What `auto` means: the second model, if one is named; nothing where guesses could change a text."""
    if runtime.speculation != "auto":
        return runtime.speculation
    if settled_backend(runtime.backend) != "cpu":
        return "off"
    return "model" if runtime.draft_model else "auto"


def tokenizer_bytes(bundle: Bundle) -> int:
    """Memory that `open_tokenizer` takes at its peak, at most. Raises BundleError for a file that is gone."""
    info = bundle.manifest.tokenizer
    if info.kind is None or info.file is None:
        return 0
    return loading_bytes(info.kind, bundle.small_parts(info.file))


def open_tokenizer(bundle: Bundle) -> Tokenizer | None:
    """The bundle's tokenizer, if it has one. Raises BundleError for a damaged or hostile file."""
    info = bundle.manifest.tokenizer
    if info.kind is None or info.file is None:
        return None
    data = bundle.read_small(info.file)
    tokenizer = load_tokenizer(
        info.kind, data, info.bos_id, info.eos_ids, info.add_bos, vocab_size=bundle.config.vocab_size
    )
    del data
    # What parsing took would count as the process's own.
    trim_heap()
    return tokenizer


def check_tokens(resolved: ResolvedModel, tokens: Sequence[int], wanted: int = 0) -> None:
    """Refuse before loading what `generate` would refuse after it: UsageError and ContextOverflowError.

    wanted: tokens that there must be room for behind these.
    """
    try:
        check_prompt(tokens, resolved.plan.max_context, resolved.bundle.config.max_context, wanted)
    except ContextOverflowError as error:
        if resolved.whole is not None:
            needed = resolved.whole.plan.minimum_budget_bytes
            error.add_note(
                f"{context_words(resolved.plan)} the budget: that takes --dram-budget {needed} or more"
            )
        raise


def is_auto(budget: str | int) -> bool:
    """Whether the budget is for the machine to say."""
    return str(budget).strip().lower() == "auto"


def budget_bytes(budget: str | int, plan: Plan) -> int:
    """The budget that `budget` means for the planned model, loaded or not. Raises UsageError for no size."""
    if is_auto(budget):
        # What a loaded model holds already is as good as free to it.
        return auto_budget(plan, allowance(process_memory().current_bytes, memory_rooms()))
    return parse_budget(budget)


def warn_of_budget(budget: str | int, plan: Plan, name: str) -> None:
    """Log why a loaded model's new budget may be more than there is."""
    if not is_auto(budget):
        for warning in budget_warnings(plan, name, process_memory().current_bytes, memory_rooms()):
            log.warning("%s", warning)
