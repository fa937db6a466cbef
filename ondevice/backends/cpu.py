"""The CPU engine: numpy arrays for activations, packed weights, our C++ kernels for every reduction.

Equal bits for a token whatever the chunk, the thread count or the instruction set (architecture, one
canonical arithmetic); numpy only copies, indexes and adds. An op's result is valid until the op's next call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ondevice.backends.base import (
    Bytes,
    Cutoff,
    EmbeddingSource,
    FeedForwardSource,
    Float32,
    HeadNorms,
    Int32,
    KVStore,
    LinearSource,
    Norm,
    Selector,
)
from ondevice.backends.token_tree import TokenTree
from ondevice.bundle.layout import RowLayout
from ondevice.config import ACTIVATIONS, GROUP_SIZE, Activation
from ondevice.errors import BackendUnavailableError, OndeviceError
from ondevice.kernels import _native

NO_NORM = Norm(None, 0.0)
BLOCK_NEURONS = GROUP_SIZE
"""Neurons are packed, lent and streamed in whole blocks of this many."""


def make_engine(threads: int, target: str = "auto") -> _native.Engine:
    """Threads (1 or more) and a kernel target. Raises BackendUnavailableError if it can't run here."""
    if target != "auto" and target not in _native.available_targets():
        raise BackendUnavailableError(
            f"kernel target {target!r} can't run on this machine; it has "
            f"{', '.join(_native.available_targets())}"
        )
    return _native.Engine(threads, target)


def contributions(
    engine: _native.Engine, gates: Float32, importance: Float32, activation: Activation, out: Float32
) -> None:
    """|act(gate)| * importance of gates (T, F) and importance (F,) into out (T, F), which may be gates."""
    act = ACTIVATIONS.index(activation)
    for gate, contribution in zip(gates, out, strict=True):
        _native.activate(engine, act, gate, importance, contribution)
        np.abs(contribution, out=contribution)


@dataclass(frozen=True)
class CpuLinear:
    """A packed matrix; bias: (N,) or None."""

    matrix: _native.Matrix
    bias: Float32 | None


Selected: TypeAlias = Callable[[Float32, int], Iterator[tuple[Int32, NDArray[np.uint64]]]]
"""Scores (T, F) -> the neurons with a score above zero: ascending ids, addresses of what is read of them.
Of the tokens from the second argument on, only those that are in memory."""


