"""Types of tokens in GGUF files, and the ends of turns: what llama.cpp makes of the same vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import pre_tokenizers

from ondevice.converters.checkpoints.end_tokens import ENDS, FILE_ENDS, MIDDLE_MARKS, PLAIN_ENDS
from ondevice.errors import CheckpointError
from ondevice.tokenizer import Tokenizer
from ondevice.tokenizer.infill import InfillTokens
from tests.converters.test_gguf_tokenizer import header, loaded, read
from tests.support.llama_cpp_vocab import llama_cpp_vocab, write_vocab

UNDEFINED, NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(7)
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
CHANNELS = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"]


def byte_level(*marks: tuple[str, int], **changes: Any) -> dict[str, Any]:
    """Metadata of a byte-level vocabulary with `marks`, texts and types, from id 257 on."""
    tokens, kinds = [*BYTES, "he", *(text for text, _ in marks)], [kind for _, kind in marks]
    values = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "token_type": [NORMAL] * 257 + kinds}
    return {**values, "merges": ["h e"], "eos_token_id": 0, "bos_token_id": 0, **changes}


def spelt(*marks: tuple[str, int], **changes: Any) -> dict[str, Any]:
    """Metadata of a sentencepiece vocabulary with `marks` from id 263 on."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a"]
    kinds = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * 4 + [kind for _, kind in marks]
    scores = [0.0] * 259 + [-1.0, -2.0, -3.0, -4.0] + [-5.0] * len(marks)
    values = {"model": "llama", "tokens": tokens + [text for text, _ in marks], "token_type": kinds}
    return {**values, "scores": scores, "bos_token_id": 1, "eos_token_id": 2, **changes}


def opened(values: dict[str, Any], folder: Path) -> tuple[Tokenizer, tuple[int, ...]]:
    rows = len(values["tokens"]) + 3
    found = read(header(**values), folder, rows)
    return loaded(found, rows), found.info.eos_ids


def assert_like_llama_cpp(values: dict[str, Any], folder: Path, *texts: str) -> None:
    """The same ends, the same bytes of every token but ends, and the same ids of texts, with and without
    special tokens."""
    pytest.importorskip("llama_cpp")
    mine, ends = opened(values, folder)
    write_vocab(folder / "vocab.gguf", values)
    with llama_cpp_vocab(folder / "vocab.gguf") as theirs:
        assert set(ends) == theirs.ends()
        for token in set(range(theirs.size)) - set(ends):
            assert mine.token_bytes(token) == theirs.token_bytes(token), mine.piece(token)
        for text in texts:
            for special in (False, True):
                found = mine.encode(text, add_bos=False, special=special)
                assert found == theirs.encode(text, special=special), (text, special)


@pytest.mark.fast("*-1", "*_end*-3", "*im_end*")
@pytest.mark.parametrize("kind", [NORMAL, CONTROL, USER_DEFINED, UNUSED])
@pytest.mark.parametrize("name", sorted(ENDS | FILE_ENDS))
def test_a_token_of_an_ends_name_ends_a_turn(tmp_path: Path, name: str, kind: int) -> None:
    """Whatever type the file gives it; it is no text either, and a template's text becomes it."""
    mine, ends = opened(byte_level((name, kind)), tmp_path)
    assert ends == (0, 257)
    assert mine.encode(f"he{name}", special=True) == [256, 257]
    assert 257 not in mine.encode(f"he{name}")
    assert mine.decode(mine.encode(f"he{name}")) == f"he{name}"
    assert mine.decode([256, 257]) == "he"
    mine, ends = opened(spelt((name, kind)), tmp_path)
    assert ends == (2, 263)
    assert mine.encode(f"a{name}", special=True, add_bos=False) == [262, 263]
    assert 263 not in mine.encode(f"a{name}")
    assert mine.decode([262, 263]) == "a"


