"""The description of a feed-forward: the arithmetic between a token's gates and its down projection."""

from __future__ import annotations

from typing import Literal, get_args

from ondevice.errors import UnsupportedModelError
from ondevice.model_config.checks import MAX_FACTOR, SIZE_LIMITS, check_choice, check_factor, check_integer
from ondevice.records import dataclass

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "fatrelu", "clamped_swish"]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
ZEROING: tuple[Activation, ...] = ("relu", "relu2", "fatrelu")
"""Activations that turn gates into exact zeros, so that their neurons add nothing."""
ZEROING_NAMES = f"{', '.join(ZEROING[:-1])} or {ZEROING[-1]}"
UpActivation = Literal["none", "relu"]
CLAMP, SWISH_SLOPE = 7.0, 1.702
"""Default constants of `clamped_swish`."""
MAX_DEVIATIONS = 10.0
"""Largest distance of a statistical cutoff from the gates' mean, in standard deviations."""


@dataclass(frozen=True)
class FeedForwardSpec:
    """Feed-forward of one layer: down(activation(gate) * up), or down(activation(gate)) if it isn't gated.

    The gated form is that of arXiv 2002.05202. A neuron's gate decides whether the neuron fires; in an
    ungated block the gate is the projection elsewhere called up, or `fc1`.

    Args:
        activation: of the gates; `fatrelu` keeps gates above `threshold` and zeros all others.
            `clamped_swish` makes a gate g = min(g, clamp) into g * sigmoid(slope * g), and the up u into
            clip(u, -clamp, clamp) + 1.
        gated: whether there is an up projection.
        threshold: of `fatrelu`, a float32 value; 0 for other activations.
        up_activation: of the up projection: relu gives dReLU (arXiv 2406.05955).
        bias: whether gates have a bias. Only without an up projection.
        output_bias: whether the output has a bias.
        cutoff: if not None, gates g become max(0, g - m - cutoff * s), m the mean of the token's gates and s
            their standard deviation (statistical top-k, arXiv 2506.06644). A float32 value.
        clamp, slope: parameters of `clamped_swish`, float32 values.
        neurons: number of neurons, experts' included; None: the model's `intermediate_size`; 0: the layer has
            no feed-forward.
    """

    activation: Activation
    gated: bool = True
    threshold: float = 0.0
    up_activation: UpActivation = "none"
    bias: bool = False
    output_bias: bool = False
    cutoff: float | None = None
    clamp: float = CLAMP
    slope: float = SWISH_SLOPE
    neurons: int | None = None

    def __post_init__(self) -> None:
        check_choice("activation", self.activation, ACTIVATIONS)
        if self.neurons is not None:
            check_integer("a layer's neurons", self.neurons, 0, SIZE_LIMITS["intermediate_size"])
        if self.neurons == 0 and (self.bias or self.output_bias or self.cutoff is not None):
            raise UnsupportedModelError("a layer without a feed-forward has no biases of one and no cutoff")
        if self.cutoff is not None and not -MAX_DEVIATIONS <= self.cutoff <= MAX_DEVIATIONS:
            raise UnsupportedModelError(
                f"cutoff of gates is {self.cutoff}; it must be from {-MAX_DEVIATIONS:g} to {MAX_DEVIATIONS:g}"
            )
        if self.cutoff is not None and (self.bias or self.activation in ZEROING):
            raise UnsupportedModelError(
                f"a statistical cutoff of gates with biases, or before {self.activation!r}, isn't supported"
            )
        check_choice("up_activation", self.up_activation, get_args(UpActivation))
        if not 0.0 <= self.threshold <= MAX_FACTOR:
            raise UnsupportedModelError(
                f"activation threshold is {self.threshold}; it must be from 0 to {MAX_FACTOR:g}"
            )
        if self.threshold and self.activation != "fatrelu":
            raise UnsupportedModelError(f"activation {self.activation!r} has no threshold; fatrelu has")
        check_factor("clamp", self.clamp)
        check_factor("slope", self.slope)
        if self.activation != "clamped_swish" and (self.clamp, self.slope) != (CLAMP, SWISH_SLOPE):
            raise UnsupportedModelError(
                f"activation {self.activation!r} has no clamp and no slope; clamped_swish has"
            )
        if self.activation == "clamped_swish" and self.up_activation != "none":
            raise UnsupportedModelError("clamped_swish has its own form of ups; up_activation isn't for it")
        if not self.gated and self.up_activation != "none":
            raise UnsupportedModelError("up_activation is of gated feed-forwards; this one is ungated")
        if self.gated and self.bias:
            raise UnsupportedModelError("gated feed-forwards whose gates have biases aren't supported")

    @property
    def zeros_gates(self) -> bool:
        """Whether the activation zeroes gates at or below `threshold`, so that their neurons add nothing."""
        return self.activation in ZEROING

    @property
    def num_rows(self) -> int:
        """Rows of a neuron's record: gate, up if gated, and down."""
        return 3 if self.gated else 2
