"""Tools in requests: their definitions, which of them may be called, and calls and results in messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from ondevice.chat_template import EFFORT
from ondevice.chat_template.messages import Message, all_checked
from ondevice.chat_template.tools import EFFORTS, PLAIN, PromptOptions, Think
from ondevice.errors import UsageError
from ondevice.generate import Event
from ondevice.serve.fields import Fields
from ondevice.serve.models import ModelFacts


@dataclass(frozen=True)
class Choice:
    """What a request says of calling tools: whether one may be called, or must be, and of which name."""

    may: bool = True
    must: bool = False
    name: str | None = None


AUTO, NONE, REQUIRED = Choice(), Choice(may=False), Choice(must=True)


def take_tools(
    fields: Fields, read: Callable[[Fields], dict[str, Any]], name: str = "tools"
) -> PromptOptions:
    """The tools of a request, each read by `read` to OpenAI's shape."""
    value = fields.take(name)
    if value is None:
        return PLAIN
    if not isinstance(value, list):
        fields.refuse(name, "must be a list of tools")
    tools = [read(Fields(each, f"{fields.full(name)}[{at}]")) for at, each in enumerate(value)]
    try:
        return PromptOptions.checked(tools, None)
    except UsageError as error:
        fields.refuse(name, f"can't be used: {error.for_command_line}")


def function_tool(fields: Fields) -> dict[str, Any]:
    """A tool as chats of OpenAI's and Ollama's have it."""
    _require_function(fields)
    function = fields.object("function")
    if function is None:
        fields.refuse("function", "is missing")
    found = _definition(function, "parameters")
    function.ignore("strict")
    function.close()
    fields.close()
    return found


def flat_tool(fields: Fields) -> dict[str, Any]:
    """A tool as OpenAI's responses have it."""
    _require_function(fields)
    found = _definition(fields, "parameters")
    fields.ignore("strict")
    fields.close()
    return found


def anthropic_tool(fields: Fields) -> dict[str, Any]:
    """A tool as Anthropic's messages have it."""
    kind = fields.text("type")
    if kind not in (None, "custom"):
        fields.refuse("type", f"is {str(kind)[:40]!r}; this server has no tools of its own, but custom")
    found = _definition(fields, "input_schema")
    fields.ignore(
        "cache_control",
        "strict",
        "input_examples",
        "eager_input_streaming",
        "defer_loading",
        "allowed_callers",
    )
    fields.close()
    return found


def _require_function(fields: Fields) -> None:
    kind = fields.text("type", "function")
    if kind != "function":
        fields.refuse(
            "type", f"is {str(kind)[:40]!r}; this server has no tools of its own, and takes functions"
        )


def _definition(fields: Fields, schema: str) -> dict[str, Any]:
    name, description = fields.required_text("name"), fields.text("description")
    parameters = fields.take(schema)
    if parameters is not None and not isinstance(parameters, dict):
        fields.refuse(schema, "must be a JSON schema, an object")
    function = {"name": name, "description": description or "", "parameters": parameters}
    return {"type": "function", "function": function}


def take_choice(fields: Fields, named: Callable[[Fields], str]) -> Choice:
    """OpenAI's `tool_choice`: a word, or an object of which `named` reads the tool's name."""
    value = fields.take("tool_choice")
    words = {"auto": AUTO, "none": NONE, "required": REQUIRED}
    if value is None:
        return AUTO
    if isinstance(value, str):
        if value not in words:
            fields.refuse("tool_choice", f"is {value[:40]!r}; it must be auto, none, required or a function")
        return words[value]
    given = Fields(value, fields.full("tool_choice"))
    kind = given.required_text("type")
    if kind != "function":
        given.refuse("type", f"is {kind[:40]!r}; it must be function")
    choice = Choice(must=True, name=named(given))
    given.close()
    return choice


def nested_name(fields: Fields) -> str:
    """The name in a chat's `tool_choice`."""
    function = fields.object("function")
    if function is None:
        fields.refuse("function", "is missing")
    name = function.required_text("name")
    function.close()
    return name


def flat_name(fields: Fields) -> str:
    """The name in a response's `tool_choice`."""
    return fields.required_text("name")


