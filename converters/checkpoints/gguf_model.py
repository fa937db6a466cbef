"""GGUF files as checkpoints: one file, or the parts `NAME-00001-of-00003.gguf` and so on.

Metadata are converted to the values of the `config.json` that the model was made from, so that families are
described only in `converters/architectures`. Tensors get Hugging Face's names, and rows that llama.cpp's
converter moved are moved back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from ondevice.converters.architectures.common import Description
from ondevice.converters.architectures.config_reader import CONFIG_REMEDY, SAME_REPOSITORY, ConfigReader
from ondevice.converters.architectures.registry import describe
from ondevice.converters.architectures.tensors import LayerNames, tensor_shapes
from ondevice.converters.checkpoints.base import (
    Checkpoint,
    SourceFile,
    SourceTensor,
    plain,
    printable,
    some_of,
)
from ondevice.converters.checkpoints.gguf_aliases import other_kind
from ondevice.converters.checkpoints.gguf_experts import EXPERT_NAMES
from ondevice.converters.checkpoints.gguf_families import (
    BLOCK_NAMES,
    GGUF_FAMILIES,
    LONG_FACTORS,
    MIXTRAL,
    MODEL_NAMES,
    SHORT_FACTORS,
    GgufFamily,
)
from ondevice.converters.checkpoints.gguf_file import GgufHeader, Value, read_header
from ondevice.converters.checkpoints.gguf_gemma import ROPE_FACTORS
from ondevice.converters.checkpoints.gguf_metadata import Metadata, Stored
from ondevice.converters.checkpoints.gguf_parts import PART, GgufPart, open_parts
from ondevice.converters.checkpoints.gguf_tensor import source_tensor
from ondevice.converters.checkpoints.gguf_tokenizer import read_gguf_tokenizer
from ondevice.converters.checkpoints.source_folder import SourceFolder
from ondevice.converters.checkpoints.tokenizer_files import with_table
from ondevice.errors import CheckpointError, UnsupportedModelError
from ondevice.model_config import ModelConfig, RopeSpec

_NUMBER = r"(0|[1-9]\d{0,3})"
_NAME = re.compile(
    rf"(?:blk\.{_NUMBER}\.)?((?:nextn\.|shortconv\.)?\w{{1,64}})(?:\.{_NUMBER})?(\.weight|\.bias|\.scale)?"
)
"""The parts of a name: block number, module, number of a single expert, and the module's part with its dot,
or nothing."""

_HARMLESS = (
    "vocab_size",
    "rope.scaling.finetuned",
    "tensor_data_layout",
)
"""Keys that change nothing, or repeat what others say."""


def open_gguf(path: Path) -> Checkpoint:
    """A GGUF file on a disk, as a Checkpoint. It may be a link to anywhere, because the user named it. See
    `open_gguf_of`.
    """
    return open_gguf_of(SourceFolder(path.absolute().parent), path.name, lambda name: SourceFile(path))


def open_gguf_of(
    folder: SourceFolder, name: str, opened: Callable[[str], SourceFile] | None = None
) -> Checkpoint:
    """A GGUF file of a folder as a Checkpoint. If it is one of several parts, all parts are opened, whichever
    is named.

    opened: opens the named file; by default the folder does.

    Raises CheckpointError if the file is damaged or parts are missing, UnsupportedModelError if the model,
    its tokenizer or a type of its tensors isn't supported.
    """
    with ExitStack() as refused:

        def opened_part(part: str) -> GgufPart:
            source = opened(part) if opened is not None and part == name else folder.open(part)
            file = refused.enter_context(closing(source))
            return GgufPart(file, read_header(file))

        parts = open_parts(name, opened_part)
        stored = _stored_tensors(parts)
        header = parts[0].header
        family = _family(header)
        description = _description(header, family, stored)
        config = description.config
        tensors = _selected(header, family, description, stored)
        tokenizer = read_gguf_tokenizer(header, folder, config.vocab_size)
        refused.pop_all()
    part = PART.fullmatch(name)
    joined_name = f"{part['stem']}.gguf" if part else name
    return Checkpoint(
        name=printable(folder.repository_file(joined_name) or Path(joined_name).stem),
        source_format="gguf",
        config=config,
        tensors=tensors,
        tokenizer=with_table(tokenizer),
        generation={},
        notes=description.notes,
    )


def _stored_tensors(parts: list[GgufPart]) -> dict[str, Stored]:
    stored: dict[str, Stored] = {}
    for part in parts:
        for name, entry in part.header.tensors.items():
            if name in stored:
                raise CheckpointError(
                    f"{stored[name].file.path.name} and {part.header.file} both hold {plain(name)}; download "
                    "both again"
                )
            stored[name] = Stored(part.file, entry)
    return stored


def _family(header: GgufHeader) -> GgufFamily:
    kind = header.text("general.type")
    if kind not in (None, "model"):
        raise UnsupportedModelError(f"{header.file} holds {plain(str(kind))}, not a language model")
    name = header.text("general.architecture")
    if name is None:
        raise CheckpointError(f"{header.file} has no general.architecture; it isn't a language model")
    if kind := other_kind(name):
        raise UnsupportedModelError(
            f"{header.file} is {kind}: general.architecture is {name}; give a language model's file"
        )
    if name not in GGUF_FAMILIES:
        known = ", ".join(sorted(GGUF_FAMILIES))
        raise UnsupportedModelError(
            f"{header.file}: general.architecture {plain(name)} is not one of {known}"
        )
    if name == "llama" and _scalar(header.metadata.get("llama.expert_count", 0)):
        return MIXTRAL
    return GGUF_FAMILIES[name]


def _description(header: GgufHeader, family: GgufFamily, stored: Mapping[str, Stored]) -> Description:
    with np.errstate(all="ignore"):
        values = _config_values(header, family, stored)
    try:
        description = describe(values)
    except (CheckpointError, UnsupportedModelError) as error:
        raise _of_metadata(header, error) from error
    description = replace(description, notes=(*description.notes, *family.notes(header, description.config)))
    if ROPE_FACTORS not in stored or ROPE_FACTORS in family.factors:
        return description
    factors = stored[ROPE_FACTORS]
    tensor = source_tensor(ROPE_FACTORS, factors.file, ROPE_FACTORS, factors.entry)
    ropes = tuple(_divided(rope, tensor, header.file) for rope in description.config.ropes)
    return replace(description, config=replace(description.config, ropes=ropes))


def _of_metadata(
    header: GgufHeader, error: CheckpointError | UnsupportedModelError
) -> CheckpointError | UnsupportedModelError:
    """An error of a config, or of tensors that don't match it, reworded for a GGUF file, which
    has no config.
    """
    text = str(error)
    if text.startswith(header.file):
        return error
    for remedy in (CONFIG_REMEDY, SAME_REPOSITORY):
        text = text.replace(remedy, "download it again, or convert the Hugging Face folder it was made from")
    text = text.removeprefix("config.json: ").replace("config.json", "that config")
    return type(error)(f"{header.file}, whose metadata were read as a config.json: {text}")


def _divided(rope: RopeSpec, factors: SourceTensor, file: str) -> RopeSpec:
    """Frequencies divided by a file's factors, one for each rotated pair. Llama 3's scaling is stored this
    way.
    """
    if rope.long_frequencies:
        raise CheckpointError(
            f"{file} has {factors.name} beside {SHORT_FACTORS} and {LONG_FACTORS}; a model has one or "
            "the others"
        )
    pairs = sum(frequency > 0 for frequency in rope.frequencies)
    if not pairs:
        return rope
    if factors.shape != (pairs,):
        raise CheckpointError(f"{file}: {factors.name} has shape {list(factors.shape)}, not [{pairs}]")
    divisors = factors.vector()
    if divisors.min() < 1.0:
        raise CheckpointError(f"{file}: {factors.name} has the factor {divisors.min()}; the least is 1")
    frequencies = np.array(rope.frequencies, np.float32)
    frequencies[:pairs] /= divisors
    return replace(rope, frequencies=tuple(frequencies.tolist()))


def _config_values(header: GgufHeader, family: GgufFamily, stored: Mapping[str, Stored]) -> dict[str, Any]:
    """The values that a `config.json` would have. Raises an error that names an unknown key of the
    architecture.
    """
    prefix = f"{header.text('general.architecture')}."
    family_values = {key: value for key, value in header.metadata.items() if key.startswith(prefix)}
    scalars = {
        key: _scalar(value[:1] if key.removeprefix(prefix) in family.varied and _is_array(value) else value)
        for key, value in family_values.items()
    }
    reader = ConfigReader(scalars, header.file)
    metadata = Metadata(header, reader, prefix, stored)
    embedding = stored.get("token_embd.weight")
    if embedding is None or len(embedding.entry.shape) != 2:
        raise CheckpointError(f"{header.file} has no matrix token_embd.weight; it isn't a language model")
    width, heads = metadata.integer("embedding_length"), metadata.integer("attention.head_count")
    if min(width, heads) < 1:
        raise CheckpointError(
            f"{header.file}: {prefix}embedding_length is {width}, and {prefix}attention.head_count {heads}; "
            "both must be 1 or more"
        )
    head_dim = metadata.integer("attention.key_length", width // heads)
    if head_dim < 1:
        raise CheckpointError(f"{header.file}: heads would have {head_dim} dimensions; the least is 1")
    epsilon = "layer_norm_rms_epsilon" if family.norm_key == "rms_norm_eps" else "layer_norm_epsilon"
    values: dict[str, Any] = {
        "model_type": family.model_type,
        "hidden_size": width,
        "num_hidden_layers": metadata.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": metadata.integer("feed_forward_length", 0 if family.all_experts else None),
        "vocab_size": embedding.entry.shape[0],
        "max_position_embeddings": metadata.integer("context_length"),
        family.norm_key: metadata.number(f"attention.{epsilon}"),
        "rope_theta": metadata.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(reader, prefix),
        "tie_word_embeddings": "output.weight" not in stored,
        **family.fixed,
    }
    if not family.latent:
        reader.only(prefix + "attention.value_length", head_dim)
        values |= _rotated(metadata, family, head_dim)
    _check_decoder(metadata, family)
    values |= family.keys(metadata, values)
    window = metadata.integer("attention.sliding_window", 0)
    if window and family.model_type == "llama":
        values |= {"model_type": "mistral", "sliding_window": window}
    elif window and "sliding_window" not in values:
        reader.only(prefix + "attention.sliding_window", 0)
    if family.bias_key and values["model_type"] != "mistral":
        values[family.bias_key] = any(f"blk.0.attn_{part}.bias" in stored for part in ("q", "qkv"))
    reader.close(frozenset(prefix + key for key in _HARMLESS))
    return values


def _rotated(metadata: Metadata, family: GgufFamily, head_dim: int) -> dict[str, Any]:
    """The share of a head's dimensions that is rotated, for families in which it may be only a part."""
    if not family.partial:
        metadata.reader.only(metadata.prefix + "rope.dimension_count", head_dim)
        return {}
    rotated = metadata.integer("rope.dimension_count", head_dim)
    if not 0 < rotated <= head_dim:
        raise CheckpointError(
            f"{metadata.header.file}: {metadata.prefix}rope.dimension_count is {rotated}; heads have "
            f"{head_dim}"
        )
    # Half a dimension more, as the product with head_dim is rounded down.
    return {"partial_rotary_factor": (rotated + 0.5) / head_dim}


