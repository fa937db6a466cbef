"""Routing: the experts of each token and their weights, from a router's logits.

`route` is in numpy, by additions, multiplications and divisions of single values, so that a row's result has
the same bits on every machine and with any other rows. Legend: T tokens, E experts, k chosen for a token.
"""

from __future__ import annotations

import math
from functools import cached_property, lru_cache
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from ondevice.backends.base import Float32, Int32
from ondevice.kernels import _native
from ondevice.model_config import ExpertsSpec
from ondevice.model_config.experts import Scoring
from ondevice.records import dataclass

Float64 = NDArray[np.float64]

_LOG2_E = 1.4426950408889634
_LN2_HIGH, _LN2_LOW = 0.6931471803691238, 1.9082149292705877e-10
"""The natural logarithm of 2 in two parts; the first has few digits, so that it is multiplied exactly."""
_EXP_TERMS = tuple(1.0 / math.factorial(n) for n in range(13, -1, -1))
"""Coefficients of exp's series, enough for arguments up to ln(2) / 2 in float64."""
_MIN_EXPONENT = -700.0
FEW = 8
"""Largest number of values that are faster one by one (10 us) than as an array (18 us)."""


@dataclass(frozen=True)
class Routing:
    """The experts of T tokens.

    ids: (T, k), ascending in each row. weights: (T, k). count: E.
    """

    ids: Int32
    weights: Float32
    count: int

    @cached_property
    def experts(self) -> Int32:
        """The distinct experts of all tokens, ascending."""
        return self.ids[0] if len(self.ids) == 1 else np.unique(self.ids)

    def rows_of(self, expert: int) -> tuple[NDArray[np.intp], Float32]:
        """The tokens that go to an expert, ascending, (n,), and its weight for each, (n, 1)."""
        rows, places = np.nonzero(self.ids == expert)
        return rows, self.weights[rows, places, None]

    @property
    def gates(self) -> Float32:
        """(T, E), 1 for a token's experts and -1 for others."""
        gates = np.full((len(self.ids), self.count), -1.0, dtype=np.float32)
        gates[_each_row(self.ids), self.ids] = 1.0
        return gates


def route(
    logits: Float32, spec: ExpertsSpec, choice_bias: Float32 | None = None, scales: Float32 | None = None
) -> Routing:
    """The chosen experts of each token, and their weights, from logits (T, E), which stay unchanged.

    choice_bias: (E,). scales: (E,), factors of weights.
    """
    if spec.scoring == "sparsemixer":
        return _sparsemixer(logits, spec)
    scores = logits if spec.scoring == "softmax" else sigmoid(logits)
    choice = scores if choice_bias is None else scores + choice_bias
    among = choice if spec.groups == 1 else _of_best_groups(choice, spec)
    ids = np.sort(_highest(among, spec.chosen), axis=1)
    return _weighted(ids, logits, scores, spec, scales)


def native_route(
    logits: Float32, spec: ExpertsSpec, choice_bias: Float32 | None = None, scales: Float32 | None = None
) -> Routing:
    """`route` in the native library, with the same bits."""
    shape = len(logits), spec.chosen
    ids, weights = np.empty(shape, dtype=np.int32), np.empty(shape, dtype=np.float32)
    _router(spec).route(logits, choice_bias, scales, ids, weights)
    return Routing(ids, weights, spec.count)


@lru_cache
def _router(spec: ExpertsSpec) -> _native.Router:
    return _native.Router(
        get_args(Scoring).index(spec.scoring),
        spec.count,
        spec.chosen,
        spec.renormalised,
        spec.factor,
        spec.groups,
        spec.chosen_groups,
        spec.jitter,
        spec.group_best,
    )


def _weighted(
    ids: Int32, logits: Float32, scores: Float32, spec: ExpertsSpec, scales: Float32 | None
) -> Routing:
    """The routing of tokens to their experts `ids` (T, k), ascending in each row, with weights from the
    scores.
    """
    weights = scores[_each_row(ids), ids].astype(np.float64)
    if spec.scoring == "softmax":
        highest = logits.max(axis=1, keepdims=True)
        if spec.renormalised:
            weights = exp(weights - highest)
        else:
            shares = exp(logits.astype(np.float64) - highest)
            weights = shares[_each_row(ids), ids] / _sums(shares)
    if spec.renormalised:
        weights /= _sums(weights) + (1e-20 if spec.scoring == "sigmoid" else 0.0)
    weights = weights * spec.factor if scales is None else weights * spec.factor * scales[ids]
    return Routing(ids, weights.astype(np.float32), spec.count)


