"""What OpenAI's dialects have in common: sampling fields, messages, usage."""

from __future__ import annotations

from typing import Any

from ondevice.chat_template.messages import Message
from ondevice.chat_template.tools import ToolCall
from ondevice.generate import Event
from ondevice.serve.content import take_text, told_text
from ondevice.serve.fields import Fields
from ondevice.serve.generation_request import (
    MAX_STOP_CHARS,
    MAX_STOPS,
    chosen,
    take_penalties,
    take_repeat_last_n,
    take_seed,
    take_temperature,
    take_top_k,
    take_top_p,
)
from ondevice.serve.models import ModelFacts
from ondevice.serve.tools import checked_messages, take_calls, take_function
from ondevice.stats import GenerationStats
from ondevice.tokenizer import Tokenizer

MAX_CHOICES = 8
MAX_BIASES = 1024
NO_FUNCTIONS = "tools took the place of functions"
MIN_LOGPROB = -9999.0
"""The value for minus infinity, which JSON doesn't have."""
IGNORED = (
    "metadata",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "user",
)
"""Fields that change no text here: names of users, keys of caches, tiers of service."""
CONSTRAINTS = ("grammar", "guided_choice", "guided_grammar", "guided_regex", "structured_outputs")
"""Fields that ask other servers for a constraint. Ignoring one would give unreadable answers."""


def take_sampling(fields: Fields, model: ModelFacts, schema_field: str = "response_format") -> dict[str, Any]:
    """The options of SamplingConfig, from OpenAI's fields and common extensions.

    schema_field: the field that may hold a schema in place of those in CONSTRAINTS.
    """
    options = {
        "temperature": take_temperature(fields, 2.0),
        "top_p": take_top_p(fields),
        "top_k": take_top_k(fields),
        "min_p": fields.number("min_p", 0.0, 1.0),
        "repetition_penalty": _repetition_penalty(fields),
        "repeat_last_n": take_repeat_last_n(fields),
        "seed": take_seed(fields),
        "stop": fields.strings("stop", MAX_STOPS, MAX_STOP_CHARS),
        "logit_bias": _biases(fields, model),
    }
    for name in CONSTRAINTS:
        fields.neutral(name, "", why=f"{schema_field} has a schema for it")
    return chosen(options | take_penalties(fields))


def _repetition_penalty(fields: Fields) -> float | None:
    """The repetition penalty, from the field of that name, or from llama.cpp's if it is absent."""
    names = ("repeat_penalty", "repetition_penalty")
    other, penalty = (fields.number(name, 1e-3, 100.0) for name in names)
    return other if penalty is None else penalty


def _biases(fields: Fields, model: ModelFacts) -> dict[int, float] | None:
    given = fields.object("logit_bias")
    if given is None:
        return None
    names = given.names()
    if len(names) > MAX_BIASES:
        fields.refuse("logit_bias", f"has {len(names)} tokens; it may have {MAX_BIASES}")
    biases = {}
    for name in names:
        if not (name.isascii() and name.isdecimal() and len(name) <= 9):
            fields.refuse("logit_bias", f"names {name[:40]!r}, which is no token id")
        if int(name) >= model.vocab_size:
            fields.refuse("logit_bias", f"names token {name}; {ids_of(model)}")
        bias = given.number(name, -100.0, 100.0)
        if bias is not None:
            biases[int(name)] = bias
    return biases


def ids_of(model: ModelFacts) -> str:
    """The range of a model's token ids in words, for an error."""
    return f"ids of this model run from 0 to {model.vocab_size - 1}"


def take_messages(fields: Fields, name: str = "messages") -> tuple[Message, ...]:
    """The messages of a chat. The role `developer` becomes `system`."""
    messages = tuple(_message(each) for each in fields.objects(name))
    if not messages:
        fields.refuse(name, "is empty; give at least one message")
    return checked_messages(fields, name, messages)


def _message(fields: Fields) -> Message:
    role = fields.required_text("role")
    roles = ("system", "developer", "user", "assistant", "tool", "function")
    if role not in roles:
        fields.refuse("role", f"is {role[:40]!r}; it must be {', '.join(roles[:-2])} or tool")
    if role in ("tool", "function"):
        message: dict[str, Any] = {"role": "tool", "content": told_text(fields, "content")}
        message |= {"tool_call_id": fields.text("tool_call_id"), "name": fields.text("name")}
    else:
        text = take_text(fields, "content", empty=role == "assistant", written=role == "assistant")
        message = {"role": "system" if role == "developer" else role, "content": text}
    if role == "assistant":
        message["tool_calls"] = take_calls(fields) + _older_call(fields)
        message["thinking"] = fields.text("reasoning_content") or fields.text("reasoning")
    fields.neutral("tool_calls", [], why="only an assistant's message has calls")
    fields.neutral("function_call", why=NO_FUNCTIONS)
    fields.neutral("audio")
    fields.ignore("name", "refusal", "reasoning_content", "reasoning", "annotations", "cache_control")
    fields.close()
    return message


def _older_call(fields: Fields) -> list[dict[str, Any]]:
    """The call in the older field `function_call`, as a list. It has no id."""
    function = fields.object("function_call")
    return [] if function is None else [take_function(function, None, "arguments")]


def usage(stats: GenerationStats, thought_tokens: int = 0) -> dict[str, Any]:
    """The numbers of tokens of one generation, as OpenAI's `usage` object."""
    return {
        "prompt_tokens": stats.prompt_tokens,
        "completion_tokens": stats.generated_tokens,
        "total_tokens": stats.prompt_tokens + stats.generated_tokens,
        "prompt_tokens_details": {"cached_tokens": stats.reused_tokens},
        "completion_tokens_details": {"reasoning_tokens": thought_tokens},
    }


def summed(usages: list[dict[str, Any]], choices: int) -> dict[str, Any]:
    """The numbers of tokens of several generations, added. Every `choices` of them share one prompt, which
    counts once.
    """
    first = usages[::choices]
    prompt, written = (
        sum(each["prompt_tokens"] for each in first),
        sum(each["completion_tokens"] for each in usages),
    )
    cached = sum(each["prompt_tokens_details"]["cached_tokens"] for each in first)
    thought = sum(each["completion_tokens_details"]["reasoning_tokens"] for each in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": thought},
    }


def finish_reason(event: Event, calls: int = 0) -> str:
    """The finish reason of a reply: `stop`, `length`, or `tool_calls` for a complete reply with calls."""
    reason = event.finish_reason or "stop"
    return "tool_calls" if calls and reason == "stop" else reason


def call_entry(call: ToolCall) -> dict[str, Any]:
    """The JSON object of one call in a message."""
    function = {"name": call.name, "arguments": call.arguments_json}
    return {"id": call.id, "type": "function", "function": function}


def shown_token(tokenizer: Tokenizer, token: int) -> str:
    """A token as text. Bytes of incomplete characters are escaped, so that different tokens stay
    different.
    """
    data = tokenizer.token_bytes(token)
    return data.decode("utf-8", "backslashreplace") if data else tokenizer.piece(token)


def logprob_entry(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    """The entry for one token in `logprobs.content`, without its alternatives."""
    return {
        "token": shown_token(tokenizer, token),
        "logprob": max(logprob, MIN_LOGPROB),
        "bytes": list(tokenizer.token_bytes(token)),
    }
