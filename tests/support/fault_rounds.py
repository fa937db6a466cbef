"""Generation after generation while reads go wrong; run under the shim by `test_fetch_faults.py`.

Reads go through io_uring where `FLASH_FAULT_RING` is set, else by threads, direct and buffered in turn. (An
engine reads experts by threads; with the ring its reader is given one, which must serve as well.) Every
round draws faults, generates, and demands the right tokens, a read error that was injected, or to be
cancelled; after the last two, with the faults off, the right tokens. Then every slot must be held, claimed or
free, and threads and open files as many as before. A round's draws depend on its number and the seed alone;
which read meets which fault does not, as threads come in any order.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import gc
import json
import logging
import math
import mmap
import os
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import ondevice.runtime.loaded_model
from ondevice.api import Model, load
from ondevice.backends.base import Int32
from ondevice.config import SamplingConfig
from ondevice.errors import FlashReadError
from ondevice.flash.reader import FlashReader
from ondevice.generate import Event
from ondevice.sparsity.experts import ExpertFetcher
from ondevice.sparsity.fetch import NeuronFetcher
from ondevice.sparsity.neuron_cache import NeuronCache
from ondevice.sparsity.pooled_cache import PooledCache
from tests.support.bundles import EOS
from tests.support.chat import PROMPT, squeeze
from tests.support.slow_memory import slow_memory

KINDS = ("interrupt", "error", "end", "short", "stall", "long stall", "damage")
WAYS = ("pread", "ring")
"""How a read is made. What goes wrong in the ring is read again by pread, but not what arrives damaged."""
HARMLESS, FATAL = ("interrupt", "short", "stall"), ("error", "end", "damage")
LONG_STALLS = 0.06
"""Of the rounds: each of theirs takes 1 to 3 seconds."""
ROUNDS_PER_MODEL = 100
TOKENS = 8
SAMPLING = SamplingConfig(max_tokens=TOKENS, logit_bias=((EOS, -math.inf),))
DEADLOCK_SECONDS = 180


class Kind(ctypes.Structure):
    _fields_ = [
        ("every", ctypes.c_uint32),
        ("left", ctypes.c_int32),
        ("done", ctypes.c_uint32 * len(WAYS)),
    ]


class Table(ctypes.Structure):
    """What the shim maps too: `Table` of `flash_faults.cc`."""

    _fields_ = [
        ("kinds", Kind * len(KINDS)),
        ("seed", ctypes.c_uint32),
        ("draws", ctypes.c_uint32),
        ("cancelled", ctypes.c_uint32),
        ("late", ctypes.c_uint32 * len(WAYS)),
    ]

    @classmethod
    def of(cls, path: str) -> Table:
        with open(path, "r+b") as file:
            return cls.from_buffer(mmap.mmap(file.fileno(), ctypes.sizeof(cls)))

    def allow(self, name: str, every: int, most: int) -> None:
        kind = self.kinds[KINDS.index(name)]
        kind.every, kind.left = every, most

    def stop(self) -> None:
        for kind in self.kinds:
            kind.every = kind.left = 0

    def done(self, *names: str, ways: Sequence[str] = WAYS) -> int:
        return sum(self.kinds[KINDS.index(name)].done[WAYS.index(way)] for name in names for way in ways)

    def errors_due(self) -> int:
        """Faults that a read may have ended in an error for."""
        return self.done("error", "end", ways=["pread"]) + self.done("damage")

    def counts(self) -> dict[str, dict[str, int]]:
        """Faults by way and kind, and by way the reads that came back late."""
        faults = {way: {name: self.done(name, ways=[way]) for name in KINDS} for way in WAYS}
        return {way: kinds | {"late": self.late[WAYS.index(way)]} for way, kinds in faults.items()}


def tokens_of(events: Iterator[Event]) -> list[int]:
    return [event.token for event in events if event.token is not None]


def threads_and_files() -> tuple[list[str], int]:
    """Names of threads, less the workers that the system keeps for a ring, and how many files are open."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it may end meanwhile
            names.append((task / "comm").read_text().strip())
    return sorted(name for name in names if not name.startswith("iou-")), len(os.listdir("/proc/self/fd"))


