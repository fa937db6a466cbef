"""Tools in requests: their definitions, which of them may be called, and calls and results in messages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Literal

from ondevice.chat_template import EFFORT
from ondevice.chat_template.messages import Message, all_checked
from ondevice.chat_template.tools import ID_CHARS, PLAIN, PromptOptions, Think, json_text, new_id
from ondevice.errors import UsageError
from ondevice.generate import Event
from ondevice.records import dataclass
from ondevice.serve.fields import Fields
from ondevice.serve.models import ModelFacts


@dataclass(frozen=True)
class Choice:
    """What a request says about calling tools: whether a call is allowed or required, and of which tools.

    names: names of the tools that may be called; None: all. several: whether several calls are allowed.
    """

    may: bool = True
    must: bool = False
    names: tuple[str, ...] | None = None
    several: bool = True


AUTO, NONE, REQUIRED = Choice(), Choice(may=False), Choice(must=True)
NOT_RUN = "this server has no tools of its own, and takes functions"
LEVELS: dict[str, Think] = {
    "none": False,
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "high",
    "max": "high",
}
"""How much to think, by the words of all dialects."""


def take_tools(fields: Fields, read: Callable[[Fields], list[dict[str, Any]]]) -> PromptOptions:
    """The tools of a request. read: returns the tools of one entry, in OpenAI's shape."""
    value = fields.take("tools")
    if value is None:
        return PLAIN
    if not isinstance(value, list):
        fields.refuse("tools", "must be a list of tools")
    tools = [tool for at, each in enumerate(value) for tool in read(fields.inner(each, f"tools[{at}]"))]
    try:
        return PromptOptions.checked(tools, None)
    except UsageError as error:
        fields.refuse("tools", f"can't be used: {error.for_command_line}")


def function_tool(fields: Fields) -> list[dict[str, Any]]:
    """The tool of an entry in OpenAI's or Ollama's chats."""
    if not is_of(fields, "function"):
        return []
    function = fields.object("function")
    if function is None:
        fields.refuse("function", "is missing")
    tool = _definition(function, "parameters")
    function.ignore("strict")
    function.close()
    fields.close()
    return [tool]


def flat_tool(fields: Fields) -> list[dict[str, Any]]:
    """The tool of an entry in OpenAI's responses."""
    if not is_of(fields, "function"):
        return []
    tool = _definition(fields, "parameters")
    fields.ignore("strict", "defer_loading", "output_schema")
    fields.close()
    return [tool]


def anthropic_tool(fields: Fields) -> list[dict[str, Any]]:
    """The tool of an entry in Anthropic's messages."""
    if not is_of(fields, "custom"):
        return []
    tool = _definition(fields, "input_schema")
    fields.ignore(
        "cache_control",
        "strict",
        "input_examples",
        "eager_input_streaming",
        "defer_loading",
        "allowed_callers",
    )
    fields.close()
    return [tool]


def is_of(fields: Fields, kind: str) -> bool:
    """Whether a tool is a function, by the dialect's type.

    Tools of other types are left out, because only a server, or a model trained for them, could run them.
    """
    given = fields.text("type") or kind
    if given != kind:
        fields.leave_out("type", f"tools of type {given}", f"is {given[:40]!r}; {NOT_RUN}")
    return given == kind


def _definition(fields: Fields, schema: str) -> dict[str, Any]:
    name, description = fields.required_text("name"), fields.text("description")
    parameters = fields.take(schema)
    if parameters is not None and not isinstance(parameters, dict):
        fields.refuse(schema, "must be a JSON schema, an object")
    function = {"name": name, "description": description or "", "parameters": parameters}
    return {"type": "function", "function": function}


def take_choice(fields: Fields, named: Callable[[Fields], str]) -> Choice:
    """The choice in OpenAI's `tool_choice`, which is a word or an object. named: reads the tool's name in the
    object.
    """
    value = fields.take("tool_choice")
    words = {"auto": AUTO, "none": NONE, "required": REQUIRED}
    if value is None:
        return AUTO
    if isinstance(value, str):
        if value not in words:
            fields.refuse("tool_choice", f"is {value[:40]!r}; it must be auto, none, required or a function")
        return words[value]
    given = fields.inner(value, "tool_choice")
    kind = given.required_text("type")
    if kind not in ("function", "allowed_tools"):
        given.refuse("type", f"is {kind[:40]!r}; it must be function or allowed_tools")
    if kind == "function":
        # OpenAI documents exactly one call.
        choice = Choice(must=True, names=(named(given),), several=False)
    else:
        choice = _take_allowed(given, named)
    given.close()
    return choice


def _take_allowed(given: Fields, named: Callable[[Fields], str]) -> Choice:
    """The choice among some of the tools. In chats it is one level deeper than in responses."""
    allowed = given.object("allowed_tools") or given
    mode = allowed.required_text("mode")
    if mode not in ("auto", "required"):
        allowed.refuse("mode", f"is {mode[:40]!r}; it must be auto or required")
    names = []
    for each in allowed.objects("tools"):
        if is_of(each, "function"):
            names.append(named(each))
            each.close()
    allowed.close()
    return Choice(must=mode == "required", names=tuple(names))


def nested_name(fields: Fields) -> str:
    """The tool's name in the `tool_choice` of a chat."""
    function = fields.object("function")
    if function is None:
        fields.refuse("function", "is missing")
    name = function.required_text("name")
    function.close()
    return name


def flat_name(fields: Fields) -> str:
    """The tool's name in the `tool_choice` of a response."""
    return fields.required_text("name")


