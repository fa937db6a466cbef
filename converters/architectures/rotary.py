"""Reads rotary frequencies from a checkpoint's keys: base, scaling for long contexts, and rotated dimensions.

Frequencies are rounded to float32 as `transformers` rounds them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ondevice.converters.architectures.config_reader import ConfigReader, shown
from ondevice.errors import CheckpointError, UnsupportedModelError
from ondevice.model_config import SIZE_LIMITS, RopeSpec

ScalingKind = Literal["linear", "llama3", "yarn", "longrope"]


@dataclass(frozen=True)
class RopeScaling:
    """The scaling of rotary frequencies for long contexts.

    Kinds are position interpolation (`linear`, arXiv 2306.15595), by wavelength (`llama3`), by number of
    rotations (`yarn`, arXiv 2309.00071), and a separate divisor for each frequency (`longrope`, arXiv
    2402.13753).

    Args:
        kind: how frequencies are scaled.
        factor: by how much the context is longer.
        low_freq_factor, high_freq_factor: for `llama3`, numbers of rotations in the original context: below
            the first a frequency is divided by `factor`, above the second it is unchanged.
        original_max_context: tokens that the model was first trained for.
        beta_fast, beta_slow: for `yarn`, numbers of rotations: above the first a frequency is unchanged,
            below the second it is divided.
        truncate: for `yarn`, whether the range between the two is widened to complete pairs.
        divisors, long_divisors: for `longrope`, one for each rotated pair, in contexts up to the original one
            and in longer ones. Without long ones there are no longer contexts.
        magnitude: factor of cosine and sine.
    """

    kind: ScalingKind
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_context: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    divisors: tuple[float, ...] = ()
    long_divisors: tuple[float, ...] = ()
    magnitude: float = 1.0


MIN_TURNS, MAX_TURNS = 1e-6, 1e6
"""Limits of yarn's beta_slow and beta_fast, which are 1 and 32 nearly everywhere."""


def rope_spec(
    theta: float, head_dim: int, scaling: RopeScaling | None = None, rotated: int | None = None
) -> RopeSpec:
    """The rotary embedding with base `theta`. Raises CheckpointError for a base below 1.

    rotated: number of a head's dimensions that are rotated, an even number; None: all. The others have
    frequency 0.
    """
    if not 1.0 <= theta < 1e12:
        raise CheckpointError(f"config.json: rope_theta is {theta}; it must be from 1 to below 1e12")
    rotated = head_dim if rotated is None else rotated
    if not 0 < rotated <= head_dim or rotated % 2:
        raise UnsupportedModelError(
            f"config.json: {rotated} of a head's {head_dim} dimensions would turn; odd numbers can't"
        )
    frequencies = [1.0 / theta ** (i / rotated) for i in range(0, rotated, 2)]
    pairs = head_dim // 2
    if scaling is None:
        return RopeSpec(_rounded(frequencies, pairs))
    if scaling.kind == "longrope":
        return _longrope_spec(frequencies, pairs, scaling)
    scaled = _SCALED[scaling.kind]
    frequencies = [
        scaled(frequency, pair, theta, rotated, scaling) for pair, frequency in enumerate(frequencies)
    ]
    return RopeSpec(_rounded(frequencies, pairs), scaling.magnitude)


def _longrope_spec(frequencies: list[float], pairs: int, scaling: RopeScaling) -> RopeSpec:
    for name, divisors in (("short_factor", scaling.divisors), ("long_factor", scaling.long_divisors)):
        if len(divisors) != len(frequencies) and (divisors or name == "short_factor"):
            raise CheckpointError(
                f"config.json: {name} has {len(divisors)} values for {len(frequencies)} pairs"
            )
    short = _rounded([it / by for it, by in zip(frequencies, scaling.divisors, strict=True)], pairs)
    if not scaling.long_divisors:
        return RopeSpec(short, scaling.magnitude)
    long = _rounded([it / by for it, by in zip(frequencies, scaling.long_divisors, strict=True)], pairs)
    return RopeSpec(short, scaling.magnitude, long, scaling.original_max_context)


def _rounded(frequencies: list[float], pairs: int) -> tuple[float, ...]:
    """The frequencies as float32, filled up with 0 to a head's number of `pairs`, for those that aren't
    rotated.
    """
    still = [0.0] * (pairs - len(frequencies))
    return tuple(float(np.float32(frequency)) for frequency in (*frequencies, *still))


