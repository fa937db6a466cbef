"""Clients of a server in OpenAI's dialect that stream completions at once, and how fast the server is then.

Nothing here knows which server it is.
"""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

TIMEOUT_SECONDS = 1800.0
READY_SECONDS = 900.0


def free_port() -> int:
    """A port of this machine that nothing listens at."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def wait_until_ready(port: int, server: subprocess.Popen[bytes], seconds: float = READY_SECONDS) -> None:
    """Wait until `/health` says 200. Raises ConnectionError if the server ends or takes too long."""
    give_up = time.monotonic() + seconds
    while time.monotonic() < give_up:
        if server.poll() is not None:
            raise ConnectionError(f"the server ended with {server.returncode} before it was ready")
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status == http.client.OK:
                return
        except OSError:
            pass  # It doesn't listen yet, or is busy.
        finally:
            connection.close()
        time.sleep(0.2)
    raise ConnectionError(f"the server wasn't ready after {seconds:.0f} s")


@dataclass
class Client:
    """A request for exactly `count` tokens, one number of which never comes: the end of the text."""

    port: int
    prompt: list[int]
    count: int
    end_of_text: int
    text: str = ""
    times: list[float] = field(default_factory=list)
    """When text came. A server holds the bytes of an unfinished character back."""
    tokens: int = 0
    """As the server counts them."""
    error: Exception | None = None

    def run(self) -> None:
        """Read the stream to its end. An error is kept."""
        try:
            self._read()
            if self.tokens != self.count or len(self.times) < 2:
                raise ConnectionError(
                    f"{self.tokens} of {self.count} tokens came in {len(self.times)} pieces"
                )
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            self.error = error

    def _read(self) -> None:
        body: dict[str, Any] = {
            "prompt": self.prompt,
            "max_tokens": self.count,
            "temperature": 0,
            "logit_bias": {str(self.end_of_text): -100},
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_SECONDS)
        try:
            connection.request(
                "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
            )
            response = connection.getresponse()
            if response.status != http.client.OK:
                raise ConnectionError(f"status {response.status}: {response.read()[:400]!r}")
            for line in response:
                if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                    self._take(json.loads(line[6:]))
        finally:
            connection.close()

    def _take(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            raise ConnectionError(str(chunk["error"]))
        if chunk.get("usage"):
            self.tokens = chunk["usage"]["completion_tokens"]
        for choice in chunk["choices"]:
            if choice["text"]:
                self.text += choice["text"]
                self.times.append(time.monotonic())


def at_once(clients: Sequence[Client]) -> None:
    """Run all together. Raises the first error of one."""
    threads = [threading.Thread(target=client.run) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for client in clients:
        if client.error is not None:
            raise client.error


def rate(clients: Sequence[Client]) -> float:
    """Tokens of all per second, from when all have their first until one has its last; 0 if none came then.

    A piece of text counts as its share of the client's tokens.
    """
    begin, end = max(client.times[0] for client in clients), min(client.times[-1] for client in clients)
    if end <= begin:
        return 0.0
    tokens = 0.0
    for client in clients:
        pieces = sum(begin < moment <= end for moment in client.times)
        tokens += pieces * (client.tokens - 1) / (len(client.times) - 1)
    return tokens / (end - begin)
