"""Converts chat messages to the prompt text and token ids that a model was tuned on.

A bundle's template is Jinja source from the model's maker, and isn't trusted. It runs in `sandbox`, with the
conventions of Hugging Face `transformers` (its variables, `raise_exception`, `tojson`, `strftime_now`, loop
controls, trimmed blocks). Its clock stands at midnight, so that a conversation's prompts begin alike all day.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import date
from functools import cached_property
from traceback import walk_tb
from typing import Any

from ondevice.chat_template.call_formats import CallFormat
from ondevice.chat_template.channels import CHANNEL, Channels, has_channels
from ondevice.chat_template.dates import written_by
from ondevice.chat_template.forced_calls import call_or_json, forced_call, forced_channel
from ondevice.chat_template.given_text import given, plain, template_tokens
from ondevice.chat_template.known_formats import HERMES, recognised
from ondevice.chat_template.messages import (
    CALL_FORMS,
    Message,
    all_checked,
    as_form,
    changed_messages,
    changed_tools,
    size,
    uses_tools,
    with_short_ids,
    with_tools,
)
from ondevice.chat_template.placement import INSTRUCTIONS, is_usual, numbered, placements
from ondevice.chat_template.replies import THINKING_MARKS, MarkedReply, PlainReply, ReplyParser
from ondevice.chat_template.tools import EFFORTS, PLAIN, PromptOptions, Tool, ToolCall
from ondevice.chat_template.tools_as_text import with_tools_as_text
from ondevice.constraints.constraint import Constraint
from ondevice.errors import BundleError, UsageError
from ondevice.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

MAX_TEMPLATE_CHARS = 64 * 1024
MAX_SECONDS = 5.0
_MAX_UNITS = 4_000_000
_UNITS_PER_MESSAGE = 1000
_UNITS_PER_CHAR = 64
_LONG_CHARS = 1 << 16
"""Characters above which a message is encoded alone first, to see whether it can fit a context."""
TEMPLATE_REMEDY = (
    "give another with --chat-template FILE, to `convert` for good, or to `chat` and `serve` for a run"
)
"""Remedy for an unusable template."""

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
SWITCHES = ("enable_thinking", "thinking", "open_thinking")
"""Variables by which templates ask whether to think."""
EFFORT = "reasoning_effort"
TOOL_NAMES = ("tools", "xml_tools")
"""Variables by which templates ask for tools."""
_TAIL = 8
"""Number of ids at the end of a prompt that are searched for a mark of thinking."""
_PROBE = "probe_tool"
_SHORT_CHAT = [{"role": role, "content": "x"} for role in ("user", "assistant", "user")]
"""A short chat with roles that chat templates know."""


class ChatTemplate:
    """A compiled template. stop: strings that end a reply, in addition to the model's end-of-text tokens."""

    def __init__(
        self, source: str | None, *, bos_token: str = "", eos_token: str = "", day: date | None = None
    ) -> None:
        """source: Jinja text, or None for a plain transcript. day: the date that `strftime_now` returns, or
        None for today.

        Raises BundleError if it doesn't compile.
        """
        self.is_default = source is None
        self.stop = ("\nUser:",) if source is None else ()
        source = DEFAULT_TEMPLATE if source is None else source
        if len(source) > MAX_TEMPLATE_CHARS:
            raise BundleError(
                f"the chat template has {len(source)} characters; the limit is {MAX_TEMPLATE_CHARS}; "
                f"{TEMPLATE_REMEDY}"
            )
        self._names: dict[str, Any] = {
            "bos_token": bos_token,
            "eos_token": eos_token,
            "strftime_now": lambda form: written_by(day or date.today())(form),
        }
        self._tokenizer: Tokenizer | None = None
        self._has_channels = False
        self._marks = next((pair for pair in THINKING_MARKS if pair[1] in source), None)
        self._format = recognised(source)
        self._lock = threading.Lock()
        self._has_said_text = False
        self._compile(source)

    @staticmethod
    def load(source: bytes | None, tokenizer: Tokenizer, day: date | None = None) -> ChatTemplate:
        """The template of a bundle, with the tokenizer's names for bos and eos.

        source: bytes of its file, or None if it has none. day: the date that `strftime_now` returns, or None
        for today.
        """
        text = None if source is None else decoded(source)
        bos = "" if tokenizer.bos_id is None else tokenizer.piece(tokenizer.bos_id)
        eos = tokenizer.piece(tokenizer.eos_ids[0]) if tokenizer.eos_ids else ""
        template = ChatTemplate(text, bos_token=bos, eos_token=eos, day=day)
        template._tokenizer = tokenizer
        template._has_channels = text is not None and has_channels(text, tokenizer.special_tokens)
        return template

    @cached_property
    def always_thinks(self) -> bool:
        """Whether every reply begins with thinking that no option turns off."""
        if self._marks is None or self._switch is not None or EFFORT in self._reads:
            return False
        made = self._tried([{"role": "user", "content": "x"}], {})
        return made.rstrip().endswith(self._marks[0])

    @property
    def takes_tools(self) -> bool:
        """Whether the template takes tools and their calls have a known format.

        Otherwise tools are written into the messages' text, and the model is told the format of calls.
        """
        return self._tools_by is not None and (self._has_channels or self._format is not None)

    @property
    def _call_format(self) -> CallFormat:
        """The format in which the model writes calls. For a template without channels."""
        return self._format if self.takes_tools and self._format is not None else HERMES

    def reply_parser(self, options: PromptOptions = PLAIN, prompt: Sequence[int] = ()) -> ReplyParser:
        """A parser that separates thinking and tool calls from the reply that follows the prompt's token ids.

        Raises UsageError if thinking is to be off but the model can't turn it off.
        """
        if options.reply_prefix is not None:
            prefix, parser = options.reply_prefix, self.reply_parser(replace(options, reply_prefix=None))
            parser.take(None, prefix.thought(self._marks or ()) + prefix.text)
            return parser
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
        calls = self._call_format if tools else None
        return MarkedReply(
            self._marks, thinks, calls, tools, self._special, self._openers, options.calls_alone
        )

    def gate(self, options: PromptOptions = PLAIN, prompt: Sequence[int] = ()) -> ReplyParser | None:
        """A parser that tells which part of the text a constraint applies to; None if it applies to all of
        it.
        """
        return None if self._has_channels and options.must_call else self.reply_parser(options, prompt)

    def forced_call(self, options: PromptOptions) -> Constraint:
        """The constraint for a reply that must call one of the tools named in `options.must_call`.

        Raises UsageError if that can't be enforced, ConstraintError if a tool's schema isn't a valid one.
        """
        tools = [tool for tool in options.tools if tool.name in options.must_call]
        if len(tools) < len(options.must_call):
            raise UsageError(
                f"must_call names {', '.join(options.must_call)[:200]}; not all of them are tools"
            )
        if self._has_channels:
            return forced_channel(tools, self._special)
        return forced_call(self._call_format, tools, self._special, options.parallel_calls)

    def call_or_json(self, options: PromptOptions, answer: Constraint) -> Constraint:
        """The constraint for a reply that is either calls of the tools or a text under the constraint
        `answer`.

        Raises ConstraintError if the two can't be told apart, and if a tool's schema isn't a valid one.
        """
        if self._has_channels:
            return answer
        return call_or_json(self._call_format, options.tools, self._special, options.parallel_calls, answer)

    def render(
        self,
        messages: Sequence[Message],
        *,
        options: PromptOptions = PLAIN,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt's text, made from messages by the template.

        Raises UsageError for malformed messages, for messages that the template refuses, and for options that
        it can't express. Raises BundleError if the template fails, tries to escape, or exceeds a limit on its
        work, output or time.
        """
        checked = self._checked(messages, options)
        tools = [tool.to_dict() for tool in options.tools]
        return plain(self._rendered(checked, tools, options, add_generation_prompt))

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

        A special token's name in a message is encoded as plain text, and the template sees it as it is.
        Raises as `render` does.

        most: number of ids that the caller can use. A longer prompt may be cut, but never to `most` ids or
        fewer.
        """
        ids = self._encoded(messages, tokenizer, options, add_generation_prompt, most)
        if (prefix := options.reply_prefix) is None:
            return ids
        if self._has_channels:
            raise UsageError("replies of this model can't be continued; ask for a new one")
        if self.is_default:
            prefix = replace(prefix, text=f" {prefix.text}")
        return ids + prefix.encode(tokenizer, self._marks or (), self._tail(ids))

    def _encoded(
        self,
        messages: Sequence[Message],
        tokenizer: Tokenizer,
        options: PromptOptions,
        add_generation_prompt: bool,
        most: int | None,
    ) -> list[int]:
        """The token ids that `encode` returns, but without the beginning of a reply."""
        checked = self._checked(messages, options)
        for message in checked:
            # Checked first, so that no copies are made of a message longer than any context.
            if most is not None and len(message["content"]) > _LONG_CHARS:
                ids = tokenizer.encode(message["content"], add_bos=False, most=most)
                if len(ids) > most:
                    return ids
        tools = [tool.to_dict() for tool in options.tools]
        text = self._rendered(checked, tools, options, add_generation_prompt)
        written, names = plain(text), tokenizer.special_tokens
        if self.is_default:
            return tokenizer.encode(written, most=most)
        tokens = template_tokens(text, tokenizer.special_pattern)
        places = [token.span() for token in tokens]
        if places == [match.span() for match in tokenizer.special_pattern.finditer(written)]:
            ids = tokenizer.encode(written, add_bos=False, special=True, most=most)
            special = {*names.values()}
            # Valid unless the tokenizer recognised other special tokens than those that the template wrote.
            count = sum(token in special for token in ids)
            if count == len(tokens) or (most is not None and len(ids) > most):
                return ids
        ids, start = [], 0
        for token in tokens:
            ids += tokenizer.encode(written[start : token.start()], add_bos=False)
            ids.append(names[token[0]])
            start = token.end()
        return ids + tokenizer.encode(written[start:], add_bos=False)

    @property
    def _special(self) -> Mapping[str, int]:
        """Ids of the special tokens by name."""
        return {} if self._tokenizer is None else self._tokenizer.special_tokens

    def _compile(self, source: str) -> None:
        import jinja2

        from ondevice.chat_template.meter import TemplateMeter
        from ondevice.chat_template.sandbox import MeteredEnvironment

        self._environment = MeteredEnvironment()
        self._environment.meter = TemplateMeter(_MAX_UNITS, MAX_SECONDS)
        try:
            self._template, self._reads = self._environment.compile_guarded(source)
        except (jinja2.TemplateError, *_FAILURES) as error:
            raise BundleError(
                f"the chat template can't be used: {_reason(error)}; {TEMPLATE_REMEDY}"
            ) from error

    def _checked(self, messages: Sequence[Message], options: PromptOptions) -> list[dict[str, Any]]:
        checked = all_checked(messages)
        if isinstance(options.think, str) and EFFORT not in self._reads:
            raise UsageError(
                f"think is {options.think!r}, and this model's chat template knows no levels; "
                "it can be True or False"
            )
        return checked

    def _rendered(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]],
        options: PromptOptions,
        add_generation_prompt: bool,
    ) -> str:
        """The prompt's text, from messages and tools in the forms that the template takes.

        The text records which of its parts come from messages and tools.
        """
        from ondevice.chat_template.meter import TemplateLimit

        units, refusal = size(messages, tools), None
        by = self._tools_by if tools and self.takes_tools else None
        for placed in self._placements(messages, tools):
            variables = self._thinking(options)
            if by is not None:
                placed, more = with_tools(placed, changed_tools(tools, given), by)
                variables |= more
            try:
                return self._render(changed_messages(placed, given), variables, add_generation_prompt, units)
            except (UsageError, BundleError) as error:
                if isinstance(error.__cause__, TemplateLimit):
                    raise
                refusal = refusal or error
        assert refusal is not None
        raise refusal

    def _placements(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]
    ) -> Iterator[list[dict[str, Any]]]:
        """Yields the messages in every form and order that the template may take, best first.

        If the template has no place for tools, they are written into the messages.
        """
        if not tools and not uses_tools(messages):
            yield from self._placed(messages)
            return
        if self.takes_tools:
            form, takes_text = self._call_form, self._takes_text
            yield from self._placed(
                [
                    as_form(message, form, self._call_format, takes_text)
                    for message in with_short_ids(messages)
                ]
            )
            # Some templates refuse calls of no result, several at once, and results of no call.
            tools = []
        else:
            self._say_tools_come_as_text()
        yield from self._placed(with_tools_as_text(messages, tools, self._call_format, self._takes_system))

    def _placed(self, messages: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
        """Yields the messages in the order that the template is known to take; if none is known, every order
        to try.
        """
        kept = None
        if not is_usual(messages):
            kept = next((each for each in placements(messages) if self._keeps(each)), None)
        yield from (placements(messages) if kept is None else [kept])

    def _keeps(self, messages: list[dict[str, Any]]) -> bool:
        """Whether the template writes all user messages and instructions in order, and none of them as a
        reply.

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

    def _say_tools_come_as_text(self) -> None:
        """Log, once, that tools are written as text into the messages."""
        if not self._has_said_text:
            self._has_said_text = True
            what = "has no place for tools" if self._tools_by is None else "writes calls in an unknown format"
            logger.warning(
                "the model's chat template %s: it gets them as JSON in its instructions, and is told how to "
                "call them",
                what,
            )

    def _thinking(self, options: PromptOptions) -> dict[str, Any]:
        """The template variables that turn thinking on or off, or set how much the model thinks."""
        think = options.think
        if think is None:
            return {}
        if EFFORT in self._reads:
            return {EFFORT: think if isinstance(think, str) else EFFORTS[1 if think else 0]}
        return {} if self._switch is None else {self._switch: bool(think)}

    @cached_property
    def _switch(self) -> str | None:
        """The variable that turns thinking on or off. It counts only if setting it changes the prompt. None
        without one.
        """
        return next((name for name in SWITCHES if name in self._reads and self._asks_for(name)), None)

    def _asks_for(self, name: str) -> bool:
        messages = [{"role": "user", "content": "x"}]
        return self._tried(messages, {name: True}) != self._tried(messages, {name: False})

    @cached_property
    def _tools_by(self) -> str | None:
        """How the template takes tools: the name of a variable, or `system` if it takes them in the system
        message.
        """
        tools = [Tool(_PROBE).to_dict()]
        for way in (*(name for name in TOOL_NAMES if name in self._reads), "system"):
            messages, variables = with_tools([{"role": "user", "content": "x"}], tools, way)
            if _PROBE in self._tried(messages, variables):
                return way
        return None

    @cached_property
    def _takes_system(self) -> bool:
        """Whether the template writes system instructions into the prompt."""
        return _PROBE in self._tried(
            [{"role": "system", "content": _PROBE}, {"role": "user", "content": "x"}], {}
        )

    @cached_property
    def _call_form(self) -> str:
        """The form in which the template takes a message's calls: one of CALL_FORMS."""
        call = ToolCall(_PROBE, {"probe_key": "probe_value"}, "123456789").to_dict()
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "x", "tool_call_id": call["id"], "name": "other"},
        ]
        for form in CALL_FORMS[:-1]:
            text = self._tried([as_form(message, form, HERMES) for message in messages], {})
            if _PROBE in text and "probe_value" in text:
                return form
        return CALL_FORMS[-1]

    @cached_property
    def _takes_text(self) -> bool:
        """Whether the template also writes call arguments that are a string instead of a JSON object."""
        function = {"name": _PROBE, "arguments": "probe_value"}
        call = {"id": "123456789", "type": "function", "function": function}
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "x", "tool_call_id": call["id"], "name": "other"},
        ]
        form = self._call_form
        taken = [as_form(message, form, HERMES, takes_text=True) for message in messages]
        return "probe_value" in self._tried(taken, {})

    def _tried(self, messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> str:
        """The template's output for these messages, or an empty text if it refuses them or fails."""
        try:
            return self._render(messages, variables, True)
        except (UsageError, BundleError):
            return ""

    @cached_property
    def _openers(self) -> frozenset[int]:
        """The id of the token that begins thinking, if it is one token."""
        if self._tokenizer is None or self._marks is None:
            return frozenset()
        ids = self._tokenizer.encode(self._marks[0], add_bos=False, special=True)
        return frozenset(ids if len(ids) == 1 else ())

    def _tail(self, prompt: Sequence[int]) -> str:
        """The text at the end of a prompt, special tokens included."""
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
        """The template's output. given: number of characters in messages and tools, which bounds the work
        allowed.
        """
        import jinja2

        from ondevice.chat_template.meter import MessagesRefused, TemplateMeter

        variables = self._names | {
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
            "tools": None,
            "documents": None,
            **variables,
        }
        units = _MAX_UNITS + _UNITS_PER_MESSAGE * len(messages) + _UNITS_PER_CHAR * given
        with self._lock:
            self._environment.meter = TemplateMeter(units, MAX_SECONDS)
            try:
                return self._template.render(variables)
            except MessagesRefused as error:
                raise UsageError(f"the chat template refuses these messages: {error}") from error
            except (jinja2.TemplateError, *_FAILURES) as error:
                raise BundleError(f"the chat template failed: {_reason(error)}; {TEMPLATE_REMEDY}") from error


def import_template_library() -> None:
    """Import the library that compiles and fills templates. It stays in the process."""
    import ondevice.chat_template.formatting  # noqa: F401


def decoded(source: bytes) -> str:
    """A template's text. Raises BundleError unless it is UTF-8."""
    try:
        return source.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BundleError(f"the chat template is not UTF-8: {error}; {TEMPLATE_REMEDY}") from error


def try_out(source: str) -> None:
    """Compile a template and run it on a short chat. Raises BundleError if it doesn't compile or fails.

    A template that refuses the chat with `raise_exception` is fine.
    """
    template = ChatTemplate(source)
    with suppress(UsageError):
        template.render(_SHORT_CHAT)


def read_template(path: str | os.PathLike[str]) -> bytes:
    """The bytes of a template in a user's file. Raises UsageError if it can't be read or used."""
    try:
        with open(path, "rb") as stream:
            data = stream.read(4 * MAX_TEMPLATE_CHARS + 1)
        try_out(decoded(data))
    except BundleError as error:
        raise UsageError(f"{os.fspath(path)}: {error.for_command_line}") from error
    except (OSError, ValueError) as error:  # A path with a null byte is a ValueError.
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"the chat template {os.fspath(path)} can't be read: {reason}") from error
    return data


def abilities(source: str) -> tuple[str, ...]:
    """What a model can do, judged by its template's source, in Ollama's words: `tools`, `thinking`."""
    calls = CHANNEL in source or recognised(source) is not None
    thinks = CHANNEL in source or any(closes in source for _, closes in THINKING_MARKS)
    takes = calls and any(name in source for name in TOOL_NAMES)
    return (*(("tools",) if takes else ()), *(("thinking",) if thinks else ()))


def _reason(error: BaseException) -> str:
    """What went wrong, and in which line of the template if that is known."""
    lines = [line for frame, line in walk_tb(error.__traceback__) if frame.f_code.co_filename == "<template>"]
    line = getattr(error, "lineno", None) or next(reversed(lines), None)
    where = f" (line {line})" if line and f"line {line}" not in str(error) else ""
    return f"{type(error).__name__}: {str(error)[:300]}{where}"
