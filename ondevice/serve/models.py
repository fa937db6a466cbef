"""Loads models, and admits requests to them.

Models are loaded when they are requested, all under one budget. Up to `RuntimeConfig.parallel` requests for
one model generate at once. Waiting clients, distinguished by address, are admitted one after the other. A
request for another model waits in the same queue. Once nothing runs, other models make room for its model, as
`residency` decides.
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
"""The client's address of the present request."""


@dataclass(frozen=True)
class ModelFacts:
    """A model's name, size and abilities, known without loading it. created: seconds since 1970."""

    name: str
    architecture: str
    parameters: int
    nbytes: int
    quantization: str
    max_context: int
    """Most tokens that the model was made for."""
    planned_context: int
    """Tokens that a text may have by the plan from before loading."""
    vocab_size: int
    digest: str
    """SHA-256 of the bundle's manifest, in hex."""
    template: str
    created: int
    least_bytes: int
    """Estimated memory that the model needs to run, without the process."""
    full_bytes: int
    """Estimated memory that the model can use, without the process."""
    fills_gaps: bool
    """Whether the model has tokens to fill a gap between two texts."""
    sampling: SamplingConfig
    """The authors' recommendation for replies."""


class ServedModel:
    """A loaded model, and the number of requests that use it."""

    def __init__(self, facts: ModelFacts, model: Model) -> None:
        self.facts = facts
        self.model = model
        self.at_work = 0
        """Number of requests that the model works for."""
        self.kept_until = 0.0
        """Time of `time.monotonic()` until which a client wants the model to stay loaded."""

    @contextmanager
    def working(self) -> Iterator[None]:
        """A context in which the model counts as in use, so that it isn't unloaded."""
        self.at_work += 1
        try:
            yield
        finally:
            self.at_work -= 1

    @property
    def is_kept(self) -> bool:
        """Whether a client wants the model to stay loaded."""
        return time.monotonic() < self.kept_until

    @property
    def resident(self) -> Resident:
        """The model in the form that `residency` takes."""
        plan = self.model.plan
        least = plan.minimum_budget_bytes - plan.process_bytes - plan.others_bytes
        return Resident(self.facts.name, plan.claim_bytes, least, self.at_work > 0)

    @property
    def parallel(self) -> int:
        """Most requests that may generate at once."""
        return self.model.runtime.parallel


@dataclass(eq=False)
class _Waiting:
    """A waiting request. admitted: gets its result when the request is admitted."""

    facts: ModelFacts
    client: str
    admitted: asyncio.Future[None]


