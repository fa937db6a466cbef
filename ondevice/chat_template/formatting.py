"""`str.format` and `%` for templates, limited to plain and narrow fields: a template can't reach attributes
or make huge texts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from string import Formatter
from typing import Any

from ondevice.chat_template.given_text import GivenText, concatenated, given_alike, made_of
from ondevice.chat_template.meter import TemplateLimit, TemplateMeter

MAX_WIDTH = 1000
"""Most characters and decimals of a field."""
_FIELD = re.compile(r"\d{0,3}|[A-Za-z_]\w*", re.ASCII)
_SPEC = re.compile(r"(?:.?[<>=^])?[-+ ]?#?0?(\d*)[,_]?(?:\.(\d+))?[a-zA-Z%]?", re.ASCII)
_DIRECTIVE = re.compile(r"%(?:\((\w+)\))?([-+ #0]*)(\d*)(?:\.(\d+))?(.?)", re.ASCII | re.DOTALL)
_KINDS = "sdifFeEgGxXoc"


def filled_in(form: str, values: Sequence[Any], named: Mapping[str, Any], meter: TemplateMeter) -> str:
    """`form.format(*values, **named)`, with its output charged to the meter.

    Raises TemplateLimit for wide fields, and for fields with attributes, items or conversions. Raises
    ValueError, LookupError and TypeError as `str.format` does.
    """
    parts: list[str] = []
    number = 0
    meter.charge(len(form), "text")
    for literal, field, spec, conversion in Formatter().parse(form):
        parts.append(literal)
        if field is None:
            continue
        if _FIELD.fullmatch(field) is None or conversion not in (None, "s"):
            raise TemplateLimit(f"str.format is given the field {{{field[:40]}}}; it takes plain names alone")
        if not field:
            field, number = str(number), number + 1
        value = values[int(field)] if field.isdigit() else named[field]
        parts.append(_charged(_with_spec(value, spec or "", meter), meter))
    return _made_of(form, parts)


def _with_spec(value: Any, spec: str, meter: TemplateMeter) -> str:
    if not spec:
        return meter.text(value)
    match = _SPEC.fullmatch(spec)
    if match is None or max(int(match[1] or 0), int(match[2] or 0)) > MAX_WIDTH:
        raise TemplateLimit(f"str.format is given the width {spec[:40]!r}; the limit is {MAX_WIDTH}")
    if not isinstance(value, str | int | float):
        value = meter.text(value)
    return given_alike(format(value, spec), value) if isinstance(value, str) else format(value, spec)


def percent_filled_in(form: str, values: Any, meter: TemplateMeter) -> str:
    """`form % values`, with its output charged to the meter.

    Raises TemplateLimit for wide fields, and ValueError, LookupError and TypeError as `%` does.
    """
    given_values = list(values) if isinstance(values, tuple) else [values]
    parts: list[str] = []
    at = used = 0
    meter.charge(len(form), "text")
    for match in _DIRECTIVE.finditer(form):
        parts.append(form[at : match.start()])
        at = match.end()
        name, flags, width, decimals, kind = match.groups()
        if kind == "%" and match[0] == "%%":
            parts.append("%")
            continue
        if not kind or kind not in _KINDS:
            raise ValueError(f"formatting with % knows no {match[0][:40]!r}; it knows {', '.join(_KINDS)}")
        if max(int(width or 0), int(decimals or 0)) > MAX_WIDTH:
            raise TemplateLimit(f"formatting with % is given {match[0][:40]!r}; the limit is {MAX_WIDTH}")
        if name is not None:
            value = values[name]
        elif used < len(given_values):
            value, used = given_values[used], used + 1
        else:
            raise TypeError("formatting with % has too few values")
        spec = flags + width + (f".{decimals}" if decimals else "")
        parts.append(_charged(_with_kind(value, kind, spec, meter), meter))
    parts.append(form[at:])
    if used < len(given_values) and not isinstance(values, Mapping):
        raise TypeError("formatting with % has too many values")
    return _made_of(form, parts)


def _with_kind(value: Any, kind: str, spec: str, meter: TemplateMeter) -> str:
    if kind != "s":
        made = f"%{spec}{kind}" % value
        return given_alike(made, value) if isinstance(value, str) else made
    text = meter.text(value)
    return given_alike(f"%{spec}s" % text, text) if spec else text


def _charged(part: str, meter: TemplateMeter) -> str:
    """The part itself, after charging its length. Parts are charged singly, since a short form may have many
    wide fields.
    """
    meter.charge(len(part), "text")
    return part


def _made_of(form: str, parts: Sequence[str]) -> str:
    """The parts joined to one text. All of it is marked as given if any part of the form is."""
    text = concatenated(parts)
    return made_of(text, form) if isinstance(form, GivenText) and form.spans else text
