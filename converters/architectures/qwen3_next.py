"""Qwen3-Next, Qwen3.5 and Qwen3.6 (text): the gated delta rule in most layers, gated attention in the others.

Attention's queries and output gates are one projection, head by head. A quarter of a head is rotated. Norms
are stored minus one, except for the norm of the delta rule's output. Layers that predict further tokens
(`mtp.*`) aren't part of the model; `_layer_ahead` reads them for `draft_layers/mtp.py`. In folders that MLX
has written, the channels of convolutions come after their taps, and norms aren't stored minus one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ondevice.converters.architectures.adapting import (
    check_shape,
    in_halves,
    norms_shifted,
    taps_first,
    under_model,
    written_by_mlx,
)
from ondevice.converters.architectures.common import (
    Description,
    Family,
    Sizes,
    Tensors,
    decoder,
    read_feed_forward,
    read_layer_types,
    read_sizes,
    score_scale,
)
from ondevice.converters.architectures.config_reader import SAME_REPOSITORY, ConfigReader, shown
from ondevice.converters.architectures.experts import (
    join_experts,
    read_count,
    read_shared_neurons,
    read_training_keys,
    unstacked,
    with_experts,
)
from ondevice.converters.architectures.layers_ahead import (
    EMBEDDING_NORM,
    HIDDEN_NORM,
    notes_of_layers_ahead,
)
from ondevice.converters.architectures.qwen2_moe import NAMES
from ondevice.converters.architectures.qwen3_moe import read_sparse_layers
from ondevice.converters.architectures.rotary import read_rope
from ondevice.converters.architectures.tensors import FINAL_NORM, LayerNames
from ondevice.converters.checkpoints.views import Matrices, RowsOf, Scaled
from ondevice.errors import CheckpointError, UnsupportedModelError
from ondevice.model_config import (
    NO_ATTENTION,
    AttentionSpec,
    DeltaSpec,
    ExpertsSpec,
    LayerSpec,
    ModelConfig,
    NormSpec,
)

EXPERT_KEYS = (
    "decoder_sparse_step",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)
"""Keys without an effect where there are no experts."""
INTERVAL = 4
"""Layers from one with attention to the next, where the config names none."""
ROTATED_SHARE = 0.25
KINDS = ("linear_attention", "full_attention")
POSITION_KEYS = ("mrope_section", "mrope_interleaved")
"""Keys that divide a head's pairs among three positions, which are equal in a text."""
Rows = dict[str, NDArray[np.int64]]
GATES = ("b", "a")
"""The projections of betas and decays, in this order."""
AHEAD = "mtp."
"""Prefix of the names of layers that predict tokens further ahead."""
AHEAD_NAMES = {
    "mtp.layers.0.": "model.layers.0.",
    "mtp.norm.weight": FINAL_NORM,
    "mtp.pre_fc_norm_embedding.weight": EMBEDDING_NORM,
    "mtp.pre_fc_norm_hidden.weight": HIDDEN_NORM,
}
PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
"""Prefixes of names in models with other towers and in MLX's folders, and their replacements."""
VECTORS = {
    "linear_attn.A_log": "delta.decay_log",
    "linear_attn.dt_bias": "delta.time_bias",
    "linear_attn.norm.weight": "delta.norm.weight",
}


def _read_next(reader: ConfigReader) -> Description:
    config = _read(reader, "qwen3_next")
    if not reader.integer("num_experts", 512):
        for key in EXPERT_KEYS:
            reader.integer(key, 0)
        reader.boolean("norm_topk_prob", True)
        reader.numbers("mlp_only_layers")
        read_training_keys(reader)
        return _description(reader, config)
    experts, shared = _read_experts(reader, count=512, chosen=10)
    experts = replace(experts, renormalised=reader.boolean("norm_topk_prob", True))
    config = with_experts(config, experts, read_sparse_layers(reader, config.num_layers), shared)
    return _description(reader, config)


