"""The states of a model's texts, the memory that they may have together, and which of them a new text begins
with.

A text begins with the state that has most of its tokens, whichever text left it: it takes that state, or a
copy of that part of it. The pool knows no weights. What isn't in memory any more is computed again when it is
needed, to the same bits, unless a prompt cache on disk has it: what isn't there yet is written while the
model is idle, a little beside texts that run, or before it is dropped.
"""

from __future__ import annotations

import itertools
import logging
import queue
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from ondevice.backends.base import BLOCK_TOKENS, Block, KVLayout
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

MAX_KEPT = 64
"""Most prefixes that are kept, so that finding the longest takes no time."""
SHARED_TOKENS = 8
"""Fewest tokens for whose sake a text begins with another's state."""
LOST_SHARE = 16
"""A state is copied where a text would take at most this many tokens from it for each one that it would lose;
else the text takes the state itself."""
PASSES_PER_WRITE = 20
"""Time for which texts run, in units of what the prompt cache's last file took, until the next is written."""


class StatePool:
    """One model's states: of sessions, each named by a key, and prefixes that texts have left. All but
    `retired` belongs to the owner thread.

    When memory runs short, states that aren't in use lose their ends: prefixes first, by least use.
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
        layout: How blocks are laid out.
        plan: The model's plan, which limits the bytes of all states.
        claim: The model's claim on the process's memory.
        backend: The backend, which allocates blocks.
        yield_to: Called before a block is allocated, with the bytes that blocks will have then.
        store: The prompt cache on disk; None without one.
        later: The layers of other machines, which have a part of every state; None without any.
        chunk: Tokens of the whole chunks of a prompt that another text may begin with; 0: any number of
            tokens gives it equal bits.
        """
        self.layout = layout
        self.nbytes = 0
        """Bytes of all blocks and states that exist."""
        self.of_sessions: OrderedDict[int, SequenceState] = OrderedDict()
        """Least recently used first."""
        self.kept: list[SequenceState] = []
        """Prefixes that texts which have ended left for others, least recently used first."""
        self.retired: queue.SimpleQueue[tuple[int, bool]] = queue.SimpleQueue()
        """Keys that are no longer needed, and whether their states become prefixes for other texts; any
        thread may add to it."""
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
        self._chunk = chunk
        self._unnamed = itertools.count(-1, -1)
        """Keys of texts that have none."""
        self._write_after = 0.0
        """When the next file may be written beside texts that run, by `time.monotonic`."""

    @property
    def kept_bytes(self) -> int:
        """Bytes of all prefixes that texts have left."""
        return sum(kv.nbytes for kv in self.kept)

    @contextmanager
    def begin(self, key: int | None, tokens: Sequence[int], keep: bool = False) -> Iterator[SequenceState]:
        """A context with the state of `key` for a text that begins with `tokens`, which holds nothing else.

        It has as many of them as any state has, but the last, which always runs. A `key` of None gives a new
        state that ends with the context and has none of them. keep: it begins like one with a key instead,
        and is left as a prefix for other texts.
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
            self._no_longer_used(kv)
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
        """Write a little of what the prompt cache lacks of states that aren't in use. False: there is no
        more.
        """
        for kv in [it for it in self._unsaved if not self._is_used(it)]:
            if self._write_next(kv):
                return True
            self._saved(kv)
        return False

    def save_between_passes(self) -> None:
        """`save_next` between the passes of texts that run, for a small share of their time: so a server that
        is never idle has little to write where memory runs short.
        """
        begun = time.monotonic()
        if self._unsaved and begun >= self._write_after:
            self.save_next()
            ended = time.monotonic()
            self._write_after = ended + PASSES_PER_WRITE * (ended - begun)

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
            copy = self._copied(kv)
            if copy is None:
                log.info("no room for a second state: the fork will compute its own")
            else:
                self.of_sessions[target] = copy

    def keep_to(self, plan: Plan) -> None:
        """Keep to another plan, and drop states that it has no room for.

        Those go first that aren't in use, then those whose use began last. The first in use stays.
        """
        self._plan = plan
        self._drop_idle(plan.kv_limit_bytes)
        self._limit_kept()
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
        self.kept.clear()
        self._backend = self._yield_to = None  # type: ignore[assignment]

    def new_state(self) -> SequenceState:
        """An empty state that has no key."""
        make = SequenceState if self._later is None else self._later.new_state
        return make(self.layout, self._allocate, self._release, self._backend.new_arrays(self.layout))

    def drop_kept(self) -> None:
        """Drop the prefixes that texts have left."""
        self._drop_retired()
        for kv in self.kept:
            if not self._is_used(kv):
                self._drop(kv)
        self._forget_empty()

    def _take_prefix(self, key: int, tokens: Sequence[int]) -> None:
        """Give `key` the state that has most of `tokens`, or a copy of that part of it, if it has more than
        the key's own.
        """
        self._drop_retired()
        present, wanted = self.of_sessions.get(key), tokens[:-1]
        if present is not None and self._is_used(present):
            return
        held = 0 if present is None else present.nearest(common_prefix(present.tokens, wanted))
        others = [(self._shared(kv, wanted), kv) for kv in self._all() if kv is not present]
        # Those that aren't in use come first, then those of which least would be lost.
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
        """How many of `tokens` another text can take from a state."""
        count = common_prefix(kv.tokens, tokens, min(kv.verified, len(tokens)))
        if self._chunk and count < kv.verified:
            count = min(count, kv.chunked) // self._chunk * self._chunk
        return kv.nearest(count)

    def _taken(self, kv: SequenceState, count: int, n_tokens: int) -> SequenceState | None:
        """A state with the first `count` tokens of kv, for a text of n_tokens: kv itself, or a copy if it is
        in use or worth that. None: there is no room for one.
        """
        in_use = self._is_used(kv)
        if in_use or self._is_worth_a_copy(kv, count, n_tokens):
            copy = self._copied(kv, count)
            if copy is not None or in_use:
                return copy
        if count < kv.length:
            self._save(kv)
            kv.truncate(count)
        self.kept = [it for it in self.kept if it is not kv]
        for key in [key for key, it in self.of_sessions.items() if it is kv]:
            del self.of_sessions[key]
        return kv

    def _is_worth_a_copy(self, kv: SequenceState, count: int, n_tokens: int) -> bool:
        """Whether others would lose less to a copy than this state loses by going another way."""
        lost = kv.length - count
        needed = self.nbytes + self.layout.nbytes(n_tokens + 1)
        short = max(0, needed - self._plan.kv_limit_bytes)
        if kv.states is not None and not short:
            # Once it has gone on, it may not come back to this place.
            return True
        return lost * LOST_SHARE >= count and short * kv.length <= kv.nbytes * lost

    def _copied(self, kv: SequenceState, n_tokens: int | None = None) -> SequenceState | None:
        """A copy of a state's first n_tokens, by default of all; None if there is no room for it."""
        self._in_use.append(kv)
        try:
            copy = kv.fork(n_tokens)
        except (BudgetError, MemoryError):
            return None
        finally:
            self._no_longer_used(kv)
        if any(kv is it for it in self.kept):
            self.kept = [*(it for it in self.kept if it is not kv), kv]
        return copy

    def _leave(self, kv: SequenceState | None) -> None:
        """Keep a state as a prefix for other texts."""
        if kv is not None:
            self.kept.append(kv)
            self._limit_kept()

    def _limit_kept(self) -> None:
        """Keep at most MAX_KEPT prefixes. Where weights come from flash, they have one full context's memory
        together: the plan has neurons beside that.
        """
        for kv in self.kept[:-MAX_KEPT]:
            if not self._is_used(kv):
                self._drop(kv)
        if self._plan.offloads_weights:
            for kv in self.kept:
                while self.kept_bytes > self._plan.kv_cache_bytes and kv.nbytes and not self._is_used(kv):
                    self._shorten(kv, self.kept_bytes - self._plan.kv_cache_bytes)
        self._forget_empty()

    def _forget_empty(self) -> None:
        self.kept = [kv for kv in self.kept if kv.nbytes or self._is_used(kv)]

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
        """Whether all states and `added` bytes keep to limit_bytes, and to what other machines have."""
        short = self._later is not None and self._later.short_of_room(self.layout, added)
        return self.nbytes + added <= limit_bytes and not short

    def _drop_idle(self, limit_bytes: int, added: int = 0) -> None:
        """Shorten states that aren't in use, prefixes first and then by least use, until the rest and `added`
        bytes fit.
        """
        self._drop_retired()
        if self._fits(limit_bytes, added):
            return
        self._save_keyless()
        for kv in self._all():
            while kv.nbytes and not self._fits(limit_bytes, added) and not self._is_used(kv):
                self._shorten(kv, self.nbytes + added - limit_bytes)
        self._forget_empty()

    def _shorten(self, kv: SequenceState, nbytes: int) -> None:
        """Take `nbytes` or more from a state's end, and a quarter at least, as arrays may move to shrink.
        What the prompt cache lacks is written first.
        """
        self._save(kv)
        tokens = kv.length - -(-nbytes // self.layout.block_bytes) * BLOCK_TOKENS if nbytes > 0 else kv.length
        tokens = min(tokens, kv.length * 3 // 4)
        kv.truncate(tokens if tokens >= SHARED_TOKENS else 0)

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
            if not self._is_held(kv):
                self._save(kv)

    def _write_next(self, kv: SequenceState) -> bool:
        """Write one file of a state's. False: there is nothing more to write."""
        assert self.store is not None
        before, kv.saved = kv.saved, self.store.write_next(kv, kv.saved)
        return kv.saved > before

    def _saved(self, kv: SequenceState) -> None:
        """A state needn't be written any more; without a key it ends here."""
        self._unsaved = [it for it in self._unsaved if it is not kv]
        if not self._is_held(kv):
            kv.truncate(0)

    def _all(self) -> list[SequenceState]:
        """All states that later texts may begin with, in the order in which they lose their memory."""
        return [*self.kept, *self.of_sessions.values()]

    def _is_held(self, kv: SequenceState) -> bool:
        return any(it is kv for it in self._all())

    def _is_used(self, kv: SequenceState) -> bool:
        return any(it is kv for it in self._in_use)

    def _no_longer_used(self, kv: SequenceState) -> None:
        """End the use that began last: a text that came earlier and still uses a state keeps its place."""
        del self._in_use[max(at for at, it in enumerate(self._in_use) if it is kv)]

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
