"""Ways of rounding a matrix to 4 bits in groups of 64, some of which use what the matrix's inputs look like.

All give the values that a bundle's codes, scales and biases stand for: its format and size are the same.
Legend: R rows, C columns of a matrix, one input a column; F rows of a down projection as records hold it, one
input a row; G groups.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ondevice.backends.base import Float32
from ondevice.config import GROUP_SIZE
from ondevice.converters.quantize import CUTS, dequantize, quantize
from ondevice.kernels import _native

Float64 = NDArray[np.float64]
TOP = 15
FITS = 4
DAMPING = 0.01
"""Share of the inputs' mean energy that is added to every input's, so that their matrix has an inverse."""


def to_range(weight: Float32) -> Float32:
    """Codes span a group's range, and zero has a code of its own: the rounding of converter version 4."""
    found = np.empty_like(weight)
    for part in _groups(weight.shape[1]):
        w = weight[:, part].astype(np.float64)
        low, high = w.min(axis=1), w.max(axis=1)
        with np.errstate(all="ignore"):
            scale = np.where(np.abs(low) > np.abs(high), high - low, low - high) / TOP
            bias = np.where(np.abs(low) > np.abs(high), low, high)
            zero = np.where(scale != 0, np.rint(bias / scale), 0)
            scale = np.where(zero != 0, bias / zero, scale)
        scale, bias = _half(scale), _half(bias)
        found[:, part] = scale[:, None] * _codes(w, scale, bias) + bias[:, None]
    return found


def least_squares(weight: Float32) -> Float32:
    """The converter's own rounding."""
    rows = quantize(_native.Runner(1), np.ascontiguousarray(weight), 4, "a matrix")
    return dequantize(rows, 4, weight.shape[1])


def weighted(weight: Float32, moments: Float64) -> Float32:
    """Least squares, a column's error weighted by its input's energy. moments: (C, C) of the inputs."""
    found, energy = np.empty_like(weight), np.diag(moments)
    for part in _groups(weight.shape[1]):
        w = weight[:, part].astype(np.float64)
        scale, bias = _fit(w, energy[part])
        found[:, part] = scale[:, None] * _codes(w, scale, bias) + bias[:, None]
    return found


def with_feedback(weight: Float32, moments: Float64) -> Float32:
    """GPTQ (arXiv 2210.17323): a column's rounding error is made up for by the columns after it.

    Scale and bias are those of `weighted`, fitted when a group's turn comes. moments: (C, C) of the inputs.
    """
    w, found = weight.astype(np.float64), np.empty(weight.shape)
    spread = _spread(moments)
    for part in _groups(weight.shape[1]):
        scale, bias = _fit(w[:, part], np.diag(moments)[part])
        for column in range(part.start, part.stop):
            code = _codes(w[:, column : column + 1], scale, bias)[:, 0]
            found[:, column] = scale * code + bias
            error = (w[:, column] - found[:, column]) / spread[column, column]
            w[:, column + 1 :] -= np.outer(error, spread[column, column + 1 :])
    return found.astype(np.float32)


def rows_with_feedback(weight: Float32, moments: Float64) -> Float32:
    """`with_feedback` for a down projection, whose rows are rounded each alone: errors go from row to row.

    Rows of much energy come first. moments: (F, F) of the inputs. Rows are whole groups, or less than one.
    """
    order = np.argsort(-np.diag(moments), kind="stable")
    w, rounded = weight[order].astype(np.float64), np.empty(weight.shape)
    spread = _spread(moments[np.ix_(order, order)])
    width = min(GROUP_SIZE, weight.shape[1])
    for row in range(len(w)):
        groups = w[row].reshape(-1, width)
        scale, bias = _fit(groups, np.ones(width))
        rounded[row] = (scale[:, None] * _codes(groups, scale, bias) + bias[:, None]).reshape(-1)
        error = (w[row] - rounded[row]) / spread[row, row]
        w[row + 1 :] -= np.outer(spread[row, row + 1 :], error)
    found = np.empty_like(weight)
    found[order] = rounded
    return found


def _groups(cols: int) -> list[slice]:
    return [slice(start, min(start + GROUP_SIZE, cols)) for start in range(0, cols, GROUP_SIZE)]


def _half(x: Float64) -> Float64:
    return x.astype(np.float16).astype(np.float64)


def _codes(w: Float64, scale: Float64, bias: Float64) -> Float64:
    with np.errstate(all="ignore"):
        codes = np.clip(np.rint((w - bias[:, None]) / scale[:, None]), 0, TOP)
    return np.where(scale[:, None] != 0, codes, 0.0)


def _fit(w: Float64, energy: Float64) -> tuple[Float64, Float64]:
    """Scale and bias (R,) of one group's weights (R, n): the search of `quantize_reference`, weighted."""
    low = w.min(axis=1)
    width = w.max(axis=1) - low
    energy = energy + max(1e-30, 1e-6 * float(energy.mean()))
    starts = [
        (width * (1 - a - b) / TOP, low + a * width) for a in map(float, CUTS) for b in map(float, CUTS)
    ]
    best = np.stack([np.full(len(w), np.inf), np.zeros(len(w)), np.zeros(len(w))])

    def try_out(scale: Float64, bias: Float64) -> None:
        scale, bias = _half(scale), _half(bias)
        error = np.square(scale[:, None] * _codes(w, scale, bias) + bias[:, None] - w) @ energy
        np.copyto(best, np.stack([error, scale, bias]), where=error < best[0])

    for scale, bias in starts:
        try_out(scale, bias)
    for _ in range(FITS):
        q = _codes(w, best[1], best[2])
        total = energy.sum()
        mean_q, mean_w = q @ energy / total, w @ energy / total
        centred = q - mean_q[:, None]
        with np.errstate(all="ignore"):
            scale = (centred * w) @ energy / (np.square(centred) @ energy)
        try_out(scale, mean_w - _half(scale) * mean_q)
    return best[1], best[2]


def _spread(moments: Float64) -> Float64:
    """Upper triangular U with U^T U the inverse of the damped moments."""
    damped = moments + DAMPING * max(float(np.trace(moments)) / len(moments), 1e-30) * np.eye(len(moments))
    return np.linalg.cholesky(np.linalg.inv(damped)).T
