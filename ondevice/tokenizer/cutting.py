"""Cuts a text into pieces that are encoded one by one, so that memory and time per piece are bounded.

The cuts depend only on the text. A piece ends before white space that follows a letter, if possible: no
tokenizer that splits words has a token across that place. Otherwise it ends before punctuation that follows a
letter, or else where it is full. Texts of up to `MAX_PIECE_CHARS` characters aren't cut.
"""

from __future__ import annotations

import re
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from ondevice.errors import BundleError
from ondevice.records import dataclass

MAX_PIECE_CHARS = 4096
"""Most characters of a piece. Encoding one takes 0.3 to 1.3 MB of memory and 2 to 7 ms for ordinary
tokenizers. Larger pieces are no faster (2 million characters of novels: 0.93, 1.30, 1.37 and 1.94
microseconds per character in pieces of 1,024, 4,096, 16,384 and 1,000,000)."""
MAX_FORM_CHARS = 6144
"""Most characters of a piece in a Unicode normal form; U+FDFA alone becomes 18 in two of the forms."""
_APOSTROPHES = "'\u2019"
MAX_SECONDS = 10.0
MAX_SECONDS_PER_CHAR = 50e-6
"""Added to `MAX_SECONDS` for each character of a text. Ordinary tokenizers take a fiftieth of the limit; the
costliest file that is accepted takes at most 3 seconds per piece."""


@dataclass(frozen=True)
class Piece:
    """A part of a text. first: whether it begins the text. last: whether it ends the text."""

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
    """Yields a text in pieces of at most `limit` characters.

    Args:
        parts: the text, cut anywhere.
        limit: most characters of a piece.
        unbroken: matches of this pattern aren't cut.
        fits: tells whether a piece is short enough; if not, it is cut again near half its length.
        is_space: tells whether a piece may begin with a character, as white space.
    """

    def next_end(most: int) -> int:
        end = _cut(rest, start, most, unbroken, is_space)
        while end - start > 1 and not fits(rest[start:end]):
            end = _cut(rest, start, (end - start) // 2, unbroken, is_space)
        return end

    rest, start, first = "", 0, True
    for part in parts:
        rest, start = rest[start:] + part, 0
        # One character more than the limit, as the end of a piece depends on the character after it.
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
    """The end of the piece that begins at `start`, in the second half of `limit` if possible."""
    least, most = start + max(1, limit // 2), start + limit
    for follows in (is_space, _is_punctuation):
        for end in range(most, least, -1):
            if text[end - 1].isalpha() and follows(text[end]):
                return _outside(text, start, end, unbroken)
    return _outside(text, start, most, unbroken)


def _is_punctuation(character: str) -> bool:
    return character not in _APOSTROPHES and unicodedata.category(character).startswith("P")


def _outside(text: str, start: int, end: int, unbroken: re.Pattern[str] | None) -> int:
    """`end`, or if that would cut a match of `unbroken`, the start of that match."""
    if unbroken is not None:
        for match in unbroken.finditer(text, start, end + MAX_PIECE_CHARS):
            if match.start() >= end:
                break
            if match.end() > end > match.start() > start:
                return match.start()
    return end


class Stopwatch:
    """Limits the time that encoding a text may take, in proportion to the text's length."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._allowed = MAX_SECONDS

    @contextmanager
    def running(self, chars: int) -> Iterator[None]:
        """A context that times the encoding of `chars` characters. At its end, raises BundleError if that
        took too long.
        """
        started = time.monotonic()
        yield
        self._seconds += time.monotonic() - started
        self._allowed += MAX_SECONDS_PER_CHAR * chars
        if self._seconds > self._allowed:
            raise BundleError(
                f"the tokenizer takes more than {self._allowed:.0f} seconds for this text; no ordinary one "
                "does: convert the model again, from a source you trust"
            )
