"""The description of a layer's attention. Legend: D model width, Dh head width."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

from ondevice.errors import UnsupportedModelError
from ondevice.model_config.checks import SIZE_LIMITS, check_choice, check_factor, check_integer
from ondevice.model_config.latent import LatentSpec
from ondevice.records import dataclass

HeadNorm = Literal["none", "head", "projection", "layer"]
"""The norms of queries and keys before rotary embedding: none; RMS norms of each head (`head`), or of all
heads as one vector (`projection`); or LayerNorms with separate weights and biases for each head (`layer`)."""


@dataclass(frozen=True)
class AttentionSpec:
    """Grouped-query attention (arXiv 2305.13245) of one layer.

    Args:
        scale: factor of the scores, a float32 value. `score_scale` gives the usual one.
        rope: index into the model's `ropes`.
        window: number of tokens that a query sees, including itself; 0: all.
        soft_cap: if not 0, scores s become soft_cap * tanh(s / soft_cap).
        head_norm: the norms of queries and keys.
        bias, output_bias: whether the fused query, key and value projection, and the output projection, have
            a bias.
        value_norm: whether each head's values have an RMS norm without a weight. Only with head_norm `head`.
        sinks: whether each head has an attention sink (arXiv 2309.17453): a learned score in the softmax,
            whose weight goes to no value.
        keys_of: index of the earlier layer whose keys and values are read; None: the layer stores them.
        head_dim, num_kv_heads: width of a head and number of key (or value) heads; 0: the model's.
        latent: latent attention, with separate head sizes; None: keys and values are stored head by head.
        gated: whether attention's output is multiplied by the sigmoid of a projection of the layer's normed
            input.
        out_factor: factor of attention's output before its projection, a float32 value.
        value_dim: width of a value, if it is below a key's; 0: a key's.
    """

    scale: float
    rope: int = 0
    window: int = 0
    soft_cap: float = 0.0
    head_norm: HeadNorm = "none"
    bias: bool = False
    output_bias: bool = False
    value_norm: bool = False
    sinks: bool = False
    keys_of: int | None = None
    head_dim: int = 0
    num_kv_heads: int = 0
    latent: LatentSpec | None = None
    gated: bool = False
    out_factor: float = 1.0
    value_dim: int = 0

    def __post_init__(self) -> None:
        check_factor("attention scale", self.scale)
        check_factor("attention out_factor", self.out_factor)
        if self.latent is not None and (self.has_norms or self.keys_of is not None or self.sinks):
            raise UnsupportedModelError(
                "latent attention with norms of heads, shared keys or attention sinks isn't supported"
            )
        for name in ("head_dim", "num_kv_heads"):
            check_integer(f"a layer's {name}", getattr(self, name), 0, SIZE_LIMITS[name])
        check_integer("a layer's value_dim", self.value_dim, 0, SIZE_LIMITS["head_dim"])
        if self.value_dim and (self.latent is not None or self.value_norm):
            raise UnsupportedModelError(
                "value_dim beside latent attention, which has its own, or normed values isn't supported"
            )
        if self.head_norm != "head" and (self.value_norm or (self.keys_of is not None and self.has_norms)):
            raise UnsupportedModelError(
                f"head_norm is {self.head_norm!r}; layers whose values are normed need 'head', and those "
                "that share keys and values that or 'none'"
            )
        if self.soft_cap:
            check_factor("attention soft_cap", self.soft_cap)
        check_choice("head_norm", self.head_norm, get_args(HeadNorm))
        if self.window < 0:
            raise UnsupportedModelError(f"window is {self.window}; it must be 0 or more")

    @property
    def has_norms(self) -> bool:
        """Whether queries are normed, and keys if the layer stores them."""
        return self.head_norm != "none"

    @property
    def head_norm_bias(self) -> bool:
        """Whether the norms of queries and keys have biases."""
        return self.head_norm == "layer"


NO_ATTENTION = AttentionSpec(1.0)
"""The attention of a layer without attention."""


class HeadSizes(NamedTuple):
    """A layer's heads: `queries` query heads and `keys` key (or value) heads, each `width` wide.

    latent: if not 0, the number of a key's first dimensions that are the value (`LatentSpec`).
    values: width of a value, if it differs from a key's; else 0.
    """

    queries: int
    keys: int
    width: int
    latent: int = 0
    values: int = 0

    @property
    def value_width(self) -> int:
        """Width of a value."""
        return self.latent or self.values or self.width

    @property
    def stored_width(self) -> int:
        """Floats that one key head stores for a token: a key and a value, or a latent key that is both."""
        return self.width if self.latent else self.width + self.value_width

    @property
    def attending(self) -> int:
        """Floats of a token's row of queries, keys and values."""
        return self.queries * self.width + self.keys * self.stored_width
