"""What a decoder-only transformer is: its sizes, and a `LayerSpec` for each of its layers.

A model is described by its blocks, not by its family: converters translate a family's keys into these, and
nothing below them knows a family's name. Legend: D model width, Dh head width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from ondevice.errors import UnsupportedModelError

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "fatrelu"]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
ZEROING: tuple[Activation, ...] = ("relu", "relu2", "fatrelu")
"""Activations that turn gates into exact zeros, so that their neurons add nothing."""
ZEROING_NAMES = f"{', '.join(ZEROING[:-1])} or {ZEROING[-1]}"
UpActivation = Literal["none", "relu"]
HeadNorm = Literal["none", "head", "projection", "layer"]
"""What is normed before rotary embedding: nothing; each head, or all heads as one vector, by its
root mean square; or each head by a LayerNorm with weights and biases of its own."""
NormKind = Literal["rms", "layer"]
NormPlaces = Literal["before", "after", "both"]
"""Where a block's norms stand: on its input, on its output before it joins the residual, or on both."""
MAX_FACTOR = 1e6
"""Largest multiplier and soft cap."""
MIN_FACTOR = 1e-6


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding (arXiv 2104.09864) of a head's dimension pairs (i, i + Dh / 2).

    frequencies: (Dh / 2,) angle of each pair in radians per position, scaled for long contexts already; each
        is a float32 value. A pair with frequency 0 isn't turned.
    magnitude: factor of the cosine and sine of the pairs that turn (YaRN, arXiv 2309.00071, section 3.4).
    """

    frequencies: tuple[float, ...]
    magnitude: float = 1.0

    def __post_init__(self) -> None:
        if not all(0.0 <= frequency <= 1.0 for frequency in self.frequencies):
            raise UnsupportedModelError("rotary frequencies must be from 0 to 1 radian per position")
        _check_factor("rope magnitude", self.magnitude)

    @property
    def turning(self) -> int:
        """Number of a head's dimensions that are turned."""
        return 2 * sum(frequency > 0 for frequency in self.frequencies)


@dataclass(frozen=True)
class NormSpec:
    """The norms of a model: of root mean square (arXiv 1910.07467) or LayerNorm (arXiv 1607.06450).

    bias: whether they add a bias after the weight.
    """

    kind: NormKind = "rms"
    eps: float = 1e-5
    bias: bool = False

    def __post_init__(self) -> None:
        _check_choice("norm kind", self.kind, get_args(NormKind))
        if not 0.0 < self.eps < 1.0:
            raise UnsupportedModelError(f"norm eps is {self.eps}; it must be above 0 and below 1")


@dataclass(frozen=True)
class AttentionSpec:
    """Grouped-query attention (arXiv 2305.13245) of one layer.

    Args:
        scale: factor of the scores, a float32 value. `score_scale` gives the usual one.
        rope: index into the model's `ropes`.
        window: number of tokens that a query sees, its own included; 0: all.
        soft_cap: if not 0, scores s become soft_cap * tanh(s / soft_cap).
        head_norm: the norms of queries and keys.
        bias, output_bias: whether the projections of queries, keys and values, and that of the output, have
            one.
    """

    scale: float
    rope: int = 0
    window: int = 0
    soft_cap: float = 0.0
    head_norm: HeadNorm = "none"
    bias: bool = False
    output_bias: bool = False

    def __post_init__(self) -> None:
        _check_factor("attention scale", self.scale)
        if self.soft_cap:
            _check_factor("attention soft_cap", self.soft_cap)
        _check_choice("head_norm", self.head_norm, get_args(HeadNorm))
        if self.window < 0:
            raise UnsupportedModelError(f"window is {self.window}; it must be 0 or more")

    @property
    def head_norm_bias(self) -> bool:
        """Whether the norms of queries and keys have biases."""
        return self.head_norm == "layer"


