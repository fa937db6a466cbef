"""Replies of a real model that a JSON schema constrains: each parses, and is valid."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("llguidance")
from ondevice import Constraint
from ondevice.api import Model, load

jsonschema = pytest.importorskip("jsonschema")

pytestmark = [pytest.mark.real, pytest.mark.slow]

MAX_TOKENS = 300
TEXT = {"type": "string", "minLength": 1, "maxLength": 60}
CITY = {
    "type": "object",
    "properties": {
        "name": TEXT,
        "country": TEXT,
        "inhabitants": {"type": "integer", "minimum": 1, "maximum": 50_000_000},
    },
    "required": ["name", "country", "inhabitants"],
    "additionalProperties": False,
}
LINE = {
    "type": "object",
    "properties": {"kind": {"const": "line"}, "length": {"type": "number", "exclusiveMinimum": 0}},
    "required": ["kind", "length"],
    "additionalProperties": False,
}
CIRCLE = LINE | {
    "properties": {"kind": {"const": "circle"}, "radius": {"type": "number", "exclusiveMinimum": 0}},
    "required": ["kind", "radius"],
}
TREE = {
    "type": "object",
    "properties": {
        "label": TEXT,
        "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2},
    },
    "required": ["label", "children"],
    "additionalProperties": False,
}
CASES: dict[str, tuple[str, Any]] = {
    "object": ("Describe the city of Oslo.", CITY),
    "array of objects": (
        "Name two cities of Italy.",
        {"type": "array", "items": CITY, "minItems": 2, "maxItems": 2},
    ),
    "enum and pattern": (
        "A task: fix the failing build before Friday 2026-11-27.",
        {
            "type": "object",
            "properties": {
                "priority": {"enum": ["low", "medium", "high"]},
                "due": {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}$"},
                "done": {"type": "boolean"},
            },
            "required": ["priority", "due", "done"],
            "additionalProperties": False,
        },
    ),
    "one of several": ("Describe a circle of radius 2.5.", {"anyOf": [LINE, CIRCLE]}),
    "recursive": (
        "Describe a family tree: Ann has the children Bob and Cid, who have none.",
        {"$defs": {"tree": TREE}, "$ref": "#/$defs/tree"},
    ),
}


@pytest.fixture(scope="module")
def coder(bundle_of: Any) -> Iterator[Model]:
    with load(bundle_of("qwen2.5-coder-1.5b")) as model:
        yield model


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 7}], ids=["greedy", "sampled"])
def test_replies_are_valid(coder: Model, case: str, sampling: dict[str, Any]) -> None:
    question, schema = CASES[case]
    constraint = Constraint.json_schema(schema)
    reply = coder.session("You answer in JSON.").respond(
        question, constraint=constraint, max_tokens=MAX_TOKENS, **sampling
    )
    assert reply.finish_reason == "stop", reply.text
    jsonschema.Draft202012Validator(schema).validate(json.loads(reply.text))
