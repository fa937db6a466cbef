"""Converts chat messages to the prompt text and token ids that a model was tuned on.

A bundle's template is Jinja source from the model's maker, and isn't trusted. It runs in `sandbox`, with the
conventions of Hugging Face `transformers` (its variables, `raise_exception`, `tojson`, loop controls, trimmed
blocks) but without a clock, so that the same messages always give the same text. A template that calls
`strftime_now` without asking whether there is one gets the day on which it was loaded.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from functools import cached_property
from typing import Any

from ondevice.chat_template.call_formats import recognised
from ondevice.chat_template.channels import CHANNEL, Channels, has_channels
from ondevice.chat_template.dates import written_by
from ondevice.chat_template.forced_calls import call_or_json, forced_call, forced_channel
from ondevice.chat_template.messages import (
    CALL_FORMS,
    Message,
    absent_character,
    all_checked,
    as_form,
    changed_messages,
    changed_tools,
    mark,
    size,
    uses_tools,
    with_short_ids,
    with_tools,
)
from ondevice.chat_template.placement import INSTRUCTIONS, calls_as_text, is_usual, numbered, placements
from ondevice.chat_template.replies import THINKING_MARKS, MarkedReply, PlainReply, ReplyParser
from ondevice.chat_template.tools import EFFORTS, PLAIN, PromptOptions, Tool, ToolCall
from ondevice.constraints.constraint import Constraint
from ondevice.errors import BundleError, ToolsNotSupportedError, UsageError
from ondevice.tokenizer import Tokenizer

MAX_TEMPLATE_CHARS = 64 * 1024
MAX_SECONDS = 5.0
_MAX_UNITS = 4_000_000
_UNITS_PER_MESSAGE = 1000
_UNITS_PER_CHAR = 64
_LONG_CHARS = 1 << 16
"""Characters above which a message is encoded by itself first, to see whether a context could hold it."""
TEMPLATE_REMEDY = (
    "put another chat_template.jinja into the checkpoint's folder (of a repository, into a downloaded copy; "
    "beside a GGUF file, together with the model's tokenizer.json) and convert it again"
)
"""What to do about a template that can't be used."""

DEFAULT_TEMPLATE = """\
{% for message in messages %}
{% if message.role == 'system' %}
{{ message.content | trim }}

{% else %}
{{ message.role | capitalize }}: {{ message.content | trim }}
{% endif %}
{% endfor %}
{% if add_generation_prompt %}
Assistant:
{%- endif %}
"""
"""A plain transcript, for models without a template of their own."""

# Exceptions that Python raises for a template's faulty operations.
_FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    NameError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)
_ASKS_FOR_CLOCK = re.compile(r"strftime_now\s+is\s+(not\s+)?defined")
SWITCHES = ("enable_thinking", "thinking", "open_thinking")
"""Names by which templates ask whether to think."""
EFFORT = "reasoning_effort"
TOOL_NAMES = ("tools", "xml_tools")
"""Names by which templates ask for tools."""
_TAIL = 8
"""Number of ids at a prompt's end among which a mark of thinking is looked for."""
_PROBE = "probe_tool"