def no_rope(head_dim: int) -> RopeSpec:
    """A rotary embedding that rotates nothing."""
    return RopeSpec((0.0,) * (head_dim // 2))


def base_of(rope: RopeSpec) -> float:
    """The base of unscaled frequencies, an integer. Raises ValueError if the frequencies are scaled."""
    head_dim = 2 * len(rope.frequencies)
    base = float(round(rope.frequencies[1] ** (-head_dim / 2))) if head_dim > 2 else 10000.0
    if rope_spec(base, head_dim) != rope:
        raise ValueError("the rotary frequencies are scaled, or their base isn't a whole number")
    return base


def read_rope(
    reader: ConfigReader,
    head_dim: int,
    max_context: int,
    *,
    theta: float = 10000.0,
    rotated_share: float | None = None,
) -> RopeSpec:
    """The rotary embedding described by `rope_theta` and `rope_scaling`, or by the newer `rope_parameters`.

    Args:
        reader: reads `config.json`.
        head_dim: width of a head.
        max_context: the model's context in tokens.
        theta: the base if the config names none.
        rotated_share: share of a head's dimensions that are rotated if the config names none. None: this
            family always rotates all.
    """
    older, newer = reader.section("rope_scaling"), reader.section("rope_parameters")
    if older and newer and older != newer:
        raise CheckpointError("config.json: rope_scaling and rope_parameters contradict each other")
    where = "config.json: rope_parameters" if newer else "config.json: rope_scaling"
    theta = reader.number("rope_theta", theta)
    if rotated_share is None:
        reader.only("partial_rotary_factor", 1.0)
    else:
        rotated_share = reader.number("partial_rotary_factor", rotated_share)
    original = reader.integer("original_max_position_embeddings", max_context)
    outer_wins = reader.has("original_max_position_embeddings")
    rope = ConfigReader(newer or older or {}, where)
    return read_section(rope, head_dim, theta, original, max_context, outer_wins, rotated_share)


def read_score_magnitude(reader: ConfigReader) -> float:
    """The factor of a query and of a key that yarn's `mscale_all_dim` gives, for families that scale scores
    by it.

    `read_rope` reads the same section, and checks it.
    """
    section = reader.section("rope_parameters") or reader.section("rope_scaling") or {}
    rope = ConfigReader(section, "config.json: rope_scaling")
    if rope.text("rope_type", rope.text("type", "default")) == "default":
        return 1.0
    all_dims = rope.number("mscale_all_dim", 0.0)
    return _mscale(rope.number("factor"), all_dims) if all_dims > 0.0 else 1.0


def read_section(
    rope: ConfigReader,
    head_dim: int,
    theta: float,
    original: int,
    max_context: int,
    outer_wins: bool = False,
    rotated_share: float | None = None,
) -> RopeSpec:
    """The rotary embedding described by one object of rotary parameters.

    Args:
        rope: reader of the object.
        head_dim: width of a head.
        theta: the base if the object names none.
        original: context before scaling, in tokens, if the object names none.
        max_context: context after scaling.
        outer_wins: whether `original` counts even if the object names one.
        rotated_share: as in `read_rope`.
    """
    where = rope.where
    older_kind = rope.text("type", rope.text("rope_type", "default"))
    kind = rope.text("rope_type", older_kind)
    if kind != older_kind:
        raise CheckpointError(f"{where}: rope_type {shown(kind)} and type {shown(older_kind)} contradict")
    theta = rope.number("rope_theta", theta)
    if rotated_share is None:
        rope.only("partial_rotary_factor", 1.0)
        rotated = head_dim
    else:
        rotated = int(head_dim * rope.number("partial_rotary_factor", rotated_share))
    inner = rope.integer("original_max_position_embeddings", original)
    scaling = _read_scaling(rope, kind, original if outer_wins else inner, max_context)
    if scaling is not None:
        _check_scaling(scaling, where)
        if kind == "yarn" and theta == 1.0:
            raise CheckpointError(f"{where}: rope_theta is 1; yarn needs a base above 1")
    rope.close(frozenset(["factor"] if kind == "default" else []))
    return rope_spec(theta, head_dim, scaling, rotated)


def _read_scaling(rope: ConfigReader, kind: str, original: int, max_context: int) -> RopeScaling | None:
    """The scaling from a context of `original` tokens to one of `max_context`; None if there is none."""
    if original < 1:
        raise CheckpointError(
            f"{rope.where}: original_max_position_embeddings is {original}; it must be 1 or more"
        )
    if original > SIZE_LIMITS["max_context"]:
        raise CheckpointError(
            f"{rope.where}: original_max_position_embeddings is {shown(original)}; the most is "
            f"{SIZE_LIMITS['max_context']}"
        )
    match kind:
        case "default":
            return None
        case "dynamic":
            # The base grows with every token beyond the model's context, so no text goes beyond it here.
            rope.number("factor")
            return None
        case "linear":
            return RopeScaling("linear", rope.number("factor"))
        case "llama3":
            low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
            return RopeScaling("llama3", rope.number("factor"), low, high, original)
        case "yarn":
            return _yarn(rope, original)
        case "longrope" | "su":
            return _longrope(rope, original, max_context)
    raise UnsupportedModelError(
        f"{rope.where}: {shown(kind)} is not one of default, dynamic, linear, llama3, yarn, longrope"
    )


def _yarn(rope: ConfigReader, original: int) -> RopeScaling:
    factor = rope.number("factor")
    scale, all_dims = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
    if min(scale, all_dims) < 0.0:
        raise CheckpointError(
            f"{rope.where}: mscale is {scale}, and mscale_all_dim {all_dims}; the least is 0"
        )
    magnitude = _mscale(factor, 1.0)
    if scale and all_dims:
        magnitude = _mscale(factor, scale) / _mscale(factor, all_dims)
    return RopeScaling(
        "yarn",
        factor,
        original_max_context=original,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.boolean("truncate", True),
        magnitude=rope.number("attention_factor", magnitude),
    )


def _longrope(rope: ConfigReader, original: int, max_context: int) -> RopeScaling:
    long_divisors = tuple(rope.numbers("long_factor") or ())
    if original < max_context and not long_divisors:
        raise CheckpointError(f"{rope.where}: long_factor is missing or empty")
    factor = rope.number("factor", max_context / original)
    magnitude = 1.0
    if factor > 1.0 and original > 1:
        magnitude = math.sqrt(1.0 + math.log(factor) / math.log(original))
    return RopeScaling(
        "longrope",
        max(1.0, factor),
        original_max_context=original,
        divisors=tuple(rope.numbers("short_factor") or ()),
        long_divisors=long_divisors if original < max_context else (),
        magnitude=rope.number("attention_factor", magnitude),
    )


def _mscale(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * scale * math.log(factor) + 1.0


def _check_scaling(scaling: RopeScaling, where: str) -> None:
    if scaling.factor < 1.0 or not 0.0 < scaling.low_freq_factor < scaling.high_freq_factor:
        raise CheckpointError(
            f"{where}: factor must be 1 or more, and high_freq_factor above low_freq_factor above 0"
        )
    for name, divisors in (("short_factor", scaling.divisors), ("long_factor", scaling.long_divisors)):
        if divisors and min(divisors) < 1.0:
            raise CheckpointError(f"{where}: {name} has {min(divisors)}; its values must be 1 or more")
    if not MIN_TURNS <= scaling.beta_slow <= scaling.beta_fast <= MAX_TURNS:
        raise CheckpointError(
            f"{where}: beta_slow is {scaling.beta_slow}, and beta_fast {scaling.beta_fast}; they must be in "
            f"this order, from {MIN_TURNS:g} to {MAX_TURNS:g}"
        )


def _linear(frequency: float, pair: int, theta: float, rotated: int, scaling: RopeScaling) -> float:
    return frequency / scaling.factor


def _llama3(frequency: float, pair: int, theta: float, rotated: int, scaling: RopeScaling) -> float:
    """A frequency scaled as in Llama 3.1: divided if the wavelength is long."""
    wavelength = 2.0 * math.pi / frequency
    low_wavelength = scaling.original_max_context / scaling.low_freq_factor
    high_wavelength = scaling.original_max_context / scaling.high_freq_factor
    if wavelength > low_wavelength:
        return frequency / scaling.factor
    if wavelength < high_wavelength:
        return frequency
    smooth = (scaling.original_max_context / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    return (1.0 - smooth) * frequency / scaling.factor + smooth * frequency


def _yarn_scaled(frequency: float, pair: int, theta: float, rotated: int, scaling: RopeScaling) -> float:
    """A frequency scaled by yarn.

    It is between divided and unchanged, depending on how often the pair rotates in the original context.
    """

    def pair_with(rotations: float) -> float:
        """The fractional index of the pair that makes `rotations` rotations in the original context."""
        wavelengths = scaling.original_max_context / (rotations * 2.0 * math.pi)
        return rotated * math.log(wavelengths) / (2.0 * math.log(theta))

    low, high = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotated - 1)
    if low == high:
        high += 0.001
    ramp = min(1.0, max(0.0, (pair - low) / (high - low)))
    return frequency / scaling.factor * ramp + frequency * (1.0 - ramp)


_SCALED: dict[ScalingKind, Callable[[float, int, float, int, RopeScaling], float]] = {
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn_scaled,
}
