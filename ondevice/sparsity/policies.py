"""Cache policies: which neurons stay in memory, as functions of the gates of past tokens.

A policy sees the gates of every accepted token, or a predictor's scores, and scores each neuron. The cache
keeps a layer's neurons with the highest scores, and gives each layer slots by its share of the model's
highest scores. NaN counts as fired.

Legend: T tokens, F neurons of a layer; widths: F of each layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, get_args

import numpy as np

from ondevice.backends.base import Float32, Int32
from ondevice.kernels import _native

PolicyName = Literal["gate", "frequency", "lru", "window"]
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)
DEFAULT_POLICY: PolicyName = "gate"

FREQUENCY_DECAY = 0.9
"""Decay per token of the `frequency` policy's count."""
# A slow mean of 0.98 or 0.995, or half or double the weight, changes hit rates by at most half a point on the
# shipped model's held-out text (tests/benchmarks/explain/cache_hit_rates.py).
SLOW_DECAY = 0.99
"""Decay per token of the share of tokens for which a neuron fired, in the `gate` policy."""
FAST_DECAY = 0.8
"""Decay per token of how near a neuron's gate came to firing."""
GATE_WEIGHT = 0.3
"""Weight of that nearness in the `gate` policy's score."""


class Policy(Protocol):
    """Gives scores to one model's neurons, layer by layer."""

    def observe(self, layer: int, gates: Float32) -> None:
        """Learn from the gates (T, F) of the tokens after those seen so far. Gates are products before the
        activation.
        """
        ...

    def scores(self, layer: int) -> Float32:
        """The scores of a layer's neurons, (F,): the higher, the likelier to fire again. Those with -inf are
        evicted first.
        """
        ...

    def fit(self, slots: int) -> None:
        """Adapt to the number of slots of all layers together. Called when slots are divided."""
        ...


class Recency:
    """Keeps the neurons that were used most recently."""

    def __init__(self, widths: Sequence[int]) -> None:
        self._used = [np.full(neurons, -np.inf, dtype=np.float32) for neurons in widths]
        """The last token that used each neuron of a layer, counted from 1."""
        self._tokens = [0] * len(widths)

    def observe(self, layer: int, gates: Float32) -> None:
        used = self._used[layer]
        for row in gates:
            self._tokens[layer] += 1
            used[fires(row)] = self._tokens[layer]

    def scores(self, layer: int) -> Float32:
        used: Float32 = self._used[layer]
        return used

    def fit(self, slots: int) -> None:
        """Do nothing: recency doesn't depend on the number of slots."""


class Window(Recency):
    """Keeps the neurons that the last k tokens used, which is the rule of "LLM in a flash" (arXiv 2312.11514,
    3.1).

    k is the largest window that fits, or 1, so it shrinks under memory pressure. A smaller window would save
    no reads, and might cause some. The paper drops neurons outside the window at once. Here they keep their
    slots until these are needed, and are evicted first, in no order.
    """

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__(widths)
        self._window = np.float32(np.inf)
        """k, in tokens."""

    def scores(self, layer: int) -> Float32:
        used = super().scores(layer)
        return np.where(used > self._tokens[layer] - self._window, used, np.float32(-np.inf))

    def fit(self, slots: int) -> None:
        ages = np.concatenate(
            [np.float32(tokens) - used for tokens, used in zip(self._tokens, self._used, strict=True)]
        )
        # Tokens since the most recent use that doesn't fit; a neuron that the newest token used has age 0.
        longest = np.partition(ages, slots)[slots] if slots < ages.size else np.float32(np.inf)
        self._window = max(longest, np.float32(1))


class Frequency:
    """Keeps the neurons that fired most often, by a decayed count. It starts at each layer's `frequencies`
    (F,), if known.
    """

    def __init__(self, widths: Sequence[int], frequencies: Sequence[Float32] | None = None) -> None:
        self._fired = known_frequencies(widths, frequencies)

    def observe(self, layer: int, gates: Float32) -> None:
        decayed_mean(self._fired[layer], FREQUENCY_DECAY, fires(gates))

    def scores(self, layer: int) -> Float32:
        scores: Float32 = self._fired[layer]
        return scores

    def fit(self, slots: int) -> None:
        """Do nothing: counts don't depend on the number of slots."""


class GateScore:
    """Keeps neurons by a score: how often a neuron fired over many tokens, plus how near its gate recently
    came to firing.

    A gate just below zero is likelier to fire next than one far below. Gates are measured in units of their
    layer's root mean square, so a score means the same in every layer and model. The slow count starts at
    each layer's `frequencies` (F,), if known; a separate constant term of them gives fewer hits.
    """

    def __init__(self, widths: Sequence[int], frequencies: Sequence[Float32] | None = None) -> None:
        self._fired = known_frequencies(widths, frequencies)
        self._near = known_frequencies(widths, None)

    def observe(self, layer: int, gates: Float32) -> None:
        decayed_mean(self._fired[layer], SLOW_DECAY, fires(gates))
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            scale = np.sqrt(np.mean(gates * gates, axis=1, keepdims=True))
            # NaN counts as far below zero.
            near = np.fmin(np.fmax(np.float32(0.5) + gates / scale, 0), 1)
        decayed_mean(self._near[layer], FAST_DECAY, near)

    def scores(self, layer: int) -> Float32:
        scores: Float32 = self._fired[layer] + np.float32(GATE_WEIGHT) * self._near[layer]
        return scores

    def fit(self, slots: int) -> None:
        """Do nothing: scores don't depend on the number of slots."""


def make_policy(
    name: PolicyName, widths: Sequence[int], frequencies: Sequence[Float32] | None = None
) -> Policy:
    """The policy called `name`, before it has seen a token.

    frequencies: for each layer, (F,) share of tokens, from 0 to 1, for which each neuron fired on some text.
    Policies that count start with them; policies of recency can't use them.
    """
    if name == "lru":
        return Recency(widths)
    if name == "window":
        return Window(widths)
    if name == "frequency":
        return Frequency(widths, frequencies)
    return GateScore(widths, frequencies)


def fires(gates: Float32) -> np.ndarray:
    """Whether each gate or score is above zero or NaN, as booleans of the same shape."""
    return ~(gates <= 0)


def selected(scores: Float32) -> Int32:
    """Ascending ids of the neurons that at least one token of scores (T, F) selects."""
    ids = np.empty(scores.shape[1], dtype=np.int32)
    return ids[: _native.select(scores, ids)]


def known_frequencies(widths: Sequence[int], frequencies: Sequence[Float32] | None) -> list[Float32]:
    """Each layer's frequencies in new arrays, zeros if they aren't known. Raises ValueError for
    wrong shapes.
    """
    if frequencies is None:
        return [np.zeros(neurons, dtype=np.float32) for neurons in widths]
    given = [len(shares) for shares in frequencies]
    if given != list(widths):
        raise ValueError(f"frequencies of {given} neurons aren't those of {list(widths)}")
    return [shares.astype(np.float32) for shares in frequencies]


def decayed_mean(mean: Float32, decay: float, values: np.ndarray) -> None:
    """Update the decayed mean (F,) in place with `values` (T, F)."""
    tokens = len(values)
    if tokens == 1:
        mean *= np.float32(decay)
        mean += np.float32(1 - decay) * values[0]
        return
    weights = ((1 - decay) * decay ** np.arange(tokens - 1, -1, -1)).astype(np.float32)
    mean *= np.float32(decay**tokens)
    mean += weights @ values.astype(np.float32)
