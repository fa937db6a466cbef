"""A layer's experts on disk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ondevice.bundle.layout import ExpertLayout
from ondevice.bundle.matrix_layout import RowLayout
from ondevice.bundle.tiles import rows_format
from ondevice.records import dataclass

Bytes = NDArray[np.uint8]
HELD_ROWS = 16
"""Most rows of a pass for which the outputs of all experts are held, where experts come one by one."""
ROWS_AT_ONCE = 32
"""Tokens that are computed together by a backend that holds all experts."""


@lru_cache
def rows_layout(layout: ExpertLayout) -> ExpertLayout:
    """The layout of an expert, or of a slice, after its matrices are converted to the formats of
    `rows_format`.
    """
    return ExpertLayout(
        tuple(
            replace(matrix, row=RowLayout(matrix.row.cols, *rows_format(matrix.row.stored)))
            for matrix in layout.matrices
        )
    )


@dataclass(frozen=True)
class ExpertRecords:
    """Experts that lie one after the other in a file, expert 0 first.

    Args:
        file: index of the file in the flash reader.
        start: first byte of expert 0.
        nbytes: bytes of one expert.
        count: number of experts.
        read_range: reads (file, offset, nbytes). Raises FlashReadError.
        layout: the layout of experts stored as matrices. None if each expert is a run of neuron records.
    """

    file: int
    start: int
    nbytes: int
    count: int
    read_range: Callable[[int, int, int], Bytes]
    layout: ExpertLayout | None = None

    def offset(self, expert: int) -> int:
        """First byte of an expert in the file."""
        return self.start + expert * self.nbytes

    def read(self, expert: int) -> Bytes:
        """(nbytes,) the bytes of an expert. Raises FlashReadError."""
        return self.read_range(self.file, self.offset(expert), self.nbytes)
