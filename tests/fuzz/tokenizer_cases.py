"""Tokenizers: components of every kind, patterns, merges, added tokens, sentencepiece's fields, tables."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ondevice.bundle.layout import TOKENIZER_FILES
from ondevice.errors import OndeviceError
from ondevice.tokenizer import StreamingDetokenizer, load_tokenizer, loading_bytes
from ondevice.units import process_memory
from tests.fuzz.bases import Bases
from tests.fuzz.mutations import FRAGMENTS, change_json, changed_bytes, json_bytes, made_up_text
from tests.fuzz.outcomes import Difference

FILES = TOKENIZER_FILES
ATOMS = [
    "a", ".", r"\s", r"\S", r"\p{L}", r"\p{N}", r"[^\s\p{L}\p{N}]", "[a-z]", "[^a]", r"\d", r"\w", r"\b",
    "^", "$", "(?=.)", "(?!a)", r"(?<=a)", "(?i:x)", r"\p{Han}", r"\R", r"\X", "(a|aa)", "(a*)", "(.+)",
    r"\1", "", "é", "\\", "(?>a+)", "(?:", ")", "[", r"\x{110000}", r"\p{Nope}", "(?#c)", r"\K", "(?R)",
    r"\g<0>", " ?", "'s|'t", "|",
]  # fmt: skip
QUANTIFIERS = [
    "",
    "",
    "",
    "*",
    "+",
    "?",
    "{1,3}",
    "{2}",
    "{0,1000}",
    "{1000}",
    "*?",
    "++",
    "{,5}",
    "{3,1}",
    "**",
]
MOST_CHARS = 30_000
"""Lists of ids are the caller's memory, and small beside the plan's."""
PLAIN_NORMALIZERS = ["NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Nmt", "ByteLevel"]
WORDS = ["", " ", "a", "▁", "Ġ", "aa", "é", "\x00", "x" * 17, "x" * 5000, "<s>", "\U0010ffff"]


def made_up(kind: str, rng: random.Random, bases: Bases) -> bytes:
    """A hostile tokenizer's file of this kind."""
    data = rng.choice(bases.tokenizers(kind))
    if kind == "sentencepiece":
        return _sentencepiece(data, rng)
    if rng.random() < 0.1:
        return changed_bytes(data, rng)
    if kind == "byte_pairs":
        return _table(data, rng)
    value = json.loads(data)
    for _ in range(rng.choice([1, 1, 2, 3])):
        _change(value, rng)
    return json_bytes(value, rng)


