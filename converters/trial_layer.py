"""Runs a few tokens through a bundle's layers, one layer in memory at a time.

A layer's attention is loaded completely, its neurons a few MB at a time, and its experts one by one.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ondevice.backends.base import Block, Bytes, EmbeddingSource, FeedForwardSource, Float32
from ondevice.backends.cpu import CpuBackend
from ondevice.backends.cpu_neurons import CpuFeedForward, CpuSlices
from ondevice.backends.expert_records import ExpertRecords
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.backends.kv_layout import KVLayout
from ondevice.backends.neuron_source import NeuronSource
from ondevice.backends.routing import Routing
from ondevice.bundle.layout import RecordLayout, SliceLayout
from ondevice.bundle.reader import Bundle
from ondevice.callbacks import never_cancelled
from ondevice.config import QuantConfig, RowFormat
from ondevice.converters.pipeline import ahead
from ondevice.flash.reader import FlashReader
from ondevice.kernels import _native
from ondevice.model.altup import ResidualStreams
from ondevice.model.loading import (
    blocks_of_model,
    feed_forward_biases,
    layer_parts,
    layer_weights,
    loaded_positions,
    model_weight_parts,
    position_parts,
)
from ondevice.model.parts import Part, part_tasks
from ondevice.model.records import NeuronRecords, embedding_records, per_layer_records
from ondevice.model.selectors import cutoff_gates
from ondevice.model.sequence_state import SequenceState, state_over
from ondevice.model.tensor_file import TaskResults, TensorFile
from ondevice.model.transformer import Transformer
from ondevice.model.weights import ModelWeights
from ondevice.model_config import LayerSpec, ModelConfig

PIECE_BYTES = 8 << 20
"""Bytes of neurons, or of the head's rows, that are computed together; as many are read meanwhile. Fresh
memory of this size has huge pages: with pieces of 4 MB, a 7B trial took 1.3 core seconds more."""


class LayerBackend(CpuBackend):
    """A backend that runs one layer after another. A layer's matrices reuse the memory of the
    layer before.
    """

    def __init__(self, runner: _native.Runner, layout: RecordLayout | SliceLayout) -> None:
        neurons = layout.neurons_in(PIECE_BYTES)
        super().__init__(runner, segment_neurons=neurons, piece_neurons=neurons)
        self.neurons = neurons
        self._used: list[tuple[Any, _native.Matrix]] = []
        self._free: list[tuple[Any, _native.Matrix]] = []

    def new_matrix(self, sections: list[tuple[int, RowFormat]], cols: int) -> _native.Matrix:
        key = sections, cols
        at = next((i for i, (free, _) in enumerate(self._free) if free == key), None)
        matrix = super().new_matrix(sections, cols) if at is None else self._free.pop(at)[1]
        self._used.append((key, matrix))
        return matrix

    def next_layer(self) -> None:
        """Forget the layer that is loaded."""
        self._free, self._used = self._used, []
        self.feed_forwards.clear()


def through_layer(
    config: ModelConfig,
    quant: QuantConfig,
    resident: TensorFile,
    table: EmbeddingSource,
    source: FeedForwardSource,
    backend: LayerBackend,
    layer: int,
    tokens: Sequence[int],
    x: Float32 | None,
    inputs: Sequence[Part],
) -> Float32:
    """The output (T, D) of a plain model's layer. x: its input (T, D); None for the tokens' embedding.

    inputs: the parts that compute the embedding.
    """
    alone = replace(config, layers=config.layers[layer : layer + 1])
    backend.next_layer()
    loaded = loaded_parts(backend, layer_parts(config, quant, resident, layer))
    feed_forward = backend.load_feed_forward(0, source, biases=feed_forward_biases(loaded))
    feed_forward.neurons = _Pieces(source, backend.neurons)
    weights = layer_weights(backend, alone, alone.layers[0], loaded, feed_forward)
    embedding = backend.load_embedding(table)
    positions = project_in = None
    if x is None:
        loaded = loaded_parts(backend, inputs)
        positions, project_in = loaded_positions(alone, loaded), loaded.get("project_in")
    model_weights = ModelWeights(embedding, [weights], None, None, positions, project_in)
    model = Transformer(alone, backend, model_weights)
    # The arrays that a backend returns are valid only until its next op.
    return np.array(model.hidden_states(tokens, SequenceState(KVLayout(alone, 16)), x=x))


class LayerByLayer:
    """Runs a text through all layers of a bundle, whatever blocks they have."""

    def __init__(
        self,
        bundle: Bundle,
        reader: FlashReader,
        resident: TensorFile,
        backend: LayerBackend,
        tokens: Sequence[int],
    ) -> None:
        self._bundle = bundle
        self._config = bundle.config
        self._reader = reader
        self._resident = resident
        self._backend = backend
        self._tokens = tokens
        self._keys: dict[int, list[Block]] = {}
        """Keys and values of layers whose keys and values others read."""

    def run(self) -> Float32:
        """The output (T, D) of the last layer."""
        config, width = self._config, self._config.per_layer_width
        model = self._around()
        residual_streams, inputs = model.embed_residuals(self._tokens)
        residual_streams = _held(residual_streams)
        inputs = None if inputs is None else np.array(inputs)
        owners = {layer.attention.keys_of for layer in config.layers}
        for layer in range(config.num_layers):
            layer_inputs = None if inputs is None else inputs[:, layer * width : (layer + 1) * width]
            residual_streams, blocks = self._through(layer, residual_streams, layer_inputs)
            if layer in owners:
                self._keys[layer] = blocks
        return (
            residual_streams[0]
            if len(residual_streams) == 1
            else np.array(self._around().merge_residuals(residual_streams))
        )

    def _around(self) -> Transformer:
        """The model without its layers."""
        config, bundle, backend = self._config, self._bundle, self._backend
        backend.next_layer()
        parts = [*position_parts(config, self._resident), *model_weight_parts(bundle, self._resident)]
        loaded = loaded_parts(backend, parts)
        rows = None
        if config.per_layer_width:
            rows = backend.load_embedding(per_layer_records(bundle, self._reader), offloaded=True)
        table = backend.load_embedding(embedding_records(bundle, self._reader))
        positions, blocks = loaded_positions(config, loaded), blocks_of_model(config, loaded, rows)
        return Transformer(config, backend, ModelWeights(table, [], None, None, positions, **blocks))

    def _through(
        self, layer: int, residual_streams: ResidualStreams, inputs: Float32 | None
    ) -> tuple[ResidualStreams, list[Block]]:
        """The output of a layer, and its keys and values. inputs: the layer's per-layer inputs, (T, W)."""
        config, backend = self._config, self._backend
        spec, owner = config.layers[layer], config.layers[layer].attention.keys_of
        layers: tuple[LayerSpec, ...] = (spec,)
        if owner is not None:
            shared = replace(spec, attention=replace(spec.attention, keys_of=0))
            layers = (config.layers[owner], shared)
        alone = replace(config, layers=layers)
        backend.next_layer()
        parts = layer_parts(config, self._bundle.quant, self._resident, layer)
        parts = [*parts, *cutoff_gates(self._bundle, self._reader, layer, "dense")]
        loaded = loaded_parts(backend, parts)
        weights = layer_weights(backend, config, spec, loaded, self._neurons(layer, loaded))
        table = backend.load_embedding(embedding_records(self._bundle, self._reader))
        # The layer that another one's keys are of isn't run again.
        model = Transformer(alone, backend, ModelWeights(table, [weights] * len(layers), None, None))
        layout = KVLayout(alone, 16)
        kv = SequenceState(layout) if owner is None else state_over(layout, self._keys[owner])
        outputs = model.layer(len(layers) - 1, residual_streams, self._tokens, kv, inputs)
        return _held(outputs), kv.blocks

    def _neurons(self, layer: int, loaded: Mapping[str, Any]) -> CpuFeedForward | CpuSlices:
        config, spec = self._config, self._config.layers[layer]
        source = NeuronRecords(self._bundle, self._reader, layer)
        dense = None if spec.experts is None else config.dense_neurons(spec)
        feed_forward = self._backend.load_feed_forward(
            0, source, biases=feed_forward_biases(loaded), gates=loaded.get("gate"), dense=dense
        )
        if spec.experts is None:
            feed_forward.neurons = _Pieces(source, self._backend.neurons)
        else:
            assert source.experts is not None
            feed_forward.neurons = _Experts(source.experts)
        return feed_forward


