"""The description of a decoder-only transformer: its sizes, and a `LayerSpec` for each of its layers.

A model is described by its blocks, not by its family: only converters know families. Legend: D model width,
Dh head width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Literal, get_args

from ondevice.errors import UnsupportedModelError
from ondevice.model_config.attention import NO_ATTENTION, AttentionSpec, HeadSizes
from ondevice.model_config.checks import SIZE_LIMITS, check_choice, check_factor, check_integer
from ondevice.model_config.experts import ExpertsSpec
from ondevice.model_config.feed_forward import Activation, FeedForwardSpec
from ondevice.model_config.part import FULL_MODEL, ModelPart
from ondevice.model_config.recurrent import ConvSpec, DeltaSpec, Mamba2Spec, RecurrentSpec
from ondevice.model_config.rope import RopeSpec
from ondevice.records import dataclass

NormKind = Literal["rms", "layer"]
NormPlaces = Literal["before", "after", "both", "residual"]
"""The norms of a block: of its input, of its output, of both, or of the residual after its output was added
("post-norm", as in arXiv 1706.03762)."""
MAX_COPIES = 16
"""Largest number of residual streams."""


@dataclass(frozen=True)
class NormSpec:
    """The norms of a model: RMS norms (arXiv 1910.07467) or LayerNorms (arXiv 1607.06450).

    bias: whether they have a bias.
    """

    kind: NormKind = "rms"
    eps: float = 1e-5
    bias: bool = False

    def __post_init__(self) -> None:
        check_choice("norm kind", self.kind, get_args(NormKind))
        if not 0.0 < self.eps < 1.0:
            raise UnsupportedModelError(f"norm eps is {self.eps}; it must be above 0 and below 1")


@dataclass(frozen=True)
class LayerSpec:
    """One layer: x += attention(norm(x)); x += feed_forward(norm(x)).

    parallel: both blocks read the layer's input, and both outputs are added to it.
    laurel_rank: if not 0, the rank of a block parallel to attention (LAuReL, arXiv 2411.07501): attention's
        result x becomes (x + n + norm(up @ down @ n)) / sqrt(2) for the normed input n.
    scaled: whether the layer's output is multiplied by a scalar.
    experts: the layer's experts, which are among its neurons and share their arithmetic, or None.
    delta: the gated delta rule instead of attention; `attention` is then `NO_ATTENTION`.
    conv: a short convolution instead of attention.
    mamba2: a Mamba-2 mixer instead of attention, or parallel to it, with one norm for both.

    A layer of 0 neurons has no feed-forward: x += attention(norm(x)).
    """

    attention: AttentionSpec
    feed_forward: FeedForwardSpec
    norms: NormPlaces = "before"
    parallel: bool = False
    laurel_rank: int = 0
    scaled: bool = False
    experts: ExpertsSpec | None = None
    delta: DeltaSpec | None = None
    conv: ConvSpec | None = None
    mamba2: Mamba2Spec | None = None

    def __post_init__(self) -> None:
        check_choice("norms", self.norms, get_args(NormPlaces))
        if not 0 <= self.laurel_rank <= SIZE_LIMITS["hidden_size"]:
            raise UnsupportedModelError(
                f"laurel_rank is {self.laurel_rank}; it must be from 0 to {SIZE_LIMITS['hidden_size']}"
            )
        if self.laurel_rank and (self.parallel or not self.norms_input):
            raise UnsupportedModelError("a low-rank block beside attention needs a norm before that")
        self._check_recurrent()
        if not self.has_feed_forward and (self.parallel or self.experts is not None):
            raise UnsupportedModelError(
                "a layer without a feed-forward has no experts and no parallel blocks"
            )
        if (self.recurrent is not None or self.attention.gated) and not self.norms_input:
            raise UnsupportedModelError("recurrent layers and gated attention need a norm before them")
        if self.parallel and self.norms == "residual":
            raise UnsupportedModelError("blocks side by side with norms of the residual aren't supported")
        spec = self.feed_forward
        if self.experts is not None and (spec.bias or spec.output_bias or spec.cutoff is not None):
            raise UnsupportedModelError("experts with biases or with cutoffs of gates aren't supported")

    def _check_recurrent(self) -> None:
        """Check the recurrent blocks. Raises UnsupportedModelError if they can't be combined."""
        states = [it for it in (self.delta, self.conv, self.mamba2) if it is not None]
        if not states:
            return
        attention = self.attention if self.mamba2 is not None else NO_ATTENTION
        if len(states) > 1 or self.attention != attention or self.parallel or self.laurel_rank:
            raise UnsupportedModelError(
                "a layer with the delta rule, a short convolution or a Mamba-2 mixer has one of the three, "
                "no attention beside the first two, no low-rank block and no parallel blocks"
            )
        gated_or_latent = self.attends and (attention.gated or attention.latent is not None)
        if gated_or_latent or (self.attends and self.norms != "before"):
            raise UnsupportedModelError(
                "attention beside a Mamba-2 mixer is neither gated nor latent, and has a norm before it alone"
            )

    @property
    def recurrent(self) -> RecurrentSpec | None:
        """The recurrent block, in place of attention or parallel to it; None if there is only attention."""
        return self.delta or self.conv or self.mamba2

    @property
    def attends(self) -> bool:
        """Whether there is attention, with or without a parallel mixer."""
        return self.recurrent is None or self.attention != NO_ATTENTION

    @property
    def parallel_mixer(self) -> Mamba2Spec | None:
        """The mixer parallel to attention, or None."""
        return self.mamba2 if self.attends else None

    @property
    def has_feed_forward(self) -> bool:
        """Whether there are neurons."""
        return self.feed_forward.neurons != 0

    @property
    def norms_input(self) -> bool:
        """Whether each block has a norm of its input."""
        return self.norms in ("before", "both")

    @property
    def norms_output(self) -> bool:
        """Whether each block has a norm of its output, or of the residual after it."""
        return self.norms != "before"

    @property
    def plain_residual(self) -> bool:
        """Whether a block's output is added to the residual without a norm."""
        return self.norms in ("before", "residual")


