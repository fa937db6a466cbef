"""Rewrites JSON schemas into the part of JSON Schema that llguidance implements.

Every text that the new schema allows is valid under the old one. If that isn't possible, a keyword is left as
it is, and llguidance refuses it by name. Keywords that only describe (JSON Schema calls them annotations),
such as a format that llguidance doesn't know, are dropped.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from ondevice.constraints.constraint import Constraint
from ondevice.constraints.endless import without_endless
from ondevice.constraints.large_integers import exact_rule
from ondevice.constraints.one_of import exclusive
from ondevice.constraints.subschemas import with_subschemas
from ondevice.errors import ConstraintError, json_fault

FORMATS = (
    *("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri"),
    "uuid",
)
"""Formats that llguidance enforces."""
SPELLING = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "coerce_one_of": False,
    "lenient": False,
}
"""How JSON is written, and that no part of a schema is ignored silently."""
MAX_DEPTH = 100
"""Deepest nesting of schemas."""
MAX_DEPENDENCIES = 6
"""Most properties of an object on which others depend: each doubles the cases."""


def prepared(source: str) -> str:
    """The JSON text of the schema for llguidance, from a schema's JSON text. Raises ConstraintError."""
    return json.dumps(_prepared(source), allow_nan=False)


def json_rule(constraint: Constraint) -> str:
    """A schema written as a part of a rule in a Lark grammar: `start: "<call>" <this> "</call>"`.

    constraint: one that `json_schema` or `json_object` made. Raises ConstraintError.
    """
    schema = _prepared(constraint.source)
    return exact_rule(schema, _json_rule) or _json_rule(schema)


def exact_grammar(constraint: Constraint) -> str | None:
    """The Lark grammar for a schema with integers above 2^53; None for other schemas. Raises
    ConstraintError.
    """
    rule = exact_rule(_prepared(constraint.source), _json_rule)
    return None if rule is None else f"start: {rule}"


def _json_rule(schema: Any) -> str:
    return "%json " + json.dumps({"x-guidance": SPELLING} | ({} if schema is True else schema))


def _prepared(source: str) -> dict[str, Any]:
    """The schema for llguidance, from a schema's JSON text. Raises ConstraintError."""
    try:
        schema = json.loads(source)
        prepared = without_endless(_rewritten(schema, schema, 0))
    except (ValueError, RecursionError) as error:
        raise ConstraintError(f"the schema isn't JSON: {json_fault(error)}") from error
    if prepared is False:
        raise ConstraintError("the schema is false, which no JSON satisfies")
    return prepared if isinstance(prepared, dict) else {}


def _rewritten(schema: Any, root: Any, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise ConstraintError(f"the schema is nested more than {MAX_DEPTH} deep")
    if not isinstance(schema, dict):
        return schema
    rewritten = with_subschemas(schema, lambda each: _rewritten(each, root, depth + 1))
    rewritten.pop("x-guidance", None)
    for rule in _RULES:
        rule(rewritten, root)
    return rewritten


def _drop_formats(schema: dict[str, Any], root: Any) -> None:
    if "format" in schema and schema["format"] not in FORMATS:
        del schema["format"]


def _always_or_never(schema: dict[str, Any], root: Any) -> None:
    """Rewrite keywords whose schemas are `true` or `false`, which llguidance doesn't accept."""
    for key, nothing in (("uniqueItems", False), ("unevaluatedItems", True), ("unevaluatedProperties", True)):
        if schema.get(key) in (nothing, {}):
            del schema[key]
    parts: list[Any] = []
    if schema.get("not") is False:
        del schema["not"]
    if "if" not in schema or _truth(schema["if"]) is not None:
        chosen = {True: "then", False: "else"}.get(_truth(schema.pop("if", None)), "")  # type: ignore[arg-type]
        branches = {key: schema.pop(key, True) for key in ("then", "else")}
        parts += [branches[chosen]] if chosen else []
    counted = {"minContains", "maxContains"} & schema.keys()
    if not counted and _truth(schema.get("contains")) is not None:
        some = {"type": "array", "minItems": 1} if _truth(schema.pop("contains")) else False
        parts.append({"anyOf": [{"type": _NO_ARRAY}, some]})
    if schema.get("propertyNames") is False:
        del schema["propertyNames"]
        parts.append({"maxProperties": 0})
    _add_parts(schema, parts)


def _truth(schema: Any) -> bool | None:
    """True or False for a schema that allows everything or nothing; None for others."""
    return schema if isinstance(schema, bool) else True if schema == {} else None


def _exclusive_bounds(schema: dict[str, Any], root: Any) -> None:
    """Rewrite the boolean exclusive bounds of Draft 4."""
    for bound in ("minimum", "maximum"):
        name = f"exclusive{bound.capitalize()}"
        if isinstance(schema.get(name), bool) and schema.pop(name) and bound in schema:
            schema[name] = schema.pop(bound)


def _dependencies(schema: dict[str, Any], root: Any) -> None:
    """Rewrite dependencies as alternatives: either the property is absent, or what depends on it holds."""
    cases: list[Any] = []
    for key in ("dependencies", "dependentRequired", "dependentSchemas"):
        given = schema.get(key)
        if (
            not isinstance(given, dict)
            or len(cases) + len(given) > MAX_DEPENDENCIES
            or not isinstance(schema.get("allOf", []), list)
            or not all(isinstance(wanted, list | dict | bool) for wanted in given.values())
        ):
            continue
        del schema[key]
        for name, wanted in given.items():
            then = {"required": wanted} if isinstance(wanted, list) else wanted
            cases.append({"anyOf": [{"properties": {name: False}}, then]})
    _add_parts(schema, cases)


def _property_names(schema: dict[str, Any], root: Any) -> None:
    """Rewrite a pattern for all property names. Names listed as well are left for llguidance to refuse."""
    names = schema.get("propertyNames")
    if names is True or names == {}:
        del schema["propertyNames"]
    elif (
        isinstance(names, dict)
        and isinstance(names.get("pattern"), str)
        and names.keys() <= {"pattern", "type", "description"}
        and not schema.keys() & {"properties", "patternProperties", "required"}
    ):
        del schema["propertyNames"]
        schema["patternProperties"] = {names["pattern"]: schema.get("additionalProperties", True)}
        schema["additionalProperties"] = False


def _one_of(schema: dict[str, Any], root: Any) -> None:
    """Rewrite `oneOf` as `anyOf` of branches that exclude one another."""
    branches = schema.get("oneOf")
    if not isinstance(branches, list):
        return
    apart = exclusive(branches, root)
    if apart is None or not isinstance(schema.get("allOf", []), list):
        return
    del schema["oneOf"]
    if "anyOf" in schema:
        _add_parts(schema, [{"anyOf": apart}])
    else:
        schema["anyOf"] = apart


def _add_parts(schema: dict[str, Any], parts: list[Any]) -> None:
    """Require that the schema's values also satisfy `parts`."""
    if parts:
        schema["allOf"] = [*schema.get("allOf", []), *parts]


_NO_ARRAY = ["null", "boolean", "object", "number", "string"]
_RULES: tuple[Callable[[dict[str, Any], Any], None], ...] = (
    _drop_formats,
    _always_or_never,
    _exclusive_bounds,
    _dependencies,
    _property_names,
    _one_of,
)
