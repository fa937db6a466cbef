"""The official clients, unchanged, that leave their streams early: the server frees their places at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")

from ondevice.api import load
from tests.support.chat import pause_engine
from tests.support.serving import Serving, serving, until

CANCELLED = 'generations_total{reason="cancelled"}'
USER: Any = [{"role": "user", "content": "Say"}]
"""What begins with a whole character at temperature 0: half of one is no text, so no part of Ollama's."""
LONG = 400
"""Tokens of a reply that the paused engine never writes."""
Leave = Callable[[Serving], Any]


def openai_chat(server: Serving) -> Any:
    openai = pytest.importorskip("openai")
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
        client.chat.completions.create(
            model="", messages=USER, max_tokens=LONG, temperature=0, stream=True
        ) as stream,
    ):
        return next(iter(stream)).object


def openai_responses(server: Serving) -> Any:
    openai = pytest.importorskip("openai")
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
        client.responses.create(
            model="", input="Say", max_output_tokens=LONG, temperature=0, stream=True
        ) as stream,
    ):
        return next(iter(stream)).type


def openai_task(server: Serving) -> Any:
    """The asynchronous client in a task that is cancelled."""
    openai = pytest.importorskip("openai")

    async def main() -> str:
        came: asyncio.Queue[str] = asyncio.Queue()

        async def follow() -> None:
            async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
                async for chunk in await client.chat.completions.create(
                    model="", messages=USER, max_tokens=LONG, temperature=0, stream=True
                ):
                    came.put_nowait(chunk.object)

        task = asyncio.create_task(follow())
        first = await came.get()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return first

    return asyncio.run(main())


def anthropic_messages(server: Serving) -> Any:
    anthropic = pytest.importorskip("anthropic")
    with (
        anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client,
        client.messages.stream(
            model="", messages=USER, max_tokens=LONG, extra_body={"temperature": 0}
        ) as stream,
    ):
        return next(iter(stream)).type


def ollama_chat(server: Serving) -> Any:
    ollama = pytest.importorskip("ollama")
    greedy = {"num_predict": LONG, "temperature": 0}
    stream = ollama.Client(host=server.url).chat(
        server.model.name, messages=USER, options=greedy, stream=True
    )
    first = next(stream).message.role
    stream.close()
    return first


@pytest.fixture(scope="module")
def server(chat_bundle: Path) -> Iterator[Serving]:
    """One request at a time."""
    with serving(load(chat_bundle, threads=1, speculation="off")) as running:
        yield running


@pytest.mark.parametrize(
    ("leave", "first"),
    [
        (openai_chat, "chat.completion.chunk"),
        (openai_responses, "response.created"),
        (openai_task, "chat.completion.chunk"),
        (anthropic_messages, "message_start"),
        (ollama_chat, "assistant"),
    ],
)
def test_a_client_that_leaves_its_stream_frees_its_place(
    server: Serving, monkeypatch: pytest.MonkeyPatch, leave: Leave, first: str
) -> None:
    asked = {"messages": USER, "max_tokens": 3, "temperature": 0}
    expected = server.post("/v1/chat/completions", asked).json["choices"]
    cancelled = server.metric(CANCELLED)
    with monkeypatch.context() as patch:
        # The paused engine ends only once it is cancelled, or after 20 seconds.
        made = pause_engine(server.model, patch)
        assert leave(server) == first
        until(lambda: server.metric("running_requests") == 0, 10)
        # The place is free before the engine has told of the end.
        until(lambda: made[-1].finish_reason is not None, 10)
        assert made[-1].finish_reason == "cancelled"
        assert len(made) <= 3
    assert server.metric(CANCELLED) == cancelled + 1
    assert server.post("/v1/chat/completions", asked).json["choices"] == expected
