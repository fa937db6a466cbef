"""The smallest budgets of published models: two buffers, one short context, and the process."""

from __future__ import annotations

from typing import Any

import pytest

from ondevice.budget.cpu_memory import CpuMemory
from ondevice.budget.plan import plan_memory
from ondevice.config import QuantConfig, RuntimeConfig
from ondevice.converters.architectures.registry import read_config
from ondevice.runtime.resolving import SMALL_CHUNK

PROCESS_BYTES = 50_000_000
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "head_dim": 128,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "max_position_embeddings": 8192,
    "rope_theta": 5e5,
}
QWEN: dict[str, Any] = {
    "head_dim": 128,
    "num_attention_heads": 64,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "rope_theta": 1e6,
}
MODELS: dict[str, tuple[dict[str, Any], float]] = {
    "Qwen3-32B": (
        QWEN
        | {"model_type": "qwen3", "hidden_size": 5120, "num_hidden_layers": 64, "num_key_value_heads": 8}
        | {"intermediate_size": 25_600},
        0.40,
    ),
    "Llama-3.3-70B": (
        LLAMA
        | {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64}
        | {"intermediate_size": 28_672},
        0.50,
    ),
    "Qwen3-235B-A22B": (
        QWEN
        | {"model_type": "qwen3_moe", "hidden_size": 4096, "num_hidden_layers": 94, "num_key_value_heads": 4}
        | {"intermediate_size": 12_288, "moe_intermediate_size": 1536, "num_experts": 128}
        | {"num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
        0.60,
    ),
    "DeepSeek-V3": (
        {"model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "vocab_size": 129_280}
        | {"num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512}
        | {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "intermediate_size": 18_432}
        | {"moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1}
        | {"num_experts_per_tok": 8, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4}
        | {"norm_topk_prob": True, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid"}
        | {"topk_method": "noaux_tc", "moe_layer_freq": 1, "max_position_embeddings": 4096}
        | {"rope_theta": 10_000.0},
        1.0,
    ),
    "Llama-3.1-405B": (
        LLAMA
        | {"hidden_size": 16_384, "num_hidden_layers": 126, "num_attention_heads": 128}
        | {"intermediate_size": 53_248},
        1.0,
    ),
}
"""By name: what its configuration says, and gigabytes that are enough at 4 bits for 512 tokens."""


@pytest.mark.parametrize("name", MODELS)
def test_published_models_run_in_a_gigabyte(name: str) -> None:
    values, gigabytes = MODELS[name]
    shared = {"rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False}
    runtime = RuntimeConfig(speculation="off", max_context=512, prefill_chunk=SMALL_CHUNK)
    memory = CpuMemory(read_config(shared | values), QuantConfig(4), runtime)
    plan = plan_memory(memory, budget_bytes=0, process_bytes=PROCESS_BYTES)
    assert plan.minimum_budget_bytes <= gigabytes * 1e9
    # None of the matrices stays in memory there.
    assert plan.with_budget(plan.minimum_budget_bytes).held_units == 0
    assert plan.model_bytes > 15e9
