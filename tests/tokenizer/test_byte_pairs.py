"""The native tokenizer of byte pairs against the libraries whose rules it has, and hostile tables."""

from __future__ import annotations

import json
import math
import random
import struct
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.normalizers import NFC

from ondevice.bundle.manifest import MAX_BLOB_BYTES, TokenizerInfo
from ondevice.converters.checkpoints import sentencepiece_model as proto
from ondevice.converters.checkpoints.base import TokenizerFiles
from ondevice.converters.checkpoints.byte_pair_table import byte_pair_table
from ondevice.converters.checkpoints.gguf_splitting import GPT2_PATTERN, SPLITTINGS
from ondevice.converters.checkpoints.piece_table import piece_table
from ondevice.converters.checkpoints.tokenizer_files import with_table
from ondevice.errors import BundleError
from ondevice.tokenizer import MAX_TOKENIZER_BYTES, Tokenizer, load_tokenizer
from ondevice.tokenizer.base import byte_letters
from ondevice.tokenizer.byte_pairs import HEADER, composed
from ondevice.tokenizer.tokenizer_file import read_tokenizer_file
from tests.support.small_tokenizers import added, small_json, train_sentencepiece
from tests.tokenizer import unicode_tables
from tests.tokenizer.test_hostile import characters_map, child, with_fields

SPELL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
GPT2 = SPELL | {"use_regex": True}
DIGITS = {"type": "Digits", "individual_digits": True}
END, START = 0, 1


def split(regex: str | None, **changes: Any) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False} | changes


def steps(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(parts)}


QWEN2, LLAMA3 = SPLITTINGS["qwen2"].pattern, SPLITTINGS["llama3"].pattern
RULES: dict[str, dict[str, Any]] = {
    "none": {"pre_tokenizer": SPELL},
    "gpt2": {"pre_tokenizer": GPT2},
    "gpt2_pattern": {"pre_tokenizer": steps(split(GPT2_PATTERN), SPELL)},
    "digits": {"pre_tokenizer": steps(DIGITS, GPT2)},
    "qwen2": {"normalizer": {"type": "NFC"}, "pre_tokenizer": steps(split(QWEN2), SPELL)},
    "llama3": {"pre_tokenizer": steps(split(LLAMA3), SPELL)},
}
WORDS = ["the", "th", "in", " a", " th", "  ", "\n\n", "12", "ll", "é", "e\u0301", "漢", "नम", "'s", "re"]


def document(rule: str, without: str = "", **model: Any) -> dict[str, Any]:
    """A tokenizer with every pair of bytes of WORDS, and with added tokens of all kinds.

    without: bytes that have no token.
    """
    letters = byte_letters()
    names = ["<|end|>", "<|start|>", *(letter for letter in letters if letter not in without)]
    vocabulary = {name: token for token, name in enumerate(names)}
    merges = []
    for word in WORDS:
        spelled = "".join(letters[byte] for byte in word.encode())
        for size in range(2, len(spelled) + 1):
            merges += [(spelled[: size - 1], spelled[size - 1])] * (spelled[:size] not in vocabulary)
            vocabulary.setdefault(spelled[:size], len(vocabulary))
    tokens = [added(END, "<|end|>"), added(START, "<|start|>", special=False) | {"normalized": True}]
    for name in ("<|end|>>", "<\uff5cof\uff5c>", "\n<think>", "a\u0300b"):
        content = unicodedata.normalize("NFC", name)
        tokens.append(added(len(vocabulary) + len(tokens) - 2, content, special="\uff5c" in name))
    values: dict[str, Any] = json.loads(small_json(**RULES[rule], added_tokens=tokens))
    values["model"] |= {"vocab": vocabulary, "merges": merges, **model}
    return values


def both(values: dict[str, Any], ends: tuple[int, ...] = (START,)) -> tuple[Tokenizer, ...]:
    """The library's tokenizer and the table's."""
    data = json.dumps(values).encode()
    table = byte_pair_table(read_tokenizer_file(data))
    assert table is not None
    return tuple(
        load_tokenizer(kind, it, None, ends, False)
        for kind, it in (("tokenizers", data), ("byte_pairs", table))
    )


