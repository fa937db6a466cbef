"""The states of a model's texts, their memory, and the choice of the state that a new text begins with.

A text begins with the state that shares most of its tokens: it takes that state, or a copy of the shared
prefix. Evicted states are computed again when they are needed, with the same bits, unless the prompt cache on
disk has them. Unsaved states are written to this cache while the model is idle, for a small share of the time
between passes, and before they are dropped.
"""

from __future__ import annotations

import itertools
import logging
import queue
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from ondevice.backends.base import Block
from ondevice.backends.budgeted import BudgetedBackend
from ondevice.backends.kv_layout import BLOCK_TOKENS, KVLayout
from ondevice.budget.claims import Claim
from ondevice.budget.plan import Plan
from ondevice.callbacks import IsCancelled
from ondevice.errors import BudgetError
from ondevice.model.layer_range import LaterLayers
from ondevice.model.sequence_state import SequenceState, common_prefix
from ondevice.prompt_cache.store import PromptCache
from ondevice.units import format_bytes

log = logging.getLogger(__name__)

MAX_PREFIXES = 64
"""Most prefixes that are kept, so that the longest is quickly found."""
SHARED_TOKENS = 8
"""Minimum number of shared tokens for which a text begins with another's state."""
LOST_SHARE = 16
"""A state is copied if the shared tokens are at most this many times those that it would lose; else the text
takes the state itself."""
PASSES_PER_WRITE = 20
"""Time between two writes to the prompt cache while texts run, in units of the last write's time."""


