"""`Response`, a finished generation gathered from its events, and the stats of the last generation."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ondevice.callbacks import IsCancelled
from ondevice.chat_template.tools import ToolCall
from ondevice.errors import OndeviceError
from ondevice.generate import Event, FinishReason, Steps, watched
from ondevice.records import dataclass
from ondevice.stats import GenerationStats

Work = Callable[[IsCancelled], Steps[None]]
"""A generation to run on the owner thread."""


@dataclass(frozen=True)
class Response:
    """The answer to a prompt. `tokens`: the generated ids. `thinking`: what the model thought first.

    `tool_calls`: the calls of tools in a reply; their results are messages of the next turn.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    stats: GenerationStats
    thinking: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The object that `generate --json` prints."""
        return {
            "text": self.text,
            "tokens": list(self.tokens),
            "finish_reason": self.finish_reason,
            "stats": self.stats.to_dict(),
        }


def gather(events: Iterable[Event]) -> Response:
    """All events of a stream as one Response. Raises OndeviceError if it stops before its last event."""
    texts: list[str] = []
    thought: list[str] = []
    tokens: list[int] = []
    calls: list[ToolCall] = []
    for event in events:
        if event.tool_call is not None:
            calls.append(event.tool_call)
        (thought if event.thinking else texts).append(event.text)
        if event.token is not None:
            tokens.append(event.token)
        if event.finish_reason is not None and event.stats is not None:
            reason, stats = event.finish_reason, event.stats
            return Response("".join(texts), tuple(tokens), reason, stats, "".join(thought), tuple(calls))
    raise OndeviceError("the generation ended without a result")


class LastStats:
    """Stats of the generation that finished last.

    The owner thread records them, because the consumer's iterator may be gone when the generation ends.
    """

    def __init__(self) -> None:
        self._stats = GenerationStats()
        self._stopping: threading.Event | None = None
        """Set once the last abandoned generation has ended."""

    def get(self) -> GenerationStats:
        """The stats of the generation that finished last.

        If a generation's iterator was closed while it ran, waits for that generation, which ends soon.
        """
        if self._stopping is not None:
            self._stopping.wait()
        return self._stats

    def _note(self, event: Event) -> None:
        if event.stats is not None:
            self._stats = event.stats

    @contextmanager
    def noted(self, work: Work) -> Iterator[Work]:
        """A context whose value is `work`, wrapped so that its stats are recorded. Leave it when nothing
        consumes the work.
        """
        begun, ended = threading.Event(), threading.Event()

        def noting(cancelled: IsCancelled) -> Steps[None]:
            begun.set()
            try:
                yield from watched(work(cancelled), self._note)
            finally:
                ended.set()

        try:
            yield noting
        finally:
            if begun.is_set() and not ended.is_set():
                self._stopping = ended


def without_reuse(event: Event) -> Event:
    """The event with a count of 0 reused tokens, for a prompt that the same caller has already
    computed once.
    """
    if event.prompt is not None:
        event = replace(event, prompt=replace(event.prompt, reused_tokens=0))
    if event.stats is not None:
        event = replace(event, stats=replace(event.stats, reused_tokens=0))
    return event
