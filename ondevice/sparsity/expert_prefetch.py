"""Prefetch of experts: those that the next layer's router would choose for this layer's input.

The residual stream changes little from one layer to the next, so that is most of what the router then
chooses. They are read only while no expert is that a pass waits for, into the slots of the reserve that the
layer's own experts leave. Once the choice is known, those that aren't wanted are dropped, unless their
reading has begun. No result depends on any of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ondevice.backends.base import Int32
from ondevice.errors import FlashReadError
from ondevice.kernels import _native
from ondevice.records import dataclass
from ondevice.sparsity.pooled_cache import PooledCache
from ondevice.sparsity.prefetch import PREFETCH_TOKENS, PrefetchQuality
from ondevice.stats import PassTimes

log = logging.getLogger(__name__)

TRIAL_PASSES = 32
"""Passes of which every second prefetches, and whose times are compared: neighbours, as what else uses the
device changes within seconds."""
KEPT_PASSES = 224
"""Passes for which the better of the two is kept."""


BeginAhead = Callable[[int, int, int], int]
"""Begins to read an expert ahead: a turn, the expert, and the address of its slot. Returns the ticket."""


class Prefetched(NamedTuple):
    """An expert on its way into the slot at `address`."""

    turn: int
    expert: int
    slot: int
    address: int
    ticket: int


@dataclass
class _Times:
    """Missing experts of some passes, and the seconds that these took beside multiplying."""

    experts: int = 0
    waited: float = 0.0
    managed: float = 0.0


class ExpertPrefetcher:
    """Prefetches experts for one layer at a time. Layers are known by their turns, as the cache knows them.

    Args:
        reads: the reads of experts, with those that a pass waits for.
        cache: the cache in which slots are reserved.
        begin: begins a read.
        most: most experts on their way.
    """

    def __init__(self, reads: _native.RangeReads, cache: PooledCache, begin: BeginAhead, most: int) -> None:
        self._reads = reads
        self._cache = cache
        self._begin = begin
        self._most = most
        self._likely: tuple[int, list[int]] | None = None
        """A turn and its absent experts that are to be read, likeliest first, until `begin`."""
        self._coming: list[Prefetched] = []
        """Experts for the turn that comes next."""
        self._late: list[Prefetched] = []
        """Experts that weren't wanted, and that are still being read."""
        self._passes = 0
        """Passes since trials began anew."""
        self._without = self._with = self._now = _Times()
        """Times of the last trials without prefetch, of those with it, and of the pass that runs: `_now` is
        one of the two, or neither where the pass is no trial."""
        self._before = PassTimes()
        """Times of all passes until the one that runs."""
        self.on = False
        """Whether this pass prefetches."""
        self.quality = PrefetchQuality()

    def wants(self, turn: int, rows: int) -> bool:
        """Whether `expect` would use the choices of this many rows."""
        cache = self._cache
        return self.on and rows <= PREFETCH_TOKENS and not cache.holds_all and not cache.holds_layer(turn)

    def expect(self, turn: int, chosen: Callable[[], Int32]) -> None:
        """Note that the turn after this one likely wants chosen() (T, k). `begin` then reads them."""
        ids = chosen()
        likely = ids[0]
        if len(ids) > 1:
            likely, rows = np.unique(ids, return_counts=True)
            likely = likely[np.argsort(-rows, kind="stable")]
        self._likely = turn, self._cache.without_slot(turn, likely)

    def begin(self, turn: int, kept: Sequence[int]) -> None:
        """Begin to read what is expected: the missing experts of `turn` are on their way; it needs `kept`."""
        if self._likely is None:
            return
        (coming, experts), self._likely = self._likely, None
        cache, most = self._cache, self._most - len(self._late)
        count = min(len(experts), most)
        if count > 0 and not cache.has_room(count):
            # What is above the room goes at the end of this turn anyhow.
            cache.evict_for(count, turn, np.array(kept, dtype=np.int32))
        for expert in experts[: max(0, most)]:
            if not cache.has_room(1):
                break
            self._start(coming, expert)

    def settle(self, turn: int, wanted: Int32) -> list[Prefetched]:
        """At a layer's turn: the prefetched experts among `wanted`, which have their slots now.

        Each is to be waited for before it is multiplied. The others are dropped, or kept once they have
        arrived.
        """
        found: list[Prefetched] = []
        if not self._coming and not self._late:
            return found
        before = len(self._late)
        own = set(wanted.tolist())
        for one in self._coming:
            if one.turn == turn and one.expert in own:
                self._reads.hurry(one.ticket)
                if self._commit(one):
                    found.append(one)
                    continue
            if self._reads.drop(one.ticket):
                self._release(one)
            else:
                self._late.append(one)
        begun = len(found) + len(self._late) - before
        self._coming = []
        self._late = [one for one in self._late if not self._has_ended(one)]
        so_far, nbytes = self.quality, (begun - len(found)) * self._cache.slot_bytes
        self.quality = replace(
            so_far,
            begun=so_far.begun + begun,
            used=so_far.used + len(found),
            wasted_bytes=so_far.wasted_bytes + nbytes,
        )
        return found

    def fill(self, likely: Sequence[tuple[int, int]]) -> bool:
        """Between passes: read these absent experts, pairs of turn and id. False if one couldn't be read."""
        for turn, expert in likely:
            self._start(turn, expert)
        whole = True
        while self._coming:
            one = self._coming[0]
            try:
                self._reads.wait(one.ticket)
            except FlashReadError:
                whole = False
                self._release(one)
            else:
                self._commit(one)
            del self._coming[0]
        return whole

    def _start(self, turn: int, expert: int) -> None:
        """Begin to read an absent expert into a slot of its own."""
        slots, addresses = self._cache.reserve(turn, 1)
        begun = False
        try:
            ticket = self._begin(turn, expert, int(addresses[0]))
            begun = True
        finally:
            if not begun:
                self._cache.release(turn, slots)
        self._coming.append(Prefetched(turn, expert, int(slots[0]), int(addresses[0]), ticket))

    def count_missing(self, count: int) -> None:
        """Count experts that weren't in memory when they were wanted, prefetched ones too."""
        self._now.experts += count

    def next_pass(self, tokens: int, times: PassTimes) -> None:
        """Before a pass: forget what a cancelled one left; every so often, find out whether prefetch pays.

        That is measured: by the time that a pass waits for a missing expert and the time that it manages
        experts, with prefetch and without.

        times: of all passes so far. Managing includes estimates, and beginning reads.
        """
        self._now.waited += times.waited - self._before.waited
        self._now.managed += times.managed - self._before.managed
        self._before = times
        self._likely = None
        if self._coming:
            self.drop()
        if tokens > PREFETCH_TOKENS or self._cache.holds_all:
            self._now = _Times()
            return
        passes = self._passes
        self._passes = (passes + 1) % (TRIAL_PASSES + KEPT_PASSES)
        if passes == 0:
            self._without, self._with = _Times(), _Times()
        if passes < TRIAL_PASSES:
            self.on = passes % 2 == 1
            self._now = self._with if self.on else self._without
        elif passes == TRIAL_PASSES:
            self._now = _Times()
            self._judge()

    def _judge(self) -> None:
        """Keep prefetch on if the last trial's passes with it took less time than those without.

        They waited for as many experts as were missing, and managed all that they chose.
        """
        without, tried = self._without, self._with
        gained = without.waited / max(1, without.experts) * tried.experts - tried.waited
        gained += without.managed - tried.managed
        self.on = gained > 0
        self.quality = replace(
            self.quality,
            hidden_seconds=self.quality.hidden_seconds + max(0.0, gained),
            spent_seconds=self.quality.spent_seconds + max(0.0, -gained),
        )
        log.info("prefetching experts is %s: it spared %.4f s", "on" if self.on else "off", gained)

    def drop(self) -> None:
        """Between passes: end all reads and free their slots."""
        self._reads.cancel()
        self.forget()

    def forget(self) -> None:
        """Free the slots, into which nothing is read any more since all reads were cancelled."""
        self._likely = None
        for one in (*self._coming, *self._late):
            self._release(one)
        self._coming, self._late = [], []

    def _has_ended(self, one: Prefetched) -> bool:
        """Whether an expert that no pass waits for is read. If it arrived whole, it is held from now on."""
        if not self._reads.arrived(one.ticket):
            return False
        try:
            self._reads.wait(one.ticket)
        except FlashReadError:
            # A pass that needs it reads it again, and says so.
            self._release(one)
            return True
        if not self._commit(one):
            self._release(one)
        return True

    def _commit(self, one: Prefetched) -> bool:
        """Give the expert its slot. False if it has another one meanwhile; then this one stays reserved."""
        experts, slots = np.array([one.expert], dtype=np.int32), np.array([one.slot], dtype=np.int32)
        return len(self._cache.commit(one.turn, experts, slots)[0]) > 0

    def _release(self, one: Prefetched) -> None:
        self._cache.release(one.turn, np.array([one.slot], dtype=np.int32))
