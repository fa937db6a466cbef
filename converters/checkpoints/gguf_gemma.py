"""Gemma's families in GGUF files: their `config.json` values and their tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import numpy as np

from ondevice.converters.architectures.common import Tensors
from ondevice.converters.architectures.config_reader import SAME_REPOSITORY, shown
from ondevice.converters.checkpoints.base import SourceTensor, StoredTensor
from ondevice.converters.checkpoints.gguf_metadata import Metadata
from ondevice.converters.checkpoints.gguf_tensor import QuantizedTensor
from ondevice.errors import CheckpointError, UnsupportedModelError
from ondevice.model_config import SIZE_LIMITS, ModelConfig

Values = Mapping[str, Any]
"""Values of a `config.json` by key."""
ROPE_FACTORS = "rope_freqs.weight"
"""Name of the tensor by which rotary frequencies are divided."""
STILL = 1e30
"""The value there for a pair of dimensions that doesn't turn."""
_GEMMA4_SCALES = {
    "layer_scalar.weight": "layer_scalar",
    "router.proj.scale": "router.scale",
    "experts.down.scale": "router.per_expert_scale",
}
GEMMA_LARGEST = {"gemma2": 46, "gemma3_text": 62}
"""Number of layers of the 27B models."""


def gemma2_keys(metadata: Metadata, values: Values) -> dict[str, Any]:
    """The keys of Gemma 2.

    Files don't have the scale of scores; like llama.cpp, this recognises the largest model by its number of
    layers.
    """
    width = values["hidden_size"] // values["num_attention_heads"]
    largest = values["num_hidden_layers"] == GEMMA_LARGEST[values["model_type"]]
    window = metadata.integer("attention.sliding_window", 0)
    keys: dict[str, Any] = {
        "query_pre_attn_scalar": width if largest else values["head_dim"],
        "sliding_window": window or None,
    }
    for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
        if metadata.has(cap):
            keys[cap] = metadata.number(cap)
    return keys


def gemma3_keys(metadata: Metadata, values: Values) -> dict[str, Any]:
    keys = gemma2_keys(metadata, values)
    keys["rope_local_base_freq"] = metadata.number("rope.freq_base_swa", 10_000.0)
    keys["sliding_window_pattern"] = metadata.integer("attention.sliding_window_pattern", 6)
    return keys


