"""Drafts with a second model that has another vocabulary: its text is converted to the target's tokens.

String-level exact match (SLEM; Timor et al., arXiv 2502.05202): the text so far is encoded for the second
model, its next tokens become text again, and that is encoded for the target. Both sides agree on bytes. If a
conversion changes the text, draft tokens are rejected; the text is never wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ondevice.backends.base import Float32
from ondevice.backends.recurrent import AHEAD_TOKENS
from ondevice.callbacks import IsCancelled
from ondevice.config import SamplingConfig
from ondevice.model.sequence_state import SequenceState, common_prefix
from ondevice.speculation.drafter import Drafter
from ondevice.speculation.drafters.model import DraftContext, DraftModel
from ondevice.speculation.tree import Proposals
from ondevice.tokenizer import Tokenizer

WINDOW_BYTES = 48
"""Bytes before a seam that are encoded again with the text after it, as a token may span the seam."""
MAX_DRAFTED = 24
"""Maximum tokens of the second model in a draft."""
SEAM_TOKENS = 4
"""Number of the text's last tokens that may be encoded anew as it grows."""


class OtherVocabularyDrafter(Drafter):
    """Drafts a chain: the second model's likeliest continuation of the text."""

    def __init__(self, model: DraftModel) -> None:
        """model: the second model, with both tokenizers."""
        assert model.tokenizer is not None
        assert model.target_tokenizer is not None
        self._model = model
        self._drafter_tokenizer = model.tokenizer
        self._target = model.target_tokenizer
        self._context = DraftContext(model)
        self._cancelled: IsCancelled | None = None
        """Cancels the growing draft."""
        self._temperature = 0.0
        self._text: list[int] = []
        self._said = bytearray()
        """The text's bytes."""
        self._tokens: list[int] = []
        """The first `_covered` bytes of `_said` as the second model's tokens."""
        self._covered = 0
        # Recurrent states can drop AHEAD_TOKENS at no cost, and no more.
        self._most = MAX_DRAFTED if model.kv.states is None else AHEAD_TOKENS - SEAM_TOKENS
        self._forget()

    def begin(self, text: list[int], sampling: SamplingConfig, prompt_tokens: int | None = None) -> None:
        known = len(self._text)
        self._temperature = sampling.temperature
        if not known or text[:known] != self._text:
            self._text = []
            self._tokens = []
            self._said.clear()
            self._covered = 0
            self._forget()
            known = 0
        for token in text[known:]:
            self.observe(token, None)

    def observe(self, token: int, logits: Float32 | None) -> None:
        self._text.append(token)
        self._said += _spelt(self._target, token, at_start=not self._said)

    def prepare(self, kv: SequenceState, max_nodes: int, cancelled: IsCancelled) -> None:
        self._cancelled = cancelled
        said = bytes(self._said)
        # The second model's keys and values have the accepted part of the last draft.
        for token, data in self._drafted:
            if not said.startswith(data, self._covered):
                break
            self._tokens.append(token)
            self._covered += len(data)
        self._forget()
        if not _ends_character(said):
            self._ended = True
            return
        if self._tokens and self._covered < len(said):
            removed, added = _seam(self._drafter_tokenizer, said[: self._covered], said[self._covered :])
            kept = len(self._tokens) - len(removed)
            if self._tokens[kept:] == removed:
                self._tokens[kept:] = added
                self._covered = len(said)
        if not self._tokens or self._covered < len(said):
            self._tokens = self._drafter_tokenizer.encode(said.decode(errors="replace"))
            self._covered = len(said)

    def propose(self, path: Sequence[int]) -> Proposals:
        place = len(path)
        # Unless the draft has ended, text yet to be drafted may become part of its last token.
        while len(self._chain) <= place + 1 and self._draft():
            pass
        settled = len(self._chain) - (not self._ended)
        if settled <= place or [token for token, _ in self._chain[:place]] != list(path):
            return []
        token, chance = self._chain[place]
        return [(token, chance / (self._chain[place - 1][1] if place else 1.0))]

    def close(self) -> None:
        self._model.close()

    def _forget(self) -> None:
        self._drafted: list[tuple[int, bytes]] = []
        self._ends: list[tuple[int, float]] = []
        """For each drafted token, the bytes up to its end, and the chance that the text reaches it."""
        self._continuation = b""
        self._chain: list[tuple[int, float]] = []
        """The draft in the target's tokens, with the chance that the text reaches each."""
        self._ended = False

    @property
    def _settled(self) -> int:
        """Number of the first `_tokens` that will hardly change."""
        return max(0, len(self._tokens) - SEAM_TOKENS)

    def _draft(self) -> bool:
        """Draft one more token with the second model. Returns False if the draft ends."""
        if self._ended or len(self._drafted) == self._most:
            return False
        tokens = [*self._tokens, *(token for token, _ in self._drafted)]
        logits = self._context.logits(tokens, self._settled, self._cancelled)
        token = -1 if logits is None else int(np.argmax(logits))
        at_start = not self._said and not self._continuation
        data = b"" if logits is None else _spelt(self._drafter_tokenizer, token, at_start)
        if logits is None or not data or token in self._drafter_tokenizer.eos_ids:
            self._ended = True
            return False
        weights = np.exp((logits - logits[token]) / np.float32(self._temperature or 1.0))
        before = self._ends[-1][1] if self._ends else 1.0
        self._drafted.append((token, data))
        self._continuation += data
        self._ends.append((len(self._continuation), before / float(weights.sum())))
        self._chain = self._translated()
        return True

    def _translated(self) -> list[tuple[int, float]]:
        """The draft in tokens of the target, as in `_chain`; empty if a token spans the border between text
        and draft.
        """
        continuation = self._continuation
        while continuation and not _ends_character(continuation):
            continuation = continuation[:-1]
        removed, added = _seam(self._target, bytes(self._said), continuation)
        if removed:
            return []
        tokens, end = [], 0
        for token in added:
            end += len(self._target.token_bytes(token))
            chance = next((chance for place, chance in self._ends if place >= end), None)
            if chance is None:
                break
            tokens.append((token, chance))
        return tokens


def same_vocabulary(a: Tokenizer, b: Tokenizer) -> bool:
    """Whether two tokenizers have the same name for every token."""
    return a.vocab_size == b.vocab_size and all(
        a.piece(token) == b.piece(token) for token in range(a.vocab_size)
    )


def _spelt(tokenizer: Tokenizer, token: int, at_start: bool) -> bytes:
    """The bytes of a token. At the start of a text, without the space that an encoder adds there."""
    data = tokenizer.token_bytes(token)
    dropped = at_start and tokenizer.leading_space != "keep" and tokenizer.begins_word(token)
    return data[1:] if data and dropped else data


def _seam(tokenizer: Tokenizer, before: bytes, after: bytes) -> tuple[list[int], list[int]]:
    """The last tokens of `before` that are replaced if `after` follows it, and the tokens that
    replace them.
    """
    start = max(0, len(before) - WINDOW_BYTES)
    while start < len(before) and before[start] & 0xC0 == 0x80:
        start += 1
    window = before[start:]
    alone = tokenizer.encode(window.decode(errors="replace"), add_bos=False)
    together = tokenizer.encode((window + after).decode(errors="replace"), add_bos=False)
    kept = common_prefix(alone, together, len(alone))
    return alone[kept:], together[kept:]


def _ends_character(data: bytes) -> bool:
    """Whether `data` ends at the end of a UTF-8 character."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte >= 0xC0:
            return back >= (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
        if byte < 0x80:
            return True
    return True
