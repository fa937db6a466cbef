"""The place of every byte of a stored row, and of a matrix that is stored as tiles.

Pure arithmetic; `weights/README.md` is the specification.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np

from ondevice.config import GROUP_SIZE, SUPER_SIZE, CodeBits, GroupSize, RowFormat, Scales
from ondevice.records import dataclass

TILE_ROWS = 16
"""Interleaved rows of a matrix that is stored as the kernels multiply it."""


def padded(n: int, multiple: int) -> int:
    """`n` rounded up to a multiple of `multiple`."""
    return -(-n // multiple) * multiple


class HalfRange(NamedTuple):
    """Where float16 values lie: `times` ranges of bytes, first [start, stop), then each one `step` bytes
    further on.

    mxfp4: whether they hold scales of MXFP4 instead, a byte each.
    """

    start: int
    stop: int
    step: int = 0
    times: int = 1
    mxfp4: bool = False

    def shifted(self, offset: int) -> HalfRange:
        """The ranges `offset` bytes further on."""
        return self._replace(start=self.start + offset, stop=self.stop + offset)


@dataclass(frozen=True)
class RowLayout:
    """One stored row of `cols` logical elements: [codes | scales | biases], or float16 values at 16 bits.

    bits, group_size, scales: as in RowFormat; implied biases take no bytes. With two levels of scales, which
    exist only in tiles, the scales are headers, one for every 256 columns.
    """

    cols: int
    bits: CodeBits
    group_size: GroupSize = 64
    scales: Scales = "affine"

    @cached_property
    def stored(self) -> RowFormat:
        return RowFormat(self.bits, self.group_size, self.scales)

    @property
    def mxfp4(self) -> bool:
        return self.stored.mxfp4

    @property
    def implied_bias(self) -> bool:
        return self.stored.implied_bias

    @property
    def scale_type(self) -> np.dtype[np.generic]:
        """The type of a scale and a bias: float16, or a byte in MXFP4 and in headers."""
        return np.dtype(np.uint8 if self.mxfp4 or self.stored.two_levels else np.float16)

    @property
    def padded_cols(self) -> int:
        return padded(self.cols, GROUP_SIZE)

    @property
    def groups(self) -> int:
        return self.padded_cols // self.group_size

    @property
    def codes_bytes(self) -> int:
        return self.padded_cols * self.bits // 8

    @cached_property
    def scales_bytes(self) -> int:
        """Bytes of the scales; 0 at 16 bits."""
        if self.stored.two_levels:
            return self.padded_cols // SUPER_SIZE * self.stored.header_bytes
        return 0 if self.bits == 16 else self.scale_type.itemsize * self.groups

    @property
    def biases_bytes(self) -> int:
        """Bytes of the float16 biases; 0 if none are stored."""
        return self.scales_bytes if self.stored.has_biases else 0

    @cached_property
    def nbytes(self) -> int:
        return self.codes_bytes + self.scales_bytes + self.biases_bytes

    @property
    def halves(self) -> HalfRange:
        """Bytes of the row's float16 values: scales and biases, or everything at 16 bits."""
        return HalfRange(0 if self.bits == 16 else self.codes_bytes, self.nbytes, mxfp4=self.mxfp4)


@dataclass(frozen=True)
class TiledMatrix:
    """A matrix as the kernels multiply it: a tensor, or one part of an expert's record.

    Its bytes are [tiles of 16 rows], or at 16 bits [rows], and then [biases], if it has any. row: the layout
    of one of its rows outside tiles. has_bias: whether a float32 bias for each row is added to its products;
    only records have biases.
    """

    rows: int
    row: RowLayout
    has_bias: bool = False

    @property
    def padded_rows(self) -> int:
        return padded(self.rows, TILE_ROWS)

    @property
    def tiles(self) -> int:
        return self.padded_rows // TILE_ROWS

    @property
    def tile_bytes(self) -> int:
        return TILE_ROWS * self.row.nbytes

    @property
    def block_cols(self) -> int:
        """Columns of a block of codes and scales: 64, or 256 with two levels of scales."""
        return SUPER_SIZE if self.row.stored.two_levels else GROUP_SIZE

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of 16 rows: codes, scales and biases. At 16 bits, bytes of a tile."""
        if self.row.bits == 16:
            return self.tile_bytes
        return TILE_ROWS * self.row.nbytes * self.block_cols // self.row.padded_cols

    @property
    def low_tile_bytes(self) -> int:
        """Bytes of a tile's low plane; 0 if codes aren't divided."""
        return TILE_ROWS * self.row.padded_cols * self.row.stored.low_bits // 8

    @property
    def high_tile_bytes(self) -> int:
        """Bytes of a tile's high plane, or of the tile if codes aren't divided."""
        return self.tile_bytes - self.low_tile_bytes

    @property
    def high_halves(self) -> HalfRange:
        """The bytes of the high plane that hold float16 values, as `halves`."""
        stored = self.row.stored
        if not stored.low_bits:
            return self.halves
        low = TILE_ROWS * self.block_cols * stored.low_bits // 8
        halves = self.halves
        start = halves.start if stored.two_levels else halves.start - low
        return halves._replace(start=start, stop=halves.stop - halves.start + start, step=halves.step - low)

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """The runs that a block consists of, in order: (n, width) stands for n times 16 units of `width`
        bytes, one for each row.

        At 16 bits a tile is one block.
        """
        stored = self.row.stored
        if stored.bits == 16:
            return ((1, self.row.nbytes),)
        codes = self.block_cols * stored.bits // 32, 4
        if stored.two_levels:
            upper = stored.upper_bytes
            return (upper // 2, 2), (stored.header_bytes - upper, 1), codes
        width = self.row.scale_type.itemsize
        scales = self.block_cols // stored.group_size, width
        return (codes, scales, scales) if stored.has_biases else (codes, scales)

    @property
    def rows_bytes(self) -> int:
        """Bytes of all rows, without the products' biases."""
        return self.padded_rows * self.row.nbytes

    @property
    def nbytes(self) -> int:
        return self.rows_bytes + 4 * self.padded_rows * self.has_bias

    @property
    def halves(self) -> HalfRange:
        """The bytes that hold float16 values: scales and biases of each block, or all rows at 16 bits."""
        if self.row.bits == 16:
            return HalfRange(0, self.rows_bytes)
        codes = TILE_ROWS * GROUP_SIZE * self.row.bits // 8
        times = self.rows_bytes // self.block_bytes
        if self.row.stored.two_levels:
            return HalfRange(0, TILE_ROWS * self.row.stored.upper_bytes, self.block_bytes, times)
        return HalfRange(codes, self.block_bytes, self.block_bytes, times, self.row.mxfp4)
