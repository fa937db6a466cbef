"""Random tiny models of every family, made and saved by `transformers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.mixer_families import MIXER_CASES

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.1,
}
ABSENT = (
    "head_dim",
    "num_key_value_heads",
    "intermediate_size",
    "initializer_range",
    "first_k_dense_replace",
)
"""Keys that a family may lack, where a case says None."""
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 10000.0}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + i / 8 for i in range(8)],
    "long_factor": [4.0] * 8,
    "rope_theta": 10000.0,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
FALCON = {"head_dim": None, "intermediate_size": None, "num_key_value_heads": None}
PERSIMMON = {"head_dim": None, "num_key_value_heads": None}
GEMMA = {"query_pre_attn_scalar": 24, "sliding_window": 9, "num_hidden_layers": 4}
GEMMA3N = {
    "num_hidden_layers": 6,
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": 250,
    "laurel_rank": 8,
    "num_kv_shared_layers": 2,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "activation_sparsity_pattern": [0.9, 0.95, 0.5, 0.0, 0.0, 0.0],
}
GEMMA4 = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 9,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 0,
}
GEMMA4_E = {
    **GEMMA4,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": 256,
    "num_kv_shared_layers": 2,
}
# With three chosen, a margin of 2e-5 between two scores lets `cpu` choose another expert at one position.
GEMMA4_MOE = {
    **GEMMA4,
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 2,
    "moe_intermediate_size": 48,
}
TURNING_ALL = {
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
PHI_LESS_TURNS = {
    "head_dim": None,
    "hidden_size": 80,
    "num_key_value_heads": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.4},
}
OLMOE = {"head_dim": None, "intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 3}
QWEN3_MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
MIXTRAL = {"intermediate_size": 64, "num_local_experts": 4}
PHIMOE = {"head_dim": None, "intermediate_size": 64, "num_local_experts": 6}
PHIMOE_ROPE = {**LONGROPE, "short_mscale": 1.25, "long_mscale": 1.25, "original_max_position_embeddings": 128}
GRANITE_MOE = {"head_dim": None, "intermediate_size": 48, "num_local_experts": 6, "num_experts_per_tok": 3}
QWEN2_MOE = {
    "head_dim": None,
    "num_experts": 8,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 72,
    "num_experts_per_tok": 3,
    "sliding_window": 4096,
}
DELTA = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
LFM2 = {
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
    "head_dim": None,
    "block_multiple_of": 32,
}
LFM2_MOE = {
    "num_hidden_layers": 4,
    "layer_types": LFM2["layer_types"],
    "head_dim": None,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "num_dense_layers": 1,
}
DELTA_EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 72,
}
WIDE_DELTA = {"linear_key_head_dim": 40, "linear_value_head_dim": 32, "linear_conv_kernel_dim": 3}
# A state behind rounded keys may magnify what they lose: queries and keys there have length 1, however small.
# That is the random weights' conditioning: changes of 2^-12 in what enters the first layer do as much.
PAIRS = {"layer_types": ["linear_attention"] * 2 + ["full_attention"] * 2}
GLM4_MOE = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "pad_token_id": None,
}
LATENT = {
    "head_dim": None,
    "num_key_value_heads": 4,
    "kv_lora_rank": 48,
    "q_lora_rank": 40,
    "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
DEEPSEEK = {
    **LATENT,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "pad_token_id": None,
}
DEEPSEEK_V3 = {**DEEPSEEK, "n_group": 4, "topk_group": 2}
LATENT_YARN = {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}
MIMO = {
    "num_hidden_layers": 4,
    "head_dim": 24,
    "v_head_dim": 16,
    "sliding_window": 9,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": None,
}
MIMO_TURNING = {
    "full_attention": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
}
GPT_OSS = {
    "intermediate_size": 48,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "sliding_window": 9,
    "swiglu_limit": 0.5,
    "num_hidden_layers": 4,
}
OPT = dict.fromkeys(ABSENT) | {"ffn_dim": 160, "init_std": 0.1, "max_position_embeddings": 64}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("Gemma", {}),
    "gemma wide heads": ("Gemma", {"head_dim": 32, "num_key_value_heads": 1, "tie_word_embeddings": False}),
    "gemma bias": ("Gemma", {"attention_bias": True, "rms_norm_eps": 1e-5}),
    "gemma2": ("Gemma2", GEMMA),
    "gemma2 low caps": ("Gemma2", {**GEMMA, "attn_logit_softcapping": 0.5, "final_logit_softcapping": 2.0}),
    "gemma2 no caps": ("Gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3": ("Gemma3Text", {**GEMMA, "num_hidden_layers": 7}),
    "gemma3 local first": (
        "Gemma3Text",
        {**GEMMA, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "gemma3 scaled": (
        "Gemma3Text",
        {
            **GEMMA,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "gemma3n": ("Gemma3nText", GEMMA3N),
    "gemma3n own keys": (
        "Gemma3nText",
        {
            **GEMMA3N,
            "altup_num_inputs": 2,
            "num_kv_shared_layers": 0,
            "activation_sparsity_pattern": None,
            "tie_word_embeddings": False,
            "vocab_size_per_layer_input": 256,
        },
    ),
    "gemma3n mostly shared": (
        "Gemma3nText",
        {
            **GEMMA3N,
            "altup_num_inputs": 3,
            "intermediate_size": [160, 96, 320, 160, 224, 50],
            "num_kv_shared_layers": 4,
            "attention_bias": True,
            "final_logit_softcapping": 2.0,
            "activation_sparsity_pattern": [0.3] * 6,
            "rms_norm_eps": 1e-5,
        },
    ),
    "gemma4": (
        "Gemma4Text",
        {**GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1, "final_logit_softcapping": 2.0},
    ),
    "gemma4 own values": ("Gemma4Text", {**GEMMA4, "rope_parameters": TURNING_ALL, "attention_bias": True}),
    "gemma4 six layers": (
        "Gemma4Text",
        {**GEMMA4, "num_hidden_layers": 7, "layer_types": None, "tie_word_embeddings": False}
        | {"global_head_dim": 8, "rms_norm_eps": 1e-5, "head_dim": 32},
    ),
    "gemma4 e": ("Gemma4Text", GEMMA4_E),
    "gemma4 e wide": ("Gemma4Text", {**GEMMA4_E, "num_kv_shared_layers": 4, "use_double_wide_mlp": True}),
    "gemma4 e joint values": (
        "Gemma4Text",
        {**GEMMA4_E, "attention_k_eq_v": True, "num_global_key_value_heads": 4, "num_kv_shared_layers": 0}
        | {"global_head_dim": 16, "final_logit_softcapping": 3.0},
    ),
    "gemma4 unified": (
        "Gemma4UnifiedText",
        {name: value for name, value in GEMMA4.items() if name != "hidden_size_per_layer_input"},
    ),
    "phi3": ("Phi3", {"head_dim": None}),
    "phi3 longrope": (
        "Phi3",
        {"head_dim": None, "rope_parameters": LONGROPE, "original_max_position_embeddings": 128},
    ),
    "phi3 partial": (
        "Phi3",
        {
            "head_dim": None,
            "rope_parameters": {**LONGROPE, "partial_rotary_factor": 0.75, "short_factor": [1.5] * 6}
            | {"long_factor": [4.0] * 6},
            "original_max_position_embeddings": 128,
            "sliding_window": 11,
            "tie_word_embeddings": True,
        },
    ),
    "glm4": ("Glm4", {}),
    "glm4 no bias": ("Glm4", {"attention_bias": False, "tie_word_embeddings": True}),
    "glm4 quarter": (
        "Glm4",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}},
    ),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 5, "head_dim": None}),
    "smollm3 yarn": ("SmolLM3", {"rope_parameters": YARN, "head_dim": None, "attention_bias": True}),
    "smollm3 windows": (
        "SmolLM3",
        {"use_sliding_window": True, "sliding_window": 7, "no_rope_layers": [1, 0, 1], "head_dim": None},
    ),
    "granite": (
        "Granite",
        {
            "head_dim": None,
            "embedding_multiplier": 12.0,
            "logits_scaling": 8.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.015625,
        },
    ),
    "granite bias": ("Granite", {"head_dim": None, "attention_bias": True, "residual_multiplier": 0.5}),
    "granite tied": ("Granite", {"head_dim": None, "tie_word_embeddings": True, "logits_scaling": 3.0}),
    "stablelm": ("StableLm", {"head_dim": None, "num_attention_heads": 2}),
    "stablelm parallel": (
        "StableLm",
        {"head_dim": None, "num_attention_heads": 2, "use_parallel_residual": True, "use_qkv_bias": True},
    ),
    "stablelm whole heads": (
        "StableLm",
        {
            "head_dim": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
            "layer_norm_eps": 1e-3,
            "tie_word_embeddings": True,
        },
    ),
    "stablelm head norms": (
        "StableLm",
        {"head_dim": None, "num_attention_heads": 2, "num_key_value_heads": 1, "qk_layernorm": True},
    ),
    "stablelm parallel head norms": (
        "StableLm",
        {"head_dim": None, "num_attention_heads": 4, "qk_layernorm": True, "use_parallel_residual": True},
    ),
    "falcon": ("Falcon", FALCON),
    "falcon newer": (
        "Falcon",
        {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "activation": "relu"},
    ),
    "falcon newer, one norm": (
        "Falcon",
        {
            **FALCON,
            "new_decoder_architecture": True,
            "num_kv_heads": 4,
            "num_ln_in_parallel_attn": 1,
            "tie_word_embeddings": False,
        },
    ),
    "falcon in sequence": (
        "Falcon",
        {**FALCON, "multi_query": False, "parallel_attn": False, "bias": True, "ffn_hidden_size": 96},
    ),
    "phi": ("Phi", {"head_dim": None, "partial_rotary_factor": 0.5}),
    "phi less turns": ("Phi", {**PHI_LESS_TURNS, "hidden_act": "relu"}),
    "phi head norms": ("Phi", {"head_dim": None, "qk_layernorm": True, "layer_norm_eps": 1e-3}),
    "persimmon": ("Persimmon", PERSIMMON),
    "persimmon whole heads": (
        "Persimmon",
        {
            **PERSIMMON,
            "rope_parameters": {"rope_type": "default", "rope_theta": 25000.0, "partial_rotary_factor": 1.0},
            "tie_word_embeddings": True,
        },
    ),
    "persimmon plain heads": ("Persimmon", {**PERSIMMON, "qk_layernorm": False, "hidden_act": "gelu"}),
    "nemotron": ("Nemotron", {}),
    "nemotron bias": ("Nemotron", {"attention_bias": True, "mlp_bias": True, "norm_eps": 1e-3}),
    "nemotron wide heads": (
        "Nemotron",
        {
            "head_dim": 32,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
            "tie_word_embeddings": True,
        },
    ),
    "llama dynamic": ("Llama", {"rope_parameters": DYNAMIC}),
    "olmo2": ("Olmo2", {"head_dim": None}),
    "olmo2 all heads": ("Olmo2", {"head_dim": None, "num_key_value_heads": 4, "attention_bias": True}),
    "olmo2 yarn": ("Olmo2", {"head_dim": None, "rope_parameters": YARN}),
    "olmoe": ("Olmoe", OLMOE),
    "olmoe renormalised": ("Olmoe", {**OLMOE, "norm_topk_prob": True, "attention_bias": True}),
    "olmoe all chosen": (
        "Olmoe",
        {**OLMOE, "num_experts": 5, "num_experts_per_tok": 5, "num_key_value_heads": 4},
    ),
    "qwen3 moe": ("Qwen3Moe", QWEN3_MOE),
    "qwen3 moe renormalised": ("Qwen3Moe", {**QWEN3_MOE, "norm_topk_prob": True, "hidden_act": "gelu"}),
    "qwen3 moe one chosen": (
        "Qwen3Moe",
        {**QWEN3_MOE, "num_experts_per_tok": 1, "moe_intermediate_size": 40, "tie_word_embeddings": True},
    ),
    "mixtral": ("Mixtral", MIXTRAL),
    "mixtral window": ("Mixtral", {**MIXTRAL, "sliding_window": 9, "num_local_experts": 3}),
    "mixtral all chosen": ("Mixtral", {**MIXTRAL, "num_experts_per_tok": 4, "tie_word_embeddings": True}),
    "phimoe": ("Phimoe", {**PHIMOE, "attention_bias": True, "lm_head_bias": True}),
    "phimoe near": ("Phimoe", {**PHIMOE, "router_jitter_noise": 0.5, "tie_word_embeddings": True}),
    "phimoe longrope": (
        "Phimoe",
        {**PHIMOE, "rope_parameters": PHIMOE_ROPE, "router_jitter_noise": 0.1, "num_local_experts": 2},
    ),
    "granite moe": ("GraniteMoe", GRANITE_MOE),
    "granite moe scaled": (
        "GraniteMoe",
        {**GRANITE_MOE, "residual_multiplier": 0.5, "logits_scaling": 3.0, "attention_multiplier": 0.3},
    ),
    "granite moe tied": (
        "GraniteMoe",
        {**GRANITE_MOE, "tie_word_embeddings": True, "attention_bias": True, "embedding_multiplier": 2.0},
    ),
    "qwen2 moe": ("Qwen2Moe", QWEN2_MOE),
    "qwen2 moe renormalised": (
        "Qwen2Moe",
        {**QWEN2_MOE, "norm_topk_prob": True, "shared_expert_intermediate_size": 33, "qkv_bias": False},
    ),
    "qwen3 moe dense between": (
        "Qwen3Moe",
        {**QWEN3_MOE, "decoder_sparse_step": 2, "num_hidden_layers": 4, "mlp_only_layers": [3]},
    ),
    "qwen2 moe dense between": ("Qwen2Moe", {**QWEN2_MOE, "mlp_only_layers": [0, 2]}),
    "glm4 moe": ("Glm4Moe", {**GLM4_MOE, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}),
    "glm4 moe head norms": (
        "Glm4Moe",
        {**GLM4_MOE, "use_qk_norm": True, "first_k_dense_replace": 2, "n_shared_experts": 2}
        | {"attention_bias": True, "norm_topk_prob": False},
    ),
    "glm4 moe all sparse": ("Glm4Moe", {**GLM4_MOE, "first_k_dense_replace": 0, "n_group": 2}),
    "gemma4 moe": ("Gemma4Text", GEMMA4_MOE),
    "gemma4 moe joint values": (
        "Gemma4Text",
        {**GEMMA4_MOE, "attention_k_eq_v": True, "num_global_key_value_heads": 1, "num_experts": 5}
        | {"top_k_experts": 5, "final_logit_softcapping": 2.0},
    ),
    "gemma4 moe with inputs": (
        "Gemma4Text",
        {**GEMMA4_MOE, "hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 256}
        | {"top_k_experts": 1, "rms_norm_eps": 1e-5},
    ),
    "gpt-oss moe": ("GptOss", GPT_OSS),
    "gpt-oss moe plain": (
        "GptOss",
        {**GPT_OSS, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "num_local_experts": 5}
        | {"attention_bias": False, "swiglu_limit": 7.0, "swiglu_alpha": 1.25},
    ),
    "gpt-oss moe all chosen": (
        "GptOss",
        {**GPT_OSS, "num_local_experts": 4, "num_experts_per_tok": 4, "tie_word_embeddings": True}
        | {"layer_types": ["full_attention", "sliding_attention"] * 2, "intermediate_size": 52},
    ),
    "deepseek v2 moe": ("DeepseekV2", {**DEEPSEEK, "q_lora_rank": None, "rope_parameters": LATENT_YARN}),
    "deepseek v2 moe groups": (
        "DeepseekV2",
        {**DEEPSEEK, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
        | {"routed_scaling_factor": 4.0, "n_shared_experts": 1},
    ),
    "deepseek v2 dense": (
        "DeepseekV2",
        {**DEEPSEEK, "first_k_dense_replace": 3, "num_attention_heads": 2, "num_key_value_heads": 2}
        | {"kv_lora_rank": 16, "qk_nope_head_dim": 72, "v_head_dim": 80, "tie_word_embeddings": True},
    ),
    "deepseek v3 moe": ("DeepseekV3", {**DEEPSEEK_V3, "rope_parameters": LATENT_YARN}),
    "deepseek v3 moe halves": (
        "DeepseekV3",
        {**DEEPSEEK_V3, "rope_interleave": False, "q_lora_rank": None, "norm_topk_prob": False}
        | {"rope_parameters": YARN, "first_k_dense_replace": 2, "n_shared_experts": 2},
    ),
    "deepseek v3 moe wide": (
        "DeepseekV3",
        {**DEEPSEEK_V3, "kv_lora_rank": 128, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64}
        | {"v_head_dim": 64, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1},
    ),
    "glm4 moe lite": ("Glm4MoeLite", {**DEEPSEEK, "first_k_dense_replace": None}),
    "glm4 moe lite kinds": (
        "Glm4MoeLite",
        {**DEEPSEEK, "mlp_layer_types": ["dense", "sparse", "dense"], "n_group": 2, "topk_group": 1}
        | {"first_k_dense_replace": None, "num_experts_per_tok": 2},
    ),
    "glm4 moe lite eps": (
        "Glm4MoeLite",
        {**DEEPSEEK, "first_k_dense_replace": None, "rms_norm_eps": 1e-3, "v_head_dim": 32}
        | {"num_attention_heads": 5, "num_key_value_heads": 5, "q_lora_rank": None},
    ),
    "mimo v2 moe": ("MiMoV2Flash", MIMO),
    "mimo v2 moe wide": (
        "MiMoV2Flash",
        {**MIMO, "head_dim": 96, "v_head_dim": 40, "num_key_value_heads": 1, "routed_scaling_factor": 2.5}
        | {"rope_parameters": MIMO_TURNING, "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2, "n_group": 4, "topk_group": 2},
    ),
    "mimo v2 moe plain": (
        "MiMoV2Flash",
        {**MIMO, "v_head_dim": 24, "attention_value_scale": None, "attention_bias": True}
        | {"norm_topk_prob": False, "tie_word_embeddings": True, "mlp_layer_types": ["sparse"] * 4},
    ),
    "qwen3 next": ("Qwen3Next", {**DELTA, **DELTA_EXPERTS}),
    "qwen3 next dense": (
        "Qwen3Next",
        {**DELTA, **WIDE_DELTA, "num_experts": 0, "tie_word_embeddings": True, "num_key_value_heads": 1},
    ),
    "qwen3 next dense between": (
        "Qwen3Next",
        {**DELTA, **DELTA_EXPERTS, **PAIRS, "mlp_only_layers": [1], "norm_topk_prob": False}
        | {"linear_num_key_heads": 4, "rms_norm_eps": 1e-5},
    ),
    "qwen3.5": ("Qwen3_5Text", DELTA),
    "qwen3.5 wide states": ("Qwen3_5Text", {**DELTA, **WIDE_DELTA, "linear_num_key_heads": 1}),
    "qwen3.5 half turns": (
        "Qwen3_5Text",
        {**DELTA, **PAIRS, "tie_word_embeddings": True, "hidden_size": 80}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}},
    ),
    "qwen3.5 moe": ("Qwen3_5MoeText", {**DELTA, **DELTA_EXPERTS, "intermediate_size": None}),
    "qwen3.5 moe all chosen": (
        "Qwen3_5MoeText",
        {**DELTA, **DELTA_EXPERTS, **WIDE_DELTA, "intermediate_size": None}
        | {"num_experts": 4, "num_experts_per_tok": 4},
    ),
    "qwen3.5 moe in pairs": (
        "Qwen3_5MoeText",
        {**DELTA, **DELTA_EXPERTS, **PAIRS, "intermediate_size": None, "num_attention_heads": 8}
        | {"tie_word_embeddings": True, "linear_num_value_heads": 2},
    ),
    "lfm2": ("Lfm2", LFM2),
    "lfm2 five taps": (
        "Lfm2",
        {**LFM2, "conv_L_cache": 5, "layer_types": None, "full_attn_idxs": [1, 3], "hidden_size": 80}
        | {"num_attention_heads": 5, "num_key_value_heads": 1, "tie_word_embeddings": False}
        | {"block_auto_adjust_ff_dim": False},
    ),
    "lfm2 adjusted": (
        "Lfm2",
        {**LFM2, "block_multiple_of": 48, "block_ffn_dim_multiplier": 1.3, "intermediate_size": None}
        | {"block_ff_dim": 200, "norm_eps": 1e-4, "conv_L_cache": 2, "rope_parameters": YARN},
    ),
    "lfm2 moe": ("Lfm2Moe", LFM2_MOE),
    "lfm2 moe scaled": (
        "Lfm2Moe",
        {**LFM2_MOE, "use_expert_bias": False, "norm_topk_prob": False, "routed_scaling_factor": 1.5}
        | {"num_dense_layers": 0, "conv_L_cache": 4, "num_key_value_heads": 1},
    ),
    "lfm2 moe all chosen": (
        "Lfm2Moe",
        {**LFM2_MOE, "num_experts": 5, "num_experts_per_tok": 5, "num_dense_layers": 2, "hidden_size": 80}
        | {"num_attention_heads": 5, "num_key_value_heads": 1, "tie_word_embeddings": False}
        | {"norm_eps": 1e-4, "layer_types": ["conv", "conv", "full_attention", "conv"]},
    ),
    **MIXER_CASES,
    "opt": ("OPT", OPT),
    "opt gelu": ("OPT", {**OPT, "activation_function": "gelu", "tie_word_embeddings": False}),
    "opt no biases": ("OPT", {**OPT, "enable_bias": False, "num_attention_heads": 2}),
    "opt norms behind": ("OPT", {**OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 24}),
    "opt wide embeddings": ("OPT", {**OPT, "word_embed_proj_dim": 80, "tie_word_embeddings": False}),
    "opt no last norm": ("OPT", {**OPT, "_remove_final_layer_norm": True, "word_embed_proj_dim": 32}),
}


def write_model(folder: Path, family: str, options: dict[str, Any], conditioned: bool = True) -> Any:
    """A random model of the family, saved to `folder`; the weights are values that float16 holds.

    conditioned: Gemma 4's scores are small, so that attention takes many keys.
    """
    torch.manual_seed(3)
    values = {
        name: value for name, value in (SIZES | options).items() if value is not None or name in options
    }
    values = {name: value for name, value in values.items() if name not in ABSENT or value is not None}
    config = getattr(transformers, f"{family}Config")(**values)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                # Norms and biases as they aren't at the start: all different.
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif not parameter.any():
                parameter.add_(0.1 * torch.randn_like(parameter))
            if family in ("GraniteMoeHybrid", "FalconH1") and name.endswith("dt_bias"):
                # Some heads forget within a token, others slowly.
                parameter.sub_(torch.linspace(0, 6, len(parameter)))
            parameter.copy_(parameter.half().float())
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.fill_(0.75 + 0.125 * int(name.split(".")[2]))
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.copy_(0.2 * torch.randn_like(buffer))
        if family.startswith("Gemma4") and conditioned:
            # Scores have no other factor. With norms near 1, softmax takes nearly one key alone. What keys
            # lose in 16 bits is then more than the limit for `cpu` allows: see `test_gemma4.py`.
            for name, parameter in model.named_parameters():
                if name.endswith("q_norm.weight"):
                    parameter.mul_(0.125)
    model.save_pretrained(folder)
    return model
