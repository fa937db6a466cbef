"""Tiny random Hugging Face checkpoints of the four families, and what `transformers` says about them.

`write_checkpoint` needs numpy only; `transformers_model` and `transformers_logits` import torch and
transformers, and skip the calling test where they are absent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ondevice.converters.architectures import registry
from ondevice.converters.architectures.common import Description
from ondevice.converters.architectures.config_reader import ConfigReader

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR_ROPE = {"rope_type": "linear", "factor": 4.0}

# Every option of every family at least once; sizes that aren't multiples of 64 in most of them.
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama"},
    "llama-gqa-tied": {"family": "llama", "num_key_value_heads": 2, "tie_word_embeddings": True},
    "llama-tails": {
        "family": "llama",
        "hidden_size": 72,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "intermediate_size": 100,
        "vocab_size": 131,
    },
    "llama-llama3-rope": {"family": "llama", "rope_scaling": LLAMA3_ROPE, "rope_theta": 500000.0},
    "llama-linear-rope-bias": {"family": "llama", "rope_scaling": LINEAR_ROPE, "attention_bias": True},
    "llama-relu": {"family": "llama", "hidden_act": "relu", "head_dim": 24},
    "llama-gelu": {"family": "llama", "hidden_act": "gelu"},
    "mistral-window": {"family": "mistral", "sliding_window": 7, "num_key_value_heads": 2},
    "mistral-head-dim-gelu-tanh": {
        "family": "mistral",
        "sliding_window": None,
        "head_dim": 32,
        "hidden_act": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-5,
    },
    "mistral-untied-wide": {
        "family": "mistral",
        "sliding_window": 4096,
        "num_key_value_heads": 1,
        "intermediate_size": 192,
        "rope_theta": 1000000.0,
    },
    "qwen2": {"family": "qwen2", "num_key_value_heads": 1, "rope_theta": 1000000.0},
    "qwen2-window-tied": {
        "family": "qwen2",
        "num_hidden_layers": 3,
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
        "tie_word_embeddings": True,
    },
    "qwen3": {"family": "qwen3", "head_dim": 40, "num_key_value_heads": 2, "rope_theta": 1000000.0},
    "qwen3-bias-relu2": {
        "family": "qwen3",
        "head_dim": 16,
        "attention_bias": True,
        "hidden_act": "relu2",
        "tie_word_embeddings": True,
        "intermediate_size": 200,
    },
}

QUANTS = dict(zip(VARIANTS, ("q4", "q8", "f16") * len(VARIANTS), strict=False))
"""One for each variant, where not all combinations are tried."""


def tiny_config(
    family: str = "llama",
    *,
    rope_theta: float = 10000.0,
    rope_scaling: Mapping[str, Any] | None = None,
    rope_style: str = "legacy",
    **options: Any,
) -> dict[str, Any]:
    """A `config.json` of about 100,000 parameters; `options` are its keys and override the defaults.

    rope_style: `legacy` writes rope_theta and rope_scaling, `parameters` the newer rope_parameters.
    """
    names = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    config: dict[str, Any] = {
        "architectures": [f"{names[family]}ForCausalLM"],
        "model_type": family,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 256,
        "max_position_embeddings": 512,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
        "use_cache": True,
    }
    if family == "qwen3":
        config["head_dim"] = 16
    if family == "mistral":
        config["sliding_window"] = None
    if rope_style == "parameters":
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": rope_theta, **(rope_scaling or {})}
    else:
        config["rope_theta"] = rope_theta
        config["rope_scaling"] = dict(rope_scaling) if rope_scaling else None
    return config | options


def tensor_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of every tensor that a checkpoint with this `config.json` holds."""
    family = config["model_type"]
    width, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim") or width // config["num_attention_heads"]
    queries = config["num_attention_heads"] * head_dim
    keys = config["num_key_value_heads"] * head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], width)}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        projections = {"q_proj": (queries, width), "k_proj": (keys, width), "v_proj": (keys, width)}
        for name, shape in projections.items():
            shapes[f"{layer}.self_attn.{name}.weight"] = shape
            if family == "qwen2" or config.get("attention_bias"):
                shapes[f"{layer}.self_attn.{name}.bias"] = shape[:1]
        shapes[f"{layer}.self_attn.o_proj.weight"] = (width, queries)
        if config.get("attention_bias"):
            shapes[f"{layer}.self_attn.o_proj.bias"] = (width,)
        if family == "qwen3":
            shapes[f"{layer}.self_attn.q_norm.weight"] = (head_dim,)
            shapes[f"{layer}.self_attn.k_norm.weight"] = (head_dim,)
        shapes[f"{layer}.mlp.gate_proj.weight"] = (inner, width)
        shapes[f"{layer}.mlp.up_proj.weight"] = (inner, width)
        shapes[f"{layer}.mlp.down_proj.weight"] = (width, inner)
        shapes[f"{layer}.input_layernorm.weight"] = (width,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (width,)
    shapes["model.norm.weight"] = (width,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], width)
    return shapes


