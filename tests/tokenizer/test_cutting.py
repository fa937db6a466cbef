"""Long texts are encoded in pieces: to the ids of the whole, however they arrive."""

from __future__ import annotations

import json
import random
import re
import tarfile
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers

from ondevice.errors import BundleError
from ondevice.tokenizer import Tokenizer, cutting, load_tokenizer
from ondevice.tokenizer.cutting import MAX_PIECE_CHARS, Piece, Stopwatch, pieces
from tests.support.small_tokenizers import added, replace, small_json, train_sentencepiece

METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": False}


def texts(parts: list[str], limit: int = 16, **options: Any) -> list[str]:
    found = list(pieces(parts, limit, **options))
    assert [piece.first for piece in found] == [True, *[False] * (len(found) - 1)]
    assert [piece.last for piece in found] == [*[False] * (len(found) - 1), True]
    return [piece.text for piece in found]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", [""]),
        ("sixteen letters!", ["sixteen letters!"]),
        ("one two three four five", ["one two three", " four five"]),
        ("one two three\nfour five", ["one two three", "\nfour five"]),
        ("one, two; 3333 3333 3333", ["one, two; 3333 3", "333 3333"]),
        ("天地玄黄宇宙洪荒日月,盈昃辰宿列张", ["天地玄黄宇宙洪荒日月", ",盈昃辰宿列张"]),
        ("abcdefghijklmno'qrstuvwxyz", ["abcdefghijklmno'", "qrstuvwxyz"]),
    ],
)
def test_pieces_end_where_words_do(text: str, expected: list[str]) -> None:
    assert texts([text]) == expected


def test_where_a_text_is_cut_depends_on_nothing_but_the_text() -> None:
    draw = random.Random(1)
    for _ in range(300):
        text = "".join(draw.choice("ab  ,.\n3天é") for _ in range(draw.randint(0, 200)))
        whole = texts([text])
        assert "".join(whole) == text
        assert max(map(len, whole)) <= 16
        ends = sorted(draw.randint(0, len(text)) for _ in range(draw.randint(0, 9)))
        parts = [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]
        assert texts(parts) == whole


def test_names_of_special_tokens_are_never_cut() -> None:
    name = re.compile(re.escape("<|a name|>"))
    for before in range(40):
        text = "x" * before + "<|a name|>" + "y" * 30
        assert any("<|a name|>" in piece for piece in texts([text], unbroken=name))


def test_what_would_grow_too_much_is_cut_smaller() -> None:
    found = texts(["a" * 10 + "B" * 20], fits=lambda text: text.count("B") <= 4)
    assert "".join(found) == "a" * 10 + "B" * 20, found
    assert all(piece.count("B") <= 4 for piece in found)
    assert texts(["B" * 3], fits=lambda text: False) == ["B", "B", "B"]


def first_difference(ids: list[int], expected: list[int]) -> int | None:
    pairs = enumerate(zip_longest(ids, expected))
    return next((index for index, (a, b) in pairs if a != b), None)


def with_vocabulary(shared: Path, pre_tokenizer: Any, **changes: Any) -> bytes:
    """GPT-2's vocabulary behind another pre-tokenizer."""
    folder = shared / "tokenizers" / "gpt2"
    vocabulary = json.loads((folder / "vocab.json").read_text())
    merges = (folder / "merges.txt").read_text().splitlines()[1:]
    model = {"type": "BPE", "vocab": vocabulary, "merges": [line for line in merges if line]}
    return small_json(model=model, pre_tokenizer=pre_tokenizer, **changes)


def long_texts(shared: Path) -> dict[str, str]:
    """20,000 characters and more each, of kinds that are cut at different places."""
    with tarfile.open(next((shared / "corpus" / "english_novels").glob("*.tar.xz"))) as archive:
        member = next(member for member in archive if member.isfile())
        stream = archive.extractfile(member)
        assert stream is not None
        novel = stream.read(60_000).decode("utf-8", "replace")
    code = "".join(
        f"    if x_{i} >= {i * 37}:\n\n        return f'{{x_{i}}}' # é naïve\n" for i in range(400)
    )
    chinese = "天地玄黄、宇宙洪荒。日月盈昃、辰宿列张。寒来暑往\n秋收冬藏「闰余成岁」律吕调阳。" * 600
    mixed = "Ünïcode   TEXT, with 1234567890 numbers... and\ttabs\r\n\r\nж ъы की किताब " * 300
    return {"novel": novel, "code": code, "chinese": chinese, "mixed": mixed}