def _check_decoder(metadata: Metadata, family: GgufFamily) -> None:
    """Check the kind of model. Raises UnsupportedModelError for experts in a family without any, and for a
    model that isn't causal.
    """
    for key in ("expert_count", "expert_used_count"):
        if metadata.integer(key, 0) and family.model_type not in EXPERT_NAMES:
            raise UnsupportedModelError(
                f"{metadata.header.file} is a mixture of experts, which can't be converted in this family yet"
            )
    if not metadata.boolean("attention.causal", True):
        raise UnsupportedModelError(
            f"{metadata.header.file} isn't a causal language model: {metadata.prefix}attention.causal is "
            "false"
        )


def _is_array(value: Value) -> TypeGuard[NDArray[Any]]:
    return isinstance(value, np.ndarray)


def _scalar(value: Value) -> bool | int | float | str:
    """A value for ConfigReader. An array with one number per layer counts as a number if all are equal."""
    if isinstance(value, bool | int | float):
        return value
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    items = value.tolist() if isinstance(value, np.ndarray) else []
    return items[0] if items and items.count(items[0]) == len(items) else f"an array of {len(value)} values"


def _rope_scaling(reader: ConfigReader, prefix: str) -> dict[str, Any] | None:
    """The section `rope_scaling` of a `config.json`. An older name of its factor is `rope.scale_linear`."""
    kind = reader.text(prefix + "rope.scaling.type", "none")
    linear = reader.number(prefix + "rope.scale_linear", 1.0)
    factor = reader.number(prefix + "rope.scaling.factor", linear)
    original = reader.integer(prefix + "rope.scaling.original_context_length", 0)
    if kind == "none":
        kind, factor = "linear", linear
    if factor in (0.0, 1.0) and kind == "linear":
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    for beta in ("beta_fast", "beta_slow"):
        if reader.has(key := f"{prefix}rope.scaling.yarn_{beta}"):
            scaling[beta] = reader.number(key)
    # A linear factor is the same wherever the model began.
    return (
        scaling
        if kind == "linear" or not original
        else {**scaling, "original_max_position_embeddings": original}
    )


