"""Chat messages: checked, and brought into the forms that templates take."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ondevice.chat_template.call_formats import CallFormat
from ondevice.chat_template.given_text import given, joined, marked, unmarked
from ondevice.chat_template.tools import arguments_text, checked_calls, checked_id, json_text, short_id
from ondevice.errors import UsageError

Message = Mapping[str, Any]
"""A message: its `role` (a lower-case word such as system, user or assistant) and its `content`, a string.

An assistant's may have `tool_calls` and, with them, the `thinking` before them. One of role `tool` has the
`tool_call_id` of the call that it answers."""

_ROLES = ("system", "developer", "user", "assistant", "tool")
"""Words by which templates distinguish messages."""
_MESSAGE_KEYS, _TOOL_KEYS = 3, 2
"""Keys whose names are fixed, by nesting level: of a message, its calls and their functions; of a tool and
its function."""
_ROLE = re.compile(r"[a-z][a-z0-9_-]{0,63}", re.ASCII)
# Noncharacters, which texts don't use. The private area is for texts that contain all of them anyway.
_MARKERS = [*map(chr, range(0xFDD0, 0xFDF0)), *map(chr, range(0xE000, 0xF900))]


def all_checked(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages with the fields that templates read. Raises UsageError for malformed ones.

    The message with a tool's result also gets the tool's name, which some templates read.
    """
    if isinstance(messages, str) or not isinstance(messages, Iterable):
        raise UsageError(f"the messages are {messages!r}; they must be a list of messages")
    checked, names = [], {}
    for each in messages:
        message = _checked(each)
        for call in message.get("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]
        if message["role"] == "tool" and message["tool_call_id"] in names:
            message["name"] = names[message["tool_call_id"]]
        checked.append(message)
    return checked


def _checked(message: Message) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise UsageError(f"the message is {message!r}; it must have a role and a content")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or _ROLE.fullmatch(role) is None:
        raise UsageError(f"message role {role!r} is not a word such as system, user or assistant")
    if not isinstance(content, str):
        raise UsageError(f"the content of a {role} message is {type(content).__name__}; it must be a string")
    checked: dict[str, Any] = {"role": role, "content": content}
    if message.get("tool_calls"):
        if role != "assistant":
            raise UsageError(f"a {role} message has tool_calls; only an assistant's may have them")
        checked["tool_calls"] = checked_calls(message["tool_calls"])
        if isinstance(thought := message.get("thinking"), str) and thought:
            checked["thinking"] = thought
    if role == "tool":
        checked["tool_call_id"] = checked_id(message.get("tool_call_id"))
    return checked


def uses_tools(messages: Sequence[Message]) -> bool:
    """Whether checked messages contain calls or results of tools."""
    return any("tool_calls" in message or message["role"] == "tool" for message in messages)


def with_short_ids(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with calls' ids shortened for the strictest templates."""

    def shortened(message: dict[str, Any]) -> dict[str, Any]:
        if "tool_calls" in message:
            calls = [call | {"id": short_id(call["id"])} for call in message["tool_calls"]]
            return message | {"tool_calls": calls}
        if "tool_call_id" in message:
            return message | {"tool_call_id": short_id(message["tool_call_id"])}
        return message

    return [shortened(message) for message in messages]


def changed_strings(value: Any, change: Callable[[str], str], fixed_levels: int = 0) -> Any:
    """A copy of JSON data with every string changed, including keys.

    fixed_levels: number of outermost levels of objects whose keys stay as they are.
    """
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        inner = max(0, fixed_levels - 1)
        return {
            key if fixed_levels else change(key): changed_strings(item, change, inner)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [changed_strings(item, change, fixed_levels) for item in value]
    return value


def changed_messages(messages: Sequence[Message], change: Callable[[str], str]) -> list[dict[str, Any]]:
    """Copies of checked messages with every string changed, except the keys and roles that templates look
    for.
    """
    roles = [{"role": it["role"]} if it["role"] in _ROLES else {} for it in messages]
    return [
        changed_strings(it, change, _MESSAGE_KEYS) | role for it, role in zip(messages, roles, strict=True)
    ]


def changed_tools(tools: Sequence[Mapping[str, Any]], change: Callable[[str], str]) -> list[dict[str, Any]]:
    """Copies of tools with every string changed, except the keys that templates look for."""
    return [changed_strings(it, change, _TOOL_KEYS) for it in tools]


def size(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> int:
    """Approximate number of characters in messages and tools."""
    plain = sum(len(message["content"]) for message in messages)
    return (
        plain
        + sum(len(json_text(message["tool_calls"])) for message in messages if "tool_calls" in message)
        + (len(json_text(tools)) if tools else 0)
    )


def _absent_character(value: Any) -> str:
    """A character that doesn't occur in JSON data. Raises UsageError if there is none."""
    used = set(json_text(value))
    marker = next((character for character in _MARKERS if character not in used), None)
    if marker is None:
        raise UsageError("calls use every private and noncharacter code point; that isn't text")
    return marker


CALL_FORMS = ("object", "text", "object alone", "text alone", "written")
"""Forms of a message with calls: arguments as an object or as a JSON string, with empty content or none;
last, all in the content."""


def as_form(
    message: dict[str, Any], form: str, format: CallFormat, takes_text: bool = False
) -> dict[str, Any]:
    """A copy of a message with its calls, and the thinking before them, in the form that a template takes.

    Thinking is stored under two names. In a message that also has a text it is left out, because gpt-oss's
    template refuses both.

    takes_text: whether arguments that aren't an object may stay a string. Otherwise all calls of the message
    are written as text, because turning the string into an object would invent an argument.
    """
    calls = message.get("tool_calls")
    if calls is None:
        return message
    thought = message.get("thinking")
    message = {key: value for key, value in message.items() if key != "thinking"}
    if thought and not message["content"]:
        message |= {"thinking": thought, "reasoning_content": thought}
    is_broken = any(isinstance(call["function"]["arguments"], str) for call in calls)
    if form == "written" or (is_broken and not takes_text):
        mark = _absent_character(calls)
        functions = [call["function"] for call in calls]
        pairs = [marked((each["name"], each["arguments"]), mark) for each in functions]
        parts = [text for text in (given(message["content"]), unmarked(format.write(pairs), mark)) if text]
        return {"role": message["role"], "content": joined("\n", parts)}
    if form.startswith("text"):
        calls = [_with_text(call) for call in calls]
    alone = form.endswith("alone") and not message["content"]
    return message | {"tool_calls": calls} | ({"content": None} if alone else {})


def _with_text(call: dict[str, Any]) -> dict[str, Any]:
    """A copy of a call with its arguments as text: JSON, or the string that they already are."""
    function = call["function"]
    return call | {"function": function | {"arguments": arguments_text(function["arguments"])}}


def with_tools(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]], way: str
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The messages and variables for a template that takes tools by `way`: the name of a variable, or
    `system`.
    """
    if way != "system":
        return messages, {way: tools}
    head = messages[0] if messages and messages[0]["role"] == "system" else {"role": "system", "content": ""}
    rest = messages[1:] if messages and messages[0] is head else messages
    return [head | {"tools": json_text([tool["function"] for tool in tools])}, *rest], {}
