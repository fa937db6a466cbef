"""The definition of quantisation to 4 to 8 bits: every bit of what the native kernel stores, in numpy.

Legend: R rows, C columns, G groups of 32 or 64 columns.
"""

from __future__ import annotations

import numpy as np

from ondevice.bundle.codes import pack
from ondevice.bundle.matrix_layout import RowLayout
from ondevice.converters.quantize import (
    Float32,
    QuantizedRows,
    Stored,
    Weights,
    bad_values,
    row_format,
    to_float32,
)

CUTS = tuple(np.float32(cut) for cut in (0.0, 0.04, 0.08))
"""Shares of a group's range that the search's starting points cut off at an end."""
FITS = 4
"""Times that scale and bias are fitted to the codes by least squares."""


def quantize_reference(weights: Weights, stored: Stored, name: str = "weights") -> QuantizedRows:
    """The definition of `quantize`, in numpy. Each line is one float32 operation, in order.

    At 4, 5 and 6 bits, with top = 15, 31 and 63, for the n real columns of a group (padding takes no part),
    sums running over them in order:

        low, high = min(w), max(w);  range = |high - low|
        nine starts, for cut_low in CUTS, for cut_high in CUTS:
            scale = range * (1 - cut_low - cut_high) / top
            bias  = low + cut_low * range
        a tenth start: as at 8 bits, with this top
        from the best start, FITS times, with t = w - bias and q its codes:
            scale = (n * sum(q * t) - sum(q) * sum(t)) / (n * sum(q * q) - sum(q) * sum(q))
            bias  = bias + (sum(t) - scale * sum(q)) / n                 (least squares, given the codes)

    Each scale and bias is rounded to float16 and widened again before it is used, and

        q     = round_half_even(clip((w - bias) * (1 / scale), 0, top)), or 0 where scale is 0
        error = sum((scale * q - (w - bias))^2)

    The first scale and bias with the least error are stored; an error that isn't finite is never the least.

    At 8 bits, with top = 255:

        scale     = (high - low) / top, negated unless |low| > |high|
        bias      = low if |low| > |high| else high        (the end of the range that is further from zero)
        q0        = round_half_even(bias / scale), or 0 where scale is 0
        scale     = bias / q0 where q0 isn't 0             (so that zero has a code of its own)
        scale, bias are rounded to float16, and widened again
        q         = clip(round_half_even((w - bias) / scale), 0, top), or 0 where scale is 0

    In a group of zeros that bias keeps the sign of the group's first element. Padding has q = 0; a group of
    padding alone has scale and bias 0.
    At 16 bits the values are rounded to float16, and padding is 0.
    Raises CheckpointError if a value isn't finite as float16.
    """
    rows, cols = weights.shape
    layout = RowLayout(cols, *row_format(stored))
    bits, size = layout.bits, layout.group_size
    if bits == 16:
        return _half_reference(weights, layout.padded_cols, name)
    groups = -(-cols // size)
    w = np.zeros((rows, groups * size), dtype=np.float32)
    w[:, :cols] = to_float32(weights)
    w = w.reshape(rows, groups, size)
    real = np.arange(groups * size).reshape(groups, size) < cols
    with np.errstate(all="ignore"):
        if not np.isfinite(w.astype(np.float16)).all():
            raise bad_values(name)
        if bits < 8:
            top = (1 << bits) - 1
            fits, rest = [_fit_reference(w[:, : cols // size], top)], cols % size
            if rest:
                fits.append(_fit_reference(w[:, cols // size :, :rest], top))
            scale, bias = (np.concatenate(values, axis=1)[:, :, None] for values in zip(*fits, strict=True))
            q = _codes(w - bias, scale, top)
        else:
            low = np.where(real, w, np.inf).min(axis=2)
            high = np.where(real, w, -np.inf).max(axis=2)
            scale, bias = _range_reference(low, high, 255)
            bias = np.where(bias == 0, w[:, :, 0], bias)
            scale, bias = (x.astype(np.float16).astype(np.float32)[:, :, None] for x in (scale, bias))
            q = np.clip(np.rint((w - bias) / scale), np.float32(0), np.float32(255))
    all_codes = np.where((scale != 0) & real, q, 0).astype(np.uint8).reshape(rows, -1)
    codes = pack(all_codes, bits)
    codes = np.pad(codes, ((0, 0), (0, layout.codes_bytes - codes.shape[1])))
    empty = ((0, 0), (0, layout.groups - groups))
    scales, biases = (np.pad(x[:, :, 0].astype(np.float16), empty) for x in (scale, bias))
    return QuantizedRows(np.ascontiguousarray(codes), scales, biases)


def _fit_reference(w: Float32, top: int) -> tuple[Float32, Float32]:
    """Scale and bias, (R, G) float16 values as float32, of the groups w (R, G, n) at 4 to 6 bits."""
    low, high, n = w.min(axis=2), w.max(axis=2), np.float32(w.shape[2])
    width, one = np.abs(high - low), np.float32(1)
    best = np.stack([np.full_like(low, np.inf), np.zeros_like(low), np.zeros_like(low)])

    def try_out(scale: Float32, bias: Float32) -> tuple[Float32, Float32, Float32]:
        """Keep what is better than `best`. Returns the scale and bias as rounded, and the weights' codes."""
        scale, bias = (x.astype(np.float16).astype(np.float32) for x in (scale, bias))
        t = w - bias[:, :, None]
        q = _codes(t, scale[:, :, None], top)
        error = _sum_in_order((scale[:, :, None] * q - t) ** 2)
        np.copyto(best, np.stack([error, scale, bias]), where=error < best[0])
        return scale, bias, q

    for cut_low in CUTS:
        for cut_high in CUTS:
            try_out(width * (one - cut_low - cut_high) / np.float32(top), low + cut_low * width)
    try_out(*_range_reference(low, high, top))
    scale, bias = best[1], best[2]
    for _ in range(FITS):
        scale, bias, q = try_out(scale, bias)
        t = w - bias[:, :, None]
        sum_q, sum_t, sum_qq, sum_qt = (_sum_in_order(x) for x in (q, t, q * q, q * t))
        scale = (n * sum_qt - sum_q * sum_t) / (n * sum_qq - sum_q * sum_q)
        scale = scale.astype(np.float16).astype(np.float32)
        bias = bias + (sum_t - scale * sum_q) / n
    try_out(scale, bias)
    return best[1], best[2]


def _codes(t: Float32, scale: Float32, top: int) -> Float32:
    """Codes of t = w - bias, before padding is set to 0. A t that isn't a number has any code."""
    inverse = np.where(scale != 0, np.float32(1) / scale, np.float32(0))
    return np.rint(np.clip(t * inverse, np.float32(0), np.float32(top)))


def _sum_in_order(x: Float32) -> Float32:
    """Sums over the last axis, from its first element to its last."""
    total = np.zeros(x.shape[:-1], dtype=np.float32)
    for i in range(x.shape[-1]):
        total += x[..., i]
    return total


def _range_reference(low: Float32, high: Float32, top: int) -> tuple[Float32, Float32]:
    """Scale and bias, not rounded yet, of groups whose codes 0 to `top` span the range from low to high."""
    from_low = np.abs(low) > np.abs(high)
    scale = (high - low) / np.float32(top)
    scale = np.where(from_low, scale, -scale)
    bias = np.where(from_low, low, high)
    q0 = np.where(scale != 0, np.rint(bias / scale), np.float32(0))
    return np.where(q0 != 0, bias / q0, scale), bias


def _half_reference(weights: Weights, padded_cols: int, name: str) -> QuantizedRows:
    half = np.zeros((len(weights), padded_cols), dtype=np.float16)
    with np.errstate(over="ignore", under="ignore"):
        half[:, : weights.shape[1]] = to_float32(weights)
    if not np.isfinite(half).all():
        raise bad_values(name)
    empty = np.empty((len(weights), 0), dtype=np.float16)
    return QuantizedRows(half.view(np.uint8), empty, empty)