class ChatTemplate:
    """A compiled template. stop: strings that end a reply, in addition to the model's end-of-text tokens."""

    def __init__(self, source: str | None, *, bos_token: str = "", eos_token: str = "") -> None:
        """source: Jinja text, or None for the plain transcript. Raises BundleError if it doesn't compile."""
        self.is_default = source is None
        self.stop = ("\nUser:",) if source is None else ()
        source = DEFAULT_TEMPLATE if source is None else source
        if len(source) > MAX_TEMPLATE_CHARS:
            raise BundleError(
                f"the chat template has {len(source)} characters; the limit is {MAX_TEMPLATE_CHARS}; "
                f"{TEMPLATE_REMEDY}"
            )
        self._names: dict[str, Any] = {"bos_token": bos_token, "eos_token": eos_token}
        if "strftime_now" in source and not _ASKS_FOR_CLOCK.search(source):
            self._names["strftime_now"] = written_by(date.today())
        self._tokenizer: Tokenizer | None = None
        self._has_channels = False
        self._marks = next((pair for pair in THINKING_MARKS if pair[1] in source), None)
        self._format = recognised(source)
        self._lock = threading.Lock()
        self._compile(source)

    @staticmethod
    def load(source: bytes | None, tokenizer: Tokenizer) -> ChatTemplate:
        """A bundle's template, with the tokenizer's names for bos and eos. source: None if it has no file."""
        try:
            text = None if source is None else source.decode("utf-8")
        except UnicodeDecodeError as error:
            raise BundleError(f"the chat template is not UTF-8: {error}; {TEMPLATE_REMEDY}") from error
        bos = "" if tokenizer.bos_id is None else tokenizer.piece(tokenizer.bos_id)
        eos = tokenizer.piece(tokenizer.eos_ids[0]) if tokenizer.eos_ids else ""
        template = ChatTemplate(text, bos_token=bos, eos_token=eos)
        template._tokenizer = tokenizer
        template._has_channels = text is not None and has_channels(text, tokenizer.special_tokens)
        return template

    @property
    def thinks(self) -> bool:
        """Whether the model may think before it replies, by its template."""
        return self._has_channels or self._marks is not None

    @cached_property
    def always_thinks(self) -> bool:
        """Whether every reply begins with thinking, and nothing turns that off."""
        if self._marks is None or self._switch is not None or EFFORT in self._reads:
            return False
        made = self._tried([{"role": "user", "content": "x"}], {})
        return made.rstrip().endswith(self._marks[0])

    @property
    def takes_tools(self) -> bool:
        """Whether the template takes tools and calls of them are of a format that is known."""
        return self._tools_by is not None and (self._has_channels or self._format is not None)

    def reply_parser(self, options: PromptOptions = PLAIN, prompt: Sequence[int] = ()) -> ReplyParser:
        """What tells thinking and calls from the reply in one reply of the model, behind the ids of a prompt.

        Raises UsageError where the model can't be told not to think.
        """
        tools = {tool.name: tool for tool in options.tools}
        if self._has_channels:
            return Channels(self._special, tools)
        thinks = self._marks is not None and self._tail(prompt).rstrip().endswith(self._marks[0])
        if thinks and options.think is False:
            raise UsageError(
                "this model can't be told not to think: its chat template begins every reply with "
                f"{self._marks[0] if self._marks else ''} and asks nothing; leave thinking on"
            )
        if self._marks is None and not tools:
            return PlainReply()
        calls = self._format if tools else None
        return MarkedReply(
            self._marks, thinks, calls, tools, self._special, self._openers, options.calls_alone
        )

    def gate(self, options: PromptOptions = PLAIN, prompt: Sequence[int] = ()) -> ReplyParser | None:
        """What tells what a constraint concerns; None where it concerns the whole text."""
        return None if self._has_channels and options.must_call else self.reply_parser(options, prompt)

    def forced_call(self, options: PromptOptions) -> Constraint:
        """What a reply obeys that calls one of the tools `must_call`.

        Raises UsageError where that can't be enforced, ConstraintError for a tool's schema that is none.
        """
        self._require_tools()
        tools = [tool for tool in options.tools if tool.name in options.must_call]
        if len(tools) < len(options.must_call):
            raise UsageError(
                f"must_call names {', '.join(options.must_call)[:200]}; not all of them are tools"
            )
        if self._has_channels:
            return forced_channel(tools, self._special)
        assert self._format is not None
        return forced_call(self._format, tools, self._special, options.parallel_calls)

    def call_or_json(self, options: PromptOptions, answer: Constraint) -> Constraint:
        """What a reply obeys that is either calls of the tools or a text that obeys `answer`.

        Raises ConstraintError where the two can't be told apart, and for a tool's schema that is none.
        """
        self._require_tools()
        if self._has_channels:
            return answer
        assert self._format is not None
        return call_or_json(self._format, options.tools, self._special, options.parallel_calls, answer)

    def render(
        self,
        messages: Sequence[Message],
        *,
        options: PromptOptions = PLAIN,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt's text.

        Raises UsageError for messages that are malformed or that the template refuses, and for options that
        it has no place for, BundleError if the template fails, tries to escape, or exceeds a limit on its
        work, output or time.
        """
        checked = self._checked(messages, options)
        tools = [tool.to_dict() for tool in options.tools]
        return self._rendered(checked, tools, options, add_generation_prompt)

    def encode(
        self,
        messages: Sequence[Message],
        tokenizer: Tokenizer,
        *,
        options: PromptOptions = PLAIN,
        add_generation_prompt: bool = True,
        most: int | None = None,
    ) -> list[int]:
        """The prompt's token ids. Special tokens come only from the template, never from a message or a tool.

        A special token's name in a message is encoded as plain text. Raises as `render` does.

        most: number of ids that the caller can use. If there are more, only some of them may be returned, but
            more than `most`.
        """
        checked = self._checked(messages, options)
        for message in checked:
            # Checked first, so that no copies are made of a message longer than any context.
            if most is not None and len(message["content"]) > _LONG_CHARS:
                ids = tokenizer.encode(message["content"], add_bos=False, most=most)
                if len(ids) > most:
                    return ids
        if self.is_default:
            return tokenizer.encode(self._render(checked, {}, add_generation_prompt), most=most)
        names, pattern = tokenizer.special_tokens, tokenizer.special_pattern
        tools = [tool.to_dict() for tool in options.tools]
        marker = absent_character(checked, tools)

        def marked(text: str) -> str:
            return mark(text, pattern, names, marker)

        checked, tools = changed_messages(checked, marked), changed_tools(tools, marked)
        text = self._rendered(checked, tools, options, add_generation_prompt)
        found = list(pattern.finditer(text))
        if marker not in text:
            ids = tokenizer.encode(text, add_bos=False, special=True, most=most)
            # Valid unless the tokenizer recognised other special tokens than those that the template wrote.
            written = sum(token in names.values() for token in ids)
            if written == len(found) or (most is not None and len(ids) > most):
                return ids
        ids, start = [], 0
        for match in found:
            ids += tokenizer.encode(text[start : match.start()].replace(marker, ""), add_bos=False)
            ids.append(names[match[0]])
            start = match.end()
        return ids + tokenizer.encode(text[start:].replace(marker, ""), add_bos=False)

    @property
    def _special(self) -> Mapping[str, int]:
        """Ids of the special tokens, by name."""
        return {} if self._tokenizer is None else self._tokenizer.special_tokens

    def _compile(self, source: str) -> None:
        import jinja2

        from ondevice.chat_template.meter import Meter
        from ondevice.chat_template.sandbox import MeteredEnvironment

        self._environment = MeteredEnvironment()
        self._environment.meter = Meter(_MAX_UNITS, MAX_SECONDS)
        try:
            self._template, self._reads = self._environment.compile_guarded(source)
        except (jinja2.TemplateError, *_FAILURES) as error:
            raise BundleError(
                f"the chat template can't be used: {_reason(error)}; {TEMPLATE_REMEDY}"
            ) from error

    def _checked(self, messages: Sequence[Message], options: PromptOptions) -> list[dict[str, Any]]:
        checked = all_checked(messages)
        if options.tools or uses_tools(checked):
            self._require_tools()
        if isinstance(options.think, str) and EFFORT not in self._reads:
            raise UsageError(
                f"think is {options.think!r}, and this model's chat template knows no levels; "
                "it can be True or False"
            )
        return checked

    def _require_tools(self) -> None:
        """Raises ToolsNotSupportedError if the template has no place for tools."""
        if not self.takes_tools:
            what = (
                "has no place for tools"
                if self._tools_by is None
                else "has calls of a format that isn't known"
            )
            raise ToolsNotSupportedError(f"this model can't call tools: its chat template {what}")

    def _rendered(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]],
        options: PromptOptions,
        add_generation_prompt: bool,
    ) -> str:
        """The prompt's text, of messages and tools in the forms that the template takes."""
        from ondevice.chat_template.meter import TemplateLimit

        given, refusal = size(messages, tools), None
        for placed in self._placements(messages):
            variables = self._thinking(options)
            if tools and self._tools_by is not None:
                placed, more = with_tools(placed, tools, self._tools_by)
                variables |= more
            try:
                return self._render(placed, variables, add_generation_prompt, given)
            except (UsageError, BundleError) as error:
                if isinstance(error.__cause__, TemplateLimit):
                    raise
                refusal = refusal or error
        assert refusal is not None
        raise refusal

    def _placements(self, messages: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
        """The messages in the forms and places in which the template may take them, the best one first."""
        if not uses_tools(messages):
            yield from self._placed(messages)
            return
        form, takes_text = self._call_form, self._takes_text
        yield from self._placed(
            [as_form(message, form, self._format, takes_text) for message in with_short_ids(messages)]
        )
        yield from self._placed(calls_as_text(messages, self._format))

    def _placed(self, messages: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
        """The messages where the template takes them; where that isn't known, one placement after another."""
        kept = None
        if not is_usual(messages):
            kept = next((each for each in placements(messages) if self._keeps(each)), None)
        yield from (placements(messages) if kept is None else [kept])

    def _keeps(self, messages: list[dict[str, Any]]) -> bool:
        """Whether the template writes the text of every user's message and of all instructions, in order, and
        none of these as a reply.

        The first instructions may stand anywhere: some templates put them before the last question.
        """
        short, texts = numbered(messages)
        made = self._tried(short, {})
        replies = [it | {"role": "assistant"} if it["role"] in INSTRUCTIONS else it for it in short[1:]]
        replies = short[:1] + replies
        if replies != short and made == self._tried(replies, {}):
            return False
        places = [made.find(text) for text in texts]
        ordered = places[1:] if messages[0]["role"] in INSTRUCTIONS else places
        return -1 not in places and ordered == sorted(ordered)

    def _thinking(self, options: PromptOptions) -> dict[str, Any]:
        """The variables that tell the template whether, or how much, to think."""
        think = options.think
        if think is None:
            return {}
        if EFFORT in self._reads:
            return {EFFORT: think if isinstance(think, str) else EFFORTS[1 if think else 0]}
        return {} if self._switch is None else {self._switch: bool(think)}

    @cached_property
    def _switch(self) -> str | None:
        """The name by which the template asks whether to think; it must change the prompt."""
        return next((name for name in SWITCHES if name in self._reads and self._asks_for(name)), None)

    def _asks_for(self, name: str) -> bool:
        messages = [{"role": "user", "content": "x"}]
        return self._tried(messages, {name: True}) != self._tried(messages, {name: False})

    @cached_property
    def _tools_by(self) -> str | None:
        """How the template takes tools: by a variable of this name, or by `system`, in that message."""
        tools = [Tool(_PROBE).to_dict()]
        for way in (*(name for name in TOOL_NAMES if name in self._reads), "system"):
            messages, variables = with_tools([{"role": "user", "content": "x"}], tools, way)
            if _PROBE in self._tried(messages, variables):
                return way
        return None

    @cached_property
    def _call_form(self) -> str:
        """How the template takes calls in a message: one of CALL_FORMS."""
        call = ToolCall(_PROBE, {"probe_key": "probe_value"}, "123456789").to_dict()
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "x", "tool_call_id": call["id"], "name": "other"},
        ]
        for form in CALL_FORMS[:-1]:
            text = self._tried([as_form(message, form, None) for message in messages], {})
            if _PROBE in text and "probe_value" in text:
                return form
        return CALL_FORMS[-1]

    @cached_property
    def _takes_text(self) -> bool:
        """Whether the template writes arguments that are a string, which no JSON object is."""
        function = {"name": _PROBE, "arguments": "probe_value"}
        call = {"id": "123456789", "type": "function", "function": function}
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "x", "tool_call_id": call["id"], "name": "other"},
        ]
        form = self._call_form
        return "probe_value" in self._tried([as_form(it, form, None, takes_text=True) for it in messages], {})

    def _tried(self, messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> str:
        """What the template makes of messages; empty if it refuses them or fails."""
        try:
            return self._render(messages, variables, True)
        except (UsageError, BundleError):
            return ""

    @cached_property
    def _openers(self) -> frozenset[int]:
        """The token that begins thinking, if it is one."""
        if self._tokenizer is None or self._marks is None:
            return frozenset()
        ids = self._tokenizer.encode(self._marks[0], add_bos=False, special=True)
        return frozenset(ids if len(ids) == 1 else ())

    def _tail(self, prompt: Sequence[int]) -> str:
        """The text at the end of a prompt, with its special tokens."""
        tokenizer = self._tokenizer
        if tokenizer is None:
            return ""
        names = {token: name for name, token in tokenizer.special_tokens.items()}
        parts = [
            names[token].encode() if token in names else tokenizer.token_bytes(token)
            for token in prompt[-_TAIL:]
        ]
        return b"".join(parts).decode("utf-8", "replace")

    def _render(
        self,
        messages: list[dict[str, Any]],
        variables: Mapping[str, Any],
        add_generation_prompt: bool,
        given: int = 0,
    ) -> str:
        """What the template makes of messages. given: characters in messages and tools, which may be work."""
        import jinja2

        from ondevice.chat_template.meter import MessagesRefused, Meter

        variables = self._names | {
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
            "tools": None,
            "documents": None,
            **variables,
        }
        units = _MAX_UNITS + _UNITS_PER_MESSAGE * len(messages) + _UNITS_PER_CHAR * given
        with self._lock:
            self._environment.meter = Meter(units, MAX_SECONDS)
            try:
                return self._template.render(variables)
            except MessagesRefused as error:
                raise UsageError(f"the chat template refuses these messages: {error}") from error
            except (jinja2.TemplateError, *_FAILURES) as error:
                raise BundleError(f"the chat template failed: {_reason(error)}; {TEMPLATE_REMEDY}") from error


def abilities(source: str) -> tuple[str, ...]:
    """What a template's source tells of a model, by Ollama's words: tools, thinking."""
    calls = CHANNEL in source or recognised(source) is not None
    thinks = CHANNEL in source or any(closes in source for _, closes in THINKING_MARKS)
    takes = calls and any(name in source for name in TOOL_NAMES)
    return (*(("tools",) if takes else ()), *(("thinking",) if thinks else ()))


def _reason(error: BaseException) -> str:
    line = getattr(error, "lineno", None)
    where = f" (line {line})" if line and f"line {line}" not in str(error) else ""
    return f"{type(error).__name__}: {str(error)[:300]}{where}"
