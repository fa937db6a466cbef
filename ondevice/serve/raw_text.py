"""The text of token ids, with the names of special tokens, so that it can be encoded again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ondevice.tokenizer import StreamingDetokenizer, Tokenizer
from ondevice.tokenizer.base import LeadingSpace, Spelling


class NamedSpelling(Spelling):
    """A tokenizer's spelling in which tokens without a text have their names."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @property
    def leading_space(self) -> LeadingSpace:
        return self._tokenizer.leading_space

    def token_bytes(self, token: int) -> bytes:
        return self._tokenizer.token_bytes(token) or self._tokenizer.piece(token).encode()

    def begins_word(self, token: int) -> bool:
        return self._tokenizer.begins_word(token)


def spelled(tokenizer: Tokenizer, ids: Iterable[int]) -> list[str]:
    """The text that each token completes; an incomplete character at the end belongs to the last one."""
    stream = StreamingDetokenizer(NamedSpelling(tokenizer))
    parts = [stream.add(token) for token in ids]
    if rest := stream.finish():
        parts[-1] += rest
    return parts


def prompt_parts(tokenizer: Tokenizer, prompt: str | Sequence[int] | None, ids: Sequence[int]) -> list[str]:
    """The texts of a prompt's ids; joined, they are the prompt.

    A token that begins every text has an empty one, unless the prompt begins with that token's name.
    """
    parts = spelled(tokenizer, ids)
    if isinstance(prompt, str) and parts and ids[0] == tokenizer.bos_id and not prompt.startswith(parts[0]):
        # The encoder may have added a space after it.
        parts = ["", *spelled(tokenizer, ids[1:])]
    return parts
