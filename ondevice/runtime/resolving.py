"""Resolves a model before a weight is read: settles its options and plans its memory."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import field, replace

from ondevice.backends.row_invariance import BY_CONSTRUCTION, RowInvariance, RowWidths
from ondevice.budget.claims import other_process_bytes, others
from ondevice.budget.draft_layers import draft_layer_bytes, loaded_bytes
from ondevice.budget.limits import (
    Allowance,
    allowance,
    auto_budget,
    budget_warnings,
    context_words,
    group_limit,
    require_fit,
)
from ondevice.budget.memory_model import MemoryModel
from ondevice.budget.plan import Plan, plan_memory
from ondevice.budget.sizes import (
    context_tokens,
    prompt_chunk,
    stream_bytes,
)
from ondevice.bundle.draft_layers import DraftLayer
from ondevice.bundle.parts import part_words
from ondevice.bundle.reader import Bundle
from ondevice.bundle.streams import MultiStreams
from ondevice.chat_template import import_template_library
from ondevice.config import SELECTING, RuntimeConfig, Sparsity, Speculation
from ondevice.errors import BudgetError, ContextOverflowError, UnsupportedModelError
from ondevice.generate import check_prompt
from ondevice.model_config import WHOLE
from ondevice.records import dataclass
from ondevice.runtime.backend_choice import (
    allowed_draft_layer,
    check_drafts,
    memory_model,
    row_invariance,
    settled_backend,
    settled_parallel,
)
from ondevice.runtime.draft_model import ResolvedDraft, open_draft, plan_draft
from ondevice.runtime.models import automatic_modes, check_runtime, of_part, with_chosen_experts
from ondevice.runtime.opening import (
    damage_warnings,
    open_tokenizer,
    settled_speculation,
    tokenizer_bytes,
    without_damaged_sidecars,
)
from ondevice.speculation.registry import (
    datastore_bytes,
    runs_streams,
    used_draft_layer,
)
from ondevice.tokenizer import Tokenizer, import_library
from ondevice.units import MemoryRoom, memory_rooms, parse_budget, process_memory, trim_heap, usable_cores

log = logging.getLogger(__name__)

LEAST_CONTEXT = 512
"""Tokens below which no budget shortens the default context: the length of a training text's pieces."""
CONTEXT_STEP = 256
SMALL_CHUNK = 64
"""Tokens of a prompt's chunk where a budget has no room for more: a prompt then reads weights more often."""
TINY_CONTEXTS = (64, 128)
"""Contexts below LEAST_CONTEXT, in tokens, that messages may suggest. They apply only if a user asks."""


