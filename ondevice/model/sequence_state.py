"""The state of a text: its tokens, and the blocks of their keys and values.

It grows by blocks of 64 tokens, which the allocator (the memory plan's) may refuse. Ops read and write the
blocks by `KVLayout`, or a backend's arrays of the same capacity. Recurrent layers have `recurrent_states.py`
instead of keys and values; which blocks of windowed layers stay is in `window_blocks.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from ondevice.backends.base import Block, Bytes
from ondevice.backends.kv_arrays import KVArrays
from ondevice.backends.kv_layout import BLOCK_TOKENS, KVLayout
from ondevice.backends.recurrent import PROMPT_TAIL
from ondevice.errors import BudgetError
from ondevice.model.recurrent_states import RecurrentStates
from ondevice.model.window_blocks import WindowBlocks

__all__ = ["BLOCK_TOKENS", "KVLayout", "SequenceState", "allocate_block", "common_prefix"]

ALIGNMENT = 64


def allocate_block(nbytes: int) -> Bytes:
    """A zeroed (nbytes,) block on a 64-byte boundary, from the process heap."""
    buffer = np.zeros(nbytes + ALIGNMENT, dtype=np.uint8)
    start = -buffer.ctypes.data % ALIGNMENT
    return buffer[start : start + nbytes]


def common_prefix(a: Sequence[int], b: Sequence[int], limit: int | None = None) -> int:
    """Number of leading elements that a and b share, at most `limit`."""
    low, limit = 0, min(len(a), len(b), len(a) if limit is None else limit)
    # Usually one is a prefix of the other. Slices compare far faster than elements.
    if a[:limit] == b[:limit]:
        return limit
    while limit - low > 1:
        middle = (low + limit) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            limit = middle
    return low


def _forget(block: Block) -> None:
    """Nothing to do: a block on the heap is freed with its last reference."""


class SequenceState:
    """Keys and values of `tokens`, at logical positions 0 .. length - 1, and the states after them.

    allocate: returns a new block of a number of bytes, which the backend's ops can write to (uint8 for numpy
        backends). May raise an error, such as BudgetError under a memory plan.
    release: frees a block.
    arrays: a backend's arrays. If given, ops write to these, and blocks only account for their memory.
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
        self.drafted = 0
        """Number of last tokens that are an unverified draft."""
        self.chunked = 0
        """Number of leading tokens from complete chunks of a prompt; in a model with recurrent layers, up to
        the last of an unbroken series of checkpoints."""
        self.saved = 0
        """Number of leading tokens in the prompt cache."""
        self.states: RecurrentStates | None = None
        """States of recurrent layers; None in a model without recurrent layers."""
        if layout.states.nbytes:
            memory = None if arrays is None else arrays.states
            self.states = RecurrentStates(layout.states, allocate, release, memory)
        self.windows = WindowBlocks(layout, allocate, release) if layout.ring else None
        """Blocks of windowed layers; None in a model without such."""
        self.before_loss: Callable[[SequenceState, int], None] = lambda kv, stop: None
        """Called before blocks of windowed layers are given up, with the number of tokens up to the last."""
        self.is_idle: Callable[[int], bool] = lambda nbytes: False
        """Whether nothing else would use so many bytes: windowed layers then keep all their blocks."""
        self._allocate = allocate
        self._release = release

    @property
    def length(self) -> int:
        """Number of tokens whose keys and values are stored."""
        return len(self.tokens)

    @property
    def verified(self) -> int:
        """Number of tokens without an unverified draft."""
        return self.length - self.drafted

    @property
    def room(self) -> int:
        """Number of tokens that fit into the allocated blocks."""
        return len(self.blocks) * BLOCK_TOKENS

    @property
    def window_blocks(self) -> Sequence[Block]:
        """The blocks of windowed layers, in order; None for one that was given up."""
        return () if self.windows is None else self.windows.blocks

    @property
    def nbytes(self) -> int:
        """Bytes of the allocated blocks and states."""
        states = 0 if self.states is None else self.states.nbytes
        windows = 0 if self.windows is None else self.windows.nbytes
        return len(self.blocks) * self.layout.block_bytes + windows + states

    def reserve(self, n_tokens: int) -> None:
        """Allocate room for n_tokens in all. If the allocator raises, only kept blocks of marks may have
        changed.
        """
        while True:
            try:
                self._reserve(n_tokens, self._given_up(self.layout.blocks(n_tokens)))
                return
            except (BudgetError, MemoryError):
                if not self.forget_past():
                    raise

    def _given_up(self, n_blocks: int) -> list[int]:
        """The blocks of windowed layers that can be given up to make room for n_blocks in all."""
        added = n_blocks - len(self.blocks)
        if self.windows is None or added <= 0:
            return []
        lost = self.windows.given_up(self.length, n_blocks)
        if not lost or self.is_idle(added * (self.layout.block_bytes + self.layout.window_block_bytes)):
            return []
        self._before_loss(lost[-1])
        return lost

    def _reserve(self, n_tokens: int, spare: Sequence[int]) -> None:
        added: list[Block] = []
        done = False
        if self.states is not None:
            self.states.reserve(n_tokens)
        try:
            while len(self.blocks) + len(added) < self.layout.blocks(n_tokens):
                added.append(self._allocate(self.layout.block_bytes))
            if added:
                if self.arrays is not None:
                    self.arrays.resize(len(self.blocks) + len(added))
                if self.windows is not None:
                    self.windows.reserve(len(self.blocks) + len(added), spare)
                self.blocks += added
                self.places = None
                added = []
            done = True
        finally:
            for block in added:
                self._release(block)
            if self.states is not None and not done:
                self.states.rewind(self.length)

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens whose keys and values a pass has written at the next positions."""
        room = self.room - self.length
        if len(tokens) > room:
            raise ValueError(f"{len(tokens)} tokens were written where only {room} positions are reserved")
        self.tokens.extend(tokens)
        if self.states is not None and self.states.extend(self.length):
            self._add_checkpoint(self.length)

    def end_of_chunk(self, stop: int) -> int:
        """The end of a prompt's chunk: `stop`, or the next checkpoint if that comes first."""
        if self.states is None:
            return stop
        spacing = self.states.layout.spacing
        return min(stop, (self.length // spacing + 1) * spacing)

    def mark_prompt(self, n_tokens: int) -> None:
        """Begin a prompt that ends at n_tokens: set marks at the current length and near the prompt's end."""
        self.mark(sorted({self.length, max(self.length, n_tokens - PROMPT_TAIL)} - {0}))

    def mark(self, positions: Sequence[int]) -> None:
        """Keep recurrent states after these numbers of tokens, as `RecurrentStates.mark`."""
        if self.states is not None:
            self.states.mark(positions)
        if self.windows is not None:
            self.windows.marks = tuple(positions[: self.layout.marks])

    def forget_past(self, marks: bool = True) -> bool:
        """Release blocks of windowed layers that the text doesn't need in order to go on. Returns whether
        there were any.

        marks: whether blocks that only marks need may be released too, once no others are left.
        """
        if self.windows is None:
            return False
        self._before_loss(len(self.windows.blocks) - self.layout.ring - 1)
        self.places = None
        return self.windows.forget(self.length, marks)

    def nearest(self, n_tokens: int) -> int:
        """The largest number of tokens, at most n_tokens, that `truncate` can keep."""
        if self.windows is not None:
            return self.windows.nearest(n_tokens)
        return n_tokens if self.states is None else self.states.nearest(n_tokens)

    def truncate(self, n_tokens: int) -> None:
        """Keep the first `nearest(n_tokens)` tokens, and release the blocks after them."""
        if not 0 <= n_tokens <= self.length:
            raise ValueError(f"can't truncate the state of {self.length} tokens to {n_tokens}")
        n_tokens = self.nearest(n_tokens)
        if self.states is not None:
            self.states.rewind(n_tokens)
        self.drafted = max(0, n_tokens - self.verified)
        del self.tokens[n_tokens:]
        limit = self._checkpointed(n_tokens)
        self.chunked, self.saved = min(self.chunked, limit), min(self.saved, limit)
        self._shrink(self.layout.blocks(n_tokens))

    def keep(self, start: int, path: Sequence[int], move: Callable[[int, int], None]) -> None:
        """Keep only the nodes of `path` from the tree that is stored from position `start` on.

        path: ascending nodes. move(source, target): copies the keys and values of one position to another.
        Recurrent states don't include these tokens until `commit`.
        """
        if self.states is not None and path and start >= self.states.position:
            self.states.keep(start - self.states.position, path)
        for target, node in enumerate(path, start):
            if start + node != target:
                move(start + node, target)
                self.tokens[target] = self.tokens[start + node]
        self.truncate(start + len(path))
        self.drafted = 0

    def commit(self, n_tokens: int, replay: Callable[[int], None]) -> None:
        """Advance recurrent states to n_tokens. replay: as in `RecurrentStates.commit`."""
        if self.states is not None:
            for checkpoint in self.states.commit(n_tokens, replay):
                self._add_checkpoint(checkpoint)

    def fork(self, n_tokens: int | None = None) -> SequenceState:
        """An independent copy of the first `nearest(n_tokens)` tokens; by default of all verified ones."""
        wanted = self.verified if n_tokens is None else min(n_tokens, self.verified)
        copied = wanted
        if self.states is not None:
            wanted = min(wanted, self.states.position) if self.drafted else wanted
            copied = self.length if wanted >= self.states.position else self.nearest(wanted)
        elif self.windows is not None:
            wanted = copied = self.nearest(wanted)
        copy = self._empty()
        self._copy_to(copy, copied)
        if copy.length > wanted:
            copy.truncate(wanted)
        return copy

    def _checkpointed(self, n_tokens: int) -> int:
        """n_tokens, rounded down to a multiple of the distance between checkpoints if there are recurrent
        layers.
        """
        return n_tokens if self.states is None else n_tokens - n_tokens % self.states.layout.spacing

    def _empty(self) -> SequenceState:
        """A new empty state with the same allocator."""
        empty = SequenceState(self.layout, self._allocate, self._release)
        empty.before_loss, empty.is_idle = self.before_loss, self.is_idle
        return empty

    def _copy_to(self, copy: SequenceState, n_tokens: int) -> None:
        """Copy the first n_tokens, a result of `nearest`, to an empty state. If that fails, the copy stays
        empty.
        """
        if self.states is not None and copy.states is not None:
            copy.states.memory = self.states.memory
            marks = self.states.marks
            copy.states.mark(marks if n_tokens == self.length else [at for at in marks if at <= n_tokens])
        with ExitStack() as undo:
            if self.windows is not None and copy.windows is not None:
                undo.callback(copy.truncate, 0)
                self.windows.copy_to(copy.windows, self.layout.blocks(n_tokens))
            copy.reserve(n_tokens)
            undo.pop_all()
        if self.arrays is None:
            for target, source in zip(copy.blocks, self.blocks, strict=False):
                target[:] = source
        else:
            try:
                copy.arrays = self.arrays.fork(len(copy.blocks))
            except MemoryError:
                copy.truncate(0)
                raise
        if self.states is not None and copy.states is not None:
            self.states.copy_to(copy.states, n_tokens)
        copy.tokens = self.tokens[:n_tokens]
        limit = n_tokens if n_tokens == self.length else self._checkpointed(n_tokens)
        copy.chunked, copy.saved = min(self.chunked, limit), min(self.saved, limit)

    def part_sizes(self, start: int, stop: int, windowed: bool = True) -> list[int]:
        """Bytes of each part of the state at positions start .. stop - 1, for `part` and `load_part`.

        Parts are complete blocks, even if these hold other positions too. windowed: whether blocks of
        windowed layers are included, after the others. The last part is the recurrent states after `stop`
        tokens, a checkpoint.
        """
        if self.windows is not None:
            blocks = self._blocks_of(start, stop)
            kinds = [self.layout.block_bytes, *([self.layout.window_block_bytes] if windowed else [])]
            return [nbytes for nbytes in kinds for _ in blocks]
        states = [] if self.states is None else [self.layout.states.nbytes]
        return self._stored_sizes(start, stop) + states

    def holds_windows(self, start: int, stop: int) -> bool:
        """Whether the blocks of windowed layers at positions start .. stop - 1 are all held."""
        blocks = self._blocks_of(start, stop)
        return self.windows is None or all(self.windows.blocks[at] is not None for at in blocks)

    def give_up_windows(self, start: int, stop: int) -> None:
        """Release the blocks of windowed layers at positions start .. stop - 1. The text can't go back to
        these then.
        """
        if self.windows is not None:
            self.places = None
            self.windows.give_up(self._blocks_of(start, stop))

    def part(self, index: int, start: int, stop: int) -> Bytes:
        """A part of the state, (nbytes,) uint8: a view of a block, or a copy."""
        if self._is_states(index, start, stop):
            assert self.states is not None
            return self.states.checkpoint(stop)
        if self.arrays is not None:
            copied: Bytes = self.arrays.part(index, start, stop)
            return copied
        return self._block(index, start, stop)

    def load_part(self, index: int, start: int, stop: int, read: Callable[[Bytes], None]) -> None:
        """Set a part of the state to the (nbytes,) uint8 that `read` fills in. Room for it must
        be reserved.
        """
        if self._is_states(index, start, stop):
            assert self.states is not None
            self.states.load(read)
            return
        if self.arrays is None:
            read(self._block(index, start, stop))
            return
        data = np.empty(self.part_sizes(start, stop)[index], np.uint8)
        read(data)
        self.arrays.load_part(index, start, stop, data)

    def _before_loss(self, block: int) -> None:
        """Announce that blocks of windowed layers up to `block` may be given up, unless they are saved."""
        stop = min((block + 1) * BLOCK_TOKENS, self.verified)
        if stop > self.saved:
            self.before_loss(self, stop)

    def _blocks_of(self, start: int, stop: int) -> range:
        """The blocks with positions start .. stop - 1."""
        return range(start // BLOCK_TOKENS, self.layout.blocks(stop))

    def _block(self, index: int, start: int, stop: int) -> Bytes:
        """The block that is part `index`. Blocks of layers that see all tokens come first."""
        blocks = self._blocks_of(start, stop)
        block: Bytes
        if index < len(blocks) or self.windows is None:
            block = self.blocks[blocks.start + index]
        else:
            block = self.windows.blocks[blocks[index - len(blocks)]]
        return block

    def _add_checkpoint(self, position: int) -> None:
        assert self.states is not None
        if position == self.chunked + self.states.layout.spacing:
            self.chunked = position

    def _is_states(self, index: int, start: int, stop: int) -> bool:
        """Whether part `index` of the state at these positions is the recurrent states."""
        return self.states is not None and index == len(self._stored_sizes(start, stop))

    def _stored_sizes(self, start: int, stop: int) -> list[int]:
        """Bytes of each part of the keys and values at these positions."""
        if self.arrays is not None:
            sizes: list[int] = self.arrays.part_sizes(stop - start)
            return sizes
        return [self.layout.block_bytes] * len(self._blocks_of(start, stop))

    def _shrink(self, n_blocks: int) -> None:
        if self.windows is not None:
            self.windows.shrink(n_blocks)
        if len(self.blocks) <= n_blocks:
            return
        self.places = None
        while len(self.blocks) > n_blocks:
            self._release(self.blocks.pop())
        # Last, as arrays that can't shrink for lack of memory still have room for every block.
        if self.arrays is not None:
            self.arrays.resize(n_blocks)


def state_over(layout: KVLayout, blocks: Sequence[Block]) -> SequenceState:
    """A state without tokens, over blocks that already hold keys and values for the tokens it will get."""
    held = iter(blocks)
    return SequenceState(layout, lambda nbytes: next(held))
