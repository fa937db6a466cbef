"""The forward pass of a decoder-only transformer, written once over the backend ops: the file to open first.

    x = embedding(tokens) (+ positions)
    for each layer:  x += attention(norm(x));  x += feed_forward(norm(x))
    logits = head(norm(x))

Few models have embeddings of another width than their layers, several residuals (`altup.py`), or a third
block in each layer (`per_layer.py`).

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
from ondevice.model import altup
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
    """The results of a forward pass over n tokens, with S streams each where they have some."""

    tokens: int
    """n."""
    hidden: Array
    """(n, D) hidden states for `Transformer.logits`."""
    branches: Array | None = None
    """(n * S, D) initial states of every token's streams; with `last_only`, of the last token's alone."""
    streams: Mapping[int, Array] = field(default_factory=dict)
    """(S, D) final states of a token's streams for `Transformer.logits`, by the token's row."""
    tapped: Sequence[Array] = ()
    """Hidden states, (n, D) each, of `Transformer.taps`; none of a pass of several sequences."""
    position: int = 0
    """Tokens in kv before the pass."""


class Transformer(LayerRange):
    """A loaded model: its shapes, a backend, and the weights that the backend loaded.

    streams: None without multi-stream attention. later: the layers that other machines run; None where all
    are here.

    To run with other weights, as training does, make another Transformer from `weights` with parts replaced.
    A model runs on the thread that made it, as passes use caches that belong to that thread.
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
        """Layers of the model, ascending, whose inputs `run` hands out; its number of layers means what
        leaves the last."""
        self.equal_rows = ANY_ROWS
        """Rows up to which the backend gives each the bits that it has alone."""
        self._zeros = np.zeros(config.vocab_size, dtype=np.float32)

    def forward(
        self,
        tokens: Sequence[int],
        kv: SequenceState,
        logits: WantedLogits = "last",
        cancelled: IsCancelled | None = None,
    ) -> Float32 | None:
        """Run T tokens at positions kv.length, kv.length + 1, ... and leave their keys and values in kv.

        Returns float32 logits (1, V) of the last token, or None if `logits` is `none`.
        Raises Cancelled if `cancelled()` holds between two layers, WrongThreadError, UsageError for an id
        outside the vocabulary, BundleError if logits aren't finite, and the errors of reads and of the
        cache's allocator. Then kv is as before.
        """
        with ExitStack() as undo:
            undo.callback(kv.truncate, kv.length)
            found = self.run(ForwardBatch(tokens, last_only=True), kv, cancelled)
            result = None if logits == "none" else self.checked_logits(found.hidden)
            undo.pop_all()
        return result

    def every_logits(
        self, batch: ForwardBatch, kv: SequenceState, rows: int, cancelled: IsCancelled | None = None
    ) -> Iterator[Float32]:
        """Like `run`, but yields the logits of every token in pieces, (at most rows, V).

        By the first piece, all layers have run and kv holds the tokens.
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
        """The input of the first layer, (T, D), for tokens at these positions, (T,)."""
        found, factor = self.backend.embedding(self.weights.embedding, ids), self.config.embedding_multiplier
        found = found if factor == 1.0 else found * factor
        if self.weights.project_in is not None:
            # A copy, as a product is valid only until the next one.
            wide = self.backend.linear(found, self.weights.project_in)
            found = self.backend.rows(wide, range(len(ids)))
        table = self.weights.positions
        if table is None:
            return found
        # Only tokens that never join a text lie past the context's end.
        known = np.minimum(positions, self.config.max_context - 1)
        return found + self.backend.rows(table, known.tolist())

    def embed_residuals(self, tokens: Sequence[int], position: int = 0) -> tuple[altup.Copies, Array | None]:
        """The first layer's inputs, for tokens from `position` on: residual streams, (T, D) each, one in
        most models, and the per-layer inputs of all layers, (T, L * W), or None.

        Raises UsageError for an id outside the vocabulary.
        """
        ids = self._checked(tokens)
        return self._enter(ids, self._embedded(ids, position + np.arange(len(ids))))

    def merge_residuals(self, copies: altup.Copies) -> Array:
        """The hidden states for `logits`, (T, D), of the copies that leave the last layer."""
        weights = self.weights.copies
        return copies[0] if weights is None else altup.gather(self.backend, weights, copies)

    def hidden_states(
        self,
        tokens: Sequence[int],
        kv: SequenceState,
        cancelled: IsCancelled | None = None,
        x: Array | None = None,
        tree: TokenTree | None = None,
    ) -> Array:
        """The last layer's output for a text or a tree, (T, D) hidden states for `logits`. See `run`."""
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
            batch: the tokens; it has no rows of streams yet.
            kv: the cache, which the pass extends.
            cancelled: asked between two layers.
            x: (T, D) input of the first layer instead of `embedding(tokens)`; may be overwritten. UsageError
                for another shape.
            streamed: rows of the tokens that get streams; None: streams take no part in the pass.
        """
        last_only, position, taps = batch.last_only, kv.length, self.taps
        if self.config.model_layers in taps and len(batch.tokens) <= self.equal_rows:
            batch = replace(batch, last_only=False)
        own = ForwardPass((SequencePart(batch, kv),), batch, taps, streamed, last_only)
        state = self._passed(own, cancelled, x)
        if state is None:
            return ForwardOutput(0, self.backend.load_vector(self._zeros[:0]), position=position)
        size, hidden, tapped = len(batch.tokens), self.merge_residuals(state.copies), list(state.tapped)
        self._tap(own, self.config.model_layers, hidden, size, tapped)
        if not streamed or self.streams is None:
            hidden = hidden[-1:] if last_only else hidden
            return ForwardOutput(size, hidden, state.branches, tapped=tapped, position=position)
        count = self.streams.count
        starts = range(size, size + count * len(streamed), count)
        ended = {token: hidden[start : start + count] for token, start in zip(streamed, starts, strict=True)}
        return ForwardOutput(size, hidden[:size], state.branches, ended, tapped, position)

    def run_each(self, parts: Sequence[SequencePart], cancelled: IsCancelled | None = None) -> Array:
        """One pass over the tokens of several sequences, which it adds to each one's kv.

        Where the backend is row-invariant, every row has the bits that it has in a pass of its sequence
        alone: attention sees its own sequence, and everything else is computed row by row. Sequences may
        have draft trees, which get no streams.

        Returns (T, D) hidden states for `logits`, of the rows of `joint_batch`. Raises as `forward` does;
        every kv is then as before.
        """
        state = self._passed(ForwardPass(tuple(parts), joint_batch(it.batch for it in parts)), cancelled)
        assert state is not None
        return self.merge_residuals(state.copies)

    def stream_states(
        self, branches: Array, kv: SequenceState, cancelled: IsCancelled | None = None
    ) -> Array:
        """Run the last token's streams from their initial states `branches`, (S, D), to final ones, (S, D).

        Only the stream layers run, with the neurons that are in memory. kv keeps its tokens, and may reserve
        room. Raises Cancelled, and the cache's allocator's errors.
        """
        assert self.streams is not None
        batch = ForwardBatch((), stream_rows=self.streams.count, resident_only=True)
        own = ForwardPass((SequencePart(batch, kv),), batch)
        self.begin(own)
        state = self._all_layers(own, PassState([branches]), cancelled)
        assert state is not None
        return state.copies[0]

    def logits(self, hidden: Array) -> Array:
        """Logits (n, V), unchecked and as the backend's array, for `hidden` (n, D) from `hidden_states`."""
        return self._head(hidden, self.weights.head)

    @property
    def frequent_tokens(self) -> int:
        """Number of the vocabulary's first tokens, whose rows of the head are held before the others."""
        return self.config.vocab_size if self._frequent is None else self._frequent.rows

    def frequent_logits(self, hidden: Array) -> Float32:
        """Logits of these tokens, (n, frequent_tokens), as `checked_logits` gives them."""
        rows = self.weights.head if self._frequent is None else self._frequent
        return self._finite(self._head(hidden, rows))

    @property
    def holds_head(self) -> bool:
        """Whether the whole head is in memory."""
        return self._frequent is None or self.weights.head.is_held

    def _head(self, hidden: Array, rows: Linear) -> Array:
        norm, project_out = self.weights.final_norm, self.weights.project_out
        if project_out is not None:
            narrow = self.backend.linear(hidden, project_out, norm)
            hidden, norm = self.backend.rows(narrow, range(narrow.shape[0])), None
        logits, cap = self.backend.linear(hidden, rows, norm), self.config.logit_soft_cap
        return self.backend.soft_cap(logits, cap) if cap else logits

    def _passed(
        self, own: ForwardPass, cancelled: IsCancelled | None, x: Array | None = None
    ) -> PassState | None:
        """What leaves the last layer, of a pass whose tokens are then in kv; None if nothing is wanted of it.

        x: as `run` has it. If it raises, every kv is as before.
        """
        lengths, done = [kv.length for _, kv in own.parts], False
        try:
            ids = self._checked(own.batch.tokens)
            if own.batch.tree is not None and len(own.batch.tree) != len(ids):
                raise UsageError(f"a tree of {len(own.batch.tree)} nodes can't hold {len(ids)} tokens")
            self.begin(own)
            if x is None:
                x = self._embedded(ids, positions(places(own.parts)))
            elif tuple(x.shape) != (len(ids), self.config.hidden_size):
                raise UsageError(f"x is {tuple(x.shape)}; it must be {(len(ids), self.config.hidden_size)}")
            state = self._all_layers(own, PassState(*self._enter(ids, x)), cancelled)
            self.take(own)
            done = True
        finally:
            if not done:
                for (_, kv), length in zip(own.parts, lengths, strict=True):
                    kv.truncate(length)
        return state

    def _all_layers(
        self, own: ForwardPass, state: PassState, cancelled: IsCancelled | None
    ) -> PassState | None:
        """What leaves the last layer; None if nothing is wanted of the pass."""
        state = self.run_layers(own, state, cancelled)
        if self.later is None:
            return state
        if cancelled is not None and cancelled():
            raise Cancelled
        return self.later.run(own, state, self.backend, 0 if self.streams is None else self.streams.count)

    def _enter(self, ids: Int32, x: Array) -> tuple[altup.Copies, Array | None]:
        """The copies and the per-layer inputs of all layers, for embeddings x (T, D)."""
        backend, weights, inputs = self.backend, self.weights, None
        if weights.per_layer is not None:
            inputs = per_layer_inputs(backend, weights.per_layer, ids, x, self.config)
        return [x] if weights.copies is None else altup.spread(backend, weights.copies, x), inputs

    def checked_logits(self, hidden: Array) -> Float32:
        """Logits (n, V) for `hidden` (n, D), from `hidden_states`. Raises BundleError if one isn't finite."""
        return self._finite(self.logits(hidden))

    def _finite(self, logits: Array) -> Float32:
        values = self.backend.to_numpy(logits)
        self.check_finite(values)
        return values

    def check_finite(self, logits: Float32) -> None:
        """Raises BundleError if a value of logits, (n, V) or of frequent tokens, isn't finite."""
        # Zero times a value that isn't finite is NaN. Checking each value would take many times as long.
        if any(logits.dot(self._zeros[: logits.shape[1]])):
            raise BundleError(
                "the model computes logits that are not finite: its weights are not a usable model's; "
                "check the checkpoint and convert it again"
            )

    def _checked(self, tokens: Sequence[int]) -> Int32:
        """Tokens as (T,) int32. Raises UsageError for an id out of range, which would read another record."""
        if not len(tokens):
            raise UsageError("a forward pass needs at least one token")
        lowest, highest = min(tokens), max(tokens)
        if lowest < 0 or highest >= self.config.vocab_size:
            bad = lowest if lowest < 0 else highest
            raise UsageError(f"token id {bad} is not from 0 to {self.config.vocab_size - 1}")
        return np.array(tokens, dtype=np.int32)
