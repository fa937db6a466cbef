"""Rank 0's side of the layers on other ranks: sends passes around the ring, and receives their results.

If a pass has no result that is wanted, such as a chunk of a prompt before the last, rank 0 doesn't wait: the
next rank computes it while rank 0 continues.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from ondevice.backends.base import Backend, Block
from ondevice.backends.kv_arrays import KVArrays
from ondevice.backends.kv_layout import KVLayout
from ondevice.backends.row_invariance import ANY_ROWS, RowWidths
from ondevice.distributed.messages import Change, Message, PassMessage, SequenceTokens, pack, unpack
from ondevice.distributed.mirrored_state import ChangeLog, MirroredState
from ondevice.distributed.transport import Transport
from ondevice.errors import BudgetError, RankError
from ondevice.model.layer_range import Allocate, ForwardPass, PassState, Release
from ondevice.model.sequence_state import SequenceState
from ondevice.model_config import ModelConfig
from ondevice.records import dataclass
from ondevice.stats import RankStats

PIPELINED_ROWS = 128
"""Tokens of a prompt's pass when ranks compute consecutive passes at once. With 256 a rank idles longer at
both ends of a prompt; with 64, narrower passes lose as much as that gains."""


@dataclass(frozen=True)
class StateRoom:
    """The memory that another rank has for states.

    limit_bytes: all of it. block_bytes: what a block takes there. state_bytes: what the states of recurrent
    layers take. ahead_bytes: what the inputs of tokens that run ahead of these states take. chain_rows,
    tree_rows: its `RowWidths`. offloads: 1 if weights may have to come from flash, else 0.
    """

    block_bytes: int
    state_bytes: int
    ahead_bytes: int
    limit_bytes: int
    chain_rows: int = ANY_ROWS
    tree_rows: int = ANY_ROWS
    offloads: int = 0

    def part_bytes(self, layout: KVLayout, nbytes: int) -> int:
        """Bytes that a block or buffer takes on that rank, if it takes nbytes on rank 0 with this layout.

        The kind of block is recognised by its size. If two kinds have the same size, the larger result
        counts.
        """
        states = layout.states
        sizes_here = (layout.block_bytes, states.nbytes, states.ahead_bytes)
        theirs = (self.block_bytes, self.state_bytes, self.ahead_bytes)
        return max(part for part, here in zip(theirs, sizes_here, strict=True) if here == nbytes)

    @staticmethod
    def of(layout: KVLayout, limit_bytes: int, widths: RowWidths, offloads: bool) -> StateRoom:
        """The room for states of a rank with this layout."""
        states, rows = layout.states, (widths.chain, widths.tree)
        sizes = (layout.block_bytes, states.nbytes, states.ahead_bytes)
        return StateRoom(*sizes, limit_bytes, *rows, int(offloads))


class RemoteLayers:
    """The `LaterLayers` of a model that run on a ring of other ranks. Used on the model's thread only."""

    def __init__(self, transport: Transport, config: ModelConfig, rooms: Sequence[StateRoom] = ()) -> None:
        """config: this rank's layers. rooms: the room for states on each other rank."""
        self._transport = transport
        self._config = config
        self._rooms = rooms
        self._log = ChangeLog(self._flush)
        self._held = Counter[int]()
        """Number of blocks and buffers of states here, by their bytes. Other ranks have as many."""
        self._streams = 0
        self._ended = False
        self.on_failure: Callable[[Exception], None] = lambda error: None
        """Called once with the error that ends the run. Without it a server would go on answering, each time
        with an error."""

    def run(self, forward: ForwardPass, state: PassState, backend: Backend, streams: int) -> PassState | None:
        self._streams = streams
        self._require_ring()
        parts = tuple(SequenceTokens(_mirrored(kv).number, kv.length, batch) for batch, kv in forward.parts)
        streamed = None if forward.streamed is None else tuple(forward.streamed)
        passed = PassMessage(parts, in_host_memory(state, backend), forward.taps, streamed, forward.branches)
        with self._exchange():
            self._transport.send(*pack(Message("pass", self._log.take(), passed)))
            result = self._received(forward, streams) if forward.is_wanted else None
        return None if result is None else in_backend(result, backend)

    def _require_ring(self) -> None:
        if self._ended:
            raise RankError("another rank has failed or ended before; start the ranks anew")

    @contextmanager
    def _exchange(self) -> Iterator[None]:
        """A context for exchanging messages. Messages can't be taken back, so no pass may follow a failed
        exchange.
        """
        self._ended = True
        try:
            yield
            self._ended = False
        finally:
            error = sys.exception()
            if self._ended and isinstance(error, Exception):
                self.on_failure(error)

    def _received(self, forward: ForwardPass, streams: int) -> PassState:
        """The result that comes back for the pass that was just sent."""
        message = unpack(*self._transport.receive(), self._config, streams)
        if message.result is None:
            raise RankError(f"another rank sent a {message.kind} where a pass's result was due")
        self._check(forward, message.result)
        return message.result

    def new_state(
        self, layout: KVLayout, allocate: Allocate, release: Release, arrays: KVArrays | None = None
    ) -> SequenceState:
        def allocate_part(nbytes: int) -> Block:
            block = allocate(nbytes)
            self._held[nbytes] += 1
            return block

        def release_part(block: Block) -> None:
            self._held[layout.block_bytes if block is None else block.nbytes] -= 1
            release(block)

        return MirroredState(self._log, layout, allocate_part, release_part, arrays)

    def short_of_room(self, layout: KVLayout, nbytes: int = 0) -> str:
        for rank, room in enumerate(self._rooms, 1):
            held = sum(
                count * room.part_bytes(layout, block_bytes) for block_bytes, count in self._held.items()
            )
            if held + (nbytes and room.part_bytes(layout, nbytes)) > room.limit_bytes:
                return f"rank {rank}"
        return ""

    def require_context(self, layout: KVLayout, n_tokens: int) -> None:
        """Check the room for states. Raises BudgetError unless every rank has room for a text of n_tokens."""
        blocks, states = layout.blocks(n_tokens), layout.states.buffers(n_tokens)
        for rank, room in enumerate(self._rooms, 1):
            needed = blocks * room.block_bytes + states * room.state_bytes + room.ahead_bytes * layout.drafts
            if needed > room.limit_bytes:
                raise BudgetError(
                    f"rank {rank} has room for {room.limit_bytes} bytes of keys, values and states, and a "
                    f"context of {n_tokens} tokens takes {needed} there; raise that machine's budget, or "
                    "lower --max-context",
                    required_bytes=needed,
                )

    def narrowed(self, widths: RowWidths) -> RowWidths:
        return RowWidths(
            min([widths.chain, *(room.chain_rows for room in self._rooms)]),
            min([widths.tree, *(room.tree_rows for room in self._rooms)]),
        )

    def prompt_rows(self, rows: int, equal_rows: int, offloads: bool) -> int:
        if offloads or equal_rows < rows or any(room.offloads for room in self._rooms):
            return rows
        return min(rows, PIPELINED_ROWS)

    def expect(self, kv: SequenceState, n_tokens: int) -> None:
        self._log.add(Change("expect", _mirrored(kv).number, n_tokens))

    def keep(self, kv: SequenceState, start: int, path: Sequence[int]) -> None:
        _mirrored(kv).kept(start, path)

    def accept(self, rows: Sequence[int]) -> None:
        self._log.add(Change("accept", 0, 0, tuple(rows)))

    def stats(self, here: RankStats) -> tuple[RankStats, ...]:
        if self._ended:
            return ()
        transport = self._transport
        mine = replace(here, rank=transport.rank, hops=transport.stats)
        with self._exchange():
            transport.send(*pack(Message("stats", self._log.take(), stats=(mine,))))
            message = unpack(*transport.receive(), self._config, self._streams)
            if message.kind != "stats" or [it.rank for it in message.stats] != list(range(transport.size)):
                raise RankError("the ranks' stats haven't come around")
        return message.stats

    def end(self) -> None:
        """Tell the other ranks that no more passes follow. Idempotent."""
        if not self._ended:
            self._ended = True
            self._transport.send(*pack(Message("end")))

    def _flush(self) -> None:
        if self._ended:
            self._log.take()
            return
        with self._exchange():
            self._transport.send(*pack(Message("changes", self._log.take())))

    def _check(self, forward: ForwardPass, result: PassState) -> None:
        """Check a result. Raises RankError unless it has the rows of its pass."""
        rows = tokens = len(forward.batch.tokens)
        if result.entered != (forward.streamed is not None):
            raise RankError("another rank's result has streams that its pass has not, or lacks them")
        rows += forward.batch.stream_rows + self._streams * len(forward.streamed or ())
        ends = {1, rows} if forward.batch.last_only else {rows}
        counts = {len(copy) for copy in result.residual_streams}
        if not counts <= ends or any(len(it) != tokens for it in result.tapped):
            raise RankError(f"another rank's result has {counts} rows; the pass has {rows}")
        if len(result.tapped) != sum(tap < self._config.part.layers for tap in forward.taps):
            raise RankError(
                f"another rank's result has {len(result.tapped)} tapped states of {len(forward.taps)}"
            )
        if result.branches is not None and len(result.branches) not in (
            self._streams,
            self._streams * tokens,
        ):
            raise RankError(f"another rank's result has {len(result.branches)} streams' states")


def _mirrored(kv: SequenceState) -> MirroredState:
    assert isinstance(kv, MirroredState)
    return kv


def in_host_memory(state: PassState, backend: Backend) -> PassState:
    """The state of a pass with its arrays copied to float32 arrays in host memory, for a message."""

    def host(array: Any) -> Any:
        return None if array is None else np.ascontiguousarray(backend.to_numpy(array), dtype=np.float32)

    return _with_arrays(state, host)


def in_backend(state: PassState, backend: Backend) -> PassState:
    """The state of a pass with its arrays, which came in a message, converted to the backend's arrays."""

    def loaded(array: Any) -> Any:
        return None if array is None else backend.load_vector(array.reshape(-1)).reshape(array.shape)

    return _with_arrays(state, loaded)


def _with_arrays(state: PassState, change: Any) -> PassState:
    return replace(
        state,
        residual_streams=[change(copy) for copy in state.residual_streams],
        inputs=change(state.inputs),
        branches=change(state.branches),
        tapped=[change(it) for it in state.tapped],
    )
