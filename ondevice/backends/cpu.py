"""The CPU backend: numpy arrays for activations, packed weights, our C++ kernels for every reduction.

A token's results have the same bits whatever the chunk, the thread count or the instruction set (see the
architecture's one canonical arithmetic); numpy only copies, indexes and adds. An op's result is valid until
the next call of the op.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from ondevice.backends import row_sums
from ondevice.backends.base import (
    NO_BIASES,
    Biases,
    Bytes,
    FeedForwardSource,
    Float32,
    Int32,
    LinearSource,
    Norm,
    Router,
    Selector,
)
from ondevice.backends.cpu_attention import CpuAttention
from ondevice.backends.cpu_layers import CpuPlainLayers, cpu_plain_layers
from ondevice.backends.cpu_matrices import CpuLinear, FlashMatrix, StreamedHead, StreamedLinear
from ondevice.backends.cpu_neurons import CpuFeedForward, CpuSlices, native_form
from ondevice.backends.cpu_recurrent import CpuRecurrent
from ondevice.backends.embedding_table import EmbeddingTable
from ondevice.backends.expert_records import HELD_ROWS
from ondevice.backends.feed_forward_layer import BLOCK_NEURONS, FirstNeurons
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.backends.kv_layout import KVLayout
from ondevice.backends.neuron_source import Planes
from ondevice.backends.offloading import OffloadingBackend
from ondevice.backends.plain_layers import Adapters, PlainWeights
from ondevice.backends.routing import Routing, native_route, sigmoid
from ondevice.backends.tiled_source import TiledSource
from ondevice.bundle.layout import SliceLayout
from ondevice.bundle.matrix_layout import padded
from ondevice.config import RowFormat
from ondevice.errors import BackendUnavailableError
from ondevice.kernels import _native, memory
from ondevice.model_config import Activation, FeedForwardSpec, LayerSpec, ModelConfig

SCORES = ("scores", "more scores")
"""Names of the output buffers of a selector's matrices."""
READ_BYTES = 4 << 20
"""Bytes of neurons that are read at a time into memory where they stay."""
VIEWS = 64
"""Most views of output arrays kept at once: the last chunks of prompts have any length."""


def make_runner(threads: int, target: str = "auto") -> _native.Runner:
    """The kernels' runner. threads: at least 1. Raises BackendUnavailableError if `target` can't run here."""
    if target != "auto" and target not in _native.available_targets():
        raise BackendUnavailableError(
            f"kernel target {target!r} can't run on this machine; it has "
            f"{', '.join(_native.available_targets())}"
        )
    return _native.Runner(threads, target)


def _with_bias(out: Float32, bias: Float32 | None) -> Float32:
    """`out` (T, D) with the output bias, if there is one, added in place."""
    if bias is not None:
        out += bias
    return out


