"""A model that says what a test wants it to say, token by token, and remembers what it was asked."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

from ondevice.api import Model
from ondevice.config import SamplingConfig
from ondevice.generate import Event, FinishReason
from ondevice.stats import GenerationStats, PromptUse
from ondevice.tokenizer import StreamingDetokenizer, Tokenizer


def spoken(tokenizer: Tokenizer, text: str) -> list[tuple[int, str]]:
    """The tokens of a text and what each of them completes."""
    stream = StreamingDetokenizer(tokenizer, at_start=False)
    return [(token, stream.add(token)) for token in tokenizer.encode(text, special=True, add_bos=False)]


@dataclass
class Script:
    """What a model says, reply by reply; the last one stays. `asked` are the prompts' texts."""

    replies: list[str]
    asked: list[str] = field(default_factory=list)
    finish_reason: FinishReason = "stop"

    def put_into(self, model: Model, monkeypatch: Any) -> Script:
        """Let `model` say this instead of what it would."""
        tokenizer = model.tokenizer

        def events(
            key: Any, ids: list[int], sampling: SamplingConfig, *more: Any, **options: Any
        ) -> Iterator[Event]:
            self.asked.append(_written(tokenizer, ids))
            reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
            said = spoken(tokenizer, reply)
            for at, (token, text) in enumerate(said):
                yield Event(text, token, prompt=None if at else PromptUse(len(ids), 0))
            stats = GenerationStats(prompt_tokens=len(ids), generated_tokens=len(said))
            yield Event("", None, self.finish_reason, stats)

        async def asynchronously(*arguments: Any, **options: Any) -> AsyncIterator[Event]:
            for event in events(*arguments, **options):
                yield event

        monkeypatch.setattr(model._host, "stream_ids", events)
        monkeypatch.setattr(model._host, "astream_ids", asynchronously)
        return self


def _written(tokenizer: Tokenizer, ids: list[int]) -> str:
    names = {token: name.encode() for name, token in tokenizer.special_tokens.items()}
    return b"".join(names.get(token) or tokenizer.token_bytes(token) for token in ids).decode()