@dataclass(frozen=True)
class ResolvedModel:
    """A model, its options and its plan, ready to be loaded. No weight has been read."""

    bundle: Bundle
    tokenizer: Tokenizer | None
    """None if the bundle has none, or if the budget has no room for reading it."""
    runtime: RuntimeConfig
    """The options, with `auto` and 0 settled."""
    plan: Plan
    draft: ResolvedDraft | None = None
    """The second model that drafts; None without one."""
    draft_layer: DraftLayer | None = None
    """The draft layer that is loaded; None if none is."""
    leaves_streams: bool = False
    """Whether `auto` goes without streams that the bundle has."""
    widths: RowWidths = BY_CONSTRUCTION.widths
    """How wide drafts may be on the backend."""
    least: ResolvedModel | None = None
    """The model as `auto` would take it under the smallest budget that works; None if that is this one."""
    whole: ResolvedModel | None = None
    """The model with the default context, where that doesn't fit and this one's is shorter."""
    fitting_context: int = 0
    """The longest context that would fit, where the plan doesn't; 0 for none."""
    fitting_options: tuple[str, ...] = ()
    """Options with which the model would fit, where the plan doesn't, each by itself."""
    alternatives: tuple[ResolvedModel, ...] = ()
    """The models that `auto` chose this one's modes from by `_preferred`."""
    under: Callable[[int], ResolvedModel] | None = field(default=None, repr=False, compare=False)
    """The model that another budget, in bytes, would give by the same measurement, at most with the default
    context; None for one of `alternatives`.
    """
    budget_origin: str = ""
    """Origin of the budget that `auto` found, in words; empty for the user's own budget."""
    warnings: tuple[str, ...] = ()
    """Sidecars that are damaged and that `auto` therefore goes without."""
    budget_warnings: tuple[str, ...] = ()
    """Why the user's budget may be more than there is."""

    def require_fit(self, only_budget: bool = False) -> None:
        """Raises BudgetError if the plan doesn't fit, with the smallest budget and what else would work.

        only_budget: whether nothing else can be changed.
        """
        require_fit(
            self.plan,
            self.bundle.name,
            self.budget_origin,
            self.fitting_context,
            self.fitting_options,
            only_budget,
        )

    def require_whole_context(self) -> None:
        """Raises BudgetError if the budget has shortened the default context."""
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
    def _streams(self) -> MultiStreams | None:
        return None if self.leaves_streams else self.bundle.streams

    @property
    def runs_streams(self) -> bool:
        """True if multi-stream adapters are loaded."""
        return runs_streams(self.runtime.speculation, self._streams)

    @property
    def own_experts(self) -> int:
        """Experts that the model's own tokens choose, where `--experts` asks for fewer; else 0."""
        experts = self.bundle.manifest.config.experts if self.runtime.experts else None
        return 0 if experts is None else experts.chosen

    @property
    def loaded_bytes(self) -> int:
        """Memory of the loaded weights, the embedding table and neurons aside."""
        found = self.plan.weights_bytes + self.plan.predictor_bytes
        if self.draft is not None:
            found += self.draft.loaded_bytes
        if self.draft_layer is not None:
            found += loaded_bytes(self.draft_layer, self.bundle.config)
        if self._streams is not None and self.runs_streams:
            found += stream_bytes(self.bundle.config, self._streams)
        return found

    @property
    def frugal(self) -> ResolvedModel:
        """The model under those allowed options that need the smallest budget."""
        return self.least or self


def require_whole(bundle: Bundle) -> None:
    """Raises UnsupportedModelError for a slice, which gives no text alone."""
    if bundle.config.part != WHOLE:
        raise UnsupportedModelError(
            f"{bundle.name} is {part_words(bundle.manifest)}. It runs with the other layers' machines alone: "
            "use --hosts, or name the whole model"
        )


