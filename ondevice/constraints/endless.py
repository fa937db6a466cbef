"""Finds references in a JSON schema that no finite value satisfies, such as a list that must hold itself.

A text under the grammar of such a schema could never end. So those references become `false`, and a schema
that needs one is refused before a text begins.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from ondevice.constraints.subschemas import referred, walked, with_subschemas
from ondevice.errors import ConstraintError

MAX_VISITS = 300_000
"""Most schemas examined, one several times where references meet."""
_ENDLESS = ("object", "array")
"""Types whose values contain others."""


def without_endless(root: Any) -> Any:
    """The schema, with references that never end replaced by `false`.

    Raises ConstraintError, which names one, if the schema itself never ends because of them.
    """
    pointers = {each["$ref"] for each in walked(root) if isinstance(each.get("$ref"), str)}
    if not pointers:
        return root
    search = _Search(root, sorted(pointers))
    search.run()
    endless = pointers - search.ending
    if not endless:
        return root
    if not search.ends(root):
        raise ConstraintError(
            "the JSON schema can't be enforced, for its keyword $ref: every value has one of "
            f"{min(endless)[:80]!r} in it, which nothing satisfies or which comes back to itself without end",
            "$ref",
        )

    def replaced(schema: Any) -> Any:
        if not isinstance(schema, dict):
            return schema
        return False if schema.get("$ref") in endless else with_subschemas(schema, replaced)

    return replaced(root)


class _Search:
    """Computes which references of a schema can end, as a least fixed point."""

    def __init__(self, root: Any, pointers: list[str]) -> None:
        self.ending: set[str] = set()
        self._root, self._pointers, self._visits = root, pointers, 0

    def run(self) -> None:
        """Compute `ending`. Raises ConstraintError if that takes too long."""
        targets = {pointer: referred(pointer, self._root) for pointer in self._pointers}
        # What can't be followed here is for llguidance to refuse.
        self.ending = {pointer for pointer, target in targets.items() if target is None}
        users: dict[str, list[str]] = {pointer: [] for pointer in targets}
        for pointer, target in targets.items():
            for each in walked(target):
                self._visit()
                if isinstance(each.get("$ref"), str):
                    users[each["$ref"]].append(pointer)
        waiting = deque(self._pointers)
        while waiting:
            pointer = waiting.popleft()
            if pointer not in self.ending and self.ends(targets[pointer]):
                self.ending.add(pointer)
                waiting += users[pointer]

    def ends(self, schema: Any) -> bool:
        """Whether a schema has a finite value, judged by the references that are known to end so far."""
        self._visit()
        if not isinstance(schema, dict):
            return schema is not False
        if "$ref" in schema and isinstance(schema["$ref"], str) and schema["$ref"] not in self.ending:
            return False
        if not all(map(self.ends, _list(schema.get("allOf")))):
            return False
        for key in ("anyOf", "oneOf"):
            branches = _list(schema.get(key))
            if branches and not any(map(self.ends, branches)):
                return False
        if "const" in schema or "enum" in schema:
            return True
        given = schema.get("type", "null")
        types = given if isinstance(given, list) else [given]
        if not types or any(kind not in _ENDLESS for kind in types):
            return True
        return any(
            self._object_ends(schema) if kind == "object" else self._array_ends(schema) for kind in types
        )

    def _object_ends(self, schema: dict[str, Any]) -> bool:
        properties, required = schema.get("properties"), schema.get("required")
        known = properties if isinstance(properties, dict) else {}
        others = True if schema.get("patternProperties") else schema.get("additionalProperties", True)
        names = [name for name in _list(required) if isinstance(name, str)]
        return all(self.ends(known.get(name, others)) for name in names)

    def _array_ends(self, schema: dict[str, Any]) -> bool:
        least, items = schema.get("minItems", 0), schema.get("items", True)
        first = _list(schema.get("prefixItems"))
        if isinstance(items, list):
            first, items = items, schema.get("additionalItems", True)
        if not isinstance(least, int):
            return True
        return all(map(self.ends, first[:least])) and (least <= len(first) or self.ends(items))

    def _visit(self) -> None:
        self._visits += 1
        if self._visits > MAX_VISITS:
            raise ConstraintError("the schema's references lead to one another too often", "$ref")


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
