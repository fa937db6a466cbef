"""What OpenAI's dialects share: sampling fields, messages, usage."""

from __future__ import annotations

from typing import Any

from ondevice.chat_template.messages import Message
from ondevice.chat_template.tools import ToolCall
from ondevice.generate import Event
from ondevice.serve.asked import (
    MAX_STOP_CHARS,
    MAX_STOPS,
    MAX_TOKENS,
    chosen,
    take_seed,
    take_temperature,
    take_top_p,
)
from ondevice.serve.fields import Fields
from ondevice.serve.models import ModelFacts
from ondevice.serve.tools import checked_messages, take_calls
from ondevice.stats import GenerationStats
from ondevice.tokenizer import Tokenizer

MAX_CHOICES = 8
MAX_BIASES = 1024
NO_FUNCTIONS = "tools took the place of functions"
LEAST_LOGPROB = -9999.0
"""What stands for minus infinity, which JSON doesn't have."""
IGNORED = (
    "metadata",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "user",
)
"""Fields that change no text here: names of users, keys of caches, tiers of service."""


def take_sampling(fields: Fields, model: ModelFacts) -> dict[str, Any]:
    """Options of SamplingConfig from the fields that chats and completions have, and common extensions."""
    options = {
        "temperature": take_temperature(fields, 2.0),
        "top_p": take_top_p(fields),
        "top_k": fields.integer("top_k", 0, MAX_TOKENS),
        "min_p": fields.number("min_p", 0.0, 1.0),
        "repetition_penalty": fields.number("repetition_penalty", 1e-3, 100.0),
        "seed": take_seed(fields),
        "stop": fields.strings("stop", MAX_STOPS, MAX_STOP_CHARS),
        "logit_bias": _biases(fields, model),
    }
    for name in ("frequency_penalty", "presence_penalty"):
        fields.neutral(name, 0, 0.0, why="repetition_penalty is what this server has")
    return chosen(options)


def _biases(fields: Fields, model: ModelFacts) -> dict[int, float] | None:
    given = fields.object("logit_bias")
    if given is None:
        return None
    names = given.names()
    if len(names) > MAX_BIASES:
        fields.refuse("logit_bias", f"has {len(names)} tokens; it may have {MAX_BIASES}")
    found = {}
    for name in names:
        if not (name.isascii() and name.isdecimal() and len(name) <= 9):
            fields.refuse("logit_bias", f"names {name[:40]!r}, which is no token id")
        if int(name) >= model.vocab_size:
            fields.refuse("logit_bias", f"names token {name}; {ids_of(model)}")
        bias = given.number(name, -100.0, 100.0)
        if bias is not None:
            found[int(name)] = bias
    return found


def ids_of(model: ModelFacts) -> str:
    """Which token ids a model has, for errors."""
    return f"ids of this model run from 0 to {model.vocab_size - 1}"


def take_messages(fields: Fields, name: str = "messages") -> tuple[Message, ...]:
    """The messages of a chat. `developer` is what `system` was called before."""
    found = tuple(_message(each) for each in fields.objects(name))
    if not found:
        fields.refuse(name, "is empty; give at least one message")
    return checked_messages(fields, name, found)


def _message(fields: Fields) -> Message:
    role = fields.required_text("role")
    if role not in ("system", "developer", "user", "assistant", "tool"):
        fields.refuse("role", f"is {role[:40]!r}; it must be system, developer, user, assistant or tool")
    text = take_content(fields, "content", ("text",), empty=role == "assistant")
    found: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": text}
    if role == "assistant":
        found["tool_calls"] = take_calls(fields)
        found["thinking"] = fields.text("reasoning_content") or fields.text("reasoning")
    if role == "tool":
        found["tool_call_id"] = fields.required_text("tool_call_id")
    fields.neutral("tool_calls", [], why="only an assistant's message has calls")
    fields.neutral("function_call", why=NO_FUNCTIONS)
    fields.neutral("audio")
    fields.ignore("name", "refusal", "reasoning_content", "reasoning", "annotations")
    fields.close()
    return found


def take_content(fields: Fields, name: str, kinds: tuple[str, ...], empty: bool = False) -> str:
    """The text of a message: a string, or a list of parts of these kinds. empty: whether null is no text."""
    value = fields.take(name)
    if value is None and empty:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        fields.refuse(name, "must be a string or a list of parts")
    texts = []
    for at, item in enumerate(value):
        part = Fields(item, f"{fields.full(name)}[{at}]")
        kind = part.required_text("type")
        if kind not in kinds:
            part.refuse("type", f"is {kind[:40]!r}; this server takes {', '.join(kinds)}")
        texts.append(part.required_text("text"))
        part.ignore("annotations", "cache_control", "citations", "logprobs", "prompt_cache_breakpoint")
        part.close()
    return "".join(texts)


def usage(stats: GenerationStats, thought_tokens: int = 0) -> dict[str, Any]:
    """Tokens of one generation."""
    return {
        "prompt_tokens": stats.prompt_tokens,
        "completion_tokens": stats.generated_tokens,
        "total_tokens": stats.prompt_tokens + stats.generated_tokens,
        "prompt_tokens_details": {"cached_tokens": stats.reused_tokens},
        "completion_tokens_details": {"reasoning_tokens": thought_tokens},
    }


def summed(usages: list[dict[str, Any]], choices: int) -> dict[str, Any]:
    """Tokens of several generations. Each `choices` of them have one prompt, which counts once."""
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
    """`stop` or `length`; `tool_calls` where a reply that isn't cut short has calls."""
    reason = event.finish_reason or "stop"
    return "tool_calls" if calls and reason == "stop" else reason


def call_entry(call: ToolCall) -> dict[str, Any]:
    """One call of a message."""
    function = {"name": call.name, "arguments": call.arguments_json}
    return {"id": call.id, "type": "function", "function": function}


def shown_token(tokenizer: Tokenizer, token: int) -> str:
    """A token as text. Bytes that are no whole character are escaped, so that tokens stay apart."""
    data = tokenizer.token_bytes(token)
    return data.decode("utf-8", "backslashreplace") if data else tokenizer.piece(token)


def logprob_entry(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    """One token of `logprobs.content`, without its alternatives."""
    return {
        "token": shown_token(tokenizer, token),
        "logprob": max(logprob, LEAST_LOGPROB),
        "bytes": list(tokenizer.token_bytes(token)),
    }
