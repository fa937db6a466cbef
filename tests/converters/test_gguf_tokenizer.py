"""Tokenizers of GGUF files: the ids that the models' own tokenizers give, and names for what isn't known."""

from __future__ import annotations

import json
import logging
import random
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, pre_tokenizers
from tokenizers import Tokenizer as Library

from ondevice.bundle.manifest import TokenizerInfo
from ondevice.chat_template import ChatTemplate
from ondevice.converters.checkpoints.base import SourceFile, TokenizerFiles
from ondevice.converters.checkpoints.gguf_file import GgufHeader, Value, read_header
from ondevice.converters.checkpoints.gguf_splitting import SPLITTINGS
from ondevice.converters.checkpoints.gguf_tokenizer import read_gguf_tokenizer
from ondevice.converters.checkpoints.source_folder import SourceFolder
from ondevice.errors import CheckpointError, UnsupportedModelError
from ondevice.tokenizer import Tokenizer, load_tokenizer
from tests.converters.test_tokenizer import byte_level, write_json

UNUSED = 5
HOSTILE = (
    "$1,234,567.89 != 1234567e-12 <<=>> ^^||`~` 0x1F 007",
    "٠١٢٣٤٥ ⅷ²³¹ ½¼¾ 12²34 一二三",
    "\u200b\u200d\u2028a\u00a0\ufeff\u0300\u0301e\u0301\u0327",
    "!!!???...---___''\"\"\" 's'S'RE 'll''ve 1's 22't",
    "\U000e0041\U0010ffff\ufffd\x00\x7f\x85",
    "「日本」、。１２３４５！",  # noqa: RUF001 - wide marks and digits are meant
    "\r\r\n\n\t \t123\t4567 ",
)
"""Marks, digits and spaces of every kind side by side."""


def header(**values: Value | Sequence[str] | str | None) -> GgufHeader:
    """A header of tokenizer metadata: keys without `tokenizer.ggml.`; None leaves a key out."""
    metadata: dict[str, Value] = {}
    for key, value in values.items():
        name = f"tokenizer.{key}" if key.startswith("chat_template") else f"tokenizer.ggml.{key}"
        if isinstance(value, str):
            metadata[name] = value.encode()
        elif isinstance(value, list) and value and isinstance(value[0], str):
            metadata[name] = [item.encode() for item in value]
        elif isinstance(value, list) and value and not isinstance(value[0], bytes):
            metadata[name] = np.array(value)
        elif value is not None:
            metadata[name] = value  # type: ignore[assignment]
    return GgufHeader("m.gguf", 3, metadata, {})


def read(made: GgufHeader, folder: Path, vocab_size: int) -> TokenizerFiles:
    return read_gguf_tokenizer(made, SourceFolder(folder), vocab_size)


def loaded(files: TokenizerFiles, vocab_size: int) -> Tokenizer:
    info = files.info
    assert info.kind is not None
    file = {"sentencepiece": "tokenizer.model", "tokenizers": "tokenizer.json"}[info.kind]
    return load_tokenizer(
        info.kind, files.blobs[file], info.bos_id, info.eos_ids, info.add_bos, vocab_size=vocab_size
    )


def texts(count: int = 200) -> list[str]:
    """Plain ones, and random ones of many scripts."""
    rng = random.Random(3)
    ranges = [(32, 127)] * 4 + [
        (0xA0, 0x250),
        (0x370, 0x600),
        (0x900, 0x980),
        (0x4E00, 0x5000),
        (0x1F300, 0x1F600),
    ]
    plain = [
        "", " ", "  ", "\n", "Hello world", "  two  spaces  ", "It's we'LL they'd DON'T",
        "x = 3.14159;\r\n\tif (y):", "日本語のテキスト🙂 é ñ e\u0301",
        "1234567890 12 345", "ﬁ ½ Ⅷ ñandú", "a\n\n\n b \n c",
        "CamelCaseWords", "नमस्ते दुनिया", "شكرا", "<s>not special</s>",
    ]  # fmt: skip
    made = ["".join(chr(rng.randrange(*rng.choice(ranges))) for _ in range(40)) for _ in range(count)]
    words = [
        rng.choice(["the", " of", "\n", "  ", " 12", "'s", "Über", " 中", ".", "ing"]) for _ in range(400)
    ]
    return [*plain, *made, "".join(words)]


