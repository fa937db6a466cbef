"""The key/value caches of a model's sessions, and the memory that they may have together.

The pool knows no weights. A dropped cache is computed again when it is needed, to the same bits.
"""

from __future__ import annotations

import logging
import queue
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ondevice.backends.base import Block, KVLayout
from ondevice.backends.budgeted import BudgetedBackend
from ondevice.budget.claims import Claim
from ondevice.budget.plan import Plan
from ondevice.errors import BudgetError
from ondevice.model.kv_cache import KVCache
from ondevice.units import format_bytes

log = logging.getLogger(__name__)


class KVCachePool:
    """One model's key/value caches, each named by a key. All but `retired` belongs to the owner thread.

    When memory runs short, caches other than the one in use may be dropped.
    """

    def __init__(
        self,
        layout: KVLayout,
        plan: Plan,
        claim: Claim,
        backend: BudgetedBackend,
        yield_to: Callable[[int], None],
    ) -> None:
        """Args:
        layout: How blocks are laid out.
        plan: The model's plan, which limits the bytes of all caches.
        claim: The model's claim on the process's memory.
        backend: The backend, which allocates blocks.
        yield_to: Called before a block is allocated, with the bytes that blocks will have then.
        """
        self.layout = layout
        self.nbytes = 0
        """Bytes of all blocks that exist."""
        self.caches: OrderedDict[int, KVCache] = OrderedDict()
        """Least recently used first."""
        self.retired: queue.SimpleQueue[int] = queue.SimpleQueue()
        """Keys whose caches are no longer needed; any thread may add to it."""
        self._in_use: KVCache | None = None
        self._plan = plan
        self._claim = claim
        self._backend = backend
        self._yield_to = yield_to

    @contextmanager
    def use(self, key: int | None) -> Iterator[KVCache]:
        """A context with the cache of `key`, which isn't dropped meanwhile.

        A `key` of None gives a new cache that ends with the context.
        """
        self._drop_retired()
        kv = self.new_cache() if key is None else self.cache(key)
        self._in_use = kv
        try:
            yield kv
        finally:
            self._in_use = None
            if key is None:
                kv.truncate(0)

    def cache(self, key: int) -> KVCache:
        """The cache of a key, empty if there was none."""
        kv = self.caches.get(key)
        if kv is None:
            kv = self.caches[key] = self.new_cache()
        self.caches.move_to_end(key)
        return kv

    def fork(self, source: int, target: int) -> None:
        """Give `target` a copy of the cache of `source`, if there is room for two."""
        with self.use(source) as kv:
            try:
                self.caches[target] = kv.fork()
            except BudgetError:
                log.info("no room for a second KV cache: the fork will compute its own")

    def keep_to(self, plan: Plan) -> None:
        """Keep to another plan, and drop idle caches that it has no room for."""
        self._plan = plan
        self._drop_idle(plan.kv_limit_bytes)
        self._claimed(self.nbytes)

    def close(self) -> None:
        """Drop everything, the backend included. Idempotent."""
        self.caches.clear()
        self._backend = self._yield_to = None  # type: ignore[assignment]

    def new_cache(self) -> KVCache:
        """An empty cache that has no key."""
        return KVCache(self.layout, self._allocate, self._release, self._backend.new_arrays(self.layout))

    def _drop_retired(self) -> None:
        while not self.retired.empty():
            kv = self.caches.pop(self.retired.get(), None)
            if kv is not None:
                kv.truncate(0)

    def _drop_idle(self, limit_bytes: int) -> None:
        """Drop caches that aren't in use, least recently used first, until the rest keep to limit_bytes."""
        self._drop_retired()
        for kv in self.caches.values():
            if self.nbytes <= limit_bytes:
                break
            if kv is not self._in_use:
                kv.truncate(0)

    def _allocate(self, nbytes: int) -> Block:
        """Memory for a block; neurons yield before it exists."""
        plan = self._plan
        self._drop_idle(plan.kv_limit_bytes - nbytes)
        if not self._claimed(self.nbytes + nbytes):
            # One full context is guaranteed; the rest belongs to another model by now.
            self._drop_idle(plan.kv_cache_bytes - nbytes)
        if not self._claimed(self.nbytes + nbytes):
            raise BudgetError(
                f"{format_bytes(self.nbytes + nbytes)} of keys and values don't fit the budget of "
                f"{format_bytes(plan.budget_bytes)}; close a session or raise the budget",
                required_bytes=plan.budget_bytes + nbytes,
            )
        self._yield_to(self.nbytes + nbytes)
        # The whole block at once: pages first touched as tokens are written would hit a limit one by one.
        block = self._backend.allocate_block(self.layout)
        self.nbytes += nbytes
        return block

    def _release(self, block: Block) -> None:
        self.nbytes -= self.layout.block_bytes
        self._claimed(self.nbytes)

    def _claimed(self, nbytes: int) -> bool:
        """Claim `nbytes` for all caches. Returns False if they don't fit.

        Beyond one full context, the caches may only have memory that no other model claims.
        """
        plan = self._plan
        beyond = 0 if plan.offloads_weights else max(0, nbytes - plan.kv_cache_bytes)
        return nbytes <= plan.kv_limit_bytes and self._claim.go_beyond(plan, beyond)
