"""Known formats of calls, recognised by marks in chat templates, and formats that need no template."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ondevice.chat_template.call_formats import (
    ARGUMENTS,
    DEEPSEEK_CALL,
    DEEPSEEK_CALL_END,
    DEEPSEEK_CALLS,
    DEEPSEEK_END,
    DEEPSEEK_SEPARATOR,
    GEMMA_QUOTE,
    KIMI_CALL,
    KIMI_CALL_END,
    KIMI_SEPARATOR,
    Call,
    CallFormat,
    Streaming,
    Tools,
    as_json,
    checked_call,
    deepseek_calls,
    gemma_calls,
    glm_calls,
    inside_glm,
    inside_json_or_python,
    inside_string,
    inside_xml,
    json_calls,
    json_or_python_calls,
    kimi_calls,
    mistral_calls,
    python_calls,
    write_bare,
    write_command,
    write_deepseek,
    write_gemma,
    write_glm,
    write_hermes,
    write_kimi,
    write_list,
    write_mistral_args,
    write_xml,
    xml_calls,
)
from ondevice.chat_template.tools import NAME_CHARS

Reader = Callable[[str, Tools], list[Call] | None]

_NAME = rf"([A-Za-z0-9_.-]{{1,{NAME_CHARS}}})"
_GAP = r"\s{0,64}"
_COMMA, _COLON = f"{_GAP},{_GAP}", f"{_GAP}:{_GAP}"
_ARGUMENTS_KEY = f'"(?:{"|".join(ARGUMENTS)})"'
_JSON_HEAD = (
    rf'[\s,;]{{0,64}}(?:\[{_GAP})?\{{?\{{{_GAP}"name"{_COLON}"{_NAME}"{_COMMA}{_ARGUMENTS_KEY}{_COLON}(?=\{{)'
)
_OTHER_KEY = rf'"[^"\\]{{1,64}}"{_COLON}(?:"[^"\\]{{0,256}}"|[-+.\w]{{1,64}})'
_JSON_TAIL = rf"(?:{_COMMA}{_OTHER_KEY})*{_GAP}\}}\}}?(?:{_GAP}\])?"
_CALL_ID = rf"\[CALL_ID\]\w{{0,64}}{_GAP}"
_ARGS_HEAD = rf"{_GAP}(?:\[TOOL_CALLS\]{_GAP})?{_NAME}{_GAP}(?:{_CALL_ID})?(?:\[ARGS\]{_GAP})?(?=\{{)"
_DEEPSEEK_NAME = f"{_NAME}{_GAP}{DEEPSEEK_SEPARATOR}|function{_GAP}{DEEPSEEK_SEPARATOR}{_NAME}{_GAP}```json"
_DEEPSEEK_HEAD = rf"{_GAP}(?:{DEEPSEEK_CALL}{_GAP})?(?:{_DEEPSEEK_NAME}){_GAP}(?=\{{)"
_IN_JSON = Streaming(re.compile(_JSON_HEAD), re.compile(_JSON_TAIL))
_BEHIND_NAMES = Streaming(re.compile(f"{_JSON_HEAD}|{_ARGS_HEAD}"), re.compile(f"(?:{_JSON_TAIL})?"))
_DEEPSEEK = Streaming(
    re.compile(_DEEPSEEK_HEAD), re.compile(rf"(?:{_GAP}```)?(?:{_GAP}{DEEPSEEK_CALL_END})?")
)

_LFM2 = CallFormat(
    "lfm2",
    ("<|tool_call_start|>",),
    ("<|tool_call_start|>",),
    "<|tool_call_end|>",
    json_or_python_calls,
    write_list("<|tool_call_start|>", "<|tool_call_end|>"),
    inside=inside_json_or_python,
)
FORMATS = (
    CallFormat(
        "qwen3-coder",
        ("<tool_call>", "<function=", "<parameter="),
        ("<tool_call>",),
        "</tool_call>",
        xml_calls,
        write_xml("<tool_call>", "</tool_call>"),
        inside=inside_xml,
    ),
    CallFormat(
        "seed",
        ("<seed:tool_call>", "<function="),
        ("<seed:tool_call>",),
        "</seed:tool_call>",
        xml_calls,
        write_xml("<seed:tool_call>", "</seed:tool_call>"),
        inside=inside_xml,
    ),
    CallFormat(
        "glm",
        ("<tool_call>", "<arg_key>", "<arg_value>"),
        ("<tool_call>",),
        "</tool_call>",
        glm_calls,
        write_glm,
        inner=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        inside=inside_glm,
    ),
    CallFormat(
        "mistral-args",
        ("[TOOL_CALLS]", "[ARGS]"),
        ("[TOOL_CALLS]",),
        None,
        mistral_calls,
        write_mistral_args,
        inner=("[ARGS]", "[CALL_ID]"),
        streaming=_BEHIND_NAMES,
    ),
    CallFormat(
        "mistral",
        ("[TOOL_CALLS]",),
        ("[TOOL_CALLS]",),
        None,
        mistral_calls,
        write_list("[TOOL_CALLS]"),
        streaming=_BEHIND_NAMES,
    ),
    CallFormat(
        "deepseek-fenced",
        (DEEPSEEK_CALLS, DEEPSEEK_SEPARATOR, "```json"),
        (DEEPSEEK_CALLS,),
        DEEPSEEK_END,
        deepseek_calls,
        write_deepseek(f"function{DEEPSEEK_SEPARATOR}", "\n```json\n", "\n```", "\n"),
        inner=(DEEPSEEK_CALL, DEEPSEEK_SEPARATOR, DEEPSEEK_CALL_END),
        streaming=_DEEPSEEK,
    ),
    CallFormat(
        "deepseek",
        (DEEPSEEK_CALLS, DEEPSEEK_SEPARATOR),
        (DEEPSEEK_CALLS,),
        DEEPSEEK_END,
        deepseek_calls,
        write_deepseek("", DEEPSEEK_SEPARATOR, "", ""),
        inner=(DEEPSEEK_CALL, DEEPSEEK_SEPARATOR, DEEPSEEK_CALL_END),
        streaming=_DEEPSEEK,
    ),
    CallFormat(
        "gemma4",
        ("<|tool_call>call:", "<tool_call|>"),
        ("<|tool_call>",),
        "<tool_call|>",
        gemma_calls,
        write_gemma,
        inner=(GEMMA_QUOTE,),
    ),
    CallFormat(
        "phi",
        ("<|tool|>", "<|/tool|>"),
        ("<|tool_call|>",),
        "<|/tool_call|>",
        json_calls,
        lambda calls: "".join(f"<|tool_call|>{as_json(*call)}<|/tool_call|>" for call in calls),
        streaming=_IN_JSON,
    ),
    CallFormat(
        "granite",
        ("<|tool_call|>",),
        ("<|tool_call|>",),
        None,
        json_calls,
        write_list("<|tool_call|>"),
        streaming=_IN_JSON,
    ),
    CallFormat(
        "kimi",
        ("<|tool_calls_section_begin|>", KIMI_SEPARATOR),
        ("<|tool_calls_section_begin|>",),
        "<|tool_calls_section_end|>",
        kimi_calls,
        write_kimi,
        inner=(KIMI_CALL, KIMI_SEPARATOR, KIMI_CALL_END),
    ),
    CallFormat(
        "command",
        ("<|START_ACTION|>", "<|END_ACTION|>"),
        ("<|START_ACTION|>",),
        "<|END_ACTION|>",
        json_calls,
        write_command,
    ),
    CallFormat(
        "nemotron",
        ("<TOOLCALL>",),
        ("<TOOLCALL>",),
        "</TOOLCALL>",
        json_calls,
        write_list("<TOOLCALL>", "</TOOLCALL>"),
        streaming=_IN_JSON,
    ),
    _LFM2,
    replace(_LFM2, marks=("<|tool_list_start|>",)),
    replace(_LFM2, marks=("<|im_start|>", "List of tools: ")),
    CallFormat(
        "hermes",
        ("<tool_call>", "</tool_call>"),
        ("<tool_call>",),
        "</tool_call>",
        json_calls,
        write_hermes,
        streaming=_IN_JSON,
    ),
    CallFormat(
        "llama",
        ("<|start_header_id|>", '{"name": ', '"parameters": '),
        ("<|python_tag|>",),
        None,
        json_or_python_calls,
        write_bare,
        bare=True,
        streaming=_IN_JSON,
    ),
    CallFormat(
        "tool-calls",
        ("<tool_calls>",),
        ("<tool_calls>",),
        "</tool_calls>",
        json_calls,
        write_list("<tool_calls>", "</tool_calls>"),
        streaming=_IN_JSON,
    ),
)
"""All formats, those with more marks first."""
HERMES = next(each for each in FORMATS if each.name == "hermes")
"""The format that a model is told to use if its template has none."""


def recognised(template: str) -> CallFormat | None:
    """The format of a template's source; None if no known one is recognised."""
    return next((each for each in FORMATS if all(mark in template for mark in each.marks)), None)


