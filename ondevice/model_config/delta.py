"""A layer with the gated delta rule instead of attention (Gated DeltaNet, arXiv 2412.06464).

Legend: HK key heads, HV value heads, K and V their widths, C channels, taps of the convolution.
"""

from __future__ import annotations

from ondevice.errors import UnsupportedModelError
from ondevice.model_config.checks import SIZE_LIMITS, check_integer
from ondevice.records import dataclass

MAX_TAPS = 16
"""Most taps of a short convolution."""


@dataclass(frozen=True)
class DeltaSpec:
    """Queries, keys and values go through a causal convolution of each channel and SiLU. Queries and keys are
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
        """(HK, HV, K, V)."""
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
        """Floats of a token's inputs of betas and decays."""
        return 2 * self.value_heads

    @property
    def projections(self) -> dict[str, int]:
        """Rows of each projection; z are the output gates."""
        return {"q": self.key_size, "k": self.key_size, "v": self.value_size, "z": self.value_size}

    @property
    def token_floats(self) -> int:
        """Floats of a token in a thread's scratch memory: one key head and its value heads."""
        return 2 * self.key_width + self.value_heads // self.key_heads * (self.value_width + 2)

    @property
    def state_floats(self) -> int:
        """Floats of a state: (HV, K, V), then (taps - 1, C), the convolution's last inputs."""
        return self.value_size * self.key_width + (self.taps - 1) * self.channels
