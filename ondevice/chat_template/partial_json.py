"""Follows JSON while it is written: finds where a value ends, and whether the text so far can become one."""

from __future__ import annotations

import re
from typing import Literal

from ondevice.chat_template.tools import MAX_DEPTH

MAX_SCALAR_CHARS = 1024
"""Most characters of a number or a word."""
_SPACES = re.compile(r"[ \t\r\n]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9A-Fa-f]{4})')
_ESCAPE_BEGUN = re.compile(r"\\(?:u[0-9A-Fa-f]{0,3})?\Z")
_SCALAR = re.compile(r"[-+.0-9A-Za-z]+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_NUMBER_BEGUN = re.compile(r"-?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?(?:[eE][-+]?[0-9]*)?)?")
_WORDS = ("true", "false", "null")
_CLOSES = {"{": "}", "[": "]"}


class JsonScan:
    """A JSON value (RFC 8259) that is being read, at most MAX_DEPTH deep.

    ended: whether it is complete. broken: whether the text can't be JSON.
    """

    def __init__(self) -> None:
        self.ended = False
        self.broken = False
        self._open: list[str] = []
        self._quoted = False
        self._wants: Literal["value", "key", "colon", "comma"] = "value"
        self._may_close = False
        """Whether the bracket opened last may be closed now."""

    def take(self, text: str, at: int) -> int:
        """Follow `text` from `at`, where the last call ended. Returns the position up to which it has been
        read.

        Text after that position is still open: pass it again with more text after it, unless the value has
        ended there or is broken.
        """
        while at < len(text) and not self.ended:
            end = self._string(text, at) if self._quoted else self._token(text, at)
            if end == at:
                break
            at = end
        return at

    def _token(self, text: str, at: int) -> int:
        """The end of the spaces, sign or scalar at `at`. Returns `at` itself if it is incomplete or breaks
        the value.
        """
        spaces = _SPACES.match(text, at)
        if spaces is not None and spaces.end() > at:
            return spaces.end()
        sign, fresh = text[at], self._may_close
        self._may_close = False
        if sign in "}]" and (fresh or self._wants == "comma") and sign == _CLOSES[self._open[-1]]:
            self._open.pop()
            self._complete()
        elif self._wants == "comma" and sign == ",":
            self._wants = "key" if self._open[-1] == "{" else "value"
        elif self._wants == "colon" and sign == ":":
            self._wants = "value"
        elif self._wants in ("key", "value") and sign == '"':
            self._quoted = True
        elif self._wants == "value" and sign in "{[" and len(self._open) < MAX_DEPTH:
            self._open.append(sign)
            self._may_close = True
            self._wants = "key" if sign == "{" else "value"
        elif self._wants == "value":
            end = self._scalar(text, at)
            self._may_close = fresh and end == at
            return end
        else:
            self.broken = True
            return at
        return at + 1

    def _string(self, text: str, at: int) -> int:
        plain = _PLAIN.match(text, at)
        if plain is not None and plain.end() > at:
            return plain.end()
        if text[at] == '"':
            self._quoted = False
            if self._wants == "key":
                self._wants = "colon"
            else:
                self._complete()
            return at + 1
        escape = _ESCAPE.match(text, at)
        if escape is not None:
            return escape.end()
        self.broken = _ESCAPE_BEGUN.match(text, at) is None
        return at

    def _scalar(self, text: str, at: int) -> int:
        match = _SCALAR.match(text, at)
        word = "" if match is None else match[0]
        if not word or len(word) > MAX_SCALAR_CHARS:
            self.broken = True
            return at
        if at + len(word) == len(text):
            begun = _NUMBER_BEGUN.fullmatch(word) or any(each.startswith(word) for each in _WORDS)
            self.broken = not begun
            return at
        if word not in _WORDS and _NUMBER.fullmatch(word) is None:
            self.broken = True
            return at
        self._complete()
        return at + len(word)

    def _complete(self) -> None:
        """Record that a value inside the text is complete."""
        self._wants = "comma"
        self.ended = not self._open


def ends_inside(text: str, at: int = 0) -> bool:
    """Whether a text ends before the JSON value that begins at `at` does."""
    scan = JsonScan()
    scan.take(text, at)
    return not scan.ended and not scan.broken