def _read_dense(reader: ConfigReader) -> Description:
    return _description(reader, _read(reader, "qwen3_5_text"))


def _read_moe(reader: ConfigReader) -> Description:
    # No layer has a dense feed-forward alone, whose neurons this would be the number of.
    reader.integer("intermediate_size", 0)
    reader = reader.with_value("intermediate_size", 1)
    reader.only("decoder_sparse_step", 1)
    if reader.numbers("mlp_only_layers"):
        raise UnsupportedModelError("config.json: mlp_only_layers names layers; all have experts here")
    reader.only("norm_topk_prob", True)
    config = _read(reader, "qwen3_5_moe_text")
    experts, shared = _read_experts(reader, count=256, chosen=8)
    return _description(reader, with_experts(config, experts, [True] * config.num_layers, shared))


def _read(reader: ConfigReader, name: str) -> ModelConfig:
    """The config, with what all models of the family share: sizes, rotary embedding and layers without
    experts.
    """
    sizes = read_sizes(reader, max_context=32768, kv_heads=2, head_dim=256)
    reader.only("attention_bias", False)
    reader.only("attn_output_gate", True)
    # Of a rule's output, which is silu, also called swish, as `transformers` has it.
    if (gate := reader.text("output_gate_type", "swish")) not in ("silu", "swish"):
        raise UnsupportedModelError(
            f"config.json: output_gate_type is {shown(gate)}; it must be swish or silu"
        )
    # States are float32 here, as the published models have them.
    reader.text("mamba_ssm_dtype", "float32")
    for key in ("rope_parameters", "rope_scaling"):
        if (section := reader.section(key)) is not None:
            scaling = {name: value for name, value in section.items() if name not in POSITION_KEYS}
            reader = reader.with_value(key, scaling)
    turning = read_rope(reader, sizes.head_dim, sizes.max_context, rotated_share=ROTATED_SHARE)
    feed_forward = read_feed_forward(reader)
    if feed_forward.activation != "silu":
        raise UnsupportedModelError(
            f"config.json: hidden_act is {feed_forward.activation}; convolutions run with silu alone"
        )
    attention = AttentionSpec(score_scale(sizes.head_dim), head_norm="head", gated=True)
    delta = DeltaSpec(
        reader.integer("linear_num_key_heads", 16),
        reader.integer("linear_num_value_heads", 32),
        reader.integer("linear_key_head_dim", 128),
        reader.integer("linear_value_head_dim", 128),
        reader.integer("linear_conv_kernel_dim", 4),
    )
    layers = [
        LayerSpec(NO_ATTENTION, feed_forward, delta=delta)
        if kind == "linear_attention"
        else LayerSpec(attention, feed_forward)
        for kind in _read_kinds(reader, sizes)
    ]
    return decoder(
        name,
        sizes,
        layers,
        [turning],
        norm=NormSpec("rms", reader.number("rms_norm_eps", 1e-6)),
        tie_embeddings=reader.boolean("tie_word_embeddings", False),
    )


def _read_kinds(reader: ConfigReader, sizes: Sizes) -> Sequence[str]:
    interval = reader.integer("full_attention_interval", INTERVAL)
    if interval < 1:
        raise CheckpointError(f"config.json: full_attention_interval is {interval}; it must be 1 or more")
    kinds = read_layer_types(reader, sizes.num_layers, KINDS)
    if kinds is None:
        return [KINDS[(layer + 1) % interval == 0] for layer in range(sizes.num_layers)]
    if KINDS[1] not in kinds:
        raise UnsupportedModelError("config.json: layer_types names no full_attention; one layer needs it")
    return kinds


def _read_experts(reader: ConfigReader, count: int, chosen: int) -> tuple[ExpertsSpec, int]:
    """The experts, and the number of neurons of the shared one."""
    shared = read_shared_neurons(reader, 512)
    experts = ExpertsSpec(
        read_count(reader, count, "num_experts", "num_local_experts"),
        reader.integer("num_experts_per_tok", chosen),
        reader.integer("moe_intermediate_size", 512),
        renormalised=True,
        shared_gate=True,
    )
    read_training_keys(reader)
    return experts, shared