def chosen_tools(fields: Fields, given: PromptOptions, choice: Choice, parallel: bool) -> PromptOptions:
    """What a prompt is made with: the tools, if any may be called. Raises RequestError."""
    if choice.must and not given.tools:
        fields.refuse("tool_choice", "asks for a call, and there are no tools")
    if choice.name is not None and choice.name not in [tool.name for tool in given.tools]:
        fields.refuse("tool_choice", f"names {choice.name[:80]!r}, which is none of the tools")
    names = tuple(tool.name for tool in given.tools) if choice.name is None else (choice.name,)
    return replace(
        given,
        tools=given.tools if choice.may else (),
        parallel_calls=parallel,
        must_call=names if choice.must else (),
    )


@dataclass(frozen=True)
class CallStep:
    """A step of a call in a stream: it begins, has arguments, ends or, where its text follows, breaks off.

    text: the next part of the arguments' JSON, or all of it where the call ends.
    """

    kind: Literal["begins", "arguments", "ends", "breaks"]
    id: str
    name: str
    text: str = ""


class CallSteps:
    """The steps of calls in a reply's events, one call behind the other."""

    def __init__(self) -> None:
        self._open: tuple[str, str] | None = None
        """The id and the name of the call that has begun."""

    def take(self, event: Event) -> list[CallStep]:
        """The steps that an event makes. One that breaks off does so before the event's text."""
        found: list[CallStep] = []
        part, call = event.call_part, event.tool_call
        begins = part is not None and not part.arguments
        if self._open is not None and (event.text or event.finish_reason is not None or begins):
            found.append(CallStep("breaks", *self._open))
            self._open = None
        if part is not None:
            found += self._begun(part.id, part.name)
            found += [CallStep("arguments", part.id, part.name, part.arguments)] if part.arguments else []
        if call is not None:
            if self._open is None:
                # Its arguments weren't JSON, and come at once.
                found += self._begun(call.id, call.name)
                found.append(CallStep("arguments", call.id, call.name, call.arguments_json))
            found.append(CallStep("ends", call.id, call.name, call.arguments_json))
            self._open = None
        return found

    def _begun(self, id: str, name: str) -> list[CallStep]:
        if self._open is not None:
            return []
        self._open = (id, name)
        return [CallStep("begins", id, name)]


def take_calls(fields: Fields) -> list[dict[str, Any]]:
    """The `tool_calls` of an assistant's message, OpenAI's or Ollama's."""
    value = fields.take("tool_calls")
    if value is None:
        return []
    if not isinstance(value, list):
        fields.refuse("tool_calls", "must be a list of calls")
    return [_take_call(Fields(each, f"{fields.full('tool_calls')}[{at}]")) for at, each in enumerate(value)]


def _take_call(fields: Fields) -> dict[str, Any]:
    _require_function(fields)
    function = fields.object("function")
    if function is None:
        fields.refuse("function", "is missing")
    name, arguments = function.required_text("name"), function.take("arguments")
    function.ignore("index")
    function.close()
    found = call_message(fields.text("id", "") or "", name, {} if arguments is None else arguments)
    fields.ignore("index")
    fields.close()
    return found


def call_message(id: str, name: str, arguments: Any) -> dict[str, Any]:
    """A call as messages have it. arguments: an object, or its JSON."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def checked_messages(fields: Fields, name: str, messages: Iterable[Message]) -> tuple[Message, ...]:
    """The messages as a session keeps them. Raises RequestError for malformed calls."""
    try:
        return tuple(all_checked(list(messages)))
    except UsageError as error:
        fields.refuse(name, f"can't be used: {error.for_command_line}")


def take_effort(fields: Fields, name: str, model: ModelFacts) -> Think:
    """Whether to think, or how much, by OpenAI's words."""
    effort = fields.text(name)
    if effort is None:
        return None
    if effort == "none":
        return False
    if effort not in EFFORTS:
        fields.refuse(name, f"is {effort[:40]!r}; it must be none, {', '.join(EFFORTS)}")
    if EFFORT not in model.template:
        # Clients send what is usual without being asked.
        if effort == "medium":
            return None
        fields.refuse(name, f"is {effort!r}; it can be none or medium: this model's template has no levels")
    return effort  # type: ignore[return-value]
