"""How model families write calls of tools, recognised by the marks in their chat templates.

A format says where a call begins and ends in a reply, reads what stands between, and writes calls for
templates that leave them out of a conversation. What a format can't read is no call: it stays text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ondevice.chat_template.tools import Tool, json_text, parsed_object

Call = tuple[str, dict[str, Any]]
"""The name of a tool, and arguments."""
Tools = Mapping[str, Tool]
"""Tools that may be called, by name."""

_SEPARATORS = " \t\r\n,;"
_DECODER = json.JSONDecoder()
_ARGUMENTS = ("arguments", "parameters")
_XML_FUNCTION = re.compile(r"\s*<function=([^>\n]*)>(.*?)(?:</function>\s*|\s*\Z)", re.DOTALL)
_XML_PARAMETER = re.compile(
    r"\s*<parameter=([^>\n]*)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|\Z))", re.DOTALL
)
_KEY_AND_VALUE = re.compile(
    r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>(?=\s*(?:<arg_key>|\Z))", re.DOTALL
)
_DEEPSEEK_CALLS, _DEEPSEEK_END, _DEEPSEEK_CALL, _DEEPSEEK_CALL_END, _DEEPSEEK_SEPARATOR = (
    "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"
    for words in ("tool calls begin", "tool calls end", "tool call begin", "tool call end", "tool sep")
)
_GEMMA_QUOTE = '<|"|>'
_GEMMA_KEY = re.compile(r"([{,]\s*)([^\s{}\[\],:\"]+)\s*:")
_PYTHON_WORDS: dict[str, Any] = {"True": True, "False": False, "None": None}


@dataclass(frozen=True)
class CallFormat:
    """One way to write calls.

    marks: strings that a template of this format has, all of them. opens: what begins calls; `closes` ends
    them, or the reply's end. read: the calls in between, or None if they aren't of this format or of another
    tool. write: calls as the model writes them. bare: whether a reply that begins with a brace is a call.
    inner: marks inside of calls, which may be special tokens.
    """

    name: str
    marks: tuple[str, ...]
    opens: tuple[str, ...]
    closes: str | None
    read: Callable[[str, Tools], list[Call] | None]
    write: Callable[[Sequence[Call]], str]
    bare: bool = False
    inner: tuple[str, ...] = ()

    @property
    def texts(self) -> tuple[str, ...]:
        """Everything that the format's replies may have as special tokens."""
        return (*self.opens, *self.inner, *((self.closes,) if self.closes else ()))


def recognised(template: str) -> CallFormat | None:
    """The format of a template's source; None if it has none of those that are known."""
    return next((each for each in FORMATS if all(mark in template for mark in each.marks)), None)


def json_calls(text: str, tools: Tools) -> list[Call] | None:
    """Calls as JSON: an object with a name and arguments, several of them, or a list."""
    values = list(_values(text))
    if values[-1:] == [_BROKEN]:
        return None
    objects = [each for value in values for each in (value if isinstance(value, list) else [value])]
    calls = [_object_call(each, tools) for each in objects]
    return None if not calls or None in calls else [call for call in calls if call is not None]


_BROKEN = object()


def _values(text: str) -> Iterator[Any]:
    """The JSON values of a text, one behind the other; at last _BROKEN if the rest is none."""
    at, end = 0, len(text)
    while True:
        while at < end and text[at] in _SEPARATORS:
            at += 1
        if at == end:
            return
        try:
            value, at = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError):
            yield _BROKEN
            return
        yield value


def _object_call(value: Any, tools: Tools) -> Call | None:
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments: Any = next((value[key] for key in _ARGUMENTS if key in value), {})
    return _checked(value["name"], arguments, tools)


def _checked(name: str, arguments: Any, tools: Tools) -> Call | None:
    """A call, if there is such a tool and its arguments are an object that JSON can hold."""
    if isinstance(arguments, str):
        arguments = parsed_object(arguments)
    if name not in tools or not isinstance(arguments, dict):
        return None
    try:
        json.dumps(arguments, allow_nan=False)
    except (ValueError, RecursionError):
        return None
    return name, arguments


def _xml_calls(text: str, tools: Tools) -> list[Call] | None:
    """`<function=NAME>` with a `<parameter=NAME>` for each argument."""
    return _matched(text, _XML_FUNCTION, lambda found: _xml_call(found[1].strip(), found[2], tools))


def _xml_call(name: str, body: str, tools: Tools) -> Call | None:
    return _pairs_call(name, _pairs(body, _XML_PARAMETER), tools)