@pytest.mark.fast("llama2", "metaspace", "minimind", "split")
@pytest.mark.parametrize("kind", ["gpt2", "split", "metaspace", "minimind", "llama2"])
def test_pieces_give_the_ids_of_the_whole(kind: str, shared_data: Path) -> None:
    llama3 = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    split = {"type": "Split", "pattern": {"Regex": llama3}, "behavior": "Isolated", "invert": False}
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": kind == "gpt2",
    }
    if kind == "llama2":
        data = (shared_data / "tokenizers" / "llama2" / "tokenizer.model").read_bytes()
        library = sentencepiece.SentencePieceProcessor(model_proto=data)
        encode = library.encode
    else:
        data = {
            "gpt2": lambda: with_vocabulary(shared_data, {**level, "add_prefix_space": True}),
            "split": lambda: with_vocabulary(
                shared_data, {"type": "Sequence", "pretokenizers": [split, level]}, normalizer={"type": "NFC"}
            ),
            "metaspace": lambda: small_json(
                pre_tokenizer=METASPACE,
                decoder=METASPACE,
                model={
                    "type": "BPE",
                    "vocab": {piece: i for i, piece in enumerate(("▁", *"abcdefghijklmnop", "▁a", "▁an"))},
                    "merges": ["▁ a", "▁a n"],
                },
            ),
            "minimind": lambda: (shared_data / "tokenizers" / "minimind" / "tokenizer.json").read_bytes(),
        }[kind]()
        whole = tokenizers.Tokenizer.from_str(data.decode())

        def encode(text: str) -> Any:
            return whole.encode(text, add_special_tokens=False).ids

    tokenizer = load_tokenizer("sentencepiece" if kind == "llama2" else "tokenizers", data, None, [], False)
    for text in long_texts(shared_data).values():
        assert len(text) > 4 * MAX_PIECE_CHARS
        expected = encode(text)
        # Not the lists themselves: who reads 20,000 ids that differ?
        assert first_difference(tokenizer.encode(text), expected) is None
        parts = [text[at : at + 1000] for at in range(0, len(text), 1000)]
        ids = [token for found in tokenizer.encode_parts(parts) for token in found]
        assert first_difference(ids, expected) is None


@pytest.mark.parametrize("escape", [True, False])
@pytest.mark.parametrize("dummy", [True, False])
@pytest.mark.parametrize("strips", [True, False])
def test_a_sentencepiece_models_spaces_are_its_own(escape: bool, dummy: bool, strips: bool) -> None:
    data = train_sentencepiece(
        add_dummy_prefix=dummy, remove_extra_whitespaces=strips, user_defined_symbols=["▁▁"]
    )
    if not escape:
        data += bytes([3 << 3 | 2, 2, 5 << 3, 0])  # NormalizerSpec.escape_whitespaces
    library = sentencepiece.SentencePieceProcessor(model_proto=data)
    tokenizer = load_tokenizer("sentencepiece", data, None, [], False)
    # Long ones only where a space that a piece begins with isn't lost.
    long = ["the " * 3000, "cab abc word\n" * 900] if dummy or not strips else []
    for text in ("a b", " a", "  word", "", " ", "▁the", "a  b ", "\n a", *long):
        assert first_difference(tokenizer.encode(text), library.encode(text)) is None, text[:20]


def test_added_tokens_and_normalizers_hold_at_every_cut() -> None:
    """Nothing is put before a piece but the first, and no white space taken from its ends."""
    normalizers = [
        {"type": "Strip", "strip_left": True, "strip_right": True},
        {"type": "Prepend", "prepend": "b"},
        replace("x", "a"),
    ]
    letters = {letter: i for i, letter in enumerate("ab xy")}
    data = small_json(
        normalizer={"type": "Sequence", "normalizers": normalizers},
        model={"type": "BPE", "vocab": letters, "merges": []},
        added_tokens=[added(5, "<t>"), added(6, "yy", special=False)],
    )
    tokenizer = load_tokenizer("tokenizers", data, None, [5], False)
    text = "  " + "xyy a" * 3000 + "  "
    library = tokenizers.Tokenizer.from_str(data.decode())
    library.encode_special_tokens = True
    short = "  " + "xyy a" * 20 + "  "
    assert tokenizer.encode(short) == library.encode(short, add_special_tokens=False).ids
    # Only the library's way with a text's ends differs: of every stretch between two added tokens.
    ids = tokenizer.encode(text)
    assert ids.count(6) == 3000
    assert ids.count(letters["a"]) == 6000


def test_a_tokenizer_that_takes_too_long_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who takes the ids may take as long as they please."""
    clock = iter([0.0, 10.1, 100.0, 100.2, 200.0, 200.2])
    monkeypatch.setattr(cutting.time, "monotonic", lambda: next(clock))
    stopwatch = Stopwatch()
    for chars in (4096, 4096):
        with stopwatch.running(chars):
            pass
    with pytest.raises(BundleError, match="takes more than 10 seconds"), stopwatch.running(1):
        pass


def test_ids_come_before_the_text_has_ended(small_sentencepiece: bytes) -> None:
    """Nothing waits for the end of what may have none."""
    tokenizer: Tokenizer = load_tokenizer("sentencepiece", small_sentencepiece, None, [], False)

    def endless() -> Any:
        while True:
            yield "word abc "

    stream = tokenizer.encode_parts(endless())
    assert sum(len(next(stream)) for _ in range(10)) > 10_000
    assert Piece("", True, True) == next(pieces([]))
