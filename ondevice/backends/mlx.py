"""The MLX backend: `mlx.core` arrays for activations, quantised weights in the bundle's codes, Apple's GPU.

A layer's neurons are summed range by range in ascending order, whether they are resident, read ahead or
fetched, so no bit of a result depends on the budget. Whether a row's bits depend on other rows, or on skipped
zeros, is measured on the device (`mlx_row_ops.py`); on MLX's CPU device they don't. MLX is lazy: memory
filled from flash is overwritten only after everything computed from it is evaluated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import field, replace
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ondevice.backends.base import (
    NO_BIASES,
    Biases,
    FeedForwardSource,
    Float32,
    Int32,
    KVStore,
    LinearSource,
    Norm,
    Router,
    Selector,
)
from ondevice.backends.expert_records import HELD_ROWS
from ondevice.backends.feed_forward_layer import BLOCK_NEURONS, FirstNeurons
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.backends.kv_layout import KVLayout
from ondevice.backends.mlx_experts import Chosen, route
from ondevice.backends.mlx_kv import MlxKV
from ondevice.backends.mlx_linear import MlxLinear
from ondevice.backends.mlx_memory import MlxLimits, Synchronisations, begin
from ondevice.backends.mlx_ops import MlxOps, activate, cut_off, hidden, normed
from ondevice.backends.mlx_weights import (
    GatheredNeurons,
    MlxFeedForward,
    MlxNeurons,
    MlxPieceMemory,
    MlxSegment,
)
from ondevice.backends.offloading import OffloadingBackend
from ondevice.backends.routing import Routing
from ondevice.backends.stored_rows import RowsOfTiles
from ondevice.backends.tiled_source import TiledSource
from ondevice.bundle.matrix_layout import padded
from ondevice.model_config import FeedForwardSpec, LayerSpec
from ondevice.records import dataclass


def compute_type() -> mx.Dtype:
    """The type of matrix products on MLX's default device: float16 on a GPU, else float32."""
    return mx.float16 if mx.default_device() == mx.gpu else mx.float32


