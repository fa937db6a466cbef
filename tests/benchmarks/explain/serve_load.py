"""A server under load for minutes: does it lose a request, change a text, or keep memory?

`ondevice serve` runs the model that ships in a process of its own. Clients ask for replies of random sizes
with known seeds, whole or as streams; some leave in the middle of a reply, or before it begins, and the
budget moves between its bounds every second. Beforehand each request is asked alone. The server's memory is
read four times a second. Ends with one JSON line; exits 0 only if every request of a client that stayed was
answered with the text that it has alone, and the last third's median memory is within 2 % of the first
third's.

    python -m tests.benchmarks.explain.serve_load [--minutes 5] [--clients 16]
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.benchmarks.lib.measure import machine

CHAT = "/v1/chat/completions"
REQUESTS = 24
PARTS = ("Find me a restaurant.", "It should be cheap.", "I want to book a table.", "What is the address?")
WARM_UP_SECONDS = 30.0
"""Time before memory is compared, in which caches and the heap reach their sizes."""
SHARE = 0.02


@dataclass
class Load:
    """What clients share."""

    host: str
    port: int
    end: float
    expected: list[str]
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.host, self.port, timeout=300)

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """The JSON of an answer. Raises OSError for any status but 200."""
        connection = self.connection()
        try:
            connection.request(method, path, None if body is None else json.dumps(body))
            response = connection.getresponse()
            data = response.read()
            if response.status != 200:
                raise OSError(f"{path}: {response.status} {data[:200]!r}")
            return json.loads(data)
        finally:
            connection.close()


def request(number: int) -> dict[str, Any]:
    """One of the requests, whose text is always the same."""
    text = " ".join(PARTS[(number + it) % len(PARTS)] for it in range(number % 5 + 1))
    messages = [{"role": "user", "content": f"{text} {number}"}]
    return {"messages": messages, "max_tokens": 1 + number * 7 % 60, "seed": number}


def whole(load: Load, number: int) -> str:
    return str(load.ask("POST", CHAT, request(number))["choices"][0]["message"]["content"])


def streamed(load: Load, number: int, parts: int) -> str | None:
    """The text of a stream, or None if the client left after `parts` parts."""
    connection, text = load.connection(), ""
    try:
        connection.request("POST", CHAT, json.dumps(request(number) | {"stream": True}))
        if parts == 0:
            return None
        response = connection.getresponse()
        if response.status != 200:
            raise OSError(f"{response.status} {response.read()[:200]!r}")
        ended = False
        for line in response:
            ended = ended or line.startswith(b"data: [DONE]")
            if line.startswith(b"data: {"):
                parts -= 1
                choice = json.loads(line[6:])["choices"][0]
                text += choice["delta"].get("content") or ""
            if parts == 0:
                return None
        if not ended:
            raise OSError("the stream ended without its end")
        return text
    finally:
        connection.close()


def client(load: Load, index: int) -> None:
    chance = random.Random(index)
    while time.monotonic() < load.end and not load.failures:
        number = chance.randrange(REQUESTS)
        stays = chance.random() < 0.7
        try:
            if stays and chance.random() < 0.5:
                text: str | None = whole(load, number)
            else:
                text = streamed(load, number, 1 << 30 if stays else chance.choice((0, 1, 2, 8)))
        except (OSError, ValueError, KeyError, http.client.HTTPException) as error:
            load.failures.append(f"request {number}: {error!r}")
            return
        load.counts["left" if text is None else "answered"] += 1
        if text is not None and text != load.expected[number]:
            load.failures.append(
                f"request {number} has another text: {text!r}, not {load.expected[number]!r}"
            )


def move_budget(load: Load, least_bytes: int, full_bytes: int) -> None:
    chance = random.Random(0)
    while time.monotonic() < load.end and not load.failures:
        try:
            load.ask("POST", "/page/budget", {"budget_bytes": chance.randint(least_bytes, full_bytes)})
        except OSError as error:
            load.failures.append(f"budget: {error!r}")
        load.counts["budgets"] += 1
        time.sleep(1.0)


def first_state(load: Load) -> Any:
    """What `/page/live` tells first."""
    connection = load.connection()
    try:
        connection.request("GET", "/page/live")
        return json.loads(connection.getresponse().readline()[6:])
    finally:
        connection.close()


def resident_bytes(process: int) -> int:
    status = Path(f"/proc/{process}/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmRSS"))


def run(load: Load, process: int, clients: int) -> list[tuple[float, int]]:
    """Memory over time while the clients ask."""
    plan = first_state(load)["plan"]
    work = [threading.Thread(target=client, args=(load, index)) for index in range(clients)]
    work.append(threading.Thread(target=move_budget, args=(load, plan["least_bytes"], plan["full_bytes"])))
    for thread in work:
        thread.start()
    memory = []
    while time.monotonic() < load.end and not load.failures:
        memory.append((time.monotonic(), resident_bytes(process)))
        time.sleep(0.25)
    for thread in work:
        thread.join()
    return memory


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--clients", type=int, default=16)
    asked = parser.parse_args()
    # A client that leaves and asks again has two places until the server has seen that the first is free.
    places = str(2 * asked.clients)
    started = [sys.executable, "-m", "ondevice", "serve", "--port", "0", "--queue", places]
    with subprocess.Popen(started, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        events = (json.loads(line) for line in server.stderr if line.startswith("{"))
        url = urlsplit(next(event["url"] for event in events if event["event"] == "listening"))
        drain = threading.Thread(target=deque, args=(server.stderr, 0))
        drain.start()
        load = Load(url.hostname or "", url.port or 0, 0.0, [])
        load.expected = [whole(load, number) for number in range(REQUESTS)]
        load.end = time.monotonic() + WARM_UP_SECONDS + 60.0 * asked.minutes
        memory = run(load, server.pid, asked.clients)
        server.terminate()
        drain.join()
    begun = load.end - 60.0 * asked.minutes
    third = 20.0 * asked.minutes
    first = [nbytes for at, nbytes in memory if 0 <= at - begun < third]
    last = [nbytes for at, nbytes in memory if at >= load.end - third]
    ratio = statistics.median(last) / statistics.median(first) if first and last else 0.0
    print(f"answered {load.counts['answered']}, left {load.counts['left']}, budgets {load.counts['budgets']}")
    print(f"memory of the last third / first third: {ratio:.4f}")
    print(*load.failures, sep="\n")
    found = {
        "minutes": asked.minutes,
        "clients": asked.clients,
        **load.counts,
        "failures": len(load.failures),
        "first_third_bytes": statistics.median(first) if first else 0,
        "last_third_bytes": statistics.median(last) if last else 0,
        "memory_ratio": ratio,
        "machine": machine(),
    }
    print(json.dumps(found))
    sys.exit(bool(load.failures) or abs(ratio - 1) > SHARE)


if __name__ == "__main__":
    main()
