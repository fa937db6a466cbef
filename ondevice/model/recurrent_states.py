"""The states of a text's recurrent layers: behind its last token, and at checkpoints to go back to.

A state can't be taken back by a token. So a text goes back to the checkpoint before the place that it is
truncated to, and what follows runs again: `SequenceState.truncate` keeps fewer tokens than it was asked for.
"""

from __future__ import annotations

from collections.abc import Callable

from ondevice.backends.base import Bytes
from ondevice.backends.recurrent import StateLayout, States

Allocate = Callable[[int], Bytes]


class RecurrentStates:
    """States behind `position` tokens. A pass reads these and writes the next ones, which `advance` takes.

    allocate, release: of buffers of `layout.nbytes` bytes, as in `SequenceState`.
    """

    def __init__(self, layout: StateLayout, allocate: Allocate, release: Callable[[Bytes], None]) -> None:
        self.layout = layout
        self.position = 0
        self.checkpoints: dict[int, Bytes] = {}
        """States by number of tokens, ascending multiples of `layout.spacing`."""
        self._current: Bytes | None = None
        self._next: Bytes | None = None
        self._spare: list[Bytes] = []
        self._allocate = allocate
        self._release = release

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers held."""
        return self._held * self.layout.nbytes

    def state(self, layer: int) -> States:
        """A layer's state behind `position` tokens."""
        assert self._current is not None
        return self.layout.of(self._current, layer)

    def next_state(self, layer: int) -> States:
        """Where a pass writes a layer's state."""
        assert self._next is not None
        return self.layout.of(self._next, layer)

    def reserve(self, n_tokens: int) -> None:
        """Make room for what n_tokens need. If the allocator raises, all is as before."""
        added: list[Bytes] = []
        try:
            for _ in range(self.layout.buffers(n_tokens) - self._held):
                added.append(self._allocate(self.layout.nbytes))
            self._spare += added
            added = []
        finally:
            for buffer in added:
                self._release(buffer)
        if self._current is None:
            self._current, self._next = self._spare.pop(), self._spare.pop()
            self._current.fill(0)

    def advance(self, position: int) -> bool:
        """Take the states that a pass has written behind `position` tokens. True: they are a checkpoint."""
        self._current, self._next = self._next, self._current
        self.position = position
        if position % self.layout.spacing or not self._spare:
            return False
        assert self._current is not None
        kept = self.checkpoints[position] = self._spare.pop()
        kept[:] = self._current
        return True

    def nearest(self, n_tokens: int) -> int:
        """The most tokens, at most n_tokens, that `back_to` can go back to."""
        if n_tokens >= self.position:
            return self.position
        return max((at for at in self.checkpoints if at <= n_tokens), default=0)

    def back_to(self, position: int) -> None:
        """Go back to a place that `nearest` gave, and release what so many tokens don't need."""
        if position < self.position and self._current is not None:
            kept = self.checkpoints.get(position)
            if kept is None:
                self._current.fill(0)
            else:
                self._current[:] = kept
        self.position = position
        for at in [at for at in self.checkpoints if at > position]:
            self._spare.append(self.checkpoints.pop(at))
        while self._spare and self._held > self.layout.buffers(position):
            self._release(self._spare.pop())
        if not position and self._current is not None and self._next is not None:
            self._release(self._current)
            self._release(self._next)
            self._current = self._next = None

    def copy_to(self, other: RecurrentStates) -> None:
        """Give `other`, in which room is reserved, the same states."""
        if self._current is None or other._current is None:
            return
        other._current[:] = self._current
        other.position = self.position
        for at, kept in self.checkpoints.items():
            copy = other.checkpoints[at] = other._spare.pop()
            copy[:] = kept

    def load(self, read: Callable[[Bytes], None]) -> None:
        """Let `read` fill the next states, (layout.nbytes,), which `advance` then takes."""
        assert self._next is not None
        read(self._next)

    @property
    def _held(self) -> int:
        working = (self._current is not None) + (self._next is not None)
        return working + len(self.checkpoints) + len(self._spare)
