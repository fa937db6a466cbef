"""Runs drafters for the texts of one model, and decides when and how much they draft."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from ondevice.callbacks import Cancelled, IsCancelled, never_cancelled
from ondevice.config import SamplingConfig
from ondevice.constraints.constrained import Constrained
from ondevice.errors import OndeviceError, system_refusals
from ondevice.model.sequence_state import SequenceState
from ondevice.model.transformer import ForwardOutput
from ondevice.speculation.drafted_text import DraftedText, DraftPass, PassOutcome, State
from ondevice.speculation.drafter import Drafter
from ondevice.speculation.policy import TreePolicy
from ondevice.speculation.tree import Draft, Proposals, Root, grow, plain
from ondevice.stats import DraftStats

log = logging.getLogger(__name__)

TIMED_EVERY = 8
"""Interval between timed passes while drafting is disabled, in passes."""


class DraftRequest(NamedTuple):
    """A text's request for a draft in the next pass.

    text: as `begin` returned it; None: the text gets no draft.
    root: the text's last token, which hasn't been through the model yet.
    kv: the target's keys and values of the text without `root`.
    max_nodes: number of nodes for which the context has room.
    max_tokens: number of tokens that may still be drawn.
    """

    text: DraftedText | None
    root: int
    kv: SequenceState
    max_nodes: int
    max_tokens: int
    cancelled: IsCancelled | None = None


class Drafting:
    """Drafts for one model's texts, several of which may share a pass.

    The decode loop calls `begin` and `end` for each text. For each pass it calls `propose` with all texts
    that decode; then, for each text, its `drew` for each drawn token, and `observe`. A prompt's pass has no
    `propose`. Pass times depend on the number of texts, so there is a policy and a state for each number:

        +------------------- listening -------------------+
        |           drafts lose to plain passes           |  looking hasn't paid
        |  drafting --------------------------> backing   | --------------------> throttled
        |           <--------------------------   off     | <--------------------
        |           48 to 1,536 passes are over           |  time for another look
        +-------------------------------------------------+
             |                              ^
             | a plain pass takes less than | it takes more
             | min_pass_seconds for a text, |
             v or a drafter fails for good  |
        +-------------------------------------------------+
        |                    disabled                     |
        +-------------------------------------------------+

    drafting: `TreePolicy` sizes the drafts. backing off: passes are plain (`BackOff`). In both states,
    drafters are told every token, and every pass is timed. throttled: the pass is plain and untimed. Drafters
    are told the missed tokens all at once before they draft again; telling them between passes would take far
    longer. disabled: passes are plain, and one in TIMED_EVERY is timed. Afterwards drafters begin again with
    the complete text.
    """

    def __init__(
        self,
        drafter: Drafter,
        max_nodes: int,
        min_pass_seconds: float = 0.0,
        branches: bool = True,
        texts: int = 1,
    ) -> None:
        """drafter: owned by this object, and closed with it.

        Args:
            max_nodes: most nodes of a pass, roots included.
            min_pass_seconds: time of a plain pass, per text, below which drafting is disabled.
            branches: whether drafts may branch.
            texts: most texts with drafts at the same time; fewer if the drafter can't spawn others.
        """
        self._drafter = drafter
        self._texts = [DraftedText(drafter)]
        while len(self._texts) < texts and (other := drafter.spawn()) is not None:
            self._texts.append(DraftedText(other))
        self._max_nodes = max_nodes
        self._min_pass_seconds = min_pass_seconds
        self._branches = branches
        self._failure = ""
        """Why drafting is disabled for good; empty if it isn't."""
        self._states: dict[int, DraftingState] = {}
        """By the number of texts that share a pass."""
        self._state = self._state_for(1)
        """The state for the number of texts in the newest pass."""

    def begin(
        self,
        text: list[int],
        sampling: SamplingConfig,
        constrained: Constrained | None = None,
        prompt_tokens: int | None = None,
    ) -> DraftedText | None:
        """Begin to continue a text, until `end`. None if all drafters have texts.

        text: at least one token id; the caller's list grows with the text. constrained: the constraint that
        the text obeys; tokens that it forces are drafted, and ones that it forbids aren't.
        prompt_tokens: how many of the text's tokens are its prompt; None: all.
        """
        free = next((it for it in self._texts if not it.is_used), None)
        if free is not None:
            prompt = len(text) if prompt_tokens is None else prompt_tokens
            free.begin(
                text, prompt, sampling, constrained, "disabled" if self._state.disabled else "listening"
            )
        return free

    def end(self, text: DraftedText) -> None:
        """Release a text. Its drafter can then serve another one."""
        text.end()

    def propose(self, requests: Sequence[DraftRequest], max_nodes: int) -> list[Draft | Cancelled]:
        """The drafts of a pass, one per request. Together they have at most `max_nodes` nodes, or one node
        each.

        Each also becomes the `draft` of its text. A drafter that fails disables drafting. A text whose
        `cancelled()` turns True meanwhile gets Cancelled instead of a draft.
        """
        texts = [it.text for it in requests if it.text is not None]
        state = self._state = self._state_for(len(requests))
        draft_pass, policy = DraftPass(len(requests), texts), state.policy
        if state.disabled:
            return self._plain(requests, draft_pass, "disabled")
        if policy.throttle():
            draft_pass.timed = False
            return self._with_streams(self._plain(requests, draft_pass, "throttled"), requests)
        drafts = self._plain(requests, draft_pass, "listening")
        try:
            with system_refusals():
                for text in texts:
                    text.catch_up()
                limit = min(policy.begin(), self._max_nodes, max_nodes)
                if limit > len(requests):
                    drafts = self._grown(requests, draft_pass, limit)
        except OndeviceError as error:
            self._fail(error)
            return self._plain(requests, draft_pass, "disabled")
        return self._with_streams(drafts, requests)

    def read(self, text: DraftedText, output: ForwardOutput) -> None:
        """Let a text's drafter learn from a pass over the text's prompt. If that fails, drafting
        is disabled.
        """
        if self._failure:
            return
        try:
            with system_refusals():
                text.read(output)
        except OndeviceError as error:
            self._fail(error)

    def observe(self, text: DraftedText, outcome: PassOutcome) -> None:
        """Learn from a text's part of a finished pass, which may be a prompt's. If that fails, drafting is
        disabled.
        """
        draft_pass = text.draft_pass
        try:
            with system_refusals():
                is_last = text.drawn(outcome)
        except OndeviceError as error:
            self._fail(error)
            return
        if is_last and draft_pass is not None and draft_pass.timed:
            self._state_for(draft_pass.texts).record(draft_pass)

    @property
    def taps(self) -> tuple[int, ...]:
        """The layers whose hidden states the next output must include, as in `Transformer.taps`."""
        return () if self._state.disabled else self._drafter.taps

    def stats(self, text: DraftedText) -> DraftStats:
        """Stats of the text so far, with a sentence on whether drafts are made, and why."""
        return text.stats(self._decision)

    def close(self) -> None:
        """Close the drafters. Idempotent."""
        self._drafter.close()

    def _state_for(self, texts: int) -> DraftingState:
        if texts not in self._states:
            policy = TreePolicy(self._max_nodes, texts)
            self._states[texts] = DraftingState(policy, texts * self._min_pass_seconds)
        return self._states[texts]

    def _plain(
        self, requests: Sequence[DraftRequest], draft_pass: DraftPass, state: State
    ) -> list[Draft | Cancelled]:
        """Drafts of roots only, set as the drafts of their texts and returned."""
        for one in requests:
            if one.text is not None:
                one.text.plain(one.root, state, draft_pass)
        return [plain(one.root) for one in requests]

    def _grown(
        self, requests: Sequence[DraftRequest], draft_pass: DraftPass, limit: int
    ) -> list[Draft | Cancelled]:
        """The drafts of a pass, with at most `limit` nodes together. Raises what a drafter raises, except
        Cancelled.
        """
        policy, gone = self._state.policy, dict[int, Cancelled]()
        roots = [self._root(at, one, limit - len(requests) + 1, gone) for at, one in enumerate(requests)]
        texts = [one.text for one in requests if one.text is not None]
        draft_pass.drafted(sum(text.preparing_seconds for text in texts))
        policy.prepared(draft_pass.drafting_seconds)
        started = time.perf_counter()
        try:
            drafts = grow(
                roots,
                policy.is_worth_adding,
                limit,
                policy.is_worth_asking,
                self._branches,
                policy.is_worth_computing,
            )
        finally:
            for text in texts:
                text.drafter.grown()
        growing_seconds = time.perf_counter() - started
        computing_seconds = sum(text.computing_seconds for text in texts)
        policy.computed(computing_seconds, sum(text.computed for text in texts))
        policy.grown(growing_seconds - computing_seconds, sum(text.propose_calls for text in texts))
        draft_pass.drafted(growing_seconds)
        draft_pass.nodes = sum(map(len, drafts))
        draft_pass.timed = not gone
        for one, draft in zip(requests, drafts, strict=True):
            if one.text is not None:
                one.text.draft = draft
        return [gone.get(at, draft) for at, draft in enumerate(drafts)]

    def _root(self, at: int, request: DraftRequest, most: int, gone: dict[int, Cancelled]) -> Root:
        """The root of request `at`. gone: a cancelled text's Cancelled is added to it, by the request's
        index.
        """
        # A draft takes no more blocks of keys and values than the root alone.
        nodes = min(most, request.max_nodes, max(1, request.kv.room - request.kv.length))
        text, cancelled = request.text, request.cancelled or never_cancelled
        if text is None or nodes < 2 or request.max_tokens < 2:
            return Root(request.root, lambda path: (), 1, 0)

        def unless_gone(ask: Callable[[Sequence[int]], Proposals], path: Sequence[int]) -> Proposals:
            try:
                return () if at in gone else ask(path)
            except Cancelled as error:
                gone[at] = error
                return ()

        try:
            text.prepare(request.kv, nodes, cancelled)
        except Cancelled as error:
            gone[at] = error
        return Root(
            request.root,
            partial(unless_gone, text.propose),
            nodes,
            request.max_tokens - 1,
            partial(unless_gone, text.compute),
            text.drafter.computed_chance,
        )

    def _with_streams(
        self, drafts: list[Draft | Cancelled], requests: Sequence[DraftRequest]
    ) -> list[Draft | Cancelled]:
        """The drafts. If a pass has only one draft, it gets streams, which will make the next draft."""
        policy, text, (draft, *others) = self._state.policy, requests[0].text, drafts
        if text is not None and isinstance(draft, Draft) and not others and not policy.is_backing_off:
            text.streamed = text.drafter.streamed(draft, policy.row_share)
        return drafts

    def _fail(self, error: OndeviceError) -> None:
        log.warning("no more drafts: %s", error)
        self._failure = str(error)
        self._min_pass_seconds = math.inf
        for state in self._states.values():
            state.disable()
        for text in self._texts:
            text.disable()

    @property
    def _decision(self) -> str:
        """The sentence for `DraftStats.decision`."""
        return f"no drafts: {self._failure}" if self._failure else self._state.decision


