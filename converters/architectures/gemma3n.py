"""Gemma 3n (text): several residual streams, a low-rank block parallel to attention, and per-layer inputs.

The last layers share keys and values, and gates of the first layers have statistical cutoffs.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import NormalDist

import numpy as np

from ondevice.converters.architectures.adapting import renamed
from ondevice.converters.architectures.common import (
    Description,
    Family,
    Sizes,
    Tensors,
    check_window,
    decoder,
    float32,
    read_activation,
    read_layer_types,
    read_sizes,
)
from ondevice.converters.architectures.config_reader import ConfigReader, shown
from ondevice.converters.architectures.gemma import OUTPUT_NORMS, read_ropes, read_soft_cap
from ondevice.converters.architectures.tensors import PER_LAYER, LayerNames, model_weight
from ondevice.converters.checkpoints.base import SourceTensor
from ondevice.converters.checkpoints.views import RowsOf, Scaled
from ondevice.errors import CheckpointError, UnsupportedModelError
from ondevice.model_config import MAX_COPIES, AttentionSpec, FeedForwardSpec, LayerSpec, ModelConfig, NormSpec

GLOBAL_INTERVAL = 5
"""Layers from one global layer to the next, unless the file names each layer's kind."""
CUT_LAYERS, CUT_SHARE = 10, 0.95
"""Layers with cutoffs, and the share of gates below them, where a file of more than ten layers says
neither."""
PER_LAYER_NAMES = {
    "per_layer_input_gate.weight": "per_layer.gate",
    "per_layer_projection.weight": "per_layer.out",
    "post_per_layer_input_norm.weight": "per_layer.norm.weight",
}
NAMES = (
    OUTPUT_NORMS
    | PER_LAYER_NAMES
    | {
        "laurel.linear_left.weight": "laurel.down",
        "laurel.linear_right.weight": "laurel.up",
        "laurel.post_laurel_norm.weight": "laurel.norm.weight",
        "altup.router_norm.weight": "copies.norm.weight",
        "altup.modality_router.weight": "copies.router",
        "altup.prediction_coefs.weight": "copies.predict",
        "altup.correction_coefs.weight": "copies.correct",
        "altup.correct_output_scale": "copies.scale",
    }
)
SHARED = ("k_proj.weight", "v_proj.weight", "k_norm.weight", "k_proj.bias", "v_proj.bias")
"""Tensors that checkpoints hold for layers with shared keys and values, and that nothing reads."""


def _read(reader: ConfigReader) -> Description:
    sizes, neurons = _sizes(reader)
    layers = sizes.num_layers
    kinds = read_layer_types(reader, layers)
    if kinds is None:
        kinds = [
            "sliding_attention" if (i + 1) % GLOBAL_INTERVAL else "full_attention" for i in range(layers)
        ]
    window = reader.integer("sliding_window", 512)
    check_window(window)
    bias = reader.boolean("attention_bias", False)
    # Scores aren't scaled, whatever it says.
    reader.number("query_pre_attn_scalar", 256.0)
    attention = AttentionSpec(1.0, head_norm="head", value_norm=True, bias=bias, output_bias=bias)
    owners = key_owners(kinds, reader.integer("num_kv_shared_layers", 15))
    feed_forward = FeedForwardSpec(read_activation(reader, "hidden_activation", "gelu_pytorch_tanh"))
    rank = reader.integer("laurel_rank", 64)
    if rank < 1:
        raise CheckpointError(f"config.json: laurel_rank is {rank}; it must be 1 or more")
    specs = [
        LayerSpec(
            replace(
                attention,
                rope=int(kind == "sliding_attention"),
                window=window if kind == "sliding_attention" else 0,
                keys_of=owner,
            ),
            replace(feed_forward, cutoff=cutoff, neurons=neurons_if_different(count, sizes)),
            "both",
            laurel_rank=rank,
        )
        for kind, owner, cutoff, count in zip(kinds, owners, _cutoffs(reader, layers), neurons, strict=True)
    ]
    width = reader.integer("hidden_size_per_layer_input", 256)
    config = decoder(
        "gemma3n_text",
        sizes,
        specs,
        read_ropes(reader, sizes),
        norm=NormSpec("rms", reader.number("rms_norm_eps", 1e-6)),
        embedding_multiplier=float32(sizes.hidden_size**0.5),
        logit_soft_cap=read_soft_cap(reader, "final_logit_softcapping", 30.0),
        tie_embeddings=reader.boolean("tie_word_embeddings", True),
        per_layer_width=width,
        per_layer_multiplier=per_layer_multiplier(width),
        residual_copies=_copies(reader),
    )
    known = per_layer_vocabulary(reader, config.vocab_size)
    return Description(config, lambda tensors: _adapt(tensors, config, known))


