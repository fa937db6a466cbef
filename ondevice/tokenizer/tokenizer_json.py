"""`tokenizer.json`: Hugging Face's file. Its vetted parts are used with their `tokenizers` library."""

from __future__ import annotations

import json
import threading
import unicodedata
from typing import Any

from ondevice.errors import BundleError
from ondevice.tokenizer.base import (
    SPACE_MARK,
    Vocabulary,
    byte_letters,
    byte_of,
    library_errors,
    valid_unicode,
)
from ondevice.tokenizer.cutting import MAX_FORM_CHARS, MAX_PIECE_CHARS, Piece
from ondevice.tokenizer.tokenizer_file import Component, TokenizerFile, read_tokenizer_file


class HuggingFaceTokenizer(Vocabulary):
    """The tokenizer of a `tokenizer.json`: byte-level BPE (GPT-2, Qwen, Llama 3), or Llama 2's BPE.

    Llama 2's BPE is like sentencepiece's. The file's truncation, padding, dropout and post-processor are
    ignored: a text is encoded completely and always the same way, and `add_bos` decides how it begins.
    """

    def __init__(self, data: bytes, bos_id: int | None, eos_ids: tuple[int, ...], add_bos: bool) -> None:
        super().__init__(bos_id, eos_ids, add_bos)
        file = read_tokenizer_file(data)
        # An end of text that isn't marked special would otherwise be recognised in a user's text.
        special = {token.id for token in file.added if token.special} | self._ends
        self.leading_space, self._byte_level = file.leading_space, file.byte_level
        self._forms = file.forms
        self._added = {token.id: token.content.encode("utf-8", "replace") for token in file.added}
        self.vocab_size = 1 + max((*file.vocabulary.values(), *self._added), default=-1)
        with library_errors("tokenizer.json"):
            self._library = _library(file, special)
            self._components = {
                (first, last): _components(file.normalizer(first, last), file.pre_tokenizer(first))
                for first in (True, False)
                for last in (True, False)
            }
            _check_normalized(file, [normalizer for normalizer, _ in self._components.values()])
        self._silent = frozenset(special)
        self.special_tokens = {name: i for i in self._silent if (name := self.piece(i))}
        self._piece_chars = max(1, MAX_PIECE_CHARS // file.growth)
        self._alphabet = {letter: byte for byte, letter in enumerate(byte_letters())}
        self._used: tuple[bool, bool] | None = None
        self._lock = threading.Lock()

    def piece(self, token: int) -> str:
        name = self._library.id_to_token(token) if 0 <= token < 1 << 31 else None
        return name if name is not None else ""

    def token_id(self, name: str) -> int | None:
        token: int | None = self._library.token_to_id(valid_unicode(name))
        return token

    def token_bytes(self, token: int) -> bytes:
        if token in self._silent:
            return b""
        if token in self._added:
            return self._added[token]
        piece = self.piece(token)
        if self._byte_level:
            try:
                return bytes([self._alphabet[character] for character in piece])
            except KeyError:
                return piece.encode()
        return byte_of(piece) or piece.replace(SPACE_MARK, " ").encode()

    def begins_word(self, token: int) -> bool:
        return self.token_bytes(token).startswith(b" ")

    def _fits(self, text: str) -> bool:
        return text.isascii() or all(
            len(unicodedata.normalize(form, text)) <= MAX_FORM_CHARS for form in self._forms
        )

    def _encode_piece(self, piece: Piece, special: bool) -> list[int]:
        text = valid_unicode(piece.text)
        library, place = self._library, (piece.first, piece.last)
        # Threads share the library's object, whose state includes `encode_special_tokens` and the prefix.
        with self._lock, library_errors("tokenizer.json"):
            if self._used != place:
                library.normalizer, library.pre_tokenizer = self._components[place]
                self._used = place
            library.encode_special_tokens = not special
            ids: list[int] = library.encode(text, add_special_tokens=False).ids
        return ids


def _library(file: TokenizerFile, special: set[int]) -> Any:
    """The library's tokenizer for a vetted file, without normalizers and pre-tokenizers."""
    import tokenizers

    model = tokenizers.models.BPE(vocab=file.vocabulary, merges=file.merges, **file.options)
    library = tokenizers.Tokenizer(model)
    library.add_tokens(
        [
            tokenizers.AddedToken(
                token.content,
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=token.normalized and (token.special or token.id not in special),
                special=token.id in special,
            )
            for token in file.added
        ]
    )
    for token in file.added:
        # The library assigns ids itself.
        if library.token_to_id(token.content) != token.id:
            raise BundleError(
                f"tokenizer.json gives the added token {token.content!r:.60} the id {token.id}; as it "
                f"follows those before it, it is {library.token_to_id(token.content)}"
            )
    return library


def _check_normalized(file: TokenizerFile, normalizers: list[Any]) -> None:
    """Check normalizers with added tokens. Raises BundleError if one becomes the empty text, which would
    match everywhere.
    """
    for token in file.added:
        for normalizer in normalizers:
            if token.normalized and normalizer is not None and not normalizer.normalize_str(token.content):
                raise BundleError(
                    f"tokenizer.json normalises the added token {token.content!r:.60} to nothing"
                )


def _components(normalizer: Component | None, pre_tokenizer: Component | None) -> tuple[Any, Any]:
    """The library's objects for vetted components, made from a document that contains nothing else."""
    import tokenizers

    document: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": None,
        "model": {"type": "BPE", "vocab": {}, "merges": []},
    }
    read = tokenizers.Tokenizer.from_str(json.dumps(document))
    return read.normalizer, read.pre_tokenizer
