"""The blocks of a text's windowed layers, in which a token sees only the last tokens before it.

A text keeps a ring of the last blocks. If memory allows, it also keeps those that tokens after its marks see,
and if memory is idle, all. The text can go back to any place whose window is still held. Otherwise it goes
back to an earlier place, at worst its beginning, and runs again from there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ondevice.backends.base import Block
from ondevice.backends.kv_layout import BLOCK_TOKENS, KVLayout


class WindowBlocks:
    """Keys and values of windowed layers: `blocks`, one for every 64 tokens, None where it was given up.

    allocate, release: functions for blocks of `layout.window_block_bytes` bytes, as in `SequenceState`.
    """

    def __init__(
        self, layout: KVLayout, allocate: Callable[[int], Block], release: Callable[[Block], None]
    ) -> None:
        self.layout = layout
        self.blocks: list[Block] = []
        self.marks: tuple[int, ...] = ()
        """Numbers of tokens behind which a text can go on, while there is memory for it."""
        self._copied: frozenset[int] = frozenset()
        """Blocks that are being copied, which stay until they are."""
        self._window = max(layout.windows)
        self._allocate = allocate
        self._release = release

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks held."""
        return sum(block is not None for block in self.blocks) * self.layout.window_block_bytes

    def given_up(self, length: int, n_blocks: int) -> list[int]:
        """The blocks that a text of `length` tokens gives up to make room for n_blocks in all, ascending."""
        first, kept, held = self._first_seen(length), self._marked(), self._held()
        unseen = [at for at in held if at < first and at not in kept]
        needed = len(held) - sum(at < first for at in kept) + n_blocks - len(self.blocks)
        return unseen[: max(0, needed - self.layout.ring)] if n_blocks > len(self.blocks) else []

    def reserve(self, n_blocks: int, spare: Sequence[int] = ()) -> None:
        """Make room for n_blocks in all. spare: blocks that are given up for it, if they are still held.

        If the allocator raises, spare blocks are gone, and everything else is as before.
        """
        count = n_blocks - len(self.blocks)
        added = [self._taken(at) for at in spare if self.blocks[at] is not None]
        try:
            while len(added) < count:
                added.append(self._allocate(self.layout.window_block_bytes))
            self.blocks += added[: max(0, count)]
            added = added[max(0, count) :]
        finally:
            self._let_go(added)

    def nearest(self, n_tokens: int) -> int:
        """The most tokens, at most n_tokens, for which all blocks that the next token sees are held."""
        n_tokens = min(n_tokens, len(self.blocks) * BLOCK_TOKENS)
        while n_tokens > 0 and (gap := self._last_gap(n_tokens)) is not None:
            n_tokens = gap * BLOCK_TOKENS
        return n_tokens

    def shrink(self, n_blocks: int) -> None:
        """Release the blocks after the first n_blocks."""
        while len(self.blocks) > n_blocks:
            block = self.blocks.pop()
            if block is not None:
                self._release(block)

    def forget(self, length: int, marks: bool) -> bool:
        """Release the blocks before the ring of a text of `length` tokens. Returns whether there were any.

        If `marks` is true, blocks that tokens after marks see are released too, but only when no others are
        left, together with the marks.
        """
        first, kept, held = self._first_seen(length), self._marked(), self._held()
        past = [at for at in held[: -self.layout.ring] if at < first and at not in self._copied]
        lost = [at for at in past if at not in kept]
        if marks and not lost:
            lost, self.marks = past, ()
        self.give_up(lost)
        return bool(lost)

    def copy_to(self, other: WindowBlocks, n_blocks: int) -> None:
        """Give an empty `other` a copy of the ring of the first n_blocks. If its allocator raises, it gets
        only a part.
        """
        # The allocator may take what else this text doesn't need to go on.
        self._copied = frozenset(self._held(n_blocks)[-self.layout.ring :])
        try:
            for at in range(n_blocks):
                other.blocks.append(None)
                if at in self._copied:
                    other.blocks[at] = other._allocate(self.layout.window_block_bytes)
                    other.blocks[at][:] = self.blocks[at]
        finally:
            self._copied = frozenset()

    def give_up(self, blocks: Sequence[int]) -> None:
        """Release these blocks, as far as they are held."""
        self._let_go([self._taken(at) for at in blocks if self.blocks[at] is not None])

    def _held(self, n_blocks: int | None = None) -> list[int]:
        """The numbers of the blocks held among the first n_blocks, or among all, ascending."""
        return [at for at, block in enumerate(self.blocks[:n_blocks]) if block is not None]

    def _first_seen(self, n_tokens: int) -> int:
        """The first block that a token after n_tokens sees."""
        return max(0, n_tokens + 1 - self._window) // BLOCK_TOKENS

    def _last_gap(self, n_tokens: int) -> int | None:
        """The last missing block among those that a token after n_tokens sees; None if all are held."""
        seen = range(self._first_seen(n_tokens), self.layout.blocks(n_tokens))
        return next((at for at in reversed(seen) if self.blocks[at] is None), None)

    def _marked(self) -> set[int]:
        """The held blocks that tokens after a mark see."""
        return {
            at
            for mark in self.marks
            for at in range(self._first_seen(mark), min(self.layout.blocks(mark), len(self.blocks)))
            if self.blocks[at] is not None
        }

    def _taken(self, at: int) -> Block:
        block, self.blocks[at] = self.blocks[at], None
        return block

    def _let_go(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            self._release(block)
