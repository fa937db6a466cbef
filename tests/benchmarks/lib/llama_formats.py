"""Matrices rounded by llama.cpp's own code, in the mixes of formats that its files have.

libggml rounds, the `gguf` package reads the blocks back. A mix says what format each matrix has, by the rules
of `llama_tensor_get_type` in llama.cpp's src/llama-quant.cpp, for a model whose embedding is its head too.
Legend: R rows, C columns of a matrix, one input a column.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import gguf
import numpy as np
from numpy.typing import NDArray

from ondevice.backends.base import Float32

Kind = Literal["q", "k", "v", "out", "gate", "up", "down", "embedding"]
Type = gguf.GGMLQuantizationType
FALL_BACKS = {Type.Q4_K: Type.Q5_0, Type.Q5_K: Type.Q5_1, Type.Q6_K: Type.Q8_0}
"""What llama.cpp takes where rows aren't multiples of 256."""


@dataclass(frozen=True)
class Mix:
    """A file's formats. more: that of `v` and `down` in the layers that `uses_more` names."""

    plain: Type
    more: Type
    embedding: Type

    def of(self, kind: Kind, layer: int, layers: int, cols: int) -> Type:
        """The format of one matrix of C columns; float16 where even blocks of 32 don't fit."""
        found = self.embedding if kind == "embedding" else self.plain
        if kind in ("v", "down") and uses_more(layer, layers):
            found = self.more
        if cols % gguf.GGML_QUANT_SIZES[found][0]:
            found = FALL_BACKS.get(found, Type.F16)
        return found if cols % gguf.GGML_QUANT_SIZES[found][0] == 0 else Type.F16


MIXES = {
    "Q4_0 throughout": Mix(Type.Q4_0, Type.Q4_0, Type.Q4_0),
    "Q4_K throughout": Mix(Type.Q4_K, Type.Q4_K, Type.Q4_K),
    "Q4_0": Mix(Type.Q4_0, Type.Q4_0, Type.Q6_K),
    "Q4_K_M": Mix(Type.Q4_K, Type.Q6_K, Type.Q6_K),
    "Q5_K throughout": Mix(Type.Q5_K, Type.Q5_K, Type.Q5_K),
    "Q6_K": Mix(Type.Q6_K, Type.Q6_K, Type.Q6_K),
}


def uses_more(layer: int, layers: int) -> bool:
    """Whether a layer is of the first or the last eighth, or every third of those between."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


class Rounder:
    """llama.cpp's rounding; it counts the weights and their bytes."""

    def __init__(self) -> None:
        spec = find_spec("llama_cpp")
        if spec is None or spec.origin is None:
            raise SystemExit("llama-cpp-python isn't installed, whose libggml-base rounds here")
        self._library = ctypes.CDLL(str(Path(spec.origin).parent / "lib" / "libggml-base.so"))
        self._library.ggml_quantize_chunk.restype = ctypes.c_size_t
        self.weights = self.nbytes = 0

    @property
    def weight_bits(self) -> float:
        """Bits that a weight took so far, on average."""
        return 8 * self.nbytes / self.weights

    def round(self, weight: Float32, form: Type, energies: NDArray[np.float64] | None) -> Float32:
        """(R, C) values of a format. energies: (C,), mean squares of the inputs: the "importance matrix"."""
        exact = np.ascontiguousarray(weight, np.float32)
        rows, cols = exact.shape
        self.weights += exact.size
        if form == Type.F16:
            self.nbytes += 2 * exact.size
            return exact.astype(np.float16).astype(np.float32)
        block, block_bytes = gguf.GGML_QUANT_SIZES[form]
        blocks = np.empty((rows, cols // block * block_bytes), np.uint8)
        importance = None if energies is None else np.ascontiguousarray(energies, np.float32)
        pointer = ctypes.POINTER(ctypes.c_float)
        written = self._library.ggml_quantize_chunk(
            ctypes.c_int(form.value),
            exact.ctypes.data_as(pointer),
            blocks.ctypes.data_as(ctypes.c_void_p),
            ctypes.c_int64(0),
            ctypes.c_int64(rows),
            ctypes.c_int64(cols),
            None if importance is None else importance.ctypes.data_as(pointer),
        )
        if written != blocks.nbytes:
            raise RuntimeError(f"libggml wrote {written} bytes of {form.name}, not {blocks.nbytes}")
        self.nbytes += blocks.nbytes
        found: Float32 = gguf.quants.dequantize(blocks, form).astype(np.float32)
        return found