@pytest.fixture(scope="module")
def pairs() -> dict[str, tuple[Tokenizer, ...]]:
    made = {rule: both(document(rule)) for rule in RULES}
    made["whole words"] = both(document("llama3", ignore_merges=True))
    made["left out"] = both(document("gpt2", without="xyz"))
    made["unknown"] = both(document("gpt2", without="xyz", unk_token="<|end|>"))
    made["other ends"] = both(document("qwen2"), ends=(END, 300))
    return made


FRAGMENTS = [
    *WORDS,
    "'S", "'\u017f", "'LL", "'Re", "'vE", "''", "<|end|>", "<|end|>>", "<|start|>", "<|", "<\uff5cof\uff5c>",
    " ", "   ", "\t", "\r\n", "\n \n", "\u00a0", "\u3000", "\u2028", "\x85", "\x1c", "\u200b", "\n<think>",
    "123456", "1²½", "Ⅻ", "٣", "\U00010d40", "\U00011de0", "xyz", "HELLO", "…!?", ".\n\n", "<|end|>\u0338",
    "A\u030a", "\u212b", "\u0958", "\u0327\u0301", "\u0301\u0327", "\u1100\u1161\u11a8", "\u037e", "\u0897",
    "a\u0300b", "e\u08d3\u0301", "한국어", "日本", "👩\u200d👧", "\U00011935\U00011930", "\ud800",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(FRAGMENTS) | st.characters(), max_size=12).map("".join)


@settings(max_examples=100)
@given(text=TEXTS, special=st.booleans())
def test_a_table_encodes_and_decodes_as_the_library(
    pairs: dict[str, tuple[Tokenizer, ...]], text: str, special: bool
) -> None:
    for rule, (library, table) in pairs.items():
        ids = library.encode(text, special=special)
        assert table.encode(text, special=special) == ids, rule
        assert table.decode(ids) == library.decode(ids), rule


def test_a_table_names_tokens_as_the_library(pairs: dict[str, tuple[Tokenizer, ...]]) -> None:
    for library, table in pairs.values():
        assert table.vocab_size == library.vocab_size
        assert table.special_tokens == library.special_tokens
        for token in range(-2, library.vocab_size + 2):
            name = library.piece(token)
            assert (table.piece(token), table.token_bytes(token)) == (name, library.token_bytes(token))
            assert table.token_id(name) == library.token_id(name) or not name
        for name in ("", "nothing", "Ġ", " ", "\n", "漢", "\ud800"):
            assert table.token_id(name) == library.token_id(name)


def test_every_kind_of_character_counts_as_in_the_library(
    pairs: dict[str, tuple[Tokenizer, ...]],
) -> None:
    """First and last of each range of the table of classes, between letters, digits and spaces."""
    bits = [int(line.split(",")[0], 16) for line in unicode_tables.HEADER.read_text().split("{0x")[1:]]
    codes = {code for first in bits for code in (first - 1, first, first + 1)}
    text = "".join(f"a{chr(code)}1{chr(code)} {chr(code)}\n" for code in sorted(codes) if code >= 0)
    for rule in ("digits", "qwen2", "llama3"):
        library, table = pairs[rule]
        assert table.encode(text) == library.encode(text), rule


def test_form_c_is_the_librarys() -> None:
    library = NFC().normalize_str
    for character in map(chr, range(0x300, 0x1F000)):
        if unicodedata.combining(character) or unicodedata.decomposition(character):
            apart = unicodedata.normalize("NFD", character)
            for text in (apart, f"a{character}\u0316", f"e{apart}\u0301\u0334", f"\u0301{character}"):
                assert composed(text) == library(text), text


@pytest.mark.slow
def test_the_table_of_classes_is_the_librarys() -> None:
    assert unicode_tables.header(unicode_tables.classes()) == unicode_tables.HEADER.read_text()


# --- tables of characters ---

