"""Parses JSON from untrusted files. Checks size, nesting, keys, types and ranges; raises only BundleError."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from ondevice.errors import BundleError, json_fault

T = TypeVar("T")

MAX_JSON_BYTES = 1 << 20
MAX_NESTING = 16
MAX_SHOWN = 4
"""Most numbers of a list that a message shows."""
Rule = tuple[Any, ...]
"""How a value is read: a function of a section and a key, as Section's methods are, and further arguments."""
_STRING_OR_BRACKET = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)


def parse_json(data: bytes, where: str) -> Any:
    """The JSON value in `data` (UTF-8). Raises BundleError, naming `where`, if it isn't acceptable."""
    if len(data) > MAX_JSON_BYTES:
        raise BundleError(f"{where} has {len(data)} bytes; the limit is {MAX_JSON_BYTES}")
    # Fewer brackets can't nest deeper. Matching each takes longer than parsing a message between ranks.
    may_nest = data.count(b"[") + data.count(b"{") > MAX_NESTING
    depth = 0
    for match in _STRING_OR_BRACKET.finditer(data) if may_nest else ():
        depth += {b"[": 1, b"{": 1, b"]": -1, b"}": -1}.get(match.group(), 0)
        if depth > MAX_NESTING:
            raise BundleError(f"{where} nests deeper than {MAX_NESTING} levels at byte {match.start()}")
    try:
        return json.loads(
            data.decode("utf-8"),
            object_pairs_hook=unique_keys,
            parse_constant=_refuse_constant,
            parse_float=_finite,
        )
    except ValueError as error:
        raise BundleError(f"{where} isn't valid JSON: {json_fault(error)}") from error


def canonical_json(value: object) -> bytes:
    """The canonical text for hashing: sorted keys, no spaces, ASCII, shortest floats."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of `pairs`, an `object_pairs_hook` of json. Raises ValueError for a repeated key."""
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("an object has the same key twice")
    return result


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is not a finite number")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