def assert_as_before(before: tuple[list[str], int]) -> None:
    give_up = time.monotonic() + 10  # the system takes a moment to forget a thread that was joined
    while (now := threads_and_files()) != before and time.monotonic() < give_up:
        time.sleep(0.01)
    assert now == before, f"threads and open files: {now}, {before} before"


def assert_nothing_leaked(model: Model) -> None:
    """Every slot that exists is held, claimed or free, once; layers keep to their shares; no read is left.

    Looked at by the thread that owns them, which may fill the cache while nothing is asked.
    """
    list(model._owner.stream(lambda cancelled: iter([_assert_nothing_leaked(model)])))


def _assert_nothing_leaked(model: Model) -> None:
    neurons, reservation = model._engine._neurons, None
    assert isinstance(neurons, NeuronFetcher | ExpertFetcher)
    neurons._prefetcher.drop()
    if isinstance(neurons, NeuronFetcher):
        reservation = neurons._warm_up._reservation
        assert all(batch.done() for reads in neurons._reads for batch, _ in reads._batches)
        assert model._engine._reader.staging_bytes <= model.plan.buffers.nbytes
    assert_each_slot_once(neurons._cache, np.zeros(0, np.int32) if reservation is None else reservation.slots)


def assert_each_slot_once(cache: NeuronCache, claimed: Int32) -> None:
    """Every slot that exists is held, in `claimed` or free, once; layers keep to their shares."""
    held = np.sort(cache._slots[cache._slots >= 0])
    every = np.sort(np.concatenate([held, claimed, cache._free[: cache._num_free]]))
    np.testing.assert_array_equal(every, np.arange(len(cache._owner)))
    np.testing.assert_array_equal(held, np.flatnonzero(cache._owner >= 0))
    assert cache._counts == [int((own >= 0).sum()) for own in cache._slot_of]
    assert sum(cache._reserved) == len(claimed)
    if isinstance(cache, PooledCache):
        assert cache._spare >= 0
    for layer, share in enumerate(cache._shares):
        assert cache._counts[layer] + cache._reserved[layer] <= share


