"""A layer with a Mamba-2 mixer (arXiv 2405.21060), in attention's place or beside it.

Legend: H heads, P width of a head, G groups, N width of a state, C channels, taps of the convolution.
"""

from __future__ import annotations

from typing import Literal, get_args

from ondevice.errors import UnsupportedModelError
from ondevice.model_config.checks import SIZE_LIMITS, check_choice, check_factor, check_integer
from ondevice.model_config.delta import MAX_TAPS
from ondevice.records import dataclass

MixerNorm = Literal["none", "before", "after"]
"""Where the norm of a mixer's output stands: nowhere, before the gate multiplies it, or behind that."""
MAX_TIME = 1e6
"""Largest limit of a time step."""


@dataclass(frozen=True)
class Mamba2Spec:
    """Inputs x, and B and C of each group, go through a causal convolution of each channel and SiLU. Each
    head has a state S (N, P), which tokens change by their time step dt:

        dt = clip(softplus(time_factor * d + time_bias), least_time, most_time)
        S = exp(-exp(A) * dt) * S + B (dt * x)^T;  y = C S + skip * x

    with d a projection, and A, time_bias and skip a number of each head. What leaves is y * silu(gate_factor
    * z) * out_factor, z a projection beside those of x, B and C, with an RMS norm before or behind the gate.

    Args:
        heads, head_width: H and P.
        groups: G; neighbouring heads share their group's B and C.
        state_width: N.
        taps: tokens that the convolution sees, its own included.
        conv_bias: whether the convolution has a bias of each channel.
        norm: where a norm stands; its eps is the model's.
        norm_groups: parts of the output that are normed each by itself, of one width.
        least_time, most_time: limits of time steps, float32 values; most_time None: there is none.
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
        most = MAX_TIME if self.most_time is None else self.most_time
        if not 0.0 <= self.least_time <= most <= MAX_TIME:
            raise UnsupportedModelError(
                f"a mixer's time steps are from {self.least_time} to {self.most_time}; limits are from 0 to "
                f"{MAX_TIME:g}, the first not above the second"
            )

    @property
    def value_size(self) -> int:
        """Width of what the output projection reads, H * P."""
        return self.heads * self.head_width

    @property
    def group_size(self) -> int:
        """Width of B, or C, of all groups."""
        return self.groups * self.state_width

    @property
    def channels(self) -> int:
        """C: what the convolution runs over, x, B and C."""
        return self.value_size + 2 * self.group_size

    @property
    def gate_floats(self) -> int:
        """Values of a token that time steps are made of."""
        return self.heads

    @property
    def projections(self) -> dict[str, int]:
        """Rows of each projection: x, B and C, which the convolution runs over, and the gates z."""
        return {"x": self.value_size, "b": self.group_size, "c": self.group_size, "z": self.value_size}

    @property
    def token_floats(self) -> int:
        """Values of a token that a thread has side by side: of one head and its group."""
        return self.head_width + 2 * self.state_width + 2

    @property
    def state_floats(self) -> int:
        """Values of a state: (H, N, P), then (taps - 1, C), the convolution's last inputs."""
        return self.value_size * self.state_width + (self.taps - 1) * self.channels
