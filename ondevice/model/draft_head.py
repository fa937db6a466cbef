"""Loads a draft head: the rows of the output head for the tokens that drafters choose from.

"FR-Spec" (arXiv 2502.14856) and "VocabTrim" (arXiv 2506.22694): most of a text consists of few tokens, and a
head over these alone is a smaller matrix. Codes are copied, so each logit has the bits that the whole head
gives it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ondevice.backends.base import Backend, Float32, RowChunk
from ondevice.bundle.layout import RESIDENT
from ondevice.bundle.reader import Bundle
from ondevice.callbacks import IsCancelled, never_cancelled
from ondevice.errors import BundleError
from ondevice.flash.reader import FlashReader
from ondevice.model.loading import head_part
from ondevice.model.parts import MatrixPart, part_tasks
from ondevice.model.records import RESIDENT_FILE, embedding_records
from ondevice.model.tensor_file import ReadAhead, TensorFile
from ondevice.model.weights import DraftHead


def load_draft_head(
    bundle: Bundle,
    reader: FlashReader,
    backend: Backend,
    number: int,
    cancelled: IsCancelled = never_cancelled,
) -> DraftHead:
    """Load the head's rows of the `number` most frequent tokens into `backend`.

    Raises BundleError if the bundle has no token counts or they are damaged, and what `load_weights` raises.
    """
    counted = bundle.counted_tokens()
    if counted is None:
        raise BundleError(f"the bundle {bundle.path} has no token counts")
    tokens = counted.most_frequent(number, bundle.config.vocab_size)
    resident = TensorFile(bundle, reader, bundle.file(RESIDENT), RESIDENT_FILE)
    head = head_part(bundle, resident, embedding_records(bundle, reader))
    with ReadAhead(part_tasks([head], cancelled)) as ahead:
        return DraftHead(tokens, backend.load_linear(_ChosenRows(head, tokens, ahead)))


class _ChosenRows:
    """`LinearSource` of some rows of a matrix, whose chunks are the next results of `ahead`."""

    def __init__(self, matrix: MatrixPart, chosen: NDArray[np.int64], ahead: ReadAhead) -> None:
        """chosen: ascending rows of the matrix."""
        self.rows = len(chosen)
        self.cols = matrix.cols
        self.stored = matrix.stored
        bias = None if matrix.bias is None else ahead.next()
        self.bias: Float32 | None = None if bias is None else bias[chosen]
        self._matrix = matrix
        self._chosen = chosen
        self._ahead = ahead

    def chunks(self) -> Iterator[RowChunk]:
        for start in self._matrix.starts:
            chunk: RowChunk = self._ahead.next()
            first, last = np.searchsorted(self._chosen, (start, start + len(chunk.codes))).tolist()
            if first < last:
                rows = self._chosen[first:last] - start
                yield RowChunk(first, chunk.codes[rows], chunk.scales[rows], chunk.biases[rows])
