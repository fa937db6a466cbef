"""Compares every drafter with plain decoding, on one model in one run, and checks that texts are equal.

One loaded model continues every prompt without drafts and with each drafter in turn, in an order that
rotates, so that other load on the machine affects all alike. Each drafter begins with memory as after
loading, and with what it has learned from earlier prompts. This module knows nothing of files and tables.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from statistics import median
from typing import Any, Final

from ondevice.api import Name, open_model
from ondevice.budget.limits import require_fit
from ondevice.bundle.reader import Bundle
from ondevice.callbacks import OnProgress, ignore_progress, never_cancelled
from ondevice.chat_template import ChatTemplate
from ondevice.config import RuntimeConfig, SamplingConfig
from ondevice.errors import (
    BudgetError,
    BundleError,
    ContextOverflowError,
    TextChangedError,
    UnsupportedModelError,
    UsageError,
)
from ondevice.host import text_tokenizer
from ondevice.measure.prompts import Task
from ondevice.records import dataclass
from ondevice.runtime.backend_choice import on_kernels
from ondevice.runtime.engine import Engine
from ondevice.runtime.resolving import ResolvedModel, budget_bytes, check_tokens, resolve
from ondevice.scoring import benchmark_prompt, machine
from ondevice.speculation.drafting import Drafting
from ondevice.speculation.registry import DRAFTERS
from ondevice.stats import DraftStats, per_second
from ondevice.tokenizer import Tokenizer
from ondevice.units import format_bytes

OFF: Final = "off"
ALL_TASKS = "all"
MIN_TOKENS = 2
"""Fewest tokens of a text. The first comes with the prompt's pass, so one token has no decode pass."""
WARM_UP_TOKENS = 8
FILL_SECONDS = 0.0005
"""Seconds between two steps of reading ahead."""


@dataclass(frozen=True)
class _MeasuredText:
    """One drafter's continuation of one prompt.

    decoded: number of tokens that the decode passes gave. passes, seconds, flash_bytes: sums over the decode
    passes.
    """

    tokens: tuple[int, ...]
    finish_reason: str | None
    decoded: int
    passes: int
    seconds: float
    flash_bytes: int
    drafting: DraftStats


@dataclass(frozen=True)
class DrafterRow:
    """One drafter on one task. Sums are over the decode passes of its texts, in bytes and seconds.

    tokens: number of tokens that those passes gave. speed_ups: for each text with a decode pass, the speed
    over the same text without drafts; empty for `off` itself.
    """

    task: str
    drafter: str
    prompts: int
    tokens: int
    passes: int
    seconds: float
    flash_bytes: int
    drafting: DraftStats
    speed_ups: tuple[float, ...]

    @property
    def tokens_per_pass(self) -> float:
        return self.tokens / self.passes if self.passes else 1.0

    @property
    def seconds_per_pass(self) -> float:
        return self.seconds / self.passes if self.passes else 0.0

    @property
    def drafting_seconds_per_pass(self) -> float:
        """Seconds per pass spent on preparing and growing drafts. They are part of `seconds_per_pass`."""
        spent = self.drafting.preparing_seconds + self.drafting.growing_seconds
        return spent / self.passes if self.passes else 0.0

    @property
    def flash_bytes_per_token(self) -> float:
        return self.flash_bytes / self.tokens if self.tokens else 0.0

    @property
    def tokens_per_draft(self) -> float:
        """Mean number of draft tokens in a draft, its root excluded."""
        return self.drafting.draft_tokens / self.drafting.drafts if self.drafting.drafts else 0.0

    def to_dict(self) -> dict[str, Any]:
        known = len(self.speed_ups) > 0
        return {
            "task": self.task,
            "drafter": self.drafter,
            "prompts": self.prompts,
            "tokens": self.tokens,
            "passes": self.passes,
            "tokens_per_pass": self.tokens_per_pass,
            "tokens_per_second": per_second(self.tokens, self.seconds),
            "seconds_per_pass": self.seconds_per_pass,
            "drafting_seconds_per_pass": self.drafting_seconds_per_pass,
            "flash_bytes_per_token": self.flash_bytes_per_token,
            "tokens_per_draft": self.tokens_per_draft,
            "drafting": self.drafting.to_dict(),
            "speed_up": median(self.speed_ups) if known else None,
            "speed_up_least": min(self.speed_ups) if known else None,
            "speed_up_most": max(self.speed_ups) if known else None,
        }