class CpuFeedForward:
    """One layer's neurons in ascending id: a resident prefix in segments, the rest as `streamed` gives it.

    With a `selector`, only those it selects are multiplied, from where `selected` says they lie. It owns
    neither the memory nor what is read: `sparsity` lends both.
    """

    def __init__(
        self,
        engine: _native.Engine,
        source: FeedForwardSource,
        segment_neurons: int,
        selector: Selector | None = None,
    ) -> None:
        self.selector = selector
        self.selected: Selected = _unfed
        self.foresee: Callable[[int, Callable[[], Float32]], None] | None = None
        """Told, before the layer's turn, how many tokens are to come and what scores them by a guess."""
        row = RowLayout(source.hidden_size, source.bits)
        first, second = source.layout.part_offsets
        self.source = source
        self.segment_neurons = segment_neurons
        self.segments: list[_native.Segment] = []
        self.streamed: Callable[[], Iterator[Bytes | _native.Segment]] = lambda: iter(())
        self.native = _native.FeedForward(
            source.hidden_size, source.bits, source.layout.stride, first, second, second + row.nbytes
        )
        self._engine = engine

    @property
    def resident_neurons(self) -> int:
        """Neurons 0 .. resident_neurons - 1 are held in segments."""
        return min(len(self.segments) * self.segment_neurons, self.source.num_neurons)

    @property
    def num_segments(self) -> int:
        """Segments that hold all neurons."""
        return -(-self.source.num_neurons // self.segment_neurons)

    def segment_range(self, index: int) -> range:
        """The neurons that segment `index` of this layer holds."""
        first = index * self.segment_neurons
        return range(first, min(first + self.segment_neurons, self.source.num_neurons))

    def pack(self, segment: _native.Segment, index: int, first: int, records: Bytes) -> None:
        """Put records (n, stride) of neurons first .. first + n into segment `index`; first % 64 == 0."""
        neurons = self.segment_range(index)
        blocks = -(-len(neurons) // BLOCK_NEURONS)
        block0 = (first - neurons.start) // BLOCK_NEURONS
        self.native.pack(self._engine, segment, blocks, block0, records)


def _unfed(scores: Float32, certain: int) -> Iterator[tuple[Int32, NDArray[np.uint64]]]:
    """Neurons that nobody provides must not read as zeros."""
    raise OndeviceError("nothing provides the neurons that are selected")


class CpuBackend:
    """`Backend` over the native kernels.

    segment_neurons, stream_neurons: multiples of 64; most neurons of one segment and of one streamed piece.
    resident_embedding: hold the embedding table in memory instead of reading its rows from flash, to begin.
    """

    name = "cpu"

    def __init__(
        self,
        engine: _native.Engine,
        *,
        segment_neurons: int,
        stream_neurons: int,
        resident_embedding: bool = False,
    ) -> None:
        self.engine = engine
        self.feed_forwards: list[CpuFeedForward] = []
        self._segment_neurons = segment_neurons
        self._stream_neurons = stream_neurons
        self._resident_embedding = resident_embedding
        self._embedding: _Embedding | None = None
        self._staging: _native.Segment | None = None
        self._buffers: dict[str, Float32] = {}
        self._blocks = np.zeros(0, dtype=np.uint64)

    def load_vector(self, values: Float32) -> Float32:
        return np.array(values, dtype=np.float32)

    def load_linear(self, source: LinearSource) -> CpuLinear:
        matrix = _native.Matrix(source.rows, source.cols, source.bits)
        for row0, codes, scales, biases in source.chunks():
            matrix.load_rows(self.engine, row0, codes, scales.view(np.uint16), biases.view(np.uint16))
        bias = None if source.bias is None else np.array(source.bias, dtype=np.float32)
        return CpuLinear(matrix, bias)

    def load_feed_forward(
        self, layer: int, source: FeedForwardSource, selector: Selector | None = None
    ) -> CpuFeedForward:
        self.feed_forwards.append(CpuFeedForward(self.engine, source, self._segment_neurons, selector))
        return self.feed_forwards[-1]

    def load_embedding(self, source: EmbeddingSource) -> EmbeddingSource:
        self._embedding = _Embedding(source)
        self.hold_embedding(self._resident_embedding)
        return self._embedding

    def hold_embedding(self, resident: bool) -> None:
        """Hold the embedding table in memory, or give it back: its rows then come from flash."""
        if self._embedding is not None:
            self._embedding.hold(resident)

    def trim(self) -> None:
        """Give working memory back; the next pass takes what it needs. No result of an op is valid after."""
        self._buffers.clear()
        self.engine.trim()

    def embedding(self, table: EmbeddingSource, tokens: Int32) -> Float32:
        width = RowLayout(table.hidden_size, table.bits).padded_cols
        out = np.empty((len(tokens), width), dtype=np.float32)
        _native.dequantize_rows(self.engine, table.bits, table.read(tokens), table.hidden_size, out)
        return np.ascontiguousarray(out[:, : table.hidden_size])

    def linear(
        self, x: Float32, weight: CpuLinear, norm: Norm | None = None, added: Float32 | None = None
    ) -> Float32:
        out = self._buffer("linear", (len(x), weight.matrix.rows)) if added is None else added
        weight.matrix.forward(self.engine, x, weight.bias, out, *(norm or NO_NORM), added)
        return out

    def kv_move(self, kv: KVStore, source: int, target: int) -> None:
        layout, config = kv.layout, kv.layout.config
        blocks = _addresses(kv)
        _native.kv_move(
            self.engine,
            blocks,
            config.num_layers,
            config.num_kv_heads,
            config.head_dim,
            layout.kv_bits,
            source,
            target,
        )

    def attend(
        self,
        qkv: Float32,
        kv: KVStore,
        layer: int,
        position: int,
        cos: Float32,
        sin: Float32,
        norms: HeadNorms | None = None,
        window: int = 0,
        tree: TokenTree | None = None,
    ) -> Float32:
        if layer == 0 or len(self._blocks) != len(kv.blocks):
            self._blocks = _addresses(kv)
        layout, config = kv.layout, kv.layout.config
        out = self._buffer("attention", (len(qkv), config.query_size))
        _native.attend(
            self.engine,
            qkv,
            self._blocks,
            layer,
            layout.kv_bits,
            config.num_heads,
            config.num_kv_heads,
            position,
            window,
            cos,
            sin,
            norms,
            None if tree is None else (tree.parents, tree.depths),
            out,
        )
        return out

    def foresee(self, x: Float32, norm: Norm, weight: CpuFeedForward) -> None:
        selector = weight.selector
        if weight.foresee is not None and selector is not None:
            weight.foresee(len(x), lambda: self.scores(x, selector, norm))

    def feed_forward(
        self,
        x: Float32,
        weight: CpuFeedForward,
        activation: Activation,
        norm: Norm | None = None,
        added: Float32 | None = None,
        certain: int | None = None,
    ) -> Float32:
        if weight.selector is None:
            return self.dense_feed_forward(x, weight, activation, norm, added, streamed=certain != 0)
        native, act = weight.native, ACTIVATIONS.index(activation)
        scores, gates = self._scored(x, weight.selector, norm)
        native.begin(self.engine, x, *(norm or NO_NORM))
        for ids, parts in weight.selected(scores, len(x) if certain is None else certain):
            native.add_gathered(self.engine, ids, parts, weight.selector.predicted, gates, act)
        return self._finished(x, weight, added)

    def dense_feed_forward(
        self,
        x: Float32,
        weight: CpuFeedForward,
        activation: Activation,
        norm: Norm | None = None,
        added: Float32 | None = None,
        streamed: bool = True,
    ) -> Float32:
        """`feed_forward` of every neuron, whatever a selector would say; without `streamed`, in memory."""
        native, tokens, act = weight.native, len(x), ACTIVATIONS.index(activation)
        native.begin(self.engine, x, *(norm or NO_NORM))
        if weight.segments:
            native.add(self.engine, weight.segments, tokens, act)
        for piece in weight.streamed() if streamed else ():
            if isinstance(piece, np.ndarray):
                staging = self._stage(native)
                native.pack(self.engine, staging, -(-len(piece) // BLOCK_NEURONS), 0, piece)
                piece = staging
            native.add(self.engine, [piece], tokens, act)
        return self._finished(x, weight, added)

    def _finished(self, x: Float32, weight: CpuFeedForward, added: Float32 | None) -> Float32:
        out = self._buffer("feed_forward", x.shape) if added is None else added
        weight.native.finish(self.engine, out, added)
        return out

    def rows(self, x: Float32, tokens: Sequence[int]) -> Float32:
        return x[list(tokens)]

    def add_streams(self, x: Float32, tokens: Sequence[int], embeddings: Sequence[Float32]) -> Float32:
        streams = x[list(tokens), None] + np.stack(embeddings)
        return np.concatenate([x, streams.reshape(-1, x.shape[1])])

    def add_low_rank(
        self,
        y: Float32,
        x: Float32,
        down: CpuLinear,
        up: CpuLinear,
        first: int,
        activation: Literal["relu"] | None = None,
        norm: Norm | None = None,
    ) -> Float32:
        narrow = self._buffer("low rank", (len(x), down.matrix.rows))
        down.matrix.forward(self.engine, x, None, narrow, *(norm or NO_NORM))
        if activation is not None:
            np.maximum(narrow, 0, out=narrow)
        wide = self._buffer("from low rank", (len(narrow), up.matrix.rows))
        up.matrix.forward(self.engine, narrow, None, wide)
        y[first:] += wide
        return y

    def to_numpy(self, x: Float32) -> Float32:
        return x.copy()

    def scores(self, x: Float32, selector: Selector, norm: Norm | None = None) -> Float32:
        """(T, F), what `selector` says of every neuron for norm(x), x (T, D)."""
        return self._scored(x, selector, norm)[0]

    def _scored(self, x: Float32, selector: Selector, norm: Norm | None) -> tuple[Float32, Float32]:
        """Scores (T, F) for norm(x), x (T, D), and the gates (T, F) of those with a score above zero."""
        for step, linear in enumerate(selector.matrices):
            out = self._buffer(f"scores {step}", (len(x), linear.matrix.rows))
            linear.matrix.forward(self.engine, x, linear.bias, out, *(norm or NO_NORM))
            x, norm = out, None
        return (x if selector.cutoff is None else self._cut_off(x, selector.cutoff)), x

    def _cut_off(self, gates: Float32, cutoff: Cutoff) -> Float32:
        """(T, F), above zero by how much gates (T, F) exceed the cutoff; those that don't become zero.

        The activation of zero is zero, so a neuron that doesn't count for a token adds exactly nothing to it.
        """
        scores = self._buffer("cut off", gates.shape)
        contributions(self.engine, gates, cutoff.importance, cutoff.activation, scores)
        scores -= np.float32(cutoff.threshold)
        for gate, score in zip(gates, scores, strict=True):
            gate[score <= 0] = 0
        return scores

    def _stage(self, native: _native.FeedForward) -> _native.Segment:
        """Where streamed records are packed before they are multiplied; made when first needed."""
        if self._staging is None:
            self._staging = _native.Segment(native.segment_bytes(self._stream_neurons // BLOCK_NEURONS))
        return self._staging

    def _buffer(self, op: str, shape: tuple[int, ...]) -> Float32:
        """An op's own output array, re-used: fresh pages for every call would cost more than many ops."""
        size = math.prod(shape)
        if op not in self._buffers or self._buffers[op].size < size:
            self._buffers[op] = np.empty(size, dtype=np.float32)
        return self._buffers[op][:size].reshape(shape)


def _addresses(kv: KVStore) -> NDArray[np.uint64]:
    """Where every block lies."""
    return np.array([block.__array_interface__["data"][0] for block in kv.blocks], dtype=np.uint64)


class _Embedding:
    """The embedding table, on flash or held in memory, behind the same interface."""

    def __init__(self, source: EmbeddingSource) -> None:
        self.file = source.file
        self.vocab_size = source.vocab_size
        self.hidden_size = source.hidden_size
        self.bits = source.bits
        self.layout = source.layout
        self._source = source
        self._records: Bytes | None = None

    def read(self, tokens: Int32) -> Bytes:
        if self._records is None:
            return self._source.read(tokens)
        records: Bytes = self._records[tokens]
        return records

    def hold(self, resident: bool) -> None:
        if not resident:
            self._records = None
        elif self._records is None:
            self._records = self._source.read(np.arange(self.vocab_size, dtype=np.int32))