@pytest.mark.parametrize("name", sorted(PLAIN_ENDS))
def test_a_name_that_may_be_text_ends_a_turn_if_a_template_or_its_type_says_so(
    tmp_path: Path, name: str
) -> None:
    for kind in (NORMAL, USER_DEFINED):
        made = byte_level((name, kind), chat_template="{{ messages }}")
        assert opened(made, tmp_path)[1] == (0,)
        made["chat_template"] = "{{ messages[0].content + '" + name + "' }}"
        assert opened(made, tmp_path)[1] == (0, 257)
    assert opened(byte_level((name, CONTROL)), tmp_path)[1] == (0, 257)


@pytest.mark.parametrize("name", sorted(MIDDLE_MARKS))
def test_marks_around_a_middle_steer_whatever_their_type(tmp_path: Path, name: str) -> None:
    mine, ends = opened(byte_level((name, USER_DEFINED)), tmp_path)
    assert ends == (0,)
    assert mine.encode(name, special=True) == [257]
    assert 257 not in mine.encode(name)


@pytest.mark.parametrize("key", ["eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep"])
def test_a_token_that_a_key_names_ends_a_turn(tmp_path: Path, key: str) -> None:
    made = byte_level(("<mark>", NORMAL), **{f"{key}_token_id": 257})
    assert 257 in opened(made, tmp_path)[1]


MARKS = {"fim_pre": "<a>", "fim_suf": "<b>", "fim_mid": "<c>", "fim_rep": "<d>", "fim_sep": "<e>"}


def test_marks_of_a_middle_may_be_named_by_keys(tmp_path: Path) -> None:
    keys = {f"{key}_token_id": 257 + at for at, key in enumerate((*MARKS, "fim_pad"))}
    made = byte_level(*((name, NORMAL) for name in (*MARKS.values(), "<f>")), **keys)
    rows = len(made["tokens"])
    found = read(header(**made), tmp_path, rows)
    marks = found.info.infill
    assert marks == InfillTokens(257, 258, 259, 260, 261, tuple(range(257, 263)))
    mine = loaded(found, rows)
    assert marks.prompt(mine, "he", "<c>")[:3] == [257, 256, 258]
    assert 259 not in mine.encode("<c>")
    del made["fim_mid_token_id"]
    assert read(header(**made), tmp_path, rows).info.infill is None
    # Known names tell more than keys do: Codestral's suffix comes first.
    known = byte_level(("[PREFIX]", CONTROL), ("[SUFFIX]", CONTROL), ("[MIDDLE]", CONTROL))
    known |= {"fim_pre_token_id": 257, "fim_suf_token_id": 258, "fim_mid_token_id": 259}
    assert read(header(**known), tmp_path, rows).info.infill is None
    with pytest.raises(CheckpointError, match="fim_suf_token_id"):
        read(header(**made | {"fim_suf_token_id": 10**6}), tmp_path, rows)


def test_byte_level_types_are_like_llama_cpps(tmp_path: Path) -> None:
    marks = [("<unk>", UNKNOWN), ("<think>", USER_DEFINED), ("<|im_end|>", NORMAL), ("<c>", CONTROL)]
    marks += [("[PAD9]", UNUSED), ("hehe", UNUSED), ("[later]", USER_DEFINED), ("<|fim_prefix|>", NORMAL)]
    made = byte_level(*marks, merges=["h e"])
    texts = ("<unk> a<think>b<|im_end|>[PAD9]", "hehe<c>[later]", "<|fim_prefix|>he")
    mine, _ = opened(made, tmp_path)
    assert mine.decode([257, 258, 260, 261, 262, 256]) == "<think>he"
    assert_like_llama_cpp(made, tmp_path, *texts)


def test_sentencepiece_types_are_like_llama_cpps(tmp_path: Path) -> None:
    """But for a text after a user-defined piece, which gets a space there, and for `<unk>` in a template."""
    marks = [("<u>", USER_DEFINED), ("[PAD9]", UNUSED), ("<end_of_turn>", NORMAL), ("<c>", CONTROL)]
    marks += [("  ", USER_DEFINED), ("<|file_sep|>", USER_DEFINED)]
    made = spelt(*marks)
    mine, _ = opened(made, tmp_path)
    assert mine.decode([0, 264, 260, 12, 261]) == "a\tb"
    assert_like_llama_cpp(made, tmp_path, "a b<u>", "a<end_of_turn>b<c>", "[PAD9] é")