# --- What models write though their templates have another form ---

_CALL_HEAD = re.compile(
    r'\{(?:"type":"function",)?(?:"function":\{)?"(?:name|tool_name|function)":"([A-Za-z0-9_.-]*)("?)'
)
_HEADS = (
    '{"name":"',
    '{"tool_name":"',
    '{"type":"function",',
    '{"function":{',
    '{"function":"',
    '{"parameters":{',
    '{"arguments":{',
)
_OTHER_KEY_HEAD = re.compile(r'\s*,\s*"')
_PYTHON_HEAD = re.compile(r"\[?\s*([A-Za-z0-9_.-]*)(\s*\()?")
_LANGUAGES = ("json", "tool_calls", "tool_call", "tool_code", "")
_LOOKED_AT = 512
"""Characters of a text that decide whether it can be a call."""


def _begins_name(name: str, is_complete: bool, tools: Tools) -> bool:
    return name in tools if is_complete else any(tool.startswith(name) for tool in tools)


def _could_be_json(text: str, tools: Tools) -> bool:
    """Whether JSON that begins with this text can be a call of one of the tools."""
    if _OTHER_KEY_HEAD.match(text):
        # Behind a call's arguments, whose last brace hasn't come yet.
        return len(text) < _LOOKED_AT
    bare = "".join(text[:_LOOKED_AT].split()).lstrip(",;").removeprefix("[").lstrip("]")
    bare = bare[bare.startswith("{{") :]
    named = _CALL_HEAD.match(bare)
    if named is not None and (named[2] or named.end() == len(bare)):
        return _begins_name(named[1], bool(named[2]), tools)
    return any(bare.startswith(head) or head.startswith(bare) for head in _HEADS)


