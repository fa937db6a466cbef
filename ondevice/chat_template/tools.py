"""Tools that a model may call, its calls, and how both appear in messages. All of it comes from outside.

The shapes are those that chat templates know, which are OpenAI's: a tool is `{"type": "function", "function":
{"name", "description", "parameters"}}`, an assistant's message may have `tool_calls`, and a message of role
`tool` is the result of the call that its `tool_call_id` names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from typing import Any, Literal

from ondevice.chat_template.reply_prefix import ReplyPrefix
from ondevice.errors import UsageError
from ondevice.hashing import sha256_hex
from ondevice.records import dataclass

MAX_TOOLS = 256
MAX_CALLS = 128
"""Most calls of one message."""
MAX_DEPTH = 64
"""Levels of objects and lists in a tool's parameters or a call's arguments."""
NAME_CHARS = 128
ID_CHARS = 200
_NAME = re.compile(rf"[A-Za-z0-9_.-]{{1,{NAME_CHARS}}}")
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")

Think = bool | Literal["low", "medium", "high"] | None
"""Whether, or how much, a model thinks before it replies; None: by its template's default."""
EFFORTS = ("low", "medium", "high")


@dataclass(frozen=True)
class Tool:
    """A function that a model may call. parameters: the JSON schema of its arguments, an object."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})

    def to_dict(self) -> dict[str, Any]:
        """The tool in the form that templates take. Absent fields are present but empty, as some templates
        need them.
        """
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}

    @property
    def properties(self) -> Mapping[str, Any]:
        """Schemas of the arguments, by name."""
        declared = self.parameters.get("properties")
        return declared if isinstance(declared, Mapping) else {}


def is_text(schema: object) -> bool:
    """Whether an argument's schema says directly that it is a string."""
    if not isinstance(schema, Mapping):
        return False
    if "type" in schema:
        return schema["type"] in ("string", ["string"])
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return isinstance(values, list) and bool(values) and all(isinstance(value, str) for value in values)


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool by a model. id: 9 letters and digits, which the message with the result names.

    written: the arguments' JSON as the model wrote it; empty if it wrote another notation.
    """

    name: str
    arguments: Mapping[str, Any]
    id: str = ""
    written: str = field(default="", compare=False, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """The call in the form that messages have."""
        function = {"name": self.name, "arguments": dict(self.arguments)}
        return {"id": self.id, "type": "function", "function": function}

    @property
    def arguments_json(self) -> str:
        """The arguments as JSON: the model's own text if it wrote JSON. Lone surrogates are escaped."""
        return self.written or json_text(self.arguments)


@dataclass(frozen=True)
class CallPart:
    """A part of a call that is being written. arguments: the next part of their JSON, empty at first.

    Together, the parts of a call are its `arguments_json`. If a call breaks off, it is none, and its text
    follows.
    """

    name: str
    id: str
    arguments: str = ""


@dataclass(frozen=True)
class PromptOptions:
    """The options of a prompt, apart from its messages. Without tools, none can be called.

    parallel_calls: whether a reply may have several calls; otherwise, calls after the first are left out.
    must_call: names of tools, one of which the reply must call; empty if the model chooses whether to call.
    calls_alone: whether a reply is either calls or a text; then marks of calls inside a text are text.
    reply_prefix: the beginning of a reply that the model continues; None if it begins one.
    """

    tools: tuple[Tool, ...] = ()
    think: Think = None
    parallel_calls: bool = True
    must_call: tuple[str, ...] = ()
    calls_alone: bool = False
    reply_prefix: ReplyPrefix | None = None

    @staticmethod
    def checked(
        tools: Sequence[Tool | Mapping[str, Any]], think: Think, parallel_calls: bool = True
    ) -> PromptOptions:
        """Options with checked tools.

        Raises UsageError for invalid tools, for two of one name, and for an invalid `think`.
        """
        if think not in (None, True, False, *EFFORTS) or (think is not None and type(think) is int):
            raise UsageError(
                f"think is {think!r}; it must be True, False, one of {', '.join(EFFORTS)}, or None"
            )
        if isinstance(tools, str | Mapping) or not isinstance(tools, Iterable):
            raise UsageError(f"tools is {type(tools).__name__}; it must be a list of tools")
        return PromptOptions(_all_tools(list(tools)), think, parallel_calls)


PLAIN = PromptOptions()


def _all_tools(given: list[Tool | Mapping[str, Any]]) -> tuple[Tool, ...]:
    if len(given) > MAX_TOOLS:
        raise UsageError(f"there are {len(given)} tools; at most {MAX_TOOLS} can be given")
    tools = tuple(_tool(each) for each in given)
    names = [tool.name for tool in tools]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"two tools have the name {twice!r}; give each a name of its own")
    return tools


