"""Grammar rules for arguments that aren't JSON: names and values between marks, and Gemma's notation.

Every text that the rules allow is read by `call_formats.py` as arguments that match the schema. Optional
properties may be left out, properties that the schema doesn't list can't occur, and a keyword that has no
rule is refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ondevice.chat_template.call_formats import GEMMA_QUOTE, written_gemma
from ondevice.chat_template.tools import MAX_DEPTH, Tool, is_text
from ondevice.constraints.constraint import Constraint
from ondevice.constraints.schema import json_rule, prepared
from ondevice.errors import ConstraintError
from ondevice.records import dataclass

_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_TYPES: dict[str, tuple[str, ...]] = {
    "object": ("properties", "required", "additionalProperties"),
    "array": ("items", "minItems", "maxItems"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "integer": _NUMBERS,
    "number": _NUMBERS,
    "boolean": (),
    "null": (),
}
"""JSON's types, and the keywords about their values that have rules."""
_REFUSED: dict[str, tuple[str, ...]] = {
    "object": (
        *("patternProperties", "propertyNames", "minProperties", "maxProperties", "dependencies"),
        *("dependentRequired", "dependentSchemas", "unevaluatedProperties"),
    ),
    "array": ("prefixItems", "contains", "uniqueItems", "unevaluatedItems"),
}
"""Keywords without rules. Keywords outside JSON Schema allow everything, as it specifies."""
_ANY_TYPE = ("allOf", "anyOf", "oneOf", "not", "if", "enum", "const", "$ref", "$dynamicRef", "$recursiveRef")
_DEFINITIONS = ("$defs", "definitions")
_PLAIN_NAME = re.compile(r"[^\s<>{}\[\],:\"|]+")
_PATTERN_PART = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)
"""A part of a pattern: a letter, an escaped one, or letters in brackets."""
_DELIMITERS = re.compile(r"\\.|[/\n]", re.DOTALL)
"""Delimiters that end a pattern in a grammar, and sequences that are escaped already."""
_LOCAL = re.compile(r"#/(?:\$defs|definitions)/")
_NOTHING = '""'
MAX_COUNT = 4096
"""Largest count of characters or items in a rule."""


class Rules:
    """The rules of one grammar in llguidance's Lark format."""

    def __init__(self, special: Mapping[str, int]) -> None:
        """special: ids of the special tokens, by name."""
        self.special = special
        self._lines: list[str] = []

    def __str__(self) -> str:
        return "\n".join(self._lines)

    def name(self, body: str, kind: str = "rule") -> str:
        """Add a rule, or a terminal if `kind` is in upper case, with this body. Returns the new name."""
        name = f"{kind}_{len(self._lines)}"
        self.set(name, body)
        return name

    def set(self, name: str, body: str) -> None:
        self._lines.append(f"{name}: {body}")

    def literal(self, text: str) -> str:
        """A rule for exactly this text, in which special tokens are named by their ids."""
        names = sorted((name for name in self.special if name in text), key=len, reverse=True)
        if not names:
            return json.dumps(text) if text else ""
        parts = re.split(f"({'|'.join(map(re.escape, names))})", text)
        terminals = (
            f"<[{self.special[it]}]>" if it in self.special else json.dumps(it) for it in parts if it
        )
        return " ".join(terminals)

    def text(self, schema: Mapping[str, Any], closing: str, marks: Sequence[str]) -> str:
        """A rule for a text that a schema describes, followed by `closing`, which ends with the first of the
        marks.

        The text contains none of the marks, which all begin with `<`. If the schema limits its length or
        letters, it contains no `<` at all, since looking for marks as well exceeds llguidance's limits.
        """
        is_token = marks[0] in self.special
        end = "" if is_token else _escaped(closing)
        count = _counted(schema, "minLength", "maxLength")
        if "pattern" in schema or count not in ("{0,}", "{1,}"):
            parts = [f"/[^<]{count}{end}/"]
            parts += [f"/{_anywhere(schema['pattern'])}{end}/"] if "pattern" in schema else []
        else:
            others = "|".join(map(_escaped, marks if is_token else marks[1:]))
            parts = [f"/(?s:.{count}){end}/", f"~/(?s:.*)({others})(?s:.*)/"]
            parts += [] if is_token else [f"~/(?s:.*){_escaped(marks[0])}(?s:.+)/"]
        terminal = self.name(" & ".join(parts), "TEXT")
        return f"{terminal} {self.literal(closing)}" if is_token else terminal


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", r"\/").replace("\n", "n")