def per_layer_multiplier(width: int) -> float:
    """The factor of per-layer input rows of `width` values."""
    return float32((0.5 * width) ** 0.5) if width > 0 else 1.0


def per_layer_vocabulary(reader: ConfigReader, vocab_size: int) -> int:
    """The number of tokens that have a row of per-layer inputs. Raises UnsupportedModelError for too many."""
    known = reader.integer("vocab_size_per_layer_input", 262144)
    if not 1 <= known <= vocab_size:
        raise UnsupportedModelError(
            f"config.json: vocab_size_per_layer_input is {known}; it must be from 1 to vocab_size, "
            f"{vocab_size}"
        )
    return known


def _sizes(reader: ConfigReader) -> tuple[Sizes, list[int]]:
    """The sizes, and each layer's number of neurons, which the config may give once for all layers."""
    neurons = reader.values_of("intermediate_size")
    if any(type(count) is not int or count == 0 for count in neurons):
        raise CheckpointError(
            f"config.json: intermediate_size is {shown(neurons)}; it must be whole numbers from 1 on"
        )
    sizes = read_sizes(
        reader.with_value("intermediate_size", neurons[0]),
        max_context=32768,
        kv_heads=2,
        head_dim=256,
        heads=8,
        vocab_size=262400,
    )
    if len(neurons) not in (1, sizes.num_layers):
        raise CheckpointError(
            f"config.json: intermediate_size names {len(neurons)} layers of {sizes.num_layers}"
        )
    return sizes, neurons if len(neurons) > 1 else neurons * sizes.num_layers


def neurons_if_different(count: int, sizes: Sizes) -> int | None:
    """The number `count` of a layer's neurons; None if it is the same as the model's."""
    return None if count == sizes.intermediate_size else count


def key_owners(kinds: list[str], shared: int) -> list[int | None]:
    """For each layer, the earlier layer whose keys and values it reads, the last of its kind that has some;
    None if it has its own.
    """
    first = len(kinds) - shared
    if not 0 <= shared < len(kinds):
        raise UnsupportedModelError(
            f"config.json: num_kv_shared_layers is {shared}; it must be from 0 to {len(kinds) - 1}"
        )
    owner_kinds = kinds[:first]
    if missing := set(kinds) - set(owner_kinds):
        raise UnsupportedModelError(
            f"config.json: {', '.join(sorted(missing))} has no layer with keys and values of its own, as "
            f"num_kv_shared_layers is {shared}"
        )
    last = {kind: first - 1 - owner_kinds[::-1].index(kind) for kind in set(owner_kinds)}
    return [None] * first + [last[kind] for kind in kinds[first:]]


def _cutoffs(reader: ConfigReader, layers: int) -> list[float | None]:
    """Each layer's cutoff in standard deviations, computed from the share of gates that it cuts off if these
    are normal.
    """
    shares = reader.numbers("activation_sparsity_pattern")
    if shares is None:
        cut = CUT_LAYERS if layers > CUT_LAYERS else 0
        shares = [CUT_SHARE] * cut + [0.0] * (layers - cut)
    if len(shares) != layers:
        raise CheckpointError(
            f"config.json: activation_sparsity_pattern names {len(shares)} layers of {layers}"
        )
    if not all(0.0 <= share <= 0.9999 for share in shares):
        raise UnsupportedModelError(
            f"config.json: activation_sparsity_pattern is {shown(shares)}; shares are from 0 to 0.9999"
        )
    normal = NormalDist()
    # Shares below this are more than ten deviations off.
    return [float32(normal.inv_cdf(float32(share))) if share > 1e-6 else None for share in shares]


