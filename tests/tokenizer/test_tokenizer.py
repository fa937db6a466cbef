"""Tokenizers against the libraries that define them, on real vocabularies and random ids."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from ondevice.errors import BundleError, UnsupportedModelError, UsageError
from ondevice.tokenizer import StreamingDetokenizer, Tokenizer, load_tokenizer
from tests.support.small_tokenizers import added, small_json, train_sentencepiece

TEXTS = [
    "",
    " ",
    "Once upon a time, there was a little girl.",
    "  two leading spaces, a tab\t and\n\nnewlines ",
    "naïve café — “quotes” … 漢字かな 한국어 हिन्दी",
    "emoji 👩‍👩‍👧 🇫🇷 \U0001d518\U0001d52b \u0000 \ufffd \u2581 ▁▁",
    "def f(x):\n    return x**2  # <0x0A> <unk>",
]

KINDS = ["llama2", "llama2_json", "gpt2", "minimind"]


def llama2_as_json(data: bytes) -> str:
    """Llama 2's vocabulary as a `tokenizer.json`: merges are every split of a piece, best score first."""
    library = sentencepiece.SentencePieceProcessor(model_proto=data)
    pieces = [library.id_to_piece(i) for i in range(library.vocab_size())]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    splits = [
        (-library.get_score(i), vocab[piece[:at]], vocab[piece[at:]], piece[:at], piece[at:])
        for i, piece in enumerate(pieces)
        for at in range(1, len(piece))
        if piece[:at] in vocab and piece[at:] in vocab and i >= 259
    ]
    merges = [(left, right) for _, _, _, left, right in sorted(splits)]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab, merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<unk>", "<s>", "</s>")])
    return str(tokenizer.to_str())


def gpt2_as_json(folder: Path) -> str:
    tokenizer = tokenizers.Tokenizer(
        models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|endoftext|>", special=True)])
    return str(tokenizer.to_str())


@pytest.fixture(scope="session")
def files(shared_data: Path) -> dict[str, bytes]:
    folder = shared_data / "tokenizers"
    llama2 = (folder / "llama2" / "tokenizer.model").read_bytes()
    return {
        "llama2": llama2,
        "llama2_json": llama2_as_json(llama2).encode(),
        "gpt2": gpt2_as_json(folder / "gpt2").encode(),
        "minimind": (folder / "minimind" / "tokenizer.json").read_bytes(),
    }


@pytest.fixture(scope="session")
def loaded(files: dict[str, bytes]) -> dict[str, Tokenizer]:
    ends = {"llama2": (1, 2), "llama2_json": (1, 2), "gpt2": (50256, 50256), "minimind": (1, 2)}
    return {
        name: load_tokenizer(
            "sentencepiece" if name == "llama2" else "tokenizers",
            files[name],
            bos,
            [eos],
            name.startswith("llama"),
        )
        for name, (bos, eos) in ends.items()
    }


@pytest.fixture(scope="session")
def libraries(files: dict[str, bytes]) -> dict[str, tokenizers.Tokenizer]:
    """The library's reading of each `tokenizer.json`."""
    return {name: tokenizers.Tokenizer.from_str(files[name].decode()) for name in KINDS[1:]}


@pytest.fixture(scope="session")
def llama2(files: dict[str, bytes]) -> Any:
    """Llama 2's tokenizer, as its own library reads it."""
    return sentencepiece.SentencePieceProcessor(model_proto=files["llama2"])


@pytest.fixture(scope="session")
def library_decode(
    llama2: Any, libraries: dict[str, tokenizers.Tokenizer]
) -> dict[str, Callable[[list[int]], str]]:
    decode: dict[str, Callable[[list[int]], str]] = {"llama2": llama2.decode}
    return decode | {name: library.decode for name, library in libraries.items()}


def streamed(tokenizer: Tokenizer, ids: list[int], at_start: bool = True) -> list[str]:
    stream = StreamingDetokenizer(tokenizer, at_start=at_start)
    return [*(stream.add(token) for token in ids), stream.finish()]


def runs_joined(text: str) -> str:
    """Libraries differ in how many U+FFFD stand for one broken character."""
    return re.sub("\ufffd+", "\ufffd", text)


# --- encoding ---


@pytest.mark.parametrize("text", TEXTS)
def test_sentencepiece_encodes_as_its_library(loaded: dict[str, Tokenizer], llama2: Any, text: str) -> None:
    assert loaded["llama2"].encode(text, add_bos=False) == llama2.encode(text)
    assert loaded["llama2"].encode(text) == [1, *llama2.encode(text)]


@pytest.mark.fast("*-gpt2", "*emoji*", "*leading*")
@pytest.mark.parametrize("name", KINDS[1:])
@pytest.mark.parametrize("text", TEXTS)
def test_tokenizer_json_encodes_as_its_library(
    loaded: dict[str, Tokenizer], libraries: dict[str, tokenizers.Tokenizer], name: str, text: str
) -> None:
    expected = libraries[name].encode(text, add_special_tokens=False).ids
    assert loaded[name].encode(text, add_bos=False, special=True) == expected


@settings(max_examples=100)
@given(st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="▁"), max_size=40))
def test_both_forms_of_llama2_agree(loaded: dict[str, Tokenizer], text: str) -> None:
    ids = loaded["llama2"].encode(text)
    assert loaded["llama2_json"].encode(text) == ids
    assert loaded["llama2_json"].decode(ids) == loaded["llama2"].decode(ids)


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=100)
@given(st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="▁"), max_size=40))
def test_text_survives_the_round_trip(loaded: dict[str, Tokenizer], name: str, text: str) -> None:
    assert loaded[name].decode(loaded[name].encode(text)) == text


