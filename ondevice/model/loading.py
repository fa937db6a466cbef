"""Loads weights from a bundle on flash into a backend, in bounded pieces.

All reads go through the flash reader, which checks every byte.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ondevice.backends.base import (
    Array,
    Backend,
    Biases,
    Embedding,
    ExpertNorms,
    FeedForward,
    Float32,
    HeadNorms,
    Norm,
    Router,
)
from ondevice.backends.cpu_matrices import StreamedHead
from ondevice.backends.latent import LatentWeights
from ondevice.backends.recurrent import DeltaWeights, MixerWeights
from ondevice.bundle.layout import (
    PER_LAYER,
    POSITIONS,
    RESIDENT,
    head_matrix,
    out_matrix,
    projection_matrices,
)
from ondevice.bundle.matrix_layout import TiledMatrix
from ondevice.bundle.matrix_units import ROUTER, head_rows
from ondevice.bundle.predictors import PREDICTORS, OperatingPoint
from ondevice.bundle.reader import Bundle, CheckedFile
from ondevice.bundle.streams import STREAMS
from ondevice.bundle.weight_shapes import EXPERT_NORMS, WeightShape, layer_weight_shapes, model_weight_shapes
from ondevice.callbacks import IsCancelled, never_cancelled
from ondevice.config import QuantConfig, Sparsity
from ondevice.flash.reader import FlashReader
from ondevice.model.parts import Part, StreamedPart, TiledSection, TilesPart, VectorPart, part_tasks
from ondevice.model.records import (
    RESIDENT_FILE,
    EmbeddingRecords,
    NeuronRecords,
    embedding_records,
    per_layer_records,
)
from ondevice.model.selectors import cutoff_gates, selector_parts
from ondevice.model.tensor_file import TaskResults, TensorFile
from ondevice.model.weights import (
    AltUpLayer,
    AltUpModel,
    Laurel,
    LayerWeights,
    ModelWeights,
    PerLayerBlock,
    PerLayerInputs,
)
from ondevice.model_config import AttentionSpec, LayerSpec, ModelConfig


def bundle_files(bundle: Bundle, sparsity: Sparsity = "dense", streams: bool = False) -> list[CheckedFile]:
    """The files to open a FlashReader with. Sources refer to files by their index in this list.

    In order: the resident file, neurons, the embedding, per-layer inputs, experts stored as matrices, then
    gate rows for `exact` if activations zero gates, predictors for `predicted`, and adapters with `streams`.
    Raises BundleError if the bundle lacks one of them.
    """
    layers = range(bundle.config.num_layers)
    files = [bundle.file(RESIDENT), *(bundle.neuron_file(layer) for layer in layers)]
    if bundle.config.has_table:
        files.append(bundle.embedding_file)
    if bundle.config.has_inputs_table:
        files.append(bundle.file(PER_LAYER))
    files += [bundle.expert_file(layer) for layer in bundle.config.expert_layers]
    if sparsity == "exact" and bundle.config.zeros_gates:
        files += [bundle.gate_file(layer) for layer in layers]
    elif sparsity == "predicted":
        files.append(bundle.sidecar_file(PREDICTORS))
    if streams:
        files.append(bundle.sidecar_file(STREAMS))
    return files


def load_weights(
    bundle: Bundle,
    reader: FlashReader,
    backend: Backend,
    cancelled: IsCancelled = never_cancelled,
    sparsity: Sparsity = "dense",
    point: OperatingPoint | None = None,
    streams_matrices: bool = False,
) -> ModelWeights:
    """The weights of a model or a part of one, loaded into `backend` from `reader`, which is opened over the
    bundle's files.

    A missing embedding table or output head is None.

    Raises FlashReadError if bytes don't match their checksum, BundleError if they can't be weights, Cancelled
    if `cancelled()` holds between two pieces, and the backend's error if memory runs out.

    Args:
        bundle: the model's bundle.
        reader: opened over `bundle_files(bundle, sparsity)`.
        backend: loads and holds the weights.
        cancelled: called between two pieces.
        sparsity: how neurons are selected: not at all (`dense`), by their gates (`exact`) or by predictors
            (`predicted`).
        point: the operating point of `predicted`.
        streams_matrices: whether `matrix_units` stay on flash until passes need them (`MatrixStream`).
    """
    config = bundle.config
    resident = TensorFile(bundle, reader, bundle.file(RESIDENT), RESIDENT_FILE)
    embedding = embedding_records(bundle, reader) if config.has_table else None
    layers = _layers_parts(bundle, reader, resident, sparsity, streams_matrices)
    final_norm = norm_parts(config, resident, "final_norm") if config.final_norm else []
    heads = _head_parts(bundle, resident, embedding, streams_matrices)
    selectors = selector_parts(bundle, reader, resident, sparsity, point)
    positions = position_parts(config, resident)
    extra = model_weight_parts(bundle, resident)
    order: list[Part] = [*positions]
    for parts, selector in zip(layers, selectors, strict=True):
        order += [*parts, *selector.matrices]
    order += [*extra, *final_norm, *heads]

    with TaskResults(part_tasks(order, cancelled)) as ahead:
        table = loaded_positions(config, {part.field: part.load(backend, ahead) for part in positions})
        loaded_layers = []
        for layer, (parts, selector) in enumerate(zip(layers, selectors, strict=True)):
            loaded = {part.field: part.load(backend, ahead) for part in parts}
            records, chosen = NeuronRecords(bundle, reader, layer), selector.load(backend, ahead)
            gates = loaded.get("gate") if chosen is None else chosen.cut_gates
            biases = feed_forward_biases(loaded)
            spec = config.layers[layer]
            dense = None if config.experts is None else config.dense_neurons(spec)
            neurons = backend.load_feed_forward(layer, records, chosen, biases, gates, dense)
            loaded_layers.append(layer_weights(backend, config, spec, loaded, neurons))
        others = {part.field: part.load(backend, ahead) for part in extra}
        last = {part.field: part.load(backend, ahead) for part in final_norm}
        loaded_heads = [part.load(backend, ahead) for part in heads]
    norm = loaded_norm(config, last, "final_norm") if config.final_norm else None
    rows = None
    if config.has_inputs_table:
        rows = backend.load_embedding(per_layer_records(bundle, reader), offloaded=True)
    loaded_table, loaded_head = None, loaded_heads[0] if loaded_heads else None
    if loaded_heads and streams_matrices:
        loaded_head = StreamedHead(loaded_heads)
    if embedding is not None and config.part.embeds:
        tied = loaded_head if config.tie_embeddings else None
        loaded_table = backend.load_embedding(embedding, head=tied)
    blocks = blocks_of_model(config, others, rows)
    return ModelWeights(loaded_table, loaded_layers, norm, loaded_head, table, **blocks)


def _layers_parts(
    bundle: Bundle, reader: FlashReader, resident: TensorFile, sparsity: Sparsity, streams_matrices: bool
) -> list[list[Part]]:
    """For each layer, the parts to load."""
    layers = []
    for layer in range(bundle.config.num_layers):
        parts = layer_parts(bundle.config, bundle.quant, resident, layer)
        if streams_matrices:
            parts = [
                StreamedPart(it, layer) if isinstance(it, TilesPart) and it.field != ROUTER else it
                for it in parts
            ]
        layers.append([*parts, *cutoff_gates(bundle, reader, layer, sparsity)])
    return layers


def _head_parts(
    bundle: Bundle, resident: TensorFile, embedding: EmbeddingRecords | None, streams_matrices: bool
) -> list[Part]:
    """The parts to load for the head: one, or one for each unit if the head stays on flash; empty without a
    head.
    """
    if not bundle.config.part.heads:
        return []
    head, parts = head_part(bundle, resident, embedding), list[Part]()
    if not streams_matrices:
        return [head]
    (tiles,) = head.sections
    for unit, (first, matrix) in enumerate(head_rows(bundle.config, bundle.quant), bundle.config.num_layers):
        bias = None if head.bias is None else partial(_slice, head.bias, first, first + matrix.rows)
        parts.append(StreamedPart(TilesPart(head.field, (tiles.rows(first, matrix),), bias), unit))
    return parts


def _slice(read: Callable[[], Float32], first: int, stop: int) -> Float32:
    return read()[first:stop]


def blocks_of_model(config: ModelConfig, weights: Mapping[str, Any], table: Embedding) -> dict[str, Any]:
    """The fields of ModelWeights that few models have, made of loaded weights by name. table: the table of
    per-layer inputs.
    """
    fields: dict[str, Any] = {name: weights.get(name) for name in ("project_in", "project_out")}
    if config.has_inputs_table:
        norm = _weight_norm(config, weights, "per_layer")
        fields["per_layer"] = PerLayerInputs(table, weights["per_layer.projection"], norm)
    if config.residual_copies > 1 and config.part.heads:
        spread, gather = (
            [weights[f"copies.{name}.{copy}"] for copy in range(1, config.residual_copies) if exists]
            for name, exists in (("spread", config.part.embeds), ("gather", True))
        )
        fields["altup"] = AltUpModel(spread, gather)
    return fields


def layer_weights(
    backend: Backend,
    config: ModelConfig,
    spec: LayerSpec,
    loaded: Mapping[str, Any],
    feed_forward: FeedForward,
) -> LayerWeights:
    """The weights of the layer `spec`, made of its loaded `layer_parts` by field and its neurons."""

    def norm(field: str) -> Norm | None:
        return loaded_norm(config, loaded, field) if field in loaded else None

    norms = head_norms(spec.attention, config.norm.eps, loaded)
    if norms is not None and spec.attention.value_norm and norms.k is not None:
        ones = backend.load_vector(np.ones(config.heads(spec.attention).width, dtype=np.float32))
        norms = norms._replace(v=Norm(ones, config.norm.eps))
    shapes = layer_weight_shapes(config, spec)
    weights = {weight.name: loaded[weight.name] for weight in shapes if weight.name in loaded}
    return LayerWeights(
        attention_norm=norm("attention_norm"),
        qkv=loaded["qkv"],
        head_norms=norms,
        out=loaded["out"],
        attention_output_norm=norm("attention_output_norm"),
        feed_forward_norm=norm("feed_forward_norm"),
        feed_forward=feed_forward,
        feed_forward_output_norm=norm("feed_forward_output_norm"),
        latent=_latent(spec, weights),
        **_other_blocks(config, weights),
        **_gates(backend, config, spec, weights),
    )


def _latent(spec: LayerSpec, weights: Mapping[str, Any]) -> LatentWeights | None:
    latent = spec.attention.latent
    if latent is None:
        return None
    norm = Norm(weights["attention.latent_norm.weight"], latent.eps)
    keys, values = weights["attention.latent_keys"], weights["attention.latent_values"]
    if not latent.query_rank:
        return LatentWeights(norm, keys, values)
    query_norm = Norm(weights["attention.query_norm.weight"], latent.eps)
    return LatentWeights(norm, keys, values, weights["attention.queries"], query_norm)


def _other_blocks(config: ModelConfig, weights: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of LayerWeights that few models have, made of a layer's loaded weights by name."""
    fields: dict[str, Any] = {}
    if "laurel.down" in weights:
        norm = _weight_norm(config, weights, "laurel")
        fields["laurel"] = Laurel(weights["laurel.down"], weights["laurel.up"], norm)
    if "copies.router" in weights:
        shape, count = (-1, config.hidden_size), config.residual_copies
        fields["altup"] = AltUpLayer(
            _weight_norm(config, weights, "copies"),
            weights["copies.router"].reshape(shape),
            weights["copies.predict"].reshape(-1, count),
            weights["copies.correct"].reshape(-1, count),
            weights["copies.scale"],
        )
    if "per_layer.gate" in weights:
        norm = _weight_norm(config, weights, "per_layer")
        fields["per_layer"] = PerLayerBlock(weights["per_layer.gate"], weights["per_layer.out"], norm)
    fields["scale"], fields["sinks"] = weights.get("scale"), weights.get("attention.sinks")
    if "router" in weights:
        bias, shared_gate = weights.get("router.choice_bias"), weights.get("shared_gate")
        fields["router"] = Router(weights["router"], bias, shared_gate, _expert_norms(config, weights))
    return fields