def _description(reader: ConfigReader, config: ModelConfig) -> Description:
    reader.boolean("mtp_use_dedicated_embeddings", False)
    notes = notes_of_layers_ahead(reader.integer("mtp_num_hidden_layers", 0))
    ahead = partial(_layer_ahead, config=config)
    return Description(config, partial(_adapt, config=config), notes, ahead)


def _layer_ahead(tensors: Tensors, config: ModelConfig) -> tuple[ModelConfig, Tensors]:
    """The layer that predicts one more token, as `Description.ahead` returns it. config: the model's config.

    Raises CheckpointError for a folder without it, UnsupportedModelError for one written by MLX, whose norms
    may or may not be stored minus one.
    """
    of_layer = {name: it for name, it in tensors.items() if name.startswith(AHEAD)}
    if not of_layer:
        raise CheckpointError(
            f"the folder has no tensors {AHEAD}*, which predict one token more; take its authors' folder"
        )
    if written_by_mlx(tensors, "conv1d.weight"):
        raise UnsupportedModelError(
            f"{AHEAD}* isn't read from a folder that MLX has written, whose norms may be whole or less one; "
            "take its authors' folder"
        )
    layer = next(it for it in config.layers if it.delta is None)
    config = replace(config, layers=(layer,))
    tensors = norms_shifted(under_model(of_layer, AHEAD_NAMES))
    tensors = in_halves(_with_output_gates(tensors, config), config)
    return config, _with_experts(tensors, config)


def _adapt(tensors: Tensors, config: ModelConfig) -> Tensors:
    tensors = {name: it for name, it in tensors.items() if not name.startswith(AHEAD)}
    tensors = under_model(tensors, PREFIXES)
    of_delta = {name: it for name, it in tensors.items() if ".linear_attn." in name}
    tensors = {name: it for name, it in tensors.items() if name not in of_delta}
    if not written_by_mlx(of_delta, "conv1d.weight"):
        tensors = norms_shifted(tensors)
    tensors = in_halves(_with_output_gates(tensors, config), config)
    return _with_experts({**tensors, **_delta_tensors(of_delta, config)}, config)


def _with_experts(tensors: Tensors, config: ModelConfig) -> Tensors:
    """The tensors, with experts renamed, whether they are stored separately or stacked."""
    tensors = unstacked(tensors, config, "mlp.experts.gate_up_proj", NAMES.of("gate", "up"))
    tensors = unstacked(tensors, config, "mlp.experts.down_proj", NAMES.of("down"))
    return join_experts(tensors, config, NAMES)


def _with_output_gates(tensors: Tensors, config: ModelConfig) -> Tensors:
    """The tensors, with attention's queries and output gates split. Within a head, queries come first."""
    adapted = dict(tensors)
    rows = np.arange(2 * config.num_heads * config.head_dim).reshape(config.num_heads, 2, -1)
    for layer, spec in enumerate(config.layers):
        name = LayerNames(layer)
        both = adapted.pop(name.projection("q"), None)
        if both is None:
            continue
        check_shape(both, (rows.size, config.hidden_size))
        if spec.attention.gated:
            adapted[name.projection("q")] = RowsOf(name.projection("q"), both, rows[:, 0].reshape(-1))
            gates = name.weight("attention.gate")
            adapted[gates] = RowsOf(gates, both, rows[:, 1].reshape(-1))
    return adapted


