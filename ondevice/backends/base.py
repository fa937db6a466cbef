"""The backend protocol: about a dozen wide ops, and the loading of the weights that they multiply.

`model/` is written over this protocol and treats arrays and loaded weights as opaque: it may only slice and
reshape them and hand them back to ops. A backend knows nothing of prompts, bundles or budgets.

Legend: T tokens, D model width, H query heads, KVH key/value heads, Dh head width, F neurons, V vocabulary,
K/N columns/rows of a matrix, G groups of 64 columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ondevice.backends.expert_records import ExpertRecords
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.backends.kv_layout import KVLayout
from ondevice.backends.latent import LatentOps
from ondevice.backends.plain_layers import Adapters, PlainLayers, PlainWeights
from ondevice.backends.recurrent import RecurrentOps, StateStore
from ondevice.backends.tiled_source import TiledSource
from ondevice.backends.token_tree import TokenTree
from ondevice.bundle.layout import RecordLayout, SliceLayout, TileLayout
from ondevice.config import RowFormat
from ondevice.model_config import (
    Activation,
    AttentionSpec,
    FeedForwardSpec,
    LayerSpec,
    ModelConfig,
)
from ondevice.records import dataclass

Bytes: TypeAlias = NDArray[np.uint8]
Float16: TypeAlias = NDArray[np.float16]
Float32: TypeAlias = NDArray[np.float32]
Int32: TypeAlias = NDArray[np.int32]

Array: TypeAlias = Any
"""A backend's float32 activations; numpy arrays for `cpu` and `reference`. Sliceable and reshapeable."""
Vector: TypeAlias = Any
"""A loaded norm weight."""
Linear: TypeAlias = Any
"""A loaded matrix with its bias."""
Embedding: TypeAlias = Any
"""A loaded embedding table, resident or read row by row."""
FeedForward: TypeAlias = Any
"""One layer's loaded neurons: resident, read ahead or cached."""
Block: TypeAlias = Any
"""Keys and values of 64 positions: `Bytes` that `cpu` and `reference` write to, or None with `KVArrays`."""

KEY_LANES = 16
"""Positions whose keys are stored side by side."""


class KVStore(Protocol):
    """The part of a key/value cache that ops see."""

    @property
    def layout(self) -> KVLayout: ...

    @property
    def blocks(self) -> list[Block]:
        """The blocks in order: `Bytes` (block_bytes,), 64-byte aligned and writable, with room for every
        position that an op reads or writes.
        """

    @property
    def window_blocks(self) -> Sequence[Block]:
        """The blocks of windowed layers, `Bytes` (window_block_bytes,); None for a block that no window
        reaches.
        """
        ...

    places: Any
    """The block addresses in a backend's form; None after blocks have changed."""
    arrays: Any
    """The backend's `KVArrays` with the keys and values; None if they are in the blocks."""

    @property
    def states(self) -> StateStore | None:
        """The states of recurrent layers; None in a model without recurrent layers."""


class RowChunk(NamedTuple):
    """Rows row0 .. row0 + n of a stored matrix. The arrays are valid until the next chunk is read."""

    row0: int
    codes: Bytes
    """(n, padded_cols * bits / 8); at 16 bits the bytes of float16 values."""
    scales: Float16 | Bytes
    """(n, G); (n, 0) at 16 bits. Bytes in MXFP4."""
    biases: Float16
    """(n, G); (n, 0) where none are stored."""


class LinearSource(Protocol):
    """A matrix stored row by row on disk, read once in bounded chunks of ascending rows."""

    @property
    def rows(self) -> int: ...

    @property
    def cols(self) -> int: ...

    @property
    def stored(self) -> RowFormat: ...

    @property
    def bias(self) -> Float32 | None:
        """(rows,) or None."""

    def chunks(self) -> Iterator[RowChunk]:
        """Yields the matrix's rows in chunks, each row once. Raises FlashReadError if bytes don't match their
        checksum.
        """


