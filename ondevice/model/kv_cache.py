"""The key/value cache: the tokens a pass has seen, and the blocks that hold their keys and values.

It grows a block of 64 tokens at a time, from an allocator that may refuse (the memory plan's), and knows
nothing of attention: ops write and read the blocks by `KVLayout`, or an engine's own arrays, which have room
for as many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ondevice.backends.base import BLOCK_TOKENS, Block, Bytes, KVArrays, KVLayout

__all__ = ["BLOCK_TOKENS", "KVCache", "KVLayout", "allocate_block", "common_prefix"]

ALIGNMENT = 64


def allocate_block(nbytes: int) -> Bytes:
    """A zeroed (nbytes,) block on a 64-byte boundary, from the process heap."""
    buffer = np.zeros(nbytes + ALIGNMENT, dtype=np.uint8)
    start = -buffer.ctypes.data % ALIGNMENT
    return buffer[start : start + nbytes]


def common_prefix(a: Sequence[int], b: Sequence[int], most: int | None = None) -> int:
    """How many leading elements a and b share, `most` at most; where these are tokens, mostly nearly all.

    Slices are compared, which is far faster than elements one by one.
    """
    least, most = 0, min(len(a), len(b), len(a) if most is None else most)
    # The end is where they differ, if they do: guesses of the last draft.
    if a[:most] == b[:most]:
        return most
    while most - least > 1:
        middle = (least + most) // 2
        if a[least:middle] == b[least:middle]:
            least = middle
        else:
            most = middle
    return least


def _forget(block: Block) -> None:
    """The heap's blocks need no more than their last reference to go."""


class KVCache:
    """Keys and values of `tokens`, at logical positions 0 .. length - 1.

    `allocate(nbytes)` gives a block that the backend's ops can write (uint8 for numpy backends) or raises
    (`BudgetError` where a plan is in charge); `release(block)` takes one back. Where an engine has
    `arrays` of its own, these are what ops write, and blocks only count what they take.
    """

    def __init__(
        self,
        layout: KVLayout,
        allocate: Callable[[int], Block] = allocate_block,
        release: Callable[[Block], None] = _forget,
        arrays: KVArrays | None = None,
    ) -> None:
        self.layout = layout
        self.blocks: list[Block] = []
        self.places: Any = None
        self.arrays: Any = arrays
        self.tokens: list[int] = []
        self._allocate = allocate
        self._release = release

    @property
    def length(self) -> int:
        """Tokens whose keys and values are stored."""
        return len(self.tokens)

    @property
    def room(self) -> int:
        """Tokens that the blocks held have places for."""
        return len(self.blocks) * BLOCK_TOKENS

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks held, used or reserved."""
        return len(self.blocks) * self.layout.block_bytes

    def reserve(self, n_tokens: int) -> None:
        """Hold room for n_tokens positions in all. What the allocator raises leaves the cache as it was."""
        added: list[Block] = []
        try:
            while len(self.blocks) + len(added) < self.layout.blocks(n_tokens):
                added.append(self._allocate(self.layout.block_bytes))
            if added:
                if self.arrays is not None:
                    self.arrays.resize(len(self.blocks) + len(added))
                self.blocks += added
                self.places = None
                added = []
        finally:
            for block in added:
                self._release(block)

    def extend(self, tokens: Sequence[int]) -> None:
        """Count tokens whose keys and values a pass has just written behind the others."""
        room = self.room - self.length
        if len(tokens) > room:
            raise ValueError(f"{len(tokens)} tokens were written where only {room} positions are reserved")
        self.tokens.extend(tokens)

    def truncate(self, n_tokens: int) -> None:
        """Keep the first n_tokens positions and release the blocks that none of them uses."""
        if not 0 <= n_tokens <= self.length:
            raise ValueError(f"can't truncate a cache of {self.length} tokens to {n_tokens}")
        del self.tokens[n_tokens:]
        self._shrink(self.layout.blocks(n_tokens))

    def keep(self, start: int, path: Sequence[int], move: Callable[[int, int], None]) -> None:
        """Of the tokens from place `start` on, the nodes of a tree, keep those of `path`, in its order.

        path: ascending nodes. move(source, target) copies what one place holds to another.
        """
        for target, node in enumerate(path, start):
            if start + node != target:
                move(start + node, target)
                self.tokens[target] = self.tokens[start + node]
        self.truncate(start + len(path))

    def fork(self) -> KVCache:
        """An independent copy, in blocks of its own."""
        copy = KVCache(self.layout, self._allocate, self._release)
        copy.reserve(self.length)
        if self.arrays is None:
            for target, source in zip(copy.blocks, self.blocks, strict=False):
                target[:] = source
        else:
            try:
                copy.arrays = self.arrays.fork(len(copy.blocks))
            except MemoryError:
                copy.truncate(0)
                raise
        copy.tokens = list(self.tokens)
        return copy

    def _shrink(self, n_blocks: int) -> None:
        if len(self.blocks) <= n_blocks:
            return
        self.places = None
        while len(self.blocks) > n_blocks:
            self._release(self.blocks.pop())
        # Last: arrays that can't be cut for want of memory still have room for every block.
        if self.arrays is not None:
            self.arrays.resize(n_blocks)
