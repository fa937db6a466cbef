"""Known formats of calls, recognised by marks in chat templates, and formats that need no template."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ondevice.chat_template import call_formats as forms
from ondevice.chat_template.call_formats import (
    ARGUMENTS,
    Call,
    CallFormat,
    Streaming,
    Tools,
    checked_call,
    json_calls,
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
_DEEPSEEK_NAME = (
    f"{_NAME}{_GAP}{forms.DEEPSEEK_SEPARATOR}|function{_GAP}{forms.DEEPSEEK_SEPARATOR}{_NAME}{_GAP}```json"
)
_DEEPSEEK_HEAD = rf"{_GAP}(?:{forms.DEEPSEEK_CALL}{_GAP})?(?:{_DEEPSEEK_NAME}){_GAP}(?=\{{)"
_IN_JSON = Streaming(re.compile(_JSON_HEAD), re.compile(_JSON_TAIL))
_AFTER_NAMES = Streaming(re.compile(f"{_JSON_HEAD}|{_ARGS_HEAD}"), re.compile(f"(?:{_JSON_TAIL})?"))
_DEEPSEEK = CallFormat(
    "deepseek",
    (forms.DEEPSEEK_CALLS, forms.DEEPSEEK_SEPARATOR),
    (forms.DEEPSEEK_CALLS,),
    forms.DEEPSEEK_END,
    forms.deepseek_calls,
    forms.write_deepseek("", forms.DEEPSEEK_SEPARATOR, "", ""),
    inner=(forms.DEEPSEEK_CALL, forms.DEEPSEEK_SEPARATOR, forms.DEEPSEEK_CALL_END),
    streaming=Streaming(
        re.compile(_DEEPSEEK_HEAD), re.compile(rf"(?:{_GAP}```)?(?:{_GAP}{forms.DEEPSEEK_CALL_END})?")
    ),
)

_LFM2 = CallFormat(
    "lfm2",
    ("<|tool_call_start|>",),
    ("<|tool_call_start|>",),
    "<|tool_call_end|>",
    forms.json_or_python_calls,
    forms.write_list("<|tool_call_start|>", "<|tool_call_end|>"),
    inside=forms.inside_json_or_python,
)


def _in_xml(name: str, opens: str, closes: str, *marks: str) -> CallFormat:
    """The format of calls with names and values between marks. marks: strings in its templates, in addition
    to `opens`.
    """
    write = forms.write_xml(opens, closes)
    return CallFormat(
        name, (opens, *marks), (opens,), closes, forms.xml_calls, write, inside=forms.inside_xml
    )


def _json_list(name: str, opens: str, closes: str | None = None) -> CallFormat:
    """The format of calls that are written as one JSON list, recognised by the mark that opens it."""
    write = forms.write_list(opens, closes or "")
    return CallFormat(name, (opens,), (opens,), closes, json_calls, write, streaming=_IN_JSON)


FORMATS = (
    _in_xml("qwen3-coder", "<tool_call>", "</tool_call>", "<function=", "<parameter="),
    _in_xml("seed", "<seed:tool_call>", "</seed:tool_call>", "<function="),
    CallFormat(
        "glm",
        ("<tool_call>", "<arg_key>", "<arg_value>"),
        ("<tool_call>",),
        "</tool_call>",
        forms.glm_calls,
        forms.write_glm,
        inner=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        inside=forms.inside_glm,
    ),
    CallFormat(
        "mistral-args",
        ("[TOOL_CALLS]", "[ARGS]"),
        ("[TOOL_CALLS]",),
        None,
        forms.mistral_calls,
        forms.write_mistral_args,
        inner=("[ARGS]", "[CALL_ID]"),
        streaming=_AFTER_NAMES,
    ),
    replace(_json_list("mistral", "[TOOL_CALLS]"), read=forms.mistral_calls, streaming=_AFTER_NAMES),
    replace(
        _DEEPSEEK,
        name="deepseek-fenced",
        marks=(*_DEEPSEEK.marks, "```json"),
        write=forms.write_deepseek(f"function{forms.DEEPSEEK_SEPARATOR}", "\n```json\n", "\n```", "\n"),
    ),
    _DEEPSEEK,
    CallFormat(
        "gemma4",
        ("<|tool_call>call:", "<tool_call|>"),
        ("<|tool_call>",),
        "<tool_call|>",
        forms.gemma_calls,
        forms.write_gemma,
        inner=(forms.GEMMA_QUOTE,),
    ),
    CallFormat(
        "phi",
        ("<|tool|>", "<|/tool|>"),
        ("<|tool_call|>",),
        "<|/tool_call|>",
        json_calls,
        lambda calls: "".join(f"<|tool_call|>{forms.as_json(*call)}<|/tool_call|>" for call in calls),
        streaming=_IN_JSON,
    ),
    _json_list("granite", "<|tool_call|>"),
    CallFormat(
        "kimi",
        ("<|tool_calls_section_begin|>", forms.KIMI_SEPARATOR),
        ("<|tool_calls_section_begin|>",),
        "<|tool_calls_section_end|>",
        forms.kimi_calls,
        forms.write_kimi,
        inner=(forms.KIMI_CALL, forms.KIMI_SEPARATOR, forms.KIMI_CALL_END),
    ),
    CallFormat(
        "command",
        ("<|START_ACTION|>", "<|END_ACTION|>"),
        ("<|START_ACTION|>",),
        "<|END_ACTION|>",
        json_calls,
        forms.write_command,
    ),
    _json_list("nemotron", "<TOOLCALL>", "</TOOLCALL>"),
    _LFM2,
    replace(_LFM2, marks=("<|tool_list_start|>",)),
    replace(_LFM2, marks=("<|im_start|>", "List of tools: ")),
    CallFormat(
        "hermes",
        ("<tool_call>", "</tool_call>"),
        ("<tool_call>",),
        "</tool_call>",
        json_calls,
        forms.write_hermes,
        streaming=_IN_JSON,
    ),
    CallFormat(
        "llama",
        ("<|start_header_id|>", '{"name": ', '"parameters": '),
        ("<|python_tag|>",),
        None,
        forms.json_or_python_calls,
        forms.write_bare,
        bare=True,
        streaming=_IN_JSON,
    ),
    _json_list("tool-calls", "<tool_calls>", "</tool_calls>"),
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
    """Whether JSON that begins with this text can still become a call of one of the tools."""
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
    """Whether a text that begins with this one can still become calls in Python's notation."""
    bare = text[:_LOOKED_AT].strip()
    name, is_complete = _PYTHON_HEAD.match(bare).groups() if bare else ("", None)  # type: ignore[union-attr]
    if is_complete:
        return name.removesuffix(".call") in tools
    return bare.removeprefix("[").lstrip() == name and _begins_name(name, False, tools)