def test_llama_2_from_metadata_gives_the_ids_of_its_own_model(shared_data: Path, tmp_path: Path) -> None:
    import sentencepiece

    data = shared_data / "tokenizers"
    found = read(read_header(SourceFile(data / "gguf_vocab" / "ggml-vocab-llama.gguf")), tmp_path, 32000)
    assert found.info == TokenizerInfo("sentencepiece", bos_id=1, eos_ids=(2,), add_bos=True)
    mine = loaded(found, 32000)
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(data / "llama2" / "tokenizer.model"))
    for text in texts():
        ids = theirs.encode(text)
        assert mine.encode(text, add_bos=False) == ids, text
        assert mine.decode(ids) == theirs.decode(ids)
    assert mine.encode("a") == [1, *theirs.encode("a")]
    assert mine.special_tokens == {"<s>": 1, "</s>": 2}


@pytest.mark.fast("qwen2")
@pytest.mark.parametrize("pre", ["gpt-2", "qwen2", "smollm", "falcon"])
def test_byte_level_ids_are_those_of_hugging_face(shared_data: Path, tmp_path: Path, pre: str) -> None:
    """One vocabulary, split by the rules of four models; its own are those of gpt-2."""
    file = shared_data / "tokenizers" / "minimind" / "tokenizer.json"
    document = json.loads(file.read_text(encoding="utf-8"))
    vocabulary: dict[str, int] = document["model"]["vocab"]
    merges = [tuple(merge) for merge in document["model"]["merges"]]
    special = {token["content"]: 3 if token["special"] else 4 for token in document["added_tokens"]}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    theirs = Library.from_file(str(file))
    if pre == "qwen2":
        transformers = pytest.importorskip("transformers")
        theirs = transformers.Qwen2Tokenizer(vocab=vocabulary, merges=merges).backend_tokenizer
    elif pre == "smollm":
        theirs.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),  # type: ignore[list-item]
                pre_tokenizers.ByteLevel(add_prefix_space=False),  # type: ignore[list-item]
            ]
        )
    elif pre == "falcon":
        theirs.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Punctuation("contiguous"),  # type: ignore[list-item]
                pre_tokenizers.ByteLevel(add_prefix_space=False),  # type: ignore[list-item]
                pre_tokenizers.Digits(individual_digits=False),  # type: ignore[list-item]
                pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated"),  # type: ignore[list-item]
            ]
        )
    made = header(
        model="gpt2",
        pre=pre,
        tokens=tokens,
        token_type=[special.get(token, 1) for token in tokens],
        merges=[" ".join(pair) for pair in merges],
        eos_token_id=2,
    )
    mine = loaded(read(made, tmp_path, len(tokens)), len(tokens))
    corpus = (shared_data / "corpus" / "wikitext2" / "valid.txt").read_text(encoding="utf-8")
    for text in [*texts(), *HOSTILE, corpus[:4096], corpus[100_000:104_096]]:
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert mine.encode(text) == ids, text
        assert mine.decode(ids) == theirs.decode(ids)
    assert special["<|im_end|>"] == 3
    assert mine.encode("a<|im_end|>", special=True) == [*mine.encode("a"), vocabulary["<|im_end|>"]]
    assert vocabulary["<|im_end|>"] not in mine.encode("a<|im_end|>")


def test_deepseek_cuts_numbers_and_sets_chinese_apart_before_words(tmp_path: Path) -> None:
    """A word after punctuation is one part with it, if nothing stands before."""
    made = json.loads(read(small(pre="deepseek-v3"), tmp_path, 300).blobs["tokenizer.json"])
    made["model"] = {"type": "BPE", "vocab": {}, "merges": []}
    splitter = Library.from_str(json.dumps(made | {"added_tokens": []})).pre_tokenizer
    parts = [part for part, _ in splitter.pre_tokenize_str("12345x (foo)b.c \u4e2da\u304b")]
    assert parts[:-3] == ["123", "45", "x", "\u0120(", "foo", ")b", ".c", "\u0120"]
    assert [len(part) for part in parts[-3:]] == [3, 1, 3]


@pytest.mark.parametrize("pre", {rule: name for name, rule in SPLITTINGS.items()}.values())
def test_every_splitting_encodes_and_comes_back(tmp_path: Path, pre: str) -> None:
    mine = loaded(read(small(pre=pre), tmp_path, 300), 300)
    for text in texts(20):
        expected = unicodedata.normalize("NFC", text) if SPLITTINGS[pre].composes else text
        assert mine.decode(mine.encode(text)) == expected


