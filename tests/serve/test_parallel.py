"""Requests that generate at once: as many as the model was loaded for, each with the text of its own."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")

from ondevice.api import Model, load
from ondevice.errors import UsageError
from ondevice.generate import watched
from ondevice.serve import openai_chat, openai_completions
from ondevice.serve.config import ServeConfig
from ondevice.serve.exchange import generation
from ondevice.serve.metrics import Metrics
from ondevice.serve.models import Models, client_address
from ondevice.serve.server import facts_of
from tests.support.bundles import EOS
from tests.support.command_line import Run
from tests.support.serving import Answer, Serving, serving, until

CHAT = "/v1/chat/completions"


def asked(number: int, **more: Any) -> dict[str, Any]:
    """A request whose text has its 40 tokens."""
    messages = [{"role": "user", "content": f"Say {number}"}]
    whole = {"max_tokens": 40, "logit_bias": {str(EOS): -100}}
    return {"messages": messages, "seed": number, "temperature": 1, **whole, **more}


def slow(model: Model) -> Callable[[], None]:
    """Let every token take long, so that no text ends before the test says so; returns what ends that."""
    engine, steps = model._engine, model._engine.steps
    hurry = threading.Event()
    engine.steps = lambda *arguments: watched(steps(*arguments), lambda event: hurry.wait(0.25))  # type: ignore[method-assign]
    return hurry.set


@pytest.fixture
def server(chat_bundle: Path) -> Iterator[Serving]:
    with serving(load(chat_bundle, threads=1, parallel=2)) as running:
        yield running


def answered(server: Serving, requests: list[dict[str, Any]]) -> tuple[list[threading.Thread], list[Answer]]:
    """Threads that ask, in order, and where answers will be."""
    answers: list[Any] = [None] * len(requests)

    def ask(at: int) -> None:
        answers[at] = server.post(CHAT, requests[at])

    threads = [threading.Thread(target=ask, args=(at,)) for at in range(len(requests))]
    for thread in threads:
        thread.start()
    return threads, answers


def text(answer: Answer) -> str:
    assert answer.status == 200, answer.body
    return str(answer.json["choices"][0]["message"]["content"])


def test_two_run_and_one_that_goes_makes_room(server: Serving) -> None:
    expected = [text(server.post(CHAT, asked(number))) for number in range(3)]
    hurry = slow(server.model)
    connection = server.connection()
    connection.request("POST", CHAT, json.dumps(asked(9, stream=True, max_tokens=400)))
    assert connection.getresponse().status == 200
    threads, answers = answered(server, [asked(number) for number in range(3)])
    until(lambda: server.metric("running_requests") == 2 and server.metric("waiting_requests") == 2)
    connection.close()
    until(lambda: server.metric("waiting_requests") < 2 and server.metric("running_requests") == 2)
    hurry()
    for thread in threads:
        thread.join(60)
    assert [text(answer) for answer in answers] == expected
    until(lambda: server.metric("running_requests") == 0)


def test_one_conversation_asked_twice_at_once_is_answered_twice(server: Serving) -> None:
    expected = text(server.post(CHAT, asked(1)))
    hurry = slow(server.model)
    threads, answers = answered(server, [asked(1), asked(1)])
    until(lambda: server.metric("running_requests") == 2)
    hurry()
    for thread in threads:
        thread.join(60)
    assert [text(answer) for answer in answers] == [expected] * 2


def test_another_model_waits_until_all_have_ended(chat_bundle: Path) -> None:
    loaded: list[float] = []

    def again(budget: int | None) -> Model:
        loaded.append(running())
        return load(chat_bundle, threads=1, parallel=2)

    with serving(load(chat_bundle, threads=1, parallel=2), others={"second": again}) as server:

        def running() -> float:
            return server.metric("running_requests")

        hurry = slow(server.model)
        threads, answers = answered(server, [asked(1), asked(2)])
        until(lambda: running() == 2)
        second, others = answered(server, [asked(3, model="second")])
        until(lambda: server.metric("waiting_requests") == 1)
        behind, last = answered(server, [asked(3, model="second")])
        until(lambda: server.metric("waiting_requests") == 2)
        hurry()
        for thread in (*threads, *second, *behind):
            thread.join(60)
        assert loaded[0] == 1
        assert text(last[0]) == text(others[0])
        assert all(map(text, answers))


@pytest.mark.fast("*prompts0")
@pytest.mark.parametrize(
    ("dialect", "path", "prompts"),
    [
        (openai_chat, CHAT, {"messages": [{"role": "user", "content": "x"}], "n": 2}),
        (openai_completions, "/v1/completions", {"prompt": "x", "n": 2}),
        (openai_completions, "/v1/completions", {"prompt": ["x", "y"]}),
    ],
)
def test_a_full_queue_refuses_no_later_choice(
    chat_bundle: Path,
    monkeypatch: pytest.MonkeyPatch,
    dialect: Any,
    path: str,
    prompts: dict[str, Any],
) -> None:
    """Others come between the choices and fill the queue; what has been made isn't thrown away."""
    between, go_on, begun = threading.Event(), threading.Event(), []

    @asynccontextmanager
    async def late(service: Any, wanted: Any) -> AsyncIterator[Any]:
        begun.append(wanted)
        if len(begun) == 2:
            between.set()
            await asyncio.to_thread(go_on.wait, 30)
        async with generation(service, wanted) as running:
            yield running

    with serving(load(chat_bundle, threads=1), ServeConfig(port=0, queue=1)) as server:
        own: list[Answer] = []
        body = prompts | {"max_tokens": 3, "temperature": 0}
        with monkeypatch.context() as patch:
            patch.setattr(dialect, "generation", late)
            choices = threading.Thread(target=lambda: own.append(server.post(path, body)))
            choices.start()
            assert between.wait(30)
        hurry = slow(server.model)
        busy = []
        for number, metric in enumerate(("running_requests", "waiting_requests")):
            busy += answered(server, [asked(number, max_tokens=200)])[0]
            until(lambda metric=metric: server.metric(metric) == 1)  # type: ignore[misc]
        assert server.post(CHAT, asked(9)).status == 429
        go_on.set()
        until(lambda: server.metric("waiting_requests") == 2)
        hurry()
        for thread in (choices, *busy):
            thread.join(60)
        assert own[0].status == 200, own[0].body
        assert len(own[0].json["choices"]) == 2


