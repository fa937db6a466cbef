"""The time of a forward pass as a linear function of its draft tokens, fitted to recent passes."""

from __future__ import annotations

DECAY = 0.97
"""Decay of the line's history with every pass. With 0.9, good drafts are up to 8 % slower."""
OUTLIER = 1.5
"""Largest measured time of a pass that counts, as a multiple of the expected one. Beyond it, another process
probably had the machine.

Without it, text is 30 % slower if one pass in fifty takes thirty times as long.
"""
IN_A_ROW = 4
"""Number of consecutive passes beyond OUTLIER, all slower or all faster, that change the whole line.

Without such changes, text is up to 13 % slower after a change; with 2, up to 25 %, as outliers make some.
"""


class PassTime:
    """The line `plain_seconds + node_seconds * (nodes - texts)`, fitted by decayed least squares to the
    seconds of passes.

    While all passes have the same size, the slope can't be measured and stays as it is. It begins at 0.
    """

    def __init__(self, texts: int = 1) -> None:
        """texts: number of texts that share the passes. Each has one node that is no draft token."""
        self._texts = texts
        self.plain_seconds = 0.0
        self.node_seconds = 0.0
        self.scale = 1.0
        """Factor by which the last recorded pass changed the whole line."""
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        """Decayed sums: of 1, of draft tokens x, of seconds y, and of their products."""
        self._ratios: list[float] = []
        """Measured over expected seconds of the last passes beyond OUTLIER, all slower or all faster."""

    def seconds(self, nodes: int) -> float:
        """Expected seconds of a pass over `nodes`; 0 before any was recorded."""
        return self.plain_seconds + self.node_seconds * (nodes - self._texts)

    def record(self, nodes: int, seconds: float) -> float:
        """Record a pass over `nodes` nodes, including roots, in `seconds`. Returns the seconds that are
        counted.
        """
        self._rescale(nodes, seconds)
        expected = self.seconds(nodes)
        if expected > 0:
            seconds = min(seconds, OUTLIER * expected)
        x = float(nodes - self._texts)
        self._weight = DECAY * self._weight + 1
        self._x = DECAY * self._x + x
        self._y = DECAY * self._y + seconds
        self._xx = DECAY * self._xx + x * x
        self._xy = DECAY * self._xy + x * seconds
        mean_x = self._x / self._weight
        mean_y = self._y / self._weight
        variance = self._xx / self._weight - mean_x * mean_x
        # Below this variance, the remains of passes of another size are rounding errors.
        if variance > 1e-6 * (1 + mean_x * mean_x):
            covariance = self._xy / self._weight - mean_x * mean_y
            self.node_seconds = max(0.0, covariance / variance)
        # A line too steep would put a plain pass below zero.
        self.plain_seconds = max(mean_y - self.node_seconds * mean_x, 0.05 * mean_y)
        return seconds

    def _rescale(self, nodes: int, seconds: float) -> None:
        """Scale the line if the last IN_A_ROW passes all took far longer, or far less, than expected."""
        self.scale = 1.0
        expected = self.seconds(nodes)
        ratio = seconds / expected if expected > 0 else 1.0
        if self._ratios and (ratio > 1) != (self._ratios[0] > 1):
            self._ratios.clear()
        if 1 / OUTLIER <= ratio <= OUTLIER:
            self._ratios.clear()
            return
        self._ratios.append(ratio)
        if len(self._ratios) == IN_A_ROW:
            # The ratio nearest to 1: the others may be outliers of the new line.
            self.scale = min(self._ratios) if ratio > 1 else max(self._ratios)
            self._ratios.clear()
            self._y *= self.scale
            self._xy *= self.scale
            self.plain_seconds *= self.scale
            self.node_seconds *= self.scale
