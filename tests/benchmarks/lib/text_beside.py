"""A text that is written beside what a benchmark measures, and the pauses that it has meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import pairwise
from types import TracebackType
from typing import Any

import ondevice

BEFORE = 5
"""Tokens of the text before anything is measured."""


class TextBeside:
    """A context in which a model writes a text of at most `max_tokens` tokens in a thread of its own.

    clock: seconds, by which its tokens are noted. options: of `Model.stream`.
    """

    def __init__(
        self,
        model: ondevice.Model,
        max_tokens: int,
        clock: Callable[[], float] = time.monotonic,
        **options: Any,
    ) -> None:
        self._moments: list[float] = []
        self._begun, self._left = threading.Event(), threading.Event()
        self._clock = clock
        self._thread = threading.Thread(target=self._write, args=(model, max_tokens, options))

    def __enter__(self) -> TextBeside:
        self._thread.start()
        self._begun.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left.set()
        self._thread.join()

    def pauses(self, begun: float, done: float) -> list[float]:
        """Seconds between two of its tokens, of those that overlap begun .. done. To be asked behind it."""
        return [end - start for start, end in pairwise(self._moments) if end > begun and start < done]

    def _write(self, model: ondevice.Model, max_tokens: int, options: dict[str, Any]) -> None:
        for _ in model.stream(tokens=[5, 6, 7, 8], max_tokens=max_tokens, **options):
            self._moments.append(self._clock())
            if len(self._moments) == BEFORE:
                self._begun.set()
            if self._left.is_set():
                break
        self._begun.set()
