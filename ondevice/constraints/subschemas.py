"""Finds the schemas inside a JSON schema, and follows its references."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

SINGLE = (
    "additionalItems",
    "additionalProperties",
    "contains",
    "else",
    "if",
    "items",
    "not",
    "propertyNames",
)
SEVERAL = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
NAMED = ("$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties")
_SINGLE = (*SINGLE, "then", "unevaluatedItems", "unevaluatedProperties")


def with_subschemas(schema: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """A copy of a schema with `change` applied to each direct subschema."""
    copy = dict(schema)
    for key in _SINGLE:
        if isinstance(copy.get(key), dict | bool):
            copy[key] = change(copy[key])
    for key in SEVERAL:
        if isinstance(copy.get(key), list):
            copy[key] = [change(each) for each in copy[key]]
    for key in NAMED:
        if isinstance(copy.get(key), dict):
            copy[key] = {name: change(each) for name, each in copy[key].items()}
    return copy


def walked(schema: Any) -> Iterator[dict[str, Any]]:
    """Yields a schema and all schemas in it, except booleans. References aren't followed."""
    if isinstance(schema, dict):
        yield schema
        inner: list[Any] = []
        with_subschemas(schema, inner.append)
        for each in inner:
            yield from walked(each)


def referred(pointer: Any, root: Any) -> Any:
    """The schema that a reference within the document points to; None if there is none."""
    # Anchors and other documents aren't looked into.
    if not isinstance(pointer, str) or not (pointer == "#" or pointer.startswith("#/")) or "%" in pointer:
        return None
    target = root
    for part in pointer.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(target, list) and name.isdecimal() and int(name[:9]) < len(target):
            target = target[int(name[:9])]
        elif isinstance(target, dict) and name in target:
            target = target[name]
        else:
            return None
    return target
