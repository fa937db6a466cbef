"""Hugging Face folders: `config.json`, one or many safetensors files, tokenizer and generation defaults.

MLX writes such folders too. If it has quantised one, `mlx_folder` says what the tensors mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, closing
from typing import Any

import numpy as np

from ondevice.bundle.layout import TOKENIZER_FILES
from ondevice.bundle.manifest import GENERATION_RANGES
from ondevice.config import MIN_TEMPERATURE
from ondevice.converters.architectures.common import Description
from ondevice.converters.architectures.config_reader import SAME_REPOSITORY
from ondevice.converters.architectures.registry import describe
from ondevice.converters.architectures.tensors import EMBEDDING, HEAD, tensor_shapes
from ondevice.converters.checkpoints.base import (
    PICKLES,
    Checkpoint,
    SourceTensor,
    TokenizerFiles,
    plain,
    printable,
    some_of,
)
from ondevice.converters.checkpoints.fp8_folder import read_fp8, scaled_tensors
from ondevice.converters.checkpoints.mlx_folder import (
    COPY_KEY,
    KEY,
    quantized_tensors,
    read_quantization,
)
from ondevice.converters.checkpoints.mxfp4_folder import experts_of, has_mxfp4
from ondevice.converters.checkpoints.safetensors_file import RawTensor, floating, read_tensors
from ondevice.converters.checkpoints.source_folder import SourceFolder
from ondevice.converters.checkpoints.tokenizer_files import VOCABULARY, read_tokenizer, with_table
from ondevice.errors import CheckpointError, UnsupportedModelError
from ondevice.model_config import ModelConfig

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_CONFIG_BYTES = 1 << 20
"""Most bytes of `config.json` and `generation_config.json`, which have a few kilobytes."""

MAX_SHARDS = 1 << 11
MAX_TENSORS = 1 << 17
"""Most tensors in all shards; the largest mixtures of experts have 100,000."""


def open_huggingface(folder: SourceFolder) -> Checkpoint:
    """A Hugging Face folder as a Checkpoint. Headers are read, weights aren't.

    Raises CheckpointError if files are missing, damaged or inconsistent, UnsupportedModelError if they are
    sound but can't be converted.
    """
    values = folder.json("config.json", MAX_CONFIG_BYTES)
    by_mlx = _quantized_by_mlx(values)
    description = describe_model(values)
    with ExitStack() as refused:
        stored = stored_tensors(folder, values, refused)
        if description.stored is not None:
            description = description.stored(stored)
        config = description.config
        tensors = _select(description.adapt(stored), config)
        generation = folder.optional_json("generation_config.json", MAX_CONFIG_BYTES)
        tokenizer = read_tokenizer(folder, values, generation, config.vocab_size)
        refused.pop_all()
    return Checkpoint(
        name=printable(folder.name),
        source_format="mlx" if by_mlx else "huggingface",
        config=config,
        tensors=tensors,
        tokenizer=with_table(tokenizer),
        generation=generation_defaults(generation),
        notes=description.notes,
    )


def open_config(folder: SourceFolder) -> Checkpoint:
    """A Checkpoint without tensors, made from a folder's `config.json`, which can only be planned.

    The tokenizer may be missing too. Raises what `open_huggingface` raises, except for missing weights.
    """
    values = folder.json("config.json", MAX_CONFIG_BYTES)
    description = describe_model(values)
    generation, tokenizer = folder.optional_json("generation_config.json", MAX_CONFIG_BYTES), TokenizerFiles()
    if any(map(folder.has, (*TOKENIZER_FILES.values(), VOCABULARY))):
        tokenizer = with_table(read_tokenizer(folder, values, generation, description.config.vocab_size))
    return Checkpoint(
        name=printable(folder.name),
        source_format="huggingface",
        config=description.config,
        tensors={},
        tokenizer=tokenizer,
        generation=generation_defaults(generation),
        notes=description.notes,
    )


def describe_model(values: Mapping[str, Any]) -> Description:
    """The model that a folder's `config.json` describes, however its tensors are stored. Raises what
    `describe` raises.
    """
    return describe({key: value for key, value in values.items() if key not in (KEY, COPY_KEY)})


def stored_tensors(
    folder: SourceFolder, values: Mapping[str, Any], opened: ExitStack
) -> dict[str, SourceTensor]:
    """All tensors of the folder by their names in it. Codes are joined with their scales.

    values: the content of `config.json`. opened: will close the files that are opened here. Raises
    CheckpointError for files that are missing or damaged, UnsupportedModelError for unknown types and
    methods.
    """
    mxfp4 = has_mxfp4(values)
    fp8 = read_fp8(values)
    quantisation = None if mxfp4 or fp8 else read_quantization(values)
    raw = all_tensors(folder, opened)
    if mxfp4:
        return experts_of(raw)
    if fp8 is not None:
        return scaled_tensors(raw, fp8)
    if quantisation is None:
        return {name: floating(tensor) for name, tensor in raw.items()}
    return quantized_tensors(raw, quantisation)


def _quantized_by_mlx(values: Mapping[str, Any]) -> bool:
    """Whether MLX has quantised the folder. Raises UnsupportedModelError for an unknown method."""
    return not has_mxfp4(values) and not read_fp8(values) and read_quantization(values) is not None


def generation_defaults(values: dict[str, Any]) -> dict[str, float]:
    """The sampling defaults in `generation_config.json`, by SamplingConfig field. Invalid values are left
    out.

    Without `do_sample` the file means greedy decoding, which is a temperature of 0.
    """
    defaults: dict[str, float] = {}
    for name, (low, high) in GENERATION_RANGES.items():
        value: Any = values.get(name)
        if type(value) in (int, float) and low <= value <= high:
            defaults[name] = int(value) if isinstance(high, int) else float(value)
    if defaults.get("temperature", 1.0) < MIN_TEMPERATURE:
        defaults["temperature"] = 0.0
    if values.get("do_sample") is True:
        defaults.setdefault("temperature", 1.0)
    elif defaults:
        defaults = {name: value for name, value in defaults.items() if name == "repetition_penalty"}
        defaults["temperature"] = 0.0
    return defaults


def all_tensors(folder: SourceFolder, opened: ExitStack) -> dict[str, RawTensor]:
    """All tensors of the folder, by name. opened: will close the files that are opened here."""
    if folder.has(SINGLE):
        return read_tensors(opened.enter_context(closing(folder.open(SINGLE))))
    if folder.has(INDEX):
        return _sharded_tensors(folder, folder.json(INDEX).get("weight_map"), opened)
    pickles = [name for name in folder.names() if name.endswith(PICKLES)]
    if pickles:
        raise UnsupportedModelError(
            f"{folder.path} has its weights in {pickles[0]}, a pickle, which can run code when it is opened, "
            "so it never is; use the repository's safetensors files, or save the model again with safetensors"
        )
    raise CheckpointError(f"{folder.path} has neither {SINGLE} nor {INDEX}; is the download complete?")


def _sharded_tensors(folder: SourceFolder, weight_map: Any, opened: ExitStack) -> dict[str, RawTensor]:
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{INDEX} has no weight_map of tensor names to files; download it again")
    shards = {}
    names = sorted(set(weight_map.values()))
    if len(names) > MAX_SHARDS:
        raise CheckpointError(f"{INDEX} lists {len(names)} files; the most is {MAX_SHARDS}")
    count = 0
    for name in names:
        if not name.endswith(".safetensors"):
            raise CheckpointError(
                f"{INDEX} lists {plain(name)}, which isn't a safetensors file; download it again"
            )
        shards[name] = read_tensors(opened.enter_context(closing(folder.open(name))))
        count += len(shards[name])
        if count > MAX_TENSORS:
            raise CheckpointError(f"the files that {INDEX} lists have more than {MAX_TENSORS} tensors")
    for name, shard_name in weight_map.items():
        if name not in shards[shard_name]:
            raise CheckpointError(
                f"{shard_name} has no {plain(name)}, which {INDEX} says it has; download it again"
            )
    return _merged(shards)


def _merged(shards: dict[str, dict[str, RawTensor]]) -> dict[str, RawTensor]:
    """The tensors of all shards. Raises CheckpointError for a tensor that is in two of them."""
    tensors: dict[str, RawTensor] = {}
    for shard_name, shard in shards.items():
        for name, tensor in shard.items():
            if name in tensors:
                other = tensors[name].file.path.name
                raise CheckpointError(
                    f"{other} and {shard_name} both hold {plain(name)}; which is meant isn't known; download "
                    "both"
                )
            tensors[name] = tensor
    return tensors


def _select(tensors: Mapping[str, SourceTensor], config: ModelConfig) -> dict[str, SourceTensor]:
    """The model's tensors, checked against the config. Redundant ones are left out."""
    expected = tensor_shapes(config)
    missing = sorted(set(expected) - set(tensors))
    if missing:
        raise CheckpointError(
            f"{len(missing)} tensors that config.json asks for are missing, {some_of(missing)}; is the "
            "download complete, and does config.json belong to it?"
        )
    for name, shape in expected.items():
        if tensors[name].shape != shape:
            raise CheckpointError(
                f"{name} has shape {list(tensors[name].shape)}; config.json asks for {list(shape)}; "
                f"{SAME_REPOSITORY}"
            )
    extra = sorted(name for name in set(tensors) - set(expected) if not name.endswith("rotary_emb.inv_freq"))
    if extra == [HEAD] and config.tie_embeddings:
        _check_tied(tensors[HEAD], tensors[EMBEDDING])
        extra = []
    if extra:
        raise CheckpointError(
            f"{len(extra)} tensors are no part of a {config.architecture} model, {some_of(extra)}; leaving "
            "them out could change what it says"
        )
    return {name: tensors[name] for name in expected}


def _check_tied(head: SourceTensor, embedding: SourceTensor) -> None:
    """Check the head in the files of a model with tied embeddings. Raises CheckpointError unless it equals
    the embedding.
    """
    same = (head.shape, head.dtype) == (embedding.shape, embedding.dtype)
    block = max(1, (4 << 20) * embedding.shape[0] // embedding.values_nbytes)
    for start in range(0, embedding.shape[0] if same else 0, block):
        stop = min(start + block, embedding.shape[0])
        same = same and np.array_equal(
            head.rows(start, stop).view(np.uint8), embedding.rows(start, stop).view(np.uint8)
        )
    if not same:
        raise CheckpointError(
            f"config.json says tie_word_embeddings, but {HEAD} differs from {EMBEDDING}; if the head is "
            "meant, set tie_word_embeddings to false there"
        )
