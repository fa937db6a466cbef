"""Calls that must come: what a format's grammar lets a model write is read back, and obeys the schema."""

from __future__ import annotations

import codecs
import json
import lzma
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jsonschema
import numpy as np
import pytest

pytest.importorskip("llguidance")

from ondevice.chat_template.channels import CHANNEL, CONSTRAIN, END, MESSAGE, START, Channels
from ondevice.chat_template.forced_calls import call_or_json, forced_call, forced_channel
from ondevice.chat_template.known_formats import FORMATS
from ondevice.chat_template.replies import MarkedReply, ReplyParser
from ondevice.chat_template.tools import Tool
from ondevice.constraints.constrained import Constrained
from ondevice.constraints.constraint import Constraint
from ondevice.constraints.digits import DEFAULT_DIGITS
from ondevice.constraints.grammars import Grammars, GrammarVocabulary
from ondevice.errors import ConstraintError
from tests.support.paths import SHARED_DATA

BY_NAME = {form.name: form for form in FORMATS}
EOS, WORDS_AT = 256, 300
MARKS = sorted({text for form in FORMATS for text in form.texts} | {CHANNEL, CONSTRAIN, END, MESSAGE, START})
SPECIAL = {mark: at for at, mark in enumerate(MARKS, EOS + 1)}
WORDS = [
    *("</tool_call>", "</parameter>", "</arg_value>", "\n</parameter>\n", "<tool_call|>", '<|"|>', '"}'),
    *('": "', "</", "</parameter", "</function>", "true", "null", "\\u003c", '\\"', "<parameter=city>"),
]
TOKENS = [bytes([at]) for at in range(256)] + [b""] * (WORDS_AT - 256) + [word.encode() for word in WORDS]
POINT = {
    "type": "object",
    "properties": {"x": {"type": "string"}, "y": {"$ref": "#/$defs/Point"}},
    "required": ["x"],
    "additionalProperties": False,
}
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "of any name"},
        "unit": {"enum": ["C", "F", "1"]},
        "days": {"type": "integer", "minimum": 3},
        "point": {"$ref": "#/$defs/Point", "description": "where"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "list": {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "maxItems": 3},
        "code": {"type": "string", "pattern": "^[a-c]+(!|/|[^a-z/])?$", "maxLength": 9, "strict": 5},
        "long": {"type": "string", "minLength": 2, "maxLength": 900},
        "high": {"type": "boolean"},
        "any": {},
    },
    "required": ["city", "unit", "point", "list"],
    "additionalProperties": False,
    "$defs": {"Point": POINT},
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
HUGE = re.compile(r"[0-9][eE]\+?[0-9]{3,}")
TOOLS = [Tool("weather", "", SCHEMA), Tool("now", "", NOTHING)]
GIVEN = {tool.name: tool for tool in TOOLS}


def walk(constraint: Constraint, special: Mapping[str, int], seed: int, most: int | None = None) -> list[int]:
    """Tokens of a random text that obeys: mostly marks and quotes, so that it ends and is hard to read."""
    chance, found = random.Random(seed), []
    vocabulary = GrammarVocabulary(TOKENS, special, (EOS,), lambda text: list(text.encode()))
    matcher = Grammars(vocabulary).matcher(constraint)
    while not matcher.is_stopped() and (most is None or len(found) < most):
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        assert not matcher.is_error(), matcher.get_error()
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little")[: len(TOKENS)]).tolist()
        if most is not None:
            # What a letter is in patterns isn't the same everywhere beyond these.
            allowed = [it for it in allowed if it < 128 or it >= EOS] or allowed
        if EOS in allowed:
            allowed.remove(EOS)
            if not allowed or chance.random() < 0.5:
                break
        ends = 6 + len(found) / 20
        weights = [
            30 if it in special.values() else 3 if it >= WORDS_AT else ends if chr(it) in '"}]\n<,' else 1
            for it in allowed
        ]
        token = chance.choices(allowed, weights)[0]
        matcher.consume_token(token)
        found.append(token)
        assert len(found) < 20000
    return found


def read(parser: ReplyParser, tokens: Sequence[int]) -> tuple[str, list[Any]]:
    """The text and the calls of a reply."""
    decode, pieces = codecs.getincrementaldecoder("utf-8")("replace"), []
    for token in tokens:
        pieces += parser.take(token, decode.decode(TOKENS[token]))
    pieces += parser.finish()
    said = "".join(piece.text for piece in pieces if piece.kind == "reply")
    return said, [piece.call for piece in pieces if piece.call is not None]


def check_calls(calls: Sequence[Any]) -> None:
    assert calls
    for name, arguments in calls:
        jsonschema.validate(arguments, GIVEN[name].parameters)