def _counted(schema: Mapping[str, Any], least: str, most: str) -> str:
    """The repetition suffix, such as `{1,5}`, for the bounds in two keywords of a schema."""
    low, high = schema.get(least, 0), schema.get(most)
    for name, count in ((least, low), (most, 0 if high is None else high)):
        if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= MAX_COUNT:
            raise ConstraintError(f"{name} is {str(count)[:40]}; in calls it is 0 to {MAX_COUNT}", name)
    if high is not None and high < low:
        raise ConstraintError(f"{least} is {low} and {most} {high}, which no value satisfies", least)
    return f"{{{low},{'' if high is None else high}}}"


def _anywhere(pattern: object) -> str:
    """A pattern that matches an entire text, made from a JSON Schema pattern, which may match
    anywhere in it.
    """
    if not isinstance(pattern, str):
        raise ConstraintError("a pattern is no string", "pattern")
    begins = pattern.startswith("^")
    ends = re.search(r"(?<!\\)(?:\\\\)*\$\Z", pattern) is not None
    branches = _branches(pattern)
    if branches is None:
        raise ConstraintError("a pattern has brackets without their others", "pattern")
    if (begins or ends) and branches > 1:
        raise ConstraintError("a pattern of several, with ^ or $, can't be enforced in calls", "pattern")
    inner = pattern[begins : len(pattern) - ends]
    inner = _DELIMITERS.sub(lambda part: {"/": r"\/", "\n": r"\n"}.get(part[0], part[0]), inner)
    return f"{'' if begins else '(?s:.*)'}({inner}){'' if ends else '(?s:.*)'}"


def _branches(pattern: str) -> int | None:
    """Number of alternatives that `|` separates outside brackets; None if brackets don't match."""
    depth, branches = 0, 1
    for part in _PATTERN_PART.findall(pattern):
        depth += (part == "(") - (part == ")")
        branches += part == "|" and depth == 0
        if depth < 0:
            return None
    return None if depth else branches


@dataclass(frozen=True)
class PairForm:
    """The marks around the names and values of arguments.

    before: precedes a value, with the name in the place of KEY. closing: follows a value. between: follows
    `closing`, before the next name. marks: strings that no value may contain, first the mark in `closing`.
    """

    before: str
    closing: str
    between: str
    marks: tuple[str, ...]


def pairs(rules: Rules, tool: Tool, form: PairForm) -> str:
    """A rule for a tool's arguments, each between marks. Raises ConstraintError for a schema that has no
    rules.
    """
    schema = tool.parameters
    root = _followed(schema)
    defined = {key: schema[key] for key in _DEFINITIONS if key in schema}
    rules_of_pairs = []
    for name, value, is_required in _members(root, f"the arguments of {tool.name}"):
        before = rules.literal(form.before.replace("KEY", name))
        if is_text(value):
            _only(value, ("enum", "const", *_TYPES["string"]), ("string",), f"{tool.name}'s {name}")
            body = _bare(rules, value, form)
        else:
            _require_local(value)
            body = f"{json_rule(_json(value, defined))} {rules.literal(form.closing)}"
        rule = rules.name(f"{before} {body} {rules.literal(form.between)}")
        rules_of_pairs.append(rule if is_required else f"{rule}?")
    return " ".join(rules_of_pairs)


