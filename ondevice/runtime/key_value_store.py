"""Keys and values of a model's sessions in memory: who has a cache, who yields, what the plan allows.

Knows no weights. What leaves memory here is computed again when it is asked for, to the same bits.
"""

from __future__ import annotations

import logging
import queue
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ondevice.backends.base import Block, KVLayout
from ondevice.budget.claims import Claim
from ondevice.budget.plan import Plan
from ondevice.errors import BudgetError
from ondevice.kernels import _native
from ondevice.model.kv_cache import KVCache
from ondevice.runtime.backend_choice import BudgetBackend
from ondevice.units import format_bytes

log = logging.getLogger(__name__)


class KVMemory:
    """One model's key/value caches, each named by a key. Belongs to the model's owner thread, but `retired`.

    Caches of other keys than the one at work may be dropped when memory runs short.
    """

    def __init__(
        self,
        layout: KVLayout,
        plan: Plan,
        claim: Claim,
        yield_to: Callable[[int], None],
    ) -> None:
        """plan, claim: of the model. yield_to: told how many bytes there will be, before they are."""
        self.layout = layout
        self.backend: BudgetBackend | None = None
        """Whose blocks they are; None: our own."""
        self.nbytes = 0
        """Bytes of all blocks that exist."""
        self.caches: OrderedDict[int, KVCache] = OrderedDict()
        """Longest unused first."""
        self.retired: queue.SimpleQueue[int] = queue.SimpleQueue()
        """Keys whose caches nobody needs any more; any thread may add to it."""
        self._at_work: KVCache | None = None
        self._plan = plan
        self._claim = claim
        self._yield_to = yield_to

    @contextmanager
    def work_on(self, kv: KVCache) -> Iterator[None]:
        """While this lasts, kv isn't dropped."""
        self._at_work = kv
        try:
            yield
        finally:
            self._at_work = None

    def cache(self, key: int) -> KVCache:
        """The cache of a key, empty if there was none."""
        kv = self.caches.setdefault(key, self.new_cache())
        self.caches.move_to_end(key)
        return kv

    def new_cache(self) -> KVCache:
        """An empty one that has no key."""
        arrays = None if self.backend is None else self.backend.new_arrays(self.layout)
        return KVCache(self.layout, self._allocate, self._release, arrays)

    def fork(self, source: int, target: int) -> None:
        """Give `target` a copy of the cache of `source`, if there is room for two."""
        kv = self.cache(source)
        with self.work_on(kv):
            try:
                self.caches[target] = kv.fork()
            except BudgetError:
                log.info("no room for a second KV cache: the fork will compute its own")

    def keep_to(self, plan: Plan) -> None:
        """Drop what another plan has no room for."""
        self._plan = plan
        self._drop_idle(plan.kv_limit_bytes)
        self._claimed(self.nbytes)

    def drop_retired(self) -> None:
        """Drop what nobody needs any more."""
        while not self.retired.empty():
            kv = self.caches.pop(self.retired.get(), None)
            if kv is not None:
                kv.truncate(0)

    def close(self) -> None:
        """Drop everything. Idempotent."""
        self.caches.clear()
        self.backend = None

    def _drop_idle(self, limit_bytes: int) -> None:
        """Drop caches that aren't at work, longest unused first, until the rest keep to limit_bytes."""
        self.drop_retired()
        for kv in self.caches.values():
            if self.nbytes <= limit_bytes:
                break
            if kv is not self._at_work:
                kv.truncate(0)

    def _allocate(self, nbytes: int) -> Block:
        """A block in a mapping of its own; neurons yield before it exists."""
        plan = self._plan
        self._drop_idle(plan.kv_limit_bytes - nbytes)
        if not self._claimed(self.nbytes + nbytes):
            # One full context is guaranteed; what more there was is another model's.
            self._drop_idle(plan.kv_cache_bytes - nbytes)
        if not self._claimed(self.nbytes + nbytes):
            raise BudgetError(
                f"{format_bytes(self.nbytes + nbytes)} of keys and values don't fit the budget of "
                f"{format_bytes(plan.budget_bytes)}; close a session or raise the budget",
                required_bytes=plan.budget_bytes + nbytes,
            )
        self._yield_to(self.nbytes + nbytes)
        # `cpu`: whole at once; pages that come as tokens are written would hit a memory limit token by token.
        backend = self.backend
        block = _native.allocate(nbytes) if backend is None else backend.allocate_block(self.layout)
        self.nbytes += nbytes
        return block

    def _release(self, block: Block) -> None:
        self.nbytes -= self.layout.block_bytes
        self._claimed(self.nbytes)

    def _claimed(self, nbytes: int) -> bool:
        """Whether so much may be held in all; beyond one full context, what no other model has claimed."""
        plan = self._plan
        beyond = 0 if plan.offloads_weights else max(0, nbytes - plan.kv_cache_bytes)
        return nbytes <= plan.kv_limit_bytes and self._claim.go_beyond(plan, beyond)
