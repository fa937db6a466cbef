"""Runs a range of a model's layers for rank 0. Every other rank runs one, and holds its part of all states.

It receives a pass from the rank before, runs its layers, and sends the pass to the next rank; the last one
sends the result to rank 0. Before a pass it repeats the changes that were made to states on rank 0. Any error
ends it, since the ranks' states would differ from then on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ondevice.backends.forward_batch import ForwardBatch
from ondevice.backends.kv_layout import KVLayout
from ondevice.callbacks import IsCancelled, never_cancelled
from ondevice.distributed.messages import Change, Message, PassMessage, pack, unpack
from ondevice.distributed.remote_layers import StateRoom, in_backend, in_host_memory
from ondevice.distributed.transport import Transport
from ondevice.errors import RankError, system_refusals
from ondevice.model.layer_range import ForwardPass, PassState, SequencePart
from ondevice.model.sequence_state import SequenceState
from ondevice.model.transformer import Transformer
from ondevice.runtime.loaded_model import LoadedModel
from ondevice.runtime.resolving import ResolvedModel
from ondevice.speculation.registry import is_drafter
from ondevice.stats import RankStats

MAX_SEQUENCES = 1 << 16
"""Most sequences that a rank has parts of."""


def state_layout(resolved: ResolvedModel) -> KVLayout:
    """The layout of a part's states."""
    runtime = resolved.runtime
    return KVLayout(resolved.bundle.config, runtime.kv_bits, is_drafter(runtime.speculation))


def state_room(resolved: ResolvedModel) -> StateRoom:
    """The room for states that the plan leaves on a rank with this part of a model."""
    plan = resolved.plan
    return StateRoom.of(state_layout(resolved), plan.kv_limit_bytes, resolved.widths, plan.offloads_weights)


def serve_layers(
    resolved: ResolvedModel, transport: Transport, cancelled: IsCancelled = never_cancelled
) -> None:
    """Load this rank's part of a model and serve its layers until rank 0 ends.

    Raises what loading raises, RankError, and what a pass raises.
    """
    model = LoadedModel(resolved, cancelled)
    try:
        states = model.kv.new_state
        LayerServer(
            model.transformer, transport, states, model.before_pass, model.grow_weights, model.rank_stats
        ).run()
    finally:
        model.close()


class LayerServer:
    """Serves the layers of `transformer`, on the thread that creates this object."""

    def __init__(
        self,
        transformer: Transformer,
        transport: Transport,
        new_state: Callable[[], SequenceState],
        before_pass: Callable[[ForwardBatch], None] = lambda batch: None,
        expect: Callable[[SequenceState, int], None] = lambda kv, tokens: None,
        stats: Callable[[], RankStats] = RankStats,
    ) -> None:
        """new_state: makes an empty state. before_pass: makes room for a pass. expect: called with a state
        before a text, and with its number of tokens, as `LaterLayers.expect` has it. stats: of this rank, but
        for its messages.
        """
        self._transformer = transformer
        self._transport = transport
        self._new_state = new_state
        self._before_pass = before_pass
        self._expect = expect
        self._stats = stats
        self._states: dict[int, SequenceState] = {}
        self._last = ForwardBatch(())
        """The batch of the last pass, whose draft may be accepted."""

    def run(self) -> None:
        """Serve passes until rank 0 ends. Raises RankError, and what a pass raises."""
        transformer, transport = self._transformer, self._transport
        streams, entered = 0, False
        if transformer.streams is not None:
            streams = transformer.streams.count
            entered = not self._is_before_streams and not transformer.streams.embeddings
        is_last = transport.rank == transport.size - 1
        while True:
            message = unpack(*transport.receive(), transformer.config, streams, entered)
            if message.kind == "result":
                raise RankError(
                    "rank 0's layers came as a result; is the order of ranks the same everywhere?"
                )
            if message.kind == "stats":
                rank_stats = replace(self._stats(), rank=transport.rank, hops=transport.stats)
                transport.send(*pack(Message("stats", message.changes, stats=(*message.stats, rank_stats))))
            elif message.kind != "pass" and not is_last:
                transport.send(*pack(message))
            with system_refusals():
                for change in message.changes:
                    self._change(change)
            if message.kind == "end":
                return
            if message.passed is None:
                continue
            with system_refusals():
                state, wanted = self._run(message.passed)
            if not is_last:
                passed = replace(message.passed, state=state)
                transport.send(*pack(replace(message, passed=passed)))
            elif wanted:
                transport.send(*pack(Message("result", result=replace(state, inputs=None))))

    def _run(self, passed: PassMessage) -> tuple[PassState, bool]:
        """The state of the pass after this rank's layers, and whether rank 0 waits for it."""
        transformer, batch = self._transformer, passed.batch
        parts = tuple(
            SequencePart(part.batch, self._at(part.sequence, part.position)) for part in passed.parts
        )
        if len({id(part.kv) for part in parts}) < len(parts):
            raise RankError("a pass has a sequence twice")
        forward = ForwardPass(parts, batch, passed.taps, passed.streamed, passed.branches)
        state = in_backend(passed.state, transformer.backend)
        self._before_pass(batch)
        if batch.tokens and not batch.resident_only:
            self._last = batch
        transformer.begin(forward)
        state = transformer.run_layers(forward, state)
        transformer.take(forward)
        return in_host_memory(state, transformer.backend), forward.is_wanted

    def _change(self, change: Change) -> None:
        kind, number, value, rows = change
        if kind == "accept":
            if rows and rows[-1] >= len(self._last.tokens):
                raise RankError(
                    f"row {rows[-1]} joins a text, and the last pass has {len(self._last.tokens)}"
                )
            self._transformer.accept(self._last, rows)
            return
        kv = self._state(number)
        if kind == "expect":
            self._expect(kv, value)
        elif kind == "mark":
            kv.mark_prompt(value)
        elif kind == "fork":
            self._let_go(value)
            self._states[value] = kv.fork()
        elif kind == "cut":
            self._require(kv, value <= kv.length, change)
            kv.truncate(value)
            self._require(kv, kv.length == value, change)
            if not value:
                self._let_go(number)
        else:
            self._keep(kv, change)

    def _keep(self, kv: SequenceState, change: Change) -> None:
        _, _, start, rows = change
        end = start + (rows[-1] + 1 if rows else 0)
        self._require(kv, end <= kv.length, change)
        self._transformer.keep(kv, start, rows)

    @property
    def _is_before_streams(self) -> bool:
        """Whether all layers with streams are on later ranks."""
        streams = self._transformer.streams
        return streams is None or streams.first_layer >= self._transformer.config.num_layers

    def _at(self, number: int, position: int) -> SequenceState:
        """The state of a sequence. Raises RankError unless it holds `position` tokens."""
        kv = self._state(number)
        if kv.length != position:
            raise RankError(
                f"a pass begins behind {position} tokens of a sequence that has {kv.length} on this rank"
            )
        return kv

    def _state(self, number: int) -> SequenceState:
        if number not in self._states:
            if len(self._states) >= MAX_SEQUENCES:
                raise RankError(f"rank 0 has more than {MAX_SEQUENCES} sequences")
            self._states[number] = self._new_state()
        return self._states[number]

    def _let_go(self, number: int) -> None:
        """Free the state of a sequence that has no tokens left, or that a copy replaces."""
        kv = self._states.pop(number, None)
        if kv is not None:
            kv.truncate(0)

    def _require(self, kv: SequenceState, holds: bool, change: Change) -> None:
        if not holds:
            raise RankError(f"a state of {kv.length} tokens can't change as on rank 0: {change}")
