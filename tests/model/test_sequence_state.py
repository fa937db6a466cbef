"""The key/value cache: layout arithmetic, growth by blocks, and what a refused block leaves behind."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
import pytest

from ondevice.backends.base import Bytes
from ondevice.errors import BudgetError
from ondevice.model.sequence_state import KVLayout, SequenceState, allocate_block
from tests.support.sources import tiny_config

CONFIG = tiny_config(num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16)


class Counter:
    """An allocator with a limit, that knows what is out."""

    def __init__(self, limit: int = 100) -> None:
        self.out = 0
        self.limit = limit

    def allocate(self, nbytes: int) -> Bytes:
        if self.out == self.limit:
            raise BudgetError("no more blocks", required_bytes=(self.limit + 1) * nbytes)
        self.out += 1
        return allocate_block(nbytes)

    def release(self, block: Bytes) -> None:
        self.out -= 1


def test_the_layout_counts_bytes_of_heads_and_blocks() -> None:
    wide, narrow = KVLayout(CONFIG, 16), KVLayout(CONFIG, 8)
    assert wide.head_bytes(0) == 2 * 64 * 16 * 2
    assert narrow.head_bytes(0) == 2 * (64 * 16 + 64 * 4)
    assert wide.block_bytes == 3 * 2 * wide.head_bytes(0)
    assert narrow.head_offset(2, 1) == narrow.block_bytes - narrow.head_bytes(0)
    assert [wide.blocks(n) for n in (0, 1, 64, 65)] == [0, 1, 1, 2]


def test_narrow_values_take_less() -> None:
    """By what they are narrower than keys, and every offset stays a multiple of 64 bytes."""
    specs = [replace(layer, attention=replace(layer.attention, value_dim=6)) for layer in CONFIG.layers]
    config = replace(CONFIG, layers=tuple(specs))
    bits: tuple[Literal[32, 16, 8], ...] = (32, 16, 8)
    for kv_bits in bits:
        narrow, plain = KVLayout(config, kv_bits), KVLayout(CONFIG, kv_bits)
        assert plain.head_bytes(0) - narrow.head_bytes(0) == 64 * 10 * kv_bits // 8
        assert not any(offset % 64 for offset in narrow.layer_offsets)


def test_blocks_are_aligned_and_grow_by_64_tokens() -> None:
    cache = SequenceState(KVLayout(CONFIG))
    for tokens, blocks in ((1, 1), (64, 1), (65, 2), (10, 2)):
        cache.reserve(tokens)
        assert len(cache.blocks) == blocks
    assert all(
        block.ctypes.data % 64 == 0 and block.nbytes == cache.layout.block_bytes for block in cache.blocks
    )
    assert cache.nbytes == 2 * cache.layout.block_bytes


def test_truncate_gives_back_only_unused_blocks() -> None:
    counter = Counter()
    cache = SequenceState(KVLayout(CONFIG), counter.allocate, counter.release)
    cache.reserve(200)
    cache.extend(list(range(200)))
    first = cache.blocks[0]
    cache.truncate(65)
    assert (cache.length, counter.out, len(cache.blocks)) == (65, 2, 2)
    assert cache.blocks[0] is first
    assert cache.tokens == list(range(65))
    cache.truncate(0)
    assert counter.out == 0


def test_a_refused_block_leaves_the_cache_as_it_was() -> None:
    counter = Counter(limit=3)
    cache = SequenceState(KVLayout(CONFIG), counter.allocate, counter.release)
    cache.reserve(64)
    cache.extend([1, 2, 3])
    with pytest.raises(BudgetError):
        cache.reserve(64 * 4)
    assert (cache.length, len(cache.blocks), counter.out) == (3, 1, 1)


def test_extend_beyond_what_is_reserved_is_refused() -> None:
    cache = SequenceState(KVLayout(CONFIG))
    cache.reserve(64)
    with pytest.raises(ValueError, match="64 positions"):
        cache.extend([0] * 65)
    with pytest.raises(ValueError, match="truncate"):
        cache.truncate(1)


def test_a_fork_is_independent() -> None:
    cache = SequenceState(KVLayout(CONFIG))
    cache.reserve(70)
    cache.extend(list(range(70)))
    for index, block in enumerate(cache.blocks):
        block[:] = index + 1
    fork = cache.fork()
    assert fork.tokens == cache.tokens
    cache.blocks[0][:] = 99
    cache.truncate(5)
    assert fork.length == 70
    assert [np.unique(block).tolist() for block in fork.blocks] == [[1], [2]]


def test_a_refused_fork_holds_nothing() -> None:
    counter = Counter(limit=3)
    cache = SequenceState(KVLayout(CONFIG), counter.allocate, counter.release)
    cache.reserve(128)
    cache.extend([0] * 128)
    with pytest.raises(BudgetError):
        cache.fork()
    assert counter.out == 2
