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
from ondevice.kernels import _native
from ondevice.sparsity.policies import known_frequencies

SLOW_DECAY = 0.95
"""Decay per token of the share of tokens that chose an expert."""
FAST_DECAY = 0.5
"""Decay per token of the same over the last few tokens."""
FAST_WEIGHT = 0.5
REMEMBERED_TOKENS = 256
"""W. The longer, the better the forecast: 64 cost up to 0.6 points of hits, 32 up to 1.6."""
SIMILAR_TOKENS = 16
"""Past tokens that the forecast is made from."""
TOKEN_DECAY = 0.02
"""What a layer's likeness still counts one token later: most is told by the dozen layers before."""
SHARPNESS = 10.0
"""A past token whose path is like the newest in all chosen experts weighs e^10 as much as one in none."""
AHEAD_WEIGHTS = tuple(0.5**turn for turn in range(4))
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
        fade = TOKEN_DECAY ** (1 / layers)
        self._native = _native.ReuseScores(
            experts,
            chosen,
            REMEMBERED_TOKENS,
            SIMILAR_TOKENS,
            SLOW_DECAY,
            FAST_DECAY,
            FAST_WEIGHT,
            fade,
            SHARPNESS,
            AHEAD_WEIGHTS,
        )
        self._slow = np.stack(known_frequencies([experts] * layers, frequencies))
        self._fast = np.zeros((layers, experts), dtype=np.float32)
        self._scores = self._slow.copy()
        self._past = np.zeros((layers, chosen, REMEMBERED_TOKENS), dtype=np.int32)
        """Each layer's choices for the last tokens, the newest first."""
        self._seen = [0] * layers
        """Tokens of each layer that are remembered."""
        self._alike = np.zeros(REMEMBERED_TOKENS, dtype=np.float32)
        """By n: how like the newest token's path that of the n-th token before it is, from 0 to 1."""
        turns = np.arange(layers, dtype=np.float32) + 1
        self._nearness = np.sqrt(layers / turns)
        """By the number of layers until a layer's turn, less one: what a slot until then is worth."""

    def observe(self, layer: int, gates: Float32) -> None:
        """Learn from gates (T, E), above 0 for the chosen, of the tokens after those seen so far."""
        # In one native call: between layers, numpy's many small ones find nothing in the processor's caches.
        self._seen[layer] = self._native.observe(
            np.ascontiguousarray(gates),
            self._slow[layer],
            self._fast[layer],
            self._scores[layer],
            self._past[layer],
            self._seen[layer],
            self._alike,
        )

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


def history_bytes(chosen: int) -> int:
    """Bytes that a layer's remembered tokens take."""
    return 4 * chosen * REMEMBERED_TOKENS