@pytest.mark.parametrize("name", KINDS)
def test_lone_surrogates_become_replacement_characters(loaded: dict[str, Tokenizer], name: str) -> None:
    assert loaded[name].encode("a\ud800b") == loaded[name].encode("a\ufffdb")


# --- special tokens ---

MARKED = {
    "llama2": "a</s>b<s>",
    "llama2_json": "a</s>b<s>",
    "gpt2": "a<|endoftext|>b",
    "minimind": "a<|im_end|>b",
}


@pytest.mark.parametrize("name", KINDS)
def test_names_of_special_tokens_count_only_when_asked(loaded: dict[str, Tokenizer], name: str) -> None:
    tokenizer, text = loaded[name], MARKED[name]
    special = {tokenizer.bos_id, *tokenizer.eos_ids}
    plain = tokenizer.encode(text, add_bos=False)
    assert special.isdisjoint(plain)
    assert tokenizer.decode(plain) == text
    assert special <= set(tokenizer.special_tokens.values())
    names = [name for name in re.findall(r"<[^>]*>", text) if name in tokenizer.special_tokens]
    found = [i for i in tokenizer.encode(text, add_bos=False, special=True) if i in special]
    assert found == [tokenizer.special_tokens[name] for name in names]
    assert [tokenizer.piece(i) for i in found] == names != []


def test_text_around_special_tokens_is_encoded_as_if_alone(loaded: dict[str, Tokenizer]) -> None:
    tokenizer = loaded["llama2"]
    a, b = tokenizer.encode("hello", add_bos=False), tokenizer.encode("you", add_bos=False)
    assert tokenizer.encode("hello</s>you<s>", add_bos=False, special=True) == [*a, 2, *b, 1]


def test_an_end_of_text_not_marked_special_cannot_be_typed() -> None:
    tokenizer = load_tokenizer(
        "tokenizers", small_json(added_tokens=[added(7, "<end>", special=False)]), None, [7], False
    )
    assert tokenizer.encode("a<end>", special=True) == [0, 7]
    assert 7 not in tokenizer.encode("a<end>")
    assert tokenizer.decode([0, 7]) == "a"


def test_other_added_tokens_are_text(loaded: dict[str, Tokenizer]) -> None:
    ids = loaded["minimind"].encode("<think>so</think>")
    assert (ids[0], ids[-1]) == (25, 26)
    assert loaded["minimind"].decode(ids) == "<think>so</think>"


def test_markup_defined_by_a_sentencepiece_user_is_special(small_sentencepiece: bytes) -> None:
    library = sentencepiece.SentencePieceProcessor(model_proto=small_sentencepiece)
    turn, word = library.piece_to_id("<turn>"), library.piece_to_id("word")
    assert turn in library.encode("a <turn> b"), "the library itself takes it from any text"
    tokenizer = load_tokenizer("sentencepiece", small_sentencepiece, 1, [2], True)
    plain = tokenizer.encode("a <turn> b word")
    assert turn not in plain
    assert word in plain
    assert tokenizer.decode(plain) == "a <turn> b word"
    assert turn in tokenizer.encode("a <turn> b", special=True)


@pytest.mark.parametrize("name", ["gpt2", "minimind"])
def test_a_text_begins_with_bos_only_if_there_is_one(loaded: dict[str, Tokenizer], name: str) -> None:
    assert loaded[name].encode("hi", add_bos=True)[0] == loaded[name].bos_id
    assert loaded[name].encode("hi")[0] != loaded[name].bos_id


def test_add_bos_without_a_bos_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="begins a text"):
        load_tokenizer("tokenizers", small_json(), None, [], False).encode("a", add_bos=True)


# --- decoding ---


