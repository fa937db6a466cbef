"""EAGLE-3 heads and MTP layers of random weights, and their arithmetic in plain PyTorch.

The twin is written from the description in the paper and the authors' names of tensors; it has no cache, and
computes every row anew.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from ondevice.bundle.draft_layers import DraftLayer
from ondevice.bundle.reader import Bundle
from ondevice.converters.architectures.rotary import rope_spec
from ondevice.converters.draft_layers.write import write_draft_layer
from ondevice.model_config import ModelConfig

Tensors = dict[str, np.ndarray]


def head_config(**options: Any) -> dict[str, Any]:
    """A `config.json` that goes with `write_chat_checkpoint`'s models."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "vocab_size": 272,
        "draft_vocab_size": 100,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
        "torch_dtype": "float16",
    } | options


def head_tensors(
    config: Mapping[str, Any],
    target_width: int = 64,
    seed: int = 0,
    embeddings: bool = False,
    head_norms: bool = False,
) -> Tensors:
    """Random weights of a head, float16 but for the offsets of its tokens."""
    rng = np.random.default_rng(seed)
    width, neurons, tokens = (
        config["hidden_size"],
        config["intermediate_size"],
        config["draft_vocab_size"],
    )
    head = config.get("head_dim") or width // config["num_attention_heads"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (width, 3 * target_width),
        "midlayer.self_attn.q_proj.weight": (queries, 2 * width),
        "midlayer.self_attn.k_proj.weight": (keys, 2 * width),
        "midlayer.self_attn.v_proj.weight": (keys, 2 * width),
        "midlayer.self_attn.o_proj.weight": (width, queries),
        "midlayer.mlp.gate_proj.weight": (neurons, width),
        "midlayer.mlp.up_proj.weight": (neurons, width),
        "midlayer.mlp.down_proj.weight": (width, neurons),
        "midlayer.hidden_norm.weight": (width,),
        "midlayer.input_layernorm.weight": (width,),
        "midlayer.post_attention_layernorm.weight": (width,),
        "norm.weight": (width,),
        "lm_head.weight": (tokens, width),
    }
    if config.get("fc_norm"):
        shapes |= {f"fc_norm.{tap}.weight": (target_width,) for tap in range(3)}
    if head_norms:
        shapes |= {f"midlayer.self_attn.{it}_norm.weight": (head,) for it in "qk"}
    if config.get("attention_bias"):
        for name, rows in (("q", queries), ("k", keys), ("v", keys), ("o", width)):
            shapes[f"midlayer.self_attn.{name}_proj.bias"] = (rows,)
    if embeddings:
        shapes["embed_tokens.weight"] = (config["vocab_size"], width)
    found: Tensors = {}
    for name, shape in shapes.items():
        noise = rng.standard_normal(shape)
        scale = 0.2 if len(shape) == 1 else 1.0 / np.sqrt(shape[1])
        found[name] = (noise * scale + (len(shape) == 1 and "norm" in name)).astype(np.float16)
    chosen = np.sort(rng.choice(config["vocab_size"], tokens, replace=False))
    found["d2t"] = chosen.astype(np.int64) - np.arange(tokens)
    found["t2d"] = np.isin(np.arange(config["vocab_size"]), chosen)
    return found


def write_eagle_head(
    folder: Path, tensors: Tensors | None = None, embeddings: bool = False, **options: Any
) -> Path:
    """A folder with a head of random weights, or of `tensors`."""
    config = head_config(**options)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors or head_tensors(config, embeddings=embeddings), folder / "model.safetensors")
    return folder


