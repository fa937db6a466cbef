"""A finished generation, gathered from its events."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ondevice.errors import OndeviceError
from ondevice.generate import Event, FinishReason
from ondevice.stats import GenerationStats


@dataclass(frozen=True)
class Response:
    """What a prompt was answered with. `tokens` are the generated ids."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    stats: GenerationStats

    def to_dict(self) -> dict[str, Any]:
        """The object that `generate --json` prints."""
        return {
            "text": self.text,
            "tokens": list(self.tokens),
            "finish_reason": self.finish_reason,
            "stats": self.stats.to_dict(),
        }


def gather(events: Iterable[Event]) -> Response:
    """All of a stream. Raises OndeviceError if it stopped before its last event."""
    texts: list[str] = []
    tokens: list[int] = []
    for event in events:
        texts.append(event.text)
        if event.token is not None:
            tokens.append(event.token)
        if event.finish_reason is not None and event.stats is not None:
            return Response("".join(texts), tuple(tokens), event.finish_reason, event.stats)
    raise OndeviceError("the generation ended without a result")