Pieces = list[tuple[str, float, int]]
START_PIECES: Pieces = [
    ("<unk>", 0.0, proto.UNKNOWN),
    ("<s>", 0.0, proto.CONTROL),
    ("</s>", 0.0, proto.CONTROL),
    *((f"<0x{byte:02X}>", 0.0, proto.BYTE) for byte in range(256)),
]
USER_PIECES: Pieces = [
    *((text, 0.0, proto.USER_DEFINED) for text in ("<turn>", "<turn>\n", "[INST]", "\t", "a<b>c", "x y")),
    *((text, -1000.0, proto.USER_DEFINED) for text in ("▁▁", "▁▁▁▁", "<plain>", "aab", "\n", "\n\n", "é")),
    *((text, 0.0, proto.CONTROL) for text in ("<end>", "[a▁b]", "x<plain>y")),
    *((text, -1.0, proto.UNUSED) for text in ("[PAD7]", "<pad>")),
    ("<|normal|>", 0.0, proto.NORMAL),
]


def scored(pieces: Pieces, *texts: str) -> Pieces:
    """`pieces` and normal ones of the texts: the first of several characters has the highest score."""
    known = {text for text, _, _ in pieces}
    letters = sorted(set("".join(texts)) - known)
    joined = [text for text in dict.fromkeys(texts) if len(text) > 1 and text not in known]
    made = [(text, -float(at // 2), proto.NORMAL) for at, text in enumerate(joined)]
    return [*pieces, *made, *((text, -1e6, proto.NORMAL) for text in letters)]


def both_of_pieces(model: bytes, ends: tuple[int, ...] = (2,)) -> tuple[Tokenizer, ...]:
    """The library's tokenizer and the table's."""
    table = piece_table(model)
    assert table is not None
    return tuple(
        load_tokenizer(kind, it, 1, ends, False)
        for kind, it in (("sentencepiece", model), ("byte_pairs", table))
    )


NORMAL_TEXTS = [
    "▁the", "the", "th", "he", "he▁", "▁t", "▁<", "<|", "<|normal|>", "ll", "hell", "ell", "el", "lo", "漢字",
    "字漢", "👩\u200d👧", "ab", "ba", "aa", "bab", "▁a", "12", "\u0301e", "e\u0301", "é",
]  # fmt: skip
MODEL = proto.bpe_model(scored(START_PIECES + USER_PIECES, *NORMAL_TEXTS), 0, 1, 2)


@pytest.fixture(scope="module")
def piece_pairs() -> list[tuple[Tokenizer, ...]]:
    pieces = scored(START_PIECES + USER_PIECES, *NORMAL_TEXTS)
    other_ends = len(pieces) - 1, 261
    plain = train_sentencepiece(user_defined_symbols=["<turn>"], remove_extra_whitespaces=False)
    return [
        both_of_pieces(MODEL),
        both_of_pieces(proto.bpe_model(pieces, 0, 1, 2, adds_space=False), other_ends),
        both_of_pieces(plain),
    ]


PIECE_FRAGMENTS = [
    *NORMAL_TEXTS, *(text for text, _, _ in USER_PIECES + START_PIECES[:70]), *FRAGMENTS,
    "▁", "▁▁▁", "<tu", "rn>", "\0", "\x7f", "\ue000", "\uffff",
    "\U0010ffff", "aabab", "hello" * 9, "the the", "\udc80\udcff", "a" * 99,
]  # fmt: skip
PIECE_TEXTS = st.lists(st.sampled_from(PIECE_FRAGMENTS) | st.characters(), max_size=12).map("".join)


@settings(max_examples=100)
@given(text=PIECE_TEXTS, special=st.booleans(), at_start=st.booleans())
def test_a_table_of_characters_encodes_and_decodes_as_the_library(
    piece_pairs: list[tuple[Tokenizer, ...]], text: str, special: bool, at_start: bool
) -> None:
    for library, table in piece_pairs:
        ids = library.encode(text, special=special, at_start=at_start)
        assert table.encode(text, special=special, at_start=at_start) == ids
        assert table.decode(ids, at_start=at_start) == library.decode(ids, at_start=at_start)


def test_a_table_of_characters_names_tokens_as_the_library(piece_pairs: list[tuple[Tokenizer, ...]]) -> None:
    for library, table in piece_pairs:
        assert (table.vocab_size, table.leading_space) == (library.vocab_size, library.leading_space)
        assert table.special_tokens == library.special_tokens
        for token in range(-2, library.vocab_size + 2):
            name = library.piece(token)
            assert (table.piece(token), table.token_bytes(token)) == (name, library.token_bytes(token))
            assert table.begins_word(token) == library.begins_word(token)
            assert table.token_id(name) == library.token_id(name) or not name
        assert [table.token_id(name) for name in ("", "nothing", "\ud800")] == [None] * 3


@pytest.mark.parametrize("seed", range(4))
def test_any_scores_merge_as_in_the_library(seed: int) -> None:
    """Pieces that join in several ways, and many of one score."""
    rng = random.Random(seed)
    texts = sorted({"".join(rng.choices("ab▁", k=rng.randint(2, 6))) for _ in range(rng.choice([5, 20, 80]))})
    normal = [(text, rng.choice([0.0, -0.0, -1.0, 2.5, -1e30, rng.random()]), proto.NORMAL) for text in texts]
    letters = [(letter, rng.random(), proto.NORMAL) for letter in "ab▁"]
    library, table = both_of_pieces(proto.bpe_model([*START_PIECES, *normal, *letters], 0, 1, 2))
    for _ in range(200):
        text = "".join(rng.choices("aab  c", k=rng.randint(1, 60)))
        assert table.encode(text) == library.encode(text), text


@pytest.mark.parametrize("name", ["llama2", "shipped"])
def test_real_text_is_encoded_by_a_table_of_characters_as_by_the_library(
    name: str, shared_data: Path
) -> None:
    shipped = Path(__file__).parents[2] / "weights" / "small-relu" / "tokenizer.model"
    path = shared_data / "tokenizers" / "llama2" / "tokenizer.model" if name == "llama2" else shipped
    library, table = both_of_pieces(path.read_bytes())
    files = sorted(path for path in (shared_data / "prompts" / "gsm8k").glob("*") if path.is_file())
    lines = "".join(path.read_text(errors="replace")[:20_000] for path in files)
    text = f"<s>{lines}</s>{lines[:4000]}" + "x" * 50_000 + " " * 20_000 + "漢" * 20_000
    for special in (True, False):
        ids = library.encode(text, special=special)
        assert table.encode(text, special=special) == ids
    assert table.decode(ids) == library.decode(ids)


# --- which tokenizers have a table ---


def altered(rule: str, **changes: Any) -> dict[str, Any]:
    return document(rule) | changes


def with_token(**changes: Any) -> dict[str, Any]:
    values = document("qwen2")
    values["added_tokens"][0] |= changes
    return values


def with_piece(piece: str) -> dict[str, Any]:
    values = document("gpt2")
    values["model"]["vocab"][piece] = 400
    return values


@pytest.mark.parametrize(
    "values",
    [
        altered("gpt2", normalizer={"type": "NFKC"}),
        altered("qwen2", normalizer={"type": "Sequence", "normalizers": [{"type": "NFC"}] * 2}),
        altered("gpt2", pre_tokenizer=None),
        altered("gpt2", pre_tokenizer=GPT2 | {"add_prefix_space": True}),
        altered("gpt2", pre_tokenizer=steps(DIGITS | {"individual_digits": False}, GPT2)),
        altered("gpt2", pre_tokenizer=steps(split(QWEN2))),
        altered("gpt2", pre_tokenizer=steps(split(QWEN2, invert=True), SPELL)),
        altered("gpt2", pre_tokenizer=steps(split(QWEN2, behavior="Removed"), SPELL)),
        altered("gpt2", pre_tokenizer=steps(split(QWEN2, pattern={"String": QWEN2}), SPELL)),
        altered("gpt2", pre_tokenizer=steps(split(rf"{QWEN2}|x"), SPELL)),
        *(with_token(**{flag: True}) for flag in ("single_word", "lstrip", "rstrip")),
        with_piece("a b"),
        with_piece(""),
    ],
)
def test_other_rules_stay_with_their_library(values: dict[str, Any]) -> None:
    data = json.dumps(values).encode()
    files = TokenizerFiles(TokenizerInfo("tokenizers"), {"tokenizer.json": data})
    assert with_table(files) is files


def with_pieces(*pieces: tuple[str, float, int]) -> bytes:
    return MODEL + proto.piece_fields(pieces)


def with_numbers(message: int, *fields: tuple[int, int]) -> bytes:
    return MODEL + proto._bytes_field(message, b"".join(proto._varint_field(*field) for field in fields))


@pytest.mark.parametrize(
    "model",
    [
        with_numbers(2, (3, 1)),  # unigrams
        with_numbers(2, (24, 1)),  # the space behind a word
        with_numbers(2, (35, 0)),  # no bytes for unknown characters
        with_numbers(3, (4, 1)),  # spaces are removed
        with_numbers(3, (5, 0)),  # spaces aren't marks
        with_fields(MODEL, 3, (2, characters_map(b"x"))),
        with_pieces(("hel", -1.0, proto.UNUSED)),  # which the library takes apart
        with_pieces(("ж", -1.0, proto.UNUSED)),
        with_pieces(("ж", 0.0, proto.CONTROL)),
        with_pieces(("жh", -1.0, proto.NORMAL)),  # of a character that is no piece
        with_pieces(("th", -1.0, proto.CONTROL)),  # twice
        with_pieces(("<0x0a>", -1.0, proto.NORMAL)),
        with_pieces(("yy", math.nan, proto.NORMAL)),
        with_pieces(("yy", -1.0, 9)),
        with_pieces(("y" * 5000, -1.0, proto.CONTROL)),
        b"".join([proto.piece_fields(START_PIECES[:40]), with_numbers(2)[-2:]]),
    ],
)
def test_other_models_stay_with_their_library(model: bytes) -> None:
    assert piece_table(MODEL) is not None
    assert piece_table(model) is None
    files = TokenizerFiles(TokenizerInfo("sentencepiece"), {"tokenizer.model": model})
    assert with_table(files) is files


def test_a_table_that_a_reader_would_refuse_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    files = TokenizerFiles(TokenizerInfo("sentencepiece"), {"tokenizer.model": MODEL})
    table = with_table(files).blobs["tokenizer.bin"]
    monkeypatch.setitem(MAX_BLOB_BYTES, "tokenizer.bin", len(table) - 1)
    assert with_table(files) is files
    # Merges alone pass the limit before the table is put together.
    monkeypatch.setitem(MAX_TOKENIZER_BYTES, "byte_pairs", 100)
    assert piece_table(MODEL) is None


# --- the format, and hostile tables ---


def test_a_table_is_written_byte_for_byte_as_specified() -> None:
    letters = byte_letters()
    vocabulary = {letter: byte for byte, letter in enumerate(letters)} | {"aa": 256, "aab": 257, "<e>": 259}
    values = document("qwen2")
    values["model"] |= {"vocab": vocabulary, "merges": ["aa b", "a a", "aa b"], "ignore_merges": True}
    values["added_tokens"] = [added(260, "<n>", False) | {"normalized": True}, added(259, "<e>")]
    data = byte_pair_table(read_tokenizer_file(json.dumps(values).encode()))
    texts = [bytes([byte]) for byte in range(256)] + [b"aa", b"aab", b"", b"<e>", b"<n>"]
    starts = [sum(map(len, texts[:token])) for token in range(len(texts) + 1)]
    listed = sorted((*range(258), 259), key=texts.__getitem__)
    merge_starts = [0] * 98 + [1] * (257 - 98) + [2] * (262 - 257)
    numbers = [*range(256), *starts, *listed, *merge_starts, 97, 98, 256, 257, 0, 1, 259, 1, 260, 2]
    header = struct.pack("<8s9I", b"bytepair", 1, 3, 3, 261, 259, 2, 2, 6, 267)
    assert data == header + struct.pack(f"<{len(numbers)}I", *numbers) + b"".join(texts)


def test_a_table_of_characters_is_written_byte_for_byte_as_specified() -> None:
    normal = [
        (text, score, proto.NORMAL) for text, score in (("ab", -2.0), ("abb", -1.0), ("bb", -2.0), ("b", 0.0))
    ]
    pieces = [*START_PIECES, *normal, ("\n\n", -9.0, proto.USER_DEFINED), ("a", 0.0, proto.NORMAL)]
    data = piece_table(proto.bpe_model(pieces, 0, 1, 2))
    texts = [text.encode() for text, _, _ in pieces]
    starts = [sum(map(len, texts[:token])) for token in range(len(texts) + 1)]
    listed = sorted((*range(3, 263), 264), key=texts.__getitem__)
    ab, abb, bb, b, lines, a = range(259, 265)
    merge_starts = [0] * (ab + 1) + [1] * (b - ab) + [2] * (a - b) + [4]
    merges = [b, b, bb, b, abb, bb, abb, ab, 0, 1, 0, 1]
    flags = [lines, 0, 2, 3, 1, 3, 0, 2]
    numbers = [*range(3, 259), *starts, *listed, *merge_starts, *merges, *flags]
    header = struct.pack("<8s9I", b"bytepair", 1, 5, 4, 265, 261, 4, 4, 14, starts[-1])
    assert data == header + struct.pack(f"<{len(numbers)}I", *numbers) + b"".join(texts)


@pytest.fixture(scope="module")
def characters() -> bytes:
    data = piece_table(MODEL)
    assert data is not None
    return data


@pytest.fixture(scope="module")
def table() -> bytes:
    data = byte_pair_table(read_tokenizer_file(json.dumps(document("qwen2")).encode()))
    assert data is not None
    return data


def number(field: int, value: Callable[[int], int]) -> Callable[[bytes], bytes]:
    """A change of one of the header's numbers."""

    def change(data: bytes) -> bytes:
        at = 8 + 4 * field
        old = int.from_bytes(data[at : at + 4], "little")
        return data[:at] + (value(old) % (1 << 32)).to_bytes(4, "little") + data[at + 4 :]

    return change


def word(section: int, index: int, value: int) -> Callable[[bytes], bytes]:
    """A change of a number of a section."""

    def change(data: bytes) -> bytes:
        *_, tokens, merged, merges, added, _, _ = HEADER.unpack_from(data)
        sizes = [256, tokens + 1, merged, tokens + 1, merges, merges, merges, 2 * added]
        at = HEADER.size + 4 * (sum(sizes[:section]) + index % sizes[section])
        return data[:at] + value.to_bytes(4, "little") + data[at + 4 :]

    return change


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda data: data[:43], "doesn't begin as a table does"),
        (lambda data: b"bytepairs"[1:] + data[8:], "doesn't begin"),
        (lambda data: data[:-1], "size"),
        (lambda data: data + b"\0", "size"),
        (number(0, lambda _: 2), "version"),
        (number(1, lambda _: 6), "splitting"),
        (number(2, lambda _: 8), "flags"),
        *((number(field, lambda old: old + 1), "size") for field in (3, 4, 5, 6, 8)),
        *((number(field, lambda _: -1), "size|too many") for field in (3, 4, 5, 6, 7, 8)),
        (number(7, lambda old: old + 1), "length"),
        (word(0, 65, 1 << 20), "a byte has a token"),
        (word(1, 0, 1), "all of its text"),
        (word(1, -1, 1), "all of its text"),
        (word(1, 7, 1 << 31), "ends before it begins"),
        (word(2, 9, 1 << 20), "lists a token"),
        (word(3, 0, 1), "all of its merges"),
        (word(3, -1, 0), "all of its merges"),
        (word(3, 5, 1 << 30), "merges end before"),
        (word(5, 0, 1 << 20), "makes a token"),
        (word(6, 0, (1 << 32) - 1), "rank"),
        (word(7, 0, 1 << 20), "added token isn't there"),
        (word(7, 1, 4), "flags"),
        (word(7, 2, START), "order"),
    ],
)
def test_a_broken_table_is_refused(
    table: bytes, characters: bytes, change: Callable[[bytes], bytes], problem: str
) -> None:
    for data in (table, characters):
        with pytest.raises(BundleError, match=problem):
            load_tokenizer("byte_pairs", change(data), None, [END], False)


