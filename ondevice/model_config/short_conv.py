"""A layer with a gated short convolution instead of attention, as in LFM2."""

from __future__ import annotations

from ondevice.model_config.checks import SIZE_LIMITS, check_integer
from ondevice.model_config.delta import MAX_TAPS
from ondevice.records import dataclass


@dataclass(frozen=True)
class ConvSpec:
    """y = c * conv(b * x) of three projections b, c and x, with a causal convolution of each channel.

    In bundles the projections are q, k and v. The state is the last products b * x that the convolution sees.

    Args:
        channels: width of each projection, and of y.
        taps: number of tokens that the convolution sees, including the current one.
    """

    channels: int
    taps: int

    def __post_init__(self) -> None:
        check_integer("a convolution's channels", self.channels, 1, SIZE_LIMITS["hidden_size"])
        check_integer("a convolution's taps", self.taps, 2, MAX_TAPS)

    @property
    def value_size(self) -> int:
        """Width of the output projection's input."""
        return self.channels

    @property
    def gate_floats(self) -> int:
        """0: a token that runs ahead has no stored inputs except its channels."""
        return 0

    @property
    def state_floats(self) -> int:
        """Floats of a state: (taps - 1, C), the last products b * x."""
        return (self.taps - 1) * self.channels

    @property
    def projections(self) -> dict[str, int]:
        """Rows of each projection: b, c and x."""
        return dict.fromkeys("qkv", self.channels)
