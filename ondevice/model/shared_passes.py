"""Passes that several texts share: each asks for a pass of its own, and one pass answers them all.

Reading the weights takes most of a pass over few rows, and it is the same for one row as for several. Every
text gets the bits that it gets alone (`Transformer.run_each`). This module knows nothing of sampling, plans
or threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ondevice.backends.base import Array, Float32
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.callbacks import IsCancelled
from ondevice.errors import BudgetError, OndeviceError, system_refusals
from ondevice.model.kv_cache import KVCache
from ondevice.model.transformer import Cancelled, ForwardOutput, Prune, SequencePart, Transformer

PROMPT_ROWS = 64
"""Most rows of prompts in a pass in which other texts get a token each: these wait for all of its rows."""


@dataclass(frozen=True)
class PassRequest:
    """A pass that a text asks for: `batch` behind the tokens in kv. It may be answered in part.

    prompt: whether its tokens are of a prompt, of which a pass may take the first ones alone. logits: whether
    those behind its last token are wanted. prune: as `Transformer.run` has it.

    A batch without tokens asks for no pass: other texts' passes go first.
    """

    batch: ForwardBatch
    kv: KVCache
    length: int
    """Tokens in kv. If it has fewer by the time of the pass, its memory was needed elsewhere."""
    cancelled: IsCancelled | None = None
    prune: Prune | None = None
    prompt: bool = False
    logits: bool = True


@dataclass(frozen=True)
class PassResult:
    """The result of a pass over the first `rows` tokens of a request, which are in its kv now.

    logits: (1, V) behind the last of them, unchecked, where the pass was shared and they were wanted.
    """

    rows: int
    output: ForwardOutput
    logits: Float32 | None = None


Answer: TypeAlias = PassResult | OndeviceError | Cancelled | Literal["evicted", "passed"] | None
"""The answer to a request: its result, what it raises, `evicted` where its kv was emptied for want of memory,
so that it has to begin anew, `passed` where it asked for no pass, or None where it waits for a later one."""


class SharedPasses:
    """Answers the requests of the texts that run together.

    If memory for keys and values runs out, the text that came last loses its own, and computes them again
    when a text that came before it has ended. The first of all always goes on: a plan guarantees it a
    context.
    """

    def __init__(
        self, transformer: Transformer, before_pass: Callable[[ForwardBatch], None], most_rows: int
    ) -> None:
        """before_pass: called before every pass; it may change how much memory there is, and empty caches.

        most_rows: of a shared pass.
        """
        self._transformer = transformer
        self._before_pass = before_pass
        self._most_rows = most_rows
        self._waiting: dict[KVCache, list[KVCache]] = {}
        """Emptied caches, and those of the texts of which one has to end first."""

    def answer(self, requests: Sequence[PassRequest]) -> list[Answer]:
        """One answer for each request, in the order in which their texts began."""
        self._forget(requests)
        going = [it for it in requests if it.cancelled is None or not it.cancelled()]
        found: dict[int, Answer] = {id(it): Cancelled() for it in requests}
        if len(going) == 1:
            self._waiting.clear()
            found[id(going[0])] = self.alone(going[0])
        elif going:
            found |= self._together(going)
        return [found[id(it)] for it in requests]

    def alone(self, request: PassRequest) -> Answer:
        """The answer to a request in a pass of its own."""
        batch, kv = request.batch, request.kv
        if not batch.tokens:
            return "passed"
        try:
            with system_refusals():
                self._before_pass(batch)
                if kv.length != request.length:
                    return "evicted"
                found = self._transformer.run(batch, kv, request.cancelled, prune=request.prune)
        except (OndeviceError, Cancelled) as error:
            return error
        return PassResult(len(batch.tokens), found)

    def _together(self, requests: Sequence[PassRequest]) -> dict[int, Answer]:
        """Answers to two or more requests, by `id`."""
        rows, found = self._rows(requests), {}
        try:
            self._before_pass(ForwardBatch([0] * sum(rows)))
        except OndeviceError as error:
            return {id(it): error for it in requests}
        ready: list[tuple[PassRequest, int]] = []
        for at, (request, count) in enumerate(zip(requests, rows, strict=True)):
            answer = self._held(requests, at, count)
            found[id(request)] = "passed" if answer is None and not request.batch.tokens else answer
            if answer is None and count and request.kv not in self._waiting:
                ready.append((request, count))
        if len(ready) == 1 and ready[0][1] == len(ready[0][0].batch.tokens):
            found[id(ready[0][0])] = self.alone(ready[0][0])
        elif ready:
            found |= self._shared(ready)
        return found

    def _rows(self, requests: Sequence[PassRequest]) -> list[int]:
        """How many of each request's tokens the pass takes: one of a text, and equal shares of prompts."""
        texts = sum(not it.prompt for it in requests)
        room = max(1, min(PROMPT_ROWS if texts else self._most_rows, self._most_rows - texts))
        rows = [0 if it.prompt else 1 for it in requests]
        open_prompts: list[int] = []
        for at, request in enumerate(requests):
            if request.kv in self._waiting:
                # What comes behind it would take the memory that it waits for.
                break
            if request.prompt:
                open_prompts.append(at)
        # Those that need least come first, so that what they leave goes to the others.
        open_prompts.sort(key=lambda at: len(requests[at].batch.tokens))
        for place, at in enumerate(open_prompts):
            share = -(-room // (len(open_prompts) - place))
            rows[at] = min(share, len(requests[at].batch.tokens))
            room -= rows[at]
        return rows

    def _held(self, requests: Sequence[PassRequest], at: int, count: int) -> Answer:
        """Hold memory for `count` tokens of a request. Returns its answer if it has none; None if it has."""
        request, kv = requests[at], requests[at].kv
        if kv.length != request.length:
            self._wait(requests, at)
            return "evicted"
        if kv in self._waiting:
            return None
        later = list(requests[at + 1 :])
        while True:
            try:
                with system_refusals():
                    kv.reserve(kv.length + count)
                return None
            except BudgetError as error:
                while later and not later[-1].kv.blocks:
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
        """Let a request wait until one before it has ended."""
        if at:
            self._waiting[requests[at].kv] = [it.kv for it in requests[:at]]

    def _forget(self, requests: Sequence[PassRequest]) -> None:
        """Let those go on before which a text has ended."""
        here = {it.kv for it in requests}
        self._waiting = {
            kv: before for kv, before in self._waiting.items() if kv in here and here.issuperset(before)
        }

    def _shared(self, ready: Sequence[tuple[PassRequest, int]]) -> dict[int, Answer]:
        """Answers from one pass, by `id`. If it fails, from a pass of each: one's error is no other's."""
        requests = [request for request, _ in ready]

        def cancelled() -> bool:
            return all(it.cancelled is not None and it.cancelled() for it in requests)

        parts = [SequencePart(request.batch.tokens[:count], request.kv) for request, count in ready]
        try:
            with system_refusals():
                hidden = self._transformer.run_each(parts, cancelled)
                return self._results(ready, hidden)
        except Cancelled:
            return {id(it): Cancelled() for it in requests}
        except OndeviceError:
            for request in requests:
                request.kv.truncate(min(request.kv.length, request.length))
            return {id(it): self.alone(it) for it in requests}

    def _results(self, ready: Sequence[tuple[PassRequest, int]], hidden: Array) -> dict[int, Answer]:
        """Results for hidden states (T, D) of all rows, with the logits that are wanted, in one product."""
        transformer, backend, found, stop = self._transformer, self._transformer.backend, {}, 0
        ends: dict[int, int] = {}
        for request, count in ready:
            stop += count
            output = ForwardOutput(range(count), hidden[stop - count : stop])
            found[id(request)] = PassResult(count, output)
            if request.logits and (not request.prompt or count == len(request.batch.tokens)):
                ends[id(request)] = stop - 1
        if ends:
            logits = backend.to_numpy(transformer.logits(backend.rows(hidden, list(ends.values()))))
            for row, key in enumerate(ends):
                found[key] = PassResult(found[key].rows, found[key].output, logits[row : row + 1])
        return dict(found)
