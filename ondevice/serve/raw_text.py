"""The text of token ids, with the names of special tokens, so that it can be encoded again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ondevice.tokenizer import StreamingDetokenizer, Tokenizer
from ondevice.tokenizer.base import LeadingSpace, Spelling


class NamedSpelling(Spelling):
    """The spelling of a tokenizer's tokens, with names for tokens that have no text."""

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
    """The text that each token completes. An incomplete character at the end counts to the last token."""
    stream = StreamingDetokenizer(NamedSpelling(tokenizer))
    parts = [stream.add(token) for token in ids]
    if rest := stream.finish():
        parts[-1] += rest
    return parts


def prompt_parts(tokenizer: Tokenizer, prompt: str | Sequence[int] | None, ids: Sequence[int]) -> list[str]:
    """The text of each of a prompt's ids. Joined, they are the prompt.

    The beginning-of-text token has an empty text, unless the prompt begins with its name.
    """
    parts = spelled(tokenizer, ids)
    if isinstance(prompt, str) and parts and ids[0] == tokenizer.bos_id and not prompt.startswith(parts[0]):
        # The encoder may have added a space after it.
        parts = ["", *spelled(tokenizer, ids[1:])]
    return parts
