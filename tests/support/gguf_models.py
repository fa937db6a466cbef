"""GGUF files of the tiny random models, written with the `gguf` package as llama.cpp's converter writes
them."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.models import random_tensors

LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
GEMMA_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
"""The names of norms from Gemma 2 on."""
MODEL_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


SCALES = {
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
    "IQ4_NL": (0,), "IQ4_XS": (0,),
}  # fmt: skip
"""Offsets of the float16 scales in a block of types that the `gguf` package reads and doesn't write."""


def made_up(kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """Stored bytes of a matrix of a type in SCALES: any codes, and scales of about the size of a model's."""
    import gguf

    block, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rng = np.random.default_rng(shape[0])
    data = rng.integers(0, 256, (shape[0], shape[1] // block, nbytes), dtype=np.uint8)
    for offset in SCALES[kind]:
        scales = rng.uniform(1e-5, 1e-4, data.shape[:2]).astype(np.float16)
        data[:, :, offset : offset + 2] = scales.view(np.uint8).reshape(*data.shape[:2], 2)
    return data.reshape(shape[0], -1)


BYTE_LEVEL_TOKENS = 264
"""Tokens of `add_byte_level`."""


def gguf_name(name: str, output_norms: bool = False) -> str:
    """A tensor's name in GGUF, from Hugging Face's.

    output_norms: whether blocks have norms on their outputs.
    """
    if name in MODEL_NAMES:
        return MODEL_NAMES[name]
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    kind, _, suffix = rest.rpartition(".")
    names = LAYER_NAMES | (GEMMA_NAMES if output_norms else {})
    return f"blk.{layer}.{names[kind]}.{suffix}"


def permuted(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries or keys in the order of llama.cpp's rotary embedding: (i, i + half) become
    neighbours."""
    return values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def add_config(writer: Any, config: Mapping[str, Any]) -> None:
    """The architecture's metadata of a `config.json`."""
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(head_dim)
    writer.add_vocab_size(config["vocab_size"])
    if config.get("head_dim"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if config.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") == "linear":
        import gguf

        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(scaling["factor"])


def stored_tensors(config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Tensors by GGUF's names, with rows moved as llama.cpp's converter moves them."""
    stored = {}
    for name, values in tensors.items():
        if config["model_type"] in ("llama", "mistral"):
            for which, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads")):
                if f"self_attn.{which}_proj." in name:
                    values = permuted(values, config[heads])
        if config["model_type"].startswith("gemma") and name.endswith("norm.weight"):
            values = values + np.float32(1)
        stored[gguf_name(name, "post_feedforward" in "".join(tensors))] = values
    return stored


def write_gguf(
    path: Path,
    folder: Path,
    kind: str | Callable[[str], str] = "F32",
    *,
    seed: int = 0,
    extra: Mapping[str, np.ndarray] | None = None,
    change: Callable[[Any], None] = lambda writer: None,
    tensors: Mapping[str, np.ndarray] | None = None,
    **options: Any,
) -> dict[str, np.ndarray]:
    """Write the model of the checkpoint `folder` as a GGUF file, matrices of the type `kind`.

    kind: a type's name, or what gives one for the name of a tensor in the file.
    extra: more tensors. change: adds metadata. tensors: instead of the folder's. options: of the writer.
    Returns the values that the file's tensors stand for, by Hugging Face's names.
    """
    gguf = pytest.importorskip("gguf")
    config = json.loads((folder / "config.json").read_text())
    weights = dict(tensors or random_tensors(config, seed))
    names = {"mistral": "llama", "gemma3_text": "gemma3"}
    architecture = names.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(path, architecture, **options)
    add_config(writer, config)
    change(writer)
    exact: dict[str, np.ndarray] = {}
    for name, moved in stored_tensors(config, weights).items():
        stored = np.ascontiguousarray(moved)
        quant = gguf.GGMLQuantizationType[kind if isinstance(kind, str) else kind(name)]
        block = gguf.GGML_QUANT_SIZES[quant][0]
        own = quant if stored.ndim == 2 and stored.shape[1] % block == 0 else gguf.GGMLQuantizationType.F32
        data = made_up(own.name, stored.shape) if own.name in SCALES else gguf.quants.quantize(stored, own)
        writer.add_tensor(name, data, raw_dtype=own)
        exact[name] = gguf.quants.dequantize(data, own)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    output_norms = "post_feedforward" in "".join(weights)
    return {name: unmoved(config, name, exact[gguf_name(name, output_norms)]) for name in weights}


def unmoved(config: Mapping[str, Any], name: str, values: np.ndarray) -> np.ndarray:
    """The inverse of what `stored_tensors` does to a tensor."""
    if config["model_type"] in ("llama", "mistral"):
        for which, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads")):
            if f"self_attn.{which}_proj." in name:
                pairs = values.reshape(config[heads], -1, 2, *values.shape[1:])
                return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)
    return values


def add_byte_level(writer: Any, pre: str = "gpt-2") -> None:
    """Metadata of a byte-level tokenizer: 256 byte tokens, a few merges, then `<bos>`, `<eot>`, `<eos>`."""
    from tokenizers import pre_tokenizers

    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w"]
    tokens += [merge.replace(" ", "") for merge in merges]
    special = ["<bos>", "<eot>", "<eos>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens + special)
    writer.add_token_types([1] * len(tokens) + [3] * len(special))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(len(tokens))
    writer.add_eot_token_id(len(tokens) + 1)
    writer.add_eos_token_id(len(tokens) + 2)
    writer.add_chat_template("{{ messages }}")


def add_sentencepiece(writer: Any) -> None:
    """Metadata of a sentencepiece tokenizer of 300 tokens: bytes, letters, a few merges, and padding."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [*"▁abcdehlow", "he", "ll", "hell", "hello", "▁w", "<|im_end|>", "<think>"]
    types = [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 261), 3, 4]
    padding = 300 - len(tokens)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens + [f"[PAD{i}]" for i in range(padding)])
    writer.add_token_scores([-float(max(0, i - 258)) for i in range(300)])
    writer.add_token_types(types + [5] * padding)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(True)


def changed_gguf(data: bytes, end: int, rng: random.Random) -> bytes:
    """The file with its header of `end` bytes changed in one to three places."""
    content = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 1, 2, 3])):
        at = rng.randrange(end)
        how = rng.randrange(6)
        if how == 0:
            content[at] ^= 1 << rng.randrange(8)
        elif how == 1:
            content[at] = rng.choice([0, 1, 0x7F, 0x80, 0xFF])
        elif how == 2:
            width = rng.choice([4, 8])
            content[at : at + width] = rng.randbytes(width)
        elif how == 3:
            value = rng.choice([0, 1, (1 << 31) - 1, (1 << 32) - 1, 1 << 40, (1 << 63) - 1, (1 << 64) - 1])
            content[at : at + 8] = struct.pack("<Q", value)
        elif how == 4:
            content[at : at + rng.randint(1, 64)] = b""
        else:
            content[at:at] = content[at : at + rng.randint(1, 64)]
    return bytes(content[: rng.randrange(len(content))] if rng.random() < 0.03 else content)