class CpuBackend(OffloadingBackend, CpuAttention, CpuRecurrent):
    """`Backend` over the native kernels.

    Args:
        runner: the kernels' threads and instruction set.
        segment_neurons: neurons in a segment, a multiple of 64.
        piece_neurons: neurons in a piece that is read, a multiple of 64.
        resident_embedding: whether the embedding table starts in memory, instead of being read from flash.
        dense_neurons: neurons in a segment of the dense part of a layer with experts, where the layers'
            source provides them; 0: layers hold them.
    """

    name = "cpu"
    looks_up = True
    synchronisations = 0
    """0: an op's result is complete when the op returns."""
    synchronised_seconds = 0.0

    def __init__(
        self,
        runner: _native.Runner,
        *,
        segment_neurons: int,
        piece_neurons: int,
        resident_embedding: bool = False,
        dense_neurons: int = 0,
    ) -> None:
        super().__init__(resident_embedding)
        self._dense_neurons = dense_neurons
        self.runner = runner
        self.streamed: list[StreamedLinear] = []
        """The matrices that may come from flash, in the order of their units."""
        self._segment_neurons = segment_neurons
        self._piece_neurons = piece_neurons
        self._staging: _native.Segment | None = None
        self._buffers: dict[str, Float32] = {}
        self._views: dict[tuple[str, tuple[int, int]], Float32] = {}

    def load_vector(self, values: Float32) -> Float32:
        return np.array(values, dtype=np.float32)

    def load_linear(self, source: LinearSource) -> CpuLinear:
        matrix = self.new_matrix([(source.rows, source.stored)], source.cols)
        for row0, codes, scales, biases in source.chunks():
            matrix.load_rows(self.runner, row0, codes, scales.view(np.uint8), biases.view(np.uint8))
        return CpuLinear(matrix, None if source.bias is None else self.load_vector(source.bias))

    def load_tiles(self, sections: Sequence[TiledSource], bias: Float32 | None = None) -> CpuLinear:
        kinds = [(section.matrix.rows, section.matrix.row.stored) for section in sections]
        matrix = self.new_matrix(kinds, sections[0].matrix.row.cols)
        for index, section in enumerate(sections):
            for first, tiles in section.chunks():
                matrix.load_tiles(index, first, tiles)
        return CpuLinear(matrix, None if bias is None else self.load_vector(bias))

    def load_streamed(
        self, unit: int, stored: Sequence[FlashMatrix], bias: Float32 | None = None
    ) -> StreamedLinear:
        """A matrix like those of `load_tiles`, but one that stays on flash and is read each time it is
        needed.
        """
        linear = StreamedLinear(unit, stored, None if bias is None else self.load_vector(bias))
        self.streamed.append(linear)
        return linear

    def new_matrix(self, sections: list[tuple[int, RowFormat]], cols: int) -> _native.Matrix:
        """An empty matrix for weights to be loaded into. sections: the number of rows and the format of each
        part.
        """
        return _native.Matrix(sections, cols)

    def load_feed_forward(
        self,
        layer: int,
        source: FeedForwardSource,
        selector: Selector | None = None,
        biases: Biases = NO_BIASES,
        gates: CpuLinear | None = None,
        dense: int | None = None,
    ) -> CpuFeedForward | CpuSlices:
        neurons = self._segment_neurons
        if isinstance(source.layout, SliceLayout):
            slices = CpuSlices(self.runner, layer, source, biases)
            self.feed_forwards.append(slices)
            return slices
        if dense is not None:
            source = FirstNeurons(source, dense)
            neurons = self._dense_neurons or max(BLOCK_NEURONS, padded(dense, BLOCK_NEURONS))
        loaded = CpuFeedForward(self.runner, layer, source, neurons, selector, biases, gates)
        if dense and not self._dense_neurons:
            loaded.hold_all(READ_BYTES)
        self.feed_forwards.append(loaded)
        return loaded

    def plain_layers(
        self, config: ModelConfig, layers: Sequence[PlainWeights], adapters: Adapters
    ) -> CpuPlainLayers | None:
        return cpu_plain_layers(self.runner, config, layers, adapters, self._buffer)

    @property
    def target(self) -> str:
        """The instruction set that the kernels use."""
        return self.runner.target

    def allocate_block(self, nbytes: int) -> Bytes:
        """A separately mapped block of keys and values, or of states."""
        return _native.allocate(nbytes)

    def new_arrays(self, layout: KVLayout) -> None:
        """None: the cpu backend keeps keys and values in the cache's blocks."""

    def keep_to(self, budget_bytes: int) -> None:
        """Nothing to do: the kernels allocate nothing themselves."""

    def close(self) -> None:
        """Free scratch memory. Idempotent."""
        self.trim()

    def trim(self) -> None:
        """Free scratch memory, which the next pass allocates again. Invalidates all results of ops."""
        self._buffers.clear()
        self._views.clear()
        self.runner.trim()

    def embedding(self, table: EmbeddingTable, tokens: Int32) -> Float32:
        return table.rows(self.runner, tokens)

    def linear(
        self,
        x: Float32,
        weight: CpuLinear | StreamedLinear | StreamedHead,
        norm: Norm | None = None,
        added: Float32 | None = None,
    ) -> Float32:
        if isinstance(weight, StreamedHead):
            return self._head_logits(x, weight, norm)
        matrix = weight.matrix
        out = self._buffer("linear", (len(x), matrix.rows)) if added is None else added
        matrix.forward(self.runner, x, weight.bias, out, norm, added)
        return out

    def _head_logits(self, x: Float32, head: StreamedHead, norm: Norm | None) -> Float32:
        """Logits of the output head, like `linear`, in a new array: callers keep these logits while others
        are computed.
        """
        out, first = np.empty((len(x), head.rows), np.float32), 0
        # Units that don't stay in memory share it.
        together = [head.units] if head.is_held else [(unit,) for unit in head.units]
        for units in together:
            matrices = [unit.matrix for unit in units]
            _native.forward_stacked(self.runner, matrices, x, out, first, norm)
            for unit in units:
                if unit.bias is not None:
                    out[:, first : first + unit.rows] += unit.bias
                first += unit.rows
        return out

    def add_normed(self, x: Float32, y: Float32, norm: Norm) -> Float32:
        _native.add_normed(self.runner, x, y, norm)
        return x

    def normed(self, x: Float32, norm: Norm) -> Float32:
        out = np.empty_like(x)
        _native.norm(self.runner, x, norm, out)
        return out

    def gated(self, x: Float32, y: Float32, activation: Activation) -> Float32:
        out = np.empty(x.shape, dtype=np.float32)
        gate, up = (np.ascontiguousarray(part).reshape(-1) for part in (x, y))
        _native.activate(self.runner, native_form(FeedForwardSpec(activation)), gate, up, out.reshape(-1))
        return out

    def small_linear(self, x: Float32, weight: Float32) -> Float32:
        return row_sums.small_linear(x, weight)

    def match_rms(self, x: Float32, other: Float32) -> Float32:
        return row_sums.match_rms(x, other)

    def soft_cap(self, x: Float32, cap: float) -> Float32:
        _native.soft_cap(self.runner, x, cap)
        return x

    def prefetch(self, x: Float32, norm: Norm | None, weight: CpuFeedForward) -> None:
        selector = weight.selector
        if selector is not None:
            weight.neurons.prefetch(weight.index, len(x), lambda: self.scores(x, selector, norm))

    def prefetch_experts(
        self, x: Float32, norm: Norm | None, weight: CpuFeedForward, router: Router, spec: LayerSpec
    ) -> None:
        if not weight.neurons.wants_prefetch(weight.index, len(x)):
            return
        experts, matrix = spec.experts, router.matrix.matrix
        assert experts is not None
        before = norm if router.apart is None else router.apart.router

        def chosen() -> Int32:
            logits = self._buffer("expected", (len(x), matrix.rows))
            matrix.forward(self.runner, x, router.matrix.bias, logits, before)
            return native_route(logits, experts, router.choice_bias).ids

        weight.neurons.prefetch_experts(weight.index, chosen)

    def feed_forward(
        self,
        x: Float32,
        weight: CpuFeedForward | CpuSlices,
        spec: FeedForwardSpec,
        batch: ForwardBatch,
        norm: Norm | None = None,
        added: Float32 | None = None,
    ) -> Float32:
        if isinstance(weight, CpuSlices) or weight.selector is None:
            return self.dense_feed_forward(x, weight, spec, batch, norm, added)
        native, selector, form = weight.native, weight.selector, native_form(spec)
        out = self._buffer("feed_forward", x.shape) if added is None else added
        resident = weight.neurons.begin_layer(weight.index, batch)
        if resident is not None and selector.activated is None and selector.deviations is None:
            *narrow, scorer = selector.matrices
            count = native.forward_selected(
                self.runner,
                x,
                scorer.matrix,
                scorer.bias,
                narrow[0].matrix if narrow else None,
                resident.slots,
                resident.addresses,
                selector.predicted,
                form,
                out,
                norm,
                added,
            )
            resident.count_multiplied(count)
            return _with_bias(out, weight.output_bias)
        scores, gates = self._scored(x, selector, norm)
        forward = _native.FeedForwardPass(self.runner, native, x, form, norm)
        for ids, parts in weight.neurons.select(weight.index, scores, batch):
            forward.add_selected(ids, parts, selector.predicted, gates)
        forward.finish(out, added)
        return _with_bias(out, weight.output_bias)

    def dense_feed_forward(
        self,
        x: Float32,
        weight: CpuFeedForward | CpuSlices,
        spec: FeedForwardSpec,
        batch: ForwardBatch,
        norm: Norm | None = None,
        added: Float32 | None = None,
        out: Float32 | None = None,
    ) -> Float32:
        """`feed_forward` over every neuron, without a selector. In a layer with experts, over the dense part
        only.

        Rows that are only estimates, such as streams, use only the resident neurons. out: (T, D), receives
        the result.
        """
        if isinstance(weight, CpuSlices):
            return self._sliced_feed_forward(x, weight, spec, batch, norm, added)
        native, form, gates = weight.native, native_form(spec), None
        if spec.cutoff is not None:
            gates = self._cut_off_gates(x, weight, spec.cutoff, norm)
        out = added if out is None else out
        out = self._buffer("feed_forward", x.shape) if out is None else out
        pieces = weight.neurons.offloaded(weight.index, batch)
        if pieces == () and gates is None:
            native.forward(self.runner, x, weight.segments, form, out, norm, added)
            return _with_bias(out, weight.output_bias)
        forward = _native.FeedForwardPass(self.runner, native, x, form, norm)
        if weight.segments:
            forward.add(weight.segments, None, gates)
        for piece in pieces:
            if isinstance(piece, np.ndarray):
                staging = self._stage(native)
                native.pack(self.runner, staging, -(-len(piece) // BLOCK_NEURONS), 0, piece)
                piece = staging
            forward.add([piece], batch.num_exact_rows, gates)
        forward.finish(out, added)
        return _with_bias(out, weight.output_bias)

    def _sliced_feed_forward(
        self,
        x: Float32,
        weight: CpuSlices,
        spec: FeedForwardSpec,
        batch: ForwardBatch,
        norm: Norm | None,
        added: Float32 | None,
    ) -> Float32:
        """`feed_forward` of a layer in slices, whose outputs are added in order.

        Rows that are only estimates, such as streams, use resident slices, and the resident high planes of
        others.
        """
        out = self._buffer("feed_forward", x.shape) if added is None else added
        pieces = weight.neurons.offloaded(weight.index, batch)
        exact, form, at = batch.num_exact_rows, native_form(spec), weight.slices.high_bytes

        def begin(rows: slice) -> _native.SlicePass:
            forward = _native.SlicePass(self.runner, weight.native, x[rows], form, norm, weight.gate_bias)
            forward.add(weight.segments, None, out[rows], None if added is None else added[rows])
            return forward

        rows = slice(None)
        if weight.high_planes and exact < len(x):
            estimates, rows = slice(exact, None), slice(exact)
            planes = [(plane, None) for plane in weight.high_planes]
            begin(estimates).add_planes(planes, None, out[estimates], out[estimates])
        if rows.stop == 0:
            return _with_bias(out, weight.output_bias)
        forward = begin(rows)
        for piece in pieces:
            if isinstance(piece, Planes):
                forward.add_planes([piece], exact, out, out)
            elif piece.ndim == 1:
                forward.add([piece], exact, out, out)
            else:
                forward.add_planes([(record[:at], record[at:]) for record in piece], exact, out, out)
        return _with_bias(out, weight.output_bias)

    def _cut_off_gates(self, x: Float32, weight: CpuFeedForward, cutoff: float, norm: Norm | None) -> Float32:
        """Gates (T, F) for norm(x), x (T, D), after the statistical cutoff over each token's gates."""
        assert weight.gates is not None
        matrix = weight.gates.matrix
        gates = self._buffer("gates", (len(x), matrix.rows))
        matrix.forward(self.runner, x, None, gates, norm)
        row_sums.cut_off(gates, cutoff)
        return gates

    def mixture(
        self,
        x: Float32,
        weight: CpuFeedForward,
        router: Router,
        spec: LayerSpec,
        batch: ForwardBatch,
        norm: Norm | None = None,
        added: Float32 | None = None,
    ) -> Float32:
        experts = spec.experts
        assert experts is not None
        apart, residual = router.apart, x
        x = x if norm is None else self.normed(x, norm)
        total = np.zeros_like(x)
        if weight.source.num_neurons:
            self.dense_feed_forward(x, weight, spec.feed_forward, batch, out=total)
            if router.shared_gate is not None:
                total *= sigmoid(self.linear(x, router.shared_gate))
        dense_output = total
        if apart is not None:
            dense_output, total = self.normed(total, apart.dense_output), np.zeros_like(x)
            x = self.normed(residual, apart.experts)
        logits = self.linear(x if apart is None else residual, router.matrix, apart and apart.router)
        routing = native_route(logits, experts, router.choice_bias, apart and apart.scales)
        self.add_experts(x, weight, spec, routing, batch, total)
        if apart is not None:
            total = np.add(dense_output, self.normed(total, apart.output), out=dense_output)
        return total if added is None else np.add(added, total, out=added)

    def add_experts(
        self,
        x: Float32,
        weight: CpuFeedForward,
        spec: LayerSpec,
        routing: Routing,
        batch: ForwardBatch,
        total: Float32,
    ) -> None:
        """Adds to total (T, D) the outputs of the experts that `routing` chose, for their input x (T, D)."""
        assert spec.experts is not None
        # Outputs are added in the order of experts. Those of few rows are held until all have come.
        needs_expert_order = len(x) > HELD_ROWS
        forward = _native.ExpertPass(
            self.runner,
            weight.native,
            weight.expert,
            spec.experts.neurons,
            x,
            routing.ids,
            routing.weights,
            native_form(spec.feed_forward),
            needs_expert_order,
            total,
        )
        for expert, address in weight.neurons.experts(weight.index, routing, batch, needs_expert_order):
            forward.add(expert, address)
        forward.finish()

    def rows(self, x: Float32, tokens: Sequence[int]) -> Float32:
        return x[list(tokens)]

    def stacked(self, parts: Sequence[Float32]) -> Float32:
        return np.concatenate(parts)

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
        down.matrix.forward(self.runner, x, None, narrow, norm)
        if activation is not None:
            np.maximum(narrow, 0, out=narrow)
        wide = self._buffer("from low rank", (len(narrow), up.matrix.rows))
        up.matrix.forward(self.runner, narrow, None, wide)
        y[first:] += wide
        return y

    def to_numpy(self, x: Float32) -> Float32:
        # Buffers are used again, and are all views; other arrays have memory of their own.
        return x if x.base is None else x.copy()

    def scores(self, x: Float32, selector: Selector, norm: Norm | None = None) -> Float32:
        """The selector's scores of all neurons, (T, F), for norm(x), x (T, D)."""
        return self._scored(x, selector, norm)[0]

    def _scored(self, x: Float32, selector: Selector, norm: Norm | None) -> tuple[Float32, Float32]:
        """Scores (T, F) for norm(x), x (T, D), and gates (T, F), valid where the score is above zero."""
        for op, linear in zip(SCORES, selector.matrices, strict=False):
            out = self._buffer(op, (len(x), linear.matrix.rows))
            linear.matrix.forward(self.runner, x, linear.bias, out, norm)
            x, norm = out, None
        if selector.deviations is not None:
            row_sums.cut_off(x, selector.deviations)
        if selector.activated is None and not selector.min_gate:
            return x, x
        scores = self._buffer("cut off", (len(x), x.shape[1]))
        if selector.activated is not None:
            form = native_form(selector.activated)
            for gates, activated in zip(x, scores, strict=True):
                _native.activate(self.runner, form, gates, None, activated)
            return np.abs(scores, out=scores), x
        return np.subtract(x, np.float32(selector.min_gate), out=scores), x

    def _stage(self, native: _native.FeedForward) -> _native.Segment:
        """The segment in which records from flash are packed before they are multiplied."""
        if self._staging is None:
            self._staging = _native.Segment(native.segment_bytes(self._piece_neurons // BLOCK_NEURONS))
        return self._staging

    def _buffer(self, op: str, shape: tuple[int, int]) -> Float32:
        """An op's output array of this shape, re-used: fresh pages cost more than many ops.

        Views are cached, as making one takes as long as a short product.
        """
        view = self._views.get((op, shape))
        if view is None:
            size = shape[0] * shape[1]
            if op not in self._buffers or self._buffers[op].size < size:
                # Freed before the new one is allocated: the plan counts only one.
                self._buffers.pop(op, None)
                self._views.clear()
                self._buffers[op] = memory.empty((size,), np.float32)
            if len(self._views) >= VIEWS:
                self._views.clear()
            view = self._views[op, shape] = self._buffers[op][:size].reshape(shape)
        return view