def _gates(
    backend: Backend, config: ModelConfig, spec: LayerSpec, weights: Mapping[str, Any]
) -> dict[str, Any]:
    """The fields of LayerWeights for gated attention or recurrent layers, made of a layer's loaded weights by
    name.
    """
    if spec.conv is not None:
        return {"conv": weights["conv.weight"].reshape(spec.conv.taps, -1)}
    if spec.mamba2 is not None:
        mixer = MixerWeights(
            weights["mamba2.conv"].reshape(spec.mamba2.taps, -1),
            weights.get("mamba2.conv.bias"),
            _decay(backend, weights["mamba2.decay_log"]),
            weights["mamba2.time_bias"],
            weights["mamba2.skip"],
            None if spec.mamba2.norm == "none" else _weight_norm(config, weights, "mamba2"),
        )
        projections = {"mixer_in": weights.get("mamba2.in"), "mixer_out": weights.get("mamba2.out")}
        return {"gates": weights["mamba2.steps"], "mixer": mixer, **projections}
    if spec.delta is None:
        return {"gates": weights.get("attention.gate")}
    delta = DeltaWeights(
        weights["delta.conv"].reshape(spec.delta.taps, -1),
        _decay(backend, weights["delta.decay_log"]),
        weights["delta.time_bias"],
        _weight_norm(config, weights, "delta"),
    )
    return {"gates": weights["delta.gates"], "delta": delta}


