"""Text to token ids and back, over the libraries that defined each format.

`sentencepiece` reads `tokenizer.model`, `tokenizers` reads `tokenizer.json`; both are imported when a
tokenizer is loaded, not before. Tokenizer files are untrusted input: whatever goes wrong inside the
libraries ends as BundleError.
"""

from __future__ import annotations

from collections.abc import Sequence

from ondevice.errors import BundleError, UnsupportedModelError
from ondevice.tokenizer.base import LeadingSpace, StreamingDetokenizer, Tokenizer
from ondevice.tokenizer.sentencepiece_model import SentencePieceTokenizer
from ondevice.tokenizer.tokenizer_json import HuggingFaceTokenizer

__all__ = [
    "MAX_TOKENIZER_BYTES",
    "HuggingFaceTokenizer",
    "LeadingSpace",
    "SentencePieceTokenizer",
    "StreamingDetokenizer",
    "Tokenizer",
    "load_tokenizer",
]

_KINDS: dict[str, type[SentencePieceTokenizer | HuggingFaceTokenizer]] = {
    "sentencepiece": SentencePieceTokenizer,
    "tokenizers": HuggingFaceTokenizer,
}
MAX_TOKENIZER_BYTES = {"sentencepiece": 16 << 20, "tokenizers": 32 << 20}
"""Largest file of each kind, for it is read whole and takes several times its size once parsed."""


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
