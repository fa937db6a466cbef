"""Formats in which model families write tool calls, recognised by the marks in their chat templates.

A format says where a call begins and ends in a reply, reads what stands between, and writes calls for
templates that leave them out of a conversation. Text that a format can't read as a call stays text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ondevice.chat_template.partial_json import ends_inside
from ondevice.chat_template.python_calls import by_name, ends_inside_calls, read_python_calls
from ondevice.chat_template.tools import Tool, arguments_text, is_text, json_text, parsed_object, plain_data
from ondevice.errors import UsageError
from ondevice.records import dataclass

Call = tuple[str, dict[str, Any]]
"""A tool's name and its arguments."""
WrittenCall = tuple[str, Mapping[str, Any] | str]
"""A call to write. String arguments, which were cut off or are no object, are written unchanged."""
Tools = Mapping[str, Tool]
"""Tools that may be called, by name."""

SEPARATORS = " \t\r\n,;"
_DECODER = json.JSONDecoder()
_NAMES = ("name", "tool_name", "function")
ARGUMENTS = ("arguments", "parameters")
_XML_FUNCTION = re.compile(r"\s*<function=([^>\n]*)>")
_XML_END = re.compile(r"\s*(?:</function>\s*|\Z)")
_STRING = re.compile(r'"[^"\\]*(?:\\(?:.|\Z)[^"\\]*)*("|\Z)', re.DOTALL)
DEEPSEEK_CALLS, DEEPSEEK_END, DEEPSEEK_CALL, DEEPSEEK_CALL_END, DEEPSEEK_SEPARATOR = (
    "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"
    for words in ("tool calls begin", "tool calls end", "tool call begin", "tool call end", "tool sep")
)
KIMI_CALL, KIMI_SEPARATOR, KIMI_CALL_END = (
    f"<|tool_call_{word}|>" for word in ("begin", "argument_begin", "end")
)
GEMMA_QUOTE = '<|"|>'
_GEMMA_KEY = re.compile(r"([{,]\s*)([^\s{}\[\],:\"]+)\s*:")
_PYTHON_WORDS: dict[str, Any] = {"True": True, "False": False, "None": None}


@dataclass(frozen=True)
class Streaming:
    """Where JSON arguments stand, so that they can be reported while they are written.

    head: matches what precedes a call's arguments; one of its groups is the tool's name. tail: matches what
    may follow them and belongs to the call. Each matches a bounded number of spaces and words.
    """

    head: re.Pattern[str]
    tail: re.Pattern[str]


def inside_string(text: str, tools: Tools) -> bool:
    """Whether a text ends inside a JSON string."""
    ends = [match[1] for match in _STRING.finditer(text)]
    return ends[-1:] == [""]


@dataclass(frozen=True)
class CallFormat:
    """One way to write calls.

    marks: strings that all occur in a template of this format. opens: the text that begins calls. closes: the
    text that ends them; the reply's end does too. read: returns the calls in between, or None if they have
    another format or name an unknown tool. write: returns calls as the model writes them. bare: whether the
    model writes calls without a mark. inner: marks inside of calls, which may be special tokens. streaming:
    None if arguments aren't JSON. inside: whether the text so far ends inside an argument, which may contain
    `closes`. could: whether the text after `opens` can still become a call, for an `opens` that also begins
    other texts.
    """

    name: str
    marks: tuple[str, ...]
    opens: tuple[str, ...]
    closes: str | None
    read: Callable[[str, Tools], list[Call] | None]
    write: Callable[[Sequence[WrittenCall]], str]
    bare: bool = False
    inner: tuple[str, ...] = ()
    streaming: Streaming | None = None
    inside: Callable[[str, Tools], bool] = inside_string
    could: Callable[[str, Tools], bool] | None = None

    @property
    def texts(self) -> tuple[str, ...]:
        """All special tokens that replies in this format may contain."""
        return (*self.opens, *self.inner, *((self.closes,) if self.closes else ()))


def json_calls(text: str, tools: Tools, needs_arguments: bool = False) -> list[Call] | None:
    """Calls written as JSON: one object with a name and arguments, several such objects, or a list of them.
    None if the text is anything else.

    needs_arguments: whether an object with a name but no arguments counts as a call only if it says that it
    is one.
    """
    values = list(_values(text))
    if values[-1:] == [_BROKEN]:
        return None
    objects = [each for value in values for each in (value if isinstance(value, list) else [value])]
    calls = [_object_call(each, tools, needs_arguments) for each in objects]
    return None if not calls or None in calls else [call for call in calls if call is not None]


