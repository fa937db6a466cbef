"""Texts that run at the same time: what is asked, and what each is answered."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ondevice.api import Model
from ondevice.errors import OndeviceError
from ondevice.generate import Event

ENDS = {"max_tokens": 24, "logit_bias": {2: -math.inf}}
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.9, "seed": 3},
    {"temperature": 1.1, "seed": 4, "top_k": 30, "repetition_penalty": 1.3},
    {"top_logprobs": 2},
    {"temperature": 0.7, "seed": 5, "top_p": 0.9, "top_logprobs": 1, "frequency_penalty": 0.8},
    {"max_tokens": 3},
    {"temperature": 1.0, "seed": 3, "min_p": 0.02, "max_tokens": 40},
    {"repetition_penalty": 1.5},
)
Parts = list[list[tuple[int, int]]]
"""For each shared pass, of each text the rows and how many of them are draft tokens."""


def prompts(vocab_size: int, count: int, seed: int = 1) -> list[list[int]]:
    """Prompts of different lengths."""
    rng = random.Random(seed)
    return [[rng.randrange(5, vocab_size) for _ in range(rng.choice([1, 5, 30, 90]))] for _ in range(count)]


def asked(model: Model, count: int) -> list[tuple[list[int], dict[str, Any]]]:
    """Prompts and their options, mixed."""
    given = prompts(model.config.vocab_size, count)
    return [(ids, {**ENDS, **OPTIONS[at % len(OPTIONS)]}) for at, ids in enumerate(given)]


def said(events: Sequence[Event]) -> list[Any]:
    return [(event.text, event.token, event.logprob, event.top_logprobs, event.stop) for event in events]


def alone(model: Model, requests: Sequence[tuple[list[int], dict[str, Any]]]) -> list[list[Any]]:
    return [said(list(model.stream(tokens=ids, **options))) for ids, options in requests]


def at_once(works: Sequence[Callable[[], Any]]) -> list[Any]:
    """What each returns or raises, with all running at the same time."""
    found: list[Any] = [None] * len(works)

    def run(at: int, work: Callable[[], Any]) -> None:
        try:
            found[at] = work()
        except OndeviceError as error:
            found[at] = error

    threads = [threading.Thread(target=run, args=each) for each in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def together(model: Model, requests: Sequence[tuple[list[int], dict[str, Any]]]) -> list[Any]:
    """What each is answered where all wait before the first begins."""
    streams = [model.stream(tokens=ids, **options) for ids, options in requests]
    gate, queue = threading.Event(), model._owner._jobs._queue
    held = model._owner.stream(lambda cancelled: (gate.wait(60 * turn) for turn in range(2)))
    next(held)

    def release() -> None:
        while queue.qsize() < len(requests):
            time.sleep(0.001)
        gate.set()

    works = [lambda it=it: said(list(it)) for it in streams]  # type: ignore[misc]
    return at_once([*works, release])[: len(requests)]
