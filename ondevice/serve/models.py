"""Which models are loaded, and whose turn it is.

Models are loaded when they are asked for, all under one budget. Up to `RuntimeConfig.parallel` requests for
one model generate at once. Turns go round the clients that wait, a client being an address. A request for
another model waits for its turn like any other, and those behind it wait as well; once nothing runs, the
other models make room for its own, as `residency` says.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from ondevice.config import SamplingConfig
from ondevice.errors import BudgetError
from ondevice.records import dataclass
from ondevice.serve.errors import RequestError
from ondevice.serve.metrics import Metrics, log_event
from ondevice.serve.residency import Resident, room_for

if TYPE_CHECKING:
    from ondevice.api import Model

    Load = Callable[[str, int | None], Model]
    """Loads a model by name under a budget; None: as the server's options say."""


PATTERN_CHARACTERS = set("*?[")
"""Characters that make an alias a pattern of many names."""
client_address: ContextVar[str] = ContextVar("client_address", default="")
"""Where the request that is being answered comes from."""


@dataclass(frozen=True)
class ModelFacts:
    """A model's name, size and abilities, read without loading it. `created`: seconds since 1970."""

    name: str
    architecture: str
    parameters: int
    nbytes: int
    quantisation: str
    max_context: int
    """Most tokens that the model was made for."""
    planned_context: int
    """Tokens that a text may have by the plan that was made before it was loaded."""
    vocab_size: int
    digest: str
    """What tells this bundle from others: a SHA-256 in hex."""
    template: str
    created: int
    least_bytes: int
    """Memory of its own in which it can run, about."""
    full_bytes: int
    """Most memory of its own that it can use, about."""
    fills_gaps: bool
    """Whether it has tokens for what belongs between two texts."""
    sampling: SamplingConfig
    """What its authors recommend for replies, where a request leaves it open."""


class LoadedModel:
    """A model, and how many requests it works for."""

    def __init__(self, facts: ModelFacts, model: Model) -> None:
        self.facts = facts
        self.model = model
        self.at_work = 0
        """Requests that it works for."""
        self.kept_until = 0.0
        """Until when, by `time.monotonic()`, a client wants it to stay loaded."""

    @contextmanager
    def working(self) -> Iterator[None]:
        """A context in which the model is at work, and so isn't unloaded."""
        self.at_work += 1
        try:
            yield
        finally:
            self.at_work -= 1

    @property
    def is_kept(self) -> bool:
        """Whether a client wants it to stay loaded."""
        return time.monotonic() < self.kept_until

    @property
    def resident(self) -> Resident:
        """The model as `residency` sees it."""
        plan = self.model.plan
        least = plan.minimum_budget_bytes - plan.process_bytes - plan.others_bytes
        return Resident(self.facts.name, plan.claim_bytes, least, self.at_work > 0)

    @property
    def parallel(self) -> int:
        """Most requests that may generate at once."""
        return self.model.runtime.parallel


@dataclass(eq=False)
class _Waiting:
    """A request that waits for its turn, which is set where it comes."""

    facts: ModelFacts
    client: str
    turn: asyncio.Future[None]


