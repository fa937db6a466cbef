"""Experts of Hugging Face folders in MXFP4, as gpt-oss has them: `NAME_blocks` and `NAME_scales`.

Blocks are bytes (experts, rows, groups, 16), and scales are bytes (experts, rows, groups). A group has 32
columns, and its first value is in the low half of its first byte. A row has the same bytes as in MLX's MXFP4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

from ondevice.converters.architectures.config_reader import SAME_REPOSITORY
from ondevice.converters.checkpoints.base import SourceTensor, plain
from ondevice.converters.checkpoints.mlx_folder import COPY_KEY, UNQUANTISED
from ondevice.converters.checkpoints.mlx_tensor import MlxTensor
from ondevice.converters.checkpoints.safetensors_file import RawTensor, floating
from ondevice.errors import CheckpointError, UnsupportedModelError
from ondevice.model_config import MAX_EXPERTS

METHOD = "mxfp4"
BLOCKS, SCALES = "_blocks", "_scales"
GROUP, GROUP_BYTES = 32, 16
_HARMLESS = ("quant_method", "modules_to_not_convert", "dequantize")
"""Keys that the tensors imply, or that say how weights are run elsewhere."""


def has_mxfp4(values: Mapping[str, Any]) -> bool:
    """Whether a `config.json` says that its experts are in MXFP4.

    Raises UnsupportedModelError for an unknown setting.
    """
    section = values.get(COPY_KEY)
    if not isinstance(section, dict) or section.get("quant_method") != METHOD:
        return False
    unknown = sorted(set(section) - set(_HARMLESS))
    if unknown:
        raise UnsupportedModelError(
            f"config.json: {COPY_KEY} has {plain(unknown[0])}, which isn't known here; only plain {METHOD} "
            f"can be converted; {UNQUANTISED}"
        )
    return True


def experts_of(tensors: Mapping[str, RawTensor]) -> dict[str, SourceTensor]:
    """The tensors of a folder by name. Those in `NAME_blocks` become matrices `NAME.0`, `NAME.1` and so on.

    Raises CheckpointError for blocks and scales that don't belong together.
    """
    sources: dict[str, SourceTensor] = {}
    for name, tensor in tensors.items():
        stem = name.removesuffix(BLOCKS)
        if name.endswith(SCALES) and f"{name.removesuffix(SCALES)}{BLOCKS}" in tensors:
            continue
        if stem == name or tensor.dtype != "U8":
            sources[name] = floating(tensor)
            continue
        scales = tensors.get(f"{stem}{SCALES}")
        _check(tensor, scales)
        assert scales is not None
        for expert in range(tensor.shape[0]):
            expert_name = f"{stem}.{expert}"
            sources[expert_name] = MlxTensor(
                expert_name, 4, GROUP, _one(tensor, expert), _one(scales, expert), None
            )
    return sources


def _check(blocks: RawTensor, scales: RawTensor | None) -> None:
    """Check that blocks and scales belong to the same stack of matrices. Raises CheckpointError if not."""
    if scales is None:
        raise CheckpointError(f"{plain(blocks.name)} has no {SCALES} beside it; is the download complete?")
    shape = blocks.shape
    if len(shape) != 4 or shape[3] != GROUP_BYTES or scales.shape != shape[:3] or scales.dtype != "U8":
        raise CheckpointError(
            f"{plain(blocks.name)} has shape {list(shape)}, and its scales {list(scales.shape)} of "
            f"{scales.dtype}; they must be U8 of (experts, rows, groups, {GROUP_BYTES}) and of (experts, "
            f"rows, groups); {SAME_REPOSITORY}"
        )
    if not 1 <= shape[0] <= MAX_EXPERTS or not prod(shape):
        raise CheckpointError(
            f"{plain(blocks.name)} has shape {list(shape)}; it must hold 1 to {MAX_EXPERTS} experts; "
            f"{SAME_REPOSITORY}"
        )


def _one(stack: RawTensor, expert: int) -> RawTensor:
    """The bytes of one expert's rows, as a matrix."""
    shape = (stack.shape[1], prod(stack.shape[2:]))
    return replace(stack, shape=shape, offset=stack.offset + expert * prod(shape))
