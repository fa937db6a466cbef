"""Text to token ids and back, over the libraries that defined each format.

`sentencepiece` reads `tokenizer.model`, `tokenizers` reads `tokenizer.json`; both are imported when a
tokenizer is loaded, not before. Tokenizer files are untrusted input: whatever goes wrong inside the
libraries ends as BundleError.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import import_module

from ondevice.errors import BundleError, UnsupportedModelError
from ondevice.tokenizer.base import LeadingSpace, StreamingDetokenizer, Tokenizer
from ondevice.tokenizer.sentencepiece_model import SentencePieceTokenizer
from ondevice.tokenizer.tokenizer_file import MAX_ADDED_CHARS
from ondevice.tokenizer.tokenizer_json import HuggingFaceTokenizer

__all__ = [
    "MAX_TOKENIZER_BYTES",
    "HuggingFaceTokenizer",
    "LeadingSpace",
    "SentencePieceTokenizer",
    "StreamingDetokenizer",
    "Tokenizer",
    "import_library",
    "load_tokenizer",
    "loading_bytes",
]

_KINDS: dict[str, type[SentencePieceTokenizer | HuggingFaceTokenizer]] = {
    "sentencepiece": SentencePieceTokenizer,
    "tokenizers": HuggingFaceTokenizer,
}
MAX_TOKENIZER_BYTES = {"sentencepiece": 16 << 20, "tokenizers": 32 << 20}
"""Largest file of each kind, for it is read whole and takes several times its size once parsed."""


LIBRARY_BYTES = 2 << 20
"""What a library touches of itself when it is first used: 1.3 MB to read the smallest file, 0.6 to encode."""


def import_library(kind: str) -> None:
    """Import what reads tokenizers of a kind, which is named after it: a process holds it from then on."""
    if kind in _KINDS:
        import_module(kind)


def loading_bytes(kind: str, parts: Iterable[bytes]) -> int:
    """Most memory that `load_tokenizer` takes for the file that `parts` add up to, the file included.

    By marks that what takes memory can't be without: measured are 330 to 420 bytes for an entry of a
    vocabulary in JSON, 92 to 182 for a merge, 110 for a character of added tokens, 200 to 340 for a piece of
    sentencepiece's, which begins with a line feed, as its text does.
    """
    size = keys = commas = line_feeds = 0
    for part in parts:
        size += len(part)
        keys += part.count(b":")
        commas += part.count(b",")
        line_feeds += part.count(b"\n")
    if kind == "sentencepiece":
        return LIBRARY_BYTES + 175 * line_feeds + 13 * size
    added = 110 * min(size, MAX_ADDED_CHARS)
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
    """A tokenizer from the bytes of its file. `kind` is `sentencepiece` or `tokenizers`.

    vocab_size: rows of the model's embedding, which must cover every id.
    Raises BundleError for a damaged or hostile file and for ids outside the vocabulary,
    UnsupportedModelError for a tokenizer whose rules aren't implemented.
    """
    if kind not in _KINDS:
        raise UnsupportedModelError(f"tokenizer kind {kind!r} is not one of {', '.join(_KINDS)}")
    if len(data) > MAX_TOKENIZER_BYTES[kind]:
        raise BundleError(f"tokenizer file has {len(data)} bytes; the limit is {MAX_TOKENIZER_BYTES[kind]}")
    tokenizer = _KINDS[kind](data, bos_id, tuple(eos_ids), add_bos)
    if vocab_size is not None:
        tokenizer.check_vocabulary(vocab_size)
    return tokenizer
