"""Streams, predictors and hotness of an embedded model: the small model's, in the places of the large one.

The small bundle's come from the one that it was rounded from: streams with wider heads, predictors as they
are. In the large bundle their codes are copied. Layers that aren't the small model's have adapters that add
nothing. A filler's predictor is fitted to its gates on the model's own text, from what the trained layer's
predictor computes first, and finds as many of the fillers that fire as that one is said to find.

Legend: T tokens, D hidden size, F neurons of a layer, R rank of a predictor.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from ondevice.backends.base import Float32
from ondevice.bundle.file_layouts import tensors_layout
from ondevice.bundle.predictors import (
    PREDICTORS,
    PREDICTORS_SIDECAR,
    OperatingPoint,
    Predictors,
    predictor_tensors,
)
from ondevice.bundle.reader import Bundle
from ondevice.bundle.sidecar import weights_digest
from ondevice.bundle.streams import (
    EMBEDDINGS,
    STREAMS,
    STREAMS_SIDECAR,
    MultiStreams,
    stream_tensors,
)
from ondevice.config import RuntimeConfig
from ondevice.converters.quantize import dequantize, quantize
from ondevice.converters.training.hotness import write_hotness
from ondevice.converters.training.predictors.train import StoredPredictor, save_predictors, stored_arrays
from ondevice.converters.training.sidecars import write_tensors
from ondevice.converters.training.streams.write import save_streams, write_streams
from ondevice.kernels import _native
from ondevice.units import usable_cores
from tests.benchmarks.lib.embedded_weights import EmbeddedModel, put, silent_rows
from tests.benchmarks.lib.filler_neurons import Recorded, normed, root_mean_square
from tests.benchmarks.lib.stored_model import Q4, matrix_of, place_groups, widened_context, widened_qkv

RECALL = RuntimeConfig().predictor_recall
"""Target of the operating point at which fillers' predictors have the trained ones' share of misses."""
RIDGE = 1e-3
MEASURED_LAYERS = 8
"""Most layers whose predictors are measured."""
Tensors = Mapping[str, NDArray[Any]]


def copy_sidecars(source: Path, folder: Path, frequencies: Sequence[Float32], tokens: int) -> None:
    """Give the small bundle in `folder` the sidecars of `source`, from which it was rounded.

    frequencies: for each layer, (F,) share of `tokens` tokens for which a neuron of the small bundle fires.
    """
    old, new = Bundle.open(source), Bundle.open(folder)
    if old.config.zeros_gates:
        write_hotness(new, frequencies, tokens, folder)
    if old.predictors is not None:
        shutil.copyfile(source / PREDICTORS, folder / PREDICTORS)
        save_predictors(replace(old.predictors, model=weights_digest(new.manifest)), folder)
    if old.streams is None:
        return
    stored, facts = load_file(source / STREAMS), old.streams
    arrays = {EMBEDDINGS: stored[EMBEDDINGS]}
    for name, (_, cols) in facts.matrices(old.config).items():
        matrix = dequantize(matrix_of(stored, name), facts.bits, cols)
        if name.endswith("qkv.up"):
            matrix = widened_qkv(matrix, old.config, new.config.head_dim)
        if name.endswith("out.down"):
            matrix = widened_context(matrix, old.config, new.config.head_dim)
        arrays[name] = np.ascontiguousarray(matrix)
    write_streams(
        folder,
        arrays,
        mode=facts.mode,
        bits=facts.bits,
        streams=facts.streams,
        first_layer=facts.first_layer,
        attention_rank=facts.attention_rank,
        feed_forward_rank=facts.feed_forward_rank,
        trained_tokens=facts.trained_tokens,
        measured_tokens=facts.measured_tokens,
        acceptance=facts.acceptance,
    )


def embed_sidecars(model: EmbeddedModel, folder: Path) -> None:
    """Give the large bundle in `folder` what the small one has, and hotness where gates are zero."""
    large, small = Bundle.open(folder), Bundle.open(model.small.bundle.path)
    if small.streams is not None:
        _embed_streams(model, small.streams, load_file(small.path / STREAMS), large)
    if not large.config.zeros_gates:
        return
    facts = small.predictors
    stored: Tensors = {} if facts is None else load_file(small.path / PREDICTORS)
    layers = []
    frequencies = [np.zeros(model.shape.intermediate_size, np.float32) for _ in range(model.shape.num_layers)]
    for layer, source in enumerate(model.sources):
        if facts is not None:
            layers.append(embedded_predictor(model, facts, stored, layer))
        frequencies[layer][model.filler_places(layer)] = model.fillers(layer).fires.mean(axis=1)
        if model.is_real(layer):
            frequencies[layer][model.neuron_places(layer)] = model.frequencies[source]
    if facts is not None:
        _write_predictors(model, facts, layers, large)
    write_hotness(large, frequencies, len(model.text.entering[0]), folder)


def _embed_streams(model: EmbeddedModel, facts: MultiStreams, stored: Tensors, large: Bundle) -> None:
    wide = replace(facts, model=weights_digest(large.manifest), first_layer=model.layers[facts.first_layer])
    tensors = stream_tensors(large.config, wide)
    arrays = _stream_arrays(model, wide, stored, large)
    sha256, crcs = write_tensors(STREAMS_SIDECAR, tensors_layout(tensors), arrays, large.path)
    save_streams(replace(wide, sha256=sha256, crcs=crcs), large.path)


def _stream_arrays(
    model: EmbeddedModel, facts: MultiStreams, stored: Tensors, large: Bundle
) -> Iterator[NDArray[np.generic]]:
    """Each tensor of the large bundle's streams."""
    random = np.random.default_rng(36)
    embeddings = np.zeros((facts.streams, large.config.hidden_size), np.float32)
    embeddings[:, : stored[EMBEDDINGS].shape[1]] = stored[EMBEDDINGS]
    yield embeddings
    for name, (rows, cols) in facts.matrices(large.config).items():
        found = silent_rows(rows, cols, facts.bits, random)
        old = _old_name(model, name)
        if old is not None:
            matrix = matrix_of(stored, old)
            places, columns = np.arange(len(matrix.codes)), np.arange(matrix.scales.shape[1])
            if name.endswith("qkv.up"):
                places = model.qkv_rows()
            if name.endswith("out.down"):
                columns = model.context_groups()
            put(found, places, place_groups(matrix, facts.bits, found.scales.shape[1], columns, random))
        yield from (found.codes, found.scales, found.biases)