@dataclass(frozen=True)
class Changed:
    """A text that differs from the one of plain decoding. prompt: index of the prompt in its task, from 0."""

    task: str
    prompt: int
    drafter: str


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison.

    rows: ordered by task, then by drafter, with `off` first; all tasks together come last. budget_bytes: the
    value of --dram-budget for plain decoding. held_bytes: by drafter, the bytes for drafting in its plan
    beyond those in plain decoding's. notes: sentences on what is missing or doubtful, and why.
    """

    model: str
    budget_bytes: int
    sparsity: str
    io: str
    kernel_target: str
    sampling: SamplingConfig
    held_bytes: Mapping[str, int]
    rows: tuple[DrafterRow, ...]
    changed: tuple[Changed, ...]
    notes: tuple[str, ...]

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of the tasks in order; the last is ALL_TASKS."""
        return tuple(dict.fromkeys(row.task for row in self.rows))

    @property
    def texts(self) -> int:
        """Number of texts written with drafters."""
        return sum(row.prompts for row in self.rows if row.task == ALL_TASKS and row.drafter != OFF)

    def row(self, task: str, drafter: str) -> DrafterRow:
        return next(row for row in self.rows if (row.task, row.drafter) == (task, drafter))

    def require_same_texts(self) -> None:
        """Check the texts. Raises TextChangedError if a drafter's text differs from that of plain
        decoding.
        """
        if self.changed:
            first, count = self.changed[0], len(self.changed)
            raise TextChangedError(
                f"{count} of {self.texts} texts aren't those of plain decoding, the first by {first.drafter} "
                f"on prompt {first.prompt + 1} of {first.task}: a fault of this program; please report it, "
                "and take --speculation off until it is mended"
            )

    def to_dict(self) -> dict[str, Any]:
        """The comparison as an object for JSON."""
        sampling = asdict(self.sampling)
        penalties = ("repetition_penalty", "frequency_penalty", "presence_penalty")
        shown = ("temperature", "top_k", "top_p", "min_p", *penalties, "seed", "max_tokens")
        return {
            "model": self.model,
            "dram_budget_bytes": self.budget_bytes,
            "sparsity": self.sparsity,
            "io": self.io,
            "sampling": {name: sampling[name] for name in shown},
            "held_bytes": dict(self.held_bytes),
            "rows": [row.to_dict() for row in self.rows],
            "changed": [asdict(text) for text in self.changed],
            "notes": list(self.notes),
            "machine": machine(self.kernel_target),
        }