def chosen_tools(fields: Fields, given: PromptOptions, choice: Choice, parallel: bool) -> PromptOptions:
    """The prompt's options, with the tools that may be called. Raises RequestError.

    Even if one tool must be called, the other tools stay in the prompt, so that requests with other choices
    share it.
    """
    known = tuple(tool.name for tool in given.tools)
    names = known if choice.names is None else choice.names
    if choice.must and not names:
        fields.refuse("tool_choice", "asks for a call, and there are no tools")
    other = next((name for name in names if name not in known), None)
    if other is not None:
        fields.refuse("tool_choice", f"names {other[:80]!r}, which is none of the tools")
    parallel = parallel and choice.several
    if choice.must:
        return replace(given, parallel_calls=parallel, must_call=tuple(dict.fromkeys(names)))
    tools = tuple(tool for tool in given.tools if choice.may and tool.name in names)
    return replace(given, tools=tools, parallel_calls=parallel)


@dataclass(frozen=True)
class CallStep:
    """A step of a call in a stream. A call begins, has arguments, and ends; or it breaks off, and its text
    follows.

    text: the next part of the arguments' JSON, or all of it at the call's end.
    """

    kind: Literal["begins", "arguments", "ends", "breaks"]
    id: str
    name: str
    text: str = ""


class CallSteps:
    """The steps of calls in a reply's events, one call after the other."""

    def __init__(self) -> None:
        self._open: tuple[str, str] | None = None
        """The id and the name of the call that has begun."""

    def take(self, event: Event) -> list[CallStep]:
        """The steps in an event. If a call breaks off, that step comes before the event's text."""
        steps: list[CallStep] = []
        part, call = event.call_part, event.tool_call
        begins = part is not None and not part.arguments
        if self._open is not None and (event.text or event.finish_reason is not None or begins):
            steps.append(CallStep("breaks", *self._open))
            self._open = None
        if part is not None:
            steps += self._begun(part.id, part.name)
            steps += [CallStep("arguments", part.id, part.name, part.arguments)] if part.arguments else []
        if call is not None:
            if self._open is None:
                # Its arguments weren't JSON, and come at once.
                steps += self._begun(call.id, call.name)
                steps.append(CallStep("arguments", call.id, call.name, call.arguments_json))
            steps.append(CallStep("ends", call.id, call.name, call.arguments_json))
            self._open = None
        return steps

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
    return [_take_call(fields.inner(each, f"tool_calls[{at}]")) for at, each in enumerate(value)]


def _take_call(fields: Fields) -> dict[str, Any]:
    """A call in a message. Any part may be missing, if a model wrote it that way."""
    kind = fields.text("type", "function") or "function"
    function = fields.object("custom" if kind == "custom" else "function") or fields.inner({}, "function")
    call = take_function(function, fields.text("id"), "input" if kind == "custom" else "arguments")
    function.close()
    fields.ignore("index")
    fields.close()
    return call


def take_function(fields: Fields, id: str | None, arguments: str) -> dict[str, Any]:
    """The call of a function. arguments: the name of the field with its arguments."""
    name, value = fields.text("name", "") or "", fields.take(arguments)
    fields.ignore("index")
    return call_message(id or "", name, {"input": value} if arguments == "input" else value)


def call_message(id: str, name: str, arguments: Any) -> dict[str, Any]:
    """A call, in the form for a message. arguments: an object, its JSON, or any other text that a model
    wrote.
    """
    # As JSON, since a history may have an object that no call may have, such as one with 1e999.
    text = arguments if isinstance(arguments, str) else json_text({} if arguments is None else arguments)
    return {"id": kept_id(id), "type": "function", "function": {"name": name, "arguments": text}}


def kept_id(id: str) -> str:
    """A call's id. If it is too long, a shorter one derived from it."""
    return id if len(id) <= ID_CHARS else new_id(id)


def with_ids(messages: Iterable[Message]) -> list[Message]:
    """The messages, with ids added to calls and results for which a client has left them out.

    A result without an id belongs to the first call without a result, of the same tool if it names one.
    """
    open_names: dict[str, str] = {}
    """Names of the calls without results, by id."""
    open_ids: defaultdict[str, dict[str, None]] = defaultdict(dict)
    """Their ids, by name: one request may have many thousands."""
    completed: list[Message] = []
    for at, message in enumerate(messages):
        calls = [
            call | {"id": call["id"] or new_id(at, index)}
            for index, call in enumerate(message.get("tool_calls") or ())
        ]
        for call in calls:
            open_names[call["id"]] = call["function"]["name"]
            open_ids[call["function"]["name"]][call["id"]] = None
        message = {**message, "tool_calls": calls} if calls else message
        if message["role"] == "tool":
            id, name = message.get("tool_call_id"), message.get("name")
            id = kept_id(id or next(iter(open_names if name is None else open_ids.get(name, ())), ""))
            message = {**message, "tool_call_id": id}
            if id in open_names:
                open_ids[open_names.pop(id)].pop(id, None)
        completed.append(message)
    return completed


def checked_messages(fields: Fields, name: str, messages: Iterable[Message]) -> tuple[Message, ...]:
    """The messages in the form that a session keeps. Raises RequestError for messages that no template
    accepts.
    """
    try:
        return tuple(all_checked(with_ids(messages)))
    except UsageError as error:
        fields.refuse(name, f"can't be used: {error.for_command_line}")


def take_effort(fields: Fields, name: str, model: ModelFacts) -> Think:
    """Whether to think, or how much, from OpenAI's words for effort."""
    effort = fields.text(name)
    if effort is None:
        return None
    if effort not in LEVELS:
        fields.refuse(name, f"is {effort[:40]!r}; it must be {', '.join(LEVELS)}")
    if effort == "none" or EFFORT in model.template:
        return LEVELS[effort]
    # Clients send the usual value without a user's choice.
    if effort != "medium":
        fields.leave_out(name, why=f"is {effort!r}, and this model's template has no levels of thinking")
    return None