def _copies(reader: ConfigReader) -> int:
    copies = reader.integer("altup_num_inputs", 4)
    if not 2 <= copies <= MAX_COPIES:
        raise UnsupportedModelError(
            f"config.json: altup_num_inputs is {copies}; it must be from 2 to {MAX_COPIES}"
        )
    active = reader.integer("altup_active_idx", 0)
    if active:
        raise UnsupportedModelError(f"config.json: altup_active_idx is {active}; only 0 is supported")
    if not reader.boolean("altup_correct_scale", True):
        raise UnsupportedModelError("config.json: altup_correct_scale is false, which isn't supported")
    # Of training alone.
    for dropped in ("altup_coef_clip", "altup_lr_multiplier"):
        reader.number(dropped, 0.0)
    return copies


def _adapt(tensors: Tensors, config: ModelConfig, known: int) -> Tensors:
    """The tensors under the names of `tensors.py`, with constant factors moved into norms and per-layer
    inputs.

    known: number of tokens that have a row of per-layer inputs; others use the first token's row.
    """
    adapted = without_shared_keys(dict(renamed(tensors, NAMES)), config)
    for layer in range(config.num_layers):
        norm = LayerNames(layer).weight("copies.norm.weight")
        if norm in adapted:
            adapted[norm] = Scaled(norm, adapted[norm], 1.0 / config.hidden_size)
    model = {
        f"{old}.{copy - 1}.weight": f"copies.{new}.{copy}"
        for old, new in (("altup_projections", "spread"), ("altup_unembed_projections", "gather"))
        for copy in range(1, config.residual_copies)
    }
    for old, new in model.items():
        if (source := adapted.pop(f"model.{old}", None)) is not None:
            adapted[model_weight(new)] = source
    return with_per_layer_inputs(adapted, config, known)


def without_shared_keys(tensors: Tensors, config: ModelConfig) -> dict[str, SourceTensor]:
    """The tensors without those of keys and values that no layer uses."""
    kept = dict(tensors)
    for layer, spec in enumerate(config.layers):
        if spec.attention.keys_of is not None:
            for name in SHARED:
                kept.pop(f"model.layers.{layer}.self_attn.{name}", None)
    return kept


def with_per_layer_inputs(tensors: Tensors, config: ModelConfig, known: int) -> dict[str, SourceTensor]:
    """The tensors of per-layer inputs under the names of `tensors.py`, with constant factors applied.

    Rows of the table aren't multiplied by `per_layer_multiplier`: 16 bits hold the published rows exactly,
    but not their multiples.

    known: number of tokens that have a row of per-layer inputs; others use the first token's row.
    """
    adapted = dict(tensors)
    names = {
        "per_layer_model_projection.weight": "per_layer.projection",
        "per_layer_projection_norm.weight": "per_layer.norm.weight",
    }
    for old, new in names.items():
        if (source := adapted.pop(f"model.{old}", None)) is not None:
            adapted[model_weight(new)] = source
    half = 0.5**0.5
    factors = {
        model_weight("per_layer.projection"): config.hidden_size**-0.5,
        model_weight("per_layer.norm.weight"): half,
    }
    for name, factor in factors.items():
        if name in adapted:
            adapted[name] = Scaled(name, adapted[name], factor)
    rows = adapted.get(PER_LAYER)
    if rows is not None and rows.shape[:1] == (known,) and known < config.vocab_size:
        others = np.zeros(config.vocab_size - known, dtype=np.int64)
        adapted[PER_LAYER] = RowsOf(PER_LAYER, rows, np.concatenate([np.arange(known), others]))
    return adapted


GEMMA3N = Family("gemma3n_text", "Gemma3nForCausalLM", _read)