def gemma3n_keys(metadata: Metadata, values: Values) -> dict[str, Any]:
    """The keys of Gemma 3n.

    A file stores a cutoff in standard deviations; `config.json` has the share of gates below it.
    """
    keys: dict[str, Any] = {
        "sliding_window": metadata.integer("attention.sliding_window"),
        "rope_local_base_freq": metadata.number("rope.freq_base_swa", 10_000.0),
        "hidden_size_per_layer_input": metadata.integer("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": metadata.rows("per_layer_token_embd.weight"),
        "num_kv_shared_layers": metadata.integer("attention.shared_kv_layers"),
        "altup_num_inputs": metadata.integer("altup.num_inputs"),
        "altup_active_idx": metadata.integer("altup.active_idx", 0),
        "laurel_rank": metadata.rows("blk.0.laurel_l.weight"),
    }
    if (scales := metadata.array("activation_sparsity_scale")) is not None:
        normal = NormalDist()
        # Configs name shares of few digits.
        keys["activation_sparsity_pattern"] = [round(normal.cdf(scale), 6) for scale in scales]
    layers = values["num_hidden_layers"]
    if metadata.is_array("feed_forward_length"):
        keys["intermediate_size"] = of_layers(metadata, "feed_forward_length", layers, 0)
    if metadata.has("attention.sliding_window_pattern"):
        keys["layer_types"] = kinds_of_layers(metadata, layers)
    if metadata.has("final_logit_softcapping"):
        keys["final_logit_softcapping"] = metadata.number("final_logit_softcapping")
    return keys


def gemma4_keys(metadata: Metadata, values: Values) -> dict[str, Any]:
    """The keys of Gemma 4.

    Global layers have other heads, and layers with shared keys another number of neurons.
    """
    layers, shared = values["num_hidden_layers"], metadata.integer("attention.shared_kv_layers", 0)
    if not 0 <= shared < layers <= SIZE_LIMITS["num_layers"]:
        raise CheckpointError(
            f"{metadata.header.file}: {metadata.prefix}attention.shared_kv_layers is {shared} of {layers} "
            f"layers; there may be {SIZE_LIMITS['num_layers']}, and the first must have keys of its own"
        )
    kinds = kinds_of_layers(metadata, layers)
    head_dim = metadata.integer("attention.key_length_swa", values["head_dim"])
    for same in ("attention.value_length_swa", "rope.dimension_count_swa"):
        metadata.reader.only(metadata.prefix + same, head_dim)
    keys = of_layers(metadata, "attention.head_count_kv", layers, values["num_key_value_heads"])
    neurons = of_layers(metadata, "feed_forward_length", layers, values["intermediate_size"])
    wide = [neurons[0]] * (layers - shared) + [2 * neurons[0]] * shared
    if neurons not in (wide, [neurons[0]] * layers):
        raise UnsupportedModelError(
            f"{metadata.header.file}: {metadata.prefix}feed_forward_length is {shown(neurons)}; only layers "
            "that share keys may have other sizes, twice those of the first"
        )
    owners = range(layers - shared)
    width = metadata.integer("embedding_length_per_layer_input", 0)
    config_keys: dict[str, Any] = {
        "layer_types": kinds,
        "sliding_window": metadata.integer("attention.sliding_window"),
        "head_dim": head_dim,
        "global_head_dim": values["head_dim"],
        "num_key_value_heads": first_of(kinds, "sliding_attention", keys),
        "num_global_key_value_heads": first_of(kinds, "full_attention", keys),
        "attention_k_eq_v": any(
            kinds[i] == "full_attention" and f"blk.{i}.attn_v.weight" not in metadata.stored for i in owners
        ),
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": neurons[-1] != neurons[0],
        "hidden_size_per_layer_input": width,
        "rope_parameters": _gemma4_ropes(metadata, values),
        "rope_theta": None,
    }
    if width:
        config_keys["vocab_size_per_layer_input"] = metadata.rows("per_layer_token_embd.weight")
    if metadata.has("final_logit_softcapping"):
        config_keys["final_logit_softcapping"] = metadata.number("final_logit_softcapping")
    return config_keys


def kinds_of_layers(metadata: Metadata, layers: int) -> list[str]:
    """Each layer's kind of attention.

    Raises UnsupportedModelError for a single value, which might be a period, or a value for all layers.
    """
    key = "attention.sliding_window_pattern"
    if not metadata.is_array(key):
        raise UnsupportedModelError(
            f"{metadata.header.file}: {metadata.prefix}{key} is missing or one value; only an array, which "
            "says of each layer whether it is a local one, can be converted; download a newer file, or "
            "convert the model's Hugging Face folder"
        )
    local = of_layers(metadata, key, layers, 0)
    return ["sliding_attention" if is_local else "full_attention" for is_local in local]


def of_layers(metadata: Metadata, key: str, layers: int, default: int) -> list[int]:
    """An integer for each layer, from an array or from one number for all. `default` if the key
    is missing.
    """
    if metadata.is_array(key):
        numbers = [int(value) for value in metadata.array(key) or []]
        if len(numbers) != layers:
            raise CheckpointError(
                f"{metadata.header.file}: {metadata.prefix}{key} has {len(numbers)} values for "
                f"{layers} layers"
            )
        return numbers
    return [metadata.integer(key, default)] * layers


def first_of(kinds: list[str], kind: str, values: list[int]) -> int:
    """The value of the first layer of `kind`; if there is none, that of the first layer."""
    return values[kinds.index(kind) if kind in kinds else 0]


def _gemma4_ropes(metadata: Metadata, values: Values) -> dict[str, Any]:
    """The section `rope_parameters`, made from the two rotary bases and the file's factors.

    In a global layer only a head's first pairs are rotated, with the frequencies that they would have if all
    were. Files express this by factors: 1 for these pairs, and a huge number for the others. Raises
    UnsupportedModelError for other factors.
    """
    base = {"rope_type": "default", "rope_theta": values["rope_theta"]}
    if ROPE_FACTORS in metadata.stored:
        factors, pairs = metadata.vector(ROPE_FACTORS), values["head_dim"] // 2
        turning = factors.count(1.0)
        if factors != [1.0] * turning + [float(np.float32(STILL))] * (pairs - turning):
            raise UnsupportedModelError(
                f"{metadata.header.file}: {ROPE_FACTORS} must be {pairs} factors, 1 for pairs that turn and "
                f"then {STILL:g} for the others"
            )
        # Half a dimension more, as the product with the width is rounded down.
        share = min(1.0, (2 * turning + 0.5) / values["head_dim"])
        base |= {"rope_type": "proportional", "partial_rotary_factor": share}
    local = {"rope_type": "default", "rope_theta": metadata.number("rope.freq_base_swa", 10_000.0)}
    return {"full_attention": base, "sliding_attention": local}


def restored_gemma3n(tensors: Tensors, config: ModelConfig) -> Tensors:
    """The tensors, with the matrices of residual streams split from their stack."""
    restored = dict(tensors)
    for stem in ("model.altup_projections", "model.altup_unembed_projections"):
        stacked = restored.pop(f"{stem}.weight", None)
        if stacked is not None:
            restored |= _slices(stacked, stem, config.residual_copies - 1)
    for layer in range(config.num_layers):
        stem = f"model.layers.{layer}.altup.correct_output_scale"
        if (scale := restored.pop(f"{stem}.weight", None)) is not None:
            restored[stem] = scale
    return restored


def restored_gemma4(tensors: Tensors, config: ModelConfig) -> Tensors:
    """The tensors of Gemma 4, with scales of layers, router inputs and expert outputs renamed as in
    checkpoints.
    """
    restored = dict(tensors)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        for stored, name in _GEMMA4_SCALES.items():
            if (scale := restored.pop(prefix + stored, None)) is not None:
                restored[prefix + name] = scale
    return restored


def _slices(tensor: SourceTensor, stem: str, count: int) -> dict[str, SourceTensor]:
    if not isinstance(tensor, StoredTensor | QuantizedTensor) or tensor.shape[:-2] != (count,):
        raise CheckpointError(
            f"{tensor.name} has shape {list(tensor.shape)}; config.json asks for {count} matrices; "
            f"{SAME_REPOSITORY}"
        )
    step = tensor.nbytes // count
    names = [f"{stem}.{i}.weight" for i in range(count)]
    return {
        name: replace(tensor, name=name, shape=tensor.shape[1:], offset=tensor.offset + i * step)
        for i, name in enumerate(names)
    }
