"""Parses a tokenizer's regular expressions into a tree. Knows the part of Oniguruma's syntax that tokenizers
use.

The contents of a character class are skipped, because they don't affect the cost of a pattern (`pattern.py`).
"""

from __future__ import annotations

from typing import Literal

from ondevice.errors import UnsupportedModelError
from ondevice.records import dataclass

MAX_CHARS = 8192
_MAX_DEPTH = 40
_CLASS_ESCAPES = frozenset("sSdDwWhHtnrfvae")
_ANCHOR_ESCAPES = frozenset("bBAzZ")
_UNBOUNDED = None


def refused(source: str, reason: str) -> UnsupportedModelError:
    """The error for a pattern that no ordinary tokenizer has."""
    shown = source if len(source) <= 60 else f"{source[:60]}..."
    return UnsupportedModelError(f"the tokenizer's pattern {shown!r} isn't supported: {reason}")


def parse_pattern(source: str) -> Node:
    """The tree of the pattern `source`, in Oniguruma's Ruby syntax.

    Raises UnsupportedModelError if it isn't a pattern, or for syntax that no tokenizer needs: back
    references, conditions, recursion, flags other than i and m.
    """
    if len(source) > MAX_CHARS:
        raise refused(source, f"it has {len(source)} characters; the limit is {MAX_CHARS}")
    return _Parser(source).parse()


@dataclass(frozen=True)
class Node:
    """A part of a pattern: one character, a condition, or a composition of parts.

    A condition is an anchor, or a look-around of `parts[0]`. least, most: bounds of a repetition.
    """

    kind: Literal["character", "condition", "sequence", "choice", "repeat"]
    parts: tuple[Node, ...] = ()
    least: int = 1
    most: int | None = 1

    @property
    def consumes_nothing(self) -> bool:
        """Whether this part can match the empty text."""
        match self.kind:
            case "character":
                return False
            case "condition":
                return True
            case "choice":
                return any(part.consumes_nothing for part in self.parts)
            case "sequence":
                return all(part.consumes_nothing for part in self.parts)
        return self.least == 0 or self.parts[0].consumes_nothing


_CHARACTER = Node("character")
_ANCHOR = Node("condition")


class _Parser:
    """A recursive descent parser."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._at = 0
        self._depth = 0

    def parse(self) -> Node:
        node = self._choice()
        if self._at < len(self._source):
            raise self._error("a group ends that hasn't begun")
        return node

    def _error(self, reason: str) -> UnsupportedModelError:
        return refused(self._source, f"{reason} (at character {self._at})")

    def _peek(self) -> str:
        return self._source[self._at : self._at + 1]

    def _take(self) -> str:
        character = self._peek()
        if not character:
            raise self._error("it ends too early")
        self._at += 1
        return character

    def _accept(self, text: str) -> bool:
        matches = self._source.startswith(text, self._at)
        self._at += len(text) * matches
        return matches

    def _choice(self) -> Node:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise self._error(f"its groups nest more than {_MAX_DEPTH} deep")
        ways = [self._sequence()]
        while self._accept("|"):
            ways.append(self._sequence())
        self._depth -= 1
        return ways[0] if len(ways) == 1 else Node("choice", tuple(ways))

    def _sequence(self) -> Node:
        parts = []
        while self._peek() not in ("", "|", ")"):
            parts.append(self._repeated(self._atom()))
        return parts[0] if len(parts) == 1 else Node("sequence", tuple(parts))

    def _repeated(self, node: Node) -> Node:
        while (bounds := self._quantifier()) is not None:
            node = Node("repeat", (node,), *bounds)
        return node

    def _quantifier(self) -> tuple[int, int | None] | None:
        """The bounds of the repetition at this place, or None. Lazy and possessive forms cost no more than
        greedy ones.
        """
        for mark, bounds in (("?", (0, 1)), ("*", (0, _UNBOUNDED)), ("+", (1, _UNBOUNDED))):
            if self._accept(mark):
                # `a+?` is lazy, `a++` possessive; after braces these marks are further repetitions.
                if self._peek() in ("?", "+"):
                    self._at += 1
                return bounds
        if self._peek() != "{":
            return None
        end = self._source.find("}", self._at)
        least, comma, most = self._source[self._at + 1 : max(end, 0)].partition(",")
        numbers = [text for text in (least, most) if text]
        if not numbers or not all(text.isascii() and text.isdigit() and len(text) <= 4 for text in numbers):
            raise self._error("a brace stands where a number of repetitions is expected")
        self._at = end + 1
        low = int(least or 0)
        high = int(most) if most else (_UNBOUNDED if comma else low)
        if high is not None and high < low:
            raise self._error("it repeats at most less often than at least")
        return low, high

    def _atom(self) -> Node:
        character = self._take()
        if character == "(":
            return self._group()
        if character == "[":
            self._class()
            return _CHARACTER
        if character == "\\":
            return self._escape()
        if character in "^$":
            return _ANCHOR
        if character in "*+?{":
            raise self._error("a repetition has nothing before it")
        return _CHARACTER

    def _group(self) -> Node:
        looks = False
        if self._accept("?"):
            if self._accept("=") or self._accept("!") or self._accept("<=") or self._accept("<!"):
                looks = True
            elif not (self._accept(":") or self._accept(">")):
                self._flags()
        node = self._choice()
        if not self._accept(")"):
            raise self._error("a group doesn't end")
        return Node("condition", (node,)) if looks else node

    def _flags(self) -> None:
        """Skip flags such as `i:` and `m-i:`. Raises an error for `x`, names, conditions and comments."""
        end = self._source.find(":", self._at)
        if end < 0 or not set(self._source[self._at : end]) <= set("im-"):
            raise self._error("this kind of group isn't supported")
        self._at = end + 1

    def _class(self) -> None:
        """Skip what follows the opening bracket of a character class, including classes inside it."""
        self._accept("^")
        if self._peek() == "]":
            raise self._error("a class begins with a bracket that should be escaped")
        while not self._accept("]"):
            character = self._take()
            if character == "\\":
                self._escape(inside=True)
            elif character == "[":
                self._depth += 1
                if self._depth > _MAX_DEPTH:
                    raise self._error(f"its classes nest more than {_MAX_DEPTH} deep")
                self._class()
                self._depth -= 1

    def _escape(self, inside: bool = False) -> Node:
        character = self._take()
        if character in "pPxu":
            self._code(character)
        elif character in _ANCHOR_ESCAPES and not inside:
            return _ANCHOR
        elif character.isascii() and character.isalnum() and not (character in _CLASS_ESCAPES or inside):
            raise self._error(f"\\{character} isn't supported")
        return _CHARACTER

    def _code(self, kind: str) -> None:
        """Skip the rest of `\\p{..}`, `\\x{..}`, `\\xHH` or `\\uHHHH`."""
        if self._accept("{"):
            end = self._source.find("}", self._at)
            if end < 0 or not all(c.isalnum() or c in "_^ -" for c in self._source[self._at : end]):
                raise self._error(f"\\{kind} names what isn't known")
            self._at = end + 1
        elif kind in "xu":
            digits = 2 if kind == "x" else 4
            while digits and self._peek() in set("0123456789abcdefABCDEF"):
                self._at, digits = self._at + 1, digits - 1
        else:
            raise self._error(f"\\{kind} without a name in braces isn't supported")