class MlxBackend(OffloadingBackend, MlxOps):
    """`Backend` under a budget, on MLX's default device.

    Args:
        segment_neurons: neurons in a segment and in a piece that is read, a multiple of 64.
        stage_neurons: selected neurons that a stage holds, at least segment_neurons; 0: no stages.
        stages: largest number of stages.
        cache_bytes: bytes of freed arrays that MLX may keep.
        budget_bytes: the process's budget; 0: MLX's limits stay as they are.
        resident_embedding: whether the embedding table starts in memory.
        copies_reads: whether flash is read into plain memory, and copied from there.
    """

    name = "mlx"

    def __init__(
        self,
        *,
        segment_neurons: int,
        stage_neurons: int = 0,
        stages: int = 0,
        cache_bytes: int = 0,
        budget_bytes: int = 0,
        resident_embedding: bool = False,
        copies_reads: bool = False,
    ) -> None:
        super().__init__(resident_embedding)
        self.dtype = compute_type()
        self._limits = MlxLimits(cache_bytes, budget_bytes) if budget_bytes else None
        self._waits = Synchronisations()
        self._segment_neurons = segment_neurons
        self._stage_neurons = stage_neurons
        self._max_stages = stages
        self._stages: list[_Stage] = []
        self._pieces = MlxPieceMemory(self._waits, copies_reads)
        self._prefetched: tuple[MlxFeedForward, int, mx.array] | None = None
        self._begun: mx.array | None = None
        """The last computation begun, until something waits for it or for a result of it."""
        self._bounded: tuple[mx.array, ...] = ()
        """The arrays that `bounded` began last, until something waits."""

    def load_linear(self, source: LinearSource) -> MlxLinear:
        return MlxLinear([source], source.bias, self.dtype)

    def load_tiles(self, sections: Sequence[TiledSource], bias: Float32 | None = None) -> MlxLinear:
        return MlxLinear([RowsOfTiles(it, nearest=True) for it in sections], bias, self.dtype)

    def load_feed_forward(
        self,
        layer: int,
        source: FeedForwardSource,
        selector: Selector | None = None,
        biases: Biases = NO_BIASES,
        gates: MlxLinear | None = None,
        dense: int | None = None,
    ) -> MlxFeedForward:
        neurons = source if dense is None else FirstNeurons(source, dense)
        loaded = MlxFeedForward(
            layer, neurons, self._segment_neurons, self.dtype, self._pieces, selector, biases, gates
        )
        if dense:
            loaded.hold_all()
        self.feed_forwards.append(loaded)
        return loaded

    @property
    def target(self) -> str:
        """The device that multiplies: `mlx-gpu` or `mlx-cpu`."""
        return f"mlx-{mx.default_device().type.name}"

    @property
    def synchronisations(self) -> int:
        """Number of times that the host has waited for MLX."""
        return self._waits.count

    @property
    def synchronised_seconds(self) -> float:
        """Seconds that the host has waited for MLX."""
        return self._waits.seconds

    def allocate_block(self, nbytes: int) -> None:
        """None: the arrays from `new_arrays` hold the keys and values, so no block is needed."""

    def new_arrays(self, layout: KVLayout) -> MlxKV:
        """Empty arrays for a cache's keys and values."""
        return MlxKV(layout, self._waits)

    def keep_to(self, budget_bytes: int) -> None:
        """Set MLX's limits to the budget in bytes, if this backend sets limits at all."""
        if self._limits is not None:
            self._limits.keep_to(budget_bytes)

    def close(self) -> None:
        """Free memory, drop the results of computations under way, and restore MLX's limits. Idempotent."""
        self._begun = None
        self.feed_forwards.clear()  # before `trim`, which clears MLX's cache
        self.trim()
        if self._limits is not None:
            self._limits.restore()

    def trim(self) -> None:
        """Free scratch memory, after waiting for the computations that use it."""
        if self._begun is not None:
            self._await(self._begun)
        self._stages.clear()
        self._prefetched = None
        mx.clear_cache()

    def product(self, x: mx.array, weight: MlxLinear) -> mx.array:
        return weight.product(x)

    def heads_product(self, x: mx.array, weight: MlxLinear) -> mx.array:
        return weight.heads_product(x)

    def begin_pass(self, batch: ForwardBatch) -> None:
        # A prompt's chunk without logits ends before the next one begins. So the computations under way fit
        # one pass's scratch memory, and a cancelled prompt ends soon.
        self._prefetched = None  # from a cancelled pass
        if self._begun is not None:
            self._await(self._begun)
        super().begin_pass(batch)

    def attend(self, qkv: mx.array, kv: KVStore, layer: int, *where: Any, **options: Any) -> mx.array:
        return self._beginning(super().attend(qkv, kv, layer, *where, **options))

    def gated_delta(self, projected: mx.array, *where: Any) -> mx.array:
        return self._beginning(super().gated_delta(projected, *where))

    def mamba2(self, projected: mx.array, *where: Any) -> mx.array:
        return self._beginning(super().mamba2(projected, *where))

    def short_conv(self, projected: mx.array, *where: Any) -> mx.array:
        return self._beginning(super().short_conv(projected, *where))

    def _beginning(self, result: mx.array) -> mx.array:
        self._begun = result
        begin(result)
        return result

    def bounded(self, *arrays: mx.array) -> None:
        begin(*arrays)
        if self._bounded:
            self._waits.wait(*self._bounded)
        self._bounded = arrays

    def prefetch(self, x: mx.array, norm: Norm | None, weight: MlxFeedForward) -> None:
        selector, tokens = weight.selector, x.shape[0]
        if selector is None:
            return
        if weight.neurons.wants_prefetch(weight.index, tokens):
            # Read back together with the layer's scores, so that prefetching costs no synchronisation.
            self._prefetched = weight, tokens, self._scored(x, selector, norm)[0]
        else:
            weight.neurons.prefetch(
                weight.index, tokens, lambda: self.to_numpy(self._scored(x, selector, norm)[0])
            )

    def feed_forward(
        self,
        x: mx.array,
        weight: MlxFeedForward,
        spec: FeedForwardSpec,
        batch: ForwardBatch,
        norm: Norm | None = None,
        added: mx.array | None = None,
    ) -> mx.array:
        if weight.selector is None:
            return self.dense_feed_forward(x, weight, spec, batch, norm, added)
        out = self._selected(normed(x, norm), weight, weight.selector, spec, batch)
        out = _with_bias(out, weight)
        return out if added is None else added + out

    def dense_feed_forward(
        self,
        x: mx.array,
        weight: MlxFeedForward,
        spec: FeedForwardSpec,
        batch: ForwardBatch,
        norm: Norm | None = None,
        added: mx.array | None = None,
    ) -> mx.array:
        """`feed_forward` over every neuron, without a selector.

        Segments are multiplied in order, resident ones first. Rows that are only estimates, such as streams,
        use only the resident ones.
        """
        x, out = normed(x, norm), mx.zeros(x.shape)
        gates = None if weight.gates is None else cut_off(self.product(x, weight.gates), spec.cutoff)
        pieces, resident = weight.neurons.offloaded(weight.index, batch), len(weight.segments)
        for index, segment in enumerate(weight.segments):
            out = out + all_of(x, segment.neurons, spec, _segment_gates(gates, weight, index))
        estimates = out[batch.num_exact_rows :]
        if estimates.shape[0]:
            x, out = x[: batch.num_exact_rows], out[: batch.num_exact_rows]
            gates = None if gates is None else gates[: batch.num_exact_rows]
        # A piece is one segment.
        for index, piece in enumerate(pieces, resident):
            segment_gates = _segment_gates(gates, weight, index)
            if isinstance(piece, MlxSegment):
                out = out + all_of(x, piece.neurons, spec, segment_gates)
            else:
                neurons = weight.neurons_of(piece, index * weight.segment_neurons)
                out = out + all_of(x, neurons, spec, segment_gates)
                self._pieces.begin([out])
        if estimates.shape[0]:
            out = mx.concatenate([out, estimates])
        out = _with_bias(out, weight)
        return out if added is None else added + out

    def mixture(
        self,
        x: mx.array,
        weight: MlxFeedForward,
        router: Router,
        spec: LayerSpec,
        batch: ForwardBatch,
        norm: Norm | None = None,
        added: mx.array | None = None,
    ) -> mx.array:
        experts, apart, residual = spec.experts, router.apart, x
        assert experts is not None
        x = normed(x, norm)
        total = mx.zeros(x.shape)
        if weight.segments:
            total = self.dense_feed_forward(x, weight, spec.feed_forward, batch)
            if router.shared_gate is not None:
                total = total * mx.sigmoid(self.product(x, router.shared_gate))
        dense_output = total
        if apart is not None:
            dense_output, total = normed(total, apart.dense_output), mx.zeros(x.shape)
            x = normed(residual, apart.experts)
        logits = self.product(x if apart is None else normed(residual, apart.router), router.matrix)
        chosen = route(logits, experts, router.choice_bias, None if apart is None else apart.scales)
        held = weight.held_experts if weight.has_expert_matrices else None
        if held is None:
            total = self._fetched(total, x, weight, chosen, spec, batch)
        else:
            total = held.added_to(total, x, chosen, spec.feed_forward)
        if apart is not None:
            total = dense_output + normed(total, apart.output)
        return total if added is None else added + total

    def _fetched(
        self,
        total: mx.array,
        x: mx.array,
        weight: MlxFeedForward,
        chosen: Chosen,
        spec: LayerSpec,
        batch: ForwardBatch,
    ) -> mx.array:
        """total (T, D) plus the weighted outputs of each token's experts, in ascending order.

        The choice of experts is read back to the host, and experts are multiplied one by one from their
        slots.
        """
        self._await(*chosen)
        assert spec.experts is not None
        routing = Routing(np.array(chosen.ids), np.array(chosen.weights), spec.experts.count)
        rows_of_pass = x.shape[0]
        needs_expert_order, held = rows_of_pass > HELD_ROWS, {}
        for expert, address in weight.neurons.experts(weight.index, routing, batch, needs_expert_order):
            rows, weights = routing.rows_of(expert)
            inputs = x if len(rows) == rows_of_pass else x[mx.array(rows)]
            if weight.has_expert_matrices:
                first = mx.zeros((len(rows), 1), dtype=mx.int32)
                outputs = weight.expert_at(address).outputs(inputs, first, spec.feed_forward)[:, 0]
            else:
                outputs = all_of(inputs, weight.expert_neurons(address), spec.feed_forward)
            held[expert] = rows, outputs * mx.array(weights)
            if needs_expert_order:
                total = _with_outputs(total, held)
            self._pieces.begin([total if needs_expert_order else held[expert][1]])
        return _with_outputs(total, held)

    def _selected(
        self,
        x: mx.array,
        weight: MlxFeedForward,
        selector: Selector,
        spec: FeedForwardSpec,
        batch: ForwardBatch,
    ) -> mx.array:
        """The output of the selected neurons, (T, D), for x (T, D).

        It is summed segment by segment, so the order of summation doesn't depend on where neurons are.
        """
        # A resident layer's addresses aren't used: neurons are gathered.
        weight.neurons.begin_layer(weight.index, batch)
        scores, gates = self._scored(x, selector, None)
        known = self._to_host(scores)
        out = mx.zeros(x.shape)
        piece: _Piece | None = None
        for ids, addresses in weight.neurons.select(weight.index, known, batch):
            for first, last in _ranges(ids, weight.segment_neurons):
                index = int(ids[first]) // weight.segment_neurons
                if piece is not None and piece.index != index:
                    out = self._multiplied(out, x, weight, piece, known, gates, spec)
                    piece = None
                if piece is None:
                    piece = _Piece(index, self._stage(weight))
                self._gather(piece, ids[first:last], addresses[first:last], weight)
        if piece is not None:
            out = self._multiplied(out, x, weight, piece, known, gates, spec)
        return out

    def _gather(
        self, piece: _Piece, ids: Int32, addresses: NDArray[np.uint64], weight: MlxFeedForward
    ) -> None:
        """Copy more neurons of `piece` from their addresses into its stage."""
        if piece.first + piece.places(len(ids)) > self._stage_neurons:
            # A piece is multiplied at once, so its neurons gathered so far move to the next stage.
            stage = self._next_stage(weight)
            stage.room.take_over(piece.stage.room, piece.first, piece.count)
            piece.stage, piece.first = stage, 0
        piece.stage.room.gather(piece.first + piece.count, addresses)
        piece.ids.append(ids.copy())
        piece.count += len(ids)

    def _multiplied(
        self,
        total: mx.array,
        x: mx.array,
        weight: MlxFeedForward,
        piece: _Piece,
        scores: Float32,
        gates: mx.array,
        spec: FeedForwardSpec,
    ) -> mx.array:
        """total (T, D) plus the output of a piece's neurons, padded to blocks of neurons."""
        ids, stage, count = np.concatenate(piece.ids), piece.stage, piece.places()
        stage.filled = piece.first + count
        stage.room.clear(piece.first + len(ids), stage.filled)
        neurons = stage.room.neurons(piece.first, stage.filled)
        chosen = np.zeros((len(scores), count), dtype=np.float32)
        chosen[:, : len(ids)] = scores[:, ids] > 0
        where = np.zeros(count, dtype=np.int32)
        where[: len(ids)] = ids
        columns, bias = mx.array(where), weight.biases.gates
        if neurons.gate is None:
            chosen_gates = gates[:, columns]
        else:
            chosen_gates = replace(neurons, bias=None if bias is None else bias[columns]).gates(x)
        stage.pending = total + product_of_selected(x, neurons, chosen_gates, mx.array(chosen), spec)
        return stage.pending

    def _stage(self, weight: MlxFeedForward) -> _Stage:
        """A stage with room for at least one block of neurons."""
        if self._stages and self._stages[0].filled < self._stage_neurons:
            return self._stages[0]
        return self._next_stage(weight)

    def _next_stage(self, weight: MlxFeedForward) -> _Stage:
        """An empty stage that no computation uses."""
        if len(self._stages) < self._max_stages:
            self._stages.insert(0, _Stage(weight.room_for(self._stage_neurons)))
        else:
            self._stages.insert(0, self._stages.pop())
            if self._stages[0].pending is not None:
                self._await()
            self._stages[0].filled = 0
        return self._stages[0]

    def _to_host(self, scores: mx.array) -> Float32:
        """The scores in host memory. The wait for them also brings the scores for the next layer's
        prefetch.
        """
        prefetched, self._prefetched = self._prefetched, None
        if prefetched is None:
            return self.to_numpy(scores)
        layer, tokens, predicted = prefetched
        self._await(scores, predicted)
        layer.neurons.prefetch(layer.index, tokens, lambda: np.array(predicted))
        return np.array(scores)

    def to_numpy(self, x: mx.array) -> Float32:
        self._await(x)
        return np.array(x)

    def scores(self, x: mx.array, selector: Selector, norm: Norm | None = None) -> Float32:
        """The selector's scores of all neurons, (T, F), for norm(x), x (T, D)."""
        return self.to_numpy(self._scored(x, selector, norm)[0])

    def _await(self, *arrays: mx.array) -> None:
        """Wait for these arrays, and for all computations on stages, in one synchronisation."""
        self._waits.wait(*arrays, *(stage.pending for stage in self._stages if stage.pending is not None))
        for stage in self._stages:
            stage.pending = None
        self._begun, self._bounded = None, ()

    def _scored(self, x: mx.array, selector: Selector, norm: Norm | None) -> tuple[mx.array, mx.array]:
        """Scores (T, F) for norm(x), x (T, D), and gates (T, F), valid where the score is above zero."""
        gates = normed(x, norm)
        for linear in selector.matrices:
            gates = self.product(gates, linear)
        gates = cut_off(gates, selector.deviations)
        if selector.activated is not None:
            return mx.abs(activate(gates, selector.activated.activation)), gates
        return (gates - selector.min_gate if selector.min_gate else gates), gates


