"""A range of a model's layers, and the state of a forward pass between two layers.

If several machines share a model, each runs a range of its layers, and the state of a pass goes from one
machine to the next (`LaterLayers`). On one machine the range has all layers. This module knows nothing of
embeddings, heads, sampling and networks. Legend: T tokens, D model width, R rows of a batch, S streams of a
token, L layers, W values of a layer's per-layer inputs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ondevice.backends.base import Array, Backend, Block, Float32
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.backends.kv_arrays import KVArrays
from ondevice.backends.kv_layout import KVLayout
from ondevice.backends.row_invariance import RowWidths
from ondevice.callbacks import Cancelled, IsCancelled
from ondevice.errors import check_thread
from ondevice.model import altup
from ondevice.model.altup import ResidualStreams
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
    """The tokens of one sequence in a pass. They follow those in its kv, as in `Transformer.run`."""

    batch: ForwardBatch
    kv: SequenceState


@dataclass(frozen=True)
class ForwardPass:
    """The inputs of a forward pass.

    parts: the sequences; a pass with streams or taps has one. batch: the batch of all sequences. taps:
    ascending numbers of the layers whose inputs are wanted; the number of layers stands for the last layer's
    output. streamed: rows of the tokens that get streams in this pass; if given, the initial states of every
    token's streams are wanted. branches: whether the initial states of the last token's streams are wanted if
    `streamed` isn't given.
    """

    parts: tuple[SequencePart, ...]
    batch: ForwardBatch
    taps: tuple[int, ...] = ()
    streamed: Sequence[int] | None = None
    branches: bool = False

    @property
    def is_wanted(self) -> bool:
        """Whether the pass has wanted results other than keys and values."""
        return not self.batch.silent or bool(self.taps)


@dataclass(frozen=True)
class PassState:
    """The state of a pass between two layers.

    residual_streams: (R, D) each, one in most models; layers may overwrite them. inputs: per-layer inputs of
    the remaining layers, (T, L * W), or None. entered: whether the pass's streams have entered. branches:
    initial states of streams, (n * S, D), as in `ForwardOutput`. tapped: (n, D) each, the inputs of the
    layers in `taps` so far.
    """

    residual_streams: ResidualStreams
    inputs: Array | None = None
    entered: bool = False
    branches: Array | None = None
    tapped: Sequence[Array] = ()


class LaterLayers(Protocol):
    """The layers after those of this machine, and their keys and values, on other machines."""

    def run(
        self, forward_pass: ForwardPass, state: PassState, backend: Backend, streams: int
    ) -> PassState | None:
        """Run the layers. Returns the state after the last layer; None for a pass without wanted results.

        backend: the backend that the state's arrays belong to. streams: number of a token's streams, or 0.

        Raises the other machines' errors, after which no pass may follow.
        """

    def new_state(
        self, layout: KVLayout, allocate: Allocate, release: Release, arrays: KVArrays | None = None
    ) -> SequenceState:
        """An empty `SequenceState`. Its parts for later layers are on the other machines.

        Truncations and copies here are repeated there before the next pass.
        """

    def short_of_room(self, layout: KVLayout, nbytes: int = 0) -> str:
        """The name of a machine that lacks room for its parts of all states, including a new block or buffer
        that takes nbytes here. "" if all have room.
        """

    def narrowed(self, widths: RowWidths) -> RowWidths:
        """The narrowest widths of all machines. widths: those of this machine."""

    def prompt_rows(self, rows: int, equal_rows: int, offloads: bool) -> int:
        """The most tokens of a prompt's pass: `rows`, or fewer if that keeps the machines busier.

        It is `rows` if passes of more than equal_rows rows give other bits, or if weights are read from
        flash, here (`offloads`) or on another machine.
        """

    def expect(self, kv: SequenceState, n_tokens: int) -> None:
        """Announce a text whose state will have n_tokens. Memory beyond that may be used for neurons."""

    def keep(self, kv: SequenceState, start: int, path: Sequence[int]) -> None:
        """Keep only the nodes of `path` of a tree, as `LayerRange.keep`."""

    def stats(self, rank_stats: RankStats) -> tuple[RankStats, ...]:
        """The stats of all machines, in order. rank_stats: of this one, rank 0, without its messages."""

    def end(self) -> None:
        """End the other machines' work. No pass may follow. Idempotent."""

    def accept(self, rows: Sequence[int]) -> None:
        """Take the rows of the last pass's batch whose tokens are part of the text."""