def test_a_token_has_a_bounded_length(table: bytes) -> None:
    values = document("gpt2")
    values["added_tokens"][2]["content"] = "漢" * 1024
    assert both(values)[1].decode([values["added_tokens"][2]["id"]]) == "漢" * 1024
    *_, tokens, _, _, _, _, length = HEADER.unpack_from(table)
    # The last token takes 5,000 more bytes.
    longer = number(8, lambda old: old + 5000)(word(1, tokens, length + 5000)(table)) + b"x" * 5000
    with pytest.raises(BundleError, match="more than 4096 bytes"):
        load_tokenizer("byte_pairs", longer, None, [], False)


@pytest.mark.parametrize("seed", range(6))
def test_a_changed_table_gives_tokens_or_an_error(table: bytes, characters: bytes, seed: int) -> None:
    """Anything may be wrong where nothing is checked: orders, ranks, texts that merges don't make."""
    rng = random.Random(seed)
    table = characters if seed % 2 else table
    text = "".join(rng.choices(PIECE_FRAGMENTS, k=80))
    loaded = 0
    for _ in range(300):
        data = bytearray(table)
        for _ in range(rng.choice([1, 3, 30])):
            at = rng.randrange(HEADER.size, len(data) & ~3) & ~3
            small = rng.randrange(320).to_bytes(4, "little")
            data[at : at + 4] = rng.choice([data[at + 4 : at + 8], small, rng.randbytes(4)])
        try:
            tokenizer = load_tokenizer("byte_pairs", bytes(data), None, [END], False)
        except BundleError:
            continue
        loaded += 1
        for special in (True, False):
            ids = tokenizer.encode(text, special=special)
            assert not ids or 0 <= min(ids) <= max(ids) < tokenizer.vocab_size
            tokenizer.decode(ids)
        for token in range(tokenizer.vocab_size):
            tokenizer.token_id(tokenizer.piece(token))
    assert loaded > 30


