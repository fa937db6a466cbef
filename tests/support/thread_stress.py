"""Many threads on one model: every text that ends must be the one that a single thread gets.

    python -m tests.support.thread_stress --seconds 600 --threads 12 --seed 0

They generate, stream, cancel, talk, score, change the budget, close the model and load it again. Most texts
share their passes with others. What it prints ends with a line of JSON; the exit status is 1 for a wrong text
or an untyped error, 2 where a thread hangs.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import json
import random
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import ondevice
from ondevice.errors import BudgetError, OndeviceError
from tests.fuzz.bases import make_bases

REQUESTS = 24
MAX_TOKENS = 24
PATIENCE_SECONDS = 120.0
"""For what was done by no thread yet when time is up, and then for the threads to end in."""
BUDGETS = (1.02, 1.1, 1.5, 3.0)
"""Times the smallest one."""
CLOSED = ("the model is closed", "the computation was cancelled")
"""Words of the errors that whoever uses a model gets when another closes it."""
TURNS = ("hello", "and then?")
WORK = {
    "generate", "agenerate", "stream", "cancel", "talk", "fork", "score", "logits", "budget", "reload",
}  # fmt: skip
"""What threads do, each at least once."""


@dataclass(frozen=True)
class Request:
    """What to ask, and what one thread alone was answered."""

    tokens: tuple[int, ...]
    options: dict[str, Any]
    answer: tuple[int, ...]
    logits: bytes
    perplexity: float
    replies: tuple[tuple[int, ...], ...]


@dataclass
class Stress:
    """The model that all threads use, and what they saw."""

    folder: Path
    requests: list[Request]
    stop: threading.Event = field(default_factory=threading.Event)
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    reloading: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.minimum = ondevice.inspect(self.folder, memory_pressure="off").minimum_budget_bytes
        # Other models of the process count in every plan, and a closed one goes at its own pace.
        self.minimum += 32 << 20
        self.model = self.load()

    def load(self, **options: Any) -> ondevice.Model:
        budget = int(self.minimum * max(BUDGETS))
        options = {"parallel": 4} | options
        return ondevice.load(self.folder, dram_budget=budget, memory_pressure="off", **options)

    def count(self, what: str) -> None:
        with self.lock:
            self.counts[what] += 1

    @property
    def has_done_all(self) -> bool:
        with self.lock:
            return self.counts.keys() >= WORK

    def expect(self, same: bool, what: str) -> None:
        """Every thread goes on; what was wrong is told at the end."""
        if not same:
            with self.lock:
                self.faults.append(what)

    def run(self, seed: str) -> None:
        """One thread's work, until it is told to stop."""
        rng = random.Random(seed)
        actions: list[Callable[[random.Random], None]] = [
            self.generate, self.generate, self.stream, self.cancel, self.talk, self.fork, self.score,
            self.logits, self.budget, self.budget, self.agenerate,
        ]  # fmt: skip
        while not self.stop.is_set():
            action = self.reload if rng.random() < 0.005 else rng.choice(actions)
            try:
                action(rng)
                self.count(action.__name__)
            except OndeviceError as error:
                # The next one is on its way.
                time.sleep(0.01)
                closed = any(words in str(error) for words in CLOSED)
                self.count("found it closed" if closed else type(error).__name__)
                self.expect(closed or isinstance(error, BudgetError), f"{action.__name__}: {error!r}")
            except BaseException:
                self.expect(False, f"{action.__name__}: {traceback.format_exc()[-1500:]}")

    def compare(self, what: str, found: ondevice.Response, answer: tuple[int, ...]) -> bool:
        """Whether it ended, and wasn't cut short by somebody who closed the model."""
        ended = found.finish_reason != "cancelled"
        right = found.tokens == (answer if ended else answer[: len(found.tokens)])
        self.expect(right, f"{what} {found.tokens} ({found.finish_reason}), not {answer}")
        return ended

    def generate(self, rng: random.Random) -> None:
        request = rng.choice(self.requests)
        found = self.model.generate(tokens=request.tokens, **request.options)
        self.compare("generated", found, request.answer)

    def agenerate(self, rng: random.Random) -> None:
        request = rng.choice(self.requests)

        async def work() -> ondevice.Response | None:
            task = asyncio.ensure_future(self.model.agenerate(tokens=request.tokens, **request.options))
            if rng.random() < 0.3:
                await asyncio.sleep(rng.random() / 50)
                task.cancel()
            with suppress(asyncio.CancelledError):
                return await task
            return None

        found = asyncio.run(work())
        if found is not None:
            self.compare("awaited", found, request.answer)

    def stream(self, rng: random.Random) -> None:
        request = rng.choice(self.requests)
        events = list(self.model.stream(tokens=request.tokens, **request.options))
        found = tuple(event.token for event in events if event.token is not None)
        ended = events[-1].finish_reason != "cancelled"
        answer = request.answer if ended else request.answer[: len(found)]
        self.expect(found == answer, f"streamed {found} ({events[-1].finish_reason}), not {request.answer}")

    def cancel(self, rng: random.Random) -> None:
        request = rng.choice(self.requests)
        events = self.model.stream(tokens=request.tokens, **request.options)
        wanted = rng.randrange(6)
        found: list[int] = []
        for event in events:
            if len(found) >= wanted:
                break
            if event.token is not None:
                found.append(event.token)
        events.close()  # type: ignore[attr-defined]
        begun = request.answer[: len(found)]
        self.expect(tuple(found) == begun, f"streamed {found} until cancelled, not {begun}")

    def talk(self, rng: random.Random) -> None:
        request = rng.choice(self.requests)
        session = self.model.session()
        for turn, reply in zip(TURNS, request.replies, strict=True):
            if not self.compare("said", session.respond(turn, **request.options), reply):
                break

    def fork(self, rng: random.Random) -> None:
        request = rng.choice(self.requests)
        session = self.model.session()
        if not self.compare("said", session.respond(TURNS[0], **request.options), request.replies[0]):
            return
        other = session.fork()
        for one in (other, session):
            self.compare("a fork said", one.respond(TURNS[1], **request.options), request.replies[1])

    def score(self, rng: random.Random) -> None:
        request = rng.choice(self.requests)
        found = self.model.score(tokens=request.tokens).perplexity
        self.expect(found == request.perplexity, f"scored {found}, not {request.perplexity}")

    def logits(self, rng: random.Random) -> None:
        request = rng.choice(self.requests)
        found = self.model.logits(request.tokens).tobytes()
        self.expect(found == request.logits, "other logits")

    def budget(self, rng: random.Random) -> None:
        self.model.set_dram_budget(int(self.minimum * rng.choice(BUDGETS)))

    def reload(self, rng: random.Random) -> None:
        """Close it under everybody's hands, or open the next one first."""
        if not self.reloading.acquire(blocking=False):
            return
        try:
            before = self.model
            if rng.random() < 0.5:
                before.close()
            options = {
                "threads": rng.choice([1, 2]),
                "parallel": rng.choice([1, 3, 8]),
                "speculation": rng.choice(["auto", "off", "streams", "lookup"]),
            }
            self.model = self.load(**options)
            before.close()
        finally:
            self.reloading.release()


