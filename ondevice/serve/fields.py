"""Reads a request's JSON within bounds: each field once, with its type. Other fields are ignored.

Names of ignored fields are collected for the log; a strict server refuses them. Every error names the field
by its path, such as `messages[2].content`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from ondevice.errors import json_fault
from ondevice.serve.config import MAX_DEPTH, MAX_VALUES
from ondevice.serve.errors import RequestError

# Also matches a string that the body's end cuts off: a failed match would begin anew at every quote.
_STRING = re.compile(rb'"[^"\\]*(?:\\(?:.|\Z)[^"\\]*)*(?:"|\Z)', re.DOTALL)
_BRACKET = re.compile(rb"[\[\]{}]")
_INDEX = re.compile(r"\[\d+\]")
MAX_IGNORED = 1000
"""Most names of ignored fields that are collected for a request."""
SHOWN_CHARS = 100
"""Most characters of a client's name for a field that an error or the log shows."""


class Ignored:
    """Names of a request's ignored fields, each once.

    strict: whether ignored fields are errors instead. tell: takes the names once the request has been read.
    """

    def __init__(self, strict: bool = False, tell: Callable[[Sequence[str]], None] | None = None) -> None:
        self._strict = strict
        self._tell = tell
        self._names: dict[str, None] = {}

    @property
    def names(self) -> list[str]:
        """The names, in the order in which they were added."""
        return list(self._names)

    def add(self, full: str, name: str, why: str) -> None:
        """Record that the field `full` is ignored. Raises RequestError if the server is strict.

        name: the field's name in the log. why: the words after the field's name in the error.
        """
        if self._strict:
            shown = full[:SHOWN_CHARS]
            raise RequestError(400, f"{shown} {why}", field=shown, code="unsupported_parameter")
        if len(self._names) < MAX_IGNORED:
            self._names[name[:SHOWN_CHARS]] = None

    def tell(self) -> None:
        """Pass the recorded names on, if there are any."""
        if self._names and self._tell is not None:
            self._tell(self.names)


def parse_object(data: bytes, ignored: Ignored | None = None) -> Fields:
    """The JSON object in a body. Raises RequestError if it is anything else, too large or too deeply nested.

    ignored: collects ignored fields.
    """
    _check_shape(data)
    try:
        value = json.loads(data.decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"the body is not JSON in UTF-8: {json_fault(error)}") from error
    if not isinstance(value, dict):
        raise RequestError(400, "the body must be a JSON object")
    return Fields(value, ignored=ignored)


def _check_shape(data: bytes) -> None:
    """Check the number of values and their depth, by counting brackets and commas outside strings. Raises
    RequestError.
    """
    bare = _STRING.sub(b"", data)
    values = bare.count(b",") + bare.count(b"[") + bare.count(b"{")
    if values > MAX_VALUES:
        raise RequestError(400, f"the body has more than {MAX_VALUES} JSON values")
    depth = 0
    for bracket in _BRACKET.finditer(bare):
        depth += 1 if bracket[0] in b"[{" else -1
        if depth > MAX_DEPTH:
            raise RequestError(400, f"the body's JSON is nested more than {MAX_DEPTH} deep")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