def random_tensors(config: Mapping[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Float32 weights whose logits are far from uniform: matrices N(0, 1/columns), norms near 1."""
    rng = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray] = {}
    for name, shape in tensor_shapes(config).items():
        noise = rng.standard_normal(shape, dtype=np.float32)
        if name.endswith("norm.weight"):
            tensors[name] = 1.0 + 0.2 * noise
        elif len(shape) == 1:
            tensors[name] = 0.3 * noise
        else:
            scale = 1.0 if "embed" in name else 2.0 / np.sqrt(shape[1])
            tensors[name] = noise * np.float32(scale)
    return tensors


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Float32 to bfloat16 bit patterns (uint16), rounded to nearest even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def save_safetensors(path: Path, tensors: Mapping[str, np.ndarray], dtype: str = "F32") -> None:
    """A safetensors file with every tensor stored as `dtype`: F32, F16 or BF16."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    blobs: list[bytes] = []
    offset = 0
    for name, values in tensors.items():
        stored = {
            "F32": lambda v: np.asarray(v, dtype="<f4"),
            "F16": lambda v: np.asarray(v, dtype="<f2"),
            "BF16": to_bfloat16,
        }[dtype](values)
        blobs.append(stored.tobytes())
        span = [offset, offset + len(blobs[-1])]
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": span}
        offset = span[1]
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + b"".join(blobs))


def write_checkpoint(
    folder: Path,
    family: str = "llama",
    *,
    dtype: str = "F32",
    shards: int = 1,
    seed: int = 0,
    **options: Any,
) -> Path:
    """Write `config.json` and random weights (no tokenizer) into `folder`, and return it.

    dtype: F32, F16 or BF16. shards: number of safetensors files; more than one gets an index.
    options: see `tiny_config`.
    """
    config = tiny_config(family, **options)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    tensors = random_tensors(config, seed)
    if shards == 1:
        save_safetensors(folder / "model.safetensors", tensors, dtype)
        return folder
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = names[len(names) * shard // shards : len(names) * (shard + 1) // shards]
        save_safetensors(folder / file, {name: tensors[name] for name in part}, dtype)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def transformers_model(folder: Path, weights: Mapping[str, np.ndarray] | None = None) -> Any:
    """The float32 `transformers` model of a checkpoint folder, its weights replaced by `weights` if given.

    weights: Hugging Face names to float arrays, for instance `bundle_weights(...)`.
    """
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )
    if weights is not None:
        state = {name: torch.from_numpy(np.array(w, dtype=np.float32)) for name, w in weights.items()}
        if model.config.tie_word_embeddings:
            state["lm_head.weight"] = state["model.embed_tokens.weight"]
        model.load_state_dict(state, strict=True)
    return model.eval()


def transformers_logits(model: Any, tokens: Sequence[int]) -> np.ndarray:
    """Float32 logits (T, V) of one sequence of token ids."""
    torch = pytest.importorskip("torch")
    with torch.no_grad():
        return np.asarray(model(torch.tensor([list(tokens)])).logits[0].numpy())


def change_family(patch: pytest.MonkeyPatch, **fields: Any) -> None:
    """Let checkpoints of Llama's keys be models with these fields of ModelConfig, which no Llama has."""
    family = registry.FAMILIES["llama"]

    def read(reader: ConfigReader) -> Description:
        found = family.read(reader)
        return replace(found, config=replace(found.config, **fields))

    patch.setitem(registry.FAMILIES, "llama", replace(family, read=read))


def add_tensor(checkpoint: Path, name: str, values: np.ndarray) -> None:
    """Add a tensor to a checkpoint's `model.safetensors`."""
    file = checkpoint / "model.safetensors"
    save_file(load_file(file) | {name: values}, file)
