"""Resolves a model's options and plans its memory, before any weight is read."""

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
from ondevice.budget.sizes import context_tokens, prompt_chunk, stream_bytes
from ondevice.bundle.draft_layers import DraftLayer
from ondevice.bundle.parts import part_words
from ondevice.bundle.reader import Bundle
from ondevice.bundle.streams import MultiStreams
from ondevice.chat_template import import_template_library
from ondevice.config import SELECTING, RuntimeConfig, Sparsity, Speculation
from ondevice.errors import BudgetError, ContextOverflowError, UnsupportedModelError
from ondevice.generate import check_prompt
from ondevice.model_config import FULL_MODEL
from ondevice.records import dataclass
from ondevice.runtime.backend_choice import (
    allowed_draft_layer,
    check_drafts,
    memory_model,
    resolved_backend,
    resolved_parallel,
    row_invariance,
)
from ondevice.runtime.draft_model import ResolvedDraft, open_draft, plan_draft
from ondevice.runtime.models import automatic_modes, check_runtime, for_slice, with_chosen_experts
from ondevice.runtime.opening import (
    damage_warnings,
    open_tokenizer,
    resolved_speculation,
    tokenizer_bytes,
    without_damaged_sidecars,
)
from ondevice.speculation.registry import datastore_bytes, runs_streams, used_draft_layer
from ondevice.tokenizer import Tokenizer, import_library
from ondevice.units import MemoryRoom, memory_rooms, parse_budget, process_memory, trim_heap, usable_cores

log = logging.getLogger(__name__)

MIN_CONTEXT = 512
"""Minimum context, in tokens, of a budget-shortened default: the length of a training text's pieces."""
CONTEXT_STEP = 256
SMALL_CHUNK = 64
"""Tokens of a prompt's chunk if the budget has no room for more: weights are then read more often."""
TINY_CONTEXTS = (64, 128)
"""Contexts below MIN_CONTEXT, in tokens, that messages may suggest."""


@dataclass(frozen=True)
class ResolvedModel:
    """A model, its options and its plan, ready to be loaded."""

    bundle: Bundle
    tokenizer: Tokenizer | None
    """None if the bundle has none, or if the budget has no room for reading it."""
    runtime: RuntimeConfig
    """The options, with `auto` and 0 resolved."""
    plan: Plan
    draft: ResolvedDraft | None = None
    """The second model, which drafts, or None."""
    draft_layer: DraftLayer | None = None
    """The draft layer to load, or None."""
    leaves_streams: bool = False
    """Whether `auto` ignores the bundle's streams."""
    widths: RowWidths = BY_CONSTRUCTION.widths
    """Largest widths of drafts on the backend."""
    smallest: ResolvedModel | None = None
    """The model with the smallest budget that works, if it isn't this one."""
    unshortened: ResolvedModel | None = None
    """The model with the default context, if it doesn't fit and this one's context is shorter."""
    fitting_context: int = 0
    """The longest context that would fit, if the plan doesn't; 0 for none."""
    fitting_options: tuple[str, ...] = ()
    """Options that would each make the model fit, if the plan doesn't."""
    alternatives: tuple[ResolvedModel, ...] = ()
    """The models from which `_preferred` chose this one's modes."""
    under: Callable[[int], ResolvedModel] | None = field(default=None, repr=False, compare=False)
    """The model under another budget, in bytes, by the same measurement, with at most the default context;
    None for one of `alternatives`.
    """
    budget_origin: str = ""
    """Origin of the budget of `auto`, in words; empty for the user's budget."""
    warnings: tuple[str, ...] = ()
    """Damaged sidecars that `auto` therefore ignores."""
    budget_warnings: tuple[str, ...] = ()
    """Reasons why the user's budget may exceed the machine's memory."""

    def require_fit(self, only_budget: bool = False) -> None:
        """Check the plan. Raises BudgetError if it doesn't fit, with the smallest budget and other remedies.

        only_budget: whether only the budget can be changed.
        """
        require_fit(
            self.plan,
            self.bundle.name,
            self.budget_origin,
            self.fitting_context,
            self.fitting_options,
            only_budget,
        )

    def require_default_context(self) -> None:
        """Check the context. Raises BudgetError if the budget is too small for the default context."""
        if self.unshortened is None:
            return
        try:
            self.unshortened.require_fit()
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
        """Whether multi-stream adapters are loaded."""
        return runs_streams(self.runtime.speculation, self._streams)

    @property
    def default_experts(self) -> int:
        """The model's number of experts per token, if `--experts` reduces it; otherwise 0."""
        experts = self.bundle.manifest.config.experts if self.runtime.experts else None
        return 0 if experts is None else experts.chosen

    @property
    def loaded_bytes(self) -> int:
        """Memory of the loaded weights, without the embedding table and neurons."""
        nbytes = self.plan.weights_bytes + self.plan.predictor_bytes
        if self.draft is not None:
            nbytes += self.draft.loaded_bytes
        if self.draft_layer is not None:
            nbytes += loaded_bytes(self.draft_layer, self.bundle.config)
        if self._streams is not None and self.runs_streams:
            nbytes += stream_bytes(self.bundle.config, self._streams)
        return nbytes

    @property
    def smallest_plan(self) -> ResolvedModel:
        """The same model, with those allowed options that need the smallest budget."""
        return self.smallest or self