class Rounds:
    """One model's rounds. `tally` counts how they ended."""

    def __init__(
        self, model: Model, expected: list[int], table: Table, seed: int, tally: Counter[str]
    ) -> None:
        self._model, self._expected, self._table = model, expected, table
        self._seed, self._tally = seed, tally
        self._rng = random.Random(seed)
        self._key = model._host.new_key()
        """Of a cache of keys and values that is kept: what a failed pass leaves there must be right too."""
        self._prompt = model.prompt_ids(PROMPT)
        squeeze(model, model.plan.segment.total)
        self._assert_right()
        self._before = threads_and_files()  # with all that a model starts as its cache grows
        self._squeeze()

    def run(self, number: int) -> None:
        """Round `number`."""
        faulthandler.dump_traceback_later(DEADLOCK_SECONDS, exit=True)
        self._rng = random.Random(f"{self._seed} {number}")
        self._table.seed, self._table.draws = self._rng.getrandbits(32), 0
        if self._rng.random() < 0.3:
            self._squeeze()
        way = self._rng.choice([self._stay, self._stay, self._resize, self._leave])
        total, due = self._table.done(*KINDS), self._table.errors_due()
        failed_in_ring = self._table.done("error", "end", ways=["ring"])
        self._draw_faults()
        try:
            ended = way()
        except FlashReadError:
            ended = "errors"
            assert self._table.errors_due() > due, "an error where none was injected"
        finally:
            self._table.stop()
        self._tally["rounds with faults"] += self._table.done(*KINDS) > total
        self._tally[ended] += 1
        read_again = self._table.done("error", "end", ways=["ring"]) > failed_in_ring
        self._tally["right, some read again"] += ended == "right" and read_again
        if ended != "right":
            self._assert_right()
        assert_nothing_leaked(self._model)
        assert_as_before(self._before)

    def close(self) -> None:
        """Close the model in the middle of a generation whose reads all stall."""
        self._squeeze()
        self._table.allow("stall", 1, 60)
        events = self._events(None)
        assert [next(events).token] == self._expected[:1]
        self._table.cancelled += 1
        self._model.close()
        last = list(events)[-1]
        assert last.finish_reason == "cancelled"
        self._table.stop()

    def _draw_faults(self) -> None:
        names = self._rng.sample(HARMLESS, self._rng.randint(1, len(HARMLESS)))
        if self._rng.random() < 0.5:
            names += self._rng.sample(FATAL, self._rng.randint(1, len(FATAL)))
        for name in names:
            self._table.allow(name, self._every(), self._rng.randint(1, 6))
        if self._rng.random() < LONG_STALLS:
            self._table.allow("long stall", self._rng.randint(1, 30), self._rng.randint(1, 2))

    def _every(self) -> int:
        """How rare a kind of fault is: often not at all, as a read that fails in the ring must fail once more
        to be an error."""
        return round(30 ** self._rng.random())

    def _events(self, key: int | None) -> Iterator[Event]:
        return self._model._host.stream_ids(key, self._prompt, SAMPLING)

    def _drawn_events(self) -> Iterator[Event]:
        return self._events(self._rng.choice([None, self._key]))

    def _stay(self) -> str:
        assert tokens_of(self._drawn_events()) == self._expected
        return "right"

    def _resize(self) -> str:
        """Change the slots in the middle."""
        events = self._drawn_events()
        tokens = [next(events).token for _ in range(self._rng.randint(1, 3))]
        self._squeeze()
        assert tokens + tokens_of(events) == self._expected
        return "right"

    def _leave(self) -> str:
        """Cancel in the middle, with reads under way: those come back when nobody waits for them."""
        self._table.allow("stall", 2, 100)
        events = self._drawn_events()
        count = self._rng.randint(1, 4)
        assert [next(events).token for _ in range(count)] == self._expected[:count]
        time.sleep(self._rng.random() * 0.01)
        events.close()  # type: ignore[attr-defined]
        self._table.cancelled += 1
        return "cancelled"

    def _assert_right(self) -> None:
        for key in (None, self._key):
            assert tokens_of(self._events(key)) == self._expected

    def _squeeze(self) -> None:
        segment = self._model.plan.segment
        squeeze(self._model, self._rng.randint(0, (segment.total - segment.least) // 2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--sparsity", required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    table = Table.of(os.environ["FLASH_FAULT_TABLE"])
    ring = "FLASH_FAULT_RING" in os.environ
    if ring and options.sparsity == "experts":
        ondevice.runtime.loaded_model.FlashReader = partial(FlashReader, ring=True)  # type: ignore[misc, assignment]
    if options.sparsity == "experts":
        slow_memory(pytest.MonkeyPatch(), 0.002)
    tally = Counter[str]()
    ahead = logging.Handler()
    ahead.emit = lambda record: tally.update(["ahead"] * ("failed" in record.msg))  # type: ignore[method-assign]
    logger = logging.getLogger("ondevice.sparsity.reserved_reads")
    logger.setLevel(logging.INFO)
    logger.addHandler(ahead)
    faulthandler.dump_traceback_later(DEADLOCK_SECONDS, exit=True)

    def expected() -> list[int]:
        whole = "dense" if options.sparsity == "exact" else options.sparsity
        with load(options.bundle, sparsity=whole) as model:
            return tokens_of(model._host.stream_ids(None, model.prompt_ids(PROMPT), SAMPLING))

    right = expected()
    assert len(right) == TOKENS
    gc.collect()
    before = threads_and_files()  # after a first model: libraries keep some threads of their own
    for first in range(0, options.rounds, ROUNDS_PER_MODEL):
        io = "auto" if ring else ("auto", "buffered")[first // ROUNDS_PER_MODEL % 2]
        model = load(options.bundle, sparsity=options.sparsity, io=io)
        assert model._engine._reader.has_ring == ring
        rounds = Rounds(model, right, table, options.seed, tally)
        for number in range(first, min(first + ROUNDS_PER_MODEL, options.rounds)):
            try:
                rounds.run(number)
            except Exception as error:
                error.add_note(f"in round {number} of seed {options.seed}, {io}")
                raise
        rounds.close()
        del model, rounds
        gc.collect()
        assert_as_before(before)
    faulthandler.cancel_dump_traceback_later()
    print(json.dumps({"faults": table.counts(), **tally}))


if __name__ == "__main__":
    main()
