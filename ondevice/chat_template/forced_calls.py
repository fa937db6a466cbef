"""Grammars of replies that must be calls of tools, so that their arguments obey the tools' schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ondevice.chat_template.call_formats import CallFormat
from ondevice.chat_template.tools import MAX_CALLS, Tool
from ondevice.constraints.constraint import Constraint
from ondevice.constraints.schema import json_rule
from ondevice.errors import UsageError

_SHAPES = ("type", "$ref", "anyOf", "oneOf", "allOf", "enum", "const")
"""Keywords of which one says what kind of value a schema wants."""


@dataclass(frozen=True)
class _Form:
    """How calls are written: what begins and ends all of them, stands between two, and begins and ends one.

    `opens` has the tool's name in the place of NAME.
    """

    before: str
    opens: str
    closes: str
    between: str
    after: str
    several: bool = True


_FORMS = {
    "hermes": _Form("", '<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>", "\n", ""),
    "phi": _Form("", '<|tool_call|>{"name": "NAME", "arguments": ', "}<|/tool_call|>", "", ""),
    "granite": _Form("<|tool_call|>[", '{"name": "NAME", "arguments": ', "}", ", ", "]"),
    "mistral": _Form("[TOOL_CALLS][", '{"name": "NAME", "arguments": ', "}", ", ", "]"),
    "mistral-args": _Form("", "[TOOL_CALLS]NAME[ARGS]", "", "", ""),
    "llama": _Form("", '{"name": "NAME", "parameters": ', "}", "", "", several=False),
}
"""The formats whose arguments are JSON, by name."""


def forced_call(
    format: CallFormat | None, tools: Sequence[Tool], special: Mapping[str, int], parallel: bool
) -> Constraint:
    """What a reply has to obey that calls one of the tools, or, if `parallel`, one or more.

    special: ids of the special tokens, by name. Raises UsageError for a format whose arguments aren't JSON,
    ConstraintError for a schema that is none.
    """
    form = None if format is None else _FORMS.get(format.name)
    if form is None:
        name = "channels" if format is None else format.name
        raise UsageError(
            f"this model can't be made to call a tool: that isn't done for calls of the format {name}, but "
            f"for {', '.join(_FORMS)}; leave the choice to the model"
        )
    names = [f"tool_{at}" for at in range(len(tools))]
    more = (
        f"({_literal(form.between, special)} call){{0,{MAX_CALLS - 1}}}" if form.several and parallel else ""
    )
    rules = [
        f"start: {_literal(form.before, special)} call {more} {_literal(form.after, special)}",
        f"call: {' | '.join(names)}",
    ]
    for name, tool in zip(names, tools, strict=True):
        opens, closes = (
            _literal(form.opens.replace("NAME", tool.name), special),
            _literal(form.closes, special),
        )
        rules.append(f"{name}: {opens} {json_rule(_arguments(tool))} {closes}")
    return Constraint.lark("\n".join(rules))


def _arguments(tool: Tool) -> Constraint:
    """The schema of a tool's arguments, which are an object whatever it says."""
    schema = dict(tool.parameters)
    return Constraint.json_schema(
        schema if any(key in schema for key in _SHAPES) else {"type": "object"} | schema
    )


def _literal(text: str, special: Mapping[str, int]) -> str:
    """A text as a grammar has it, with special tokens by their ids."""
    names = sorted((name for name in special if name in text), key=len, reverse=True)
    if not names:
        return json.dumps(text) if text else ""
    parts = re.split(f"({'|'.join(map(re.escape, names))})", text)
    return " ".join(f"<[{special[part]}]>" if part in special else json.dumps(part) for part in parts if part)
