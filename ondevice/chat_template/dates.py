"""`strftime_now` for templates: formats a day, with a clock that stands at midnight."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import date

_DIRECTIVE = re.compile(r"%(-?.?)", re.DOTALL)
_WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October",
    "November", "December",
)  # fmt: skip


def written_by(day: date) -> Callable[[str], str]:
    """A function `strftime_now` for a fixed day: Python's directives except time zones, always in English."""
    month, weekday = _MONTHS[day.month - 1], _WEEKDAYS[day.weekday()]
    since_first = day.timetuple().tm_yday
    parts = {
        "Y": f"{day.year:04}",
        "m": f"{day.month:02}",
        "d": f"{day.day:02}",
        "-d": f"{day.day}",
        "B": month,
        "b": month[:3],
        "h": month[:3],
        "y": f"{day.year % 100:02}",
        "-m": f"{day.month}",
        "e": f"{day.day:2}",
        "j": f"{since_first:03}",
        "-j": f"{since_first}",
        "A": weekday,
        "a": weekday[:3],
        "u": f"{day.isoweekday()}",
        "w": f"{day.isoweekday() % 7}",
        "F": day.isoformat(),
        "H": "00",
        "-H": "0",
        "I": "12",
        "-I": "12",
        "M": "00",
        "-M": "0",
        "S": "00",
        "-S": "0",
        "p": "AM",
        "T": "00:00:00",
        "Z": "",
        "z": "",
        "%": "%",
    }

    def written(form: str) -> str:
        if not isinstance(form, str):
            raise TypeError(f"strftime_now takes a form of dates, not {type(form).__name__}")
        unknown = [directive for directive in _DIRECTIVE.findall(form) if directive not in parts]
        if unknown:
            raise ValueError(f"strftime_now knows no %{unknown[0]}; it knows %{', %'.join(parts)}")
        return _DIRECTIVE.sub(lambda match: parts[match[1]], form)

    return written
