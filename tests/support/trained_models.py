"""Trained models for tests, and the text that they make up.

The mixture of experts is a bundle of 4 bits. What its codes stand for, rounded to what float16 holds, is the
model that other engines get.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import ondevice
from ondevice.bundle.reader import Bundle
from tests.support.engines import running
from tests.support.models import save_safetensors
from tests.support.paths import ROOT

MIXTURE = ROOT / "tests" / "benchmarks" / "data" / "small-olmoe"
"""A mixture of experts, trained for half an hour: its routing is real."""
TWIN = ROOT / "tests" / "benchmarks" / "data" / "small-silu"
"""A SwiGLU model with the same tokenizer, whose rows are multiples of 256: blocks of K-quants."""


def own_text(folder: Path, count: int) -> list[int]:
    """Tokens of texts that a bundle's model makes up."""
    tokens: list[int] = []
    with ondevice.load(folder) as model:
        first = model.bundle.manifest.tokenizer.bos_id or 0
        while len(tokens) < count:
            made = model.generate(tokens=[first], max_tokens=100, temperature=1.0, seed=len(tokens))
            tokens += [first, *made.tokens]
    return tokens[:count]


def write_mixture(folder: Path) -> Path:
    """Write the Hugging Face folder. Its head is a matrix of its own, with the embedding's values, as GGUF
    files of this family want it.
    """
    bundle = Bundle.open(MIXTURE)
    config, experts = bundle.config, bundle.config.experts
    assert experts is not None
    folder.mkdir()
    values = {
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        "hidden_size": config.hidden_size,
        "intermediate_size": experts.neurons,
        "num_experts": experts.count,
        "num_experts_per_tok": experts.chosen,
        "norm_topk_prob": False,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_context,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm.eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(values))
    held = {name: values.astype(np.float16).astype(np.float32) for name, values in _weights()}
    save_safetensors(folder / "model.safetensors", held, "F32")
    shutil.copy(MIXTURE / "tokenizer.model", folder)
    return folder


def _weights() -> Iterator[tuple[str, np.ndarray]]:
    """The values that the mixture's codes stand for, by Hugging Face's names."""
    with running(MIXTURE) as model:
        weights: Any = model.weights
        yield "model.embed_tokens.weight", weights.head.weight
        yield "lm_head.weight", weights.head.weight
        yield "model.norm.weight", weights.final_norm.weight
        for index, layer in enumerate(weights.layers):
            query, key, value = np.split(layer.qkv.weight, 3)
            parts = {
                "input_layernorm": layer.attention_norm.weight,
                "post_attention_layernorm": layer.feed_forward_norm.weight,
                "mlp.gate": layer.router.matrix.weight,
                "self_attn.q_norm": layer.head_norms.q.weight,
                "self_attn.k_norm": layer.head_norms.k.weight,
                **{"self_attn.q_proj": query, "self_attn.k_proj": key, "self_attn.v_proj": value},
                "self_attn.o_proj": layer.out.weight,
            }
            for number, expert in enumerate(layer.feed_forward.experts):
                for name, values in (("gate", expert.gate), ("up", expert.up), ("down", expert.down.T)):
                    parts[f"mlp.experts.{number}.{name}_proj"] = values
            for name, values in parts.items():
                yield f"model.layers.{index}.{name}.weight", values
