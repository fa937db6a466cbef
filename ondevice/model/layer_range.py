"""A range of a model's layers, and what a forward pass hands from one layer to the next.

Where several machines share a model, each runs a range of its layers, and the state of a pass between two
layers goes from one machine to the next (`LaterLayers`). On one machine the range has all layers. This module
knows nothing of embeddings, heads and sampling, nor of how a state reaches another machine. Legend: T tokens,
D model width, R rows of a batch, S streams of a token, L layers, W values of a layer's per-layer inputs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ondevice.backends.base import Array, Backend, Block, Float32, KVLayout
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.backends.kv_arrays import KVArrays
from ondevice.backends.row_invariance import RowWidths
from ondevice.callbacks import Cancelled, IsCancelled
from ondevice.errors import check_thread
from ondevice.model import altup
from ondevice.model.ahead import begin_states, settle
from ondevice.model.attention import Place, Rows, attention
from ondevice.model.ffn import feed_forward, prefetch
from ondevice.model.per_layer import per_layer_output
from ondevice.model.rope import Rope
from ondevice.model.sequence_state import SequenceState
from ondevice.model.weights import ModelWeights, MultiStreamWeights
from ondevice.model_config import ModelConfig
from ondevice.records import dataclass
from ondevice.stats import RankStats

Allocate = Callable[[int], Block]
Release = Callable[[Block], None]


class SequencePart(NamedTuple):
    """The tokens of one sequence in a pass; they follow those in its kv, as `Transformer.run` has them."""

    batch: ForwardBatch
    kv: SequenceState


@dataclass(frozen=True)
class ForwardPass:
    """A forward pass as it begins.

    parts: its sequences; only a pass of one has streams and taps. batch: of all. taps: layers of the model,
    ascending, whose inputs are wanted; its number of layers means what leaves the last. streamed: rows of the
    tokens that get streams in this pass; with it, initial states of every token's streams are wanted.
    branches: whether those of the last token's are wanted otherwise.
    """

    parts: tuple[SequencePart, ...]
    batch: ForwardBatch
    taps: tuple[int, ...] = ()
    streamed: Sequence[int] | None = None
    branches: bool = False

    @property
    def is_wanted(self) -> bool:
        """Whether it has results beside keys and values."""
        return not self.batch.silent or bool(self.taps)


@dataclass(frozen=True)
class PassState:
    """What a pass hands from one layer to the next.

    copies: of the residual, (R, D) each and one in most models; layers may overwrite them. inputs: per-layer
    inputs of the layers to come, (T, L * W), or None. entered: whether the pass has come through the layer
    where its streams enter. branches: initial states of streams, (n * S, D), as of `ForwardOutput`. tapped:
    (n, D) each, of the taps so far.
    """

    copies: altup.Copies
    inputs: Array | None = None
    entered: bool = False
    branches: Array | None = None
    tapped: Sequence[Array] = ()


class LaterLayers(Protocol):
    """The layers behind those of this machine, and their keys and values, on other machines."""

    def run(self, own: ForwardPass, state: PassState, backend: Backend, streams: int) -> PassState | None:
        """Run the layers. Returns what leaves the last; None for a pass of which nothing is wanted.

        backend: whose arrays the states have. streams: of a token; 0 without any.

        Raises the other machines' errors, after which no pass may follow.
        """

    def new_state(
        self, layout: KVLayout, allocate: Allocate, release: Release, arrays: KVArrays | None = None
    ) -> SequenceState:
        """An empty state, as `SequenceState` makes it, of which the other machines have their parts.

        What shortens or copies it here is repeated there before the next pass.
        """

    def short_of_room(self, layout: KVLayout, nbytes: int = 0) -> str:
        """The name of a machine without room for its parts of all states, and of a new block or buffer that
        takes nbytes here; "" if all have room.
        """

    def narrowed(self, widths: RowWidths) -> RowWidths:
        """The narrowest of these widths, of this machine's layers, and of the others'."""

    def prompt_rows(self, rows: int, equal_rows: int, offloads: bool) -> int:
        """Most tokens of a prompt's pass, of at most `rows`: fewer where that pipelines better.

        Not where a pass of more than equal_rows has other bits, or reads weights from flash, here
        (`offloads`) or on another machine.
        """

    def expect(self, kv: SequenceState, n_tokens: int) -> None:
        """A text begins whose state will have n_tokens: the rest of the memory is for neurons."""

    def keep(self, kv: SequenceState, start: int, path: Sequence[int]) -> None:
        """Keep only the nodes of `path` of a tree, as `LayerRange.keep` does here."""

    def stats(self, own: RankStats) -> tuple[RankStats, ...]:
        """What all machines took so far, in order. own: of this one, rank 0, but for its messages."""

    def end(self) -> None:
        """No pass follows: the other machines are done. Idempotent."""

    def accept(self, rows: Sequence[int]) -> None:
        """Rows of the last pass's batch whose tokens are part of the text, as `LayerRange.accept` has it."""


