"""Separates thinking and tool calls from the reply of models that write to channels.

gpt-oss writes messages to channels (OpenAI's "harmony" format): `<|channel|>analysis<|message|>...<|end|>`,
then `<|start|>assistant<|channel|>final<|message|>...`. Text on the channel `final` is the reply. A message
whose header has `to=functions.NAME`, or `to=NAME`, is a call of that tool with its text as arguments, or part
of the reply if there is no such tool. All other messages are thinking, which a chat may show but leaves out
of its history, as the model's template does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ondevice.chat_template.call_formats import Tools, checked_call
from ondevice.chat_template.replies import MAX_CALL_CHARS, CallScan, Kind, ReplyPiece

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
CONSTRAIN = "<|constrain|>"
"""Marks the kind of a message's text."""
CALL = "<|call|>"
"""Ends a call, unless the call ends the reply."""
REPLY_CHANNEL = "final"
_RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")
_BEFORE_RECIPIENT = "to="
MAX_HEADER_CHARS = 1024


class Channels:
    """The parser for models that write to channels.

    A reply begins inside a message's header, after `<|start|>assistant`. Text before the first channel is
    part of the reply, as in a model without channels, unless it names a recipient.
    """

    def __init__(self, tokens: Mapping[str, int], tools: Tools) -> None:
        """tokens: ids of the special tokens, by name. tools: the tools that may be called, by name."""
        self._marks = {tokens[name]: name for name in (START, CHANNEL, MESSAGE, END, CALL) if name in tokens}
        self.openers = frozenset(tokens[name] for name in (START, CHANNEL))
        self._tools = tools
        self._part: str = "start"
        """The part being read: the start, a header, thinking, a call or the reply."""
        self._header = ""
        self._channel = ""
        self._call = ""
        self._name = ""
        self._scan: CallScan | None = None

    @property
    def kind(self) -> Kind:
        kinds: dict[str, Kind] = {"thinking": "thinking", "call": "call", "header": "header"}
        return kinds.get(self._part, "reply")

    def take(self, token: int | None, text: str) -> list[ReplyPiece]:
        pieces = self._took(text)
        match self._marks.get(-1 if token is None else token):
            case "<|start|>":
                pieces += self.finish()
                self._part, self._header, self._channel = "header", "", ""
            case "<|channel|>":
                pieces += self.finish() if self._part not in ("start", "header") else []
                self._part, self._channel = "header", self._header
                self._header = ""
            case "<|end|>" | "<|call|>":
                pieces += self.finish()
                self._part, self._header, self._channel = "header", "", ""
            case "<|message|>":
                pieces += self.finish() if self._part == "call" else []
                self._begin()
        return pieces

    def finish(self) -> list[ReplyPiece]:
        """The remaining pieces, at the end of the reply. A call that can't be read becomes text
        of the reply.
        """
        part, call, held = self._part, self._call, self._header
        self._call, self._scan = "", None
        if part == "start" and held:
            self._header = ""
            return [ReplyPiece("reply", held)]
        if part != "call":
            return []
        self._part = "header"
        call_made = checked_call(self._name, call.strip(), self._tools)
        if call_made is None:
            return [ReplyPiece("reply", call)] if call else []
        return [ReplyPiece("reply", "", call_made)]

    def _took(self, text: str) -> list[ReplyPiece]:
        if self._part == "header":
            self._header = (self._header + text)[:MAX_HEADER_CHARS]
            return []
        if self._part == "start":
            self._header += text
            bare = self._header.lstrip()
            names = bare.startswith(_BEFORE_RECIPIENT) or _BEFORE_RECIPIENT.startswith(bare)
            if names and len(self._header) <= MAX_HEADER_CHARS:
                return []
            text, self._header, self._part = self._header, "", "reply"
        if self._part == "call":
            self._call += text
            if len(self._call) <= MAX_CALL_CHARS:
                return self._streamed()
            text, self._call, self._part = self._call, "", "reply"
        return [ReplyPiece("thinking" if self._part == "thinking" else "reply", text)] if text else []

    def _streamed(self) -> list[ReplyPiece]:
        """The pieces of a call's arguments that are certain so far."""
        pieces = []
        if self._scan is None and self._call.lstrip().startswith("{") and self._name in self._tools:
            self._scan = CallScan(self._name, self._call.index("{"))
            pieces.append(ReplyPiece("reply", "", begins=self._name))
        certain = "" if self._scan is None else self._scan.take(self._call)
        return [*pieces, ReplyPiece("reply", "", arguments=certain)] if certain else pieces

    def _begin(self) -> None:
        """Begin a message's text. Its header says which kind of text it is."""
        recipient = _RECIPIENT.search(f"{self._channel} {self._header}")
        if recipient is not None and recipient[1] in self._tools:
            self._part, self._name, self._call = "call", recipient[1], ""
        else:
            # A call of another tool is text, and not lost among what the model thinks.
            is_reply = self._header.split()[:1] == [REPLY_CHANNEL] or (recipient and self._tools)
            self._part = "reply" if is_reply else "thinking"
        self._header = self._channel = ""


def has_channels(template: str, tokens: Mapping[str, int]) -> bool:
    """Whether a model writes to channels: its template names them, and its tokenizer has their marks as
    tokens.
    """
    return CHANNEL in template and all(name in tokens for name in (START, CHANNEL, MESSAGE, END))
