"""Writes tools, calls and results as plain text, for chat templates without a place for them.

The model is told what it may call, and how, in its instructions. Calls in a conversation stand in the text of
the assistant's messages, results in messages of the user.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ondevice.chat_template.call_formats import CallFormat
from ondevice.chat_template.given_text import GivenText, given, joined
from ondevice.chat_template.messages import as_form
from ondevice.chat_template.tools import json_text

_SYSTEM = ("system", "developer")
_BEFORE = "You can call these functions. Each line describes one as JSON:\n<tools>\n"
_AFTER = """
</tools>
To call a function, reply with its name and arguments as JSON, in this form and nothing else:
<tool_call>
{"name": "NAME", "arguments": {"KEY": "VALUE"}}
</tool_call>
For several calls, write several such blocks. The results then come between <tool_response> and \
</tool_response>. If no function helps, reply in plain words."""


def with_tools_as_text(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    format: CallFormat,
    takes_system: bool,
) -> list[dict[str, Any]]:
    """The messages as plain texts, with tools described in the instructions, and calls and results written as
    text.

    takes_system: whether the template takes instructions; otherwise they begin the first user message.
    """
    texts: list[dict[str, Any]] = []
    heads = [given(message["content"]) for message in messages[:1] if message["role"] in _SYSTEM]
    if tools:
        heads.append(_instructions(tools))
    has_results = False
    for message in messages[1:] if messages and messages[0]["role"] in _SYSTEM else messages:
        is_result = message["role"] == "tool"
        plain = as_form(dict(message), "written", format)
        content = _result(message["content"]) if is_result else given(plain["content"])
        is_user = is_result or message["role"] == "user"
        if is_user and texts and texts[-1]["role"] == "user" and (is_result or has_results):
            texts[-1] = _text("user", [texts[-1]["content"], content], "\n")
        else:
            texts.append(_text("user" if is_user else message["role"], [content]))
        has_results = is_result
    if not heads:
        return texts
    if takes_system:
        return [_text("system", heads), *texts]
    if texts and texts[0]["role"] == "user":
        return [_text("user", [*heads, texts[0]["content"]]), *texts[1:]]
    return [_text("user", heads), *texts]


def _text(role: str, parts: Sequence[GivenText], between: str = "\n\n") -> dict[str, Any]:
    """A message whose text is made of these parts. Empty parts are skipped."""
    return {"role": role, "content": _made(joined(between, [part for part in parts if part]))}


def _instructions(tools: Sequence[Mapping[str, Any]]) -> GivenText:
    listed = joined("\n", [given(json_text(tool["function"])) for tool in tools])
    return _made(joined("", (_BEFORE, listed, _AFTER)))


def _result(content: str) -> GivenText:
    return _made(joined("", ("<tool_response>\n", given(content), "\n</tool_response>")))


def _made(text: str) -> GivenText:
    """A GivenText of this text, with the parts that were given, if any."""
    return text if isinstance(text, GivenText) else GivenText(text, ())
