"""What the MLX engine multiplies with: quantised matrices with a bundle's own codes, and neurons.

All of it are MLX arrays that are written in place, through numpy views of them, so MLX makes no copy. Who
writes to one must know that no kernel reads it any more: MLX is lazy, so what was computed from it must have
been evaluated.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from mmap import mmap
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ondevice.backends.base import Bytes, FeedForwardSource, LinearSource, Selector
from ondevice.backends.fed_layer import FedLayer
from ondevice.bundle.layout import RowLayout
from ondevice.config import GROUP_SIZE

EVERY = slice(None)


@contextmanager
def allocation() -> Iterator[None]:
    """What MLX raises for want of memory is a MemoryError outside."""
    try:
        yield
    except RuntimeError as error:
        if "alloc" not in str(error):
            raise
        raise MemoryError(str(error)) from error


def writable(shape: tuple[int, ...], dtype: mx.Dtype) -> tuple[mx.array, NDArray[Any]]:
    """An array of zeros and the numpy view through which it is written. Raises MemoryError."""
    # MLX's CPU device doesn't ask whether it got its memory: this does, and touches none of it.
    try:
        mmap(-1, max(1, prod(shape) * dtype.size)).close()
    except OSError as error:
        raise MemoryError(f"{prod(shape) * dtype.size} bytes for MLX: {error.strerror}") from error
    with allocation():
        array = mx.zeros(shape, dtype=dtype)
        mx.eval(array)
    return array, np.array(array, copy=False)


class MlxMatrix:
    """(N, K) in a bundle's quantisation, with its codes; products are float32.

    dtype: what is multiplied and what scales, biases and 16-bit values are held in: float32, or float16 where
    a GPU reads half as much for it.
    """

    def __init__(self, rows: int, cols: int, bits: int, dtype: mx.Dtype) -> None:
        self.layout = RowLayout(cols, bits)
        self.rows = rows
        self.dtype = dtype
        layout, self._pieces = self.layout, {}
        if bits == 16:
            self._pieces["codes"] = writable((rows, layout.padded_cols), dtype)
        else:
            self._pieces["codes"] = writable((rows, layout.codes_bytes // 4), mx.uint32)
            for part in ("scales", "biases"):
                self._pieces[part] = writable((rows, layout.groups), dtype)

    def write(self, row0: int, codes: Bytes, scales: NDArray[Any], biases: NDArray[Any]) -> None:
        """Rows row0 .. row0 + n: codes (n, codes_bytes) of uint8, scales and biases (n, G) of float16."""
        end = row0 + len(codes)
        if self.layout.bits == 16:
            self._pieces["codes"][1][row0:end] = np.ascontiguousarray(codes).view(np.float16)
            return
        self._pieces["codes"][1][row0:end].view(np.uint8)[:] = codes
        for part, values in (("scales", scales), ("biases", biases)):
            self._pieces[part][1][row0:end] = values

    def write_rows(self, row0: int, records: Bytes, offset: int) -> None:
        """`write` of what lies `offset` bytes into each record (n, stride)."""
        layout = self.layout
        scales = offset + layout.codes_bytes
        biases = scales + layout.scales_bytes
        pairs = (records[:, scales:biases], records[:, biases : biases + layout.biases_bytes])
        halves = (np.ascontiguousarray(pair).view(np.float16) for pair in pairs)
        self.write(row0, records[:, offset:scales], *halves)

    def clear(self, row0: int, row1: int) -> None:
        """Rows row0 .. row1 count for nothing."""
        for part, (_, view) in self._pieces.items():
            if part != "codes" or self.layout.bits == 16:
                view[row0:row1] = 0

    def rows_product(self, x: mx.array, rows: slice = EVERY) -> mx.array:
        """x (T, K) @ W^T of these rows: (T, n) float32."""
        x = x.astype(self.dtype)
        more = self.layout.padded_cols - x.shape[1]
        if more:
            x = mx.pad(x, [(0, 0), (0, more)])
        return self._product(x, rows, transpose=True)

    def columns_product(self, x: mx.array, rows: slice = EVERY) -> mx.array:
        """x (T, n) @ W of these n rows: (T, K) float32."""
        return self._product(x.astype(self.dtype), rows, transpose=False)[:, : self.layout.cols]

    def _product(self, x: mx.array, rows: slice, transpose: bool) -> mx.array:
        arrays = [array[rows] for array, _ in self._pieces.values()]
        if self.layout.bits == 16:
            found = x @ (arrays[0].T if transpose else arrays[0])
        else:
            found = mx.quantized_matmul(
                x, *arrays, transpose=transpose, group_size=GROUP_SIZE, bits=self.layout.bits
            )
        return found.astype(mx.float32)


class MlxLinear:
    """A loaded matrix with its bias (N,), or None."""

    def __init__(self, source: LinearSource, dtype: mx.Dtype) -> None:
        self.matrix = MlxMatrix(source.rows, source.cols, source.bits, dtype)
        for row0, codes, scales, biases in source.chunks():
            self.matrix.write(row0, codes, scales, biases)
        self.bias = None if source.bias is None else mx.array(source.bias)


class MlxNeurons:
    """Room for `count` neurons, gate, up and down rows by themselves: what segments and staging are."""

    def __init__(self, source: FeedForwardSource, count: int, dtype: mx.Dtype) -> None:
        self._row = RowLayout(source.hidden_size, source.bits)
        first, second = source.layout.part_offsets
        self._offsets = first, second, second + self._row.nbytes
        shape = (count, source.hidden_size, source.bits, dtype)
        self.gate, self.up, self.down = MlxMatrix(*shape), MlxMatrix(*shape), MlxMatrix(*shape)

    def write(self, row0: int, records: Bytes) -> None:
        """Whole records (n, stride) of neurons into places row0 .. row0 + n."""
        for matrix, offset in zip((self.gate, self.up, self.down), self._offsets, strict=True):
            matrix.write_rows(row0, records, offset)

    def write_up_and_down(self, row0: int, parts: Bytes) -> None:
        """Only what follows the gate row of each record (n, part bytes)."""
        self.up.write_rows(row0, parts, 0)
        self.down.write_rows(row0, parts, self._row.nbytes)

    def clear(self, row0: int, row1: int) -> None:
        for matrix in (self.gate, self.up, self.down):
            matrix.clear(row0, row1)


class MlxFeedForward(FedLayer):
    """One layer's neurons; segments are `MlxNeurons`, each of which is multiplied by itself."""

    # MLX has streams of its own for every thread that computes, and keeps them when it ends.
    allocates_anywhere = False

    def __init__(
        self,
        source: FeedForwardSource,
        segment_neurons: int,
        dtype: mx.Dtype,
        selector: Selector | None = None,
    ) -> None:
        super().__init__(source, segment_neurons, selector)
        self._dtype = dtype

    def new_segment(self) -> MlxNeurons:
        return self.room_for(self.segment_neurons)

    def room_for(self, neurons: int) -> MlxNeurons:
        """Empty places for so many neurons of any layer."""
        return MlxNeurons(self.source, neurons, self._dtype)

    def pack(self, segment: MlxNeurons, index: int, first: int, records: Bytes) -> None:
        segment.write(first - self.segment_range(index).start, records)
