"""A draft layer: an extra decoder layer that drafts from the hidden states of the model's passes.

A row reads a token's embedding and the hidden state after the previous token. Its output approximates the
hidden state after its token, and is the input of the next draft token's row. `bundle/draft_layers.py`
describes the kinds of draft layers, `draft_experts.py` has the feed-forward of a layer with experts, and
`draft_block.py` runs layers that draft a block at once.

Legend: n rows, D width of the draft layer, T of the target, V target's vocabulary, N tokens of its head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ondevice.backends.base import Array, Backend, Embedding, Float32, HeadNorms, Linear, Norm, RowChunk
from ondevice.backends.latent import LatentWeights
from ondevice.bundle.draft_layers import EMBEDDINGS, TOKENS, DraftLayer, DraftMatrix
from ondevice.bundle.reader import Bundle
from ondevice.callbacks import IsCancelled, never_cancelled
from ondevice.config import RowFormat
from ondevice.errors import BundleError
from ondevice.flash.reader import FlashReader
from ondevice.kernels import _native, memory
from ondevice.model.attention import Place, Rows, attention
from ondevice.model.draft_experts import DraftExperts, GatedMatrices
from ondevice.model.parts import MatrixPart, Part, VectorPart, part_tasks
from ondevice.model.rope import Rope
from ondevice.model.sequence_state import SequenceState
from ondevice.model.tensor_file import TaskResults, TensorFile
from ondevice.model.weights import LayerWeights, ModelWeights
from ondevice.records import dataclass

PIECE_ROWS = 64
"""Most rows of one run."""
GATED = ("gate", "up", "down")
"""Names of a feed-forward's matrices, in the order of `GatedMatrices`."""
CHOICE_BIAS = "choice_bias"
"""Name of the experts' choice bias, which stays in host memory."""


@dataclass(frozen=True)
class _Read:
    """A part that is read in one piece and stays in host memory."""

    field: str
    read: Any

    def tasks(self) -> Iterator[Any]:
        yield self.read

    def load(self, backend: Backend, ahead: TaskResults) -> Any:
        return ahead.next()


@dataclass(frozen=True)
class _Embeddings:
    """A draft layer's stored embeddings, (V, padded D), read and checked in chunks of rows.

    file: name of their file, for errors.
    """

    rows: MatrixPart
    file: str

    @property
    def field(self) -> str:
        return self.rows.field

    def tasks(self) -> Iterator[Any]:
        return self.rows.tasks()

    def load(self, backend: Backend, ahead: TaskResults) -> NDArray[np.float16]:
        """The embeddings, read piece by piece. Raises BundleError for values that aren't finite."""
        count, table = self.rows.num_rows, memory.empty((0, 0), np.float16)
        for row0 in self.rows.starts:
            values = ahead.next().codes.view(np.float16)
            if not np.isfinite(values).all():
                raise BundleError(
                    f"{self.file}: embeddings hold values that are not finite; convert it again"
                )
            if not row0:
                table = memory.empty((count, values.shape[1]), np.float16)
            table[row0 : row0 + len(values)] = values
        return table