class DrafterSwitch:
    """One loaded model that drafts with one drafter after another.

    Each drafter begins as if the model had just been loaded for it: offloaded weights are read again. What a
    drafter has learned stays until it is used again, and so do the neuron cache's statistics. Memory of
    drafters that aren't in use is in no plan. If one of them drafts by streams, the engine must have been
    made with streams.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._made: dict[str, Drafting | None] = {}
        self._closing = ExitStack()

    def draft_as(self, arm: ResolvedModel) -> None:
        """Switch to the drafter and the memory plan of `arm`, the same model with another `--speculation`.

        Raises BudgetError, and changes nothing, if the plan doesn't fit. Raises what making a drafter raises.
        """
        engine, name = self.engine, arm.runtime.speculation
        engine.set_plan(arm.plan, emptied=engine.plan.offloads_weights or arm.plan.offloads_weights)
        if name not in self._made:
            drafting = self._made[name] = engine.make_drafting(arm, never_cancelled)
            if drafting is not None:
                self._closing.callback(drafting.close)
        engine.draft_with(name, self._made[name])
        while engine.fill_ahead():
            time.sleep(FILL_SECONDS)

    def close(self) -> None:
        """Close every drafter that the switch has made."""
        self._closing.close()
        self._made.clear()


def compare_drafters(
    model: Name | None,
    runtime: RuntimeConfig,
    tasks: Sequence[Task],
    sampling: SamplingConfig,
    *,
    drafters: Sequence[str] = tuple(DRAFTERS),
    on_progress: OnProgress = ignore_progress,
) -> Comparison:
    """Continue every prompt with every one of `drafters` that the model can have.

    Args:
        model: a path, a name or an alias.
        runtime: options of the model; its `speculation` is ignored. Every drafter plans memory as if it were
            alone: memory that idle drafters hold is outside the budget.
        tasks: the prompts.
        sampling: how tokens are chosen. Its `max_tokens` is that of every text, 2 or more.
        drafters: values of `--speculation`.
        on_progress: called with the share done and the current step.

    Before a weight is read, raises UsageError for texts of fewer tokens, no prompts or a model without a
    tokenizer, ContextOverflowError for a prompt that is too long, BackendUnavailableError where drafts could
    change texts, and BudgetError if not even plain decoding fits. Raises what `load` and a generation raise.
    """
    if sampling.max_tokens < MIN_TOKENS:
        raise UsageError(
            f"--max-tokens {sampling.max_tokens}: a text's first token comes with its prompt's pass; ask for "
            f"{MIN_TOKENS} or more"
        )
    # All share one seed; otherwise texts couldn't be equal.
    sampling = sampling.seeded()
    runtime = on_kernels(runtime, "the comparison of --speculation all")
    arms, notes = _arms(model, runtime, drafters)
    plain = arms[OFF]
    prompts = prompt_ids(plain, tasks, sampling.max_tokens)
    base = next((it for it in arms.values() if it.runs_streams), plain)
    with closing(Engine(base, never_cancelled)) as engine, closing(DrafterSwitch(engine)) as switch:
        measured = _measured(switch, arms, prompts, sampling, on_progress)
        io, kernel_target = engine.io, engine.kernel_target
    on_progress(1.0, "done")
    rows = [_row(task, name, texts) for task, texts in _with_all(measured).items() for name in arms]
    return Comparison(
        model=plain.bundle.name,
        budget_bytes=plain.plan.budget_bytes,
        sparsity=plain.runtime.sparsity,
        io=io,
        kernel_target=kernel_target,
        sampling=sampling,
        held_bytes=_held_bytes(arms),
        rows=tuple(rows),
        changed=tuple(_changed(measured)),
        notes=(*notes, *_notes(arms)),
    )


def _arms(
    model: Name | None, runtime: RuntimeConfig, drafters: Sequence[str]
) -> tuple[dict[str, ResolvedModel], list[str]]:
    """The model resolved for plain decoding and for every possible drafter, each as if alone, and notes on
    missing drafters.
    """
    plain = open_model(model, replace(runtime, speculation="off"))
    plain.require_fit()
    arms, notes = {OFF: plain}, []
    for name in drafters:
        speculation: dict[str, Any] = {"speculation": name}
        if name == "auto":
            # With a draft model, `auto` would mean that one.
            speculation["draft_model"] = ""
        try:
            arm = resolve(plain.bundle, replace(plain.runtime, **speculation))
            # All share one tokenizer and the process's memory before any of them.
            plan = replace(arm.plan, process_bytes=plain.plan.process_bytes)
            plan = plan.with_budget(budget_bytes(runtime.dram_budget, plan))
            require_fit(plan, plain.bundle.name)
        except (UnsupportedModelError, UsageError, BudgetError, BundleError) as error:
            # Damage here is in the drafter's own files: plain decoding has opened all that the model needs.
            notes.append(f"without {name}: {error.for_command_line}")
            continue
        if arm.runtime.speculation != name:
            notes.append(f"without {name}: its memory is what plain decoding would lack under this budget")
            continue
        arms[name] = replace(arm, plan=plan, tokenizer=plain.tokenizer)
    return arms, notes


def prompt_ids(resolved: ResolvedModel, tasks: Sequence[Task], max_tokens: int) -> dict[str, list[list[int]]]:
    """Token ids of every task's prompts.

    Raises UsageError for a task without prompts or without a distinct name, ContextOverflowError for a prompt
    that leaves no room for `max_tokens`.
    """
    tokenizer = text_tokenizer(resolved)
    template = _chat_template(resolved.bundle, tokenizer) if any(task.chat for task in tasks) else None
    by_task: dict[str, list[list[int]]] = {}
    for task in tasks:
        if not task.prompts or task.name in by_task or task.name == ALL_TASKS:
            raise UsageError(f"the task {task.name!r} has no prompts, or shares its name; rename its file")
        by_task[task.name] = []
        for index, prompt in enumerate(task.prompts):
            if template is not None and task.chat:
                ids = template.encode([{"role": "user", "content": prompt}], tokenizer)
            else:
                ids = tokenizer.encode(prompt)
            try:
                check_tokens(resolved, ids, max_tokens)
            except ContextOverflowError as error:
                error.add_note(f"it is prompt {index + 1} of {task.name}")
                raise
            by_task[task.name].append(ids)
    if not by_task:
        raise UsageError("there are no prompts to continue")
    return by_task


def _chat_template(bundle: Bundle, tokenizer: Tokenizer) -> ChatTemplate:
    file = bundle.manifest.tokenizer.chat_template
    return ChatTemplate.load(None if file is None else bundle.read_small(file), tokenizer)


def _measured(
    switch: DrafterSwitch,
    arms: Mapping[str, ResolvedModel],
    prompts: Mapping[str, Sequence[Sequence[int]]],
    sampling: SamplingConfig,
    on_progress: OnProgress,
) -> dict[str, list[dict[str, _MeasuredText]]]:
    """For each task, one dictionary per prompt, with the prompt's texts by drafter."""
    warm_up = benchmark_prompt(WARM_UP_TOKENS, next(iter(arms.values())).bundle.config.vocab_size)
    for arm in arms.values():
        switch.draft_as(arm)
        _continued(switch.engine, warm_up, replace(sampling, max_tokens=WARM_UP_TOKENS))
    by_task: dict[str, list[dict[str, _MeasuredText]]] = {}
    # Tasks take turns, so that a machine that slows down affects all of them.
    longest = max(map(len, prompts.values()))
    queue = [(task, index) for index in range(longest) for task in prompts if index < len(prompts[task])]
    for done, (task, index) in enumerate(queue):
        rotation = done % len(arms)
        texts = {}
        for place, name in enumerate([*arms, *arms][rotation : rotation + len(arms)]):
            on_progress((done + place / len(arms)) / len(queue), f"{task} {index + 1}, {name}")
            switch.draft_as(arms[name])
            texts[name] = _continued(switch.engine, prompts[task][index], sampling)
        by_task.setdefault(task, []).append(texts)
    return {task: by_task[task] for task in prompts}


