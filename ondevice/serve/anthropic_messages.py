"""The conversation in a request to Anthropic's API: instructions, turns made of blocks, calls and results."""

from __future__ import annotations

import re
from typing import Any

from ondevice.chat_template.messages import Message
from ondevice.serve.content import take_text, told_text
from ondevice.serve.fields import Fields
from ondevice.serve.tools import call_message, checked_messages

THINKING = ("thinking", "redacted_thinking")
"""Blocks of an assistant's turn that aren't its text."""
BILLING_HEADER = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*")
"""Claude Code's first line of instructions, for Anthropic's servers. Its value changes with every request, so
it is removed: otherwise no prompt would begin as the last one did."""
TOOL_BLOCKS = {"assistant": "tool_use", "user": "tool_result"}
"""Blocks of calls and of results, by role."""
ROLES = ("system", "user", "assistant")


def take_messages(fields: Fields) -> tuple[Message, ...]:
    """The messages in `system` and `messages`, in order. Raises RequestError if there is no user message."""
    system = take_text(fields, "system", empty=True, unread=BILLING_HEADER)
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for each in fields.objects("messages"):
        _add(messages, each)
    if all(message["role"] == "system" for message in messages):
        fields.refuse("messages", "is empty; give at least one message of a user")
    return checked_messages(fields, "messages", messages)


def _add(messages: list[dict[str, Any]], fields: Fields) -> None:
    """Append a turn's messages: results of tools, then its text. Consecutive turns of one role are joined."""
    role = fields.required_text("role")
    if role not in ROLES:
        fields.refuse("role", f"is {role[:40]!r}; it must be {', '.join(ROLES)}")
    thought = _thought(fields) if role == "assistant" else ""
    calls, results = _take_tool_blocks(fields, role)
    if fields.peek("content") is None:
        fields.refuse("content", "is missing")
    dropped = (*(THINKING if role == "assistant" else ()), TOOL_BLOCKS.get(role, ""))
    unread = BILLING_HEADER if role == "system" else None
    text = take_text(fields, "content", written=role == "assistant", dropped=dropped, unread=unread)
    fields.ignore("cache_control", "id")
    fields.close()
    messages += results
    if not text and not calls and results:
        return
    if messages and messages[-1]["role"] == role:
        messages[-1]["content"] = "\n\n".join(filter(None, (messages[-1]["content"], text)))
    else:
        messages.append({"role": role, "content": text})
    if calls:
        messages[-1].setdefault("tool_calls", []).extend(calls)
    if thought:
        messages[-1]["thinking"] = thought


def _thought(fields: Fields) -> str:
    """The thinking in the blocks of a turn."""
    value = fields.peek("content")
    blocks = [it for it in value if isinstance(it, dict)] if isinstance(value, list) else []
    texts = [it.get("thinking") for it in blocks if it.get("type") == "thinking"]
    return "".join(text for text in texts if isinstance(text, str))


def _take_tool_blocks(fields: Fields, role: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The calls in an assistant's turn, and the results in a user's turn as messages."""
    value = fields.peek("content")
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for at, item in enumerate(value if isinstance(value, list) else []):
        if not isinstance(item, dict) or item.get("type") != TOOL_BLOCKS.get(role):
            continue
        block = fields.inner(item, f"content[{at}]")
        block.ignore("type", "cache_control", "caller")
        if role == "assistant":
            name, id = block.text("name", "") or "", block.text("id", "") or ""
            calls.append(call_message(id, name, block.take("input")))
        else:
            failed, text = block.boolean("is_error"), told_text(block, "content")
            text = f"Error: {text}" if failed else text
            results.append({"role": "tool", "content": text, "tool_call_id": block.text("tool_use_id")})
        block.close()
    return calls, results
