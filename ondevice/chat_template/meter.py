"""Limits the work and the time of one rendering of a chat template.

The unit of work is one character or element made, or one loop iteration or call. Everything that a rendering
makes is charged, so the limit bounds its memory as well as its time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import jinja2

from ondevice.chat_template.given_text import GivenText, given

_MAX_ELEMENTS = 1 << 20
_DATA = (str, bool, int, float, type(None), jinja2.Undefined)
"""Types that a template may print, alone or in containers; other values could print without bounds."""


class TemplateLimit(jinja2.TemplateError):
    """Raised when a template exceeds the meter's limits or uses an operation that isn't allowed."""


class MessagesRefused(jinja2.TemplateError):
    """Raised when the template itself calls `raise_exception`, because it doesn't accept the messages."""


class TemplateMeter:
    """Counts down the units of work and the seconds that are left, and knows the sizes of containers made so
    far.
    """

    def __init__(self, units: int, seconds: float) -> None:
        self._units = self._left = units
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        self._sizes: dict[int, tuple[object, int]] = {}

    def charge(self, units: int, what: str = "work") -> None:
        """Charges `units`. Raises TemplateLimit, naming `what`, if the units or the time are used up."""
        self._left -= max(0, units)
        if self._left < 0:
            raise TemplateLimit(f"it makes too much {what}: the limit is {self._units} characters or steps")
        if time.monotonic() > self._deadline:
            raise TemplateLimit(f"it runs for more than {self._seconds:g} seconds")

    def elements(self, value: object) -> int:
        """Number of elements in a container, including nested ones; shared parts count each time they occur.

        Sizes are cached by identity, so a container of containers costs only its length. The number is
        bounded, because the time to compare or print a value is proportional to it.
        """
        if not isinstance(value, list | tuple | dict):
            return 1
        known = self._sizes.get(id(value))
        if known is not None:
            return known[1]
        inner = [*value, *value.values()] if isinstance(value, dict) else value
        # 16 for the container itself, which stays cached until the end.
        self.charge(16 + len(inner), "list elements")
        size = 1 + sum(map(self.elements, inner))
        if size > _MAX_ELEMENTS:
            raise TemplateLimit(f"it nests lists to {size} elements; the limit is {_MAX_ELEMENTS}")
        self._sizes[id(value)] = (value, size)
        return size

    def text(self, value: object) -> str:
        """`value` as printed. Raises TemplateLimit if it isn't plain data, because then its printed length is
        unknown.
        """
        if isinstance(value, list | tuple | dict):
            has_given = self._charge_printed(value)
            return given(str(value)) if has_given else str(value)
        if not isinstance(value, _DATA):
            raise _unprintable(value)
        text = str(value)
        self.charge(len(text), "text")
        return text

    def json(
        self,
        value: object,
        indent: int | None = None,
        ensure_ascii: bool = False,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """`value` as JSON: the filter `tojson` as in `transformers`, with nothing escaped for HTML."""
        if indent is not None and not 0 <= indent <= 16:
            raise TemplateLimit(f"it indents JSON by {indent}; the limit is 16")

        def dumps(part: object, indent: int | None = None) -> str:
            return json.dumps(
                part, indent=indent, ensure_ascii=ensure_ascii, separators=separators, sort_keys=sort_keys
            )

        has_given = self._charge_printed(value, dumps, 4 + sum(map(len, separators or ())), indent or 0)
        return given(dumps(value, indent)) if has_given else dumps(value, indent)

    def _charge_printed(
        self, value: object, printed: Callable[[object], str] = repr, between: int = 4, indent: int = 0
    ) -> bool:
        """Charge the text that printing `value` makes, before it is made. Returns True if any part of it was
        given.

        printed: prints a value without elements. between: characters around each value. indent: additional
        characters per level.
        """
        self.elements(value)
        has_given, pending = False, [(value, 0)]
        while pending:
            item, depth = pending.pop()
            # A container's end stands on a line of its own too.
            self.charge(between + 2 * indent * depth, "text")
            if isinstance(item, dict):
                pending += [(part, depth + 1) for pair in item.items() for part in pair]
            elif isinstance(item, list | tuple):
                pending += [(part, depth + 1) for part in item]
            elif isinstance(item, str):
                has_given |= isinstance(item, GivenText)
                self.charge(len(item), "text")
                self.charge(len(printed(item)) - len(item), "text")
            elif isinstance(item, _DATA):
                self.charge(len(printed(item)), "text")
            else:
                raise _unprintable(item)
        return has_given


def _unprintable(value: object) -> TemplateLimit:
    return TemplateLimit(f"it prints a {type(value).__name__}")
