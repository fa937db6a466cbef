"""The conversation and the tools of a request to `/v1/responses`.

Items are messages, reasoning, calls and their outputs. Calls of tools that aren't functions, made by another
model, become usual calls if a client ran them. Calls that a server ran are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ondevice.chat_template.messages import Message
from ondevice.serve.content import take_text, told_text
from ondevice.serve.fields import Fields
from ondevice.serve.tools import call_message, flat_tool

NO_STATE = "this server keeps no responses; send the whole conversation"
ROLES = ("system", "developer", "user", "assistant")
_REQUESTS = ("arguments", "input", "action", "operation", "actions")
"""Fields with a call's arguments, in calls of all kinds."""


class Namespaces:
    """The tools of a request in their groups.

    The model knows each tool by its name. If two names are equal, the name of the group is put before the
    tool's.
    """

    def __init__(self, tools: Any = None) -> None:
        """tools: the field `tools` of the request."""
        self._plain = {it.get("name") for it in _objects(tools) if it.get("type") != "namespace"}
        self._groups: dict[str, tuple[str, str]] = {}
        """The group and the name in it, by the name that the model knows."""
        self._known: dict[tuple[str | None, str], str] = {}
        """The inverse of `_groups`."""

    def read(self, fields: Fields) -> list[dict[str, Any]]:
        """The functions in one entry of `tools`: a single one, or those of a group."""
        if fields.peek("type") != "namespace":
            return flat_tool(fields)
        if not isinstance(fields.peek("tools"), list):
            fields.leave_out("type", "tools of type namespace", "is 'namespace', which has no tools")
            return []
        fields.ignore("type")
        group, tools = fields.required_text("name"), []
        for each in fields.objects("tools"):
            for tool in flat_tool(each):
                tools.append(self._named(tool, group))
        fields.ignore("description")
        fields.close()
        return tools

    def _named(self, tool: dict[str, Any], group: str) -> dict[str, Any]:
        plain = tool["function"]["name"]
        name = f"{group}.{plain}" if plain in self._groups or plain in self._plain else plain
        self._groups[name] = (group, plain)
        self._known.setdefault((group, plain), name)
        return tool | {"function": tool["function"] | {"name": name}}

    def known(self, group: str | None, plain: str) -> str:
        """The name by which the model knows the tool `plain` of a group."""
        return self._known.get((group, plain), plain)

    def told(self, name: str) -> dict[str, str]:
        """The fields with which a response names a tool that the model calls."""
        if name not in self._groups:
            return {"name": name}
        group, plain = self._groups[name]
        return {"name": plain, "namespace": group}


def _objects(value: Any) -> list[dict[str, Any]]:
    return [it for it in value if isinstance(it, dict)] if isinstance(value, list) else []


def take_input(fields: Fields, namespaces: Namespaces) -> tuple[Message, ...]:
    """The conversation: a user's text, or a list of messages, calls and results. Reasoning before calls is
    kept."""
    value = fields.take("input")
    if isinstance(value, str):
        return ({"role": "user", "content": value},)
    if not isinstance(value, list):
        fields.refuse("input", "must be a string or a list of items")
    messages: list[dict[str, Any]] = []
    thought = ""
    for at, each in enumerate(value):
        item = fields.inner(each, f"input[{at}]")
        kind = item.text("type", "message") or "message"
        if kind == "reasoning":
            thought = _take_reasoning(item)
            continue
        if kind == "message":
            messages.append(_take_message(item))
        elif kind == "function_call_output" or (kind.endswith("_output") and item.peek("call_id")):
            messages.append(_take_result(item))
        elif kind == "function_call" or item.peek("call_id"):
            _add_call(messages, item, kind, namespaces)
            messages[-1].setdefault("thinking", thought)
            thought = ""
        else:
            _leave_out(item, kind)
            continue
        item.ignore("id", "status", "phase")
        item.close()
    if not messages:
        fields.refuse("input", "has no messages; give at least one")
    return tuple(messages)


def _take_reasoning(item: Fields) -> str:
    """The text of a reasoning item; empty if it has none."""
    texts = (part.get("text") for part in _objects(item.take("content")))
    return "".join(text for text in texts if isinstance(text, str))


def _take_message(item: Fields) -> dict[str, Any]:
    role = item.required_text("role")
    if role not in ROLES:
        item.refuse("role", f"is {role[:40]!r}; it must be {', '.join(ROLES)}")
    text = take_text(item, "content", written=role == "assistant")
    return {"role": "system" if role == "developer" else role, "content": text}


def _add_call(messages: list[dict[str, Any]], item: Fields, kind: str, namespaces: Namespaces) -> None:
    """Add a call to the assistant's message before it, or to a new one."""
    name = item.text("name") or kind.removesuffix("_call")
    known = namespaces.known(item.text("namespace"), name)
    field = next((each for each in _REQUESTS if item.peek(each) is not None), "arguments")
    value = item.take(field)
    # A value that isn't JSON, such as a patch, becomes the call's only argument.
    arguments = {field: value} if field != "arguments" and isinstance(value, str) else value
    call = call_message(item.text("call_id", "") or "", known, arguments)
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    messages[-1].setdefault("tool_calls", []).append(call)


def _take_result(item: Fields) -> dict[str, Any]:
    name = "tools" if item.peek("output") is None and item.peek("tools") is not None else "output"
    return {"role": "tool", "content": told_text(item, name), "tool_call_id": item.text("call_id")}


def _leave_out(item: Fields, kind: str) -> None:
    """Leave out an item that a server ran. Raises RequestError if it refers to a stored item."""
    if kind == "item_reference":
        item.refuse("type", f"is {kind!r}, and {NO_STATE}")
    why = f"is {kind[:40]!r}, and this server takes messages, calls and results"
    item.leave_out("type", f"input of type {kind}", why)


def echoed_tools(tools: Sequence[Mapping[str, Any]], namespaces: Namespaces) -> list[dict[str, Any]]:
    """The tools that the model got, in the form in which a response repeats them."""
    return [
        {"type": "function", "strict": False} | tool["function"] | namespaces.told(tool["function"]["name"])
        for tool in tools
    ]
