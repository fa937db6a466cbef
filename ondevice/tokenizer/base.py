"""The tokenizer protocol, streaming decoding, and the base of both implementations.

A token's contribution to a text is defined once, as bytes, so streaming and decoding at once can't differ.
"""

from __future__ import annotations

import codecs
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from operator import index
from typing import Literal, Protocol

from ondevice.errors import BundleError, LibraryErrors, UsageError
from ondevice.tokenizer.cutting import Piece, Stopwatch, pieces

LeadingSpace = Literal["keep", "one", "each"]
"""When decoding drops the space that sentencepiece's encoder puts at the start of a text: never (`keep`),
from the first token only (`one`), or from every token until one adds text (`each`)."""

SPACE_MARK = "▁"
"""Stands for a space in sentencepiece's vocabularies."""

MAX_TOKEN_CHARS = 1024
"""Most characters of a token's name in any vocabulary, which bounds generated text. The longest names of
public tokenizers have 512."""

MAX_SPECIAL_CHARS = 1 << 17
"""Most characters in the names of all special tokens: a pattern that finds them takes 100 times as many
bytes. A public tokenizer with 6,400 special tokens has 80,000."""

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SURROGATES = re.compile("[\ud800-\udfff]")
_NO_LIMIT = 1 << 31


class Spelling(Protocol):
    """What a decoder needs of a tokenizer: the bytes that each token adds to a text."""

    @property
    def leading_space(self) -> LeadingSpace:
        """The rule for a space at the start of a decoded text."""

    def token_bytes(self, token: int) -> bytes:
        """UTF-8 bytes that the token adds inside a text; they may be part of a character."""

    def begins_word(self, token: int) -> bool:
        """Whether the first of `token_bytes` is a space that `leading_space` may drop."""


