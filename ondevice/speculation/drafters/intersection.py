"""A second model with another vocabulary drafts the tokens that both vocabularies have.

Token-level intersection (TLI; Timor et al., arXiv 2502.05202): the second model's logits of the shared tokens
alone choose, so a draft token is a token of the target without going through text. With sampling they are
ranked with the target's own noise, which `OtherVocabularyDrafter` can't: its tokens and the target's differ.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ondevice.backends.base import Float32
from ondevice.callbacks import IsCancelled
from ondevice.config import SamplingConfig
from ondevice.model.sequence_state import SequenceState
from ondevice.records import dataclass
from ondevice.speculation.drafters.model import BRANCHES, DraftModel
from ondevice.speculation.drafters.other_vocabulary import OtherVocabularyDrafter
from ondevice.speculation.ranking import Ranking
from ondevice.speculation.tree import Proposals
from ondevice.tokenizer import Tokenizer

LEAST_SHARED = 0.9
"""Share of the target's tokens that the second model must have for this drafter to be taken.

It was measured where 95 and nearly 100 % are shared (docs/lab/README.md). What isn't shared is never drafted.
"""

TABLE_BYTES, FINDING_BYTES = 20, 112
"""Bytes for each of the target's tokens: of the tables, and while shared tokens are found, which is measured
with two vocabularies of 150,000."""


@dataclass(frozen=True, eq=False)
class SharedTokens:
    """Tokens that stand for the same bytes in both vocabularies.

    ids: (n, 2) the target's, ascending, and the second model's. share: of the target's that have bytes.
    """

    ids: NDArray[np.int64]
    share: float

    @property
    def are_enough(self) -> bool:
        """Whether they are enough to draft from."""
        return self.share >= LEAST_SHARED

    @staticmethod
    def of(model: DraftModel) -> SharedTokens:
        """The tokens with equal bytes in a second model's vocabulary and in the target's, which differ."""
        assert model.tokenizer is not None
        assert model.target_tokenizer is not None
        own, target = model.tokenizer, model.target_tokenizer
        (hashes, ids), (own_hashes, own_ids) = _by_hash(target), _by_hash(own)
        _, places, own_places = np.intersect1d(hashes, own_hashes, assume_unique=True, return_indices=True)
        pairs = np.stack([ids[places], own_ids[own_places]], axis=1)
        equal = (target.token_bytes(int(here)) == own.token_bytes(int(there)) for here, there in pairs)
        pairs = pairs[np.fromiter(equal, bool, len(pairs))]
        return SharedTokens(pairs[np.argsort(pairs[:, 0])], len(pairs) / max(1, len(ids)))


class IntersectionDrafter(OtherVocabularyDrafter):
    """Drafts trees of shared tokens. It follows the text as its base does, by bytes."""

    def __init__(self, model: DraftModel, shared: SharedTokens) -> None:
        """model: has both tokenizers. shared: its tokens that the target has too."""
        super().__init__(model)
        self._own_of = np.full(self._target.vocab_size, -1, np.int32)
        """(V,) the second model's id of each of the target's tokens; -1 where it has none."""
        self._own_of[shared.ids[:, 0]] = shared.ids[:, 1]
        self._shared = shared.ids[:, 1]
        """(n,) the second model's ids, in the order of the target's."""
        self._ranking = Ranking(BRANCHES, shared.ids[:, 0])
        self._path: tuple[int, ...] = ()
        """Tokens that were drawn since the draft began."""
        self._logits: dict[tuple[int, ...], Float32] = {}
        """Logits of the shared tokens after each path that was asked for."""

    def begin(self, text: list[int], sampling: SamplingConfig, prompt_tokens: int | None = None) -> None:
        super().begin(text, sampling, prompt_tokens)
        self._ranking.begin(sampling, len(text) if prompt_tokens is None else prompt_tokens)
        self._drafted.clear()
        self._path = ()
        self._logits.clear()

    def observe(self, token: int, logits: Float32 | None) -> None:
        own = self._logits.get(self._path)
        if logits is not None and own is not None:
            self._ranking.judge(own, len(self._text), token, self._text)
        # As long as the text consists of shared tokens, it needn't be encoded anew.
        known = int(self._own_of[token]) if token < len(self._own_of) else -1
        if known >= 0 and len(self._drafted) == len(self._path):
            self._drafted.append((known, self._own.token_bytes(known)))
        self._path = (*self._path, token)
        super().observe(token, logits)

    def prepare(self, kv: SequenceState, max_nodes: int, cancelled: IsCancelled) -> None:
        super().prepare(kv, max_nodes, cancelled)
        self._path = ()
        self._logits.clear()

    def propose(self, path: Sequence[int]) -> Proposals:
        if self._ended or not len(self._shared):
            return []
        tokens = [*self._tokens, *self._own_of[list(path)].tolist()]
        logits = self._context.logits(tokens, self._settled, self._cancelled)
        if logits is None:
            return []
        shared: Float32 = logits[self._shared]
        self._logits[tuple(path)] = shared
        text = [*self._text, *path]
        return self._ranking.rank(shared, len(text), text)


def _by_hash(tokenizer: Tokenizer) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Ascending hashes of what tokens stand for, and the last token of each; none of those that end a text.

    Where a single byte has a token for itself and a piece, the piece comes later, and is what texts have.
    Dictionaries of a large vocabulary would take tens of megabytes.
    """
    size = tokenizer.vocab_size
    ends = frozenset(tokenizer.eos_ids)
    spelt = (b"" if token in ends else tokenizer.token_bytes(token) for token in range(size))
    hashes = np.fromiter((hash(data) if data else 0 for data in spelt), np.int64, size)
    found, places = np.unique(hashes[::-1], return_index=True)
    return found[found != 0], size - 1 - places[found != 0].astype(np.int64)