class Models:
    """The server's models by name; the first is the default."""

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
        first: the first model, if it is loaded already. Its budget becomes that of all models together.
        queue: number of requests that may wait. As many more may wait if their clients have no other waiting
            request.
        metrics: counts waiting and running requests.
        aliases: patterns of other names, each with the name of a model in `facts`.
        """
        self.facts = {model.name: model for model in facts}
        self._aliases = aliases
        self.residents: list[ServedModel] = []
        """The loaded models, least recently used first."""
        self.waiting = 0
        self._load = load
        self._queue = queue
        self._metrics = metrics
        self._waiting: deque[_Waiting] = deque()
        self._running = 0
        self._current: ModelFacts | None = None
        """The running requests' model."""
        self._changing: asyncio.Task[Any] | None = None
        self._stopping = False
        self._tasks: set[asyncio.Task[Any]] = set()
        """Tasks of waiting and running requests."""
        self._ended = False
        """Whether running requests are over, because the server stops."""
        self._budget_bytes: int | None = None
        """Budget of all models together; None until one is loaded."""
        if first is not None:
            self._add(self.find(None), first)

    @property
    def loaded(self) -> ServedModel | None:
        """The model that was used last."""
        return self.residents[-1] if self.residents else None

    @property
    def running(self) -> int:
        """Number of requests that generate."""
        return self._running

    @property
    def listed(self) -> list[tuple[str, ModelFacts]]:
        """Names of the models, and aliases without patterns, each with its model."""
        plain = [(name, model) for name, model in self._aliases if not set(name) & PATTERN_CHARACTERS]
        other = [(name, self.facts[model]) for name, model in plain if name not in self.facts]
        return [*self.facts.items(), *other]

    def find(self, name: str | None) -> ModelFacts:
        """The model of a name or an alias; both may end in `:latest`. Raises RequestError for other names."""
        if not name:
            return next(iter(self.facts.values()))
        names = (name, name.removesuffix(":latest"))
        facts = next((self.facts[each] for each in names if each in self.facts), None)
        if facts is None:
            aliased = (to for each in names for alias, to in self._aliases if fnmatchcase(each, alias))
            facts = self.facts.get(next(aliased, ""))
        if facts is None:
            raise RequestError(
                404,
                f"there is no model {name[:100]!r}; this server has {', '.join(self.facts)}",
                field="model",
                code="model_not_found",
            )
        return facts

    def loaded_as(self, facts: ModelFacts) -> ServedModel | None:
        """The loaded model; None if it isn't loaded."""
        return next((loaded for loaded in self.residents if loaded.facts is facts), None)

    def context_tokens(self, facts: ModelFacts) -> int:
        """The number of tokens that a text of a model may have, including its prompt."""
        loaded = self.loaded_as(facts)
        return facts.planned_context if loaded is None else loaded.model.plan.max_context

    @asynccontextmanager
    async def admitted(self, facts: ModelFacts, follows: bool = False) -> AsyncIterator[ServedModel]:
        """A context in which the caller may generate, with the model loaded.

        follows: whether the request has been admitted before. Then it may wait even if too many others do,
        because its earlier generations would be lost otherwise.

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
                    # Only a loaded model tells how many may run.
                    self._admit()
                    yield loaded
            finally:
                self._metrics.add("running_requests", -1)
                self._running -= 1
                self._admit()

    @asynccontextmanager
    async def ensure_loaded(self, facts: ModelFacts) -> AsyncIterator[ServedModel]:
        """A context with the model loaded, for work other than generating. Waits only until it is loaded."""
        known = self.loaded_as(facts)
        if known is not None:
            with known.working():
                yield known
            return
        async with self.admitted(facts) as loaded:
            yield loaded

    def keep(self, facts: ModelFacts, seconds: float | None) -> None:
        """Keep a loaded model for some seconds, unless others need its memory. 0: unload it if it is idle.

        seconds: None changes nothing.
        """
        loaded = self.loaded_as(facts)
        if loaded is None or seconds is None:
            return
        loaded.kept_until = time.monotonic() + seconds
        is_wanted = any(it.facts is facts for it in self._waiting) or (
            self._running and self._current is facts
        )
        if seconds == 0 and not (is_wanted or loaded.at_work or self._is_changing):
            # Removed before it is closed, so that no request gets it.
            self.residents.remove(loaded)
            self._changing = asyncio.create_task(self._close(loaded))

    async def set_budget(self, budget_bytes: int) -> None:
        """Set the budget of all models together. The model used last gets what the others leave.

        Raises RequestError if that model can't run in it, or none is loaded.
        """
        loaded = self.loaded
        if loaded is None or self._is_changing:
            raise RequestError(503, "a model is being loaded; try again")
        plan = loaded.model.plan
        alone = plan.minimum_budget_bytes - plan.others_bytes
        try:
            if budget_bytes < alone:
                # Unloading others wouldn't help.
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
        """Refuse new and waiting requests."""
        self._stopping = True
        while self._waiting:
            future = self._waiting.popleft().admitted
            if not future.done():
                future.set_exception(_stopping())

    def end_requests(self) -> None:
        """End the running requests with an error, the same as that of refused requests."""
        self._ended = True
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        """Refuse new requests, end running ones and close the models."""
        self.refuse()
        self._ended = True
        if self._changing is not None:
            await asyncio.wait({self._changing})
        while self.residents:
            await asyncio.to_thread(self.residents.pop().model.close)

    @contextmanager
    def _endable(self) -> Iterator[None]:
        """A context in which `end_requests` ends the current task's request with a RequestError."""
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
        """Wait until the request is admitted. Raises RequestError if too many wait."""
        entry = _Waiting(facts, client_address.get(), asyncio.get_running_loop().create_future())
        waits = any(it.client == entry.client and not it.admitted.done() for it in self._waiting)
        most = self._queue if waits else 2 * self._queue
        self._waiting.append(entry)
        self._admit()
        if not entry.admitted.done() and not follows and self.waiting >= most:
            self._waiting.remove(entry)
            raise RequestError(
                429, f"{self.waiting} requests wait already; try again", code="rate_limit_exceeded"
            )
        self._wait(1)
        try:
            await entry.admitted
        except asyncio.CancelledError:
            if not entry.admitted.cancelled():
                self._running -= 1
            self._admit()
            raise
        finally:
            self._wait(-1)

    def _admit(self) -> None:
        """Admit waiting requests in order, as many as the running ones allow.

        When a request is admitted, other requests of the same client move to the end of the queue.
        """
        while self._waiting:
            if self._waiting[0].admitted.cancelled():
                self._waiting.popleft()
                continue
            facts, loaded = self._waiting[0].facts, self.loaded
            if self._running:
                known = loaded is not None and loaded.facts is facts and self._current is facts
                if not known or loaded is None or self._running >= loaded.parallel:
                    return
            self._running, self._current = self._running + 1, facts
            first = self._waiting.popleft()
            first.admitted.set_result(None)
            # Stable, so that each client's requests keep their order.
            self._waiting = deque(sorted(self._waiting, key=lambda it: it.client == first.client))

    def _wait(self, change: int) -> None:
        self.waiting += change
        self._metrics.add("waiting_requests", change)

    @property
    def _is_changing(self) -> bool:
        return self._changing is not None and not self._changing.done()

    async def _ensured(self, facts: ModelFacts) -> ServedModel:
        """The loaded model. If the client disconnects, loading goes on."""
        while self._is_changing:
            assert self._changing is not None
            await asyncio.wait({self._changing})
        if self.loaded is not None and self.loaded.facts is facts:
            return self.loaded
        changing = self._changing = asyncio.create_task(self._changed(facts))
        return await asyncio.shield(changing)

    async def _changed(self, facts: ModelFacts) -> ServedModel:
        """The model, loaded if it wasn't, with the memory that the other models leave it."""
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

    def _add(self, facts: ModelFacts, model: Model) -> ServedModel:
        self.residents.append(ServedModel(facts, model))
        if self._budget_bytes is None:
            self._budget_bytes = model.memory_pressure.user_budget_bytes
        return self.residents[-1]

    async def _share(self, loaded: ServedModel, budget_bytes: int | None) -> None:
        """Give a loaded model the memory that the others leave. Raises BudgetError if that is too little."""
        plan, resident = loaded.model.plan, loaded.resident
        assert budget_bytes is not None, "it is known once a model is loaded"
        full = plan.full_bytes - plan.process_bytes - plan.others_bytes
        await self._make_room(resident.least_bytes, full, budget_bytes, loaded)
        while True:
            try:
                await asyncio.to_thread(loaded.model.set_dram_budget, budget_bytes)
                return
            except BudgetError:
                if not await self._unload_one(loaded):
                    raise

    async def _make_room(
        self, least_bytes: int, full_bytes: int, budget_bytes: int | None, but: ServedModel | None = None
    ) -> None:
        """Let other models than `but` make room for a model."""
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

    async def _unload_one(self, but: ServedModel | None = None) -> bool:
        """Unload the idle model that was used least recently, but not `but`. Returns False if
        there is none.
        """
        idle = [it for it in self._by_need() if it is not but and not it.at_work]
        if idle:
            await self._unload(idle[0])
        return bool(idle)

    def _by_need(self) -> list[ServedModel]:
        """The loaded models in the order in which they make room: first those that no client keeps, then by
        last use.
        """
        return sorted(self.residents, key=lambda it: it.is_kept)

    async def _unload(self, loaded: ServedModel) -> None:
        self.residents.remove(loaded)
        await self._close(loaded)

    async def _close(self, loaded: ServedModel) -> None:
        is_kept = loaded.is_kept
        await asyncio.to_thread(loaded.model.close)
        # kept=True: a client wanted the model to stay longer.
        log_event("unloaded", model=loaded.facts.name, kept=is_kept)


async def _drop_prefixes(others: Sequence[ServedModel], full_bytes: int, budget_bytes: int) -> None:
    """Let idle models drop their texts' states, unless a model of full_bytes has room anyway."""
    claimed = sum(it.resident.claim_bytes for it in others)
    # A claim has one full context.
    beyond = sum(max(0, it.model.state_bytes - it.model.plan.kv_cache_bytes) for it in others)
    for it in others if claimed + beyond + full_bytes > budget_bytes else ():
        if not it.at_work:
            await asyncio.to_thread(it.model.drop_prefixes)


def _yield_memory(model: Model) -> int:
    """Set a model's budget to the smallest with which it runs next to the others. Returns it in bytes."""
    least = model.replanned.minimum_budget_bytes
    model.set_dram_budget(least)
    return least


def _stopping() -> RequestError:
    return RequestError(503, "the server is stopping", code="server_stopping")