def _table(data: bytes, rng: random.Random) -> bytes:
    """A table with some numbers of its header and its lists changed, to near ones as a rule."""
    table = bytearray(data)
    for _ in range(rng.choice([1, 2, 10, 100])):
        at = 4 * rng.randrange(2 if rng.random() < 0.1 else 11, len(table) // 4)
        old = int.from_bytes(table[at : at + 4], "little")
        new = rng.choice([old + 1, old - 1, rng.randrange(300), 0, -1, 1 << 31, rng.getrandbits(32)])
        table[at : at + 4] = (new % (1 << 32)).to_bytes(4, "little")
    return bytes(table)


def make(folder: Path, rng: random.Random, bases: Bases) -> None:
    """A file in `folder`."""
    kind = rng.choice(["tokenizers", "tokenizers", "sentencepiece", "byte_pairs"])
    (folder / FILES[kind]).write_bytes(made_up(kind, rng, bases))


def run(folder: Path, rng: random.Random) -> int:
    """Load, encode and decode; in parts and whole must agree. Returns what loading may take."""
    kind = next(kind for kind, name in FILES.items() if (folder / name).exists())
    data = (folder / FILES[kind]).read_bytes()
    before = process_memory().current_bytes
    allowed = before + loading_bytes(kind, [data])
    try:
        tokenizer = load_tokenizer(kind, data, rng.choice([None, 0, 1]), rng.choice([(), (2,)]), False)
        for text in _texts(rng):
            ids = tokenizer.encode(text, special=rng.random() < 0.3, add_bos=False)
            plain = tokenizer.encode(text)
            parts = tokenizer.encode_within(_split(text, rng))
            if plain != parts:
                raise Difference(f"{text[:80]!r} gives {plain[:40]} whole and {parts[:40]} in parts")
            tokenizer.encode(text, most=rng.choice([0, 1, 50]))
            _decode(tokenizer, ids[:2000])
        tokenizer.special_pattern.search(made_up_text(rng))
        _decode(tokenizer, [rng.randrange(-3, tokenizer.vocab_size + 5) for _ in range(20)])
    except OndeviceError as error:
        error.allowed_bytes = allowed  # type: ignore[attr-defined]
        raise
    return allowed


def _decode(tokenizer: Any, ids: list[int]) -> None:
    """Whole and in a stream."""
    whole = tokenizer.decode(ids)
    stream = StreamingDetokenizer(tokenizer)
    streamed = "".join(stream.add(token) for token in ids) + stream.finish()
    if whole != streamed:
        raise Difference(f"{ids[:40]} are {whole[:80]!r} whole and {streamed[:80]!r} in a stream")


def _texts(rng: random.Random) -> Iterator[str]:
    yield made_up_text(rng)
    yield "a b" * rng.choice([1, 10, 500])
    yield (rng.choice(FRAGMENTS) * rng.choice([1, 3, 1200, 20000]))[:MOST_CHARS]


def _split(text: str, rng: random.Random) -> Iterator[str]:
    at = 0
    while at < len(text):
        step = rng.choice([1, 7, 1000, 1 << 20])
        yield text[at : at + step]
        at += step


def pattern(rng: random.Random, depth: int = 0) -> str:
    """A regular expression, or nearly one."""
    parts = []
    for _ in range(rng.randint(1, 4)):
        atom = rng.choice(ATOMS)
        if depth < 4 and rng.random() < 0.25:
            atom = f"({rng.choice(['', '?:', '?=', '?!'])}{pattern(rng, depth + 1)})"
        parts.append(atom + rng.choice(QUANTIFIERS))
    return rng.choice(["", "", "|"]).join(parts)


def _pattern(rng: random.Random) -> dict[str, Any]:
    return {"Regex": pattern(rng)} if rng.random() < 0.7 else {"String": rng.choice(WORDS)}


def _normalizer(rng: random.Random) -> dict[str, Any]:
    flag = rng.choice([True, False])
    return rng.choice(
        [
            {"type": rng.choice(PLAIN_NORMALIZERS)},
            {"type": "Strip", "strip_left": flag, "strip_right": rng.choice([True, False])},
            {"type": "Replace", "pattern": _pattern(rng), "content": rng.choice(WORDS)},
            {"type": "Prepend", "prepend": rng.choice(WORDS)},
            {"type": "Precompiled", "precompiled_charsmap": rng.choice(["", "AAAA", "////"])},
            {"type": "BertNormalizer", "clean_text": flag, "handle_chinese_chars": flag, "lowercase": flag},
        ]
    )  # fmt: skip


def _pre_tokenizer(rng: random.Random) -> dict[str, Any]:
    flag, other = rng.choice([True, False]), rng.choice([True, False])
    behavior = rng.choice(
        ["Isolated", "Removed", "MergedWithPrevious", "MergedWithNext", "Contiguous", "Nope"]
    )
    return rng.choice(
        [
            {"type": "ByteLevel", "add_prefix_space": flag, "trim_offsets": True, "use_regex": other},
            {"type": "Metaspace", "replacement": rng.choice(["▁", "_", "▁▁", ""]),
             "prepend_scheme": rng.choice(["always", "never", "first"]), "split": flag},
            {"type": "Split", "pattern": _pattern(rng), "behavior": behavior, "invert": flag},
            {"type": "Digits", "individual_digits": flag},
            {"type": "Punctuation", "behavior": behavior},
            {"type": "CharDelimiterSplit", "delimiter": rng.choice(["a", " ", "ab", ""])},
            {"type": "FixedLength", "length": rng.choice([0, 1, 5, 1 << 40, -1])},
            {"type": rng.choice(["Whitespace", "WhitespaceSplit", "BertPreTokenizer", "UnicodeScripts"])},
        ]
    )  # fmt: skip


def _decoder(rng: random.Random) -> dict[str, Any]:
    return rng.choice(
        [
            {"type": rng.choice(["ByteLevel", "ByteFallback", "Fuse", "WordPiece", "CTC", "BPEDecoder"])},
            {
                "type": "Strip",
                "content": rng.choice([" ", "a", "ab"]),
                "start": rng.choice([0, 1, 1 << 40]),
                "stop": 0,
            },
            {"type": "Replace", "pattern": _pattern(rng), "content": rng.choice(WORDS)},
            {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
        ]
    )


def _some(one: Any, key: str, rng: random.Random) -> Any:
    """None, one component, or a sequence of several, in another one."""
    how = rng.random()
    if how < 0.1:
        return None
    if how < 0.5:
        return one(rng)
    count = rng.choice([1, 2, 3, 5, 16, 17, 60])
    parts = [one(rng) for _ in range(count)]
    if rng.random() < 0.3:
        parts = [parts[0]] * count
    inner = {"type": "Sequence", key: parts}
    return {"type": "Sequence", key: [inner]} if rng.random() < 0.2 else inner


def _added(rng: random.Random, ids: int) -> dict[str, Any]:
    content = rng.choice([*WORDS, rng.choice(FRAGMENTS), made_up_text(rng, 4)])
    token = rng.choice([ids, ids + 1, 0, 5, -1, 1 << 31, (1 << 31) - 1, 1 << 40, ids + rng.randrange(100)])
    flags = {
        name: rng.choice([True, False])
        for name in ("single_word", "lstrip", "rstrip", "normalized", "special")
    }
    return {"id": token, "content": content, **flags}


def _change(value: Any, rng: random.Random) -> None:
    how = rng.randrange(8)
    if how == 0:
        value["normalizer"] = _some(_normalizer, "normalizers", rng)
    elif how == 1:
        value["pre_tokenizer"] = _some(_pre_tokenizer, "pretokenizers", rng)
    elif how == 2:
        value["decoder"] = _some(_decoder, "decoders", rng)
    elif how == 3:
        tokens = value.setdefault("added_tokens", [])
        if isinstance(tokens, list):
            # An earlier change may have made anything of them.
            model = value.get("model")
            vocabulary = model.get("vocab") if isinstance(model, dict) else None
            ids = (len(vocabulary) if isinstance(vocabulary, list | dict) else 0) + len(tokens)
            tokens += [_added(rng, ids + i) for i in range(rng.choice([1, 2, 20]))]
    elif how == 4:
        size = rng.choice([0, 5, 1 << 40, -1])
        value["padding"] = {
            "strategy": rng.choice(["BatchLongest", {"Fixed": size}]), "direction": "Right",
            "pad_to_multiple_of": rng.choice([None, size]), "pad_id": 0, "pad_type_id": 0, "pad_token": "a",
        }  # fmt: skip
        value["truncation"] = {
            "direction": "Right",
            "max_length": size,
            "strategy": "LongestFirst",
            "stride": size,
        }
    elif how == 5:
        value["post_processor"] = rng.choice(
            [
                {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}] * 50,
                 "pair": [], "special_tokens": {}},
                {"type": "BertProcessing", "sep": ["a", 1], "cls": ["b", 2]},
                {"type": "Sequence", "processors": []},
            ]
        )  # fmt: skip
    elif how == 6 and isinstance(value.get("model"), dict):
        _change_model(value["model"], rng)
    else:
        change_json(value, rng)


