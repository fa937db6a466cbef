"""`eagle.json`, `mtp.json`, `dflash.json` and their tensors: layers that draft from hidden states.

Three kinds have one form. EAGLE-3 (arXiv 2503.01840) is a layer trained for a finished model: its queries,
keys and values read a token's embedding next to a mixture of three hidden states. A multi-token-prediction
layer (arXiv 2412.19437, section 2.2) comes with a checkpoint: one matrix joins the embedding and the last
hidden state, and a usual layer follows, which may have experts and latent attention. DFlash (arXiv
2602.06036) and DSpark (arXiv 2607.05147) have several layers, whose keys and values of the text are
projections of a mixture of hidden states, and which draft a block of tokens at once. Each is a sidecar
(`sidecar.py`) of a finished bundle; `weights/README.md` is the specification.

Legend: D width of the draft layer, T of the target, V target's vocabulary, N tokens of the layer's own head,
R rank of a Markov head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, Literal, NamedTuple, get_args

from ondevice.bundle.file_layouts import FileLayout, TensorSpec, linear_tensors, tensors_layout
from ondevice.bundle.manifest import Manifest
from ondevice.bundle.model_section import object_section, read_object
from ondevice.bundle.sidecar import (
    BITS,
    CRCS,
    SHA256,
    Sidecar,
    check_sidecar,
    parse_sidecar,
    sidecar_text,
)
from ondevice.bundle.strict_json import Rule, Section
from ondevice.config import GROUP_SIZE, RowFormat
from ondevice.errors import BundleError, UnsupportedModelError
from ondevice.model_config import (
    ACTIVATIONS,
    MAX_FACTOR,
    SIZE_LIMITS,
    Activation,
    AttentionSpec,
    ExpertsSpec,
    FeedForwardSpec,
    LatentSpec,
    LayerSpec,
    ModelConfig,
    NormSpec,
    RopeSpec,
)
from ondevice.records import dataclass

DraftLayerKind = Literal["eagle", "dflash", "mtp"]


def _sidecar(kind: DraftLayerKind, source: str) -> Sidecar:
    return Sidecar(
        kind,
        f"{kind}.json",
        f"{kind}.safetensors",
        f"ondevice convert {source} --draft-for {{model}}",
        f"every --speculation but `{kind}`",
        {"version": 1, "group_size": GROUP_SIZE},
    )


EAGLE_SIDECAR, DFLASH_SIDECAR = _sidecar("eagle", "HEADS"), _sidecar("dflash", "HEADS")
MTP_SIDECAR = _sidecar("mtp", "CHECKPOINT")
SIDECAR_OF: Mapping[str, Sidecar] = {it.key: it for it in (EAGLE_SIDECAR, DFLASH_SIDECAR, MTP_SIDECAR)}
"""By kind, in the order in which `auto` prefers them."""
EAGLE_TAPS, MAX_BLOCK_TAPS = 3, 8
"""Hidden states that an EAGLE-3 layer mixes, and the most that layers of a block do."""
MAX_BLOCK_LAYERS, MAX_BLOCK, MAX_RANK = 32, 64, 1 << 12
"""Limits of layers that draft a block, of its tokens, and of the Markov head's rank."""
_OPTIONAL: Mapping[DraftLayerKind, Mapping[str, Any]] = {
    "eagle": {"taps_normed": False},
    "mtp": {"window": 0, "sinks": False, "value_dim": 0, "out_factor": 1.0},
    "dflash": {"windows": (), "block": 0, "mask": 0, "anchored": False, "markov_rank": 0},
}
"""Keys that one kind alone has, with their values when they are absent."""
_PLAIN = {name: value for names in _OPTIONAL.values() for name, value in names.items()}
TOKENS = "tokens"
EMBEDDINGS = "embeddings"
ROUTER_BITS: Literal[16] = 16
"""Bits of the router and of the shared experts' gate, so that choices don't depend on rounded weights."""


class DraftMatrix(NamedTuple):
    """A quantized matrix of the file. It consists of `number` matrices (rows, cols), those of experts, below
    each other.

    halves: whether it always has 16 bits, whatever the other matrices have.
    """

    rows: int
    cols: int
    number: int = 1
    halves: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """Logical (rows, columns) of all `number` matrices."""
        return self.number * self.rows, self.cols

    def stored(self, bits: Literal[4, 8, 16]) -> RowFormat:
        """The matrix's format in a draft layer whose matrices have this many bits."""
        return RowFormat(ROUTER_BITS if self.halves else bits)


