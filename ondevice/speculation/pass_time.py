"""What a pass over n nodes takes, as passes have lately been: so much, and so much more for every guess."""

from __future__ import annotations

DECAY = 0.97
"""Of what is known, per pass."""
OUTLIER = 4.0
"""A pass that took more times what was expected counts as so many: another process had the machine."""


class PassTime:
    """Decayed least squares of seconds on guesses: `plain_seconds + guess_seconds * (nodes - 1)`.

    While all passes are of one size the slope can't be seen, and stays what it was; before any it is 0.
    """

    def __init__(self) -> None:
        self.plain_seconds = 0.0
        self.guess_seconds = 0.0
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        """Decayed sums: of 1, of guesses x, of seconds y, and of their products."""

    def seconds(self, nodes: int) -> float:
        """Of a pass over so many nodes; 0 before any was recorded."""
        return self.plain_seconds + self.guess_seconds * (nodes - 1)

    def record(self, nodes: int, seconds: float) -> None:
        """A pass over so many nodes, its root included, took so long."""
        expected = self.seconds(nodes)
        if expected > 0:
            seconds = min(seconds, OUTLIER * expected)
        x = float(nodes - 1)
        self._weight = DECAY * self._weight + 1
        self._x = DECAY * self._x + x
        self._y = DECAY * self._y + seconds
        self._xx = DECAY * self._xx + x * x
        self._xy = DECAY * self._xy + x * seconds
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - mean_x * mean_x
        # Below it, what is left of passes of another size is rounding.
        if variance > 1e-6 * (1 + mean_x * mean_x):
            covariance = self._xy / self._weight - mean_x * mean_y
            self.guess_seconds = max(0.0, covariance / variance)
        # A line that would begin below nothing begins at nothing much: times that are too steep for a line.
        self.plain_seconds = max(mean_y - self.guess_seconds * mean_x, 0.05 * mean_y)
