"""Passes that several texts share: each text requests a pass, and one pass answers all requests.

A pass over few rows spends most of its time on reading weights, which takes the same time for one row as for
several. Every text gets the same bits as in separate passes (`Transformer.run_each`): if bits depend on the
number of rows, a pass has only so many rows, and texts take turns. This module knows nothing of sampling,
plans or threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal, NamedTuple, TypeAlias

from ondevice.backends.base import Array, Float32
from ondevice.backends.forward_batch import ForwardBatch, joint_batch
from ondevice.backends.row_invariance import ANY_ROWS
from ondevice.callbacks import Cancelled, IsCancelled
from ondevice.errors import BudgetError, OndeviceError, system_refusals
from ondevice.model.layer_range import SequencePart
from ondevice.model.prefill_schedule import PrefillSchedule
from ondevice.model.sequence_state import SequenceState
from ondevice.model.transformer import ForwardOutput, Transformer
from ondevice.records import dataclass


@dataclass(frozen=True)
class PassRequest:
    """A text's request for a pass over `batch`, which follows the tokens in kv. The answer may cover only a
    part of it.

    prompt: whether the tokens belong to a prompt, so that a pass may take only the first of them. unread:
    number of unread tokens of the prompt, including these. logits: whether the logits after the last token
    are wanted. draft_request: the input for `draft` of `SharedPasses`, if a draft may follow the token.

    A request with an empty batch only lets the passes of other texts go first.
    """

    batch: ForwardBatch
    kv: SequenceState
    length: int
    """Tokens in kv. If it has fewer at the pass, it was evicted."""
    cancelled: IsCancelled | None = None
    prompt: bool = False
    unread: int = 0
    logits: bool = True
    draft_request: Any = None


def no_pass(kv: SequenceState, cancelled: IsCancelled | None) -> PassRequest:
    """A request that lets other texts' passes go first."""
    return PassRequest(ForwardBatch([]), kv, kv.length, cancelled, prompt=True)


@dataclass(frozen=True)
class PassResult:
    """The result of a pass over the first `rows` tokens of a request, which are now in its kv.

    logits: (1, V), unchecked, after the last of these tokens, or after the one before a draft; None unless
    the pass was shared and they are wanted. seconds: time of the pass; None if it can't be compared with
    other passes over as many tokens. batch: the batch of the pass. first: the row in `batch` of the request's
    first token.
    """

    rows: int
    output: ForwardOutput
    logits: Float32 | None
    seconds: float | None
    batch: ForwardBatch
    first: int = 0


class Drafted(NamedTuple):
    """A token with the draft that follows it. streamed: as in `Transformer.run`, if the text runs in a
    separate pass.
    """

    batch: ForwardBatch
    streamed: Sequence[int] | None = None


MakeDrafts: TypeAlias = Callable[[Sequence[PassRequest], int], Sequence[Drafted | Cancelled]]
"""The drafts of all texts of a pass, with at most a number of rows together, or one row for each text."""
Answer: TypeAlias = PassResult | OndeviceError | Cancelled | Literal["evicted", "passed"] | None
"""The answer to a request: its result, its error, `evicted` if its kv was emptied to free memory, so that it
has to start again, `passed` if its batch is empty, or None if it waits for a later pass."""


def _note_draft(request: PassRequest, rows: int) -> None:
    """Record the number of unverified tokens after a pass over `rows` tokens."""
    request.kv.drafted = 0 if request.prompt else rows - 1


def _first_tokens(batch: ForwardBatch, count: int) -> ForwardBatch:
    """A batch of the first `count` tokens of a batch. Without wanted results, unless these are all its
    tokens.
    """
    if count >= len(batch.tokens):
        return batch
    return ForwardBatch(batch.tokens[:count], last_only=batch.last_only, silent=True)