def _fenced(text: str) -> str:
    """The content of a code fence, without the name of its language."""
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
    return json_calls(inner, tools, needs_arguments=True) or forms.python_calls(inner, tools)


def _listed_calls(text: str, tools: Tools) -> list[Call] | None:
    return forms.python_calls(text, tools) if _could_be_python(text, tools) else None


def _function_calls(text: str, tools: Tools) -> list[Call] | None:
    """Calls written as a name, `>` and arguments, which are JSON or stand between marks. None if it isn't
    one.
    """
    name, _, arguments = text.partition(">")
    call = checked_call(name.strip(), arguments.strip(), tools) if arguments.strip()[:1] == "{" else None
    return forms.xml_calls(f"<function={text}</function>", tools) if call is None else [call]


def _inside_function(text: str, tools: Tools) -> bool:
    arguments = text.partition(">")[2].strip()
    if arguments[:1] == "{":
        return forms.inside_string(arguments, tools)
    return forms.inside_xml(f"<function={text}</function>", tools)


def _loose(opens: str, closes: str, read: Reader, **more: Any) -> CallFormat:
    return CallFormat(opens, (), (opens,), closes, read, forms.write_bare, **more)


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
    "": CallFormat(
        "bare", (), (), None, _bare_calls, forms.write_bare, streaming=_IN_JSON, could=_could_be_json
    ),
    FENCE: CallFormat(
        "fenced", (), (), FENCE, _fenced_calls, forms.write_bare, streaming=_FENCED, could=_could_be_fenced
    ),
    "[": CallFormat(
        "listed",
        (),
        (),
        "]",
        _listed_calls,
        forms.write_bare,
        inside=forms.inside_json_or_python,
        could=_could_be_python,
    ),
}
"""Formats of calls without marks, by how a line begins: JSON, a fence, or a Python list."""
