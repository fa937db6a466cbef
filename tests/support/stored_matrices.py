"""The rows of a bundle's matrices as the specification says, read without our loading."""

from __future__ import annotations

import numpy as np

from ondevice.bundle.file_layouts import resident_tensors
from ondevice.bundle.layout import DATA_OFFSET, EMBEDDING
from ondevice.bundle.matrix_layout import TiledMatrix
from ondevice.bundle.reader import Bundle
from ondevice.bundle.tiles import StoredMatrix, untiled


def resident_matrix(bundle: Bundle, name: str) -> StoredMatrix:
    """The matrix of the resident tensor `name`."""
    matrix, span = resident_tensors(bundle.config, bundle.quant)[name].matrix, bundle.tensor_span(name)
    assert matrix is not None
    tiles = np.fromfile(bundle.path / span.file, np.uint8, span.nbytes, offset=span.offset)
    return untiled(tiles, matrix)


def embedding_matrix(bundle: Bundle) -> StoredMatrix:
    """The embedding."""
    layout = bundle.embedding_layout
    matrix = TiledMatrix(bundle.config.vocab_size, layout.row)
    records = np.fromfile(bundle.path / EMBEDDING, np.uint8, offset=DATA_OFFSET).reshape(-1, layout.stride)
    return untiled(np.ascontiguousarray(records[:, : matrix.tile_bytes]).reshape(-1), matrix)