def sigmoid(x: Float32) -> Float32:
    """1 / (1 + e^-x), rounded from float64. Values of x below -700 count as -700."""
    if x.size <= FEW:
        each = [1.0 / (1.0 + _exp_of_one(min(-value, -_MIN_EXPONENT))) for value in x.ravel().tolist()]
        return np.array(each, dtype=np.float32).reshape(x.shape)
    return (1.0 / (1.0 + exp(np.minimum(-x, np.float32(-_MIN_EXPONENT))))).astype(np.float32)


def exp(x: NDArray[np.floating]) -> Float64:
    """e^x in float64 for x up to 700. Values of x below -700 count as -700."""
    wide = np.maximum(x.astype(np.float64), _MIN_EXPONENT)
    twos = np.rint(wide * _LOG2_E)
    rest = (wide - twos * _LN2_HIGH) - twos * _LN2_LOW
    total = np.full_like(rest, _EXP_TERMS[0])
    for term in _EXP_TERMS[1:]:
        total *= rest
        total += term
    # NaN stays NaN, whatever its power of two.
    return np.ldexp(total, np.fmax(twos, 2.0 * _MIN_EXPONENT).astype(np.int32))


def _exp_of_one(x: float) -> float:
    """`exp` of one number, computed by the same steps."""
    if math.isnan(x):
        return x
    wide = max(x, _MIN_EXPONENT)
    twos = float(round(wide * _LOG2_E))
    rest = (wide - twos * _LN2_HIGH) - twos * _LN2_LOW
    total = float(_EXP_TERMS[0])
    for term in _EXP_TERMS[1:]:
        total = total * rest + float(term)
    return math.ldexp(total, int(twos))


def _each_row(ids: Int32) -> NDArray[np.intp]:
    """Row numbers, (T, 1), that index a matrix together with column ids (T, k)."""
    return np.arange(len(ids))[:, None]


def _highest(scores: Float32, count: int) -> Int32:
    """(T, count): the column indices of each row's highest scores. Among equal scores the first ones win."""
    return np.argsort(-scores, axis=1, kind="stable")[:, :count].astype(np.int32)


def _of_best_groups(choice: Float32, spec: ExpertsSpec) -> Float32:
    """Scores (T, E) with -inf outside a token's best groups of experts."""
    grouped = choice.reshape(len(choice), spec.groups, -1)
    two = np.sort(grouped, axis=2)[:, :, -2:]
    worth = two[:, :, 1] if spec.group_best == 1 else two[:, :, 1] + two[:, :, 0]
    best = _highest(worth, spec.chosen_groups)
    among = np.full_like(grouped, -np.inf)
    for row, groups in enumerate(best):
        among[row, groups] = grouped[row, groups]
    return among.reshape(choice.shape)


def _sparsemixer(logits: Float32, spec: ExpertsSpec) -> Routing:
    """A token's two experts, each chosen in a separate step (arXiv 2409.12136, as in its authors' code)."""
    left = logits.astype(np.float64)
    ids, weights = [], []
    for _ in range(spec.chosen):
        chosen = _highest(left.astype(np.float32), 1)
        highest = np.take_along_axis(left, chosen, axis=1)
        with np.errstate(invalid="ignore", divide="ignore"):
            distance = (highest - logits) / np.maximum(np.abs(logits), highest)
            near = ~(distance > 2.0 * spec.jitter) & np.isfinite(left)
        shares = np.where(near, exp(np.where(near, left - highest, 0.0)), 0.0)
        ids.append(chosen)
        weights.append(1.0 / _sums(shares))
        np.put_along_axis(left, chosen, -np.inf, axis=1)
    chosen, shares = np.concatenate(ids, axis=1), np.concatenate(weights, axis=1)
    order = np.argsort(chosen, axis=1, kind="stable")
    shares = np.take_along_axis(shares, order, axis=1) * spec.factor
    return Routing(np.take_along_axis(chosen, order, axis=1), shares.astype(np.float32), spec.count)


def _sums(values: Float64) -> Float64:
    """Sums (T, 1) over the last axis of (T, n), in the order of `row_sums.row_sums`."""
    total = values.copy()
    width = total.shape[1]
    while width > 1:
        half = -(-width // 2)
        total[:, : width - half] += total[:, half:width]
        width = half
    return total[:, :1].copy()
