"""Back-off: decides by measured speed whether drafting pays, compared with plain decoding.

Drafting that loses ends within a few tokens. It is tried again after a back-off, which doubles while trials
keep losing.
"""

from __future__ import annotations

import math

MIN_BACK_OFF = 48
"""Passes without a draft after drafts have lost."""
MAX_BACK_OFF = 1536
"""Passes without a draft after trials have kept losing. Without doubling, losing drafts cost 2 % more,
though text that is predictable at times gains up to 12 %.
"""
FIRST_PLAIN = 4
"""Plain passes before the first trial. With just one, 100 passes are 13 % slower if it was a cold one."""
PLAIN_EVERY = 64
"""Interval between plain passes while drafts win, in passes. They keep the time of a plain pass known.

Without them, text is up to 8 % slower while nodes are expensive.
"""
FIRST_PLAIN_EVERY = 4
"""First interval between plain passes while drafts win; it doubles up to PLAIN_EVERY.

While memory fills, plain passes are slow. Without short intervals, 300 passes after it are up to 9 %
slower, as drafts that lose seem to win; 100 passes with expensive nodes, 24 %.
"""
SLACK = 0.5
"""Tolerated loss after one draft, relative to plain decoding's speed; after n drafts, this over sqrt(n).

Without it, drafts that win are given up by chance: text is 6 % slower in the mean, up to 20 %.
"""


class Rate:
    """A rate in tokens per second, as a mean that is decayed with every pass."""

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self.clear()

    def clear(self) -> None:
        self._tokens = self._seconds = 0.0

    def record(self, tokens: float, seconds: float) -> None:
        self._tokens = self._decay * self._tokens + tokens
        self._seconds = self._decay * self._seconds + seconds

    def rescale(self, factor: float) -> None:
        """Change the history as if all its passes had taken `factor` times as long."""
        self._seconds *= factor

    @property
    def value(self) -> float:
        """Tokens per second; 0 before any pass."""
        return self._tokens / self._seconds if self._seconds > 0 else 0.0


class BackOff:
    """The state of drafting: backing off, on trial, or neither of these."""

    def __init__(self) -> None:
        self._plain = Rate(decay=0.9)
        # The slow rate shows small losses; the fast rate shows large ones soon. Without the fast one, 200
        # passes of wrong drafts after right ones take 1.29 times plain decoding's time instead of 1.12.
        self._slow = Rate(decay=0.97)
        self._fast = Rate(decay=0.7)
        self._drafts = 0
        """Number of drafts since the last back-off."""
        self._in_a_row = 0
        """Number of drafts since the last plain pass."""
        self._plain_every = FIRST_PLAIN_EVERY
        """Most drafts before the next plain pass."""
        self._left = FIRST_PLAIN
        """Passes left to back off."""
        self._next = MIN_BACK_OFF
        """Length of the next back-off."""
        self.lost = 1.0
        """Speed of drafts before the last back-off, relative to plain decoding's."""
        self.is_on_trial = True
        """Whether the next draft is the first ever or after a back-off. It should then be small."""

    @property
    def is_active(self) -> bool:
        """Whether drafting is backing off, so that the next passes have no draft."""
        return self._left > 0

    @property
    def allows_draft(self) -> bool:
        """Whether the next pass may have a draft."""
        return not self.is_active and self._in_a_row < self._plain_every

    def record_plain(self, seconds: float) -> None:
        """Record a pass without a draft, which took `seconds` and gave a text one token."""
        if not self.allows_draft and not self.is_active:
            self._plain_every = min(2 * self._plain_every, PLAIN_EVERY)
        self._plain.record(1, seconds)
        self._left = max(0, self._left - 1)
        self._in_a_row = 0

    def record_untimed(self) -> None:
        """Record a pass without a draft that wasn't timed."""
        self._left = max(0, self._left - 1)

    def rescale(self, factor: float) -> None:
        """Change the history as if all its passes had taken `factor` times as long."""
        for rate in (self._plain, self._slow, self._fast):
            rate.rescale(factor)

    def record_draft(self, tokens: float, seconds: float) -> None:
        """Record a pass with a draft, which took `seconds`, including drafting, and gave a text `tokens`."""
        self._in_a_row += 1
        self._drafts += 1
        self._slow.record(tokens, seconds)
        self._fast.record(tokens, seconds)
        plain = self._plain.value
        if not plain:
            return
        slow = self._slow.value / plain
        fast = self._fast.value / plain
        slack = SLACK / math.sqrt(self._drafts)
        if slow + slack < 1 or fast + SLACK / 2 + slack < 1:
            self.lost = min(slow, fast)
            self._begin()
        elif self.is_on_trial:
            self.is_on_trial = False
            if slow >= 1:
                self._next = MIN_BACK_OFF

    def _begin(self) -> None:
        self._left = self._next
        self._next = min(2 * self._next, MAX_BACK_OFF)
        self._drafts = 0
        self._in_a_row = 0
        self.is_on_trial = True
        self._slow.clear()
        self._fast.clear()