@dataclass(frozen=True)
class FeedForwardSpec:
    """Feed-forward of one layer: down(activation(gate) * up), or down(activation(gate)) if it isn't gated.

    The first is arXiv 2002.05202. A neuron's gate decides whether the neuron fires; in an ungated block it is
    what other descriptions call the up projection, or `fc1`.

    Args:
        activation: of the gates; `fatrelu` leaves gates above `threshold` as they are and zeros all others.
        gated: whether there is an up projection.
        threshold: of `fatrelu`, a float32 value; 0 for other activations.
        up_activation: of the up projection: relu gives dReLU (arXiv 2406.05955).
        bias: whether gates have a bias, one value for each neuron. Only without an up projection.
        output_bias: whether the output has one.
    """

    activation: Activation
    gated: bool = True
    threshold: float = 0.0
    up_activation: UpActivation = "none"
    bias: bool = False
    output_bias: bool = False

    def __post_init__(self) -> None:
        _check_choice("activation", self.activation, ACTIVATIONS)
        _check_choice("up_activation", self.up_activation, get_args(UpActivation))
        if not 0.0 <= self.threshold <= MAX_FACTOR:
            raise UnsupportedModelError(
                f"activation threshold is {self.threshold}; it must be from 0 to {MAX_FACTOR:g}"
            )
        if self.threshold and self.activation != "fatrelu":
            raise UnsupportedModelError(f"activation {self.activation!r} has no threshold; fatrelu has")
        if not self.gated and self.up_activation != "none":
            raise UnsupportedModelError("up_activation is of gated feed-forwards; this one is ungated")
        if self.gated and self.bias:
            raise UnsupportedModelError("gated feed-forwards whose gates have biases aren't supported")

    @property
    def zeros_gates(self) -> bool:
        """True if the activation zeroes gates at or below `threshold`, so that their neurons add nothing."""
        return self.activation in ZEROING

    @property
    def num_rows(self) -> int:
        """Rows of a neuron's record: gate, up if gated, and down."""
        return 3 if self.gated else 2


@dataclass(frozen=True)
class LayerSpec:
    """One layer: x += attention(norm(x)); x += feed_forward(norm(x)).

    parallel: both blocks read the layer's input, and their outputs join it together.
    """

    attention: AttentionSpec
    feed_forward: FeedForwardSpec
    norms: NormPlaces = "before"
    parallel: bool = False

    def __post_init__(self) -> None:
        _check_choice("norms", self.norms, get_args(NormPlaces))

    @property
    def norms_input(self) -> bool:
        """Whether each block has a norm on its input."""
        return self.norms in ("before", "both")

    @property
    def norms_output(self) -> bool:
        """Whether each block has a norm on its output."""
        return self.norms in ("after", "both")


