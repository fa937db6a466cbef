"""The chat template of a checkpoint, which may be in several places and under several names.

A model may have a template `tool_use` for chats with tools, in addition to its `default` one. A bundle has a
single template, which chooses between them. A template that can't be used is left out, with a warning; it
never stops a conversion.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from ondevice.bundle.layout import CHAT_TEMPLATE
from ondevice.chat_template import TEMPLATE_REMEDY, try_out
from ondevice.converters.checkpoints.source_folder import SourceFolder
from ondevice.errors import BundleError, CheckpointError

DEFAULT, WITH_TOOLS = "default", "tool_use"
OTHER_TEMPLATES = "additional_chat_templates"
"""Folder with templates of other names."""
OLD_TEMPLATE = "chat_template.json"
_KEY = "chat_template"

logger = logging.getLogger(__name__)


def folder_template(folder: SourceFolder, settings: dict[str, Any]) -> bytes | None:
    """The chat template of a Hugging Face folder; None if it has no usable one.

    settings: the parsed tokenizer_config.json. Templates in separate files take precedence over it, as in
    `transformers`.
    """
    named = _named(settings.get(_KEY))
    if folder.has(OLD_TEMPLATE):
        named |= _named(folder.json(OLD_TEMPLATE).get(_KEY))
    if folder.has(CHAT_TEMPLATE):
        named[DEFAULT] = decoded(folder.read(CHAT_TEMPLATE))
    others = folder.folder(OTHER_TEMPLATES)
    file = f"{WITH_TOOLS}.jinja"
    if others is not None and others.has(file):
        named[WITH_TOOLS] = decoded(others.read(file))
    return usable_template(named)


def _named(value: Any) -> dict[str, str]:
    """The templates by name, from a single template, or from several in a list or an object."""
    if isinstance(value, str):
        return {DEFAULT: value}
    items: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, dict) else ()
    if isinstance(value, list):
        items = [(item.get("name"), item.get("template")) for item in value if isinstance(item, dict)]
    return {name: text for name, text in items if isinstance(name, str) and isinstance(text, str)}


def decoded(data: bytes) -> str:
    """A file's text. Bytes that aren't UTF-8 become a character that no template can contain."""
    return data.decode("utf-8", "surrogateescape")


def usable_template(named: Mapping[str, str]) -> bytes | None:
    """A single template made from templates by name; None, with a warning, if none is usable."""
    plain, with_tools = named.get(DEFAULT, ""), named.get(WITH_TOOLS, "")
    choices = [plain or with_tools]
    if plain.strip() and with_tools.strip() and plain != with_tools:
        choices = [_choosing(plain, with_tools), plain]
    for source in choices:
        if not source.strip():
            return None
        try:
            return checked_template(source)
        except CheckpointError as error:
            logger.warning("%s", error.for_command_line)
    logger.warning("the bundle has no chat template of the model's, and continues a plain transcript")
    return None


def checked_template(source: str) -> bytes:
    """A chat template in the form that a bundle stores. Raises CheckpointError if it isn't UTF-8 or can't be
    used.
    """
    try:
        data = source.encode("utf-8")
        try_out(source)
    except UnicodeEncodeError as error:
        raise CheckpointError(f"the chat template isn't UTF-8 text; {TEMPLATE_REMEDY}") from error
    except BundleError as error:
        raise CheckpointError(error.for_command_line) from error
    return data


def _choosing(plain: str, with_tools: str) -> str:
    """A template that chooses between two templates. The last line feed of each is dropped, as it is for any
    template.
    """
    first, second = (text.removesuffix("\n") for text in (with_tools, plain))
    return f"{{% if tools +%}}{first}{{%+ else +%}}{second}{{%+ endif %}}"
