"""Matrices that every token multiplies, loaded by the MLX backend row by row in the bundle's codes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import mlx.core as mx
import numpy as np

from ondevice.backends.base import Float32, LinearSource
from ondevice.backends.mlx_matrix import MlxMatrix, require_mode
from ondevice.backends.mlx_memory import writable
from ondevice.bundle.matrix_layout import RowLayout


class MlxLinear:
    """A loaded matrix (N, K), with a bias (N,) or None.

    sections: sources of its rows, in order. Neighbouring sections of the same format become one MlxMatrix.
    """

    def __init__(self, sections: Sequence[LinearSource], bias: Float32 | None, dtype: mx.Dtype) -> None:
        by_format = groupby(sections, key=lambda section: section.stored)
        self.matrices = tuple(_loaded(list(group), dtype) for _, group in by_format)
        self.bias = None if bias is None else mx.array(bias)

    def product(self, x: mx.array) -> mx.array:
        """x (T, K) @ W^T + bias: (T, N) float32."""
        products = [matrix.rows_product(x) for matrix in self.matrices]
        product = products[0] if len(products) == 1 else mx.concatenate(products, axis=1)
        return product if self.bias is None else product + self.bias

    def heads_product(self, x: mx.array) -> mx.array:
        """The product of each head with its block of rows of W, (H, T, N / H) float32, for x (H, T, K). W has
        one section.
        """
        (matrix,) = self.matrices
        return matrix.heads_product(x)


def _loaded(sections: Sequence[LinearSource], dtype: mx.Dtype) -> MlxMatrix:
    """The rows of sections of one format. Raises BackendUnavailableError if MLX can't multiply it."""
    stored, rows = sections[0].stored, sum(section.rows for section in sections)
    layout = RowLayout(sections[0].cols, *stored)
    require_mode(layout)
    if layout.bits == 16:
        pieces = [writable((rows, layout.padded_cols), dtype)]
    elif layout.mxfp4:
        pieces = [writable((rows, layout.codes_bytes // 4), mx.uint32)]
        pieces += [writable((rows, layout.groups), mx.uint8)]
    else:
        pieces = [writable((rows, layout.codes_bytes // 4), mx.uint32)]
        pieces += [writable((rows, layout.groups), dtype) for _ in range(2)]
    begin = 0
    for section in sections:
        for row0, codes, *pairs in section.chunks():
            place = slice(begin + row0, begin + row0 + len(codes))
            if layout.bits == 16:
                pieces[0][1][place] = np.ascontiguousarray(codes).view(np.float16)
                continue
            pieces[0][1][place].view(np.uint8)[:] = codes
            if layout.mxfp4:
                pairs = pairs[:1]
            elif layout.implied_bias:
                pairs[1] = np.float16(-stored.zero) * pairs[0]
            for (_, view), values in zip(pieces[1:], pairs, strict=True):
                view[place] = values
        begin += section.rows
    return MlxMatrix(layout, dtype, tuple(array for array, _ in pieces))
