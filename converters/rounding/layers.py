"""A checkpoint's layers one after another: run over a text in float16, then rounded by the inputs they had.

Layers run on the unrounded weights, read from the checkpoint, and on the `cpu` backend, whose results have
the same bits for every number of threads.

Memory: one layer's weights in float16 while it runs, and of the text at most `INPUT_BYTES` of hidden states
and inputs. Then that, the layer's codes, and what `feedback` holds.

Legend: T tokens of a chunk, D hidden size.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ondevice.backends.base import Float32, Int32, KVLayout, Norm
from ondevice.backends.cpu import CpuBackend, CpuLinear, native_form
from ondevice.backends.feed_forward_layer import BLOCK_NEURONS
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.config import MatrixKind, QuantConfig, RowFormat
from ondevice.converters.architectures import tensors as names
from ondevice.converters.checkpoints.base import Checkpoint, SourceTensor
from ondevice.converters.quantize import RoundedRows, quantize, to_float32
from ondevice.converters.rounding.feedback import (
    DAMPING,
    READ_BYTES,
    Inputs,
    rounded_by_columns,
    rounded_by_rows,
)
from ondevice.kernels import _native
from ondevice.model.kv_cache import KVCache
from ondevice.model.loading import head_norms
from ondevice.model.transformer import Transformer
from ondevice.model.weights import LayerWeights, ModelWeights
from ondevice.model_config import FeedForwardSpec, ModelConfig

MOST_BITS = 6
"""Most bits of weights that a text rounds: 8 lose nothing that it could save."""
MOST_TOKENS = 16384
"""Most tokens of a text that a model is run over."""
RANDOM_TOKENS = 2048
"""Tokens that are drawn where there is no text."""
INPUT_BYTES = 512 << 20
"""Most bytes of hidden states and of one layer's inputs."""
CHUNK_TOKENS = 256
NO_STATES: Float32 = np.empty((0, 0), dtype=np.float32)

OnStep = Callable[[str], None]


def is_rounded(stored: RowFormat) -> bool:
    """Whether a text rounds the matrices of this format."""
    return stored.bits <= MOST_BITS and not stored.implied_bias


def rounds_any(quant: QuantConfig) -> bool:
    """Whether a text rounds any matrix that is stored so."""
    return any(is_rounded(stored) for stored in (quant.down, *dict(quant.formats).values()))


