"""From what a drafter thinks of a place in the text to guesses at the token that will be drawn there.

Greedy decoding takes the likeliest, so guesses are ranked by probability. Sampling adds noise that is known
ahead, being keyed by position: a drafter that adds the same noise guesses what the target will draw as often
as the two agree, however random the draw (Gumbel-max coupling).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ondevice.backends.base import Float32
from ondevice.config import SamplingConfig
from ondevice.kernels import _native
from ondevice.sampling import near_noise, seed_of
from ondevice.speculation.drafter import Sureness

MOST_GUESSES = 8
NOISY_TOKENS = 128
"""Of the likeliest tokens, those that noise is computed for: it seldom lifts another above all of them."""
LEADS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Limits of the leads that the first guess has over the second, in units of the score: how sure it is."""
FIRST_PRIORS = (0.3, 0.35, 0.45, 0.6, 0.75, 0.9)
"""By lead: how sure the first guess is at first; each further one is half as sure as the one before it."""
TokenIds = npt.NDArray[np.int64]


class Ranking:
    """Guesses for one drafter's places, and how often those of each rank and lead have been right."""

    def __init__(self, most: int = MOST_GUESSES) -> None:
        """most: guesses for a place."""
        self._most = most
        self._sampling = SamplingConfig()
        # By the first guess's lead, then by rank: what is left by a sure one is little.
        self._sureness = [
            [Sureness(prior)] + [Sureness((1 - prior) * 0.5**rank) for rank in range(1, most)]
            for prior in FIRST_PRIORS
        ]

    def begin(self, sampling: SamplingConfig) -> None:
        """How the text's tokens will be drawn from here on."""
        self._sampling = sampling

    def rank(self, logits: Float32, position: int, history: Sequence[int] = ()) -> list[tuple[int, float]]:
        """Guesses at the token at `position` of the text, likeliest first, with their chances.

        logits: (V,) what the drafter thinks of it. history: the ids before it, which a repetition penalty
        reads. Greedy: the drafter's own probabilities. Sampled: what guesses so ranked have come to.
        """
        ids, scores, level = self._scores(logits, position, history)
        if self._sampling.temperature == 0.0:
            chances = [min(1.0, math.exp(score - level)) for score in scores.tolist()]
            return list(zip(ids.tolist(), chances, strict=True))
        sureness = self._sureness[_lead(scores)]
        return [(token, sure.chance) for token, sure in zip(ids.tolist(), sureness, strict=False)]

    def judge(self, logits: Float32, position: int, token: int, history: Sequence[int] = ()) -> None:
        """`token` was drawn at `position`: learn how good `rank` of the same was."""
        if self._sampling.temperature == 0.0:
            return
        ids, scores, _ = self._scores(logits, position, history)
        for guess, sureness in zip(ids.tolist(), self._sureness[_lead(scores)], strict=False):
            sureness.count(guess == token)

    def _scores(
        self, logits: Float32, position: int, history: Sequence[int]
    ) -> tuple[TokenIds, Float32, float]:
        """The best tokens (at most `most`,), what each is ranked by, best first, and the logits' level."""
        sampling, penalised = self._sampling, self._sampling.repetition_penalty != 1.0 and len(history)
        if sampling.temperature == 0.0 and not penalised:
            return largest(logits, self._most)
        ids, _, level = largest(logits, NOISY_TOKENS)
        ids = np.sort(ids)
        scores = logits[ids]
        if penalised:
            seen = np.isin(ids, np.asarray(history))
            penalty = np.float32(sampling.repetition_penalty)
            scores[seen] = np.where(scores[seen] < 0, scores[seen] * penalty, scores[seen] / penalty)
        if sampling.temperature:
            scores = scores / np.float32(sampling.temperature) + near_noise(seed_of(sampling), position, ids)
        best = np.argsort(-scores, kind="stable")[: self._most]
        return ids[best], scores[best], level


def largest(values: Float32, count: int) -> tuple[TokenIds, Float32, float]:
    """The `count` largest of values (V,), or all, largest first, ties to the lower index.

    Returns their indices, the values themselves, and the logarithm of the sum of exp(value) over all of V.
    """
    ids = np.empty(min(count, values.size), dtype=np.int32)
    found = np.empty(ids.size, dtype=np.float32)
    total = _native.largest(values, ids, found)
    return ids.astype(np.int64), found, float(found[0]) + math.log(total)


def _lead(scores: Float32) -> int:
    """Which of LEADS the first score's lead over the second lies below."""
    lead = scores[0] - scores[1] if len(scores) > 1 else np.inf
    return sum(lead >= limit for limit in LEADS)
