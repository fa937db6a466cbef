"""Tiny MLX quantised folders, written with numpy alone, and the values that their codes stand for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.models import random_tensors, tiny_config, to_bfloat16

Typed = tuple[str, np.ndarray]
"""Type of the safetensors format, and an array with its bytes; BF16 as uint16."""
_EXPERT = re.compile(r"(.*)\.experts\.(\d+)\.(\w+)\.weight")
_STACK = re.compile(r"(.*\.(?:experts|block_sparse_moe))\.(\w+_proj|\w+_linear)(?:\.weight)?")
_MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
LUT = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Scheme:
    """How a module is quantised. scales: their type. rough: float32 scales that float16 doesn't hold."""

    bits: int = 4
    group: int = 64
    scales: str = "F16"
    mode: str = "affine"
    rough: bool = False

    @property
    def entry(self) -> dict[str, Any]:
        return {"group_size": self.group, "bits": self.bits, "mode": self.mode}


MXFP4 = Scheme(group=32, scales="U8", mode="mxfp4")


def packed(q: np.ndarray, bits: int) -> np.ndarray:
    """Codes (R, C) as uint32 (R, C * bits / 32): one stream of bits along a row, low bits first."""
    stream = (q[:, :, None].astype(np.uint8) >> np.arange(bits, dtype=np.uint8)) & 1
    return np.packbits(stream.reshape(len(q), -1), axis=1, bitorder="little").view("<u4")


def widened(typed: Typed) -> np.ndarray:
    """Float32 values of a typed array."""
    dtype, values = typed
    if dtype == "BF16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def quantised(values: np.ndarray, scheme: Scheme) -> tuple[dict[str, Typed], np.ndarray]:
    """The parts of a quantised module by suffix, and the (R, C) float32 values that they stand for.

    A stack of matrices, (E, R, C), gives stacks.
    """
    if values.ndim == 3:
        parts, found = quantised(values.reshape(-1, values.shape[2]), scheme)
        stacks = {name: (part[0], part[1].reshape(*values.shape[:2], -1)) for name, part in parts.items()}
        return stacks, found.reshape(values.shape)
    groups = values.astype(np.float32).reshape(len(values), -1, scheme.group)
    if scheme.mode == "mxfp4":
        return _mxfp4(groups)
    low, high = groups.min(axis=2), groups.max(axis=2)
    top = (1 << scheme.bits) - 1
    scales = np.where(high > low, (high - low) / np.float32(top), np.float32(1)).astype(np.float32)
    if scheme.scales == "F32" and not scheme.rough:
        scales, low = (x.astype(np.float16).astype(np.float32) for x in (scales, low))
    parts: dict[str, Typed] = {"scales": typed(scales, scheme.scales), "biases": typed(low, scheme.scales)}
    scale, bias = (widened(parts[part])[:, :, None] for part in ("scales", "biases"))
    q = np.clip(np.rint((groups - bias) / scale), 0, top).astype(np.float32)
    parts["weight"] = ("U32", packed(q.reshape(len(values), -1), scheme.bits))
    return parts, (q * scale + bias).reshape(values.shape)


def _mxfp4(groups: np.ndarray) -> tuple[dict[str, Typed], np.ndarray]:
    table = np.array([*LUT, *(-value for value in LUT)], dtype=np.float32)
    exponents = np.ceil(np.log2(np.maximum(np.abs(groups).max(axis=2), 1e-6) / 6.0)).astype(np.int32)
    scale = np.exp2(exponents.astype(np.float32))[:, :, None]
    q = np.abs((groups / scale)[..., None] - table).argmin(axis=-1)
    rows = len(groups)
    parts: dict[str, Typed] = {"scales": ("U8", (exponents + 127).astype(np.uint8))}
    parts["weight"] = ("U32", packed(q.reshape(rows, -1), 4))
    return parts, (table[q] * scale).reshape(rows, -1)


def typed(values: np.ndarray, dtype: str) -> Typed:
    if dtype == "BF16":
        return dtype, to_bfloat16(values)
    return dtype, values.astype({"F32": "<f4", "F16": "<f2"}[dtype])


def save_typed(path: Path, tensors: Mapping[str, Typed]) -> None:
    """A safetensors file, as MLX writes it."""
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    offset = 0
    for name, (dtype, values) in tensors.items():
        span = [offset, offset + values.nbytes]
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": span}
        offset = span[1]
    encoded = json.dumps(header).encode()
    blobs = b"".join(values.tobytes() for _, values in tensors.values())
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + blobs)


