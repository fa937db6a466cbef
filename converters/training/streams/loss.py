"""The training loss of stream adapters: computed by the model's forward pass, differentiated by MLX.

"Speculative Streaming" (arXiv 2402.11131), section 3.2. Only the layers that have streams run, on the hidden
states that enter them: the forward pass of `model/` over this module's backend. The caller provides the
states, chooses the windows and uses the gradients.

The tokens of a window that have streams form runs of neighbours. Tokens before a run pass without streams,
so that in lossless mode a gradient goes through the rows of the run only.

Legend: T tokens of a window, P tokens of its runs, S streams, D width, F neurons, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ondevice.backends.base import NO_BIASES, Biases, FeedForwardSource, Float32, Norm, Selector
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.backends.kv_layout import KVLayout
from ondevice.backends.mlx_float import FloatFeedForward, MlxFloatBackend
from ondevice.backends.mlx_kv import MlxKV, no_block
from ondevice.backends.mlx_ops import FloatLinear, activate, normed
from ondevice.backends.tiled_source import TiledSource
from ondevice.bundle.reader import Bundle
from ondevice.bundle.streams import EMBEDDINGS, MultiStreams, layer_prefix
from ondevice.converters.quantize import dequantize, quantize
from ondevice.converters.training.streams.options import longest_run, resident_prefix
from ondevice.flash.reader import FlashReader
from ondevice.kernels import _native
from ondevice.model.loading import bundle_files, load_weights
from ondevice.model.sequence_state import SequenceState
from ondevice.model.transformer import Transformer
from ondevice.model.weights import LowRank, ModelWeights, MultiStreamLayer, MultiStreamWeights
from ondevice.model_config import FeedForwardSpec, ModelConfig
from ondevice.units import usable_cores

STREAM_WEIGHT = 0.1
"""Weight of each stream's loss in shared mode; the text's own loss has weight 1 (section 3.2.4)."""
EMBEDDING_DEVIATION = 0.1
LOGIT_ROWS = 256
"""Rows whose logits are in memory at once while correct draft tokens are counted."""

Parameters = Mapping[str, mx.array]
"""The trained arrays, by their names in `streams.safetensors`; matrices have their logical shapes."""


@dataclass(frozen=True)
class TrainingWindow:
    """A piece of text. tokens: (T,) ids. layer_inputs: (T, D), the inputs of the first layer with streams."""

    tokens: Sequence[int]
    layer_inputs: mx.array


@dataclass(frozen=True)
class TopLayers:
    """The last layers of a model and its head, which aren't trained. `config` describes only these layers."""

    config: ModelConfig
    weights: ModelWeights

    def model(
        self,
        parameters: Parameters,
        streams: MultiStreams,
        resident_tokens: int = 0,
        resident_parts: int = 0,
    ) -> Transformer:
        """The layers as a model with streams. streams: the shape of the streams. Other arguments are as in
        `ResidentBackend`.
        """
        adapters = stream_weights(parameters, streams, self.config.num_layers)
        backend = ResidentBackend(resident_tokens, resident_parts)
        return Transformer(self.config, backend, self.weights, adapters)


