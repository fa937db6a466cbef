"""Speculative Streaming (Bhendawade et al., arXiv 2402.11131): the model's own streams guess what follows.

In the pass that verifies a draft, the likeliest ends of the accepted path get streams, rows of the upper
layers; where the path ends elsewhere, its last token's streams run by themselves in the upper layers. Either
way they read no neurons. Stream j of a token guesses the token j places behind the one that it predicts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ondevice.backends.base import Array, Float32
from ondevice.config import SamplingConfig
from ondevice.errors import BundleError
from ondevice.model.kv_cache import KVCache
from ondevice.model.transformer import ForwardOutput, PrunedDraft, Transformer
from ondevice.speculation.drafter import Drafter, IsCancelled
from ondevice.speculation.ranking import MOST_GUESSES, Ranking
from ondevice.speculation.tree import Draft, Proposals


@dataclass(frozen=True)
class MultiStreamDrafting:
    """How streams draft: it decides how many tokens passes give and take, never which.

    most_ends: nodes of a draft that get streams in its own pass, at most; each takes a row for every stream.
    least_end: how likely the accepted path must at least be to end in such a node; streams that run later
    take a pass of their own. guesses: of each stream. streams: that guess, from the first on; 0: all.
    pruning_threshold: a node whose chance, by the pruning adapter, is below it doesn't enter the stream
    layers (section 3.2.3); 0 prunes nothing.
    """

    most_ends: int = 2
    least_end: float = 0.15
    guesses: int = MOST_GUESSES
    streams: int = 0
    pruning_threshold: float = 0.0


DEFAULT_STREAMS = MultiStreamDrafting()


class MultiStreamDrafter(Drafter):
    """Streams of the newest token whose keys and values are stored; they guess behind the one drawn next."""

    def __init__(
        self, transformer: Transformer, most_rows: int, options: MultiStreamDrafting = DEFAULT_STREAMS
    ) -> None:
        """transformer: with streams. most_rows: of a pass, streams included."""
        assert transformer.streams is not None
        self._transformer = transformer
        self._count = transformer.streams.count
        self._options = options
        self._prunes = options.pruning_threshold > 0 and transformer.streams.pruning is not None
        self._used = min(options.streams or self._count, self._count)
        self._rankings = [Ranking(options.guesses) for _ in range(self._used)]
        self._branches: Array | None = None
        """(S, D) what the newest token's streams begin with."""
        self._states: Array | None = None
        """(S, D) what they became, if they have run."""
        self._logits: Float32 | None = None
        self._ranked: list[Proposals | None] = [None] * self._count
        """What each stream guesses, once asked: but for a repetition penalty, whatever the path."""
        self._penalised = False
        self._most_rows = most_rows
        self._places = 0
        """That the cache has for rows of the next pass."""
        self._text: list[int] = []
        self._drawn = 0
        """Tokens drawn since the streams' own token was: their guesses are behind the first of them."""

    def begin(self, text: list[int], sampling: SamplingConfig) -> None:
        self._text, self._places, self._penalised = list(text), 0, sampling.repetition_penalty != 1.0
        self._forget()
        for ranking in self._rankings:
            ranking.begin(sampling)

    def add(self, token: int) -> None:
        self._text.append(token)
        self._drawn += 1

    def entered(self, found: ForwardOutput, node: int) -> None:
        """A pass is over: `node` of those that went through it is the text's newest token in the cache."""
        self._forget()
        self._states = found.streams.get(node)
        if self._states is None and found.branches is not None:
            row = node if len(found.tokens) == found.branches.shape[0] // self._count else 0
            self._branches = found.branches[row * self._count : (row + 1) * self._count]

    def prepare(self, kv: KVCache, most_nodes: int, cancelled: IsCancelled) -> None:
        # Streams take no block of keys and values that the text alone wouldn't.
        if self._states is None and self._branches is not None and kv.room - kv.length >= self._count:
            self._states = self._transformer.stream_states(self._branches, kv, cancelled)
        self._places = min(self._most_rows, kv.room - kv.length)
        if self._states is not None and self._logits is None:
            self._logits = self._checked_logits(self._states)

    def _checked_logits(self, states: Array) -> Float32:
        try:
            return self._transformer.checked_logits(states)
        except BundleError:
            # The model's own are looked at by itself.
            raise BundleError("the streams compute logits that are not finite; train them again") from None

    def propose(self, path: Sequence[int]) -> Proposals:
        if self._logits is None or len(path) >= self._used:
            return []
        stream, position = len(path), len(self._text) + len(path)
        ranked = self._ranked[stream]
        if ranked is None or self._penalised:
            ranked = self._rankings[stream].rank(self._logits[stream], position, [*self._text, *path])
            self._ranked[stream] = ranked
        return ranked

    def judge(self, token: int) -> None:
        stream = self._drawn
        if self._logits is not None and stream < self._used:
            self._rankings[stream].judge(self._logits[stream], len(self._text), token, self._text)

    def _forget(self) -> None:
        """What was known of the newest token: it is another one's turn."""
        self._drawn, self._logits, self._branches, self._states = 0, None, None, None
        self._ranked = [None] * self._count

    @property
    def wants_streams(self) -> bool:
        return True

    def prune(self, draft: Draft, entering: Array, row_share: float) -> PrunedDraft:
        """Which nodes of `draft` go on into the stream layers, given what enters them, and which get streams.

        The accepted path ends in a node if it gets there and none of its children is right. Streams of a node
        that it may end in save a pass of their own, which takes about what a plain pass does and row_share of
        it for every row but the first, in as many layers.
        """
        kept = self._unpruned(draft, entering)
        if len(draft) == 1:
            # No draft may be wanted next either; if one is, the streams run then.
            return PrunedDraft(kept)
        reached = np.array(draft.chances)[kept]
        ends = reached.copy()
        index = {node: place for place, node in enumerate(kept)}
        for place, node in enumerate(kept[1:], 1):
            ends[index[draft.parents[node]]] -= reached[place]
        most = min(self._options.most_ends, (self._places - len(kept)) // self._count)
        best = np.argsort(-ends, kind="stable")[: max(0, most)]
        least = self._count * row_share / (1 + (self._count - 1) * row_share)
        least = max(least, self._options.least_end)
        return PrunedDraft(kept, sorted(int(place) for place in best if ends[place] >= least))

    def _unpruned(self, draft: Draft, entering: Array) -> list[int]:
        if not self._prunes or len(draft) == 1:
            return list(range(len(draft)))
        logits = self._transformer.backend.to_numpy(self._transformer.pruning_logits(entering))
        chances = np.exp(logits - logits.max(axis=1, keepdims=True))
        chances /= chances.sum(axis=1, keepdims=True)
        kept = [0]
        for node in range(1, len(draft)):
            parent = draft.parents[node]
            if parent in kept and chances[parent, draft.tokens[node]] >= self._options.pruning_threshold:
                kept.append(node)
        return kept