def _decay(backend: Backend, decay_log: Array) -> Array:
    # Rounded once from float64, so that all backends have the same values.
    return backend.load_vector(-np.exp(np.array(decay_log, np.float64)).astype(np.float32))


def _expert_norms(config: ModelConfig, weights: Mapping[str, Any]) -> ExpertNorms | None:
    if "router.scales" not in weights:
        return None
    router, experts, output, dense = (Norm(weights[f"{it}.weight"], config.norm.eps) for it in EXPERT_NORMS)
    return ExpertNorms(router, experts, output, dense, weights["router.scales"])


def _weight_norm(config: ModelConfig, loaded: Mapping[str, Any], block: str) -> Norm:
    return Norm(loaded[f"{block}.norm.weight"], config.norm.eps)


def head_norms(spec: AttentionSpec, eps: float, loaded: Mapping[str, Any]) -> HeadNorms | None:
    """The norms of queries and keys, made of the loaded vectors `q_norm` and `k_norm`, and those with
    `_bias`.
    """
    if spec.head_norm == "none":
        return None
    q, k = (
        Norm(loaded[which], eps, loaded.get(f"{which}_bias"), spec.head_norm == "layer")
        if which in loaded
        else None
        for which in ("q_norm", "k_norm")
    )
    assert q is not None
    return HeadNorms(q, k, spec.head_norm == "projection")