def _json(value: Any, defined: Mapping[str, Any]) -> Constraint:
    """The constraint for a JSON value: its schema, with the definitions of the complete schema."""
    return Constraint.json_schema({**value, **defined} if isinstance(value, Mapping) else value)


def _bare(rules: Rules, schema: Mapping[str, Any], form: PairForm) -> str:
    values = _listed(schema)
    if values is None:
        return rules.text(schema, form.closing, form.marks)
    unwritable = (*form.marks, *rules.special)
    texts = [it for it in values if isinstance(it, str) and not any(mark in it for mark in unwritable)]
    if not texts:
        raise ConstraintError("none of a list of values can be written in calls of this format", "enum")
    return f"({' | '.join(rules.literal(text + form.closing) for text in texts)})"


def gemma(rules: Rules, tool: Tool, marks: tuple[str, ...]) -> str:
    """A rule for a tool's arguments in Gemma's notation: `{key:value}`, texts between GEMMA_QUOTE.

    marks: strings that no text may contain, GEMMA_QUOTE first. Raises ConstraintError for a schema without
    rules.
    """
    root = json.loads(prepared(json.dumps(dict(tool.parameters))))
    return _Gemma(rules, root, marks).members(_followed(root), 0)


class _Gemma:
    """Writes the rules for one schema in Gemma's notation."""

    def __init__(self, rules: Rules, root: Any, marks: tuple[str, ...]) -> None:
        self._rules, self._root, self._marks = rules, root, marks
        self._named: dict[str, str] = {}
        self._any = ""

    def value(self, schema: Any, depth: int) -> str:
        """The name of the rule for a schema's values."""
        if depth > MAX_DEPTH:
            raise ConstraintError(f"the schema is nested more than {MAX_DEPTH} deep")
        if schema is False:
            raise ConstraintError("a part of the schema is false, which no value satisfies")
        if schema is True:
            return self._anything()
        if not isinstance(schema, Mapping):
            raise ConstraintError(f"a part of the schema is of type {type(schema).__name__}")
        if "$ref" in schema:
            _alone(schema, "$ref")
            return self._reference(schema["$ref"], depth)
        for key in ("anyOf", "allOf"):
            branches = schema.get(key)
            if isinstance(branches, list) and (key == "anyOf" or len(branches) == 1) and branches:
                _alone(schema, key)
                return self._rules.name(" | ".join(self.value(each, depth + 1) for each in branches))
        values = _listed(schema)
        if values is not None:
            return self._rules.name(" | ".join(self._written(value) for value in values))
        types = _types(schema)
        _only(schema, [key for kind in types for key in _TYPES[kind]], types, f"a schema of {types[0]}")
        if len(types) == len(_TYPES):
            return self._anything()
        return self._rules.name(" | ".join(self._of_type(kind, schema, depth) for kind in types))

    def members(self, schema: Any, depth: int) -> str:
        """The body of a rule for an object."""
        more_pairs = ""
        members = list(_members(schema, "an object"))
        if not members and schema.get("additionalProperties", True) is not False and depth:
            return self._map(self.value(schema.get("additionalProperties", True), depth + 1))
        more = _NOTHING
        for name, value, is_required in reversed(members):
            if _PLAIN_NAME.fullmatch(name) is None:
                raise ConstraintError(f"the property {name[:40]!r} can't be written in calls of this format")
            pair = f"{json.dumps(f'{name}:')} {self.value(value, depth + 1)}"
            # First with nothing before it, so without a comma.
            others = "" if is_required else f" | {more_pairs or _NOTHING}"
            more_pairs = self._rules.name(f"{pair} {more}{others}")
            follows = f'"," {pair}' if is_required else f'("," {pair})?'
            more = self._rules.name(f"{follows} {more}")
        return f'"{{" {more_pairs} "}}"'

    def _of_type(self, kind: str, schema: Mapping[str, Any], depth: int) -> str:
        if kind == "object":
            return self.members(schema, depth)
        if kind == "array":
            return self._list(schema, depth)
        if kind == "string":
            quote = self._rules.literal(GEMMA_QUOTE)
            return f"{quote} {self._rules.text(schema, GEMMA_QUOTE, self._marks)}"
        keywords = {key: schema[key] for key in _TYPES[kind] if key in schema}
        return json_rule(Constraint.json_schema({"type": kind} | keywords))

    def _list(self, schema: Mapping[str, Any], depth: int) -> str:
        count, item = (
            _counted(schema, "minItems", "maxItems"),
            self.value(schema.get("items", True), depth + 1),
        )
        low, _, high = count.strip("{}").partition(",")
        if high == "0":
            return '"[" "]"'
        if high == "1":
            return f'"[" {item} "]"' if int(low) else f'"[" {item}? "]"'
        rest = f'("," {item}){{{max(0, int(low) - 1)},{int(high) - 1 if high else ""}}}'
        items = f"{item} {rest}"
        return f'"[" {items} "]"' if int(low) else f'"[" ({items})? "]"'

    def _map(self, value: str) -> str:
        key = self._rules.name(r"/[A-Za-z_][A-Za-z0-9_]*/", "KEY")
        return f'"{{" ({key} ":" {value} ("," {key} ":" {value})*)? "}}"'

    def _anything(self) -> str:
        if not self._any:
            self._any = "anything"
            kinds: dict[str, Any] = {"type": ["number", "boolean", "null"]}
            scalar = self._rules.name(json_rule(Constraint.json_schema(kinds)))
            text, items = self._of_type("string", {}, 0), self._list({"items": True}, 0)
            self._rules.set(self._any, f"{scalar} | {text} | {items} | {self._map(self._any)}")
        return self._any

    def _reference(self, pointer: object, depth: int) -> str:
        schema, key = _referred(self._root, pointer), str(pointer)
        if key not in self._named:
            self._named[key] = f"defined_{len(self._named)}"
            self._rules.set(self._named[key], self.value(schema, depth + 1))
        return self._named[key]

    def _written(self, value: Any) -> str:
        text = written_gemma(value)
        unwritable = (*self._marks, *self._rules.special)
        inner = [it for it in _strings(value) if any(mark in it for mark in unwritable)]
        if inner or any(_PLAIN_NAME.fullmatch(key) is None for key in _keys(value)):
            raise ConstraintError(f"the value {text[:40]} can't be written in calls of this format", "enum")
        return self._rules.literal(text)