class ResidentBackend(MlxFloatBackend):
    """A backend whose streams use only the neurons that would be in memory. If both arguments are 0, they use
    every neuron.

    One backend is for the consecutive forward passes of one text. If a forward pass has streams, all its
    tokens have them.

    Args:
        resident_tokens: for a model with ReLU gates, whose neurons are cached: streams use the neurons that
            this many last tokens used, including the stream's token.
        resident_parts: for other models: streams use the first neurons of each layer, this many of the
            layer's RESIDENT_PARTS parts.
    """

    def __init__(self, resident_tokens: int, resident_parts: int = 0) -> None:
        super().__init__()
        self._tokens = resident_tokens
        self._parts = resident_parts
        self._used: dict[int, mx.array] = {}
        """Neurons used by the last tokens, (at most resident_tokens - 1, F), by `id` of a layer's weights."""

    def feed_forward(
        self,
        x: mx.array,
        weight: FloatFeedForward,
        spec: FeedForwardSpec,
        batch: ForwardBatch,
        norm: Norm | None = None,
        added: mx.array | None = None,
    ) -> mx.array:
        text_rows = batch.num_exact_rows
        if self._parts and text_rows < x.shape[0]:
            text = super().feed_forward(x[:text_rows], weight, spec, batch, norm)
            first = weight.first(resident_prefix(weight.gate.shape[0], self._parts))
            streams = super().feed_forward(x[text_rows:], first, spec, batch, norm)
            product = mx.concatenate([text, streams])
            return product if added is None else added + product
        if not self._tokens:
            return super().feed_forward(x, weight, spec, batch, norm, added)
        x = normed(x, norm)
        gates = activate(weight.gates(x), spec.activation, spec.threshold)
        used = mx.stop_gradient(gates[:text_rows]) != 0
        if id(weight) in self._used:
            used = mx.concatenate([self._used[id(weight)], used])
        if text_rows < x.shape[0]:
            last = mx.arange(used.shape[0] - text_rows, used.shape[0])[:, None] - mx.arange(self._tokens)
            resident = used[mx.maximum(last, 0)].any(axis=1)
            resident = mx.repeat(resident, (x.shape[0] - text_rows) // text_rows, axis=0)
            gates = mx.concatenate([gates[:text_rows], mx.where(resident, gates[text_rows:], 0.0)])
        if self._tokens > 1:
            self._used[id(weight)] = used[1 - self._tokens :]
        product = weight.output(x, gates, spec)
        return product if added is None else added + product


def load_top(bundle: Bundle, first_layer: int) -> TopLayers:
    """The layers of `bundle` from `first_layer` on, dequantised. Raises FlashReadError, BundleError."""
    backend = _TopBackend(first_layer)
    with FlashReader(bundle_files(bundle)) as reader:
        weights = load_weights(bundle, reader, backend)
    return TopLayers(top_config(bundle.config, first_layer), replace(weights, layers=backend.top(weights)))


def top_config(config: ModelConfig, first_layer: int) -> ModelConfig:
    """The shape of the layers from `first_layer` on."""
    return replace(config, layers=config.layers[first_layer:])


class _TopBackend(MlxFloatBackend):
    """A backend that reads, but doesn't keep, the matrices of layers before `first_layer`."""

    def __init__(self, first_layer: int) -> None:
        super().__init__()
        self._first_layer = first_layer
        self._layer = 0

    def load_tiles(self, sections: Sequence[TiledSource], bias: Float32 | None = None) -> Any:
        if self._layer >= self._first_layer:
            return super().load_tiles(sections, bias)
        for section in sections:
            for _ in section.chunks():
                pass
        return None

    def load_feed_forward(
        self,
        layer: int,
        source: FeedForwardSource,
        selector: Selector | None = None,
        biases: Biases = NO_BIASES,
        gates: FloatLinear | None = None,
        dense: int | None = None,
    ) -> Any:
        # The feed-forward is the last part of a layer.
        self._layer = layer + 1
        if layer < self._first_layer:
            return None
        return super().load_feed_forward(layer, source, selector, biases)

    def top(self, weights: ModelWeights) -> Sequence[Any]:
        """The layers that were kept."""
        return weights.layers[self._first_layer :]


def stream_weights(parameters: Parameters, streams: MultiStreams, num_layers: int) -> MultiStreamWeights:
    """The stream adapters of `num_layers` layers, those of `TopLayers`, made of arrays. streams:
    their shape.
    """

    def low_rank(name: str) -> LowRank:
        return LowRank(*(FloatLinear(parameters[f"{name}.{end}"], None) for end in ("down", "up")))

    layers = tuple(
        MultiStreamLayer(
            low_rank(f"{prefix}.qkv"), low_rank(f"{prefix}.out"), low_rank(f"{prefix}.feed_forward")
        )
        for prefix in map(layer_prefix, range(streams.first_layer, streams.first_layer + num_layers))
    )
    embeddings = tuple(parameters[EMBEDDINGS][stream] for stream in range(streams.streams))
    return MultiStreamWeights(embeddings, 0, layers, streams.mode == "shared", len(embeddings))


def initial_parameters(streams: MultiStreams, config: ModelConfig, seed: int) -> dict[str, mx.array]:
    """The parameters at the start of training: adapters that add nothing, and embeddings that add little."""
    rng = np.random.default_rng(seed)
    shape = (streams.streams, config.hidden_size)
    parameters = {EMBEDDINGS: mx.array(EMBEDDING_DEVIATION * rng.standard_normal(shape, np.float32))}
    for name, (rows, cols) in streams.matrices(config).items():
        values = rng.standard_normal((rows, cols), np.float32) / math.sqrt(cols)
        parameters[name] = mx.array(values) if name.endswith(".down") else mx.zeros((rows, cols))
    return parameters


def stored_parameters(arrays: Mapping[str, Float32], bits: Literal[4, 8, 16]) -> dict[str, mx.array]:
    """The arrays after quantising and reading them back. Raises CheckpointError for values beyond float16."""
    runner = _native.Runner(usable_cores(), "auto")
    rows = {name: quantize(runner, of, bits, name) for name, of in arrays.items() if name != EMBEDDINGS}
    read = {name: dequantize(of, bits, arrays[name].shape[1]) for name, of in rows.items()}
    return {name: mx.array(read.get(name, of)) for name, of in arrays.items()}


def stream_loss(
    parameters: Parameters,
    streams: MultiStreams,
    top: TopLayers,
    window: TrainingWindow,
    run: range,
    resident_tokens: int = 0,
    resident_parts: int = 0,
) -> mx.array:
    """The loss of the streams of the tokens `run`, in nats per token.

    Stream j of the token at t drafts the token at t + 1 + j. Its loss is the cross-entropy to the model's
    distribution there, given the text up to t + j, as when draft tokens are verified. In lossless mode the
    loss is the mean over streams. In shared mode it is a tenth of each stream's loss, plus the loss of the
    text's next tokens.

    Args:
        parameters: the trained arrays.
        streams: their shape.
        top: the frozen layers.
        window: the text, of T tokens.
        run: the tokens that have streams; run.stop + S < T.
        resident_tokens, resident_parts: see `ResidentBackend`.
    """
    model = top.model(parameters, streams, resident_tokens, resident_parts)
    shared, count = streams.mode == "shared", streams.streams
    main, ends = states(model, window, [run], len(window.tokens) if shared else run.stop + count)
    drafted = model.logits(ends.reshape(-1, ends.shape[2])).reshape(len(run), count, -1)
    said = mx.softmax(mx.stop_gradient(model.logits(main[run.start : run.stop + count])), axis=-1)
    to_be_said = mx.stack([said[1 + stream : 1 + stream + len(run)] for stream in range(count)], axis=1)
    loss = _soft_cross_entropy(drafted, to_be_said).mean()
    if shared:
        text = mx.array(np.array(window.tokens, dtype=np.int32))
        loss = STREAM_WEIGHT * count * loss + _cross_entropy(model.logits(main[:-1]), text[1:]).mean()
    return loss


def right_draft_tokens(model: Transformer, window: TrainingWindow) -> NDArray[np.bool_]:
    """Whether a stream's likeliest token is the same as the model's likeliest token at that place, (T - S,
    S).

    It covers all tokens but the last S. Every neuron is available.
    """
    assert model.streams is not None
    count = model.streams.count
    length, step = len(window.tokens) - count, longest_run(count)
    runs = [range(start, min(start + step, length)) for start in range(0, length, step)]
    main, ends = states(model, window, runs, len(window.tokens))
    said = _likeliest(model, main)
    drafted = _likeliest(model, ends.reshape(-1, ends.shape[2])).reshape(length, count)
    right: NDArray[np.bool_] = drafted == np.stack(
        [said[1 + j : 1 + j + length] for j in range(count)], axis=1
    )
    return right


def acceptance(right: Sequence[NDArray[np.bool_]]) -> tuple[float, ...]:
    """The acceptance rate of each stream: the share of correct draft tokens, among those for which all
    earlier streams were correct.

    right: for every window, the result (n, S) of `right_draft_tokens`. The rate is 0 if there is nothing to
    count.
    """
    so_far = np.concatenate([np.cumprod(of, axis=1) for of in right])
    counts = [len(so_far), *so_far.sum(axis=0).tolist()]
    return tuple(count / max(1, before) for before, count in pairwise(counts))


def states(
    model: Transformer, window: TrainingWindow, runs: Sequence[range], stop: int
) -> tuple[mx.array, mx.array]:
    """The last hidden states of the window's tokens before `stop`, (stop, D), and of the streams of the
    tokens in `runs`, (P, S, D).

    runs: ranges of tokens, ascending, none longer than `longest_run`.
    """
    layout = KVLayout(model.config, 32)
    kv = SequenceState(layout, no_block, arrays=MlxKV(layout))
    main: list[mx.array] = []
    ends: list[mx.array] = []
    at = 0
    for run in (*runs, range(stop, stop)):
        if at < run.start:
            tokens, x = window.tokens[at : run.start], window.layer_inputs[at : run.start]
            main.append(model.run(ForwardBatch(tokens), kv, x=x).hidden)
        if len(run):
            tokens, x = window.tokens[run.start : run.stop], window.layer_inputs[run.start : run.stop]
            output = model.run(ForwardBatch(tokens), kv, x=x, streamed=range(len(run)))
            main.append(output.hidden)
            ends += [output.streams[token] for token in range(len(run))]
        at = run.stop
    return mx.concatenate(main), mx.stack(ends)


def _soft_cross_entropy(logits: mx.array, chances: mx.array) -> mx.array:
    """The cross-entropy in nats, (...,), of logits (..., V) to probabilities `chances` (..., V), which sum to
    one.
    """
    return mx.logsumexp(logits, axis=-1) - (logits * chances).sum(axis=-1)


def _cross_entropy(logits: mx.array, tokens: mx.array) -> mx.array:
    """The cross-entropy in nats, (n,), of logits (n, V) to the actual tokens (n,)."""
    picked = mx.take_along_axis(logits, tokens[:, None], axis=1)[:, 0]
    return mx.logsumexp(logits, axis=-1) - picked


def _likeliest(model: Transformer, hidden: mx.array) -> NDArray[np.int64]:
    """The likeliest next token after each of the hidden states (n, D), as (n,)."""
    tokens: list[Float32] = []
    for start in range(0, hidden.shape[0], LOGIT_ROWS):
        tokens.append(np.array(mx.argmax(model.logits(hidden[start : start + LOGIT_ROWS]), axis=-1)))
    return np.concatenate(tokens).astype(np.int64)
