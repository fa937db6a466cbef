"""Rounds a checkpoint's layers one after another: a layer runs over a text in float16, then it is rounded by
the inputs of its matrices.

Layers run with the unrounded weights of the checkpoint, by the engine's forward pass on the `cpu` backend,
whose results have the same bits for every number of threads.

Memory: while a layer runs, its weights in float16, and at most `INPUT_BYTES` for the text: residuals,
per-layer inputs, keys and values that later layers read, and inputs of matrices. While it is rounded, the
text's bytes, the layer's codes, and what `feedback` holds.

Legend: T tokens of a chunk, D hidden size, L layers, W values of a layer's per-layer inputs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace

import numpy as np

from ondevice.backends.base import Block, Float32
from ondevice.backends.kv_layout import KVLayout
from ondevice.bundle.weight_shapes import layer_weight_shapes
from ondevice.config import QuantConfig, RowFormat
from ondevice.converters.architectures import tensors as names
from ondevice.converters.checkpoints.base import Checkpoint
from ondevice.converters.quantize import RoundedRows
from ondevice.converters.rounding.feedback import (
    DAMPING,
    Inputs,
    rounded_by_columns,
    rounded_by_rows,
)
from ondevice.converters.rounding.recording import (
    EMBEDDED,
    PROJECT_OUT,
    SAME_INPUTS,
    RecordedWeights,
    RecordingBackend,
)
from ondevice.kernels import _native
from ondevice.model.altup import ResidualStreams
from ondevice.model.sequence_state import SequenceState, state_over
from ondevice.model.transformer import Transformer
from ondevice.model_config import LayerSpec, ModelConfig

MAX_ROUNDED_BITS = 6
"""Most bits of weights that a text rounds: at 8 bits there is nothing left to gain."""
MAX_ROUNDING_TOKENS = 16384
"""Most tokens of a text that a model is run over."""
RANDOM_TOKENS = 2048
"""Number of random tokens drawn where there is no text."""
INPUT_BYTES = 512 << 20
"""Most bytes of hidden states and of one layer's inputs."""
CHUNK_TOKENS = 256
OnStep = Callable[[str], None]


def is_rounded(stored: RowFormat) -> bool:
    """Whether matrices of this format are rounded by a text."""
    return stored.bits <= MAX_ROUNDED_BITS and stored.has_biases


def rounds_any(quant: QuantConfig) -> bool:
    """Whether any matrix is rounded by a text under this quantisation."""
    return any(is_rounded(stored) for stored in (quant.plain, *dict(quant.formats).values()))