class LoadedDraftLayer:
    """A loaded draft layer. It runs on the backend's thread.

    tokens: (N,) ascending ids of the tokens of its head; None for all of the target's vocabulary.
    """

    def __init__(
        self,
        layer: DraftLayer,
        backend: Backend,
        loaded: dict[str, Any],
        target: ModelWeights,
        vocab_size: int,
        max_context: int,
    ) -> None:
        """loaded: vectors and matrices by name, also `tokens` and `embeddings` if they are stored.

        vocab_size: size of the target's vocabulary.
        """
        self.layer = layer
        self.backend = backend
        self.taps = tuple(sorted(set(layer.taps)))
        """The target's hidden states that `mixed` takes, as in `Transformer.taps`."""
        self.config = layer.layer_config(max_context)
        full_vocabulary = not layer.own_head or layer.tokens == vocab_size
        self.tokens: NDArray[np.int64] | None = None if full_vocabulary else loaded[TOKENS]
        self.weights = loaded
        """Vectors and matrices by name, as the backend loaded them."""
        self._embedding: Embedding = target.embedding
        self._target_norm = target.final_norm
        self._head: Linear = loaded["head"] if layer.own_head else target.head
        self.rope = Rope(self.config.ropes[0])
        self._block = self._attention_block() if layer.kind == "mtp" else None
        self._dense = self.gated("") if layer.neurons and not layer.block else None
        self._experts = self._mixture()

    def mixed(self, tapped: Sequence[Array]) -> Array:
        """The hidden states that the layer reads, (n, D or T), mixed from the target's hidden states, (n, T)
        for each of `taps`.
        """
        backend, layer, mixed = self.backend, self.layer, None
        if layer.kind == "mtp":
            if not layer.states_normed:
                return tapped[0]
            assert self._target_norm is not None
            return backend.normed(tapped[0], self._target_norm)
        for number, tap in enumerate(layer.taps):
            hidden = tapped[self.taps.index(tap)]
            norm = self.norm(f"tap_norm.{number}") if layer.taps_normed else None
            mixed = backend.linear(hidden, self.weights[f"fc.{number}"], norm, mixed)
        if layer.block:
            return backend.normed(mixed, self.norm("hidden_norm"))
        # A copy, as a product is valid only until the next one.
        return backend.rows(mixed, range(tapped[0].shape[0]))

    def run(self, tokens: Sequence[int], hidden: Array, kv: SequenceState) -> Array:
        """The hidden states (n, D) after `tokens`. Adds the tokens' keys and values to kv.

        tokens: (n,) at most PIECE_ROWS ids, which follow those in kv. hidden: (n, D or T) from `mixed` or an
        earlier `run`; may be overwritten. Raises the errors of the cache's allocator; kv is then as before.
        """
        backend, layer = self.backend, self.layer
        count, position = len(tokens), kv.length
        kv.reserve(position + count)
        embedded = self.embedded(tokens)
        before = self.norm("embedding_norm"), self.norm("hidden_norm")
        rope_tables, spec = self.rope.run(position, count), self.config.layers[0]
        if self._block is not None:
            x = backend.linear(embedded, self.weights["joined.embedding"], before[0])
            x = backend.linear(hidden, self.weights["joined.hidden"], before[1], added=x)
            # A copy, as the next product overwrites it.
            x, place = backend.rows(x, range(count)), Place(kv, position, count)
            x = attention(backend, spec, self._block, 0, x, Rows((place,), (rope_tables,), count))
        else:
            x, second = hidden, None if layer.residual_normed else before[1]
            if layer.residual_normed:
                x = backend.normed(hidden, before[1])
            qkv = backend.linear(embedded, self.weights["qkv.embedding"], before[0])
            qkv = backend.linear(x, self.weights["qkv.hidden"], second, added=qkv)
            seen = backend.attend(qkv, kv, 0, position, *rope_tables, spec.attention, self._head_norms())
            x = backend.linear(seen, self.weights["out"], added=x)
        norm = self.norm("feed_forward_norm")
        if self._experts is not None:
            x = self._experts.added_to(x, backend, norm)
        else:
            assert self._dense is not None
            x = self._dense.product(backend, x, layer.activation, norm, x)
        kv.extend(tokens)
        return backend.normed(x, self.norm("final_norm")) if layer.states_normed else x

    def logits(self, hidden: Array) -> Float32:
        """Logits (n, N) of the next token, for hidden states (n, D).

        Raises BundleError if one isn't finite.
        """
        norm = None if self.layer.states_normed else self.norm("final_norm")
        logits = self.backend.to_numpy(self.backend.linear(hidden, self._head, norm))
        if not _native.all_finite(logits):
            raise BundleError(
                f"the draft layer of {self.layer.sidecar.manifest} computes logits that are not "
                "finite; convert it again"
            )
        return logits

    def embedded(self, tokens: Sequence[int]) -> Array:
        """The embeddings of token ids (n,): (n, D)."""
        if self.layer.own_embeddings:
            return self.table_rows(tokens)
        return self.backend.embedding(self._embedding, np.asarray(tokens, dtype=np.int32))

    def table_rows(self, tokens: Sequence[int]) -> Array:
        """The rows of the stored table for token ids (n,): (n, D or R)."""
        rows = self.weights[EMBEDDINGS][list(tokens), : self.layer.table_width].astype(np.float32)
        return self.backend.load_vector(rows.reshape(-1)).reshape(rows.shape)

    def norm(self, name: str) -> Norm:
        """The norm whose weight has this name."""
        return Norm(self.weights[name], self.layer.eps)

    def gated(self, prefix: str) -> GatedMatrices:
        """The feed-forward whose matrices have this prefix."""
        return GatedMatrices(*(self.weights[prefix + it] for it in GATED))

    def _head_norms(self) -> HeadNorms | None:
        return HeadNorms(self.norm("q_norm"), self.norm("k_norm")) if self.layer.head_norm else None

    def _attention_block(self) -> LayerWeights:
        """The weights of the layer's attention, in the form of a model's layer."""
        weights, latent = self.weights, None
        if (spec := self.layer.latent) is not None:
            query_norm = Norm(weights["query_norm"], spec.eps) if spec.query_rank else None
            keys, values = weights["latent_keys"], weights["latent_values"]
            latent = LatentWeights(
                Norm(weights["latent_norm"], spec.eps), keys, values, weights.get("queries"), query_norm
            )
        return LayerWeights(
            attention_norm=self.norm("attention_norm"),
            qkv=weights["qkv"],
            head_norms=self._head_norms(),
            out=weights["out"],
            attention_output_norm=None,
            feed_forward_norm=None,
            feed_forward=None,
            feed_forward_output_norm=None,
            latent=latent,
            gates=weights.get("output_gates"),
            sinks=weights.get("sinks"),
        )

    def _mixture(self) -> DraftExperts | None:
        weights, spec = self.weights, self.layer.experts
        if spec is None:
            return None
        each = tuple(
            GatedMatrices(*(weights[expert_name(f"experts.{it}", number)] for it in GATED))
            for number in range(spec.count)
        )
        return DraftExperts(
            spec,
            self.layer.activation,
            weights["router"],
            each,
            weights.get(CHOICE_BIAS),
            self._dense,
            weights.get("shared_gate"),
        )