def _old_name(model: EmbeddedModel, name: str) -> str | None:
    """The small model's name for a tensor of the large one's; None if it has none."""
    _, layer, rest = name.split(".", 2)
    return f"layers.{model.layers.index(int(layer))}.{rest}" if model.is_real(int(layer)) else None


def embedded_predictor(
    model: EmbeddedModel, facts: Predictors, stored: Tensors, layer: int
) -> StoredPredictor:
    """The predictor of a layer of the large model. facts, stored: the small model's predictors."""
    source, own = model.sources[layer], model.small.config
    prefix, bits, random = f"layers.{source}", facts.bits, np.random.default_rng([37, layer])
    down, up = (matrix_of(stored, f"{prefix}.{part}") for part in ("down", "up"))
    found, places = model.fillers(layer), model.filler_places(layer)
    gates, fed = filler_gates(model, layer, model.text)
    low = fed @ dequantize(down, bits, own.hidden_size).T
    trained = dequantize(up, bits, low.shape[1])
    # From 1 and what the trained predictor computes first, to gates of one standard deviation.
    spreads = gates.std(axis=0) + np.float32(1e-6)
    inputs = np.concatenate([low, np.ones((len(low), 1), np.float32)], axis=1)
    square = inputs.T @ inputs
    square += RIDGE * np.trace(square) / len(square) * np.eye(len(square), dtype=np.float32)
    weights = np.linalg.solve(square, inputs.T @ (gates / spreads)).T
    sizes = (low @ trained.T).std(axis=0)[found.first] / ((inputs @ weights.T).std(axis=0) + 1e-6)
    weights *= sizes[:, None]
    runner = _native.Runner(usable_cores())
    rows = quantize(runner, np.ascontiguousarray(weights[:, :-1], np.float32), bits, "a predictor")
    scores = low @ dequantize(rows, bits, low.shape[1]).T + weights[:, -1]
    point = facts.point(RECALL)
    shift = np.quantile(scores[gates > 0], point.false_negatives[source]) + point.offsets[source]
    whole = silent_rows(model.shape.intermediate_size, low.shape[1], bits, random)
    bias = np.zeros(model.shape.intermediate_size, np.float32)
    put(whole, places, rows)
    bias[places] = weights[:, -1] - shift
    if model.is_real(layer):
        put(whole, model.neuron_places(layer), up)
        bias[model.neuron_places(layer)] = stored[f"{prefix}.bias"]
    wide = place_groups(down, bits, model.groups, model.columns, random)
    return StoredPredictor(bits, wide, whole, bias, points=())


