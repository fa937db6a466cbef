"""Group-affine quantisation of weight rows, `w = scale * q + bias`, and its error.

The native kernel does the work. `tests/support/quantize_reference.py` defines every bit of its result, and is
what tests compare it with. Legend: R rows, C columns, G groups of 32 or 64 columns. A format given only as a
number of bits has groups of 64.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ondevice.bundle.codes import (
    E2M1,
    E8M0_NAN,
    MAX_POWER,
    powers,
    unpack,
    values_of_table,
    values_of_two_levels,
)
from ondevice.bundle.matrix_layout import RowLayout
from ondevice.config import GROUP_SIZE, SUPER_SIZE, Bits, RowFormat
from ondevice.errors import CheckpointError
from ondevice.kernels import _native

Weights = NDArray[Any]
"""(R, C) weights in a checkpoint's own type: float32, float16, or uint16 with bfloat16 bits."""

Float32 = NDArray[np.float32]
Stored: TypeAlias = RowFormat | Bits
_SAMPLED_ROWS = 4


@dataclass(frozen=True)
class QuantizedRows:
    """Rows in the form that a bundle stores, with columns zero-padded to a multiple of 64.

    codes: uint8 (R, padded_cols * bits / 8), packed as MLX does: without gaps, low bits first. scales,
    biases: float16 (R, G). At 16 bits, codes hold float16 values and there are no scales and biases (G = 0).
    Biases that aren't stored are (R, 0). MXFP4 has uint8 scales; two levels of scales are the bytes of
    headers, uint8 (R, C / 256 * header_bytes).
    """

    codes: NDArray[np.uint8]
    scales: NDArray[np.float16] | NDArray[np.uint8]
    biases: NDArray[np.float16]


@dataclass(frozen=True)
class RoundedRows:
    """Rows that were rounded before they are stored, with their errors.

    cols: logical columns. squares: float64 (R, 2), sums over each row of (stored - exact)^2 and exact^2.
    """

    rows: QuantizedRows
    cols: int
    squares: NDArray[np.float64]

    def taken(self, picks: slice | NDArray[np.int64]) -> RoundedRows:
        """Some of the rows, in the order of `picks`."""
        rows = self.rows
        picked = QuantizedRows(rows.codes[picks], rows.scales[picks], rows.biases[picks])
        return RoundedRows(picked, self.cols, self.squares[picks])


@dataclass(frozen=True)
class SourceCodes:
    """Rows of a quantised checkpoint, as codes that a bundle can hold unchanged.

    codes: as in QuantizedRows, in the bundle's format. scales, biases: float16 (R, G), or float32 if float16
    might not hold them: exactly the checkpoint's values, for the groups of the format. Biases that aren't
    stored are (R, 0). MXFP4 has uint8 scales, two levels of scales are headers, as in QuantizedRows.
    """

    codes: NDArray[np.uint8]
    scales: NDArray[Any]
    biases: NDArray[Any]


def in_columns(
    rows: Weights | SourceCodes | RoundedRows, start: int, stop: int, stored: RowFormat
) -> Weights | SourceCodes | RoundedRows:
    """Columns [start, stop) of rows (R, C). start: a multiple of 64, or of 256 with two levels of scales."""
    if isinstance(rows, RoundedRows):
        parts = (rows.rows.codes, rows.rows.scales, rows.rows.biases)
        share = (stop - start) / rows.cols
        cut = QuantizedRows(*_cut_parts(parts, start, stop, stored))
        return RoundedRows(cut, stop - start, rows.squares * share)
    if isinstance(rows, SourceCodes):
        return SourceCodes(*_cut_parts((rows.codes, rows.scales, rows.biases), start, stop, stored))
    return rows[:, start:stop]


