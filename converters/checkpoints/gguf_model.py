"""GGUF files as checkpoints: one file, or the parts `NAME-00001-of-00003.gguf` and so on.

Metadata become the values of the `config.json` that the model was made from, so that families stay described
in one place, `converters/architectures`. Tensors get Hugging Face's names, and rows that llama.cpp's
converter moved go back to their place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ondevice.converters.architectures.config_reader import ConfigReader
from ondevice.converters.architectures.registry import read_config
from ondevice.converters.architectures.tensors import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    LayerNames,
    tensor_shapes,
)
from ondevice.converters.checkpoints.base import Checkpoint, SourceFile, SourceTensor, plain, printable
from ondevice.converters.checkpoints.gguf_file import (
    GgufHeader,
    TensorEntry,
    Value,
    read_header,
)
from ondevice.converters.checkpoints.gguf_parts import PART, Part, open_parts
from ondevice.converters.checkpoints.gguf_tensor import source_tensor
from ondevice.converters.checkpoints.gguf_tokenizer import read_gguf_tokenizer
from ondevice.converters.checkpoints.source_folder import SourceFolder
from ondevice.errors import CheckpointError, UnsupportedModelError
from ondevice.model_config import ModelConfig, RopeSpec

ROPE_FACTORS = "rope_freqs.weight"
"""A tensor that rotary frequencies are divided by."""


@dataclass(frozen=True)
class Family:
    """A family of models as GGUF files have it.

    Args:
        model_type: its name in `config.json`.
        interleaved: whether rows of queries and keys are stored in the order of llama.cpp's rotary
            embedding, pairs (2i, 2i + 1).
        activation: `hidden_act`, which files don't have.
        keys: the values of its own keys, given the reader, its prefix and the values so far.
    """

    model_type: str
    interleaved: bool = False
    activation: str = "silu"
    keys: Callable[[ConfigReader, str, Mapping[str, Any]], dict[str, Any]] = lambda reader, prefix, values: {}


def _gemma_keys(reader: ConfigReader, prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {"hidden_activation": "gelu_pytorch_tanh"}


def _gemma2_keys(reader: ConfigReader, prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Files don't have the scale of scores: llama.cpp knows the largest model by its number of layers."""
    width = values["hidden_size"] // values["num_attention_heads"]
    largest = values["num_hidden_layers"] == GEMMA_LARGEST[values["model_type"]]
    window = reader.integer(prefix + "attention.sliding_window", 0)
    found: dict[str, Any] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": width if largest else values["head_dim"],
        "sliding_window": window or None,
    }
    for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
        if reader.has(prefix + cap):
            found[cap] = reader.number(prefix + cap)
    return found


