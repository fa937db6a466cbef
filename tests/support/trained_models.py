"""Trained models for tests, and the text that they make up.

The mixture of experts is a bundle of 4 bits. What its codes stand for, rounded to what float16 holds, is the
model that other engines get.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np

import ondevice
from ondevice.bundle.reader import Bundle
from tests.support.engines import bundle_weights
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
    weights = bundle_weights(MIXTURE)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    held = {
        name: np.ascontiguousarray(matrix.astype(np.float16), np.float32) for name, matrix in weights.items()
    }
    save_safetensors(folder / "model.safetensors", held, "F32")
    shutil.copy(MIXTURE / "tokenizer.model", folder)
    return folder
