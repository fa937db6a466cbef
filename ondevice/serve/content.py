"""The text of messages and of tools' results that come in parts of many kinds.

Models here run on text alone. A picture, a sound or a file is refused in a person's message, because an
answer without it would be wrong. In a tool's result, which every later request repeats, it is replaced by a
line that says it isn't shown.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ondevice.chat_template.tools import json_text
from ondevice.serve.fields import Fields

TEXT_KINDS = ("text", "input_text", "output_text")
_DATA_WORDS = ("image", "audio", "video", "document", "file", "pdf", "upload", "screenshot")
_WRITTEN_KINDS = {"refusal": "refusal", "compaction": "content"}
"""Kinds of parts whose text is in a field of another name."""
_INERT = (
    "annotations",
    "cache_control",
    "citations",
    "id",
    "logprobs",
    "prompt_cache_breakpoint",
    "provider_options",
)


def take_text(
    fields: Fields,
    name: str,
    *,
    empty: bool = False,
    written: bool = False,
    dropped: tuple[str, ...] = (),
    unread: re.Pattern[str] | None = None,
) -> str:
    """The text of a field: a string, or a list of parts.

    Args:
        empty: whether it may be missing.
        written: whether a model wrote it; then parts that have no text are ignored, not refused.
        dropped: kinds of parts that are read elsewhere.
        unread: matches text that is removed from strings and parts.
    """
    value = fields.take(name)
    if value is None and empty:
        return ""
    if isinstance(value, str):
        return value if unread is None else unread.sub("", value)
    if not isinstance(value, list):
        fields.refuse(name, "must be a string or a list of parts")
    texts = []
    for at, item in enumerate(value):
        part = fields.inner(item, f"{name}[{at}]")
        if part.peek("type") not in dropped:
            text = _part_text(part, name, written)
            texts.append(text if unread is None else unread.sub("", text))
    return "".join(texts)


def _part_text(part: Fields, name: str, written: bool) -> str:
    kind = part.required_text("type")
    if kind in TEXT_KINDS:
        text = part.required_text("text")
        part.ignore(*_INERT)
        part.close()
        return text
    text = _text_document(part, kind) or _search_result(part, kind)
    if text:
        return text
    if kind in _WRITTEN_KINDS:
        return part.text(_WRITTEN_KINDS[kind], "") or ""
    why = f"is {kind[:40]!r}; this server takes text"
    if not written:
        part.refuse("type", why)
    part.leave_out("type", f"{name} of type {kind}", why)
    return ""


def _text_document(part: Fields, kind: str) -> str:
    """The text of a document that is plain text; empty for other documents."""
    source = part.peek("source")
    if kind != "document" or not isinstance(source, dict) or source.get("type") not in ("text", "content"):
        return ""
    title, data = part.peek("title"), source.get("data", source.get("content"))
    return _titled(title, data if isinstance(data, str) else _joined(data))


def _search_result(part: Fields, kind: str) -> str:
    if kind != "search_result":
        return ""
    return _titled(part.peek("title"), _joined(part.peek("content")))


def _titled(title: Any, text: str) -> str:
    return f"{title}\n{text}\n" if isinstance(title, str) and title else text


def _joined(blocks: Any) -> str:
    """The texts of all objects in a list that have a `text`, joined; empty for any other value."""
    texts = [it.get("text") for it in blocks if isinstance(it, dict)] if isinstance(blocks, list) else []
    return "".join(text for text in texts if isinstance(text, str))


def told_text(fields: Fields, name: str) -> str:
    """The text of a tool's result in any form: a string, parts, other JSON, or nothing."""
    value = fields.take(name)
    if value is None or isinstance(value, str):
        return value or ""
    parts = value if isinstance(value, list) else [value]
    return "".join(_told_part(fields, name, part) for part in parts)


def _told_part(fields: Fields, name: str, part: Any) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        return json_text(part)
    kind = part["type"]
    if isinstance(text := part.get("text"), str):
        return text
    inner = fields.inner(dict(part), name)
    if text := _text_document(inner, kind) or _search_result(inner, kind):
        return text
    if any(word in kind for word in _DATA_WORDS):
        inner.leave_out("type", f"{name} of type {kind}", f"is {kind[:40]!r}; this server takes text")
        return f"[{kind[:40]}: not shown, as this model takes text alone]"
    return json_text({key: value for key, value in part.items() if key != "cache_control"})
