"""Tools in chat templates: how each kind takes them, their calls and results; and conversations with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from ondevice.chat_template import ChatTemplate, abilities
from ondevice.chat_template.channels import CHANNEL, END, MESSAGE, START, Channels
from ondevice.chat_template.replies import MarkedReply, ReplyPiece
from ondevice.chat_template.tools import MAX_DEPTH, MAX_TOOLS, PromptOptions, Tool, ToolCall
from ondevice.errors import UsageError
from ondevice.session import Session
from ondevice.tokenizer import Tokenizer, load_tokenizer
from tests.chat_template.test_channels import ScriptedHost, spoken, tokenizer  # noqa: F401
from tests.chat_template.test_chat_template import minimind, transformers_renders  # noqa: F401
from tests.chat_template.test_replies import check_streamed
from tests.support.bundles import write_byte_tokenizer
from tests.support.chat_templates import TOOLS

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = Tool("weather", "The weather", SCHEMA)
OPTIONS = PromptOptions((WEATHER,))
CALL = {"id": "abc", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "9 C", "tool_call_id": "abc"},
]

TEXT_ARGUMENTS = """\
{%- for m in messages %}
    {%- for call in m.tool_calls or [] %}<\uff5ctool\u2581calls\u2581begin\uff5c>{{ call.function.name }}
        {{- '<\uff5ctool\u2581sep\uff5c>' + call.function.arguments }}
    {%- endfor %}{{ m.content }}
{%- endfor %}{{ tools | tojson }}
"""
CONTENT_NONE = """\
{%- for m in messages %}
    {%- if m.content is none %}<tool_call>{{ m.tool_calls[0].function | tojson }}</tool_call>
    {%- else %}{{ m.content }}{% endif %}
{%- endfor %}{{ tools | tojson }}
"""
ONLY_CONTENT = """\
{%- if xml_tools is defined %}{% for tool in xml_tools[:] %}{{ tool | string }}{% endfor %}{% endif %}
{%- for m in messages %}|{{ m.role }}|{{ m.content }}{% endfor %}<tool_call></tool_call>
"""
IN_SYSTEM = """\
{%- for m in messages %}
    {%- if m.role == 'system' and 'tools' in m %}<|system|>{{ m.content }}<|tool|>{{ m.tools }}<|/tool|>
    {%- else %}<|{{ m.role }}|>{{ m.content }}{% endif %}
{%- endfor %}
"""
STRICT_IDS = """\
{%- for m in messages %}
    {%- if m.role == 'tool' and m.tool_call_id | length != 9 %}{{ raise_exception('id') }}{% endif %}
    {%- for call in m.tool_calls or [] %}
        {%- if call.id | length != 9 %}{{ raise_exception('id') }}{% endif %}
        {{- '[TOOL_CALLS]' }}{{ call.function | tojson }}
    {%- endfor %}{{ m.content }}
{%- endfor %}{{ tools | tojson }}
"""


@pytest.mark.parametrize(
    ("source", "call"),
    [
        (TOOLS, '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'),
        (TEXT_ARGUMENTS, 'weather<\uff5ctool\u2581sep\uff5c>{"city": "Oslo"}'),
        (CONTENT_NONE, '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'),
        (ONLY_CONTENT, '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'),
        (IN_SYSTEM, '<|tool_call|>{"name": "weather", "arguments": {"city": "Oslo"}}<|/tool_call|>'),
        (STRICT_IDS, '[TOOL_CALLS]{"name": "weather", "arguments": {"city": "Oslo"}}'),
    ],
)
def test_a_template_gets_tools_and_calls_in_the_form_that_it_takes(source: str, call: str) -> None:
    template = ChatTemplate(source)
    assert template.takes_tools
    text = template.render(TALK, options=OPTIONS)
    assert "The weather" in text
    assert text.count(call) == 1
    assert "9 C" in text
    assert "tools" in abilities(source) or source is IN_SYSTEM


def test_a_real_template_renders_tools_as_transformers_does(
    minimind: tuple[str, Tokenizer, Any],  # noqa: F811
) -> None:
    source, tokens, _ = minimind
    template = ChatTemplate.load(source.encode(), tokens)
    call = CALL | {"function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    for messages in (TALK[:1], [TALK[0], TALK[1] | {"tool_calls": [call]}, TALK[2]]):
        names = {"tools": [WEATHER.to_dict()], "add_generation_prompt": True}
        expected = transformers_renders(source, messages, **names)
        assert template.render(messages, options=OPTIONS) == expected
        ids = template.encode(messages, tokens, options=OPTIONS)
        assert ids == tokens.encode(expected, special=True, add_bos=False)
    for think in (True, False):
        expected = transformers_renders(source, TALK[:1], add_generation_prompt=True, open_thinking=think)
        assert template.render(TALK[:1], options=PromptOptions(think=think)) == expected
        ids = template.encode(TALK[:1], tokens, options=PromptOptions(think=think))
        parser = template.reply_parser(PromptOptions(think=think), ids)
        assert isinstance(parser, MarkedReply)
        assert parser.kind == ("thinking" if think else "reply")


def test_special_tokens_may_be_called_as_parts_of_messages_are(tmp_path: Path) -> None:
    """As a hostile tokenizer has them. Keys of arguments and schemas are others' words, and stay text."""
    write_byte_tokenizer(tmp_path)
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    names = ["content", "tool_calls", "function", "name", "arguments", "tool_call_id", "parameters", "city"]
    library.add_special_tokens(names)
    tokens = load_tokenizer("tokenizers", library.to_str().encode(), 1, [2], False)
    template = ChatTemplate(TOOLS)
    ids = template.encode(TALK, tokens, options=OPTIONS)
    special = set(tokens.special_tokens.values())
    said = [tokens.piece(it) if it in special else tokens.decode([it], at_start=False) for it in ids]
    assert "".join(said) == template.render(TALK, options=OPTIONS)
    assert tokens.special_tokens["city"] not in ids


