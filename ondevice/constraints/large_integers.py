"""Grammar rules for schemas with integers above 2^53, which llguidance rounds to the next double.

Values that contain such a number get rules here, and everything else is left to llguidance. In these values,
a keyword without a rule is refused by name. Properties of an object with such a number come in the order of
`properties`, and properties that aren't listed can't occur.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any

from ondevice.constraints.subschemas import referred
from ondevice.errors import ConstraintError

EXACT = 1 << 53
"""Largest magnitude up to which every integer is a double."""
MAX_DIGITS = 100
"""Most digits of an integer that a schema names."""
MAX_DEPTH = 40
MAX_PARTS = 1000
"""Most schemas on the way to large integers; those behind references count each time."""
MAX_ITEMS = 4096
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_LISTED = ("const", "enum")
_TYPES = ("object", "array", "string", "number", "boolean", "null")
_KNOWN = {
    "object": ("properties", "required", "additionalProperties"),
    "array": ("items", "prefixItems", "additionalItems", "minItems", "maxItems"),
    "number": _BOUNDS,
}
_ALL = (
    *("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "$ref", "$dynamicRef", *_LISTED, "multipleOf"),
    *("patternProperties", "propertyNames", "minProperties", "maxProperties", "dependentRequired"),
    *("dependencies", "dependentSchemas", "unevaluatedProperties", "contains", "uniqueItems"),
    *("unevaluatedItems", *_KNOWN["object"], *_KNOWN["array"], *_BOUNDS),
)
"""Keywords that could constrain a value, except strings' keywords."""
_STRING = r'/"([^"\\\x00-\x1F\x7F]|\\["\\bfnrt])*"/'


def exact_rule(schema: Any, leaf: Callable[[Any], str]) -> str | None:
    """A rule for a schema, in llguidance's Lark format; None if the schema has no integer above 2^53.

    leaf: writes the rule for a schema without such an integer. Raises ConstraintError for a keyword without a
    rule, and for bounds that no number meets.
    """
    writer = _RuleWriter(schema, leaf)
    return writer.value(schema, 0) if writer.is_large(schema) else None