class Tokenizer(Spelling, Protocol):
    """A tokenizer in the form that the rest of the runtime uses."""

    @property
    def vocab_size(self) -> int:
        """Number of ids that the tokenizer knows. A model may have more rows; their ids decode to nothing."""

    @property
    def bos_id(self) -> int | None:
        """Id that begins a text, if the model has one."""

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end a text."""

    @property
    def add_bos(self) -> bool:
        """Whether `encode` begins with `bos_id` by default."""

    def encode(
        self,
        text: str,
        *,
        add_bos: bool | None = None,
        special: bool = False,
        at_start: bool = True,
        most: int | None = None,
    ) -> list[int]:
        """Ids of `text`.

        add_bos: whether `bos_id` comes first; None: as the property `add_bos` says. If special tokens are
            read, a text that begins with the name of `bos_id` gets no second one.
        special: whether special tokens' names in the text become those tokens.
        at_start: False for a text that follows other tokens; it then gets no space at its start, unless the
            tokenizer puts one before every word.
        most: number of ids that the caller can use. For a longer text, a few more ids are returned, and the
            remaining text isn't encoded.
        """

    def encode_parts(
        self, parts: Iterable[str], *, special: bool = False, at_start: bool = True
    ) -> Iterator[list[int]]:
        """Yields the ids of the text in `parts`, a few at a time as parts arrive, without `bos_id`.

        Neither memory nor the time to the next ids grows with the text. Arguments are as in `encode`.
        """

    def encode_within(
        self,
        parts: Iterable[str],
        *,
        add_bos: bool | None = None,
        special: bool = False,
        at_start: bool = True,
        most: int | None = None,
    ) -> list[int]:
        """The ids of the text in `parts`, as from `encode`. No more parts are read than needed."""

    def decode(self, ids: Iterable[int], *, at_start: bool = True) -> str:
        """The text of `ids`, without special tokens, and with invalid UTF-8 replaced by U+FFFD.

        at_start: False for ids that continue a text, which then keeps a leading space.
        """

    def piece(self, token: int) -> str:
        """The token's name in the vocabulary, special or not; empty if it has none."""

    def token_id(self, name: str) -> int | None:
        """Id of the token with this name, special or not; None if there is none."""

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Ids of the special tokens, by name."""

    @property
    def special_pattern(self) -> re.Pattern[str]:
        """A pattern that matches names of special tokens in a text. If several match at one place, the
        longest counts.
        """


class StreamingDetokenizer:
    """Turns tokens into text one by one, in whole characters.

    The texts that `add` returns, followed by that of `finish`, equal `decode` of all tokens.
    """

    def __init__(self, tokenizer: Spelling, *, at_start: bool = True) -> None:
        self._tokenizer = tokenizer
        self._leading = tokenizer.leading_space if at_start else "keep"
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        """The text that this token completes; empty while a character is incomplete."""
        data = self._tokenizer.token_bytes(token)
        if data and self._leading != "keep":
            if self._tokenizer.begins_word(token):
                data = data[1:]
                if self._leading == "one":
                    self._leading = "keep"
            if data:
                self._leading = "keep"
        return self._decoder.decode(data)

    def finish(self) -> str:
        """U+FFFD if the text ends inside a character, otherwise an empty text."""
        return self._decoder.decode(b"", final=True)


class Vocabulary(ABC):
    """The base class of all tokenizers: ids at the ends of a text, limits, decoding."""

    leading_space: LeadingSpace
    special_tokens: Mapping[str, int]
    vocab_size: int
    _piece_chars: int

    def __init__(self, bos_id: int | None, eos_ids: tuple[int, ...], add_bos: bool) -> None:
        ends = (*eos_ids, *(() if bos_id is None else (bos_id,)))
        if any(type(token) is not int or not 0 <= token < _NO_LIMIT for token in ends):
            raise BundleError(f"bos_id {bos_id!r} or eos_ids {list(eos_ids)!r} holds what is not a token id")
        if add_bos and bos_id is None:
            raise BundleError("add_bos is true, but the bundle names no bos_id")
        self.bos_id, self.eos_ids, self.add_bos = bos_id, eos_ids, add_bos
        self._ends = frozenset(ends)
        self._model_rows = _NO_LIMIT

    def check_vocabulary(self, rows: int) -> None:
        """Check the ids. Raises BundleError if the tokenizer has ids for which a model of `rows` embedding
        rows has no row.
        """
        highest = max((self.vocab_size - 1, *self._ends))
        if highest >= rows:
            raise BundleError(
                f"the tokenizer has token id {highest}, but the model's vocabulary ends at {rows - 1}; "
                "they don't belong together"
            )
        self._model_rows = rows

    def encode(
        self,
        text: str,
        *,
        add_bos: bool | None = None,
        special: bool = False,
        at_start: bool = True,
        most: int | None = None,
    ) -> list[int]:
        if not isinstance(text, str):
            raise UsageError(f"the text is {text!r}; it must be a string")
        return self.encode_within([text], add_bos=add_bos, special=special, at_start=at_start, most=most)

    def encode_within(
        self,
        parts: Iterable[str],
        *,
        add_bos: bool | None = None,
        special: bool = False,
        at_start: bool = True,
        most: int | None = None,
    ) -> list[int]:
        if not isinstance(parts, Iterable):
            raise UsageError(f"the text is {parts!r}; it must be parts of a text")
        begins = self.add_bos if add_bos is None else add_bos
        if begins and self.bos_id is None:
            raise UsageError("this model has no token that begins a text; leave add_bos out")
        ids = [self.bos_id] if begins and self.bos_id is not None else []
        for piece_ids in self.encode_parts(parts, special=special, at_start=at_start):
            if special and len(ids) == begins and piece_ids[:1] == [self.bos_id]:
                ids.clear()
            ids += piece_ids
            if most is not None and len(ids) > most:
                break
        return ids

    def encode_parts(
        self, parts: Iterable[str], *, special: bool = False, at_start: bool = True
    ) -> Iterator[list[int]]:
        stopwatch = Stopwatch()
        names = self.special_pattern if special else None
        for piece in pieces(parts, self._piece_chars, names, self._fits, self._is_space):
            if not at_start:
                piece = replace(piece, first=False)
            with stopwatch.running(len(piece.text)):
                ids = self._encode_piece(piece, special)
            # A hostile vocabulary may have gaps, so its size alone doesn't bound the ids it yields.
            if ids and max(ids) >= self._model_rows:
                raise BundleError(
                    f"the tokenizer gave id {max(ids)}; the model ends at {self._model_rows - 1}"
                )
            yield ids

    def decode(self, ids: Iterable[int], *, at_start: bool = True) -> str:
        if not isinstance(ids, Iterable):
            raise UsageError(f"the ids are {ids!r}; they must be a sequence of token ids")
        stream = StreamingDetokenizer(self, at_start=at_start)
        return "".join(stream.add(self._known(token)) for token in ids) + stream.finish()

    def _known(self, token: int) -> int:
        """The token, checked. Raises UsageError if the model doesn't have it."""
        try:
            known = index(token)
        except TypeError as error:
            raise UsageError(f"{token!r} is no token id") from error
        if not 0 <= known < self._model_rows:
            raise UsageError(f"{known} is no token id of this model: they end at {self._model_rows - 1}")
        return known

    @abstractmethod
    def piece(self, token: int) -> str: ...

    @abstractmethod
    def token_id(self, name: str) -> int | None: ...

    @abstractmethod
    def token_bytes(self, token: int) -> bytes: ...

    @abstractmethod
    def begins_word(self, token: int) -> bool: ...

    @abstractmethod
    def _encode_piece(self, piece: Piece, special: bool) -> list[int]: ...

    @abstractmethod
    def _fits(self, text: str) -> bool:
        """Whether `text` is short enough to be encoded at once."""

    def _is_space(self, character: str) -> bool:
        """Whether `character` counts as white space, with which a piece of a long text may begin."""
        return character.isspace()

    @cached_property
    def special_pattern(self) -> re.Pattern[str]:
        names = sorted(self.special_tokens, key=len, reverse=True)
        chars = sum(map(len, names))
        if chars > MAX_SPECIAL_CHARS:
            raise BundleError(
                f"the names of the tokenizer's special tokens have {chars} characters; the limit is "
                f"{MAX_SPECIAL_CHARS}"
            )
        return re.compile("|".join(map(re.escape, names)) or r"(?!)")


def byte_of(piece: str) -> bytes:
    """The byte that a piece named like `<0x0A>` stands for; empty for any other piece."""
    match = _BYTE_PIECE.fullmatch(piece)
    return bytes([int(match[1], 16)]) if match else b""


def byte_letters() -> tuple[str, ...]:
    """GPT-2's letter for each byte: printable Latin-1 is itself, the rest is U+0100 onwards."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return tuple(chr(byte if byte in printable else next(others)) for byte in range(256))


def valid_unicode(text: str) -> str:
    """`text` with lone surrogates, which no tokenizer can encode, replaced by U+FFFD."""
    return _SURROGATES.sub("\ufffd", text)


def library_errors(file: str) -> LibraryErrors:
    """A context that turns a tokenizer library's error about a bad file into BundleError."""
    return LibraryErrors(lambda message: BundleError(f"{file} can't be used: {message[:300]}"))
