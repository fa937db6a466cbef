"""The recurrent blocks of layers: the gated delta rule, short convolutions and Mamba-2 mixers.

Legend: C channels and taps of the causal convolution. Of a delta rule: HK key heads, HV value heads, K and V
their widths. Of a mixer: H heads, P width of a head, G groups, N width of a state.
"""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

from ondevice.errors import UnsupportedModelError
from ondevice.model_config.checks import SIZE_LIMITS, check_choice, check_factor, check_integer
from ondevice.records import dataclass

MAX_TAPS = 16
"""Most taps of a short convolution."""
MAX_TIME = 1e6
"""Largest limit of a time step."""
MixerNorm = Literal["none", "before", "after"]
"""The place of the norm of a mixer's output: none, before the gate multiplies it, or after."""


@dataclass(frozen=True)
class DeltaSpec:
    """The gated delta rule instead of attention (Gated DeltaNet, arXiv 2412.06464).

    Queries, keys and values go through a causal convolution of each channel and SiLU. Queries and keys are
    normalised to length 1, queries divided by sqrt(K). Each token updates a state S (K, V) of each value
    head:

        S = decay * S;  S += k (beta * (v - k S));  out = q S

    with beta = sigmoid(b) and decay = exp(-exp(A) * softplus(a + t)) of two projections b and a. The output
    is norm(out) * silu(z), z a fourth projection.

    Args:
        key_heads, value_heads: numbers of heads; neighbouring value heads share a key head.
        key_width, value_width: widths of a key (and a query) and of a value.
        taps: number of tokens that the convolution sees, including the current one.
    """

    key_heads: int
    value_heads: int
    key_width: int
    value_width: int
    taps: int = 4

    def __post_init__(self) -> None:
        for name in ("key_heads", "value_heads"):
            check_integer(f"a layer's {name}", getattr(self, name), 1, SIZE_LIMITS["num_heads"])
        for name in ("key_width", "value_width"):
            check_integer(f"a layer's {name}", getattr(self, name), 1, SIZE_LIMITS["head_dim"])
        check_integer("a convolution's taps", self.taps, 2, MAX_TAPS)
        if self.value_heads % self.key_heads:
            raise UnsupportedModelError(
                f"value_heads is {self.value_heads}; it must be a multiple of key_heads, {self.key_heads}"
            )

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """The sizes (HK, HV, K, V)."""
        return self.key_heads, self.value_heads, self.key_width, self.value_width

    @property
    def key_size(self) -> int:
        """Width of all keys together."""
        return self.key_heads * self.key_width

    @property
    def value_size(self) -> int:
        """Width of all values together."""
        return self.value_heads * self.value_width

    @property
    def channels(self) -> int:
        """C: width of the convolution, over queries, keys and values."""
        return 2 * self.key_size + self.value_size

    @property
    def gate_floats(self) -> int:
        """Floats that a token needs for the inputs of betas and decays."""
        return 2 * self.value_heads

    @property
    def projections(self) -> dict[str, int]:
        """Rows of each projection; z are the output gates."""
        return {"q": self.key_size, "k": self.key_size, "v": self.value_size, "z": self.value_size}

    @property
    def token_floats(self) -> int:
        """Floats of a thread's scratch memory for a token: those of one key head and its value heads."""
        return 2 * self.key_width + self.value_heads // self.key_heads * (self.value_width + 2)

    @property
    def state_floats(self) -> int:
        """Floats of a state: (HV, K, V), followed by the last inputs of the convolution, (taps - 1, C)."""
        return self.value_size * self.key_width + (self.taps - 1) * self.channels


@dataclass(frozen=True)
class ConvSpec:
    """A gated short convolution instead of attention, as in LFM2.

    y = c * conv(b * x) of three projections b, c and x, with a causal convolution of each channel.

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
        """0, since a token that runs ahead has no stored inputs except its channels."""
        return 0

    @property
    def state_floats(self) -> int:
        """Floats of a state, which is the last products b * x: (taps - 1, C)."""
        return (self.taps - 1) * self.channels

    @property
    def projections(self) -> dict[str, int]:
        """Rows of each projection: b, c and x."""
        return dict.fromkeys("qkv", self.channels)


@dataclass(frozen=True)
class Mamba2Spec:
    """A Mamba-2 mixer (arXiv 2405.21060), instead of attention or parallel to it.

    Inputs x, and B and C of each group, go through a causal convolution of each channel and SiLU. Each
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
        """Floats that a token needs for the inputs of time steps."""
        return self.heads

    @property
    def projections(self) -> dict[str, int]:
        """Rows of each projection: x, B and C, the convolution's inputs, and the gates z."""
        return {"x": self.value_size, "b": self.group_size, "c": self.group_size, "z": self.value_size}

    @property
    def token_floats(self) -> int:
        """Floats of a thread's scratch memory for a token: those of one head and its group."""
        return self.head_width + 2 * self.state_width + 2

    @property
    def state_floats(self) -> int:
        """Floats of a state: (H, N, P), then (taps - 1, C), the convolution's last inputs."""
        return self.value_size * self.state_width + (self.taps - 1) * self.channels


RecurrentSpec: TypeAlias = DeltaSpec | ConvSpec | Mamba2Spec
"""A layer's recurrent block."""
