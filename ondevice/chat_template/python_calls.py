"""Reads calls that are written as Python writes them, such as `[weather(city="Oslo", days=3), now()]`."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from typing import Any

from ondevice.chat_template.tools import MAX_DEPTH, NAME_CHARS

MAX_NUMBER_CHARS = 512
_SPACES = re.compile(r"\s*")
_NAME = re.compile(rf"[A-Za-z_][\w.-]{{0,{NAME_CHARS}}}", re.ASCII)
_KEY = re.compile(r"([A-Za-z_]\w{0,127})\s*=(?!=)", re.ASCII)
_NUMBER = re.compile(r"[-+]?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?", re.ASCII)
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"|' r"'(?:[^'\\]|\\.)*'", re.DOTALL)
_WORDS: dict[str, Any] = {
    **{"True": True, "False": False, "None": None},
    **{"true": True, "false": False, "null": None},
}
_METHOD = ".call"
"""The method that Llama calls on a tool that it was trained with."""

PythonCall = tuple[str, list[Any], dict[str, Any]]
"""A function's name, and its arguments by position and by name."""


class UnfinishedError(ValueError):
    """Raised if the text ends before the calls do."""


class _CallReader:
    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def calls(self) -> list[PythonCall]:
        """All calls of the text, with brackets around them or without. Raises ValueError."""
        listed = self.took("[")
        calls = [self.call()]
        while self.took(",") or self.took(";") or not self.ends():
            if self.ends() or self.peek() == "]":
                break
            calls.append(self.call())
        if listed and not self.took("]"):
            raise self.wrong()
        if not self.ends():
            raise self.wrong()
        return calls

    def call(self) -> PythonCall:
        name = self.match(_NAME)[0].removesuffix(_METHOD)
        self.require("(")
        values: list[Any] = []
        named: dict[str, Any] = {}
        while not self.took(")"):
            self.skip()
            key = _KEY.match(self.text, self.at)
            if key is not None:
                self.at = key.end()
                named[key[1]] = self.value(0)
            else:
                values.append(self.value(0))
            if self.peek() != ")":
                self.require(",")
        return name, values, named

    def value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ValueError("nested too deep")
        sign = self.peek()
        if sign in ("'", '"'):
            return self.string()
        if sign == "[" or sign == "(":
            return self.items("]" if sign == "[" else ")", lambda: self.value(depth + 1))
        if sign == "{":
            return dict(self.items("}", lambda: self.pair(depth + 1)))
        if sign.isalpha():
            word = self.match(_NAME)[0]
            if word not in _WORDS:
                raise UnfinishedError if self.ends() else self.wrong()
            return _WORDS[word]
        number = self.match(_NUMBER)[0]
        if len(number) > MAX_NUMBER_CHARS:
            raise ValueError("a number has too many digits")
        return int(number) if number.lstrip("+-").isdigit() else float(number)

    def items(self, closes: str, read: Callable[[], Any]) -> list[Any]:
        self.at += 1
        values = []
        while not self.took(closes):
            values.append(read())
            if self.peek() != closes:
                self.require(",")
        return values

    def pair(self, depth: int) -> tuple[str, Any]:
        if self.peek() not in ("'", '"'):
            raise self.wrong()
        key = self.string()
        self.require(":")
        return key, self.value(depth)

    def string(self) -> str:
        match = _STRING.match(self.text, self.at)
        if match is None:
            raise UnfinishedError
        self.at = match.end()
        value: str = ast.literal_eval(match[0].replace("\r", "\\r").replace("\n", "\\n"))
        return value

    def match(self, pattern: re.Pattern[str]) -> re.Match[str]:
        self.skip()
        match = pattern.match(self.text, self.at)
        if match is None:
            raise self.wrong()
        self.at = match.end()
        return match

    def skip(self) -> None:
        match = _SPACES.match(self.text, self.at)
        self.at = self.at if match is None else match.end()

    def peek(self) -> str:
        """The next non-space character. Raises UnfinishedError if there is none."""
        if self.ends():
            raise UnfinishedError
        return self.text[self.at]

    def took(self, sign: str) -> bool:
        self.skip()
        is_here = self.text.startswith(sign, self.at)
        self.at += len(sign) if is_here else 0
        return is_here

    def require(self, sign: str) -> None:
        if not self.took(sign):
            raise self.wrong()

    def ends(self) -> bool:
        self.skip()
        return self.at == len(self.text)

    def wrong(self) -> ValueError:
        return UnfinishedError() if self.ends() else ValueError(f"it is no call at {self.at}")


def read_python_calls(text: str) -> list[PythonCall] | None:
    """The calls that a text consists of; None if it is anything else."""
    try:
        return _CallReader(text).calls()
    except (ValueError, SyntaxError, RecursionError):
        return None


def ends_inside_calls(text: str) -> bool:
    """Whether a text begins with calls and ends before they do."""
    try:
        _CallReader(text).calls()
    except UnfinishedError:
        return True
    except (ValueError, SyntaxError, RecursionError):
        return False
    return False


def by_name(values: Sequence[Any], named: dict[str, Any], names: Sequence[str]) -> dict[str, Any] | None:
    """Arguments by name; None if there are more positional ones than names.

    names: the names of a function's arguments, in order.
    """
    if len(values) > len(names):
        return None
    return dict(zip(names, values, strict=False)) | named