class LayerRange:
    """Layers of a model, from `first` on, with a backend that has loaded them.

    config, weights: those of these layers. streams: None without multi-stream attention. It must be used on
    the thread that created it, because passes use that thread's caches.
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
        self._plain = backend.plain_layers(config, weights.layers, streams)

    def begin(self, forward_pass: ForwardPass) -> None:
        """Prepare for a pass: reserve room for its tokens. Raises what the cache's allocator raises."""
        check_thread(self._thread)
        for batch, kv in forward_pass.parts:
            kv.reserve(kv.length + len(batch.tokens) + batch.stream_rows)
            self._begin_states(kv, batch)
        self.backend.begin_pass(forward_pass.batch)

    def _begin_states(self, kv: SequenceState, batch: ForwardBatch) -> None:
        """Prepare recurrent states for `batch`. In a pass with drafts tokens run ahead of the states; other
        passes stop at a mark.
        """
        if kv.states is None:
            return
        tree = None if batch.tree is None or batch.tree.is_chain else batch.tree
        if batch.drafted or batch.resident_only or tree is not None:
            kv.states.run_ahead(len(batch.tokens), tree)
        else:
            self.commit(kv, kv.length)
            kv.states.split_at_mark(len(batch.tokens))

    def run_layers(
        self, forward_pass: ForwardPass, state: PassState, cancelled: IsCancelled | None = None
    ) -> PassState:
        """Run the layers over the first layer's input. Call `begin` before it and `take` after it.

        A pass that has only streams runs only the stream layers. Raises Cancelled if `cancelled()` holds
        between two layers, and errors of reads.
        """
        width, tapped, first = self.config.per_layer_width, list(state.tapped), 0
        residuals, inputs = state.residual_streams, state.inputs
        if not forward_pass.batch.tokens:
            first = self.config.num_layers if self.streams is None else self.streams.first_layer
        batch, rows = self._placed(forward_pass, state.entered)
        done = first
        for layer in range(first, self.config.num_layers):
            if layer < done:
                continue
            if cancelled is not None and cancelled():
                raise Cancelled
            if self.streams is not None and layer == self.streams.first_layer and self.streams.embeddings:
                state = self._enter_streams(forward_pass, replace(state, residual_streams=residuals))
                residuals = state.residual_streams
                if state.entered:
                    batch, rows = self._placed(forward_pass, True)
            self._tap(forward_pass, self.first + layer, residuals[0], len(batch.tokens), tapped)
            if len(residuals) == 1 and inputs is None:
                done = layer + self._run_plain(layer, residuals[0], batch, rows, forward_pass.taps)
                if layer < done:
                    continue
            layer_inputs = None
            if inputs is not None:
                if self._ends_with(layer) and batch.last_only:
                    inputs = inputs[-1:]
                layer_inputs, inputs = inputs[:, :width], inputs[:, width:]
            residuals = self._residuals(layer, residuals, batch, rows, layer_inputs, forward_pass.taps)
        return PassState(residuals, inputs, state.entered, state.branches, tapped)

    def take(self, forward_pass: ForwardPass) -> None:
        """Add the tokens of a finished pass to their kv."""
        for batch, kv in forward_pass.parts:
            kv.extend(list(batch.tokens))

    def layer(
        self,
        layer: int,
        residuals: ResidualStreams,
        tokens: Sequence[int],
        kv: SequenceState,
        inputs: Array | None = None,
    ) -> ResidualStreams:
        """One layer's output for tokens that follow those in kv. Adds the tokens to kv.

        residuals: the input, (T, D) each; may be overwritten. inputs: the layer's per-layer inputs, (T, W).
        Raises WrongThreadError, and what the cache's allocator raises.
        """
        batch = ForwardBatch(tokens)
        forward_pass = ForwardPass((SequencePart(batch, kv),), batch)
        self.begin(forward_pass)
        out = self._residuals(layer, residuals, *self._placed(forward_pass, False), inputs)
        self.take(forward_pass)
        return out

    def keep(self, kv: SequenceState, start: int, path: Sequence[int]) -> None:
        """Keep only the nodes of `path`, ascending, of the tree in kv from position `start` on."""
        if self.later is not None:
            self.later.keep(kv, start, path)
        kv.keep(start, path, partial(self.backend.kv_move, kv))
        self.commit(kv, kv.length)

    def commit(self, kv: SequenceState, n_tokens: int) -> None:
        """Bring the recurrent states to n_tokens of kv, by replaying tokens that ran ahead of them."""
        states = kv.states
        if states is None or states.position >= n_tokens:
            return

        def replay(count: int) -> None:
            for layer in self.config.recurrent_layers:
                spec, weights = self.config.layers[layer], self.weights.layers[layer]
                if spec.delta is not None and weights.delta is not None:
                    self.backend.replay_delta(states, layer, count, spec.delta, weights.delta)
                elif spec.mamba2 is not None and weights.mixer is not None:
                    self.backend.replay_mamba2(states, layer, count, spec.mamba2, weights.mixer)
                else:
                    self.backend.replay_conv(states, layer, count)

        kv.commit(n_tokens, replay)

    def accept(self, batch: ForwardBatch, rows: Sequence[int]) -> None:
        """Tell the backend which draft tokens of the last pass were accepted.

        rows: rows of `batch` whose tokens are part of the text, ascending.
        """
        if self.later is not None:
            self.later.accept(rows)
        self.backend.accept(batch, rows)

    def _ends_with(self, layer: int) -> bool:
        """Whether a layer of this range is the model's last."""
        return self.first + layer + 1 == self.config.model_layers

    def _tap(self, forward_pass: ForwardPass, layer: int, x: Array, count: int, tapped: list[Array]) -> None:
        """Add a copy of the first `count` rows of x to `tapped`, if x, the input of the model's `layer`, is
        wanted.
        """
        if layer in forward_pass.taps:
            # A copy, as layers overwrite their input.
            tapped.append(self.backend.rows(x, range(count)))

    def _run_plain(self, layer: int, x: Array, batch: ForwardBatch, rows: Rows, taps: Sequence[int]) -> int:
        """Run layers from `layer` on in one call of the backend, over x (R, D) in place, and return how many
        ran.
        """
        if self._plain is None or (batch.resident_only and batch.tokens):
            return 0
        stop, streams = self.config.num_layers, self.streams
        if streams is not None and layer < streams.first_layer:
            stop = streams.first_layer
        stop = min([stop, *(tap - self.first for tap in taps if tap > self.first + layer)])
        if batch.last_only and x.shape[0] > 1 and stop > 0 and self._ends_with(stop - 1):
            stop -= 1
        layers = range(layer, stop)
        return self._plain.run(layers, x, batch, rows.places, rows.rope_tables, rows.adapted) if layers else 0

    def _residuals(
        self,
        layer: int,
        residuals: ResidualStreams,
        batch: ForwardBatch,
        rows: Rows,
        inputs: Array | None,
        taps: Sequence[int] = (),
    ) -> ResidualStreams:
        """The residual streams after one layer. inputs: the layer's per-layer inputs, (T, W)."""
        backend, weights = self.backend, self.weights.layers[layer]
        if weights.altup is None:
            x = self._layer(layer, residuals[0], batch, rows, taps)
            residuals, residual = [x], x
        else:
            predicted = altup.predict(backend, weights.altup, residuals)
            x = backend.rows(predicted[0], range(predicted[0].shape[0]))
            x = self._layer(layer, x, batch, rows, taps)
            predicted = [stream[-x.shape[0] :] for stream in predicted]
            residuals = altup.correct(backend, weights.altup, predicted, x)
            residual = residuals[0] * weights.altup.scale
        if weights.per_layer is not None and inputs is not None:
            activation = self.config.activation
            added = per_layer_output(backend, weights.per_layer, residual, inputs, activation)
            first = 0 if weights.altup is None else 1
            residuals = [*residuals[:first], *(x + added for x in residuals[first:])]
        return residuals if weights.scale is None else [x * weights.scale for x in residuals]

    def _layer(self, layer: int, x: Array, batch: ForwardBatch, rows: Rows, taps: Sequence[int]) -> Array:
        """One layer's output for the rows of `batch`, (R, D), or (1, D) for only the last row. x: (R, D)."""
        backend, spec, weights = self.backend, self.config.layers[layer], self.weights.layers[layer]
        adapters = None
        if self.streams is not None and rows.adapted < x.shape[0]:
            adapters = self.streams.layer(layer)
        # A parallel feed-forward has attention's input, which attention may overwrite.
        attention_input = backend.rows(x, range(x.shape[0])) if spec.parallel else None
        x = attention(backend, spec, weights, layer, x, rows, adapters)
        if layer + 1 < self.config.num_layers and not batch.resident_only:
            known = x[: len(batch.tokens)] if batch.stream_rows else x
            prefetch(backend, self.config.layers[layer + 1], self.weights.layers[layer + 1], known)
        ffn_input, before = x if attention_input is None else attention_input, None
        if self._ends_with(layer) and batch.last_only:
            if self.config.model_layers in taps:
                # The last row runs alone, so that it has the bits of a pass without taps.
                others = replace(batch, tokens=batch.tokens[:-1], last_only=False)
                before = feed_forward(
                    backend, spec, weights, ffn_input[:-1], x[:-1], others, adapters, rows.adapted
                )
                before = backend.rows(before, range(len(others.tokens)))
            x, ffn_input, batch = x[-1:], ffn_input[-1:], batch.last_row()
        out = feed_forward(backend, spec, weights, ffn_input, x, batch, adapters, rows.adapted)
        return out if before is None else backend.stacked([before, out])

    def _placed(self, forward_pass: ForwardPass, entered: bool) -> tuple[ForwardBatch, Rows]:
        """The batch of a pass, including stream rows if streams have entered, and its rows. Reserves room for
        them.
        """
        batch, parts = forward_pass.batch, forward_pass.parts
        if entered and forward_pass.streamed:
            assert self.streams is not None
            batch = batch.with_streams(forward_pass.streamed, self.streams.count)
            ((_, kv),) = parts
            parts = (SequencePart(batch, kv),)
            kv.reserve(kv.length + len(batch.tokens) + batch.stream_rows)
        return batch, self._rows(places(parts), batch)

    def _rows(self, places: Sequence[Place], batch: ForwardBatch) -> Rows:
        """The rows of a batch at these places."""
        tables = [[_rope_tables(rope, place) for place in places] for rope in self._ropes]
        joined = [each[0] if len(each) == 1 else _joined(each) for each in tables]
        adapted = 0 if self.streams is not None and self.streams.shared else len(batch.tokens)
        return Rows(tuple(places), tuple(joined), adapted)

    def _enter_streams(self, forward_pass: ForwardPass, state: PassState) -> PassState:
        """The state of a pass before the first stream layer, with its streams added."""
        assert self.streams is not None
        (x,), size = state.residual_streams, len(forward_pass.batch.tokens)
        if forward_pass.streamed is None:
            return replace(state, branches=self._branches(x, [size - 1])) if forward_pass.branches else state
        if forward_pass.streamed:
            x = self.backend.add_streams(x, forward_pass.streamed, self.streams.embeddings)
        return replace(state, residual_streams=[x], entered=True, branches=self._branches(x, range(size)))

    def _branches(self, x: Array, tokens: Sequence[int]) -> Array:
        """The initial states of the streams of `tokens`: (n * S, D)."""
        assert self.streams is not None
        rows = self.backend.rows(x, tokens)
        return self.backend.add_streams(rows, range(len(tokens)), self.streams.embeddings)[len(tokens) :]


def places(parts: Sequence[SequencePart]) -> list[Place]:
    """The place of each sequence's rows, after the tokens in its kv."""
    trees = (None if batch.tree is None or batch.tree.is_chain else batch.tree for batch, _ in parts)
    return [
        Place(kv, kv.length, len(batch.tokens) + batch.stream_rows, tree)
        for (batch, kv), tree in zip(parts, trees, strict=True)
    ]


def positions(places: Sequence[Place]) -> NDArray[np.integer]:
    """The logical position of every row, (R,)."""
    offsets = (np.arange(it.size) if it.tree is None else it.tree.depths for it in places)
    return np.concatenate([it.position + offset for it, offset in zip(places, offsets, strict=True)])


def _rope_tables(rope: Rope, place: Place) -> tuple[Float32, Float32]:
    """Cosine and sine, each (n, Dh / 2), for the rows at a place."""
    if place.tree is None:
        return rope.run(place.position, place.size)
    return rope.tables(place.position + place.tree.depths)


def _joined(tables: Sequence[tuple[Float32, Float32]]) -> tuple[Float32, Float32]:
    """Cosine and sine of several places' rows, concatenated."""
    cosines, sines = zip(*tables, strict=True)
    return np.concatenate(cosines), np.concatenate(sines)
