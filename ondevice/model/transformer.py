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

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ondevice.backends.base import Array, Backend, Float32, Int32, Linear
from ondevice.backends.forward_batch import ForwardBatch, joint_batch
from ondevice.backends.row_invariance import ANY_ROWS
from ondevice.backends.token_tree import TokenTree
from ondevice.callbacks import IsCancelled
from ondevice.errors import BundleError, UsageError, check_thread
from ondevice.model import altup
from ondevice.model.ahead import begin_states, settle
from ondevice.model.attention import Place, Rows, attention
from ondevice.model.ffn import feed_forward, prefetch
from ondevice.model.per_layer import per_layer_inputs, per_layer_output
from ondevice.model.rope import Rope
from ondevice.model.sequence_state import SequenceState
from ondevice.model.weights import DraftHead, ModelWeights, MultiStreamWeights
from ondevice.model_config import ModelConfig

WantedLogits = Literal["none", "last"]


class Cancelled(Exception):  # noqa: N818 - an outcome the decode loop handles, never an error a user sees
    """A pass was cancelled between two layers; the cache is as it was before the pass."""


@dataclass(frozen=True)
class PrunedDraft:
    """The tokens of a pass that enter the stream layers, after pruning."""

    tokens: Sequence[int]
    """Rows of these tokens in the batch, ascending."""
    streams: Sequence[int] = ()
    """Indices into `tokens` of those that get streams."""


Prune = Callable[[Array], PrunedDraft]
"""Chooses the tokens, given the hidden states (T, D) that enter the stream layers."""


@dataclass(frozen=True)
class ForwardOutput:
    """The results of a forward pass over T tokens, of which n went through all layers; S streams each."""

    tokens: Sequence[int]
    """(n,) rows of the batch that weren't pruned."""
    hidden: Array
    """(n, D) hidden states for `Transformer.logits`."""
    branches: Array | None = None
    """(n * S, D) initial states of every token's streams; with `last_only`, of the last token's alone."""
    streams: Mapping[int, Array] = field(default_factory=dict)
    """(S, D) final states of a token's streams for `Transformer.logits`, by index into `tokens`."""
    tapped: Sequence[Array] = ()
    """Hidden states, (n, D) each, of `Transformer.taps`; none of a pass of several sequences."""
    position: int = 0
    """Tokens in kv before the pass."""


class SequencePart(NamedTuple):
    """The tokens of one sequence in a pass of several; they follow those in its kv, as `run` has them."""

    batch: ForwardBatch
    kv: SequenceState


