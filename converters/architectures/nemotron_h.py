"""Nemotron-H: a sequence of blocks, each a Mamba-2 mixer, attention without rotary embedding, a feed-forward,
or experts.

A mixer or attention, and the feed-forward after it, are one layer here. Feed-forwards are ungated. For
prompts, `transformers` keeps time steps above `time_step_min`, which is a key for initialising models. The
authors' code doesn't, and neither does `transformers` itself token by token, so this package doesn't.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial

from ondevice.converters.architectures.adapting import renamed, under_model
from ondevice.converters.architectures.common import (
    Description,
    Family,
    Tensors,
    check_code,
    decoder,
    read_activation,
    read_sizes,
    score_scale,
)
from ondevice.converters.architectures.config_reader import CONFIG_REMEDY, ConfigReader, shown
from ondevice.converters.architectures.experts import (
    ExpertNames,
    join_experts,
    read_count,
    read_shared_neurons,
    read_training_keys,
    unstacked,
    with_experts,
)
from ondevice.converters.architectures.mamba2 import KINDS, mixer_tensors, read_time_limits, require_silu
from ondevice.converters.architectures.rotary import no_rope
from ondevice.converters.architectures.tensors import EMBEDDING, FINAL_NORM
from ondevice.errors import CheckpointError, UnsupportedModelError
from ondevice.model_config import (
    NO_ATTENTION,
    AttentionSpec,
    ExpertsSpec,
    FeedForwardSpec,
    LayerSpec,
    Mamba2Spec,
    ModelConfig,
    NormSpec,
)

PATTERN = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
MIXERS = ("linear_attention", "full_attention")
MODULES = {"linear_attention": "mamba.", "full_attention": "self_attn.", "mlp": "mlp.", "moe": "mlp."}
"""What replaces `mixer.` in the names of each kind of block."""
DENSE = {f"{module}.up_proj.weight": f"{module}.gate_proj.weight" for module in ("mlp", "mlp.shared_experts")}
"""Names of an ungated feed-forward; its first matrix takes the gates' place."""
STACKS = {
    "mlp.switch_mlp.fc1.weight": "mlp.switch_mlp.gate_proj.weight",
    "mlp.switch_mlp.fc2.weight": "mlp.switch_mlp.down_proj.weight",
}
"""Names of all experts' matrices in MLX's folders, and other families' names for them."""
NAMES = ExpertNames(
    gate="mlp.experts.{}.up_proj.weight",
    down="mlp.experts.{}.down_proj.weight",
    choice_bias="mlp.gate.e_score_correction_bias",
    shared="mlp.shared_experts.",
)
PREFIXES = {
    "backbone.embeddings.weight": EMBEDDING,
    "model.embeddings.weight": EMBEDDING,
    "backbone.norm_f.weight": FINAL_NORM,
    "model.norm_f.weight": FINAL_NORM,
    "backbone.": "model.",
}
UNUSED_FLAGS = (
    "rescale_prenorm_residual",
    "residual_in_fp32",
    "use_mamba_kernels",
    "moe_shared_expert_overlap",
)
UNUSED_NUMBERS = (
    *("chunk_size", "expand", "num_logits_to_keep", "rope_theta", "partial_rotary_factor"),
    *("time_step_min", "time_step_max", "time_step_floor", "time_step_rank"),
)
"""Keys of initialisation and of running, and of rotary embedding, which these models don't have."""
EXPERT_KEYS = (
    *("num_experts_per_tok", "moe_intermediate_size", "moe_shared_expert_intermediate_size"),
    *("n_routed_experts", "n_shared_experts", "n_group", "topk_group", "routed_scaling_factor"),
)
"""Keys without an effect where no block has experts."""
_BLOCK = re.compile(r"model\.layers\.(\d+)\.(.+)")
Layer = tuple[int, int | None]
"""The blocks of a layer, by number: a mixer or attention, and a feed-forward or None."""


def _read(reader: ConfigReader) -> Description:
    check_code(reader, "nemotron_h")
    kinds = _read_kinds(reader)
    layers = _paired(kinds)
    reader = reader.with_value("num_hidden_layers", len(layers))
    head_dim = reader.integer("attention_head_dim", reader.integer("head_dim", 128))
    reader.only("head_dim", head_dim)
    sizes = read_sizes(
        reader.with_value("head_dim", head_dim),
        max_context=4096,
        kv_heads=8,
        neurons=("intermediate_size", 21504),
    )
    for key in ("attention_bias", "mlp_bias", "use_bias", "mamba_proj_bias"):
        reader.only(key, False)
    for key in UNUSED_FLAGS:
        reader.boolean(key, True)
    for key in UNUSED_NUMBERS:
        reader.number(key, 0.0)
    reader.text("mamba_ssm_cache_dtype", "float32")
    mixer, attention = _read_mixer(reader), AttentionSpec(score_scale(sizes.head_dim))
    activation = read_activation(reader, "mlp_hidden_act", "relu2")
    specs = []
    for block, following in layers:
        recurrent = kinds[block] == "linear_attention"
        feed_forward = FeedForwardSpec(activation, gated=False, neurons=0 if following is None else None)
        specs.append(
            LayerSpec(
                NO_ATTENTION if recurrent else attention, feed_forward, mamba2=mixer if recurrent else None
            )
        )
    eps = reader.number("layer_norm_epsilon", 1e-5)
    for key in ("norm_eps", "rms_norm_eps"):
        reader.only(key, eps)
    reader.only("hidden_act", activation)
    config = decoder(
        "nemotron_h",
        sizes,
        specs,
        [no_rope(sizes.head_dim)],
        norm=NormSpec("rms", eps),
        tie_embeddings=reader.boolean("tie_word_embeddings", False),
    )
    config = _with_experts(
        reader, config, [following is not None and kinds[following] == "moe" for _, following in layers]
    )
    # Layers that predict tokens ahead, of which there are none.
    reader.only("num_nextn_predict_layers", 0)
    reader.texts("mtp_layers_block_type")
    reader.text("mtp_hybrid_override_pattern", "")
    return Description(config, partial(_adapt, config=config, kinds=kinds, layers=layers))


