"""Whoever leaves a generation, however they leave it, cancels it within a layer."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ondevice.api import Model, load
from ondevice.backends.reference import ReferenceBackend
from ondevice.bundle.reader import Bundle
from ondevice.callbacks import Cancelled, IsCancelled
from ondevice.errors import OndeviceError
from ondevice.flash.reader import FlashReader
from ondevice.generate import Event
from ondevice.model.loading import bundle_files, load_weights
from ondevice.runtime import loaded_model
from tests.support.bundles import EOS
from tests.support.chat import PROMPT, pause_engine

ENDLESS: dict[str, Any] = {"max_tokens": 200, "logit_bias": {EOS: -math.inf}}
Made = list[Event]


def close(events: Iterator[Event]) -> None:
    next(events)
    next(events)
    events.close()  # type: ignore[attr-defined]


async def aclose(events: AsyncGenerator[Event, None]) -> None:
    await anext(events)
    await anext(events)
    await events.aclose()


async def cancel(reply: Awaitable[Any], made: Made) -> None:
    task = asyncio.ensure_future(reply)
    while len(made) < 2:
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


WAYS: dict[str, Callable[[Model, Made], Any]] = {
    "stream": lambda model, _: close(model.stream(PROMPT, **ENDLESS)),
    "session": lambda model, _: close(model.session().stream_response(PROMPT, **ENDLESS)),
    "astream": lambda model, _: asyncio.run(aclose(model.astream(PROMPT, **ENDLESS))),
    "async session": lambda model, _: asyncio.run(
        aclose(model.session().astream_response(PROMPT, **ENDLESS))
    ),
    "agenerate": lambda model, made: asyncio.run(cancel(model.agenerate(PROMPT, **ENDLESS), made)),
    "arespond": lambda model, made: asyncio.run(cancel(model.session().arespond(PROMPT, **ENDLESS), made)),
}


@pytest.mark.parametrize("way", WAYS)
def test_leaving_a_generation_cancels_it(way: str, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        made = pause_engine(model, patch)
        WAYS[way](model, made)
        assert model.stats.generated_tokens == 2
    assert [event.finish_reason for event in made] == [None, None, "cancelled"]
    expected = model.generate(PROMPT, max_tokens=3).tokens
    assert model.stats.generated_tokens == len(expected)
    if way in ("stream", "astream", "agenerate"):
        assert tuple(event.token for event in made[:2]) == expected[:2]


def test_closing_the_model_ends_a_score(chat_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with load(chat_bundle, threads=1, prefill_chunk=1) as model:
        made = pause_engine(model, monkeypatch, "logits", after=1)
        with pytest.raises(OndeviceError, match="cancelled"):
            model.score(tokens=[1] * 200, on_progress=lambda *_: model.close())
    assert len(made) == 1


def test_loading_is_given_up_between_two_pieces(chat_bundle: Path) -> None:
    bundle = Bundle.open(chat_bundle)
    reader = FlashReader(bundle_files(bundle), "auto")
    asked = 0

    def cancelled() -> bool:
        nonlocal asked
        asked += 1
        return asked > 3

    with pytest.raises(Cancelled):
        load_weights(bundle, reader, ReferenceBackend(), cancelled)
    assert asked == 4
    reader.close()


def test_an_interrupt_while_loading_cancels_it(chat_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def waiting(bundle: Any, reader: Any, backend: Any, cancelled: IsCancelled, *mode: Any) -> None:
        time.sleep(0.5)  # Python misses a signal that comes just before it waits.
        os.kill(os.getpid(), signal.SIGINT)
        deadline = time.monotonic() + 30
        while not cancelled() and time.monotonic() < deadline:
            time.sleep(0.01)
        seen.append(cancelled())
        raise Cancelled

    monkeypatch.setattr(loaded_model, "load_weights", waiting)
    with pytest.raises(KeyboardInterrupt):
        load(chat_bundle)
    assert seen == [True]
