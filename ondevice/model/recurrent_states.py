"""The states of a text's recurrent layers: behind its last token, and at checkpoints to go back to.

A state can't be taken back by a token. So a text goes back to the checkpoint before the place that it is
truncated to, and what follows runs again: `SequenceState.truncate` keeps fewer tokens than it was asked for.
Checkpoints lie at multiples of a number of tokens, and at marks, which the text's last prompt sets.

Tokens that may have to be taken back, as those of drafts, run ahead: passes keep their inputs, which are
small, and leave the states as they are. Those that stay are replayed (`settle`), so that a tree's nodes
needn't each have a state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ondevice.backends.base import Block, Bytes
from ondevice.backends.recurrent import (
    AHEAD_TOKENS,
    Ahead,
    StateLayout,
    States,
    StateStore,
    ahead_parents,
)
from ondevice.backends.state_memory import Buffer, HostStates, StateMemory
from ondevice.backends.token_tree import Int32, TokenTree
from ondevice.errors import UsageError

Allocate = Callable[[int], Block]


class RecurrentStates:
    """States behind `position` tokens. A pass reads these and writes the next ones, which `advance` takes; or
    it runs ahead of them.

    allocate, release: of buffers of `layout.nbytes` or `layout.ahead_bytes` bytes, as in `SequenceState`.
    memory: what the buffers are; by default, the allocator's bytes.
    """

    def __init__(
        self,
        layout: StateLayout,
        allocate: Allocate,
        release: Callable[[Block], None],
        memory: StateMemory | None = None,
    ) -> None:
        self.layout = layout
        self.memory: StateMemory = HostStates(layout) if memory is None else memory
        self.position = 0
        self.tokens_ahead = 0
        """Tokens behind `position` whose inputs are kept."""
        self.checkpoints: dict[int, Buffer] = {}
        """States by number of tokens, ascending: multiples of `layout.spacing`, and marks."""
        self.marks: tuple[int, ...] = ()
        """Further numbers of tokens behind which states are kept, at most `layout.marks`."""
        self._way: int | None = None
        """The mark among the tokens of the pass that runs, which writes the states there to `_between`."""
        self._between: Buffer | None = None
        self._parents: Int32 | None = None
        """`Ahead.parents` of the pass that runs; None for one that writes the next states."""
        self._current: Buffer | None = None
        self._next: Buffer | None = None
        self._inputs: Buffer | None = None
        self._spare: list[Buffer] = []
        self._allocate = allocate
        self._release = release

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers held."""
        return self._held * self.layout.nbytes + (0 if self._inputs is None else self.layout.ahead_bytes)

    def state(self, layer: int) -> States:
        """A layer's state behind `position` tokens."""
        assert self._current is not None
        found: States = self.memory.state(self._current, layer)
        return found

    def next_state(self, layer: int) -> States:
        """Where a pass writes a layer's state."""
        assert self._next is not None
        found: States = self.memory.state(self._next, layer)
        return found

    def inputs(self, layer: int, count: int) -> tuple[States, States]:
        """A layer's kept inputs of the first `count` tokens that run ahead."""
        assert self._inputs is not None
        return self.memory.inputs(self._inputs, layer, count)

    def ahead(self, layer: int) -> Ahead | None:
        """Where a pass that runs ahead keeps a layer's inputs; None for one that writes the next states."""
        if self._parents is None:
            return None
        return Ahead(*self.inputs(layer, len(self._parents)), self._parents)

    def mark(self, positions: Sequence[int]) -> None:
        """Keep the states behind these numbers of tokens, ascending, when the text is there, and those of no
        earlier marks. Room for them comes with `reserve`.
        """
        self.marks = tuple(positions[: self.layout.marks])
        self._spare += [self.checkpoints.pop(at) for at in self.ends if at not in self.marks]

    @property
    def ends(self) -> list[int]:
        """The checkpoints at marks alone, ascending."""
        return [at for at in self.checkpoints if at % self.layout.spacing]

    def go_by(self, count: int) -> None:
        """The next pass, of `count` tokens, writes the next states, and those at a mark among the tokens."""
        self._drop_between()
        inside = [at for at in self.marks if self.position < at < self.position + count]
        if inside:
            self._way, self._between = inside[-1], self._spare.pop()

    def stretches(self, count: int) -> list[tuple[StateStore, int]]:
        """The tokens of the pass, `count`, in runs: the states before and behind each, and its size."""
        if self._way is None:
            return [(self, count)]
        first, memory = self._way - self.position, self.memory
        return [
            (Stretch(memory, self._current, self._between), first),
            (Stretch(memory, self._between, self._next), count - first),
        ]

    def reserve(self, n_tokens: int) -> None:
        """Make room for what n_tokens need. If the allocator raises, all is as before."""
        added: list[Buffer] = []
        try:
            for _ in range(self.layout.buffers(n_tokens, len(self.marks)) - self._held):
                added.append(self.memory.new_buffer(self._allocate, self.layout.nbytes))
            if self.layout.drafts:
                self._hold_inputs()
            self._spare += added
            added = []
        finally:
            for buffer in added:
                self._release(buffer)
        if self._current is None:
            self._current, self._next = self._spare.pop(), self._spare.pop()
            self.memory.clear(self._current)
        self._keep_checkpoint()

    def run_ahead(self, count: int, tree: TokenTree | None) -> None:
        """The next pass, of `count` tokens, runs ahead. Raises UsageError for too many, and the allocator's
        errors.
        """
        known = self.tokens_ahead
        if known + count > AHEAD_TOKENS:
            raise UsageError(
                f"{known + count} tokens can't run ahead of recurrent layers: up to {AHEAD_TOKENS} can"
            )
        self._hold_inputs()
        self._drop_between()
        self._parents = ahead_parents(known, count, tree)

    def extend(self, position: int) -> bool:
        """Take what a pass has written for the tokens up to `position`. True: that is a checkpoint."""
        if self._parents is None:
            return self.advance(position)
        self._parents, self.tokens_ahead = None, position - self.position
        return False

    def advance(self, position: int) -> bool:
        """Take the states that were written behind `position` tokens. True: they are a checkpoint."""
        self._current, self._next = self._next, self._current
        if self._way is not None:
            self.checkpoints[self._way] = self._between
            self._way = self._between = None
        self.position = position
        return self._keep_checkpoint()

    def keep(self, known: int, path: Sequence[int]) -> None:
        """Keep the inputs of `known` tokens that run ahead of a tree, and of its nodes `path`, ascending."""
        kept = [*range(known), *(known + node for node in path)]
        if kept != list(range(len(kept))):
            self._move_inputs(kept)
        self.tokens_ahead = len(kept)

    def settle(self, position: int, replay: Callable[[int], None]) -> list[int]:
        """Bring the states behind `position` tokens, of which the last run ahead. Returns new checkpoints.

        replay(n): writes the next states, those behind the first n tokens that run ahead.
        """
        found, spacing = [], self.layout.spacing
        while self.position < position:
            # By way of every checkpoint, as a text without drafts goes.
            marks = [at for at in self.marks if at > self.position]
            stop = min(position, (self.position // spacing + 1) * spacing, *marks)
            count = stop - self.position
            replay(count)
            left = range(count, self.tokens_ahead)
            if left:
                self._move_inputs(left)
            self.tokens_ahead = len(left)
            if self.advance(stop):
                found.append(stop)
        return found

    def nearest(self, n_tokens: int) -> int:
        """The most tokens, at most n_tokens, that `back_to` can go back to."""
        if n_tokens >= self.position:
            return min(n_tokens, self.position + self.tokens_ahead)
        return max((at for at in self.checkpoints if at <= n_tokens), default=0)

    def back_to(self, position: int) -> None:
        """Go back to a place that `nearest` gave, and release what so many tokens don't need."""
        self._parents = None
        self._drop_between()
        if position < self.position and self._current is not None:
            kept = self.checkpoints.get(position)
            if kept is None:
                self.memory.clear(self._current)
            else:
                self.memory.copy(kept, self._current)
        self.position = min(self.position, position)
        self.tokens_ahead = position - self.position
        for at in [at for at in self.checkpoints if at > position]:
            self._spare.append(self.checkpoints.pop(at))
        while self._spare and self._held > self.layout.buffers(position, len(self.ends)):
            self._release(self._spare.pop())
        if position:
            return
        for buffer in (self._current, self._next, self._inputs):
            if buffer is not None:
                self._release(buffer)
        self._current = self._next = self._inputs = None

    def copy_to(self, other: RecurrentStates, position: int) -> None:
        """Give `other`, in which room is reserved, the same states, up to the checkpoint at `position` if
        that lies before the last ones.
        """
        if self._current is None or other._current is None or not position:
            return
        if position < self.position:
            self.memory.copy(self.checkpoints[position], other._current)
            other.position = position
        else:
            self.memory.copy(self._current, other._current)
            other.position = self.position
            if self._inputs is not None and self.tokens_ahead:
                other._hold_inputs()
                assert other._inputs is not None
                self.memory.copy(self._inputs, other._inputs)
                other.tokens_ahead = self.tokens_ahead
        for at, kept in self.checkpoints.items():
            if at <= position:
                copy = other.checkpoints[at] = other._spare.pop()
                self.memory.copy(kept, copy)

    def checkpoint(self, position: int) -> Bytes:
        """The states of a checkpoint, (layout.nbytes,), as `load` takes them: a view or a copy."""
        return self.memory.data(self.checkpoints[position])

    def load(self, read: Callable[[Bytes], None]) -> None:
        """Let `read` fill the next states, (layout.nbytes,), which `advance` then takes."""
        assert self._next is not None
        self._drop_between()
        self.memory.load(self._next, read)

    def _drop_between(self) -> None:
        """Forget what a pass that failed may have written at a mark."""
        if self._between is not None:
            self._spare.append(self._between)
        self._way = self._between = None

    def _keep_checkpoint(self) -> bool:
        """Keep the states behind `position` tokens if these are a checkpoint. Returns whether they are a new
        one.
        """
        at = self.position
        wanted = at in self.marks or (at > 0 and at % self.layout.spacing == 0)
        if not wanted or at in self.checkpoints or not self._spare:
            return False
        assert self._current is not None
        kept = self.checkpoints[at] = self._spare.pop()
        self.memory.copy(self._current, kept)
        return True

    def _hold_inputs(self) -> None:
        if self._inputs is None:
            self._inputs = self.memory.new_buffer(self._allocate, self.layout.ahead_bytes)

    def _move_inputs(self, sources: Sequence[int]) -> None:
        """Keep the inputs of the tokens `sources`, ascending, in place of those of the first."""
        assert self._inputs is not None
        self.memory.move_inputs(self._inputs, sources)

    @property
    def _held(self) -> int:
        working = (self._current is not None) + (self._next is not None)
        return working + (self._between is not None) + len(self.checkpoints) + len(self._spare)


class Stretch:
    """`StateStore` of a run of tokens in a pass, between two buffers of states."""

    def __init__(self, memory: StateMemory, before: Buffer, after: Buffer) -> None:
        self._memory = memory
        self._before = before
        self._after = after

    def state(self, layer: int) -> States:
        """A layer's state before the run."""
        found: States = self._memory.state(self._before, layer)
        return found

    def next_state(self, layer: int) -> States:
        """Where the layer's state behind the run goes."""
        found: States = self._memory.state(self._after, layer)
        return found

    def ahead(self, layer: int) -> None:
        """None: the run writes states."""

    def inputs(self, layer: int, count: int) -> tuple[States, States]:
        raise NotImplementedError("no tokens of a run go ahead of its states")
