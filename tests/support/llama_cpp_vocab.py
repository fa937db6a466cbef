"""Vocabularies in GGUF files, and llama.cpp as their oracle: it tokenises, spells and ends texts by them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


def write_vocab(path: Path, values: dict[str, Any]) -> None:
    """Write a GGUF file without tensors. values: of metadata, by keys without `tokenizer.ggml.`."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in values.items():
        if key == "chat_template":
            writer.add_chat_template(value)
            continue
        name = f"tokenizer.ggml.{key}"
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        else:
            writer.add_string(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


class LlamaCppVocab:
    """A vocabulary of llama.cpp."""

    def __init__(self, library: Any, vocab: Any) -> None:
        self._library, self._vocab = library, vocab

    @property
    def size(self) -> int:
        size: int = self._library.llama_vocab_n_tokens(self._vocab)
        return size

    def encode(self, text: str, *, bos: bool = False, special: bool = False) -> list[int]:
        data = text.encode()
        room = len(data) + 8
        ids = (ctypes.c_int32 * room)()
        count = self._library.llama_tokenize(self._vocab, data, len(data), ids, room, bos, special)
        assert count >= 0
        return list(ids[:count])

    def token_bytes(self, token: int) -> bytes:
        """What a token adds to a text, without special tokens."""
        room = ctypes.create_string_buffer(4096)
        count = self._library.llama_token_to_piece(self._vocab, token, room, 4096, 0, False)
        assert count >= 0
        return room.raw[:count]

    def ends(self) -> set[int]:
        """Ids that end a text or a turn."""
        return {i for i in range(self.size) if self._library.llama_vocab_is_eog(self._vocab, i)}

    @property
    def bos(self) -> int:
        token: int = self._library.llama_vocab_bos(self._vocab)
        return token


@contextmanager
def llama_cpp_vocab(path: Path) -> Iterator[LlamaCppVocab]:
    """The vocabulary of a GGUF file, as llama.cpp reads it. Skips the test without llama.cpp."""
    library = pytest.importorskip("llama_cpp")
    silent = library.llama_log_callback(lambda level, text, data: None)
    library.llama_log_set(silent, ctypes.c_void_p(0))
    options = library.llama_model_default_params()
    options.vocab_only = True
    model = library.llama_model_load_from_file(str(path).encode(), options)
    assert model, f"llama.cpp doesn't load {path.name}"
    try:
        yield LlamaCppVocab(library, library.llama_model_get_vocab(model))
    finally:
        library.llama_model_free(model)


def ids_of(vocab: LlamaCppVocab, texts: Sequence[str]) -> list[list[int]]:
    return [vocab.encode(text) for text in texts]
