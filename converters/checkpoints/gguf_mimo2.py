"""MiMo V2 in GGUF files, whose architecture is named `mimo2`.

Files contain the authors' `sliding_window`, which counts the tokens before the query. Older files don't have
the factor of attention's values, which llama.cpp didn't know then, and store queries, keys and values
separately. Later files may have these in one matrix, and may contain the layers that predict further tokens,
after the others.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ondevice.converters.architectures.adapting import check_shape
from ondevice.converters.architectures.common import GLOBAL, LOCAL, Tensors
from ondevice.converters.architectures.config_reader import shown
from ondevice.converters.architectures.mimo_v2 import VALUE_SCALE
from ondevice.converters.architectures.tensors import LayerNames
from ondevice.converters.checkpoints.gguf_experts import expert_keys, layers_ahead, restored_experts
from ondevice.converters.checkpoints.gguf_file import GgufHeader
from ondevice.converters.checkpoints.gguf_gemma import Values, first_of, kinds_of_layers, of_layers
from ondevice.converters.checkpoints.gguf_lfm2 import KEY_HEADS
from ondevice.converters.checkpoints.gguf_metadata import Metadata
from ondevice.converters.checkpoints.views import RowsOf
from ondevice.errors import CheckpointError
from ondevice.model_config import ModelConfig

MIMO2_NAMES = {
    "attn_sinks": "self_attn.sinks",
    "attn_qkv": "self_attn.qkv_proj",
    # Of the layers that predict tokens ahead alone.
    "layer_output_norm": "final_layernorm",
}
WINDOWS = "attention.sliding_window_pattern"
_SCALE = "attention.value_scale"
_NEURONS, _FACTOR = "expert_feed_forward_length", "expert_weights_scale"
_GROUPS, _CHOSEN_GROUPS = "expert_group_count", "expert_group_used_count"


def mimo2_keys(metadata: Metadata, values: Values) -> dict[str, Any]:
    """The keys of MiMo V2. The tensors show which layers have experts, and which have sinks."""
    total, ahead, width = values["num_hidden_layers"], layers_ahead(metadata, values), values["head_dim"]
    layers = total - ahead
    kinds = kinds_of_layers(metadata, total)[:layers]
    keys = of_layers(metadata, KEY_HEADS, total, values["num_key_value_heads"])[:layers]
    of_kind = {kind: first_of(kinds, kind, keys) for kind in (GLOBAL, LOCAL)}
    if keys != [of_kind[kind] for kind in kinds]:
        raise CheckpointError(
            f"{metadata.header.file}: {metadata.prefix}{KEY_HEADS} is {shown(keys)}; layers with windows "
            "have one number of heads, and those without another"
        )
    rotated = metadata.integer("rope.dimension_count", width)
    if not 0 < rotated <= width:
        raise CheckpointError(
            f"{metadata.header.file}: {metadata.prefix}rope.dimension_count is {rotated}; heads have {width}"
        )

    def with_sinks(kind: str) -> bool:
        layers_of_kind = (layer for layer, of_layer in enumerate(kinds) if of_layer == kind)
        return any(f"blk.{layer}.attn_sinks.weight" in metadata.stored for layer in layers_of_kind)

    routers = [f"blk.{layer}.ffn_gate_inp.weight" for layer in range(layers)]
    return {
        **expert_keys(
            metadata,
            "n_routed_experts",
            0,
            *(_NEURONS, _FACTOR, _GROUPS, _CHOSEN_GROUPS),
            gating="sigmoid",
        ),
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": ahead,
        "layer_types": kinds,
        "mlp_layer_types": ["sparse" if router in metadata.stored else "dense" for router in routers],
        "num_key_value_heads": of_kind[GLOBAL],
        "swa_num_key_value_heads": of_kind[LOCAL],
        "v_head_dim": metadata.integer("attention.value_length", width),
        # Half a dimension more, as the product with the width is rounded down.
        "partial_rotary_factor": (rotated + 0.5) / width,
        "swa_rope_theta": metadata.number("rope.freq_base_swa", 1e4),
        "sliding_window_size": metadata.integer("attention.sliding_window"),
        "sliding_window": None,
        "add_swa_attention_sink_bias": with_sinks(LOCAL),
        "add_full_attention_sink_bias": with_sinks(GLOBAL),
        "attention_value_scale": metadata.number(_SCALE, VALUE_SCALE),
        "moe_intermediate_size": metadata.integer(_NEURONS),
        "routed_scaling_factor": metadata.number(_FACTOR, 0.0) or 1.0,
        "n_group": metadata.integer(_GROUPS, 0) or 1,
        "topk_group": metadata.integer(_CHOSEN_GROUPS, 0) or 1,
        "norm_topk_prob": metadata.boolean("expert_weights_norm", True),
    }


def mimo2_notes(header: GgufHeader, config: ModelConfig) -> tuple[str, ...]:
    """The notes for users on attention, if the file doesn't say something and published models were the
    guide.
    """
    if f"mimo2.{_SCALE}" in header.metadata:
        return ()
    return (f"values are scaled by {VALUE_SCALE}, as in published models: {header.file} has no {_SCALE}",)


def restored_mimo2(tensors: Tensors, config: ModelConfig) -> Tensors:
    """The tensors of MiMo V2, with experts and fused attention projections split and sinks renamed as in a
    checkpoint.

    Raises CheckpointError for experts that are missing, and for tensors of other shapes.
    """
    restored = dict(restored_experts(tensors, config))
    for layer, spec in enumerate(config.layers):
        prefix, name = f"model.layers.{layer}.self_attn.", LayerNames(layer)
        if (sinks := restored.pop(f"{prefix}sinks.weight", None)) is not None:
            restored[f"{prefix}sinks"] = sinks
        fused, rows, first = restored.pop(f"{prefix}qkv_proj.weight", None), config.projection_sizes(spec), 0
        if fused is None:
            continue
        check_shape(fused, (sum(rows.values()), config.hidden_size))
        for which, count in rows.items():
            new = name.projection(which)
            restored[new] = RowsOf(new, fused, np.arange(first, first + count))
            first += count
    return restored
