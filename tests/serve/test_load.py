"""Many clients at once, of which some go away: no text changes, no request is lost, nothing leaks."""

from __future__ import annotations

import json
import random
import threading
import time
from itertools import count
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")

from ondevice.api import load
from ondevice.serve.config import ServeConfig
from ondevice.units import process_memory
from tests.support.serving import Serving, serving, until

CLIENTS = 8
PLACES = 2 * CLIENTS
"""A client that leaves and asks again has two until the server has seen that the first is free."""
SECONDS = 60.0
CHAT = "/v1/chat/completions"


def asked(number: int) -> dict[str, Any]:
    """One of sixteen requests."""
    text = "Tell me more. " * (number % 4 + 1)
    return {
        "messages": [{"role": "user", "content": f"{number}: {text}"}],
        "max_tokens": 1 + number % 7 * 4,
        "seed": number,
    }


def whole(server: Serving, number: int) -> str:
    return str(server.post(CHAT, asked(number)).json["choices"][0]["message"]["content"])


def streamed(server: Serving, number: int, parts: int) -> str | None:
    """The text of a stream, or None if the client went after `parts` parts."""
    connection = server.connection()
    try:
        connection.request("POST", CHAT, json.dumps(asked(number) | {"stream": True}))
        response, text = connection.getresponse(), ""
        assert response.status == 200
        for line in response:
            if line.startswith(b"data: {"):
                parts -= 1
                text += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
            if parts == 0:
                return None
        return text
    finally:
        connection.close()


def run_clients(server: Serving, expected: list[str], seconds: float = 0.0, least: int = 0) -> int:
    """Number of answers that were compared. Raises what any client found.

    Every client goes on for `seconds`, and until it has asked `least` times.
    """
    end, found, compared = time.monotonic() + seconds, [], [0] * CLIENTS

    def client(index: int) -> None:
        chance = random.Random(index)
        try:
            for done in count():
                if done >= least and time.monotonic() > end:
                    return
                number = chance.randrange(len(expected))
                if chance.random() < 0.5:
                    text: str | None = whole(server, number)
                else:
                    text = streamed(server, number, chance.choice([1, 3, 1000]))
                assert text in (None, expected[number])
                compared[index] += text is not None
        except (AssertionError, OSError, KeyError, ValueError) as error:
            found.append(error)

    threads = [threading.Thread(target=client, args=(index,)) for index in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds + 60)
    assert found == []
    return sum(compared)


@pytest.mark.slow
def test_many_clients_change_no_text_and_leak_nothing(chat_bundle: Path) -> None:
    with serving(load(chat_bundle, threads=1, parallel=4), ServeConfig(port=0, queue=PLACES)) as server:
        expected = [whole(server, number) for number in range(16)]
        run_clients(server, expected, SECONDS / 3)
        before = process_memory().current_bytes
        assert run_clients(server, expected, SECONDS) > 100
        until(lambda: server.metric("running_requests") == 0)
        assert server.metric("waiting_requests") == 0
        assert process_memory().current_bytes < 1.02 * before


def test_a_few_clients_change_no_text(chat_bundle: Path) -> None:
    with serving(load(chat_bundle, threads=1, parallel=4), ServeConfig(port=0, queue=PLACES)) as server:
        expected = [whole(server, number) for number in range(16)]
        assert run_clients(server, expected, least=4) > 3
        until(lambda: server.metric("running_requests") == 0)
        assert server.metric("waiting_requests") == 0
