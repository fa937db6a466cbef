"""A matrix on disk in the layout that the kernels multiply."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ondevice.bundle.matrix_layout import TiledMatrix


class TileChunk(NamedTuple):
    """Tiles of 16 rows, the first of which is tile number `first`. Valid until the next chunk is read."""

    first: int
    tiles: NDArray[np.uint8]
    """(n, tile_bytes); tiles may lie apart."""


class TiledSource(Protocol):
    """A matrix stored as tiles on disk, read once in bounded chunks of ascending tiles."""

    @property
    def matrix(self) -> TiledMatrix: ...

    def chunks(self) -> Iterator[TileChunk]:
        """Yields the matrix's tiles in chunks, each tile once. Raises FlashReadError if bytes don't match
        their checksum.
        """
