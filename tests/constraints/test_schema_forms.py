"""Which JSON a schema's grammar accepts, against Python's own reading of numbers and against `jsonschema`."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import pytest

pytest.importorskip("llguidance")

from ondevice import Constraint, ConstraintError
from ondevice.chat_template.forced_calls import json_rule
from ondevice.constraints.constrained import Constrained
from ondevice.constraints.digits import DEFAULT_DIGITS, DigitBound, NumberTokens
from ondevice.constraints.endless import MAX_VISITS
from ondevice.constraints.grammars import Grammars, GrammarVocabulary

jsonschema = pytest.importorskip("jsonschema")

EOS = 256
TOKENS = [*(bytes([byte]) for byte in range(256)), b"", b"12345", b"00000", b"0.00", b", 1", b"99]"]
EXACT = 1 << 53
LARGE = (EXACT + 1, -EXACT - 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 10**30 + 7)
OLD = "http://json-schema.org/draft-07/schema#"
TWICE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "required": ["next"]}


@cache
def grammars() -> Grammars:
    """Of a token for each byte, one that ends texts, and some of several digits."""
    return Grammars(GrammarVocabulary(TOKENS, {}, (EOS,), lambda text: list(text.encode())))


def following(schema: Any) -> Constrained:
    return of(Constraint.json_schema(schema))


def of(constraint: Constraint) -> Constrained:
    ends, digits = frozenset({EOS}), grammars().digit_bound(constraint)
    return Constrained(grammars().matcher(constraint), len(TOKENS), ends, digits=digits)


def accepts(schema: Any, text: str) -> bool:
    """Whether a text may be written byte by byte, and then end."""
    return ends(following(schema), text)


def ends(text: Constrained, said: str) -> bool:
    for byte in said.encode():
        if text.is_complete or not text.allowed()[byte]:
            return False
        text.take(byte, chr(byte))
    return text.is_complete or bool(text.allowed()[EOS])


def valid(schema: Any, value: Any) -> bool:
    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    return bool(kind(schema).is_valid(value))


def near(numbers: tuple[int, ...] = LARGE) -> list[int]:
    """The integers around these, and some others."""
    found = {number + step for number in numbers for step in (-2, -1, 0, 1, 2)}
    return sorted(found | {0, 1, -1, 9, 10, 99, 100, -EXACT, EXACT, 10**18, -(10**18), 10**19})


@pytest.mark.parametrize("number", LARGE)
def test_integers_above_2_53_are_exact_in_consts_and_enums(number: int) -> None:
    for schema in (
        {"const": number},
        {"enum": [number, "a", 5, [number]]},
        {"type": "integer", "enum": [number]},
    ):
        for other in near():
            assert accepts(schema, str(other)) == valid(schema, other), (schema, other)
    assert accepts({"enum": [number, "a"]}, '"a"')
    assert accepts({"enum": [{"id": number}]}, json.dumps({"id": number}))
    assert not accepts({"enum": [{"id": number}]}, json.dumps({"id": number + 1}))
    with pytest.raises(ConstraintError, match="keyword enum"):
        accepts({"type": "string", "enum": [number]}, "")


@pytest.mark.parametrize("number", LARGE)
@pytest.mark.parametrize("bound", ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"])
def test_integers_above_2_53_are_exact_in_bounds(bound: str, number: int) -> None:
    schema, most = {"type": "integer", bound: number}, max(DEFAULT_DIGITS, len(str(abs(number))))
    for other in near():
        digits = len(str(abs(other)))
        if digits <= most:
            assert accepts(schema, str(other)) == valid(schema, other), (schema, other)
        if digits < most:
            assert accepts(schema | {"type": "number"}, f"{other}.0") == valid(schema, other), (schema, other)


def test_random_ranges_of_integers_are_exact() -> None:
    rng = random.Random(52)
    for _ in range(60):
        size = rng.choice((10**3, 1 << 54, 10**19, 10**25))
        least, most = sorted(rng.randrange(-size, size) for _ in range(2))
        schema = {"type": "integer", "minimum": least, "maximum": most}
        if max(-least, most) <= EXACT:
            schema["minimum"] = least = -EXACT - rng.randrange(1, 10**6)
        others = {rng.randrange(-2 * size, 2 * size) for _ in range(12)}
        for other in sorted({least - 1, least, least + 1, most - 1, most, most + 1, 0} | others):
            assert accepts(schema, str(other)) == (least <= other <= most), (schema, other)
        assert not accepts(schema, "-0") or least <= 0 <= most


def test_large_integers_are_exact_wherever_they_stand() -> None:
    number = EXACT + 1
    item = {"type": "integer", "maximum": number}
    schema = {
        "type": "object",
        "$defs": {"id": {"anyOf": [{"type": "null"}, {"const": number}]}},
        "properties": {
            "a": {"type": ["string", "integer"], "minimum": number, "maxLength": 3},
            "b": {"type": "array", "items": item, "minItems": 1, "maxItems": 3},
            "c": {"$ref": "#/$defs/id"},
            "d": {"type": "array", "prefixItems": [{"type": "null"}, item], "items": False},
            "e": {"type": "object", "additionalProperties": item},
            "f": {"type": "boolean"},
        },
        "required": ["b"],
        "additionalProperties": False,
    }
    values: dict[str, list[Any]] = {
        "a": [number, number - 1, "abc", "abcd", None],
        "b": [[], [1], [number, 2], [number + 1], [1, 2, 3], [1, 2, 3, 4]],
        "c": [None, number, number - 1, number + 1],
        "d": [[], [None], [None, number], [None, number + 1], [1], [None, 1, 1]],
        "e": [{}, {"x": number}, {"x": number + 1}, {"x": 1, "y": 2}],
        "f": [True, 1],
    }
    for name, given in values.items():
        for value in given:
            for document in ({"b": [1]} | {name: value}, {name: value}):
                ordered = {key: document[key] for key in sorted(document)}
                expected = valid(schema, ordered)
                assert accepts(schema, json.dumps(ordered)) == expected, ordered
    optional = schema | {"required": []}
    for document in ({}, {"a": number, "f": True}, {"f": False}, {"c": number, "d": [None], "f": True}):
        assert accepts(optional, json.dumps(document))
    rule = json_rule(Constraint.json_schema({"const": number}))
    for other in (number - 1, number, number + 1):
        assert ends(of(Constraint.lark(f'start: "<" {rule} ">"')), f"<{other}>") == (other == number)


@pytest.mark.parametrize(
    ("keyword", "schema"),
    [
        ("multipleOf", {"type": "integer", "maximum": EXACT + 1, "multipleOf": 3}),
        ("patternProperties", {"patternProperties": {"a": True}, "properties": {"b": {"const": EXACT + 1}}}),
        ("minimum", {"type": "integer", "minimum": EXACT + 2, "maximum": EXACT + 1}),
        (
            "$ref",
            {"properties": {"id": {"const": EXACT + 1}, "next": {"$ref": "#"}}, "type": "object"},
        ),
    ],
)
def test_what_cannot_be_enforced_beside_a_large_integer_is_refused(keyword: str, schema: Any) -> None:
    with pytest.raises(ConstraintError) as error:
        following(schema)
    assert error.value.keyword == keyword


@pytest.mark.parametrize(
    "schema", [{}, {"type": "integer"}, {"type": "number"}, {"type": "integer", "minimum": -5}]
)
def test_numbers_have_no_more_than_twenty_digits(schema: Any) -> None:
    longest = "1234567890" * 2
    for text in (longest, "-1" if schema.get("minimum") else f"-{longest}", "1" + 19 * "0"):
        assert accepts(schema, text)
        assert not accepts(schema, f"{text}{longest}")
    assert not accepts(schema, f"{longest}1")
    if schema.get("type") != "integer":
        for text in (f"0.{longest}", f"1.{longest[1:]}", f"0.{20 * '0'}{longest}", "1e308", "2.5e-07"):
            assert accepts(schema, text)
        for text in (f"1.{longest}", f"{longest}.0", f"0.{21 * '0'}1", "1e1000", f"0.{21 * '0'}"):
            assert not accepts(schema, text)


def test_the_digits_of_strings_are_as_many_as_ever() -> None:
    text = json.dumps({"1" * 30: ["2" * 50, '"' + "3" * 30, "\\" + "4" * 30]})
    assert accepts({}, text)
    assert accepts({"type": "string", "pattern": "^[0-9]{40}$"}, f'"{"5" * 40}"')


def test_a_schema_that_names_a_longer_number_has_as_many_digits() -> None:
    least = 10**24
    schema = {"type": "integer", "minimum": least}
    assert accepts(schema, str(least))
    assert not accepts(schema, str(10 * least))
    # What has to go on does: a multiple of 7 ends where it is one.
    text = following({"type": "integer", "multipleOf": 7})
    for byte in b"1" * DEFAULT_DIGITS:
        text.take(byte, chr(byte))
    assert not text.allowed()[EOS]
    assert text.allowed()[ord("1")]


def test_tokens_of_several_digits_end_at_the_bound() -> None:
    """Against a plain count of the number's digits after the token."""
    rng = random.Random(3)
    numbers = NumberTokens(TOKENS)
    for _ in range(300):
        bound, said = DigitBound(numbers), b"["
        for token in rng.choices(
            [*range(48, 58), *range(257, len(TOKENS)), ord(","), ord("."), ord('"')], k=30
        ):
            if said.count(b'"') % 2 == 0 and TOKENS[token][:1].isdigit():
                run = said[len(said.rstrip(b"0123456789.")) :] + TOKENS[token].split(b",")[0].rstrip(b"]")
                digits = run.replace(b".", b"").lstrip(b"0")
                mask = bound.bounded(_all_of(len(TOKENS)))
                if run.count(b".") <= 1 and not TOKENS[token].startswith(b", "):
                    zeros = len(run.replace(b".", b"")) - len(digits)
                    fits = len(digits) <= DEFAULT_DIGITS and zeros <= DEFAULT_DIGITS + 1
                    assert bool(mask[token]) == fits, (said, TOKENS[token])
                if not mask[token]:
                    continue
            said += TOKENS[token]
            bound.take(token)


