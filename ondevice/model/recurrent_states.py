"""The states of a text's recurrent layers: after its last token, and at checkpoints.

A recurrent update can't be undone. So `SequenceState.truncate` keeps the tokens up to the last checkpoint
before the requested length, and later tokens run again. There are checkpoints at multiples of a number of
tokens, and at marks, which the text's last prompt sets.

Draft tokens run ahead: passes store their inputs, which are small, and leave the states unchanged. `commit`
replays accepted ones, so that a tree's nodes need no states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ondevice.backends.base import Block, Bytes
from ondevice.backends.recurrent import AHEAD_TOKENS, Ahead, StateLayout, States, StateStore, ahead_parents
from ondevice.backends.state_memory import Buffer, HostStates, StateMemory
from ondevice.backends.token_tree import Int32, TokenTree
from ondevice.errors import UsageError

Allocate = Callable[[int], Block]


class RecurrentStates:
    """The states of recurrent layers after `position` tokens.

    A pass reads these and either writes the next states, which `advance` takes, or runs ahead: it only stores
    its inputs.

    allocate, release: functions for buffers of `layout.nbytes` or `layout.ahead_bytes` bytes, as in
        `SequenceState`.
    memory: how buffers are read and written; by default they are the allocator's bytes.
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
        """Tokens after `position` whose inputs are stored."""
        self.checkpoints: dict[int, Buffer] = {}
        """States by number of tokens, ascending: multiples of `layout.spacing`, and marks."""
        self.marks: tuple[int, ...] = ()
        """Further numbers of tokens with a checkpoint, at most `layout.marks`."""
        self._split_mark: int | None = None
        """The mark inside the current pass, which writes its states there to `_split_states`."""
        self._split_states: Buffer | None = None
        self._parents: Int32 | None = None
        """`Ahead.parents` of the current pass; None if it writes the next states."""
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
        """A layer's state after `position` tokens."""
        assert self._current is not None
        state: States = self.memory.state(self._current, layer)
        return state

    def next_state(self, layer: int) -> States:
        """Where a pass writes a layer's state."""
        assert self._next is not None
        state: States = self.memory.state(self._next, layer)
        return state

    def inputs(self, layer: int, count: int) -> tuple[States, States]:
        """A layer's stored inputs for the first `count` tokens that run ahead."""
        assert self._inputs is not None
        return self.memory.inputs(self._inputs, layer, count)

    def ahead(self, layer: int) -> Ahead | None:
        """A layer's stored inputs if the pass runs ahead; None if the pass writes the next states."""
        if self._parents is None:
            return None
        return Ahead(*self.inputs(layer, len(self._parents)), self._parents)

    def mark(self, positions: Sequence[int]) -> None:
        """Set the marks, ascending numbers of tokens, in place of earlier marks. `reserve` allocates their
        buffers.
        """
        self.marks = tuple(positions[: self.layout.marks])
        self._spare += [self.checkpoints.pop(at) for at in self.ends if at not in self.marks]

    @property
    def ends(self) -> list[int]:
        """The checkpoints that exist only because of marks, ascending."""
        return [at for at in self.checkpoints if at % self.layout.spacing]

    def split_at_mark(self, count: int) -> None:
        """Let the next pass, of `count` tokens, write the next states, and also those at a mark inside the
        pass.
        """
        self._drop_split()
        inside = [at for at in self.marks if self.position < at < self.position + count]
        if inside:
            self._split_mark, self._split_states = inside[-1], self._spare.pop()

    def stretches(self, count: int) -> list[tuple[StateStore, int]]:
        """The `count` tokens of the pass, divided at a mark: the states and the number of tokens
        of each run.
        """
        if self._split_mark is None:
            return [(self, count)]
        first, memory = self._split_mark - self.position, self.memory
        return [
            (Stretch(memory, self._current, self._split_states), first),
            (Stretch(memory, self._split_states, self._next), count - first),
        ]

    def reserve(self, n_tokens: int) -> None:
        """Allocate the buffers that n_tokens need. If the allocator raises, nothing changes."""
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
        """Let the next pass, of `count` tokens, run ahead of the states: it only stores its inputs.

        Raises UsageError for too many tokens, and what the allocator raises.
        """
        known = self.tokens_ahead
        if known + count > AHEAD_TOKENS:
            raise UsageError(
                f"{known + count} tokens can't run ahead of recurrent layers: up to {AHEAD_TOKENS} can"
            )
        self._hold_inputs()
        self._drop_split()
        self._parents = ahead_parents(known, count, tree)

    def extend(self, position: int) -> bool:
        """Take the results of a pass that ends at `position`. Returns whether that is a new checkpoint."""
        if self._parents is None:
            return self.advance(position)
        self._parents, self.tokens_ahead = None, position - self.position
        return False

    def advance(self, position: int) -> bool:
        """Take the states written after `position` tokens. Returns whether they are a new checkpoint."""
        self._current, self._next = self._next, self._current
        if self._split_mark is not None:
            self.checkpoints[self._split_mark] = self._split_states
            self._split_mark = self._split_states = None
        self.position = position
        return self._keep_checkpoint()

    def keep(self, known: int, path: Sequence[int]) -> None:
        """Keep only the inputs of `known` tokens before a tree, and of the tree's nodes `path`, ascending."""
        tokens = [*range(known), *(known + node for node in path)]
        if tokens != list(range(len(tokens))):
            self._move_inputs(tokens)
        self.tokens_ahead = len(tokens)

    def commit(self, position: int, replay: Callable[[int], None]) -> list[int]:
        """Bring the states to `position` by replaying tokens that ran ahead of them. Returns the new
        checkpoints.

        replay(n): writes the next states, after the first n tokens that run ahead.
        """
        checkpoints, spacing = [], self.layout.spacing
        while self.position < position:
            # Stops at every checkpoint, as a text without drafts does.
            marks = [at for at in self.marks if at > self.position]
            stop = min(position, (self.position // spacing + 1) * spacing, *marks)
            count = stop - self.position
            replay(count)
            remaining = range(count, self.tokens_ahead)
            if remaining:
                self._move_inputs(remaining)
            self.tokens_ahead = len(remaining)
            if self.advance(stop):
                checkpoints.append(stop)
        return checkpoints

    def nearest(self, n_tokens: int) -> int:
        """The largest number of tokens, at most n_tokens, to which `rewind` can go back."""
        if n_tokens >= self.position:
            return min(n_tokens, self.position + self.tokens_ahead)
        return max((at for at in self.checkpoints if at <= n_tokens), default=0)

    def rewind(self, position: int) -> None:
        """Go back to `position`, a result of `nearest`, and release buffers that aren't needed then."""
        self._parents = None
        self._drop_split()
        if position < self.position and self._current is not None:
            checkpoint = self.checkpoints.get(position)
            if checkpoint is None:
                self.memory.clear(self._current)
            else:
                self.memory.copy(checkpoint, self._current)
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
        """Copy the states up to `position`, a result of `nearest`, to `other`, whose buffers are
        allocated.
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
        for at, checkpoint in self.checkpoints.items():
            if at <= position:
                copy = other.checkpoints[at] = other._spare.pop()
                self.memory.copy(checkpoint, copy)

    def checkpoint(self, position: int) -> Bytes:
        """The states at a checkpoint, (layout.nbytes,), in the format of `load`: a view or a copy."""
        return self.memory.data(self.checkpoints[position])

    def load(self, read: Callable[[Bytes], None]) -> None:
        """Set the next states, which `advance` takes, to the bytes (layout.nbytes,) that `read` fills in."""
        assert self._next is not None
        self._drop_split()
        self.memory.load(self._next, read)

    def _drop_split(self) -> None:
        """Free the buffer for a mark inside a pass, after the pass failed."""
        if self._split_states is not None:
            self._spare.append(self._split_states)
        self._split_mark = self._split_states = None

    def _keep_checkpoint(self) -> bool:
        """Copy the current states if they are a new checkpoint. Returns whether they are."""
        at = self.position
        wanted = at in self.marks or (at > 0 and at % self.layout.spacing == 0)
        if not wanted or at in self.checkpoints or not self._spare:
            return False
        assert self._current is not None
        checkpoint = self.checkpoints[at] = self._spare.pop()
        self.memory.copy(self._current, checkpoint)
        return True

    def _hold_inputs(self) -> None:
        if self._inputs is None:
            self._inputs = self.memory.new_buffer(self._allocate, self.layout.ahead_bytes)

    def _move_inputs(self, sources: Sequence[int]) -> None:
        """Move the inputs of the tokens `sources`, ascending, to the start of the buffer."""
        assert self._inputs is not None
        self.memory.move_inputs(self._inputs, sources)

    @property
    def _held(self) -> int:
        working = (self._current is not None) + (self._next is not None)
        return working + (self._split_states is not None) + len(self.checkpoints) + len(self._spare)


class Stretch:
    """The states before and after a run of tokens in a pass, a `StateStore` between two buffers."""

    def __init__(self, memory: StateMemory, before: Buffer, after: Buffer) -> None:
        self._memory = memory
        self._before = before
        self._after = after

    def state(self, layer: int) -> States:
        """A layer's state before the run."""
        state: States = self._memory.state(self._before, layer)
        return state

    def next_state(self, layer: int) -> States:
        """Where the layer's state after the run is written."""
        state: States = self._memory.state(self._after, layer)
        return state

    def ahead(self, layer: int) -> None:
        """None: the run writes states."""

    def inputs(self, layer: int, count: int) -> tuple[States, States]:
        raise NotImplementedError("no tokens of a run go ahead of its states")
