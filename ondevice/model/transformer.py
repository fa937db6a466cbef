"""The forward pass of a decoder-only transformer, written once over the backend ops: the file to open first.

    x = embedding(tokens) (+ positions)
    for each layer:  x += attention(norm(x));  x += feed_forward(norm(x))
    logits = head(norm(x))

Few models have embeddings narrower than their layers, several residual streams (`altup.py`), or a third block
in each layer (`per_layer.py`).

This module knows nothing of prompts, sampling, budgets or files. Legend: T tokens, D model width,
V vocabulary, R rows of a batch, S streams of a token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ondevice.backends.base import Array, Backend, Float32, Int32, Linear
from ondevice.backends.cpu_matrices import StreamedHead
from ondevice.backends.forward_batch import ForwardBatch, joint_batch
from ondevice.backends.row_invariance import ANY_ROWS
from ondevice.backends.token_tree import TokenTree
from ondevice.callbacks import Cancelled, IsCancelled
from ondevice.errors import BundleError, UsageError
from ondevice.kernels import _native
from ondevice.model import altup
from ondevice.model.altup import ResidualStreams
from ondevice.model.layer_range import (
    ForwardPass,
    LaterLayers,
    LayerRange,
    PassState,
    SequencePart,
    places,
    positions,
)
from ondevice.model.per_layer import per_layer_inputs
from ondevice.model.sequence_state import SequenceState
from ondevice.model.weights import ModelWeights, MultiStreamWeights
from ondevice.model_config import ModelConfig
from ondevice.records import dataclass

WantedLogits = Literal["none", "last"]


@dataclass(frozen=True)
class ForwardOutput:
    """The results of a forward pass over n tokens, some with S streams."""

    tokens: int
    """n."""
    hidden: Array
    """(n, D) hidden states for `Transformer.logits`."""
    branches: Array | None = None
    """(n * S, D) initial states of every token's streams; with `last_only`, (S, D) of the last token's."""
    streams: Mapping[int, Array] = field(default_factory=dict)
    """(S, D) final states of a token's streams for `Transformer.logits`, by the token's row."""
    tapped: Sequence[Array] = ()
    """Hidden states, (n, D) each, of `Transformer.taps`; empty for several sequences."""
    position: int = 0
    """Tokens in kv before the pass."""


class Transformer(LayerRange):
    """A loaded model: its config, a backend, and the weights that the backend loaded.

    streams: None without multi-stream attention. later: the layers that other machines run, or None.

    To run with other weights, as training does, create another Transformer from `weights` with parts
    replaced. A model must be used on the thread that created it, because passes use that thread's caches.
    """

    def __init__(
        self,
        config: ModelConfig,
        backend: Backend,
        weights: ModelWeights,
        streams: MultiStreamWeights | None = None,
        later: LaterLayers | None = None,
    ) -> None:
        super().__init__(config, backend, weights, streams, later)
        head = weights.head
        self._frequent = head.draft_head() if isinstance(head, StreamedHead) else None
        self.taps: tuple[int, ...] = ()
        """Layers of the model, ascending, whose inputs `run` returns; the number of layers stands for the
        last layer's output."""
        self.equal_rows = ANY_ROWS
        """Number of rows up to which each row has the bits that it has alone."""

    def forward(
        self,
        tokens: Sequence[int],
        kv: SequenceState,
        logits: WantedLogits = "last",
        cancelled: IsCancelled | None = None,
    ) -> Float32 | None:
        """Logits (1, V) of the last of T tokens that follow those in kv, or None if `logits` is `none`.

        Adds the tokens to kv. Raises Cancelled if `cancelled()` holds between two layers, WrongThreadError,
        UsageError for an id outside the vocabulary, BundleError if logits aren't finite, and the errors of
        reads and of the cache's allocator. Then kv is as before.
        """
        with ExitStack() as undo:
            undo.callback(kv.truncate, kv.length)
            output = self.run(ForwardBatch(tokens, last_only=True), kv, cancelled)
            result = None if logits == "none" else self.checked_logits(output.hidden)
            undo.pop_all()
        return result

    def every_logits(
        self, batch: ForwardBatch, kv: SequenceState, rows: int, cancelled: IsCancelled | None = None
    ) -> Iterator[Float32]:
        """Yields the logits of every token of a `run`, (at most `rows`, V) at a time.

        Before the first ones, all layers have run and kv holds the tokens.
        """
        hidden = self.run(batch, kv, cancelled).hidden
        for start in range(0, len(batch.tokens), rows):
            yield self.checked_logits(hidden[start : start + rows])

    def embedding(self, tokens: Sequence[int], position: int = 0) -> Array:
        """The input of the first layer, (T, D), for tokens from `position` on.

        Raises UsageError for an id outside the vocabulary.
        """
        return self._embedded(self._checked(tokens), position + np.arange(len(tokens)))

    def _embedded(self, ids: Int32, positions: NDArray[np.integer]) -> Array:
        """The input of the first layer, (T, D), for token ids at these positions, both (T,)."""
        x, factor = self.backend.embedding(self.weights.embedding, ids), self.config.embedding_multiplier
        x = x if factor == 1.0 else x * factor
        if self.weights.project_in is not None:
            # A copy, as a product is valid only until the next one.
            wide = self.backend.linear(x, self.weights.project_in)
            x = self.backend.rows(wide, range(len(ids)))
        table = self.weights.positions
        if table is None:
            return x
        # Only tokens that never join a text lie past the context's end.
        known = np.minimum(positions, self.config.max_context - 1)
        return x + self.backend.rows(table, known.tolist())

    def embed_residuals(
        self, tokens: Sequence[int], position: int = 0
    ) -> tuple[ResidualStreams, Array | None]:
        """The residual streams, (T, D) each, that the first layer reads, and all layers' per-layer inputs,
        (T, L * W), or None.

        The tokens begin at `position`. Raises UsageError for an id outside the vocabulary.
        """
        ids = self._checked(tokens)
        return self._enter(ids, self._embedded(ids, position + np.arange(len(ids))))

    def merge_residuals(self, residuals: ResidualStreams) -> Array:
        """The hidden states for `logits`, (T, D), made of the residual streams after the last layer."""
        weights = self.weights.altup
        return residuals[0] if weights is None else altup.gather(self.backend, weights, residuals)

    def hidden_states(
        self,
        tokens: Sequence[int],
        kv: SequenceState,
        cancelled: IsCancelled | None = None,
        x: Array | None = None,
        tree: TokenTree | None = None,
    ) -> Array:
        """The hidden states (T, D), for `logits`, of a text or a tree. Arguments as in `run`."""
        return self.run(ForwardBatch(tokens, tree), kv, cancelled, x=x).hidden

    def run(
        self,
        batch: ForwardBatch,
        kv: SequenceState,
        cancelled: IsCancelled | None = None,
        *,
        x: Array | None = None,
        streamed: Sequence[int] | None = None,
    ) -> ForwardOutput:
        """One forward pass over T tokens that follow those in kv; it adds them to kv.

        If they are a tree, `keep` decides afterwards which path stays in kv. Over `mlx` the result is
        differentiable by x, by the weights, and through the keys and values that earlier passes left in kv.
        Raises as `forward` does; kv is then as before.

        Args:
            batch: the tokens, without stream rows.
            kv: the cache, which the pass extends.
            cancelled: called between two layers.
            x: (T, D) input of the first layer instead of `embedding(tokens)`; may be overwritten. UsageError
                for another shape.
            streamed: rows of the tokens that get streams; None: the pass has no streams.
        """
        last_only, position, taps = batch.last_only, kv.length, self.taps
        if self.config.model_layers in taps and len(batch.tokens) <= self.equal_rows:
            batch = replace(batch, last_only=False)
        forward_pass = ForwardPass((SequencePart(batch, kv),), batch, taps, streamed, last_only)
        state = self._passed(forward_pass, cancelled, x)
        if state is None:
            return ForwardOutput(
                0, self.backend.load_vector(np.zeros(0, dtype=np.float32)), position=position
            )
        size, tapped = len(batch.tokens), list(state.tapped)
        hidden = self.merge_residuals(state.residual_streams)
        self._tap(forward_pass, self.config.model_layers, hidden, size, tapped)
        if not streamed or self.streams is None:
            hidden = hidden[-1:] if last_only else hidden
            return ForwardOutput(size, hidden, state.branches, tapped=tapped, position=position)
        count = self.streams.count
        starts = range(size, size + count * len(streamed), count)
        ended = {token: hidden[start : start + count] for token, start in zip(streamed, starts, strict=True)}
        return ForwardOutput(size, hidden[:size], state.branches, ended, tapped, position)

    def run_each(self, parts: Sequence[SequencePart], cancelled: IsCancelled | None = None) -> Array:
        """The hidden states (T, D), for `logits`, from one pass over the tokens of several sequences.

        The tokens are added to each sequence's kv. Rows have the order of `joint_batch`.

        On a row-invariant backend, every row has the same bits as in a pass over its sequence alone, because
        attention stays within the sequence, and everything else is computed row by row. Sequences may have
        draft trees, but no streams. Raises as `forward` does; every kv is then as before.
        """
        state = self._passed(ForwardPass(tuple(parts), joint_batch(it.batch for it in parts)), cancelled)
        assert state is not None
        return self.merge_residuals(state.residual_streams)

    def stream_states(
        self, branches: Array, kv: SequenceState, cancelled: IsCancelled | None = None
    ) -> Array:
        """Final states (S, D) of the last token's streams, from their initial states `branches`, (S, D).

        Only the stream layers run, with the neurons in memory. kv keeps its tokens, and may reserve room.
        Raises Cancelled, and what the cache's allocator raises.
        """
        assert self.streams is not None
        batch = ForwardBatch((), stream_rows=self.streams.count, resident_only=True)
        forward_pass = ForwardPass((SequencePart(batch, kv),), batch)
        self.begin(forward_pass)
        state = self._all_layers(forward_pass, PassState([branches]), cancelled)
        assert state is not None
        return state.residual_streams[0]

    def logits(self, hidden: Array) -> Array:
        """Unchecked logits (n, V), the backend's array, for `hidden` (n, D) from `hidden_states`."""
        return self._head(hidden, self.weights.head)

    @property
    def frequent_tokens(self) -> int:
        """Number of tokens, the first ones of the vocabulary, whose rows of the head are kept in memory
        before others.
        """
        return self.config.vocab_size if self._frequent is None else self._frequent.rows

    def frequent_logits(self, hidden: Array) -> Float32:
        """Logits (n, frequent_tokens) of the frequent tokens, checked as in `checked_logits`."""
        rows = self.weights.head if self._frequent is None else self._frequent
        return self._finite(self._head(hidden, rows))

    @property
    def holds_head(self) -> bool:
        """Whether all of the head is in memory."""
        return self._frequent is None or self.weights.head.is_held

    def _head(self, hidden: Array, rows: Linear) -> Array:
        norm, project_out = self.weights.final_norm, self.weights.project_out
        if project_out is not None:
            narrow = self.backend.linear(hidden, project_out, norm)
            hidden, norm = self.backend.rows(narrow, range(narrow.shape[0])), None
        logits, cap = self.backend.linear(hidden, rows, norm), self.config.logit_soft_cap
        return self.backend.soft_cap(logits, cap) if cap else logits

    def _passed(
        self, forward_pass: ForwardPass, cancelled: IsCancelled | None, x: Array | None = None
    ) -> PassState | None:
        """The last layer's output, with the tokens added to kv; None for a pass without wanted results.

        x: as in `run`. If an error is raised, every kv is as before.
        """
        lengths, done = [kv.length for _, kv in forward_pass.parts], False
        try:
            ids, tree = self._checked(forward_pass.batch.tokens), forward_pass.batch.tree
            if tree is not None and len(tree) != len(ids):
                raise UsageError(f"a tree of {len(tree)} nodes can't hold {len(ids)} tokens")
            self.begin(forward_pass)
            if x is None:
                x = self._embedded(ids, positions(places(forward_pass.parts)))
            elif tuple(x.shape) != (len(ids), self.config.hidden_size):
                raise UsageError(f"x is {tuple(x.shape)}; it must be {(len(ids), self.config.hidden_size)}")
            state = self._all_layers(forward_pass, PassState(*self._enter(ids, x)), cancelled)
            self.take(forward_pass)
            done = True
        finally:
            if not done:
                for (_, kv), length in zip(forward_pass.parts, lengths, strict=True):
                    kv.truncate(length)
        return state

    def _all_layers(
        self, forward_pass: ForwardPass, state: PassState, cancelled: IsCancelled | None
    ) -> PassState | None:
        """The last layer's output; None for a pass without wanted results."""
        state = self.run_layers(forward_pass, state, cancelled)
        if self.later is None:
            return state
        if cancelled is not None and cancelled():
            raise Cancelled
        count = 0 if self.streams is None else self.streams.count
        return self.later.run(forward_pass, state, self.backend, count)

    def _enter(self, ids: Int32, x: Array) -> tuple[ResidualStreams, Array | None]:
        """The residual streams and the per-layer inputs of all layers, for embeddings x (T, D)."""
        backend, weights, inputs = self.backend, self.weights, None
        if weights.per_layer is not None:
            inputs = per_layer_inputs(backend, weights.per_layer, ids, x, self.config)
        return [x] if weights.altup is None else altup.spread(backend, weights.altup, x), inputs

    def checked_logits(self, hidden: Array) -> Float32:
        """Logits (n, V) for `hidden` (n, D), from `hidden_states`. Raises BundleError if one isn't finite."""
        return self._finite(self.logits(hidden))

    def _finite(self, logits: Array) -> Float32:
        values = self.backend.to_numpy(logits)
        self.check_finite(values)
        return values

    def check_finite(self, logits: Float32) -> None:
        """Check logits, (n, V) or those of frequent tokens. Raises BundleError if a value isn't finite."""
        # No product of BLAS: its threads go on spinning for 0.1 s, on cores that kernels need.
        if not _native.all_finite(logits):
            raise BundleError(
                "the model computes logits that are not finite: its weights are not a usable model's; "
                "check the checkpoint and convert it again"
            )

    def _checked(self, tokens: Sequence[int]) -> Int32:
        """Tokens as (T,) int32. Raises UsageError for an id out of range."""
        if not len(tokens):
            raise UsageError("a forward pass needs at least one token")
        lowest, highest = min(tokens), max(tokens)
        if lowest < 0 or highest >= self.config.vocab_size:
            bad = lowest if lowest < 0 else highest
            raise UsageError(f"token id {bad} is not from 0 to {self.config.vocab_size - 1}")
        return np.array(tokens, dtype=np.int32)
