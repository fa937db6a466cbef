"""A draft layer: a decoder layer beside the model's own, which drafts from the hidden states of its passes.

A row reads the embedding of a token and the hidden state behind the token before it, and its output stands
for the hidden state behind its own token: so a row of a draft token follows from the row before it. Its keys
and values are its own. `bundle/draft_layers.py` has the two kinds and their papers.

Legend: n rows, D width of the draft layer, T of the target, V target's vocabulary, N tokens of its head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ondevice.backends.base import Array, Backend, Embedding, Float32, HeadNorms, Linear, Norm
from ondevice.bundle.draft_layers import EMBEDDINGS, TOKENS, DraftLayer
from ondevice.bundle.reader import Bundle
from ondevice.callbacks import IsCancelled, never_cancelled
from ondevice.config import RowFormat
from ondevice.errors import BundleError
from ondevice.flash.reader import FlashReader
from ondevice.kernels import memory
from ondevice.model.parts import MatrixPart, Part, VectorPart, part_tasks
from ondevice.model.rope import Rope
from ondevice.model.sequence_state import SequenceState
from ondevice.model.tensor_file import ReadAhead, TensorFile
from ondevice.model.weights import ModelWeights

PIECE_ROWS = 64
"""Most rows that run together."""


@dataclass(frozen=True)
class _Read:
    """Bytes or values that no backend loads, read in one piece."""

    field: str
    read: Any

    def tasks(self) -> Iterator[Any]:
        yield self.read

    def load(self, backend: Backend, ahead: ReadAhead) -> Any:
        return ahead.next()


@dataclass(frozen=True)
class _Embeddings:
    """A layer's own embeddings, (V, padded D) as they are stored, read and checked in chunks of rows.

    file: name of their file, for errors.
    """

    rows: MatrixPart
    file: str

    @property
    def field(self) -> str:
        return self.rows.field

    def tasks(self) -> Iterator[Any]:
        return self.rows.tasks()

    def load(self, backend: Backend, ahead: ReadAhead) -> NDArray[np.float16]:
        """Raises BundleError for values that aren't finite."""
        count, found = self.rows.num_rows, memory.empty((0, 0), np.float16)
        for row0 in self.rows.starts:
            values = ahead.next().codes.view(np.float16)
            if not np.isfinite(values).all():
                raise BundleError(
                    f"{self.file}: embeddings hold values that are not finite; convert it again"
                )
            if not row0:
                found = memory.empty((count, values.shape[1]), np.float16)
            found[row0 : row0 + len(values)] = values
        return found


class LoadedDraftLayer:
    """A draft layer whose weights a backend has loaded. It runs on the backend's thread.

    tokens: (N,) ascending ids of the tokens of its head; None for the target's whole vocabulary.
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
        """loaded: vectors and matrices by name, and `tokens` and `embeddings` where it has its own.

        vocab_size: the target's.
        """
        self.layer = layer
        self.backend = backend
        self.taps = tuple(sorted(set(layer.taps)))
        """The target's hidden states that `mixed` takes, as of `Transformer.taps`."""
        self.config = layer.layer_config(max_context)
        whole = not layer.own_head or layer.tokens == vocab_size
        self.tokens: NDArray[np.int64] | None = None if whole else loaded[TOKENS]
        self.weights = loaded
        """Vectors and matrices by name, as the backend loaded them."""
        self._embedding: Embedding = target.embedding
        self._target_norm = target.final_norm
        self._head: Linear = loaded["head"] if layer.own_head else target.head
        self._rope = Rope(self.config.ropes[0])

    def mixed(self, tapped: Sequence[Array]) -> Array:
        """What rows take for hidden states, (n, D or T), of the target's, (n, T) for each of `taps`."""
        backend, first = self.backend, tapped[0]
        if self.layer.states_normed:
            assert self._target_norm is not None
            return backend.normed(first, self._target_norm)
        if self.layer.kind == "mtp":
            return first
        tapped = [tapped[self.taps.index(tap)] for tap in self.layer.taps]
        first = tapped[0]
        found = backend.linear(first, self.weights["fc.0"])
        for tap, hidden in enumerate(tapped[1:], 1):
            found = backend.linear(hidden, self.weights[f"fc.{tap}"], added=found)
        # A copy, as a product is valid only until the next one.
        return backend.rows(found, range(first.shape[0]))

    def run(self, tokens: Sequence[int], hidden: Array, kv: SequenceState) -> Array:
        """Run n rows, whose keys and values it adds to kv; (n, D) hidden states behind `tokens`.

        tokens: (n,) at most PIECE_ROWS ids; they follow the rows in kv. hidden: (n, D or T) of `mixed`, or of
        an earlier `run`; may be overwritten. Raises the errors of the cache's allocator; kv is then as
        before.
        """
        backend, layer, kind, gates = self.backend, self.layer, self.layer.kind, None
        count, position = len(tokens), kv.length
        kv.reserve(position + count)
        embedded = self._embedded(tokens)
        before = self._norm("embedding_norm"), self._norm("hidden_norm")
        if kind == "mtp":
            x = backend.linear(embedded, self.weights["joined.embedding"], before[0])
            x = backend.linear(hidden, self.weights["joined.hidden"], before[1], added=x)
            x, entering = backend.rows(x, range(count)), self._norm("attention_norm")
            if layer.output_gates:
                # A copy, as the next product takes its place.
                gates = backend.rows(backend.linear(x, self.weights["output_gates"], entering), range(count))
            qkv = backend.linear(x, self.weights["qkv"], entering)
        else:
            x, second = hidden, None if layer.residual_normed else before[1]
            if layer.residual_normed:
                x = backend.normed(hidden, before[1])
            qkv = backend.linear(embedded, self.weights["qkv.embedding"], before[0])
            qkv = backend.linear(x, self.weights["qkv.hidden"], second, added=qkv)
        cos, sin = self._rope.run(position, count)
        spec = self.config.layers[0].attention
        seen = backend.attend(qkv, kv, 0, position, cos, sin, spec, self._head_norms())
        if gates is not None:
            seen = backend.sigmoid_gated(seen, gates)
        x = backend.linear(seen, self.weights["out"], added=x)
        norm = self._norm("feed_forward_norm")
        gate = backend.rows(backend.linear(x, self.weights["gate"], norm), range(count))
        up = backend.linear(x, self.weights["up"], norm)
        x = backend.linear(backend.gated(gate, up, layer.activation), self.weights["down"], added=x)
        kv.extend(tokens)
        return backend.normed(x, self._norm("final_norm")) if layer.states_normed else x

    def logits(self, hidden: Array) -> Float32:
        """Logits (n, N) of the tokens that may come behind rows, for their hidden states (n, D).

        Raises BundleError if one isn't finite.
        """
        norm = None if self.layer.states_normed else self._norm("final_norm")
        found = self.backend.to_numpy(self.backend.linear(hidden, self._head, norm))
        if not np.isfinite(found).all():
            raise BundleError(
                f"the draft layer of {self.layer.sidecar.manifest} computes logits that are not "
                "finite; convert it again"
            )
        return found.copy()

    def _embedded(self, tokens: Sequence[int]) -> Array:
        """(n, D) embeddings."""
        ids = np.asarray(tokens, dtype=np.int32)
        own = self.weights.get(EMBEDDINGS)
        if own is None:
            return self.backend.embedding(self._embedding, ids)
        rows = own[ids, : self.layer.hidden_size].astype(np.float32)
        return self.backend.load_vector(rows.reshape(-1)).reshape(rows.shape)

    def _norm(self, name: str) -> Norm:
        return Norm(self.weights[name], self.layer.eps)

    def _head_norms(self) -> HeadNorms | None:
        return HeadNorms(self._norm("q_norm"), self._norm("k_norm")) if self.layer.head_norm else None