class StatePool:
    """One model's states: those of sessions, by key, and prefixes of ended texts. Only the owner thread may
    use it, except for `retired`.

    When memory runs short, unused states lose their last tokens: prefixes first, least recently used first.
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
        chunk: int = 0,
    ) -> None:
        """Args:
        layout: the layout of blocks.
        plan: the model's plan, which limits the bytes of all states.
        claim: the model's claim on the process's memory.
        backend: allocates blocks.
        yield_to: called before a block is allocated, with the bytes of all blocks after it.
        store: the prompt cache on disk, or None.
        later: the layers of other machines, which have a part of every state, or None.
        chunk: the result of `shared_chunk`.
        """
        self.layout = layout
        self.nbytes = 0
        """Bytes of all allocated blocks and states."""
        self.of_sessions: OrderedDict[int, SequenceState] = OrderedDict()
        """Least recently used first."""
        self.prefixes: list[SequenceState] = []
        """States of ended texts, for other texts, least recently used first."""
        self.retired: queue.SimpleQueue[tuple[int, bool]] = queue.SimpleQueue()
        """Unneeded keys, and whether their states become prefixes. Any thread may add to it."""
        self.store = store
        self._in_use: list[SequenceState] = []
        """Oldest use first."""
        self._unsaved: list[SequenceState] = []
        """States that may have unsaved pieces for the prompt cache, with or without a key."""
        self._plan = plan
        self._claim = claim
        self._backend = backend
        self._yield_to = yield_to
        self._later = later
        self._chunk = chunk
        self._unnamed = itertools.count(-1, -1)
        """Keys for texts without a key."""
        self._write_after = 0.0
        """Earliest time of the next write between passes, by `time.monotonic`."""

    @property
    def prefix_bytes(self) -> int:
        """Bytes of all prefixes."""
        return sum(kv.nbytes for kv in self.prefixes)

    @contextmanager
    def begin(self, key: int | None, tokens: Sequence[int], keep: bool = False) -> Iterator[SequenceState]:
        """A context with the state of `key` for a text `tokens`, truncated to a prefix of it.

        The state holds as many of the tokens as any state has, except the last token, which always runs. A
        `key` of None gives an empty state that ends with the context. With keep, the state begins like one
        with a key instead, and afterwards becomes a prefix for other texts.
        """
        unnamed = next(self._unnamed) if keep and key is None else None
        key = key if unnamed is None else unnamed
        if key is not None:
            self._take_prefix(key, tokens)
        try:
            with self.use(key, stored=True) as kv:
                self.rewind(kv, tokens)
                yield kv
        finally:
            if unnamed is not None:
                self._leave(self.of_sessions.pop(unnamed, None))

    @contextmanager
    def use(self, key: int | None, stored: bool = False) -> Iterator[SequenceState]:
        """A context with the state of `key`, which isn't dropped inside it.

        A `key` of None gives a new state that ends with the context. stored: whether the final state is
        written to the prompt cache.
        """
        self._drop_retired()
        self._save_keyless()
        kv = self.new_state() if key is None else self.state_of(key)
        if key is None and not stored:
            kv.before_loss = lambda kv, stop: None
        self._in_use.append(kv)
        try:
            yield kv
        finally:
            self._no_longer_used(kv)
            if stored and self.store is not None and kv.length:
                self.store.touch(kv)
                self._unsaved = [*(it for it in self._unsaved if it is not kv), kv]
            elif key is None:
                kv.truncate(0)

    def rewind(self, kv: SequenceState, tokens: Sequence[int]) -> None:
        """Truncate kv to the prefix that it shares with `tokens`, after saving the remaining tokens to the
        prompt cache.
        """
        common = common_prefix(kv.tokens, tokens)
        if common < kv.length:
            self._save(kv)
        kv.truncate(common)

    def restore(
        self, kv: SequenceState, tokens: Sequence[int], cancelled: IsCancelled | None
    ) -> Iterator[None]:
        """Extend kv, which holds a prefix of `tokens`, from the prompt cache, piece by piece."""
        return iter(()) if self.store is None else self.store.restore(kv, tokens, cancelled)

    def save_next(self) -> bool:
        """Write one unsaved piece of an unused state to the prompt cache. Returns False if there is none."""
        for kv in [it for it in self._unsaved if not self._is_used(it)]:
            if self._write_next(kv):
                return True
            self._saved(kv)
        return False

    def save_between_passes(self) -> None:
        """Do `save_next` for a small share of the time between passes.

        So a server that is never idle has few unsaved pieces when memory runs short.
        """
        begun = time.monotonic()
        if self._unsaved and begun >= self._write_after:
            self.save_next()
            ended = time.monotonic()
            self._write_after = ended + PASSES_PER_WRITE * (ended - begun)

    def state_of(self, key: int) -> SequenceState:
        """The state of a key. A new one is made if the key has none."""
        kv = self.of_sessions.get(key)
        if kv is None:
            kv = self.of_sessions[key] = self.new_state()
        self.of_sessions.move_to_end(key)
        return kv

    def fork(self, source: int, target: int) -> None:
        """Give `target` a copy of the state of `source`, if there is room for both."""
        with self.use(source) as kv:
            copy = self._copied(kv)
            if copy is None:
                log.info("no room for a second state: the fork will compute its own")
            else:
                self.of_sessions[target] = copy

    def keep_to(self, plan: Plan) -> None:
        """Keep to a new plan, and drop states that don't fit: first unused ones, then those in use, newest
        first.

        The oldest state in use always stays.
        """
        self._plan = plan
        self._drop_idle(plan.kv_limit_bytes)
        self._limit_prefixes()
        for kv in (*self._in_use, *self._all()) if plan.offloads_weights else ():
            kv.forget_past(marks=False)
        for kv in reversed(self._in_use[1:]):
            if self._fits(plan.kv_limit_bytes):
                break
            kv.truncate(0)
        self._claimed(self.nbytes)

    def close(self) -> None:
        """Save unsaved states, and drop everything, including the backend. Idempotent."""
        while self.save_next():
            pass
        self.of_sessions.clear()
        self.prefixes.clear()
        self._backend = self._yield_to = None  # type: ignore[assignment]

    def new_state(self) -> SequenceState:
        """An empty state without a key."""
        make = SequenceState if self._later is None else self._later.new_state
        kv = make(self.layout, self._allocate, self._release, self._backend.new_arrays(self.layout))
        kv.before_loss, kv.is_idle = self._save_up_to, self._is_idle
        return kv

    def drop_prefixes(self) -> None:
        """Drop the prefixes that aren't in use."""
        self._drop_retired()
        for kv in self.prefixes:
            if not self._is_used(kv):
                self._drop(kv)
        self._forget_empty()

    def _take_prefix(self, key: int, tokens: Sequence[int]) -> None:
        """Give `key` the state that shares most of `tokens`, or a copy of the shared prefix.

        Does nothing if the present state of `key` shares as many.
        """
        self._drop_retired()
        present, wanted = self.of_sessions.get(key), tokens[:-1]
        if present is not None and self._is_used(present):
            return
        held = 0 if present is None else present.nearest(common_prefix(present.tokens, wanted))
        others = [(self._shared(kv, wanted), kv) for kv in self._all() if kv is not present]
        # Of equal ones, unused states first, then those that would lose least.
        others.sort(key=lambda it: (-it[0], self._is_used(it[1]), it[1].length))
        for count, kv in others:
            if count < held + SHARED_TOKENS:
                break
            taken = self._taken(kv, count, len(tokens))
            if taken is not None:
                if present is not None:
                    self._drop(present)
                self.of_sessions[key] = taken
                break

    def _shared(self, kv: SequenceState, tokens: Sequence[int]) -> int:
        """The number of `tokens` that another text could take from a state."""
        count = common_prefix(kv.tokens, tokens, min(kv.verified, len(tokens)))
        if self._chunk and count < kv.verified:
            count = min(count, kv.chunked) // self._chunk * self._chunk
        return kv.nearest(count)

    def _taken(self, kv: SequenceState, count: int, n_tokens: int) -> SequenceState | None:
        """A state with the first `count` tokens of kv, for a text of n_tokens.

        It is kv itself, or a copy if kv is in use or worth keeping. None if there is no room.
        """
        in_use = self._is_used(kv)
        if in_use or self._is_worth_a_copy(kv, count, n_tokens):
            copy = self._copied(kv, count)
            if copy is not None or in_use:
                return copy
        if count < kv.length:
            self._save(kv)
            kv.truncate(count)
        self.prefixes = [it for it in self.prefixes if it is not kv]
        for key in [key for key, it in self.of_sessions.items() if it is kv]:
            del self.of_sessions[key]
        return kv

    def _is_worth_a_copy(self, kv: SequenceState, count: int, n_tokens: int) -> bool:
        """Whether a copy of kv's first `count` tokens costs other states less than kv would lose by being
        truncated.
        """
        lost = kv.length - count
        needed = self.nbytes + self.layout.nbytes(n_tokens + 1)
        short = max(0, needed - self._plan.kv_limit_bytes)
        if kv.states is not None and not short:
            # A recurrent state may later not be able to go back to this place.
            return True
        return lost * LOST_SHARE >= count and short * kv.length <= kv.nbytes * lost

    def _copied(self, kv: SequenceState, n_tokens: int | None = None) -> SequenceState | None:
        """A copy of a state's first n_tokens, or of all its tokens; None if there is no room."""
        self._in_use.append(kv)
        try:
            copy = kv.fork(n_tokens)
        except (BudgetError, MemoryError):
            return None
        finally:
            self._no_longer_used(kv)
        if any(kv is it for it in self.prefixes):
            self.prefixes = [*(it for it in self.prefixes if it is not kv), kv]
        return copy

    def _leave(self, kv: SequenceState | None) -> None:
        """Keep a state as a prefix for other texts."""
        if kv is not None:
            self.prefixes.append(kv)
            self._limit_prefixes()

    def _limit_prefixes(self) -> None:
        """Keep at most MAX_PREFIXES prefixes.

        If weights come from flash, prefixes may take at most the memory of one full context, since the plan
        gives the remaining memory to neurons.
        """
        for kv in self.prefixes[:-MAX_PREFIXES]:
            if not self._is_used(kv):
                self._drop(kv)
        if self._plan.offloads_weights:
            for kv in self.prefixes:
                while self.prefix_bytes > self._plan.kv_cache_bytes and kv.nbytes and not self._is_used(kv):
                    self._shorten(kv, self.prefix_bytes - self._plan.kv_cache_bytes)
        self._forget_empty()

    def _forget_empty(self) -> None:
        self.prefixes = [kv for kv in self.prefixes if kv.nbytes or self._is_used(kv)]

    def _drop_retired(self) -> None:
        in_use = []
        while not self.retired.empty():
            key, keep = self.retired.get()
            kv = self.of_sessions.get(key)
            if kv is not None and not keep and self._is_used(kv):
                in_use.append((key, keep))
            elif kv is not None:
                del self.of_sessions[key]
                if keep:
                    self._leave(kv)
                else:
                    self._drop(kv)
        for each in in_use:
            self.retired.put(each)

    def _fits(self, limit_bytes: int, added: int = 0) -> bool:
        """Whether all states and `added` more bytes fit into limit_bytes, and into the other machines'
        memory.
        """
        short = self._later is not None and self._later.short_of_room(self.layout, added)
        return self.nbytes + added <= limit_bytes and not short

    def _drop_idle(self, limit_bytes: int, added: int = 0) -> None:
        """Shorten unused states, prefixes first, until all states and `added` more bytes fit into
        limit_bytes.
        """
        self._drop_retired()
        if self._fits(limit_bytes, added):
            return
        self._save_keyless()
        self._forget_past(limit_bytes, added, marks=False)
        for kv in self._all():
            while kv.nbytes and not self._fits(limit_bytes, added) and not self._is_used(kv):
                self._shorten(kv, self.nbytes + added - limit_bytes)
        self._forget_past(limit_bytes, added)
        self._forget_empty()

    def _forget_past(self, limit_bytes: int, added: int = 0, marks: bool = True) -> None:
        """Release what states in use don't need in order to go on, until all states and `added` more bytes
        fit into limit_bytes.
        """
        for kv in reversed(self._in_use):
            while not self._fits(limit_bytes, added) and kv.forget_past(marks):
                pass

    def _shorten(self, kv: SequenceState, nbytes: int) -> None:
        """Make a state smaller: release blocks of windowed layers that it doesn't need, or else save it and
        cut off its end.

        Cuts off `nbytes`, but at least a quarter of the state, because arrays may move when they shrink.
        """
        if kv.forget_past():
            return
        self._save(kv)
        block_bytes = self.layout.block_bytes + self.layout.window_block_bytes
        tokens = kv.length - -(-nbytes // block_bytes) * BLOCK_TOKENS if nbytes > 0 else kv.length
        tokens = min(tokens, kv.length * 3 // 4)
        kv.truncate(tokens if tokens >= SHARED_TOKENS else 0)

    def _drop(self, kv: SequenceState) -> None:
        """Save a state, and empty it."""
        self._save(kv)
        kv.truncate(0)

    def _save(self, kv: SequenceState) -> None:
        """Write a state's unsaved pieces to the prompt cache."""
        if any(it is kv for it in self._unsaved):
            while self._write_next(kv):
                pass
            self._saved(kv)

    def _save_up_to(self, kv: SequenceState, stop: int) -> None:
        """Write those of a state's first `stop` tokens to the prompt cache that aren't stored there yet."""
        while self.store is not None and kv.saved < stop and self._write_next(kv):
            pass

    def _save_keyless(self) -> None:
        """Write and drop the states without a key."""
        for kv in list(self._unsaved):
            if not self._is_held(kv):
                self._save(kv)

    def _write_next(self, kv: SequenceState) -> bool:
        """Write one file of a state to the prompt cache. Returns False if there is nothing to write."""
        assert self.store is not None
        before, kv.saved = kv.saved, self.store.write_next(kv, kv.saved)
        return kv.saved > before

    def _saved(self, kv: SequenceState) -> None:
        """Record that a state is saved. If it has no key, it is dropped."""
        self._unsaved = [it for it in self._unsaved if it is not kv]
        if not self._is_held(kv):
            kv.truncate(0)

    def _all(self) -> list[SequenceState]:
        """All states that later texts may begin with, in the order in which they are evicted."""
        return [*self.prefixes, *self.of_sessions.values()]

    def _is_held(self, kv: SequenceState) -> bool:
        return any(it is kv for it in self._all())

    def _is_used(self, kv: SequenceState) -> bool:
        return any(it is kv for it in self._in_use)

    def _no_longer_used(self, kv: SequenceState) -> None:
        """End the newest use of kv. If an older text still uses it, kv keeps the older place in the order of
        eviction.
        """
        del self._in_use[max(at for at, it in enumerate(self._in_use) if it is kv)]

    def _allocate(self, nbytes: int) -> Block:
        """New memory for a block or for states. Weights give up memory first."""
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
            # One full context is guaranteed; another model has claimed the rest.
            self._drop_idle(plan.kv_cache_bytes, nbytes)
        if not self._claimed(self.nbytes + nbytes):
            raise BudgetError(
                f"{format_bytes(self.nbytes + nbytes)} of keys and values don't fit the budget of "
                f"{format_bytes(plan.budget_bytes)}; close a session or raise the budget",
                required_bytes=plan.budget_bytes + nbytes,
            )
        self._yield_to(self.nbytes + nbytes)
        # All pages at once: pages first touched when tokens are written would hit a limit one by one.
        block = self._backend.allocate_block(nbytes)
        self.nbytes += nbytes
        return block

    def _is_idle(self, nbytes: int) -> bool:
        """Whether `nbytes` are free that no other state uses and that weights couldn't use."""
        plan, held = self._plan, self.nbytes + nbytes
        return not plan.offloads_weights and held <= plan.kv_limit_bytes and self._claimed(held)

    def _release(self, block: Block) -> None:
        self.nbytes -= self.layout.block_bytes if block is None else block.nbytes
        self._claimed(self.nbytes)

    def _claimed(self, nbytes: int) -> bool:
        """Claim `nbytes` for all states. Returns False if they don't fit.

        Beyond one full context, states get only memory that no other model claims.
        """
        plan = self._plan
        beyond = 0 if plan.offloads_weights else max(0, nbytes - plan.kv_cache_bytes)
        return nbytes <= plan.kv_limit_bytes and self._claim.go_beyond(plan, beyond)