class SharedPasses:
    """Answers the requests of the texts that run together.

    If memory for keys and values runs out, the newest text is evicted, and starts again when an older text
    has ended. The oldest text always goes on, because the plan guarantees room for one context.
    """

    def __init__(
        self,
        transformer: Transformer,
        before_pass: Callable[[ForwardBatch], None],
        max_rows: int,
        draft: MakeDrafts | None = None,
        equal_rows: int = ANY_ROWS,
        pass_seconds: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """before_pass: called before every pass; may change the memory, and empty caches.

        max_rows: the most rows of a shared pass. draft: makes drafts; None if there are none. equal_rows: the
        most rows of a pass in which each row has the same bits as alone. If that is less than `max_rows`, it
        limits shared passes, and a prompt's chunk isn't divided: a larger one runs alone. Otherwise
        `PrefillSchedule` divides prompts, with pass_seconds.
        """
        self._transformer = transformer
        self._before_pass = before_pass
        self._max_rows = max_rows
        self._draft = draft
        self._equal_rows = equal_rows
        self._schedule = PrefillSchedule(max_rows, pass_seconds)
        self._last_pass: dict[SequenceState, int] = {}
        """Number of the last pass of each text, where rows are limited: the smallest comes next."""
        self._was_wide = False
        """Whether the last pass was a chunk too large to be shared."""
        self._waiting: dict[SequenceState, list[SequenceState]] = {}
        """Evicted caches, each with the caches of older texts, of which one has to end first."""

    def answer(self, requests: Sequence[PassRequest]) -> list[Answer]:
        """One answer for each request, in the order in which their texts began."""
        self._forget(requests)
        going = [it for it in requests if it.cancelled is None or not it.cancelled()]
        answers: dict[int, Answer] = {id(it): Cancelled() for it in requests}
        if len(going) < len(requests):
            # Cancelled texts free their memory before the others go on.
            answers |= {id(it): None for it in going}
        elif len(going) == 1:
            self._waiting.clear()
            answers[id(going[0])] = self._only(going[0])
        else:
            answers |= self._together(going)
        return [answers[id(it)] for it in requests]

    def alone(self, request: PassRequest) -> Answer:
        """The answer to a request in a separate pass."""
        if not request.batch.tokens:
            return Cancelled() if request.cancelled is not None and request.cancelled() else "passed"
        drafted = self._drafted([request], self._max_rows).get(id(request), Drafted(request.batch))
        return drafted if isinstance(drafted, Cancelled) else self._alone(request, drafted)

    def _only(self, request: PassRequest) -> Answer:
        """The answer to the only request. For a prompt, the pass has as many rows as other texts could wait
        for.
        """
        if not request.prompt or not request.batch.tokens or self._is_limited():
            return self.alone(request)
        rows = self._schedule.rows({request.kv: request.unread}, False)[request.kv]
        answer = self.alone(replace(request, batch=_first_tokens(request.batch, rows)))
        if isinstance(answer, PassResult) and answer.seconds is not None:
            self._schedule.passed(answer.seconds, {request.kv: answer.rows}, 0)
        return answer

    def _alone(self, request: PassRequest, drafted: Drafted) -> Answer:
        batch, kv = drafted.batch, request.kv
        try:
            with system_refusals():
                self._before_pass(batch)
                if kv.length != request.length:
                    return "evicted"
                started = time.perf_counter()
                output = self._transformer.run(batch, kv, request.cancelled, streamed=drafted.streamed)
        except (OndeviceError, Cancelled) as error:
            return error
        _note_draft(request, len(batch.tokens))
        return PassResult(len(batch.tokens), output, None, time.perf_counter() - started, batch)

    def _drafted(self, requests: Sequence[PassRequest], rows: int) -> dict[int, Drafted | Cancelled]:
        """The drafts of those requests that may have one, by `id` of the request. Together they have at most
        `rows` rows.
        """
        texts = list(filter(self._can_write, requests))
        if self._draft is None or not texts:
            return {}
        return dict(zip(map(id, texts), self._draft(texts, rows), strict=True))

    def _together(self, requests: Sequence[PassRequest]) -> dict[int, Answer]:
        """The answers to two or more requests, by `id` of the request."""
        rows = self._chosen(requests)
        chosen = [it for it in requests if id(it) in rows]
        drafted = self._drafted(chosen, self._draft_rows(chosen))
        answers: dict[int, Answer] = {
            key: draft for key, draft in drafted.items() if isinstance(draft, Cancelled)
        }
        going = [it for it in requests if id(it) not in answers]
        batches = self._batches(going, [drafted.get(id(it)) for it in going], rows)
        try:
            self._before_pass(joint_batch(batches))
        except OndeviceError as error:
            return {id(it): error for it in requests}
        ready: list[tuple[PassRequest, ForwardBatch]] = []
        for at, (request, batch) in enumerate(zip(going, batches, strict=True)):
            answer = self._held(going, at, len(batch.tokens))
            answers[id(request)] = "passed" if answer is None and not request.batch.tokens else answer
            if answer is None and batch.tokens and request.kv not in self._waiting:
                ready.append((request, batch))
        started = time.perf_counter()
        if len(ready) == 1:
            request, batch = ready[0]
            answers[id(request)] = self._alone(request, Drafted(batch))
        elif ready:
            answers |= self._shared(ready)
        if ready and not self._is_limited():
            read = {request.kv: len(batch.tokens) for request, batch in ready if request.prompt}
            texts = sum(len(batch.tokens) for request, batch in ready if not request.prompt)
            self._schedule.passed(time.perf_counter() - started, read, texts)
        return answers

    def _is_limited(self) -> bool:
        return self._equal_rows < self._max_rows

    def _chosen(self, requests: Sequence[PassRequest]) -> dict[int, int]:
        """The number of rows that each request gets in the next pass, without drafts, by `id` of the request.

        If a pass has a limit of rows, the requests that have waited longest get them. Otherwise all decoding
        texts get one, and prompts as many as the schedule says.
        """
        if not self._is_limited():
            unread = {it.kv: it.unread for it in self._open_prompts(requests)}
            rows = self._schedule.rows(unread, any(map(self._can_write, requests)))
            return {
                id(it): min(rows.get(it.kv, 0), len(it.batch.tokens)) if it.prompt else len(it.batch.tokens)
                for it in requests
                if not it.prompt or it.kv in rows
            }
        able = list[PassRequest]()
        waits = False
        for it in requests:
            # Prompts after a waiting text would take the memory that it waits for.
            waits = waits or it.kv in self._waiting
            if it.batch.tokens and not (waits and it.prompt):
                able.append(it)
        able.sort(key=lambda it: self._last_pass.get(it.kv, 0))
        wide = [it for it in able if len(it.batch.tokens) > self._equal_rows]
        narrow = [it for it in able if len(it.batch.tokens) <= self._equal_rows]
        # A long prompt's chunks alternate with passes of the others.
        self._was_wide = bool(wide) and not (narrow and self._was_wide)
        chosen = wide[:1] if self._was_wide else self._fitting(narrow)
        now = 1 + max(self._last_pass.values(), default=0)
        passes = {it.kv: self._last_pass.get(it.kv, 0) for it in requests}
        self._last_pass = passes | {it.kv: number for number, it in enumerate(chosen, now)}
        return {id(it): len(it.batch.tokens) for it in chosen}

    def _can_write(self, request: PassRequest) -> bool:
        """Whether the request comes from a decoding text whose key/value cache hasn't been evicted."""
        here = request.kv.length == request.length
        return not request.prompt and here and request.kv not in self._waiting

    def _open_prompts(self, requests: Sequence[PassRequest]) -> list[PassRequest]:
        """The requests of prompts that may get rows, oldest first."""
        prompts = list[PassRequest]()
        for it in requests:
            if it.kv in self._waiting:
                # Newer prompts would take the memory that it waits for.
                break
            if it.prompt and it.batch.tokens:
                prompts.append(it)
        return prompts

    def _fitting(self, requests: Sequence[PassRequest]) -> list[PassRequest]:
        """The first requests, as many as fit with all their tokens into one pass."""
        fitting, room = list[PassRequest](), self._equal_rows
        for it in requests:
            if len(it.batch.tokens) <= room:
                fitting.append(it)
                room -= len(it.batch.tokens)
        return fitting

    def _draft_rows(self, chosen: Sequence[PassRequest]) -> int:
        """The most rows that all texts may have in a pass, including their drafts."""
        prompts = [it for it in chosen if it.prompt]
        # Texts and prompts share the rows equally; drafts use the texts' share.
        shared = self._max_rows * (len(chosen) - len(prompts)) // max(1, len(chosen))
        if not self._is_limited():
            return shared
        return min(shared, self._equal_rows - sum(len(it.batch.tokens) for it in prompts))

    def _batches(
        self,
        requests: Sequence[PassRequest],
        drafted: Sequence[Drafted | Cancelled | None],
        rows: Mapping[int, int],
    ) -> list[ForwardBatch]:
        """Each request's batch in the pass: a text's token with its draft, or the first rows of a prompt.

        rows: number of rows of each request in the pass, by `id` of the request.
        """
        batches = [
            draft.batch if isinstance(draft, Drafted) else it.batch
            for it, draft in zip(requests, drafted, strict=True)
        ]
        counts = [
            rows.get(id(it), 0) if it.prompt else len(batch.tokens) * (id(it) in rows)
            for it, batch in zip(requests, batches, strict=True)
        ]
        if not self._is_limited():
            room = self._max_rows - sum(counts[at] for at, it in enumerate(requests) if not it.prompt)
            prompts = [at for at, it in enumerate(requests) if it.prompt]
            for at in sorted(prompts, key=counts.__getitem__):
                counts[at] = min(counts[at], max(room, 0))
                room -= counts[at]
        return [_first_tokens(batch, count) for batch, count in zip(batches, counts, strict=True)]

    def _held(self, requests: Sequence[PassRequest], at: int, count: int) -> Answer:
        """Reserve memory for `count` tokens of a request. Returns None; if that fails, the answer to the
        request.
        """
        request, kv = requests[at], requests[at].kv
        if not request.batch.tokens:
            return None
        if kv.length != request.length:
            self._wait(requests, at)
            return "evicted"
        if kv in self._waiting or not count:
            return None
        # A session may be saved while it answers; then two requests have one cache.
        later = [it for it in requests[at + 1 :] if it.kv is not kv]
        while True:
            try:
                with system_refusals():
                    kv.reserve(kv.length + count)
                return None
            except BudgetError as error:
                while later and not later[-1].kv.nbytes:
                    later.pop()
                if later:
                    later.pop().kv.truncate(0)
                    continue
                if at == 0:
                    return error
                kv.truncate(0)
                self._wait(requests, at)
                return "evicted" if request.length else None
            except OndeviceError as error:
                return error

    def _wait(self, requests: Sequence[PassRequest], at: int) -> None:
        """Let a request wait until an older one has ended."""
        kv = requests[at].kv
        if before := [it.kv for it in requests[:at] if it.kv is not kv]:
            self._waiting[kv] = before

    def _forget(self, requests: Sequence[PassRequest]) -> None:
        """Let waiting requests go on if a text before them has ended."""
        here = {it.kv for it in requests}
        self._schedule.keep({it.kv for it in requests if it.prompt})
        self._waiting = {
            kv: before for kv, before in self._waiting.items() if kv in here and here.issuperset(before)
        }

    def _shared(self, ready: Sequence[tuple[PassRequest, ForwardBatch]]) -> dict[int, Answer]:
        """The answers from one pass over all requests, by `id`.

        If the pass fails, each gets an answer from a separate pass, so that one text's error doesn't hit
        others.
        """
        requests = [request for request, _ in ready]

        def cancelled() -> bool:
            return all(it.cancelled is not None and it.cancelled() for it in requests)

        parts = [SequencePart(batch, request.kv) for request, batch in ready]
        try:
            with system_refusals():
                started = time.perf_counter()
                hidden = self._transformer.run_each(parts, cancelled)
                return self._results(ready, hidden, started)
        except Cancelled:
            return {id(it): Cancelled() for it in requests}
        except OndeviceError:
            for request in requests:
                request.kv.truncate(min(request.kv.length, request.length))
            return {id(it): self._untimed(it, batch) for it, batch in ready}

    def _untimed(self, request: PassRequest, batch: ForwardBatch) -> Answer:
        """The answer to a request from a separate pass, without the pass's time."""
        answer = self._alone(request, Drafted(batch))
        return replace(answer, seconds=None) if isinstance(answer, PassResult) else answer

    def _results(
        self, ready: Sequence[tuple[PassRequest, ForwardBatch]], hidden: Array, started: float
    ) -> dict[int, Answer]:
        """Results with the wanted logits, computed in one product, from the hidden states (T, D)
        of all rows.
        """
        transformer, backend = self._transformer, self._transformer.backend
        batch, first, ends = joint_batch(part for _, part in ready), 0, dict[int, int]()
        for request, part in ready:
            if not request.prompt:
                ends[id(request)] = first
            elif request.logits and len(part.tokens) == len(request.batch.tokens):
                ends[id(request)] = first + len(part.tokens) - 1
            first += len(part.tokens)
        logits: dict[int, Float32] = {}
        # An error here is raised again when each text computes its logits. The pass is done.
        with suppress(OndeviceError), system_refusals():
            if ends:
                values = backend.to_numpy(transformer.logits(backend.rows(hidden, list(ends.values()))))
                logits = {key: values[row : row + 1] for row, key in enumerate(ends)}
        seconds = None if any(it.prompt for it, _ in ready) else time.perf_counter() - started
        results, first = dict[int, Answer](), 0
        for request, part in ready:
            count = len(part.tokens)
            output = ForwardOutput(count, hidden[first : first + count])
            _note_draft(request, count)
            row_logits = logits.get(id(request))
            results[id(request)] = PassResult(count, output, row_logits, seconds, batch, first)
            first += count
        return results