def test_an_unused_piece_is_never_produced(tmp_path: Path) -> None:
    """As in sentencepiece; llama.cpp merges to it."""
    made = spelt(("ab", UNUSED))
    mine, _ = opened(made, tmp_path)
    assert mine.encode("ab", add_bos=False) == [262, 261]
    made = byte_level(("hehe", UNUSED), merges=["h e", "he he"], pre="llama-bpe")
    assert opened(made, tmp_path)[0].encode("hehe", add_bos=False) == [256, 256]


def test_an_undefined_type_only_fills_an_id(tmp_path: Path) -> None:
    made = byte_level(("odd", UNDEFINED), ("<c>", CONTROL))
    mine, _ = opened(made, tmp_path)
    assert mine.decode([257]) == ""
    assert_like_llama_cpp(made, tmp_path, "odd")


def test_messages_that_others_may_follow(tmp_path: Path) -> None:
    for names, count in ((CHANNELS, 2), (["<|end|>", "<|flush|>", "<|calls|>"], 2), (["<|end|>"], 1)):
        made = byte_level(*((name, CONTROL) for name in names))
        ends = opened(made, tmp_path)[1]
        assert len(ends) == 1 + count
        write_vocab(tmp_path / "vocab.gguf", made)
        with llama_cpp_vocab(tmp_path / "vocab.gguf") as theirs:
            assert set(ends) == theirs.ends()


def test_a_file_without_ids_of_ends_has_llamas(tmp_path: Path) -> None:
    made = spelt()
    del made["bos_token_id"], made["eos_token_id"]
    found = read(header(**made), tmp_path, 300)
    assert (found.info.bos_id, found.info.eos_ids, found.info.add_bos) == (1, (2,), True)
    assert_like_llama_cpp(made, tmp_path, "a b")


def test_gemma4_begins_with_a_bos_whatever_a_file_says(tmp_path: Path) -> None:
    """Early files say that it doesn't, and llama.cpp doesn't believe them."""
    tokens = ["<pad>", "<eos>", "<bos>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefgh"]
    made = {"model": "gemma4", "tokens": tokens, "token_type": [CONTROL] * 3 + [NORMAL] * 265,
            "merges": [], "bos_token_id": 2, "eos_token_id": 1, "add_bos_token": False}  # fmt: skip
    assert read(header(**made), tmp_path, 300).info.add_bos


def test_sarvams_merges_are_spelt_as_sentencepieces_pieces(tmp_path: Path) -> None:
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\n"]
    tokens += [*"▁abcde", "ab", "▁c", "abc", "▁▁", "<turn|>"]
    kinds = [CONTROL] * 3 + [UNKNOWN] + [BYTE] * 256 + [NORMAL] * 11 + [USER_DEFINED]
    made = {"model": "gpt2", "pre": "sarvam-moe", "tokens": tokens, "token_type": kinds,
            "merges": ["a b", "▁ c", "ab c", "▁ ▁"], "bos_token_id": 2, "eos_token_id": 1}  # fmt: skip
    assert not read(header(**made), tmp_path, 300).info.add_bos
    assert_like_llama_cpp(made, tmp_path, "abc abc  c", "a\nb é", "ab<turn|>c")


def test_a_file_that_says_nothing_of_its_splitting_is_split_the_usual_way(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = byte_level()
    del made["pre"]
    mine, _ = opened(made, tmp_path)
    assert "vocab" not in caplog.text
    assert "m.gguf doesn't say how text is split" in caplog.text
    assert mine.encode("he") == [256]
    assert_like_llama_cpp(made, tmp_path, "he said: 1234 (he)")