@dataclass(frozen=True)
class DraftLayer:
    """The content of the JSON file: a draft layer's shape, and the weights that it is for.

    Args:
        model: `weights_digest` of the target.
        bits: width of the matrices' codes.
        taps: the target's hidden states that it reads, each by the layer that it enters; the number of layers
            stands for the last layer's output.
        neurons: of the dense feed-forward; with experts, of the one in addition to them, or 0.
        tokens: N, of its head.
        head_norm: whether each head's queries and keys are normed.
        output_gates: whether heads' outputs are multiplied by the sigmoid of gates.
        residual_normed: whether attention's output joins the normed hidden state.
        states_normed: whether hidden states are normed: by the target's last norm, which EAGLE-3 heads leave
            out, then by the layer's own.
        own_head: whether it has an output head; else it uses the target's.
        own_embeddings: whether it has embeddings, (V, D); else it uses the target's.
        taps_normed: whether each of the target's hidden states has a norm before they are mixed.
        latent, scale: latent attention, and the factor of its scores; None without it.
        experts: as a model's, stored as matrices; None without.
        window, sinks, value_dim, out_factor: of its attention, as in `AttentionSpec`.
        windows: of each layer that drafts a block; 0: it sees all of the text.
        block: tokens of a block; 0: tokens are drafted one by one.
        mask: the token that stands in a block for those that aren't known.
        anchored: whether the block's first row, of the text's last token, drafts a token too.
        markov_rank: R, of the matrices that add to a draft token's logits what follows the token before it;
            0: none.
        crcs: CRC32C of each MiB of the file with the tensors.
    """

    kind: DraftLayerKind
    model: str
    bits: Literal[4, 8, 16]
    taps: tuple[int, ...]
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    neurons: int
    activation: Activation
    eps: float
    frequencies: tuple[float, ...]
    magnitude: float
    tokens: int
    qkv_bias: bool = False
    output_bias: bool = False
    head_norm: bool = False
    output_gates: bool = False
    residual_normed: bool = False
    states_normed: bool = False
    own_head: bool = False
    own_embeddings: bool = False
    latent: LatentSpec | None = None
    scale: float | None = None
    experts: ExpertsSpec | None = None
    window: int = 0
    sinks: bool = False
    value_dim: int = 0
    out_factor: float = 1.0
    taps_normed: bool = False
    windows: tuple[int, ...] = ()
    block: int = 0
    mask: int = 0
    anchored: bool = False
    markov_rank: int = 0
    sha256: str = "0" * 64
    crcs: tuple[int, ...] = ()

    @property
    def sidecar(self) -> Sidecar:
        return SIDECAR_OF[self.kind]

    @property
    def query_size(self) -> int:
        """Width of all heads' outputs together, which `out` multiplies."""
        value_dim = self.value_dim or self.head_dim
        return self.num_heads * (value_dim if self.latent is None else self.latent.value_dim)

    @property
    def qkv_rows(self) -> int:
        """Rows of the fused projection. In latent attention, rows of queries (or their latents) and of
        latents.
        """
        if (latent := self.latent) is not None:
            return (latent.query_rank or self.num_heads * latent.query_width) + latent.width
        values = self.num_kv_heads * (self.value_dim or self.head_dim)
        return (self.num_heads + self.num_kv_heads) * self.head_dim + values

    @property
    def table_width(self) -> int:
        """Width of the table of V rows that the file stores, of embeddings or for the Markov head; 0 if there
        is none.
        """
        return self.hidden_size if self.own_embeddings else self.markov_rank

    @property
    def block_drafts(self) -> int:
        """The number of draft tokens in a block."""
        return self.block if self.anchored else self.block - 1

    def embedding_width(self, target: ModelConfig) -> int:
        """Width of the embeddings that the draft layer reads."""
        return self.hidden_size if self.own_embeddings else target.embedding_size

    def layer_config(self, max_context: int) -> ModelConfig:
        """The draft layer or layers as a small model, which determines the layout of keys and values.

        Raises UnsupportedModelError for sizes that can't be run.
        """
        attention = AttentionSpec(
            self.head_dim**-0.5 if self.scale is None else self.scale,
            bias=self.qkv_bias,
            head_norm="head" if self.head_norm else "none",
            sinks=self.sinks,
            latent=self.latent,
            gated=self.output_gates,
            out_factor=self.out_factor,
            value_dim=self.value_dim,
        )
        of_experts = 0 if self.experts is None else self.experts.num_neurons
        return ModelConfig(
            architecture=self.kind,
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.neurons + of_experts,
            vocab_size=self.tokens,
            max_context=max_context,
            norm=NormSpec(eps=self.eps),
            ropes=(RopeSpec(self.frequencies, self.magnitude),),
            layers=tuple(
                LayerSpec(
                    replace(attention, window=window), FeedForwardSpec(self.activation), experts=self.experts
                )
                for window in self.windows or (self.window,)
            ),
        )

    def matrices(self, target: ModelConfig) -> dict[str, DraftMatrix]:
        """Every quantized matrix by name, in the order of the file."""
        if self.block:
            return self._block_matrices(target)
        width, embedding, hidden = self.hidden_size, self.embedding_width(target), target.hidden_size
        if self.kind == "eagle":
            shapes = {f"fc.{tap}": (width, hidden) for tap in range(len(self.taps))}
            shapes |= {"qkv.embedding": (self.qkv_rows, embedding), "qkv.hidden": (self.qkv_rows, width)}
        else:
            shapes = {"joined.embedding": (width, embedding), "joined.hidden": (width, hidden)}
            shapes["qkv"] = (self.qkv_rows, width)
            if self.output_gates:
                shapes["output_gates"] = (self.query_size, width)
        if (latent := self.latent) is not None:
            if latent.query_rank:
                shapes["queries"] = (self.num_heads * latent.query_width, latent.query_rank)
            shapes["latent_keys"] = (self.num_heads * latent.rank, latent.key_dim)
            shapes["latent_values"] = (self.num_heads * latent.value_dim, latent.rank)
        shapes["out"] = (width, self.query_size)
        if self.neurons:
            shapes |= {"gate": (self.neurons, width), "up": (self.neurons, width)}
            shapes["down"] = (width, self.neurons)
        matrices = {name: DraftMatrix(*shape) for name, shape in shapes.items()}
        if (experts := self.experts) is not None:
            matrices["router"] = DraftMatrix(experts.count, width, halves=True)
            if experts.shared_gate:
                matrices["shared_gate"] = DraftMatrix(1, width, halves=True)
            for which in ("gate", "up"):
                matrices[f"experts.{which}"] = DraftMatrix(experts.neurons, width, experts.count)
            matrices["experts.down"] = DraftMatrix(width, experts.neurons, experts.count)
        return matrices | ({"head": DraftMatrix(self.tokens, width)} if self.own_head else {})

    def _block_matrices(self, target: ModelConfig) -> dict[str, DraftMatrix]:
        """`matrices` of layers that draft a block."""
        width, matrices = self.hidden_size, dict[str, DraftMatrix]()
        for tap in range(len(self.taps)):
            matrices[f"fc.{tap}"] = DraftMatrix(width, target.hidden_size)
        for layer in range(len(self.windows)):
            matrices[f"{layer}.qkv"] = DraftMatrix(self.qkv_rows, width)
            matrices[f"{layer}.out"] = DraftMatrix(width, self.query_size)
            for which in ("gate", "up"):
                matrices[f"{layer}.{which}"] = DraftMatrix(self.neurons, width)
            matrices[f"{layer}.down"] = DraftMatrix(width, self.neurons)
        if self.markov_rank:
            matrices["markov"] = DraftMatrix(self.tokens, self.markov_rank)
        return matrices

    def vectors(self, target: ModelConfig) -> dict[str, int]:
        """Lengths of the float32 vectors by name, in the order of the file."""
        if self.block:
            lengths = {"hidden_norm": self.hidden_size, "final_norm": self.hidden_size}
            for layer in range(len(self.windows)):
                for which in ("attention_norm", "feed_forward_norm"):
                    lengths[f"{layer}.{which}"] = self.hidden_size
                lengths |= {f"{layer}.{which}": self.head_dim for which in ("q_norm", "k_norm")}
            return lengths
        sizes = {
            "embedding_norm": self.embedding_width(target),
            "hidden_norm": self.hidden_size if self.kind == "eagle" else target.hidden_size,
            "feed_forward_norm": self.hidden_size,
            "final_norm": self.hidden_size,
        }
        if self.kind == "mtp":
            sizes["attention_norm"] = self.hidden_size
        if self.taps_normed:
            sizes |= {f"tap_norm.{tap}": target.hidden_size for tap in range(len(self.taps))}
        if self.qkv_bias:
            sizes["qkv.bias"] = self.qkv_rows
        if self.output_bias:
            sizes["out.bias"] = self.hidden_size
        if self.head_norm:
            sizes |= {"q_norm": self.head_dim, "k_norm": self.head_dim}
        if self.sinks:
            sizes["sinks"] = self.num_heads
        if self.latent is not None:
            sizes["latent_norm"] = self.latent.rank
            if self.latent.query_rank:
                sizes["query_norm"] = self.latent.query_rank
        if self.experts is not None and self.experts.choice_bias:
            sizes["choice_bias"] = self.experts.count
        return sizes

    def name(self, tensor: str) -> str:
        """The name in the file of a matrix or vector."""
        return f"{self.kind}.{tensor}"