class DraftingState:
    """The policy for passes over a given number of texts, and whether drafting is disabled in
    these passes.
    """

    def __init__(self, policy: TreePolicy, min_pass_seconds: float) -> None:
        self.policy = policy
        self.disabled = min_pass_seconds > 0
        self._min_pass_seconds = min_pass_seconds
        self._untimed = 0
        """Passes until the next timed one while disabled."""

    def record(self, draft_pass: DraftPass) -> None:
        """Record the time of a pass. While drafting is disabled, only one pass in TIMED_EVERY is recorded."""
        if self.disabled:
            if self._untimed:
                self._untimed -= 1
                return
            self._untimed = TIMED_EVERY - 1
        self.policy.record(
            draft_pass.nodes, draft_pass.tokens, draft_pass.seconds, draft_pass.drafting_seconds
        )
        self.disabled = self.policy.plain_seconds < self._min_pass_seconds

    def disable(self) -> None:
        """Disable drafting for ever."""
        self.disabled, self._min_pass_seconds = True, math.inf

    @property
    def decision(self) -> str:
        if not self.disabled:
            return self.policy.decision
        return (
            f"no drafts: a plain pass takes {1e3 * self.policy.plain_seconds:.2f} ms, and drafting pays "
            f"from {1e3 * self._min_pass_seconds:.2f} ms on"
        )
