"""From logits to the next token: pure functions, and the stop strings that end a text.

Sampling is Gumbel-max (Gumbel 1954; Maddison et al., arXiv 1411.0030): the token with the largest
`score + noise` is distributed exactly as softmax(score). The noise is a function of (seed, position, token
id), so plain decoding, draft verification and drafters see the same noise in any order.

Arithmetic is float64 in NumPy operations that IEEE 754 defines exactly. `log` and `exp` are defined here,
because NumPy's differ in the last bit between SIMD targets and between contiguous and strided arrays. NumPy's
faster ones find the few tokens that could win; the exact arithmetic decides.

V is the vocabulary size, N the number of tokens that survive the filters.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ondevice.config import SamplingConfig
from ondevice.errors import OndeviceError, UsageError
from ondevice.records import dataclass

Floats = npt.NDArray[np.float64]
TokenIds = npt.NDArray[np.int64]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
# ln 2 in two parts; the high one has 32 trailing zero bits, so its product with an exponent is exact.
_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
_TAYLOR = tuple(1.0 / math.factorial(n) for n in range(15))
_SQRT_HALF = 0.7071067811865476
NOISE_ERROR = 1e-3
"""Largest error of `near_noise`. Noise lies within 37 of 0, where float32 numbers are 4e-6 apart. NumPy's
`log` errs by a few such steps at most; this is more than 200."""
_CHUNK = 1 << 13
"""Tokens whose noise is computed at once, so that intermediate values stay in the processor's cache."""


@dataclass(frozen=True)
class Candidates:
    """The tokens that may be drawn: `token_ids` (N,), ascending, and `scores` (N,), logits after
    temperature.
    """

    token_ids: TokenIds
    scores: Floats


def sample(
    logits: npt.NDArray[np.float32],
    config: SamplingConfig,
    position: int,
    history: Sequence[int] | npt.NDArray[np.integer] = (),
    allowed: npt.NDArray[np.bool_] | None = None,
    prompt_tokens: int = 0,
) -> int:
    """The token at `position` (0 for the first token of the text, prompt included).

    logits: (V,) float32. history: ids so far, prompt and draft-tree ancestors included; only penalties read
    it. allowed: (V,) whether each token may be drawn; None: all. prompt_tokens: number of first ids of the
    history that the frequency and presence penalties don't count. Temperature 0 takes the largest score. Ties
    go to the lower id.
    Raises OndeviceError if a logit is NaN, or if no token has a score above minus infinity.
    """
    if config.temperature == 0.0:
        adjusted = _only(_adjust(logits, config, history, prompt_tokens), allowed)
        best = int(np.argmax(adjusted))
        # argmax stops at the first NaN, so the winner alone tells whether there is one.
        if not -np.inf < adjusted[best] < np.inf:
            raise _unusable(adjusted)
        return best
    return draw(process_logits(logits, config, history, allowed, prompt_tokens), seed_of(config), position)


def seed_of(config: SamplingConfig) -> int:
    """The config's seed. Raises UsageError if it has none; a generation sets one before it begins."""
    if config.seed is None:
        raise UsageError("there is no seed to draw by; SamplingConfig.seeded() gives one")
    return config.seed


def draw(candidates: Candidates, seed: int, position: int) -> int:
    """The candidate with the largest sum of score and `gumbel_noise`, ties to the lower id.

    The exact sum X is computed only for tokens whose approximate sum A comes near the largest, A(b). For
    every token |X - A| <= e = NOISE_ERROR + rounding. The winner j has X(j) >= X(b), so
    A(j) >= X(j) - e >= X(b) - e >= A(b) - 2 e: it is among the tokens within 2 e of A(b). Rounding is that of
    two sums, each within 2^-53 of its own size, which here is about that of A(b). 2^-50 covers them four
    times.
    """
    state, scores, token_ids = _noise_state(seed, position), candidates.scores, candidates.token_ids
    parts = [slice(start, start + _CHUNK) for start in range(0, scores.size, _CHUNK)]
    sums = [scores[part] + _near_noise(state, token_ids[part]) for part in parts]
    highest = max(part.max() for part in sums)
    least = highest - (2 * NOISE_ERROR + 2.0**-50 * abs(highest))
    near = np.concatenate([index * _CHUNK + np.flatnonzero(part >= least) for index, part in enumerate(sums)])
    ids = token_ids[near]
    if ids.size > 1:
        return int(ids[np.argmax(scores[near] + gumbel_noise(seed, position, ids))])
    return int(ids[0])


