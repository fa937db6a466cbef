"""Steps that turn a family's tensors into those of `tensors.py`, by name, shape and order.

Each step returns a new mapping.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ondevice.converters.architectures.common import Tensors
from ondevice.converters.architectures.config_reader import SAME_REPOSITORY
from ondevice.converters.architectures.tensors import FINAL_NORM, LayerNames
from ondevice.converters.checkpoints.base import SourceTensor, StoredTensor
from ondevice.converters.checkpoints.views import Joined, RowsOf, Scaled, Transposed, head_rows
from ondevice.errors import CheckpointError, UnsupportedModelError
from ondevice.model_config import ModelConfig, RopeSpec

_LAYER = re.compile(r"(model\.layers\.\d+\.)(.+)")
_NUMBER = re.compile(r"model\.layers\.(\d+)\.")


def weights_and_biases(modules: Mapping[str, str]) -> dict[str, str]:
    """The names of each module's weight and bias, for `renamed`. modules: old name to new name."""
    return {f"{old}.{kind}": f"{new}.{kind}" for old, new in modules.items() for kind in ("weight", "bias")}


def renamed(tensors: Tensors, names: Mapping[str, str]) -> Tensors:
    """The tensors, with new names in every layer. names: old name to new name, both without
    `model.layers.N.`.
    """

    def new(name: str) -> str:
        match = _LAYER.fullmatch(name)
        return name if match is None else match[1] + names.get(match[2], match[2])

    return {new(name): tensor for name, tensor in tensors.items()}


def check_shape(tensor: SourceTensor, wanted: tuple[int, ...]) -> None:
    """Check a tensor's shape. Raises CheckpointError unless it is the one that config.json implies."""
    if tensor.shape != wanted:
        raise CheckpointError(
            f"{tensor.name} has shape {list(tensor.shape)}; config.json asks for {list(wanted)}; "
            f"{SAME_REPOSITORY}"
        )


def without_layers_ahead(tensors: Tensors, config: ModelConfig) -> Tensors:
    """The tensors without those of layers after the model's last one, which predict further tokens."""
    return {
        name: tensor
        for name, tensor in tensors.items()
        if (match := _NUMBER.match(name)) is None or int(match[1]) < config.num_layers
    }


def split(tensors: Tensors, config: ModelConfig, name: str, parts: Mapping[str, int]) -> Tensors:
    """The tensors, with each layer's fused tensor `name` split into parts. parts: the name and the number of
    rows of each, in order.

    Raises CheckpointError if the fused tensor has another number of rows.
    """
    adapted = dict(tensors)
    total = sum(parts.values())
    for layer in range(config.num_layers):
        fused = adapted.pop(f"model.layers.{layer}.{name}", None)
        if fused is None:
            continue
        if not fused.shape or fused.shape[0] != total:
            raise CheckpointError(
                f"{fused.name} has shape {list(fused.shape)}; config.json asks for {total} rows; "
                f"{SAME_REPOSITORY}"
            )
        first = 0
        for part, rows in parts.items():
            new = f"model.layers.{layer}.{part}"
            adapted[new] = RowsOf(new, fused, np.arange(first, first + rows))
            first += rows
    return adapted


def split_attention(tensors: Tensors, config: ModelConfig) -> Tensors:
    """The tensors, with the fused attention projection and its bias split into queries, keys and values, in
    this order.
    """
    rows = dict(zip("qkv", (config.query_size, config.kv_size, config.kv_size), strict=True))
    for kind in ("weight", "bias"):
        parts = {f"self_attn.{which}_proj.{kind}": count for which, count in rows.items()}
        tensors = split(tensors, config, f"self_attn.qkv_proj.{kind}", parts)
    return tensors


def split_gates(tensors: Tensors, config: ModelConfig) -> Tensors:
    """The tensors, with the fused projection of gates and ups split."""
    neurons = config.intermediate_size
    parts = {"mlp.gate_proj.weight": neurons, "mlp.up_proj.weight": neurons}
    return split(tensors, config, "mlp.gate_up_proj.weight", parts)


