"""Streaming, threads and asyncio over one model: cancelling, closing, and each caller gets its own answer."""

from __future__ import annotations

import asyncio
import gc
import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ondevice.api import Model, load
from ondevice.errors import (
    OndeviceError,
)
from tests.support.bundles import EOS
from tests.support.chat import PROMPT, pause_engine


def test_the_figures_of_a_cancelled_reply_are_its_own(model: Model) -> None:
    model.generate("x", max_tokens=1)
    session = model.session()
    bias = {EOS: -math.inf}
    for events in (
        model.stream(PROMPT, max_tokens=200, logit_bias=bias),
        session.stream_response("Hello", max_tokens=200, logit_bias=bias),
    ):
        next(events)
        events.close()  # type: ignore[attr-defined]
        prompt_tokens = model.stats.prompt_tokens
        assert prompt_tokens > len(model.tokenizer.encode("x"))
        assert 1 <= model.stats.generated_tokens <= 200
    assert prompt_tokens == len(model.chat_ids(session.transcript[:1]))

    async def cancelled() -> None:
        events = model.astream("xyz", max_tokens=200, logit_bias=bias)
        await anext(events)
        await events.aclose()

    asyncio.run(cancelled())
    assert model.stats.prompt_tokens == len(model.tokenizer.encode("xyz"))


def test_a_stream_that_was_never_begun_leaves_the_figures(model: Model) -> None:
    model.generate("x", max_tokens=1)
    before = model.stats
    model.stream(PROMPT).close()  # type: ignore[attr-defined]
    assert model.stats is before


def test_many_threads_get_their_own_answers(model: Model) -> None:
    prompts = [PROMPT, "In the beginning", "x", "zzzz"]
    expected = {prompt: model.generate(prompt, max_tokens=8).tokens for prompt in prompts}
    wrong: list[str] = []

    def ask(prompt: str) -> None:
        if model.generate(prompt, max_tokens=8).tokens != expected[prompt]:
            wrong.append(prompt)

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in prompts * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_asyncio_gives_the_tokens_of_the_plain_calls(model: Model) -> None:
    async def both() -> tuple[list[int | None], tuple[int, ...]]:
        streamed = [event.token async for event in model.astream(PROMPT, max_tokens=6)]
        response = await model.agenerate(PROMPT, max_tokens=6)
        return streamed[:-1], response.tokens

    streamed, tokens = asyncio.run(both())
    assert tuple(streamed) == tokens == model.generate(PROMPT, max_tokens=6).tokens


def test_close_ends_everything_and_is_idempotent(chat_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(threading.enumerate())
    model = load(chat_bundle)
    made = pause_engine(model, monkeypatch)
    events = model.stream(PROMPT, max_tokens=240, logit_bias={EOS: -math.inf})
    heard = [next(events), next(events)]
    model.close()
    model.close()
    assert [event.finish_reason for event in events] == ["cancelled"]
    assert made[:2] == heard
    assert len(made) == 3
    for call in (lambda: model.generate(PROMPT), lambda: model.logits([1]), lambda: model.score("ab")):
        with pytest.raises(OndeviceError, match="closed"):
            call()
    assert set(threading.enumerate()) <= before


def test_a_closed_model_refuses_everything(chat_bundle: Path) -> None:
    model = load(chat_bundle)
    session, events = model.session(), model.stream(PROMPT)
    model.close()

    async def ask() -> None:
        await model.agenerate(PROMPT)

    uses: list[Callable[[], object]] = [
        model.__enter__,
        model.session,
        session.fork,
        lambda: session.respond("Hello"),
        lambda: next(events),
        lambda: model.stream(PROMPT),
        lambda: model.astream(PROMPT),
        lambda: asyncio.run(ask()),
        lambda: model.generate(PROMPT, max_tokens=0),
        lambda: model.generate(),
        lambda: model.logits([]),
        lambda: model.score(""),
        lambda: model.measure(1, 1),
        lambda: model.set_dram_budget("8GB"),
    ]
    for use in uses:
        with pytest.raises(OndeviceError, match="the model is closed; load it again"):
            use()


def test_a_forgotten_model_frees_its_thread(chat_bundle: Path) -> None:
    before = set(threading.enumerate())
    load(chat_bundle).generate(PROMPT, max_tokens=2)
    deadline = time.monotonic() + 60.0
    while not set(threading.enumerate()) <= before and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert set(threading.enumerate()) <= before


def test_an_unfinished_stream_does_not_keep_the_interpreter(chat_bundle: Path) -> None:
    program = (
        "import sys, ondevice; model = ondevice.load(sys.argv[1])\n"
        "events = model.stream('Once', max_tokens=200); next(events)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, str(chat_bundle)], capture_output=True, timeout=60, check=False
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, b"", b"")


def test_nothing_is_printed(chat_bundle: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with load(chat_bundle) as model:
        model.generate(PROMPT, max_tokens=3)
        model.session("Be brief.").respond("Hello", max_tokens=3)
    assert capfd.readouterr() == ("", "")