def _could_be_python(text: str, tools: Tools) -> bool:
    """Whether a text that begins with this one can be calls in Python's notation."""
    bare = text[:_LOOKED_AT].strip()
    name, is_complete = _PYTHON_HEAD.match(bare).groups() if bare else ("", None)  # type: ignore[union-attr]
    if is_complete:
        return name.removesuffix(".call") in tools
    return bare.removeprefix("[").lstrip() == name and _begins_name(name, False, tools)


def _fenced(text: str) -> str:
    """The content of a fence, without the name of a language."""
    return text.removeprefix(next(it for it in _LANGUAGES if text.startswith(it)))


def _could_be_fenced(text: str, tools: Tools) -> bool:
    if any(language.startswith(text) for language in _LANGUAGES):
        return True
    inner = _fenced(text)
    return _could_be_json(inner, tools) or _could_be_python(inner, tools)


def _bare_calls(text: str, tools: Tools) -> list[Call] | None:
    return json_calls(text, tools, needs_arguments=True) if _could_be_json(text, tools) else None


def _fenced_calls(text: str, tools: Tools) -> list[Call] | None:
    if not _could_be_fenced(text, tools):
        return None
    inner = _fenced(text)
    return json_calls(inner, tools, needs_arguments=True) or python_calls(inner, tools)


def _listed_calls(text: str, tools: Tools) -> list[Call] | None:
    return python_calls(text, tools) if _could_be_python(text, tools) else None


def _function_calls(text: str, tools: Tools) -> list[Call] | None:
    """Calls as `NAME>` and arguments, in JSON or between marks."""
    name, _, arguments = text.partition(">")
    call = checked_call(name.strip(), arguments.strip(), tools) if arguments.strip()[:1] == "{" else None
    return xml_calls(f"<function={text}</function>", tools) if call is None else [call]


def _inside_function(text: str, tools: Tools) -> bool:
    arguments = text.partition(">")[2].strip()
    if arguments[:1] == "{":
        return inside_string(arguments, tools)
    return inside_xml(f"<function={text}</function>", tools)


def _loose(opens: str, closes: str, read: Reader, **more: Any) -> CallFormat:
    return CallFormat(opens, (), (opens,), closes, read, write_bare, **more)


_FENCED = Streaming(re.compile(rf"(?:{'|'.join(_LANGUAGES)}){_JSON_HEAD}"), re.compile(_JSON_TAIL))
_FUNCTION = Streaming(re.compile(rf"{_GAP}{_NAME}{_GAP}>{_GAP}(?=\{{)"), re.compile(""))
LOOSE = (
    HERMES,
    _loose("<tools>", "</tools>", json_calls, streaming=_IN_JSON),
    _loose("<function=", "</function>", _function_calls, streaming=_FUNCTION, inside=_inside_function),
)
"""Marks that models write instead of their template's."""
FENCE = "```"
LINE_FORMS = {
    "": CallFormat("bare", (), (), None, _bare_calls, write_bare, streaming=_IN_JSON, could=_could_be_json),
    FENCE: CallFormat(
        "fenced", (), (), FENCE, _fenced_calls, write_bare, streaming=_FENCED, could=_could_be_fenced
    ),
    "[": CallFormat(
        "listed",
        (),
        (),
        "]",
        _listed_calls,
        write_bare,
        inside=inside_json_or_python,
        could=_could_be_python,
    ),
}
"""Formats of calls without marks, by how a line begins: JSON, a fence, or a Python list."""