@dataclass(frozen=True)
class ModelConfig:
    """Shape and arithmetic of a decoder-only transformer.

    Sizes are logical; storage pads quantised dimensions to multiples of a group.

    Args:
        architecture: the family's name, only for display.
        hidden_size, num_heads, num_kv_heads, head_dim, intermediate_size, vocab_size: sizes of all layers;
            a layer's `AttentionSpec` and `FeedForwardSpec` may override those of heads and neurons.
        max_context: longest context of the model, in tokens.
        norm: the form of all norms except those of heads, which share its eps.
        ropes: the rotary embeddings that layers refer to.
        layers: one description for each layer.
        embedding_multiplier: factor of the embedding, a float32 value.
        logit_soft_cap: if not 0, logits x become logit_soft_cap * tanh(x / logit_soft_cap).
        tie_embeddings: whether the head is the embedding table.
        embedding_width: if not 0, the width E of the embedding table and of the head's rows. A matrix (D, E)
            then projects embeddings to the first layer, and (E, D) the last layer's normed output to the
            head.
        learned_positions: whether one of `max_context` learned vectors is added to the embedding.
        per_layer_width: if not 0, the number W of values that each layer takes from a token's row of a second
            table ("per-layer embeddings"), in a block at its end: x += norm(out @ (act(gate @ x) * input)),
            where input is the row times `per_layer_multiplier`, a float32 value, plus
            norm(projection @ embedding).
        residual_copies: number of residual streams, one of which goes through each layer (alternating
            updates, AltUp, arXiv 2301.13310); see `model/altup.py`.
        head_bias: whether the output head has a bias.
        final_norm: whether the last layer's output is normed before the head.
        part: which part of the model this is; `FULL_MODEL` for all of it. Fields of weights that the part
            lacks, such as learned positions, are unset.
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
    embedding_width: int = 0
    learned_positions: bool = False
    per_layer_width: int = 0
    per_layer_multiplier: float = 1.0
    residual_copies: int = 1
    head_bias: bool = False
    final_norm: bool = True
    part: ModelPart = FULL_MODEL

    def __post_init__(self) -> None:
        for name, limit in SIZE_LIMITS.items():
            check_integer(name, getattr(self, name), 1, limit)
        self._check_heads(self.num_kv_heads, self.head_dim)
        if not self.ropes:
            raise UnsupportedModelError(
                "a model needs at least one rope; one with frequencies of 0 turns nothing"
            )
        for rope in self.ropes:
            if rope.original_context >= self.max_context:
                raise UnsupportedModelError(
                    f"a rope's original_context is {rope.original_context}; it must be below max_context, "
                    f"{self.max_context}"
                )
        for layer in self.layers:
            sizes = self.heads(layer.attention)
            self._check_heads(sizes.keys, sizes.width)
            if sizes.values >= sizes.width:
                raise UnsupportedModelError(
                    f"a layer's value_dim is {sizes.values}; it must be below a key's {sizes.width}"
                )
            if not 0 <= layer.attention.rope < len(self.ropes):
                raise UnsupportedModelError(
                    f"a layer's rope is {layer.attention.rope}; the model has {len(self.ropes)}"
                )
            pairs = len(self.ropes[layer.attention.rope].frequencies)
            if pairs != (sizes.width - sizes.latent) // 2:
                raise UnsupportedModelError(
                    f"a rope has {pairs} frequencies for {(sizes.width - sizes.latent) // 2} pairs of a head"
                )
        if len({replace(layer.feed_forward, cutoff=None, neurons=None) for layer in self.layers}) > 1:
            raise UnsupportedModelError(
                "layers have different feed-forwards; this release runs equal ones, but for cutoffs and "
                "numbers of neurons"
            )
        if self.recurrent_layers and self.num_kv_layers < self.num_layers:
            raise UnsupportedModelError("recurrent layers run beside ones with keys of their own")
        check_integer("embedding_width", self.embedding_width, 0, SIZE_LIMITS["hidden_size"])
        self.part.check(self)
        self._check_experts()
        self._check_residuals()
        self._check_shared_keys()
        check_factor("embedding_multiplier", self.embedding_multiplier)
        check_factor("per_layer_multiplier", self.per_layer_multiplier)
        if self.logit_soft_cap:
            check_factor("logit_soft_cap", self.logit_soft_cap)

    def check_neurons(self) -> None:
        """Check the numbers of neurons. Raises UnsupportedModelError if no layer has a feed-forward. Single
        layers may lack one.
        """
        if self.layers and not any(self.model_widths):
            raise UnsupportedModelError("no layer has a feed-forward; this release runs models with some")

    def _check_heads(self, keys: int, width: int) -> None:
        """Check a layer's heads. Raises UnsupportedModelError if they can't be run."""
        if self.num_heads % keys:
            raise UnsupportedModelError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {keys}"
            )
        if width % 2:
            raise UnsupportedModelError(f"head_dim {width} is odd; rotary embedding needs pairs")

    def _check_experts(self) -> None:
        """Check the experts. Raises UnsupportedModelError if they can't be run."""
        if len({layer.experts for layer in self.layers} - {None}) > 1:
            raise UnsupportedModelError("layers have different experts; this release runs equal ones")
        for layer in self.layers:
            if self.dense_neurons(layer) < 0:
                raise UnsupportedModelError(
                    f"a layer's experts have {layer.experts and layer.experts.num_neurons} neurons; all of "
                    f"the layer's are {self.neurons(layer)}"
                )
            spec = layer.experts
            if spec is not None and (spec.shared_gate or spec.apart) and not self.dense_neurons(layer):
                raise UnsupportedModelError(
                    "a layer has a gate or a norm of shared experts, but none of these"
                )
            if spec is not None and spec.layout == "matrices" and self.zeros_gates:
                raise UnsupportedModelError(
                    f"experts: layout is 'matrices'; those with {self.activation} are stored as 'neurons'"
                )
            if spec is not None and spec.apart and (self.norm.bias or self.norm.kind != "rms"):
                raise UnsupportedModelError("experts that stand apart run with RMS norms without biases")

    def _check_residuals(self) -> None:
        """Check per-layer inputs and residual streams. Raises UnsupportedModelError if they can't be run."""
        width, streams = self.per_layer_width, self.residual_copies
        check_integer("per_layer_width", width, 0, SIZE_LIMITS["hidden_size"])
        check_integer("residual_copies", streams, 1, MAX_COPIES)
        if self.per_layer_multiplier != 1.0 and not width:
            raise UnsupportedModelError(
                "per_layer_multiplier is of per-layer inputs, which this model hasn't"
            )
        if streams > 1 and not width:
            raise UnsupportedModelError("copies of the residual without per-layer inputs aren't supported")
        others = self.any_layer(lambda layer: layer.parallel) or self.norm.bias or self.norm.kind != "rms"
        others = others or self.embedding_width > 0 or self.final_norm != self.part.heads
        if others and (width or self.any_layer(lambda layer: layer.laurel_rank > 0)):
            raise UnsupportedModelError(
                "per-layer inputs and low-rank blocks beside attention run in models of sequential blocks, "
                "RMS norms without biases, the last layer's output normed too, and embeddings of the layers' "
                "width"
            )

    def _check_shared_keys(self) -> None:
        """Check shared keys. Raises UnsupportedModelError unless only the last layers share keys, those of
        earlier layers.
        """
        owners = self.num_kv_layers
        for layer, spec in enumerate(self.layers):
            owner = spec.attention.keys_of
            if (owner is None) != (layer < owners):
                raise UnsupportedModelError("layers that share keys and values come last")
            if owner is not None and not 0 <= owner < owners:
                raise UnsupportedModelError(
                    f"layer {layer} shares the keys of layer {owner}; those of 0 to {owners - 1} "
                    "can be shared"
                )
            if owner is not None and self.heads(spec.attention) != self.heads(self.layers[owner].attention):
                raise UnsupportedModelError(
                    f"layer {layer} shares the keys of layer {owner}, whose heads are others"
                )

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def model_layers(self) -> int:
        """Number of layers of the model that this is a part of."""
        return self.part.layers or self.num_layers

    @property
    def original_context(self) -> int:
        """Longest context, in tokens, in which no rotary embedding has its long frequencies."""
        return min((rope.original_context or self.max_context for rope in self.ropes), default=0)

    def within(self, context: int) -> ModelConfig:
        """The config with the rotary embeddings that a context of `context` tokens uses."""
        return replace(self, ropes=tuple(rope.within(context) for rope in self.ropes))

    @property
    def num_kv_layers(self) -> int:
        """Number of layers that store keys and values, which come first."""
        stores_keys = [layer.attention.keys_of is None for layer in self.layers]
        return stores_keys.index(False) if False in stores_keys else len(stores_keys)

    @cached_property
    def recurrent_layers(self) -> tuple[int, ...]:
        """The layers with a recurrent state."""
        return tuple(index for index, layer in enumerate(self.layers) if layer.recurrent is not None)

    @property
    def activation(self) -> Activation:
        """The activation of every layer's feed-forward."""
        return self.feed_forward.activation

    @property
    def feed_forward(self) -> FeedForwardSpec:
        """The feed-forward of every layer, apart from cutoffs and numbers of neurons."""
        return self.layers[0].feed_forward

    def neurons(self, layer: LayerSpec) -> int:
        """Number of neurons of a layer."""
        neurons = layer.feed_forward.neurons
        return self.intermediate_size if neurons is None else neurons

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Number of neurons of each layer."""
        return tuple(map(self.neurons, self.layers))

    @property
    def widest(self) -> int:
        """Number of neurons of the model's widest layer."""
        return max(self.model_widths, default=self.intermediate_size)

    @property
    def model_widths(self) -> tuple[int, ...]:
        """Number of neurons of each layer of the model that this is a part of."""
        return self.part.widths or self.widths

    @property
    def num_neurons(self) -> int:
        """Number of neurons of all layers."""
        return sum(self.widths)

    @property
    def experts(self) -> ExpertsSpec | None:
        """The experts of every layer with experts, or None."""
        specs = (layer.experts for layer in self.layers if layer.experts is not None)
        return next(specs, self.part.experts)

    def dense_neurons(self, layer: LayerSpec) -> int:
        """Number of a layer's neurons that belong to no expert, which come first."""
        return self.neurons(layer) - (0 if layer.experts is None else layer.experts.num_neurons)

    @cached_property
    def records(self) -> tuple[int, ...]:
        """Number of neurons of each layer that are stored as neurons, not in experts' matrices."""
        as_matrices = self.experts is not None and self.experts.layout == "matrices"
        return tuple(map(self.dense_neurons, self.layers)) if as_matrices else self.widths

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """The layers whose experts are stored as matrices."""
        layers = enumerate(self.layers)
        return tuple(i for i, it in layers if it.experts is not None and it.experts.layout == "matrices")

    @property
    def zeros_gates(self) -> bool:
        """Whether gates at or below a threshold become exact zeros, so that their neurons add nothing."""
        return self.feed_forward.zeros_gates

    @property
    def cut_off_layers(self) -> tuple[LayerSpec, ...]:
        """The layers whose gates have a statistical cutoff."""
        return tuple(layer for layer in self.layers if layer.feed_forward.cutoff is not None)

    @property
    def has_exact_zeros(self) -> bool:
        """Whether gates become exact zeros, in all layers or in those with a cutoff."""
        return self.zeros_gates or bool(self.cut_off_layers)

    @property
    def is_sliced(self) -> bool:
        """Whether feed-forwards are stored in slices of neurons, because every neuron is always
        multiplied.
        """
        return not self.zeros_gates and not self.has_cutoffs and self.experts is None

    @property
    def has_cutoffs(self) -> bool:
        """Whether layers of the full model have gates with a statistical cutoff."""
        return self.part.cutoffs or bool(self.cut_off_layers)

    @property
    def has_table(self) -> bool:
        """Whether there is an embedding table, for embeddings or for a tied head."""
        return self.part.embeds or (self.part.heads and self.tie_embeddings)

    @property
    def has_inputs_table(self) -> bool:
        """Whether there is a table of per-layer inputs."""
        return self.part.embeds and self.per_layer_width > 0

    def any_layer(self, holds: Callable[[LayerSpec], bool]) -> bool:
        """Whether `holds` is true of a layer."""
        return any(map(holds, self.layers))

    def heads(self, attention: AttentionSpec) -> HeadSizes:
        """The heads of a layer with this attention; in latent attention the latent is the one key head."""
        latent = attention.latent
        if latent is not None:
            return HeadSizes(self.num_heads, 1, latent.width, latent.rank)
        keys, width = attention.num_kv_heads or self.num_kv_heads, attention.head_dim or self.head_dim
        return HeadSizes(self.num_heads, keys, width, values=attention.value_dim)

    def stored_heads(self, layer: LayerSpec) -> HeadSizes:
        """A layer's heads, with 0 key heads if it has no attention."""
        sizes = self.heads(layer.attention)
        return sizes if layer.attends else sizes._replace(keys=0)

    @property
    def _recurrent(self) -> list[RecurrentSpec]:
        return [layer.recurrent for layer in self.layers if layer.recurrent is not None]

    @property
    def _all_heads(self) -> set[HeadSizes]:
        """The heads of every layer. If there are no layers, the heads that the model's sizes give."""
        sizes = {self.heads(layer.attention) for layer in self.layers}
        return sizes or {HeadSizes(self.num_heads, self.num_kv_heads, self.head_dim)}

    @property
    def head_width(self) -> int:
        """Width of the widest layer's heads."""
        return max(sizes.width for sizes in self._all_heads)

    @property
    def query_size(self) -> int:
        """Width of all query heads, or of a recurrent layer's values, in the widest layer."""
        return max(self.num_heads * self.head_width, *(it.value_size for it in self._recurrent), 0)

    @property
    def attended_size(self) -> int:
        """Width of attention's or a recurrent layer's output, in the widest layer."""
        width = max(sizes.queries * (sizes.values or sizes.width) for sizes in self._all_heads)
        return max(width, *(it.value_size for it in self._recurrent), 0)

    @property
    def kv_size(self) -> int:
        """Width of all key (or value) heads of the widest layer."""
        return max(sizes.keys * sizes.width for sizes in self._all_heads)

    @property
    def qkv_size(self) -> int:
        """Rows of the widest layer's fused query, key and value projection."""
        rows = max(
            sizes.attending if sizes.values else (sizes.queries + 2 * sizes.keys) * sizes.width
            for sizes in self._all_heads
        )
        return max(rows, *(sum(it.projections.values()) for it in self._recurrent), 0)

    @property
    def queries_per_key(self) -> int:
        """Largest number of query heads for one key head."""
        return max(sizes.queries // sizes.keys for sizes in self._all_heads)

    def out_cols(self, layer: LayerSpec) -> int:
        """Columns of a layer's output projection: the width of its query heads, or of its values."""
        if layer.recurrent is not None and not layer.attends:
            return layer.recurrent.value_size
        latent = layer.attention.latent
        return self.num_heads * (
            self.heads(layer.attention).value_width if latent is None else latent.value_dim
        )

    def projection_sizes(self, layer: LayerSpec) -> dict[str, int]:
        """Number of rows of each projection in a layer's fused one, by name.

        The names are q, k and v, and with the delta rule also z, its output gates; x, b, c and z for a mixer
        alone; only q if keys are shared; q (or its low-rank input) and kv in latent attention.
        """
        if layer.recurrent is not None and not layer.attends:
            return layer.recurrent.projections
        if (latent := layer.attention.latent) is not None:
            return {"q": latent.query_rank or self.num_heads * latent.query_width, "kv": latent.width}
        sizes, shares = self.heads(layer.attention), layer.attention.keys_of is not None
        of_keys = {"k": sizes.keys * sizes.width, "v": sizes.keys * sizes.value_width}
        return {"q": sizes.queries * sizes.width} | ({} if shares else of_keys)

    def qkv_rows(self, layer: LayerSpec) -> int:
        """Rows of a layer's fused projection."""
        return sum(self.projection_sizes(layer).values())

    def head_norm_sizes(self, layer: LayerSpec) -> tuple[int, int]:
        """Lengths of the norm weights of a layer's queries and keys; 0 without norms."""
        sizes = self.heads(layer.attention)
        match layer.attention.head_norm:
            case "none":
                return 0, 0
            case "head":
                return sizes.width, 0 if layer.attention.keys_of is not None else sizes.width
            case "projection" | "layer":
                return sizes.queries * sizes.width, sizes.keys * sizes.width

    @property
    def embedding_size(self) -> int:
        """Columns of the embedding table and of the head."""
        return self.embedding_width or self.hidden_size

    @property
    def logits_size(self) -> int:
        """Values of a token's logits; 0 in a part without the head."""
        return self.vocab_size if self.part.heads else 0

    @property
    def norm_size(self) -> int:
        """Number of values in a norm over the model's width: its weight, and its bias if there is one."""
        return self.hidden_size * (2 if self.norm.bias else 1)

    @property
    def per_layer_size(self) -> int:
        """Width of a token's row of per-layer inputs for all the model's layers; 0 without these inputs."""
        return self.per_layer_width * self.model_layers

    @property
    def is_plain(self) -> bool:
        """Whether the model has only the blocks of a Llama-like decoder: none of the features tested here."""
        return (
            not self.per_layer_width
            and self.num_kv_layers == self.num_layers
            and not self.any_layer(lambda it: it.laurel_rank > 0 or it.scaled or it.attention.value_norm)
            and not self.any_layer(lambda it: it.attention.sinks or it.attention.gated)
            and not self.any_layer(lambda it: it.attention.latent is not None)
            and not self.recurrent_layers
            and not self.any_layer(lambda it: not it.has_feed_forward or it.attention.out_factor != 1.0)
            and not self.any_layer(lambda it: it.attention.head_dim > 0 or it.attention.num_kv_heads > 0)
            and not self.any_layer(lambda it: it.attention.value_dim > 0)
            and not self.cut_off_layers
            and self.experts is None
        )

    @property
    def positions_size(self) -> int:
        """Number of values of learned positions."""
        return self.max_context * self.hidden_size if self.learned_positions else 0