def _members(schema: Any, what: str) -> Iterator[tuple[str, Any, bool]]:
    """Yields the properties that may occur, in order: name, schema, and whether it is required."""
    _only(schema, _TYPES["object"], ("object",), what)
    if "object" not in _types(schema):
        raise ConstraintError(f"{what} are of another type than object", "type")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, Mapping):
        raise ConstraintError(f"the properties of {what} are no object", "properties")
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise ConstraintError(f"what is required of {what} is no list of names", "required")
    rest = schema.get("additionalProperties", True)
    given = dict(properties) | {name: rest for name in required if name not in properties}
    for name, value in given.items():
        if not isinstance(name, str) or _PLAIN_NAME.fullmatch(name) is None:
            raise ConstraintError(f"the property {str(name)[:40]!r} can't be written in calls of this format")
        if value is not False:
            yield name, value, name in required
        elif name in required:
            raise ConstraintError(f"{name[:40]} of {what} is required and can't be there", "required")


def _only(schema: Any, keywords: Sequence[str], types: Sequence[str], what: str) -> None:
    """Check that the keywords for these types are among `keywords`. Raises ConstraintError for any other."""
    if not isinstance(schema, Mapping):
        raise ConstraintError(f"the schema of {what} is of type {type(schema).__name__}")
    about = {*_ANY_TYPE, *(key for kind in types for key in _about(kind))} - {*keywords}
    keyword = next((key for key in schema if key in about and schema[key] is not False), None)
    if keyword is not None:
        raise ConstraintError(
            f"the keyword {keyword} of {what} can't be enforced in calls of this format", keyword
        )


