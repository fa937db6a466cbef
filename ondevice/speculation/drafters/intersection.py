"""A second model with another vocabulary drafts the tokens that both vocabularies have.

Token-level intersection (TLI; Timor et al., arXiv 2502.05202): only the second model's logits of shared
tokens count, so a draft token is a token of the target without going through text. With sampling, tokens are
ranked with the target's noise added, which `OtherVocabularyDrafter` can't do, since its tokens differ from
the target's.
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

MIN_SHARED = 0.9
"""Smallest share of the target's tokens that the second model must have for this drafter to be used.

Measurements have 95 and nearly 100 % (docs/lab/README.md). Tokens that aren't shared are never drafted.
"""
TABLE_BYTES, FINDING_BYTES = 20, 112
"""Bytes for each of the target's tokens: of the tables, and of the search for shared tokens (measured with
two vocabularies of 150,000)."""


@dataclass(frozen=True, eq=False)
class SharedTokens:
    """Tokens that stand for the same bytes in both vocabularies.

    ids: (n, 2), ids in the target's vocabulary, ascending, and in the second model's. share: share of the
    target's tokens with bytes, from 0 to 1.
    """

    ids: NDArray[np.int64]
    share: float

    @property
    def are_enough(self) -> bool:
        """Whether there are enough shared tokens to draft from."""
        return self.share >= MIN_SHARED

    @staticmethod
    def of(model: DraftModel) -> SharedTokens:
        """The tokens with equal bytes in the vocabularies of a second model and of the target."""
        assert model.tokenizer is not None
        assert model.target_tokenizer is not None
        drafter, target = model.tokenizer, model.target_tokenizer
        (hashes, ids), (drafter_hashes, drafter_ids) = _by_hash(target), _by_hash(drafter)
        _, places, drafter_places = np.intersect1d(
            hashes, drafter_hashes, assume_unique=True, return_indices=True
        )
        pairs = np.stack([ids[places], drafter_ids[drafter_places]], axis=1)
        equal = (target.token_bytes(int(here)) == drafter.token_bytes(int(there)) for here, there in pairs)
        pairs = pairs[np.fromiter(equal, bool, len(pairs))]
        return SharedTokens(pairs[np.argsort(pairs[:, 0])], len(pairs) / max(1, len(ids)))


class IntersectionDrafter(OtherVocabularyDrafter):
    """Drafts trees of shared tokens. It follows the text by bytes, as its base class does."""

    def __init__(self, model: DraftModel, shared: SharedTokens) -> None:
        """model: the second model, with both tokenizers. shared: the tokens that both vocabularies have."""
        super().__init__(model)
        self._drafter_ids = np.full(self._target.vocab_size, -1, np.int32)
        """(V,) the second model's id of each of the target's tokens; -1 where it has none."""
        self._drafter_ids[shared.ids[:, 0]] = shared.ids[:, 1]
        self._shared = shared.ids[:, 1]
        """(n,) the second model's ids, in the order of the target's."""
        self._ranking = Ranking(BRANCHES, shared.ids[:, 0])
        self._path: tuple[int, ...] = ()
        """Tokens that were drawn since the draft began."""
        self._logits: dict[tuple[int, ...], Float32] = {}
        """Logits of the shared tokens by path, as far as proposals were asked for."""

    def begin(self, text: list[int], sampling: SamplingConfig, prompt_tokens: int | None = None) -> None:
        super().begin(text, sampling, prompt_tokens)
        self._ranking.begin(sampling, len(text) if prompt_tokens is None else prompt_tokens)
        self._drafted.clear()
        self._path = ()
        self._logits.clear()

    def observe(self, token: int, logits: Float32 | None) -> None:
        drafted = self._logits.get(self._path)
        if logits is not None and drafted is not None:
            self._ranking.judge(drafted, len(self._text), token, self._text)
        # As long as the text consists of shared tokens, it needn't be encoded anew.
        known = int(self._drafter_ids[token]) if token < len(self._drafter_ids) else -1
        if known >= 0 and len(self._drafted) == len(self._path):
            self._drafted.append((known, self._drafter_tokenizer.token_bytes(known)))
        self._path = (*self._path, token)
        super().observe(token, logits)

    def prepare(self, kv: SequenceState, max_nodes: int, cancelled: IsCancelled) -> None:
        super().prepare(kv, max_nodes, cancelled)
        self._path = ()
        self._logits.clear()

    def propose(self, path: Sequence[int]) -> Proposals:
        if self._ended or not len(self._shared):
            return []
        tokens = [*self._tokens, *self._drafter_ids[list(path)].tolist()]
        logits = self._context.logits(tokens, self._settled, self._cancelled)
        if logits is None:
            return []
        shared: Float32 = logits[self._shared]
        self._logits[tuple(path)] = shared
        text = [*self._text, *path]
        return self._ranking.rank(shared, len(text), text)


def _by_hash(tokenizer: Tokenizer) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Ascending hashes of tokens' bytes, and the last token of each; without tokens that end a text.

    If a single byte has both a byte token and a piece, the piece comes later, and is the one that occurs in
    texts. Dictionaries of a large vocabulary would take tens of megabytes.
    """
    size = tokenizer.vocab_size
    ends = frozenset(tokenizer.eos_ids)
    spelt = (b"" if token in ends else tokenizer.token_bytes(token) for token in range(size))
    hashes = np.fromiter((hash(data) if data else 0 for data in spelt), np.int64, size)
    unique, places = np.unique(hashes[::-1], return_index=True)
    return unique[unique != 0], size - 1 - places[unique != 0].astype(np.int64)