class Models:
    """The models that the server has by name, the first being what a request without a name gets."""

    def __init__(
        self,
        facts: Sequence[ModelFacts],
        load: Load,
        first: Model | None,
        queue: int,
        metrics: Metrics,
        aliases: Sequence[tuple[str, str]] = (),
    ) -> None:
        """Args:
        facts: the models, at least one.
        load: loads a model by its name in `facts`, under a budget.
        first: the first of them, if it is loaded already. Its budget is all models' together.
        queue: number of requests that may wait. Up to as many again may, of clients that have none waiting.
        metrics: counts those that wait and run.
        aliases: patterns of other names, each with the name of a model in `facts`.
        """
        self.facts = {model.name: model for model in facts}
        self._aliases = aliases
        self.residents: list[LoadedModel] = []
        """The loaded models, least recently used first."""
        self.waiting = 0
        self._load = load
        self._queue = queue
        self._metrics = metrics
        self._waiting: deque[_Waiting] = deque()
        self._running = 0
        self._current: ModelFacts | None = None
        """The model of the requests that run."""
        self._changing: asyncio.Task[Any] | None = None
        self._stopping = False
        self._tasks: set[asyncio.Task[Any]] = set()
        """Tasks of the requests that wait or have a turn."""
        self._ended = False
        """Whether the time of those that ran as the server stopped is over."""
        self._budget_bytes: int | None = None
        """All models' budget; None until one is loaded."""
        if first is not None:
            self._add(self.find(None), first)

    @property
    def loaded(self) -> LoadedModel | None:
        """The model that was used last."""
        return self.residents[-1] if self.residents else None

    @property
    def running(self) -> int:
        """Number of requests that generate."""
        return self._running

    @property
    def listed(self) -> list[tuple[str, ModelFacts]]:
        """Names by which the models can be asked for, each with its model: their own, and plain aliases."""
        plain = [(name, model) for name, model in self._aliases if not set(name) & PATTERN_CHARACTERS]
        other = [(name, self.facts[model]) for name, model in plain if name not in self.facts]
        return [*self.facts.items(), *other]

    def find(self, name: str | None) -> ModelFacts:
        """The model of a name or of an alias; both may end in `:latest`. Raises RequestError for others."""
        if not name:
            return next(iter(self.facts.values()))
        names = (name, name.removesuffix(":latest"))
        found = next((self.facts[each] for each in names if each in self.facts), None)
        if found is None:
            aliased = (to for each in names for alias, to in self._aliases if fnmatchcase(each, alias))
            found = self.facts.get(next(aliased, ""))
        if found is None:
            raise RequestError(
                404,
                f"there is no model {name[:100]!r}; this server has {', '.join(self.facts)}",
                field="model",
                code="model_not_found",
            )
        return found

    def loaded_as(self, facts: ModelFacts) -> LoadedModel | None:
        """The model as it is loaded; None if it isn't."""
        return next((loaded for loaded in self.residents if loaded.facts is facts), None)

    def context_tokens(self, facts: ModelFacts) -> int:
        """Tokens that a text of a model may have, its prompt included."""
        loaded = self.loaded_as(facts)
        return facts.planned_context if loaded is None else loaded.model.plan.max_context

    @asynccontextmanager
    async def turn(self, facts: ModelFacts, follows: bool = False) -> AsyncIterator[LoadedModel]:
        """A context in which the caller may generate, with the model loaded.

        follows: whether the request has had a turn before. It may then wait even if too many do, as what
        has been generated for it would be lost.

        Raises RequestError if too many wait or the server stops, and what loading raises.
        """
        if self._ended or (self._stopping and not follows):
            raise _stopping()
        with self._endable():
            await self._begin(facts, follows)
            try:
                self._metrics.add("running_requests", 1)
                loaded = await self._ensured(facts)
                with loaded.working():
                    # Now it is known how many may run.
                    self._admit()
                    yield loaded
            finally:
                self._metrics.add("running_requests", -1)
                self._running -= 1
                self._admit()

    @asynccontextmanager
    async def at_hand(self, facts: ModelFacts) -> AsyncIterator[LoadedModel]:
        """A context with the model loaded, for work that is no generation. It waits only for loading."""
        known = self.loaded_as(facts)
        if known is not None:
            with known.working():
                yield known
            return
        async with self.turn(facts) as loaded:
            yield loaded

    def keep(self, facts: ModelFacts, seconds: float | None) -> None:
        """Let a loaded model stay for so long as far as others need no room; 0: unload it where it is idle.

        seconds: None: as it is.
        """
        loaded = self.loaded_as(facts)
        if loaded is None or seconds is None:
            return
        loaded.kept_until = time.monotonic() + seconds
        is_wanted = any(it.facts is facts for it in self._waiting) or (
            self._running and self._current is facts
        )
        if seconds == 0 and not (is_wanted or loaded.at_work or self._is_changing):
            # At once, so that nobody gets it while it is closed.
            self.residents.remove(loaded)
            self._changing = asyncio.create_task(self._close(loaded))

    async def set_budget(self, budget_bytes: int) -> None:
        """Keep all models to another budget from now on. The one used last has what others leave of it.

        Raises RequestError if that one can't run in it, or none is loaded.
        """
        loaded = self.loaded
        if loaded is None or self._is_changing:
            raise RequestError(503, "a model is being loaded; try again")
        plan = loaded.model.plan
        alone = plan.minimum_budget_bytes - plan.others_bytes
        try:
            if budget_bytes < alone:
                # Nothing that others do would help.
                raise BudgetError(
                    f"a budget of {budget_bytes} bytes is too small: {alone} is the least", alone
                )
            await self._share(loaded, budget_bytes)
        except BudgetError as error:
            raise RequestError(
                400, error.for_command_line, field="budget_bytes", code="budget_exceeded"
            ) from error
        self._budget_bytes = budget_bytes

    def refuse(self) -> None:
        """Refuse new requests, and those that wait for their turn."""
        self._stopping = True
        while self._waiting:
            turn = self._waiting.popleft().turn
            if not turn.done():
                turn.set_exception(_stopping())

    def end_requests(self) -> None:
        """End the requests that have a turn, with the error of those that are refused."""
        self._ended = True
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        """Refuse new requests, cancel what runs and close the model."""
        self.refuse()
        self._ended = True
        if self._changing is not None:
            await asyncio.wait({self._changing})
        while self.residents:
            await asyncio.to_thread(self.residents.pop().model.close)

    @contextmanager
    def _endable(self) -> Iterator[None]:
        """A context in which `end_requests` ends the current task's request. Raises RequestError then."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if not self._ended:
                raise
            raise _stopping() from None
        finally:
            self._tasks.discard(task)

    async def _begin(self, facts: ModelFacts, follows: bool) -> None:
        """Wait for a turn, and take it. Raises RequestError if too many wait."""
        own = _Waiting(facts, client_address.get(), asyncio.get_running_loop().create_future())
        waits = any(it.client == own.client and not it.turn.done() for it in self._waiting)
        most = self._queue if waits else 2 * self._queue
        self._waiting.append(own)
        self._admit()
        if not own.turn.done() and not follows and self.waiting >= most:
            self._waiting.remove(own)
            raise RequestError(
                429, f"{self.waiting} requests wait already; try again", code="rate_limit_exceeded"
            )
        self._wait(1)
        try:
            await own.turn
        except asyncio.CancelledError:
            if not own.turn.cancelled():
                self._running -= 1
            self._admit()
            raise
        finally:
            self._wait(-1)

    def _admit(self) -> None:
        """Give turns to those that wait, in their order, as far as there are any.

        A client whose request gets one goes behind the others with the rest of its requests.
        """
        while self._waiting:
            if self._waiting[0].turn.cancelled():
                self._waiting.popleft()
                continue
            facts, loaded = self._waiting[0].facts, self.loaded
            if self._running:
                known = loaded is not None and loaded.facts is facts and self._current is facts
                if not known or loaded is None or self._running >= loaded.parallel:
                    return
            self._running, self._current = self._running + 1, facts
            first = self._waiting.popleft()
            first.turn.set_result(None)
            # Stable, so that each client's requests keep their order.
            self._waiting = deque(sorted(self._waiting, key=lambda it: it.client == first.client))

    def _wait(self, change: int) -> None:
        self.waiting += change
        self._metrics.add("waiting_requests", change)

    @property
    def _is_changing(self) -> bool:
        return self._changing is not None and not self._changing.done()

    async def _ensured(self, facts: ModelFacts) -> LoadedModel:
        """The loaded model. Changing it goes on if the client goes, or what is loaded would be lost."""
        while self._is_changing:
            assert self._changing is not None
            await asyncio.wait({self._changing})
        if self.loaded is not None and self.loaded.facts is facts:
            return self.loaded
        changing = self._changing = asyncio.create_task(self._changed(facts))
        return await asyncio.shield(changing)

    async def _changed(self, facts: ModelFacts) -> LoadedModel:
        """The model, loaded or as it is, with what memory the others leave it."""
        for loaded in self.residents:
            if loaded.facts is facts:
                await self._share(loaded, self._budget_bytes)
                self.residents.remove(loaded)
                self.residents.append(loaded)
                return loaded
        begun = time.monotonic()
        await self._make_room(facts.least_bytes, facts.full_bytes, self._budget_bytes)
        while True:
            try:
                model = await asyncio.to_thread(self._load, facts.name, self._budget_bytes)
                break
            except BudgetError:
                # The sizes were estimates.
                if not await self._unload_one():
                    raise
        log_event("loaded", model=facts.name, seconds=round(time.monotonic() - begun, 3))
        return self._add(facts, model)

    def _add(self, facts: ModelFacts, model: Model) -> LoadedModel:
        self.residents.append(LoadedModel(facts, model))
        if self._budget_bytes is None:
            self._budget_bytes = model.memory_pressure.user_budget_bytes
        return self.residents[-1]

    async def _share(self, loaded: LoadedModel, budget_bytes: int | None) -> None:
        """Give a loaded model what others leave of the budget. Raises BudgetError if that is too little."""
        plan, own = loaded.model.plan, loaded.resident
        assert budget_bytes is not None, "it is known once a model is loaded"
        full = plan.full_bytes - plan.process_bytes - plan.others_bytes
        await self._make_room(own.least_bytes, full, budget_bytes, loaded)
        while True:
            try:
                await asyncio.to_thread(loaded.model.set_dram_budget, budget_bytes)
                return
            except BudgetError:
                if not await self._unload_one(loaded):
                    raise

    async def _make_room(
        self, least_bytes: int, full_bytes: int, budget_bytes: int | None, but: LoadedModel | None = None
    ) -> None:
        """Have other models than `but` make room for one."""
        others = {it.facts.name: it for it in self._by_need() if it is not but}
        if budget_bytes is None or not others:
            return
        residents = [it.resident for it in others.values()]
        process = max(it.model.plan.process_bytes for it in others.values())
        await _drop_prefixes(list(others.values()), full_bytes, budget_bytes - process)
        room = room_for(least_bytes, full_bytes, budget_bytes - process, residents)
        for name in room.unloaded:
            await self._unload(others[name])
        for name in room.yielding:
            least = await asyncio.to_thread(_yield_memory, others[name].model)
            log_event("yielded", model=name, budget_bytes=least)

    async def _unload_one(self, but: LoadedModel | None = None) -> bool:
        """Unload the idle model that was used least recently. Returns False if there is none."""
        idle = [it for it in self._by_need() if it is not but and not it.at_work]
        if idle:
            await self._unload(idle[0])
        return bool(idle)

    def _by_need(self) -> list[LoadedModel]:
        """The loaded models, those first that make room first: not kept for a client, least recently used."""
        return sorted(self.residents, key=lambda it: it.is_kept)

    async def _unload(self, loaded: LoadedModel) -> None:
        self.residents.remove(loaded)
        await self._close(loaded)

    async def _close(self, loaded: LoadedModel) -> None:
        is_kept = loaded.is_kept
        await asyncio.to_thread(loaded.model.close)
        # True: a client wanted it to stay longer.
        log_event("unloaded", model=loaded.facts.name, kept=is_kept)


async def _drop_prefixes(others: Sequence[LoadedModel], full_bytes: int, budget_bytes: int) -> None:
    """Have idle models drop what texts have left, unless a model of full_bytes has room beside that."""
    claimed = sum(it.resident.claim_bytes for it in others)
    # A claim has one full context.
    beyond = sum(max(0, it.model.state_bytes - it.model.plan.kv_cache_bytes) for it in others)
    for it in others if claimed + beyond + full_bytes > budget_bytes else ():
        if not it.at_work:
            await asyncio.to_thread(it.model.drop_prefixes)


def _yield_memory(model: Model) -> int:
    """Keep a model to the least that it runs in beside the others; that budget in bytes."""
    least = model.replanned.minimum_budget_bytes
    model.set_dram_budget(least)
    return least


def _stopping() -> RequestError:
    return RequestError(503, "the server is stopping", code="server_stopping")