def process_logits(
    logits: npt.NDArray[np.float32],
    config: SamplingConfig,
    history: Sequence[int] | npt.NDArray[np.integer] = (),
    allowed: npt.NDArray[np.bool_] | None = None,
    prompt_tokens: int = 0,
) -> Candidates:
    """The tokens left after penalties, bias, temperature, top-k, top-p and min-p, applied in this order.

    Arguments are as in `sample`; `allowed` applies before all filters. At temperature 0, filters select as at
    temperature 1.
    Raises OndeviceError as `sample` does, UsageError for a bias or history id outside the vocabulary.
    """
    scores = _only(_adjust(logits, config, history, prompt_tokens), allowed).astype(np.float64)
    scores /= config.temperature or 1.0
    highest = scores.max()
    if not -np.inf < highest < np.inf:
        raise _unusable(scores)
    # Filters mark what they leave out in place: with copies, a large vocabulary would take megabytes more.
    if 0 < config.top_k < np.count_nonzero(scores > -np.inf):
        scores[~_largest(scores, config.top_k)] = -np.inf
    if config.top_p < 1.0:
        scores[~_nucleus(scores, config.top_p)] = -np.inf
    if config.min_p > 0.0:
        scores[scores < highest + _log(np.array([config.min_p]))[0]] = -np.inf
    ids = np.flatnonzero(scores > -np.inf)
    return Candidates(ids, scores if ids.size == scores.size else scores[ids])


def log_probabilities(
    logits: npt.NDArray[np.float32], token: int, most: int
) -> tuple[float, tuple[tuple[int, float], ...]]:
    """Log-probability of a token, and the `most` likeliest tokens with theirs, likeliest first.

    logits: (V,) float32, finite or minus infinity, as the model gives them: before penalties, bias and
    temperature. Natural logarithms, log softmax(logits). Ties go to the lower id.
    """
    scores = logits.astype(np.float64)
    scores -= scores.max()
    scores -= _log(_exp(scores).cumsum()[-1:])[0]
    if most == 0:
        return float(scores[token]), ()
    ids = np.flatnonzero(_largest(scores, min(most, scores.size)))
    ids = ids[np.argsort(-scores[ids], kind="stable")]
    return float(scores[token]), tuple((int(each), float(scores[each])) for each in ids)


def gumbel_noise(seed: int, position: int, token_ids: TokenIds) -> Floats:
    """Standard Gumbel noise (N,) of the tokens at `position`. Each depends only on (seed, position, id).

    Token i gets output i (from 0) of the SplitMix64 generator (Steele et al., OOPSLA 2014) whose state is
    `mix(mix(seed) + position)`; its top 52 bits, centred in their cell, are u in (0, 1), and the noise is
    -log(-log(u)).
    """
    return -_log(-_log(_uniform(_noise_state(seed, position), token_ids)))


def near_noise(seed: int, position: int, token_ids: TokenIds) -> npt.NDArray[np.float32]:
    """`gumbel_noise` (N,) within NOISE_ERROR, many times faster. For ranking, never for deciding.

    Its last bits differ between machines, and depend on the other tokens in the call.
    """
    return _near_noise(_noise_state(seed, position), token_ids)


def _near_noise(state: int, token_ids: TokenIds) -> npt.NDArray[np.float32]:
    uniform = _uniform(state, token_ids)
    # For u near 1, where the noise is large, -log(u) needs float64 to differ from 0. The second log doesn't.
    np.log(uniform, out=uniform)
    noise = np.negative(uniform).astype(np.float32)
    np.log(noise, out=noise)
    return np.negative(noise, out=noise)


def _noise_state(seed: int, position: int) -> int:
    return _mix_integer((_mix_integer(seed) + position) & _MASK)


def _uniform(state: int, token_ids: TokenIds) -> Floats:
    """Exact uniform values u (N,) of the tokens, as `gumbel_noise` defines them."""
    words = token_ids.astype(np.uint64)
    words += np.uint64(1)
    words *= np.uint64(_GOLDEN)
    words += np.uint64(state)
    shifted = np.empty_like(words)
    for shift, factor in _MIX:
        words ^= np.right_shift(words, np.uint64(shift), out=shifted)
        words *= np.uint64(factor)
    words ^= np.right_shift(words, np.uint64(31), out=shifted)
    words >>= np.uint64(12)
    uniform = words.astype(np.float64)
    uniform += 0.5
    uniform *= 2.0**-52
    return uniform


def _mix_integer(value: int) -> int:
    """SplitMix64's output function, on one integer below 2^64."""
    for shift, factor in _MIX:
        value = ((value ^ (value >> shift)) * factor) & _MASK
    return value ^ (value >> 31)


