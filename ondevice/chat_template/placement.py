"""Where messages stand that a template refuses or leaves out there: instructions between others, and several
messages of one role in a row. Pure.

Agents send both. Many templates take instructions as the first message alone, some none at all, and some only
users and replies by turns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from ondevice.chat_template.call_formats import CallFormat
from ondevice.chat_template.tools import json_text

INSTRUCTIONS = ("system", "developer")
_JOINED = ("user", "assistant")
"""Roles whose messages are joined where they follow each other."""
_GAP = "\n\n"


def is_usual(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether roles come in an order that every template knows: instructions first, and no role twice in a
    row but results."""
    roles = [message["role"] for message in messages]
    later = any(role in INSTRUCTIONS for role in roles[1:])
    return not later and not any(role in _JOINED and role == after for role, after in pairwise(roles))


def placements(messages: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The messages as they are, and then in ever fewer roles and turns, each different from the one before.

    Instructions that follow others become a user's message where they stand; then messages of one role in a
    row are one; at last the first instructions begin the first user's message. No text is lost, and all keep
    their order.
    """
    yield messages
    head, rest = _head(messages)
    later = [*head, *map(_as_user, rest)]
    made = [later, joined(later), joined([_as_user(message) for message in later])]
    before = messages
    for each in made:
        if each != before:
            yield each
        before = each


def joined(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages, those of a user or of the model that follow each other as one."""
    kept: list[dict[str, Any]] = []
    for message in messages:
        if kept and kept[-1]["role"] == message["role"] and message["role"] in _JOINED:
            kept[-1] = _join(kept[-1], message)
        else:
            kept.append(message)
    return kept


def numbered(messages: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """The messages with short texts in place of theirs, and the texts of users and instructions, in order."""
    texts = [f"probe{at}x" if _is_question(message) else "y" for at, message in enumerate(messages)]
    short = [
        message | ({} if message["content"] is None else {"content": text})
        for message, text in zip(messages, texts, strict=True)
    ]
    return short, [text for text in texts if text != "y"]


def calls_as_text(messages: list[dict[str, Any]], format: CallFormat | None) -> list[dict[str, Any]]:
    """The messages with calls written into the replies and results as a user's messages.

    For templates that refuse these calls: of no result, of several at once, results of no call.
    """
    return joined([_plain(message, format) for message in messages])


def _plain(message: dict[str, Any], format: CallFormat | None) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    if "tool_calls" not in message:
        return message
    functions = [call["function"] for call in message["tool_calls"]]
    written = [
        json_text({"name": each["name"], "arguments": each["arguments"]})
        if format is None or isinstance(each["arguments"], str)
        else format.write([(each["name"], each["arguments"])])
        for each in functions
    ]
    return {"role": message["role"], "content": "\n".join(filter(None, (message["content"], *written)))}


def _head(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The instructions that messages begin with, as one message, and the others."""
    count = next(
        (at for at, message in enumerate(messages) if message["role"] not in INSTRUCTIONS), len(messages)
    )
    if count < 2:
        return messages[:count], messages[count:]
    texts = (message["content"] for message in messages[:count])
    return [messages[0] | {"content": _GAP.join(filter(None, texts))}], messages[count:]


def _as_user(message: dict[str, Any]) -> dict[str, Any]:
    return message | {"role": "user"} if message["role"] in INSTRUCTIONS else message


def _is_question(message: Mapping[str, Any]) -> bool:
    return message["role"] == "user" or message["role"] in INSTRUCTIONS


def _join(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Two messages of one role as one."""
    texts = [text for text in (first["content"], second["content"]) if text]
    calls = [*first.get("tool_calls", ()), *second.get("tool_calls", ())]
    content = {"content": _GAP.join(texts) if texts or not calls else first["content"]}
    return second | first | content | ({"tool_calls": calls} if calls else {})
