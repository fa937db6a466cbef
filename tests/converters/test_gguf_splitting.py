"""Every way of splitting texts that llama.cpp has a name for: its ids, and a regular expression library's
parts."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Library

from ondevice.converters.checkpoints.gguf_splitting import SPLITTINGS, Splitting
from ondevice.tokenizer.base import byte_letters
from tests.converters.test_gguf_tokenizer import HOSTILE, header, loaded, read
from tests.support.llama_cpp_vocab import ids_of, llama_cpp_vocab, write_vocab

TEXTS = (
    *HOSTILE,
    "def f(x):\n\treturn x ** 2 - 10**-3  # ok\r\n\r\n    if (a&&b) { x+=1; }   \n\n\n   ",
    "KAŻDY Łoś'LL użyje 12345 €; ǅ Straße'S won't I'M she'D y'all've 'tables d'Maison 'REAL 'llama",
    "עברית 123 ١٢٣٤٥ हिन्दी में १२३४ ไทย ๑๒๓ 日本語カタカナひらがな漢字 한국어 12가나다",
    "Привет, мир! Ёлка 2024-11-28T19:00 CamelCaseWords HTTPServer iPhone7S",
    "<sentinel:12> IMGIMGABCDZ [x]  (y) a|b /path/to/file.txt\n//comment\n/",
    "a  b   c    d     e" + " " * 20 + "f  \n  g\n\n\n  h   ",
    "1 12 123 1234 12345 123456 1234567 0.123456 x1234567y 12\n345",
    "🙂👍🏽 family 👨‍👩‍👧 flags 🇩🇪 中文English混排123,。！",  # noqa: RUF001 - wide marks are meant
    "éé e\u0301\u0301 n\u0303o\u0308x \u00f1and\u00fa \ufb01 \u00bd \u2167",
    "…—“quoted” ‘x’ ㄅㄆㄇ ㄱㄴ 가 ！：； ॐ।۔،",  # noqa: RUF001 - marks of many scripts are meant
    "a\tb\x0bc\x0cd\u3000f\n\n",
    "",
    " ",
    "\n",
)
LIKE_ITS_MODEL = {
    "falcon": "numbers stand apart from the space before them",
    "tekken": "marks belong to the letters before them, and capitals begin words in all scripts",
    "gpt-4o": "as in tekken",
    "granite-embed-multi-97m": "capitals of all scripts",
    "youtu": "capitals begin words",
    "kimi-k2": "as in tekken",
    "tiny_aya": "numbers that letters follow",
    "qwen2": "texts are composed first",
    "qwen35": "texts are composed first",
    "deepseek-llm": "wide spaces are spaces",
    "deepseek-coder": "wide spaces are spaces",
    "afmoe": "spaces before numbers",
    "superbpe": "digits of all scripts",
}
"""Names by which models' own `tokenizer.json` splits otherwise than llama.cpp, and where. They, and others of
the same rule, are held to their own pattern."""
ORIGINALS = {
    "youtu": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll"
        r"|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve"
        r"|'m|'ll|'d)?|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "kimi-k2": (
        r"\p{Han}+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^"
        r"\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}"
        r"]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}"
        r"]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
"""Patterns of models that llama.cpp approximates and `transformers` doesn't know."""
RECORDED = {
    name: digest
    for digest, names in (
        ("d994a2f373dfbac1", "gpt-2 phi-2 gigachat a.x-4.0 mellum modern-bert roberta-bpe"),
        ("d994a2f373dfbac1", "jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code mpt"),
        ("d994a2f373dfbac1", "olmo jais trillion granite-docling exaone4"),
        ("df956f3b1f784d8a", "chatglm-bpe dbrx smaug-bpe"),
        ("57bd79914331fc92", "glm4 glm5 llama-bpe llama3 llama-v3 lfm2 falcon3"),
        ("57bd79914331fc92", "falcon-h1 pixtral midm-2.0 jina-v5-nano"),
        ("2b5f449222873015", "jais-2"),
        ("8706364ffac496cf", "minicpm5"),
        ("ab852b55111b1da2", "stablelm2 deepseek-r1-qwen kormo f2llmv2 megrez hunyuan solar-open"),
        ("ab852b55111b1da2", "grok-2 bailingmoe bailingmoe2 llada-moe"),
        ("27437ffc0c4b543d", "ufakzeka"),
        ("782464a1ce48e5c5", "laguna"),
        ("b602c5adff866b61", "seed-coder"),
        ("18496ddfe94b95b9", "exaone-moe"),
        ("f7787afeebb584b7", "deepseek-v3 hunyuan-dense joyai-llm hy_v4"),
        ("0124d255fb886b22", "spark2_5"),
        ("cb6cdaacfeb15017", "smollm starcoder refact command-r codeshell exaone minerva-7b"),
        ("cb6cdaacfeb15017", "mellum2"),
        ("73c411bc3e51350e", "poro-chat bloom gpt3-finnish"),
        ("b18d67b30569dad5", "viking"),
        ("6776f66c2c5cf0d9", "chameleon"),
        ("9e13f609d341852c", "default"),
    )
    for name in names.split()
}
"""Digests of the ids that llama.cpp 0.3.36 (its Python package's version) gives TEXTS, by name."""
RULES = {rule: name for name, rule in reversed(SPLITTINGS.items())}
"""A name of each rule."""


