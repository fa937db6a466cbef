"""Thinking and calls in replies: every format, cut at every place, and whatever else a model may write."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ondevice.chat_template.call_formats import CallFormat
from ondevice.chat_template.known_formats import FORMATS
from ondevice.chat_template.replies import (
    MAX_CALL_CHARS,
    MAX_HELD_SPACES,
    MarkedReply,
    PlainReply,
    ReplyPiece,
)
from ondevice.chat_template.tools import MAX_CALLS, Tool, json_text

BY_NAME = {each.name: each for each in FORMATS}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = {"weather": Tool("weather", "", PARAMETERS), "now": Tool("now")}
THINK = ("<think>", "</think>")
WEATHER = ("weather", {"city": "Oslo", "days": 3})
QUOTED = ("weather", {"city": 'a "</tool_call>" b\\', "days": 3})
DEEP = "<\uff5ctool\u2581{}\uff5c>"
SEP, CALL, CALL_END = DEEP.format("sep"), DEEP.format("call\u2581begin"), DEEP.format("call\u2581end")
CALLS, CALLS_END = DEEP.format("calls\u2581begin"), DEEP.format("calls\u2581end")
BARE = json.dumps({"name": "weather", "arguments": WEATHER[1]})
NOW = '{"name": "now", "arguments": {}}'
MARKED = ("weather", {"city": "<tool_call>", "days": 3})
LAST_NAME = json.dumps({"arguments": MARKED[1], "name": MARKED[0]})

# As the families write them: the format, the reply, its text and its calls.
WRITTEN: list[tuple[str, str, str, list[Any]]] = [
    ("hermes", f"<tool_call>\n{BARE}\n</tool_call>", "", [WEATHER]),
    (
        "hermes",
        f"Let me look.\n<tool_call>\n{BARE}\n</tool_call>\n<tool_call>\n{NOW}\n</tool_call>",
        "Let me look.",
        [WEATHER, ("now", {})],
    ),
    ("hermes", f"<tool_call>{NOW}{NOW}</tool_call>", "", [("now", {}), ("now", {})]),
    ("hermes", f"<tool_call>{BARE}", "", [WEATHER]),
    (
        "hermes",
        f"<tool_call>{json.dumps({'name': 'weather', 'arguments': QUOTED[1]})}</tool_call> done",
        "done",
        [QUOTED],
    ),
    ("hermes", '<tool_call>{"name": "now", "arguments": "{}"}</tool_call>', "", [("now", {})]),
    (
        "qwen3-coder",
        "Hm.\n\n<tool_call>\n<function=weather>\n<parameter=city>\nNew\nYork\n</parameter>\n<parameter=days>\n"
        "3\n</parameter>\n</function>\n</tool_call>",
        "Hm.",
        [("weather", {"city": "New\nYork", "days": 3})],
    ),
    ("qwen3-coder", "<tool_call>\n<function=now>\n</function>\n</tool_call>", "", [("now", {})]),
    (
        "qwen3-coder",
        "<tool_call><function=now><parameter=a>True</parameter><parameter=b>[1]</parameter></function></tool_call>",
        "",
        [("now", {"a": True, "b": [1]})],
    ),
    (
        "glm",
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>5</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>5</arg_value>\n</tool_call>",
        "",
        [("weather", {"city": "5", "days": 5})],
    ),
    ("glm", "<tool_call>now\n</tool_call>", "", [("now", {})]),
    ("mistral", f"[TOOL_CALLS][{BARE}, {NOW}]", "", [WEATHER, ("now", {})]),
    (
        "mistral-args",
        'Yes[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{"city": "Oslo", "days": 3}[TOOL_CALLS]now[ARGS]{}',
        "Yes",
        [WEATHER, ("now", {})],
    ),
    ("mistral-args", '[TOOL_CALLS]weather{"city": "Oslo", "days": 3}', "", [WEATHER]),
    (
        "deepseek",
        f'{CALLS}{CALL}weather{SEP}{{"city": "Oslo", "days": 3}}{CALL_END}{CALL}now{SEP}{{}}{CALL_END}'
        f"{CALLS_END}",
        "",
        [WEATHER, ("now", {})],
    ),
    (
        "deepseek",
        f"{CALLS}{CALL}function{SEP}now\n```json\n{{}}\n```{CALL_END}{CALLS_END}",
        "",
        [("now", {})],
    ),
    (
        "gemma4",
        'Wait.<|tool_call>call:weather{city:<|"|>a {b:"c"}<|"|>,days:3}<tool_call|><|tool_call>call:now{a:[1,'
        '{b:<|"|>x<|"|>}],c:true}<tool_call|>',
        "Wait.",
        [("weather", {"city": 'a {b:"c"}', "days": 3}), ("now", {"a": [1, {"b": "x"}], "c": True})],
    ),
    ("phi", f"<|tool_call|>{BARE}<|/tool_call|>", "", [WEATHER]),
    ("granite", f"<|tool_call|>[{BARE}]", "", [WEATHER]),
    ("llama", '{"name": "weather", "parameters": {"city": "Oslo", "days": 3}}', "", [WEATHER]),
    ("llama", f" {NOW}; {NOW}", "", [("now", {}), ("now", {})]),
    ("llama", f"<|python_tag|>{NOW}", "", [("now", {})]),
    ("llama", '{"type": "function", "function": {"name": "now"}}', "", [("now", {})]),
    ("llama", '{"type": "function", "function": "now", "parameters": {}}', "", [("now", {})]),
    ("llama", '{"function": "now", "parameters": null}', "", [("now", {})]),
    ("llama", f"{NOW} Done.", "Done.", [("now", {})]),
    (
        "seed",
        "Hm.<seed:tool_call>\n<function=weather>\n<parameter=city>Oslo</parameter>\n<parameter=days>3</parameter>"
        "\n</function>\n</seed:tool_call>",
        "Hm.",
        [WEATHER],
    ),
    (
        "lfm2",
        '<|tool_call_start|>[weather(city="Oslo", days=3), now()]<|tool_call_end|>',
        "",
        [WEATHER, ("now", {})],
    ),
    (
        "lfm2",
        '<|tool_call_start|>[now(a=["<|tool_call_end|>"])]',
        "",
        [("now", {"a": ["<|tool_call_end|>"]})],
    ),
    ("lfm2", f"<|tool_call_start|>[{BARE}]<|tool_call_end|>Wait.", "Wait.", [WEATHER]),
    (
        "kimi",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        '{"city": "Oslo", "days": 3}<|tool_call_end|><|tool_calls_section_end|>',
        "",
        [WEATHER],
    ),
    (
        "command",
        '<|START_ACTION|>[\n {"tool_call_id": "0", "tool_name": "now", "parameters": {}}\n]<|END_ACTION|>',
        "",
        [("now", {})],
    ),
    ("nemotron", f"<TOOLCALL>[{BARE}, {NOW}]</TOOLCALL>", "", [WEATHER, ("now", {})]),
    ("tool-calls", f"Yes.\n<tool_calls>[{NOW}]</tool_calls>", "Yes.", [("now", {})]),
    # What models write whatever their template says.
    ("mistral", f"Yes:\n{BARE}\n{NOW}\nSo.", "Yes:\n\nSo.", [WEATHER, ("now", {})]),
    ("hermes", f"[{NOW},\n {BARE}]\n", "", [("now", {}), WEATHER]),
    ("hermes", '{"arguments": {}, "name": "now"}', "", [("now", {})]),
    ("hermes", f"{{{NOW}", "", [("now", {})]),
    ("hermes", f"<tool_call>\n{{{BARE}}}\n</tool_call>", "", [WEATHER]),
    ("mistral", '{{"arguments": {}, "name": "now"}}', "", [("now", {})]),
    ("hermes", f"a\n\n```json\n{BARE}\n```\nb", "a\n\nb", [WEATHER]),
    (
        "hermes",
        f"a <tool_call>{BARE}</tool_call> <tool_call>{NOW}</tool_call> b",
        "a b",
        [WEATHER, ("now", {})],
    ),
    ("hermes", f"a\n<tool_call>{BARE}</tool_call>b\n\n\n\n{NOW}\nc", "a\nb\n\nc", [WEATHER, ("now", {})]),
    ("hermes", f"a\n<tool_call>{BARE}\n<tool_call>x</tool_call>", "a\n<tool_call>x</tool_call>", [WEATHER]),
    ("hermes", f"<tool_call>\n{BARE}\n<tool_call>\n{LAST_NAME}", "", [WEATHER, MARKED]),
    ("hermes", f"<tool_call>\n{LAST_NAME}\n<tool_call>\n{LAST_NAME}", "", [MARKED, MARKED]),
    ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', "", [("now", {})]),
    ("hermes", '<tool_call>{"name": "now", "arguments": "null"}</tool_call>', "", [("now", {})]),
    ("hermes", f"```\n[{NOW}]", "", [("now", {})]),
    ("hermes", '```json\n{"name": "now", "arguments": {"a": "```\\n"}}\n```', "", [("now", {"a": "```\n"})]),
    ("hermes", "```tool_code\nnow(a=1)\n```", "", [("now", {"a": 1})]),
    ("hermes", "x\n [weather('Oslo', days=3)]y", "x\ny", [WEATHER]),
    ("hermes", "[now(a=[1], b=']')]", "", [("now", {"a": [1], "b": "]"})]),
    ("hermes", "```py\n```\n[now()]", "```py\n```", [("now", {})]),
    ("deepseek", '<function=now>{"a": "</function>"}</function>', "", [("now", {"a": "</function>"})]),
    ("phi", f"<tools>{NOW}</tools>", "", [("now", {})]),
    (
        "glm",
        "<function=weather><parameter=city>Oslo</parameter></function>",
        "",
        [("weather", {"city": "Oslo"})],
    ),
]

# What is no call stays as it is.
TEXTS: list[tuple[str, str]] = [
    ("hermes", "No call at all, 1 < 2 and <tool."),
    ("hermes", '<tool_call>{"name": "other", "arguments": {}}</tool_call>'),
    ("hermes", "Well,\n <tool_call>{broken}</tool_call> and so on"),
    ("hermes", '<tool_call>{"name": "now", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": NaN}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": ' + "[" * 5000 + "</tool_call>"),
    ("hermes", '<tool_call>{"name": "now'),
    ("hermes", "<tool_call></tool_call>"),
    ("hermes", "a </tool_call> b"),
    ("qwen3-coder", "<tool_call><function=other></function></tool_call>"),
    ("qwen3-coder", "<tool_call><function=now>x</function></tool_call>"),
    ("glm", "<tool_call>now<arg_key>a</arg_key></tool_call>"),
    ("mistral", "[TOOL_CALLS]none of it"),
    ("mistral-args", "[TOOL_CALLS]other[ARGS]{}"),
    ("deepseek", f"{CALLS}{CALL}now{SEP}[1]{CALLS_END}x{CALLS}"),
    ("gemma4", '<|tool_call>call:now{a:<|"|>x}<tool_call|>'),
    ("gemma4", "<|tool_call>now{}<tool_call|>"),
    ("phi", "<|tool_call|>1<|/tool_call|>"),
    ("granite", "<|tool_call|>[]"),
    ("llama", '{"answer": 42}'),
    ("llama", '{"name": "Bob"}'),
    ("llama", '{"type": "function", "function": "other", "parameters": {}}'),
    ("llama", '{"function": "now"}'),
    ("llama", 'x {"name": "now", "parameters": {}}'),
    ("hermes", f"Say {NOW}"),
    ("hermes", '{"name": "other", "arguments": {}}\n[other()]\n```json\n{"name": "other"}\n```'),
    ("hermes", '{"name": "now"\n{"x": 1}\n[ [1]\n]'),
    ("hermes", "```json\n{}\n```\n```\nnow\n```"),
    ("hermes", f"```python\n{NOW}\n[now()]\n```\n```json\nx"),
    ("hermes", "[now](a) [now]\n[now(a=b)]\n[now(a=1]"),
    ("hermes", "``` [`` [\n["),
    ("lfm2", "<|tool_call_start|>[other()]<|tool_call_end|>"),
    ("lfm2", "<|tool_call_start|>[weather(1, 2, 3)]<|tool_call_end|>"),
    ("lfm2", "<|tool_call_start|>[now(a=" + "[" * 500 + "<|tool_call_end|>"),
    ("lfm2", "<|tool_call_start|>[now(a=" + "9" * 6000 + ")]<|tool_call_end|>"),
    ("kimi", "<|tool_calls_section_begin|>x<|tool_calls_section_end|>"),
    ("command", "<|START_ACTION|>[]<|END_ACTION|>"),
]


def read(parser: Any, parts: list[str]) -> tuple[str, str, list[Any]]:
    """Thinking, the reply and the calls of a text that comes in parts."""
    pieces: list[ReplyPiece] = [piece for part in parts for piece in parser.take(1, part)] + parser.finish()
    check_streamed(pieces)
    thought = "".join(piece.text for piece in pieces if piece.kind == "thinking")
    said = "".join(piece.text for piece in pieces if piece.kind == "reply")
    return thought, said, [piece.call for piece in pieces if piece.call is not None]


def check_streamed(pieces: list[ReplyPiece]) -> None:
    """What is told of a call while it is written is that call; what breaks off comes as text instead."""
    name, told = "", ""
    for piece in pieces:
        if piece.begins:
            assert not name
            name, told = piece.begins, ""
        told += piece.arguments
        assert not piece.arguments or name
        if piece.call is not None and name:
            assert (name, json.loads(told)) == piece.call
            name = ""
        if name and piece.text:
            assert told in piece.text
            name = ""
    assert not name


def parser(form: str | CallFormat | None, thinks: bool = False, marks: Any = THINK) -> MarkedReply:
    found = BY_NAME[form] if isinstance(form, str) else form
    return MarkedReply(marks, thinks, found, TOOLS if found else {}, {})


def cuts(text: str) -> list[list[str]]:
    """A text in two parts, cut at every place, and in single characters."""
    step = max(1, len(text) // 300)
    return [[text[:at], text[at:]] for at in range(0, len(text) + 1, step)] + [list(text)]


@pytest.mark.parametrize("before", ["", "<think>\nHm, <tool_call>?\n</think>\n\n"])
@pytest.mark.parametrize(("form", "text", "said", "calls"), WRITTEN)
def test_calls_are_read_wherever_a_text_is_cut(
    form: str, text: str, said: str, calls: list[Any], before: str
) -> None:
    thought = "Hm, <tool_call>?" if before else ""
    for parts in cuts(before + text):
        assert read(parser(form), parts) == (thought, said, calls)


@pytest.mark.parametrize(("form", "text"), TEXTS)
def test_what_is_no_call_stays_text(form: str, text: str) -> None:
    for parts in cuts(text):
        assert read(parser(form), parts) == ("", text, [])


@pytest.mark.parametrize(
    ("text", "thinks", "expected"),
    [
        ("<think>\nHm.\n</think>\n\nHello.", False, ("Hm.", "Hello.")),
        ("Hm.\n</think>\n\nHello.", True, ("Hm.", "Hello.")),
        ("\n<think></think>Hello <think>x</think>", False, ("", "Hello <think>x</think>")),
        ("Hello <think>x</think>", False, ("", "Hello <think>x</think>")),
        ("<think>never ends </thin", False, ("never ends </thin", "")),
        ("<think", False, ("", "<think")),
        ("  Hello ", False, ("", "  Hello ")),
        ("<think>\n\n</think>\n\n", False, ("", "")),
        ("", True, ("", "")),
    ],
)
def test_thinking_is_read_wherever_a_text_is_cut(text: str, thinks: bool, expected: tuple[str, str]) -> None:
    for parts in cuts(text):
        assert read(parser(None, thinks), parts)[:2] == expected


def test_no_part_of_a_mark_is_ever_shown() -> None:
    """What has been shown at any time is a beginning of the text without marks."""
    text = f"<think>Hm</think>Say\n<tool_call>{BARE}</tool_call>"
    for length in range(len(text)):
        made = parser("hermes")
        shown = "".join(piece.text for part in text[:length] for piece in made.take(1, part))
        assert "HmSay".startswith(shown)


def test_marks_may_be_special_tokens_without_text() -> None:
    special = {"<think>": 7, "</think>": 8, "[TOOL_CALLS]": 9, "[ARGS]": 10, "<|other|>": 11}
    gemma = MarkedReply(
        ("<|channel>thought", "<channel|>"), False, None, {}, {"<|channel>": 7, "<channel|>": 8}
    )
    said = [(7, ""), (1, "thought\nHm"), (8, ""), (1, "Hi")]
    assert [piece for token, text in said for piece in gemma.take(token, text)] == [
        ReplyPiece("thinking", "Hm"),
        ReplyPiece("reply", "Hi"),
    ]
    made = MarkedReply(THINK, False, BY_NAME["mistral-args"], TOOLS, special)
    said = [(7, ""), (1, "Hm"), (8, ""), (11, ""), (9, ""), (1, "now"), (10, ""), (1, "{}")]
    pieces = [piece for token, text in said for piece in made.take(token, text)] + made.finish()
    assert pieces == [
        ReplyPiece("thinking", "Hm"),
        ReplyPiece("reply", "", begins="now"),
        ReplyPiece("reply", "", arguments="{}"),
        ReplyPiece("reply", "", ("now", {})),
    ]


def test_what_is_held_back_is_bounded() -> None:
    made = parser("hermes")
    shown = 0
    for _ in range(20):
        shown += sum(len(piece.text) for piece in made.take(1, " " * 100))
    assert shown >= 2000 - MAX_HELD_SPACES - 100
    made = parser("hermes")
    long = "<tool_call>" + "x" * MAX_CALL_CHARS
    assert made.take(1, long) == []
    assert made.take(1, "x") == [ReplyPiece("reply", long + "x")]
    many = f"<tool_call>{NOW}</tool_call>" * (MAX_CALLS + 5)
    assert len(read(parser("hermes"), [many])[2]) == MAX_CALLS


def test_without_marks_every_character_is_the_reply() -> None:
    assert read(PlainReply(), ["<think>", "x</think>"]) == ("", "<think>x</think>", [])


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_what_a_format_writes_it_reads(form: CallFormat) -> None:
    calls = [WEATHER, ("now", {}), ("weather", {"city": 'Zürich "x"\n</x>', "days": -1})]
    assert read(parser(form), [form.write(calls)]) == ("", "", calls)


@pytest.mark.parametrize("form", [form for form in FORMATS if form.streaming], ids=lambda form: form.name)
def test_arguments_that_are_json_are_told_while_they_are_written(form: CallFormat) -> None:
    calls = [("weather", {"city": f"{form.closes or ''} Oslo", "days": 31}), ("now", {"a": [True, {}]})]
    written = "".join(json_text(arguments) for _, arguments in calls)
    made = parser(form)
    pieces = [piece for letter in form.write(calls) for piece in made.take(1, letter)]
    told = [piece.arguments for piece in pieces if piece.arguments]
    assert "".join(told) == written
    # A number or a word is told at its end, everything else letter by letter.
    assert len(told) >= len(written) - len("31,") - len("true,")


def test_a_call_that_breaks_off_is_text_behind_what_was_told_of_it() -> None:
    made = parser("hermes")
    begun = [*made.take(1, '<tool_call>{"name": "weather", "arguments": {"city": "Os'), *made.take(1, "lo")]
    assert begun == [
        ReplyPiece("reply", "", begins="weather"),
        ReplyPiece("reply", "", arguments='{"city": "Os'),
        ReplyPiece("reply", "", arguments="lo"),
    ]
    text = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo'
    assert made.finish() == [ReplyPiece("reply", text)]


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("qwen3-coder", "<tool_call><function=now><parameter=a>{}</parameter></function></tool_call>"),
        ("glm", "<tool_call>now<arg_key>a</arg_key><arg_value>{}</arg_value></tool_call>"),
    ],
)
def test_marks_may_stand_in_arguments_that_are_json(form: str, text: str) -> None:
    value = {"x": "</tool_call></parameter></function></arg_value><tool_call>", "y": ['"', "\\"]}
    written = text.format(json.dumps(value))
    for parts in cuts(written):
        assert read(parser(form), parts) == ("", "", [("now", {"a": value})])


@pytest.mark.parametrize("tail", ["", "}", "}]", ', "id": "abcdefghi"}]', '}, {"name": "now"}]', "} ]\n"])
def test_what_stands_behind_arguments_belongs_to_the_call(tail: str) -> None:
    text = f'[TOOL_CALLS][{{"name": "weather", "arguments": {{"city": "Oslo"}}{tail}'
    more = [("now", {})] if "now" in tail else []
    for parts in cuts(text):
        assert read(parser("mistral"), parts) == ("", "", [("weather", {"city": "Oslo"}), *more])


MARKS = sorted({text for form in FORMATS for text in form.texts} | {*THINK})
PIECES = st.sampled_from(
    [
        *(*MARKS, BARE, NOW, "{", "}", "[", "]", '"', "\\", "<", "now", "\n", " ", "<function=now>", "x"),
        *("\n" + BARE, "\n```json\n", "```", "\n[now(", "a=1", ")", ", "),
    ]
)


@given(
    form=st.sampled_from(FORMATS),
    thinks=st.booleans(),
    parts=st.lists(st.one_of(PIECES, st.text(max_size=5)), max_size=30),
    size=st.integers(1, 9),
)
@settings(max_examples=100)
def test_any_text_reads_the_same_in_parts_and_loses_nothing_but_marks(
    form: CallFormat, thinks: bool, parts: list[str], size: int
) -> None:
    text = "".join(parts)
    whole = read(parser(form, thinks), [text])
    assert read(parser(form, thinks), [text[at : at + size] for at in range(0, len(text), size)]) == whole
    assert read(parser(form, thinks), parts) == whole
    for name, arguments in whole[2]:
        assert name in TOOLS
        json.dumps(arguments, allow_nan=False)
    if not whole[2] and not thinks and not text.lstrip().startswith(THINK[0]):
        assert whole[1] == text
