"""Configs of published hybrids, key by key: of Qwen3.5 and later, and of Nemotron-H 8B and Nano 9B."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ondevice.converters.architectures.registry import describe, read_config
from ondevice.errors import UnsupportedModelError
from ondevice.model_config import DeltaSpec

QWEN_TEXT: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_output_gate": True,
    "bos_token_id": 248_044,
    "dtype": "bfloat16",
    "eos_token_id": 248_044,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "initializer_range": 0.02,
    "intermediate_size": 17_408,
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * 16,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262_144,
    "mlp_only_layers": [],
    "model_type": "qwen3_5_text",
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "num_attention_heads": 24,
    "num_hidden_layers": 64,
    "num_key_value_heads": 4,
    "pad_token_id": None,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10_000_000,
        "rope_type": "default",
    },
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": 248_320,
}
QWEN: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "image_token_id": 248_056,
    "model_type": "qwen3_5",
    "text_config": QWEN_TEXT,
    "tie_word_embeddings": False,
    "transformers_version": "4.57.0.dev0",
    "video_token_id": 248_057,
    "vision_config": {"depth": 27, "model_type": "qwen3_5"},
    "vision_end_token_id": 248_054,
    "vision_start_token_id": 248_053,
}
"""The 27B of Qwen3.5."""
LATER = {"language_model_only": False, "text_config": QWEN_TEXT | {"output_gate_type": "swish"}}
"""What 3.6 and later ones have beside that."""
OF_MLX = {
    "do_sample": True,
    "eos_token_id": [248_046, 248_044],
    "generation_config": {"do_sample": True, "temperature": 1.0, "top_k": 20},
    "quantization": {"bits": 4, "group_size": 64, "mode": "affine"},
    "temperature": 1.0,
    "top_k": 20,
    "top_p": 0.95,
}
"""What a folder of that has that MLX has written; `quantization` is read apart."""
NEMOTRON: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_head_dim": 128,
    "auto_map": {
        "AutoConfig": "configuration_nemotron_h.NemotronHConfig",
        "AutoModelForCausalLM": "modeling_nemotron_h.NemotronHForCausalLM",
    },
    "bos_token_id": 1,
    "chunk_size": 128,
    "conv_kernel": 4,
    "eos_token_id": 2,
    "expand": 2,
    "hidden_dropout": 0.0,
    "hidden_size": 4096,
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "initializer_range": 0.02,
    "intermediate_size": 21_504,
    "layer_norm_epsilon": 1e-05,
    "mamba_head_dim": 64,
    "mamba_hidden_act": "silu",
    "mamba_num_heads": 128,
    "mamba_proj_bias": False,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "model_type": "nemotron_h",
    "n_groups": 8,
    "num_attention_heads": 32,
    "num_hidden_layers": 52,
    "num_key_value_heads": 8,
    "num_logits_to_keep": 1,
    "pad_token_id": 0,
    "rescale_prenorm_residual": True,
    "residual_in_fp32": False,
    "rms_norm_eps": 1e-05,
    "ssm_state_size": 128,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.48.0.dev0",
    "use_bias": False,
    "use_cache": True,
    "use_conv_bias": True,
    "use_mamba_kernels": True,
    "vocab_size": 131_072,
}
"""The 8B of Nemotron-H."""
NANO = {
    "hidden_size": 4480,
    "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
    "intermediate_size": 15_680,
    "mamba_head_dim": 80,
    "num_attention_heads": 40,
    "num_hidden_layers": 56,
    "sliding_window": None,
    "time_step_floor": 0.0001,
    "time_step_limit": [0.0, math.inf],
    "time_step_max": 0.1,
    "time_step_min": 0.001,
    "time_step_rank": 256,
}
"""What the 9B of Nano v2 has otherwise."""


@pytest.mark.parametrize("more", [{}, LATER], ids=["3.5", "3.6"])
def test_a_published_qwen_s_config_is_read(more: dict[str, Any]) -> None:
    config = read_config(QWEN | more)
    assert config.architecture == "qwen3_5_text"
    assert (config.num_layers, sum(layer.attends for layer in config.layers)) == (64, 16)
    assert config.layers[0].delta == DeltaSpec(16, 48, 128, 128, 4)
    assert sum(frequency > 0 for frequency in config.ropes[0].frequencies) == 32
    notes = " ".join(describe(QWEN | more).notes)
    assert "its text model alone" in notes
    assert "--draft-for" in notes


def test_a_published_qwen_s_mlx_config_is_read_as_the_original() -> None:
    folder = {key: value for key, value in (QWEN | LATER | OF_MLX).items() if key != "quantization"}
    assert read_config(folder) == read_config(QWEN)


def test_the_experts_of_a_qwen_are_read_from_its_config() -> None:
    text = {key: value for key, value in QWEN_TEXT.items() if key not in ("intermediate_size",)}
    text |= {"model_type": "qwen3_5_moe_text", "hidden_size": 2048, "num_hidden_layers": 40}
    text |= {"layer_types": QWEN_TEXT["layer_types"][:40], "output_gate_type": "swish"}
    text |= {"num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512}
    text |= {"shared_expert_intermediate_size": 512, "router_aux_loss_coef": 0.001}
    whole = QWEN | {"model_type": "qwen3_5_moe", "language_model_only": False, "text_config": text}
    config = read_config(whole | {"architectures": ["Qwen3_5MoeForConditionalGeneration"]})
    assert config.experts is not None
    assert (config.experts.count, config.experts.chosen, config.experts.neurons) == (256, 8, 512)


def test_another_gate_of_a_rules_output_is_refused() -> None:
    text = QWEN_TEXT | {"output_gate_type": "sigmoid"}
    with pytest.raises(
        UnsupportedModelError, match="output_gate_type is 'sigmoid'; it must be swish or silu"
    ):
        read_config(QWEN | {"text_config": text})


@pytest.mark.parametrize(("more", "attention", "mixers"), [({}, 4, 24), (NANO, 4, 27)], ids=["8B", "Nano"])
def test_a_published_nemotron_s_config_is_read(more: dict[str, Any], attention: int, mixers: int) -> None:
    config = read_config(NEMOTRON | more)
    assert sum(layer.attends for layer in config.layers) == attention
    assert sum(layer.mamba2 is not None for layer in config.layers) == mixers
    assert config.norm.eps == 1e-5
    assert config.experts is None
