"""Rearranges messages that a template refuses or drops, such as instructions after the first message, or
several messages of one role in a row.

Agents send both. Many templates take instructions only as the first message, some take none, and some accept
only user messages and replies that alternate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from ondevice.chat_template import given_text

INSTRUCTIONS = ("system", "developer")
_JOINED = ("user", "assistant")
"""Roles whose consecutive messages are joined."""
_GAP = "\n\n"


def is_usual(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the messages' roles have an order that every template accepts.

    Instructions come first, and no role except tool results comes twice in a row.
    """
    roles = [message["role"] for message in messages]
    later = any(role in INSTRUCTIONS for role in roles[1:])
    return not later and not any(role in _JOINED and role == after for role, after in pairwise(roles))


def placements(messages: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yields the messages unchanged, then rearranged with ever fewer roles and messages, each version once.

    First, instructions that follow other messages become user messages in the same place. Then consecutive
    messages of one role are joined. At last, the first instructions are put at the beginning of the first
    user message. No text is lost, and the order never changes.
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
    """The messages, with consecutive ones of a user or of the model joined."""
    kept: list[dict[str, Any]] = []
    for message in messages:
        if kept and kept[-1]["role"] == message["role"] and message["role"] in _JOINED:
            kept[-1] = _join(kept[-1], message)
        else:
            kept.append(message)
    return kept


def numbered(messages: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """The messages with short numbered texts in place of theirs, and these texts of users and instructions in
    order.
    """
    texts = [f"probe{at}x" if _is_question(message) else "y" for at, message in enumerate(messages)]
    short = [
        message | ({} if message["content"] is None else {"content": text})
        for message, text in zip(messages, texts, strict=True)
    ]
    return short, [text for text in texts if text != "y"]


def _head(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The instructions at the beginning joined to one message, if any, and the other messages."""
    count = next(
        (at for at, message in enumerate(messages) if message["role"] not in INSTRUCTIONS), len(messages)
    )
    if count < 2:
        return messages[:count], messages[count:]
    text = _text([message["content"] for message in messages[:count]])
    return [messages[0] | {"content": text}], messages[count:]


def _as_user(message: dict[str, Any]) -> dict[str, Any]:
    return message | {"role": "user"} if message["role"] in INSTRUCTIONS else message


def _is_question(message: Mapping[str, Any]) -> bool:
    return message["role"] == "user" or message["role"] in INSTRUCTIONS


def _join(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Two messages of one role joined to one."""
    texts = [text for text in (first["content"], second["content"]) if text]
    calls = [*first.get("tool_calls", ()), *second.get("tool_calls", ())]
    content = {"content": _text(texts) if texts or not calls else first["content"]}
    return second | first | content | ({"tool_calls": calls} if calls else {})


def _text(texts: Sequence[str]) -> str:
    """The texts joined by gaps, with everything except the gaps marked as given."""
    return given_text.joined(_GAP, [given_text.given(text) for text in texts if text])