ALTERNATING = """\
{%- for m in messages %}
    {%- if m.role not in ('user', 'assistant') %}{{ raise_exception('no ' + m.role) }}{% endif %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}
    {{- '<' + m.role + '>' + m.content }}
{%- endfor %}
"""
PLAINLY = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


@pytest.mark.parametrize("source", [None, ALTERNATING, PLAINLY, PLAINLY + "{{ tools }}"])
def test_tools_that_a_template_has_no_place_for_come_as_text(
    source: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """In the instructions, or, where there are none, before what the user says first."""
    template = ChatTemplate(source)
    assert not template.takes_tools
    first = [{"role": "system", "content": "Be brief."}, TALK[0]]
    for messages in (TALK[:1], first):
        text = template.render(messages, options=OPTIONS)
        assert text.count(json.dumps(WEATHER.to_dict()["function"])) == 1
        assert '{"name": "NAME", "arguments": {"KEY": "VALUE"}}' in text
        assert text.index("The weather") < text.index("Hi")
        assert ("Be brief." in text) == (messages is first)
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    text = template.render([*TALK, {"role": "user", "content": "And now?"}], options=OPTIONS)
    assert text.index(call) < text.index("<tool_response>\n9 C\n</tool_response>\nAnd now?")
    parser = template.reply_parser(OPTIONS)
    pieces = [*parser.take(1, f"Let me see.\n{call}"), *parser.finish()]
    assert [piece.call for piece in pieces if piece.call] == [("weather", {"city": "Oslo"})]
    told = [record.message for record in caplog.records if "gets them as JSON" in record.message]
    assert len(told) == 1


def test_marks_of_calls_that_come_as_text_are_the_tokens_that_they_are(tmp_path: Path) -> None:
    """Those of the instructions and of calls, and none that stand in arguments or results."""
    write_byte_tokenizer(tmp_path)
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    library.add_special_tokens(["<tool_call>", "</tool_call>"])
    tokens = load_tokenizer("tokenizers", library.to_str().encode(), 1, [2], False)
    template = ChatTemplate.load(PLAINLY.encode(), tokens)
    call = CALL | {"function": {"name": "weather", "arguments": {"city": "</tool_call>", "<tool_call>": 1}}}
    messages = [TALK[0], TALK[1] | {"tool_calls": [call]}, TALK[2] | {"content": "</tool_call>"}]
    begin, end = (tokens.special_tokens[name] for name in ("<tool_call>", "</tool_call>"))
    assert [it for it in template.encode(messages, tokens) if it in (begin, end)] == [begin, end]
    told = template.encode(messages, tokens, options=OPTIONS)
    assert [it for it in told if it in (begin, end)] == [begin, end] * 2


def test_thinking_follows_the_template_s_switch() -> None:
    def asked(source: str, think: Any) -> str:
        return ChatTemplate(source).render(TALK[:1], options=PromptOptions(think=think))

    for name in ("enable_thinking", "thinking", "open_thinking"):
        source = f"{{{{ 'thinks' if {name} is not defined or {name} else 'not' }}}}</think>"
        assert [asked(source, think) for think in (None, True, False)] == [
            f"{word}</think>" for word in ("thinks", "thinks", "not")
        ]
    # Read, but without an effect on the prompt.
    assert ChatTemplate("{% if thinking %}{% endif %}x")._switch is None
    levels = "{{ reasoning_effort | default('none given') }}"
    assert [asked(levels, think) for think in (None, False, True, "high")] == [
        "none given", "low", "medium", "high",
    ]  # fmt: skip
    with pytest.raises(UsageError, match="no levels"):
        asked("x", "high")


def test_a_model_that_must_think_can_t_be_told_not_to(minimind: tuple[str, Tokenizer, Any]) -> None:  # noqa: F811
    tokens = minimind[1]
    template = ChatTemplate.load(b"{{ messages[0].content }}{{ '</think>'[:0] }}<think>\n", tokens)
    ids = template.encode(TALK[:1], tokens)
    assert template.reply_parser(PromptOptions(), ids).kind == "thinking"
    with pytest.raises(UsageError, match="can't be told not to think"):
        template.reply_parser(PromptOptions(think=False), ids)
    assert template.always_thinks
    assert not ChatTemplate(minimind[0]).always_thinks
    assert not ChatTemplate(
        "{{ messages[0].content }}{% if thinking %}<think></think>{% endif %}"
    ).always_thinks


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ("weather", "list of tools"),
        (5, "list of tools"),
        ([5], "a tool is 5"),
        ([{"type": "function", "function": {"name": "a b"}}], "'a b'"),
        ([{"function": {"name": "a", "description": 5}}], "description"),
        ([{"function": {"name": "a", "parameters": 5}}], "parameters"),
        ([{"function": {"name": "a", "parameters": {1: 2}}}], "no string"),
        ([{"function": {"name": "a", "parameters": {"a": float("nan")}}}], "JSON doesn't have"),
        ([{"function": {"name": "a", "parameters": {"a": {5}}}}], "JSON doesn't have"),
        ([WEATHER, WEATHER], "two tools"),
        ([WEATHER] * (MAX_TOOLS + 1), "at most"),
    ],
)
def test_what_is_no_tool_is_refused(tools: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        PromptOptions.checked(tools, None)


def test_depth_and_other_values_of_think_are_refused() -> None:
    deep: Any = {}
    for _ in range(MAX_DEPTH + 2):
        deep = {"a": deep}
    with pytest.raises(UsageError, match="deep"):
        PromptOptions.checked([Tool("a", "", deep)], None)
    for think in (1, 0, "much", [], {}):
        with pytest.raises(UsageError, match="think is"):
            PromptOptions.checked([], think)


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "x", "tool_calls": [CALL]},
        {"role": "assistant", "content": "x", "tool_calls": "x"},
        {"role": "assistant", "content": "x", "tool_calls": [5]},
        {"role": "assistant", "content": "x", "tool_calls": [CALL | {"id": 5}]},
        {"role": "assistant", "content": "x", "tool_calls": [CALL | {"id": "x" * 201}]},
        {"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "a", "arguments": 5}}]},
        {"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": 5}}]},
        {"role": "assistant", "content": "x", "tool_calls": [CALL] * 200},
        {"role": "tool", "content": "x", "tool_call_id": 5},
    ],
)
def test_malformed_calls_and_results_are_refused(message: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        ChatTemplate(TOOLS).render([message], options=OPTIONS)


def test_thinking_that_led_to_calls_is_part_of_the_prompt(minimind: tuple[str, Tokenizer, Any]) -> None:  # noqa: F811
    template = ChatTemplate(minimind[0])
    thoughtful = [TALK[0], TALK[1] | {"thinking": "I look."}, TALK[2]]
    assert "<think>\nI look.\n</think>" in template.render(thoughtful, options=OPTIONS)
    plain = [TALK[0], {"role": "assistant", "content": "x", "thinking": "I look."}]
    assert "I look." not in template.render(plain, options=OPTIONS)


# --- gpt-oss's channels ---

THOUGHT = f"{CHANNEL}analysis{MESSAGE}Hm.{END}{START}assistant"
CALLED = ReplyPiece("reply", "", ("weather", {"city": "Oslo"}))


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        (f'{THOUGHT}{CHANNEL}commentary to=functions.weather json{MESSAGE}{{"city": "Oslo"}}', [CALLED]),
        (f'{THOUGHT} to=functions.weather{CHANNEL}commentary json{MESSAGE}{{"city": "Oslo"}}', [CALLED]),
        (f' to=functions.weather{CHANNEL}commentary{MESSAGE}{{"city": "Oslo"}}{END}', [CALLED]),
        (f'{CHANNEL}commentary to=weather json{MESSAGE}{{"city": "Oslo"}}', [CALLED]),
        (f"{CHANNEL}commentary to=functions.other{MESSAGE}{{}}", [ReplyPiece("reply", "{}")]),
        (f"{CHANNEL}analysis to=python code{MESSAGE}print(1)", [ReplyPiece("reply", "print(1)")]),
        (f"{CHANNEL}commentary to=functions.weather{MESSAGE}{{no", [ReplyPiece("reply", "{no")]),
        (" to be", [ReplyPiece("reply", " to be")]),
        ("to=", [ReplyPiece("reply", "to=")]),
    ],
)
def test_a_channel_to_a_known_tool_is_a_call(
    tokenizer: Tokenizer,  # noqa: F811
    text: str,
    pieces: list[ReplyPiece],
) -> None:
    parser = Channels(tokenizer.special_tokens, {"weather": WEATHER})
    found = [it for token, said in spoken(tokenizer, text) for it in parser.take(token, said)]
    found = [it for it in [*found, *parser.finish()] if it.kind != "thinking"]
    check_streamed(found)
    said = "".join(it.text for it in found)
    assert [it for it in found if it.call] == [it for it in pieces if it.call]
    assert said == "".join(it.text for it in pieces)