def position_parts(config: ModelConfig, resident: TensorFile) -> list[Part]:
    """The part to load for learned positions, as a list; empty if the model has none."""
    return [VectorPart(POSITIONS, partial(resident.vector, POSITIONS))] if config.learned_positions else []


def loaded_positions(config: ModelConfig, loaded: Mapping[str, Any]) -> Array | None:
    """The learned positions for `ModelWeights.positions`, from the loaded `position_parts` by field; None
    without any.
    """
    if not config.learned_positions:
        return None
    return loaded[POSITIONS].reshape(config.max_context, config.hidden_size)


def feed_forward_biases(loaded: Mapping[str, Any]) -> Biases:
    """The biases of a layer's feed-forward, made of its loaded `layer_parts` by field."""
    return Biases(loaded.get("gate_bias"), loaded.get("down_bias"))


def loaded_norm(config: ModelConfig, loaded: Mapping[str, Any], field: str) -> Norm:
    """The norm `field`, made of the loaded `norm_parts` by field."""
    norm = config.norm
    return Norm(loaded[field], norm.eps, loaded.get(f"{field}_bias"), norm.kind == "layer")


def layer_parts(config: ModelConfig, quant: QuantConfig, resident: TensorFile, layer: int) -> list[Part]:
    """The parts to load for one layer's LayerWeights, in the order of the resident file."""
    prefix = f"layers.{layer}"
    spec = config.layers[layer]
    attention, feed_forward = spec.attention, spec.feed_forward

    def matrix(field: str, parts: Mapping[str, TiledMatrix], has_bias: bool) -> list[Part]:
        bias = partial(resident.vector, f"{prefix}.attention.{field}.bias") if has_bias else None
        sections = (section(resident, f"{prefix}.attention.{name}", it) for name, it in parts.items())
        return [TilesPart(field, tuple(sections), bias)]

    def norm(field: str, exists: bool) -> list[Part]:
        return norm_parts(config, resident, f"{prefix}.{field}") if exists else []

    def vector(field: str, name: str, exists: bool) -> list[Part]:
        return [VectorPart(field, partial(resident.vector, f"{prefix}.{name}"))] if exists else []

    def head_norm(which: str, exists: bool) -> list[Part]:
        name = f"attention.{which}"
        bias = vector(f"{which}_bias", f"{name}.bias", exists and attention.head_norm_bias)
        return [*vector(which, f"{name}.weight", exists), *bias]

    others = _weight_parts(resident, quant, f"{prefix}.", layer_weight_shapes(config, spec))

    return [
        *norm("attention_norm", spec.norms_input),
        *matrix("qkv", projection_matrices(config, quant, layer), attention.bias),
        *head_norm("q_norm", attention.has_norms),
        *head_norm("k_norm", attention.has_norms and attention.keys_of is None),
        *matrix("out", {"out": out_matrix(config, quant, layer)}, attention.output_bias),
        *norm("attention_output_norm", spec.norms_output),
        *norm("feed_forward_norm", spec.norms_input and spec.has_feed_forward),
        *vector("gate_bias", "feed_forward.gate.bias", feed_forward.bias),
        *vector("down_bias", "feed_forward.down.bias", feed_forward.output_bias),
        *norm("feed_forward_output_norm", spec.norms_output and spec.has_feed_forward),
        *others,
    ]


