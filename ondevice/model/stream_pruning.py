"""Which tokens of a draft enter the stream layers, and which of them get streams there.

"Speculative Streaming" (arXiv 2402.11131), section 3.2.3: an adapter estimates, half-way through a pass,
which draft tokens will be right. What a rule needs beside that is known before the pass, so that the rule can
be applied on whichever machine has the first stream layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ondevice.backends.base import Array, Backend, Float32
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.backends.token_tree import TokenTree


@dataclass(frozen=True)
class PrunedDraft:
    """The tokens of a pass that enter the stream layers, after pruning."""

    tokens: Sequence[int]
    """Rows of these tokens in the batch, ascending."""
    streams: Sequence[int] = ()
    """Indices into `tokens` of those that get streams."""


Prune = Callable[[Array], PrunedDraft]
"""Chooses the tokens, given the hidden states (T, D) that enter the stream layers."""


@dataclass(frozen=True)
class PruningRule:
    """How the tokens of one draft are chosen.

    The accepted path ends in a node if it reaches the node and none of the node's children is right. The
    likeliest ends get streams, which then need no pass of their own.

    tokens, parents, chances: the draft, as `Draft` has it. threshold: chance by the pruning adapter below
    which a node goes no further; 0 prunes nothing. places: rows that the pass has for nodes and streams.
    count: streams of a node. max_ends: most nodes that get streams. min_end_chance: smallest chance of an end
    that does.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    chances: tuple[float, ...]
    threshold: float
    places: int
    count: int
    max_ends: int
    min_end_chance: float

    @property
    def asks(self) -> bool:
        """Whether `choose` takes logits."""
        return self.threshold > 0 and len(self.tokens) > 1

    def choose(self, logits: Float32 | None, listed: NDArray[np.int64] | None) -> PrunedDraft:
        """The chosen tokens, given `pruning_logits` of the nodes, of the tokens `listed` (None: of all)."""
        kept = list(range(len(self.tokens))) if logits is None else self._unpruned(logits, listed)
        if len(self.tokens) == 1:
            # The next pass may have no draft either; if it has one, the streams run then.
            return PrunedDraft(kept)
        reached = np.array(self.chances)[kept]
        ends = reached.copy()
        index = {node: place for place, node in enumerate(kept)}
        for place, node in enumerate(kept[1:], 1):
            ends[index[self.parents[node]]] -= reached[place]
        max_ends = min(self.max_ends, (self.places - len(kept)) // self.count)
        best = np.argsort(-ends, kind="stable")[: max(0, max_ends)]
        return PrunedDraft(kept, sorted(int(place) for place in best if ends[place] >= self.min_end_chance))

    def _unpruned(self, logits: Float32, listed: NDArray[np.int64] | None) -> list[int]:
        """Nodes that the pruning adapter doesn't prune, ascending."""
        chances = np.exp(logits - logits.max(axis=1, keepdims=True))
        chances /= chances.sum(axis=1, keepdims=True)
        tokens = columns = np.array(self.tokens)
        if listed is not None:
            columns = np.minimum(np.searchsorted(listed, tokens), len(listed) - 1)
        likely = chances[list(self.parents), columns] >= self.threshold
        if listed is not None:
            # Another drafter may propose a token that the draft head lacks: its chance isn't known.
            likely |= listed[columns] != tokens
        kept = [0]
        for node in range(1, len(self.tokens)):
            if self.parents[node] in kept and likely[node]:
                kept.append(node)
        return kept


class PruningModel(Protocol):
    """The part of a model that a rule asks."""

    @property
    def backend(self) -> Backend: ...

    @property
    def draft_tokens(self) -> NDArray[np.int64] | None:
        """Ids of the tokens that `pruning_logits` are of; None for all."""
        ...

    def pruning_logits(self, entering: Array) -> Array:
        """What the pruning adapter estimates, (n, its tokens), from the stream layers' input, (n, D)."""
        ...


@dataclass(frozen=True)
class RulePruning:
    """A `Prune` by a rule, of the model that has the first stream layer."""

    model: PruningModel
    rule: PruningRule

    def __call__(self, entering: Array) -> PrunedDraft:
        if not self.rule.asks:
            return self.rule.choose(None, None)
        logits = self.model.backend.to_numpy(self.model.pruning_logits(entering))
        return self.rule.choose(logits, self.model.draft_tokens)


def pruned_batch(batch: ForwardBatch, chosen: PrunedDraft, count: int) -> ForwardBatch:
    """The batch of the tokens that were chosen, followed by `count` rows of streams of each with some."""
    size, kept = len(batch.tokens), len(chosen.tokens)
    parents = list(range(-1, size - 1)) if batch.tree is None else batch.tree.parents.tolist()
    if kept < size:
        index = {token: target for target, token in enumerate(chosen.tokens)} | {-1: -1}
        parents = [index[parents[token]] for token in chosen.tokens]
    for token in chosen.streams:
        parents += [token, *range(len(parents), len(parents) + count - 1)]
    return batch.pruned(chosen.tokens, TokenTree(parents), len(parents) - kept)