@pytest.mark.fast("*-True", "gemma4-False", "hermes-False")
@pytest.mark.parametrize("with_tokens", [True, False])
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_what_a_grammar_writes_is_read_and_obeys(form: Any, with_tokens: bool) -> None:
    """with_tokens: whether the marks are special tokens; otherwise they are letters of the text."""
    special = {mark: SPECIAL[mark] for mark in form.texts} if with_tokens else {}
    for seed in range(2):
        tokens = walk(forced_call(form, TOOLS, special, True), special, seed)
        said, calls = read(MarkedReply(None, False, form, GIVEN, special), tokens)
        assert said == ""
        check_calls(calls)
        alone = walk(forced_call(form, TOOLS[:1], special, False), special, seed)
        said, calls = read(MarkedReply(None, False, form, GIVEN, special), alone)
        assert (said, [name for name, _ in calls]) == ("", ["weather"])
        check_calls(calls)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_what_a_format_writes_its_grammar_allows(form: Any) -> None:
    point, days = {"x": "</x> é", "y": {"x": ""}}, {"city": "Oslo\n", "unit": "C", "days": 3}
    last = {"note": None, "list": ["a"], "code": "ab!", "long": "é" * 899, "high": True, "any": [{"a": 1}]}
    calls = [("weather", days | {"point": point} | last), ("now", {})]
    for written, parallel in ((calls, True), (calls, False), (calls[:1], False)):
        constraint = forced_call(form, TOOLS, {}, parallel)
        matcher = Grammars(GrammarVocabulary(TOKENS, {}, (EOS,), lambda text: list(text.encode()))).matcher(
            constraint
        )
        text = list(form.write(written).encode())
        is_allowed = len(written) == 1 or (parallel and not form.bare)
        assert (matcher.try_consume_tokens(text) == len(text)) == is_allowed


def test_gpt_oss_thinks_and_calls_on_its_channels() -> None:
    special = {name: SPECIAL[name] for name in (START, CHANNEL, MESSAGE, END, CONSTRAIN)}
    thought = 0
    for seed in range(8):
        tokens = walk(forced_channel(TOOLS, special), special, seed)
        said, calls = read(Channels(special, GIVEN), tokens)
        assert (said, len(calls)) == ("", 1)
        check_calls(calls)
        thought += tokens.count(special[CHANNEL]) == 2
    assert thought > 0


@pytest.mark.parametrize("form", [form for form in FORMATS if not form.bare], ids=lambda form: form.name)
def test_a_reply_is_calls_or_the_json_that_was_asked_for(form: Any) -> None:
    answer = {"type": "object", "properties": {"said": {"type": "string"}}, "required": ["said"]}
    answer["additionalProperties"] = False
    constraint = call_or_json(form, TOOLS[1:], {}, True, Constraint.json_schema(answer))
    kinds = set()
    for seed in range(12):
        tokens = walk(constraint, {}, seed)
        said, calls = read(MarkedReply(None, False, form, GIVEN, {}, calls_alone=True), tokens)
        kinds.add(bool(calls))
        if calls:
            assert (said, {name for name, _ in calls}) == ("", {"now"})
        else:
            jsonschema.validate(json.loads(said), answer)
        if len(kinds) == 2 and seed >= 3:
            break
    assert kinds == {True, False}


def test_marks_of_calls_inside_an_answer_are_text() -> None:
    form = BY_NAME["hermes"]
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    for parts in ([f"[{call}"], list(f"[{call}"), ["[", call], ["", " [", call]):
        made = MarkedReply(None, False, form, GIVEN, {}, calls_alone=True)
        pieces = [piece for part in parts for piece in made.take(1, part)] + made.finish()
        assert "".join(piece.text for piece in pieces).strip() == f"[{call}"
        assert not any(piece.call or piece.begins for piece in pieces)


def test_what_can_t_be_told_from_json_is_refused() -> None:
    for form, answer in (
        (BY_NAME["llama"], Constraint.json_object()),
        (BY_NAME["hermes"], Constraint.regex("a+")),
    ):
        with pytest.raises(ConstraintError, match="either tools or a constraint"):
            call_or_json(form, TOOLS, {}, True, answer)