def resolve(bundle: Bundle, runtime: RuntimeConfig) -> ResolvedModel:
    """Settle the options and plan the memory. A budget that is too small gives a plan that doesn't fit.

    Raises UsageError for an impossible option, UnsupportedModelError and BackendUnavailableError for one
    that this model or machine can't have, BundleError for one whose files are damaged, and what reading the
    tokenizer raises.
    """
    bundle = without_damaged_sidecars(bundle, runtime)
    fewer = with_chosen_experts(bundle.config, runtime.experts)
    if fewer is bundle.config:
        runtime = replace(runtime, experts=0)
    bundle = bundle.with_config(fewer)
    runtime = of_part(bundle.config, runtime)
    added = bundle.predictors, bundle.streams, bundle.damaged, bundle.ngrams
    check_runtime(bundle.config, runtime, *added, {"eagle": bundle.eagle, "mtp": bundle.mtp})
    if bundle.incomplete is not None:
        raise bundle.incomplete
    runtime = replace(
        runtime,
        backend=settled_backend(runtime.backend, bundle.config),
        threads=runtime.threads or usable_cores(),
    )
    rows = row_invariance(bundle.config, bundle.quant, runtime, bundle.predictors, bundle.streams)
    check_drafts(runtime, rows)
    runtime = replace(
        runtime,
        speculation=settled_speculation(runtime, rows),
        parallel=settled_parallel(runtime, rows),
    )
    layer = used_draft_layer(runtime.speculation, bundle.eagle, bundle.mtp)
    layer = allowed_draft_layer(bundle.config, runtime, layer, rows)
    warnings = damage_warnings(bundle, runtime)
    # Import now what is needed anyway, so that it is measured with the process.
    memory = memory_model(bundle.config, bundle.quant, runtime, bundle.predictors, bundle.streams)
    import_library(bundle.manifest.tokenizer.kind or "")
    if bundle.manifest.tokenizer.chat_template is not None:
        import_template_library()
    # Freed memory that the heap keeps would count as the process's.
    trim_heap()
    draft = None
    if runtime.speculation == "model" and bundle.config.part.embeds:
        draft = plan_draft(open_draft(runtime), runtime, context_tokens(bundle.config, runtime))
    before, reading = _measured(), tokenizer_bytes(bundle)
    later = 0 if draft is None else tokenizer_bytes(draft.bundle)
    opening, unread_bytes = before.process_bytes + reading, reading + later
    unread = _Planner(
        bundle, None, runtime, rows, draft, layer, memory, before, opening, unread_bytes, warnings
    )
    if reading and not unread.may_open:
        return unread.resolved()
    planner = replace(unread, tokenizer=open_tokenizer(bundle), unread_bytes=later)
    if draft is not None:
        before = _measured()
        opening = max(opening, before.process_bytes + later)
        planner = replace(planner, opening_bytes=opening, measured=before)
        if not planner.may_open:
            return replace(planner, tokenizer=None).resolved()
        draft = draft.compared(open_tokenizer(draft.bundle), planner.tokenizer)
        planner = replace(planner, draft=draft, unread_bytes=0)
    return replace(planner, measured=_measured()).resolved()


@dataclass(frozen=True)
class _Measured:
    """Memory that exists and that is taken before a model is planned."""

    held_bytes: int
    """Memory of this process and of those counted to it, its models included."""
    process_bytes: int
    """Memory of this process and of those counted to it, its models left out."""
    others_bytes: int
    """Memory that loaded models hold or have claimed."""
    rooms: tuple[MemoryRoom, ...]
    limit: MemoryRoom | None


def held_bytes() -> int:
    """Memory of this process and of those counted to it."""
    return process_memory().current_bytes + other_process_bytes()


def _measured() -> _Measured:
    before = others()
    held = held_bytes()
    after = others()
    # A model that fills or closes meanwhile must not be subtracted with more than the process counts for it.
    of_models = min(before.held_bytes, after.held_bytes)
    process_bytes = max(0, held - of_models)
    return _Measured(held, process_bytes, after.claimed_bytes, tuple(memory_rooms()), group_limit())