def small(**changes: Any) -> GgufHeader:
    """Byte tokens, one merge and four tokens by type, in 262 of 300 rows; the rest is padding."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "<bos>", "<eos>", "<eot>", "<think>"]
    padding = [f"[PAD{i}]" for i in range(len(tokens), 300)]
    values: dict[str, Any] = {
        "model": "gpt2",
        "pre": "llama-bpe",
        "tokens": tokens + padding,
        "token_type": [1] * 257 + [3, 3, 3, 4] + [UNUSED] * len(padding),
        "merges": ["h e"],
        "bos_token_id": 257,
        "eos_token_id": 258,
        "eot_token_id": 259,
    }
    return header(**(values | changes))


def test_special_tokens_by_type_and_ends(tmp_path: Path) -> None:
    found = read(small(chat_template="{{ messages }}"), tmp_path, 300)
    assert found.info == TokenizerInfo("tokenizers", 257, (258, 259), True, "chat_template.jinja")
    assert found.blobs["chat_template.jinja"] == b"{{ messages }}"
    mine = loaded(found, 300)
    assert mine.vocab_size == 261
    assert mine.special_tokens == {"<bos>": 257, "<eos>": 258, "<eot>": 259}
    assert mine.encode("he<think>") == [257, 256, 260]
    assert mine.encode("<eot>", special=True) == [257, 259]
    assert mine.decode([257, 256, 260, 259]) == "he<think>"


@pytest.mark.parametrize(
    ("changes", "bos_id", "eos_ids", "add_bos"),
    [
        ({"pre": "qwen2"}, 257, (258, 259), False),
        ({"pre": "qwen2", "add_bos_token": True}, 257, (258, 259), True),
        ({"add_bos_token": False}, 257, (258, 259), False),
        ({"bos_token_id": None}, None, (258, 259), False),
        ({"eos_token_id": 259, "eom_token_id": 258}, 257, (259, 258), True),
        ({"eos_token_id": None, "eot_token_id": None}, 257, (258,), True),
    ],
)
def test_tokens_at_the_ends(
    tmp_path: Path, changes: dict[str, Any], bos_id: int | None, eos_ids: tuple[int, ...], add_bos: bool
) -> None:
    info = read(small(**changes), tmp_path, 300).info
    assert (info.bos_id, info.eos_ids, info.add_bos) == (bos_id, eos_ids, add_bos)


@pytest.mark.parametrize("eot", [None, 258])
def test_the_end_of_a_message_is_no_end_where_there_are_channels(tmp_path: Path, eot: int | None) -> None:
    """As in gpt-oss's tokenizer, whatever a key says of `<|end|>`."""
    marks = ["<|return|>", "<|channel|>", "<|end|>", "<|call|>"]
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *marks]
    made = small(tokens=tokens, token_type=[1] * 256 + [3] * 4, merges=[], pre="gpt-4o", eos_token_id=256,
                 eot_token_id=eot, bos_token_id=None)  # fmt: skip
    assert read(made, tmp_path, 260).info.eos_ids == (256, 259)
    plain = small(tokens=[*tokens[:256], "<|end|>"], token_type=[1] * 256 + [3], merges=[],
                  eos_token_id=None, eot_token_id=None, bos_token_id=None)  # fmt: skip
    assert read(plain, tmp_path, 260).info.eos_ids == (256,)


