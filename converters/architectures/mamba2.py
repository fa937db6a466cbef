"""What families with Mamba-2 mixers share: their keys and their tensors.

A checkpoint has all projections of a mixer in one matrix: rows of the gates z, of x, of B and C, and of time
steps. Legend: C channels and taps of the convolution.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from ondevice.converters.architectures.adapting import check_shape, taps_first, written_by_mlx
from ondevice.converters.architectures.common import Sizes, Tensors, float32
from ondevice.converters.architectures.config_reader import (
    CONFIG_REMEDY,
    SAME_REPOSITORY,
    ConfigReader,
    shown,
)
from ondevice.converters.architectures.tensors import LayerNames
from ondevice.converters.checkpoints.base import SourceTensor
from ondevice.converters.checkpoints.views import Matrices, RowsOf, Scaled, Transposed
from ondevice.errors import CheckpointError, UnsupportedModelError
from ondevice.model_config import LayerSpec, Mamba2Spec, ModelConfig

VECTORS = {
    "A_log": "mamba2.decay_log",
    "D": "mamba2.skip",
    "dt_bias": "mamba2.time_bias",
    "norm.weight": "mamba2.norm.weight",
    "conv1d.bias": "mamba2.conv.bias",
}
CONVOLUTION = "mamba.conv1d.weight"
"""End of the name of a convolution's weights."""
LIMITS = "time_step_limit"
INFINITE = (math.inf, {"__float__": "Infinity"})
"""How older and newer releases of `transformers` write that time steps have no upper limit."""
KINDS = {"mamba": "linear_attention", "attention": "full_attention"}
"""Older names of kinds of layers."""


def read_time_limits(reader: ConfigReader) -> tuple[float, float | None]:
    """The smallest and the largest time step; None as the largest means no limit. Raises CheckpointError."""
    limits = reader.values_of(LIMITS)
    unlimited = len(limits) == 2 and limits[1] in INFINITE
    section = reader.with_value(LIMITS, [*limits[:1], 0.0] if unlimited else limits)
    if limits == [None]:
        section, unlimited = reader.with_value(LIMITS, [0.0, 0.0]), True
    numbers = section.numbers(LIMITS) or []
    if len(numbers) != 2:
        raise CheckpointError(
            f"config.json: {LIMITS} is {shown(limits)}; it must be two numbers, the least time step and the "
            f"largest; {CONFIG_REMEDY}"
        )
    return float32(numbers[0]), None if unlimited else float32(numbers[1])


def read_mixer(reader: ConfigReader, sizes: Sizes, width: int | None = None) -> Mamba2Spec:
    """A mixer from the keys of Granite 4 and Falcon-H1. Its norm comes after the gate, group by group.

    width: width of all heads together; None: `mamba_expand` times the model's width.

    Raises CheckpointError for heads that don't add up to it.
    """
    expanded = reader.integer("mamba_expand", 2) * sizes.hidden_size
    width = expanded if width is None else width
    heads = reader.integer("mamba_n_heads", 128)
    # Decides how a pass is divided, and no more.
    reader.integer("mamba_chunk_size", 256)
    reader.only("mamba_proj_bias", False)
    if reader.values_of("mamba_d_head") in (["auto"], [None]):
        reader.text("mamba_d_head", "auto")
        each = width // heads if heads > 0 else 0
    else:
        each = reader.integer("mamba_d_head")
    if heads * each != width:
        raise CheckpointError(
            f"config.json: mamba_n_heads is {heads}, of {each} dimensions each; together they must have "
            f"{width}; {CONFIG_REMEDY}"
        )
    least, most = read_time_limits(reader)
    groups = reader.integer("mamba_n_groups", 1)
    return Mamba2Spec(
        heads,
        each,
        groups,
        reader.integer("mamba_d_state", 256),
        reader.integer("mamba_d_conv", 4),
        conv_bias=reader.boolean("mamba_conv_bias", True),
        norm_groups=groups,
        least_time=least,
        most_time=most,
    )


