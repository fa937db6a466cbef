"""gpt-oss's chat format: its template, its channels, and what of them a conversation keeps."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import date
from typing import Any

import pytest

from ondevice.chat_template import ChatTemplate
from ondevice.chat_template.channels import CHANNEL, END, MESSAGE, START, Channels
from ondevice.chat_template.replies import Kind
from ondevice.chat_template.tools import PLAIN, PromptOptions
from ondevice.commands import terminal
from ondevice.config import SamplingConfig
from ondevice.errors import BundleError
from ondevice.generate import Event
from ondevice.session import Session
from ondevice.stats import GenerationStats
from ondevice.tokenizer import Tokenizer, load_tokenizer
from tests.chat_template.test_chat_template import transformers_renders
from tests.support.small_tokenizers import added

MARKS = {START: 256, CHANNEL: 257, MESSAGE: 258, END: 259, "<|return|>": 260}
TEMPLATE = """\
{%- macro head() -%}
    {%- if model_identity is not defined %}
        {%- set model_identity = "You are a model." %}
    {%- endif %}
    {{- model_identity + "\\n" }}
    {{- "Current date: " + strftime_now("%Y-%m-%d") + "\\n\\n" }}
    {{- "# Valid channels: analysis, commentary, final." }}
{%- endmacro -%}
{{- "<|start|>system<|message|>" }}
{{- head() }}
{{- "<|end|>" }}
{%- if messages[0].role == "developer" or messages[0].role == "system" %}
    {%- set developer_message, loop_messages = messages[0].content, messages[1:] %}
    {{- "<|start|>developer<|message|># Instructions\\n\\n" + developer_message + "\\n\\n<|end|>" }}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- for message in loop_messages -%}
    {%- if message.role == 'assistant' -%}
        {%- if "<|channel|>analysis<|message|>" in message.content %}
            {{- raise_exception("You have passed a message containing <|channel|> tags.") }}
        {%- endif %}
        {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
    {%- elif message.role == 'user' -%}
        {{- "<|start|>user<|message|>" + message.content + "<|end|>" }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|start|>assistant
{%- endif -%}
"""
"""The parts of the published template that a conversation without tools comes by."""
SPLITTING = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""o200k's, as `tokenizer.json` of gpt-oss has it."""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Bytes and the marks of channels, split as gpt-oss's tokenizer splits."""
    from tokenizers.pre_tokenizers import ByteLevel

    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": SPLITTING}, "behavior": "Removed", "invert": True}
    document = {
        "version": "1.0",
        "added_tokens": [added(token, name) for name, token in MARKS.items()],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": None,
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {letter: i for i, letter in enumerate(sorted(ByteLevel.alphabet()))},
            "merges": [],
        },
    }
    return load_tokenizer("tokenizers", json.dumps(document).encode(), None, (260,), False)


def loaded(tokenizer: Tokenizer, source: str = TEMPLATE) -> ChatTemplate:
    return ChatTemplate.load(source.encode(), tokenizer)


CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi, it's 12345!"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Naïve café?"},
]


def test_the_template_renders_as_transformers_renders_it(tokenizer: Tokenizer) -> None:
    for messages in (CONVERSATION, CONVERSATION[1:], CONVERSATION[1:2]):
        expected = transformers_renders(TEMPLATE, messages, add_generation_prompt=True)
        template = loaded(tokenizer)
        assert template.render(messages) == expected
        ids = template.encode(messages, tokenizer)
        assert ids == tokenizer.encode(expected, special=True)
        assert sum(token == MARKS[START] for token in ids) == expected.count(START)


