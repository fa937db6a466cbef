"""Schedules of a run: the learning rate, and the weight of the penalty that makes gates zero."""

from __future__ import annotations

from dataclasses import dataclass

from recipe.config import StoredBits, Training

FIRST_WEIGHT, LEAST_WEIGHT, MOST_WEIGHT = 1e-2, 1e-4, 10.0
GAIN = 0.02
MEMORY = 0.9


@dataclass
class Schedule:
    """Learning rate: a warm-up, a constant part, and a decay to zero that may be started at any time."""

    training: Training
    decay_from: int
    decay_steps: int

    @staticmethod
    def of(training: Training) -> Schedule:
        decay_steps = max(1, round(training.steps * training.decay_share))
        return Schedule(training, training.steps - decay_steps, decay_steps)

    def decay_now(self, step: int) -> None:
        """Start the decay now, so that the run ends early. The decay keeps its share of the run."""
        if step < self.decay_from:
            share = self.training.decay_share
            self.decay_from, self.decay_steps = step, max(1, round(step * share / (1 - share)))

    @property
    def steps(self) -> int:
        return self.decay_from + self.decay_steps

    def bits(self, step: int) -> StoredBits:
        """Bits per weight in the update that follows `step` updates; 0 means unrounded weights."""
        return self.training.stored_bits if step >= self.decay_from else 0

    def learning_rate(self, step: int) -> float:
        """Learning rate of the update that follows `step` updates."""
        warm = min(1.0, (step + 1) / self.training.warmup_steps)
        left = min(1.0, (self.steps - step) / self.decay_steps)
        return self.training.learning_rate * min(warm, left)


@dataclass
class Penalty:
    """The weight of the gate penalty, steered so that the share of zeros follows its target."""

    training: Training
    weight: float = FIRST_WEIGHT
    zeros: float = 0.5
    """Share of zeros, a moving mean over layers and time."""

    def target(self, step: int, steps: int) -> float:
        """Target share of zeros: a straight line from 0.5, which are zero by chance, to the final target."""
        way = min(1.0, step / max(1.0, steps * self.training.target_share))
        return 0.5 + way * (self.training.target_zeros - 0.5)

    def observe(self, zeros: float, step: int, steps: int) -> None:
        """Adjust the weight after a step. zeros: share of zeros in that step."""
        self.zeros = MEMORY * self.zeros + (1 - MEMORY) * zeros
        # The lack is relative to the active share: 0.90 and 0.91 differ as much as 0.0 and 0.1 do.
        lack = (1 - self.zeros) / (1 - self.target(step, steps)) - 1
        change = 1 + GAIN * max(-1.0, min(1.0, lack))
        self.weight = min(MOST_WEIGHT, max(LEAST_WEIGHT, self.weight * change))
