"""`tokenizer.json`: Hugging Face's file, read by their `tokenizers` library."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

from ondevice.errors import BundleError, UnsupportedModelError
from ondevice.tokenizer.base import (
    SPACE_MARK,
    LeadingSpace,
    LibraryErrors,
    Vocabulary,
    byte_of,
    valid_unicode,
)

_MAX_NORMALIZER_GROWTH = 16
_PLAIN_NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Strip", "StripAccents"}


class HuggingFaceTokenizer(Vocabulary):
    """A `tokenizer.json`: byte-level BPE (GPT-2, Qwen, Llama 3), or sentencepiece-like BPE (Llama 2).

    Truncation, padding and dropout settings in the file are switched off: a prompt is encoded whole, and
    always the same way. Its post-processor isn't used; `add_bos` says what begins a text.
    """

    def __init__(self, data: bytes, bos_id: int | None, eos_ids: tuple[int, ...], add_bos: bool) -> None:
        import tokenizers

        super().__init__(bos_id, eos_ids, add_bos)
        with LibraryErrors("tokenizer.json"):
            self._library = library = tokenizers.Tokenizer.from_str(data.decode("utf-8"))
            library.no_truncation()
            library.no_padding()
            self.vocab_size = library.get_vocab_size(with_added_tokens=True)
            added = library.get_added_tokens_decoder()
            # An end of text that isn't marked special would be recognised in a user's text.
            unmarked = [added[i].content for i in self._ends if i in added and not added[i].special]
            library.add_special_tokens([tokenizers.AddedToken(name, special=True) for name in unmarked])
            self._check_model(library)
            _check_normalizer(_state(library.normalizer))
            self._byte_level, self.leading_space = _decoding_rules(_state(library.decoder))
        self._silent = self._ends | {i for i, token in added.items() if token.special}
        self.special_tokens = {name: i for i in self._silent if (name := self.piece(i))}
        self._added = {i: token.content.encode() for i, token in added.items()}
        self._alphabet = _byte_level_alphabet()
        self._lock = threading.Lock()

    def encode(self, text: str, *, add_bos: bool | None = None, special: bool = False) -> list[int]:
        text = valid_unicode(text)
        # Whether names of special tokens count is a switch of the shared object, hence the lock.
        with self._lock, LibraryErrors("tokenizer.json"):
            self._library.encode_special_tokens = not special
            ids: list[int] = self._library.encode(text, add_special_tokens=False).ids
        return self._finished(ids, add_bos)

    def piece(self, token: int) -> str:
        name = self._library.id_to_token(token) if 0 <= token < 1 << 32 else None
        return name if name is not None else ""

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

    def _check_model(self, library: Any) -> None:
        model = library.model
        if type(model).__name__ != "BPE":
            raise UnsupportedModelError(f"tokenizer model {type(model).__name__} isn't supported; BPE is")
        if model.continuing_subword_prefix or model.end_of_word_suffix:
            raise UnsupportedModelError("tokenizers with subword prefixes or word suffixes aren't supported")
        model.dropout = None


def _state(component: Any) -> dict[str, Any]:
    """A component of a `tokenizer.json` as its own JSON object, without the vocabulary around it."""
    return {} if component is None else dict(json.loads(component.__getstate__()))


def _flattened(state: dict[str, Any], key: str) -> Iterator[dict[str, Any]]:
    if state.get("type") == "Sequence":
        for inner in state[key]:
            yield from _flattened(inner, key)
    elif state:
        yield state


def _check_normalizer(state: dict[str, Any]) -> None:
    """Raises BundleError where replacements could multiply a text without bound."""
    growth = 1
    for part in _flattened(state, "normalizers"):
        if part["type"] == "Replace":
            growth *= max(1, len(part["content"]))
        elif part["type"] == "Prepend":
            growth += len(part["prepend"])
        elif part["type"] not in _PLAIN_NORMALIZERS:
            raise UnsupportedModelError(f"tokenizer normalizer {part['type']} isn't supported")
        if growth > _MAX_NORMALIZER_GROWTH:
            raise BundleError(
                f"the tokenizer's replacements make text {growth} times longer; "
                f"{_MAX_NORMALIZER_GROWTH} times is the limit"
            )


def _decoding_rules(state: dict[str, Any]) -> tuple[bool, LeadingSpace]:
    """Whether pieces are spelt in GPT-2's byte alphabet, and the leading-space rule."""
    parts = list(_flattened(state, "decoders"))
    kinds = {part["type"] for part in parts}
    if kinds == {"ByteLevel"}:
        return True, "keep"
    if kinds and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        replaced = [(part["pattern"], part["content"]) for part in parts if part["type"] == "Replace"]
        strips = [(p["content"], p["start"], p["stop"]) for p in parts if p["type"] == "Strip"]
        spaces = [p["replacement"] for p in parts if p["type"] == "Metaspace"]
        marks = all(rule == ({"String": SPACE_MARK}, " ") for rule in replaced) and spaces in (
            [],
            [SPACE_MARK],
        )
        if marks and strips in ([], [(" ", 1, 0)]) and (replaced or spaces):
            dropping = bool(strips) or any(p.get("prepend_scheme") in ("always", "first") for p in parts)
            return False, "one" if dropping else "keep"
    raise UnsupportedModelError(f"tokenizer decoder {json.dumps(state)[:200]} isn't supported")


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 stands for itself, the rest for U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + i): byte for i, byte in enumerate(others)}