def spelled(**changes: Any) -> GgufHeader:
    """A sentencepiece vocabulary: bytes, letters, a word, and tokens by type."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["▁", "a", "b", "ab", "▁ab", "<|end|>", "two words", "[PAD266]"]
    values: dict[str, Any] = {
        "model": "llama",
        "tokens": tokens,
        "token_type": [2, 3, 3] + [6] * 256 + [1] * 5 + [3, 4, UNUSED],
        "scores": [0.0] * 259 + [-1.0, -2.0, -3.0, -4.0, -5.0, -1000.0, -1000.0, -1000.0],
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return header(**(values | changes))


@pytest.mark.parametrize(
    ("changes", "text", "pieces"),
    [
        ({}, "ab  a", ["▁ab", "▁", "▁", "a"]),
        ({"add_space_prefix": False}, "ab  a", ["ab", "▁", "▁", "a"]),
        ({"remove_extra_whitespaces": True}, " ab  a ", ["▁ab", "▁", "a"]),
        ({}, "a two words", ["▁", "a", "▁", "two▁words"]),
        ({}, "é", ["▁", "<0xC3>", "<0xA9>"]),
    ],
)
def test_sentencepiece_rules_of_a_gguf_file_decide_the_pieces(
    tmp_path: Path, changes: dict[str, Any], text: str, pieces: list[str]
) -> None:
    mine = loaded(read(spelled(**changes), tmp_path, 300), 300)
    assert [mine.piece(token) for token in mine.encode(text, add_bos=False)] == pieces
    assert mine.vocab_size == 266
    assert mine.special_tokens == {"<s>": 1, "</s>": 2, "<|end|>": 264}


def test_gemma4_merges_whole_texts(tmp_path: Path) -> None:
    """Against the `tokenizer.json` that its checkpoints have: the same ids, and the text back."""
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pairs = [("\n", "\n"), ("▁", "▁"), ("h", "e"), ("l", "l"), ("he", "ll"), ("▁", "w"), ("o", "▁w")]
    pairs += [("hell", "o"), ("r", "l")]
    tokens += ["\n", *"▁helowrd", *map("".join, pairs), "<|turn>", "<turn|>", "<|channel>"]
    kinds = [3, 3, 3, 2, *[6] * 256, *[1] * (len(tokens) - 263), 3, 3, 4]
    added = [
        {"id": token, "content": tokens[token], "special": kind != 4, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for token, kind in enumerate(kinds)
        if kind in (2, 3, 4)
    ]
    back = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    document = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"String": " "},
            "behavior": "MergedWithPrevious",
            "invert": False,
        },
        "decoder": {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {"type": "BPE", "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}
        | {"vocab": {text: token for token, text in enumerate(tokens)}, "merges": list(map(list, pairs))},
    }
    theirs = Library.from_str(json.dumps(document))
    made = header(
        model="gemma4", tokens=tokens, token_type=kinds, merges=list(map(" ".join, pairs)),
        scores=[-1000.0] * len(tokens), bos_token_id=2, eos_token_id=1, add_space_prefix=False,
    )  # fmt: skip
    found = read(made, tmp_path, len(tokens))
    assert found.info.eos_ids == (1, tokens.index("<turn|>"))
    assert found.info.add_bos
    mine = loaded(found, len(tokens))
    for text in [*texts(), "hello world\n\n  hello", "hell<|channel>o w", "w" * 9000]:
        ids = mine.encode(text, add_bos=False)
        assert ids == theirs.encode(text, add_special_tokens=False).ids, text
        assert mine.decode(ids) == text


@pytest.mark.parametrize(
    ("made", "error", "message"),
    [
        (small(pre="new-kind"), UnsupportedModelError, "ggml.pre is new-kind, .* names known here; .*beside"),
        (small(model="bert"), UnsupportedModelError, "ggml.model is bert, .* by WordPiece; .*another model"),
        (small(model="t5"), UnsupportedModelError, "ggml.model is t5, .* by unigrams; .*another model"),
        (small(model="rwkv"), UnsupportedModelError, "ggml.model is rwkv, .* RWKV's trie; .*another model"),
        (small(model="plamo2"), UnsupportedModelError, "ggml.model is plamo2, .*PLaMo's table; .*another"),
        (small(model="hybriddna"), UnsupportedModelError, "ggml.model is hybriddna, .* k-mers of DNA; .*an"),
        (small(model="whitespace"), UnsupportedModelError, "ggml.model is whitespace, .*whole words; .*an"),
        (small(model="newer"), UnsupportedModelError, "ggml.model is newer.*only llama, gpt2 .*beside"),
        (small(model=None), UnsupportedModelError, "tokenizer.ggml.model is missing"),
        (spelled(precompiled_charsmap=b"x"), UnsupportedModelError, "precompiled_charsmap, which changes"),
        (small(token_type=[1] * 5), CheckpointError, "token_type must be one of .* each of 300 tokens"),
        (small(token_type=[9] * 300), CheckpointError, "token_type must be"),
        (small(token_type=[1.0] * 300), CheckpointError, "token_type must be"),
        (spelled(token_type=[True] * 267), CheckpointError, "token_type must be"),
        (small(tokens=["a"] * 300), CheckpointError, "no two are the same"),
        (small(tokens=[b"\xff"] * 300), CheckpointError, "tokens must be UTF-8"),
        (small(tokens=["a" * 2000, *map(str, range(299))]), CheckpointError, "at most 1024 characters"),
        (small(tokens=7), CheckpointError, "tokens must be an array of strings"),
        (small(merges=None), CheckpointError, "merges must be there"),
        (small(merges=["h"]), CheckpointError, "a merge isn't a pair"),
        (small(merges=["x y"]), CheckpointError, "a merge makes a piece"),
        (small(bos_token_id=300), CheckpointError, "bos_token_id must be an id below 300, not 300"),
        (small(eot_token_id=-1), CheckpointError, "eot_token_id must be an id below"),
        (small(chat_template=7), CheckpointError, "tokenizer.chat_template must be a string"),
        (spelled(scores=None), CheckpointError, "scores must be a finite score for each of 266"),
        (spelled(scores=[0.0] * 5), CheckpointError, "scores must be"),
        (spelled(scores=[float("nan")] * 267), CheckpointError, "scores must be"),
        (spelled(token_type=[1] * 267), CheckpointError, "the tokenizer of m.gguf"),
        (spelled(tokens=["", *map(str, range(266))]), CheckpointError, "the tokenizer of m.gguf"),
    ],
)  # fmt: skip
def test_unsupported_and_damaged_tokenizers_are_refused(
    tmp_path: Path, made: GgufHeader, error: type, message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        read(made, tmp_path, 300)
    assert type(caught.value) is error
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("x" * 2_000_000, "the chat template has 2000000 characters"),
        ("{% if x", "TemplateSyntaxError"),
        (b"\xff", "the chat template isn't UTF-8 text"),
    ],
)
def test_a_template_that_can_t_be_used_is_left_out_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, template: str | bytes, reason: str
) -> None:
    found = read(small(chat_template=template), tmp_path, 300)
    assert (found.info.chat_template, "chat_template.jinja" in found.blobs) == (None, False)
    assert reason in caplog.text
    assert "give another with --chat-template FILE" in caplog.text


def test_a_template_for_tools_comes_beside_the_default_one(tmp_path: Path) -> None:
    made = small(chat_template="plain\n", **{"chat_template.tool_use": "\ntooled {{ tools }}\n"})
    source = read(made, tmp_path, 300).blobs["chat_template.jinja"].decode()
    template = ChatTemplate(source)
    assert template.render([]) == "plain"
    assert template._render([], {"tools": ["a"]}, False) == "\ntooled ['a']"
    # One of the two is enough, and the other needn't be one that can be used.
    made = small(chat_template="plain", **{"chat_template.tool_use": "{% if tools"})
    assert read(made, tmp_path, 300).blobs["chat_template.jinja"] == b"plain"


def test_more_tokens_than_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has 261 tokens and an embedding of 260"):
        read(small(eot_token_id=None), tmp_path, 260)
    assert read(small(), tmp_path, 261).info.kind == "tokenizers"


def test_without_a_tokenizer_there_are_token_ids(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = read(header(eos_token_id=5, chat_template="x"), tmp_path, 300)
    assert "m.gguf has no tokenizer" in caplog.text
    assert found.info == TokenizerInfo(None, None, (5,), False, "chat_template.jinja")


def test_a_tokenizer_json_beside_the_file_is_preferred(tmp_path: Path) -> None:
    own = byte_level("<bos>")
    own.save(str(tmp_path / "tokenizer.json"))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = small(tokens=alphabet, token_type=[1] * 256, pre="wrong", chat_template="{{ own }}")
    found = read(made, tmp_path, 300)
    assert found.blobs["tokenizer.json"] == (tmp_path / "tokenizer.json").read_bytes()
    assert found.info == TokenizerInfo("tokenizers", 257, (258, 259), True, "chat_template.jinja")
    assert found.blobs["chat_template.jinja"] == b"{{ own }}"
    write_json(tmp_path / "tokenizer_config.json", bos_token="<bos>", chat_template="{{ beside }}")
    found = read(made, tmp_path, 300)
    assert (found.info.bos_id, found.blobs["chat_template.jinja"]) == (256, b"{{ beside }}")
    # The file's own needn't be one that can be used.
    made = small(tokens=alphabet, token_type=[1] * 256, pre="wrong", chat_template="{% if own")
    assert read(made, tmp_path, 300).blobs["chat_template.jinja"] == b"{{ beside }}"
    with pytest.raises(CheckpointError, match=r"beside m\.gguf gives .* the id 255, and the file 0; it"):
        read(small(tokens=alphabet[-1:] + alphabet[:-1], token_type=[1] * 256), tmp_path, 300)