def in_halves(tensors: Tensors, config: ModelConfig, interleaved: bool = False) -> Tensors:
    """The tensors, with rows of queries and keys in rotate-half order, in which the pairs (i, i + Dh / 2) are
    rotated.

    Args:
        tensors: the checkpoint's tensors.
        config: the model's config. In each layer the first dimensions of a head are rotated.
        interleaved: whether the checkpoint's pairs are (2 i, 2 i + 1); otherwise they are (i, i + half the
            rotated dimensions).
    """
    orders = [_halves_order(rope, interleaved) for rope in config.ropes]
    adapted = dict(tensors)
    for layer, spec in enumerate(config.layers):
        name, order, sizes = LayerNames(layer), orders[spec.attention.rope], config.heads(spec.attention)
        width = sizes.width
        if order == list(range(width)):
            continue
        for which, heads in (("q", sizes.queries), ("k", sizes.keys)):
            norm, norm_bias = name.head_norm(which), name.head_norm_bias(which)
            for tensor in (name.projection(which), name.projection_bias(which), norm, norm_bias):
                if tensor not in adapted:
                    continue
                source = adapted[tensor]
                count = source.shape[0] // width if source.shape else 0
                if count * width != (source.shape or (0,))[0] or count not in (1, heads):
                    raise CheckpointError(
                        f"{tensor} has shape {list(source.shape)}; config.json asks for {heads * width} "
                        f"rows; {SAME_REPOSITORY}"
                    )
                adapted[tensor] = RowsOf(tensor, source, head_rows(count, order), len(order))
    return adapted


def _halves_order(rope: RopeSpec, interleaved: bool) -> list[int]:
    """The indices that put the dimensions of a checkpoint's heads in rotate-half order."""
    turning, width = sum(frequency > 0 for frequency in rope.frequencies), 2 * len(rope.frequencies)
    rotated = 2 * turning
    if interleaved:
        first, second = list(range(0, rotated, 2)), list(range(1, rotated, 2))
    else:
        first, second = list(range(turning)), list(range(turning, rotated))
    rest = list(range(rotated, width))
    half = len(rest) // 2
    return [*first, *rest[:half], *second, *rest[half:]]


def in_turning_halves(source: SourceTensor, name: str, heads: int, width: int, turning: int) -> SourceTensor:
    """The rows of `heads` heads with their last `turning` rows reordered.

    Each head has `width` rows. Pairs (2 i, 2 i + 1) become pairs (i, i + turning / 2). Raises CheckpointError
    for another number of rows.
    """
    if not source.shape or source.shape[0] != heads * width:
        raise CheckpointError(
            f"{source.name} has shape {list(source.shape)}; config.json asks for {heads * width} rows; "
            f"{SAME_REPOSITORY}"
        )
    still = width - turning
    order = [*range(still), *range(still, width, 2), *range(still + 1, width, 2)]
    return RowsOf(name, source, head_rows(heads, order), width)


def split_grouped(tensors: Tensors, config: ModelConfig, name: str) -> Tensors:
    """The tensors, with each layer's fused projection `name` split, in which each key-value head has its
    queries, key and value together.

    The projection's shape is [KVH, H / KVH + 2, Dh]. Raises CheckpointError if it has another number of rows.
    """
    heads, width = config.num_kv_heads, config.head_dim
    group = config.num_heads // heads
    rows = np.arange(config.qkv_size).reshape(heads, group + 2, width)
    picks = {"q": rows[:, :group], "k": rows[:, group], "v": rows[:, group + 1]}
    adapted = dict(tensors)
    for layer in range(config.num_layers):
        for kind in ("weight", "bias"):
            fused = adapted.pop(f"model.layers.{layer}.{name}.{kind}", None)
            if fused is None:
                continue
            if not fused.shape or fused.shape[0] != config.qkv_size:
                raise CheckpointError(
                    f"{fused.name} has shape {list(fused.shape)}; config.json asks for {config.qkv_size} "
                    f"rows; {SAME_REPOSITORY}"
                )
            for which, chosen in picks.items():
                new = f"model.layers.{layer}.self_attn.{which}_proj.{kind}"
                adapted[new] = RowsOf(new, fused, chosen.reshape(-1))
    return adapted


def one_norm_for_both(tensors: Tensors, config: ModelConfig) -> Tensors:
    """The tensors, in which attention and a parallel feed-forward each get a copy of the one norm that they
    share.

    Raises CheckpointError if the second block has a separate norm.
    """
    adapted = dict(tensors)
    for layer, spec in enumerate(config.layers):
        name = LayerNames(layer)
        for norm in (name.norm, name.norm_bias) if spec.parallel else ():
            second, shared = norm("feed_forward_norm"), norm("attention_norm")
            if second in adapted:
                raise CheckpointError(
                    f"{second} is there, but by config.json both blocks of a layer read {shared}; "
                    f"{SAME_REPOSITORY}"
                )
            if shared in adapted:
                adapted[second] = adapted[shared]
    return adapted


