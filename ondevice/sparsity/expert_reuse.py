"""The cache policy for experts: it uses how often and how recently an expert was chosen, and what followed
similar tokens.

A token's path is the experts that it used in all layers. A score combines two decayed means of an expert's
use with a forecast: the layer's choices after those past tokens whose paths were most similar to the newest
one's. No constant needs to be exact, see docs/experts.md.

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
"""Decay per token of the same share over the last few tokens."""
FAST_WEIGHT = 0.5
"""Weight of the fast mean in an expert's score."""
REMEMBERED_TOKENS = 256
"""W. Longer memories forecast better: 64 costs up to 0.6 points of hits, 32 up to 1.6."""
SIMILAR_TOKENS = 16
"""Past tokens that a forecast is made from."""
TOKEN_DECAY = 0.02
"""Decay per token of a layer's part in the similarity of paths: the dozen layers before tell most."""
SHARPNESS = 10.0
"""A past token that shares all experts with the newest weighs e^SHARPNESS times one that shares none."""
AHEAD_WEIGHTS = tuple(0.5**distance for distance in range(4))
"""Weights of the tokens after a similar past token, the nearest first."""


class ExpertReuse:
    """The scores of one model's experts: a `policies.Policy`, with `pool_scores` for a cache that layers
    share.

    Args:
        layers: L, layers with experts.
        experts: E.
        chosen: k. If a token has more experts, those with the highest gates count.
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
        self._similarity = np.zeros(REMEMBERED_TOKENS, dtype=np.float32)
        """By n: similarity of the newest token's path to that of the n-th token before it, from 0 to 1."""
        distances = np.arange(layers, dtype=np.float32) + 1
        self._nearness = np.sqrt(layers / distances)
        """Worth of a slot for a layer that comes next, after one other layer, and so on."""

    def observe(self, layer: int, gates: Float32) -> None:
        """Learn from the gates (T, E) of the next tokens; a gate is above 0 if the expert was chosen."""
        # One native call, as numpy's many small ones miss the processor's caches between layers.
        self._seen[layer] = self._native.observe(
            np.ascontiguousarray(gates),
            self._slow[layer],
            self._fast[layer],
            self._scores[layer],
            self._past[layer],
            self._seen[layer],
            self._similarity,
        )

    def scores(self, layer: int) -> Float32:
        """The scores of experts, (E,). A higher score means that the expert is likelier to be chosen next."""
        scores: Float32 = self._scores[layer]
        return scores

    def pool_scores(self, layer: int) -> Float32:
        """The worth of a slot for each expert just after `layer`, (L * E,). Higher for layers that come
        sooner.
        """
        layers = len(self._scores)
        until = (np.arange(layers) - layer - 1) % layers
        scores: Float32 = (self._scores * self._nearness[until, None]).ravel()
        return scores

    def fit(self, slots: int) -> None:
        """Do nothing: scores don't depend on the number of slots."""


def history_bytes(chosen: int) -> int:
    """Bytes that the remembered tokens of a layer take."""
    return 4 * chosen * REMEMBERED_TOKENS