def _held(residual_streams: ResidualStreams) -> ResidualStreams:
    """Copies of arrays that a backend returned, which are valid only until its next op."""
    return [np.array(copy) for copy in residual_streams]


class _Pieces(NeuronSource):
    """A neuron source that reads the neurons of `source` one piece at a time."""

    def __init__(self, source: FeedForwardSource, piece_neurons: int) -> None:
        self._source = source
        self._piece_neurons = piece_neurons

    def offloaded(self, layer: int, batch: ForwardBatch) -> Iterator[Bytes]:
        # The next piece is read while this one is computed.
        return ahead(self._read(), 1)

    def _read(self) -> Generator[Bytes, None, None]:
        step, end = self._piece_neurons, self._source.num_neurons
        for first in range(0, end, step):
            yield self._source.read(first, min(step, end - first))


class _Experts(NeuronSource):
    """A neuron source that reads experts one at a time."""

    def __init__(self, experts: ExpertRecords) -> None:
        self._experts = experts

    def offloaded(self, layer: int, batch: ForwardBatch) -> Sequence[Bytes]:
        """Nothing: the neurons that belong to no expert are already in memory."""
        return ()

    def experts(
        self, layer: int, routing: Routing, batch: ForwardBatch, needs_expert_order: bool
    ) -> Iterator[tuple[int, int]]:
        for expert in routing.experts.tolist():
            record = self._experts.read(expert)
            yield expert, record.ctypes.data
            # One at a time, as they may be large.
            del record


def loaded_parts(backend: CpuBackend, parts: Sequence[Part]) -> dict[str, Any]:
    """The parts to load, loaded into the backend, by field."""
    with TaskResults(part_tasks(parts, never_cancelled)) as ahead:
        return {part.field: part.load(backend, ahead) for part in parts}