_BROKEN = object()


def _values(text: str) -> Iterator[Any]:
    """Yields the JSON values of a text, one after the other, then _BROKEN if the remaining text
    isn't JSON.
    """
    at, end = 0, len(text)
    while True:
        while at < end and text[at] in SEPARATORS:
            at += 1
        if at == end:
            return
        # Qwen 2.5's template shows calls with doubled braces, which models then write, at times at one end.
        is_doubled = text.startswith("{{", at)
        try:
            value, at = _DECODER.raw_decode(text, at + is_doubled)
        except (ValueError, RecursionError):
            yield _BROKEN
            return
        at += is_doubled and text.startswith("}", at)
        yield value


def _object_call(value: Any, tools: Tools, needs_arguments: bool) -> Call | None:
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value, needs_arguments = value["function"], False
    if not isinstance(value, dict):
        return None
    name = next((value[key] for key in _NAMES if key in value), None)
    if not isinstance(name, str) or (needs_arguments and not any(key in value for key in ARGUMENTS)):
        return None
    return checked_call(name, next((value[key] for key in ARGUMENTS if key in value), None), tools)


def checked_call(name: str, arguments: Any, tools: Tools) -> Call | None:
    """The call, if the tool exists and its arguments are null or an object of plain JSON; otherwise None."""
    if isinstance(arguments, str | None):
        arguments = parsed_object(arguments or "")
    if name not in tools or not isinstance(arguments, dict):
        return None
    try:
        plain_data(arguments, "arguments")
    except (UsageError, RecursionError):
        return None
    return name, arguments


class _Pairs:
    """A format of calls in which names and values stand between marks. Texts are written bare, other values
    as JSON.
    """

    def __init__(self, before: str, separator: str, closing: str, end: str) -> None:
        """The arguments are patterns: of the text before a name, between a name and its value, after a value,
        and after all.
        """
        self._head = re.compile(rf"\s*{before}([^<>\n]*){separator}")
        self._closing = re.compile(rf"{closing}(?=\s*(?:{before}|{end}\Z))")
        self._closing_json = re.compile(rf"\s*{closing}")

    def read(self, text: str, at: int, tool: Tool) -> tuple[dict[str, Any], int, bool]:
        """The arguments that begin at `at`, the position after them, and whether the text ends inside a JSON
        argument.
        """
        arguments: dict[str, Any] = {}
        while head := self._head.match(text, at):
            name = head[1].strip()
            schema, end, value = tool.properties.get(name), None, None
            if not is_text(schema):
                end, value = self._json(text, head.end())
            if end is None:
                end = self._closing.search(text, head.end())
                if end is None:
                    return arguments, at, not is_text(schema) and ends_inside(text, head.end())
                value = _typed(text[head.end() : end.start()], schema)
            arguments[name] = value
            at = end.end()
        return arguments, at, False

    def _json(self, text: str, at: int) -> tuple[re.Match[str] | None, Any]:
        """The match of what follows the JSON value at `at`, and that value.

        The match is None if there is no JSON there, or if something else follows it.
        """
        try:
            value, end = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError):
            return None, None
        return self._closing_json.match(text, end), value


_XML = _Pairs("<parameter=", r">\n?", r"\n?</parameter>", r"</function>|")
_GLM = _Pairs("<arg_key>", r"</arg_key>\s*<arg_value>", "</arg_value>", "")


def _typed(text: str, schema: Any) -> Any:
    """The value of a bare argument: a text if the schema wants one, otherwise the JSON or Python word that it
    spells.
    """
    if is_text(schema):
        return text
    bare = text.strip()
    if bare in _PYTHON_WORDS:
        return _PYTHON_WORDS[bare]
    try:
        return json.loads(bare)
    except (ValueError, RecursionError):
        return text


def _xml_read(text: str, tools: Tools) -> tuple[list[Call] | None, bool]:
    """Calls written as `<function=NAME>` with a `<parameter=NAME>` for each argument, and whether a JSON one
    is incomplete.
    """
    at, calls = 0, []
    text = text.rstrip()
    while at < len(text):
        begin = _XML_FUNCTION.match(text, at)
        name = "" if begin is None else begin[1].strip()
        if begin is None or name not in tools:
            return None, False
        arguments, at, inside = _XML.read(text, begin.end(), tools[name])
        end, call = _XML_END.match(text, at), checked_call(name, arguments, tools)
        if end is None or call is None:
            return None, inside
        calls.append(call)
        at = end.end()
    return calls or None, False


