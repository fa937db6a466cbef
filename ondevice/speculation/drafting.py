"""A drafter and a policy at work on one text after another."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence

from ondevice.backends.base import Array, Float32
from ondevice.config import SamplingConfig
from ondevice.errors import OndeviceError
from ondevice.model.kv_cache import KVCache
from ondevice.model.transformer import ForwardOutput, PrunedDraft
from ondevice.speculation.drafter import Drafter, IsCancelled
from ondevice.speculation.policy import TreePolicy
from ondevice.speculation.tree import Draft, Proposals, grow, plain

log = logging.getLogger(__name__)

TIMED_EVERY = 8
"""Of passes that the drafter doesn't hear of, the first is timed and one in so many after it."""


class Drafting:
    """Drafts for one model's texts, one at a time: what was learned of one helps the next."""

    def __init__(self, drafter: Drafter, most_nodes: int, least_pass_seconds: float = 0.0) -> None:
        """most_nodes: of a draft, its root included. The drafter is this object's own: see `close`.

        least_pass_seconds: models whose passes are shorter write their text plainly.
        """
        self._drafter = drafter
        self._policy = TreePolicy(most_nodes)
        self.preparing_seconds = self.growing_seconds = 0.0
        """What the newest draft took to prepare, and to grow."""
        self._learning_seconds = 0.0
        """What its tokens took, once drawn."""
        self._least_pass_seconds = least_pass_seconds
        self._failure = ""
        """Why nothing is drafted any more."""
        self._passes = 0
        self._text: list[int] = []
        self._sampling = SamplingConfig()
        self.deaf = least_pass_seconds > 0
        """Whether passes are too short to guess beside, or not known not to be: while it holds, nothing but
        `begin`, and `passed_plainly` after every pass, is to be called."""
        self._behind = False
        """The drafter has missed some of the text."""
        self._drawn = 0
        """Tokens since the last draft."""
        self._paused = False
        """In this pass, for nothing is in sight: the drafter hears of it when guesses are wanted again."""
        self._unheard: list[int] = []
        """Tokens that came while paused."""
        self._unseen: tuple[ForwardOutput, int] | None = None
        """What the last pass left, if that was while paused."""

    @property
    def resting(self) -> bool:
        """Whether this pass has no draft and the next will hardly have one: nothing is computed for it."""
        return self._paused or self._policy.resting

    def begin(self, text: list[int], sampling: SamplingConfig) -> None:
        """A text is about to be continued: its token ids, of which there is at least one; the list grows."""
        self._text, self._sampling, self._behind = text, sampling, self.deaf
        self._paused, self._unseen = False, None
        self._unheard.clear()
        if not self.deaf:
            self._drafter.begin(text, sampling)

    @property
    def wants_streams(self) -> bool:
        """Whether the next pass is to be pruned by `prune`, in a model that has streams."""
        return not self.resting and self._drafter.wants_streams

    def draft(
        self,
        root: int,
        kv: KVCache,
        most_nodes: int,
        most_tokens: int,
        cancelled: IsCancelled | None = None,
    ) -> Draft:
        """Guesses behind the text, whose last token is `root` and has not been through the model.

        kv: holds the text but for `root`. most_nodes: that there is room for; most_tokens: that may still
        be drawn. Raises Cancelled. A drafter that fails drafts no more, and the text goes on without.
        """
        self._drawn, self.preparing_seconds, self.growing_seconds, self._learning_seconds = 0, 0.0, 0.0, 0.0
        if self._behind:
            self._drafter.begin(list(self._text), self._sampling)
            self._behind, self._unseen = False, None
            self._unheard.clear()
        self._paused = self._policy.pause()
        if self._paused:
            return plain(root)
        started = time.perf_counter()
        self._catch_up()
        nodes = min(self._policy.begin(), most_nodes)
        if nodes < 2 or most_tokens < 2:
            return plain(root)
        try:
            self._drafter.prepare(kv, nodes, cancelled or _never)
            return self._grown(root, nodes, most_tokens - 1, started)
        except OndeviceError as error:
            log.warning("no more drafts: %s", error)
            self._failure, self._least_pass_seconds = str(error), math.inf
            self.deaf = True
            return plain(root)

    def _grown(self, root: int, nodes: int, depth: int, started: float) -> Draft:
        """A draft of a drafter that is prepared; that began at `started`."""
        asked = 0

        def propose(path: Sequence[int]) -> Proposals:
            nonlocal asked
            asked += 1
            return self._drafter.propose(path)

        prepared = time.perf_counter()
        self.preparing_seconds = prepared - started
        self._policy.prepared(self.preparing_seconds)
        draft = grow(root, propose, self._policy.worth, nodes, depth, self._policy.promising)
        self.growing_seconds = time.perf_counter() - prepared
        self._policy.grown(self.growing_seconds, asked)
        return draft

    def drew(self, last: int, token: int, logits: Float32) -> None:
        """`token` was drawn from logits (V,) and comes behind the text, which ends with `last`."""
        self._drawn += 1
        if self._paused:
            self._unheard.append(token)
            return
        started = time.perf_counter()
        self._drafter.judge(token)
        self._drafter.learn(last, logits)
        self._drafter.add(token)
        self._learning_seconds += time.perf_counter() - started

    def prune(self, draft: Draft, entering: Array) -> PrunedDraft:
        """Of a draft on its way, what goes on into the stream layers: asked in a model that has some."""
        return self._drafter.prune(draft, entering, self._policy.row_share)

    def entered(self, found: ForwardOutput, node: int) -> None:
        """`node` of those that went through a pass is the newest token in the cache; one has been drawn."""
        if self._paused:
            self._unseen = found, node
        else:
            self._drafter.entered(found, node)

    def passed(self, draft: Draft, seconds: float) -> None:
        """A pass over `draft`, growing it and drawing from it took so long."""
        if not self._paused:
            drafting_seconds = self.preparing_seconds + self.growing_seconds + self._learning_seconds
            self._policy.record(len(draft), self._drawn, seconds, drafting_seconds)
            self._listen()

    def passed_plainly(self, seconds: float) -> None:
        """A pass that was none of `draft`'s business, and drawing from it, took so long."""
        if self._passes % TIMED_EVERY == 0:
            self._policy.record(1, 1, seconds)
            self._listen()
        self._passes += 1

    def _listen(self) -> None:
        """Whether the drafter hears of the next pass, by what a plain one takes."""
        self.deaf = self._policy.plain_seconds < self._least_pass_seconds
        self._behind |= self.deaf

    def _catch_up(self) -> None:
        """Tell the drafter what it has missed: all at once takes far less time than between passes."""
        for token in self._unheard:
            self._drafter.add(token)
        self._unheard.clear()
        if self._unseen is not None:
            self._drafter.entered(*self._unseen)
            self._unseen = None

    @property
    def decision(self) -> str:
        """Whether drafts are made, and why, for people."""
        if self._failure:
            return f"no drafts: {self._failure}"
        if self.deaf:
            return (
                f"no drafts: a plain pass takes {1e3 * self._policy.plain_seconds:.2f} ms, and from "
                f"{1e3 * self._least_pass_seconds:.2f} ms on there is time to guess beside it"
            )
        return self._policy.decision

    def close(self) -> None:
        """Give back what the drafter holds. Idempotent."""
        self._drafter.close()


def _never() -> bool:
    return False