@dataclass
class _Stage:
    """Room for gathered neurons. A place is overwritten only after the stage's neurons were multiplied."""

    room: GatheredNeurons
    filled: int = 0
    pending: mx.array | None = None
    """The last computation on these neurons, until it is known to have ended."""


@dataclass
class _Piece:
    """Selected neurons of one range, in ascending order, from place `first` of a stage on."""

    index: int
    stage: _Stage
    first: int = field(init=False)
    count: int = 0
    ids: list[Int32] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.first = self.stage.filled

    def places(self, more: int = 0) -> int:
        """Number of places this piece takes with `more` neurons added, rounded up to blocks."""
        return padded(self.count + more, BLOCK_NEURONS)


def _ranges(ids: Int32, width: int) -> Iterator[tuple[int, int]]:
    """Yields (start, stop) of each run of ascending ids that lie between two neighbouring multiples of
    `width`.
    """
    start = 0
    while start < len(ids):
        end = (int(ids[start]) // width + 1) * width
        stop = int(np.searchsorted(ids, end))
        yield start, stop
        start = stop


def all_of(
    x: mx.array, neurons: MlxNeurons, spec: FeedForwardSpec, gates: mx.array | None = None
) -> mx.array:
    """The output of all `neurons`, (T, D), for x (T, D). gates: (T, n), or None to compute them."""
    gates = neurons.gates(x) if gates is None else gates
    return neurons.outputs(hidden(gates, neurons.ups(x), spec))


def _segment_gates(gates: mx.array | None, weight: MlxFeedForward, index: int) -> mx.array | None:
    """The columns of gates (T, F) that belong to segment `index`."""
    if gates is None:
        return None
    neurons = weight.segment_range(index)
    return gates[:, neurons.start : neurons.stop]


def product_of_selected(
    x: mx.array, neurons: MlxNeurons, gates: mx.array, chosen: mx.array, spec: FeedForwardSpec
) -> mx.array:
    """The output (T, D) of n gathered neurons for x (T, D). gates: (T, n). chosen: (T, n), 1 or 0."""
    return neurons.down.columns_product(hidden(gates, neurons.ups(x), spec) * chosen)


def _with_outputs(total: mx.array, held: dict[int, tuple[NDArray[np.intp], mx.array]]) -> mx.array:
    """total (T, D) plus the outputs of the experts in `held`, each (rows, values), in ascending order.
    Empties `held`.
    """
    for expert in sorted(held):
        rows, out = held.pop(expert)
        total = total + out if len(rows) == total.shape[0] else total.at[mx.array(rows)].add(out)
    return total


def _with_bias(out: mx.array, weight: MlxFeedForward) -> mx.array:
    return out if weight.biases.output is None else out + weight.biases.output
