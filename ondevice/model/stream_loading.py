"""Loads the adapters in a bundle's `streams.safetensors` into a backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from ondevice.backends.base import Backend, Float32, Vector
from ondevice.bundle.reader import Bundle
from ondevice.bundle.streams import EMBEDDINGS, STREAMS, layer_prefix
from ondevice.callbacks import IsCancelled, never_cancelled
from ondevice.config import RowFormat
from ondevice.errors import BundleError
from ondevice.flash.reader import FlashReader
from ondevice.model.parts import MatrixPart, Part, part_tasks
from ondevice.model.tensor_file import TaskResults, TensorFile
from ondevice.model.weights import LowRank, MultiStreamLayer, MultiStreamWeights
from ondevice.records import dataclass


def load_streams(
    bundle: Bundle,
    reader: FlashReader,
    backend: Backend,
    file_index: int,
    cancelled: IsCancelled = never_cancelled,
) -> MultiStreamWeights:
    """Load the bundle's streams into `backend`.

    file_index: index of the streams' file in `reader`. cancelled: called between two pieces.

    Raises BundleError if the bundle has no streams or their bytes can't be weights, FlashReadError if bytes
    don't match their checksum, Cancelled if `cancelled()` holds, and the backend's error if memory runs out.
    """
    config, streams = bundle.config, bundle.streams
    if streams is None:
        raise BundleError(f"the bundle {bundle.path} has no {STREAMS}")
    file = TensorFile(bundle, reader, bundle.sidecar_file(STREAMS), file_index)
    stored = RowFormat(streams.bits)
    begun = [_EmbeddingsPart(partial(file.vector, EMBEDDINGS), config.hidden_size)] if streams.begins else []
    matrices = [
        MatrixPart(name, rows, cols, stored, partial(file.rows, name, stored))
        for name, (rows, cols) in streams.matrices(config).items()
    ]
    parts: list[Part] = [*begun, *matrices]
    with TaskResults(part_tasks(parts, cancelled)) as ahead:
        vectors = tuple(vector for part in begun for vector in part.load(backend, ahead))
        loaded = {matrix.field: matrix.load(backend, ahead) for matrix in matrices}

    def low_rank(name: str) -> LowRank:
        return LowRank(loaded[f"{name}.down"], loaded[f"{name}.up"])

    layers = tuple(
        MultiStreamLayer(
            low_rank(f"{prefix}.qkv"), low_rank(f"{prefix}.out"), low_rank(f"{prefix}.feed_forward")
        )
        for prefix in map(layer_prefix, streams.layers(config))
    )
    return MultiStreamWeights(vectors, streams.first_layer, layers, streams.mode == "shared", streams.streams)


@dataclass(frozen=True)
class _EmbeddingsPart:
    """Stream embeddings: rows of `width` values, read in one piece and loaded one by one."""

    read: Callable[[], Float32]
    width: int
    field: str = EMBEDDINGS

    def tasks(self) -> Iterator[Callable[[], Float32]]:
        yield self.read

    def load(self, backend: Backend, ahead: TaskResults) -> tuple[Vector, ...]:
        return tuple(backend.load_vector(row) for row in ahead.next().reshape(-1, self.width))
