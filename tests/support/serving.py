"""A running server in this process, and raw requests to it."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ondevice.api import Model, load
from ondevice.serve.app import make_service
from ondevice.serve.config import ServeConfig
from ondevice.serve.server import Server, facts_of, listening, url


@dataclass(frozen=True)
class Answer:
    """What came back to a request."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class Serving:
    """A server, and the model that it began with."""

    url: str
    port: int
    model: Model
    stop: Callable[[], None]
    """Does what a signal does."""

    def connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def request(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        """One request. body: bytes as they are, anything else as JSON."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection = self.connection()
        try:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, data, named)
            response = connection.getresponse()
            lower = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, lower, response.read())
        finally:
            connection.close()

    def post(self, path: str, body: Any, **headers: str) -> Answer:
        return self.request("POST", path, body, **headers)

    def metric(self, name: str) -> float:
        """A metric's value, or the sum over its labels."""
        lines = self.request("GET", "/metrics").body.decode().splitlines()
        found = [line for line in lines if line.startswith(f"ondevice_{name}")]
        return sum(float(line.rsplit(" ", 1)[1]) for line in found)


@contextmanager
def serving(
    model: Model,
    config: ServeConfig | None = None,
    others: dict[str, Callable[[int], Model]] | None = None,
) -> Iterator[Serving]:
    """A server of a loaded model on a free port.

    others: models that are loaded when asked for, by name, under a budget.

    The server closes the model at its end.
    """
    config = config or ServeConfig(port=0)
    loaders = {model.name: lambda budget: load(model.bundle.path, dram_budget=budget, threads=1)}
    loaders |= others or {}
    facts = [facts_of(name, model.bundle, model.plan, model.tokenizer) for name in loaders]
    with listening(config) as listener:
        server = Server(make_service(config, facts, lambda name, budget: loaders[name](budget or 0), model))
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        until(lambda: server.started)

        def stop() -> None:
            server.should_exit = True

        try:
            yield Serving(url(config, listener), listener.getsockname()[1], model, stop)
        finally:
            stop()
            thread.join(30)
            assert not thread.is_alive()


def until(true: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait until something is so."""
    give_up = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < give_up
        time.sleep(0.005)
