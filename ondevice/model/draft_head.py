"""Loads a draft head: the rows of the output head for the tokens that drafters choose from.

"FR-Spec" (arXiv 2502.14856) and "VocabTrim" (arXiv 2506.22694): most of a text consists of few tokens, and a
head over these alone is a smaller matrix. Codes are copied, so each logit has the bits that the whole head
gives it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ondevice.backends.base import Backend
from ondevice.backends.tiled_source import TileChunk, TiledSource
from ondevice.bundle.layout import RESIDENT
from ondevice.bundle.matrix_layout import TILE_ROWS
from ondevice.bundle.reader import Bundle
from ondevice.bundle.tiles import lane_rows, tiles_of_lanes
from ondevice.callbacks import IsCancelled, never_cancelled
from ondevice.errors import BundleError
from ondevice.flash.reader import FlashReader
from ondevice.model.loading import head_part
from ondevice.model.parts import ReadTiles, part_tasks
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
    (section,) = head.sections
    with ReadAhead(part_tasks([head], cancelled)) as ahead:
        bias = None if head.bias is None else ahead.next()[tokens]
        chosen = _ChosenRows(ReadTiles(section, ahead), tokens)
        return DraftHead(tokens, backend.load_tiles([chosen], bias))


class _ChosenRows:
    """`TiledSource` of some rows of a matrix: their bytes, in tiles of their own.

    chosen: (n,) ascending rows of the matrix.
    """

    def __init__(self, source: TiledSource, chosen: NDArray[np.int64]) -> None:
        self.matrix = replace(source.matrix, rows=len(chosen))
        self._source = source
        self._chosen = chosen

    def chunks(self) -> Iterator[TileChunk]:
        row, done = self.matrix.row, 0
        waiting = np.empty((0, row.nbytes), dtype=np.uint8)
        for first, tiles in self._source.chunks():
            start = first * TILE_ROWS
            low, high = np.searchsorted(self._chosen, (start, start + len(tiles) * TILE_ROWS)).tolist()
            rows = lane_rows(np.ascontiguousarray(tiles), row)[self._chosen[low:high] - start]
            waiting = np.concatenate([waiting, rows])
            count = len(waiting) if high == len(self._chosen) else len(waiting) // TILE_ROWS * TILE_ROWS
            if count:
                yield TileChunk(done // TILE_ROWS, tiles_of_lanes(waiting[:count], row))
                done, waiting = done + count, waiting[count:]
