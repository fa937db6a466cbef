"""The tokens that a Hugging Face folder adds to its `tokenizer.model`, in additional JSON files.

They become pieces of the model file, so that a runtime has to read only that file.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from ondevice.converters.checkpoints import sentencepiece_model as proto
from ondevice.converters.checkpoints.base import printable
from ondevice.converters.checkpoints.source_folder import SourceFolder
from ondevice.tokenizer.base import SPACE_MARK, valid_unicode

ADDED_TOKENS = "added_tokens.json"
SPECIAL_TOKENS = "special_tokens_map.json"

_TEXT_SCORE = -1.0
"""Score of added text pieces. Not 0, because the runtime takes pieces of score 0 for control tokens."""

logger = logging.getLogger(__name__)


def with_added_tokens(
    model: bytes, pieces: Sequence[str], folder: SourceFolder, settings: dict[str, Any], vocab_size: int
) -> bytes:
    """The sentencepiece `model` with the folder's added tokens appended to its pieces.

    Args:
        model: the serialised model.
        pieces: the texts of its pieces, by id.
        folder: the checkpoint's folder.
        settings: the content of `tokenizer_config.json`.
        vocab_size: the model's vocabulary size.

    A token can't be added if its id isn't the next one or is beyond `vocab_size`, or if its text is a piece
    already. A warning names such tokens.
    """
    known, special = set(pieces), special_texts(folder, settings)
    added: list[tuple[str, float, int]] = []
    left_out: list[str] = []
    for token, text in sorted(declared_tokens(folder, settings)):
        if 0 <= token < len(pieces) and pieces[token] == text:
            continue
        follows = token == len(pieces) + len(added) < vocab_size
        if not follows or not text or text in known or "\0" in text or valid_unicode(text) != text:
            left_out.append(f"{text!a} ({token})")
            continue
        known.add(text)
        if text in special:
            added.append((text, 0.0, proto.CONTROL))
        else:
            added.append((text.replace(" ", SPACE_MARK), _TEXT_SCORE, proto.USER_DEFINED))
    if left_out:
        logger.warning(
            "%s: these added tokens have no place after the %d of tokenizer.model and are left out: %s",
            folder.path,
            len(pieces),
            printable(", ".join(left_out[:20]) + (", ..." if len(left_out) > 20 else "")),
        )
    return model + proto.piece_fields(added)


def declared_tokens(folder: SourceFolder, settings: dict[str, Any]) -> set[tuple[int, str]]:
    """The added tokens with their ids: `{text: id}` in one file, `{"id": {"content": text}}` in the other."""
    entries: list[tuple[Any, Any]] = [
        (token, text) for text, token in folder.optional_json(ADDED_TOKENS).items()
    ]
    for token, entry in _decoder(settings).items():
        if token.isascii() and token.isdecimal() and len(token) < 10:
            entries.append((int(token), entry.get("content")))
    return {(token, text) for token, text in entries if type(token) is int and isinstance(text, str)}


def special_texts(folder: SourceFolder, settings: dict[str, Any]) -> set[str]:
    """The texts of those added tokens that control the model, and so aren't part of a text."""
    texts = [entry.get("content") for entry in _decoder(settings).values() if entry.get("special") is True]
    for source in (settings, folder.optional_json(SPECIAL_TOKENS)):
        for name, value in source.items():
            if name.endswith("_token") or name == "additional_special_tokens":
                for item in value if isinstance(value, list) else [value]:
                    texts.append(item.get("content") if isinstance(item, dict) else item)
    return {text for text in texts if isinstance(text, str)}


def _decoder(settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
    decoder = settings.get("added_tokens_decoder")
    entries = decoder.items() if isinstance(decoder, dict) else ()
    return {token: entry for token, entry in entries if isinstance(entry, dict)}
