"""What a GGUF file says about its model: the architecture's keys, and the tensors of all parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ondevice.converters.architectures.config_reader import ConfigReader
from ondevice.converters.checkpoints.base import SourceFile
from ondevice.converters.checkpoints.gguf_file import GgufHeader, TensorEntry
from ondevice.converters.checkpoints.gguf_tensor import source_tensor
from ondevice.errors import CheckpointError

MIN_NUMBER = -1e30
"""Replacement for lower numbers in arrays, such as minus infinity."""
MAX_VECTOR = 1 << 16
"""Most values of a vector that metadata refer to."""


@dataclass(frozen=True)
class Stored:
    """A tensor of a file."""

    file: SourceFile
    entry: TensorEntry


@dataclass(frozen=True)
class Metadata:
    """What a GGUF file says about its model.

    Args:
        header: the header of the file with the metadata.
        reader: reads the architecture's keys, and remembers those that have been read.
        prefix: the beginning of these keys, such as `llama.`.
        stored: the tensors of all parts.
    """

    header: GgufHeader
    reader: ConfigReader
    prefix: str
    stored: Mapping[str, Stored]

    def has(self, key: str) -> bool:
        return self.reader.has(self.prefix + key)

    def is_array(self, key: str) -> bool:
        """True if the key is there, and an array of numbers."""
        return isinstance(self.header.metadata.get(self.prefix + key), np.ndarray)

    def integer(self, key: str, default: int | None = None) -> int:
        return self.reader.integer(self.prefix + key, default)

    def number(self, key: str, default: float | None = None) -> float:
        return self.reader.number(self.prefix + key, default)

    def boolean(self, key: str, default: bool) -> bool:
        return self.reader.boolean(self.prefix + key, default)

    def array(self, key: str) -> list[float] | None:
        """An array of finite numbers, none of them below MIN_NUMBER; None if the key is missing."""
        numbers = self.header.numbers(self.prefix + key)
        if numbers is None:
            return None
        values = np.maximum(numbers.astype(np.float64), MIN_NUMBER).tolist()
        return self.reader.with_value(self.prefix + key, values).numbers(self.prefix + key)

    def rows(self, name: str) -> int:
        """The number of rows of a matrix. Raises CheckpointError if there is no matrix of this name."""
        tensor = self.stored.get(name)
        if tensor is None or len(tensor.entry.shape) != 2:
            raise CheckpointError(f"{self.header.file} has no matrix {name}; is the download complete?")
        return tensor.entry.shape[0]

    def vector(self, name: str) -> list[float]:
        """The values of a vector, at most MAX_VECTOR. Raises CheckpointError if there is no such vector."""
        tensor = self.stored.get(name)
        if tensor is None or len(tensor.entry.shape) != 1 or tensor.entry.shape[0] > MAX_VECTOR:
            raise CheckpointError(f"{self.header.file} has no vector {name}; is the download complete?")
        values: list[float] = source_tensor(name, tensor.file, name, tensor.entry).vector().tolist()
        return values
