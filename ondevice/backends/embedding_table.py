"""The embedding table, on flash or held in memory."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from ondevice.backends.base import Bytes, EmbeddingSource, Float32, Int32
from ondevice.backends.stored_rows import tokens_at_once
from ondevice.bundle.layout import TileLayout
from ondevice.bundle.matrix_layout import TILE_ROWS
from ondevice.kernels import _native, memory


class RowLookup(Protocol):
    """An output head that has the same rows as the embedding table."""

    def look_up(self, runner: _native.Runner, tokens: Int32, out: Float32) -> bool:
        """Write the dequantised rows of token ids (T,) to out (T, padded_cols). Returns False if the head
        isn't in memory.
        """


class EmbeddingTable:
    """Rows of the table: read from flash for each pass, or copied from memory while it is resident.

    head: an output head with the same rows. While it is in memory, rows are looked up there.
    """

    def __init__(self, source: EmbeddingSource, head: RowLookup | None = None) -> None:
        self._head = head
        self.file = source.file
        self.vocab_size = source.vocab_size
        self.hidden_size = source.hidden_size
        self.layout = source.layout
        self._source = source
        self._records: Bytes | None = None
        self._rows = TILE_ROWS if isinstance(self.layout, TileLayout) else 1
        """Rows in a record."""

    def read(self, tokens: Int32) -> Bytes:
        """The records that hold the rows of token ids (T,): (T, stride). Raises FlashReadError."""
        if self._records is None:
            return self._source.read(tokens)
        records: Bytes = self._records.take(tokens // self._rows, axis=0)
        return records

    def rows(self, runner: _native.Runner, tokens: Int32) -> Float32:
        """The dequantised rows of token ids (T,): (T, hidden_size). Raises FlashReadError."""
        layout, width = self.layout, self.hidden_size
        row = layout.row if isinstance(layout, TileLayout) else layout.parts[0][0]
        out: Float32 = memory.empty((len(tokens), row.padded_cols), np.float32)
        in_head = self._head is not None and self._head.look_up(runner, tokens, out)
        if not in_head and isinstance(layout, TileLayout):
            step = tokens_at_once(layout)
            for start in range(0, len(tokens), step):
                piece, values = tokens[start : start + step], out[start : start + step]
                lanes = piece % TILE_ROWS
                _native.dequantize_lanes(runner, row.stored, self.read(piece), lanes, width, values)
        elif not in_head:
            _native.dequantize_rows(runner, row.stored, self.read(tokens), width, out)
        return np.ascontiguousarray(out[:, :width])

    def hold(self, resident: bool) -> None:
        """Copy the table into memory, or drop that copy."""
        if not resident:
            self._records = None
        elif self._records is None:
            self._records = self._source.read(np.arange(0, self.vocab_size, self._rows, dtype=np.int32))