def draft_layer_tensors(layer: DraftLayer, target: ModelConfig) -> Mapping[str, TensorSpec]:
    """The exact tensors of the file, in the order of their bytes: vectors, tokens, matrices, embeddings."""
    tensors = {layer.name(name): TensorSpec("F32", (size,)) for name, size in layer.vectors(target).items()}
    if layer.own_head:
        tensors[layer.name(TOKENS)] = TensorSpec("U32", (layer.tokens,))
    for name, matrix in layer.matrices(target).items():
        tensors |= linear_tensors(layer.name(name), *matrix.shape, matrix.stored(layer.bits))
    if layer.table_width:
        rows, cols = target.vocab_size, layer.table_width
        tensors |= linear_tensors(layer.name(EMBEDDINGS), rows, cols, RowFormat(16))
    return tensors


def draft_layer_layout(layer: DraftLayer, target: ModelConfig) -> FileLayout:
    """Size, header and checksum units of the file of tensors."""
    return tensors_layout(draft_layer_tensors(layer, target))


def draft_layer_text(layer: DraftLayer) -> bytes:
    """The bytes of the JSON file."""
    facts: dict[str, Any] = {
        name: value
        for name, value in asdict(layer).items()
        if value is not None and value != _PLAIN.get(name)
    }
    if layer.experts is not None:
        facts["experts"] = object_section(layer.experts)
    return sidecar_text(layer.sidecar, {**layer.sidecar.facts, **facts})