def require_full_model(bundle: Bundle) -> None:
    """Check that a bundle is a complete model. Raises UnsupportedModelError for a slice, which can't generate
    text alone.
    """
    if bundle.config.part != FULL_MODEL:
        raise UnsupportedModelError(
            f"{bundle.name} is {part_words(bundle.manifest)}. It runs with the other layers' machines alone: "
            "use --hosts, or name the whole model"
        )


def resolve(bundle: Bundle, runtime: RuntimeConfig) -> ResolvedModel:
    """Resolve the options and plan the memory. A budget that is too small gives a plan that doesn't fit.

    Raises UsageError for an impossible option, UnsupportedModelError and BackendUnavailableError for one
    that this model or machine can't have, BundleError for one with damaged files, and what reading the
    tokenizer raises.
    """
    bundle = without_damaged_sidecars(bundle, runtime)
    fewer = with_chosen_experts(bundle.config, runtime.experts)
    if fewer is bundle.config:
        runtime = replace(runtime, experts=0)
    bundle = bundle.with_config(fewer)
    runtime = for_slice(bundle.config, runtime)
    added = bundle.predictors, bundle.streams, bundle.damaged, bundle.ngrams
    check_runtime(bundle.config, runtime, *added, bundle.draft_layers)
    if bundle.incomplete is not None:
        raise bundle.incomplete
    runtime = replace(
        runtime,
        backend=resolved_backend(runtime.backend, bundle.config),
        threads=runtime.threads or usable_cores(),
    )
    rows = row_invariance(bundle.config, bundle.quant, runtime, bundle.predictors, bundle.streams)
    check_drafts(runtime, rows)
    runtime = replace(
        runtime, speculation=resolved_speculation(runtime, rows), parallel=resolved_parallel(runtime, rows)
    )
    layer = used_draft_layer(runtime.speculation, bundle.draft_layers)
    layer = allowed_draft_layer(bundle.config, runtime, layer, rows)
    warnings = damage_warnings(bundle, runtime)
    # Needed modules are imported now, so that their memory is measured with the process.
    memory = memory_model(bundle.config, bundle.quant, runtime, bundle.predictors, bundle.streams)
    import_library(bundle.manifest.tokenizer.kind or "")
    if bundle.manifest.tokenizer.chat_template is not None:
        import_template_library()
    # Freed memory in the heap would count as the process's.
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
    """The memory of the machine and of the process, before a model is planned."""

    held_bytes: int
    """Memory of this process and of those counted to it, with loaded models."""
    process_bytes: int
    """Memory of this process and of those counted to it, without loaded models."""
    others_bytes: int
    """Memory that loaded models hold or claim."""
    rooms: tuple[MemoryRoom, ...]
    limit: MemoryRoom | None


def held_bytes() -> int:
    """Bytes of this process and of the processes that count as part of it."""
    return process_memory().current_bytes + other_process_bytes()


def _measured() -> _Measured:
    before = others()
    held = held_bytes()
    after = others()
    # The smaller of both, so that of a model that grows or closes not too much is subtracted.
    of_models = min(before.held_bytes, after.held_bytes)
    process_bytes = max(0, held - of_models)
    return _Measured(held, process_bytes, after.claimed_bytes, tuple(memory_rooms()), group_limit())


