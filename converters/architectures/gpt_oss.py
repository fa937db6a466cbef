"""gpt-oss: experts with biases and a clamped activation, attention sinks, windows in every other layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ondevice.converters.architectures.adapting import renamed
from ondevice.converters.architectures.common import (
    Description,
    Family,
    Tensors,
    check_window,
    decoder,
    float32,
    read_layer_types,
    read_sizes,
    require_windows,
    score_scale,
    uniform_layers,
)
from ondevice.converters.architectures.config_reader import CONFIG_REMEDY, SAME_REPOSITORY, ConfigReader
from ondevice.converters.architectures.experts import (
    ExpertNames,
    join_experts,
    read_count,
    read_training_keys,
    with_experts,
)
from ondevice.converters.architectures.rotary import read_rope
from ondevice.converters.checkpoints.base import SourceTensor, StoredTensor
from ondevice.converters.checkpoints.views import RowsOf, Transposed
from ondevice.errors import CheckpointError
from ondevice.model_config import (
    CLAMP,
    SWISH_SLOPE,
    AttentionSpec,
    ExpertsSpec,
    FeedForwardSpec,
    ModelConfig,
    NormSpec,
)

WINDOW, THETA, CHOSEN = 128, 150000.0, 4
YARN: Mapping[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""Rotary scaling, where the file has none."""
NAMES = ExpertNames(router="mlp.router.weight", router_bias="mlp.router.bias", stack="mlp.experts.")
"""Names of the experts' tensors, once their stacks are split."""
STACKS = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}
"""Stacks of all experts of a layer, and the matrices whose rows alternate in them."""


def _read(reader: ConfigReader) -> Description:
    sizes = read_sizes(reader, max_context=131072, kv_heads=8, head_dim=64)
    reader.only("hidden_act", "silu")
    window = reader.integer("sliding_window", WINDOW)
    check_window(window)
    kinds = read_layer_types(reader, sizes.num_layers)
    if kinds is None:
        kinds = ["full_attention" if i % 2 else "sliding_attention" for i in range(sizes.num_layers)]
    require_windows(kinds, not reader.is_null("sliding_window"))
    bias = reader.boolean("attention_bias", True)
    attention = AttentionSpec(score_scale(sizes.head_dim), sinks=True, bias=bias, output_bias=bias)
    feed_forward = FeedForwardSpec(
        "clamped_swish",
        clamp=float32(reader.number("swiglu_limit", CLAMP)),
        slope=float32(reader.number("swiglu_alpha", SWISH_SLOPE)),
    )
    # What the model was first trained for, which the rotary scaling says too.
    reader.integer("initial_context_length", 4096)
    if not any(reader.section(key) for key in ("rope_scaling", "rope_parameters")):
        reader = reader.with_value("rope_scaling", YARN)
    config = decoder(
        "gpt_oss",
        sizes,
        uniform_layers(
            sizes.num_layers,
            attention,
            feed_forward,
            [window if kind == "sliding_attention" else 0 for kind in kinds],
        ),
        [read_rope(reader, sizes.head_dim, sizes.max_context, theta=THETA)],
        norm=NormSpec("rms", reader.number("rms_norm_eps", 1e-5)),
        tie_embeddings=reader.boolean("tie_word_embeddings", False),
    )
    # The weights are a softmax of the chosen experts' logits; that is one of all, renormalised.
    experts = ExpertsSpec(
        read_count(reader, 128, "num_local_experts", "num_experts"),
        _chosen(reader),
        sizes.intermediate_size,
        renormalised=True,
        router_bias=True,
        bias=True,
    )
    read_training_keys(reader)
    config = with_experts(config, experts, [True] * config.num_layers)
    return Description(config, partial(_adapt, config))


def _chosen(reader: ConfigReader) -> int:
    """The number of experts that a token chooses. Two keys must agree on it."""
    chosen = reader.integer("num_experts_per_tok", reader.integer("experts_per_token", CHOSEN))
    if reader.integer("experts_per_token", chosen) != chosen:
        raise CheckpointError(
            f"config.json: num_experts_per_tok is {chosen}, and experts_per_token "
            f"{reader.integer('experts_per_token')}; {CONFIG_REMEDY}"
        )
    return chosen


def _adapt(config: ModelConfig, tensors: Tensors) -> Tensors:
    adapted = join_experts(_apart(tensors, config), config, NAMES)
    return renamed(adapted, {"self_attn.sinks": "attention.sinks"})


def _apart(tensors: Tensors, config: ModelConfig) -> Tensors:
    """The tensors, with each expert's matrices and biases split from their stacks.

    A checkpoint stacks values as (experts, columns, rows). Quantised experts are already matrices of rows. In
    folders that MLX has written, gates and ups have separate stacks, which `join_experts` splits later; only
    their biases are split here.
    """
    adapted, experts = dict(tensors), config.experts
    assert experts is not None
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}.mlp.experts."
        for name, parts in STACKS.items():
            values, biases = adapted.pop(prefix + name, None), adapted.pop(f"{prefix}{name}_bias", None)
            rows = len(parts) * experts.neurons if len(parts) > 1 else config.hidden_size
            columns = config.hidden_size if len(parts) > 1 else experts.neurons
            for expert in range(experts.count):
                matrix = adapted.pop(f"{prefix}{name}.{expert}", None)
                if values is not None:
                    matrix = Transposed(values.name, _one(values, expert, (experts.count, columns, rows)))
                for index, part in enumerate(parts):
                    new = f"{prefix}{expert}.{part}_proj"
                    if matrix is not None:
                        adapted[f"{new}.weight"] = _interleaved_part(
                            f"{new}.weight", matrix, index, len(parts)
                        )
                    if biases is not None:
                        bias = _one(biases, expert, (experts.count, rows))
                        adapted[f"{new}.bias"] = _interleaved_part(f"{new}.bias", bias, index, len(parts))
        for part in ("gate", "up", "down"):
            if (stack := adapted.pop(f"{prefix}{part}_proj.bias", None)) is None:
                continue
            rows = config.hidden_size if part == "down" else experts.neurons
            for expert in range(experts.count):
                new = f"{prefix}{expert}.{part}_proj.bias"
                if new in adapted:
                    raise CheckpointError(f"{new} and {stack.name} are the same; {SAME_REPOSITORY}")
                adapted[new] = _one(stack, expert, (experts.count, rows))
    return adapted


def _one(stack: SourceTensor, expert: int, wanted: tuple[int, ...]) -> StoredTensor:
    """One expert of a stack. Raises CheckpointError unless it has the shape `wanted`."""
    if not isinstance(stack, StoredTensor) or stack.shape != wanted:
        raise CheckpointError(
            f"{stack.name} has shape {list(stack.shape)}; config.json asks for {list(wanted)}; "
            f"{SAME_REPOSITORY}"
        )
    offset = stack.offset + expert * (stack.nbytes // wanted[0])
    return replace(stack, shape=wanted[1:], offset=offset)


def _interleaved_part(name: str, source: SourceTensor, index: int, matrices: int) -> SourceTensor:
    """One of the `matrices` matrices whose rows alternate in `source`: its rows from `index` on, at that
    distance.
    """
    return RowsOf(name, source, np.arange(index, source.shape[0], matrices))


GPT_OSS = Family("gpt_oss", "GptOssForCausalLM", _read)
