"""Converts text to token ids and back, with native code or the libraries that defined each format.

Native code reads `tokenizer.bin`, `sentencepiece` reads `tokenizer.model`, `tokenizers` reads
`tokenizer.json`. A library is imported only when a tokenizer is loaded. Tokenizer files are untrusted input:
an error inside a library becomes a BundleError.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from ondevice.errors import BundleError, UnsupportedModelError
from ondevice.tokenizer.base import MAX_SPECIAL_CHARS, LeadingSpace, StreamingDetokenizer, Tokenizer

if TYPE_CHECKING:
    from ondevice.tokenizer.byte_pairs import BytePairTokenizer
    from ondevice.tokenizer.piece_table import PieceTableTokenizer
    from ondevice.tokenizer.sentencepiece_model import SentencePieceTokenizer
    from ondevice.tokenizer.tokenizer_json import HuggingFaceTokenizer

__all__ = [
    "MAX_TOKENIZER_BYTES",
    "LeadingSpace",
    "StreamingDetokenizer",
    "Tokenizer",
    "import_library",
    "load_tokenizer",
    "loading_bytes",
]

MAX_TOKENIZER_BYTES = {"sentencepiece": 16 << 20, "tokenizers": 32 << 20, "byte_pairs": 64 << 20}
"""Largest file of each kind, which is read at once. A library takes several times that to parse it."""
_LIBRARIES = ("sentencepiece", "tokenizers")
"""Kinds of tokenizers that a library of the same name reads."""

LIBRARY_BYTES = 2 << 20
"""Memory that a library's first use takes: 1.3 MB to read the smallest file, 0.6 MB to encode."""


def import_library(kind: str) -> None:
    """Import the library of tokenizers of a kind, if it has one. It stays in the process."""
    if kind in _LIBRARIES:
        import_module(kind)


def loading_bytes(kind: str, parts: Iterable[bytes]) -> int:
    """An upper bound of the bytes that `load_tokenizer` takes for a file, including the file.

    parts: the file's bytes. The bound counts characters in the file that occur once for each item in memory.
    An entry of a JSON vocabulary takes 330 to 420 bytes, a merge 92 to 182, a character of added tokens 110,
    and a piece of sentencepiece, which begins with the byte of a line feed, 200 to 340.
    """
    size = keys = commas = line_feeds = 0
    start = b""
    for part in parts:
        start = start or part
        size += len(part)
        keys += part.count(b":")
        commas += part.count(b",")
        line_feeds += part.count(b"\n")
    if kind == "byte_pairs":
        from ondevice.tokenizer.byte_pairs import table_bytes

        return size + table_bytes(start)
    if kind == "sentencepiece":
        return LIBRARY_BYTES + 175 * line_feeds + 13 * size
    added = 110 * min(size, MAX_SPECIAL_CHARS)
    return LIBRARY_BYTES + 480 * keys + 190 * max(0, commas - keys) + 4 * size + added


def load_tokenizer(
    kind: str,
    data: bytes,
    bos_id: int | None,
    eos_ids: Sequence[int],
    add_bos: bool,
    *,
    vocab_size: int | None = None,
) -> Tokenizer:
    """A tokenizer from the bytes of its file.

    Raises BundleError for a damaged or hostile file and for ids outside the vocabulary,
    UnsupportedModelError for a tokenizer whose rules aren't implemented.

    Args:
        kind: `byte_pairs`, `sentencepiece` or `tokenizers`.
        data: the file's bytes.
        bos_id: id that begins a text, or None.
        eos_ids: ids that end a text.
        add_bos: whether `encode` begins with `bos_id` by default.
        vocab_size: rows of the model's embedding, which must cover every id.
    """
    if kind not in MAX_TOKENIZER_BYTES:
        raise UnsupportedModelError(f"tokenizer kind {kind!r} is not one of {', '.join(MAX_TOKENIZER_BYTES)}")
    if len(data) > MAX_TOKENIZER_BYTES[kind]:
        raise BundleError(f"tokenizer file has {len(data)} bytes; the limit is {MAX_TOKENIZER_BYTES[kind]}")
    tokenizer = _class_of(kind, data)(data, bos_id, tuple(eos_ids), add_bos)
    if vocab_size is not None:
        tokenizer.check_vocabulary(vocab_size)
    return tokenizer


def _class_of(
    kind: str, data: bytes
) -> type[BytePairTokenizer | PieceTableTokenizer | SentencePieceTokenizer | HuggingFaceTokenizer]:
    """The class that reads a file of this kind. It is imported only now."""
    if kind == "byte_pairs":
        from ondevice.tokenizer.byte_pairs import BytePairTokenizer, merges_characters

        if merges_characters(data):
            from ondevice.tokenizer.piece_table import PieceTableTokenizer

            return PieceTableTokenizer
        return BytePairTokenizer
    if kind == "sentencepiece":
        from ondevice.tokenizer.sentencepiece_model import SentencePieceTokenizer

        return SentencePieceTokenizer
    from ondevice.tokenizer.tokenizer_json import HuggingFaceTokenizer

    return HuggingFaceTokenizer
