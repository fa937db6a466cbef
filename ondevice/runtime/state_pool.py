"""The states of a model's sessions, and the memory that they may have together.

The pool knows no weights. A dropped state is computed again when it is needed, to the same bits, unless a
prompt cache on disk has it: what isn't there yet is written while the model is idle, or before it is dropped.
"""

from __future__ import annotations

import logging
import queue
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from ondevice.backends.base import Block, KVLayout
from ondevice.backends.budgeted import BudgetedBackend
from ondevice.budget.claims import Claim
from ondevice.budget.plan import Plan
from ondevice.callbacks import IsCancelled
from ondevice.errors import BudgetError
from ondevice.model.layer_range import LaterLayers
from ondevice.model.sequence_state import SequenceState, common_prefix
from ondevice.prompt_cache.store import PromptCache
from ondevice.units import format_bytes

log = logging.getLogger(__name__)


class StatePool:
    """One model's states, each named by a key. All but `retired` belongs to the owner thread.

    When memory runs short, states that aren't in use may be dropped.
    """

    def __init__(
        self,
        layout: KVLayout,
        plan: Plan,
        claim: Claim,
        backend: BudgetedBackend,
        yield_to: Callable[[int], None],
        store: PromptCache | None = None,
        later: LaterLayers | None = None,
    ) -> None:
        """Args:
        layout: How blocks are laid out.
        plan: The model's plan, which limits the bytes of all states.
        claim: The model's claim on the process's memory.
        backend: The backend, which allocates blocks.
        yield_to: Called before a block is allocated, with the bytes that blocks will have then.
        store: The prompt cache on disk; None without one.
        later: The layers of other machines, which have a part of every state; None without any.
        """
        self.layout = layout
        self.nbytes = 0
        """Bytes of all blocks and states that exist."""
        self.of_sessions: OrderedDict[int, SequenceState] = OrderedDict()
        """Least recently used first."""
        self.retired: queue.SimpleQueue[int] = queue.SimpleQueue()
        """Keys whose states are no longer needed; any thread may add to it."""
        self.store = store
        self._in_use: list[SequenceState] = []
        """In the order in which their use began."""
        self._unsaved: list[SequenceState] = []
        """Caches of which the prompt cache may lack something, those without a key included."""
        self._plan = plan
        self._claim = claim
        self._backend = backend
        self._yield_to = yield_to
        self._later = later

    @contextmanager
    def use(self, key: int | None, stored: bool = False) -> Iterator[SequenceState]:
        """A context with the state of `key`, which isn't dropped meanwhile.

        A `key` of None gives a new state that ends with the context. stored: the prompt cache gets what the
        state holds at the end.
        """
        self._drop_retired()
        self._save_keyless()
        kv = self.new_state() if key is None else self.state_of(key)
        self._in_use.append(kv)
        try:
            yield kv
        finally:
            # The last one: a text that came earlier and still uses this state keeps its place.
            del self._in_use[max(at for at, it in enumerate(self._in_use) if it is kv)]
            if stored and self.store is not None and kv.length:
                self.store.touch(kv)
                self._unsaved = [*(it for it in self._unsaved if it is not kv), kv]
            elif key is None:
                kv.truncate(0)

    def rewind(self, kv: SequenceState, tokens: Sequence[int]) -> None:
        """Truncate kv to what it has in common with `tokens`. What is lost goes to the prompt cache."""
        kept = common_prefix(kv.tokens, tokens)
        if kept < kv.length:
            self._save(kv)
        kv.truncate(kept)

    def restore(
        self, kv: SequenceState, tokens: Sequence[int], cancelled: IsCancelled | None
    ) -> Iterator[None]:
        """Extend kv, which holds a prefix of `tokens`, from the prompt cache, piece by piece."""
        return iter(()) if self.store is None else self.store.restore(kv, tokens, cancelled)

    def save_next(self) -> bool:
        """Write a little of what the prompt cache lacks. False: there is no more."""
        while self._unsaved:
            kv = self._unsaved[0]
            if self._write_next(kv):
                return True
            self._saved(kv)
        return False

    def state_of(self, key: int) -> SequenceState:
        """The state of a key, empty if there was none."""
        kv = self.of_sessions.get(key)
        if kv is None:
            kv = self.of_sessions[key] = self.new_state()
        self.of_sessions.move_to_end(key)
        return kv

    def fork(self, source: int, target: int) -> None:
        """Give `target` a copy of the state of `source`, if there is room for two."""
        with self.use(source) as kv:
            try:
                self.of_sessions[target] = kv.fork()
            except BudgetError:
                log.info("no room for a second state: the fork will compute its own")

    def keep_to(self, plan: Plan) -> None:
        """Keep to another plan, and drop states that it has no room for.

        Those go first that aren't in use, then those whose use began last. The first in use stays.
        """
        self._plan = plan
        self._drop_idle(plan.kv_limit_bytes)
        for kv in reversed(self._in_use[1:]):
            if self._fits(plan.kv_limit_bytes):
                break
            kv.truncate(0)
        self._claimed(self.nbytes)

    def close(self) -> None:
        """Write what the prompt cache lacks, and drop everything, the backend included. Idempotent."""
        while self.save_next():
            pass
        self.of_sessions.clear()
        self._backend = self._yield_to = None  # type: ignore[assignment]

    def new_state(self) -> SequenceState:
        """An empty state that has no key."""
        make = SequenceState if self._later is None else self._later.new_state
        return make(self.layout, self._allocate, self._release, self._backend.new_arrays(self.layout))

    def _drop_retired(self) -> None:
        while not self.retired.empty():
            kv = self.of_sessions.pop(self.retired.get(), None)
            if kv is not None:
                self._drop(kv)

    def _fits(self, limit_bytes: int, added: int = 0) -> bool:
        """Whether all states and `added` bytes keep to limit_bytes, and to what other machines have."""
        short = self._later is not None and self._later.short_of_room(self.layout, added)
        return self.nbytes + added <= limit_bytes and not short

    def _drop_idle(self, limit_bytes: int, added: int = 0) -> None:
        """Drop states that aren't in use, least recently used first, until the rest and `added` bytes fit."""
        self._drop_retired()
        if not self._fits(limit_bytes, added):
            self._save_keyless()
        for kv in self.of_sessions.values():
            if self._fits(limit_bytes, added):
                break
            if not any(kv is used for used in self._in_use):
                self._drop(kv)

    def _drop(self, kv: SequenceState) -> None:
        """Empty a state. What the prompt cache lacks of it is written first."""
        self._save(kv)
        kv.truncate(0)

    def _save(self, kv: SequenceState) -> None:
        """Write what the prompt cache lacks of a state."""
        if any(it is kv for it in self._unsaved):
            while self._write_next(kv):
                pass
            self._saved(kv)

    def _save_keyless(self) -> None:
        """Write and drop the states that have no key: they only wait for that."""
        for kv in list(self._unsaved):
            if not self._has_key(kv):
                self._save(kv)

    def _write_next(self, kv: SequenceState) -> bool:
        """Write one file of a state's. False: there is nothing more to write."""
        assert self.store is not None
        before, kv.saved = kv.saved, self.store.write_next(kv, kv.saved)
        return kv.saved > before

    def _saved(self, kv: SequenceState) -> None:
        """A state needn't be written any more; without a key it ends here."""
        self._unsaved = [it for it in self._unsaved if it is not kv]
        if not self._has_key(kv):
            kv.truncate(0)

    def _has_key(self, kv: SequenceState) -> bool:
        return any(it is kv for it in self.of_sessions.values())

    def _allocate(self, nbytes: int) -> Block:
        """Memory for a block or states; neurons yield before it exists."""
        plan = self._plan
        self._drop_idle(plan.kv_limit_bytes, nbytes)
        short = "" if self._later is None else self._later.short_of_room(self.layout, nbytes)
        if short:
            raise BudgetError(
                f"{short} has no room for its part of {format_bytes(self.nbytes + nbytes)} of keys and "
                "values; close a session or raise that machine's budget",
                required_bytes=plan.budget_bytes,
            )
        if not self._claimed(self.nbytes + nbytes):
            # One full context is guaranteed; the rest belongs to another model by now.
            self._drop_idle(plan.kv_cache_bytes, nbytes)
        if not self._claimed(self.nbytes + nbytes):
            raise BudgetError(
                f"{format_bytes(self.nbytes + nbytes)} of keys and values don't fit the budget of "
                f"{format_bytes(plan.budget_bytes)}; close a session or raise the budget",
                required_bytes=plan.budget_bytes + nbytes,
            )
        self._yield_to(self.nbytes + nbytes)
        # The whole block at once: pages first touched as tokens are written would hit a limit one by one.
        block = self._backend.allocate_block(nbytes)
        self.nbytes += nbytes
        return block

    def _release(self, block: Block) -> None:
        self.nbytes -= self.layout.block_bytes if block is None else block.nbytes
        self._claimed(self.nbytes)

    def _claimed(self, nbytes: int) -> bool:
        """Claim `nbytes` for all states. Returns False if they don't fit.

        Beyond one full context, the states may only have memory that no other model claims.
        """
        plan = self._plan
        beyond = 0 if plan.offloads_weights else max(0, nbytes - plan.kv_cache_bytes)
        return nbytes <= plan.kv_limit_bytes and self._claim.go_beyond(plan, beyond)