def _delta_tensors(tensors: Tensors, config: ModelConfig) -> Tensors:
    """The tensors, with those of delta rules renamed; unknown ones keep their names.

    Raises CheckpointError if a projection is stored twice, separately and together with others.
    """
    adapted, by_mlx = dict(tensors), written_by_mlx(tensors, "conv1d.weight")
    for layer, spec in enumerate(config.layers):
        if (delta := spec.delta) is None:
            continue
        name, prefix = LayerNames(layer), f"model.layers.{layer}."
        for old, new in VECTORS.items():
            if (vector := adapted.pop(prefix + old, None)) is not None:
                adapted[name.weight(new)] = vector
        if (out := adapted.pop(f"{prefix}linear_attn.out_proj.weight", None)) is not None:
            adapted[name.projection("o")] = out
        if (conv := adapted.pop(f"{prefix}linear_attn.conv1d.weight", None)) is not None:
            adapted[name.weight("delta.conv")] = taps_first(
                name.weight("delta.conv"), conv, delta.channels, delta.taps, by_mlx
            )
        for old, rows_of in PARTS.items():
            fused = adapted.pop(f"{prefix}linear_attn.{old}.weight", None)
            if fused is None:
                continue
            # Rows are numbered for what is there: a config may name many layers that a file lacks.
            parts = rows_of(delta)
            check_shape(fused, (sum(map(len, parts.values())), config.hidden_size))
            for which, rows in parts.items():
                new = name.projection(which) if which in "qkvz" else f"{prefix}{which}"
                if new in adapted:
                    raise CheckpointError(f"{fused.name} and another tensor hold the same; {SAME_REPOSITORY}")
                adapted[new] = RowsOf(new, fused, rows)
        gates = [adapted.pop(prefix + which, None) for which in GATES]
        present = tuple(it for it in gates if it is not None)
        if len({it.dtype for it in present}) > 1:
            # As float32: values of two types aren't joined.
            present = tuple(Scaled(it.name, it) for it in present)
        if len(present) == len(GATES):
            adapted[name.weight("delta.gates")] = Matrices(name.weight("delta.gates"), present)
    return adapted


def _projections(delta: DeltaSpec) -> Rows:
    """The rows of q, k, v and z, in a projection that stores these for one key head after another."""
    values = delta.value_heads // delta.key_heads * delta.value_width
    return _of_heads(delta, {"q": delta.key_width, "k": delta.key_width, "v": values, "z": values})


def _gates(delta: DeltaSpec) -> Rows:
    """The rows of b and a, in a projection that stores these for one key head after another."""
    return _of_heads(delta, dict.fromkeys(GATES, delta.value_heads // delta.key_heads))


def _of_heads(delta: DeltaSpec, sizes: Mapping[str, int]) -> Rows:
    """The rows of several parts, if each key head stores its parts in sequence. sizes: number of rows of one
    head's parts.
    """
    rows = np.arange(delta.key_heads * sum(sizes.values())).reshape(delta.key_heads, -1)
    edges = np.cumsum(list(sizes.values()))[:-1]
    return {which: part.reshape(-1) for which, part in zip(sizes, np.split(rows, edges, axis=1), strict=True)}


def _channels(delta: DeltaSpec) -> Rows:
    """The rows of q, k and v, in a projection that stores first all queries, then all keys, then
    all values.
    """
    edges = [delta.key_size, 2 * delta.key_size]
    return dict(zip("qkv", np.split(np.arange(delta.channels), edges), strict=True))


PARTS: Mapping[str, Callable[[DeltaSpec], Rows]] = {
    "in_proj_qkvz": _projections,
    "in_proj_ba": _gates,
    "in_proj_qkv": _channels,
    "in_proj_z": lambda delta: {"z": np.arange(delta.value_size)},
    "in_proj_b": lambda delta: {GATES[0]: np.arange(delta.value_heads)},
    "in_proj_a": lambda delta: {GATES[1]: np.arange(delta.value_heads)},
}
"""Rows of the parts of a delta rule's projections; a checkpoint has the first two or the others."""


QWEN3_NEXT = Family("qwen3_next", "Qwen3NextForCausalLM", _read_next)
QWEN3_5 = Family("qwen3_5_text", "Qwen3_5ForCausalLM", _read_dense)
QWEN3_5_MOE = Family("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", _read_moe)