@dataclass(frozen=True)
class ModelConfig:
    """Shape and arithmetic of a decoder-only transformer.

    Sizes are logical; storage pads quantised dimensions to multiples of a group.

    Args:
        architecture: the family's name, for people.
        hidden_size, num_heads, num_kv_heads, head_dim, intermediate_size, vocab_size: sizes of all layers.
        max_context: most tokens that the model was made for.
        norm: the form of all norms but those of heads, which share its eps.
        ropes: the rotary embeddings that layers refer to.
        layers: one description for each layer.
        embedding_multiplier: factor of the embedding, a float32 value.
        logit_soft_cap: if not 0, logits x become logit_soft_cap * tanh(x / logit_soft_cap).
        tie_embeddings: whether the head is the embedding table.
        learned_positions: whether the embedding has a learned vector added to it for each position, of which
            there are `max_context`.
        head_bias: whether the output head has a bias.
    """

    architecture: str
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_context: int
    norm: NormSpec
    ropes: tuple[RopeSpec, ...]
    layers: tuple[LayerSpec, ...]
    embedding_multiplier: float = 1.0
    logit_soft_cap: float = 0.0
    tie_embeddings: bool = False
    learned_positions: bool = False
    head_bias: bool = False

    def __post_init__(self) -> None:
        for name, limit in SIZE_LIMITS.items():
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= limit:
                raise UnsupportedModelError(f"{name} is {value!r}; it must be an integer from 1 to {limit}")
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModelError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise UnsupportedModelError(f"head_dim {self.head_dim} is odd; rotary embedding needs pairs")
        if not self.ropes:
            raise UnsupportedModelError(
                "a model needs at least one rope; one with frequencies of 0 turns nothing"
            )
        for rope in self.ropes:
            if len(rope.frequencies) != self.head_dim // 2:
                raise UnsupportedModelError(
                    f"a rope has {len(rope.frequencies)} frequencies for {self.head_dim // 2} pairs of a head"
                )
        for layer in self.layers:
            if not 0 <= layer.attention.rope < len(self.ropes):
                raise UnsupportedModelError(
                    f"a layer's rope is {layer.attention.rope}; the model has {len(self.ropes)}"
                )
        if len({layer.feed_forward for layer in self.layers}) > 1:
            raise UnsupportedModelError("layers have different feed-forwards; this release runs equal ones")
        _check_factor("embedding_multiplier", self.embedding_multiplier)
        if self.logit_soft_cap:
            _check_factor("logit_soft_cap", self.logit_soft_cap)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def activation(self) -> Activation:
        """The activation of every layer's feed-forward."""
        return self.feed_forward.activation

    @property
    def feed_forward(self) -> FeedForwardSpec:
        """The feed-forward of every layer."""
        return self.layers[0].feed_forward

    @property
    def zeros_gates(self) -> bool:
        """True if gates at or below a threshold become exact zeros, so that their neurons add nothing."""
        return self.feed_forward.zeros_gates

    def any_layer(self, holds: Callable[[LayerSpec], bool]) -> bool:
        """True if `holds` is true of a layer."""
        return any(map(holds, self.layers))

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key (or value) heads together."""
        return self.num_kv_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        """Rows of the fused query, key and value projection."""
        return self.query_size + 2 * self.kv_size

    def head_norm_sizes(self, layer: LayerSpec) -> tuple[int, int]:
        """Lengths of the norm weights of a layer's queries and keys; 0 without such norms."""
        match layer.attention.head_norm:
            case "none":
                return 0, 0
            case "head":
                return self.head_dim, self.head_dim
            case "projection" | "layer":
                return self.query_size, self.kv_size

    @property
    def norm_size(self) -> int:
        """Number of values of a norm over the model's width."""
        return self.hidden_size * (2 if self.norm.bias else 1)

    @property
    def vectors_size(self) -> int:
        """Number of values of all norms, biases and learned positions."""
        others = self.norm_size + self.positions_size + self.head_bias * self.vocab_size
        return sum(map(self.vector_size, self.layers)) + others

    @property
    def positions_size(self) -> int:
        """Number of values of learned positions."""
        return self.max_context * self.hidden_size if self.learned_positions else 0

    def vector_size(self, layer: LayerSpec) -> int:
        """Number of values of a layer's norms and biases."""
        norms = (layer.norms_input + layer.norms_output) * 2 * self.norm_size
        biases = layer.attention.bias * self.qkv_size + layer.attention.output_bias * self.hidden_size
        feed_forward = layer.feed_forward
        biases += feed_forward.bias * self.intermediate_size + feed_forward.output_bias * self.hidden_size
        head_norms = sum(self.head_norm_sizes(layer)) * (2 if layer.attention.head_norm_bias else 1)
        return norms + biases + head_norms


SIZE_LIMITS = {
    "hidden_size": 1 << 17,
    "num_layers": 1 << 10,
    "num_heads": 1 << 10,
    "num_kv_heads": 1 << 10,
    "head_dim": 1 << 10,
    "intermediate_size": 1 << 20,
    "vocab_size": 1 << 22,
    "max_context": 1 << 24,
}


def _check_factor(name: str, value: float) -> None:
    if not MIN_FACTOR <= value <= MAX_FACTOR:
        raise UnsupportedModelError(f"{name} is {value}; it must be from {MIN_FACTOR:g} to {MAX_FACTOR:g}")


def _check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UnsupportedModelError(f"{name} {value!r} is not one of {', '.join(allowed)}")