def _names(family: GgufFamily, stored: Mapping[str, Stored]) -> dict[str, str]:
    """The names in the file of those tensors that the family knows, by their names in a checkpoint."""
    blocks, wholes = {**BLOCK_NAMES, **family.blocks}, {**MODEL_NAMES, **family.wholes}
    names = {}
    for name in stored:
        match = _NAME.fullmatch(name)
        if match is None:
            continue
        block, module, expert, kind = match.groups()
        module = module if expert is None else f"{module}.{{}}"
        new = wholes.get(module) if block is None else blocks.get(module, "").format(expert)
        if new:
            new += kind or ""
            names[new if block is None else f"model.layers.{block}.{new}"] = name
    return names


def _usual_names(config: ModelConfig) -> dict[str, str]:
    """The usual names in GGUF files of the tensors that `tensors.py` describes, by their names there."""
    modules = dict(BLOCK_NAMES)
    if not config.layers[0].feed_forward.gated:
        modules["ffn_up"] = modules.pop("ffn_gate")
    names: dict[str, str] = {}
    for kind in ("weight", "bias"):
        names |= {f"{new}.{kind}": f"{old}.{kind}" for old, new in MODEL_NAMES.items()}
        for layer in range(config.num_layers):
            for old, new in modules.items():
                names[f"model.layers.{layer}.{new}.{kind}"] = f"blk.{layer}.{old}.{kind}"
    return names