def _adjust(
    logits: npt.NDArray[np.float32],
    config: SamplingConfig,
    history: Sequence[int] | npt.NDArray[np.integer],
    prompt_tokens: int,
) -> npt.NDArray[np.float32]:
    """Logits after repetition penalty (Keskar et al., arXiv 1909.05858), count penalties and bias.

    It is a copy if any of them acts.
    """
    penalised = config.penalises and len(history) > 0
    if not penalised and not config.logit_bias:
        return logits
    adjusted = logits.copy()
    if penalised:
        history, prompt_tokens = penalised_ids(config, history, prompt_tokens)
        ids = _checked_ids(np.asarray(history, dtype=np.int64), logits.size)
        penalty = np.float32(config.repetition_penalty)
        # The original logits are gathered, so an id that occurs twice is penalised once.
        seen = logits[ids]
        adjusted[ids] = np.where(seen < 0, seen * penalty, seen / penalty)
        if config.counts_tokens:
            counted, amounts = count_penalties(config, ids[prompt_tokens:])
            adjusted[counted] -= amounts
    if config.logit_bias:
        pairs = dict(config.logit_bias)
        if wrong := [token for token in pairs if not 0 <= token < logits.size]:
            raise UsageError(
                f"logit_bias names token {wrong[0]}; ids of this model run from 0 to {logits.size - 1}"
            )
        ids = np.fromiter(pairs, np.int64, len(pairs))
        biases = np.fromiter(pairs.values(), np.float32, len(pairs))
        adjusted[ids] += biases
    return adjusted


def penalised_ids(
    config: SamplingConfig, history: Sequence[int] | npt.NDArray[np.integer], prompt_tokens: int
) -> tuple[Sequence[int] | npt.NDArray[np.integer], int]:
    """The newest ids of `history` that penalties look at, and how many of them belong to the prompt.

    prompt_tokens: number of first ids of `history` that belong to the prompt.
    """
    older = 0 if config.repeat_last_n < 0 else max(0, len(history) - config.repeat_last_n)
    return (history[older:], max(0, prompt_tokens - older)) if older else (history, prompt_tokens)


def count_penalties(config: SamplingConfig, generated: TokenIds) -> tuple[TokenIds, npt.NDArray[np.float32]]:
    """The distinct ids (N,) of the text after the prompt, ascending, and how much each one's logit is
    reduced, (N,).

    generated: ids in any order. The logit of a token that occurs n times is reduced by `n * frequency_penalty
    + presence_penalty`.
    """
    ids, counts = np.unique(generated, return_counts=True)
    return ids, (counts * config.frequency_penalty + config.presence_penalty).astype(np.float32)


def _only(scores: npt.NDArray[np.float32], allowed: npt.NDArray[np.bool_] | None) -> npt.NDArray[np.float32]:
    """The scores, with minus infinity for tokens that aren't allowed."""
    return scores if allowed is None else np.where(allowed, scores, np.float32(-np.inf))


def _checked_ids(ids: TokenIds, vocab_size: int) -> TokenIds:
    if ids.min() < 0 or ids.max() >= vocab_size:
        wrong = ids[(ids < 0) | (ids >= vocab_size)][0]
        raise UsageError(f"history names token {wrong}; ids of this model run from 0 to {vocab_size - 1}")
    return ids


def _unusable(scores: npt.NDArray[np.float32] | Floats) -> OndeviceError:
    broken = np.flatnonzero(np.isnan(scores))
    if broken.size:
        return OndeviceError(
            f"{broken.size} of {scores.size} logits are NaN (the first is token {broken[0]}); "
            "the weights or the computation are damaged: run `ondevice verify` on the model"
        )
    if scores.max() == np.inf:
        return OndeviceError(f"the logit of token {scores.argmax()} is infinite; run `ondevice verify`")
    return OndeviceError(
        "every token is ruled out (all logits are minus infinity); relax logit_bias or the constraint"
    )


def _largest(values: Floats, count: int) -> npt.NDArray[np.bool_]:
    """A mask of the `count` largest values. Among equal values, those with lower indices come first."""
    # Many equal values, as those that a filter left out, make a partition ten times slower.
    finite, cut = values[values > -np.inf], -np.inf
    if count <= finite.size:
        finite.partition(finite.size - count)
        cut = finite[finite.size - count]
    del finite
    mask: npt.NDArray[np.bool_] = values > cut
    tied = np.flatnonzero(values == cut)
    mask[tied[: count - np.count_nonzero(mask)]] = True
    return mask


