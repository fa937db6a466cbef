"""Runs a drafter under a policy, for one text after another."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from typing import Literal, NamedTuple

from ondevice.backends.base import Float32
from ondevice.callbacks import IsCancelled, never_cancelled
from ondevice.config import SamplingConfig
from ondevice.constraints.constrained import Constrained
from ondevice.errors import OndeviceError
from ondevice.model.kv_cache import KVCache
from ondevice.model.transformer import ForwardOutput, Prune
from ondevice.speculation.drafter import Drafter
from ondevice.speculation.policy import TreePolicy
from ondevice.speculation.tree import Draft, Proposals, grow, plain
from ondevice.stats import DraftStats

log = logging.getLogger(__name__)

TIMED_EVERY = 8
"""Interval between timed passes while drafting is disabled, in passes."""

State = Literal["listening", "throttled", "disabled"]


class PassOutcome(NamedTuple):
    """A forward pass whose tokens have been drawn."""

    draft: Draft
    """The pruned draft, which was verified: the proposed one without the nodes that were pruned."""
    path: Sequence[int]
    """The nodes of `draft` that the text takes, root first. A token was drawn after each."""
    output: ForwardOutput
    seconds: float | None
    """Time from the proposal to the last draw. None for a prompt's pass, which isn't decoding."""
    ended: bool
    """Whether the text is over. The draft tokens after the path were then never judged."""


class Drafting:
    """Drafts for one model's texts, one at a time. What it learns from one text helps the next.

    The decode loop calls `begin` for each text. For each pass it calls `propose`, then `drew` for each token
    drawn, then `observe`; the prompt's pass has no `propose`. The loop doesn't depend on these states:

        +------------------- listening -------------------+
        |           drafts lose to plain passes           |  looking hasn't paid
        |  drafting --------------------------> backing   | --------------------> throttled
        |           <--------------------------   off     | <--------------------
        |           48 to 1,536 passes are over           |  time for another look
        +-------------------------------------------------+
             |                              ^
             | a plain pass takes less than | it takes more
             | min_pass_seconds, or the     |
             v drafter fails (for good)     |
        +-------------------------------------------------+
        |                    disabled                     |
        +-------------------------------------------------+

    drafting: `TreePolicy` sizes the drafts. backing off: passes are plain (`BackOff`). In both, the drafter
    is told of every token, and every pass is timed.
    throttled: the pass is plain and untimed. The drafter is told of the missed tokens before it is next
    asked. All at once, that takes far less time than between passes.
    disabled: passes are plain, and one in TIMED_EVERY is timed. Afterwards the drafter begins anew with the
    whole text.
    """

    def __init__(
        self, drafter: Drafter, max_nodes: int, min_pass_seconds: float = 0.0, branches: bool = True
    ) -> None:
        """drafter: owned by this object from now on, which closes it.

        max_nodes: most nodes of a draft, its root included. min_pass_seconds: time of a plain pass below
        which drafting is disabled. branches: whether drafts may branch.
        """
        self._drafter = drafter
        self._policy = TreePolicy(max_nodes)
        self._min_pass_seconds = min_pass_seconds
        self._branches = branches
        self._state: State = "disabled" if min_pass_seconds > 0 else "listening"
        self._failure = ""
        """Why drafting is disabled for good; empty if it isn't."""
        self._text: list[int] = []
        self._sampling = SamplingConfig()
        self._constrained: Constrained | None = None
        self._told = 0
        """Number of the text's tokens that the drafter knows; 0: it has yet to begin."""
        self._missed_output: tuple[ForwardOutput, int] | None = None
        """The newest output that the drafter hasn't been given, and its last accepted node."""
        self._untimed = 0
        """Passes until the next timed one while disabled."""
        self._preparing_seconds = self._growing_seconds = self._learning_seconds = 0.0
        """The drafter's time in this pass: before, while and after its draft grows."""
        self._nodes = 1
        """Number of nodes of the newest draft, pruned ones included."""
        self._count = _DraftCount()
        self.prune: Prune | None = None
        """Called between the lower layers and the stream layers of the proposed pass. None: no pruning."""

    @property
    def text(self) -> list[int]:
        """The list that `begin` was called with last, or an empty one after `leave`."""
        return self._text

    def leave(self) -> None:
        """Forget the text, which goes on without drafts. It takes `begin` to draft for it again."""
        self._text = []
        self._told = 0
        self._missed_output = None
        self.prune = None

    def begin(
        self, text: list[int], sampling: SamplingConfig, constrained: Constrained | None = None
    ) -> None:
        """Begin to continue a text.

        text: at least one token id; the caller's list grows with the text. constrained: follows the text
        where it has to obey a constraint. Tokens that are then forced are drafted, and others aren't.
        """
        self._text = text
        self._sampling = sampling
        self._constrained = constrained
        self._told = 0
        self._missed_output = None
        self._count = _DraftCount()
        if self._state != "disabled":
            self._state = "listening"
            self._begin_drafter()

    def propose(
        self,
        root: int,
        kv: KVCache,
        max_nodes: int,
        max_tokens: int,
        cancelled: IsCancelled | None = None,
    ) -> Draft:
        """The next pass's draft. A drafter that fails disables drafting, and the text goes on.

        Args:
            root: the text's last token, which hasn't been through the model.
            kv: the target's keys and values. They hold the text except `root`.
            max_nodes: number of nodes for which the context has room.
            max_tokens: number of tokens that may still be drawn.
            cancelled: if it returns True, `propose` raises Cancelled.
        """
        if self._state == "disabled":
            return plain(root)
        self._preparing_seconds = self._growing_seconds = self._learning_seconds = 0.0
        self._nodes = 1
        self.prune = None
        if self._policy.throttle():
            self._state = "throttled"
            return self._prunable(plain(root))
        self._state = "listening"
        if not self._told:
            self._begin_drafter()
        started = time.perf_counter()
        self._catch_up()
        # A draft takes no more blocks of keys and values than the root alone.
        nodes = min(self._policy.begin(), max_nodes, max(1, kv.room - kv.length))
        draft = plain(root)
        if nodes > 1 and max_tokens > 1:
            try:
                self._drafter.prepare(kv, nodes, cancelled or never_cancelled)
                draft = self._grown(root, nodes, max_tokens - 1, started)
            except OndeviceError as error:
                self._fail(error)
                return plain(root)
        self._nodes = len(draft)
        return self._prunable(draft)

    def drew(self, token: int, logits: Float32) -> None:
        """Tell the drafter that `token` was drawn from logits (V,) and is about to join the text.

        Logits aren't part of `PassOutcome`, as a pass may have a row of them for each node, and each row is
        as large as the vocabulary.
        """
        if self._state == "listening":
            started = time.perf_counter()
            self._drafter.observe(token, logits)
            self._told += 1
            self._learning_seconds += time.perf_counter() - started

    def observe(self, outcome: PassOutcome) -> None:
        """Learn from the outcome of the finished pass."""
        if self._state == "disabled":
            if outcome.seconds is not None:
                self._time_plain(outcome.seconds)
            return
        if self._state == "throttled":
            self._missed_output = outcome.output, outcome.path[-1]
            return
        self._drafter.end_pass(outcome.output, outcome.path[-1])
        if outcome.seconds is None:
            return
        drafting_seconds = self._preparing_seconds + self._growing_seconds
        if drafting_seconds:
            self._count.add(outcome, self._nodes, self._preparing_seconds, self._growing_seconds)
        drafting_seconds += self._learning_seconds
        self._policy.record(self._nodes, len(outcome.path), outcome.seconds, drafting_seconds)
        self._enable_or_disable()

    @property
    def stats(self) -> DraftStats:
        """Stats of the text so far, with a sentence on whether drafts are made, and why."""
        return self._count.stats(self._decision)

    def close(self) -> None:
        """Close the drafter. Idempotent."""
        self._drafter.close()

    def _begin_drafter(self) -> None:
        self._drafter.begin(list(self._text), self._sampling)
        self._told = len(self._text)
        self._missed_output = None

    def _catch_up(self) -> None:
        """Tell the drafter of the tokens and the output that it missed while throttled."""
        for token in self._text[self._told :]:
            self._drafter.observe(token, None)
        self._told = len(self._text)
        if self._missed_output is not None:
            self._drafter.end_pass(*self._missed_output)
            self._missed_output = None

    def _grown(self, root: int, nodes: int, depth: int, started: float) -> Draft:
        """Grow a draft with the prepared drafter. started: time at which its preparation began."""
        asked = 0

        def ask(path: Sequence[int]) -> Proposals:
            nonlocal asked
            asked += 1
            return self._drafter.propose(path)

        def propose(path: Sequence[int]) -> Proposals:
            return ask(path) if self._constrained is None else self._constrained.proposals(path, ask)

        prepared = time.perf_counter()
        self._preparing_seconds = prepared - started
        self._policy.prepared(self._preparing_seconds)
        draft = grow(
            root,
            propose,
            self._policy.is_worth_adding,
            nodes,
            depth,
            self._policy.is_worth_asking,
            self._branches,
        )
        self._growing_seconds = time.perf_counter() - prepared
        self._policy.grown(self._growing_seconds, asked)
        return draft

    def _prunable(self, draft: Draft) -> Draft:
        """The next pass's draft, with its pruner. The next streams begin with that pass."""
        if not self._policy.is_backing_off:
            self.prune = self._drafter.pruner(draft, self._policy.row_share)
        return draft

    def _time_plain(self, seconds: float) -> None:
        """Record the time of a pass while disabled: of the first, and then of one in TIMED_EVERY."""
        if self._untimed:
            self._untimed -= 1
            return
        self._untimed = TIMED_EVERY - 1
        self._policy.record(1, 1, seconds)
        self._enable_or_disable()

    def _enable_or_disable(self) -> None:
        if self._policy.plain_seconds >= self._min_pass_seconds:
            self._state = "listening"
        else:
            self._disable()

    def _disable(self) -> None:
        self._state = "disabled"
        self._told = 0
        self.prune = None

    def _fail(self, error: OndeviceError) -> None:
        log.warning("no more drafts: %s", error)
        self._failure = str(error)
        self._min_pass_seconds = math.inf
        self._disable()

    @property
    def _decision(self) -> str:
        """The `decision` of `DraftStats`."""
        if self._failure:
            return f"no drafts: {self._failure}"
        if self._state == "disabled":
            return (
                f"no drafts: a plain pass takes {1e3 * self._policy.plain_seconds:.2f} ms, and drafting pays "
                f"from {1e3 * self._min_pass_seconds:.2f} ms on"
            )
        return self._policy.decision