class Section:
    """One JSON object, read field by field. `close` refuses keys that weren't read."""

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, dict):
            raise BundleError(f"{where} must be an object, not {_shown(value)}")
        self._values: dict[str, Any] = value
        self._unread = set(value)
        self.where = where

    @property
    def names(self) -> tuple[str, ...]:
        """The keys, in the file's order."""
        return tuple(self._values)

    def get(self, key: str) -> Any:
        """The raw value. Raises BundleError if the key is missing."""
        if key not in self._values:
            raise BundleError(f"{self.where} lacks {key!r}")
        self._unread.discard(key)
        return self._values[key]

    def section(self, key: str) -> Section:
        return Section(self.get(key), f"{self.where}.{key}")

    def nullable(self, key: str, read: Callable[..., T], *limits: Any) -> T | None:
        """A value that `read`, a method of Section, reads; None for null."""
        return None if self.get(key) is None else read(self, key, *limits)

    def integer(self, key: str, low: int, high: int) -> int:
        return self._integer(self.get(key), key, low, high)

    def integers(self, key: str, most: int, low: int, high: int) -> tuple[int, ...]:
        """A list of at most `most` integers from `low` to `high`."""
        return tuple(self._integer(value, key, low, high) for value in self._list(key, most))

    def number(self, key: str, low: float, high: float) -> float:
        """A finite number from `low` to `high`."""
        return self._number(self.get(key), key, low, high)

    def numbers(self, key: str, most: int, low: float, high: float) -> tuple[float, ...]:
        """A list of at most `most` finite numbers from `low` to `high`."""
        return tuple(self._number(value, key, low, high) for value in self._list(key, most))

    def sections(self, key: str, most: int) -> tuple[Section, ...]:
        """A list of at most `most` objects."""
        return tuple(
            Section(value, f"{self.where}.{key}[{index}]")
            for index, value in enumerate(self._list(key, most))
        )

    def entry(self, key: str, kind: type[T], rules: Mapping[str, Rule]) -> T:
        """An object, parsed as the dataclass `kind`. rules: the rules of `values`."""
        return kind(**self.section(key).values(rules))

    def entries(self, key: str, most: int, kind: type[T], rules: Mapping[str, Rule]) -> tuple[T, ...]:
        """A list of at most `most` objects, each parsed as the dataclass `kind`. rules: the rules of
        `values`.
        """
        return tuple(kind(**section.values(rules)) for section in self.sections(key, most))

    def boolean(self, key: str) -> bool:
        value = self.get(key)
        if type(value) is not bool:
            self._refuse(key, value, "true or false")
        return bool(value)

    def text(self, key: str, most: int) -> str:
        """A printable string of 1 to `most` characters."""
        return self._text(self.get(key), key, most)

    def one_of(self, key: str, allowed: Sequence[str]) -> str:
        """One of the strings `allowed`."""
        value = self.get(key)
        if value not in allowed:
            self._refuse(key, value, f"one of {', '.join(allowed)}")
        return str(value)

    def texts(self, key: str, count: int, most: int) -> tuple[str, ...]:
        """A list of at most `count` printable strings of 1 to `most` characters."""
        return tuple(self._text(value, key, most) for value in self._list(key, count))

    def equal(self, key: str, expected: object) -> None:
        """Require that the value is exactly the JSON value `expected`. For an object, the error names the
        wrong field.
        """
        value = self.get(key)
        if canonical_json(value) == canonical_json(expected):
            return
        if isinstance(value, dict) and isinstance(expected, Mapping):
            section = self.section(key)
            for name in expected:
                section.equal(name, expected[name])
            section.close()
        self._refuse(key, value, _shown(expected))

    def values(
        self, required: Mapping[str, Rule], optional: Mapping[str, Rule] | None = None
    ) -> dict[str, Any]:
        """All values by key, each read by the rule for its key. Other keys are refused; `optional` ones may
        be missing.
        """
        given = {key: rule for key, rule in (optional or {}).items() if key in self._values}
        values = {key: read(self, key, *limits) for key, (read, *limits) in {**required, **given}.items()}
        self.close()
        return values

    def close(self) -> None:
        if self._unread:
            raise BundleError(f"{self.where} has an unknown key {min(self._unread)!r}")

    def _list(self, key: str, most: int) -> list[Any]:
        value = self.get(key)
        if not isinstance(value, list) or len(value) > most:
            self._refuse(key, value, f"a list of at most {most} values")
        return list(value)

    def _integer(self, value: object, key: str, low: int, high: int) -> int:
        if type(value) is not int or not low <= value <= high:
            self._refuse(key, value, f"an integer from {low} to {high}")
        return value

    def _number(self, value: Any, key: str, low: float, high: float) -> float:
        if type(value) not in (int, float) or not low <= value <= high:
            self._refuse(key, value, f"a number from {low} to {high}")
        return float(value)

    def _text(self, value: object, key: str, most: int) -> str:
        if not isinstance(value, str) or not 1 <= len(value) <= most or not value.isprintable():
            self._refuse(key, value, f"printable text of 1 to {most} characters")
        return value

    def _refuse(self, key: str, value: object, wanted: str) -> NoReturn:
        raise BundleError(f"{self.where}.{key} is {_shown(value)}; it must be {wanted}")


def _shown(value: object) -> str:
    """`value` as a short piece of ASCII for a message."""
    if isinstance(value, list) and len(value) <= MAX_SHOWN and set(map(type, value)) <= {int, bool}:
        return f"[{', '.join(map(_shown, value))}]"
    if isinstance(value, Mapping | list):
        return f"{'an object' if isinstance(value, Mapping) else 'a list'} of {len(value)}"
    if isinstance(value, int) and value.bit_length() > 128:
        return "a huge integer"
    text = ascii(value)
    return text if len(text) <= 80 else text[:77] + "..."
