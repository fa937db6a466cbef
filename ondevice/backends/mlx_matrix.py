"""Quantised matrices, kept in the codes of the bundle and multiplied on MLX's default device."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import mlx.core as mx

from ondevice.backends import mlx_memory
from ondevice.backends.mlx_experts import format_options, with_biases
from ondevice.bundle.matrix_layout import RowLayout
from ondevice.errors import BackendUnavailableError
from ondevice.records import dataclass


@dataclass(frozen=True)
class MlxMatrix:
    """A matrix (N, K) in a bundle's codes; products are float32.

    dtype: the type of the products' inputs. arrays: codes (N, K bits / 32) uint32, scales (N, G), and biases
    (N, G) where they are stored; at 16 bits values (N, K). Scales of MXFP4 are uint8. spaced: whether there
    are gaps between rows, as in records.
    """

    layout: RowLayout
    dtype: mx.Dtype
    arrays: tuple[mx.array, ...]
    spaced: bool = False

    def rows_product(self, x: mx.array) -> mx.array:
        """x (T, K) @ W^T: (T, N) float32."""
        return self._product(self._padded(x), transpose=True)

    def heads_product(self, x: mx.array) -> mx.array:
        """x (H, T, K) @ W_h^T of H blocks of rows of W: (H, T, N / H) float32."""
        parts = tuple(array.reshape(x.shape[0], -1, array.shape[1]) for array in self.arrays)
        return replace(self, arrays=parts)._product(self._padded(x), transpose=True)

    def columns_product(self, x: mx.array) -> mx.array:
        """x (T, N) @ W: (T, K) float32."""
        return self._product(x.astype(self.dtype), transpose=False)[:, : self.layout.cols]

    def copy(self) -> MlxMatrix:
        """A copy with values, scales and biases in `dtype`. Not evaluated."""
        codes, *pairs = self.arrays if self.layout.bits == 16 else with_biases(self.layout, self.arrays)
        values = mx.contiguous(codes) if pairs else mx.contiguous(codes.astype(self.dtype))
        dtype = mx.uint8 if self.layout.mxfp4 else self.dtype
        pairs = [mx.contiguous(pair.astype(dtype)) for pair in pairs]
        return MlxMatrix(self.layout, self.dtype, (values, *pairs))

    def _padded(self, x: mx.array) -> mx.array:
        """x (..., K) in `dtype`, with zeros where the stored rows have padding."""
        more = self.layout.padded_cols - x.shape[-1]
        x = x.astype(self.dtype)
        return mx.pad(x, [*[(0, 0)] * (x.ndim - 1), (0, more)]) if more else x

    def _product(self, x: mx.array, transpose: bool) -> mx.array:
        if self.layout.bits == 16:
            product = x @ (self.arrays[0].swapaxes(-1, -2) if transpose else self.arrays[0])
        else:
            affine = with_biases(self.layout, self.arrays)
            if mlx_memory.on_cuda():
                x, affine = self._for_cuda(x, affine, transpose)
            product = mx.quantized_matmul(x, *affine, transpose=transpose, **format_options(self.layout))
        return product.astype(mx.float32)

    def _for_cuda(
        self, x: mx.array, affine: tuple[mx.array, ...], transpose: bool
    ) -> tuple[mx.array, tuple[mx.array, ...]]:
        """x and quantised arrays in the form that MLX's CUDA kernels need."""
        if self.spaced:  # CUDA kernels refuse gaps between rows. Other devices copy them.
            affine = tuple(map(mx.contiguous, affine))
        if transpose and self.layout.groups == 1:
            # The kernel for one group and several rows gives values that aren't finite on Hopper GPUs.
            x, affine = _doubled(x), tuple(map(_doubled, affine))
        return x, affine


def _doubled(x: mx.array) -> mx.array:
    """x (..., n) with n zeros after each row."""
    return mx.pad(x, [*[(0, 0)] * (x.ndim - 1), (0, x.shape[-1])])


@cache
def _multiplies_mxfp4() -> bool:
    # Two groups, as CUDA has a separate kernel for one.
    codes, scales = mx.zeros((32, 8), mx.uint32), mx.full((32, 2), 127, mx.uint8)
    try:
        product = mx.quantized_matmul(mx.zeros((1, 64)), codes, scales, group_size=32, bits=4, mode="mxfp4")
        mlx_memory.known(product)
    except (TypeError, ValueError):
        return False
    return True


def require_mode(layout: RowLayout) -> None:
    """Check a format. Raises BackendUnavailableError if this version of MLX can't multiply it."""
    if layout.mxfp4 and not _multiplies_mxfp4():
        raise BackendUnavailableError(
            f"--backend mlx: the model has weights in MXFP4, which MLX {mx.__version__} can't multiply; "
            "install a newer mlx, or use --backend cpu"
        )