def test_a_template_that_needs_a_day_gets_today(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Day(date):
        @classmethod
        def today(cls) -> Day:
            return cls(2026, 3, 7)

    monkeypatch.setattr("ondevice.chat_template.date", Day)
    form = "%Y-%m-%d, %-d %B, %d %b, 100 %%"
    assert ChatTemplate(f"{{{{ strftime_now('{form}') }}}}").render([]) == (
        "2026-03-07, 7 March, 07 Mar, 100 %"
    )
    for wrong in ("'%Q'", "'%9999d'", "'%'", "5"):
        with pytest.raises(BundleError, match="strftime_now"):
            ChatTemplate(f"{{{{ strftime_now({wrong}) }}}}").render([])


def spoken(tokenizer: Tokenizer, text: str) -> list[tuple[int, str]]:
    """The tokens of a text and what each of them completes."""
    from ondevice.tokenizer import StreamingDetokenizer

    stream = StreamingDetokenizer(tokenizer, at_start=False)
    return [(token, stream.add(token)) for token in tokenizer.encode(text, special=True)]


THOUGHT = f"{CHANNEL}analysis{MESSAGE}The user, er, says hi. ☕{END}{START}assistant"
CASES: dict[str, tuple[str, dict[Kind, str]]] = {
    "thinks first": (
        f"{THOUGHT}{CHANNEL}final{MESSAGE} Hello ☕.",
        {"thinking": "The user, er, says hi. ☕", "reply": " Hello ☕."},
    ),
    "replies at once": (f"{CHANNEL}final{MESSAGE}Hello.", {"thinking": "", "reply": "Hello."}),
    "calls": (
        f"{THOUGHT}{CHANNEL}commentary to=functions.x {MESSAGE}{{}}",
        {"thinking": "The user, er, says hi. ☕{}", "reply": ""},
    ),
    "knows no channels": ("Hello.", {"thinking": "", "reply": "Hello."}),
    "is cut short": (f"{CHANNEL}analysis{MESSAGE}The", {"thinking": "The", "reply": ""}),
    "twice": (
        f"{THOUGHT}{CHANNEL}final{MESSAGE}A{END}{START}assistant{CHANNEL}final{MESSAGE}B",
        {"thinking": "The user, er, says hi. ☕", "reply": "AB"},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_thinking_is_told_from_the_reply(tokenizer: Tokenizer, case: str) -> None:
    text, expected = CASES[case]
    parser, found = Channels(tokenizer.special_tokens, {}), {"thinking": "", "reply": ""}
    pieces = [it for token, said in spoken(tokenizer, text) for it in parser.take(token, said)]
    for piece in [*pieces, *parser.finish()]:
        found[piece.kind] += piece.text
    assert found == expected


def test_channels_are_those_of_a_template_that_names_them(tokenizer: Tokenizer) -> None:
    assert isinstance(loaded(tokenizer).reply_parser(), Channels)
    assert not isinstance(loaded(tokenizer, "{{ messages[0].content }}").reply_parser(), Channels)


@dataclass
class Plan:
    max_context: int = 4096


@dataclass
class ScriptedHost:
    """Says the same in every turn, and remembers what it was asked."""

    tokenizer: Tokenizer
    reply: str
    chat_template: ChatTemplate
    asked: list[str] = field(default_factory=list)
    plan: Plan = field(default_factory=Plan)

    def new_key(self) -> int:
        return 0

    def retire(self, key: int, keep: bool) -> None:
        """Nothing to free."""

    def chat_ids(self, messages: Any, options: PromptOptions = PLAIN) -> list[int]:
        return self.chat_template.encode(messages, self.tokenizer, options=options)

    def stream_ids(self, key: int, ids: list[int], sampling: SamplingConfig, *more: Any) -> Iterator[Event]:
        self.asked.append("".join(map(self.tokenizer.piece, ids)))
        for token, text in spoken(self.tokenizer, self.reply):
            yield Event(text, token)
        yield Event("", None, "stop", GenerationStats())


def test_a_conversation_keeps_replies_alone(tokenizer: Tokenizer) -> None:
    host = ScriptedHost(tokenizer, CASES["thinks first"][0], loaded(tokenizer))
    session = Session(host)  # type: ignore[arg-type]
    first = session.respond("Hi")
    assert (first.text, first.thinking) == ("Hello ☕.", "The user, er, says hi. ☕")
    events = list(session.stream_response("And now?"))
    assert "".join(event.text for event in events if not event.thinking) == "Hello ☕."
    assert [message["content"] for message in session.transcript] == [
        "Hi",
        "Hello ☕.",
        "And now?",
        "Hello ☕.",
    ]
    assert "er, says" not in host.asked[1].replace("Ġ", " ")
    assert f"{CHANNEL}final{MESSAGE}Hello" in host.asked[1]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_thinking_is_dimmed_at_a_terminal_and_left_out_of_a_pipe(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    class Output(io.StringIO):
        def isatty(self) -> bool:
            return is_terminal

    output = Output()
    monkeypatch.setattr("sys.stdout", output)
    events = [
        Event("", 1, thinking=True),
        Event("Hm.", 2, thinking=True),
        Event("", 3),
        Event("Hi", 4),
        Event("!", 5),
        Event("", None, "stop", GenerationStats()),
    ]
    assert terminal.write_events(event for event in events) == "stop"
    assert output.getvalue() == ("\x1b[2mHm.\x1b[22m\n\nHi!\n" if is_terminal else "Hi!\n")
