"""The types of what `_native` has for Mamba-2 mixers (`bindings_mamba2.cc`)."""

from typing import TypeAlias

from ondevice.kernels._native import Float32, Int32, Norm, Runner

MixerSizes: TypeAlias = tuple[int, int, int, int, float, float, float, float, float, int, bool]
"""Groups, heads, state width, head width; factors of time steps, of gates and of the output; least and most
time step; parts of the output that are normed each by itself, and whether before the gate.
"""
MixerWeights: TypeAlias = tuple[Float32, Float32 | None, Float32, Float32, Float32, Norm | None]
"""conv (taps, C); conv_bias (C,); decay (H,), below zero; time_bias and skip (H,); norm of I values."""

def mamba2(
    runner: Runner,
    projected: Float32,
    inputs: Float32,
    sizes: MixerSizes,
    weights: MixerWeights,
    state: Float32,
    next_state: Float32,
    out: Float32,
) -> None:
    """A Mamba-2 mixer (arXiv 2405.21060) over T tokens, from `state` to `next_state`, other memory.

    With H heads, I = H * head width and C channels, I + 2 * groups * state width:

    projected: (T, C + I), x, B and C before the convolution, then gates.
    inputs: (T, H), what time steps are made of.
    state: (H * state width * head width + (taps - 1) * C,): states, then inputs of the convolution.
    out: (T, I).
    """

def mamba2_ahead(
    runner: Runner,
    channels: Float32,
    inputs: Float32,
    parents: Int32,
    projected: Float32,
    sizes: MixerSizes,
    weights: MixerWeights,
    state: Float32,
    out: Float32,
) -> None:
    """`mamba2` for a tree of T <= 64 tokens of which only the last n have outputs. Keeps no state.

    channels: (T, C), before the convolution. inputs: (T, H).
    parents: (T,), the token that each follows, -1 for the text before them; a parent comes before its child.
    projected: (n, C + I), of which only the gates are used. out: (n, I).
    """

def replay_mamba2(
    runner: Runner,
    channels: Float32,
    inputs: Float32,
    sizes: MixerSizes,
    weights: MixerWeights,
    state: Float32,
    next_state: Float32,
) -> None:
    """`mamba2` without outputs, of channels (T, C) and inputs (T, H)."""