def xml_calls(text: str, tools: Tools) -> list[Call] | None:
    return _xml_read(text, tools)[0]


def inside_xml(text: str, tools: Tools) -> bool:
    return _xml_read(text, tools)[1]


def _glm_read(text: str, tools: Tools) -> tuple[list[Call] | None, bool]:
    """Calls written as a name and pairs of `<arg_key>` and `<arg_value>`, and whether a JSON value is
    incomplete.
    """
    text = text.rstrip()
    name = text.partition("<arg_key>")[0]
    if name.strip() not in tools:
        return None, False
    arguments, at, inside = _GLM.read(text, len(name), tools[name.strip()])
    call = checked_call(name.strip(), arguments, tools)
    return ([call], False) if call is not None and at == len(text) else (None, inside)


def glm_calls(text: str, tools: Tools) -> list[Call] | None:
    return _glm_read(text, tools)[0]


def inside_glm(text: str, tools: Tools) -> bool:
    return _glm_read(text, tools)[1]


def mistral_calls(text: str, tools: Tools) -> list[Call] | None:
    """Calls written as a list of JSON objects or, by later models, as names each followed by arguments."""
    if text.lstrip().startswith(("[{", "[ {", "{")):
        return json_calls(text, tools)
    calls = []
    for part in text.split("[TOOL_CALLS]"):
        name, separator, arguments = part.partition("[ARGS]")
        if not separator:
            name, separator, arguments = part.partition("{")
            arguments = separator + arguments
        call = (
            checked_call(name.partition("[CALL_ID]")[0].strip(), arguments.strip(), tools)
            if separator
            else None
        )
        if call is None:
            return None
        calls.append(call)
    return calls


def deepseek_calls(text: str, tools: Tools) -> list[Call] | None:
    """Calls written as a name and JSON, or as the word `function`, a name and JSON in a fence."""
    calls = []
    for part in text.split(DEEPSEEK_CALL):
        body = part.strip().removesuffix(DEEPSEEK_CALL_END).strip()
        if not body:
            continue
        name, _, arguments = body.partition(DEEPSEEK_SEPARATOR)
        if name.strip() == "function" and "```json" in arguments:
            name, _, arguments = arguments.partition("```json")
            arguments = arguments.strip().removesuffix("```")
        call = checked_call(name.strip(), arguments.strip(), tools)
        if call is None:
            return None
        calls.append(call)
    return calls or None


def gemma_calls(text: str, tools: Tools) -> list[Call] | None:
    """Calls written as `call:NAME{key:value}`: JSON with bare keys, and strings between marks."""
    kind, _, rest = text.strip().partition(":")
    name, brace, body = rest.partition("{")
    parts = (brace + body).split(GEMMA_QUOTE)
    if kind != "call" or len(parts) % 2 == 0:
        return None
    written = [
        json.dumps(part) if at % 2 else _GEMMA_KEY.sub(r'\1"\2":', part) for at, part in enumerate(parts)
    ]
    call = checked_call(name.strip(), "".join(written), tools)
    return None if call is None else [call]


def python_calls(text: str, tools: Tools) -> list[Call] | None:
    """Calls written in Python's notation, with or without brackets around them."""
    calls = []
    for name, values, named in read_python_calls(text) or ():
        tool = tools.get(name)
        arguments = None if tool is None else by_name(values, named, list(tool.properties))
        call = None if arguments is None else checked_call(name, arguments, tools)
        if call is None:
            return None
        calls.append(call)
    return calls or None


def json_or_python_calls(text: str, tools: Tools) -> list[Call] | None:
    """Calls written in JSON or in Python's notation."""
    return json_calls(text, tools) or python_calls(text, tools)


def inside_json_or_python(text: str, tools: Tools) -> bool:
    """Whether a text ends inside calls in JSON or Python."""
    is_json = text.lstrip().startswith(("{", "[{", "[ {"))
    return inside_string(text, tools) if is_json else ends_inside_calls(text)


def kimi_calls(text: str, tools: Tools) -> list[Call] | None:
    """Calls written as `functions.NAME:NUMBER` and JSON."""
    calls = []
    for part in text.split(KIMI_CALL):
        body = part.strip().removesuffix(KIMI_CALL_END).strip()
        if not body:
            continue
        name, _, arguments = body.partition(KIMI_SEPARATOR)
        name = name.strip().removeprefix("functions.").rpartition(":")[0] or name.strip()
        call = checked_call(name, arguments.strip(), tools)
        if call is None:
            return None
        calls.append(call)
    return calls or None