def twin_rows(
    tensors: Tensors,
    config: Mapping[str, Any],
    embeddings: np.ndarray,
    tokens: Sequence[int],
    hidden: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Hidden states (n, D) and logits (n, N) of n rows, in plain PyTorch and float64.

    Hidden states are those that a draft goes on from. tokens: (n,) whose embeddings are read. hidden: (n, D)
    the states beside them, of `fc` or fed back.
    """
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional
    w = {name: torch.from_numpy(np.asarray(it, np.float64)) for name, it in tensors.items() if it.ndim}
    width, heads = config["hidden_size"], config["num_attention_heads"]
    groups = config["num_key_value_heads"]
    head, n = config.get("head_dim") or width // heads, len(tokens)

    def norm(x: Any, name: str) -> Any:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + config["rms_norm_eps"]) * w[f"{name}.weight"]

    def projected(x: Any, name: str, count: int) -> Any:
        bias = w.get(f"midlayer.self_attn.{name}_proj.bias")
        found = functional.linear(x, w[f"midlayer.self_attn.{name}_proj.weight"], bias)
        return found.reshape(n, count, head).transpose(0, 1)

    h = torch.from_numpy(np.asarray(hidden, np.float64))
    normed = norm(h, "midlayer.hidden_norm")
    residual = normed if config.get("norm_before_residual") else h
    embedded = torch.from_numpy(np.asarray(embeddings[list(tokens)], np.float64))
    x = torch.cat([norm(embedded, "midlayer.input_layernorm"), normed], -1)
    pairs = torch.arange(0, head, 2, dtype=torch.float64)
    angles = torch.arange(n)[:, None] / config.get("rope_theta", 10000.0) ** (pairs / head)
    cos, sin = torch.cos(angles).repeat(1, 2), torch.sin(angles).repeat(1, 2)

    def turned(x: Any) -> Any:
        return x * cos + torch.cat([-x[..., head // 2 :], x[..., : head // 2]], -1) * sin

    q, k = projected(x, "q", heads), projected(x, "k", groups)
    if "midlayer.self_attn.q_norm.weight" in w:
        q, k = norm(q, "midlayer.self_attn.q_norm"), norm(k, "midlayer.self_attn.k_norm")
    q, k = turned(q), turned(k)
    k, v = (it.repeat_interleave(heads // groups, 0) for it in (k, projected(x, "v", groups)))
    seen = functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
    seen = seen.transpose(0, 1).reshape(n, -1)
    bias = w.get("midlayer.self_attn.o_proj.bias")
    x = residual + functional.linear(seen, w["midlayer.self_attn.o_proj.weight"], bias)
    inner = norm(x, "midlayer.post_attention_layernorm")
    gate = functional.silu(inner @ w["midlayer.mlp.gate_proj.weight"].T)
    x = x + (gate * (inner @ w["midlayer.mlp.up_proj.weight"].T)) @ w["midlayer.mlp.down_proj.weight"].T
    normed = norm(x, "norm")
    after = normed if config.get("norm_output") else x
    return after.numpy(), (normed @ w["lm_head.weight"].T).numpy()


def mtp_arrays(
    width: int, neurons: int, heads: int, head_dim: int, seed: int = 1, gates: bool = False
) -> Tensors:
    """Random weights of a multi-token-prediction layer with norms of heads, by our format's names.

    gates: whether what heads attend to has gates.
    """
    rng, queries = np.random.default_rng(seed), heads * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "joined.embedding": (width, width),
        "joined.hidden": (width, width),
        "qkv": (3 * queries, width),
        "out": (width, queries),
        "gate": (neurons, width),
        "up": (neurons, width),
        "down": (width, neurons),
        "q_norm": (head_dim,),
        "k_norm": (head_dim,),
    }
    norms = ("embedding_norm", "hidden_norm", "attention_norm", "feed_forward_norm", "final_norm")
    shapes |= {name: (width,) for name in norms}
    if gates:
        shapes["output_gates"] = (queries, width)
    found = {}
    for name, shape in shapes.items():
        noise = rng.standard_normal(shape)
        scale = 0.2 if len(shape) == 1 else 1.0 / np.sqrt(shape[1])
        found[name] = (noise * scale + (len(shape) == 1)).astype(np.float16).astype(np.float32)
    return found


def add_mtp_layer(folder: Path, neurons: int, normed: bool = False, gates: bool = False) -> None:
    """Give the bundle in `folder` a layer of `mtp_arrays`, which reads what leaves its last layer.

    normed: whether hidden states come from behind a norm, as Qwen3.5's do. gates: as of `mtp_arrays`.
    """
    target = Bundle.open(folder).config
    layer = replace(_mtp_layer(target, neurons), states_normed=normed, output_gates=gates)
    arrays = mtp_arrays(target.hidden_size, neurons, target.num_heads, target.head_dim, gates=gates)
    write_draft_layer(folder, layer, arrays)


def add_random_mtp_layer(folder: Path, neurons: int, **changes: Any) -> DraftLayer:
    """Give the bundle in `folder` a layer of random weights with other facts, such as experts or a latent.

    changes: fields of the layer that aren't as `add_mtp_layer` has them. Norms of heads go with a latent.
    """
    target, rng = Bundle.open(folder).config, np.random.default_rng(3)
    layer = replace(_mtp_layer(target, neurons), **changes)
    if (latent := layer.latent) is not None:
        frequencies = rope_spec(10000.0, latent.turning).frequencies
        layer = replace(
            layer, num_kv_heads=1, head_dim=latent.width, head_norm=False, frequencies=frequencies
        )
    arrays: Tensors = {}
    for name, matrix in layer.matrices(target).items():
        arrays[name] = (rng.standard_normal(matrix.shape) / np.sqrt(matrix.cols)).astype(np.float32)
    for name, size in layer.vectors(target).items():
        arrays[name] = (0.2 * rng.standard_normal(size) + name.endswith("norm")).astype(np.float32)
    return write_draft_layer(folder, layer, arrays)


def _mtp_layer(target: ModelConfig, neurons: int) -> DraftLayer:
    """The facts of a layer of `mtp_arrays`, at 16 bits."""
    width, heads, head_dim = target.hidden_size, target.num_heads, target.head_dim
    return DraftLayer(
        kind="mtp",
        model="",
        bits=16,
        taps=(target.num_layers,),
        hidden_size=width,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        neurons=neurons,
        activation="silu",
        eps=1e-6,
        frequencies=rope_spec(10000.0, head_dim).frequencies,
        magnitude=1.0,
        head_norm=True,
        tokens=target.vocab_size,
    )


def mtp_twin(
    arrays: Tensors,
    heads: int,
    eps: float,
    theta: float,
    table: np.ndarray,
    head: np.ndarray,
    tokens: Sequence[int],
    hidden: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Hidden states (n, D) and logits (n, V) of n rows in plain PyTorch and float64, as arXiv 2412.19437,
    section 2.2, has them: norms of embedding and hidden state, one matrix over both, and a layer.
    """
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional
    w = {name: torch.from_numpy(np.asarray(it, np.float64)) for name, it in arrays.items()}
    n, size = len(tokens), len(arrays["q_norm"])

    def norm(x: Any, name: str) -> Any:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * w[name]

    embedded = torch.from_numpy(np.asarray(table[list(tokens)], np.float64))
    both = torch.cat([norm(embedded, "embedding_norm"), norm(torch.from_numpy(hidden), "hidden_norm")], -1)
    x = both @ torch.cat([w["joined.embedding"], w["joined.hidden"]], 1).T
    q, k, v = (norm(x, "attention_norm") @ w["qkv"].T).reshape(n, 3, heads, size).permute(1, 2, 0, 3)
    angles = torch.arange(n)[:, None] / theta ** (torch.arange(0, size, 2, dtype=torch.float64) / size)
    cos, sin = torch.cos(angles).repeat(1, 2), torch.sin(angles).repeat(1, 2)

    def turned(x: Any) -> Any:
        return x * cos + torch.cat([-x[..., size // 2 :], x[..., : size // 2]], -1) * sin

    q, k = turned(norm(q, "q_norm")), turned(norm(k, "k_norm"))
    seen = functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
    x = x + seen.transpose(0, 1).reshape(n, -1) @ w["out"].T
    inner = norm(x, "feed_forward_norm")
    x = x + (functional.silu(inner @ w["gate"].T) * (inner @ w["up"].T)) @ w["down"].T
    logits = norm(x, "final_norm") @ torch.from_numpy(np.asarray(head, np.float64)).T
    return x.numpy(), logits.numpy()