def require_silu(activation: str, key: str) -> None:
    """Check an activation. Raises UnsupportedModelError unless it is SiLU, which convolutions and gates use
    here.
    """
    if activation != "silu":
        raise UnsupportedModelError(f"config.json: {key} is {activation}; mixers run with silu alone")


def mixer_tensors(
    tensors: Tensors, config: ModelConfig, factors: Mapping[str, float] | None = None
) -> Tensors:
    """The tensors, with those of mixers, `mamba.*`, renamed. Unknown ones keep their names.

    factors: factors of the convolution's inputs x, b and c, if there are any. They are multiplied into the
    convolution's weights.

    Raises CheckpointError for a projection or a convolution of another shape, and for a layer that has a
    mixer in place of attention, but also attention's output projection.
    """
    adapted, by_mlx = dict(tensors), written_by_mlx(tensors, CONVOLUTION)
    for layer, spec in enumerate(config.layers):
        if spec.mamba2 is not None:
            _take(adapted, LayerNames(layer), spec, config.hidden_size, factors, by_mlx)
    return adapted


def _take(
    tensors: dict[str, SourceTensor],
    name: LayerNames,
    spec: LayerSpec,
    hidden: int,
    factors: Mapping[str, float] | None,
    by_mlx: bool,
) -> None:
    """Rename a layer's mixer tensors in `tensors`, in place. by_mlx: as in `taps_first`."""
    mixer, prefix = spec.mamba2, f"model.layers.{name.layer}.mamba."
    assert mixer is not None
    for old, new in VECTORS.items():
        if (vector := tensors.pop(prefix + old, None)) is not None:
            tensors[name.weight(new)] = vector
    conv = name.weight("mamba2.conv")
    if (stored := tensors.pop(f"{prefix}conv1d.weight", None)) is not None:
        tensors[conv] = taps_first(conv, stored, mixer.channels, mixer.taps, by_mlx)
        if factors is not None:
            tensors[conv] = _scaled_channels(conv, tensors[conv], mixer, factors)
    alone = not spec.attends
    out = name.projection("o") if alone else name.weight("mamba2.out")
    if alone and out in tensors:
        raise CheckpointError(
            f"layer {name.layer} has a Mamba-2 mixer, and o_proj of attention; {SAME_REPOSITORY}"
        )
    if (stored := tensors.pop(f"{prefix}out_proj.weight", None)) is not None:
        tensors[out] = stored
    if (fused := tensors.pop(f"{prefix}in_proj.weight", None)) is None:
        return
    rows = _rows(mixer)
    check_shape(fused, (sum(map(len, rows.values())), hidden))
    steps = name.weight("mamba2.steps")
    tensors[steps] = RowsOf(steps, fused, rows["dt"])
    if alone:
        tensors |= {
            name.projection(which): RowsOf(name.projection(which), fused, rows[which]) for which in "xbcz"
        }
    else:
        joint = name.weight("mamba2.in")
        tensors[joint] = RowsOf(joint, fused, np.concatenate([rows[which] for which in "xbcz"]))


def _rows(mixer: Mamba2Spec) -> dict[str, NDArray[np.int64]]:
    """The rows of each projection in the fused matrix."""
    sizes = {
        "z": mixer.value_size,
        "x": mixer.value_size,
        "b": mixer.group_size,
        "c": mixer.group_size,
        "dt": mixer.heads,
    }
    edges = np.cumsum(list(sizes.values()))
    return dict(zip(sizes, np.split(np.arange(edges[-1]), edges[:-1]), strict=True))


def _scaled_channels(
    name: str, conv: SourceTensor, mixer: Mamba2Spec, factors: Mapping[str, float]
) -> SourceTensor:
    """The weights of a convolution, (taps, C), multiplied by the `factors` of its inputs."""
    edges = [mixer.value_size, mixer.value_size + mixer.group_size]
    by_channel = Transposed(name, conv)
    parts = tuple(
        Scaled(name, RowsOf(name, by_channel, channels), factors[which])
        for which, channels in zip("xbc", np.split(np.arange(mixer.channels), edges), strict=True)
    )
    return Transposed(name, Matrices(name, parts))
