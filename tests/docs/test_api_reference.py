"""docs/api.md: every public name and option stands in it, with its default, and nothing that isn't there."""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from typing import Any

import pytest

import ondevice
from ondevice.config import RuntimeConfig, SamplingConfig
from tests.support.paths import ROOT

TEXT = (ROOT / "docs/api.md").read_text(encoding="utf-8")
CODE = re.findall(r"`([^`\n]+)`", TEXT)


def section(title: str) -> str:
    return re.split(r"^## ", TEXT.split(f"## {title}\n")[1], maxsplit=1, flags=re.MULTILINE)[0]


def rows(title: str) -> dict[str, str]:
    """The second cell of a section's table by the names of the first, one by one."""
    found = {}
    for first, second in re.findall(r"^\| (`[^|]+) \| ([^|]+) \|", section(title), re.MULTILINE):
        names, values = re.findall(r"`(\w+)", first), second.split(", ")
        own = values if len(names) == len(values) else [second] * len(names)
        found |= {name: value.strip("` ") for name, value in zip(names, own, strict=True)}
    return found


def test_every_public_name_stands_in_it() -> None:
    named = {match for code in CODE for match in re.findall(r"\w+", code)}
    assert set(ondevice.__all__) - named == set()
    assert all(hasattr(ondevice, name) for name in ondevice.__all__)


@pytest.mark.parametrize(
    ("title", "config"), [("Options of `load`", RuntimeConfig), ("`SamplingConfig`", SamplingConfig)]
)
def test_every_option_stands_in_it_with_its_default(title: str, config: type) -> None:
    shown = {name: ast.literal_eval(value) for name, value in rows(title).items()}
    defaults: dict[str, Any] = {field.name: field.default for field in fields(config)}
    assert shown == defaults


@pytest.mark.parametrize(("title", "kind"), [("`Model`", ondevice.Model), ("`Session`", ondevice.Session)])
def test_members_that_it_names_are_there(title: str, kind: type) -> None:
    made = {"name", "config", "bundle", "runtime", "when_full", "dropped_turns"}
    named = set(rows(title))
    assert named - made - set(dir(kind)) == set()
    public = {name for name in vars(kind) if not name.startswith("_")}
    also = {"stream_response", "arespond", "astream_response"}
    assert public - also - named == set()
    assert all(name in section(title) for name in also & public)
