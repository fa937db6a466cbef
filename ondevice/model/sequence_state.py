"""The state of a text: the tokens that passes have seen, and the blocks that hold their keys and values.

It grows by blocks of 64 tokens. Their allocator (the memory plan's) may refuse. The state knows nothing of
attention: ops read and write the blocks by `KVLayout`, or a backend's own arrays of the same capacity. What
recurrent layers have in the place of keys and values is in `recurrent_states.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ondevice.backends.base import BLOCK_TOKENS, Block, Bytes, KVLayout
from ondevice.backends.kv_arrays import KVArrays
from ondevice.backends.recurrent import PROMPT_TAIL
from ondevice.model.recurrent_states import RecurrentStates

__all__ = ["BLOCK_TOKENS", "KVLayout", "SequenceState", "allocate_block", "common_prefix"]

ALIGNMENT = 64


def allocate_block(nbytes: int) -> Bytes:
    """A zeroed (nbytes,) block on a 64-byte boundary, from the process heap."""
    buffer = np.zeros(nbytes + ALIGNMENT, dtype=np.uint8)
    start = -buffer.ctypes.data % ALIGNMENT
    return buffer[start : start + nbytes]


def common_prefix(a: Sequence[int], b: Sequence[int], most: int | None = None) -> int:
    """Number of leading elements that a and b share, at most `most`.

    Compares slices, which is far faster than comparing elements one by one.
    """
    least, most = 0, min(len(a), len(b), len(a) if most is None else most)
    # Nearly always one is a prefix of the other.
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
    """Nothing to do: a block on the heap is freed with its last reference."""


class SequenceState:
    """Keys and values of `tokens`, at logical positions 0 .. length - 1, and the states behind them.

    allocate: takes a number of bytes; returns a block that the backend's ops can write to (uint8 for numpy
        backends) or raises (`BudgetError` under a memory plan).
    release: frees a block.
    arrays: a backend's own. Ops then write to these, and blocks only account for their memory.
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
        """The last of the tokens, which are a draft's and not verified yet."""
        self.chunked = 0
        """Leading tokens that came in whole chunks of a prompt, each behind whole chunks; in a model with
        recurrent layers, those up to the last multiple of its checkpoints' distance that has one at every
        multiple before it."""
        self.saved = 0
        """Leading tokens that the prompt cache has."""
        self.states: RecurrentStates | None = None
        """States of recurrent layers; None in a model without such."""
        if layout.states.nbytes:
            memory = None if arrays is None else arrays.states
            self.states = RecurrentStates(layout.states, allocate, release, memory)
        self._allocate = allocate
        self._release = release

    @property
    def length(self) -> int:
        """Number of tokens whose keys and values are stored."""
        return len(self.tokens)

    @property
    def verified(self) -> int:
        """Number of tokens that are the text's: all but those of a draft that isn't verified yet."""
        return self.length - self.drafted

    @property
    def room(self) -> int:
        """Number of tokens that fit into the blocks held."""
        return len(self.blocks) * BLOCK_TOKENS

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks and states held, used or reserved."""
        states = 0 if self.states is None else self.states.nbytes
        return len(self.blocks) * self.layout.block_bytes + states

    def reserve(self, n_tokens: int) -> None:
        """Make room for n_tokens positions in all. If the allocator raises, the state is as before."""
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
                self.blocks += added
                self.places = None
                added = []
            done = True
        finally:
            for block in added:
                self._release(block)
            if self.states is not None and not done:
                self.states.back_to(self.length)

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens whose keys and values a pass has just written at the next positions."""
        room = self.room - self.length
        if len(tokens) > room:
            raise ValueError(f"{len(tokens)} tokens were written where only {room} positions are reserved")
        self.tokens.extend(tokens)
        if self.states is not None and self.states.extend(self.length):
            self._add_checkpoint(self.length)

    def end_of_chunk(self, stop: int) -> int:
        """Where a chunk of a prompt that could go up to position `stop` ends: at a checkpoint, if one lies in
        between.
        """
        if self.states is None:
            return stop
        spacing = self.states.layout.spacing
        return min(stop, (self.length // spacing + 1) * spacing)

    def mark_prompt(self, n_tokens: int) -> None:
        """Say that what follows belongs to a prompt of n_tokens in all: states of recurrent layers are kept
        as they are here, and near the prompt's end.
        """
        self.mark(sorted({self.length, max(self.length, n_tokens - PROMPT_TAIL)} - {0}))

    def mark(self, positions: Sequence[int]) -> None:
        """Keep the states of recurrent layers behind these numbers of tokens: `RecurrentStates.mark`."""
        if self.states is not None:
            self.states.mark(positions)

    def nearest(self, n_tokens: int) -> int:
        """The most tokens, at most n_tokens, that `truncate` can keep: up to a checkpoint, where layers are
        recurrent.
        """
        return n_tokens if self.states is None else self.states.nearest(n_tokens)

    def truncate(self, n_tokens: int) -> None:
        """Keep the first n_tokens positions, and release the blocks after them.

        A model with recurrent layers may have to keep fewer, those up to the last checkpoint, unless all that
        go run ahead of its states.
        """
        if not 0 <= n_tokens <= self.length:
            raise ValueError(f"can't truncate the state of {self.length} tokens to {n_tokens}")
        n_tokens = self.nearest(n_tokens)
        if self.states is not None:
            self.states.back_to(n_tokens)
        self.drafted = max(0, n_tokens - self.verified)
        del self.tokens[n_tokens:]
        most = self._checkpointed(n_tokens)
        self.chunked, self.saved = min(self.chunked, most), min(self.saved, most)
        self._shrink(self.layout.blocks(n_tokens))

    def keep(self, start: int, path: Sequence[int], move: Callable[[int, int], None]) -> None:
        """Keep only the nodes of `path` from the tree that is stored from position `start` on.

        path: ascending nodes. move(source, target): copies the keys and values of one position to another.
        States of recurrent layers are behind tokens before them until `settle`.
        """
        if self.states is not None and path and start >= self.states.position:
            self.states.keep(start - self.states.position, path)
        for target, node in enumerate(path, start):
            if start + node != target:
                move(start + node, target)
                self.tokens[target] = self.tokens[start + node]
        self.truncate(start + len(path))
        self.drafted = 0

    def settle(self, n_tokens: int, replay: Callable[[int], None]) -> None:
        """Bring states of recurrent layers behind the first n_tokens, if the last of these run ahead.

        replay: as `RecurrentStates.settle` has it.
        """
        if self.states is not None:
            for checkpoint in self.states.settle(n_tokens, replay):
                self._add_checkpoint(checkpoint)

    def fork(self, n_tokens: int | None = None) -> SequenceState:
        """An independent copy of the first n_tokens positions, with blocks of its own: as many as `nearest`
        gives. By default it has all but a draft that isn't verified yet.
        """
        wanted = self.verified if n_tokens is None else min(n_tokens, self.verified)
        copied = wanted
        if self.states is not None:
            wanted = min(wanted, self.states.position) if self.drafted else wanted
            copied = self.length if wanted >= self.states.position else self.nearest(wanted)
        copy = self._empty()
        self._copy_to(copy, copied)
        if copy.length > wanted:
            copy.truncate(wanted)
        return copy

    def _checkpointed(self, n_tokens: int) -> int:
        """Up to which token `chunked` and `saved` may go in n_tokens: in a model with recurrent layers they
        are about multiples of its checkpoints' distance.
        """
        return n_tokens if self.states is None else n_tokens - n_tokens % self.states.layout.spacing

    def _empty(self) -> SequenceState:
        """A state with the same allocator."""
        return SequenceState(self.layout, self._allocate, self._release)

    def _copy_to(self, copy: SequenceState, n_tokens: int) -> None:
        """Give an empty state the first n_tokens of this one: all, or up to a checkpoint where layers are
        recurrent. Raises the allocator's errors; it is then empty.
        """
        if self.states is not None and copy.states is not None:
            copy.states.memory = self.states.memory
            marks = self.states.marks
            copy.states.mark(marks if n_tokens == self.length else [at for at in marks if at <= n_tokens])
        copy.reserve(n_tokens)
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
        most = n_tokens if n_tokens == self.length else self._checkpointed(n_tokens)
        copy.chunked, copy.saved = min(self.chunked, most), min(self.saved, most)

    def part_sizes(self, start: int, stop: int) -> list[int]:
        """Bytes of each part of the state at positions start .. stop - 1, as `part` and `load_part` have it.

        Blocks count whole: what they hold beside these positions goes with them. Last come the states of
        recurrent layers behind `stop` tokens, which is then a checkpoint.
        """
        states = [] if self.states is None else [self.layout.states.nbytes]
        return self._stored_sizes(start, stop) + states

    def part(self, index: int, start: int, stop: int) -> Bytes:
        """A part of the state, (its bytes,) uint8: a view of a block, or a copy."""
        if self._is_states(index, start, stop):
            assert self.states is not None
            return self.states.checkpoint(stop)
        if self.arrays is not None:
            copied: Bytes = self.arrays.part(index, start, stop)
            return copied
        block: Bytes = self.blocks[start // BLOCK_TOKENS + index]
        return block

    def load_part(self, index: int, start: int, stop: int, read: Callable[[Bytes], None]) -> None:
        """Take a part of the state from `read`, which fills (its bytes,) uint8. There is room for it."""
        if self._is_states(index, start, stop):
            assert self.states is not None
            self.states.load(read)
            return
        if self.arrays is None:
            read(self.blocks[start // BLOCK_TOKENS + index])
            return
        data = np.empty(self.part_sizes(start, stop)[index], np.uint8)
        read(data)
        self.arrays.load_part(index, start, stop, data)

    def _add_checkpoint(self, position: int) -> None:
        assert self.states is not None
        if position == self.chunked + self.states.layout.spacing:
            self.chunked = position

    def _is_states(self, index: int, start: int, stop: int) -> bool:
        """Whether a part of the state at these positions is that of recurrent layers."""
        return self.states is not None and index == len(self._stored_sizes(start, stop))

    def _stored_sizes(self, start: int, stop: int) -> list[int]:
        """Bytes of each part of the keys and values at these positions."""
        if self.arrays is not None:
            sizes: list[int] = self.arrays.part_sizes(stop - start)
            return sizes
        return [self.layout.block_bytes] * (self.layout.blocks(stop) - start // BLOCK_TOKENS)

    def _shrink(self, n_blocks: int) -> None:
        if len(self.blocks) <= n_blocks:
            return
        self.places = None
        while len(self.blocks) > n_blocks:
            self._release(self.blocks.pop())
        # Last: arrays that can't shrink for want of memory still have room for every block.
        if self.arrays is not None:
            self.arrays.resize(n_blocks)


def state_over(layout: KVLayout, blocks: Sequence[Block]) -> SequenceState:
    """An empty state over blocks that hold the keys and values of tokens yet to come."""
    held = iter(blocks)
    return SequenceState(layout, lambda nbytes: next(held))