def _pairs_call(name: str, pairs: list[tuple[str, str]] | None, tools: Tools) -> Call | None:
    if pairs is None or name not in tools:
        return None
    properties = tools[name].properties
    arguments = {key: _typed(value, properties.get(key)) for key, value in pairs}
    return _checked(name, arguments, tools)


def _matched(
    text: str, pattern: re.Pattern[str], read: Callable[[re.Match[str]], Call | None]
) -> list[Call] | None:
    """What `read` makes of the matches that a text is made of; None where it is not or one is no call."""
    at, calls = 0, []
    text = text.rstrip()
    while at < len(text):
        found = pattern.match(text, at)
        call = None if found is None else read(found)
        if found is None or call is None:
            return None
        calls.append(call)
        at = found.end()
    return calls or None


def _pairs(text: str, pattern: re.Pattern[str]) -> list[tuple[str, str]] | None:
    """Names and values that a text is made of; None where it has something else."""
    at, found = 0, []
    text = text.rstrip()
    while at < len(text):
        match = pattern.match(text, at)
        if match is None:
            return None
        found.append((match[1].strip(), match[2]))
        at = match.end()
    return found


def _typed(text: str, schema: Any) -> Any:
    """An argument that is written bare: a text where the schema wants one, else what its JSON is."""
    wanted = schema.get("type") if isinstance(schema, Mapping) else None
    if wanted == "string":
        return text
    bare = text.strip()
    if bare in _PYTHON_WORDS:
        return _PYTHON_WORDS[bare]
    try:
        return json.loads(bare)
    except (ValueError, RecursionError):
        return text


def _glm_calls(text: str, tools: Tools) -> list[Call] | None:
    """A name, and pairs of `<arg_key>` and `<arg_value>`."""
    name, key, rest = text.partition("<arg_key>")
    call = _pairs_call(name.strip(), _pairs(key + rest, _KEY_AND_VALUE), tools)
    return None if call is None else [call]


def _named_json(separator: str, text: str, tools: Tools) -> Call | None:
    """A name, a separator and the arguments' JSON."""
    name, found, arguments = text.partition(separator)
    return _checked(name.strip(), arguments, tools) if found else None


def _mistral_calls(text: str, tools: Tools) -> list[Call] | None:
    """A list of JSON objects, or, as of later models, a name and arguments for each call."""
    if text.lstrip().startswith(("[{", "[ {", "{")):
        return json_calls(text, tools)
    calls = []
    for part in text.split("[TOOL_CALLS]"):
        name, found, arguments = part.partition("[ARGS]")
        if not found:
            name, found, arguments = part.partition("{")
            arguments = found + arguments
        call = _checked(name.partition("[CALL_ID]")[0].strip(), arguments.strip(), tools) if found else None
        if call is None:
            return None
        calls.append(call)
    return calls


def _deepseek_calls(text: str, tools: Tools) -> list[Call] | None:
    """A name and JSON in each call, or the word `function`, a name and fenced JSON."""
    calls = []
    for part in text.split(_DEEPSEEK_CALL):
        body = part.strip().removesuffix(_DEEPSEEK_CALL_END).strip()
        if not body:
            continue
        name, _, arguments = body.partition(_DEEPSEEK_SEPARATOR)
        if name.strip() == "function" and "```json" in arguments:
            name, _, arguments = arguments.partition("```json")
            arguments = arguments.strip().removesuffix("```")
        call = _checked(name.strip(), arguments.strip(), tools)
        if call is None:
            return None
        calls.append(call)
    return calls or None


def _gemma_calls(text: str, tools: Tools) -> list[Call] | None:
    """`call:NAME{key:value}`: JSON whose keys are bare and whose strings stand between marks."""
    kind, _, rest = text.strip().partition(":")
    name, brace, body = rest.partition("{")
    parts = (brace + body).split(_GEMMA_QUOTE)
    if kind != "call" or len(parts) % 2 == 0:
        return None
    written = [
        json.dumps(part) if at % 2 else _GEMMA_KEY.sub(r'\1"\2":', part) for at, part in enumerate(parts)
    ]
    call = _checked(name.strip(), "".join(written), tools)
    return None if call is None else [call]


def could_be_call(text: str) -> bool:
    """Whether a reply that begins with a brace could still be a call, by its first key."""
    bare = "".join(text[:64].split())
    heads = ('{"name":', '{"type":"function"', '{"function":', '{"parameters":{', '{"arguments":{')
    return any(bare.startswith(head) or head.startswith(bare) for head in heads)


def _as_json(name: str, arguments: Mapping[str, Any], key: str = "arguments") -> str:
    return json_text({"name": name, key: arguments})


def _write_hermes(calls: Sequence[Call]) -> str:
    return "\n".join(f"<tool_call>\n{_as_json(*call)}\n</tool_call>" for call in calls)


