"""Grammars of replies that must be calls of tools, so that their arguments obey the tools' schemas."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from ondevice.chat_template.argument_rules import PairForm, Rules, gemma, pairs
from ondevice.chat_template.call_formats import (
    DEEPSEEK_CALL,
    DEEPSEEK_CALL_END,
    DEEPSEEK_CALLS,
    DEEPSEEK_END,
    DEEPSEEK_SEPARATOR,
    GEMMA_QUOTE,
    KIMI_CALL,
    KIMI_CALL_END,
    KIMI_SEPARATOR,
    CallFormat,
)
from ondevice.chat_template.channels import CHANNEL, CONSTRAIN, END, MESSAGE, START
from ondevice.chat_template.tools import MAX_CALLS, Tool
from ondevice.constraints.constraint import Constraint
from ondevice.constraints.digits import most_digits
from ondevice.constraints.schema import json_rule
from ondevice.errors import ConstraintError
from ondevice.records import dataclass


@dataclass(frozen=True)
class _Form:
    """How calls are written: texts around all calls, between two, and around one.

    opens: has NAME in the place of the tool's name, and NUMBER in that of a number. arguments: how they are
    written: as JSON, between marks, or in Gemma's notation.
    """

    before: str
    opens: str
    closes: str
    between: str
    after: str
    several: bool = True
    arguments: PairForm | Literal["json", "gemma"] = "json"


_XML = PairForm("<parameter=KEY>\n", "\n</parameter>", "\n", ("</parameter>", "</function>", "</tool_call>"))
_GLM = PairForm("<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>", "\n", ("</arg_value>", "</tool_call>"))
_SEED = replace(_XML, marks=("</parameter>", "</function>", "</seed:tool_call>"))
_FENCED = f"{DEEPSEEK_CALL}function{DEEPSEEK_SEPARATOR}NAME\n```json\n"
_PLAIN = f"{DEEPSEEK_CALL}NAME{DEEPSEEK_SEPARATOR}"
_FORMS = {
    "hermes": _Form("", '<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>", "\n", ""),
    "phi": _Form("", '<|tool_call|>{"name": "NAME", "arguments": ', "}<|/tool_call|>", "", ""),
    "granite": _Form("<|tool_call|>[", '{"name": "NAME", "arguments": ', "}", ", ", "]"),
    "mistral": _Form("[TOOL_CALLS][", '{"name": "NAME", "arguments": ', "}", ", ", "]"),
    "mistral-args": _Form("", "[TOOL_CALLS]NAME[ARGS]", "", "", ""),
    "llama": _Form("", '{"name": "NAME", "parameters": ', "}", "", "", several=False),
    "deepseek": _Form(DEEPSEEK_CALLS, _PLAIN, DEEPSEEK_CALL_END, "", DEEPSEEK_END),
    "deepseek-fenced": _Form(DEEPSEEK_CALLS, _FENCED, f"\n```{DEEPSEEK_CALL_END}", "\n", DEEPSEEK_END),
    "qwen3-coder": _Form(
        "", "<tool_call>\n<function=NAME>\n", "</function>\n</tool_call>", "\n", "", arguments=_XML
    ),
    "seed": _Form(
        "", "<seed:tool_call>\n<function=NAME>\n", "</function>\n</seed:tool_call>", "\n", "", arguments=_SEED
    ),
    "kimi": _Form(
        "<|tool_calls_section_begin|>",
        f"{KIMI_CALL}functions.NAME:NUMBER{KIMI_SEPARATOR}",
        KIMI_CALL_END,
        "",
        "<|tool_calls_section_end|>",
    ),
    "command": _Form(
        "<|START_ACTION|>[",
        '{"tool_call_id": "NUMBER", "tool_name": "NAME", "parameters": ',
        "}",
        ", ",
        "]<|END_ACTION|>",
    ),
    "nemotron": _Form("<TOOLCALL>[", '{"name": "NAME", "arguments": ', "}", ", ", "]</TOOLCALL>"),
    "tool-calls": _Form("<tool_calls>[", '{"name": "NAME", "arguments": ', "}", ", ", "]</tool_calls>"),
    "lfm2": _Form("<|tool_call_start|>[", '{"name": "NAME", "arguments": ', "}", ", ", "]<|tool_call_end|>"),
    "glm": _Form("", "<tool_call>NAME\n", "</tool_call>", "\n", "", arguments=_GLM),
    "gemma4": _Form("", "<|tool_call>call:NAME", "<tool_call|>", "", "", arguments="gemma"),
}
"""Forms of calls by name of their format."""


def forced_call(
    format: CallFormat, tools: Sequence[Tool], special: Mapping[str, int], parallel: bool
) -> Constraint:
    """The constraint for a reply that calls one of the tools, or, if `parallel`, one or more.

    special: ids of the special tokens, by name. Raises ConstraintError for an invalid schema, and for a
    keyword that can't be enforced.
    """
    rules = Rules(special)
    rules.set("start", _calls(rules, format, tools, parallel))
    return Constraint.lark(str(rules), _most_digits(format, tools))


def call_or_json(
    format: CallFormat, tools: Sequence[Tool], special: Mapping[str, int], parallel: bool, answer: Constraint
) -> Constraint:
    """The constraint for a reply that either calls tools or is JSON that a schema describes.

    Raises ConstraintError if nothing tells calls from JSON, and if `answer` isn't a schema.
    """
    if format.bare or answer.kind != "json_schema":
        raise ConstraintError(
            "the model's calls of tools are part of its reply, which can't obey a constraint then; give "
            "either tools or a constraint"
        )
    rules = Rules(special)
    rules.set("start", f"{json_rule(answer)} | calls")
    rules.set("calls", _calls(rules, format, tools, parallel))
    most = _most_digits(format, tools)
    return Constraint.lark(str(rules), most and max(most, most_digits(json.loads(answer.source))))


def forced_channel(tools: Sequence[Tool], special: Mapping[str, int]) -> Constraint:
    """The constraint for a complete text of gpt-oss that calls one of the tools, possibly after thinking.

    The text ends with the arguments, because `<|call|>` ends a reply. Raises as `forced_call` does.
    """
    rules = Rules(special)
    kind = f" {CONSTRAIN}json" if CONSTRAIN in special else " json"
    words = rules.name("/(?s:.*)/", "TEXT")
    thought = (
        f"{rules.literal(f'{CHANNEL}analysis{MESSAGE}')} {words} {rules.literal(f'{END}{START}assistant')}"
    )
    calls = [
        rules.name(
            f"{rules.literal(f'{CHANNEL}commentary to=functions.{tool.name}{kind}{MESSAGE}')} "
            f"{json_rule(_arguments(tool))}"
        )
        for tool in tools
    ]
    rules.set("start", f"({thought})? ({' | '.join(calls)})")
    return Constraint.lark(str(rules))


def _calls(rules: Rules, format: CallFormat, tools: Sequence[Tool], parallel: bool) -> str:
    """The body of a grammar rule for calls."""
    form = _FORMS[format.name]
    each = []
    for tool in tools:
        before, number, after = form.opens.partition("NUMBER")
        opens = " ".join(
            (
                rules.literal(before.replace("NAME", tool.name)),
                rules.name("/[0-9][0-9]?/", "TEXT") if number else "",
                rules.literal(after.replace("NAME", tool.name)),
            )
        )
        closes = rules.literal(form.closes)
        if isinstance(form.arguments, PairForm):
            inner = pairs(rules, tool, form.arguments)
        elif form.arguments == "gemma":
            inner = gemma(rules, tool, (GEMMA_QUOTE, form.closes))
        else:
            inner = json_rule(_arguments(tool))
        each.append(rules.name(f"{opens} {inner} {closes}"))
    call = rules.name(" | ".join(each))
    more = ""
    if form.several and parallel:
        more = f"({rules.literal(form.between)} {call}){{0,{MAX_CALLS - 1}}}"
    return f"{rules.literal(form.before)} {call} {more} {rules.literal(form.after)}"


def _most_digits(format: CallFormat, tools: Sequence[Tool]) -> int:
    """The most digits that a number in a call may have; 0, for no limit, if texts stand bare among the
    arguments.
    """
    if _FORMS[format.name].arguments != "json":
        return 0
    return max((most_digits(dict(tool.parameters)) for tool in tools), default=0)


def _arguments(tool: Tool) -> Constraint:
    """The constraint for a tool's arguments: their schema, with type object if it names no type."""
    schema = dict(tool.parameters)
    says = "type" in schema or "$ref" in schema
    return Constraint.json_schema(schema if says else {"type": "object"} | schema)
