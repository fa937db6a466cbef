"""A text in pieces that are encoded one by one, so that no text takes memory or time in proportion to itself.

Where a text is cut depends on nothing but the text. A piece ends before white space that follows a letter,
where no tokenizer that splits words has a token across; else before punctuation that does; else where it is
full. Texts of up to `MAX_PIECE_CHARS` characters stay whole.
"""

from __future__ import annotations

import re
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ondevice.errors import BundleError

MAX_PIECE_CHARS = 4096
"""Encoding a piece takes 0.3 to 1.3 MB of memory and 2 to 7 ms for ordinary tokenizers; larger pieces are no
faster (2 million characters of novels: 0.93, 1.30, 1.37 and 1.94 microseconds a character in pieces of 1,024,
4,096, 16,384 and 1,000,000)."""
_APOSTROPHES = "'\u2019"
MAX_SECONDS = 10.0
MAX_SECONDS_PER_CHAR = 50e-6
"""Ordinary tokenizers take a fiftieth of that; what a file may ask for takes at most 3 seconds a piece."""


@dataclass(frozen=True)
class Piece:
    """Part of a text: whether it begins the text, and whether it ends it."""

    text: str
    first: bool
    last: bool


def pieces(
    parts: Iterable[str],
    limit: int = MAX_PIECE_CHARS,
    unbroken: re.Pattern[str] | None = None,
    fits: Callable[[str], bool] = lambda text: True,
    is_space: Callable[[str], bool] = str.isspace,
) -> Iterator[Piece]:
    """The text that `parts` add up to, in pieces of at most `limit` characters.

    unbroken: what is never cut where it occurs. fits: whether a piece may be as long as it is; one that may
    not is cut again, at half its length. is_space: white space that a piece may begin with.
    """

    def next_end(most: int) -> int:
        end = _cut(rest, start, most, unbroken, is_space)
        while end - start > 1 and not fits(rest[start:end]):
            end = _cut(rest, start, (end - start) // 2, unbroken, is_space)
        return end

    rest, start, first = "", 0, True
    for part in parts:
        rest, start = rest[start:] + part, 0
        # One more, as where a piece ends depends on what follows it.
        while len(rest) - start > limit:
            end = next_end(limit)
            yield Piece(rest[start:end], first, False)
            start, first = end, False
    while len(rest) - start > 1 and not fits(rest[start:]):
        end = next_end((len(rest) - start) // 2)
        yield Piece(rest[start:end], first, False)
        start, first = end, False
    yield Piece(rest[start:], first, True)


def _cut(
    text: str, start: int, limit: int, unbroken: re.Pattern[str] | None, is_space: Callable[[str], bool]
) -> int:
    """Where the piece that begins at `start` ends: in its second half, if there is a place for it."""
    least, most = start + max(1, limit // 2), start + limit
    for follows in (is_space, _is_punctuation):
        for end in range(most, least, -1):
            if text[end - 1].isalpha() and follows(text[end]):
                return _outside(text, start, end, unbroken)
    return _outside(text, start, most, unbroken)


def _is_punctuation(character: str) -> bool:
    return character not in _APOSTROPHES and unicodedata.category(character).startswith("P")


def _outside(text: str, start: int, end: int, unbroken: re.Pattern[str] | None) -> int:
    """`end`, or where what may not be cut there begins."""
    if unbroken is not None:
        for match in unbroken.finditer(text, start, end + MAX_PIECE_CHARS):
            if match.start() >= end:
                break
            if match.end() > end > match.start() > start:
                return match.start()
    return end


class Stopwatch:
    """Times the encoding of a text, which may take so long, by its length."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._allowed = MAX_SECONDS

    @contextmanager
    def running(self, chars: int) -> Iterator[None]:
        """So many characters are being encoded. Raises BundleError, once they are, if that took too long."""
        started = time.monotonic()
        yield
        self._seconds += time.monotonic() - started
        self._allowed += MAX_SECONDS_PER_CHAR * chars
        if self._seconds > self._allowed:
            raise BundleError(
                f"the tokenizer takes more than {self._allowed:.0f} seconds for this text; no ordinary one "
                "does: convert the model again, from a source you trust"
            )