def _write_list(mark: str) -> Callable[[Sequence[Call]], str]:
    return lambda calls: f"{mark}[{', '.join(_as_json(*call) for call in calls)}]"


def _write_xml(calls: Sequence[Call]) -> str:
    def written(value: Any) -> str:
        return value if isinstance(value, str) else json_text(value)

    def one(name: str, arguments: Mapping[str, Any]) -> str:
        parameters = "".join(
            f"<parameter={key}>\n{written(value)}\n</parameter>\n" for key, value in arguments.items()
        )
        return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"

    return "\n".join(one(*call) for call in calls)


def _write_glm(calls: Sequence[Call]) -> str:
    def one(name: str, arguments: Mapping[str, Any]) -> str:
        pairs = "".join(
            f"\n<arg_key>{key}</arg_key>\n<arg_value>"
            f"{value if isinstance(value, str) else json_text(value)}</arg_value>"
            for key, value in arguments.items()
        )
        return f"<tool_call>{name}{pairs}\n</tool_call>"

    return "\n".join(one(*call) for call in calls)


def _write_mistral_args(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{json_text(arguments)}" for name, arguments in calls)


def _write_deepseek(calls: Sequence[Call]) -> str:
    inner = "".join(
        f"{_DEEPSEEK_CALL}{name}{_DEEPSEEK_SEPARATOR}{json_text(arguments)}{_DEEPSEEK_CALL_END}"
        for name, arguments in calls
    )
    return f"{_DEEPSEEK_CALLS}{inner}{_DEEPSEEK_END}"


def _write_gemma(calls: Sequence[Call]) -> str:
    def written(value: Any) -> str:
        if isinstance(value, str):
            return f"{_GEMMA_QUOTE}{value}{_GEMMA_QUOTE}"
        if isinstance(value, Mapping):
            return "{" + ",".join(f"{key}:{written(item)}" for key, item in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ",".join(map(written, value)) + "]"
        return json_text(value)

    return "".join(f"<|tool_call>call:{name}{written(arguments)}<tool_call|>" for name, arguments in calls)


def _write_bare(calls: Sequence[Call]) -> str:
    return "; ".join(_as_json(*call, "parameters") for call in calls)


FORMATS = (
    CallFormat(
        "qwen3-coder",
        ("<tool_call>", "<function=", "<parameter="),
        ("<tool_call>",),
        "</tool_call>",
        _xml_calls,
        _write_xml,
    ),
    CallFormat(
        "glm",
        ("<tool_call>", "<arg_key>", "<arg_value>"),
        ("<tool_call>",),
        "</tool_call>",
        _glm_calls,
        _write_glm,
        inner=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    CallFormat(
        "mistral-args",
        ("[TOOL_CALLS]", "[ARGS]"),
        ("[TOOL_CALLS]",),
        None,
        _mistral_calls,
        _write_mistral_args,
        inner=("[ARGS]", "[CALL_ID]"),
    ),
    CallFormat(
        "mistral", ("[TOOL_CALLS]",), ("[TOOL_CALLS]",), None, _mistral_calls, _write_list("[TOOL_CALLS]")
    ),
    CallFormat(
        "deepseek",
        (_DEEPSEEK_CALLS, _DEEPSEEK_SEPARATOR),
        (_DEEPSEEK_CALLS,),
        _DEEPSEEK_END,
        _deepseek_calls,
        _write_deepseek,
        inner=(_DEEPSEEK_CALL, _DEEPSEEK_SEPARATOR, _DEEPSEEK_CALL_END),
    ),
    CallFormat(
        "gemma4",
        ("<|tool_call>call:", "<tool_call|>"),
        ("<|tool_call>",),
        "<tool_call|>",
        _gemma_calls,
        _write_gemma,
        inner=(_GEMMA_QUOTE,),
    ),
    CallFormat(
        "phi",
        ("<|tool|>", "<|/tool|>"),
        ("<|tool_call|>",),
        "<|/tool_call|>",
        json_calls,
        lambda calls: "".join(f"<|tool_call|>{_as_json(*call)}<|/tool_call|>" for call in calls),
    ),
    CallFormat(
        "granite", ("<|tool_call|>",), ("<|tool_call|>",), None, json_calls, _write_list("<|tool_call|>")
    ),
    CallFormat(
        "hermes", ("<tool_call>", "</tool_call>"), ("<tool_call>",), "</tool_call>", json_calls, _write_hermes
    ),
    CallFormat(
        "llama",
        ("<|start_header_id|>", '{"name": ', '"parameters": '),
        ("<|python_tag|>",),
        None,
        json_calls,
        _write_bare,
        bare=True,
    ),
)
"""The formats, those with more marks first."""