def _read_kinds(reader: ConfigReader) -> list[str]:
    """The kind of each block. Raises UnsupportedModelError for an unknown kind."""
    named, pattern = reader.texts("layers_block_type"), reader.text("hybrid_override_pattern", "")
    kinds = [PATTERN.get(letter, letter) for letter in pattern]
    if named is not None:
        from_names = [KINDS.get(kind, kind) for kind in named]
        if kinds and kinds != from_names:
            raise CheckpointError(
                f"config.json: layers_block_type and hybrid_override_pattern differ; {CONFIG_REMEDY}"
            )
        kinds = from_names
    if unknown := set(kinds) - set(MODULES):
        raise UnsupportedModelError(
            f"config.json: blocks are of kinds {shown(sorted(unknown))}, which aren't known; known are "
            f"{', '.join(MODULES)}"
        )
    if not kinds:
        raise CheckpointError(
            f"config.json has neither layers_block_type nor hybrid_override_pattern; {CONFIG_REMEDY}"
        )
    if reader.integer("num_hidden_layers", len(kinds)) != len(kinds):
        raise CheckpointError(
            f"config.json: num_hidden_layers is {reader.integer('num_hidden_layers')}, of which {len(kinds)} "
            f"are named; {CONFIG_REMEDY}"
        )
    return kinds


def _paired(kinds: Sequence[str]) -> list[Layer]:
    """The layers that the blocks form. Raises UnsupportedModelError for a feed-forward without a mixer before
    it.
    """
    pairs: list[Layer] = []
    for block, kind in enumerate(kinds):
        if kind in MIXERS:
            pairs.append((block, None))
        elif pairs and pairs[-1][1] is None:
            pairs[-1] = (pairs[-1][0], block)
        else:
            raise UnsupportedModelError(
                f"config.json: block {block} is a feed-forward without a mixer or attention before it that "
                "has no other; only one behind such a block can be converted"
            )
    return pairs


def _read_mixer(reader: ConfigReader) -> Mamba2Spec:
    require_silu(reader.text("mamba_hidden_act", "silu"), "mamba_hidden_act")
    groups = reader.integer("n_groups", 8)
    least, most = read_time_limits(reader)
    return Mamba2Spec(
        reader.integer("mamba_num_heads", 128),
        reader.integer("mamba_head_dim", 64),
        groups,
        reader.integer("ssm_state_size", 128),
        reader.integer("conv_kernel", 4),
        conv_bias=reader.boolean("use_conv_bias", True),
        norm_groups=groups,
        least_time=least,
        most_time=most,
    )


def _with_experts(reader: ConfigReader, config: ModelConfig, sparse: Sequence[bool]) -> ModelConfig:
    """The model with experts in the layers for which `sparse` is true."""
    read_training_keys(reader)
    renormalised = reader.boolean("norm_topk_prob", True)
    if not any(sparse):
        for key in EXPERT_KEYS:
            reader.number(key, 0.0)
        return config
    reader.only("n_shared_experts", 1)
    shared = read_shared_neurons(reader, 7688, "moe_shared_expert_intermediate_size")
    experts = ExpertsSpec(
        read_count(reader, 8, "n_routed_experts"),
        reader.integer("num_experts_per_tok", 2),
        reader.integer("moe_intermediate_size", 7688),
        "sigmoid",
        renormalised=renormalised,
        factor=reader.number("routed_scaling_factor", 1.0),
        choice_bias=True,
        groups=reader.integer("n_group", 1),
        chosen_groups=reader.integer("topk_group", 1),
    )
    return with_experts(config, experts, sparse, shared)


def _adapt(tensors: Tensors, config: ModelConfig, kinds: Sequence[str], layers: Sequence[Layer]) -> Tensors:
    adapted = renamed(_by_layer(under_model(tensors, PREFIXES), kinds, layers), DENSE | STACKS)
    adapted = unstacked(adapted, config, "mlp.experts.up_proj", NAMES.of("gate"))
    adapted = unstacked(adapted, config, "mlp.experts.down_proj", NAMES.of("down"))
    return mixer_tensors(join_experts(adapted, config, NAMES), config)


def _by_layer(tensors: Tensors, kinds: Sequence[str], layers: Sequence[Layer]) -> Tensors:
    """The tensors renamed by layer and kind of block. Others keep their names."""
    places = {}
    for layer, (block, following) in enumerate(layers):
        places[block] = layer, "input_layernorm."
        if following is not None:
            places[following] = layer, "post_attention_layernorm."
    by_layer = {}
    for name, tensor in tensors.items():
        if (match := _BLOCK.fullmatch(name)) is not None and int(match[1]) in places:
            block, rest = int(match[1]), match[2]
            layer, norm = places[block]
            for old, new in (("norm.", norm), ("mixer.", MODULES[kinds[block]])):
                if rest.startswith(old):
                    name = f"model.layers.{layer}.{new}{rest.removeprefix(old)}"
                    break
            else:
                name = f"blocks.{block}.{rest}"
        by_layer[name] = tensor
    return by_layer


NEMOTRON_H = Family("nemotron_h", "NemotronHForCausalLM", _read)
