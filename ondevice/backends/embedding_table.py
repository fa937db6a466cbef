"""The embedding table, on flash or held in memory, behind the same interface."""

from __future__ import annotations

import numpy as np

from ondevice.backends.base import Bytes, EmbeddingSource, Int32


class EmbeddingTable:
    """Rows of the table: read from flash for each pass, or copied from memory while it is resident."""

    def __init__(self, source: EmbeddingSource) -> None:
        self.file = source.file
        self.vocab_size = source.vocab_size
        self.hidden_size = source.hidden_size
        self.layout = source.layout
        self._source = source
        self._records: Bytes | None = None

    def read(self, tokens: Int32) -> Bytes:
        """The records of token ids (T,): (T, stride). Raises FlashReadError."""
        if self._records is None:
            return self._source.read(tokens)
        records: Bytes = self._records.take(tokens, axis=0)
        return records

    def hold(self, resident: bool) -> None:
        """Copy the table into memory, or drop that copy."""
        if not resident:
            self._records = None
        elif self._records is None:
            self._records = self._source.read(np.arange(self.vocab_size, dtype=np.int32))
