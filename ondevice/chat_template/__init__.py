"""Converts chat messages to the prompt text and token ids that a model was tuned on.

A bundle's template is Jinja source from the model's maker, and isn't trusted. It runs in `sandbox`, with the
conventions of Hugging Face `transformers` (its variables, `raise_exception`, `tojson`, loop controls, trimmed
blocks) but without a clock, so that the same messages always give the same text. A template that calls
`strftime_now` without asking whether there is one gets the day on which it was loaded.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date
from typing import Any

from ondevice.chat_template.channels import Channels, PlainReply, ReplyParser, has_channels
from ondevice.errors import BundleError, UsageError
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
_DIRECTIVE = re.compile(r"%(-?.?)", re.DOTALL)
_MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October",
    "November", "December",
)  # fmt: skip
_ROLE = re.compile(r"[a-z][a-z0-9_-]{0,63}", re.ASCII)
# Noncharacters, which texts don't use. The private area is for texts that contain all of them anyway.
_MARKERS = [*map(chr, range(0xFDD0, 0xFDF0)), *map(chr, range(0xE000, 0xF900))]

Message = Mapping[str, str]
"""A message: its `role` (a lower-case word such as system, user or assistant) and its `content`."""


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
            self._names["strftime_now"] = _written_by(date.today())
        self._channels: Mapping[str, int] | None = None
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
        if text is not None and has_channels(text, tokenizer.special_tokens):
            template._channels = tokenizer.special_tokens
        return template

    def reply_parser(self) -> ReplyParser:
        """What tells thinking from the reply in one reply of the model."""
        return PlainReply() if self._channels is None else Channels(self._channels)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The prompt's text.

        Raises UsageError for messages that are malformed or that the template refuses, BundleError if the
        template fails, tries to escape, or exceeds a limit on its work, output or time.
        """
        checked = _all_checked(messages)
        return self._render(checked, add_generation_prompt)

    def encode(
        self,
        messages: Sequence[Message],
        tokenizer: Tokenizer,
        *,
        add_generation_prompt: bool = True,
        most: int | None = None,
    ) -> list[int]:
        """The prompt's token ids. Special tokens come only from the template, never from a message.

        A special token's name in a message is encoded as plain text. Raises as `render` does.

        most: number of ids that the caller can use. If there are more, only some of them may be returned, but
            more than `most`.
        """
        checked = _all_checked(messages)
        for message in checked:
            # Checked first, so that no copies are made of a message longer than any context.
            if most is not None and len(message["content"]) > _LONG_CHARS:
                ids = tokenizer.encode(message["content"], add_bos=False, most=most)
                if len(ids) > most:
                    return ids
        if self.is_default:
            return tokenizer.encode(self._render(checked, add_generation_prompt), most=most)
        names, pattern = tokenizer.special_tokens, tokenizer.special_pattern
        marker = _absent_character(checked)
        marked = [
            message | {"content": _mark(message["content"], pattern, names, marker)} for message in checked
        ]
        text = self._render(marked, add_generation_prompt)
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

    def _compile(self, source: str) -> None:
        import jinja2

        from ondevice.chat_template.meter import Meter
        from ondevice.chat_template.sandbox import MeteredEnvironment

        self._environment = MeteredEnvironment()
        self._environment.meter = Meter(_MAX_UNITS, MAX_SECONDS)
        try:
            self._template = self._environment.compile_guarded(source)
        except (jinja2.TemplateError, *_FAILURES) as error:
            raise BundleError(
                f"the chat template can't be used: {_reason(error)}; {TEMPLATE_REMEDY}"
            ) from error

    def _render(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        import jinja2

        from ondevice.chat_template.meter import MessagesRefused, Meter

        variables = self._names | {
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
            "tools": None,
            "documents": None,
        }
        given = sum(len(message["content"]) for message in messages)
        units = _MAX_UNITS + _UNITS_PER_MESSAGE * len(messages) + _UNITS_PER_CHAR * given
        with self._lock:
            self._environment.meter = Meter(units, MAX_SECONDS)
            try:
                return self._template.render(variables)
            except MessagesRefused as error:
                raise UsageError(f"the chat template refuses these messages: {error}") from error
            except (jinja2.TemplateError, *_FAILURES) as error:
                raise BundleError(f"the chat template failed: {_reason(error)}; {TEMPLATE_REMEDY}") from error


def _written_by(day: date) -> Callable[[str], str]:
    """`strftime_now` of a day, by the directives that templates use, in English whatever the machine's
    language.
    """
    month = _MONTHS[day.month - 1]
    parts = {
        "Y": f"{day.year:04}",
        "m": f"{day.month:02}",
        "d": f"{day.day:02}",
        "-d": f"{day.day}",
        "B": month,
        "b": month[:3],
        "%": "%",
    }

    def written(form: str) -> str:
        if not isinstance(form, str):
            raise TypeError(f"strftime_now takes a form of dates, not {type(form).__name__}")
        unknown = [found for found in _DIRECTIVE.findall(form) if found not in parts]
        if unknown:
            raise ValueError(f"strftime_now knows no %{unknown[0]}; it knows %{', %'.join(parts)}")
        return _DIRECTIVE.sub(lambda match: parts[match[1]], form)

    return written


def _all_checked(messages: Sequence[Message]) -> list[dict[str, str]]:
    """The messages with their roles and contents. Raises UsageError for malformed ones."""
    if isinstance(messages, str) or not isinstance(messages, Iterable):
        raise UsageError(f"the messages are {messages!r}; they must be a list of messages")
    return [_checked(message) for message in messages]


def _checked(message: Message) -> dict[str, str]:
    if not isinstance(message, Mapping):
        raise UsageError(f"the message is {message!r}; it must have a role and a content")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or _ROLE.fullmatch(role) is None:
        raise UsageError(f"message role {role!r} is not a word such as system, user or assistant")
    if not isinstance(content, str):
        raise UsageError(f"the content of a {role} message is {type(content).__name__}; it must be a string")
    return {"role": role, "content": content}


def _absent_character(messages: list[dict[str, str]]) -> str:
    used = set().union(*(message["content"] for message in messages))
    marker = next((character for character in _MARKERS if character not in used), None)
    if marker is None:
        raise UsageError("the messages use every private and noncharacter code point; that isn't text")
    return marker


def _mark(content: str, pattern: re.Pattern[str], names: Mapping[str, int], marker: str) -> str:
    """`content` with `marker` inside every special token's name, and inside a partial name at its end."""
    content = pattern.sub(lambda match: match[0][0] + marker + match[0][1:], content)
    body = content.rstrip()
    starts = {
        name[:length] for name in names for length in range(1, len(name)) if body.endswith(name[:length])
    }
    if not starts:
        return content
    at = len(body) - max(map(len, starts)) + 1
    return content[:at] + marker + content[at:]


def _reason(error: BaseException) -> str:
    line = getattr(error, "lineno", None)
    where = f" (line {line})" if line and f"line {line}" not in str(error) else ""
    return f"{type(error).__name__}: {str(error)[:300]}{where}"