def as_json(name: str, arguments: Mapping[str, Any] | str, key: str = "arguments") -> str:
    return f'{{"name": {json_text(name)}, "{key}": {arguments_text(arguments)}}}'


def write_hermes(calls: Sequence[WrittenCall]) -> str:
    return "\n".join(f"<tool_call>\n{as_json(*call)}\n</tool_call>" for call in calls)


def write_list(mark: str, closes: str = "") -> Callable[[Sequence[WrittenCall]], str]:
    """A function that writes calls as one JSON list."""
    return lambda calls: f"{mark}[{', '.join(as_json(*call) for call in calls)}]{closes}"


def write_kimi(calls: Sequence[WrittenCall]) -> str:
    inner = "".join(
        f"{KIMI_CALL}functions.{name}:{number}{KIMI_SEPARATOR}{arguments_text(arguments)}{KIMI_CALL_END}"
        for number, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


def write_command(calls: Sequence[WrittenCall]) -> str:
    """Calls in the notation of Command models, numbered as these number them."""
    listed = ", ".join(
        f'{{"tool_call_id": "{number}", "tool_name": {json_text(name)}, '
        f'"parameters": {arguments_text(arguments)}}}'
        for number, (name, arguments) in enumerate(calls)
    )
    return f"<|START_ACTION|>[{listed}]<|END_ACTION|>"


def write_xml(opens: str, closes: str) -> Callable[[Sequence[WrittenCall]], str]:
    """A function that writes calls with names and values between marks, each call between `opens` and
    `closes`.
    """

    def written(value: Any) -> str:
        return value if isinstance(value, str) else json_text(value)

    def one(name: str, arguments: Mapping[str, Any] | str) -> str:
        if isinstance(arguments, str):
            parameters = f"{arguments}\n"
        else:
            parameters = "".join(
                f"<parameter={key}>\n{written(value)}\n</parameter>\n" for key, value in arguments.items()
            )
        return f"{opens}\n<function={name}>\n{parameters}</function>\n{closes}"

    return lambda calls: "\n".join(one(*call) for call in calls)


def write_glm(calls: Sequence[WrittenCall]) -> str:
    def one(name: str, arguments: Mapping[str, Any] | str) -> str:
        if isinstance(arguments, str):
            return f"<tool_call>{name}\n{arguments}\n</tool_call>"
        pairs = "".join(
            f"\n<arg_key>{key}</arg_key>\n<arg_value>"
            f"{value if isinstance(value, str) else json_text(value)}</arg_value>"
            for key, value in arguments.items()
        )
        return f"<tool_call>{name}{pairs}\n</tool_call>"

    return "\n".join(one(*call) for call in calls)


def write_mistral_args(calls: Sequence[WrittenCall]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{arguments_text(arguments)}" for name, arguments in calls)


def write_deepseek(
    before: str, before_json: str, after_json: str, between: str
) -> Callable[[Sequence[WrittenCall]], str]:
    """A function that writes calls with these texts before the name, before and after the arguments, and
    between calls.
    """

    def written(calls: Sequence[WrittenCall]) -> str:
        each = (
            f"{before}{name}{before_json}{arguments_text(arguments)}{after_json}" for name, arguments in calls
        )
        inner = between.join(f"{DEEPSEEK_CALL}{text}{DEEPSEEK_CALL_END}" for text in each)
        return f"{DEEPSEEK_CALLS}{inner}{DEEPSEEK_END}"

    return written


def written_gemma(value: Any) -> str:
    """A value in Gemma's notation: texts between marks, keys bare."""
    if isinstance(value, str):
        return f"{GEMMA_QUOTE}{value}{GEMMA_QUOTE}"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{written_gemma(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(written_gemma, value)) + "]"
    return json_text(value)


def write_gemma(calls: Sequence[WrittenCall]) -> str:
    texts = (
        (name, arguments if isinstance(arguments, str) else written_gemma(arguments))
        for name, arguments in calls
    )
    return "".join(f"<|tool_call>call:{name}{text}<tool_call|>" for name, text in texts)


def write_bare(calls: Sequence[WrittenCall]) -> str:
    return "; ".join(as_json(*call, "parameters") for call in calls)
