"""Runs drafters under policies, for the texts of one model."""

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
from ondevice.speculation.drafted_text import DraftedText, PassOutcome, Round, State
from ondevice.speculation.drafter import Drafter
from ondevice.speculation.policy import TreePolicy
from ondevice.speculation.tree import Draft, Proposals, Root, grow, plain
from ondevice.stats import DraftStats

log = logging.getLogger(__name__)

TIMED_EVERY = 8
"""Interval between timed passes while drafting is disabled, in passes."""


class DraftRequest(NamedTuple):
    """A text that asks for a draft for the next pass.

    text: as `begin` returned it; None: it gets none.
    root: the text's last token, which hasn't been through the model.
    kv: the target's keys and values. They hold the text except `root`.
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
    """Drafts for one model's texts, of which several may share a pass. What it learns from one helps others.

    The decode loop calls `begin` for each text, and `end`. For each pass `propose` is called with all texts
    that decode in it; then for each text its `drew` for each token drawn, and `observe`. A prompt's pass has
    no `propose`. Passes of each number of texts have a policy and these states of their own, as their times
    differ. The loop doesn't depend on the states:

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

    drafting: `TreePolicy` sizes the drafts. backing off: passes are plain (`BackOff`). In both, drafters
    are told of every token, and every pass is timed.
    throttled: the pass is plain and untimed. Drafters are told of the missed tokens before they are next
    asked. All at once, that takes far less time than between passes.
    disabled: passes are plain, and one in TIMED_EVERY is timed. Afterwards drafters begin anew with the
    whole text.
    """

    def __init__(
        self,
        drafter: Drafter,
        max_nodes: int,
        min_pass_seconds: float = 0.0,
        branches: bool = True,
        texts: int = 1,
    ) -> None:
        """drafter: owned by this object from now on, which closes it.

        max_nodes: most nodes of a pass, roots included. min_pass_seconds: time of a plain pass for each of
        its texts below which drafting is disabled. branches: whether drafts may branch. texts: most texts
        that are drafted for at once; fewer where drafters of this kind can't.
        """
        self._drafter = drafter
        self._texts = [DraftedText(drafter)]
        while len(self._texts) < texts and (beside := drafter.beside()) is not None:
            self._texts.append(DraftedText(beside))
        self._max_nodes = max_nodes
        self._min_pass_seconds = min_pass_seconds
        self._branches = branches
        self._failure = ""
        """Why drafting is disabled for good; empty if it isn't."""
        self._paces: dict[int, Pace] = {}
        """Paces by the number of texts that share a pass."""
        self._pace = self._pace_of(1)
        """The pace of passes with as many texts as the newest one."""

    def begin(
        self,
        text: list[int],
        sampling: SamplingConfig,
        constrained: Constrained | None = None,
        prompt_tokens: int | None = None,
    ) -> DraftedText | None:
        """Begin to continue a text, until `end`. None if every drafter is at work on another text.

        text: at least one token id; the caller's list grows with the text. constrained: follows the text
        where it has to obey a constraint. Tokens that are then forced are drafted, and others aren't.
        prompt_tokens: how many of the text's tokens are its prompt; None: all.
        """
        free = next((it for it in self._texts if not it.is_used), None)
        if free is not None:
            prompt = len(text) if prompt_tokens is None else prompt_tokens
            free.begin(
                text, prompt, sampling, constrained, "disabled" if self._pace.disabled else "listening"
            )
        return free

    def end(self, text: DraftedText) -> None:
        """Let go of a text; its drafter is free for another one."""
        text.end()

    def propose(self, asked: Sequence[DraftRequest], max_nodes: int) -> list[Draft | Cancelled]:
        """The drafts of a pass of these texts, of at most `max_nodes` nodes together, or one for each.

        They are each text's `draft` too. A drafter that fails disables drafting, and texts go on without.
        Where a text's `cancelled()` turned True while its draft was made, it gets Cancelled instead.
        """
        own = [it.text for it in asked if it.text is not None]
        pace = self._pace = self._pace_of(len(asked))
        its, policy = Round(len(asked), own), pace.policy
        if pace.disabled:
            return self._plain(asked, its, "disabled")
        if policy.throttle():
            its.timed = False
            return self._with_streams(self._plain(asked, its, "throttled"), asked)
        found = self._plain(asked, its, "listening")
        try:
            with system_refusals():
                for text in own:
                    text.catch_up()
                limit = min(policy.begin(), self._max_nodes, max_nodes)
                if limit > len(asked):
                    found = self._grown(asked, its, limit)
        except OndeviceError as error:
            self._fail(error)
            return self._plain(asked, its, "disabled")
        return self._with_streams(found, asked)

    def read(self, text: DraftedText, output: ForwardOutput) -> None:
        """Let a text's drafter learn from a pass over its prompt. One that fails disables drafting."""
        if self._failure:
            return
        try:
            with system_refusals():
                text.read(output)
        except OndeviceError as error:
            self._fail(error)

    def observe(self, text: DraftedText, outcome: PassOutcome) -> None:
        """Learn from a text's part of the finished pass. Passes of prompts count as well.

        A drafter that fails disables drafting.
        """
        its = text.round
        try:
            with system_refusals():
                is_last = text.drawn(outcome)
        except OndeviceError as error:
            self._fail(error)
            return
        if is_last and its is not None and its.timed:
            self._pace_of(its.texts).record(its)

    @property
    def taps(self) -> tuple[int, ...]:
        """The layers, as of `Transformer.taps`, whose hidden states the next output should have."""
        return () if self._pace.disabled else self._drafter.taps

    def stats(self, text: DraftedText) -> DraftStats:
        """Stats of the text so far, with a sentence on whether drafts are made, and why."""
        return text.stats(self._decision)

    def close(self) -> None:
        """Close the drafters. Idempotent."""
        self._drafter.close()

    def _pace_of(self, texts: int) -> Pace:
        if texts not in self._paces:
            policy = TreePolicy(self._max_nodes, texts)
            self._paces[texts] = Pace(policy, texts * self._min_pass_seconds)
        return self._paces[texts]

    def _plain(self, asked: Sequence[DraftRequest], its: Round, state: State) -> list[Draft | Cancelled]:
        """No drafts."""
        for one in asked:
            if one.text is not None:
                one.text.plain(one.root, state, its)
        return [plain(one.root) for one in asked]

    def _grown(self, asked: Sequence[DraftRequest], its: Round, limit: int) -> list[Draft | Cancelled]:
        """Drafts of at most `limit` nodes together. Raises what a drafter raises, but Cancelled."""
        policy, gone = self._pace.policy, dict[int, Cancelled]()
        roots = [self._root(at, one, limit - len(asked) + 1, gone) for at, one in enumerate(asked)]
        own = [one.text for one in asked if one.text is not None]
        its.drafted(sum(text.preparing_seconds for text in own))
        policy.prepared(its.drafting_seconds)
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
            for text in own:
                text.drafter.grown()
        growing_seconds = time.perf_counter() - started
        computing_seconds = sum(text.computing_seconds for text in own)
        policy.computed(computing_seconds, sum(text.computed for text in own))
        policy.grown(growing_seconds - computing_seconds, sum(text.asked for text in own))
        its.drafted(growing_seconds)
        its.nodes = sum(map(len, drafts))
        its.timed = not gone
        for one, draft in zip(asked, drafts, strict=True):
            if one.text is not None:
                one.text.draft = draft
        return [gone.get(at, draft) for at, draft in enumerate(drafts)]

    def _root(self, at: int, asked: DraftRequest, most: int, gone: dict[int, Cancelled]) -> Root:
        """Where a text's draft begins. gone: gets its Cancelled, if it is cancelled."""
        # A draft takes no more blocks of keys and values than the root alone.
        nodes = min(most, asked.max_nodes, max(1, asked.kv.room - asked.kv.length))
        text, cancelled = asked.text, asked.cancelled or never_cancelled
        if text is None or nodes < 2 or asked.max_tokens < 2:
            return Root(asked.root, lambda path: (), 1, 0)

        def unless_gone(ask: Callable[[Sequence[int]], Proposals], path: Sequence[int]) -> Proposals:
            try:
                return () if at in gone else ask(path)
            except Cancelled as error:
                gone[at] = error
                return ()

        try:
            text.prepare(asked.kv, nodes, cancelled)
        except Cancelled as error:
            gone[at] = error
        return Root(
            asked.root,
            partial(unless_gone, text.propose),
            nodes,
            asked.max_tokens - 1,
            partial(unless_gone, text.compute),
            text.drafter.computed_chance,
        )

    def _with_streams(
        self, drafts: list[Draft | Cancelled], asked: Sequence[DraftRequest]
    ) -> list[Draft | Cancelled]:
        """The drafts. One that has a pass of its own gets streams there, for the next draft."""
        policy, text, (draft, *beside) = self._pace.policy, asked[0].text, drafts
        if text is not None and isinstance(draft, Draft) and not beside and not policy.is_backing_off:
            text.streamed = text.drafter.streamed(draft, policy.row_share)
        return drafts

    def _fail(self, error: OndeviceError) -> None:
        log.warning("no more drafts: %s", error)
        self._failure = str(error)
        self._min_pass_seconds = math.inf
        for pace in self._paces.values():
            pace.disable()
        for text in self._texts:
            text.disable()

    @property
    def _decision(self) -> str:
        """The `decision` of `DraftStats`."""
        return f"no drafts: {self._failure}" if self._failure else self._pace.decision


class Pace:
    """The policy and the measured times of passes over one number of texts."""

    def __init__(self, policy: TreePolicy, min_pass_seconds: float) -> None:
        self.policy = policy
        self.disabled = min_pass_seconds > 0
        self._min_pass_seconds = min_pass_seconds
        self._untimed = 0
        """Passes until the next timed one while disabled."""

    def record(self, its: Round) -> None:
        """Record the time of a pass; while disabled of the first, and then of one in TIMED_EVERY."""
        if self.disabled:
            if self._untimed:
                self._untimed -= 1
                return
            self._untimed = TIMED_EVERY - 1
        self.policy.record(its.nodes, its.tokens, its.seconds, its.drafting_seconds)
        self.disabled = self.policy.plain_seconds < self._min_pass_seconds

    def disable(self) -> None:
        """Disable drafting for good."""
        self.disabled, self._min_pass_seconds = True, math.inf

    @property
    def decision(self) -> str:
        if not self.disabled:
            return self.policy.decision
        return (
            f"no drafts: a plain pass takes {1e3 * self.policy.plain_seconds:.2f} ms, and drafting pays "
            f"from {1e3 * self._min_pass_seconds:.2f} ms on"
        )
