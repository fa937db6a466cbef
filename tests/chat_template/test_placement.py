"""Messages where templates take them, and calls that no template was written for."""

from __future__ import annotations

from typing import Any

import pytest

from ondevice.chat_template import ChatTemplate
from ondevice.chat_template.call_formats import CallFormat
from ondevice.chat_template.known_formats import FORMATS
from ondevice.chat_template.placement import placements
from ondevice.chat_template.tools import PromptOptions, Tool
from ondevice.errors import BundleError, UsageError
from tests.chat_template.test_tools import (
    CONTENT_NONE,
    IN_SYSTEM,
    ONLY_CONTENT,
    STRICT_IDS,
    TEXT_ARGUMENTS,
)
from tests.support.chat_templates import INSTRUCTIONS, TOOLS

OPTIONS = PromptOptions((Tool("weather"),))
CUT = '{"city": "Os'
ITEMS = """\
{%- for m in messages %}<|{{ m.role }}|>{{ m.content }}
    {%- for call in m.tool_calls or [] %}<tool_call><function={{ call.function.name }}>
        {%- for name, value in call.function.arguments | items %}<parameter={{ name }}>{{ value }}
        {%- endfor %}</tool_call>
    {%- endfor %}
{%- endfor %}{{ tools | tojson }}
"""
"""Arguments one by one, as Qwen3-Coder has them."""
ONE_CALL = """\
{%- for m in messages %}
    {%- if m.tool_calls %}
        {%- if m.tool_calls | length != 1 %}{{ raise_exception('single tool-calls at once') }}{% endif %}
    {%- elif m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}
        {{- raise_exception('no previous call') }}
    {%- endif %}<|{{ m.role }}|>{{ m.content }}
    {%- for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
{%- endfor %}{{ tools | tojson }}
"""
"""One call at a time, and no result without one, as Llama 3.1 and gpt-oss have it."""
NO_SYSTEM = """\
{%- for m in messages %}
    {%- if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('must alternate') }}{% endif %}
    {{- '<' ~ m.role ~ '>' ~ m.content }}
{%- endfor %}
"""
"""Gemma's rules."""
FIRST_ALONE = """\
{%- for m in messages %}
    {%- if m.role != 'system' %}<{{ m.role }}>{{ m.content }}
    {%- elif loop.first %}<system>{{ m.content }}{% endif %}
{%- endfor %}
"""
"""Later instructions are dropped without a word."""
ANYWHERE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def said(*pairs: str) -> list[dict[str, Any]]:
    """Messages of `role: text`."""
    return [dict(zip(("role", "content"), pair.split(": "), strict=True)) for pair in pairs]


AGENTS = said("system: A", "user: B", "system: C", "assistant: D", "user: E", "system: F")
"""As Claude Code sends them."""


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (ANYWHERE, "<system>A<user>B<system>C<assistant>D<user>E<system>F"),
        (FIRST_ALONE, "<system>A<user>B<user>C<assistant>D<user>E<user>F"),
        (NO_SYSTEM, "<user>A\n\nB\n\nC<assistant>D<user>E\n\nF"),
        (INSTRUCTIONS, "[INST] A\nB\n\nC [/INST] D[INST] E\n\nF [/INST]"),
    ],
)
def test_instructions_between_messages_stay_in_their_place(source: str, text: str) -> None:
    assert ChatTemplate(source).render(AGENTS) == text


def test_instructions_at_the_head_are_one_where_a_template_takes_one() -> None:
    head = said("system: A", "developer: B", "user: C", "user: D")
    assert ChatTemplate(ANYWHERE).render(head) == "<system>A<developer>B<user>C<user>D"
    assert ChatTemplate(FIRST_ALONE).render(head[:1] * 2 + head[2:]) == "<system>A\n\nA<user>C<user>D"
    assert ChatTemplate(NO_SYSTEM).render(head) == "<user>A\n\nB\n\nC\n\nD"


def test_a_conversation_s_beginning_is_the_same_when_it_goes_on() -> None:
    """What lets the next request keep the keys and values of the last one."""
    for source in (ANYWHERE, FIRST_ALONE, NO_SYSTEM, INSTRUCTIONS):
        template = ChatTemplate(source)
        assert template.render(AGENTS).startswith(template.render(AGENTS[:3]))


def test_a_plain_conversation_is_given_as_it_is() -> None:
    plain = said("system: A", "user: B", "assistant: C", "user: D")
    assert next(placements(plain)) is plain
    # It drops instructions, as its author wants it.
    source = "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    assert ChatTemplate(source).render(plain) == "<user>B<assistant>C<user>D"


def test_what_a_template_refuses_in_every_place_is_its_first_refusal() -> None:
    with pytest.raises(UsageError, match="refuses these messages: must alternate"):
        ChatTemplate(NO_SYSTEM).render(said("assistant: B", "user: C"))