@pytest.mark.fast("llama2", "gpt2")
@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=60)
@given(st.data())
def test_streams_decode_like_the_whole_and_like_the_library(
    loaded: dict[str, Tokenizer],
    library_decode: dict[str, Callable[[list[int]], str]],
    name: str,
    data: st.DataObject,
) -> None:
    """Any ids: single bytes that form no character, special tokens in the middle of one, spaces first."""
    tokenizer = loaded[name]
    token = (
        st.integers(0, 700) | st.integers(0, tokenizer.vocab_size - 1) | st.sampled_from([29871, 259, 220, 2])
    )
    ids = data.draw(st.lists(token.filter(lambda i: i < tokenizer.vocab_size), max_size=12))
    # sentencepiece lets a special token end a character, `tokenizers` doesn't; here neither does. And it
    # shows the unknown token, which is hidden here as by `tokenizers`.
    heard = [i for i in ids if name != "llama2" or i not in (0, 1, 2)]
    text, expected = tokenizer.decode(ids), library_decode[name](heard)
    # A `tokenizer.json` hides <unk>, and gives up a whole run of bytes where one of them is wrong.
    if name != "llama2_json" or (0 not in ids and "\ufffd" not in text):
        assert runs_joined(text) == runs_joined(expected)
    pieces = streamed(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    whole = b"".join(tokenizer.token_bytes(i) for i in ids).decode("utf-8", "replace")
    assert tokenizer.decode(ids, at_start=False) == whole == "".join(streamed(tokenizer, ids, at_start=False))


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=60)
@given(
    st.text(
        st.characters(min_codepoint=0x80, blacklist_categories=["Cs"], blacklist_characters="▁"),
        min_size=1,
        max_size=8,
    )
)
def test_a_stream_never_shows_part_of_a_character(loaded: dict[str, Tokenizer], name: str, text: str) -> None:
    pieces = streamed(loaded[name], loaded[name].encode(text, add_bos=False))
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


def test_a_broken_character_is_replaced_as_soon_as_it_is_certain(loaded: dict[str, Tokenizer]) -> None:
    tokenizer = loaded["llama2"]
    e2, x82, ac = (3 + byte for byte in "€".encode())
    x = tokenizer.encode("x", add_bos=False)[-1]
    assert streamed(tokenizer, [e2, x82, ac]) == ["", "", "€", ""]
    assert streamed(tokenizer, [e2, x82, x]) == ["", "", "\ufffd x", ""]
    assert streamed(tokenizer, [e2, 2, x82]) == ["", "", "", "\ufffd"]
    assert streamed(tokenizer, [ac, e2]) == ["\ufffd", "", "\ufffd"]


def test_a_continuation_keeps_its_leading_space(loaded: dict[str, Tokenizer]) -> None:
    for name in ("llama2", "llama2_json"):
        tokenizer = loaded[name]
        ids = tokenizer.encode("there was", add_bos=False)
        assert tokenizer.decode(ids) == "there was"
        assert tokenizer.decode(ids, at_start=False) == " there was"


def test_ids_beyond_the_tokenizer_decode_to_nothing(loaded: dict[str, Tokenizer]) -> None:
    """Embeddings are often padded to a round number of rows."""
    for tokenizer in loaded.values():
        assert tokenizer.decode([tokenizer.vocab_size, tokenizer.vocab_size + 100]) == ""
        assert tokenizer.token_bytes(tokenizer.vocab_size) == tokenizer.token_bytes(-1) == b""
        assert tokenizer.piece(tokenizer.vocab_size) == ""


def test_a_token_gives_its_bytes(loaded: dict[str, Tokenizer]) -> None:
    llama, gpt2 = loaded["llama2"], loaded["gpt2"]
    assert [llama.token_bytes(i) for i in (0, 1, 3, 13, 258, 263)] == [
        b"",
        b"",
        b"\0",
        b"\n",
        b"\xff",
        b" a",
    ]
    assert sorted(gpt2.token_bytes(i) for i in range(256)) == [bytes([i]) for i in range(256)]
    assert loaded["minimind"].token_bytes(25) == b"<think>"


@pytest.mark.parametrize("rule", ["keep", "one", "each"])
def test_the_leading_space_rule_is_the_model_files(rule: str, tmp_path: Path) -> None:
    options = {
        "keep": {"add_dummy_prefix": False, "remove_extra_whitespaces": False},
        "one": {"remove_extra_whitespaces": False},
        "each": {},
    }[rule]
    data = train_sentencepiece(**options)
    tokenizer = load_tokenizer("sentencepiece", data, 1, [2], False)
    library = sentencepiece.SentencePieceProcessor(model_proto=data)
    assert tokenizer.leading_space == rule
    space, a = library.piece_to_id("▁"), library.piece_to_id("a")
    for ids in ([space, a], [space, space, a], [a, space, a], [1, space, space]):
        assert tokenizer.decode(ids) == library.decode(ids)
    assert tokenizer.decode([a, 0, a]) == tokenizer.decode([a, a])


def test_kinds_ids_and_sizes_are_checked(files: dict[str, bytes]) -> None:
    with pytest.raises(UnsupportedModelError, match="'tiktoken' is not one of sentencepiece, tokenizers"):
        load_tokenizer("tiktoken", b"", None, [], False)
    with pytest.raises(BundleError, match="add_bos"):
        load_tokenizer("tokenizers", small_json(), None, [], True)
    for bad in (-1, True, 1 << 31):
        with pytest.raises(BundleError, match="not a token id"):
            load_tokenizer("tokenizers", small_json(), bad, [], False)
    load_tokenizer("sentencepiece", files["llama2"], 1, [2], True, vocab_size=32_000)
    with pytest.raises(BundleError, match="has token id 31999, but the model's vocabulary ends at 511"):
        load_tokenizer("sentencepiece", files["llama2"], 1, [2], True, vocab_size=512)
    with pytest.raises(BundleError, match="token id 99"):
        load_tokenizer("tokenizers", small_json(), None, [99], False, vocab_size=64)