def _all_of(size: int) -> Any:
    import numpy as np

    return np.ones(size, dtype=np.bool_)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (True, ["1", "null", '{"a": [1]}'], []),
        ({"type": "array", "uniqueItems": False}, ["[1, 1]"], ["1"]),
        ({"items": True, "type": "array"}, ["[1]"], ["1"]),
        ({"items": False, "type": "array"}, ["[]"], ["[1]"]),
        ({"prefixItems": [True, False], "type": "array"}, ["[]", "[1]"], ["[1, 1]"]),
        ({"$schema": OLD, "items": [True], "additionalItems": False, "type": "array"}, ["[1]"], ["[1, 1]"]),
        ({"contains": True, "type": "array"}, ["[1]"], ["[]"]),
        ({"contains": False, "type": ["array", "null"]}, ["null"], ["[]"]),
        ({"properties": {"a": True, "b": False}, "type": "object"}, ['{"a": 1}'], ['{"b": 1}']),
        ({"additionalProperties": True, "type": "object"}, ['{"a": 1}'], ["1"]),
        ({"additionalProperties": False, "type": "object"}, ["{}"], ['{"a": 1}']),
        ({"patternProperties": {"^a": True, "^b": False}, "type": "object"}, ['{"a": 1}'], ['{"b": 1}']),
        ({"propertyNames": True, "type": "object"}, ['{"a": 1}'], ["1"]),
        ({"propertyNames": False, "type": "object"}, ["{}"], ['{"a": 1}']),
        ({"unevaluatedProperties": True, "type": "object"}, ['{"a": 1}'], ["1"]),
        ({"unevaluatedItems": True, "type": "array"}, ["[1]"], ["1"]),
        ({"anyOf": [False, {"type": "null"}]}, ["null"], ["1"]),
        ({"anyOf": [True, {"type": "null"}]}, ["null", "1"], []),
        ({"allOf": [True, {"type": "null"}]}, ["null"], ["1"]),
        ({"oneOf": [False, {"type": "null"}]}, ["null"], ["1"]),
        ({"not": False, "type": "null"}, ["null"], ["1"]),
        ({"if": True, "then": {"type": "null"}}, ["null"], ["1"]),
        ({"if": False, "then": {"type": "null"}, "else": {"type": "boolean"}}, ["true"], ["null"]),
        ({"then": {"type": "null"}}, ["null", "1"], []),
        ({"$defs": {"a": True}, "$ref": "#/$defs/a"}, ["null", "1"], []),
        ({"$defs": {"a": False}, "anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}, ["null"], ["1"]),
        ({"dependentSchemas": {"a": False}, "type": "object"}, ['{"b": 1}'], ['{"a": 1}']),
        ({"dependentSchemas": {"a": True}, "type": "object"}, ['{"b": 1}', '{"a": 1}'], []),
        # A branch of a reference that never ends isn't one.
        (
            {"$defs": {"node": TWICE}, "anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            ["null"],
            ['{"next": null}'],
        ),
        (
            {"$defs": {"node": TWICE}, "type": "object", "properties": {"a": {"$ref": "#/$defs/node"}}},
            ["{}"],
            ['{"a": {"next": {}}}'],
        ),
        (
            {
                "type": "object",
                "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
                "required": ["next"],
                "additionalProperties": False,
            },
            ['{"next": {"next": null}}'],
            ["{}"],
        ),
        ({"type": "array", "items": {"$ref": "#"}}, ["[[], [[]]]"], ["[1]"]),
    ],
)
def test_true_and_false_are_schemas_wherever_schemas_may_stand(
    schema: Any, good: list[str], bad: list[str]
) -> None:
    for text in good:
        assert valid(schema, json.loads(text))
        assert accepts(schema, text), text
    for text in bad:
        assert not valid(schema, json.loads(text))
        assert not accepts(schema, text), text


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"$defs": {"node": TWICE}, "$ref": "#/$defs/node"},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {"type": "array", "prefixItems": [{"type": "null"}, {"$ref": "#"}], "minItems": 2},
        {
            "anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
            "$defs": {"a": {"allOf": [{"$ref": "#"}]}, "b": TWICE, "node": TWICE},
        },
        {"type": "object", "required": ["a"], "additionalProperties": {"$ref": "#"}},
    ],
)
def test_a_recursion_that_never_ends_is_refused_before_a_text_begins(schema: Any) -> None:
    with pytest.raises(ConstraintError, match=r"keyword \$ref: .*'#.*without end") as error:
        following(schema)
    assert error.value.keyword == "$ref"


def test_what_is_false_is_refused() -> None:
    for schema in (False, {"allOf": [False]}, {"not": True}, {"$defs": {"a": False}, "$ref": "#/$defs/a"}):
        with pytest.raises(ConstraintError):
            following(schema)


def test_references_that_lead_on_and_on_are_read_in_bounded_time() -> None:
    """A chain of them ends; doubling ones, and what would take too many looks, do at once."""
    chain: dict[str, Any] = {f"a{at}": {"$ref": f"#/$defs/a{at + 1}"} for at in range(900)}
    schema = {"$defs": chain | {"a900": {"type": "null"}}, "$ref": "#/$defs/a0"}
    assert accepts(schema, "null")
    double: dict[str, Any] = {
        f"a{at}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/a{at + 1}"}] * 2} for at in range(60)
    }
    with pytest.raises(ConstraintError, match="too many ways"):
        following({"$defs": double | {"a60": {"const": EXACT + 1}}, "$ref": "#/$defs/a0"})
    assert MAX_VISITS < 10**6