@dataclass(frozen=True)
class _Planner:
    """Plans one model under one budget. runtime: settled but for `auto` modes and the context."""

    bundle: Bundle
    tokenizer: Tokenizer | None
    runtime: RuntimeConfig
    rows: RowInvariance
    draft: ResolvedDraft | None
    draft_layer: DraftLayer | None
    """The layer that drafts, or that `auto` may draft with."""
    memory: MemoryModel
    """Its sizes under `runtime`, without a second model."""
    measured: _Measured
    opening_bytes: int
    """Memory of the process while the tokenizer is read."""
    unread_bytes: int
    """Most memory of the tokenizer, where it hasn't been read."""
    warnings: tuple[str, ...]

    @property
    def may_open(self) -> bool:
        """True if the budget has room for reading the tokenizer, before anything is planned."""
        needed = self.opening_bytes + self.measured.others_bytes
        budget = self.runtime.dram_budget
        return needed <= (self._allowance.usable_bytes if self._is_auto else parse_budget(budget))

    def resolved(self) -> ResolvedModel:
        """The model with the context asked for, or with the longest from LEAST_CONTEXT on that fits.

        One that wasn't asked for is at most the default, or as long as `context_share` of the budget allows.
        """
        wanted, floor = context_tokens(self.bundle.config, self.runtime), self._least_context
        whole = found = self._at(wanted)
        if not whole.plan.fits:
            fitting, options = self._fitting_context(wanted), self._fitting_options(whole)
            whole = replace(whole, fitting_context=fitting, fitting_options=options)
            found = self._at(fitting, wanted) if fitting >= floor else whole
        slowest = self._least_at(floor, 0 if floor == wanted else wanted)
        least = slowest.frugal
        if not found.plan.fits and slowest.plan.fits:
            found = slowest
        if not found.plan.fits:
            options = self._fitting_options(least)
            return replace(
                least,
                under=self._under,
                fitting_context=whole.fitting_context,
                fitting_options=options,
            )
        if found is whole:
            found = self._lengthened(whole)
        return replace(
            found,
            under=self._under,
            least=None if least.plan == found.plan else least,
            whole=None if found.plan.max_context >= wanted else whole,
            budget_warnings=self._doubts(found.plan),
        )

    def _under(self, budget_bytes: int) -> ResolvedModel:
        # A context beyond the default changes no mode.
        runtime = replace(self.runtime, dram_budget=budget_bytes, context_share=0.0)
        return replace(self, runtime=runtime).resolved()

    @property
    def _least_context(self) -> int:
        """Tokens below which the budget doesn't shorten the context."""
        wanted = context_tokens(self.bundle.config, self.runtime)
        return wanted if self.runtime.max_context else min(wanted, LEAST_CONTEXT)

    def _lengthened(self, default: ResolvedModel) -> ResolvedModel:
        """The model with the longest context that may have `context_share` of the budget."""
        shortest, longest = default.plan.max_context, self.bundle.config.original_context
        share = 0.0 if self.runtime.max_context else self.runtime.context_share
        # Machines that share a model agree on one context, which no budget of theirs makes longer.
        if not share or longest <= shortest or self.bundle.config.part != WHOLE:
            return default

        def has_room(length: int) -> bool:
            longer = self._at(length)
            plan, before = longer.plan, default.plan
            grown = plan.activation_bytes - before.activation_bytes + plan.draft_bytes - before.draft_bytes
            most = share * plan.budget_bytes
            if self._is_auto:
                # The process is part of that budget, and may be most of a small model's.
                most = min(most, plan.model_bytes)
            same_modes = _modes(longer) == _modes(default)
            return plan.fits and same_modes and plan.kv_cache_bytes + grown <= most

        lengths = [*range(shortest, longest, CONTEXT_STEP), longest]
        past = bisect_left(lengths, True, 1, key=lambda length: not has_room(length))
        if past == 1:
            return default
        longer = self._at(lengths[past - 1])
        plan = replace(longer.plan, context_share=share)
        return replace(longer, plan=plan, alternatives=default.alternatives)

    def _fitting_context(self, wanted: int) -> int:
        """The longest context below `wanted` with which something fits; 0 for none."""
        lengths = [*TINY_CONTEXTS, *range(CONTEXT_STEP, wanted, CONTEXT_STEP)]
        shorter = [length for length in lengths if length < wanted]
        fitting = bisect_left(shorter, True, key=lambda length: not self._at(length).plan.fits)
        return shorter[fitting - 1] if fitting else 0

    def _fitting_options(self, missed: ResolvedModel) -> tuple[str, ...]:
        """Options that would make room for a model whose plan doesn't fit: `dense`, no drafts, else both."""
        runtime, dense, plain = missed.runtime, "--sparsity dense", "--speculation off"
        planned = {
            dense: self._plan(replace(runtime, sparsity="dense"), missed.draft, missed.draft_layer),
            plain: self._plan(replace(runtime, speculation="off")),
            f"{dense} and {plain}": self._plan(replace(runtime, sparsity="dense", speculation="off")),
        }
        fitting = [options for options, plan in planned.items() if plan.fits]
        alone = tuple(options for options in fitting if options in (dense, plain))
        return alone or tuple(fitting)

    def _at(self, max_context: int, wanted: int = 0) -> ResolvedModel:
        """The model in its preferred modes with a context. If none fits, in the modes that need least memory.

        wanted: the default context if it was shortened to this one.
        """
        return self._in_chunks(prompt_chunk(self.bundle.config, self.runtime), max_context, wanted)

    def _least_at(self, max_context: int, wanted: int) -> ResolvedModel:
        """`_at` with small chunks where no bit depends on them, and no size was named."""
        chunk = prompt_chunk(self.bundle.config, self.runtime)
        if (
            not self.runtime.prefill_chunk
            and self.runtime.backend == "cpu"
            and self.bundle.config.part == WHOLE
        ):
            chunk = SMALL_CHUNK
        return self._in_chunks(chunk, max_context, wanted)

    def _in_chunks(self, prefill_chunk: int, max_context: int, wanted: int) -> ResolvedModel:
        """`_at` with prompts in chunks of so many tokens."""
        runtime = replace(self.runtime, max_context=max_context, prefill_chunk=prefill_chunk)
        draft = None if self.draft is None else self.draft.within(max_context)
        config, sparsity = self.bundle.config, runtime.sparsity
        choices = [sparsity] if sparsity != "auto" else automatic_modes(config, runtime)
        if not self.rows.skips_zeros:
            # Their last bits may differ, and no budget may change a text.
            del choices[1:]
        origin = self._allowance.words if self._is_auto else ""
        possible = []
        may_stop = max_context <= self._least_context
        modes = ((mode, *drafts) for mode in choices for drafts in self._drafting_choices(mode, may_stop))
        for chosen_sparsity, chosen_drafts, layer, leaves in modes:
            settled = replace(runtime, sparsity=chosen_sparsity, speculation=chosen_drafts)
            plan = replace(self._plan(settled, draft, layer, leaves), wanted_context=wanted)
            possible.append(
                ResolvedModel(
                    self.bundle,
                    self.tokenizer,
                    settled,
                    plan,
                    draft,
                    layer,
                    leaves_streams=leaves,
                    widths=self.rows.widths,
                    budget_origin=origin,
                    warnings=self.warnings,
                )
            )
        chosen = possible[_preferred(possible)]
        least = min(possible, key=lambda it: it.plan.minimum_budget_bytes)
        if not chosen.plan.fits:
            chosen = least
        return replace(chosen, least=None if chosen is least else least, alternatives=tuple(possible))

    def _drafting_choices(
        self, sparsity: Sparsity, may_stop: bool
    ) -> list[tuple[Speculation, DraftLayer | None, bool]]:
        """What `auto` may draft with, most first: a drafter, a draft layer, and whether streams are left.

        may_stop: whether `off` is one of them; drafts aren't given up for a longer context.
        """
        speculation = self.runtime.speculation
        choices: list[tuple[Speculation, DraftLayer | None, bool]] = [(speculation, self.draft_layer, False)]
        # A part behind the first takes drafts as they come.
        if speculation != "auto" or not self.bundle.config.part.embeds:
            return choices
        if self.draft_layer is not None:
            choices.append(("auto", None, False))
        if sparsity in SELECTING and _may_leave_streams(self.bundle):
            choices.append(("auto", None, True))
        return [*choices, ("off", None, False)] if may_stop else choices

    def _plan(
        self,
        runtime: RuntimeConfig,
        draft: ResolvedDraft | None = None,
        layer: DraftLayer | None = None,
        leaves_streams: bool = False,
    ) -> Plan:
        """The plan of a model whose options are settled, under its budget."""
        draft_bytes = 0 if draft is None else draft.nbytes
        memory = replace(
            self.memory,
            runtime=runtime,
            streams=None if leaves_streams else self.memory.streams,
            draft_model_bytes=draft_bytes,
            datastore_bytes=datastore_bytes(runtime.speculation, self.bundle.ngrams),
            draft_layer_bytes=0 if layer is None else self._draft_layer_bytes(layer, runtime),
        )
        plan = plan_memory(memory, budget_bytes=0, process_bytes=self.measured.process_bytes)
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

    def _draft_layer_bytes(self, layer: DraftLayer, runtime: RuntimeConfig) -> int:
        return draft_layer_bytes(
            layer, self.bundle.config, runtime, context_tokens(self.bundle.config, runtime)
        )

    @property
    def _is_auto(self) -> bool:
        return is_auto(self.runtime.dram_budget)

    @property
    def _allowance(self) -> Allowance:
        return allowance(self.measured.held_bytes, self.measured.rooms)

    def _doubts(self, plan: Plan) -> tuple[str, ...]:
        """Warnings that the user's budget may be more than there is."""
        name, measured = self.bundle.name, self.measured
        if self._is_auto:
            return ()
        return tuple(budget_warnings(plan, name, measured.held_bytes, measured.rooms))