def _about(kind: str) -> tuple[str, ...]:
    """The keywords that constrain values of a type."""
    return (*_TYPES[kind], *_REFUSED.get(kind, ()))


def _alone(schema: Mapping[str, Any], keyword: str) -> None:
    """Check that a keyword is the schema's only constraint. Raises ConstraintError for another."""
    _only(schema, (keyword,), tuple(_TYPES), f"a schema with {keyword}")
    if "type" in schema:
        raise ConstraintError(f"a type beside {keyword} can't be enforced in calls of this format", "type")


def _listed(schema: Mapping[str, Any]) -> list[Any] | None:
    """The values that a schema lists and its type allows; None if it lists none.

    Raises ConstraintError if other keywords restrict the list, or if no value is left.
    """
    if "const" not in schema and "enum" not in schema:
        return None
    types = _types(schema) if "type" in schema else tuple(_TYPES)
    _only(schema, ("const", "enum"), types, "a list of values")
    values = [schema["const"]] if "const" in schema else schema["enum"]
    listed = [value for value in values if _is_of(value, types)] if isinstance(values, list) else []
    if not listed:
        raise ConstraintError("a list of values has none that its type allows", "enum")
    return listed


def _is_of(value: Any, types: Sequence[str]) -> bool:
    if isinstance(value, bool):
        return "boolean" in types
    if isinstance(value, int | float):
        return "number" in types or ("integer" in types and (isinstance(value, int) or value.is_integer()))
    kinds: dict[type, str] = {str: "string", list: "array", dict: "object", type(None): "null"}
    return kinds.get(type(value)) in types


def _types(schema: Mapping[str, Any]) -> tuple[str, ...]:
    """The types that a schema allows. If it names none, the types that its keywords are for."""
    given = schema.get("type")
    if given is None:
        about = [kind for kind in _TYPES if any(key in schema for key in _about(kind))]
        return tuple(about) or tuple(_TYPES)
    names = given if isinstance(given, list) else [given]
    if not names or not all(isinstance(name, str) and name in _TYPES for name in names):
        raise ConstraintError(f"the type {str(given)[:40]} is none of JSON's", "type")
    return tuple(names)


def _referred(root: Any, pointer: object) -> Any:
    """The definition that a reference points to. Raises ConstraintError if there is none."""
    target = root
    for part in _local(pointer).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        target = target.get(name) if isinstance(target, Mapping) else None
    if target is None:
        raise ConstraintError(f"the reference {str(pointer)[:80]} leads nowhere", "$ref")
    return target


def _followed(root: Any) -> Any:
    """The schema of arguments. If it is only a reference to a definition, that definition."""
    schema = root
    for _ in range(MAX_DEPTH):
        if not isinstance(schema, Mapping) or "$ref" not in schema:
            break
        _only(schema, ("$ref",), ("object",), "a reference")
        schema = _referred(root, schema["$ref"])
    return schema


def _local(pointer: object) -> str:
    """The reference itself, if it points to a definition of the same schema. Raises ConstraintError
    otherwise.
    """
    if not isinstance(pointer, str) or _LOCAL.match(pointer) is None:
        raise ConstraintError(
            f"the reference {str(pointer)[:80]} can't be followed in calls: only one to $defs can",
            "$ref",
        )
    return pointer


def _require_local(schema: Any) -> None:
    """Check all references in a schema. Raises ConstraintError for one that points out of it."""
    for each in _walked(schema):
        if isinstance(each, Mapping) and isinstance(each.get("$ref"), str):
            _local(each["$ref"])


def _walked(value: Any) -> Iterator[Any]:
    """Yields a value, and everything nested in it."""
    yield value
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    for each in inner:
        yield from _walked(each)


def _strings(value: Any) -> Iterator[str]:
    return (each for each in _walked(value) if isinstance(each, str))


def _keys(value: Any) -> Iterator[str]:
    return (key for each in _walked(value) if isinstance(each, Mapping) for key in each)
