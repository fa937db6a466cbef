"""The tokenizer of a folder with GPT-2's own two files and no `tokenizer.json`, as OPT's are published."""

from __future__ import annotations

from typing import Any

from ondevice.bundle.layout import TOKENIZER_FILES
from ondevice.bundle.manifest import MAX_BLOB_BYTES
from ondevice.converters.checkpoints.added_tokens import declared_tokens, special_texts
from ondevice.converters.checkpoints.bpe_json import bpe_json, byte_level
from ondevice.converters.checkpoints.gguf_splitting import SPLITTINGS
from ondevice.converters.checkpoints.source_folder import SourceFolder
from ondevice.errors import CheckpointError
from ondevice.tokenizer.base import valid_unicode

VOCABULARY, MERGES = "vocab.json", "merges.txt"
CLASSES = ("GPT2Tokenizer", "GPT2TokenizerFast", "CodeGenTokenizer", "CodeGenTokenizerFast")
"""Tokenizer classes that split a text as GPT-2 does; others with these two files don't."""
_MAX_BYTES = MAX_BLOB_BYTES[TOKENIZER_FILES["tokenizers"]]


def has_bpe_files(folder: SourceFolder, settings: dict[str, Any], config: dict[str, Any]) -> bool:
    """Whether the folder has both files, and its tokenizer is known to split a text as GPT-2's.

    settings, config: of `tokenizer_config.json` and `config.json`.
    """
    tokenizer_class = settings.get("tokenizer_class") or (
        CLASSES[0] if config.get("model_type") == "opt" else None
    )
    return tokenizer_class in CLASSES and folder.has(VOCABULARY) and folder.has(MERGES)


def bpe_files_json(folder: SourceFolder, settings: dict[str, Any]) -> bytes:
    """A `tokenizer.json` of both files and the added tokens.

    Raises CheckpointError for files that are damaged.
    """
    vocabulary = folder.json(VOCABULARY, _MAX_BYTES)
    if not all(type(token) is int and 0 <= token < 1 << 31 for token in vocabulary.values()):
        raise CheckpointError(f"{VOCABULARY} has ids that are no numbers below 2^31; download it again")
    try:
        lines = folder.read(MERGES, _MAX_BYTES).decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{MERGES} isn't UTF-8 text: {error}; download it again") from error
    merges = [line for line in lines if line.strip() and not line.startswith("#version")]
    special = special_texts(folder, settings)
    added = {text: token for token, text in declared_tokens(folder, settings) if valid_unicode(text) == text}
    added |= {text: vocabulary[text] for text in special if text in vocabulary}
    rules = byte_level(SPLITTINGS["gpt-2"])
    if settings.get("add_prefix_space") is True:
        rules["pre_tokenizer"]["pretokenizers"][-1]["add_prefix_space"] = True
    entries = sorted((token, text, text in special) for text, token in added.items() if text)
    return bpe_json(vocabulary, merges, entries, rules)
