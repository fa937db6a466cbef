"""Loads a checkpoint's unrounded weights into the `cpu` backend, and records the inputs of their matrices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ondevice.backends import row_sums
from ondevice.backends.base import Float32, Int32, Norm
from ondevice.backends.cpu import CpuBackend
from ondevice.backends.cpu_matrices import CpuLinear
from ondevice.backends.cpu_neurons import native_form
from ondevice.backends.feed_forward_layer import BLOCK_NEURONS
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.bundle.weight_shapes import WeightShape, layer_weight_shapes, model_weight_shapes
from ondevice.converters.architectures import tensors as names
from ondevice.converters.checkpoints.base import Checkpoint, SourceTensor
from ondevice.converters.quantize import quantize, to_float32
from ondevice.converters.rounding.feedback import READ_BYTES, Inputs
from ondevice.kernels import _native
from ondevice.model.loading import blocks_of_model, layer_weights
from ondevice.model.weights import LayerWeights, ModelWeights
from ondevice.model_config import FeedForwardSpec

EMBEDDED = "embedded"
"""Name of the inputs of matrices that multiply the embedding."""
PROJECT_OUT = "project_out"
"""The matrix between the layers and a head of another width, and the name of its inputs."""
_OF_MODEL = {"per_layer.projection": EMBEDDED, "project_in": EMBEDDED, PROJECT_OUT: PROJECT_OUT}
"""Names of recorded inputs, by matrices outside the layers. No model has two EMBEDDED ones."""
SAME_INPUTS = dict.fromkeys(
    ("laurel.down", "attention.gate", "delta.gates", "mamba2.in", "mamba2.steps"), "qkv"
)
"""Rare matrices of a layer whose inputs are those of other matrices."""


class RecordedWeights:
    """Makes weights for a `RecordingBackend` from a checkpoint's tensors. Matrices are float16."""

    def __init__(self, checkpoint: Checkpoint, runner: _native.Runner) -> None:
        self._checkpoint = checkpoint
        self._runner = runner

    def layer(self, backend: CpuBackend, layer: int) -> LayerWeights:
        """The layer's weights."""
        checkpoint, name = self._checkpoint, names.LayerNames(layer)
        config, tensors, spec = checkpoint.config, checkpoint.tensors, checkpoint.config.layers[layer]
        attention, block = spec.attention, spec.feed_forward
        parts = config.projection_sizes(spec)
        biases = [tensors[name.projection_bias(which)] for which in parts] if attention.bias else []
        out_biases = [tensors[name.projection_bias("o")]] if attention.output_bias else []
        gate_bias = _vector([tensors[name.gate_bias]] if block.bias else [])
        down_bias = _vector([tensors[name.down_bias]] if block.output_bias else [])
        loaded: dict[str, Any] = {
            "qkv": self._matrix("qkv", [name.projection(which) for which in parts], _vector(biases)),
            "out": self._matrix("out", [name.projection("o")], _vector(out_biases)),
        }
        for norm in name.norms(spec):
            loaded[norm] = tensors[name.norm(norm)].vector()
            if config.norm.bias:
                loaded[f"{norm}_bias"] = tensors[name.norm_bias(norm)].vector()
        for which, size in zip("qk", config.head_norm_sizes(spec), strict=True):
            if size:
                loaded[f"{which}_norm"] = tensors[name.head_norm(which)].vector()
                if attention.head_norm_bias:
                    loaded[f"{which}_norm_bias"] = tensors[name.head_norm_bias(which)].vector()
        for weight in layer_weight_shapes(config, spec):
            recorded_as = "" if weight.name in SAME_INPUTS else weight.name
            loaded[weight.name] = self._weight(weight, name.weight(weight.name), recorded_as)
        feed_forward: Any = None
        if spec.has_feed_forward:
            feed_forward = _Neurons(
                self._matrix("gate", [name.gate], gate_bias),
                self._matrix("", [name.up]) if block.gated else None,
                self._matrix("down", [name.down], down_bias),
            )
        return layer_weights(backend, config, spec, loaded, feed_forward)

    def model(self, layers: Sequence[LayerWeights], with_ends: bool) -> ModelWeights:
        """The given layers, with the checkpoint's embedding. with_ends: whether to include the parts before
        and after the layers.

        The last norm and the head are missing.
        """
        config, tensors = self._checkpoint.config, self._checkpoint.tensors
        if not with_ends:
            return ModelWeights(tensors[names.EMBEDDING], layers, None, None)
        positions, model_weights = None, {}
        if config.learned_positions:
            table = tensors[names.POSITIONS]
            positions = to_float32(table.rows(0, table.shape[0]))
        for weight in model_weight_shapes(config):
            recorded_as = _OF_MODEL.get(weight.name, "")
            model_weights[weight.name] = self._weight(weight, names.model_weight(weight.name), recorded_as)
        blocks = blocks_of_model(config, model_weights, tensors.get(names.PER_LAYER))
        return ModelWeights(tensors[names.EMBEDDING], layers, None, None, positions, **blocks)

    def final_norm(self) -> Norm:
        norm, tensors = self._checkpoint.config.norm, self._checkpoint.tensors
        bias = tensors[names.FINAL_NORM_BIAS].vector() if norm.bias else None
        return Norm(tensors[names.FINAL_NORM].vector(), norm.eps, bias, norm.kind == "layer")

    def _matrix(self, which: str, sources: Sequence[str], bias: Float32 | None = None) -> _RecordedMatrix:
        """A matrix made of the rows of all `sources`. Its inputs are recorded under the name `which`."""
        return _RecordedMatrix(
            which, self._half([self._checkpoint.tensors[source] for source in sources], bias)
        )

    def _weight(self, weight: WeightShape, source: str, which: str) -> Any:
        """A weight that few models have: a matrix whose inputs are recorded under the name `which`, or
        float32 values.
        """
        if weight.is_matrix:
            return self._matrix(which, [source])
        tensor = self._checkpoint.tensors[source]
        if len(tensor.shape) == 1:
            return tensor.vector()
        return to_float32(tensor.rows(0, tensor.shape[0])).reshape(-1)

    def _half(self, sources: Sequence[SourceTensor], bias: Float32 | None) -> CpuLinear:
        """The rows of all sources as float16."""
        cols = sources[0].shape[1]
        matrix = _native.Matrix(sum(source.shape[0] for source in sources), cols, 16)
        row0, step = 0, max(1, READ_BYTES // (4 * cols) // 16) * 16
        for source in sources:
            for start in range(0, source.shape[0], step):
                values = source.rows(start, min(start + step, source.shape[0]))
                rows = quantize(self._runner, values, 16, source.name)
                empty = rows.scales.view(np.uint8)
                matrix.load_rows(self._runner, row0, rows.codes, empty, empty)
                row0 += len(values)
        return CpuLinear(matrix, bias)


@dataclass(frozen=True)
class _RecordedMatrix:
    """A matrix whose inputs are recorded under the name `which`, or not recorded if the name is empty."""

    which: str
    linear: CpuLinear


@dataclass(frozen=True)
class _Neurons:
    """The matrices of a feed-forward; up is None if it isn't gated. down: (D, F)."""

    gate: _RecordedMatrix
    up: _RecordedMatrix | None
    down: _RecordedMatrix


class RecordingBackend(CpuBackend):
    """The CPU backend for `_RecordedMatrix` matrices and `_Neurons`. It records the inputs of the
    matrices.
    """

    def __init__(self, runner: _native.Runner) -> None:
        super().__init__(runner, segment_neurons=BLOCK_NEURONS, piece_neurons=BLOCK_NEURONS)
        self.inputs: dict[str, Inputs] = {}

    def embedding(self, table: Any, tokens: Int32) -> Float32:
        return np.concatenate([to_float32(table.rows(token, token + 1)) for token in tokens.tolist()])

    def prefetch(self, x: Float32, norm: Norm | None, weight: Any) -> None:
        """Do nothing: a layer's neurons are in memory."""

    def linear(
        self, x: Float32, weight: Any, norm: Norm | None = None, added: Float32 | None = None
    ) -> Float32:
        normed_rows = x if norm is None else self.normed(x, norm)
        if weight.which:
            self.inputs.setdefault(weight.which, Inputs()).add(normed_rows)
        return super().linear(normed_rows, weight.linear, None, added)

    def feed_forward(
        self,
        x: Float32,
        weight: Any,
        spec: FeedForwardSpec,
        batch: ForwardBatch,
        norm: Norm | None = None,
        added: Float32 | None = None,
    ) -> Float32:
        normed_rows = x if norm is None else self.normed(x, norm)
        # A result is valid until the next call of the op.
        gates = np.array(self.linear(normed_rows, weight.gate))
        if spec.cutoff is not None:
            row_sums.cut_off(gates, spec.cutoff)
        ups = None if weight.up is None else np.array(self.linear(normed_rows, weight.up))
        fired = np.empty_like(gates)
        up = None if ups is None else ups.reshape(-1)
        _native.activate(self.runner, native_form(spec), gates.reshape(-1), up, fired.reshape(-1))
        return self.linear(fired, weight.down, added=added)


def _vector(sources: Sequence[SourceTensor]) -> Float32 | None:
    """The values of all sources, concatenated; None without sources."""
    return np.concatenate([source.vector() for source in sources]) if sources else None
