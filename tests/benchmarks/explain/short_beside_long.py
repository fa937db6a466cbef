"""Short questions while a server reads a long prompt: how long does each wait for its answer, and what do
they take from the long prompt?

`ondevice serve` runs a model in a process of its own. One client asks short questions, one every so many
seconds; first alone, then while another client's long prompt is read, which is also read alone. All prompts
are random token ids, of which none is known from before. Ends with one JSON line: median seconds of a short
question, alone and beside the long prompt, and the long prompt's seconds until its first token.

    python -m tests.benchmarks.explain.short_beside_long [--model NAME|DIR] [--prompt 20000] [--every 15]
        [-- --dram-budget 4GB --max-context 24576]

Options behind `--` go to `ondevice serve`.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from ondevice.bundle.reader import Bundle
from ondevice.runtime.models import find_model
from tests.benchmarks.lib.measure import machine
from tests.benchmarks.lib.random_model import random_tokens

SHORT_TOKENS = 20
"""Tokens of a short question."""
ALONE = 5
"""Short questions that are asked alone."""


@dataclass
class Client:
    """What asks the server. Each of its prompts has a seed of its own."""

    host: str
    port: int
    vocab_size: int
    no_end: dict[str, int]
    seed: int = 0

    def seconds(self, prompt_tokens: int, tokens: int) -> float:
        """Seconds until a prompt of random ids has all of its `tokens` tokens. Raises OSError if it fails."""
        self.seed += 1
        body = {
            "prompt": random_tokens(prompt_tokens, self.vocab_size, self.seed),
            "max_tokens": tokens,
            "temperature": 0,
            "logit_bias": self.no_end,
        }
        begun = time.monotonic()
        connection = http.client.HTTPConnection(self.host, self.port, timeout=3600)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body))
            response = connection.getresponse()
            answer = json.loads(response.read())
        finally:
            connection.close()
        if response.status != 200 or answer["usage"]["completion_tokens"] != tokens:
            raise OSError(f"{response.status}: {answer}")
        return time.monotonic() - begun


@contextmanager
def serving(model: str | None, options: list[str]) -> Iterator[tuple[str, int]]:
    """The host and the port of a server in a process of its own."""
    named = [] if model is None else [model]
    started = [sys.executable, "-m", "ondevice", "serve", "--port", "0", *named, *options]
    with subprocess.Popen(started, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        events = (json.loads(line) for line in server.stderr if line.startswith("{"))
        url = urlsplit(next(event["url"] for event in events if event["event"] == "listening"))
        drain = threading.Thread(target=deque, args=(server.stderr, 0))
        drain.start()
        try:
            yield url.hostname or "", url.port or 0
        finally:
            server.terminate()
            drain.join()


def beside(short: Callable[[], float], long: Callable[[], float], every: float) -> tuple[list[float], float]:
    """Seconds of each short question that is answered while the long prompt is read, and of that one."""
    ended: list[float] = []
    reading = threading.Thread(target=lambda: ended.append(long()))
    found: list[float] = []
    reading.start()
    following = time.monotonic() + every
    while reading.is_alive():
        reading.join(max(0.0, following - time.monotonic()))
        if reading.is_alive():
            seconds = short()
            if reading.is_alive():
                found.append(seconds)
            following += max(every, seconds)
    return found, ended[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", help="a bundle's folder or name; the model that ships if not given")
    parser.add_argument("--prompt", type=int, default=20_000, help="tokens of the long prompt")
    parser.add_argument("--tokens", type=int, default=24, help="tokens of a short answer")
    parser.add_argument("--every", type=float, default=15.0, help="seconds from a short question to the next")
    parser.add_argument("options", nargs="*", help="of `ondevice serve`, behind --")
    asked = parser.parse_args()
    bundle = Bundle.open(find_model(asked.model))
    no_end = dict.fromkeys(map(str, bundle.manifest.tokenizer.eos_ids), -100)
    with serving(asked.model, asked.options) as (host, port):
        clients = [Client(host, port, bundle.config.vocab_size, no_end, seed) for seed in (0, 1 << 20)]
        long = partial(clients[0].seconds, asked.prompt, 1)
        short = partial(clients[1].seconds, SHORT_TOKENS, asked.tokens)
        short()
        short_alone = statistics.median(short() for _ in range(ALONE))
        long_alone = long()
        answered, long_beside = beside(short, long, asked.every)
    median = statistics.median(answered) if answered else 0.0
    found: dict[str, Any] = {
        "model": bundle.name,
        "prompt_tokens": asked.prompt,
        "every_seconds": asked.every,
        "short_alone_seconds": short_alone,
        "short_seconds": median,
        "slowest_short_seconds": max(answered, default=0.0),
        "short_answers": len(answered),
        "long_alone_seconds": long_alone,
        "long_seconds": long_beside,
        "options": asked.options,
        "machine": machine(),
    }
    print(f"{len(answered)} short answers: median {median:.2f} s, alone {short_alone:.2f} s")
    print(f"the long prompt: {long_beside:.1f} s, alone {long_alone:.1f} s")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