@cache
def vocabulary() -> dict[str, Any]:
    """Metadata of a vocabulary in which any two or three bytes of TEXTS may merge, so that ids tell parts."""
    spelt = byte_letters()
    pairs, triples = set(), set()
    for text in TEXTS:
        line = "".join(spelt[byte] for byte in text.encode())
        pairs |= set(pairwise(line))
        triples |= {(line[at : at + 2], line[at + 2]) for at in range(len(line) - 2)}
    ordered = [sorted(pairs), sorted(triples)]
    for merges in ordered:
        random.Random(0).shuffle(merges)
    made = {a + b: f"{a} {b}" for merges in ordered for a, b in merges}
    tokens = [*sorted(spelt), *made]
    kinds = [1] * len(tokens)
    return {"model": "gpt2", "tokens": tokens, "token_type": kinds, "merges": list(made.values()),
            "eos_token_id": 0, "add_bos_token": False}  # fmt: skip


@cache
def ids(rule: Splitting, folder: Path) -> list[list[int]]:
    """Our ids of TEXTS by a rule."""
    values = vocabulary()
    count = len(values["tokens"])
    mine = loaded(read(header(**values, pre=RULES[rule]), folder, count), count)
    return [mine.encode(text) for text in TEXTS]


def digest(found: list[list[int]]) -> str:
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()[:16]


def like_llama_cpp() -> Iterator[str]:
    """Names that llama.cpp splits by as their models do."""
    others = {SPLITTINGS[name] for name in LIKE_ITS_MODEL}
    return (name for name, rule in SPLITTINGS.items() if rule not in others)


def test_ids_are_those_that_llama_cpp_gave(tmp_path: Path) -> None:
    assert set(RECORDED) == set(like_llama_cpp())
    for name, recorded in RECORDED.items():
        assert digest(ids(SPLITTINGS[name], tmp_path)) == recorded, name


@pytest.mark.slow
def test_ids_are_those_that_llama_cpp_gives(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    for name in like_llama_cpp():
        write_vocab(tmp_path / "vocab.gguf", vocabulary() | {"pre": name})
        with llama_cpp_vocab(tmp_path / "vocab.gguf") as vocab:
            expected = ids_of(vocab, TEXTS)
        for text, mine, theirs in zip(TEXTS, ids(SPLITTINGS[name], tmp_path), expected, strict=True):
            assert mine == theirs, (name, text)
        assert digest(expected) == RECORDED[name], name


def parts_by_regex(rule: Splitting, text: str) -> list[str]:
    """The parts of a text by the patterns of a rule, one after the other, as the library `regex` has them."""
    regex = pytest.importorskip("regex")
    parts = [text]
    for pattern in (*rule.first, *([] if rule.pattern is None else [rule.pattern])):
        compiled, before, parts = regex.compile(pattern, regex.VERSION1), parts, []
        for part in before:
            at = 0
            for match in compiled.finditer(part):
                parts += [part[at : match.start()], match[0]]
                at = match.end()
            parts.append(part[at:])
        parts = [part for part in parts if part]
    return parts


@pytest.mark.parametrize("name", [name for rule, name in RULES.items() if rule.pattern is not None])
def test_parts_are_those_of_another_engine(name: str) -> None:
    """Oniguruma, which splits here, against `regex`."""
    rule = SPLITTINGS[name]
    splitting = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [],
                 "normalizer": None, "pre_tokenizer": rule.pre_tokenizer, "post_processor": None,
                 "decoder": None, "model": {"type": "BPE", "vocab": {}, "merges": []}}  # fmt: skip
    splitter = Library.from_str(json.dumps(splitting)).pre_tokenizer
    alphabet = {letter: byte for byte, letter in enumerate(byte_letters())}
    for text in TEXTS:
        if name == "tiny_aya" and "²" in text:
            continue  # Engines differ in whether it is part of a word.
        spelt = [part for part, _ in splitter.pre_tokenize_str(text)]
        found = [bytes(alphabet[character] for character in part).decode() for part in spelt]
        assert found == parts_by_regex(rule, text), text


def test_patterns_that_llama_cpp_approximates_are_the_models_own() -> None:
    mapping = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    known = mapping.GGUF_PRE_TOKENIZER_SPLITS | ORIGINALS
    for name in ("tekken", "gpt-4o", "youtu", "kimi-k2", "qwen2", "qwen35"):
        assert SPLITTINGS[name].pattern == known[name], name
    assert SPLITTINGS["tiny_aya"] == Splitting(known["gpt-4o"], (r"\d{1,3}(?=(?:\d{3})*\b)",))
    # Others that `transformers` knows by the same names.
    for name in known.keys() - ORIGINALS.keys():
        assert SPLITTINGS[name].pattern == known[name], name


@pytest.mark.parametrize("count", [1, 2, 3, 4, 6, 7, 10])
def test_numbers_are_cut_into_threes_from_the_right(count: int) -> None:
    for name in ("superbpe", "afmoe", "tiny_aya"):
        digits = "1234567890"[:count]
        parts = parts_by_regex(SPLITTINGS[name], f"a {digits} b")
        numbers = [part for part in parts if part.isdecimal()]
        first = count % 3 or 3
        assert numbers == [digits[:first], *(digits[at : at + 3] for at in range(first, count, 3))]
