"""Chooses draft tokens by a drafter's logits: the tokens that the target is likely to draw.

Greedy decoding takes the likeliest token, so candidates are ranked by probability. Sampling adds noise that
depends only on the position, and is therefore known in advance. A drafter that adds the same noise proposes
the token that the target draws, if their logits agree (Gumbel-max coupling).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ondevice.backends.base import Float32
from ondevice.config import SamplingConfig
from ondevice.kernels import _native
from ondevice.sampling import count_penalties, near_noise, penalised_ids, seed_of
from ondevice.speculation.drafter import AcceptanceRate

MAX_CANDIDATES = 8
"""Maximum draft tokens for a place."""
NOISY_TOKENS = 128
"""Number of likeliest tokens for which noise is computed. It seldom lifts another token above them all."""
LEADS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Bounds of the bins of the first candidate's lead over the second, in units of the score."""
FIRST_PRIORS = (0.3, 0.35, 0.45, 0.6, 0.75, 0.9)
"""Prior acceptance rate of the first candidate, by bin of its lead. Each further one's is half the last's."""
TokenIds = npt.NDArray[np.int64]


class Ranking:
    """Ranks the candidates of one drafter, and measures how often each rank and each lead is accepted."""

    def __init__(self, max_candidates: int = MAX_CANDIDATES, tokens: TokenIds | None = None) -> None:
        """tokens: ascending ids of the tokens that the logits are for, which are the only candidates; None:
        the complete vocabulary.
        """
        self._max_candidates = max_candidates
        self._tokens = tokens
        self._sampling = SamplingConfig()
        self._prompt_tokens = 0
        # By the first candidate's lead, then by rank: a likely first one leaves little chance to the others.
        self._acceptance = [
            [AcceptanceRate(prior)]
            + [AcceptanceRate((1 - prior) * 0.5**rank) for rank in range(1, max_candidates)]
            for prior in FIRST_PRIORS
        ]

    def begin(self, sampling: SamplingConfig, prompt_tokens: int = 0) -> None:
        """Rank for tokens drawn with `sampling` from now on, of a text whose prompt has `prompt_tokens`."""
        self._sampling, self._prompt_tokens = sampling, prompt_tokens

    def rank(self, logits: Float32, position: int, history: Sequence[int] = ()) -> list[tuple[int, float]]:
        """Candidates for the token at `position` of the text, likeliest first, with their chances.

        Chances are the drafter's probabilities in greedy decoding, and measured acceptance rates in sampling.

        logits: the drafter's, (V,), or (n,) for `tokens`. history: the ids before `position`, for penalties.
        """
        ids, scores, level = self._scores(logits, position, history)
        if self._sampling.temperature == 0.0:
            chances = [min(1.0, math.exp(score - level)) for score in scores.tolist()]
            return list(zip(ids.tolist(), chances, strict=True))
        rates = self._acceptance[_lead_bin(scores)]
        return [(token, rate.value) for token, rate in zip(ids.tolist(), rates, strict=False)]

    def judge(self, logits: Float32, position: int, token: int, history: Sequence[int] = ()) -> None:
        """Update acceptance rates with `token`, which was drawn at `position`. The other arguments are as in
        `rank`.
        """
        if self._sampling.temperature == 0.0:
            return
        ids, scores, _ = self._scores(logits, position, history)
        for candidate, rate in zip(ids.tolist(), self._acceptance[_lead_bin(scores)], strict=False):
            rate.observe(candidate == token)

    def _scores(
        self, logits: Float32, position: int, history: Sequence[int]
    ) -> tuple[TokenIds, Float32, float]:
        """The ids and the scores of the best tokens, best first, and the log-sum-exp of the logits."""
        sampling = self._sampling
        penalised = sampling.penalises and len(history)
        if sampling.temperature == 0.0 and not penalised:
            ids, scores, level = largest(logits, self._max_candidates)
            return self._ids(ids), scores, level
        ids, _, level = largest(logits, NOISY_TOKENS)
        ids = np.sort(ids)
        scores = logits[ids]
        ids = self._ids(ids)
        if penalised:
            newest, prompt_tokens = penalised_ids(sampling, history, self._prompt_tokens)
            known = np.asarray(newest, dtype=np.int64)
            seen = np.isin(ids, known)
            penalty = np.float32(sampling.repetition_penalty)
            scores[seen] = np.where(scores[seen] < 0, scores[seen] * penalty, scores[seen] / penalty)
            if sampling.counts_tokens:
                counted, amounts = count_penalties(sampling, known[prompt_tokens:])
                _, at, of = np.intersect1d(ids, counted, assume_unique=True, return_indices=True)
                scores[at] -= amounts[of]
        if sampling.temperature:
            scores = scores / np.float32(sampling.temperature) + near_noise(seed_of(sampling), position, ids)
        best = np.argsort(-scores, kind="stable")[: self._max_candidates]
        return ids[best], scores[best], level

    def _ids(self, indices: TokenIds) -> TokenIds:
        """The ids of the tokens at these indices of the logits."""
        return indices if self._tokens is None else self._tokens[indices]


def largest(values: Float32, count: int) -> tuple[TokenIds, Float32, float]:
    """The `count` largest of values (V,), or all, largest first. Of equal values, the one with the lower
    index comes first.

    Returns their indices, the values themselves, and the logarithm of the sum of exp(value) over all of V.
    """
    ids = np.empty(min(count, values.size), dtype=np.int32)
    top = np.empty(ids.size, dtype=np.float32)
    total = _native.largest(values, ids, top)
    return ids.astype(np.int64), top, float(top[0]) + math.log(total)


def _lead_bin(scores: Float32) -> int:
    """The index in LEADS of the range that contains the first score's lead over the second."""
    lead = scores[0] - scores[1] if len(scores) > 1 else np.inf
    return sum(lead >= limit for limit in LEADS)