def check_draft_layer(layer: DraftLayer, target: ModelConfig) -> None:
    """Check a draft layer for this model. Raises BundleError for a value that the JSON file can't have."""
    _parse(parse_sidecar(layer.sidecar, draft_layer_text(layer)), target)


def parse_draft_layer(sidecar: Sidecar, data: bytes, manifest: Manifest) -> DraftLayer:
    """The parsed JSON file. Raises BundleError if damaged, out of range, or made for other weights."""
    layer = _parse(parse_sidecar(sidecar, data), manifest.config)
    if layer.sidecar is not sidecar:
        raise BundleError(f"{sidecar.manifest} has a draft layer of kind {layer.kind!r}")
    layout = draft_layer_layout(layer, manifest.config)
    check_sidecar(sidecar, manifest, layer.model, layout, layer.crcs)
    return layer


def _parse(section: Section, target: ModelConfig) -> DraftLayer:
    flags = ("qkv_bias", "output_bias", "head_norm", "output_gates", "residual_normed", "states_normed")
    rules: dict[str, Rule] = {
        "kind": (Section.one_of, get_args(DraftLayerKind)),
        "model": SHA256,
        "bits": BITS,
        "taps": (Section.integers, MAX_BLOCK_TAPS, 0, target.model_layers),
        **{
            name: (Section.integer, 1, SIZE_LIMITS[name])
            for name in ("hidden_size", "num_heads", "num_kv_heads", "head_dim")
        },
        "neurons": (
            Section.integer,
            0 if "experts" in section.names else 1,
            SIZE_LIMITS["intermediate_size"],
        ),
        "activation": (Section.one_of, ACTIVATIONS),
        "eps": (Section.number, 1e-12, 0.5),
        "frequencies": (Section.numbers, SIZE_LIMITS["head_dim"], 0.0, 1.0),
        "magnitude": (Section.number, 1e-6, 1e6),
        **dict.fromkeys((*flags, "own_head", "own_embeddings"), (Section.boolean,)),
        "tokens": (Section.integer, 1, target.vocab_size),
        "sha256": SHA256,
        "crcs": CRCS,
    }
    if "latent" in section.names:
        rules |= {"latent": (read_object, LatentSpec), "scale": (Section.number, 0.0, MAX_FACTOR)}
    blocks: dict[str, Rule] = {
        "window": (Section.integer, 1, SIZE_LIMITS["max_context"]),
        "sinks": (Section.boolean,),
        "value_dim": (Section.integer, 1, SIZE_LIMITS["head_dim"]),
        "out_factor": (Section.number, 0.0, MAX_FACTOR),
        "experts": (read_object, ExpertsSpec),
        "taps_normed": (Section.boolean,),
        "windows": (Section.integers, MAX_BLOCK_LAYERS, 0, SIZE_LIMITS["max_context"]),
        "block": (Section.integer, 2, MAX_BLOCK),
        "mask": (Section.integer, 0, target.vocab_size - 1),
        "anchored": (Section.boolean,),
        "markov_rank": (Section.integer, 1, MAX_RANK),
    }
    try:
        layer = DraftLayer(**section.values(rules, blocks))
    except UnsupportedModelError as error:
        raise BundleError(f"{section.where}: {error}") from error
    _check(layer, section.where, target)
    return layer


