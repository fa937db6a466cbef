"""The embedding table, on flash or held in memory, behind the same interface."""

from __future__ import annotations

import numpy as np

from ondevice.backends.base import Bytes, EmbeddingSource, Int32
from ondevice.bundle.layout import TILE_ROWS, TileLayout


class EmbeddingTable:
    """Rows of the table: read from flash for each pass, or copied from memory while it is resident."""

    def __init__(self, source: EmbeddingSource) -> None:
        self.file = source.file
        self.vocab_size = source.vocab_size
        self.hidden_size = source.hidden_size
        self.layout = source.layout
        self._source = source
        self._records: Bytes | None = None
        self._rows = TILE_ROWS if isinstance(self.layout, TileLayout) else 1
        """Tokens' rows in a record."""

    def read(self, tokens: Int32) -> Bytes:
        """The records that hold the rows of token ids (T,): (T, stride). Raises FlashReadError."""
        if self._records is None:
            return self._source.read(tokens)
        records: Bytes = self._records.take(tokens // self._rows, axis=0)
        return records

    def hold(self, resident: bool) -> None:
        """Copy the table into memory, or drop that copy."""
        if not resident:
            self._records = None
        elif self._records is None:
            self._records = self._source.read(np.arange(0, self.vocab_size, self._rows, dtype=np.int32))
