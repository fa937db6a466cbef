"""Tokenizers in `vocab.json` and `merges.txt`, as OPT's are published: the ids that `transformers` gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from ondevice.bundle.reader import Bundle
from ondevice.converters.convert import convert
from ondevice.errors import CheckpointError
from ondevice.runtime.opening import open_tokenizer
from ondevice.tokenizer import Tokenizer
from tests.support.models import write_checkpoint
from tests.support.refusals import assert_refused

VOCAB = 400
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
SETTINGS: dict[str, Any] = {
    "add_bos_token": True,
    "add_prefix_space": False,
    "bos_token": {"__type": "AddedToken", "content": "</s>"},
    "eos_token": {"__type": "AddedToken", "content": "</s>"},
    "errors": "replace",
    "pad_token": "<pad>",
    "tokenizer_class": "GPT2Tokenizer",
    "unk_token": {"__type": "AddedToken", "content": "</s>"},
}
TEXTS = (
    "The cat's sat; it'd sit on 1234 mats, wouldn't it?",
    "  spaces   and\n\nlines\t tabs ",
    "naïve café — 日本語 🦜",
    "a</s>b<pad> c",
    "",
)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A model with a trained vocabulary in two files."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - 8, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([*TEXTS, "the mats that sat on the cat " * 20] * 3, trainer)
    folder = write_checkpoint(tmp_path / "source", vocab_size=VOCAB, num_hidden_layers=1)
    made.model.save(str(folder))
    (folder / "tokenizer_config.json").write_text(json.dumps(SETTINGS))
    assert not (folder / "tokenizer.json").exists()
    return folder


def converted(source: Path) -> Tokenizer:
    tokenizer = open_tokenizer(Bundle.open(convert(source, source.parent / "bundle", force=True)))
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_those_of_transformers(source: Path, text: str) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = converted(source)
    files = {"vocab": str(source / "vocab.json"), "merges": str(source / "merges.txt")}
    theirs = transformers.GPT2Tokenizer(
        **files, bos_token="</s>", eos_token="</s>", unk_token="</s>", pad_token="<pad>"
    )
    expected = theirs.encode(text, add_special_tokens=False)
    assert tokenizer.encode(text, add_bos=False, special=True) == expected
    # A text that a user gives has no special tokens in it, whatever it looks like.
    plain = tokenizer.encode(text)
    assert tokenizer.decode(plain[1:]) == text
    if "</s>" not in text:
        assert plain == [2, *expected]


def test_tokens_that_other_files_add_are_known(source: Path) -> None:
    following = len(json.loads((source / "vocab.json").read_text()))
    (source / "added_tokens.json").write_text(json.dumps({"<turn>": following}))
    (source / "special_tokens_map.json").write_text(json.dumps({"additional_special_tokens": ["<turn>"]}))
    assert set(converted(source).special_tokens) == {"</s>", "<pad>", "<turn>"}


def test_a_leading_space_is_added_where_the_settings_say_so(source: Path) -> None:
    plain = ids_of(source, {})
    spaced = ids_of(source, {"add_prefix_space": True})
    assert plain != spaced
    assert spaced == ids_of(source, {}, " The cat")


def ids_of(source: Path, more: dict[str, Any], text: str = "The cat") -> list[int]:
    (source / "tokenizer_config.json").write_text(json.dumps(SETTINGS | more))
    return converted(source).encode(text)


@pytest.mark.parametrize(("settings", "model_type", "known"), [
    ({}, "opt", True),
    ({}, "llama", False),
    ({"tokenizer_class": "Qwen2Tokenizer"}, "opt", False),
    ({"tokenizer_class": "CodeGenTokenizer"}, "llama", True),
])  # fmt: skip
def test_only_splitting_that_is_known_is_taken(
    source: Path, settings: dict[str, Any], model_type: str, known: bool
) -> None:
    """Others with such files split a text otherwise, and would get other tokens without a word."""
    from ondevice.converters.checkpoints.source_folder import SourceFolder
    from ondevice.converters.checkpoints.tokenizer_files import has_bpe_files

    assert has_bpe_files(SourceFolder(source), settings, {"model_type": model_type}) is known


@pytest.mark.parametrize(("file", "content", "message"), [
    ("vocab.json", b'{"a": "b"}', "vocab.json has ids that are no numbers"),
    ("vocab.json", b'{"a": -1}', "vocab.json has ids that are no numbers"),
    ("vocab.json", b"[]", "vocab.json doesn't hold a JSON object"),
    ("vocab.json", b'{"a": 5000}', "a merge makes a piece that its vocabulary hasn't got"),
    ("merges.txt", b"\xff\xfe", "merges.txt isn't UTF-8"),
    ("merges.txt", b"#version: 0.2\na b c\n", "vocab.json and merges.txt"),
    ("merges.txt", b"x y\n", "vocab.json and merges.txt"),
])  # fmt: skip
def test_damaged_files_are_refused(source: Path, file: str, content: bytes, message: str) -> None:
    (source / file).write_bytes(content)
    assert_refused(source, CheckpointError, message)