def norms_of_each_head(tensors: Tensors, config: ModelConfig) -> Tensors:
    """The tensors, with norms of queries and keys for each head, and their biases.

    A checkpoint has one norm for all heads (`q_layernorm.weight`), or one for each
    (`q_layernorm.norms.0.weight` and so on). Missing biases become 0.
    """
    adapted = dict(tensors)
    for layer in range(config.num_layers):
        name = LayerNames(layer)
        for which, heads in (("q", config.num_heads), ("k", config.num_kv_heads)):
            stem = f"model.layers.{layer}.self_attn.{which}_layernorm"
            for kind, new in (("weight", name.head_norm(which)), ("bias", name.head_norm_bias(which))):
                shared = adapted.pop(f"{stem}.{kind}", None)
                each = [adapted.pop(f"{stem}.norms.{head}.{kind}", None) for head in range(heads)]
                head_norms = [tensor for tensor in each if tensor is not None]
                if shared is not None and shared.shape == (config.head_dim,):
                    adapted[new] = Joined(new, (shared,) * heads)
                elif len(head_norms) == heads and all(
                    tensor.shape == (config.head_dim,) for tensor in head_norms
                ):
                    adapted[new] = Joined(new, tuple(head_norms))
            weight, bias = name.head_norm(which), name.head_norm_bias(which)
            if weight in adapted and bias not in adapted:
                adapted[bias] = Scaled(bias, adapted[weight], factor=0.0)
    return adapted


def under_model(tensors: Tensors, prefixes: Mapping[str, str]) -> Tensors:
    """The tensors under new names. prefixes: beginning of an old name to what replaces it."""
    named = {}
    for name, tensor in tensors.items():
        old = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
        named[prefixes.get(old, "") + name.removeprefix(old)] = tensor
    return named


def norms_shifted(tensors: Tensors, shift: float = 1.0) -> Tensors:
    """The tensors, with `shift` added to norm weights. Many checkpoints store these minus one."""
    return {
        name: Scaled(name, tensor, shift=shift) if name.endswith("norm.weight") else tensor
        for name, tensor in tensors.items()
    }


def outputs_scaled(tensors: Tensors, config: ModelConfig, factor: float) -> Tensors:
    """The tensors, with the outputs of attention and feed-forward multiplied by `factor`."""
    scaled = dict(tensors)
    for layer in range(config.num_layers):
        name, experts = LayerNames(layer), config.layers[layer].experts
        downs = [name.down, *(name.expert(e, "down") for e in range(experts.count if experts else 0))]
        for tensor in (name.projection("o"), name.projection_bias("o"), *downs):
            if tensor in scaled and factor != 1.0:
                scaled[tensor] = Scaled(tensor, scaled[tensor], factor)
    return scaled


def logits_scaled(tensors: Tensors, factor: float) -> Tensors:
    """The tensors, with the last norm's weight multiplied by `factor`, which multiplies the logits."""
    scaled = dict(tensors)
    if FINAL_NORM in scaled and factor != 1.0:
        scaled[FINAL_NORM] = Scaled(FINAL_NORM, scaled[FINAL_NORM], factor)
    return scaled


def written_by_mlx(tensors: Tensors, ending: str) -> bool:
    """Whether MLX wrote the folder: whether convolutions, whose names end in `ending`, have MLX's shape (C,
    taps, 1).

    Nothing else tells every folder that MLX has written from others.
    """
    shapes = [it.shape for name, it in tensors.items() if name.endswith(ending)]
    return any(len(shape) == 3 and shape[2] == 1 for shape in shapes)


def taps_first(name: str, conv: SourceTensor, channels: int, taps: int, by_mlx: bool = False) -> SourceTensor:
    """A causal convolution's weights as (taps, C), from (C, 1, taps), (C, taps, 1) or (C, taps).

    by_mlx: whether MLX wrote it, in the second form. GGUF files have the third.
    """
    flat = (channels, taps)
    if len(conv.shape) == 2:
        check_shape(conv, flat)
        return Transposed(name, conv)
    check_shape(conv, (*flat, 1) if by_mlx else (channels, 1, taps))
    if not isinstance(conv, StoredTensor):
        raise UnsupportedModelError(f"{conv.name} is of a format from which convolutions aren't read here")
    return Transposed(name, replace(conv, shape=flat))