def test_arguments_on_a_channel_are_told_while_they_are_written(tokenizer: Tokenizer) -> None:  # noqa: F811
    parser = Channels(tokenizer.special_tokens, {"weather": WEATHER})
    text = f'{THOUGHT}{CHANNEL}commentary to=functions.weather json{MESSAGE}{{"city": "Oslo"}}'
    found = [parser.take(token, said) for token, said in spoken(tokenizer, text)]
    told = [piece.arguments for pieces in found for piece in pieces if piece.arguments]
    assert (len(told), "".join(told)) == (len('{"city": "Oslo"}'), '{"city": "Oslo"}')


# --- conversations ---


def test_a_conversation_calls_and_goes_on_with_the_results(
    minimind: tuple[str, Tokenizer, Any],  # noqa: F811
    tmp_path: Path,
) -> None:
    source, tokens, _ = minimind
    written = 'Wait.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    host = ScriptedHost(tokens, f"<think>Hm.</think>{written}", ChatTemplate.load(source.encode(), tokens))
    session = Session(host)  # type: ignore[arg-type]
    first = session.respond("Warm?", tools=[WEATHER])
    assert (first.text, first.thinking) == ("Wait.", "Hm.")
    assert first.tool_calls == (ToolCall("weather", {"city": "Oslo"}, first.tool_calls[0].id),)
    events = list(Session(host).stream_response("Warm?", tools=[WEATHER]))  # type: ignore[arg-type]
    parts = [event.call_part for event in events if event.call_part is not None]
    assert {(part.name, part.id) for part in parts} == {("weather", first.tool_calls[0].id)}
    assert "".join(part.arguments for part in parts) == first.tool_calls[0].arguments_json
    assert len(parts) > 3
    again = Session(host).respond("Warm?", tools=[WEATHER])  # type: ignore[arg-type]
    assert again.tool_calls == first.tool_calls
    host.reply = "It is."
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "9 C"}
    assert session.respond([result], tools=[WEATHER]).text == "It is."
    assert [message["role"] for message in session.transcript] == ["user", "assistant", "tool", "assistant"]
    assert session.transcript[1]["tool_calls"] == [first.tool_calls[0].to_dict()]
    assert session.transcript[1]["thinking"] == "Hm."
    session.save(tmp_path / "talk.json", state=False)
    other = Session(host)  # type: ignore[arg-type]
    other.load(tmp_path / "talk.json")
    assert other.transcript == session.transcript
    saved = json.loads((tmp_path / "talk.json").read_text())
    saved["messages"][1]["tool_calls"] = "x"
    (tmp_path / "talk.json").write_text(json.dumps(saved))
    with pytest.raises(UsageError, match="not a saved session"):
        other.load(tmp_path / "talk.json")