class _DraftCount:
    """Sums over a text's passes, as described in `DraftStats`."""

    def __init__(self) -> None:
        self._drafts = self._draft_tokens = 0
        self._preparing_seconds = self._growing_seconds = 0.0
        self._drafted: list[int] = []
        self._accepted: list[int] = []
        """Draft tokens judged and accepted, by depth from 1 on; both lists are equally long."""

    def add(self, outcome: PassOutcome, nodes: int, preparing_seconds: float, growing_seconds: float) -> None:
        """Count a pass. nodes: number of nodes in the draft before it was pruned."""
        self._drafts += nodes > 1
        self._draft_tokens += nodes - 1
        self._preparing_seconds += preparing_seconds
        self._growing_seconds += growing_seconds
        accepted = len(outcome.path) - 1
        # A draft token after the path was judged wrong, if there was one and the text didn't end there.
        judged = accepted + (not outcome.ended and outcome.path[-1] in outcome.draft.parents[1:])
        more = [0] * (judged - len(self._drafted))
        self._drafted += more
        self._accepted += more
        for depth in range(judged):
            self._drafted[depth] += 1
            self._accepted[depth] += depth < accepted

    def stats(self, decision: str) -> DraftStats:
        return DraftStats(
            drafts=self._drafts,
            draft_tokens=self._draft_tokens,
            drafted_by_depth=tuple(self._drafted),
            accepted_by_depth=tuple(self._accepted),
            preparing_seconds=self._preparing_seconds,
            growing_seconds=self._growing_seconds,
            decision=decision,
        )
