"""Prompts for what belongs between two texts: token ids by hand, of each family's marks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ondevice.errors import InfillNotSupportedError
from ondevice.tokenizer import Tokenizer, load_tokenizer
from ondevice.tokenizer.infill import InfillTokens, SourceFile
from tests.support.bundles import BOS, FIRST_MARK, INFILL_MARKS, write_byte_tokenizer
from tests.support.small_tokenizers import train_sentencepiece

PRE, SUF, MID, REPO, FILE = range(FIRST_MARK, FIRST_MARK + 5)


def byte_tokenizer(folder: Path, *marks: str, add_bos: bool = False) -> Tokenizer:
    write_byte_tokenizer(folder, None, marks)
    data = (folder / "tokenizer.json").read_bytes()
    return load_tokenizer("tokenizers", data, BOS, (), add_bos, vocab_size=300)


def spelt(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_bos=False)


def test_a_prompt_has_the_marks_around_plain_text(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path, *INFILL_MARKS, add_bos=True)
    ids = InfillTokens.of(tokenizer).prompt(tokenizer, "a<|fim_middle|>", "b")
    # A mark's name in somebody's code is code.
    code = spelt(tokenizer, "a<|fim_middle|>")
    assert len(code) == 15
    assert ids == [BOS, PRE, *code, SUF, *spelt(tokenizer, "b"), MID]


def test_other_files_stand_before_the_gap_and_the_first_ones_go_where_there_is_no_room(
    tmp_path: Path,
) -> None:
    tokenizer = byte_tokenizer(tmp_path, *INFILL_MARKS)
    marks, files = InfillTokens.of(tokenizer), [SourceFile("x.py", "one"), SourceFile("y.py", "two")]
    gap = [PRE, *spelt(tokenizer, "a"), SUF, *spelt(tokenizer, "b"), MID]
    head = [REPO, *spelt(tokenizer, "myproject\n")]
    first = [FILE, *spelt(tokenizer, "x.py\none")]
    second = [FILE, *spelt(tokenizer, "y.py\ntwo")]
    tail = [FILE, *spelt(tokenizer, "filename\n")]
    whole = [*head, *first, *second, *tail, *gap]
    assert marks.prompt(tokenizer, "a", "b", files) == whole
    assert marks.prompt(tokenizer, "a", "b", files, most=len(whole)) == whole
    assert marks.prompt(tokenizer, "a", "b", files, most=len(whole), reserved=1) == [
        *head,
        *second,
        *tail,
        *gap,
    ]
    assert marks.prompt(tokenizer, "a", "b", files, most=len(gap) + 3) == gap


@pytest.mark.parametrize(
    "names",
    [
        ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
        ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
        ("<PRE>", "<SUF>", "<MID>"),
        ("▁<PRE>", "▁<SUF>", "▁<MID>"),
        ("<\uff5cfim▁begin\uff5c>", "<\uff5cfim▁hole\uff5c>", "<\uff5cfim▁end\uff5c>"),
        ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
        ("<|prefix|>", "<|suffix|>", "<|middle|>"),
    ],
)
def test_marks_of_other_families_are_recognised(tmp_path: Path, names: tuple[str, str, str]) -> None:
    tokenizer = byte_tokenizer(tmp_path, *names, "<|endoftext|>")
    marks = InfillTokens.of(tokenizer)
    assert marks.prompt(tokenizer, "", "") == [PRE, SUF, MID]
    assert {PRE, SUF, MID} <= set(marks.ends)


def test_codestral_has_the_suffix_first_and_no_middle(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path, "[PREFIX]", "[SUFFIX]", add_bos=True)
    a, b = spelt(tokenizer, "a"), spelt(tokenizer, "b")
    assert InfillTokens.of(tokenizer).prompt(tokenizer, "a", "b") == [BOS, FIRST_MARK + 1, *b, FIRST_MARK, *a]


def test_ends_are_the_marks_and_what_ends_a_middle(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path, *INFILL_MARKS, "<|fim_pad|>", "<|endoftext|>")
    assert set(InfillTokens.of(tokenizer).ends) == set(range(FIRST_MARK, FIRST_MARK + 7))


def test_a_suffix_gets_no_space_of_sentencepiece_s(tmp_path: Path) -> None:
    """CodeLlama's own code encodes suffixes so."""
    marks_of_codellama = ["▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"]
    data = train_sentencepiece(remove_extra_whitespaces=False, user_defined_symbols=marks_of_codellama)
    tokenizer = load_tokenizer("sentencepiece", data, 1, (2,), True)
    marks = InfillTokens.of(tokenizer)
    ids = marks.prompt(tokenizer, "word", "word")
    at = ids.index(marks.suffix)
    assert "".join(map(tokenizer.piece, ids[2:at])) == "▁word"
    assert "".join(map(tokenizer.piece, ids[at + 1 : -1])) == "word"
    assert (ids[0], ids[1], ids[-1]) == (1, tokenizer.token_id("▁<PRE>"), marks.middle)
    assert tokenizer.token_id("▁<EOT>") in marks.ends


def test_what_a_tokenizer_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(InfillNotSupportedError, match=r"no <\|fim_prefix\|> and no <\|fim_suffix\|> and"):
        InfillTokens.of(byte_tokenizer(tmp_path))
    with pytest.raises(InfillNotSupportedError, match="no <fim_middle>;"):
        InfillTokens.of(byte_tokenizer(tmp_path, "<fim_prefix>", "<fim_suffix>"))


def test_tokens_that_are_not_marked_special_count_too(tmp_path: Path) -> None:
    """Qwen's own files mark none of them."""
    write_byte_tokenizer(tmp_path, None, INFILL_MARKS)
    document = json.loads((tmp_path / "tokenizer.json").read_bytes())
    for token in document["added_tokens"]:
        token["special"] = token["id"] < FIRST_MARK
    tokenizer = load_tokenizer("tokenizers", json.dumps(document).encode(), BOS, (), False)
    assert InfillTokens.of(tokenizer).prefix == PRE


@pytest.mark.parametrize("add_bos", [None, True])
def test_a_text_that_begins_with_bos_gets_no_second_one(tmp_path: Path, add_bos: bool | None) -> None:
    tokenizer = byte_tokenizer(tmp_path, add_bos=True)
    a = spelt(tokenizer, "a")
    assert tokenizer.encode("<s>a", add_bos=add_bos, special=True) == [BOS, *a]
    assert tokenizer.encode("a", add_bos=add_bos, special=True) == [BOS, *a]
    assert tokenizer.encode("<s><s>a", special=True) == [BOS, BOS, *a]
    assert tokenizer.encode("<s>a", special=False) == [BOS, *spelt(tokenizer, "<s>"), *a]