def _cut_parts(
    parts: tuple[NDArray[Any], ...], start: int, stop: int, stored: RowFormat
) -> Iterator[NDArray[Any]]:
    """Yields the codes, the scales or headers, and the biases of the groups that contain columns [start,
    stop).
    """
    unit = SUPER_SIZE if stored.two_levels else GROUP_SIZE
    per_group = unit // stored.group_size
    first, last = start // unit, -(-stop // unit)
    scales = stored.header_bytes if stored.two_levels else per_group
    for values, each in zip(parts, (unit * stored.bits // 8, scales, per_group), strict=True):
        yield values[:, first * each : last * each]


class EncodedColumns(Protocol):
    """Columns of a checkpoint's matrix (C, columns) that are still encoded and will become rows (R, C)."""

    @property
    def shape(self) -> tuple[int, int]: ...

    def taken(self, start: int, stop: int) -> EncodedColumns:
        """Columns [start, stop) of these columns. start: a multiple of 16."""
        ...

    def quantised(self, runner: _native.Runner, stored: RowFormat) -> QuantizedRows | None:
        """The rows that `quantize` would return with 4 to 8 bits; None where it would raise
        CheckpointError.
        """
        ...

    def decoded(self, picks: NDArray[np.int64]) -> NDArray[np.float32]:
        """Rows `picks` of the decoded matrix, (picks, C)."""
        ...


def padded_codes(
    codes: NDArray[np.uint8], scales: NDArray[Any], biases: NDArray[Any], layout: RowLayout
) -> SourceCodes:
    """Codes, scales and biases of rows, zero-padded to full groups as in `layout`."""
    more = ((0, 0), (0, layout.groups - scales.shape[1]))
    if layout.groups == scales.shape[1]:
        return SourceCodes(codes, scales, biases)
    biases = np.pad(biases, more) if layout.stored.has_biases else biases
    codes = np.pad(codes, ((0, 0), (0, layout.codes_bytes - codes.shape[1])))
    return SourceCodes(codes, np.pad(scales, more), biases)


def row_format(stored: Stored) -> RowFormat:
    """The row format that `stored` means. A number of bits stands for a format with groups of 64."""
    return stored if isinstance(stored, RowFormat) else RowFormat(stored)


def store_codes(source: SourceCodes, stored: Stored, name: str) -> QuantizedRows:
    """The source's codes unchanged, with scales and biases rounded to float16.

    Raises CheckpointError, which names the tensor, for scales and biases (including implied ones) that are
    beyond float16, and for scales of MXFP4 that are beyond float32.
    """
    if row_format(stored).mxfp4:
        if source.scales.max(initial=0) > MAX_POWER:
            raise CheckpointError(
                f"{name} has an MXFP4 scale of {source.scales.max()}; at most {MAX_POWER} keeps every value "
                f"within float32, and {E8M0_NAN} means NaN; the checkpoint is damaged, download it again"
            )
        return QuantizedRows(source.codes, source.scales, source.biases)
    if row_format(stored).two_levels:
        _check_headers(source.scales, row_format(stored), name)
        return QuantizedRows(source.codes, source.scales, source.biases)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        scales, biases = (x.astype(np.float16, copy=False) for x in (source.scales, source.biases))
    # An implied bias is a power of two times the scale: it adds bits - 1 to the exponent.
    more = row_format(stored).bits - 1 if row_format(stored).implied_bias else 0
    limit = np.uint16((31 - more) << 10)
    if ((scales.view(np.uint16) & 0x7FFF) >= limit).any() or not np.isfinite(biases).all():
        raise bad_values(name)
    return QuantizedRows(source.codes, scales, biases)


def _check_headers(headers: NDArray[np.uint8], stored: RowFormat, name: str) -> None:
    """Check headers (R, bytes). Raises CheckpointError unless every float16 in them is finite."""
    each = headers.reshape(-1, stored.header_bytes)[:, : stored.upper_bytes]
    if not np.isfinite(np.ascontiguousarray(each).view(np.float16)).all():
        raise bad_values(name)


def quantize(runner: _native.Runner, weights: Weights, stored: Stored, name: str) -> QuantizedRows:
    """Rows quantised to 4 to 8 bits, or rounded to float16 (16 bits). `weights` may be a transposed view.

    Biases are chosen freely, so the format must not imply them.

    Raises CheckpointError, which names the tensor, for NaN, infinity and values beyond float16.
    """
    rows, cols = weights.shape
    layout = RowLayout(cols, *row_format(stored))
    codes = np.empty((rows, layout.codes_bytes), dtype=np.uint8)
    scales, biases = (np.empty((rows, layout.scales_bytes // 2), dtype=np.uint16) for _ in range(2))
    if not _native.quantize_rows(runner, weights, layout.stored, codes, scales, biases):
        raise bad_values(name)
    return QuantizedRows(codes, scales.view(np.float16), biases.view(np.float16))


def dequantize(rows: QuantizedRows | SourceCodes, stored: Stored, cols: int) -> NDArray[np.float32]:
    """The values of quantised rows, (R, cols) float32."""
    layout = row_format(stored)
    if layout.bits == 16:
        return rows.codes.view(np.float16)[:, :cols].astype(np.float32)
    q = unpack(rows.codes, layout.bits)
    if layout.mxfp4:
        return (E2M1[q] * np.repeat(powers(rows.scales), layout.group_size, axis=1))[:, :cols]
    if layout.two_levels:
        return values_of_two_levels(q, rows.scales.view(np.uint8), layout)[:, :cols]
    if layout.scales == "table":
        return values_of_table(q, rows.scales, layout)[:, :cols]
    biases = np.float32(-layout.zero) * rows.scales if layout.implied_bias else rows.biases
    scale, bias = (np.repeat(x.astype(np.float32), layout.group_size, axis=1) for x in (rows.scales, biases))
    return (scale * q.astype(np.float32) + bias)[:, :cols]


def to_float32(weights: Weights) -> NDArray[np.float32]:
    """Checkpoint values as exact float32; uint16 is read as bfloat16."""
    if weights.dtype == np.uint16:
        return (weights.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return weights.astype(np.float32)


@dataclass(frozen=True)
class SquaredError:
    """Sums over a sample of weights: (stored - exact)^2 and exact^2."""

    error: float = 0.0
    weight: float = 0.0

    def __add__(self, other: SquaredError) -> SquaredError:
        return SquaredError(self.error + other.error, self.weight + other.weight)

    @property
    def relative(self) -> float:
        """The root-mean-square error divided by the root-mean-square weight.

        It is rounded to three significant digits, which are the same on every machine, whatever its order of
        summation.
        """
        if self.weight == 0.0:
            return 0.0
        return float(f"{(self.error / self.weight) ** 0.5:.3g}")


def quantize_encoded(
    runner: _native.Runner, source: EncodedColumns, stored: RowFormat, name: str
) -> QuantizedRows:
    """Encoded columns quantised to 4 to 8 bits, as `quantize` would. Raises CheckpointError as it does."""
    rows = source.quantised(runner, stored)
    if rows is None:
        raise bad_values(name)
    return rows


def sampled_error(
    runner: _native.Runner,
    source: Weights | SourceCodes | EncodedColumns,
    rows: QuantizedRows,
    stored: Stored,
    copied: bool = False,
) -> SquaredError:
    """The quantisation error of a few evenly spaced rows. Measuring all rows would take longer than
    quantising.

    copied: whether the rows are the source's codes, stored with all their scales and biases unchanged.
    """
    picks = _sampled_rows(len(rows.codes))
    chosen = QuantizedRows(rows.codes[picks], rows.scales[picks], rows.biases[picks])
    values = _dequantized(runner, chosen, stored)
    if copied:
        return SquaredError(0.0, _squares(values.astype(np.float64)))
    if isinstance(source, SourceCodes):
        taken = SourceCodes(source.codes[picks], source.scales[picks], source.biases[picks])
        cols = taken.codes.shape[1] * 8 // row_format(stored).bits
        exact = dequantize(taken, stored, cols).astype(np.float64)
    elif isinstance(source, np.ndarray):
        exact = to_float32(source[picks]).astype(np.float64)
    else:
        exact = source.decoded(picks).astype(np.float64)
    return SquaredError(_squares(values[:, : exact.shape[1]] - exact), _squares(exact))


@lru_cache
def _sampled_rows(count: int) -> NDArray[np.int64]:
    """Indices of the rows, evenly spaced among `count`, whose error is measured."""
    return np.linspace(0, count - 1, min(_SAMPLED_ROWS, count)).astype(np.int64)


def _squares(values: NDArray[np.float64]) -> float:
    """The sum of the squares of values (R, C)."""
    return float(np.einsum("ij,ij->", values, values))


def _dequantized(runner: _native.Runner, rows: QuantizedRows, stored: Stored) -> NDArray[np.float32]:
    """The values of rows at 2 to 8 bits, (R, padded_cols). The kernels compute them if they know
    the format.
    """
    cols = rows.codes.shape[1] * 8 // row_format(stored).bits
    if row_format(stored).tiles_only:
        return dequantize(rows, stored, cols)
    parts = rows.codes, rows.scales.view(np.uint8), rows.biases.view(np.uint8)
    out = np.empty((len(rows.codes), cols), dtype=np.float32)
    _native.dequantize_rows(runner, row_format(stored), np.concatenate(parts, axis=1), cols, out)
    return out


def bad_values(name: str) -> CheckpointError:
    """The error about a tensor that has values which no format can hold."""
    return CheckpointError(
        f"{name} holds NaN, infinity, or values beyond float16 (65504); the checkpoint is damaged or was not "
        "saved properly; download it again, or save it again in float32 with finite weights"
    )
