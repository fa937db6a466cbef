"""The types of what `_native` has for matrices in memory and rows of tiles (`bindings_matrix.cc`)."""

from collections.abc import Sequence
from typing import overload

from ondevice.kernels._native import Bytes, Float32, Format, Int32, Norm, Runner

class Matrix:
    """A weight matrix (rows, cols) in the form that the kernels multiply."""

    @overload
    def __init__(self, rows: int, cols: int, stored: Format) -> None: ...
    @overload
    def __init__(self, sections: Sequence[tuple[int, Format]], cols: int) -> None:
        """sections: number and format of rows that follow each other and are stored alike."""

    @property
    def rows(self) -> int: ...
    def load_rows(self, runner: Runner, row0: int, codes: Bytes, scales: Bytes, biases: Bytes) -> None:
        """Rows from `row0` on, as sidecars store them: codes, scales and biases, each (R, bytes).

        Biases that the format doesn't store aren't looked at.
        """

    def load_tiles(self, section: int, first: int, tiles: Bytes) -> None:
        """Tiles (n, bytes of 16 rows) of a section, from its tile `first` on. They may lie apart."""

    def forward(
        self,
        runner: Runner,
        x: Float32,
        bias: Float32 | None,
        out: Float32,
        norm: Norm | None = None,
        added: Float32 | None = None,
    ) -> None:
        """out (T, rows) = norm(x) W^T + bias + added, for x (T, cols); added may be out."""

    def forward_heads(self, runner: Runner, x: Float32, out: Float32) -> None:
        """out (T, rows), each head's own: x (heads, T, cols) meets equal parts of the rows, of 16 n rows."""

def look_up(runner: Runner, matrices: Sequence[Matrix | None], unit: int, rows: Int32, out: Float32) -> bool:
    """Values of the rows (n,) of matrices of one section, `unit` rows from one to the next.

    Returns False, and leaves out (n, padded_cols) as it is, if a matrix that has one of them is None.
    """

def forward_stacked(
    runner: Runner, matrices: Sequence[Matrix], x: Float32, out: Float32, column: int, norm: Norm | None
) -> None:
    """norm(x) W^T for the rows of all matrices, one after the other, to out (T, V) from `column` on.

    Each has one section, all one format and equally many rows, 16 n; the last may have fewer.
    """

def dequantize_lanes(
    runner: Runner, stored: Format, tiles: Bytes, lanes: Int32, cols: int, out: Float32
) -> None:
    """Row lanes[i] of each of the tiles (n, at least the bytes of 16 rows), which may lie apart.

    out: (n, padded_cols).
    """
