"""A bundle's weights as a checkpoint in memory, so that `convert` can round them anew."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ondevice.backends.base import Float32
from ondevice.bundle.reader import Bundle
from ondevice.config import RowFormat
from ondevice.converters.architectures.tensors import tensor_shapes
from ondevice.converters.checkpoints.base import Checkpoint, SourceFile, TokenizerFiles
from ondevice.converters.quantize import EncodedColumns, SourceCodes
from tests.support.engines import bundle_weights


@dataclass(frozen=True)
class ArrayTensor:
    """A `SourceTensor` over float32 values in memory."""

    name: str
    values: Float32
    dtype: str = "F32"
    code_bits: int = 0
    row_unit: int = 1
    files: tuple[SourceFile, ...] = ()
    code_format: RowFormat | None = None
    tile_format: RowFormat | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    @property
    def values_nbytes(self) -> int:
        return self.values.nbytes

    def rows(self, start: int, stop: int) -> Float32:
        return self.values[start:stop]

    def columns(self, start: int, stop: int) -> Float32:
        return self.values[:, start:stop]

    def quantized_rows(self, start: int, stop: int, stored: RowFormat) -> SourceCodes | None:
        return None

    def encoded_columns(self, start: int, stop: int, stored: RowFormat) -> EncodedColumns | None:
        return None

    def vector(self) -> Float32:
        return self.values

    def sample(self, start: int, nbytes: int) -> bytes:
        return self.values.tobytes()[start : start + nbytes]


def checkpoint_of(folder: Path) -> Checkpoint:
    """The weights that the bundle in `folder` stands for, with gates and rms norms, without its tokenizer."""
    config, weights = Bundle.open(folder).config, bundle_weights(folder)
    tensors = {
        name: ArrayTensor(name, np.ascontiguousarray(weights[name], np.float32))
        for name in tensor_shapes(config)
    }
    return Checkpoint(folder.name, "arrays", config, tensors, TokenizerFiles(), {})
