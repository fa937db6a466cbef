"""Reads and vets the settings of text normalisation in a `tokenizer.model` before its library sees the file.

The file is a protocol buffer (sentencepiece_model.proto). The library reads the vocabulary, unless a table is
made of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import unpack_from

from ondevice.errors import BundleError
from ondevice.records import dataclass
from ondevice.tokenizer.base import SPACE_MARK, LeadingSpace
from ondevice.tokenizer.cutting import MAX_PIECE_CHARS

MAX_GROWTH_BYTES = 64
"""Most bytes that may replace a character; U+FDFA becomes 33 bytes in Unicode's form KC."""
_MAX_NORMALIZED_BYTES = 1 << 16
"""Most bytes of a normalised piece; the library takes about 60 bytes of memory for each."""
# Field numbers of ModelProto, NormalizerSpec and TrainerSpec, and of their fields.
_PIECE, _TRAINER, _NORMALIZER, _SELF_TEST = 1, 2, 3, 4
_CHARSMAP, _ADD_DUMMY_PREFIX, _REMOVE_EXTRA_SPACES, _ESCAPE_SPACES = 2, 3, 4, 5
_MODEL_TYPE, _SPACE_AS_SUFFIX, _BYTE_FALLBACK = 3, 24, 35
_TEXT, _SCORE, _KIND = 1, 2, 3
_BPE = 2
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_NO_DUMMY_PREFIX = bytes([_NORMALIZER << 3 | _BYTES, 2, _ADD_DUMMY_PREFIX << 3 | _VARINT, 0])


@dataclass(frozen=True)
class SentencePieceFile:
    """The parts of a `tokenizer.model` after it has been vetted."""

    data: bytes
    """The model for the library, changed so that the library doesn't add `prefix`."""
    prefix: str
    """What the encoder must put before a text."""
    leading_space: LeadingSpace
    piece_chars: int
    """Most characters that may be encoded at once."""
    merges: bool
    """Whether pieces merge by their scores, other characters become bytes, and a text isn't changed but for
    spaces, which become marks, and the prefix."""


def read_sentencepiece_file(data: bytes) -> SentencePieceFile:
    """The parts of a `tokenizer.model`, vetted. Raises BundleError if its bytes are damaged or hostile.

    Many models put a space before a text, but only the first piece of a text may get it. So the model is
    changed not to add the space, and the encoder adds it. A model that strips spaces at both ends and adds
    one stays unchanged: a piece begins with a space if the text has one there.
    """
    flags = {_ADD_DUMMY_PREFIX: 1, _REMOVE_EXTRA_SPACES: 1, _ESCAPE_SPACES: 1}
    trainer = {_MODEL_TYPE: 1, _SPACE_AS_SUFFIX: 0, _BYTE_FALLBACK: 0}
    maps, growth = False, 1
    kept, start = [], 0
    for field, begin, at, end in _fields(data, 0, len(data)):
        if field == _SELF_TEST:
            # The library would encode the texts of a self-test while it loads.
            kept.append(data[start:begin])
            start = end
        elif field == _NORMALIZER:
            for inner, _, value, inner_end in _fields(data, at, end):
                if inner == _CHARSMAP:
                    maps = maps or value < inner_end
                    growth = max(growth, _longest_replacement(data[value:inner_end]))
                elif inner in flags:
                    flags[inner] = _number(data, value, inner_end)
        elif field == _TRAINER:
            for inner, _, value, inner_end in _fields(data, at, end):
                if inner in trainer:
                    trainer[inner] = _number(data, value, inner_end)
    if growth > MAX_GROWTH_BYTES:
        raise BundleError(
            f"tokenizer.model replaces a character by {growth} bytes; the limit is {MAX_GROWTH_BYTES}"
        )
    kept.append(data[start:])
    strips, adds = flags[_REMOVE_EXTRA_SPACES], flags[_ADD_DUMMY_PREFIX]
    moves_prefix = adds and not strips and not trainer[_SPACE_AS_SUFFIX]
    return SentencePieceFile(
        b"".join(kept) + (_NO_DUMMY_PREFIX if moves_prefix else b""),
        "" if not moves_prefix else SPACE_MARK if flags[_ESCAPE_SPACES] else " ",
        "each" if strips else "one" if adds else "keep",
        min(MAX_PIECE_CHARS, _MAX_NORMALIZED_BYTES // growth),
        trainer[_MODEL_TYPE] == _BPE
        and bool(trainer[_BYTE_FALLBACK] and flags[_ESCAPE_SPACES])
        and not (maps or strips or trainer[_SPACE_AS_SUFFIX]),
    )


def read_pieces(data: bytes) -> Iterator[tuple[str, float, int]]:
    """Yields the text, score and type of each piece of a `tokenizer.model` that the library has loaded.

    Raises BundleError if it is damaged.
    """
    for field, _, at, end in _fields(data, 0, len(data)):
        if field != _PIECE:
            continue
        text, score, kind = "", 0.0, 1
        for inner, _, value, inner_end in _fields(data, at, end):
            if inner == _TEXT:
                text = data[value:inner_end].decode("utf-8", "replace")
            elif inner == _SCORE and inner_end - value == 4:
                score = unpack_from("<f", data, value)[0]
            elif inner == _KIND:
                kind = _number(data, value, inner_end)
        yield text, score, kind


def _fields(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Yields (number, start, start of the value, end) of each field of the message in data[at:end]."""
    while at < end:
        begin = at
        # A fast path: nearly all fields are pieces of fewer than 128 bytes, and there are 100,000s.
        if data[at] == (_PIECE << 3 | _BYTES) and at + 1 < end and data[at + 1] < 0x80:
            at += 2 + data[at + 1]
            if at > end:
                raise _damaged(begin)
            yield _PIECE, begin, begin + 2, at
            continue
        key, at = _varint(data, at, end)
        kind, value = key & 7, at
        if kind == _VARINT:
            _, at = _varint(data, at, end)
        elif kind == _BYTES:
            length, value = _varint(data, at, end)
            at = value + length
        elif kind in (_FIXED32, _FIXED64):
            at += 4 if kind == _FIXED32 else 8
        else:
            raise _damaged(begin)
        if at > end:
            raise _damaged(begin)
        yield key >> 3, begin, value, at


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= end:
            break
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise _damaged(at)


def _number(data: bytes, at: int, end: int) -> int:
    return _varint(data, at, end)[0]


def _damaged(at: int) -> BundleError:
    return BundleError(f"tokenizer.model can't be used: it is no protocol buffer at byte {at}")


def _longest_replacement(charsmap: bytes) -> int:
    """The bytes of the longest text that replaces a character. A map consists of a trie, then texts that end
    with 0.
    """
    trie = int.from_bytes(charsmap[:4], "little")
    texts = charsmap[4 + trie :]
    if charsmap and (len(charsmap) < 4 or not texts.endswith(b"\0")):
        raise BundleError("tokenizer.model can't be used: its character map is damaged")
    return max(map(len, texts.split(b"\0")), default=0)
