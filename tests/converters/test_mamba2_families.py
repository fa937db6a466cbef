"""Granite 4, Nemotron-H and Falcon-H1: what published configs have, and what is refused.

`test_families.py` and `test_expert_parity.py` compare them with `transformers`.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ondevice.converters.architectures.registry import read_config
from ondevice.converters.checkpoints.opening import open_checkpoint
from ondevice.errors import CheckpointError, OndeviceError, UnsupportedModelError
from ondevice.model_config import NO_ATTENTION, Mamba2Spec
from tests.support.families import CASES, write_model

safetensors = pytest.importorskip("safetensors.numpy")

GRANITE: dict[str, Any] = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_multiplier": 0.0078125,
    "embedding_multiplier": 12,
    "hidden_act": "silu",
    "hidden_size": 1536,
    "init_method": "mup",
    "initializer_range": 0.1,
    "intermediate_size": 512,
    "layer_types": ["attention" if layer % 10 == 5 else "mamba" for layer in range(40)],
    "logits_scaling": 6,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 48,
    "mamba_proj_bias": False,
    "max_position_embeddings": 131072,
    "model_type": "granitemoehybrid",
    "normalization_function": "rmsnorm",
    "num_attention_heads": 12,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 40,
    "num_key_value_heads": 4,
    "num_local_experts": 64,
    "output_router_logits": False,
    "position_embedding_type": "nope",
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000,
    "router_aux_loss_coef": 0.0001,
    "shared_intermediate_size": 1024,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 100352,
}
"""A config with the sizes of Granite 4 tiny."""
NEMOTRON: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_nemotron_h.NemotronHConfig",
        "AutoModelForCausalLM": "modeling_nemotron_h.NemotronHForCausalLM",
    },
    "chunk_size": 128,
    "conv_kernel": 4,
    "expand": 2,
    "head_dim": 128,
    "hidden_dropout": 0.0,
    "hidden_size": 2688,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "intermediate_size": 1856,
    "layer_norm_epsilon": 1e-05,
    "mamba_head_dim": 64,
    "mamba_hidden_act": "silu",
    "mamba_num_heads": 64,
    "mamba_proj_bias": False,
    "max_position_embeddings": 262144,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "model_type": "nemotron_h",
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "n_group": 1,
    "n_groups": 8,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_eps": 1e-05,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 52,
    "num_key_value_heads": 2,
    "num_logits_to_keep": 1,
    "partial_rotary_factor": 1.0,
    "rescale_prenorm_residual": True,
    "residual_in_fp32": False,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "sliding_window": None,
    "ssm_state_size": 128,
    "tie_word_embeddings": False,
    "time_step_floor": 0.0001,
    "time_step_limit": [0.0, math.inf],
    "time_step_max": 0.1,
    "time_step_min": 0.001,
    "topk_group": 1,
    "use_bias": False,
    "use_conv_bias": True,
    "use_mamba_kernels": True,
    "vocab_size": 131072,
}
"""A config with the sizes of Nemotron 3 Nano."""
FALCON: dict[str, Any] = {
    "architectures": ["FalconH1ForCausalLM"],
    "attention_bias": False,
    "attention_in_multiplier": 1.0,
    "attention_out_multiplier": 0.9375,
    "attn_layer_indices": None,
    "embedding_multiplier": 5.656854249492381,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "key_multiplier": 0.390625,
    "lm_head_multiplier": 0.0390625,
    "mamba_chunk_size": 128,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_ssm": 1536,
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 24,
    "mamba_norm_before_gate": False,
    "mamba_proj_bias": False,
    "mamba_rms_norm": False,
    "mamba_use_mlp": True,
    "max_position_embeddings": 16384,
    "mlp_bias": False,
    "mlp_multipliers": [0.8838834764831844, 0.5859375],
    "model_type": "falcon_h1",
    "num_attention_heads": 8,
    "num_hidden_layers": 36,
    "num_key_value_heads": 2,
    "projectors_bias": False,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 100000000000.0,
    "ssm_in_multiplier": 1.25,
    "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
    "ssm_out_multiplier": 0.23570226039551587,
    "tie_word_embeddings": False,
    "vocab_size": 32784,
}
"""A config with the sizes of Falcon-H1 0.5B."""


def test_a_published_granite_s_config_is_read() -> None:
    config = read_config(GRANITE)
    assert [layer for layer, spec in enumerate(config.layers) if spec.mamba2 is None] == [5, 15, 25, 35]
    assert config.layers[0].mamba2 == Mamba2Spec(
        48, 64, 1, 128, conv_bias=True, out_factor=float(np.float32(0.22))
    )
    assert not any(config.ropes[0].frequencies)
    assert config.layers[5].attention.scale == 0.0078125
    assert config.experts is not None
    assert (config.experts.count, config.experts.chosen, config.experts.neurons) == (64, 6, 512)
    assert {config.dense_neurons(layer) for layer in config.layers} == {1024}


def test_a_published_nemotron_s_config_is_read() -> None:
    config = read_config(NEMOTRON)
    # A mixer before attention has no feed-forward of its own.
    assert [spec.has_feed_forward for spec in config.layers[:4]] == [True, True, False, True]
    assert (config.num_layers, sum(spec.attends for spec in config.layers)) == (29, 6)
    assert config.layers[0].mamba2 == Mamba2Spec(64, 64, 8, 128, conv_bias=True, norm_groups=8)
    experts, feed_forward = config.experts, config.feed_forward
    assert experts is not None
    assert (experts.count, experts.chosen, experts.scoring, experts.factor) == (128, 6, "sigmoid", 2.5)
    assert (experts.layout, experts.choice_bias, experts.renormalised) == ("neurons", True, True)
    assert (feed_forward.activation, feed_forward.gated) == ("relu2", False)
    assert config.neurons(config.layers[0]) == 128 * 1856 + 3712
    kinds = {"M": "mamba", "E": "moe", "*": "attention"}
    named = [kinds[letter] for letter in NEMOTRON["hybrid_override_pattern"]]
    newer = {
        key: value
        for key, value in NEMOTRON.items()
        if key not in ("hybrid_override_pattern", "num_hidden_layers")
    }
    assert read_config({**newer, "layers_block_type": named}) == config


def test_a_published_falcon_s_config_is_read() -> None:
    config = read_config(FALCON)
    layer = config.layers[0]
    assert layer.mamba2 is not None
    assert (layer.attends, layer.mamba2.norm, layer.mamba2.heads) == (True, "none", 24)
    assert (layer.mamba2.head_width, layer.mamba2.groups, layer.mamba2.state_width) == (64, 1, 128)
    gate, out = 1.25 * 0.3535533905932738, 0.23570226039551587
    assert (layer.mamba2.gate_factor, layer.mamba2.time_factor) == (np.float32(gate), np.float32(gate))
    assert layer.mamba2.out_factor == np.float32(out)
    assert layer.attention.scale == np.float32(0.125 * 0.390625)
    assert layer.attention.out_factor == np.float32(0.9375)
    normed = read_config(FALCON | {"mamba_rms_norm": True, "mamba_norm_before_gate": True}).layers[0].mamba2
    assert normed is not None
    assert normed.norm == "before"


def test_time_steps_have_limits() -> None:
    for limit, expected in (
        ([0.0, math.inf], (0.0, None)),
        ([0.0, {"__float__": "Infinity"}], (0.0, None)),
        (None, (0.0, None)),
        ([0.5, 1.5], (0.5, 1.5)),
    ):
        for values in (GRANITE, NEMOTRON, FALCON):
            mixer = read_config(values | {"time_step_limit": limit}).layers[0].mamba2
            assert mixer is not None
            assert (mixer.least_time, mixer.most_time) == expected


def test_a_granite_without_mixers_turns() -> None:
    plain = {"layer_types": ["attention"] * 40, "position_embedding_type": "rope", "num_local_experts": 0}
    config = read_config(GRANITE | plain)
    assert (config.recurrent_layers, config.experts, config.intermediate_size) == ((), None, 1024)
    assert all(config.ropes[0].frequencies)


SHARED: list[tuple[dict[str, Any], str]] = [
    ({"time_step_limit": [0.0]}, "time_step_limit is .0.0.; it must be two numbers"),
    ({"time_step_limit": [0.0, "Infinity"]}, "time_step_limit"),
    ({"time_step_limit": [math.inf, math.inf]}, "time_step_limit"),
    ({"time_step_limit": [2.0, 1.0]}, "time steps are from 2.0 to 1.0"),
    ({"attention_bias": "yes"}, "attention_bias"),
    ({"mamba_proj_bias": True}, "mamba_proj_bias"),
    ({"a_new_multiplier": 2.0}, "a_new_multiplier"),
]
REFUSED = {
    "granite": (
        GRANITE,
        [
            *SHARED,
            ({"hidden_act": "gelu"}, "hidden_act is gelu"),
            ({"position_embedding_type": "alibi"}, "position_embedding_type is 'alibi'"),
            ({"layer_types": ["mamba"] * 39}, "names 39 layers of 40"),
            ({"layer_types": ["conv"] * 40}, "layer_types has conv"),
            ({"normalization_function": "layernorm"}, "normalization_function"),
            ({"mamba_n_heads": 40}, "mamba_n_heads is 40, of 64 dimensions"),
            ({"mamba_n_heads": 0, "mamba_d_head": "auto"}, "mamba_n_heads is 0"),
            ({"mamba_n_groups": 5}, "groups, 5"),
            ({"mamba_d_conv": 1}, "taps is 1"),
            ({"mamba_d_state": 1 << 40}, "state_width"),
            ({"shared_intermediate_size": 0}, "shared_intermediate_size is 0"),
            ({"num_local_experts": -1}, "count is -1"),
            ({"residual_multiplier": 0.0}, "residual_multiplier is 0.0"),
        ],
    ),
    "nemotron": (
        NEMOTRON,
        [
            *SHARED,
            ({"use_bias": True}, "use_bias"),
            ({"mlp_bias": True}, "mlp_bias"),
            ({"attention_bias": True}, "attention_bias"),
            ({"sliding_window": 512}, "sliding_window"),
            ({"moe_latent_size": 1024}, "moe_latent_size"),
            ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers"),
            ({"n_shared_experts": 2}, "n_shared_experts"),
            ({"mamba_hidden_act": "gelu"}, "mamba_hidden_act is gelu"),
            ({"norm_eps": 1e-6}, "norm_eps"),
            ({"attention_head_dim": 64}, "head_dim"),
            ({"num_hidden_layers": 51}, "num_hidden_layers is 51, of which 52 are named"),
            ({"hybrid_override_pattern": "M" * 51 + "X"}, "'X'"),
            ({"hybrid_override_pattern": ""}, "neither layers_block_type nor hybrid_override_pattern"),
            ({"layers_block_type": ["mamba"] * 52}, "layers_block_type and hybrid_override_pattern differ"),
            ({"hybrid_override_pattern": "E" + "M" * 51}, "block 0 is a feed-forward"),
            ({"hybrid_override_pattern": "MEE" + "M" * 49}, "block 2 is a feed-forward"),
            ({"hybrid_override_pattern": "M" * 52}, "no layer has a feed-forward"),
            ({"moe_shared_expert_intermediate_size": 0}, "moe_shared_expert_intermediate_size is 0"),
            ({"n_groups": 0}, "groups"),
            ({"auto_map": {"AutoModelForCausalLM": "modeling_other.Other"}}, "auto_map"),
        ],
    ),
    "falcon": (
        FALCON,
        [
            *SHARED,
            ({"attn_layer_indices": [1]}, "attn_layer_indices"),
            ({"mamba_use_mlp": False}, "mamba_use_mlp"),
            ({"projectors_bias": True}, "projectors_bias"),
            ({"attention_bias": True}, "attention_bias"),
            ({"mlp_bias": True}, "mlp_bias"),
            ({"mlp_multipliers": [1.0]}, "mlp_multipliers is .1.0.; it must be 2 numbers"),
            ({"ssm_multipliers": [1.0, 1.0, 0.0, 1.0, 1.0]}, "ssm_multipliers"),
            ({"key_multiplier": -1.0}, "key_multiplier is -1.0"),
            ({"mamba_d_ssm": 1500}, "together they must have 1500"),
            ({"mamba_d_head": "wide"}, "mamba_d_head"),
        ],
    ),
}


@pytest.mark.parametrize(
    ("family", "values", "named"), [(name, *change) for name in REFUSED for change in REFUSED[name][1]]
)
def test_what_isnt_known_is_refused(family: str, values: dict[str, Any], named: str) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError), match=named):
        read_config(REFUSED[family][0] | values)


@pytest.mark.parametrize(
    ("case", "name", "shape", "says"),
    [
        ("granite hybrid", "model.layers.0.mamba.in_proj.weight", (300, 64), "in_proj"),
        ("granite hybrid", "model.layers.0.mamba.conv1d.weight", (224, 4, 1), "conv1d"),
        ("granite hybrid", "model.layers.0.mamba.A_log", None, r"mamba2\.decay_log"),
        ("granite hybrid", "model.layers.0.self_attn.o_proj.weight", (64, 64), "o_proj of attention"),
        ("granite hybrid", "model.layers.0.shared_mlp.input_linear.weight", (300, 64), "asks for 320 rows"),
        ("nemotron h", "backbone.layers.1.norm.weight", None, "post_attention_layernorm"),
        ("nemotron h", "backbone.layers.1.input_layernorm.weight", (64,), r"blocks\.1\.input_layernorm"),
        ("nemotron h moe", "backbone.layers.1.mixer.experts.7.up_proj.weight", None, r"experts\.7\.up_proj"),
        ("nemotron h", "mtp.layers.0.norm.weight", (64,), r"mtp\.layers"),
        ("falcon h1", "model.layers.1.mamba.out_proj.weight", None, r"mamba2\.out"),
        ("falcon h1", "model.layers.1.mamba.norm.weight", (96,), r"mamba2\.norm\.weight"),
    ],
)
def test_tensors_that_dont_fit_are_refused(
    tmp_path: Path, case: str, name: str, shape: tuple[int, ...] | None, says: str
) -> None:
    write_model(tmp_path, *CASES[case])
    assert open_checkpoint(tmp_path).config.num_layers > 1
    tensors = safetensors.load_file(tmp_path / "model.safetensors")
    tensors.pop(name, None)
    if shape is not None:
        tensors[name] = np.zeros(shape, np.float32)
    safetensors.save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(OndeviceError, match=says):
        open_checkpoint(tmp_path)


def test_older_and_newer_files_are_the_same_model(tmp_path: Path) -> None:
    """`transformers` writes Nemotron-H's experts one by one; in memory it has them stacked."""
    write_model(tmp_path, *CASES["nemotron h moe"])
    first = open_checkpoint(tmp_path)
    own = {name: (tensor.shape, tensor.dtype) for name, tensor in first.tensors.items()}
    first.close()
    tensors = safetensors.load_file(tmp_path / "model.safetensors")
    found: dict[str, Any] = {}
    for name, values in tensors.items():
        head, _, which = name.rpartition(".experts.")
        if head:
            expert, which = which.split(".")[:2]
            found.setdefault(f"{head}.experts.{which}", {})[int(expert)] = values
        else:
            found[name] = values
    stacked = {
        name.replace("backbone.", "model."): np.stack([it[expert] for expert in sorted(it)])
        if isinstance(it, dict)
        else it
        for name, it in found.items()
    }
    safetensors.save_file(stacked, tmp_path / "model.safetensors")
    second = open_checkpoint(tmp_path)
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in second.tensors.items()} == own
    second.close()


def test_a_mixer_alone_has_no_attention() -> None:
    config = read_config(NEMOTRON)
    assert all(spec.attention == NO_ATTENTION for spec in config.layers if spec.mamba2 is not None)


def test_config_json_is_what_transformers_writes(tmp_path: Path) -> None:
    """It writes an infinite number as no JSON does."""
    write_model(tmp_path, *CASES["falcon h1"])
    values = json.loads((tmp_path / "config.json").read_text())
    assert values["time_step_limit"] == [0.0, {"__float__": "Infinity"}]