def _continued(engine: Engine, prompt: Sequence[int], sampling: SamplingConfig) -> _MeasuredText:
    tokens: list[int] = []
    before = None
    for event in engine.generate(None, prompt, sampling, never_cancelled):
        if event.token is not None:
            tokens.append(event.token)
        # The first event marks the end of the prompt's pass.
        before = before or engine.counters()
    assert before is not None
    assert event.stats is not None
    stats = event.stats
    return _MeasuredText(
        tokens=tuple(tokens),
        finish_reason=event.finish_reason,
        decoded=round(stats.accepted_tokens_per_pass * stats.decode_passes),
        passes=stats.decode_passes,
        seconds=stats.decode_seconds,
        flash_bytes=engine.counters().flash_bytes_read - before.flash_bytes_read,
        drafting=stats.drafting,
    )


def _with_all(
    by_task: dict[str, list[dict[str, _MeasuredText]]],
) -> dict[str, list[dict[str, _MeasuredText]]]:
    return by_task | {ALL_TASKS: [texts for of_task in by_task.values() for texts in of_task]}


def _row(task: str, drafter: str, texts: Sequence[Mapping[str, _MeasuredText]]) -> DrafterRow:
    of_drafter = [of_prompt[drafter] for of_prompt in texts]
    pairs = [(of_prompt[OFF], of_prompt[drafter]) for of_prompt in texts if drafter != OFF]
    return DrafterRow(
        task=task,
        drafter=drafter,
        prompts=len(of_drafter),
        tokens=sum(text.decoded for text in of_drafter),
        passes=sum(text.passes for text in of_drafter),
        seconds=sum(text.seconds for text in of_drafter),
        flash_bytes=sum(text.flash_bytes for text in of_drafter),
        drafting=sum((text.drafting for text in of_drafter), DraftStats()),
        speed_ups=tuple(plain.seconds / text.seconds for plain, text in pairs if text.seconds > 0),
    )


def _changed(by_task: Mapping[str, Sequence[Mapping[str, _MeasuredText]]]) -> list[Changed]:
    return [
        Changed(task, index, name)
        for task, of_task in by_task.items()
        for index, texts in enumerate(of_task)
        for name, text in texts.items()
        if (text.tokens, text.finish_reason) != (texts[OFF].tokens, texts[OFF].finish_reason)
    ]


def _held_bytes(arms: Mapping[str, ResolvedModel]) -> dict[str, int]:
    return {name: arm.plan.draft_bytes - arms[OFF].plan.draft_bytes for name, arm in arms.items()}


def _notes(arms: Mapping[str, ResolvedModel]) -> list[str]:
    plan = arms[OFF].plan
    notes = []
    held = sum(_held_bytes(arms).values())
    if plan.offloads_weights and held:
        notes.append(
            "each drafter has the memory that it would have by itself, and those that rest keep theirs: the "
            f"process may hold up to {format_bytes(held)} more than the budget"
        )
    if not plan.offloads_weights:
        notes.append("everything is resident: a lower --dram-budget shows what drafts save of reads")
    return notes
