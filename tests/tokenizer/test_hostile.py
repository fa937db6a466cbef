"""Tokenizers are programs from strangers: what could multiply a text, or run on, is refused or has bounds."""

from __future__ import annotations

import itertools
import signal
import string
import struct
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from ondevice.converters.checkpoints import sentencepiece_model as proto
from ondevice.errors import BundleError, UnsupportedModelError
from ondevice.tokenizer import load_tokenizer
from ondevice.tokenizer.base import MAX_SPECIAL_CHARS, MAX_TOKEN_CHARS
from ondevice.tokenizer.cutting import MAX_PIECE_CHARS
from ondevice.tokenizer.sentencepiece_file import SentencePieceFile, read_sentencepiece_file
from ondevice.tokenizer.tokenizer_file import MAX_ADDED_CHARS
from tests.support.small_tokenizers import added, replace, small_json, train_sentencepiece

LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
MARKS = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}


def split(pattern: dict[str, str]) -> dict[str, Any]:
    return {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}


def replaced(pattern: dict[str, str]) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": "a"}


def before(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": list(parts)}}


def normal(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"normalizer": {"type": "Sequence", "normalizers": list(parts)}}


def nested(depth: int) -> dict[str, Any]:
    return LEVEL if depth == 0 else {"type": "Sequence", "pretokenizers": [nested(depth - 1)]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (before(*[LEVEL] * 23), "23 pre-tokenizers"),
        (before(*[LEVEL] * 2), "spells text anew more than once"),
        (before(*[split({"String": "."}), MARKS] * 3), "spells text anew more than once"),
        (normal(*[replaced({"String": ""})] * 2), "replaces the empty text"),
        (normal(*[replaced({"Regex": "(?=.)"})] * 2), "replaces the empty text"),
        (normal(replaced({"Regex": "b*"})), "replaces the empty text"),
        (normal(replace("a", "b" * 17)), "17 times longer"),
        (normal({"type": "Prepend", "prepend": "b" * 17}), "17 times longer"),
        (normal(*[{"type": "NFC"}] * 17), "17 normalizers"),
        (before(split({"Regex": "[ab]*[ab]*c"})), "grows faster"),
        (before(split({"Regex": "(a+)+$"})), "more than one way"),
        (before(*[split({"Regex": "|".join(f"[ab{x}]*c" for x in "defghi")})] * 3), "the limits are"),
        (before(split({"Regex": "(a?){20}a{20}"})), "the limits are"),
        (before(nested(40)), "nests too deep"),
        ({"added_tokens": [added(8, "x" * (MAX_TOKEN_CHARS + 1))]}, f"1 to {MAX_TOKEN_CHARS}"),
        ({"added_tokens": [added(8 + i, f"{i:0500}") for i in range(1 + MAX_ADDED_CHARS // 500)]}, "limit"),
        ({"added_tokens": [added(8, "x"), added(8, "y")]}, "the same id"),
        ({"added_tokens": [added(1, "x")]}, "the same id"),
        ({"added_tokens": [added(8, "x"), added(9, "x")]}, "same id|same added token"),
        ({"added_tokens": [added(12, "x")]}, "it is 7"),
        ({"model": {"type": "BPE", "vocab": {"a": 0, "b": 0}, "merges": []}}, "the same id"),
        ({"model": {"type": "BPE", "vocab": {"a": 0, "b": -1}, "merges": []}}, "isn't from 0"),
        ({"model": {"type": "BPE", "vocab": {"a": 0, "b": []}, "merges": []}}, "whole numbers"),
        ({"model": {"type": "BPE", "vocab": {"a": 0, "b": 1.5}, "merges": []}}, "whole numbers"),
        ({"model": {"type": "BPE", "vocab": {"x" * (MAX_TOKEN_CHARS + 1): 0}, "merges": []}}, "characters"),
        ({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "a", "a"]]}}, "isn't a pair"),
        ({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", []]]}}, "isn't a pair"),
        ({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [None]}}, "spelt alike"),
        ({"model": {"type": "BPE", "vocab": {"\ud800": 0}, "merges": []}}, "can't be used"),
        ({"model": {"type": "Unigram", "vocab": [["a", 0.0]]}}, "Unigram"),
        ({"model": []}, "isn't an object"),
        ({"added_tokens": {}}, "aren't a list"),
        ({"added_tokens": [{"id": 8}]}, "must be a string"),
        ({"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": [["a", "b"]]}}, "hasn't got"),
        (
            {"model": {"type": "BPE", "vocab": {"a": 0, "": 1}, "merges": [["a", "a"]]}},
            "hasn't got",
        ),
        (before({"type": "FixedLength", "length": 0}), "pieces of 0 characters"),
        (before({"type": "FixedLength", "length": True}), "pieces of True characters"),
        (
            normal({"type": "StripAccents"}) | {"added_tokens": [added(7, "\u0301") | {"normalized": True}]},
            "nothing",
        ),
        ({"pre_tokenizer": {"type": "Sequence"}}, "has no pretokenizers"),
        ({"pre_tokenizer": {"type": "Lua", "code": "while true"}}, "Lua"),
    ],
)
def test_a_tokenizer_json_that_would_harm_is_refused_when_it_is_read(
    changes: dict[str, Any], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((BundleError, UnsupportedModelError), match=message):
        load_tokenizer("tokenizers", small_json(**changes), None, [], False)
    assert capfd.readouterr().err == ""  # the library's panics write there


def test_to_prepend_nothing_changes_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    data = small_json(**normal({"type": "Prepend", "prepend": ""}, {"type": "NFC"}))
    assert load_tokenizer("tokenizers", data, None, [], False).encode("abab") == [0, 1, 0, 1]
    assert capfd.readouterr().err == ""


def test_an_object_with_a_key_twice_is_refused() -> None:
    data = small_json().replace(b'"a": 0', b'"a": 0, "a": 1')
    with pytest.raises(BundleError, match="twice"):
        load_tokenizer("tokenizers", data, None, [], False)


@pytest.mark.fast("padding1")
@pytest.mark.parametrize(
    "padding", [{"strategy": {"Fixed": 1 << 40}}, {"strategy": "BatchLongest", "pad_to_multiple_of": 1 << 40}]
)
def test_padding_and_post_processors_are_never_run(padding: dict[str, Any]) -> None:
    whole = {
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "a",
    }
    frame = {"SpecialToken": {"id": "<end>", "type_id": 0}}
    template = {
        "type": "TemplateProcessing",
        "single": [frame] * 10_000,
        "pair": [],
        "special_tokens": {"<end>": {"id": "<end>", "ids": [7] * 10_000, "tokens": ["<end>"] * 10_000}},
    }
    data = small_json(padding={**whole, **padding}, post_processor=template)
    assert load_tokenizer("tokenizers", data, None, [], False).encode("ab") == [0, 1]


def test_names_of_special_tokens_are_bounded() -> None:
    names = ["".join(letters) + "x" * 900 for letters in itertools.product("abcdef", repeat=3)]
    pieces = [(f"<0x{byte:02X}>", 0.0, proto.BYTE) for byte in range(256)]
    pieces += [("<unk>", 0.0, proto.UNKNOWN), ("<s>", 0.0, proto.CONTROL), ("</s>", 0.0, proto.CONTROL)]
    pieces += [(f"<{name}>", 0.0, proto.CONTROL) for name in names]
    assert sum(map(len, names)) > MAX_SPECIAL_CHARS
    tokenizer = load_tokenizer("sentencepiece", proto.bpe_model(pieces, 256, 257, 258), None, [], False)
    assert tokenizer.encode("a") != []
    with pytest.raises(BundleError, match=str(MAX_SPECIAL_CHARS)):
        tokenizer.encode("a", special=True)


def with_fields(model: bytes, number: int, *fields: tuple[int, bytes]) -> bytes:
    """The sentencepiece model with more fields in one of its messages."""
    inner = b"".join(proto._bytes_field(at, value) for at, value in fields)
    return model + proto._bytes_field(number, inner)


def characters_map(text: bytes) -> bytes:
    """A map of sentencepiece's whose trie is empty; `text` is all that it could make of a character."""
    trie = struct.pack("<256I", *[0] * 256)
    return struct.pack("<I", len(trie)) + trie + text + b"\0"


def test_a_character_map_that_multiplies_text_is_refused(small_sentencepiece: bytes) -> None:
    def read(growth: int) -> SentencePieceFile:
        return read_sentencepiece_file(
            with_fields(small_sentencepiece, 3, (2, characters_map(b"x" * growth)))
        )

    assert read(1).piece_chars == MAX_PIECE_CHARS
    assert read(64).piece_chars == 1024
    for growth in (65, 100_000):
        with pytest.raises(BundleError, match=f"by {growth} bytes; the limit is 64"):
            read(growth)


def test_unicodes_own_character_map_passes() -> None:
    data = train_sentencepiece(normalization_rule_name="nmt_nfkc")
    library = sentencepiece.SentencePieceProcessor(model_proto=data)
    text = "\ufdfa \uff21bc word " * 500
    tokenizer = load_tokenizer("sentencepiece", data, 1, [2], False)
    assert tokenizer.encode(text) == library.encode(text)
    assert read_sentencepiece_file(data).piece_chars == (1 << 16) // 33


@pytest.mark.parametrize("damage", [b"", b"\xff\xff\xff\xff", b"\4\0\0\0abcdxyz"])
def test_a_damaged_character_map_is_refused(small_sentencepiece: bytes, damage: bytes) -> None:
    data = with_fields(small_sentencepiece, 3, (2, damage))
    if not damage:
        load_tokenizer("sentencepiece", data, 1, [2], True)
        return
    with pytest.raises(BundleError, match="can't be used"):
        load_tokenizer("sentencepiece", data, 1, [2], True)


def test_self_tests_in_a_model_are_not_run(small_sentencepiece: bytes) -> None:
    """The library would encode them while it loads, and refuse the model where the outcome is another."""
    sample = proto._bytes_field(1, proto._bytes_field(1, b"a b") + proto._bytes_field(2, b"nonsense"))
    data = small_sentencepiece + proto._bytes_field(4, sample)
    plain = load_tokenizer("sentencepiece", small_sentencepiece, 1, [2], True)
    assert load_tokenizer("sentencepiece", data, 1, [2], True).encode("a b") == plain.encode("a b")


CHILD = """
    import sys, time
    from ondevice.tokenizer import load_tokenizer, loading_bytes

    def status(name):
        lines = open("/proc/self/status").read().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))

    kind, path = sys.argv[1:3]
    data = open(path, "rb").read()
    load_tokenizer(kind, open(sys.argv[3], "rb").read(), None, [], False).encode("warm")
"""


def child(code: str, kind: str, data: bytes, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """A process of its own, which has loaded a small tokenizer of the kind already."""
    (folder / "file").write_bytes(data)
    (folder / "small").write_bytes(small_json() if kind == "tokenizers" else data)
    command = [sys.executable, "-c", textwrap.dedent(CHILD + code), kind, str(folder / "file")]
    return subprocess.Popen(
        [*command, str(folder / "small"), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def vocabulary(count: int) -> dict[str, int]:
    names = map("".join, itertools.product(string.ascii_letters, repeat=4))
    return {name: i for i, name in enumerate(itertools.islice(names, count))}


@pytest.mark.fast("nothing", "merges", "long_added")
@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's /proc")
@pytest.mark.parametrize("case", ["vocabulary", "merges", "added", "long_added", "nothing", "real"])
def test_loading_takes_no_more_memory_than_it_is_said_to(
    case: str, tmp_path: Path, shared_data: Path
) -> None:
    letters = {letter: i for i, letter in enumerate(string.ascii_letters)}
    pairs = {a + b: 52 + i for i, (a, b) in enumerate(itertools.product(letters, letters))}
    merges = [f"{pair[0]} {pair[1]}" for pair in pairs]
    names = [*vocabulary(20_000)]

    def model(vocab: dict[str, int], merges: list[str]) -> dict[str, Any]:
        return {"type": "BPE", "vocab": vocab, "merges": merges}

    def tokens(names: list[str]) -> list[dict[str, Any]]:
        return [{"id": i, "content": name, "special": True} for i, name in enumerate(names)]

    data = {
        "vocabulary": lambda: small_json(model=model(vocabulary(100_000), [])),
        "merges": lambda: small_json(model=model(letters | pairs, merges * 60)),
        "added": lambda: small_json(model=model({}, []), added_tokens=tokens(names)),
        "long_added": lambda: small_json(
            model=model({}, []), added_tokens=tokens([name + "x" * 1000 for name in names[:130]])
        ),
        "nothing": lambda: small_json(junk=[{"a": i} for i in range(200_000)]),
        "real": lambda: (shared_data / "tokenizers" / "minimind" / "tokenizer.json").read_bytes(),
    }[case]()
    code = """
    before = status("VmRSS")
    load_tokenizer(kind, data, None, [], False)
    print(status("VmHWM") - before, loading_bytes(kind, [data]) - len(data))
    """
    process = child(code, "tokenizers", data, tmp_path)
    out, err = process.communicate(timeout=120)
    assert not err
    took, said = map(int, out.split())
    # The allocator's own, beside what is counted.
    assert took <= said + (2 << 20)


def costly() -> bytes:
    """As slow as a vetted tokenizer can be made: patterns that nearly match, at every place of a text."""
    pattern = "|".join(rf"[^.{letter}]*(?:[cd]|[cde]|[cd]|[cdx])" for letter in "efghij")
    vocab = {letter: i for i, letter in enumerate("ab.<end>")}
    return small_json(
        **before(split({"Regex": pattern})), model={"type": "BPE", "vocab": vocab, "merges": []}
    )


def test_a_piece_of_text_takes_a_bounded_time() -> None:
    tokenizer = load_tokenizer("tokenizers", costly(), None, [], False)
    started = time.process_time()
    assert len(tokenizer.encode("ab" * (MAX_PIECE_CHARS // 2 - 1) + ".c")) == MAX_PIECE_CHARS - 1
    assert time.process_time() - started < 15, "a second or two, on a machine at its ease"


def test_an_interrupt_is_heard_while_a_long_text_is_encoded(tmp_path: Path) -> None:
    code = """
    tokenizer = load_tokenizer(kind, data, None, [], False)
    print("begun", flush=True)
    tokenizer.encode(("ab" * 2000 + ".c") * 1000)
    """
    process = child(code, "tokenizers", costly(), tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    started = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in err
    assert time.monotonic() - started < 20, "no longer than a piece of the text takes"


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's /proc")
@pytest.mark.fast("replacements", "letters", "prefixes")
@pytest.mark.parametrize("case", ["replacements", "forms", "letters", "prefixes"])
def test_a_long_text_takes_the_memory_of_a_piece(case: str, tmp_path: Path) -> None:
    """A hundred thousand characters, by the greediest of vetted components."""
    changes, text = {
        "replacements": (normal(replace("a", "b" * 16)) | before(LEVEL), "a"),
        "forms": (normal({"type": "NFKD"}) | before(LEVEL), "\ufdfa"),
        "letters": (before(LEVEL), "a"),
        "prefixes": (before(split({"String": "a"}), MARKS), "a"),
    }[case]
    code = """
    tokenizer = load_tokenizer(kind, data, None, [], False)
    text, total, before = sys.argv[4] * 4096, 0, status("VmRSS")
    for ids in tokenizer.encode_parts(text for _ in range(24)):
        total += 1 + len(ids)
    print(status("VmHWM") - before, total)
    """
    process = child(code, "tokenizers", small_json(**changes), tmp_path, text)
    out, err = process.communicate(timeout=120)
    assert not err
    took, total = map(int, out.split())
    assert total >= 24
    assert took < 16 << 20


def test_nothing_a_hostile_file_does_reaches_stderr(tmp_path: Path) -> None:
    """The library would panic, loudly, where a match takes too long; such patterns aren't let in."""
    code = """
    from ondevice.errors import OndeviceError
    for pattern in ("(a+)+$", "(a|b|ab)*c", "[ab]*[ab]*[ab]*c", "(a?){30}a{30}"):
        import json
        document = json.loads(data)
        document["pre_tokenizer"] = {
            "type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False
        }
        try:
            load_tokenizer(kind, json.dumps(document).encode(), None, [], False).encode("ab" * 500 + ".c")
        except OndeviceError:
            print("refused")
    """
    out, err = child(code, "tokenizers", small_json(), tmp_path).communicate(timeout=60)
    assert (out, err) == ("refused\n" * 4, "")
