"""The cache policy of experts: how often and how lately an expert was chosen, and what followed like tokens.

A token's path through the layers tells much about the next token's, where the text has had such a path before
(a word, a place in a sentence). So beside two decayed means of an expert's use there is a forecast: what the
layer chose after the past tokens whose paths were most like the newest one's. Nothing but what routers chose
is seen. Every constant has a wide plateau, see docs/experts.md.

Legend: L layers, T tokens, E experts of a layer, k chosen for a token, W tokens that are remembered.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ondevice.backends.base import Float32
from ondevice.sparsity.policies import decayed_mean, fires, known_frequencies

SLOW_DECAY = 0.95
"""Decay per token of the share of tokens that chose an expert."""
FAST_DECAY = 0.5
"""Decay per token of the same over the last few tokens."""
FAST_WEIGHT = np.float32(0.5)
REMEMBERED_TOKENS = 256
"""W. The longer, the better the forecast: 64 cost up to 0.6 points of hits, 32 up to 1.6."""
SIMILAR_TOKENS = 16
"""Past tokens that the forecast is made from."""
TOKEN_DECAY = 0.02
"""What a layer's likeness still counts one token later: most is told by the dozen layers before."""
SHARPNESS = np.float32(10)
"""A past token whose path is like the newest in all chosen experts weighs e^10 as much as one in none."""
AHEAD_WEIGHTS = tuple(np.float32(0.5**turn) for turn in range(4))
"""What the next turns after a past token count."""


class ExpertReuse:
    """Scores for one model's experts, as `policies.Policy`; `pool_scores` for a cache that layers share.

    Args:
        layers: L, layers with experts.
        experts: E.
        chosen: k; of more the highest count, and fewer aren't expected.
        frequencies: for each layer, (E,) share of tokens, from 0 to 1, that chose each expert on some text.
    """

    def __init__(
        self, layers: int, experts: int, chosen: int, frequencies: Sequence[Float32] | None = None
    ) -> None:
        self._chosen = chosen
        self._slow = np.stack(known_frequencies([experts] * layers, frequencies))
        self._fast = np.zeros((layers, experts), dtype=np.float32)
        self._scores = self._slow.copy()
        self._past = np.zeros((layers, chosen, REMEMBERED_TOKENS), dtype=np.int32)
        """Each layer's choices for the last tokens, the newest first."""
        self._seen = [0] * layers
        """Tokens of each layer that are remembered."""
        self._alike = np.zeros(REMEMBERED_TOKENS, dtype=np.float32)
        """By n: how like the newest token's path that of the n-th token before it is, from 0 to 1."""
        self._fade = np.float32(TOKEN_DECAY ** (1 / layers))
        turns = np.arange(layers, dtype=np.float32) + 1
        self._nearness = np.sqrt(layers / turns)
        """By the number of layers until a layer's turn, less one: what a slot until then is worth."""

    def observe(self, layer: int, gates: Float32) -> None:
        """Learn from gates (T, E), above 0 for the chosen, of the tokens after those seen so far."""
        gates = gates[fires(gates).any(axis=1)]
        if not len(gates):
            return
        ids = np.argpartition(-gates, self._chosen - 1, axis=1)[:, : self._chosen].astype(np.int32)
        used = np.zeros(gates.shape, dtype=np.float32)
        used[np.arange(len(ids))[:, None], ids] = 1
        decayed_mean(self._slow[layer], SLOW_DECAY, used)
        decayed_mean(self._fast[layer], FAST_DECAY, used)
        new, past = min(len(ids), REMEMBERED_TOKENS), self._past[layer]
        past[:, new:] = past[:, : REMEMBERED_TOKENS - new].copy()
        past[:, :new] = ids[: -new - 1 : -1].T
        self._seen[layer] = min(self._seen[layer] + new, REMEMBERED_TOKENS)
        self._scores[layer] = self._slow[layer] + FAST_WEIGHT * self._fast[layer]
        if self._seen[layer] > 1:
            self._scores[layer] += self._forecast(layer, used[-1])

    def scores(self, layer: int) -> Float32:
        """(E,) scores: the higher, the likelier to be chosen in the next turns."""
        scores: Float32 = self._scores[layer]
        return scores

    def pool_scores(self, layer: int) -> Float32:
        """(L * E,) worth of a slot for each expert just after `layer`: more, the sooner its turn comes."""
        layers = len(self._scores)
        until = (np.arange(layers) - layer - 1) % layers
        scores: Float32 = (self._scores * self._nearness[until, None]).ravel()
        return scores

    def fit(self, slots: int) -> None:
        """Scores don't depend on the number of slots."""

    def _forecast(self, layer: int, used: Float32) -> Float32:
        """(E,) what the layer chose after the tokens most like the newest, which chose `used` (E,)."""
        count = self._seen[layer]
        past = self._past[layer, :, :count]
        self._alike *= self._fade
        alike = self._alike[1:count]
        alike += (1 - self._fade) / self._chosen * used[past[:, 1:]].sum(axis=0)
        best = np.arange(len(alike))
        if len(alike) > SIMILAR_TOKENS:
            best = np.argpartition(alike, -SIMILAR_TOKENS)[-SIMILAR_TOKENS:]
        weights = np.exp(SHARPNESS * (alike[best] - alike[best].max()))
        follows = np.zeros(count + len(AHEAD_WEIGHTS), dtype=np.float32)
        """By n: weight of what the n-th token before the newest chose, as it comes after a token like it."""
        follows[best] = weights / weights.sum()
        worth = AHEAD_WEIGHTS[0] * follows[:count]
        for turn, weight in enumerate(AHEAD_WEIGHTS[1:], 1):
            worth += weight * follows[turn : turn + count]
        told = np.flatnonzero(worth)
        chosen = past[:, told]
        found = np.bincount(chosen.ravel(), np.tile(worth[told], self._chosen), minlength=len(used))
        return found.astype(np.float32)


def history_bytes(chosen: int) -> int:
    """Bytes that a layer's remembered tokens take."""
    return 4 * chosen * REMEMBERED_TOKENS
