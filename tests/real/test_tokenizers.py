"""Tokenizers and templates of the real models' GGUF files: llama.cpp's ids, ends and texts."""

from __future__ import annotations

import unicodedata
from contextlib import closing
from pathlib import Path

import pytest

from ondevice.chat_template import ChatTemplate
from ondevice.converters.checkpoints.base import Checkpoint
from ondevice.converters.checkpoints.opening import open_checkpoint
from ondevice.tokenizer import Tokenizer, load_tokenizer
from tests.converters.test_gguf_splitting import TEXTS
from tests.converters.test_gguf_tokenizer import texts
from tests.support.llama_cpp_vocab import LlamaCppVocab, llama_cpp_vocab
from tests.support.real_models import real_model

pytestmark = pytest.mark.real

LARGER = ("gemma3-270m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b")
NAMES = ("smollm2", *(pytest.param(name, marks=pytest.mark.slow) for name in LARGER))
CHAT = [
    {"role": "system", "content": "Be  brief.\n"},
    {"role": "user", "content": "What's 2+2 ?"},
    {"role": "assistant", "content": "4 "},
    {"role": "user", "content": "und jetzt?\n\nЁ"},
]


def tokenizer_of(checkpoint: Checkpoint) -> Tokenizer:
    info = checkpoint.tokenizer.info
    assert info.kind is not None
    assert info.file is not None
    rows = checkpoint.config.vocab_size
    data = checkpoint.tokenizer.blobs[info.file]
    return load_tokenizer(info.kind, data, info.bos_id, info.eos_ids, info.add_bos, vocab_size=rows)


def assert_same_ids(mine: Tokenizer, theirs: LlamaCppVocab, corpus: Path, composes: bool) -> None:
    """Ids of 200 texts, with and without a BOS and special tokens, and what their tokens stand for."""
    line = corpus.read_text(encoding="utf-8")
    # `</s>` in a text is a tag of HTML here, and a control token there.
    plain = [text for text in (*TEXTS, *texts(120)) if "</s>" not in text]
    found = [*plain, *(line[at : at + 300] for at in range(0, 30_000, 600))]
    names = [name for name in mine.special_tokens if name]
    found += [f"{line[at : at + 20]}{name} {line[at : at + 9]}" for at, name in enumerate(names[:40])]
    assert len(found) >= 200
    for text in found:
        asked = unicodedata.normalize("NFC", text) if composes else text
        for special in (False, True):
            ids = mine.encode(asked, special=special)
            assert ids == theirs.encode(asked, bos=True, special=special), (asked, special)
        for token in ids:
            assert token in mine.eos_ids or mine.token_bytes(token) == theirs.token_bytes(token)


@pytest.mark.parametrize("name", NAMES)
def test_a_real_file_has_llama_cpps_ids_and_ends(shared_data: Path, name: str) -> None:
    path = real_model(name)
    with closing(open_checkpoint(path)) as checkpoint, llama_cpp_vocab(path) as theirs:
        mine = tokenizer_of(checkpoint)
        # There `</s>` ends a text too, which in these vocabularies is a tag of HTML.
        tag = {token for token in theirs.ends() if mine.piece(token) == "</s>"} - set(mine.eos_ids)
        assert set(mine.eos_ids) == theirs.ends() - tag
        if mine.add_bos:
            assert mine.bos_id == theirs.bos
        corpus = shared_data / "corpus" / "wikitext2" / "valid.txt"
        assert_same_ids(mine, theirs, corpus, "qwen" in name)


@pytest.mark.parametrize("name", NAMES)
def test_a_real_files_chat_is_llama_cpps(name: str) -> None:
    """By its template, as Jinja renders it, and with no BOS but the template's own."""
    jinja = pytest.importorskip("llama_cpp.llama_chat_format")
    path = real_model(name)
    with closing(open_checkpoint(path)) as checkpoint, llama_cpp_vocab(path) as theirs:
        blobs, mine = checkpoint.tokenizer.blobs, tokenizer_of(checkpoint)
        if "chat_template.jinja" not in blobs:
            pytest.skip(f"{name} has no chat template: it is a base model")
        source = blobs["chat_template.jinja"]
        eos, bos = mine.piece(mine.eos_ids[0]), "" if mine.bos_id is None else mine.piece(mine.bos_id)
        formatter = jinja.Jinja2ChatFormatter(source.decode(), eos, bos)
        prompt = formatter(messages=CHAT).prompt
        assert ChatTemplate.load(source, mine).encode(CHAT, mine) == theirs.encode(prompt, special=True)
