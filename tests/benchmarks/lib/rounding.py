"""Ways of rounding a matrix to few bits in groups of columns, some of which use what its inputs look like.

All give the values that codes, scales and biases would stand for, each scale and bias in float16. A bundle
has groups of 64 and codes of 4 to 8 bits; other groups and bits are here to see what they would be worth.
Legend: R rows, C columns of a matrix, one input a column; F rows of a down projection as records hold it, one
input a row; G groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ondevice.backends.base import Float32
from tests.support.quantize_reference import CUTS

Float64 = NDArray[np.float64]
FITS = 4
DAMPING = 0.1
"""Share of the inputs' mean energy that is added to every input's, so that their matrix has an inverse."""


@dataclass(frozen=True)
class Format:
    """bits: of a code. group: columns that share a scale and a bias."""

    bits: int = 4
    group: int = 64

    @property
    def top(self) -> int:
        return (1 << self.bits) - 1

    @property
    def weight_bits(self) -> float:
        """Bits that a weight takes, with its share of scale and bias."""
        return self.bits + 32 / self.group

    def groups(self, cols: int) -> list[slice]:
        return [slice(start, min(start + self.group, cols)) for start in range(0, cols, self.group)]


Q4 = Format()


def to_range(weight: Float32, form: Format = Q4) -> Float32:
    """Codes span a group's range, and zero has a code of its own: the rounding of converter version 4."""
    found = np.empty_like(weight)
    for part in form.groups(weight.shape[1]):
        w = weight[:, part].astype(np.float64)
        scale, bias = _range(w, form.top)
        found[:, part] = scale[:, None] * _codes(w, scale, bias, form.top) + bias[:, None]
    return found


def least_squares(weight: Float32 | Float64, form: Format = Q4) -> Float32:
    """What `quantize_reference` does at 4 bits, in float64."""
    if weight.shape[1] > form.group and weight.shape[1] % form.group == 0:
        return least_squares(weight.reshape(-1, form.group), form).reshape(weight.shape)
    found = np.empty(weight.shape, np.float32)
    for part in form.groups(weight.shape[1]):
        w = weight[:, part].astype(np.float64)
        scale, bias = _fit(w, form.top)
        found[:, part] = scale[:, None] * _codes(w, scale, bias, form.top) + bias[:, None]
    return found


def with_feedback(weight: Float32, moments: Float64, form: Format = Q4) -> Float32:
    """GPTQ (arXiv 2210.17323): a column's rounding error is made up for by the columns after it.

    Scale and bias are fitted when a group's turn comes. moments: (C, C) of the inputs.
    """
    w, found = weight.astype(np.float64), np.empty(weight.shape)
    spread = _spread(moments)
    for part in form.groups(weight.shape[1]):
        scale, bias = _fit(w[:, part], form.top)
        for column in range(part.start, part.stop):
            code = _codes(w[:, column : column + 1], scale, bias, form.top)[:, 0]
            found[:, column] = scale * code + bias
            error = (w[:, column] - found[:, column]) / spread[column, column]
            w[:, column + 1 :] -= np.outer(error, spread[column, column + 1 :])
    return found.astype(np.float32)


def rows_with_feedback(
    weight: Float32, moments: Float64, form: Format = Q4, block: int | None = None
) -> Float32:
    """`with_feedback` for a down projection, whose rows are rounded each alone: errors go from row to row.

    Rows of much energy come first. moments: (F, F) of the inputs. block: rows that feed errors back to each
    other; by default all.
    """
    order = np.argsort(-np.diag(moments), kind="stable")
    found = np.empty_like(weight)
    for start in range(0, len(order), block or len(order)):
        rows = order[start : start + (block or len(order))]
        w, spread = weight[rows].astype(np.float64), _spread(moments[np.ix_(rows, rows)])
        for row in range(len(w)):
            rounded = least_squares(w[row : row + 1], form)[0]
            error = (w[row] - rounded) / spread[row, row]
            w[row + 1 :] -= np.outer(spread[row, row + 1 :], error)
            found[rows[row]] = rounded
    return found


def _half(x: Float64) -> Float64:
    return x.astype(np.float16).astype(np.float64)


def _codes(w: Float64, scale: Float64, bias: Float64, top: int) -> Float64:
    with np.errstate(all="ignore"):
        codes = np.clip(np.rint((w - bias[:, None]) / scale[:, None]), 0, top)
    return np.where(scale[:, None] != 0, codes, 0.0)


def _range(w: Float64, top: int) -> tuple[Float64, Float64]:
    low, high = w.min(axis=1), w.max(axis=1)
    with np.errstate(all="ignore"):
        scale = np.where(np.abs(low) > np.abs(high), high - low, low - high) / top
        bias = np.where(np.abs(low) > np.abs(high), low, high)
        zero = np.where(scale != 0, np.rint(bias / scale), 0)
        scale = np.where(zero != 0, bias / zero, scale)
    return _half(scale), _half(bias)


def _fit(w: Float64, top: int) -> tuple[Float64, Float64]:
    """Scale and bias (R,) of one group's weights (R, n): the search of `quantize_reference`."""
    low = w.min(axis=1)
    width = w.max(axis=1) - low
    best = np.stack([np.full(len(w), np.inf), np.zeros(len(w)), np.zeros(len(w))])

    def try_out(scale: Float64, bias: Float64) -> None:
        scale, bias = _half(scale), _half(bias)
        error = np.square(scale[:, None] * _codes(w, scale, bias, top) + bias[:, None] - w).sum(axis=1)
        np.copyto(best, np.stack([error, scale, bias]), where=error < best[0])

    for a in map(float, CUTS):
        for b in map(float, CUTS):
            try_out(width * (1 - a - b) / top, low + a * width)
    try_out(*_range(w, top))
    for _ in range(FITS):
        q = _codes(w, best[1], best[2], top)
        centred = q - q.mean(axis=1, keepdims=True)
        with np.errstate(all="ignore"):
            scale = (centred * w).sum(axis=1) / np.square(centred).sum(axis=1)
        try_out(scale, w.mean(axis=1) - _half(scale) * q.mean(axis=1))
    return best[1], best[2]


def _spread(moments: Float64) -> Float64:
    """Upper triangular U with U^T U the inverse of the damped moments."""
    damped = moments + DAMPING * max(float(np.trace(moments)) / len(moments), 1e-30) * np.eye(len(moments))
    return np.linalg.cholesky(np.linalg.inv(damped)).T