class FeedForwardSource(Protocol):
    """The records of one layer's neurons on disk, in stored order.

    A record is [gate row], [up row | down column] of a neuron, without the up row in an ungated feed-forward,
    or a slice of neighbouring neurons.
    """

    @property
    def file(self) -> int:
        """Index of the layer's file in the flash reader."""

    @property
    def num_neurons(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def layout(self) -> RecordLayout | SliceLayout: ...

    @property
    def experts(self) -> ExpertRecords | None:
        """The layer's experts; None if it has none."""

    def read(self, first: int, count: int) -> Bytes:
        """The records of neurons first .. first + count, (n, stride). Neuron `first` must be the first of a
        record.

        Raises FlashReadError, and what `check_gates` raises.
        """

    def check_gates(self, first: int, records: Bytes) -> None:
        """Check records (n, stride) from neuron `first` on that weren't read through `read`.

        Raises BundleError once all records have been checked in ascending order, if their gate rows differ
        from those that mode `exact` multiplies.
        """


class EmbeddingSource(Protocol):
    """The embedding table on disk: one record for each token id, or for 16 of them."""

    @property
    def file(self) -> int:
        """Index of the table's file in the flash reader."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def layout(self) -> RecordLayout | TileLayout: ...

    def read(self, tokens: Int32) -> Bytes:
        """The records that hold the rows of token ids (T,): (T, stride). Raises FlashReadError."""


class Norm(NamedTuple):
    """An RMS norm: x / sqrt(mean(x^2) + eps) * weight + bias along the last axis; weight (n,) for x (..., n).

    bias: (n,) or None. centred: whether the mean of x is subtracted first, as in a LayerNorm.
    """

    weight: Vector
    eps: float
    bias: Vector | None = None
    centred: bool = False


class HeadNorms(NamedTuple):
    """The norms of queries and keys. Each head is normed alone, or with `together` all heads as one vector.

    Weights and biases are (Dh,), shared by all heads, or (H * Dh,) and (KVH * Dh,). k: None where a layer
    reads the keys of another. v: norm of each head's values, (Dh,), or None.
    """

    q: Norm
    k: Norm | None
    together: bool = False
    v: Norm | None = None


class Biases(NamedTuple):
    """The biases of a feed-forward: gates (F,) and output (D,). None where there is none."""

    gates: Vector | None = None
    output: Vector | None = None


NO_BIASES = Biases()


class Router(NamedTuple):
    """A layer's router: its matrix (E, D), and choice_bias (E,), which is added to scores only when experts
    are chosen.

    shared_gate: (1, D); the sigmoid of its product multiplies the dense feed-forward's output.
    apart: norms of experts that run parallel to the dense feed-forward; None where they share its norm.
    """

    matrix: Linear
    choice_bias: Vector | None = None
    shared_gate: Linear | None = None
    apart: ExpertNorms | None = None


class ExpertNorms(NamedTuple):
    """The norms of the router's input, of the experts' input, of the sum of their outputs, and of the dense
    output.

    scales: (E,) factors of the experts' weights.
    """

    router: Norm
    experts: Norm
    output: Norm
    dense_output: Norm
    scales: Vector


@dataclass(frozen=True)
class Selector:
    """Scores a layer's neurons for a token, (F,). Neurons with a score above zero are multiplied.

    matrices: multiplied one after the other: the gate projection alone, whose products are the scores, or a
        predictor's low-rank pair (`predicted`; "LLM in a flash", arXiv 2312.11514, section 3.1).
    min_gate: subtracted from gates to give scores.
    deviations: the gates' statistical cutoff in standard deviations from their mean
        (`FeedForwardSpec.cutoff`); None without one.
    activated: if not None, the activation zeroes hardly any gate, and scores are |activation(gate)|.
    """

    matrices: tuple[Linear, ...]
    predicted: bool
    min_gate: float = 0.0
    deviations: float | None = None
    activated: FeedForwardSpec | None = None

    @property
    def cut_gates(self) -> Linear | None:
        """The gate projection of a layer whose gates have a statistical cutoff."""
        return None if self.deviations is None else self.matrices[0]


class Backend(LatentOps, RecurrentOps, Protocol):
    """Ops over loaded weights. They are deterministic, and don't check their arguments.

    An op may re-use its output array, so a result is valid only until the next call of the same op. Results
    of `embedding` and `to_numpy` belong to the caller.
    """

    @property
    def name(self) -> str: ...

    def load_vector(self, values: Float32) -> Vector:
        """Load a norm weight. values: (n,)."""

    def load_linear(self, source: LinearSource) -> Linear: ...

    def load_tiles(self, sections: Sequence[TiledSource], bias: Float32 | None = None) -> Linear:
        """A matrix of all sections' rows, in order. bias: (rows,) or None."""

    def load_feed_forward(
        self,
        layer: int,
        source: FeedForwardSource,
        selector: Selector | None = None,
        biases: Biases = NO_BIASES,
        gates: Linear | None = None,
        dense: int | None = None,
    ) -> FeedForward:
        """Load one layer's neurons. Called for layers 0, 1, ... in order.

        selector: decides which neurons are multiplied for a token; without it, all are. gates: the gate
        projection, (F, D), of a layer whose gates have a statistical cutoff. dense: number of neurons that
        belong to no expert, in a model with experts; they come first, and some backends hold them.
        """

    def load_embedding(
        self, source: EmbeddingSource, offloaded: bool = False, head: Linear | None = None
    ) -> Embedding:
        """Load a table. offloaded: whether its rows always come from flash.

        head: a loaded matrix with the same rows, in which a backend may look them up.
        """

    def plain_layers(
        self, config: ModelConfig, layers: Sequence[PlainWeights], adapters: Adapters
    ) -> PlainLayers | None:
        """An object that runs those layers of a model that are plain, in place of single ops. None if ops run
        every layer.
        """

    def begin_pass(self, batch: ForwardBatch) -> None:
        """Prepare for a forward pass over `batch`."""

    def accept(self, batch: ForwardBatch, rows: Sequence[int]) -> None:
        """Tell the backend which tokens of the last pass's `batch`, which had draft tokens, were accepted.

        rows: the accepted tokens' rows in `batch`, ascending. Only these tokens may change what is kept in
        memory.
        """

    def embedding(self, table: Embedding, tokens: Int32) -> Array:
        """The rows of the table for token ids (T,) in 0 .. V-1: (T, D)."""

    def linear(self, x: Array, weight: Linear, norm: Norm | None = None, added: Array | None = None) -> Array:
        """norm(x) @ W^T + bias + added, (T, N), for x (T, K).

        added: (T, N); the result may overwrite it.
        """

    def kv_move(self, kv: KVStore, source: int, target: int) -> None:
        """Copy the keys and values at position `source`, of every layer, to position `target`."""

    def attend(
        self,
        qkv: Array,
        kv: KVStore,
        layer: int,
        position: int,
        cos: Float32,
        sin: Float32,
        spec: AttentionSpec,
        norms: HeadNorms | None = None,
        tree: TokenTree | None = None,
        sinks: Vector | None = None,
    ) -> Array:
        """Causal attention over stored and new keys and values.

        Queries and keys are normed and rotated by halves. Then keys and values are quantised and stored,
        token t's at position + t, and are read back as stored. Query t sees positions 0 .. position + t.

        A layer that reads the keys and values of another (`spec.keys_of`) has only queries, and stores
        nothing: the other layer has stored keys and values earlier in the same pass.

        Args:
            qkv: (T, `HeadSizes.attending`) queries, keys and values side by side, or (T, H * Dh) queries, or
                the result of `latent_rows`; may be overwritten.
            kv: the cache, which has room for the new keys and values.
            layer: index of the layer whose keys and values are read.
            position: number of tokens stored before these.
            cos, sin: (T, Dh / 2) rotary tables in host memory; in latent attention for the rotary part.
            spec: the scale and cap of scores, and the window of positions that a query sees.
            norms: norms of queries and keys, or None.
            tree: the tree of the T tokens; None: a chain. Query t then sees what `tree.visible` says. On
                `cpu` its result has the same bits as it has at the end of a text made of the query's path.
            sinks: (H,) attention-sink logits, or None.

        Returns (T, H * value width), in latent attention (T, H * rank).
        """

    def add_normed(self, x: Array, y: Array, norm: Norm) -> Array:
        """x + norm(y), (T, D), for x and y (T, D); may overwrite both."""

    def normed(self, x: Array, norm: Norm) -> Array:
        """norm(x), (T, D), for x (T, D). The result belongs to the caller."""

    def gated(self, x: Array, y: Array, activation: Activation) -> Array:
        """activation(x) * y, elementwise, for x and y (T, N). The result belongs to the caller."""

    def small_linear(self, x: Array, weight: Vector) -> Array:
        """x @ weight^T, (T, N), for x (T, K) and a loaded weight (N, K). The result belongs to the caller."""

    def match_rms(self, x: Array, other: Array) -> Array:
        """Rows of x (T, D) scaled to the root mean square of those of `other` (T, D).

        The mean square of x is at least 1e-5. The result belongs to the caller.
        """

    def soft_cap(self, x: Array, cap: float) -> Array:
        """cap * tanh(x / cap), for x (T, N), which it may overwrite."""

    def prefetch(self, x: Array, norm: Norm | None, weight: FeedForward) -> None:
        """Prefetch the neurons of `weight` for an input near norm(x), x (R, D). No result depends on it."""

    def prefetch_experts(
        self, x: Array, norm: Norm | None, weight: FeedForward, router: Router, spec: LayerSpec
    ) -> None:
        """Prefetch the experts that `router` chooses for x (R, D). No result depends on it."""

    def rows(self, x: Array, tokens: Sequence[int]) -> Array:
        """Copies of the rows `tokens` of x (T, D): (n, D). The result belongs to the caller."""

    def stacked(self, parts: Sequence[Array]) -> Array:
        """The rows of all parts, (n, D) each, concatenated. The result belongs to the caller."""

    def add_streams(self, x: Array, tokens: Sequence[int], embeddings: Sequence[Vector]) -> Array:
        """x (T, D), then each row in `tokens` plus each stream's embedding: (T + n * streams, D).

        The result belongs to the caller.
        """

    def add_low_rank(
        self,
        y: Array,
        x: Array,
        down: Linear,
        up: Linear,
        first: int,
        activation: Literal["relu"] | None = None,
        norm: Norm | None = None,
    ) -> Array:
        """y (T, N) plus up @ activation(down @ norm(x)) in the rows from `first` on; may overwrite y.

        x: (T - first, K).
        """

    def feed_forward(
        self,
        x: Array,
        weight: FeedForward,
        spec: FeedForwardSpec,
        batch: ForwardBatch,
        norm: Norm | None = None,
        added: Array | None = None,
    ) -> Array:
        """down(activation(gate(n)) * up(n)) + added, (R, D), with n = norm(x). Called for layers in order.

        An ungated feed-forward has no up(n).

        Rows from `batch.num_exact_rows` on are estimates: nothing is read for them, and neurons that aren't
        in memory count as zero.

        added: (R, D), which may be x; the result may overwrite it.
        """

    def mixture(
        self,
        x: Array,
        weight: FeedForward,
        router: Router,
        spec: LayerSpec,
        batch: ForwardBatch,
        norm: Norm | None = None,
        added: Array | None = None,
    ) -> Array:
        """A mixture of experts, (R, D): dense(n) + sum(w_e * expert_e(n)) + added, with n = norm(x). Called
        for layers in order.

        The sum is over a row's experts in ascending order. Each expert and the dense part, which may be
        missing, is computed as in `feed_forward`. With `router.apart` they have separate norms.

        router: chooses each row's experts and their weights w.
        spec: the layer's arithmetic; it has experts.
        added: (R, D), which may be x; the result may overwrite it.
        """

    def to_numpy(self, x: Array) -> Float32:
        """A copy or view of an array in host memory."""