def test_real_text_is_encoded_whole_and_in_parts_as_by_the_library(shared_data: Path) -> None:
    data = (shared_data / "tokenizers" / "minimind" / "tokenizer.json").read_bytes()
    library, table = both(json.loads(data), ends=(2,))
    text = (shared_data / "prompts" / "gsm8k").glob("*")
    lines = "".join(path.read_text(errors="replace")[:20_000] for path in sorted(text) if path.is_file())
    text = f"<|im_start|>{lines}<|im_end|>{lines[:4000]}"
    for special in (True, False):
        assert table.encode(text, special=special) == library.encode(text, special=special)
    parts = [text[at : at + 1000] for at in range(0, len(text), 1000)]
    assert table.encode_within(parts) == library.encode(text)


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's /proc")
@pytest.mark.parametrize("kind", ["bytes", "characters"])
def test_reading_a_table_takes_no_more_memory_than_it_is_said_to(kind: str, tmp_path: Path) -> None:
    """The costliest table: as many special tokens as may be, and the pattern that finds their names."""
    values = document("gpt2")
    first = len(values["model"]["vocab"])
    names = [f"<{i:05}>" for i in range(18_000)]
    values["added_tokens"] = [added(first + i, name) for i, name in enumerate(names)]
    if kind == "bytes":
        data = byte_pair_table(read_tokenizer_file(json.dumps(values).encode()))
    else:
        data = piece_table(with_pieces(*((name, 0.0, proto.CONTROL) for name in names)))
    assert data is not None
    code = """
    before = status("VmRSS")
    tokenizer = load_tokenizer(kind, data, None, [], False)
    tokenizer.special_pattern
    print(status("VmHWM") - before, loading_bytes(kind, [data]) - len(data))
    """
    out, err = child(code, "byte_pairs", data, tmp_path).communicate(timeout=120)
    assert not err
    took, said = map(int, out.split())
    assert took <= said + (2 << 20)
