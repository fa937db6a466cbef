"""A layer with a Mamba-2 mixer (arXiv 2405.21060), instead of attention or parallel to it.

Legend: H heads, P width of a head, G groups, N width of a state, C channels, taps of the convolution.
"""

from __future__ import annotations

from typing import Literal, get_args

from ondevice.errors import UnsupportedModelError
from ondevice.model_config.checks import SIZE_LIMITS, check_choice, check_factor, check_integer
from ondevice.model_config.delta import MAX_TAPS
from ondevice.records import dataclass

MixerNorm = Literal["none", "before", "after"]
"""The place of the norm of a mixer's output: none, before the gate multiplies it, or after."""
MAX_TIME = 1e6
"""Largest limit of a time step."""


@dataclass(frozen=True)
class Mamba2Spec:
    """Inputs x, and B and C of each group, go through a causal convolution of each channel and SiLU. Each
    token updates a state S (N, P) of each head by its time step dt:

        dt = clip(softplus(time_factor * d + time_bias), least_time, most_time)
        S = exp(-exp(A) * dt) * S + B (dt * x)^T;  y = C S + skip * x

    with d a projection, and A, time_bias and skip constants of each head. The output is
    y * silu(gate_factor * z) * out_factor, z a projection, with an RMS norm before or after the gate.

    Args:
        heads, head_width: H and P.
        groups: G; neighbouring heads share their group's B and C.
        state_width: N.
        taps: number of tokens that the convolution sees, including the current one.
        conv_bias: whether each channel of the convolution has a bias.
        norm: place of the norm; its eps is the model's.
        norm_groups: number of equal parts of the output that are normed separately.
        least_time, most_time: limits of time steps, float32 values; most_time None: no limit.
        time_factor, gate_factor, out_factor: float32 values.
    """

    heads: int
    head_width: int
    groups: int
    state_width: int
    taps: int = 4
    conv_bias: bool = False
    norm: MixerNorm = "after"
    norm_groups: int = 1
    least_time: float = 0.0
    most_time: float | None = None
    time_factor: float = 1.0
    gate_factor: float = 1.0
    out_factor: float = 1.0

    def __post_init__(self) -> None:
        for name in ("heads", "groups"):
            check_integer(f"a mixer's {name}", getattr(self, name), 1, SIZE_LIMITS["num_heads"])
        for name in ("head_width", "state_width"):
            check_integer(f"a mixer's {name}", getattr(self, name), 1, SIZE_LIMITS["head_dim"])
        check_integer("a convolution's taps", self.taps, 2, MAX_TAPS)
        check_choice("a mixer's norm", self.norm, get_args(MixerNorm))
        check_integer("a mixer's norm_groups", self.norm_groups, 1, self.value_size)
        for name in ("time_factor", "gate_factor", "out_factor"):
            check_factor(f"a mixer's {name}", getattr(self, name))
        if self.heads % self.groups:
            raise UnsupportedModelError(
                f"a mixer's heads are {self.heads}; they must be a multiple of its groups, {self.groups}"
            )
        if self.value_size % self.norm_groups or (self.norm == "none" and self.norm_groups > 1):
            raise UnsupportedModelError(
                f"a mixer's norm_groups is {self.norm_groups}; it must divide {self.value_size}, and be 1 "
                "without a norm"
            )
        max_time = MAX_TIME if self.most_time is None else self.most_time
        if not 0.0 <= self.least_time <= max_time <= MAX_TIME:
            raise UnsupportedModelError(
                f"a mixer's time steps are from {self.least_time} to {self.most_time}; limits are from 0 to "
                f"{MAX_TIME:g}, the first not above the second"
            )

    @property
    def value_size(self) -> int:
        """Width of the output projection's input, H * P."""
        return self.heads * self.head_width

    @property
    def group_size(self) -> int:
        """Width of B, or C, for all groups."""
        return self.groups * self.state_width

    @property
    def channels(self) -> int:
        """C: width of the convolution, over x, B and C."""
        return self.value_size + 2 * self.group_size

    @property
    def gate_floats(self) -> int:
        """Floats of a token's inputs of time steps."""
        return self.heads

    @property
    def projections(self) -> dict[str, int]:
        """Rows of each projection: x, B and C, the convolution's inputs, and the gates z."""
        return {"x": self.value_size, "b": self.group_size, "c": self.group_size, "z": self.value_size}

    @property
    def token_floats(self) -> int:
        """Floats of a token in a thread's scratch memory: one head and its group."""
        return self.head_width + 2 * self.state_width + 2

    @property
    def state_floats(self) -> int:
        """Floats of a state: (H, N, P), then (taps - 1, C), the convolution's last inputs."""
        return self.value_size * self.state_width + (self.taps - 1) * self.channels
