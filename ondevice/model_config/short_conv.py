"""A layer with a gated short convolution in attention's place, as LFM2 has them."""

from __future__ import annotations

from ondevice.model_config.checks import SIZE_LIMITS, check_integer
from ondevice.model_config.delta import MAX_TAPS
from ondevice.records import dataclass


@dataclass(frozen=True)
class ConvSpec:
    """y = c * conv(b * x) of three projections b, c and x: a causal convolution of each channel by itself.

    In bundles the projections are q, k and v. The state is what the convolution still sees of products b * x.

    Args:
        channels: width of each projection, and of y.
        taps: tokens that the convolution sees, its own included.
    """

    channels: int
    taps: int

    def __post_init__(self) -> None:
        check_integer("a convolution's channels", self.channels, 1, SIZE_LIMITS["hidden_size"])
        check_integer("a convolution's taps", self.taps, 2, MAX_TAPS)

    @property
    def value_size(self) -> int:
        """Width of what the output projection reads."""
        return self.channels

    @property
    def gate_floats(self) -> int:
        """Values that a token that runs ahead keeps beside its channels: none."""
        return 0

    @property
    def state_floats(self) -> int:
        """Values of a state: (taps - 1, C), the last products b * x."""
        return (self.taps - 1) * self.channels

    @property
    def projections(self) -> dict[str, int]:
        """Rows of each projection: b, c and x."""
        return dict.fromkeys("qkv", self.channels)
