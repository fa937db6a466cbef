"""Which model is loaded, and whose turn it is.

One model is loaded at a time, under the whole budget, and up to `RuntimeConfig.parallel` requests generate at
once. A request for another model waits for its turn like any other, and those behind it wait as well; once
nothing runs, the loaded model is closed and the other one loaded.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ondevice.chat_template.messages import without_ids
from ondevice.errors import BudgetError
from ondevice.serve.config import SESSIONS
from ondevice.serve.errors import RequestError
from ondevice.serve.metrics import Metrics, log_event

if TYPE_CHECKING:
    from ondevice.api import Model
    from ondevice.chat_template.messages import Message
    from ondevice.session import Session


@dataclass(frozen=True)
class ModelFacts:
    """What is known of a model without loading it. `created` is in seconds since 1970."""

    name: str
    architecture: str
    parameters: int
    nbytes: int
    quantisation: str
    max_context: int
    digest: str
    template: str
    created: int


class LoadedModel:
    """A model, and conversations whose keys and values it still has."""

    def __init__(self, facts: ModelFacts, model: Model) -> None:
        self.facts = facts
        self.model = model
        self._sessions: list[Session] = []
        """Those that don't answer now, least recently used first."""
        self._answering = 0

    @property
    def parallel(self) -> int:
        """Most requests that may generate at once."""
        return self.model.runtime.parallel

    @contextmanager
    def session_for(self, messages: Sequence[Message]) -> Iterator[Session]:
        """A context with a session to answer `messages` with, alone: the one that they continue, or repeat,
        else one to give up.
        """
        known = [(self._common(session, messages), session) for session in self._sessions]
        common, session = max(known, key=lambda pair: pair[0], default=(0, None))
        if session is None or common == 0:
            room = len(self._sessions) + self._answering < max(SESSIONS, self.parallel)
            session = self.model.session() if room else self._sessions[0]
        self._sessions = [it for it in self._sessions if it is not session]
        self._answering += 1
        try:
            yield session
        finally:
            self._answering -= 1
            self._sessions.append(session)

    @staticmethod
    def _common(session: Session, messages: Sequence[Message]) -> int:
        """Number of messages that both begin with, if one begins with all of the other; else 0."""
        said = session.transcript
        common = min(len(said), len(messages))
        return common if without_ids(said[:common]) == without_ids(messages[:common]) else 0


@dataclass(eq=False)
class _Waiting:
    """A request that waits for its turn, which is set where it comes."""

    facts: ModelFacts
    turn: asyncio.Future[None]


class Models:
    """The models that the server has by name, the first being what a request without a name gets."""

    def __init__(
        self,
        facts: Sequence[ModelFacts],
        load: Callable[[str], Model],
        queue: int,
        metrics: Metrics,
    ) -> None:
        """Args:
        facts: the models, at least one.
        load: loads a model by its name in `facts`.
        queue: number of requests that may wait.
        metrics: counts those that wait and run.
        """
        self.facts = {model.name: model for model in facts}
        self.loaded: LoadedModel | None = None
        self.waiting = 0
        self._load = load
        self._queue = queue
        self._metrics = metrics
        self._waiting: deque[_Waiting] = deque()
        self._running = 0
        self._current: ModelFacts | None = None
        """The model of the requests that run."""
        self._changing: asyncio.Task[LoadedModel] | None = None
        self._stopping = False

    def find(self, name: str | None) -> ModelFacts:
        """The model of a name, which may end in `:latest`. Raises RequestError if there is none."""
        if not name:
            return next(iter(self.facts.values()))
        found = self.facts.get(name) or self.facts.get(name.removesuffix(":latest"))
        if found is None:
            raise RequestError(
                404,
                f"there is no model {name[:100]!r}; this server has {', '.join(self.facts)}",
                field="model",
                code="model_not_found",
            )
        return found

    @asynccontextmanager
    async def turn(self, facts: ModelFacts) -> AsyncIterator[LoadedModel]:
        """A context in which the caller may generate, with the model loaded.

        Raises RequestError if too many wait or the server stops, and what loading raises.
        """
        if self._stopping:
            raise _stopping()
        await self._begin(facts)
        try:
            self._metrics.add("running_requests", 1)
            if self._stopping:
                raise _stopping()
            loaded = await self._ensured(facts)
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
        loaded = self.loaded
        if loaded is not None and loaded.facts is facts:
            yield loaded
            return
        async with self.turn(facts) as loaded:
            yield loaded

    async def set_budget(self, budget_bytes: int) -> None:
        """Keep to another budget from now on. Raises RequestError if the model can't, or none is loaded."""
        loaded = self.loaded
        if loaded is None:
            raise RequestError(503, "no model is loaded at the moment; try again")
        try:
            await asyncio.to_thread(loaded.model.set_dram_budget, budget_bytes)
        except BudgetError as error:
            raise RequestError(
                400, error.for_command_line, field="budget_bytes", code="budget_exceeded"
            ) from error

    async def close(self) -> None:
        """Refuse new requests, cancel what runs and close the model."""
        self._stopping = True
        if self._changing is not None:
            await asyncio.wait({self._changing})
        loaded, self.loaded = self.loaded, None
        if loaded is not None:
            await asyncio.to_thread(loaded.model.close)

    async def _begin(self, facts: ModelFacts) -> None:
        """Wait for a turn, and take it. Raises RequestError if too many wait."""
        own = _Waiting(facts, asyncio.get_running_loop().create_future())
        self._waiting.append(own)
        self._admit()
        if not own.turn.done() and self.waiting >= self._queue:
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
        """Give turns to those that wait, in their order, as far as there are any."""
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
            self._waiting.popleft().turn.set_result(None)

    def _wait(self, change: int) -> None:
        self.waiting += change
        self._metrics.add("waiting_requests", change)

    async def _ensured(self, facts: ModelFacts) -> LoadedModel:
        """The loaded model. Changing it goes on if the client goes, or what is loaded would be lost."""
        if self._changing is not None and not self._changing.done():
            await asyncio.wait({self._changing})
        if self.loaded is not None and self.loaded.facts is facts:
            return self.loaded
        self._changing = asyncio.create_task(self._changed(facts))
        return await asyncio.shield(self._changing)

    async def _changed(self, facts: ModelFacts) -> LoadedModel:
        begun = time.monotonic()
        before, self.loaded = self.loaded, None
        if before is not None:
            await asyncio.to_thread(before.model.close)
            log_event("unloaded", model=before.facts.name)
            del before
        model = await asyncio.to_thread(self._load, facts.name)
        self.loaded = LoadedModel(facts, model)
        log_event("loaded", model=facts.name, seconds=round(time.monotonic() - begun, 3))
        return self.loaded


def _stopping() -> RequestError:
    return RequestError(503, "the server is stopping", code="server_stopping")
