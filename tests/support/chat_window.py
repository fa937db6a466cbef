"""The example app's window on Toga's dummy backend, as tests drive it. Needs its sources on the path."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from toga_dummy.utils import EventLog, assert_action_performed

import ondevice
from ondevice.generate import watched
from ondevice_chat import folders

WAIT_SECONDS = 90.0


def endless() -> ondevice.SamplingConfig:
    """Replies that go on until they are stopped or the context is full."""
    return ondevice.SamplingConfig(max_tokens=1024, logit_bias=((2, -math.inf),))


def slow_down(app: Any) -> None:
    """The engine as a larger model would have it: the window has time to be used while a reply is written."""
    engine = app.chat._model._engine
    steps = engine.steps
    engine.steps = lambda *arguments: watched(steps(*arguments), lambda event: time.sleep(0.05))


async def until(holds: Callable[[], Any]) -> None:
    """Let the loop run until something holds."""

    async def poll() -> None:
        while not holds():
            await asyncio.sleep(0.005)

    await asyncio.wait_for(poll(), WAIT_SECONDS)


@asynccontextmanager
async def running(home: folders.Folders, **options: Any) -> AsyncIterator[Any]:
    """The app from its first window to its exit; the model is loaded, or it says why not."""
    from ondevice_chat.app import ChatApp

    app = ChatApp(home, **options)
    await until(lambda: app.chat.ready or (app.chat.notice and not app.chat.notice.startswith("Loading")))
    try:
        yield app
    finally:
        app.request_exit()
        await until(lambda: any(entry.context.get("action") == "exit" for entry in EventLog._log))
        assert_action_performed(app, "exit")


async def say(app: Any, text: str) -> None:
    """Type and send, and wait for all of the reply."""
    app.entry.value = text
    app.send_button._impl.simulate_press()
    before = len(app.chat._session.transcript)
    await until(lambda: app.chat.ready and len(app.chat._session.transcript) > before)


def drive(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scenario())


def shown(app: Any) -> str:
    return str(app.conversation.value)
