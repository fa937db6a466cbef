"""Makes the branches of a `oneOf` exclude one another, so that it can become an `anyOf`.

llguidance has no `oneOf`. So each branch is narrowed until it provably shares no value with any other
original branch: by types, by a property that tells them apart (`"kind": {"const": "circle"}`), or by a
property that one requires and the other then forbids. So exactly one of the original branches allows each
value that the narrowed branches allow.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ondevice.constraints.subschemas import referred
from ondevice.records import dataclass

TYPES = frozenset(("null", "boolean", "object", "array", "string", "integer", "fraction"))
"""JSON's types, disjoint: numbers are integers or fractions."""
MAX_BRANCHES = 32
MAX_DEPTH = 6
"""Deepest nesting of references and properties that is examined."""


@dataclass(frozen=True)
class _Facts:
    """Facts that hold for every value that a branch allows. Further facts may hold that aren't recorded."""

    types: frozenset[str] = TYPES
    values: tuple[Any, ...] | None = None
    """The only values, if they are listed."""
    required: frozenset[str] = frozenset()
    properties: tuple[tuple[str, Any], ...] = ()
    closed: bool = False
    """Whether objects have no other properties."""

    def schema_of(self, name: str) -> Any:
        """The schema of a property: False if the property isn't allowed, True if nothing is known
        about it.
        """
        return dict(self.properties).get(name, not self.closed)


def exclusive(branches: list[Any], root: Any) -> list[Any] | None:
    """The branches, narrowed so that each excludes all others; None if that can't be proven.

    root: the complete schema, into which references point.
    """
    if len(branches) > MAX_BRANCHES:
        return None
    facts = [_facts(branch, root, 0) for branch in branches]
    narrowed = []
    for index, branch in enumerate(branches):
        narrowed_facts = facts[index]
        for other in facts[:index] + facts[index + 1 :]:
            apart = _apart(narrowed_facts, other, root)
            if apart is None:
                return None
            narrowed_facts = apart
        narrowed.append(_narrowed(branch, facts[index], narrowed_facts))
    return narrowed


def _apart(facts: _Facts, other: _Facts, root: Any) -> _Facts | None:
    """`facts`, narrowed to exclude `other`; None if no way is known."""
    if _exclude(facts, other, root, 0):
        return facts
    shared = facts.types & other.types
    if not shared <= {"object"}:
        left = facts.types - (shared - {"object"})
        if "integer" not in left:
            left -= {"fraction"}  # Schemas have no type for what isn't whole.
        if not left or facts.types != TYPES:
            return None
        facts = replace(facts, types=left)
        if _exclude(facts, other, root, 0):
            return facts
    for name, schema in facts.properties:
        if schema is False:
            continue
        tags = _facts(schema, root, 1), _facts(other.schema_of(name), root, 1)
        if _exclude(*tags, root, 1):
            return replace(facts, required=facts.required | {name})
    for name in sorted(other.required - facts.required):
        properties = dict(facts.properties) | {name: False}
        return replace(facts, properties=tuple(properties.items()))
    return None


def _exclude(one: _Facts, other: _Facts, root: Any, depth: int) -> bool:
    """Whether no value can satisfy the facts of both."""
    shared = one.types & other.types
    if not shared:
        return True
    if one.values is not None and other.values is not None:
        return not any(_equal(value, another) for value in one.values for another in other.values)
    if shared != {"object"} or depth > MAX_DEPTH:
        return False
    for name in one.required | other.required:
        schemas = one.schema_of(name), other.schema_of(name)
        if False in [schema for schema in schemas if isinstance(schema, bool)]:
            return True
        inner = [_facts(schema, root, depth + 1) for schema in schemas]
        if _exclude(inner[0], inner[1], root, depth + 1):
            return True
    return False


def _facts(schema: Any, root: Any, depth: int) -> _Facts:
    """The facts about a schema's values, including those from references and `allOf`.

    If the schema has a reference, keywords next to it are ignored, as before draft 2019-09.
    """
    if schema is False:
        return _Facts(types=frozenset())
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return _Facts()
    if "$ref" in schema:
        return _facts(referred(schema["$ref"], root), root, depth + 1)
    facts, parts = _facts_of_keywords(schema), schema.get("allOf")
    for part in parts if isinstance(parts, list) else ():
        facts = _both(facts, _facts(part, root, depth + 1))
    return facts


def _facts_of_keywords(schema: dict[str, Any]) -> _Facts:
    types, values = TYPES, None
    given = schema.get("type")
    if given is not None:
        types = _types(given if isinstance(given, list) else [given])
    if "const" in schema:
        values = (schema["const"],)
    elif isinstance(schema.get("enum"), list):
        values = tuple(schema["enum"])
    if values is not None:
        types &= frozenset(map(_type_of, values))
    required, properties = schema.get("required"), schema.get("properties")
    names = required if isinstance(required, list) else []
    return _Facts(
        types,
        values,
        frozenset(name for name in names if isinstance(name, str)),
        tuple(properties.items()) if isinstance(properties, dict) else (),
        schema.get("additionalProperties") is False and not schema.get("patternProperties"),
    )


def _both(one: _Facts, other: _Facts) -> _Facts:
    """The facts about values that satisfy both. If both know a schema of a property, one of the
    two is kept.
    """
    return _Facts(
        one.types & other.types,
        other.values if one.values is None else one.values,
        one.required | other.required,
        tuple((dict(other.properties) | dict(one.properties)).items()),
        # Each closes itself alone: names that only the other has aren't allowed, which is left unused.
        one.closed and other.closed,
    )


def _types(names: Iterable[Any]) -> frozenset[str]:
    types = {name for name in names if isinstance(name, str)}
    if "number" in types:
        types |= {"integer", "fraction"}
    return frozenset(types) & TYPES


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return "integer"
    kinds = {dict: "object", list: "array", str: "string", float: "fraction"}
    return kinds.get(type(value), "null")


def _equal(one: Any, other: Any) -> bool:
    """Whether two values are equal in JSON, where true and 1 differ. Containers compare as in Python."""
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def _narrowed(branch: Any, given: _Facts, narrowed: _Facts) -> Any:
    """A branch with additional keywords that narrow it from the facts `given` to the facts `narrowed`."""
    more: dict[str, Any] = {}
    if narrowed.types != given.types:
        more["type"] = sorted({"fraction": "number"}.get(name, name) for name in narrowed.types)
    if narrowed.properties != given.properties:
        before = dict(given.properties)
        more["properties"] = {name: it for name, it in narrowed.properties if before.get(name, True) != it}
    if narrowed.required != given.required:
        more["required"] = sorted(narrowed.required - given.required)
    return {"allOf": [branch, more]} if more else branch
