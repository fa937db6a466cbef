"""Where schemas stand in a JSON schema, and its references."""

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
    """A copy of a schema in which each schema that it consists of is changed."""
    found = dict(schema)
    for key in _SINGLE:
        if isinstance(found.get(key), dict | bool):
            found[key] = change(found[key])
    for key in SEVERAL:
        if isinstance(found.get(key), list):
            found[key] = [change(each) for each in found[key]]
    for key in NAMED:
        if isinstance(found.get(key), dict):
            found[key] = {name: change(each) for name, each in found[key].items()}
    return found


def walked(schema: Any) -> Iterator[dict[str, Any]]:
    """A schema and all schemas in it, but for those that are bools. References aren't followed."""
    if isinstance(schema, dict):
        yield schema
        inner: list[Any] = []
        with_subschemas(schema, inner.append)
        for each in inner:
            yield from walked(each)


def referred(pointer: Any, root: Any) -> Any:
    """The schema that a reference within the document leads to; None if there is none."""
    # Anchors and other documents aren't looked into.
    if not isinstance(pointer, str) or not (pointer == "#" or pointer.startswith("#/")) or "%" in pointer:
        return None
    found = root
    for part in pointer.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and int(name[:9]) < len(found):
            found = found[int(name[:9])]
        elif isinstance(found, dict) and name in found:
            found = found[name]
        else:
            return None
    return found
