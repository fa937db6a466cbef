"""OPT (arXiv 2205.01068): learned positions, LayerNorms, and feed-forwards without a gate.

The model with 350 million parameters has norms on the residual, none after the last layer, and embeddings
half as wide as its layers.

`fc1` decides which neurons fire, so it takes the place of a gate.
"""

from __future__ import annotations

import re
from functools import partial

import numpy as np

from ondevice.converters.architectures.adapting import renamed, weights_and_biases
from ondevice.converters.architectures.common import (
    Description,
    Family,
    Tensors,
    decoder,
    read_activation,
    read_sizes,
    score_scale,
    uniform_layers,
)
from ondevice.converters.architectures.config_reader import ConfigReader
from ondevice.converters.architectures.tensors import POSITIONS, model_weight
from ondevice.converters.checkpoints.views import RowsOf
from ondevice.errors import CheckpointError, UnsupportedModelError
from ondevice.model_config import AttentionSpec, FeedForwardSpec, ModelConfig, NormSpec, RopeSpec

_FIRST_POSITION = 2
"""Row of the position table for a text's first token."""
_DECODER = re.compile(r"(?:model\.)?decoder\.(.+)")
_NAMES = weights_and_biases(
    {
        "self_attn.out_proj": "self_attn.o_proj",
        "self_attn_layer_norm": "input_layernorm",
        "final_layer_norm": "post_attention_layernorm",
        "fc1": "mlp.gate_proj",
        "fc2": "mlp.down_proj",
    }
)
_PROJECTIONS = {f"model.{which}.weight": model_weight(which) for which in ("project_in", "project_out")}
_NAMES_OF_OUTPUT_NORMS = _NAMES | weights_and_biases(
    {
        "self_attn_layer_norm": "attention_output_layernorm",
        "final_layer_norm": "feed_forward_output_layernorm",
    }
)
"""Names where norms come after blocks."""


def _read(reader: ConfigReader) -> Description:
    sizes = read_sizes(reader, max_context=2048, heads=12, vocab_size=50272, neurons=("ffn_dim", None))
    norms_before = reader.boolean("do_layer_norm_before", True)
    removed = reader.boolean("_remove_final_layer_norm", False)
    width = reader.integer("word_embed_proj_dim", sizes.hidden_size)
    if not reader.boolean("layer_norm_elementwise_affine", True):
        raise UnsupportedModelError(
            "config.json: layer_norm_elementwise_affine is false; only norms with weights can be converted"
        )
    # In some of the files, without an effect.
    reader.boolean("output_projection", True)
    for dropped in ("dropout", "activation_dropout", "layerdrop", "init_std"):
        reader.number(dropped, 0.0)
    bias = reader.boolean("enable_bias", True)
    attention = AttentionSpec(score_scale(sizes.head_dim), bias=bias, output_bias=bias)
    activation = read_activation(reader, "activation_function", "relu")
    feed_forward = FeedForwardSpec(activation, gated=False, bias=bias, output_bias=bias)
    config = decoder(
        "opt",
        sizes,
        uniform_layers(
            sizes.num_layers, attention, feed_forward, norms="before" if norms_before else "residual"
        ),
        [RopeSpec((0.0,) * (sizes.head_dim // 2))],
        norm=NormSpec("layer", 1e-5, bias=True),
        final_norm=norms_before and not removed,
        embedding_width=0 if width == sizes.hidden_size else width,
        learned_positions=True,
        tie_embeddings=reader.boolean("tie_word_embeddings", True),
    )
    return Description(config, partial(_adapt, config))


def _adapt(config: ModelConfig, tensors: Tensors) -> Tensors:
    adapted = {}
    for name, tensor in tensors.items():
        inner = _DECODER.fullmatch(name)
        name = name if inner is None else f"model.{inner[1]}"
        name = name.replace("model.final_layer_norm.", "model.norm.")
        adapted[_PROJECTIONS.get(name, name)] = tensor
    table = adapted.get(POSITIONS)
    if table is not None:
        if not table.shape or table.shape[0] != config.max_context + _FIRST_POSITION:
            raise CheckpointError(
                f"{table.name} has shape {list(table.shape)}; config.json asks for "
                f"{config.max_context + _FIRST_POSITION} rows; take both from the same repository"
            )
        rows = np.arange(_FIRST_POSITION, _FIRST_POSITION + config.max_context)
        adapted[POSITIONS] = RowsOf(POSITIONS, table, rows)
    names = _NAMES if config.layers[0].norms_input else _NAMES_OF_OUTPUT_NORMS
    return renamed(adapted, names)


OPT = Family("opt", "OPTForCausalLM", _read)