def _nucleus(scores: Floats, top_p: float) -> npt.NDArray[np.bool_]:
    """Mask (N,) of the smallest set of likeliest tokens that holds `top_p` of the probability.

    Nucleus sampling, Holtzman et al., arXiv 1904.09751. The token that crosses `top_p` is included.
    """
    highest, likely, count, total = scores.max(), scores[scores > -np.inf], 0, 0.0
    least = 0.5 * (1.0 - top_p) / likely.size
    for start in range(0, likely.size, _CHUNK):
        weights = _exp(likely[start : start + _CHUNK] - highest)
        total = np.append(total, weights).cumsum()[-1]
        # Tokens below (1 - p) / n hold less than 1 - p together (weights sum to 1 or more), so they aren't in
        # the nucleus. Leaving them out makes the sort short.
        weights = weights[weights >= least]
        likely[count : count + weights.size] = weights
        count += weights.size
    # Negative weights ascend where weights descend: sorting and summing in place need no other array.
    sums = np.negative(likely[:count], out=likely[:count])
    sums.sort()
    np.cumsum(sums, out=sums)
    needed = int(np.searchsorted(np.negative(sums, out=sums), top_p * total)) + 1
    del likely, sums
    return _largest(scores, min(needed, count))


def _log(x: Floats) -> Floats:
    """Natural logarithm of positive finite float64, within 2 ulp: 2 artanh((m - 1) / (m + 1)) + e ln 2."""
    mantissa, exponent = np.frexp(x)
    low = mantissa < _SQRT_HALF
    mantissa = np.where(low, mantissa + mantissa, mantissa)
    exponent = (exponent - low).astype(np.float64)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square = s * s
    series = np.full_like(s, 1.0 / 23.0)
    for odd in range(21, 2, -2):
        series *= square
        series += 1.0 / odd
    series *= square
    return exponent * _LN2_HIGH + (exponent * _LN2_LOW + 2.0 * (s * series)) + 2.0 * s


def _exp(x: Floats) -> Floats:
    """Exponential of float64 (N,) at or below 0, within 2 ulp. Values under -700 count as -700."""
    powers = np.empty_like(x)
    # In pieces, as five arrays of a large vocabulary's size would be tens of megabytes.
    for start in range(0, x.size, _CHUNK):
        part = slice(start, start + _CHUNK)
        powers[part] = _exp_piece(x[part])
    return powers


def _exp_piece(x: Floats) -> Floats:
    x = np.maximum(x, -700.0)
    power = np.rint(x * 1.4426950408889634)
    remainder = (x - power * _LN2_HIGH) - power * _LN2_LOW
    series = np.full_like(x, _TAYLOR[-1])
    for coefficient in _TAYLOR[-2::-1]:
        series *= remainder
        series += coefficient
    return np.ldexp(series, power.astype(np.int32))


class StopMatcher:
    """Cuts streamed text before the first stop string, and holds back text that may become one.

    The match that ends first wins; of several that end there, the longest. The result is the same however
    the text is cut into pieces, even into single characters.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """stops: stop strings, none empty; SamplingConfig checks that."""
        self._stops = tuple(stops)
        self._held = ""
        self._taken = self._returned = 0
        """Characters of the text."""
        self._begins: deque[int] = deque()
        """Where the newest pieces begin, of which nothing has been returned."""
        self.stopped = False
        self.matched: str | None = None
        """The stop string that ended the text."""

    def add(self, text: str) -> str:
        """Take more text. Returns the text that is now known to precede any stop string; empty once
        `stopped`.
        """
        if self.stopped:
            return ""
        if not self._stops:
            return text
        self._begins.append(self._taken)
        self._taken += len(text)
        self._held += text
        match = self._first_match()
        if match is not None:
            self.stopped = True
            cut = match
        else:
            cut = len(self._held) - self._prefix_length()
        ready, self._held = self._held[:cut], "" if self.stopped else self._held[cut:]
        self._returned += cut
        while self._begins and self._begins[0] < self._returned:
            self._begins.popleft()
        return ready

    def finish(self) -> str:
        """The text that is still held back, when the text ends without a stop string."""
        ready, self._held = self._held, ""
        if not self.stopped:
            self._begins.clear()
        return ready

    @property
    def held(self) -> int:
        """Number of the newest pieces of text of which nothing has been returned yet."""
        return len(self._begins)

    def _first_match(self) -> int | None:
        """The start of the match that ends first in the held text, or None."""
        matches = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if not matches:
            return None
        end, start = min(matches)
        self.matched = self._held[start:end]
        return start

    def _prefix_length(self) -> int:
        """The length of the longest end of the held text that is the beginning of a stop string."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0