@dataclass(frozen=True)
class _Planner:
    """Plans one model under one budget. runtime: options, resolved except for `auto` modes and
    the context.
    """

    bundle: Bundle
    tokenizer: Tokenizer | None
    runtime: RuntimeConfig
    rows: RowInvariance
    draft: ResolvedDraft | None
    draft_layer: DraftLayer | None
    """The layer that drafts, or with which `auto` may draft."""
    memory: MemoryModel
    """The model's sizes under `runtime`, without a second model."""
    measured: _Measured
    opening_bytes: int
    """Memory of the process while the tokenizer is read."""
    unread_bytes: int
    """Upper bound of the tokenizer's memory, if it hasn't been read."""
    warnings: tuple[str, ...]

    @property
    def may_open(self) -> bool:
        """Whether the budget has room to read the tokenizer."""
        needed = self.opening_bytes + self.measured.others_bytes
        budget = self.runtime.dram_budget
        return needed <= (self._allowance.usable_bytes if self._is_auto else parse_budget(budget))

    def resolved(self) -> ResolvedModel:
        """The model with the user's context. Without one, with the longest context that fits, but at least
        MIN_CONTEXT.

        That context is at most the default, or as long as `context_share` of the budget allows.
        """
        wanted, floor = context_tokens(self.bundle.config, self.runtime), self._min_context
        default = resolved = self._at(wanted)
        if not default.plan.fits:
            fitting, options = self._fitting_context(wanted), self._fitting_options(default)
            default = replace(default, fitting_context=fitting, fitting_options=options)
            resolved = self._at(fitting, wanted) if fitting >= floor else default
        slowest = self._smallest_at(floor, 0 if floor == wanted else wanted)
        smallest = slowest.smallest_plan
        if not resolved.plan.fits and slowest.plan.fits:
            resolved = slowest
        if not resolved.plan.fits:
            options = self._fitting_options(smallest)
            return replace(
                smallest, under=self._under, fitting_context=default.fitting_context, fitting_options=options
            )
        if resolved is default:
            resolved = self._lengthened(default)
        return replace(
            resolved,
            under=self._under,
            smallest=None if smallest.plan == resolved.plan else smallest,
            unshortened=None if resolved.plan.max_context >= wanted else default,
            budget_warnings=self._doubts(resolved.plan),
        )

    def _under(self, budget_bytes: int) -> ResolvedModel:
        # Without context_share, as a context beyond the default changes no mode.
        runtime = replace(self.runtime, dram_budget=budget_bytes, context_share=0.0)
        return replace(self, runtime=runtime).resolved()

    @property
    def _min_context(self) -> int:
        """The shortest context, in tokens, that a small budget may lead to."""
        wanted = context_tokens(self.bundle.config, self.runtime)
        return wanted if self.runtime.max_context else min(wanted, MIN_CONTEXT)

    def _lengthened(self, default: ResolvedModel) -> ResolvedModel:
        """The model with the longest context within `context_share` of the budget."""
        shortest, longest = default.plan.max_context, self.bundle.config.original_context
        share = 0.0 if self.runtime.max_context else self.runtime.context_share
        # Machines that share a model agree on one context, whatever their budgets.
        if not share or longest <= shortest or self.bundle.config.part != FULL_MODEL:
            return default

        def has_room(length: int) -> bool:
            longer = self._at(length)
            plan, before = longer.plan, default.plan
            grown = plan.activation_bytes - before.activation_bytes + plan.draft_bytes - before.draft_bytes
            max_bytes = share * plan.budget_bytes
            if self._is_auto:
                # The process is part of the budget, and may be most of it for a small model.
                max_bytes = min(max_bytes, plan.model_bytes)
            same_modes = _modes(longer) == _modes(default)
            return plan.fits and same_modes and plan.kv_cache_bytes + grown <= max_bytes

        lengths = [*range(shortest, longest, CONTEXT_STEP), longest]
        past = bisect_left(lengths, True, 1, key=lambda length: not has_room(length))
        if past == 1:
            return default
        longer = self._at(lengths[past - 1])
        plan = replace(longer.plan, context_share=share)
        return replace(longer, plan=plan, alternatives=default.alternatives)

    def _fitting_context(self, wanted: int) -> int:
        """The longest context below `wanted` with which the model fits; 0 if there is none."""
        lengths = [*TINY_CONTEXTS, *range(CONTEXT_STEP, wanted, CONTEXT_STEP)]
        shorter = [length for length in lengths if length < wanted]
        fitting = bisect_left(shorter, True, key=lambda length: not self._at(length).plan.fits)
        return shorter[fitting - 1] if fitting else 0

    def _fitting_options(self, missed: ResolvedModel) -> tuple[str, ...]:
        """The options, each by itself, with which a model that doesn't fit would: `dense`, no drafts, or if
        neither, both.
        """
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
        """The model with this context, in the modes it prefers, or in those that need the smallest budget if
        none fits.

        wanted: the default context, if this one is shorter.
        """
        return self._in_chunks(prompt_chunk(self.bundle.config, self.runtime), max_context, wanted)

    def _smallest_at(self, max_context: int, wanted: int) -> ResolvedModel:
        """Like `_at`, with small chunks of prompts if these change no bits and the options name no size."""
        chunk = prompt_chunk(self.bundle.config, self.runtime)
        if (
            not self.runtime.prefill_chunk
            and self.runtime.backend == "cpu"
            and self.bundle.config.part == FULL_MODEL
        ):
            chunk = SMALL_CHUNK
        return self._in_chunks(chunk, max_context, wanted)

    def _in_chunks(self, prefill_chunk: int, max_context: int, wanted: int) -> ResolvedModel:
        """Like `_at`, with prompts in chunks of `prefill_chunk` tokens."""
        runtime = replace(self.runtime, max_context=max_context, prefill_chunk=prefill_chunk)
        draft = None if self.draft is None else self.draft.within(max_context)
        config, sparsity = self.bundle.config, runtime.sparsity
        choices = [sparsity] if sparsity != "auto" else automatic_modes(config, runtime)
        if not self.rows.skips_zeros:
            # The modes' last bits may differ, and no budget may change a text.
            del choices[1:]
        origin = self._allowance.words if self._is_auto else ""
        possible = []
        may_stop = max_context <= self._min_context
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
        smallest = min(possible, key=lambda it: it.plan.minimum_budget_bytes)
        if not chosen.plan.fits:
            chosen = smallest
        smaller = None if chosen is smallest else smallest
        return replace(chosen, smallest=smaller, alternatives=tuple(possible))

    def _drafting_choices(
        self, sparsity: Sparsity, may_stop: bool
    ) -> list[tuple[Speculation, DraftLayer | None, bool]]:
        """What `auto` may choose, in order of preference: speculation, draft layer, and whether streams are
        ignored.

        may_stop: whether `off` is a choice. Drafts aren't given up for a longer context.
        """
        speculation = self.runtime.speculation
        choices: list[tuple[Speculation, DraftLayer | None, bool]] = [(speculation, self.draft_layer, False)]
        # A part after the first takes drafts from the first.
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
        """The plan under resolved options and their budget."""
        config, layer_bytes = self.bundle.config, 0
        if layer is not None:
            layer_bytes = draft_layer_bytes(layer, config, runtime, context_tokens(config, runtime))
        memory = replace(
            self.memory,
            runtime=runtime,
            streams=None if leaves_streams else self.memory.streams,
            draft_model_bytes=0 if draft is None else draft.nbytes,
            datastore_bytes=datastore_bytes(runtime.speculation, self.bundle.ngrams),
            draft_layer_bytes=layer_bytes,
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

    @property
    def _is_auto(self) -> bool:
        return is_auto(self.runtime.dram_budget)

    @property
    def _allowance(self) -> Allowance:
        return allowance(self.measured.held_bytes, self.measured.rooms)

    def _doubts(self, plan: Plan) -> tuple[str, ...]:
        """Warnings that the user's budget may exceed the machine's memory."""
        name, measured = self.bundle.name, self.measured
        if self._is_auto:
            return ()
        return tuple(budget_warnings(plan, name, measured.held_bytes, measured.rooms))


def _modes(resolved: ResolvedModel) -> tuple[object, ...]:
    """The model's sparsity and its drafting choice."""
    runtime = resolved.runtime
    return runtime.sparsity, runtime.speculation, resolved.draft_layer, resolved.leaves_streams


def _may_leave_streams(bundle: Bundle) -> bool:
    """Whether `auto` may ignore the bundle's streams.

    Not if they are shared, because these change the model, and not in a part of a model, because other
    machines' layers have them too.
    """
    streams = bundle.streams
    return streams is not None and streams.mode == "lossless" and bundle.config.part == FULL_MODEL


def _preferred(possible: Sequence[ResolvedModel]) -> int:
    """The index of the preferred model: the first that needs no flash, or if all do, the first that fits.

    Drafting is preferred even if its memory sends neurons to flash, which happens only when the context is
    nearly full. A draft layer and streams come last if selected neurons are read from flash: their memory
    costs the neurons' cache more than their drafts bring. With everything in memory, a mode that selects
    neurons in only some layers comes last, as it multiplies the other layers' neurons one by one.
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
    """Check a prompt. Raises the UsageError or ContextOverflowError that `generate` would raise after
    loading.

    wanted: number of tokens that must fit after these.
    """
    try:
        check_prompt(tokens, resolved.plan.max_context, resolved.bundle.config.max_context, wanted)
    except ContextOverflowError as error:
        if resolved.unshortened is not None:
            needed = resolved.unshortened.plan.minimum_budget_bytes
            error.add_note(
                f"{context_words(resolved.plan)} the budget: that takes --dram-budget {needed} or more"
            )
        raise


def is_auto(budget: str | int) -> bool:
    """Whether the budget is `auto`, which depends on the machine's memory."""
    return str(budget).strip().lower() == "auto"


def budget_bytes(budget: str | int, plan: Plan) -> int:
    """A budget in bytes for a planned model, whether it is loaded or not. Raises UsageError for an invalid
    size.
    """
    if is_auto(budget):
        # A loaded model's present memory is free to it.
        return auto_budget(plan, allowance(held_bytes(), memory_rooms()))
    return parse_budget(budget)


def warn_of_budget(budget: str | int, plan: Plan, name: str) -> None:
    """Log warnings if a loaded model's new budget may exceed the machine's memory."""
    if not is_auto(budget):
        for warning in budget_warnings(plan, name, held_bytes(), memory_rooms()):
            log.warning("%s", warning)
