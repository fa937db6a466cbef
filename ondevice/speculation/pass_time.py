"""What a pass over n nodes takes, as passes have lately been: so much, and so much more for every guess."""

from __future__ import annotations

DECAY = 0.97
"""Of what is known, per pass."""
OUTLIER = 1.5
"""A pass that took more times what was expected counts as so many: another process had the machine."""
IN_A_ROW = 4
"""Unless so many did: then all passes take that much longer now. So many times shorter means the same."""


class PassTime:
    """Decayed least squares of seconds on guesses: `plain_seconds + guess_seconds * (nodes - 1)`.

    While all passes are of one size the slope can't be seen, and stays what it was; before any it is 0.
    """

    def __init__(self) -> None:
        self.plain_seconds = 0.0
        self.guess_seconds = 0.0
        self.scale = 1.0
        """By how much the last pass recorded has changed what all passes are taken to take."""
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        """Decayed sums: of 1, of guesses x, of seconds y, and of their products."""
        self._ratios: list[float] = []
        """Of what the last passes took to what was expected: all far above 1, or all far below."""

    def seconds(self, nodes: int) -> float:
        """Of a pass over so many nodes; 0 before any was recorded."""
        return self.plain_seconds + self.guess_seconds * (nodes - 1)

    def record(self, nodes: int, seconds: float) -> float:
        """A pass over so many nodes, its root included, took so long. Returns the seconds that count."""
        self._rescale(nodes, seconds)
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
        return seconds

    def _rescale(self, nodes: int, seconds: float) -> None:
        """Where the last few passes all took far longer or shorter, so did all before, as far as we care."""
        self.scale, expected = 1.0, self.seconds(nodes)
        ratio = seconds / expected if expected > 0 else 1.0
        if self._ratios and (ratio > 1) != (self._ratios[0] > 1):
            self._ratios.clear()
        if 1 / OUTLIER <= ratio <= OUTLIER:
            self._ratios.clear()
            return
        self._ratios.append(ratio)
        if len(self._ratios) == IN_A_ROW:
            # The one nearest to what was expected: the others may be outliers of the new kind.
            self.scale = min(self._ratios) if ratio > 1 else max(self._ratios)
            self._ratios.clear()
            self._y *= self.scale
            self._xy *= self.scale
            self.plain_seconds *= self.scale
            self.guess_seconds *= self.scale