def most_tokens(config: ModelConfig) -> int:
    """Tokens of a text that fit into INPUT_BYTES, at most MOST_TOKENS."""
    inputs = 2 * config.hidden_size + config.query_size + config.widest
    return min(MOST_TOKENS, INPUT_BYTES // (2 * inputs + 4 * config.hidden_size))


def random_pieces(config: ModelConfig, first: int | None) -> list[list[int]]:
    """Pieces of tokens that are drawn evenly from the vocabulary, always the same; `first` begins each."""
    draw, begin = random.Random(0).random, [] if first is None else [first]
    length = max(1, min(CHUNK_TOKENS, config.max_context) - len(begin))
    count = max(1, min(RANDOM_TOKENS, most_tokens(config)) // (length + len(begin)))
    return [[*begin, *(int(draw() * config.vocab_size) for _ in range(length))] for _ in range(count)]


class LayerRounding:
    """Rounds a checkpoint's matrices to 4 to 6 bits: `layer` for one layer after another, then `head`.

    quant: how the bundle stores weights. pieces: token ids, at most `most_tokens` in all; each piece is run
    from an empty context. on_step: called with what is done next. damping: see `feedback.DAMPING`.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        quant: QuantConfig,
        pieces: Sequence[Sequence[int]],
        runner: _native.Runner,
        on_step: OnStep,
        damping: float = DAMPING,
    ) -> None:
        self._checkpoint = checkpoint
        self._quant = quant
        self._pieces = pieces
        self._runner = runner
        self._on_step = on_step
        self._damping = damping
        self.states: list[Float32] = []
        """What leaves the last layer that was run, (T, D) for each piece."""

    def layer(self, layer: int, wanted: bool = True) -> dict[str, RoundedRows]:
        """The layer's rounded matrices by the checkpoint's names. A down projection's rows are neurons.

        Matrices that keep their checkpoint's codes, or are stored with 8 bits, aren't among them.
        wanted: false to run the layer alone. Raises CheckpointError for weights that aren't a usable model's.
        """
        config = self._checkpoint.config
        self._on_step(f"layer {layer + 1} of {config.num_layers}: running the text")
        inputs = self.run(layer)
        if not wanted:
            return {}
        name = names.LayerNames(layer)
        self._on_step(f"layer {layer + 1} of {config.num_layers}: rounding attention")
        found = self._by_columns([name.projection(which) for which in "qkv"], "qkv", inputs["qkv"])
        found |= self._by_columns([name.projection("o")], "out", inputs["out"])
        self._on_step(f"layer {layer + 1} of {config.num_layers}: rounding neurons")
        *by_columns, down = name.neurons(config.layers[layer])
        found |= self._by_columns(by_columns, "feed_forward", inputs["gate"])
        source = self._checkpoint.tensors[down]
        if is_rounded(self._quant.down):
            found[source.name] = rounded_by_rows(
                self._runner, source, inputs["down"], self._quant.down, self._damping
            )
        return found

    def head(self) -> dict[str, RoundedRows]:
        """The rounded head, which may be the embedding, once all layers have run."""
        self._on_step("rounding the head")
        config, inputs, norm = self._checkpoint.config, Inputs(), None
        if config.final_norm:
            norm = _norm(self._checkpoint, names.FINAL_NORM, names.FINAL_NORM_BIAS)
        project_out = self._projection("project_out")
        with closing(_Observed(self._runner)) as backend:
            for state in self.states:
                for start in range(0, len(state), CHUNK_TOKENS):
                    rows = state[start : start + CHUNK_TOKENS]
                    entering = rows if norm is None else backend.normed(rows, norm)
                    inputs.add(entering if project_out is None else backend.linear(entering, project_out))
        if config.tie_embeddings:
            return self._by_columns([names.EMBEDDING], "embedding", inputs)
        return self._by_columns([names.HEAD], "head", inputs)

    def _by_columns(self, found: Sequence[str], kind: MatrixKind, inputs: Inputs) -> dict[str, RoundedRows]:
        stored = self._quant.of(kind)
        if not is_rounded(stored):
            return {}
        sources = [self._checkpoint.tensors[name] for name in found]
        free = [source for source in sources if source.quantised_rows(0, 1, stored) is None]
        return rounded_by_columns(self._runner, free, inputs, stored, self._damping) if free else {}

    def run(self, layer: int) -> dict[str, Inputs]:
        """Run the layer over every piece's states, which become its output.

        Returns the inputs of its matrices: `qkv`, `out`, `gate` (and the up projection), `down`.
        """
        config = self._checkpoint.config
        one = replace(config, layers=config.layers[layer : layer + 1])
        backend = _Observed(self._runner)
        with closing(backend):
            model = Transformer(one, backend, self._weights(layer))
            if not layer:
                self.states = [NO_STATES] * len(self._pieces)
            for index, piece in enumerate(self._pieces):
                kv, outputs = KVCache(KVLayout(one, 16)), []
                for start in range(0, len(piece), CHUNK_TOKENS):
                    chunk = piece[start : start + CHUNK_TOKENS]
                    x = self.states[index][start : start + len(chunk)] if layer else None
                    # The arrays that a backend returns are valid only until its next op.
                    outputs.append(np.array(model.hidden_states(chunk, kv, x=x)))
                self.states[index] = np.concatenate(outputs)
        return backend.inputs

    def _weights(self, layer: int) -> ModelWeights:
        """The layer's weights, with the checkpoint's own embedding."""
        checkpoint, name = self._checkpoint, names.LayerNames(layer)
        tensors, spec = checkpoint.tensors, checkpoint.config.layers[layer]
        attention, block = spec.attention, spec.feed_forward
        norms: dict[str, Norm] = {
            which: _norm(checkpoint, name.norm(which), name.norm_bias(which)) for which in name.norms(spec)
        }
        biases = [tensors[name.projection_bias(which)] for which in "qkv"] if attention.bias else []
        out_biases = [tensors[name.projection_bias("o")]] if attention.output_bias else []
        gate_bias = _vector([tensors[name.gate_bias]] if block.bias else [])
        down_bias = _vector([tensors[name.down_bias]] if block.output_bias else [])
        vectors = {}
        if attention.head_norm != "none":
            vectors = {f"{which}_norm": tensors[name.head_norm(which)].vector() for which in "qk"}
        if attention.head_norm_bias:
            vectors |= {f"{which}_norm_bias": tensors[name.head_norm_bias(which)].vector() for which in "qk"}

        def matrix(which: str, sources: Sequence[str], bias: Float32 | None = None) -> _Watched:
            return _Watched(which, self._half([tensors[source] for source in sources], bias))

        feed_forward = _Neurons(
            matrix("gate", [name.gate], gate_bias),
            matrix("", [name.up]) if block.gated else None,
            matrix("down", [name.down], down_bias),
        )
        weights = LayerWeights(
            attention_norm=norms.get("attention_norm"),
            qkv=matrix("qkv", [name.projection(which) for which in "qkv"], _vector(biases)),
            head_norms=head_norms(attention, checkpoint.config.norm.eps, vectors),
            out=matrix("out", [name.projection("o")], _vector(out_biases)),
            attention_output_norm=norms.get("attention_output_norm"),
            feed_forward_norm=norms.get("feed_forward_norm"),
            feed_forward=feed_forward,
            feed_forward_output_norm=norms.get("feed_forward_output_norm"),
        )
        positions = None
        if layer == 0 and checkpoint.config.learned_positions:
            table = tensors[names.POSITIONS]
            positions = to_float32(table.rows(0, table.shape[0]))
        project_in = None if layer else self._projection("project_in")
        return ModelWeights(tensors[names.EMBEDDING], [weights], None, None, positions, project_in)

    def _projection(self, which: str) -> _Watched | None:
        """The matrix between embeddings and layers; None in a model where both have one width."""
        if not self._checkpoint.config.embedding_width:
            return None
        return _Watched("", self._half([self._checkpoint.tensors[names.model_weight(which)]], None))

    def _half(self, sources: Sequence[SourceTensor], bias: Float32 | None) -> CpuLinear:
        """The rows of all sources as float16."""
        cols = sources[0].shape[1]
        matrix = _native.Matrix(sum(source.shape[0] for source in sources), cols, 16)
        row0, step = 0, max(1, READ_BYTES // (4 * cols) // 16) * 16
        for source in sources:
            for start in range(0, source.shape[0], step):
                values = source.rows(start, min(start + step, source.shape[0]))
                rows = quantize(self._runner, values, 16, source.name)
                empty = rows.scales.view(np.uint16)
                matrix.load_rows(self._runner, row0, rows.codes, empty, empty)
                row0 += len(values)
        return CpuLinear(matrix, bias)


@dataclass(frozen=True)
class _Watched:
    """A matrix whose inputs are kept by the name `which`, or not kept if that is empty."""

    which: str
    linear: CpuLinear


@dataclass(frozen=True)
class _Neurons:
    """The matrices of a feed-forward; up is None if it isn't gated. down: (D, F)."""

    gate: _Watched
    up: _Watched | None
    down: _Watched


class _Observed(CpuBackend):
    """The CPU backend over `_Watched` matrices and `_Neurons`, which keeps the inputs of matrices."""

    def __init__(self, runner: _native.Runner) -> None:
        super().__init__(runner, segment_neurons=BLOCK_NEURONS, piece_neurons=BLOCK_NEURONS)
        self.inputs: dict[str, Inputs] = {}

    def embedding(self, table: Any, tokens: Int32) -> Float32:
        return np.concatenate([to_float32(table.rows(token, token + 1)) for token in tokens.tolist()])

    def prefetch(self, x: Float32, norm: Norm | None, weight: Any) -> None:
        """Nothing to do: a layer's neurons are in memory."""

    def linear(
        self, x: Float32, weight: Any, norm: Norm | None = None, added: Float32 | None = None
    ) -> Float32:
        entering = x if norm is None else self.normed(x, norm)
        if weight.which:
            self.inputs.setdefault(weight.which, Inputs()).add(entering)
        return super().linear(entering, weight.linear, None, added)

    def feed_forward(
        self,
        x: Float32,
        weight: Any,
        spec: FeedForwardSpec,
        batch: ForwardBatch,
        norm: Norm | None = None,
        added: Float32 | None = None,
    ) -> Float32:
        entering = x if norm is None else self.normed(x, norm)
        # A result is valid until the next call of the op.
        gates = np.array(self.linear(entering, weight.gate))
        ups = None if weight.up is None else np.array(self.linear(entering, weight.up))
        fired = np.empty_like(gates)
        up = None if ups is None else ups.reshape(-1)
        _native.activate(self.runner, native_form(spec), gates.reshape(-1), up, fired.reshape(-1))
        return self.linear(fired, weight.down, added=added)


def _norm(checkpoint: Checkpoint, weight: str, bias: str) -> Norm:
    norm, tensors = checkpoint.config.norm, checkpoint.tensors
    added = tensors[bias].vector() if norm.bias else None
    return Norm(tensors[weight].vector(), norm.eps, added, norm.kind == "layer")


def _vector(sources: Sequence[SourceTensor]) -> Float32 | None:
    """The values of all sources one after another; None without sources."""
    return np.concatenate([source.vector() for source in sources]) if sources else None