def _check(layer: DraftLayer, where: str, target: ModelConfig) -> None:
    """Check values against each other and the target. Raises BundleError for contradictions."""
    expected = {"eagle": EAGLE_TAPS, "mtp": 1}.get(layer.kind, max(1, len(layer.taps)))
    if len(layer.taps) != expected:
        raise BundleError(f"{where}.taps has {len(layer.taps)} values; {layer.kind} has {expected}")
    if layer.kind != "mtp" and layer.output_gates:
        raise BundleError(f"{where} has output_gates, which {layer.kind} layers don't have")
    if (
        layer.kind == "mtp"
        and layer.states_normed
        and (not target.final_norm or layer.hidden_size != target.hidden_size)
    ):
        raise BundleError(
            f"{where}.states_normed needs a model with a last norm and of the layer's width, "
            f"{layer.hidden_size}; this one's is {target.hidden_size}"
        )
    if not layer.own_head and (
        layer.hidden_size != target.embedding_size or layer.tokens != target.vocab_size
    ):
        raise BundleError(
            f"{where} takes the model's head, of {target.vocab_size} tokens and width "
            f"{target.embedding_size}, but has {layer.tokens} tokens and width {layer.hidden_size}"
        )
    if layer.kind == "mtp" and layer.hidden_size != target.hidden_size:
        raise BundleError(
            f"{where}.hidden_size is {layer.hidden_size}; an mtp layer goes on from its own output "
            f"as from the model's, so it must be {target.hidden_size}"
        )
    if layer.kind == "mtp" and layer.residual_normed:
        raise BundleError(
            f"{where}.residual_normed is true; it must be false, as mtp layers have no such norm"
        )
    _check_blocks(layer, where)
    _check_block(layer, where)
    if layer.activation == "fatrelu":
        raise BundleError(f"{where}.activation is 'fatrelu', which needs a threshold of its own")
    try:
        layer.layer_config(target.max_context)
    except UnsupportedModelError as error:
        raise BundleError(f"{where}: {error}") from error


def _check_blocks(layer: DraftLayer, where: str) -> None:
    """Check experts and latent attention. Raises BundleError for a form that no draft layer has."""
    latent, experts = layer.latent, layer.experts
    if layer.kind != "mtp" and (latent is not None or experts is not None):
        raise BundleError(f"{where} has latent or experts, which {layer.kind} layers don't have")
    others = set(_PLAIN) - set(_OPTIONAL[layer.kind])
    if surplus := sorted(name for name in others if getattr(layer, name) != _PLAIN[name]):
        raise BundleError(f"{where} has {', '.join(surplus)}, which {layer.kind} layers don't have")
    if latent is not None and (layer.qkv_bias or layer.output_gates):
        raise BundleError(f"{where} has latent attention, which runs without qkv_bias and output_gates")
    if latent is not None and (layer.num_kv_heads, layer.head_dim) != (1, latent.width):
        raise BundleError(
            f"{where}: num_kv_heads and head_dim are {layer.num_kv_heads} and {layer.head_dim}; with its "
            f"latent attention they must be 1 and {latent.width}"
        )
    if experts is None:
        return
    if experts.layout != "matrices" or experts.bias or experts.router_bias or experts.apart:
        raise BundleError(
            f"{where}.experts must be stored as matrices, without biases, beside no norms of their own"
        )


def _check_block(layer: DraftLayer, where: str) -> None:
    """Check layers that draft a block. Raises BundleError for a form that no such layers have."""
    if layer.kind != "dflash":
        return
    if not layer.block or not layer.windows:
        raise BundleError(f"{where} lacks block or windows, which dflash layers have")
    flags = ("qkv_bias", "output_bias", "residual_normed", "states_normed", "own_head", "own_embeddings")
    if not layer.head_norm or any(getattr(layer, it) for it in flags):
        raise BundleError(f"{where} has {', '.join(flags)} or no head_norm, unlike dflash layers")
