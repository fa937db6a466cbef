"""Every alias names a model that converts: a tiny checkpoint with the keys of its own `config.json`.

The keys are the published ones, those of sizes replaced; GLM-4's, OLMo 2's, StableLM 2's and SmolLM3's files
weren't at hand, so theirs are unchecked. `transformers` says which tensors there are.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ondevice.bundle.reader import Bundle
from ondevice.converters.architectures.registry import read_config
from ondevice.converters.convert import convert
from ondevice.runtime.models import ALIASES

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "bos_token_id": 1,
    "eos_token_id": 2, "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 11008,
    "max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 32, "pretraining_tp": 1, "rms_norm_eps": 1e-5, "rope_scaling": None,
    "tie_word_embeddings": False, "torch_dtype": "float16", "transformers_version": "4.31.0.dev0",
    "use_cache": True, "vocab_size": 32000,
}  # fmt: skip
MISTRAL: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_act": "silu",
    "bos_token_id": 1, "eos_token_id": 2, "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 14336, "max_position_embeddings": 32768, "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "sliding_window": 4096, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
    "transformers_version": "4.34.0.dev0", "vocab_size": 32000,
}  # fmt: skip
QWEN2: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "attention_dropout": 0.0,
    "bos_token_id": 151643, "eos_token_id": 151645, "hidden_act": "silu", "hidden_size": 3584,
    "initializer_range": 0.02, "intermediate_size": 18944, "max_position_embeddings": 32768,
    "max_window_layers": 28, "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "sliding_window": 131072, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "use_cache": True, "use_sliding_window": False, "vocab_size": 152064,
    "transformers_version": "4.43.1",
}  # fmt: skip
QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False,
    "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 1024, "initializer_range": 0.02, "intermediate_size": 3072,
    "max_position_embeddings": 40960, "max_window_layers": 28, "num_attention_heads": 16,
    "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-6, "rope_scaling": None,
    "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "use_cache": True, "use_sliding_window": False, "vocab_size": 151936, "transformers_version": "4.51.0",
}  # fmt: skip
PHI3: dict[str, Any] = {
    "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "attention_bias": False,
    "attention_dropout": 0.0, "bos_token_id": 1, "embd_pdrop": 0.0, "eos_token_id": 32000,
    "auto_map": {
        "AutoConfig": "configuration_phi3.Phi3Config",
        "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
    },
    "hidden_act": "silu", "hidden_size": 3072, "initializer_range": 0.02, "intermediate_size": 8192,
    "max_position_embeddings": 131072, "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 32, "original_max_position_embeddings": 4096, "pad_token_id": 32000,
    "resid_pdrop": 0.0, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "sliding_window": 262144,
    "rope_scaling": {"long_factor": [1.5] * 48, "short_factor": [1.05] * 48, "type": "longrope"},
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.43.3",
    "use_cache": True, "vocab_size": 32064,
}  # fmt: skip
GEMMA3: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "attention_bias": False,
    "attention_dropout": 0.0, "attn_logit_softcapping": None, "bos_token_id": 2,
    "cache_implementation": "hybrid", "eos_token_id": [1, 106], "final_logit_softcapping": None,
    "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152,
    "initializer_range": 0.02, "intermediate_size": 6912, "max_position_embeddings": 32768,
    "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1, "pad_token_id": 0,
    "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6, "rope_local_base_freq": 10000,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0", "use_cache": True,
    "vocab_size": 262144,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama-7b": {**LLAMA, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "max_sequence_length": 2048},
    "llama-2-7b": {**LLAMA, "attention_bias": False, "attention_dropout": 0.0, "rope_theta": 10000.0},
    "llama-2-7b-chat": LLAMA,
    "mistral-7b": MISTRAL,
    "mistral-7b-instruct": {**MISTRAL, "rope_theta": 1000000.0, "sliding_window": None},
    "smollm2-135m-instruct": {
        **LLAMA, "hidden_size": 576, "intermediate_size": 1536, "max_position_embeddings": 8192,
        "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
        "rope_interleaved": False, "rope_theta": 100000, "tie_word_embeddings": True, "vocab_size": 49152,
    },
    "qwen2.5-coder-0.5b-instruct": {**QWEN2, "tie_word_embeddings": True, "vocab_size": 151936},
    "qwen2.5-coder-1.5b-instruct": {**QWEN2, "tie_word_embeddings": True, "vocab_size": 151936},
    "gemma-3-270m": {**GEMMA3, "hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18},
    "qwen2.5-0.5b-instruct": {**QWEN2, "tie_word_embeddings": True, "vocab_size": 151936},
    "qwen2.5-7b-instruct": QWEN2,
    "qwen3-0.6b": QWEN3,
    "qwen3-8b": {**QWEN3, "tie_word_embeddings": False, "num_attention_heads": 32, "max_window_layers": 36},
    "tinyllama-1.1b-chat": {**LLAMA, "attention_bias": False, "num_key_value_heads": 4, "rope_theta": 1e4},
    "gemma-2-2b-it": {
        "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "attention_bias": False,
        "attention_dropout": 0.0, "attn_logit_softcapping": 50.0, "bos_token_id": 2,
        "cache_implementation": "hybrid", "eos_token_id": [1, 107], "final_logit_softcapping": 30.0,
        "head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 2304, "initializer_range": 0.02, "intermediate_size": 9216,
        "max_position_embeddings": 8192, "num_attention_heads": 8, "num_hidden_layers": 26,
        "num_key_value_heads": 4, "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "sliding_window": 4096, "torch_dtype": "bfloat16", "use_cache": True,
        "transformers_version": "4.42.4", "vocab_size": 256000,
    },
    "gemma-3-1b-it": GEMMA3,
    "gemma-3-4b-it": {
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
        "boi_token_index": 255999, "eoi_token_index": 256000, "eos_token_id": [1, 106],
        "image_token_index": 262144, "initializer_range": 0.02, "mm_tokens_per_image": 256,
        "text_config": {
            "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
            "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0",
        "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model", "patch_size": 14},
    },
    "phi-3.5-mini-instruct": PHI3,
    "phi-4-mini-instruct": {
        **PHI3, "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False,
        "auto_map": {**PHI3["auto_map"], "AutoTokenizer": "Xenova/gpt-4o"}, "num_key_value_heads": 8,
        "num_attention_heads": 24, "partial_rotary_factor": 0.75, "tie_word_embeddings": True,
        "vocab_size": 200064,
    },
    "smollm3-3b": {
        "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "attention_bias": False,
        "attention_dropout": 0.0, "bos_token_id": None, "eos_token_id": 128012, "hidden_act": "silu",
        "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 11008,
        "layer_types": ["full_attention"] * 36, "max_position_embeddings": 65536, "max_window_layers": 28,
        "mlp_bias": False, "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9,
        "num_attention_heads": 16, "num_hidden_layers": 36, "num_key_value_heads": 4,
        "pad_token_id": 128004, "pretraining_tp": 2, "rms_norm_eps": 1e-6, "rope_scaling": None,
        "rope_theta": 5000000.0, "sliding_window": None, "torch_dtype": "bfloat16", "use_cache": False,
        "transformers_version": "4.54.0.dev0", "use_sliding_window": False, "vocab_size": 128256,
    },
    "granite-3.3-8b-instruct": {
        "architectures": ["GraniteForCausalLM"], "model_type": "granite", "attention_bias": False,
        "attention_dropout": 0.0, "attention_multiplier": 0.0078125, "bos_token_id": 0,
        "embedding_multiplier": 12.0, "eos_token_id": 0, "hidden_act": "silu", "hidden_size": 4096,
        "initializer_range": 0.02, "intermediate_size": 12800, "logits_scaling": 16.0,
        "max_position_embeddings": 131072, "mlp_bias": False, "num_attention_heads": 32,
        "num_hidden_layers": 40, "num_key_value_heads": 8, "pad_token_id": 0, "residual_multiplier": 0.22,
        "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 10000000.0, "tie_word_embeddings": True,
        "torch_dtype": "bfloat16", "transformers_version": "4.49.0", "use_cache": True, "vocab_size": 49159,
    },
    "olmo-2-7b-instruct": {
        "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "attention_bias": False,
        "attention_dropout": 0.0, "eos_token_id": 100257, "hidden_act": "silu", "hidden_size": 4096,
        "initializer_range": 0.02, "intermediate_size": 11008, "max_position_embeddings": 4096,
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
        "pad_token_id": 100277, "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 500000,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.47.0.dev0",
        "use_cache": False, "vocab_size": 100352,
    },
    "glm-4-9b": {
        "architectures": ["Glm4ForCausalLM"], "model_type": "glm4", "attention_bias": True,
        "attention_dropout": 0.0, "eos_token_id": [151329, 151336, 151338], "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 13696,
        "max_position_embeddings": 32768, "num_attention_heads": 32, "num_hidden_layers": 40,
        "num_key_value_heads": 2, "pad_token_id": 151329, "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "transformers_version": "4.52.0.dev0", "use_cache": True,
        "vocab_size": 151552,
    },
    "phi-2": {
        "architectures": ["PhiForCausalLM"], "model_type": "phi", "attention_dropout": 0.0,
        "bos_token_id": 50256, "embd_pdrop": 0.0, "eos_token_id": 50256, "hidden_act": "gelu_new",
        "hidden_size": 2560, "initializer_range": 0.02, "intermediate_size": 10240, "layer_norm_eps": 1e-5,
        "max_position_embeddings": 2048, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 32, "partial_rotary_factor": 0.4, "qk_layernorm": False, "resid_pdrop": 0.1,
        "rope_scaling": None, "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "float16",
        "transformers_version": "4.37.0", "use_cache": True, "vocab_size": 51200,
    },
    "falcon-7b-instruct": {
        "architectures": ["FalconForCausalLM"], "model_type": "falcon", "alibi": False,
        "apply_residual_connection_post_layernorm": False, "attention_dropout": 0.0,
        "auto_map": {
            "AutoConfig": "configuration_falcon.FalconConfig", "AutoModel": "modeling_falcon.FalconModel",
            "AutoModelForCausalLM": "modeling_falcon.FalconForCausalLM",
            "AutoModelForQuestionAnswering": "modeling_falcon.FalconForQuestionAnswering",
            "AutoModelForSequenceClassification": "modeling_falcon.FalconForSequenceClassification",
            "AutoModelForTokenClassification": "modeling_falcon.FalconForTokenClassification",
        },
        "bias": False, "bos_token_id": 11, "eos_token_id": 11, "hidden_dropout": 0.0, "hidden_size": 4544,
        "initializer_range": 0.02, "layer_norm_epsilon": 1e-5, "multi_query": True,
        "new_decoder_architecture": False, "num_attention_heads": 71, "num_hidden_layers": 32,
        "num_kv_heads": 71, "parallel_attn": True, "torch_dtype": "bfloat16",
        "transformers_version": "4.28.1", "use_cache": True, "vocab_size": 65024,
    },
    "stablelm-2-12b-chat": {
        "architectures": ["StableLmForCausalLM"], "model_type": "stablelm", "attention_dropout": 0.0,
        "bos_token_id": 100257, "eos_token_id": 100257, "hidden_act": "silu", "hidden_dropout": 0.0,
        "hidden_size": 5120, "initializer_range": 0.02, "intermediate_size": 13824, "layer_norm_eps": 1e-5,
        "max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 40,
        "num_key_value_heads": 8, "partial_rotary_factor": 0.25, "qk_layernorm": True, "rope_scaling": None,
        "rope_theta": 10000, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.40.0", "use_cache": True, "use_parallel_residual": True,
        "use_qkv_bias": False, "vocab_size": 100352,
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True,
        "attention_dropout": 0.0, "eos_token_id": 200002, "experts_per_token": 4, "head_dim": 64,
        "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
        "initializer_range": 0.02, "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 12, "max_position_embeddings": 131072,
        "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24,
        "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": False,
        "pad_token_id": 199999, "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "rope_type": "yarn", "truncate": False,
        },
        "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
        "tie_word_embeddings": False, "transformers_version": "4.55.0.dev0", "use_cache": True,
        "vocab_size": 201088,
    },
    "turbosparse-mistral-7b": {
        "architectures": ["BambooForCausalLM"], "model_type": "bamboo", "attention_dropout": 0.0,
        "auto_map": {
            "AutoConfig": "configuration_bamboo.BambooConfig",
            "AutoModel": "modeling_bamboo.BambooForCausalLM",
            "AutoModelForCausalLM": "modeling_bamboo.BambooForCausalLM",
        },
        "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "relu", "hidden_size": 4096,
        "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 32768,
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "transformers_version": "4.41.0", "use_cache": False, "vocab_size": 32064,
    },
}  # fmt: skip
OTHERS: dict[str, dict[str, Any]] = {
    # Whether its weights are safetensors isn't known here, so it has no alias.
    "SparseLLM/ReluLLaMA-7B": {**LLAMA, "hidden_act": "relu"},
    "HuggingFaceTB/SmolLM2-135M": {
        **LLAMA, "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 0, "eos_token_id": 0,
        "head_dim": 64, "hidden_size": 576, "initializer_range": 0.041666666666666664,
        "intermediate_size": 1536, "is_llama_config": True, "max_position_embeddings": 2048,
        "mlp_bias": False, "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
        "rope_interleaved": False, "rope_theta": 100000, "tie_word_embeddings": True, "vocab_size": 49152,
    },
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": {
        **LLAMA, "attention_bias": False, "attention_dropout": 0.0, "hidden_size": 2048,
        "intermediate_size": 8192, "max_position_embeddings": 8192, "mlp_bias": False,
        "num_hidden_layers": 24, "pad_token_id": 2, "rope_theta": 130000, "tie_word_embeddings": True,
        "transformers.js_config": {
            "dtype": "q4", "kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"},
            "use_external_data_format": {"model.onnx": True, "model_fp16.onnx": True},
        },
        "vocab_size": 49152,
    },
    "tiiuae/Falcon3-7B-Instruct": {
        **LLAMA, "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 11, "eos_token_id": 11,
        "head_dim": 256, "hidden_size": 3072, "intermediate_size": 23040, "max_position_embeddings": 32768,
        "mlp_bias": False, "num_attention_heads": 12, "num_hidden_layers": 28, "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6, "rope_theta": 1000042, "vocab_size": 131072,
    },
    "google/gemma-7b-it": {
        "architectures": ["GemmaForCausalLM"], "model_type": "gemma", "attention_bias": False,
        "attention_dropout": 0.0, "bos_token_id": 2, "eos_token_id": 1, "head_dim": 256,
        "hidden_act": "gelu", "hidden_activation": None, "hidden_size": 3072, "initializer_range": 0.02,
        "intermediate_size": 24576, "max_position_embeddings": 8192, "num_attention_heads": 16,
        "num_hidden_layers": 28, "num_key_value_heads": 16, "pad_token_id": 0, "rms_norm_eps": 1e-6,
        "rope_scaling": None, "rope_theta": 10000.0, "torch_dtype": "bfloat16",
        "transformers_version": "4.40.0.dev0", "use_cache": True, "vocab_size": 256000,
    },
    "google/gemma-2-9b-it": {
        **CONFIGS["gemma-2-2b-it"], "hidden_size": 3584, "intermediate_size": 14336,
        "num_attention_heads": 16, "num_hidden_layers": 42, "num_key_value_heads": 8,
        "sliding_window_size": 4096, "transformers_version": "4.42.0.dev0",
    },
    "facebook/opt-350m": {
        "architectures": ["OPTForCausalLM"], "model_type": "opt", "activation_dropout": 0.0,
        "activation_function": "relu", "attention_dropout": 0.0, "bos_token_id": 2,
        "do_layer_norm_before": False, "dropout": 0.1, "eos_token_id": 2, "ffn_dim": 4096,
        "hidden_size": 1024, "init_std": 0.02, "layerdrop": 0.0, "max_position_embeddings": 2048,
        "num_attention_heads": 16, "num_hidden_layers": 24, "pad_token_id": 1, "prefix": "</s>",
        "torch_dtype": "float16", "transformers_version": "4.20.0.dev0", "use_cache": True,
        "vocab_size": 50272, "word_embed_proj_dim": 512,
    },
    "facebook/opt-13b": {
        "_remove_final_layer_norm": False, "architectures": ["OPTForCausalLM"], "model_type": "opt",
        "activation_dropout": 0.0, "activation_function": "relu", "attention_dropout": 0.0,
        "bos_token_id": 2, "do_layer_norm_before": True, "dropout": 0.1, "eos_token_id": 2,
        "ffn_dim": 20480, "hidden_size": 5120, "init_std": 0.02, "layerdrop": 0.0,
        "max_position_embeddings": 2048, "num_attention_heads": 40, "num_hidden_layers": 40,
        "output_projection": True, "pad_token_id": 1, "prefix": "</s>", "use_cache": True,
        "vocab_size": 50272, "word_embed_proj_dim": 5120,
    },
    "adept/persimmon-8b-chat": {
        "architectures": ["PersimmonForCausalLM"], "model_type": "persimmon", "attention_dropout": 0.0,
        "bos_token_id": 71013, "eos_token_id": 71013, "hidden_act": "relu2", "hidden_dropout": 0.6,
        "hidden_size": 4096, "intermediate_size": 16384, "layer_norm_eps": 1e-5,
        "max_position_embeddings": 16384, "num_attention_heads": 64, "num_hidden_layers": 36,
        "num_key_value_heads": 64, "qk_layernorm": True, "rope_scaling": None, "rope_theta": 25000.0,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 262144,
    },
}  # fmt: skip
"""Keys of public checkpoints without an alias, as copies of their `config.json` elsewhere show them."""
SAME_TENSORS = {"bamboo": ("mistral", "MistralForCausalLM")}
"""Families that `transformers` lacks, and one that has their tensors."""
SMALL: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip

SMALL_TOWER = {
    "model_type": "siglip_vision_model", "hidden_size": 32, "image_size": 28, "intermediate_size": 32,
    "num_attention_heads": 2, "num_hidden_layers": 1, "patch_size": 14,
}  # fmt: skip


def shrunk(values: dict[str, Any]) -> dict[str, Any]:
    """The same keys with small sizes."""
    if "text_config" in values:
        # What a section of a text model leaves out has sizes by default.
        text = values["text_config"] | SMALL | {"head_dim": 16}
        ends = {"eos_token_id": SMALL["eos_token_id"], "mm_tokens_per_image": 4}
        return values | ends | {"text_config": text, "vision_config": SMALL_TOWER}
    small = {**values, **{key: value for key, value in SMALL.items() if key in values}}
    if "head_dim" in values:
        small["head_dim"] = 16
    for key in ("layer_types", "no_rope_layers"):
        if key in values:
            small[key] = values[key][:2]
    if "rope_scaling" in values and (values["rope_scaling"] or {}).get("type") == "longrope":
        pairs = int(8 * values.get("partial_rotary_factor", 1.0))
        factors = {key: value[:pairs] for key, value in values["rope_scaling"].items() if key != "type"}
        small["rope_scaling"] = {"type": "longrope", **factors}
    return small


def test_every_alias_has_its_config() -> None:
    assert set(CONFIGS) == set(ALIASES)


@pytest.mark.parametrize("alias", ALIASES)
def test_the_published_config_is_read(alias: str) -> None:
    config = read_config(CONFIGS[alias])
    text = CONFIGS[alias].get("text_config", CONFIGS[alias])
    assert (config.hidden_size, config.num_layers) == (text["hidden_size"], text["num_hidden_layers"])


@pytest.mark.parametrize("name", OTHERS)
def test_the_config_of_other_public_checkpoints_is_read(name: str) -> None:
    config = read_config(OTHERS[name])
    assert (config.hidden_size, config.num_layers) == (
        OTHERS[name]["hidden_size"],
        OTHERS[name]["num_hidden_layers"],
    )


@pytest.mark.fast("llama-7b", "qwen3*", "gemma-3-1b-it", "phi-2", "gpt-oss-20b", "turbosparse*")
@pytest.mark.parametrize("alias", ALIASES)
def test_a_tiny_checkpoint_of_every_alias_converts(tmp_path: Path, alias: str) -> None:
    values = shrunk(CONFIGS[alias])
    own = {key: value for key, value in values.items() if key not in ("auto_map", "cache_implementation")}
    known = own.pop("model_type"), values["architectures"][0]
    model_type, class_name = SAME_TENSORS.get(known[0], known)
    config = transformers.AutoConfig.for_model(model_type, **json.loads(json.dumps(own)))
    torch.manual_seed(1)
    model = getattr(transformers, class_name)(config)
    model.save_pretrained(tmp_path / "source")
    (tmp_path / "source" / "config.json").write_text(json.dumps(values))
    bundle = Bundle.open(convert(tmp_path / "source", tmp_path / "bundle", "q4"))
    assert bundle.config == read_config(values)
