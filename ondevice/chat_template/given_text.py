"""Texts that track which of their parts come from messages and tools while a template works on them.

A template may cut, strip, join and compare texts as it likes, and notices nothing. In the prompt that it
makes, the name of a special token becomes that token only if no part of the name was given from outside.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from operator import index
from typing import Any, SupportsIndex

Span = tuple[int, int]
"""Start and end of a part, in characters."""


class GivenText(str):
    """A text that knows which parts of it were given, `spans`. These are in order, not empty, and don't
    overlap.

    Every method that returns text keeps track of them. If that isn't possible, all of the result counts as
    given.
    """

    __slots__ = ("spans",)
    spans: tuple[Span, ...]

    def __new__(cls, text: str, spans: Iterable[Span]) -> GivenText:
        made = str.__new__(cls, text)
        made.spans = tuple(spans)
        return made

    def __str__(self) -> str:
        return self

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            return self.part(start, stop) if step == 1 else made_of(str.__getitem__(self, key), self)
        text, at = str.__getitem__(self, key), index(key)
        start = at if at >= 0 else at + len(self)
        return self.part(start, start + len(text))

    def __iter__(self) -> Iterator[str]:
        return (self.part(at, at + 1) for at in range(len(self)))

    def __add__(self, other: str) -> str:
        return joined("", (self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> str:
        return joined("", (other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, count: SupportsIndex) -> str:
        return joined("", [self] * index(count))

    def __rmul__(self, count: SupportsIndex) -> str:
        return self * count

    def part(self, start: int, stop: int) -> GivenText:
        """The characters from `start` to `stop`, which lie inside the text."""
        stop = max(start, stop)
        clipped = ((max(begin, start) - start, min(end, stop) - start) for begin, end in self.spans)
        return GivenText(str.__getitem__(self, slice(start, stop)), (it for it in clipped if it[0] < it[1]))

    def strip(self, chars: str | None = None) -> str:
        return self.part(len(self) - len(str.lstrip(self, chars)), len(str.rstrip(self, chars)))

    def lstrip(self, chars: str | None = None) -> str:
        return self.part(len(self) - len(str.lstrip(self, chars)), len(self))

    def rstrip(self, chars: str | None = None) -> str:
        return self.part(0, len(str.rstrip(self, chars)))

    def removeprefix(self, prefix: str, /) -> str:
        return self.part(len(self) - len(str.removeprefix(self, prefix)), len(self))

    def removesuffix(self, suffix: str, /) -> str:
        return self.part(0, len(str.removesuffix(self, suffix)))

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._pieces(str.split(self, sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._pieces(str.rsplit(self, sep, maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[str]:
        return self._pieces(str.splitlines(self, keepends), None)

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        head, separator, tail = self._pieces(str.partition(self, sep), "")
        return head, separator, tail

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        head, separator, tail = self._pieces(str.rpartition(self, sep), "")
        return head, separator, tail

    def upper(self) -> str:
        return given_alike(str.upper(self), self)

    def lower(self) -> str:
        return given_alike(str.lower(self), self)

    def title(self) -> str:
        return given_alike(str.title(self), self)

    def capitalize(self) -> str:
        return given_alike(str.capitalize(self), self)

    def join(self, parts: Iterable[str], /) -> str:
        return joined(self, parts)

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        return replaced(self, old, new, index(count))

    def _pieces(self, texts: Iterable[str], between: str | None) -> list[str]:
        """Consecutive parts of this text, with their spans.

        texts: the parts as plain strings. between: the text between two parts, or None for white space, with
        which only lines begin.
        """
        parts: list[str] = []
        at = 0
        for piece in texts:
            at = str.find(self, piece, at) if between is None else at
            parts.append(self.part(at, at + len(piece)))
            at += len(piece) + len(between or "")
        return parts


def given(text: str) -> GivenText:
    """The text, with all of it marked as given. A GivenText is returned as it is."""
    return text if isinstance(text, GivenText) else GivenText(text, ((0, len(text)),) if text else ())


def given_alike(text: str, source: str) -> str:
    """`text`, which was made from `source` letter by letter, marked as given in the same places.

    If its length differs, all of it is marked as given if any part of `source` is.
    """
    if isinstance(source, GivenText) and len(text) == len(source):
        return GivenText(text, source.spans)
    return made_of(text, source)


def made_of(text: str, source: str) -> str:
    """`text`, which was made from `source` in any way. All of it is marked as given if any part of `source`
    is.
    """
    if not isinstance(source, GivenText):
        return text
    return given(plain(text)) if source.spans else GivenText(text, ())


def joined(separator: str, parts: Iterable[str]) -> str:
    """The parts with the separator between them."""
    pieces = list(parts)
    text = str.join(separator, pieces)
    if not isinstance(separator, GivenText) and not any(isinstance(it, GivenText) for it in pieces):
        return text
    spans: list[Span] = []
    at = 0
    for number, piece in enumerate(pieces):
        for each in (separator, piece) if number else (piece,):
            for begin, end in each.spans if isinstance(each, GivenText) else ():
                follows = bool(spans) and spans[-1][1] == begin + at
                spans.append((spans.pop()[0] if follows else begin + at, end + at))
            at += len(each)
    return GivenText(text, spans)


def concatenated(parts: Iterable[str]) -> str:
    """The parts concatenated. jinja2 calls this to make a template's output."""
    return joined("", parts)


def replaced(text: str, old: str, new: str, count: int = -1) -> str:
    """`str.replace` that keeps spans. count: the most places to replace; all of them if negative."""
    if not any(isinstance(each, GivenText) for each in (text, new)):
        return str.replace(text, old, new, count)
    if not old:
        return given(str.replace(text, old, new, count))
    return joined(new, text.split(old, count))


def changed_parts(text: str, change: Callable[[str], str]) -> str:
    """The text with each given part replaced by what `change` returns for it, a text of the same length."""
    if not isinstance(text, GivenText):
        return text
    parts, at = [], 0
    for begin, end in text.spans:
        parts += [str.__getitem__(text, slice(at, begin)), change(str.__getitem__(text, slice(begin, end)))]
        at = end
    return "".join([*parts, str.__getitem__(text, slice(at, len(text)))])


def marked(value: Any, mark: str) -> Any:
    """JSON data with `mark` around every string, a character that the data doesn't contain. `unmarked`
    removes it.
    """
    if isinstance(value, str):
        return f"{mark}{value}{mark}"
    if isinstance(value, dict):
        return {marked(key, mark): marked(item, mark) for key, item in value.items()}
    return [marked(item, mark) for item in value] if isinstance(value, list | tuple) else value


def unmarked(text: str, mark: str) -> GivenText:
    """A text without the marks, in which everything between two of them is marked as given."""
    pieces = text.split(mark)
    text_of_all = joined("", (given(piece) if number % 2 else piece for number, piece in enumerate(pieces)))
    return text_of_all if isinstance(text_of_all, GivenText) else GivenText(text_of_all, ())


def plain(text: str) -> str:
    """The text as a plain string."""
    return str.__getitem__(text, slice(None))


def template_tokens(text: str, names: re.Pattern[str]) -> list[re.Match[str]]:
    """The special tokens in a prompt: matches of token names of which no part was given."""
    return list(names.finditer(changed_parts(text, lambda part: _BLANK * len(part))))


_BLANK = "\ufdd0"
"""A noncharacter, which no token's name contains."""