class _RuleWriter:
    """Writes the rules for one schema."""

    def __init__(self, root: Any, leaf: Callable[[Any], str]) -> None:
        self._root, self._leaf = root, leaf
        self._written = 0
        self._large: set[int] = set()
        """Schemas, by identity, that lead to a large integer."""
        users: dict[int, list[int]] = {}
        waiting, known = [root], set[int]()
        while waiting:
            schema = waiting.pop()
            if not isinstance(schema, dict) or id(schema) in known:
                continue
            known.add(id(schema))
            if any(_has_large(schema[key]) for key in (*_BOUNDS, *_LISTED) if key in schema):
                self._large.add(id(schema))
            for part in self._parts(schema):
                users.setdefault(id(part), []).append(id(schema))
                waiting.append(part)
        waiting_users = list(self._large)
        while waiting_users:
            more = [user for user in users.get(waiting_users.pop(), ()) if user not in self._large]
            self._large.update(more)
            waiting_users += more

    def is_large(self, schema: Any) -> bool:
        """Whether the schema's values may contain a number that a large integer limits or equals."""
        return id(schema) in self._large

    def value(self, schema: Any, depth: int) -> str:
        """The right-hand side of a rule for a schema's values."""
        if not self.is_large(schema):
            return self._plain(schema)
        self._written += 1
        if depth > MAX_DEPTH or self._written > MAX_PARTS:
            raise ConstraintError(
                "the JSON schema can't be enforced, for its keyword $ref: it leads to an integer above 2^53 "
                "through itself, or in too many ways",
                "$ref",
            )
        if "$ref" in schema:
            _only(schema, ("$ref",))
            return self.value(referred(schema["$ref"], self._root), depth + 1)
        for key in ("anyOf", "allOf"):
            branches = schema.get(key)
            if isinstance(branches, list) and branches and (key == "anyOf" or len(branches) == 1):
                _only(schema, (key,))
                return _either([self.value(it, depth + 1) for it in branches if it is not False])
        if any(key in schema for key in _LISTED):
            return self._listed(schema)
        return self._typed(schema, depth)

    def _typed(self, schema: dict[str, Any], depth: int) -> str:
        given = schema.get("type", list(_TYPES))
        types = given if isinstance(given, list) else [given]
        parts, rest = [], []
        for kind in types:
            known = _KNOWN.get("number" if kind == "integer" else str(kind), ())
            if not any(self._is_said_of(schema, key) for key in known):
                rest.append(kind)
                continue
            _only(schema, ("type", *(key for keys in _KNOWN.values() for key in keys)))
            if kind == "object":
                parts.append(self._object(schema, depth))
            elif kind == "array":
                parts.append(self._array(schema, depth))
            elif kind == "number" or "number" not in types:
                parts.append(_number(schema, integral=kind == "integer"))
        if rest:
            plain = {key: it for key, it in schema.items() if key not in _BOUNDS or not _has_large(it)}
            parts.append(self._plain(plain | {"type": rest}))
        return _either(parts)

    def _is_said_of(self, schema: dict[str, Any], keyword: str) -> bool:
        """Whether a keyword of the schema applies to values with large integers."""
        value = schema.get(keyword)
        if keyword in _BOUNDS:
            return _has_large(value)
        inner = value.values() if keyword == "properties" and isinstance(value, dict) else [value]
        parts = [it for each in inner for it in (each if isinstance(each, list) else [each])]
        return any(map(self.is_large, parts))

    def _object(self, schema: dict[str, Any], depth: int) -> str:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        rest = schema.get("additionalProperties", True)
        members = list(properties.items())
        members += [(name, rest) for name in dict.fromkeys(required) if name not in properties]
        parts: list[tuple[str, bool]] = []
        for name, value in members:
            if value is not False:
                pair = (
                    f"{_literal(json.dumps(name, ensure_ascii=False) + ': ')} {self.value(value, depth + 1)}"
                )
                parts.append((pair, name in required))
            elif name in required:
                raise _impossible("required")
        if not members and rest is not False:
            pair = f'{_STRING} ": " {self.value(rest, depth + 1)}'
            return f'("{{" ({pair} (", " {pair})*)? "}}")'
        return f'("{{" {_joined(parts)} "}}")'

    def _array(self, schema: dict[str, Any], depth: int) -> str:
        first, rest = schema.get("prefixItems", []), schema.get("items", True)
        if isinstance(rest, list):
            first, rest = rest, schema.get("additionalItems", True)
        least, most = schema.get("minItems", 0), schema.get("maxItems", MAX_ITEMS)
        if not isinstance(least, int) or not isinstance(most, int) or least > MAX_ITEMS:
            raise ConstraintError("minItems and maxItems can't be enforced here", "minItems")
        if False in first:
            first, rest = first[: first.index(False)], False
        if rest is False:
            most = min(most, len(first))
        if least > most:
            raise _impossible("minItems")
        parts = [self.value(it, depth + 1) for it in first[:most]]
        item = self.value(rest, depth + 1) if most > len(parts) else ""
        body, left = "", max(0, min(most, MAX_ITEMS) - len(parts))
        if item:
            body = f'(", " {item}){{{max(0, least - len(parts))},{left}}}'
            if not parts:
                body = f'{item} (", " {item}){{{max(0, least - 1)},{left - 1}}}' if left > 1 else item
        for at in range(len(parts) - 1, -1, -1):
            body = (
                f"{parts[at]} {body}" if at == 0 else f'(", " {parts[at]} {body}){"" if at < least else "?"}'
            )
        return f'("[" ({body}){"" if least else "?"} "]")' if body else '("[" "]")'

    def _listed(self, schema: dict[str, Any]) -> str:
        """A rule for the listed values, as far as they have one of the schema's types."""
        _only(schema, ("type", *_LISTED, *_BOUNDS))
        values = [schema["const"]] if "const" in schema else schema["enum"]
        fits = [it for it in values if _is_of(it, schema)] if isinstance(values, list) else []
        if not fits:
            raise _impossible("enum")
        texts = [json.dumps(it, ensure_ascii=False) for it in fits if _has_large(it)]
        others = [it for it in fits if not _has_large(it)]
        return _either([*map(_literal, texts), *([self._plain({"enum": others})] if others else [])])

    def _plain(self, schema: Any) -> str:
        """The rule for a schema without large integers, which gets the definitions of the complete schema."""
        if schema is False:
            raise _impossible("anyOf")
        if not isinstance(schema, dict) or not isinstance(self._root, dict):
            return self._leaf(schema)
        defined = {key: self._root[key] for key in ("$defs", "definitions") if key in self._root}
        return self._leaf(defined | schema)

    def _parts(self, schema: dict[str, Any]) -> list[Any]:
        """The schemas that must hold for a schema's values, or for parts of them."""
        parts = [schema.get(key) for key in ("items", "additionalProperties", "additionalItems")]
        parts += [it for key in ("allOf", "anyOf", "prefixItems", "items") for it in _list(schema.get(key))]
        for key in ("properties", "patternProperties"):
            parts += schema[key].values() if isinstance(schema.get(key), dict) else []
        return [*parts, referred(schema["$ref"], self._root)] if "$ref" in schema else parts