def _modes(resolved: ResolvedModel) -> tuple[object, ...]:
    """How the model runs: its sparsity and what drafts."""
    runtime = resolved.runtime
    return runtime.sparsity, runtime.speculation, resolved.draft_layer, resolved.leaves_streams


def _may_leave_streams(bundle: Bundle) -> bool:
    """Whether `auto` may go without the bundle's streams. Shared ones are part of the model, and in a part of
    a model other machines' layers have them too.
    """
    streams = bundle.streams
    return streams is not None and streams.mode == "lossless" and bundle.config.part == WHOLE


def _preferred(possible: Sequence[ResolvedModel]) -> int:
    """The index of the model to take: the first that needs no flash, else the first that fits.

    Drafting comes before none, even where its memory sends neurons to flash, as they leave only when the
    context is nearly full: it is given up only where nothing that drafts fits. A draft layer and streams come
    last where selected neurons are read from flash: their memory costs more of the neurons' cache than their
    drafts bring. With everything in memory, a mode that leaves neurons out in some layers alone comes last:
    it multiplies those of the others one by one.
    """

    def rank(at: int) -> tuple[bool, bool, bool, bool]:
        resolved = possible[at]
        plan, sparsity, config = resolved.plan, resolved.runtime.sparsity, resolved.bundle.config
        if plan.offloads_weights:
            has_streams = _may_leave_streams(resolved.bundle) and resolved.runs_streams
            more = resolved.draft_layer is not None or has_streams
            last = more and sparsity in SELECTING
        else:
            last = sparsity == "exact" and not config.zeros_gates
        return not plan.fits, resolved.runtime.speculation == "off", plan.offloads_weights, last

    return min(range(len(possible)), key=rank)


def check_tokens(resolved: ResolvedModel, tokens: Sequence[int], wanted: int = 0) -> None:
    """Refuse before loading what `generate` would refuse after it: UsageError and ContextOverflowError.

    wanted: tokens that must fit behind these.
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
    """True if the budget is `auto`, which depends on the machine's memory."""
    return str(budget).strip().lower() == "auto"


def budget_bytes(budget: str | int, plan: Plan) -> int:
    """The bytes that `budget` means for a planned model, loaded or not. Raises UsageError for no size."""
    if is_auto(budget):
        # Memory that a loaded model holds already is free to it.
        return auto_budget(plan, allowance(held_bytes(), memory_rooms()))
    return parse_budget(budget)


def warn_of_budget(budget: str | int, plan: Plan, name: str) -> None:
    """Log warnings if a loaded model's new budget may be more than there is."""
    if not is_auto(budget):
        for warning in budget_warnings(plan, name, held_bytes(), memory_rooms()):
            log.warning("%s", warning)