def model_weight_parts(bundle: Bundle, resident: TensorFile) -> list[Part]:
    """The parts to load for `model_weight_shapes`. Their fields are the names there."""
    return _weight_parts(resident, bundle.quant, "", model_weight_shapes(bundle.config))


def _weight_parts(
    resident: TensorFile, quant: QuantConfig, prefix: str, weights: Sequence[WeightShape]
) -> list[Part]:
    """The parts to load for `weights`. A matrix is loaded with its bias, `<name>.bias`, if there is one."""
    biases = {f"{weight.name}.bias" for weight in weights if weight.is_matrix}
    biases &= {weight.name for weight in weights}
    parts: list[Part] = []
    for weight in weights:
        name, bias_name = f"{prefix}{weight.name}", f"{weight.name}.bias"
        matrix = weight.tiled(quant)
        if matrix is None:
            if weight.name not in biases:
                parts.append(VectorPart(weight.name, partial(resident.vector, name)))
            continue
        bias = partial(resident.vector, f"{prefix}{bias_name}") if bias_name in biases else None
        parts.append(TilesPart(weight.name, (section(resident, name, matrix),), bias))
    return parts


def section(resident: TensorFile, name: str, matrix: TiledMatrix) -> TiledSection:
    """The resident tensor `name` as a section of a part, with the layout of `matrix`."""
    return TiledSection(
        matrix, partial(resident.tiles, name, matrix.tile_bytes), resident.place(name, matrix)
    )


def norm_parts(config: ModelConfig, resident: TensorFile, name: str) -> list[Part]:
    """The parts to load for the norm `name`. Their fields are the last word of the name, and this with
    `_bias`.
    """
    field = name.split(".")[-1]
    weight = VectorPart(field, partial(resident.vector, f"{name}.weight"))
    if not config.norm.bias:
        return [weight]
    return [weight, VectorPart(f"{field}_bias", partial(resident.vector, f"{name}.bias"))]


def head_part(bundle: Bundle, resident: TensorFile, embedding: EmbeddingRecords | None) -> TilesPart:
    """The part to load for the output head, which has one section: in the resident file, or the embedding's
    tiles if tied.
    """
    config, matrix = bundle.config, head_matrix(bundle.config, bundle.quant)
    if config.tie_embeddings:
        assert embedding is not None
        tiles = TiledSection(matrix, embedding.tiles, embedding.place)
    else:
        tiles = section(resident, "head", matrix)
    bias = partial(resident.vector, "head.bias") if config.head_bias else None
    return TilesPart("head", (tiles,), bias)
