"""Limits the number of digits in JSON's numbers.

A grammar lets a number go on for ever, and small models do: after many digits in a row, another digit is the
likeliest token. So tokens that would make a number too long are removed from a text's mask, as long as others
are left.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ondevice.constraints.subschemas import walked

DEFAULT_DIGITS = 20
"""Most significant digits of a number, and most zeros before them, unless its schema names a longer one."""
MAX_DIGITS = 100
"""Most digits of a number that a schema names; longer ones are left out."""
MAX_EXPONENT_DIGITS = 3
_NUMERIC = frozenset(b"0123456789.")
_DIGITS = frozenset(b"0123456789")
_NAMING = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "const", "enum")
"""Keywords that contain numbers."""


class NumberTokens:
    """The tokens of a vocabulary that can make a number longer."""

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self.token_bytes = token_bytes
        numeric = [token for token, text in enumerate(token_bytes) if not _NUMERIC.isdisjoint(text)]
        self.ids = np.array(numeric, dtype=np.int64)
        """Ascending ids of tokens with a digit or a point."""
        self.longest = max((sum(byte in _DIGITS for byte in token_bytes[it]) for it in numeric), default=0)
        """Most digits of a token."""


class _Place(NamedTuple):
    """A place in a JSON text. part: `text`, `string`, `escape`, `number` or `exponent`.

    zeros: number of leading zeros among a number's digits. digits: number of its other digits, or of the
    exponent's.
    """

    part: str = "text"
    zeros: int = 0
    digits: int = 0


_TEXT = _Place()


class DigitBound:
    """Limits the digits of numbers in one JSON text."""

    def __init__(self, tokens: NumberTokens, most_digits: int = DEFAULT_DIGITS) -> None:
        self._tokens, self._most = tokens, most_digits
        self._place = _TEXT

    def take(self, token: int) -> None:
        """Follow a token that was appended to the text."""
        # A number that had to become longer than it may be is followed no further than that.
        self._place = self._place_after(token, self._place, bounded=False) or _TEXT

    def bounded(self, mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """A mask (V,) without the tokens that make a number too long. Unchanged if it would have no tokens
        left.
        """
        place, tokens = self._place, self._tokens
        if place.part in ("string", "escape") and tokens.longest <= self._most:
            return mask
        counted = max(place.zeros, place.digits)
        if place.part != "exponent" and counted + tokens.longest < self._most:
            return mask
        allowed = tokens.ids[mask[tokens.ids]]
        wrong = [token for token in allowed.tolist() if self._place_after(token, place) is None]
        if not wrong:
            return mask
        narrowed = mask.copy()
        narrowed[wrong] = False
        return narrowed if narrowed.any() else mask

    def _place_after(self, token: int, place: _Place, bounded: bool = True) -> _Place | None:
        """The place after a token. None if `bounded` and a number would be too long."""
        reached: _Place | None = place
        for byte in self._tokens.token_bytes[token]:
            reached = self._next(byte, reached or _TEXT, bounded)
            if reached is None:
                return None
        return reached

    def _next(self, byte: int, place: _Place, bounded: bool) -> _Place | None:
        part, digits = place.part, place.digits
        if part == "escape":
            return _Place("string")
        if part == "string":
            return _Place("escape") if byte == 0x5C else _TEXT if byte == 0x22 else place
        if byte in _DIGITS:
            reached = _Place("number") if part == "text" else place
            if reached.part == "exponent" or reached.digits or byte != 0x30:
                reached = reached._replace(digits=reached.digits + 1)
            else:
                reached = reached._replace(zeros=reached.zeros + 1)
            most = MAX_EXPONENT_DIGITS if reached.part == "exponent" else self._most
            # The 0 before a point is one more.
            return None if bounded and (reached.digits > most or reached.zeros > most + 1) else reached
        if part == "number" and byte == 0x2E:
            # A digit has to follow.
            return None if bounded and digits >= self._most else place
        if part == "number" and byte in b"eE":
            return _Place("exponent")
        if part == "exponent" and byte in b"+-":
            return place
        return _Place("string") if byte == 0x22 else _TEXT


def most_digits(schema: Any) -> int:
    """The most digits that a number may have: as many as the longest number in the schema, but at least
    DEFAULT_DIGITS.
    """
    counts = (
        _digits(it) for each in walked(schema) for key in _NAMING if key in each for it in _numbers(each[key])
    )
    return max((it for it in counts if it <= MAX_DIGITS), default=DEFAULT_DIGITS)


def _numbers(value: Any) -> Iterator[int | float]:
    """Yields all numbers in a value."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield value
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for each in inner:
        yield from _numbers(each)


def _digits(number: int | float) -> int:
    """The number of digits of a number that is written without an exponent; at least DEFAULT_DIGITS."""
    digits = format(Decimal(repr(number)), "f").lstrip("-0.").replace(".", "")
    return max(DEFAULT_DIGITS, len(digits))
