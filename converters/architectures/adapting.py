"""Steps that give a family's tensors the names, shapes and order of `tensors.py`, as new mappings."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from ondevice.converters.architectures.common import Tensors
from ondevice.converters.architectures.tensors import FINAL_NORM, LayerNames
from ondevice.converters.checkpoints.views import RowsOf, Scaled, head_rows
from ondevice.errors import CheckpointError
from ondevice.model_config import ModelConfig

_LAYER = re.compile(r"(model\.layers\.\d+\.)(.+)")


def renamed(tensors: Tensors, names: Mapping[str, str]) -> Tensors:
    """Each layer's tensors by the new names. names: old name to new name, after `model.layers.N.`."""

    def new(name: str) -> str:
        found = _LAYER.fullmatch(name)
        return name if found is None else found[1] + names.get(found[2], found[2])

    return {new(name): tensor for name, tensor in tensors.items()}


def split(tensors: Tensors, config: ModelConfig, name: str, parts: Mapping[str, int]) -> Tensors:
    """Each layer's fused tensor `name` as several. parts: name and number of rows of each, in order.

    Raises CheckpointError if it has another number of rows.
    """
    found = dict(tensors)
    total = sum(parts.values())
    for layer in range(config.num_layers):
        fused = found.pop(f"model.layers.{layer}.{name}", None)
        if fused is None:
            continue
        if not fused.shape or fused.shape[0] != total:
            raise CheckpointError(
                f"{fused.name} has shape {list(fused.shape)}; config.json asks for {total} rows; take "
                "config.json and the weights from the same repository"
            )
        first = 0
        for part, rows in parts.items():
            new = f"model.layers.{layer}.{part}"
            found[new] = RowsOf(new, fused, np.arange(first, first + rows))
            first += rows
    return found


def split_attention_and_gates(tensors: Tensors, config: ModelConfig) -> Tensors:
    """Fused projections of queries, keys and values, and of gates and ups, apart."""
    rows = zip("qkv", (config.query_size, config.kv_size, config.kv_size), strict=True)
    parts = {f"self_attn.{which}_proj.weight": count for which, count in rows}
    tensors = split(tensors, config, "self_attn.qkv_proj.weight", parts)
    return split_gates(tensors, config)


def split_gates(tensors: Tensors, config: ModelConfig) -> Tensors:
    """The fused projection of gates and ups apart."""
    neurons = config.intermediate_size
    parts = {"mlp.gate_proj.weight": neurons, "mlp.up_proj.weight": neurons}
    return split(tensors, config, "mlp.gate_up_proj.weight", parts)


def in_halves(tensors: Tensors, config: ModelConfig, interleaved: bool = False) -> Tensors:
    """Rows of queries and keys in the order (i, i + Dh / 2) of the pairs that turn together.

    Args:
        tensors: the checkpoint's tensors.
        config: the model's; in all its layers the same dimensions turn, the first ones of a head.
        interleaved: whether pairs are (2 i, 2 i + 1) there, and not (i, i + half of what turns).
    """
    turning, width = sum(frequency > 0 for frequency in config.ropes[0].frequencies), config.head_dim
    rotated = 2 * turning
    if interleaved:
        first, second = list(range(0, rotated, 2)), list(range(1, rotated, 2))
    else:
        first, second = list(range(turning)), list(range(turning, rotated))
    rest = list(range(rotated, width))
    half = len(rest) // 2
    order = [*first, *rest[:half], *second, *rest[half:]]
    if order == list(range(width)):
        return tensors
    found = dict(tensors)
    for layer in range(config.num_layers):
        name = LayerNames(layer)
        for which, heads in (("q", config.num_heads), ("k", config.num_kv_heads)):
            for tensor in (name.projection(which), name.projection_bias(which), name.head_norm(which)):
                if tensor not in found:
                    continue
                source = found[tensor]
                count = source.shape[0] // width if source.shape else 0
                if count * width != (source.shape or (0,))[0] or count not in (1, heads):
                    raise CheckpointError(
                        f"{tensor} has shape {list(source.shape)}; config.json asks for {heads * width} rows"
                    )
                found[tensor] = RowsOf(tensor, source, head_rows(count, order), len(order))
    return found


def norms_plus_one(tensors: Tensors) -> Tensors:
    """Norm weights that a checkpoint stores less one."""
    return {
        name: Scaled(name, tensor, shift=1.0) if name.endswith("norm.weight") else tensor
        for name, tensor in tensors.items()
    }


def outputs_scaled(tensors: Tensors, config: ModelConfig, factor: float) -> Tensors:
    """What attention and feed-forward add to the residual, times `factor`."""
    found = dict(tensors)
    for layer in range(config.num_layers):
        name = LayerNames(layer)
        for tensor in (name.projection("o"), name.projection_bias("o"), name.down):
            if tensor in found and factor != 1.0:
                found[tensor] = Scaled(tensor, found[tensor], factor)
    return found


def logits_scaled(tensors: Tensors, factor: float) -> Tensors:
    """Logits times `factor`: the last norm's weight, as nothing but the head follows it."""
    found = dict(tensors)
    if FINAL_NORM in found and factor != 1.0:
        found[FINAL_NORM] = Scaled(FINAL_NORM, found[FINAL_NORM], factor)
    return found