def _selected(
    header: GgufHeader, family: GgufFamily, description: Description, stored: Mapping[str, Stored]
) -> dict[str, SourceTensor]:
    """The model's tensors under the names of `tensors.py`.

    Raises CheckpointError unless exactly those tensors are in the file that the metadata imply.
    """
    config = description.config
    names = _names(family, stored)
    unknown = set(stored) - set(names.values()) - family.factors - {ROPE_FACTORS}
    interleaved = set()
    if family.interleaved:
        for layer in range(config.num_layers):
            ours = LayerNames(layer)
            interleaved |= {name(which) for name in (ours.projection, ours.projection_bias) for which in "qk"}
    tensors: Mapping[str, SourceTensor] = {
        name: source_tensor(
            name,
            stored[old].file,
            old,
            stored[old].entry,
            config.head_dim if name in interleaved else 0,
        )
        for name, old in names.items()
    }
    try:
        tensors = description.adapt(family.restore(tensors, config))
    except CheckpointError as error:
        raise _of_metadata(header, error) from error
    shown = _usual_names(config) | names
    shapes = tensor_shapes(config)
    missing = [shown.get(name, name) for name in shapes if name not in tensors]
    if missing:
        raise CheckpointError(
            f"{header.file} lacks {len(missing)} tensors that its metadata ask for, {some_of(missing)}; is "
            "the download complete?"
        )
    extra = sorted(unknown | {shown.get(name, name) for name in set(tensors) - set(shapes)})
    if extra:
        raise UnsupportedModelError(
            f"{header.file} has {len(extra)} tensors that are no part of a {config.architecture} model, "
            f"{some_of(extra)}; leaving them out could change what it says"
        )
    for name, shape in shapes.items():
        if tensors[name].shape != shape:
            raise CheckpointError(
                f"{header.file}: {shown.get(name, name)} has shape {list(tensors[name].shape)}; the metadata "
                f"ask for {list(shape)}; download it again"
            )
    return {name: tensors[name] for name in shapes}
