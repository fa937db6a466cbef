"""Tells a model's thinking from its reply, token by token.

gpt-oss writes messages to channels (OpenAI's "harmony" format): `<|channel|>analysis<|message|>...<|end|>`,
then `<|start|>assistant<|channel|>final<|message|>...`. What is on the channel `final` is the reply; the
others are thinking, which a chat may show and its history leaves out, as the model's template does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

Kind = Literal["reply", "thinking", "header"]
"""What a piece of text belongs to. A header, such as a channel's name, isn't shown."""

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
REPLY_CHANNEL = "final"


class ReplyParser(Protocol):
    """Follows one reply."""

    def take(self, token: int | None, text: str) -> Kind:
        """What `text` belongs to, which ends before `token`; the token itself is then taken."""
        ...


class PlainReply:
    """The parser for models without channels, whose whole text is the reply."""

    def take(self, token: int | None, text: str) -> Kind:
        return "reply"


class Channels:
    """The parser for models that write to channels.

    A reply begins inside a message's header, behind `<|start|>assistant`; text that comes before any channel
    is the reply, as of a model that knows no channels.
    """

    def __init__(self, tokens: Mapping[str, int]) -> None:
        """tokens: ids of the special tokens, by name."""
        self._marks = {tokens[name]: name for name in (START, CHANNEL, MESSAGE, END)}
        self._kind: Kind = "reply"
        self._header = ""

    def take(self, token: int | None, text: str) -> Kind:
        kind = self._kind
        if kind == "header":
            self._header += text
        match self._marks.get(-1 if token is None else token):
            case "<|start|>" | "<|channel|>" | "<|end|>":
                self._kind, self._header = "header", ""
            case "<|message|>":
                channel = self._header.split()[:1]
                self._kind = "reply" if channel == [REPLY_CHANNEL] else "thinking"
        return kind


def has_channels(template: str, tokens: Mapping[str, int]) -> bool:
    """Whether a model writes to channels: its template names them, and its tokenizer has their marks."""
    return CHANNEL in template and all(name in tokens for name in (START, CHANNEL, MESSAGE, END))
