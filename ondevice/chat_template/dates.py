"""`strftime_now` for templates that call it without asking whether there is one."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import date

_DIRECTIVE = re.compile(r"%(-?.?)", re.DOTALL)
_MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October",
    "November", "December",
)  # fmt: skip


def written_by(day: date) -> Callable[[str], str]:
    """`strftime_now` of a day, by the directives that templates use, in English whatever the machine's
    language.
    """
    month = _MONTHS[day.month - 1]
    parts = {
        "Y": f"{day.year:04}",
        "m": f"{day.month:02}",
        "d": f"{day.day:02}",
        "-d": f"{day.day}",
        "B": month,
        "b": month[:3],
        "%": "%",
    }

    def written(form: str) -> str:
        if not isinstance(form, str):
            raise TypeError(f"strftime_now takes a form of dates, not {type(form).__name__}")
        unknown = [found for found in _DIRECTIVE.findall(form) if found not in parts]
        if unknown:
            raise ValueError(f"strftime_now knows no %{unknown[0]}; it knows %{', %'.join(parts)}")
        return _DIRECTIVE.sub(lambda match: parts[match[1]], form)

    return written
