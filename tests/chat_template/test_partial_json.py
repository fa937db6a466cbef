"""JSON followed while it is written, against Python's own parser."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ondevice.chat_template.partial_json import MAX_SCALAR_CHARS, JsonScan, ends_inside
from ondevice.chat_template.tools import MAX_DEPTH, parsed_object

VALID = (
    '{"a": [1, -2.5e+3, true, null, "x\\u00e9\\n"], "b": {"c": {}}}',
    ' {"": [[], {}, 0], "\\"": "é\\\\"}',
)
LETTERS = st.sampled_from('{}[]":,\\ u0123e.-+truefalsn\n')
EDITS = st.lists(st.tuples(st.integers(0, 60), st.sampled_from("rid"), LETTERS), max_size=3)


def scanned(text: str, step: int) -> tuple[bool, bool, int]:
    """Whether the value ended or broke, and where, in a text that comes in steps."""
    scan, at = JsonScan(), 0
    for end in [*range(step, len(text), step), len(text)]:
        at = scan.take(text[:end], at)
        if scan.ended or scan.broken:
            break
    return scan.ended, scan.broken, at


@given(text=st.sampled_from(VALID), edits=EDITS)
@settings(max_examples=200, deadline=None)
def test_a_text_reads_the_same_in_parts_and_as_python_reads_it(
    text: str, edits: list[tuple[int, str, str]]
) -> None:
    for place, kind, letter in edits:
        at = min(place, len(text) - 1)
        text = text[:at] + ("" if kind == "d" else letter) + text[at + (kind != "i") :]
    ended, broken, at = scanned(text, len(text))
    assert scanned(text, 1) == scanned(text, 3) == (ended, broken, at)
    assert not (ended and broken)
    if not text.lstrip().startswith("{"):
        return
    if parsed_object(text) is not None:
        assert ended
        assert not text[at:].strip()
    if ended:
        assert parsed_object(text[:at]) is not None


@pytest.mark.parametrize("text", VALID)
def test_every_beginning_of_a_value_is_open(text: str) -> None:
    assert all(ends_inside(text[:length]) for length in range(len(text)))
    assert not ends_inside(text)


def test_depth_and_long_numbers_break() -> None:
    deep = json.dumps([[]])
    for _ in range(MAX_DEPTH - 2):
        deep = f"[{deep}]"
    assert scanned(deep, 1)[:2] == (True, False)
    assert scanned(f"[{deep}]", 1)[:2] == (False, True)
    assert scanned("[" + "1" * (MAX_SCALAR_CHARS + 1), 7)[:2] == (False, True)