def load_draft_layer(
    bundle: Bundle,
    layer: DraftLayer,
    reader: FlashReader,
    backend: Backend,
    target: ModelWeights,
    file_index: int,
    max_context: int,
    cancelled: IsCancelled = never_cancelled,
) -> LoadedDraftLayer:
    """Load the bundle's draft layer into `backend`.

    file_index: of its file in `reader`. target: the model's own weights, of which it takes what it lacks.
    cancelled: asked between two pieces.

    Raises BundleError if its bytes can't be weights, FlashReadError if they don't match their checksum,
    Cancelled if `cancelled()` holds, and the backend's error if memory runs out.
    """
    config = bundle.config
    file = TensorFile(bundle, reader, bundle.added_file(layer.sidecar.tensors), file_index)
    stored = RowFormat(layer.bits)
    vectors = list(layer.vectors(config))
    parts: list[Part] = [
        VectorPart(it, partial(file.vector, layer.name(it))) for it in vectors if not it.endswith(".bias")
    ]
    if layer.own_head:
        parts.append(_Read(TOKENS, partial(_tokens, bundle, layer, file)))
    for it, (rows, cols) in layer.matrices(config).items():
        bias = partial(file.vector, layer.name(f"{it}.bias")) if f"{it}.bias" in vectors else None
        if it == "qkv.embedding" and layer.qkv_bias:
            bias = partial(file.vector, layer.name("qkv.bias"))
        name = layer.name(it)
        parts.append(MatrixPart(it, rows, cols, stored, partial(file.rows, name, stored), bias))
    if layer.own_embeddings:
        halves = RowFormat(16)
        read = partial(file.rows, layer.name(EMBEDDINGS), halves)
        table = MatrixPart(EMBEDDINGS, config.vocab_size, layer.hidden_size, halves, read)
        parts.append(_Embeddings(table, layer.sidecar.tensors))
    with ReadAhead(part_tasks(parts, cancelled)) as ahead:
        loaded = {part.field: part.load(backend, ahead) for part in parts}
    return LoadedDraftLayer(layer, backend, loaded, target, config.vocab_size, max_context)


def _tokens(bundle: Bundle, layer: DraftLayer, file: TensorFile) -> NDArray[np.int64]:
    """The tokens of the layer's head. Raises BundleError unless they are ascending ids of the vocabulary."""
    span = bundle.tensor_span(layer.name(TOKENS))
    found = file.read(span.offset, span.nbytes).view(np.uint32).astype(np.int64)
    if found[-1] >= bundle.config.vocab_size or (np.diff(found) <= 0).any():
        raise BundleError(
            f"{layer.sidecar.tensors}: {layer.name(TOKENS)} aren't ascending ids below "
            f"{bundle.config.vocab_size}; convert the draft layer again"
        )
    return found