def filler_gates(model: EmbeddedModel, layer: int, text: Recorded) -> tuple[Float32, Float32]:
    """(T, n) the gates of a layer's fillers on a text, and (T, D) their inputs."""
    rows, states = model.small.attention[model.sources[layer]], model.states(layer, text)
    found, eps = model.fillers(layer), model.small.config.norm.eps
    fed = normed(states, rows.feed_forward_norm, eps)
    gates = fed @ dequantize(found.gate, Q4.bits, fed.shape[1]).T
    gates += found.offset.astype(np.float32) / root_mean_square(states, eps)[:, None]
    return np.asarray(gates, np.float32), fed


def predicted_rates(model: EmbeddedModel, text: Recorded) -> dict[str, dict[str, float]]:
    """Of fillers and of the trained neurons: shares missed of those that fire, and selected of all.

    At the operating point RECALL, means over some layers, evenly spread, on a text that fitted nothing; of
    the trained ones, each layer's nearest.
    """
    facts = Bundle.open(model.small.bundle.path).predictors
    assert facts is not None
    stored, point = load_file(model.small.bundle.path / PREDICTORS), facts.point(RECALL)
    rates: dict[str, list[tuple[float, float]]] = {"fillers": [], "trained": []}
    for layer in range(0, model.shape.num_layers, -(-model.shape.num_layers // MEASURED_LAYERS)):
        source = model.sources[layer]
        gates, fed = filler_gates(model, layer, text)
        made, places = embedded_predictor(model, facts, stored, layer), model.filler_places(layer)
        columns = model.small.config.hidden_size
        low = fed @ dequantize(made.down, facts.bits, columns).T
        up = dequantize(made.up, facts.bits, low.shape[1])[places]
        rates["fillers"].append(_rates(low @ up.T + made.bias[places] + point.offsets[source], gates))
        own = text.fed(source, model.small.attention[source].feed_forward_norm, model.small.config.norm.eps)
        down, up = (
            dequantize(matrix_of(stored, f"layers.{source}.{part}"), facts.bits, size)
            for part, size in (("down", columns), ("up", low.shape[1]))
        )
        scores = own @ down.T @ up.T + stored[f"layers.{source}.bias"] + point.offsets[source]
        gate = dequantize(model.small.neurons[source][0], Q4.bits, columns)
        rates["trained"].append(_rates(scores, own @ gate.T))
    return {
        name: dict(zip(("missed", "selected"), map(float, np.mean(found, axis=0)), strict=True))
        for name, found in rates.items()
    }


def _rates(scores: NDArray[np.floating], gates: Float32) -> tuple[float, float]:
    fires = gates > 0
    return float((fires & (scores <= 0)).sum() / max(1, fires.sum())), float((scores > 0).mean())


def _write_predictors(
    model: EmbeddedModel, facts: Predictors, layers: list[StoredPredictor], large: Bundle
) -> None:
    def of(values: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(values[source] for source in model.sources)

    def wide(point: OperatingPoint) -> OperatingPoint:
        return replace(
            point,
            offsets=of(point.offsets),
            false_negatives=of(point.false_negatives),
            false_positives=of(point.false_positives),
            selected=of(point.selected),
        )

    ranks = tuple(layer.rank for layer in layers)
    tensors = predictor_tensors(large.config, facts.bits, ranks)
    sha256, crcs = write_tensors(
        PREDICTORS_SIDECAR, tensors_layout(tensors), stored_arrays(layers), large.path
    )
    found = replace(facts, model=weights_digest(large.manifest), ranks=ranks, sha256=sha256, crcs=crcs)
    save_predictors(replace(found, points=tuple(map(wide, facts.points))), large.path)