def calling(*arguments: Any, results: int | None = None) -> list[dict[str, Any]]:
    """A conversation with these calls and results of the first of them."""
    calls = [
        {"id": f"call{at}", "type": "function", "function": {"name": "weather", "arguments": each}}
        for at, each in enumerate(arguments)
    ]
    shown = len(calls) if results is None else results
    return [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        *({"role": "tool", "content": f"{at} C", "tool_call_id": f"call{at}"} for at in range(shown)),
        {"role": "user", "content": "Well?"},
    ]


@pytest.mark.parametrize(
    ("source", "written"),
    [
        (TOOLS, '"arguments": "{\\"city\\": \\"Os"}'),
        (TEXT_ARGUMENTS, CUT),
        (CONTENT_NONE, '"arguments": "{\\"city\\": \\"Os"}'),
        (ONLY_CONTENT, f'{{"name": "weather", "arguments": {CUT}}}'),
        (IN_SYSTEM, f'{{"name": "weather", "arguments": {CUT}}}'),
        (STRICT_IDS, '"arguments": "{\\"city\\": \\"Os"}'),
        (ITEMS, f"<tool_call>\n<function=weather>\n{CUT}\n</function>\n</tool_call>"),
        (ONE_CALL, '"arguments": "{\\"city\\": \\"Os"}'),
        (ANYWHERE, f'<tool_call>\n{{"name": "weather", "arguments": {CUT}}}\n</tool_call>'),
        (NO_SYSTEM, f'<tool_call>\n{{"name": "weather", "arguments": {CUT}}}\n</tool_call>'),
    ],
)
def test_arguments_that_were_cut_are_the_string_that_they_are(source: str, written: str) -> None:
    text = ChatTemplate(source).render(calling(CUT), options=OPTIONS)
    assert text.count(written) == 1
    assert text.count("0 C") == text.count("Well?") == 1


@pytest.mark.parametrize("format", FORMATS, ids=[each.name for each in FORMATS])
def test_a_format_writes_arguments_that_were_cut_as_they_are(format: CallFormat) -> None:
    text = format.write([("weather", CUT)])
    assert text.count(CUT) == text.count("weather") == 1
    whole = format.write([("weather", {"city": "Oslo"})])
    written = '{"city": "Oslo"}'
    # Formats of JSON write both alike.
    assert written not in whole or whole.replace(written, CUT) == text


@pytest.mark.parametrize("source", [TOOLS, TEXT_ARGUMENTS, CONTENT_NONE, ONLY_CONTENT, STRICT_IDS, ITEMS])
@pytest.mark.parametrize("arguments", ["[1]", "5", "null", '{"a": 1e999}', '{"a":' * 99, "\ud800", "{} x"])
def test_no_string_of_arguments_makes_a_template_fail(source: str, arguments: str) -> None:
    assert "0 C" in ChatTemplate(source).render(calling(arguments), options=OPTIONS)


def test_calls_that_a_template_refuses_are_told_as_text() -> None:
    template = ChatTemplate(ONE_CALL)
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    cut = f'<tool_call>\n{{"name": "weather", "arguments": {CUT}}}\n</tool_call>'
    two = template.render(calling({"city": "Oslo"}, CUT), options=OPTIONS)
    assert two.startswith(
        f"<|user|>Hi<|assistant|>{call}\n{cut}"
        "<|user|><tool_response>\n0 C\n</tool_response>\n<tool_response>\n1 C\n</tool_response>\nWell?"
    )
    orphan = said("user: Hi", "tool: 9 C", "user: Well?")
    text = template.render(orphan, options=OPTIONS)
    assert text.startswith("<|user|>Hi\n<tool_response>\n9 C\n</tool_response>\nWell?")
    # Where it takes them, they stay as they are.
    assert "<|tool|>0 C<|user|>Well?" in template.render(calling({}), options=OPTIONS)
    unanswered = template.render(calling({}, results=0), options=OPTIONS)
    assert '<tool_call>{"name": "weather", "arguments": {}}</tool_call><|user|>Well?' in unanswered


def test_a_template_beyond_its_limits_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rendered: list[Any] = []
    render = ChatTemplate._render

    def counted(*arguments: Any) -> str:
        rendered.append(arguments)
        return render(*arguments)

    monkeypatch.setattr(ChatTemplate, "_render", counted)
    with pytest.raises(BundleError, match="TemplateLimit"):
        ChatTemplate("{{ 'x' * 99999999 }}").render(said("system: A", "user: B"))
    assert len(rendered) == 1
    with pytest.raises(BundleError, match="ZeroDivisionError"):
        ChatTemplate("{{ 1 / 0 }}").render(said("system: A", "user: B"))
    assert len(rendered) == 3