class Fields:
    """The fields of one JSON object. Each is taken once; `close` ignores those that are left.

    A field that is null counts as absent, because clients send null for fields that aren't set.
    """

    def __init__(self, value: Any, path: str = "", ignored: Ignored | None = None) -> None:
        self.path = path
        self.ignored = ignored or Ignored()
        if not isinstance(value, dict):
            self._refuse(path or "body", value, "an object")
        self._left: dict[str, Any] = dict(value)

    def inner(self, value: Any, name: str) -> Fields:
        """The fields of an object inside this one. name: the object's name in this one, such as
        `content[2]`.
        """
        return Fields(value, self.full(name), self.ignored)

    def names(self) -> list[str]:
        """The names of the fields that haven't been taken."""
        return list(self._left)

    def take(self, name: str) -> Any:
        """Take a field's value of any type; None if it is absent."""
        return self._left.pop(name, None)

    def peek(self, name: str) -> Any:
        """A field's value of any type, without taking the field; None if it is absent."""
        return self._left.get(name)

    def text(self, name: str, default: str | None = None) -> str | None:
        value = self._typed(name, str, "a string")
        return default if value is None else value

    def required_text(self, name: str) -> str:
        value = self.text(name)
        if value is None:
            raise RequestError(400, f"{self.full(name)} is missing", field=self.full(name))
        return value

    def boolean(self, name: str, default: bool = False) -> bool:
        value = self._typed(name, bool, "true or false")
        return default if value is None else value

    def integer(self, name: str, least: int, most: int, also: str = "") -> int | None:
        """Take an integer within a range. also: other values that the caller accepts, for the
        error message.
        """
        value = self.take(name)
        # 5.0 is an integer in JSON.
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        wanted = f"an integer from {least} to {most}" + (f", or {also}" if also else "")
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            self._refuse(self.full(name), value, wanted)
        if value is not None and not least <= value <= most:
            self._refuse(self.full(name), value, wanted)
        return value

    def number(self, name: str, least: float, most: float) -> float | None:
        value = self.take(name)
        wanted = f"a number from {least:g} to {most:g}"
        if value is not None and (not isinstance(value, int | float) or isinstance(value, bool)):
            self._refuse(self.full(name), value, wanted)
        if value is not None and not least <= value <= most:
            self._refuse(self.full(name), value, wanted)
        return None if value is None else float(value)

    def strings(self, name: str, most: int, most_chars: int) -> tuple[str, ...] | None:
        """Take a string, or a list of at most `most` strings. None of them may be empty."""
        value = self.take(name)
        texts = [value] if isinstance(value, str) else value
        wanted = f"a string or a list of at most {most}, each of 1 to {most_chars} characters"
        if texts is None:
            return None
        if not isinstance(texts, list) or len(texts) > most:
            self._refuse(self.full(name), value, wanted)
        if not all(isinstance(it, str) and 0 < len(it) <= most_chars for it in texts):
            self._refuse(self.full(name), value, wanted)
        return tuple(texts)

    def object(self, name: str) -> Fields | None:
        value = self.take(name)
        return None if value is None else self.inner(value, name)

    def objects(self, name: str) -> Iterator[Fields]:
        """Take the objects of a list, which must be there."""
        value = self.take(name)
        if not isinstance(value, list):
            self._refuse(self.full(name), value, "a list of objects")
        return (self.inner(item, f"{name}[{at}]") for at, item in enumerate(value))

    def neutral(self, name: str, *values: Any, why: str = "this server doesn't support it") -> None:
        """Take a field that isn't supported. Raises RequestError unless it is null or one of `values`."""
        value = self._left.pop(name, None)
        if value is not None and not any(type(it) is type(value) and it == value for it in values):
            allowed = ", ".join(dict.fromkeys(json.dumps(it) for it in (None, *values)))
            full = self.full(name)
            raise RequestError(
                400,
                f"{full} can only be {allowed}: {why}",
                field=full,
                code="unsupported_parameter",
            )

    def ignore(self, *names: str) -> None:
        """Drop fields that make no difference to this server."""
        for name in names:
            self._left.pop(name, None)

    def leave_out(
        self, name: str, what: str = "", why: str = "is not a field that this server knows"
    ) -> None:
        """Ignore a field. It is logged as `what`, by default its path.

        Raises RequestError if the server is strict. why: the words after the field's path in the error.
        """
        full = self.full(name)
        self.ignored.add(full, what or _INDEX.sub("[]", full), why)
        self._left.pop(name, None)

    def close(self) -> None:
        """Ignore the fields that haven't been taken. For a request's body, also pass on the names of all
        ignored fields.

        Raises RequestError if fields are left and the server is strict.
        """
        for name, value in list(self._left.items()):
            if value is not None:
                self.leave_out(name)
        if not self.path:
            self.ignored.tell()

    def full(self, name: str) -> str:
        """A field's name with the path to it."""
        return f"{self.path}.{name}" if self.path else name

    def refuse(self, name: str, message: str) -> NoReturn:
        """Raise RequestError about a field."""
        full = self.full(name)
        raise RequestError(400, f"{full} {message}", field=full)

    def _typed(self, name: str, kind: type, wanted: str) -> Any:
        value = self.take(name)
        if value is not None and not isinstance(value, kind):
            self._refuse(self.full(name), value, wanted)
        return value

    @staticmethod
    def _refuse(full: str, value: Any, wanted: str) -> NoReturn:
        shown = "missing" if value is None else _shown(value)
        raise RequestError(400, f"{full} is {shown}; it must be {wanted}", field=full, code="invalid_value")


def _shown(value: Any) -> str:
    """A value in the words of an error message: lists and objects by their type, others cut short."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
