"""Makes a byte-pair-encoding `tokenizer.json` from tokens, merges and rules."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ondevice.converters.checkpoints.gguf_splitting import Splitting


def bpe_json(
    vocabulary: Mapping[str, int],
    merges: Sequence[str],
    added: Iterable[tuple[int, str, bool]],
    rules: Mapping[str, Any],
) -> bytes:
    """The bytes of a `tokenizer.json`.

    Args:
        vocabulary: ids by token.
        merges: pairs of tokens with a space between them, in order of priority.
        added: id and text of each token that is recognised in a text before the text is split, and whether
            the token controls the model, so that it isn't part of the text.
        rules: sections of the file, as `byte_level` returns them.
    """
    entries = [
        {
            "id": token,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": special,
        }
        for token, text, special in added
    ]
    model = {**rules["model"], "type": "BPE", "vocab": vocabulary, "merges": merges}
    document = {
        **rules,
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": entries,
        "post_processor": None,
        "model": model,
    }
    return json.dumps(document, ensure_ascii=False).encode()


def byte_level(splitting: Splitting) -> dict[str, Any]:
    """The rules of byte-level BPE, in the form of sections of a `tokenizer.json`."""
    model = {"unk_token": None, "byte_fallback": False, "ignore_merges": splitting.keeps_tokens}
    return {
        "normalizer": splitting.normalizer,
        "pre_tokenizer": splitting.pre_tokenizer,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": model,
    }