def _number(schema: Mapping[str, Any], integral: bool) -> str:
    """A rule for numbers within the schema's bounds: for integers only, or also with a fraction unless
    `integral`.
    """
    least, most = _bounds(schema)
    if least is not None and most is not None and least > most:
        raise _impossible("minimum")
    pattern = _integers(least, most)
    if not integral:
        pattern = f"({pattern})(\\.0{{1,20}})?"
        above = _integers(max(least or 0, 0), None if most is None else most - 1)
        below = _integers(max(-most, 0) if most is not None else 0, None if least is None else -least - 1)
        pattern += f"|({above})\\.[0-9]{{1,20}}" if above else ""
        pattern += f"|-({below})\\.[0-9]{{1,20}}" if below else ""
    return f"/{pattern}/"


def _bounds(schema: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """The smallest and the largest integer within a schema's bounds; None where there is no bound.

    A bound that only numbers of more than MAX_DIGITS digits can exceed counts as none.
    """
    given: dict[str, Decimal] = {}
    for key in _BOUNDS:
        value = schema.get(key, 0)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConstraintError(f"the JSON schema can't be enforced, for its keyword {key}: no number", key)
        if key in schema and abs(value) < 10**MAX_DIGITS:
            given[key] = Decimal(repr(value))
        elif key in schema and (value > 0) == (key in ("minimum", "exclusiveMinimum")):
            raise _impossible(key)
    lows = [math.ceil(given["minimum"])] if "minimum" in given else []
    lows += [math.floor(given["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in given else []
    highs = [math.floor(given["maximum"])] if "maximum" in given else []
    highs += [math.ceil(given["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in given else []
    return max(lows, default=None), min(highs, default=None)


def _integers(least: int | None, most: int | None) -> str:
    """A pattern that matches the integers from `least` to `most`; None means no bound. Empty if there are
    none.
    """
    if least is not None and most is not None and least > most:
        return ""
    patterns = []
    if least is None or least < 0:
        low = 1 if most is None or most >= 0 else -most
        patterns.append(f"-({_naturals(low, None if least is None else -least)})")
    if most is None or most >= 0:
        patterns.append(_naturals(max(least or 0, 0), most))
    return "|".join(patterns)


def _naturals(least: int, most: int | None) -> str:
    """A pattern that matches the integers from `least`, which is 0 or more, to `most`."""
    if most is None:
        longer = f"[1-9][0-9]{{{len(str(least))},}}"
        return f"{_naturals(least, 10 ** len(str(least)) - 1)}|{longer}"
    patterns = []
    for length in range(len(str(least)), len(str(most)) + 1):
        first = 10 ** (length - 1) if length > 1 else 0
        low, high = max(least, first), min(most, 10**length - 1)
        patterns.append(_between(str(low), str(high)))
    return "|".join(patterns)


def _between(low: str, high: str) -> str:
    """A pattern that matches the numbers from `low` to `high`, two texts with the same number of digits."""
    if low == high:
        return low
    if len(low) == 1:
        return f"[{low}-{high}]"
    rest, nines, zeros = len(low) - 1, "9" * (len(low) - 1), "0" * (len(low) - 1)
    if low[0] == high[0]:
        return f"{low[0]}({_between(low[1:], high[1:])})"
    first, last, patterns = int(low[0]), int(high[0]), []
    if low[1:] != zeros:
        patterns.append(f"{first}({_between(low[1:], nines)})")
        first += 1
    if high[1:] != nines:
        patterns.append(f"{last}({_between(zeros, high[1:])})")
        last -= 1
    if first <= last:
        patterns.append(f"[{first}-{last}][0-9]{{{rest}}}")
    return "|".join(patterns)


def _joined(parts: Sequence[tuple[str, bool]]) -> str:
    """A rule for an object's members separated by commas. parts: each member's rule, and whether it is
    required.
    """
    needed = next((at for at, (_, must) in enumerate(parts) if must), None)
    if needed is not None:
        before = " ".join(f'({pair} ", ")?' for pair, _ in parts[:needed])
        return f"{before} {parts[needed][0]} {_joined_after(parts[needed + 1 :])}"
    begun = [f"{pair} {_joined_after(parts[at + 1 :])}" for at, (pair, _) in enumerate(parts)]
    return f"({' | '.join(begun)})?" if begun else ""


def _joined_after(parts: Sequence[tuple[str, bool]]) -> str:
    return " ".join(f'(", " {pair}){"" if must else "?"}' for pair, must in parts)


def _either(parts: Sequence[str]) -> str:
    if not parts:
        raise _impossible("anyOf")
    return parts[0] if len(parts) == 1 else f"({' | '.join(parts)})"


def _literal(text: str) -> str:
    return json.dumps(text)


def _only(schema: Mapping[str, Any], keywords: Sequence[str]) -> None:
    """Check that keywords that limit a value are all in `keywords`. Raises ConstraintError for another."""
    about = next((key for key in schema if key in _ALL and key not in keywords), None)
    if about is not None:
        raise ConstraintError(
            f"the JSON schema can't be enforced, for its keyword {about}: it stands beside an integer above "
            "2^53, or on the way to one",
            about,
        )


def _is_of(value: Any, schema: Mapping[str, Any]) -> bool:
    """Whether a listed value has one of the schema's types and is within its bounds."""
    given = schema.get("type", list(_TYPES))
    types = given if isinstance(given, list) else [given]
    if isinstance(value, bool) or not isinstance(value, int | float):
        kinds: dict[type, str] = {str: "string", list: "array", dict: "object", bool: "boolean"}
        return kinds.get(type(value), "null") in types
    if "number" not in types and not ("integer" in types and value == math.floor(value)):
        return False
    above = value >= schema.get("minimum", value) and value <= schema.get("maximum", value)
    over, under = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    return above and (over is None or value > over) and (under is None or value < under)


def _has_large(value: Any) -> bool:
    """Whether a value is, or contains, a number above 2^53."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return abs(value) > EXACT
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(map(_has_large, inner))


def _impossible(keyword: str) -> ConstraintError:
    return ConstraintError(
        f"the JSON schema can't be enforced, for its keyword {keyword}: no value satisfies it", keyword
    )


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
