"""Random tiny models with Mamba-2 mixers, as cases of `families.py`."""

from __future__ import annotations

from typing import Any

GRANITE_HYBRID = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "head_dim": None,
    "mamba_n_heads": 8,
    "mamba_d_state": 24,
    "num_local_experts": 0,
    "shared_intermediate_size": 160,
    "embedding_multiplier": 12.0,
    "logits_scaling": 3.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.125,
}
GRANITE_HYBRID_MOE = {
    **GRANITE_HYBRID,
    "intermediate_size": 48,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "shared_intermediate_size": 72,
    # A power of two: matrices that take it keep their 16 bits.
    "residual_multiplier": 0.25,
}
NEMOTRON_H = {
    "num_hidden_layers": None,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 24,
    "n_groups": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 72,
    # `transformers` takes the least for a limit of time steps, but only where it runs a prompt.
    "time_step_min": 1e-30,
    "time_step_floor": 0.02,
}
FALCON_H1 = {
    "mamba_d_ssm": 96,
    "mamba_n_heads": 6,
    "mamba_d_state": 24,
    "embedding_multiplier": 5.5,
    "lm_head_multiplier": 0.25,
    "key_multiplier": 0.4,
    "attention_in_multiplier": 0.75,
    "attention_out_multiplier": 0.9375,
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.3,
    "ssm_multipliers": [0.8, 0.7, 0.6, 0.5, 0.4],
    "mlp_multipliers": [0.88, 0.6],
}


def blocks(pattern: str) -> list[str]:
    """Nemotron-H's blocks, each by its letter in published patterns."""
    kinds = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
    return [kinds[letter] for letter in pattern]


MIXER_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "granite hybrid": (
        "GraniteMoeHybrid",
        {**GRANITE_HYBRID, "mamba_n_groups": 2, "tie_word_embeddings": True, "time_step_limit": [0.01, 0.5]},
    ),
    "granite hybrid moe": (
        "GraniteMoeHybrid",
        {**GRANITE_HYBRID_MOE, "layer_types": ["linear_attention"] * 3 + ["full_attention"]},
    ),
    "granite hybrid moe turning": (
        "GraniteMoeHybrid",
        {**GRANITE_HYBRID_MOE, "position_embedding_type": "rope", "mamba_conv_bias": False}
        | {"mamba_d_conv": 3, "mamba_expand": 3, "mamba_n_heads": 6, "attention_bias": True},
    ),
    "granite hybrid without states": (
        "GraniteMoeHybrid",
        {**GRANITE_HYBRID, "position_embedding_type": "rope", "layer_types": ["full_attention"] * 4},
    ),
    "nemotron h": ("NemotronH", {**NEMOTRON_H, "layers_block_type": blocks("M-M*-M-")}),
    "nemotron h moe": ("NemotronH", {**NEMOTRON_H, "layers_block_type": blocks("MEMM*E")}),
    "nemotron h moe dense between": (
        "NemotronH",
        {**NEMOTRON_H, "layers_block_type": blocks("M-ME*-*E"), "mlp_hidden_act": "silu", "n_groups": 1}
        | {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": False}
        | {"use_conv_bias": False, "conv_kernel": 3, "layer_norm_epsilon": 1e-4},
    ),
    "falcon h1": ("FalconH1", FALCON_H1),
    "falcon h1 norm": (
        "FalconH1",
        {**FALCON_H1, "mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_n_groups": 2}
        | {"time_step_limit": [0.01, 0.5], "rms_norm_eps": 1e-4},
    ),
    "falcon h1 norm before gate": (
        "FalconH1",
        {**FALCON_H1, "mamba_rms_norm": True, "mamba_n_groups": 4, "mamba_conv_bias": False}
        | {"tie_word_embeddings": True, "mamba_d_ssm": None, "mamba_n_heads": 8, "mamba_d_conv": 3},
    ),
}