class LayerRange:
    """Layers of a model, those from `first` on, with a backend that has loaded them.

    config: of these layers. weights: theirs. streams: None without multi-stream attention.
    It runs on the thread that made it, as passes use caches that belong to that thread.
    """

    def __init__(
        self,
        config: ModelConfig,
        backend: Backend,
        weights: ModelWeights,
        streams: MultiStreamWeights | None = None,
        later: LaterLayers | None = None,
    ) -> None:
        self.config = config
        self.backend = backend
        self.weights = weights
        self.streams = streams
        self.later = later
        self.first = config.part.first
        self._thread = threading.get_ident()
        self._ropes = [Rope(spec) for spec in config.ropes]

    def begin(self, own: ForwardPass) -> None:
        """Prepare for a pass: make room for its tokens. Raises the cache's allocator's errors."""
        check_thread(self._thread)
        for batch, kv in own.parts:
            kv.reserve(kv.length + len(batch.tokens) + batch.stream_rows)
            begin_states(self.config, self.backend, self.weights, kv, batch)
        self.backend.begin_pass(own.batch)

    def run_layers(
        self, own: ForwardPass, state: PassState, cancelled: IsCancelled | None = None
    ) -> PassState:
        """Run the layers over what enters the first of them. `begin` came before; `take` comes after.

        Streams alone run in the stream layers alone. Raises Cancelled if `cancelled()` holds between two
        layers, and errors of reads.
        """
        width, tapped, first = self.config.per_layer_width, list(state.tapped), 0
        copies, inputs = state.copies, state.inputs
        if not own.batch.tokens:
            first = self.config.num_layers if self.streams is None else self.streams.first_layer
        batch, rows = self._placed(own, state.entered)
        for layer in range(first, self.config.num_layers):
            if cancelled is not None and cancelled():
                raise Cancelled
            if self.streams is not None and layer == self.streams.first_layer and self.streams.embeddings:
                state = self._enter_streams(own, replace(state, copies=copies))
                copies = state.copies
                if state.entered:
                    batch, rows = self._placed(own, True)
            self._tap(own, self.first + layer, copies[0], len(batch.tokens), tapped)
            own_inputs = None
            if inputs is not None:
                if self._ends_with(layer) and batch.last_only:
                    inputs = inputs[-1:]
                own_inputs, inputs = inputs[:, :width], inputs[:, width:]
            copies = self._residuals(layer, copies, batch, rows, own_inputs, own.taps)
        return replace(state, copies=copies, inputs=inputs, tapped=tapped)

    def take(self, own: ForwardPass) -> None:
        """Add the tokens of a pass that has run to their kv."""
        for batch, kv in own.parts:
            kv.extend(list(batch.tokens))

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
        batch = ForwardBatch(tokens)
        own = ForwardPass((SequencePart(batch, kv),), batch)
        self.begin(own)
        found = self._residuals(layer, copies, *self._placed(own, False), inputs)
        self.take(own)
        return found

    def keep(self, kv: SequenceState, start: int, path: Sequence[int]) -> None:
        """Keep only the nodes of `path`, ascending, of the tree that is in kv from position `start` on."""
        if self.later is not None:
            self.later.keep(kv, start, path)
        kv.keep(start, path, partial(self.backend.kv_move, kv))
        self.settle(kv, kv.length)

    def settle(self, kv: SequenceState, n_tokens: int) -> None:
        """Bring the states of recurrent layers behind the first n_tokens in kv, if these ran ahead."""
        settle(self.config, self.backend, self.weights, kv, n_tokens)

    def accept(self, batch: ForwardBatch, rows: Sequence[int]) -> None:
        """Tell the backend which draft tokens of the last pass join the text.

        rows: rows of `batch` whose tokens are part of the text, ascending.
        """
        if self.later is not None:
            self.later.accept(rows)
        self.backend.accept(batch, rows)

    def _ends_with(self, layer: int) -> bool:
        """Whether a layer of this range is the model's last."""
        return self.first + layer + 1 == self.config.model_layers

    def _tap(self, own: ForwardPass, layer: int, x: Array, count: int, tapped: list[Array]) -> None:
        """Add a copy of the first `count` rows of x, which enter `layer` of the model, if it is wanted."""
        if layer in own.taps:
            # Layers overwrite what enters them.
            tapped.append(self.backend.rows(x, range(count)))

    def _residuals(
        self,
        layer: int,
        copies: altup.Copies,
        batch: ForwardBatch,
        rows: Rows,
        inputs: Array | None,
        taps: Sequence[int] = (),
    ) -> altup.Copies:
        """One layer over all copies of the residual; inputs: the layer's per-layer inputs, (T, W)."""
        backend, weights = self.backend, self.weights.layers[layer]
        if weights.copies is None:
            x = self._layer(layer, copies[0], batch, rows, taps)
            copies, entering = [x], x
        else:
            predicted = altup.predict(backend, weights.copies, copies)
            x = backend.rows(predicted[0], range(predicted[0].shape[0]))
            x = self._layer(layer, x, batch, rows, taps)
            predicted = [copy[-x.shape[0] :] for copy in predicted]
            copies = altup.correct(backend, weights.copies, predicted, x)
            entering = copies[0] * weights.copies.scale
        if weights.per_layer is not None and inputs is not None:
            activation = self.config.activation
            added = per_layer_output(backend, weights.per_layer, entering, inputs, activation)
            first = 0 if weights.copies is None else 1
            copies = [*copies[:first], *(copy + added for copy in copies[first:])]
        return copies if weights.scale is None else [copy * weights.scale for copy in copies]

    def _layer(self, layer: int, x: Array, batch: ForwardBatch, rows: Rows, taps: Sequence[int]) -> Array:
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
        if self._ends_with(layer) and batch.last_only:
            if self.config.model_layers in taps:
                # The last row has the bits of a pass without taps: there it is alone from here on.
                others = replace(batch, tokens=batch.tokens[:-1], last_only=False)
                before = feed_forward(
                    backend, spec, weights, entering[:-1], x[:-1], others, adapters, rows.adapted
                )
                before = backend.rows(before, range(len(others.tokens)))
            x, entering, batch = x[-1:], entering[-1:], batch.last_row()
        found = feed_forward(backend, spec, weights, entering, x, batch, adapters, rows.adapted)
        return found if before is None else backend.stacked([before, found])

    def _placed(self, own: ForwardPass, entered: bool) -> tuple[ForwardBatch, Rows]:
        """The batch of a pass, with its streams if these have entered, and its rows. Makes room for
        streams."""
        batch, parts = own.batch, own.parts
        if entered and own.streamed:
            assert self.streams is not None
            batch = batch.with_streams(own.streamed, self.streams.count)
            ((_, kv),) = parts
            parts = (SequencePart(batch, kv),)
            kv.reserve(kv.length + len(batch.tokens) + batch.stream_rows)
        return batch, self._rows(places(parts), batch)

    def _rows(self, its: Sequence[Place], batch: ForwardBatch) -> Rows:
        """The rows of a batch, which are at these places."""
        turns = [[_turn(rope, place) for place in its] for rope in self._ropes]
        joined = [own[0] if len(own) == 1 else _joined(own) for own in turns]
        adapted = 0 if self.streams is not None and self.streams.shared else len(batch.tokens)
        return Rows(tuple(its), tuple(joined), adapted)

    def _enter_streams(self, own: ForwardPass, state: PassState) -> PassState:
        """The state of a pass that enters the first stream layer, with its streams."""
        assert self.streams is not None
        (x,), size = state.copies, len(own.batch.tokens)
        if own.streamed is None:
            return replace(state, branches=self._branches(x, [size - 1])) if own.branches else state
        if own.streamed:
            x = self.backend.add_streams(x, own.streamed, self.streams.embeddings)
        return replace(state, copies=[x], entered=True, branches=self._branches(x, range(size)))

    def _branches(self, x: Array, tokens: Sequence[int]) -> Array:
        """Initial states of the streams of `tokens`: (n * S, D)."""
        assert self.streams is not None
        own = self.backend.rows(x, tokens)
        return self.backend.add_streams(own, range(len(tokens)), self.streams.embeddings)[len(tokens) :]


def places(parts: Sequence[SequencePart]) -> list[Place]:
    """Where the rows of each sequence are: they follow the tokens in its kv."""
    found = []
    for batch, kv in parts:
        tree = batch.tree if batch.tree is not None and not batch.tree.is_chain else None
        found.append(Place(kv, kv.length, len(batch.tokens) + batch.stream_rows, tree))
    return found


def positions(its: Sequence[Place]) -> NDArray[np.integer]:
    """The logical position of every row, (R,)."""
    found = [
        place.position + (np.arange(place.size) if place.tree is None else place.tree.depths) for place in its
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
