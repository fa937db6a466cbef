"""The types of what `_native` has for recurrent layers (`bindings_delta.cc`)."""

from typing import TypeAlias

from ondevice.kernels._native import Float32, Int32, Norm, Runner

DeltaSizes: TypeAlias = tuple[int, int, int, int]
"""Numbers of key and value heads, widths of a key and of a value."""
DeltaWeights: TypeAlias = tuple[Float32, Float32, Float32, Norm]
"""conv (taps, C); decay (value heads,), below zero; time_bias (value heads,); norm of a head's output."""

def gated_delta(
    runner: Runner,
    projected: Float32,
    inputs: Float32,
    sizes: DeltaSizes,
    weights: DeltaWeights,
    state: Float32,
    next_state: Float32,
    out: Float32,
) -> None:
    """The gated delta rule (arXiv 2412.06464) over T tokens, from `state` to `next_state`, other memory.

    With C channels, 2 * key heads * key width + value heads * value width:

    projected: (T, C + value heads * value width), channels before the convolution, then output gates.
    inputs: (T, 2 * value heads), what betas are made of, then what decays are made of.
    state: (value heads * key width * value width + (taps - 1) * C,): states, then inputs of the convolution.
    out: (T, value heads * value width).
    """

def gated_delta_ahead(
    runner: Runner,
    channels: Float32,
    inputs: Float32,
    parents: Int32,
    projected: Float32,
    sizes: DeltaSizes,
    weights: DeltaWeights,
    state: Float32,
    out: Float32,
) -> None:
    """`gated_delta` for a tree of T <= 64 tokens of which only the last n have outputs. Keeps no state.

    channels: (T, C), before the convolution. inputs: (T, 2 * value heads).
    parents: (T,), the token that each follows, -1 for the text before them; a parent comes before its child.
    projected: (n, C + value heads * value width), of which only the output gates are used.
    out: (n, value heads * value width).
    """

def replay_delta(
    runner: Runner,
    channels: Float32,
    inputs: Float32,
    sizes: DeltaSizes,
    weights: DeltaWeights,
    state: Float32,
    next_state: Float32,
) -> None:
    """`gated_delta` without outputs, of channels (T, C) and inputs (T, 2 * value heads)."""

def short_conv(
    runner: Runner, projected: Float32, conv: Float32, state: Float32, next_state: Float32, out: Float32
) -> None:
    """c * conv(b * x), each of C channels by itself, over T tokens, from `state` to `next_state`.

    projected: (T, 3 * C), b, c and x side by side; b * x takes the place of b.
    next_state: other memory than `state`.
    conv: (taps, C), oldest input first. state: ((taps - 1) * C,), the last products b * x. out: (T, C).
    """

def short_conv_ahead(
    runner: Runner,
    inputs: Float32,
    parents: Int32,
    projected: Float32,
    conv: Float32,
    state: Float32,
    out: Float32,
) -> None:
    """`short_conv` for a tree of T tokens of which only the last n have outputs. Keeps no state.

    inputs: (T, C), products b * x; those of the last n are written.
    parents: (T,), the token that each follows, -1 for the text before them; a parent comes before its child.
    projected: (n, 3 * C). out: (n, C).
    """

def sigmoid_gate(runner: Runner, gates: Float32, x: Float32) -> None:
    """x (T, n) *= sigmoid(gates), elementwise."""
