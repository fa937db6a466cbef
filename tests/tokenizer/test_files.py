"""Tokenizer files that are damaged, hostile or made for something else: a typed error, or a tokenizer."""

from __future__ import annotations

from typing import Any

import pytest

from ondevice.errors import BundleError, UnsupportedModelError
from ondevice.tokenizer import load_tokenizer
from tests.support.small_tokenizers import replace, small_json


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a q"]}}, BundleError, "can't be used"),
        (
            {"model": {"type": "WordLevel", "vocab": {"[UNK]": 0}, "unk_token": "[UNK]"}},
            UnsupportedModelError,
            "Word",
        ),
        (
            {"model": {"type": "BPE", "vocab": {"a": 0, "aa": 1}, "merges": [], "end_of_word_suffix": "x"}},
            UnsupportedModelError,
            "suffix",
        ),
        (
            {
                "model": {
                    "type": "BPE",
                    "vocab": {"a": 0, "aa": 1},
                    "merges": ["a a"],
                    "continuing_subword_prefix": "aaa",
                }
            },
            UnsupportedModelError,
            "prefixes",
        ),
        ({"decoder": None}, UnsupportedModelError, "decoder"),
        (
            {"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}},
            UnsupportedModelError,
            "WordPiece",
        ),
        (
            {"decoder": {"type": "Sequence", "decoders": [replace("a", "b"), {"type": "Fuse"}]}},
            UnsupportedModelError,
            "decoder",
        ),
        (
            {"normalizer": {"type": "Sequence", "normalizers": [replace("a", "a" * 10)] * 2}},
            BundleError,
            "100 times longer",
        ),
        (
            {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAAAAAA"}},
            (UnsupportedModelError, BundleError),
            "Precompiled|can't be used",
        ),
        ({"normalizer": {"type": "Nonsense"}}, UnsupportedModelError, "Nonsense"),
        (
            {
                "pre_tokenizer": {
                    "type": "Split",
                    "pattern": {"Regex": "(a"},
                    "behavior": "Isolated",
                    "invert": False,
                }
            },
            UnsupportedModelError,
            "a group doesn't end",
        ),
    ],
)
def test_tokenizer_json_that_cannot_be_used(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    load_tokenizer("tokenizers", small_json(), None, [], False)
    with pytest.raises(error, match=message):
        load_tokenizer("tokenizers", small_json(**changes), None, [], False)


@pytest.mark.parametrize("kind", ["sentencepiece", "tokenizers"])
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0",
        b"{}",
        b"null",
        b"\xff\xfe" * 50,
        b"[" * 100_000,
        b'{"normalizer":' * 5000,
        b"\x0a\xff\xff\xff\x7f",
    ],
)
def test_bytes_that_are_no_tokenizer(kind: str, data: bytes) -> None:
    with pytest.raises(BundleError, match="can't be used"):
        load_tokenizer(kind, data, None, [], False)


@pytest.mark.parametrize(("kind", "limit"), [("sentencepiece", 16 << 20), ("tokenizers", 32 << 20)])
def test_files_above_the_cap_are_not_parsed(kind: str, limit: int) -> None:
    with pytest.raises(BundleError, match=f"the limit is {limit}"):
        load_tokenizer(kind, bytes(limit + 1), None, [], False)


def test_a_truncated_or_flipped_sentencepiece_is_an_error_or_a_tokenizer(small_sentencepiece: bytes) -> None:
    outcomes = set()
    for at in range(0, len(small_sentencepiece), 23):
        flipped = bytearray(small_sentencepiece)
        flipped[at] ^= 0xA5
        for data in (small_sentencepiece[:at], bytes(flipped)):
            try:
                tokenizer = load_tokenizer("sentencepiece", data, 1, [2], True, vocab_size=400)
                assert isinstance(tokenizer.decode(tokenizer.encode("a <turn> word é")), str)
                outcomes.add("tokenizer")
            except BundleError:
                outcomes.add("error")
    assert outcomes == {"tokenizer", "error"}


def test_settings_that_would_change_a_prompt_are_switched_off() -> None:
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    padding = {
        "strategy": {"Fixed": 9},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 1,
        "pad_type_id": 0,
        "pad_token": "b",
    }
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "aa": 2}, "merges": ["a a"], "dropout": 0.5}
    data = small_json(truncation=truncation, padding=padding, model=model)
    tokenizer = load_tokenizer("tokenizers", data, None, [], False)
    assert {tuple(tokenizer.encode("aaaaaab")) for _ in range(20)} == {(2, 2, 2, 1)}


def test_a_vocabulary_with_gaps_cannot_name_rows_the_model_lacks() -> None:
    data = small_json(model={"type": "BPE", "vocab": {"a": 0, "b": 400}, "merges": []})
    load_tokenizer("tokenizers", data, None, [], False, vocab_size=401)
    with pytest.raises(BundleError, match="400"):
        load_tokenizer("tokenizers", data, None, [], False, vocab_size=16)