def requests(folder: Path, rng: random.Random) -> list[Request]:
    """Answers of one thread, one compute thread, without drafting."""
    made = []
    with ondevice.load(folder, threads=1, speculation="off", memory_pressure="off") as model:
        for _ in range(REQUESTS):
            size = rng.choice([2, 20, 60])
            tokens = tuple(rng.randrange(model.config.vocab_size) for _ in range(size))
            temperature = rng.choice([0.0, 0.8])
            options = {
                "max_tokens": rng.randrange(1, MAX_TOKENS),
                "temperature": temperature,
                "seed": rng.randrange(99),
            }
            session = model.session()
            made.append(
                Request(
                    tokens,
                    options,
                    model.generate(tokens=tokens, **options).tokens,
                    np.ascontiguousarray(model.logits(tokens)).tobytes(),
                    model.score(tokens=tokens).perplexity,
                    tuple(session.respond(turn, **options).tokens for turn in TURNS),
                )
            )
    return made


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.thread_stress")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--threads", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ondevice-stress-") as scratch:
        bundle = make_bases(Path(scratch) / "bases").folder / "bundles" / "relu"
        stress = Stress(bundle, requests(bundle, random.Random(options.seed)))
        names = [f"{options.seed}:{index}" for index in range(options.threads)]
        # Daemons, so that one that hangs doesn't keep the process.
        threads = [threading.Thread(target=stress.run, args=(name,), daemon=True) for name in names]
        for thread in threads:
            thread.start()
        ends = time.monotonic() + options.seconds
        while time.monotonic() < ends + (0.0 if stress.has_done_all else PATIENCE_SECONDS):
            time.sleep(0.05)
        stress.stop.set()
        deadline = time.monotonic() + PATIENCE_SECONDS
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        hanging = sum(thread.is_alive() for thread in threads)
        if hanging:
            faulthandler.dump_traceback()
        else:
            stress.model.close()
    for fault in stress.faults[:20]:
        print("FAULT", fault)
    figures = {"threads": options.threads, "seconds": options.seconds, "seed": options.seed}
    print(
        json.dumps(figures | {"done": dict(stress.counts), "faults": len(stress.faults), "hanging": hanging})
    )
    return 2 if hanging else 1 if stress.faults else 0


if __name__ == "__main__":
    sys.exit(main())