def on_a_grid(shape: tuple[int, int], bits: int, seed: int = 0) -> np.ndarray:
    """Values that any groups of 32 or more, along either dimension, hold exactly at `bits` bits."""
    half = 1 << (bits - 1)
    k = np.random.default_rng(seed).integers(1 - half, half + 1, shape)
    diagonal = np.add.outer(np.arange(shape[0]), np.arange(shape[1])) % 32
    k[diagonal == 0], k[diagonal == 16] = half, 1 - half
    return (k / (half * 8)).astype(np.float32)


@dataclass(frozen=True)
class MlxFolder:
    """A folder, its parts as stored by name, and the float32 values of all tensors by name."""

    path: Path
    stored: dict[str, Typed]
    values: dict[str, np.ndarray]
    config: dict[str, Any] = field(default_factory=dict)


def write_mlx_folder(
    folder: Path,
    scheme: Scheme = Scheme(),
    *,
    exceptions: Callable[[str], Scheme | None] | None = None,
    family: str = "llama",
    floats: str = "F16",
    grid_bits: int = 0,
    shards: int = 1,
    **options: Any,
) -> MlxFolder:
    """Write `config.json` and quantised random weights, and return what is in them.

    Args:
        folder: the new folder.
        scheme: how modules are quantised.
        exceptions: the scheme of a module, or None for one that stays floating-point.
        family: see `tiny_config`.
        floats: type of what isn't quantised.
        grid_bits: not 0 for down projections that bundles of this many bits hold exactly.
        shards: number of safetensors files.
        options: keys of `config.json`.
    """
    config = tiny_config(family, **({"hidden_size": 128, "intermediate_size": 256} | options))
    tensors = random_tensors(config)
    if grid_bits:
        grids = enumerate(name for name in tensors if "down_proj" in name)
        tensors |= {name: on_a_grid(tensors[name].shape, grid_bits, number) for number, name in grids}
    return write_quantised(folder, config, tensors, scheme, exceptions, floats, shards)


def write_quantised(
    folder: Path,
    config: dict[str, Any],
    tensors: Mapping[str, np.ndarray],
    scheme: Scheme = Scheme(),
    exceptions: Callable[[str], Scheme | None] | None = None,
    floats: str = "F16",
    shards: int = 1,
) -> MlxFolder:
    """As `write_mlx_folder`, of a model whose tensors are given by their names in MLX's folders."""
    quantisation = scheme.entry
    stored: dict[str, Typed] = {}
    values: dict[str, np.ndarray] = {}
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        mine = scheme if exceptions is None else exceptions(module)
        if part != "weight" or tensor.ndim == 1 or mine is None:
            stored[name] = typed(tensor, floats)
            values[name] = widened(stored[name])
            if part == "weight" and tensor.ndim > 1:
                quantisation[module] = False
            continue
        if mine != scheme:
            quantisation[module] = mine.entry
        parts, values[name] = quantised(tensor, mine)
        stored |= {f"{module}.{suffix}": part for suffix, part in parts.items()}
    config = config | {"quantization": quantisation, "quantization_config": quantisation}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_shards(folder, stored, shards)
    return MlxFolder(folder, stored, values, config)


def named_by_mlx(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint with experts as mlx-lm names and stacks them."""
    found: dict[str, np.ndarray] = {}
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for name, values in tensors.items():
        if (expert := _EXPERT.fullmatch(name)) is not None:
            which = _MIXTRAL.get(expert[3], expert[3])
            stacks.setdefault(f"{expert[1]}.switch_mlp.{which}.weight", {})[int(expert[2])] = values
        elif (stack := _STACK.fullmatch(name)) is not None:
            prefix = stack[1] + (".switch_glu" if stack[1].endswith("experts") else ".switch_mlp")
            if stack[2] in ("gate_up_proj", "input_linear"):
                gates, ups = np.split(values, 2, axis=1)
                found |= {f"{prefix}.gate_proj.weight": gates, f"{prefix}.up_proj.weight": ups}
            else:
                found[f"{prefix}.down_proj.weight"] = values
        else:
            found[name] = values
    return found | {name: np.stack([parts[i] for i in range(len(parts))]) for name, parts in stacks.items()}


def save_shards(folder: Path, stored: Mapping[str, Typed], shards: int = 1) -> None:
    if shards == 1:
        save_typed(folder / "model.safetensors", stored)
        return
    names, weight_map = sorted(stored), {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = names[shard::shards]
        save_typed(folder / file, {name: stored[name] for name in part})
        weight_map |= dict.fromkeys(part, file)
    size = sum(values.itemsize * prod(values.shape) for _, values in stored.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
