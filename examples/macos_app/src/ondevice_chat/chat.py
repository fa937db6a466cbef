"""The conversation behind the window: one model, one session, one reply at a time.

All of it runs on one asyncio loop, the window's; what blocks (loading, budgets, files, closing) goes to a
thread. It knows nothing of widgets: `changed` tells whoever shows it to look again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, aclosing
from pathlib import Path

import ondevice
from ondevice_chat import transcript, wording
from ondevice_chat.awake import kept_awake
from ondevice_chat.folders import BUILT_IN, Folders

FRAME_SECONDS = 1 / 30
"""A small model writes hundreds of tokens a second; nobody sees more pictures than these."""
LOOK_SECONDS = 1.0
"""How often the plan is looked at: under memory pressure from other programs it changes by itself."""

SAMPLING = ondevice.SamplingConfig(max_tokens=1024)


class Chat:
    """What the window shows, as attributes, and what can be asked of it, as methods."""

    def __init__(
        self,
        folders: Folders,
        changed: Callable[[], None],
        sampling: ondevice.SamplingConfig = SAMPLING,
        awake: Callable[[], AbstractContextManager[object]] = kept_awake,
    ) -> None:
        self.choice = BUILT_IN
        """The name of the model that is open, or that couldn't be opened."""
        self.plan: ondevice.Plan | None = None
        """How the budget is divided, or would be; None while no model was found."""
        self.notice = ""
        """What the app has to say itself."""
        self.figures = ""
        self._folders = folders
        self._unwritable = folders.prepare()
        self._show = changed
        self._sampling = sampling
        self._awake = awake
        self._model: ondevice.Model | None = None
        self._session: ondevice.Session | None = None
        self._reply: asyncio.Task[str] | None = None
        self._looking: asyncio.Task[None] | None = None
        self._turn: list[dict[str, str]] = []
        """What was asked and what is answered so far, until the session's transcript has it."""
        self._work = asyncio.Lock()
        """One thing at a time: opening, answering, closing."""
        self._wanted: int | None = None
        self._following = False
        self._closed = False

    @property
    def ready(self) -> bool:
        """Whether a message can be sent."""
        return self._session is not None and not self._work.locked()

    @property
    def answering(self) -> bool:
        """Whether there is a reply to stop."""
        return self._reply is not None

    @property
    def model_names(self) -> list[str]:
        return self._folders.model_names()

    @property
    def yielding(self) -> bool:
        """Whether other programs need memory that the budget would allow."""
        memory = None if self._model is None else self._model.memory_pressure
        return memory is not None and memory.budget_bytes < memory.user_budget_bytes

    @property
    def text(self) -> str:
        """The conversation as it is shown."""
        said = [] if self._session is None else self._session.transcript
        return wording.conversation([*said, *self._turn], self.notice)

    async def open(self, name: str = BUILT_IN, dram_budget: int | str = "auto") -> None:
        """Load a model in place of the one that is open; the saved conversation goes on with it."""
        self.stop()
        async with self._work:
            if self._closed:
                return
            await self._let_go()
            self.choice, self.notice = name, f"Loading {name} ..."
            self._changed()
            self.notice = await self._load(self._folders.model(name), dram_budget) or self._unwritable
        self._changed()

    async def send(self, text: str) -> bool:
        """Have a message answered. False if it wasn't, so that it isn't lost; `notice` then says why."""
        session, model = self._session, self._model
        if not text.strip() or session is None or model is None or self._work.locked():
            return False
        async with self._work:
            before = session.transcript
            self.notice = await self._answer(session, text.strip()) or self.notice
            self._turn = []
            answered = session.transcript != before
            if answered:
                # Waits for the work of a stopped reply to end: not here.
                self.figures = wording.figures(await asyncio.to_thread(lambda: model.stats))
                failure = await asyncio.to_thread(transcript.save, session, self._folders.transcript)
                self.notice = self.notice or failure
        self._changed()
        return answered

    def stop(self) -> None:
        """End the reply that is being written; what it says by then stays."""
        if self._reply is not None:
            self._reply.cancel()

    async def set_budget(self, budget_bytes: int) -> None:
        """Keep to another budget from the next token on; without a loaded model, load it with this one.

        May be called faster than the engine follows: the newest counts.
        """
        if self.plan is None or self._closed:
            return
        self.plan, self._wanted = self.plan.with_budget(budget_bytes), budget_bytes
        self.notice = ""
        self._changed()
        if self._following:
            return
        self._following = True
        try:
            while self._wanted is not None:
                wanted, self._wanted = self._wanted, None
                await self._follow(wanted)
                self._changed()
        finally:
            self._following = False

    async def new_chat(self) -> None:
        """Begin another conversation; the file of this one stays, under another name."""
        self.stop()
        async with self._work:
            if self._session is not None:
                self.notice = await asyncio.to_thread(transcript.set_aside, self._folders.transcript, "ended")
                self._session.reset()
                self.figures = ""
        self._changed()

    async def close(self) -> None:
        """Stop the reply, save what it says by then, give the model's memory and thread back. Idempotent."""
        self._closed = True
        self.stop()
        async with self._work:
            await self._let_go()

    async def _let_go(self) -> None:
        model, self._model, self._session, self.plan = self._model, None, None, None
        if self._looking is not None:
            self._looking.cancel()
        if model is not None:
            await asyncio.to_thread(model.close)

    async def _load(self, folder: Path | None, dram_budget: int | str) -> str:
        """What went wrong in words, or nothing."""
        try:
            # Naming `ondevice.load` imports the engine: not here either.
            self._model = await asyncio.to_thread(lambda: ondevice.load(folder, dram_budget=dram_budget))
        except ondevice.BudgetError as error:
            # The window offers the budget that works; moving the slider loads the model with it.
            plan = await asyncio.to_thread(ondevice.inspect, folder)
            self.plan = plan.with_budget(max(plan.minimum_budget_bytes, error.required_bytes))
            return f"{self.choice} isn't loaded: {error} The slider stands at that budget now."
        except (ondevice.OndeviceError, OSError) as error:
            return f"{self.choice} isn't loaded: {error}"
        self.plan = self._model.plan
        self._session = self._model.session()
        self._looking = asyncio.create_task(self._look(self._model))
        return await asyncio.to_thread(transcript.restore, self._session, self._folders.transcript)

    async def _answer(self, session: ondevice.Session, text: str) -> str:
        """Stream a reply until it ends or is stopped. What there is to say of it, or nothing."""
        self._reply = asyncio.create_task(self._stream(session, text))
        try:
            with self._awake():
                await asyncio.wait([self._reply])
            return self._reply.result()
        except asyncio.CancelledError:
            if not self._reply.cancelled():
                self._reply.cancel()
                raise
        except ondevice.ContextOverflowError as error:
            return f"{error}. A new chat begins with an empty context."
        except ondevice.OndeviceError as error:
            return f"{error}"
        finally:
            self._reply = None
        return ""

    async def _stream(self, session: ondevice.Session, text: str) -> str:
        answer = {"role": "assistant", "content": ""}
        self._turn = [{"role": "user", "content": text}, answer]
        self.notice, self.figures = "", wording.progress(0, 0.0)
        self._changed()
        tokens, started, shown = 0, time.monotonic(), 0.0
        async with aclosing(session.astream_response(text, sampling=self._sampling)) as events:
            async for event in events:
                if not event.thinking:
                    answer["content"] += event.text
                tokens += event.token is not None
                now = time.monotonic()
                if now - shown >= FRAME_SECONDS:
                    shown, self.figures = now, wording.progress(tokens, now - started)
                    self._changed()
        return wording.CUT_SHORT if event.finish_reason == "length" else ""

    async def _follow(self, wanted: int) -> None:
        """Bring the engine to a budget; one that is too small is answered with the smallest that works."""
        model = self._model
        if model is None:
            await self.open(self.choice, wanted)
            return
        try:
            await asyncio.to_thread(model.set_dram_budget, wanted)
        except ondevice.BudgetError as error:
            self.notice = wording.refused_budget(wanted, error)
            if self._wanted is None and wanted < error.required_bytes:
                self._wanted = error.required_bytes
        except ondevice.OndeviceError as error:  # It was closed meanwhile.
            self.notice = str(error)
        if self._wanted is None and model is self._model:
            self.plan = model.plan

    async def _look(self, model: ondevice.Model) -> None:
        """Show what memory pressure makes of the budget, until it is cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if self.plan is not model.plan and not self._following:
                self.plan = model.plan
                self._changed()

    def _changed(self) -> None:
        if not self._closed:
            self._show()