def _change_model(model: dict[str, Any], rng: random.Random) -> None:
    how = rng.randrange(5)
    vocabulary = model.get("vocab")
    if how == 0:
        model["merges"] = [
            rng.choice([["a", "b"], "a b", ["a", "a"], ["aa", "aa"], ["", "a"], "ab", ["a"], 5])
        ] * 3
    elif how == 1 and isinstance(vocabulary, dict) and vocabulary:
        name = rng.choice(sorted(vocabulary))
        vocabulary[name] = rng.choice([0, 1, -1, 1 << 31, 1 << 62, len(vocabulary) + 7])
    elif how == 2 and isinstance(vocabulary, dict):
        vocabulary |= {rng.choice(WORDS) + str(i): len(vocabulary) + i for i in range(rng.choice([1, 30]))}
    elif how == 3:
        option = rng.choice(["unk_token", "byte_fallback", "fuse_unk", "ignore_merges", "dropout", "type",
                             "continuing_subword_prefix", "end_of_word_suffix"])  # fmt: skip
        model[option] = rng.choice(
            [None, True, False, "a", "<unk>", "nope", 0.5, 1.5, "Unigram", "WordPiece"]
        )
    else:
        change_json(model, rng)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _field(number: int, content: bytes | int) -> bytes:
    if isinstance(content, int):
        return _varint(number << 3) + _varint(content)
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _piece(rng: random.Random) -> bytes:
    name = rng.choice([*WORDS, "<0x41>", "<0xZZ>", made_up_text(rng, 3)]).encode()
    score = rng.choice([b"\x00\x00\x80\x7f", b"\x00\x00\xc0\x7f", b"\x00\x00\x00\x00", rng.randbytes(4)])
    return (
        _field(1, name)
        + _varint(2 << 3 | 5)
        + score
        + _field(3, rng.choice([1, 1, 2, 3, 4, 5, 6, 9, 1 << 40]))
    )


def _sentencepiece(data: bytes, rng: random.Random) -> bytes:
    """Fields added behind what is there, which the last one of a kind overrides; or bytes changed."""
    how = rng.random()
    if how < 0.35:
        return changed_bytes(data, rng)
    for _ in range(rng.choice([1, 1, 3])):
        part = rng.randrange(4)
        if part == 0:
            data += b"".join(_field(1, _piece(rng)) for _ in range(rng.choice([1, 3, 40])))
        elif part == 1:
            numbers = [(rng.choice([3, 4, 5]), rng.choice([0, 1, 2, 1 << 40])) for _ in range(2)]
            inner = b"".join(_field(number, flag) for number, flag in numbers)
            if rng.random() < 0.6:
                inner += _field(2, _charsmap(rng))
            data += _field(3, inner)
        elif part == 2:
            inner = _field(rng.choice([3, 24, 26, 35, 40, 41, 42, 43, 44]), rng.choice([0, 1, 2, 3, 1 << 31]))
            data += _field(2, inner)
        else:
            data += _field(rng.choice([4, 5, 6, 100]), rng.randbytes(rng.choice([0, 5, 300])))
    return changed_bytes(data, rng) if rng.random() < 0.1 else data


def _charsmap(rng: random.Random) -> bytes:
    """A trie of up to 4 KiB, and what its leaves say; mostly nonsense."""
    units = rng.randbytes(4 * rng.choice([0, 1, 16, 256, 1024]))
    texts = rng.choice([b"", b"a\x00", b"x" * rng.choice([10, 5000, 100_000]) + b"\x00", rng.randbytes(200)])
    size = rng.choice([len(units), len(units), 0, len(units) + 4, 1 << 31, (1 << 32) - 1])
    return size.to_bytes(4, "little") + units + texts