def _gemma3_keys(reader: ConfigReader, prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    found = _gemma2_keys(reader, prefix, values)
    found["rope_local_base_freq"] = reader.number(prefix + "rope.freq_base_swa", 10_000.0)
    found["sliding_window_pattern"] = reader.integer(prefix + "attention.sliding_window_pattern", 6)
    return found


GEMMA_LARGEST = {"gemma2": 46, "gemma3_text": 62}
"""Layers of the models of 27 billion parameters."""
FAMILIES = {
    "llama": Family("llama", interleaved=True),
    "qwen2": Family("qwen2"),
    "qwen3": Family("qwen3"),
    "gemma": Family("gemma", activation="gelu", keys=_gemma_keys),
    "gemma2": Family("gemma2", activation="gelu", keys=_gemma2_keys),
    "gemma3": Family("gemma3_text", activation="gelu", keys=_gemma3_keys),
}
"""By the value of `general.architecture`. A family joins when `converters/architectures` reads its config:
with a line here, its own keys in `_config_values`, and its own tensors in `_tensor_names`.

Mistral's models say llama, and are marked by a sliding window where the file has one.
"""

_HARMLESS = (
    "vocab_size",
    "rope.scaling.finetuned",
    "tensor_data_layout",
)
"""Keys of a family that change nothing, or only what other keys say too."""


@dataclass(frozen=True)
class _Stored:
    file: SourceFile
    entry: TensorEntry


def open_gguf(path: Path) -> Checkpoint:
    """A GGUF file of a disk. It may be a link that leads anywhere, as it was named. See `open_gguf_of`."""
    return open_gguf_of(SourceFolder(path.absolute().parent), path.name, lambda name: SourceFile(path))


def open_gguf_of(
    folder: SourceFolder, name: str, opened: Callable[[str], SourceFile] | None = None
) -> Checkpoint:
    """A GGUF file of a folder, with all its parts if it is one of several, whichever is named.

    opened: opens the named one, if the folder isn't to.

    Raises CheckpointError if the file is damaged or parts are missing, UnsupportedModelError if the model,
    its tokenizer or a type of its tensors isn't known here.
    """
    with ExitStack() as refused:

        def opened_part(part: str) -> Part:
            source = opened(part) if opened is not None and part == name else folder.open(part)
            file = refused.enter_context(closing(source))
            return Part(file, read_header(file))

        parts = open_parts(name, opened_part)
        stored = _stored_tensors(parts)
        header = parts[0].header
        family = _family(header)
        config = _config(header, family, stored)
        tensors = _selected(header, family, config, stored)
        tokenizer = read_gguf_tokenizer(header, folder, config.vocab_size)
        refused.pop_all()
    part = PART.fullmatch(name)
    whole = f"{part['stem']}.gguf" if part else name
    return Checkpoint(
        name=printable(folder.repository_file(whole) or Path(whole).stem),
        source_format="gguf",
        config=config,
        tensors=tensors,
        tokenizer=tokenizer,
        generation={},
    )


def _stored_tensors(parts: list[Part]) -> dict[str, _Stored]:
    stored: dict[str, _Stored] = {}
    for part in parts:
        for name, entry in part.header.tensors.items():
            if name in stored:
                raise CheckpointError(
                    f"{stored[name].file.path.name} and {part.header.file} both hold {plain(name)}; download "
                    "both again"
                )
            stored[name] = _Stored(part.file, entry)
    return stored


def _family(header: GgufHeader) -> Family:
    kind = header.text("general.type")
    if kind not in (None, "model"):
        raise UnsupportedModelError(f"{header.file} holds {plain(str(kind))}, not a language model")
    name = header.text("general.architecture")
    if name is None:
        raise CheckpointError(f"{header.file} has no general.architecture; it isn't a language model")
    if name not in FAMILIES:
        raise UnsupportedModelError(
            f"{header.file}: general.architecture {plain(name)} is not one of {', '.join(FAMILIES)}"
        )
    return FAMILIES[name]


def _config(header: GgufHeader, family: Family, stored: Mapping[str, _Stored]) -> ModelConfig:
    values = _config_values(header, family, stored)
    try:
        config = read_config(values)
    except (CheckpointError, UnsupportedModelError) as error:
        message = str(error)
        if not message.startswith("config.json"):
            raise
        raise type(error)(f"{header.file}, whose metadata were read as a config.json: {message}") from error
    if ROPE_FACTORS not in stored:
        return config
    factors = stored[ROPE_FACTORS]
    tensor = source_tensor(ROPE_FACTORS, factors.file, ROPE_FACTORS, factors.entry)
    return replace(config, ropes=tuple(_divided(rope, tensor, header.file) for rope in config.ropes))


def _divided(rope: RopeSpec, factors: SourceTensor, file: str) -> RopeSpec:
    """Frequencies divided by a file's factors, as Llama 3's scaling is stored, a whole head's pairs."""
    pairs = len(rope.frequencies)
    if factors.shape != (pairs,):
        raise CheckpointError(f"{file}: {factors.name} has shape {list(factors.shape)}, not [{pairs}]")
    divisors = factors.vector()
    if divisors.min() < 1.0:
        raise CheckpointError(f"{file}: {factors.name} has the factor {divisors.min()}; the least is 1")
    return replace(rope, frequencies=tuple((np.array(rope.frequencies, np.float32) / divisors).tolist()))


def _config_values(header: GgufHeader, family: Family, stored: Mapping[str, _Stored]) -> dict[str, Any]:
    """The values that a `config.json` would have. Unknown keys of the architecture are refused by name."""
    prefix = f"{header.text('general.architecture')}."
    own = {key: value for key, value in header.metadata.items() if key.startswith(prefix)}
    reader = ConfigReader({key: _scalar(value) for key, value in own.items()}, header.file)

    def integer(key: str, default: int | None = None) -> int:
        return reader.integer(prefix + key, default)

    embedding = stored.get("token_embd.weight")
    if embedding is None or len(embedding.entry.shape) != 2:
        raise CheckpointError(f"{header.file} has no matrix token_embd.weight; it isn't a language model")
    width, heads = integer("embedding_length"), integer("attention.head_count")
    if heads < 1:
        raise CheckpointError(f"{header.file}: {prefix}attention.head_count is {heads}")
    head_dim = integer("attention.key_length", width // heads)
    values: dict[str, Any] = {
        "model_type": family.model_type,
        "hidden_size": width,
        "num_hidden_layers": integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": integer("feed_forward_length"),
        "vocab_size": embedding.entry.shape[0],
        "max_position_embeddings": integer("context_length"),
        "hidden_act": family.activation,
        "rms_norm_eps": reader.number(prefix + "attention.layer_norm_rms_epsilon"),
        "rope_theta": reader.number(prefix + "rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(reader, prefix),
        "tie_word_embeddings": "output.weight" not in stored,
    }
    reader.only(prefix + "attention.value_length", head_dim)
    reader.only(prefix + "rope.dimension_count", head_dim)
    for key in ("expert_count", "expert_used_count"):
        if integer(key, 0):
            raise UnsupportedModelError(
                f"{header.file} is a mixture of experts, which can't be converted yet"
            )
    if not reader.boolean(prefix + "attention.causal", True):
        raise UnsupportedModelError(
            f"{header.file} isn't a causal language model: {prefix}attention.causal is false"
        )
    values |= family.keys(reader, prefix, values)
    window = integer("attention.sliding_window", 0)
    if window and family.model_type == "llama":
        values |= {"model_type": "mistral", "sliding_window": window}
    elif window and "sliding_window" not in values:
        reader.only(prefix + "attention.sliding_window", 0)
    if family.model_type != "qwen2" and values["model_type"] != "mistral":
        values["attention_bias"] = "blk.0.attn_q.bias" in stored
    reader.close(frozenset(prefix + key for key in _HARMLESS))
    return values


def _scalar(value: Value) -> bool | int | float | str:
    """A value for ConfigReader. An array, one number per layer, counts as a number if all are equal."""
    if isinstance(value, bool | int | float):
        return value
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    items = value.tolist() if isinstance(value, np.ndarray) else []
    return items[0] if items and items.count(items[0]) == len(items) else f"an array of {len(value)} values"


def _rope_scaling(reader: ConfigReader, prefix: str) -> dict[str, Any] | None:
    """The section `rope_scaling` of a `config.json`. `rope.scale_linear` is the older name of a factor."""
    kind = reader.text(prefix + "rope.scaling.type", "none")
    linear = reader.number(prefix + "rope.scale_linear", 1.0)
    factor = reader.number(prefix + "rope.scaling.factor", linear)
    original = reader.integer(prefix + "rope.scaling.original_context_length", 0)
    if kind == "none":
        kind, factor = "linear", linear
    if factor in (0.0, 1.0) and kind == "linear":
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    # A linear factor is the same wherever the model began.
    return (
        scaling
        if kind == "linear" or not original
        else {**scaling, "original_max_position_embeddings": original}
    )


def _tensor_names(config: ModelConfig) -> dict[str, str]:
    """Names of a model's tensors in a GGUF file, by Hugging Face's names."""
    names = {EMBEDDING: "token_embd.weight", FINAL_NORM: "output_norm.weight", HEAD: "output.weight"}
    for layer in range(config.num_layers):
        ours, block = LayerNames(layer), f"blk.{layer}"
        for which in "qkv":
            names[ours.projection(which)] = f"{block}.attn_{which}.weight"
            names[ours.projection_bias(which)] = f"{block}.attn_{which}.bias"
            names[ours.head_norm(which)] = f"{block}.attn_{which}_norm.weight"
        names |= {
            ours.projection("o"): f"{block}.attn_output.weight",
            ours.projection_bias("o"): f"{block}.attn_output.bias",
            ours.norm("attention_norm"): f"{block}.attn_norm.weight",
            ours.norm("feed_forward_norm"): f"{block}.ffn_norm.weight",
            ours.norm("attention_output_norm"): f"{block}.post_attention_norm.weight",
            ours.norm("feed_forward_output_norm"): f"{block}.post_ffw_norm.weight",
            ours.gate: f"{block}.ffn_gate.weight",
            ours.up: f"{block}.ffn_up.weight",
            ours.down: f"{block}.ffn_down.weight",
        }
    return names


def _selected(
    header: GgufHeader, family: Family, config: ModelConfig, stored: Mapping[str, _Stored]
) -> dict[str, SourceTensor]:
    """The model's tensors, by Hugging Face's names. All that the metadata ask for, and no others, must be
    there."""
    shapes, names = tensor_shapes(config), _tensor_names(config)
    interleaved = set()
    if family.interleaved:
        for layer in range(config.num_layers):
            ours = LayerNames(layer)
            interleaved |= {name(which) for name in (ours.projection, ours.projection_bias) for which in "qk"}
    missing = [names[name] for name in shapes if names[name] not in stored]
    if missing:
        raise CheckpointError(
            f"{header.file} lacks {len(missing)} tensors that its metadata ask for, {_some(missing)}; is the "
            "download complete?"
        )
    extra = sorted(set(stored) - {names[name] for name in shapes} - {ROPE_FACTORS})
    if extra:
        raise UnsupportedModelError(
            f"{header.file} has {len(extra)} tensors that are no part of a {config.architecture} model, "
            f"{_some(extra)}; leaving them out could change what it says"
        )
    tensors = {}
    for name, shape in shapes.items():
        file, entry = stored[names[name]].file, stored[names[name]].entry
        if entry.shape != shape:
            raise CheckpointError(
                f"{file.path.name}: {names[name]} has shape {list(entry.shape)}; the metadata ask for "
                f"{list(shape)}; download it again"
            )
        pairs = config.head_dim if name in interleaved else 0
        tensors[name] = source_tensor(name, file, names[name], entry, pairs)
    return tensors


def _some(names: list[str]) -> str:
    return ", ".join(plain(name) for name in names[:3]) + (", ..." if len(names) > 3 else "")