def _tool(given: Tool | Mapping[str, Any]) -> Tool:
    if isinstance(given, Tool):
        given = given.to_dict()
    function = given.get("function") if isinstance(given, Mapping) else None
    if not isinstance(function, Mapping):
        raise UsageError(
            f"a tool is {str(given)[:80]}; it must be an object with type 'function' and a function"
        )
    name = checked_name(function.get("name"))
    description = function.get("description")
    if not isinstance(description, str | None):
        raise UsageError(
            f"the description of tool {name} is {type(description).__name__}; it must be a string"
        )
    parameters = function.get("parameters")
    if not isinstance(parameters, Mapping | None):
        raise UsageError(
            f"the parameters of tool {name} are {type(parameters).__name__}; they must be a JSON schema"
        )
    empty = {"type": "object", "properties": {}}
    return Tool(name, description or "", plain_data(parameters or empty, f"the parameters of tool {name}"))


def checked_name(name: object) -> str:
    """A tool's name, checked. Raises UsageError if it isn't a word."""
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise UsageError(
            f"a tool's name is {str(name)[:80]!r}; it must be 1 to {NAME_CHARS} of the letters A-Z and a-z, "
            "digits, _, . and -"
        )
    return name


def checked_calls(given: object) -> list[dict[str, Any]]:
    """The `tool_calls` of a message, checked. Raises UsageError for malformed ones.

    Arguments are an object. If a model wrote something else, such as JSON that was cut off, they stay a
    string.
    """
    if isinstance(given, str | Mapping) or not isinstance(given, Iterable):
        raise UsageError(f"tool_calls is {type(given).__name__}; it must be a list of calls")
    calls = list(given)
    if len(calls) > MAX_CALLS:
        raise UsageError(f"a message has {len(calls)} tool calls; at most {MAX_CALLS} can be given")
    return [_checked_call(call) for call in calls]


def _checked_call(given: object) -> dict[str, Any]:
    if isinstance(given, ToolCall):
        given = given.to_dict()
    function = given.get("function") if isinstance(given, Mapping) else None
    if not isinstance(given, Mapping) or not isinstance(function, Mapping):
        raise UsageError(f"a tool call is {str(given)[:80]}; it must be an object with an id and a function")
    name, arguments = function.get("name"), function.get("arguments", {})
    if not isinstance(name, str):
        raise UsageError(f"the name of a called tool is {str(name)[:80]}; it must be a string")
    if isinstance(arguments, str):
        arguments = _read_arguments(arguments)
    elif isinstance(arguments, Mapping):
        arguments = plain_data(arguments, f"the arguments of a call of {name[:NAME_CHARS]}")
    else:
        raise UsageError(
            f"the arguments of a call of {name[:NAME_CHARS]} are {type(arguments).__name__}; they must be an "
            "object, or a string"
        )
    function = {"name": name, "arguments": arguments}
    return {"id": checked_id(given.get("id")), "type": "function", "function": function}


def _read_arguments(text: str) -> dict[str, Any] | str:
    """The object that a JSON string contains; the string itself if it contains anything else."""
    arguments = parsed_object(text)
    try:
        return text if arguments is None else dict(plain_data(arguments, "the arguments"))
    except UsageError:
        return text


def checked_id(given: object) -> str:
    """The id of a call, checked; empty if it has none. Raises UsageError."""
    if given is None:
        return ""
    if not isinstance(given, str) or len(given) > ID_CHARS:
        raise UsageError(f"the id of a tool call must be a string of at most {ID_CHARS} characters")
    return given


def parsed_object(text: str) -> dict[str, Any] | None:
    """The JSON object that a text contains, or None. An empty text and null stand for an empty object."""
    try:
        value = json.loads(text or "{}", parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    value = {} if value is None else value
    return value if isinstance(value, dict) else None


def json_text(value: object) -> str:
    """A value as JSON on one line. Letters aren't escaped, except lone surrogates."""
    text = json.dumps(value, ensure_ascii=False, default=dict)
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


def arguments_text(arguments: Mapping[str, Any] | str) -> str:
    """The arguments of a call as JSON, or as the string that they already are."""
    return arguments if isinstance(arguments, str) else json_text(arguments)


def short_id(given: str) -> str:
    """A call's id if it is 9 letters and digits, otherwise a 9-character id derived from it."""
    return given if _SHORT_ID.fullmatch(given) else new_id(given)


def new_id(*parts: object) -> str:
    """The 9-character id of letters and digits derived from these parts."""
    return sha256_hex(repr(parts).encode("utf-8", "backslashreplace"))[:9]


def plain_data(value: Any, what: str, depth: int = 0) -> Any:
    """A copy of JSON data. Raises UsageError if anything else is in it, or if it is nested too deeply."""
    if depth > MAX_DEPTH:
        raise UsageError(f"{what} are nested more than {MAX_DEPTH} deep")
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise UsageError(f"{what} have a key that is no string")
        return {key: plain_data(item, what, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_data(item, what, depth + 1) for item in value]
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float) and value - value == 0:
        return value
    raise UsageError(f"{what} hold {str(value)[:40]} of type {type(value).__name__}, which JSON doesn't have")


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