def most_tokens(config: ModelConfig) -> int:
    """The number of tokens of a text that fit into INPUT_BYTES, at most MAX_ROUNDING_TOKENS."""
    hidden = config.hidden_size
    inputs = 2 * hidden + config.query_size + config.widest
    if config.per_layer_width:
        # Those of the block of per-layer inputs, and embeddings.
        inputs += 2 * hidden + config.per_layer_width
    inputs += max(layer.laurel_rank for layer in config.layers) + config.embedding_width
    states = config.residual_copies * hidden + config.per_layer_size
    keys = 2 * config.kv_size * len(_owners(config))
    return min(MAX_ROUNDING_TOKENS, INPUT_BYTES // (2 * inputs + 4 * states + 2 * keys))


def _owners(config: ModelConfig) -> set[int]:
    """The layers whose keys and values other layers read."""
    return {layer.attention.keys_of for layer in config.layers if layer.attention.keys_of is not None}


def random_pieces(config: ModelConfig, first: int | None) -> list[list[int]]:
    """Pieces of tokens drawn uniformly from the vocabulary, always the same ones. Each begins
    with `first`.
    """
    draw, begin = random.Random(0).random, [] if first is None else [first]
    length = max(1, min(CHUNK_TOKENS, config.max_context) - len(begin))
    count = max(1, min(RANDOM_TOKENS, most_tokens(config)) // (length + len(begin)))
    return [[*begin, *(int(draw() * config.vocab_size) for _ in range(length))] for _ in range(count)]


class LayerRounding:
    """Rounds a checkpoint's matrices to 4 to 6 bits: `layer` for one layer after another, then `head`.

    quant: how the bundle stores weights. pieces: token ids, at most `most_tokens` in all; each piece is run
    from an empty context. on_step: called with a description of the next step. damping: see
    `feedback.DAMPING`.
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
        self._weights = RecordedWeights(checkpoint, runner)
        self._quant = quant
        self._pieces = pieces
        self._runner = runner
        self._on_step = on_step
        self._damping = damping
        self.residuals: list[ResidualStreams] = []
        """Output of the last layer that was run: (T, D) of each residual stream, for each piece."""
        self._per_layer: list[Float32 | None] = []
        """(T, L * W) for each piece."""
        self._embedded = Inputs()
        self._keys: dict[int, list[list[Block]]] = {}
        """The keys and values of each piece, of layers whose keys and values others read."""

    def layer(self, layer: int, wanted: bool = True) -> dict[str, RoundedRows]:
        """The rounded matrices of the layer, by their names in the checkpoint.

        A down projection's rows are neurons, unless feed-forwards are stored in slices. Matrices that keep
        their checkpoint's codes, or are stored with 8 bits, aren't among them. wanted: False to only run the
        layer, without rounding it.

        Raises CheckpointError for weights with which the model can't run.
        """
        config = self._checkpoint.config
        spec = config.layers[layer]
        self._on_step(f"layer {layer + 1} of {config.num_layers}: running the text")
        inputs = self.run(layer)
        if EMBEDDED in inputs:
            self._embedded = inputs[EMBEDDED]
        if not wanted:
            return {}
        name = names.LayerNames(layer)
        self._on_step(f"layer {layer + 1} of {config.num_layers}: rounding attention")
        rounded: dict[str, RoundedRows] = {}
        parts = {which: self._quant.of("qkv", layer, which) for which in config.projection_sizes(spec)}
        for stored in dict.fromkeys(parts.values()):
            projections = [name.projection(which) for which, it in parts.items() if it == stored]
            rounded |= self._by_columns(projections, stored, inputs["qkv"])
        rounded |= self._by_columns([name.projection("o")], self._quant.of("out", layer), inputs["out"])
        if spec.has_feed_forward:
            self._on_step(f"layer {layer + 1} of {config.num_layers}: rounding neurons")
            *by_columns, down = name.neurons(spec)
            stored = self._quant.of("feed_forward", layer)
            rounded |= self._by_columns(by_columns, stored, inputs["gate"])
            source = self._checkpoint.tensors[down]
            if config.is_sliced:
                rounded |= self._by_columns([down], self._quant.of("down", layer), inputs["down"])
            elif is_rounded(self._quant.plain):
                rounded[source.name] = rounded_by_rows(
                    self._runner, source, inputs["down"], self._quant.plain, self._damping
                )
        for weight in layer_weight_shapes(config, spec):
            if weight.is_matrix and not weight.is_half:
                met = inputs[SAME_INPUTS.get(weight.name, weight.name)]
                rounded |= self._by_columns([name.weight(weight.name)], self._quant.plain, met)
        return rounded

    def head(self) -> dict[str, RoundedRows]:
        """The rounded head, which may be the embedding, and other matrices that belong to no layer.

        Call it once all layers have run.
        """
        self._on_step("rounding the head")
        config, inputs = self._checkpoint.config, Inputs()
        self._per_layer.clear()
        self._keys.clear()
        rounded = self._copies()
        if config.per_layer_width:
            rounded |= self._by_columns(
                [names.model_weight("per_layer.projection")], self._quant.plain, self._embedded
            )
        norm = self._weights.final_norm() if config.final_norm else None
        with closing(RecordingBackend(self._runner)) as backend:
            weights = self._weights.model([], True)
            model, project_out = Transformer(config, backend, weights), weights.project_out
            for copies in self.residuals:
                for start in range(0, len(copies[0]), CHUNK_TOKENS):
                    rows = model.merge_residuals([copy[start : start + CHUNK_TOKENS] for copy in copies])
                    normed_rows = rows if norm is None else backend.normed(rows, norm)
                    inputs.add(
                        normed_rows if project_out is None else backend.linear(normed_rows, project_out)
                    )
        if config.embedding_width:
            for which, met in (("project_in", self._embedded), (PROJECT_OUT, backend.inputs[PROJECT_OUT])):
                rounded |= self._by_columns([names.model_weight(which)], self._quant.plain, met)
        source = names.EMBEDDING if config.tie_embeddings else names.HEAD
        return rounded | self._by_columns([source], self._quant.head(config.tie_embeddings), inputs)

    def _copies(self) -> dict[str, RoundedRows]:
        """The rounded matrices that create residual streams, and those that merge them."""
        rounded: dict[str, RoundedRows] = {}
        for copy in range(1, self._checkpoint.config.residual_copies):
            spread, gather = (names.model_weight(f"copies.{name}.{copy}") for name in ("spread", "gather"))
            rounded |= self._by_columns([spread], self._quant.plain, self._embedded)
            inputs = Inputs()
            for copies in self.residuals:
                inputs.add(copies[copy])
            rounded |= self._by_columns([gather], self._quant.plain, inputs)
        return rounded

    def _by_columns(
        self, matrices: Sequence[str], stored: RowFormat, inputs: Inputs
    ) -> dict[str, RoundedRows]:
        """The matrices of these names, rounded to the format `stored`.

        Matrices that keep their checkpoint's codes are left out. Empty if this format isn't rounded by a
        text.
        """
        if not is_rounded(stored):
            return {}
        # Keys may be values at once.
        sources = {source.name: source for source in (self._checkpoint.tensors[name] for name in matrices)}
        free = [source for source in sources.values() if source.quantized_rows(0, 1, stored) is None]
        return rounded_by_columns(self._runner, free, inputs, stored, self._damping) if free else {}

    def run(self, layer: int) -> dict[str, Inputs]:
        """Run the layer over the residuals of every piece, and replace them by its output.

        Returns the inputs of its matrices: `qkv`, `out`, `gate` (which the up projection shares), `down`, and
        those of `layer_weight_shapes` under their names there, except `SAME_INPUTS`. The first layer also has
        the inputs `EMBEDDED`, for models with several residual streams, per-layer inputs, or embeddings of
        another width.
        """
        config = self._checkpoint.config
        spec, owner = config.layers[layer], config.layers[layer].attention.keys_of
        layers: tuple[LayerSpec, ...] = (spec,)
        if owner is not None:
            shared = replace(spec, attention=replace(spec.attention, keys_of=0))
            layers = (config.layers[owner], shared)
        backend = RecordingBackend(self._runner)
        with closing(backend):
            # The layer that another one's keys are of isn't run again.
            weights = self._weights.model([self._weights.layer(backend, layer)] * len(layers), not layer)
            model = Transformer(replace(config, layers=layers), backend, weights)
            if not layer:
                self._enter(model)
            layout, is_read = KVLayout(model.config, 16), layer in _owners(config)
            for index in range(len(self._pieces)):
                kv = SequenceState(layout) if owner is None else state_over(layout, self._keys[owner][index])
                self._run_piece(model, layer, index, kv)
                if is_read:
                    self._keys.setdefault(layer, []).append(kv.blocks)
        return backend.inputs

    def _enter(self, model: Transformer) -> None:
        """Set the residuals to the first layer's input."""
        for piece in self._pieces:
            starts = range(0, len(piece), CHUNK_TOKENS)
            entered = [model.embed_residuals(piece[start : start + CHUNK_TOKENS], start) for start in starts]
            self.residuals.append(_joined([residual_streams for residual_streams, _ in entered]))
            inputs = [chunk for _, chunk in entered if chunk is not None]
            self._per_layer.append(np.concatenate(inputs) if inputs else None)

    def _run_piece(self, model: Transformer, layer: int, index: int, kv: SequenceState) -> None:
        """Run the layer, which is the last of `model`, over the residuals of one piece, and replace them by
        its output.
        """
        piece, inputs = self._pieces[index], self._per_layer[index]
        width, last, outputs = model.config.per_layer_width, model.config.num_layers - 1, []
        for start in range(0, len(piece), CHUNK_TOKENS):
            rows = slice(start, start + CHUNK_TOKENS)
            layer_inputs = None if inputs is None else inputs[rows, layer * width : (layer + 1) * width]
            residual_streams = model.layer(
                last, [copy[rows] for copy in self.residuals[index]], piece[rows], kv, layer_inputs
            )
            # The arrays that a backend returns are valid only until its next op.
            outputs.append([np.array(copy) for copy in residual_streams])
        self.residuals[index] = _joined(outputs)


def _joined(chunks: Sequence[ResidualStreams]) -> ResidualStreams:
    """The residual streams of all chunks, concatenated."""
    return [np.concatenate(copy) for copy in zip(*chunks, strict=True)]