class Transformer:
    """A loaded model: its shapes, a backend, and the weights that the backend loaded.

    streams: None without multi-stream attention. draft_head: None if drafters use the whole head.

    To run with other weights, as training does, make another Transformer from `weights` with parts replaced.
    A model runs on the thread that made it, as passes use caches that belong to that thread.
    """

    def __init__(
        self,
        config: ModelConfig,
        backend: Backend,
        weights: ModelWeights,
        streams: MultiStreamWeights | None = None,
        draft_head: DraftHead | None = None,
    ) -> None:
        self.config = config
        self.backend = backend
        self.weights = weights
        self.streams = streams
        self.draft_head = draft_head
        self.taps: tuple[int, ...] = ()
        """Layers, ascending, whose inputs `run` hands out; `num_layers` means what leaves the last."""
        self.equal_rows = ANY_ROWS
        """Rows up to which the backend gives each the bits that it has alone."""
        self._thread = threading.get_ident()
        self._is_plain = config.is_plain
        self._ropes = [Rope(spec) for spec in config.ropes]
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
            found = self._layers(ForwardBatch(tokens, last_only=True), kv, cancelled, None, None)
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

    def entering(self, tokens: Sequence[int], position: int = 0) -> tuple[altup.Copies, Array | None]:
        """What enters the first layer, for tokens from `position` on: the copies of the residual, (T, D) each
        and one in most models, and the per-layer inputs of all layers, (T, L * W), or None.

        Raises UsageError for an id outside the vocabulary.
        """
        ids = self._checked(tokens)
        return self._entering(ids, self._embedded(ids, position + np.arange(len(ids))))

    def layer(
        self,
        layer: int,
        copies: altup.Copies,
        tokens: Sequence[int],
        kv: SequenceState,
        inputs: Array | None = None,
    ) -> altup.Copies:
        """One layer alone, over tokens that follow those in kv, to which it adds them.

        copies: what enters it, (T, D) each; may be overwritten. inputs: the layer's own per-layer inputs,
        (T, W). Returns what leaves it. Raises WrongThreadError, and the cache's allocator's errors.
        """
        check_thread(self._thread)
        batch = ForwardBatch(tokens)
        kv.reserve(kv.length + len(tokens))
        begin_states(self.config, self.backend, self.weights, kv, batch)
        self.backend.begin_pass(batch)
        found = self._residuals(layer, copies, batch, self._rows([_place(kv, batch)], batch), inputs)
        kv.extend(tokens)
        return found

    def leaving(self, copies: altup.Copies) -> Array:
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
        prune: Prune | None = None,
    ) -> ForwardOutput:
        """One forward pass over T tokens that follow those in kv; it adds them to kv.

        If they are a tree, `keep` decides afterwards which path stays in kv. If streams prune tokens
        ("Speculative Streaming", arXiv 2402.11131, section 3.2), only the others are added. Over `mlx` the
        result is differentiable by x, by the weights, and through the keys and values that earlier passes
        left in kv. Raises as `forward` does; kv is then as before.

        Args:
            batch: the tokens; it has no rows of streams yet.
            kv: the cache, which the pass extends.
            cancelled: asked between two layers.
            x: (T, D) input of the first layer instead of `embedding(tokens)`; may be overwritten. UsageError
                for another shape.
            prune: called before the stream layers, if the model has any. It chooses the tokens that go on
                (the text's all do) and those of them that get streams.
        """
        length = kv.length
        found: ForwardOutput | None = None
        try:
            found = self._layers(batch, kv, cancelled, x, prune)
        finally:
            if found is None:
                kv.truncate(length)
        return found

    def run_each(self, parts: Sequence[SequencePart], cancelled: IsCancelled | None = None) -> Array:
        """One pass over the tokens of several sequences, which it adds to each one's kv.

        Where the backend is row-invariant, every row has the bits that it has in a pass of its sequence
        alone: attention sees its own sequence, and everything else is computed row by row. Sequences may
        have draft trees, which aren't pruned and get no streams.

        Returns (T, D) hidden states for `logits`, of the rows of `joint_batch`. Raises as `forward` does;
        every kv is then as before.
        """
        check_thread(self._thread)
        batch = joint_batch(part.batch for part in parts)
        ids = self._checked(batch.tokens)
        lengths, done = [part.kv.length for part in parts], False
        try:
            for own, kv in parts:
                kv.reserve(kv.length + len(own.tokens))
                begin_states(self.config, self.backend, self.weights, kv, own)
            self.backend.begin_pass(batch)
            places = [_place(kv, own) for own, kv in parts]
            x, rows = self._embedded(ids, _positions(places)), self._rows(places, batch)
            x = self._all_layers(ids, x, batch, rows, cancelled)
            for own, kv in parts:
                kv.extend(own.tokens)
            done = True
        finally:
            if not done:
                for (_, kv), length in zip(parts, lengths, strict=True):
                    kv.truncate(length)
        return x

    def stream_states(
        self, branches: Array, kv: SequenceState, cancelled: IsCancelled | None = None
    ) -> Array:
        """Run the last token's streams from their initial states `branches`, (S, D), to final ones, (S, D).

        Only the stream layers run, with the neurons that are in memory. kv keeps its tokens, and may reserve
        room. Raises Cancelled, and the cache's allocator's errors.
        """
        check_thread(self._thread)
        assert self.streams is not None
        kv.reserve(kv.length + self.streams.count)
        batch = ForwardBatch((), stream_rows=self.streams.count, resident_only=True)
        self.backend.begin_pass(batch)
        rows, x = self._rows([_place(kv, batch)], batch), branches
        for layer in range(self.streams.first_layer, self.config.num_layers):
            if cancelled is not None and cancelled():
                raise Cancelled
            x = self._layer(layer, x, batch, rows)
        return x

    def pruning_logits(self, entering: Array) -> Array:
        """The pruning adapter's estimate of `draft_logits`, from the stream layers' input, (n, D)."""
        assert self.streams is not None
        assert self.streams.pruning is not None
        low, copy = self.streams.pruning, self.backend.rows(entering, range(entering.shape[0]))
        return self._head(self.backend.add_low_rank(copy, entering, low.down, low.up, 0), self._draft_rows)

    def logits(self, hidden: Array) -> Array:
        """Logits (n, V), unchecked and as the backend's array, for `hidden` (n, D) from `hidden_states`."""
        return self._head(hidden, self.weights.head)

    def draft_logits(self, hidden: Array) -> Float32:
        """Logits of the draft head's tokens, (n, its rows), or all of them, (n, V), for `hidden` (n, D).

        Raises BundleError if one isn't finite.
        """
        logits = self.backend.to_numpy(self._head(hidden, self._draft_rows))
        self.check_finite(logits)
        return logits

    @property
    def draft_tokens(self) -> NDArray[np.int64] | None:
        """Ids of the tokens that `draft_logits` are of, ascending; None for the whole vocabulary."""
        return None if self.draft_head is None else self.draft_head.tokens

    @property
    def _draft_rows(self) -> Linear:
        return self.weights.head if self.draft_head is None else self.draft_head.rows

    def _head(self, hidden: Array, rows: Linear) -> Array:
        norm, project_out = self.weights.final_norm, self.weights.project_out
        if project_out is not None:
            narrow = self.backend.linear(hidden, project_out, norm)
            hidden, norm = self.backend.rows(narrow, range(narrow.shape[0])), None
        logits, cap = self.backend.linear(hidden, rows, norm), self.config.logit_soft_cap
        return self.backend.soft_cap(logits, cap) if cap else logits

    def keep(self, kv: SequenceState, start: int, path: Sequence[int]) -> None:
        """Keep only the nodes of `path`, ascending, of the tree that is in kv from position `start` on."""
        kv.keep(start, path, partial(self.backend.kv_move, kv))
        self.settle(kv, kv.length)

    def settle(self, kv: SequenceState, n_tokens: int) -> None:
        """Bring the states of recurrent layers behind the first n_tokens in kv, if these ran ahead."""
        settle(self.config, self.backend, self.weights, kv, n_tokens)

    def accept(self, batch: ForwardBatch, rows: Sequence[int]) -> None:
        """Tell the backend which draft tokens of the last pass join the text.

        rows: rows of `batch` whose tokens are part of the text, ascending.
        """
        self.backend.accept(batch, rows)

    def _layers(
        self,
        batch: ForwardBatch,
        kv: SequenceState,
        cancelled: IsCancelled | None,
        x: Array | None,
        prune: Prune | None,
    ) -> ForwardOutput:
        """Run all layers over T tokens. Adds those that weren't pruned to kv."""
        check_thread(self._thread)
        config, ids, tree, branches = self.config, self._checked(batch.tokens), batch.tree, None
        position, tapped, last_only = kv.length, list[Array](), batch.last_only
        if config.num_layers in self.taps and len(ids) <= self.equal_rows:
            batch = replace(batch, last_only=False)
        kv.reserve(position + len(ids))
        if tree is not None and len(tree) != len(ids):
            raise UsageError(f"a tree of {len(tree)} nodes can't hold {len(ids)} tokens")
        begin_states(self.config, self.backend, self.weights, kv, batch)
        self.backend.begin_pass(batch)
        place = _place(kv, batch)
        if x is None:
            x = self._embedded(ids, _positions([place]))
        elif tuple(x.shape) != (len(ids), config.hidden_size):
            raise UsageError(f"x is {tuple(x.shape)}; it must be {(len(ids), config.hidden_size)}")
        chosen, rows = PrunedDraft(range(len(ids))), self._rows([place], batch)
        if not self._is_plain:
            x = self._with_inputs(ids, x, batch, rows, cancelled, tapped)
            kv.extend(ids.tolist())
            return ForwardOutput(chosen.tokens, x[-1:] if last_only else x, tapped=tapped, position=position)
        for layer in range(config.num_layers):
            if cancelled is not None and cancelled():
                raise Cancelled
            if self.streams is not None and layer == self.streams.first_layer:
                if prune is not None:
                    chosen = prune(x)
                    if chosen.streams or len(chosen.tokens) < len(ids):
                        x, batch = self._prune(x, kv, chosen, batch)
                        rows = self._rows([_place(kv, batch)], batch)
                        tapped = [self.backend.rows(own, chosen.tokens) for own in tapped]
                    branches = self._branches(x, range(len(chosen.tokens)))
                elif last_only:
                    branches = self._branches(x, [len(ids) - 1])
            self._tap(layer, x, len(chosen.tokens), tapped)
            x = self._layer(layer, x, batch, rows)
        kept, known = len(chosen.tokens), ids.tolist()
        self._tap(config.num_layers, x, kept, tapped)
        kv.extend([known[token] for token in chosen.tokens])
        if self.streams is None or not chosen.streams:
            x = x[-1:] if last_only else x
            return ForwardOutput(chosen.tokens, x, branches, tapped=tapped, position=position)
        count = self.streams.count
        starts = range(kept, kept + count * len(chosen.streams), count)
        ended = {token: x[start : start + count] for token, start in zip(chosen.streams, starts, strict=True)}
        return ForwardOutput(chosen.tokens, x[:kept], branches, ended, tapped, position)

    def _tap(self, layer: int, x: Array, count: int, tapped: list[Array]) -> None:
        """Add a copy of the first `count` rows of x, which enter `layer`, to `tapped` if it is wanted."""
        if layer in self.taps:
            # Layers overwrite what enters them.
            tapped.append(self.backend.rows(x, range(count)))

    def _all_layers(
        self, ids: Int32, x: Array, batch: ForwardBatch, rows: Rows, cancelled: IsCancelled | None
    ) -> Array:
        """All layers without streams: (T, D) for embeddings x (T, D)."""
        if not self._is_plain:
            return self._with_inputs(ids, x, batch, rows, cancelled)
        for layer in range(self.config.num_layers):
            if cancelled is not None and cancelled():
                raise Cancelled
            x = self._layer(layer, x, batch, rows)
        return x

    def _with_inputs(
        self,
        ids: Int32,
        x: Array,
        batch: ForwardBatch,
        rows: Rows,
        cancelled: IsCancelled | None,
        tapped: list[Array] | None = None,
    ) -> Array:
        """All layers of a model that isn't plain, which has no streams: (T, D), or the last row alone.

        tapped: gets the hidden states of `taps`.
        """
        config, (copies, inputs) = self.config, self._entering(ids, x)
        last, width = config.num_layers - 1, config.per_layer_width
        for layer in range(config.num_layers):
            if cancelled is not None and cancelled():
                raise Cancelled
            if inputs is not None and layer == last and batch.last_only:
                inputs = inputs[-1:]
            own = None if inputs is None else inputs[:, layer * width : (layer + 1) * width]
            if tapped is not None:
                self._tap(layer, copies[0], len(ids), tapped)
            copies = self._residuals(layer, copies, batch, rows, own)
        found = self.leaving(copies)
        if tapped is not None:
            self._tap(config.num_layers, found, len(ids), tapped)
        return found

    def _entering(self, ids: Int32, x: Array) -> tuple[altup.Copies, Array | None]:
        """The copies and the per-layer inputs of all layers, for embeddings x (T, D)."""
        backend, weights, inputs = self.backend, self.weights, None
        if weights.per_layer is not None:
            inputs = per_layer_inputs(backend, weights.per_layer, ids, x, self.config)
        return [x] if weights.copies is None else altup.spread(backend, weights.copies, x), inputs

    def _residuals(
        self, layer: int, copies: altup.Copies, batch: ForwardBatch, rows: Rows, inputs: Array | None
    ) -> altup.Copies:
        """One layer over all copies of the residual; inputs: the layer's per-layer inputs, (T, W)."""
        backend, weights = self.backend, self.weights.layers[layer]
        if weights.copies is None:
            x = self._layer(layer, copies[0], batch, rows)
            copies, entering = [x], x
        else:
            predicted = altup.predict(backend, weights.copies, copies)
            x = self._layer(layer, backend.rows(predicted[0], range(predicted[0].shape[0])), batch, rows)
            predicted = [copy[-x.shape[0] :] for copy in predicted]
            copies = altup.correct(backend, weights.copies, predicted, x)
            entering = copies[0] * weights.copies.scale
        if weights.per_layer is not None and inputs is not None:
            activation = self.config.activation
            added = per_layer_output(backend, weights.per_layer, entering, inputs, activation)
            first = 0 if weights.copies is None else 1
            copies = [*copies[:first], *(copy + added for copy in copies[first:])]
        return copies if weights.scale is None else [copy * weights.scale for copy in copies]

    def _layer(self, layer: int, x: Array, batch: ForwardBatch, rows: Rows) -> Array:
        """One layer over the rows of `batch`, x (R, D). Returns (R, D), or (1, D) for the last row alone."""
        backend, spec, weights = self.backend, self.config.layers[layer], self.weights.layers[layer]
        adapters = None
        if self.streams is not None and rows.adapted < x.shape[0]:
            adapters = self.streams.layer(layer)
        # In parallel, the feed-forward reads what attention reads, which may overwrite it.
        own = backend.rows(x, range(x.shape[0])) if spec.parallel else None
        x = attention(backend, spec, weights, layer, x, rows, adapters)
        if layer + 1 < self.config.num_layers and not batch.resident_only:
            known = x[: len(batch.tokens)] if batch.stream_rows else x
            prefetch(backend, self.config.layers[layer + 1], self.weights.layers[layer + 1], known)
        entering, before = x if own is None else own, None
        if layer + 1 == self.config.num_layers and batch.last_only:
            if layer + 1 in self.taps:
                # The last row has the bits of a pass without taps: there it is alone from here on.
                others = replace(batch, tokens=batch.tokens[:-1], last_only=False)
                before = feed_forward(
                    backend, spec, weights, entering[:-1], x[:-1], others, adapters, rows.adapted
                )
                before = backend.rows(before, range(len(others.tokens)))
            x, entering, batch = x[-1:], entering[-1:], batch.last_row()
        found = feed_forward(backend, spec, weights, entering, x, batch, adapters, rows.adapted)
        return found if before is None else backend.stacked([before, found])

    def _rows(self, places: Sequence[Place], batch: ForwardBatch) -> Rows:
        """The rows of a batch, which are at `places`."""
        turns = [[_turn(rope, place) for place in places] for rope in self._ropes]
        joined = [its[0] if len(its) == 1 else _joined(its) for its in turns]
        adapted = 0 if self.streams is not None and self.streams.shared else len(batch.tokens)
        return Rows(tuple(places), tuple(joined), adapted)

    def _branches(self, x: Array, tokens: Sequence[int]) -> Array:
        """Initial states of the streams of `tokens`: (n * S, D)."""
        assert self.streams is not None
        own = self.backend.rows(x, tokens)
        return self.backend.add_streams(own, range(len(tokens)), self.streams.embeddings)[len(tokens) :]

    def _prune(
        self, x: Array, kv: SequenceState, chosen: PrunedDraft, batch: ForwardBatch
    ) -> tuple[Array, ForwardBatch]:
        """x (T, D) without pruned tokens and with streams, and its batch. Moves keys and values to match."""
        assert self.streams is not None
        count, position, kept = self.streams.count, kv.length, len(chosen.tokens)
        parents = list(range(-1, x.shape[0] - 1)) if batch.tree is None else batch.tree.parents.tolist()
        if kept < x.shape[0]:
            for target, token in enumerate(chosen.tokens):
                if target != token:
                    self.backend.kv_move(kv, position + token, position + target)
            x = self.backend.rows(x, chosen.tokens)
            index = {token: target for target, token in enumerate(chosen.tokens)} | {-1: -1}
            parents = [index[parents[token]] for token in chosen.tokens]
        for token in chosen.streams:
            parents += [token, *range(len(parents), len(parents) + count - 1)]
        if chosen.streams:
            kv.reserve(position + len(parents))
            x = self.backend.add_streams(x, chosen.streams, self.streams.embeddings)
        return x, batch.pruned(chosen.tokens, TokenTree(parents), len(parents) - kept)

    def checked_logits(self, hidden: Array) -> Float32:
        """Logits (n, V) for `hidden` (n, D), from `hidden_states`. Raises BundleError if one isn't finite."""
        logits = self.backend.to_numpy(self.logits(hidden))
        self.check_finite(logits)
        return logits

    def check_finite(self, logits: Float32) -> None:
        """Raises BundleError if a value of logits, (n, V) or of a draft head, isn't finite."""
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


def _place(kv: SequenceState, batch: ForwardBatch) -> Place:
    """The place of a batch's rows where they belong to one sequence: they follow the tokens in kv."""
    tree = batch.tree if batch.tree is not None and not batch.tree.is_chain else None
    return Place(kv, kv.length, len(batch.tokens) + batch.stream_rows, tree)


def _positions(places: Sequence[Place]) -> NDArray[np.integer]:
    """The logical position of every row, (R,)."""
    found = [
        place.position + (np.arange(place.size) if place.tree is None else place.tree.depths)
        for place in places
    ]
    return found[0] if len(found) == 1 else np.concatenate(found)


def _turn(rope: Rope, place: Place) -> tuple[Float32, Float32]:
    """Cosine and sine, each (n, Dh / 2), of the rows at a place."""
    if place.tree is None:
        return rope.run(place.position, place.size)
    return rope.tables(place.position + place.tree.depths)


def _joined(turns: Sequence[tuple[Float32, Float32]]) -> tuple[Float32, Float32]:
    """Cosine and sine of the rows at all places."""
    cosines, sines = zip(*turns, strict=True)
    return np.concatenate(cosines), np.concatenate(sines)
