"""Whether to draft at all: tokens per second with drafts against those without, as both have lately been.

A model of what a draft brings is wrong somewhere; what it brought is not. So drafts that lose end within a
few tokens, and are tried again after a rest that doubles while trials keep losing.
"""

from __future__ import annotations

import math

SHORTEST_REST, LONGEST_REST = 48, 1536
"""Passes without a draft after drafts have lost, and after trials have kept losing."""
FIRST_PLAIN = 4
"""Passes without a draft before the first one with."""
PLAIN_EVERY = 64
"""While drafts win, one pass in so many goes without, so that what one takes stays known."""
TRIAL_DRAFTS = 4
"""So many drafts that aren't behind win a trial."""
SLACK = 0.5
"""In tokens: n drafts may be behind by this over the root of n. A pass's tokens vary about as much."""


class Rate:
    """Tokens per second, over passes that count less the longer they are past."""

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self.clear()

    def clear(self) -> None:
        self._tokens = self._seconds = 0.0

    def record(self, tokens: float, seconds: float) -> None:
        self._tokens = self._decay * self._tokens + tokens
        self._seconds = self._decay * self._seconds + seconds

    def rescale(self, factor: float) -> None:
        """All passes take so many times as long."""
        self._seconds *= factor

    @property
    def value(self) -> float:
        """0 before any."""
        return self._tokens / self._seconds if self._seconds > 0 else 0.0


class Switch:
    """On, or resting: asked before every pass, and told how it went."""

    def __init__(self) -> None:
        self._plain = Rate(decay=0.9)
        # The one that is slow to forget sees small losses, the other large ones soon.
        self._slow, self._fast = Rate(decay=0.97), Rate(decay=0.7)
        self._drafts = self._in_a_row = 0
        """Since the last rest; since the last plain pass."""
        self._left = FIRST_PLAIN
        """Of the rest."""
        self._rest = SHORTEST_REST
        self.lost = 1.0
        """What drafts gave before the last rest, in plain decoding's tokens per second."""
        self.trial = True
        """Drafts are being tried, after a rest or first of all, and should be small."""

    @property
    def resting(self) -> bool:
        """Whether drafts are out of the question for a while."""
        return self._left > 0

    @property
    def on(self) -> bool:
        """Whether the next pass may have a draft."""
        return not self.resting and self._in_a_row < PLAIN_EVERY

    def record_plain(self, seconds: float) -> None:
        """A pass without a draft, which gave one token, took so long."""
        self._plain.record(1, seconds)
        self._left = max(0, self._left - 1)
        self._in_a_row = 0

    def pause(self) -> None:
        """A pass without a draft that nobody timed."""
        self._left = max(0, self._left - 1)

    def rescale(self, factor: float) -> None:
        """All passes are taken to take so many times as long as they did."""
        for rate in (self._plain, self._slow, self._fast):
            rate.rescale(factor)

    def record_draft(self, tokens: int, seconds: float) -> None:
        """A pass with a draft gave so many tokens, and took so long, growing the draft included."""
        self._in_a_row += 1
        self._drafts += 1
        self._slow.record(tokens, seconds)
        self._fast.record(tokens, seconds)
        plain = self._plain.value
        if not plain:
            return
        slow, fast = self._slow.value / plain, self._fast.value / plain
        slack = SLACK / math.sqrt(self._drafts)
        if slow + slack < 1 or fast + SLACK / 2 + slack < 1:
            self.lost = min(slow, fast)
            self._begin_rest()
        elif self._drafts >= TRIAL_DRAFTS and self.trial:
            self.trial = False
            if slow >= 1:
                self._rest = SHORTEST_REST

    def _begin_rest(self) -> None:
        self._left, self._rest = self._rest, min(2 * self._rest, LONGEST_REST)
        self._drafts = self._in_a_row = 0
        self.trial = True
        self._slow.clear()
        self._fast.clear()