def expert_name(matrix: str, number: int) -> str:
    """The field name of an expert's matrix."""
    return f"{matrix}.{number}"


def load_draft_layer(
    bundle: Bundle,
    layer: DraftLayer,
    reader: FlashReader,
    backend: Backend,
    target: ModelWeights,
    max_context: int,
    cancelled: IsCancelled = never_cancelled,
) -> LoadedDraftLayer:
    """Load the bundle's draft layer into `backend`.

    reader: opened over its file. target: the model's weights, whose embedding, norm and head it may share.
    cancelled: called between two pieces.

    Raises BundleError if its bytes can't be weights, FlashReadError if they don't match their checksum,
    Cancelled if `cancelled()` holds, and the backend's error if memory runs out.
    """
    config = bundle.config
    file = TensorFile(bundle, reader, bundle.sidecar_file(layer.sidecar.tensors), 0)
    vectors = list(layer.vectors(config))
    parts: list[Part] = []
    for it in vectors:
        read = partial(file.vector, layer.name(it))
        if it == CHOICE_BIAS:
            parts.append(_Read(it, read))
        elif not it.endswith(".bias"):
            parts.append(VectorPart(it, read))
    if layer.own_head:
        parts.append(_Read(TOKENS, partial(_tokens, bundle, layer, file)))
    for it, matrix in layer.matrices(config).items():
        bias = partial(file.vector, layer.name(f"{it}.bias")) if f"{it}.bias" in vectors else None
        if it == "qkv.embedding" and layer.qkv_bias:
            bias = partial(file.vector, layer.name("qkv.bias"))
        parts += _matrix_parts(layer, file, it, matrix, bias)
    if layer.table_width:
        halves = RowFormat(16)
        rows = partial(file.rows, layer.name(EMBEDDINGS), halves)
        table = MatrixPart(EMBEDDINGS, config.vocab_size, layer.table_width, halves, rows)
        parts.append(_Embeddings(table, layer.sidecar.tensors))
    with TaskResults(part_tasks(parts, cancelled)) as ahead:
        loaded = {part.field: part.load(backend, ahead) for part in parts}
    return LoadedDraftLayer(layer, backend, loaded, target, config.vocab_size, max_context)


def _matrix_parts(
    layer: DraftLayer, file: TensorFile, field: str, matrix: DraftMatrix, bias: Callable[[], Float32] | None
) -> Iterator[MatrixPart]:
    """The part to load for the matrix `field`, or one part for each expert. bias: reads the matrix's bias;
    None without one.
    """
    stored, name = matrix.stored(layer.bits), layer.name(field)
    read = partial(file.rows, name, stored)
    if not field.startswith("experts."):
        yield MatrixPart(field, matrix.rows, matrix.cols, stored, read, bias)
        return
    for number in range(matrix.number):
        expert_rows = partial(_rows_from, read, number * matrix.rows)
        yield MatrixPart(expert_name(field, number), matrix.rows, matrix.cols, stored, expert_rows)


def _rows_from(read: Callable[[int, int], RowChunk], first: int, row0: int, count: int) -> RowChunk:
    """Rows first + row0 .. first + row0 + count of a table, numbered from row0 on."""
    return read(first + row0, count)._replace(row0=row0)


def _tokens(bundle: Bundle, layer: DraftLayer, file: TensorFile) -> NDArray[np.int64]:
    """The tokens that the layer's head has rows for. Raises BundleError unless they are ascending ids of the
    vocabulary.
    """
    span = bundle.tensor_span(layer.name(TOKENS))
    tokens = file.read(span.offset, span.nbytes).view(np.uint32).astype(np.int64)
    if tokens[-1] >= bundle.config.vocab_size or (np.diff(tokens) <= 0).any():
        raise BundleError(
            f"{layer.sidecar.tensors}: {layer.name(TOKENS)} aren't ascending ids below "
            f"{bundle.config.vocab_size}; convert the draft layer again"
        )
    return tokens
