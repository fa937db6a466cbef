"""Prefetch of experts: reads the ones that the next layer's router would choose for this layer's input.

The residual stream changes little from one layer to the next, so these are most of the experts that the
router then chooses. They are read while a pass waits for no other expert, into those slots of the reserve
that the layer doesn't need. Once the choice is known, unwanted ones are dropped, unless their reading has
begun. No result depends on it.
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
"""Passes of a trial: every second one prefetches. They alternate, as other use of the device changes within
seconds."""
KEPT_PASSES = 224
"""Passes for which a trial's result is kept."""

BeginAhead = Callable[[int, int, int], int]
"""Begins to read an expert: takes its `moe_index`, its id and the address of its slot. Returns the ticket."""


class Prefetched(NamedTuple):
    """An expert that is being read into the slot at `address`."""

    moe_index: int
    expert: int
    slot: int
    address: int
    ticket: int


@dataclass
class _Times:
    """The missing experts of some passes, and the seconds spent on waiting for experts and on
    managing them.
    """

    experts: int = 0
    waited: float = 0.0
    managed: float = 0.0


class ExpertPrefetcher:
    """Prefetches experts for one layer at a time. `moe_index` is a layer's index among the layers with
    experts.

    Args:
        reads: the reads of experts, including those that a pass waits for.
        cache: the cache in which slots are reserved.
        begin: begins a read.
        most: most experts that are being read ahead.
    """

    def __init__(self, reads: _native.RangeReads, cache: PooledCache, begin: BeginAhead, most: int) -> None:
        self._reads = reads
        self._cache = cache
        self._begin = begin
        self._most = most
        self._likely: tuple[int, list[int]] | None = None
        """A `moe_index` and the absent experts that `begin` will read, likeliest first."""
        self._coming: list[Prefetched] = []
        """Experts for the next layer."""
        self._late: list[Prefetched] = []
        """Unwanted experts that are still being read."""
        self._passes = 0
        """Passes since the last trial began."""
        self._without = self._with = self._now = _Times()
        """Times of the last trial's passes without prefetch and with it, and of the present pass, which is
        one of the two during a trial."""
        self._before = PassTimes()
        """Times of all passes before the present one."""
        self.on = False
        """Whether this pass prefetches."""
        self.quality = PrefetchQuality()

    def wants(self, moe_index: int, rows: int) -> bool:
        """Whether `expect` would use the choices of this many rows."""
        if not self.on or rows > PREFETCH_TOKENS:
            return False
        return not self._cache.holds_all and not self._cache.holds_layer(moe_index)

    def expect(self, moe_index: int, chosen: Callable[[], Int32]) -> None:
        """Record that layer `moe_index`, the next one, will probably want the experts chosen(), (T, k).
        `begin` reads them.
        """
        ids = chosen()
        likely = ids[0]
        if len(ids) > 1:
            likely, rows = np.unique(ids, return_counts=True)
            likely = likely[np.argsort(-rows, kind="stable")]
        self._likely = moe_index, self._cache.without_slot(moe_index, likely)

    def begin(self, moe_index: int, kept: Sequence[int]) -> None:
        """Begin to read experts that the next layer will probably want. Layer `moe_index` still needs the
        experts `kept`.
        """
        if self._likely is None:
            return
        (next_index, experts), self._likely = self._likely, None
        cache, most = self._cache, self._most - len(self._late)
        count = min(len(experts), most)
        if count > 0 and not cache.has_room(count):
            # Experts above the room are evicted at the end of this layer anyhow.
            cache.evict_for(count, moe_index, np.array(kept, dtype=np.int32))
        for expert in experts[: max(0, most)]:
            if not cache.has_room(1):
                break
            self._start(next_index, expert)

    def commit(self, moe_index: int, wanted: Int32) -> list[Prefetched]:
        """Give the prefetched experts among `wanted` their slots, and return them.

        Each must be waited for before it is multiplied. Prefetched experts that aren't wanted are dropped, or
        kept if they have arrived.
        """
        committed: list[Prefetched] = []
        if not self._coming and not self._late:
            return committed
        before = len(self._late)
        wanted_ids = set(wanted.tolist())
        for one in self._coming:
            if one.moe_index == moe_index and one.expert in wanted_ids:
                self._reads.hurry(one.ticket)
                if self._commit_one(one):
                    committed.append(one)
                    continue
            if self._reads.drop(one.ticket):
                self._release(one)
            else:
                self._late.append(one)
        begun = len(committed) + len(self._late) - before
        self._coming = []
        self._late = [one for one in self._late if not self._has_ended(one)]
        so_far, nbytes = self.quality, (begun - len(committed)) * self._cache.slot_bytes
        self.quality = replace(
            so_far,
            begun=so_far.begun + begun,
            used=so_far.used + len(committed),
            wasted_bytes=so_far.wasted_bytes + nbytes,
        )
        return committed

    def fill(self, likely: Sequence[tuple[int, int]]) -> bool:
        """Read absent experts between passes, given as pairs of moe_index and id. Returns False if a read
        failed.
        """
        for moe_index, expert in likely:
            self._start(moe_index, expert)
        succeeded = True
        while self._coming:
            one = self._coming[0]
            try:
                self._reads.wait(one.ticket)
            except FlashReadError:
                succeeded = False
                self._release(one)
            else:
                self._commit_one(one)
            del self._coming[0]
        return succeeded

    def _start(self, moe_index: int, expert: int) -> None:
        """Begin to read an absent expert into a reserved slot."""
        slots, addresses = self._cache.reserve(moe_index, 1)
        begun = False
        try:
            ticket = self._begin(moe_index, expert, int(addresses[0]))
            begun = True
        finally:
            if not begun:
                self._cache.release(moe_index, slots)
        self._coming.append(Prefetched(moe_index, expert, int(slots[0]), int(addresses[0]), ticket))

    def count_missing(self, count: int) -> None:
        """Count experts that weren't in memory when they were wanted. Prefetched ones count too."""
        self._now.experts += count

    def next_pass(self, tokens: int, times: PassTimes) -> None:
        """Call before each pass: drops what a cancelled pass left, and continues or ends a trial of prefetch.

        A trial compares passes with prefetch and without: their time of waiting for missing experts, and of
        managing experts.

        times: the times of all passes so far. Managing includes estimates, and beginning reads.
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
        """Keep prefetch on if passes with it took less time per missing expert in the last trial."""
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
        """End all reads and free their slots. Called between passes."""
        self._reads.cancel()
        self.forget()

    def forget(self) -> None:
        """Free the slots of all prefetched experts. Their reads must have been cancelled."""
        self._likely = None
        for one in (*self._coming, *self._late):
            self._release(one)
        self._coming, self._late = [], []

    def _has_ended(self, one: Prefetched) -> bool:
        """Whether the read of an unwanted expert has ended. If it succeeded, the expert now
        counts as held.
        """
        if not self._reads.arrived(one.ticket):
            return False
        try:
            self._reads.wait(one.ticket)
        except FlashReadError:
            # A pass that needs it reads it again, and says so.
            self._release(one)
            return True
        if not self._commit_one(one):
            self._release(one)
        return True

    def _commit_one(self, one: Prefetched) -> bool:
        """Give an expert its slot. Returns False if it already has another slot; then this one stays
        reserved.
        """
        experts, slots = np.array([one.expert], dtype=np.int32), np.array([one.slot], dtype=np.int32)
        return len(self._cache.commit(one.moe_index, experts, slots)[0]) > 0

    def _release(self, one: Prefetched) -> None:
        self._cache.release(one.moe_index, np.array([one.slot], dtype=np.int32))
