"""Makes `tokenizer.bin`, the table of byte pairs, from a `tokenizer.json` whose rules the native tokenizer
implements.

`weights/README.md` is the specification. Every other `tokenizer.json` stays as it is.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from ondevice.converters.checkpoints.gguf_splitting import GPT2_PATTERN, SPLITTINGS
from ondevice.tokenizer.base import byte_letters
from ondevice.tokenizer.byte_pairs import (
    COMPOSED,
    COMPOSES,
    HEADER,
    IGNORES_MERGES,
    MAGIC,
    MAX_ADDED_BYTES,
    MAX_TOKEN_BYTES,
    MAX_TOKENS,
    NO_TOKEN,
    SPECIAL,
)
from ondevice.tokenizer.tokenizer_file import AddedToken, Component, TokenizerFile

_BYTES, _GPT2, _DIGITS = ("ByteLevel", ""), ("ByteLevel", GPT2_PATTERN), ("Digits", "")
_SPLITTINGS: dict[tuple[tuple[str, str | None] | None, ...], int] = {
    (_BYTES,): 0,
    (_GPT2,): 1,
    (("Split", GPT2_PATTERN), _BYTES): 1,
    (_DIGITS, _GPT2): 2,
    (("Split", SPLITTINGS["qwen2"].pattern), _BYTES): 3,
    (("Split", SPLITTINGS["llama3"].pattern), _BYTES): 4,
}
"""Numbers of the ways to split a text, by the kinds and patterns of the pre-tokenizers."""


def byte_pair_table(file: TokenizerFile) -> bytes | None:
    """The bytes of the table; None if it can't express everything in the file."""
    splitting = _SPLITTINGS.get(tuple(_rule(part) for part in file.pre_tokenizers))
    composes = [part["type"] for part in file.normalizers] == ["NFC"]
    spelled = _spelled(file, composes)
    if splitting is None or spelled is None or not file.byte_level or len(file.normalizers) != composes:
        return None
    texts = spelled | {token.id: token.content.encode() for token in file.added}
    merges, bytes_alone = _merges(file), _byte_tokens(file)
    if 1 + max(texts) > MAX_TOKENS or merges is None or bytes_alone is None:
        return None
    return packed_table(
        splitting,
        COMPOSES * composes | IGNORES_MERGES * file.options["ignore_merges"],
        [texts.get(token, b"") for token in range(1 + max(texts))],
        bytes_alone=bytes_alone,
        listed=spelled,
        merges=merges,
        added=[(token.id, _flags(token)) for token in file.added],
    )


def packed_table(
    splitting: int,
    flags: int,
    texts: Sequence[bytes],
    *,
    bytes_alone: Sequence[int],
    listed: Iterable[int],
    merges: NDArray[np.int64] | NDArray[np.uint32],
    added: Iterable[tuple[int, int]],
) -> bytes | None:
    """The bytes of a table; None if a text is too long for it.

    Args:
        texts: each token's bytes.
        bytes_alone: the token of each byte.
        listed: tokens that merging starts from or makes.
        merges: rows of left token, right token, resulting token and rank, sorted by the first two.
        added: added tokens with their flags.
    """
    added = sorted(added, key=lambda it: texts[it[0]])
    added_bytes = sum(len(texts[token]) for token, _ in added)
    if len(texts) > MAX_TOKENS or max(map(len, texts)) > MAX_TOKEN_BYTES or added_bytes > MAX_ADDED_BYTES:
        return None
    listed = sorted(listed, key=texts.__getitem__)
    sections = (
        bytes_alone,
        np.cumsum([0, *map(len, texts)]),
        listed,
        np.searchsorted(merges[:, 0], np.arange(len(texts) + 1)),
        *merges.T[1:],
        added,
    )
    header = HEADER.pack(
        MAGIC,
        1,
        splitting,
        flags,
        len(texts),
        len(listed),
        len(merges),
        len(added),
        added_bytes,
        sum(map(len, texts)),
    )
    words = [np.asarray(section, "<u4").tobytes() for section in sections]
    return b"".join([header, *words, *texts])


def _rule(part: Component) -> tuple[str, str] | None:
    """The kind and the pattern of a pre-tokenizer, if the native tokenizer may implement it;
    otherwise None.
    """
    kind = part["type"]
    if kind == "Digits" and part.get("individual_digits") is True:
        return _DIGITS
    if kind == "ByteLevel" and part.get("add_prefix_space") is False:
        return _BYTES if part.get("use_regex") is False else _GPT2
    if kind == "Split" and part.get("behavior") == "Isolated" and part.get("invert") is not True:
        pattern = part["pattern"].get("Regex")
        return (kind, pattern) if isinstance(pattern, str) else None
    return None


def _spelled(file: TokenizerFile, composes: bool) -> dict[int, bytes] | None:
    """The bytes of the tokens that merging can make, by id; None if the table can't hold them."""
    alphabet = {letter: byte for byte, letter in enumerate(byte_letters())}
    added = {token.content: token for token in file.added}
    spelled: dict[int, bytes] = {}
    for piece, token in file.vocabulary.items():
        if piece and alphabet.keys() >= set(piece):
            spelled[token] = bytes(map(alphabet.__getitem__, piece))
            if piece in added and spelled[token] != piece.encode():
                return None
        elif piece not in added:
            return None
    for it in file.added:
        if it.single_word or it.lstrip or it.rstrip or not _is_stable(it.content, composes):
            return None
    return spelled


def _byte_tokens(file: TokenizerFile) -> list[int] | None:
    """The token of each byte; None if some byte has no token and the table can't express what replaces it."""
    options, unknown = file.options, NO_TOKEN
    if not file.vocabulary.keys() >= set(byte_letters()):
        name = options["unk_token"]
        if options["byte_fallback"] or (
            name is not None and (options["fuse_unk"] or name not in file.vocabulary)
        ):
            return None
        unknown = NO_TOKEN if name is None else file.vocabulary[name]
    return [file.vocabulary.get(letter, unknown) for letter in byte_letters()]


def _is_stable(text: str, composes: bool) -> bool:
    """Whether an added token's text is valid, and is unchanged in Unicode's form C."""
    if any(0xD800 <= ord(character) < 0xE000 for character in text):
        return False
    return not composes or text.isascii() or unicodedata.is_normalized("NFC", text)


def _merges(file: TokenizerFile) -> NDArray[np.int64] | None:
    """The merges as rows of left token, right token, resulting token and rank, sorted by the first two.

    None if a merge uses tokens that aren't in the vocabulary.
    """
    ids = file.vocabulary
    if not {piece for pair in file.merges for piece in pair} <= ids.keys():
        return None
    # Of equal pairs the last one counts.
    made = {(ids[a], ids[b]): (ids[a + b], rank) for rank, (a, b) in enumerate(file.merges)}
    rows = np.array([(*pair, *result) for pair, result in sorted(made.items())], np.int64).reshape(-1, 4)
    rows[:, 3] = np.argsort(np.argsort(rows[:, 3]))
    return rows


def _flags(token: AddedToken) -> int:
    return SPECIAL * token.special | COMPOSED * token.normalized