def test_turns_go_round_the_clients_that_wait(chat_bundle: Path) -> None:
    """Each client's requests keep their order, and one that comes late waits for one of each other."""
    took: list[str] = []

    async def admitted(models: Models, client: str, request: str) -> None:
        client_address.set(client)
        async with models.admitted(models.find(None)):
            took.append(request)
            if request == "b2":
                tasks.append(asyncio.create_task(admitted(models, "d", "d1")))
            await asyncio.sleep(0)

    async def main(model: Model) -> None:
        models = Models(
            [facts_of("m", model.bundle, model.plan, model.tokenizer)], _never, model, 5, Metrics()
        )
        for request in ("a1", "a2", "a3", "a4", "b1", "b2", "c1"):
            tasks.append(asyncio.create_task(admitted(models, request[0], request)))
        while any(not task.done() for task in tasks):
            await asyncio.gather(*tasks)

    tasks: list[asyncio.Task[None]] = []
    with load(chat_bundle, threads=1) as model:
        asyncio.run(main(model))
    assert took == ["a1", "a2", "b1", "c1", "a3", "b2", "a4", "d1"]


def _never(name: str, budget: int | None) -> Model:
    raise AssertionError


def test_a_fault_of_the_program_ends_its_request_alone(
    server: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = text(server.post(CHAT, asked(1)))
    steps, broken = server.model._engine.steps, [2]

    def breaking(*arguments: Any) -> Any:
        if broken.pop() == 1:
            raise ZeroDivisionError
        broken.append(1)
        return (yield from steps(*arguments))

    monkeypatch.setattr(server.model._engine, "steps", breaking)
    threads, answers = answered(server, [asked(1), asked(1)])
    for thread in threads:
        thread.join(60)
    assert sorted(answer.status for answer in answers) == [200, 500]
    assert next(text(answer) for answer in answers if answer.status == 200) == expected
    until(lambda: server.metric("running_requests") == 0)


@pytest.mark.parametrize("value", [0, 17, -1])
def test_the_number_is_checked(value: int) -> None:
    with pytest.raises(UsageError, match=f"parallel is {value}; it must be from 1 to 16"):
        ServeConfig(parallel=value)


@pytest.mark.parametrize(("options", "expected"), [((), 4), (("--parallel", 2), 2)])
def test_the_command_line_loads_the_model_for_as_many(
    chat_bundle: Path,
    ondevice: Run,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str | int, ...],
    expected: int,
) -> None:
    found: list[int] = []

    def serve(config: ServeConfig, facts: Any, load: Any, first: Model) -> None:
        found.append(first.runtime.parallel)
        with load(first.name, None) as again:
            found.append(again.runtime.parallel)

    monkeypatch.setattr("ondevice.serve.server.serve", serve)
    ondevice("serve", chat_bundle, *options)
    assert found == [expected] * 2
