"""Small tokenizer files of both kinds, made here."""

from __future__ import annotations

import json
from typing import Any

import sentencepiece


def added(token: int, content: str, special: bool = True) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token, "content": content, "special": special, **flags}


def small_json(**changes: Any) -> bytes:
    """A byte-level `tokenizer.json` that knows a, b, aa and the letters of <end>."""
    letters = {letter: i for i, letter in enumerate("ab<end>")}
    whole: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": letters, "merges": []},
    }
    return json.dumps(whole | changes).encode()


def replace(old: str, new: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


def train_sentencepiece(**options: Any) -> bytes:
    import io

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a b c word abc cab <turn> the"] * 20),
        model_writer=model,
        model_type="bpe",
        vocab_size=60 + 256,
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
        **{"normalization_rule_name": "identity", **options},
    )
    return model.getvalue()