@pytest.mark.parametrize("form", ["qwen3-coder", "glm", "gemma4"])
@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"properties": 5}, "properties"),
        ({"properties": {"a": {"type": "string", "pattern": "^a|b$"}}}, "pattern"),
        ({"properties": {"a": {"type": "string", "maxLength": -1}}}, "maxLength"),
        ({"properties": {"a": {"type": "string", "minLength": 5, "maxLength": 4}}}, "minLength"),
        ({"properties": {"a": {"not": {"type": "string"}}}}, "not"),
        ({"properties": {"a": {"type": "array", "uniqueItems": True}}}, "uniqueItems"),
        ({"properties": {"a": {"$ref": "#/$defs/b"}}}, "$ref"),
        ({"properties": {"a": {"$ref": "#/properties/b"}, "b": {"type": "object"}}}, "$ref"),
        ({"properties": {"a": False}, "required": ["a"]}, "required"),
        ({"properties": {}, "required": ["a"], "additionalProperties": False}, "required"),
        ({"type": "object", "minProperties": 1}, "minProperties"),
        ({"type": "array"}, "type"),
        ({"properties": {"a": {"type": "string", "enum": [5]}}}, "enum"),
        ({"properties": {"a": {"enum": ["</parameter> </arg_value> <|\"|>"]}}}, "enum"),
        ({"properties": {"a": {"type": "string", "enum": ["<|im_end|>"]}}}, "enum"),
        ({"properties": {"a": {"type": "string", "pattern": "a)|(b"}}}, "pattern"),
        ({"required": [["a"]]}, "required"),
        ({"required": [{"a": 1}]}, "required"),
        ({"properties": {"a": {"type": "string", "enum": [10**400]}}}, "enum"),
    ],
)  # fmt: skip
def test_schemas_without_rules_are_refused_by_their_keyword(
    form: str, schema: dict[str, Any], keyword: str
) -> None:
    special = {"<|im_end|>": EOS}
    with pytest.raises(ConstraintError) as caught:
        walk(forced_call(BY_NAME[form], [Tool("now", "", schema)], special, True), special, 0)
    assert caught.value.keyword == keyword


@pytest.mark.parametrize("form", ["qwen3-coder", "glm", "gemma4"])
def test_an_integer_may_be_of_any_size(form: str) -> None:
    schema = {"properties": {"a": {"type": "integer", "enum": [10**400]}}}
    constraint = forced_call(BY_NAME[form], [Tool("now", "", schema)], {}, True)
    assert constraint.kind == "lark"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "most_refused"), [("hermes", 5), ("qwen3-coder", 28), ("glm", 28), ("gemma4", 41)]
)
def test_schemas_of_others_have_rules_or_are_refused(form: str, most_refused: int) -> None:
    """Those of JSONSchemaBench whose values are objects, as the schemas of a tool's arguments."""
    with lzma.open(SHARED_DATA / "schemas/jsonschemabench_sample.json.xz") as stream:
        schemas = [it for it in json.load(stream).values() if it.get("type", "object") == "object"]
    refused = []
    for schema in schemas:
        tool = Tool("now", "", schema)
        try:
            tokens = walk(forced_call(BY_NAME[form], [tool], {}, False), {}, 0, most=2000)
        except ConstraintError as error:
            refused.append(str(error))
            continue
        if len(tokens) < 2000:
            said, calls = read(MarkedReply(None, False, BY_NAME[form], {"now": tool}, {}), tokens)
            # A number beyond Python's is none, and the call is text.
            assert calls or HUGE.search(said)
            for _, arguments in calls:
                jsonschema.validate(arguments, schema)
    assert len(schemas) == 200
    assert len(refused) <= most_refused, refused


def nines(constraint: Constraint) -> int:
    """Digits of the number in a text that obeys, of a model that writes 9 wherever it may."""
    vocabulary = GrammarVocabulary(TOKENS, SPECIAL, (EOS,), lambda text: list(text.encode()))
    grammars = Grammars(vocabulary)
    digits = grammars.digit_bound(constraint)
    text = Constrained(grammars.matcher(constraint), len(TOKENS), frozenset({EOS}), digits=digits)
    found: list[int] = []
    while not text.is_complete and len(found) < 500:
        allowed = np.flatnonzero(text.allowed()).tolist()
        found.append(next((it for it in (ord("9"), ord("}"), EOS) if it in allowed), allowed[0]))
        if found[-1] == EOS:
            break
        text.take(found[-1], "")
    return max(map(len, re.findall(b"9+", b"".join(TOKENS[it] for it in found))))


@pytest.mark.parametrize(
    ("name", "most"),
    [("hermes", DEFAULT_DIGITS), ("mistral", DEFAULT_DIGITS), ("kimi", DEFAULT_DIGITS), ("glm", 450)],
)
def test_numbers_in_calls_end(name: str, most: int) -> None:
    """But where texts stand bare among arguments, which may have as many digits as they like."""

    def counting(**number: Any) -> list[Tool]:
        schema = {"type": "object", "properties": {"n": {"type": "integer"} | number}, "required": ["n"]}
        return [Tool("count", "", schema | {"additionalProperties": False})]

    either = Constraint.json_schema({"type": "number"})
    found = [
        nines(forced_call(BY_NAME[name], counting(), SPECIAL, False)),
        nines(call_or_json(BY_NAME[name], counting(), SPECIAL, False, either)),
    ]
    assert found == [most] * 2 if most == DEFAULT_DIGITS else min(found) > most
    assert nines(forced_call(BY_NAME[name], counting(maximum=10**30), SPECIAL, False)) == 30
