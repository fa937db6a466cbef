"""Draft trees: what a pass verifies, grown where acceptance is likeliest.

Whatever the tree, what is verified is exact ("SpecExec", arXiv 2406.02532, grows trees the same way): a draft
decides how many tokens a pass gives, never which.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from ondevice.backends.token_tree import MAX_DEPTH, TokenTree

_ASK = -1
LOGITS_AHEAD = 4
"""Nodes of a draft whose logits are computed together, at most."""
LIKELY = 0.5
"""A node whose chance is this part of its parent's is likely to follow it."""

Proposals = Iterable[tuple[int, float]]
"""Token ids, each once, with the chance from 0 to 1 that it is the one that follows."""


@dataclass(frozen=True)
class Draft:
    """n tokens as a tree. The first is decided and has no parent; the others are guesses at what follows."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    chances: tuple[float, ...] = (1.0,)
    """That the text gets to each node, as whoever guessed has it."""

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def tree(self) -> TokenTree:
        return TokenTree(self.parents)

    @cached_property
    def _children(self) -> dict[tuple[int, int], int]:
        nodes = zip(self.parents, self.tokens, strict=True)
        return {place: node for node, place in enumerate(nodes) if node}

    def only(self, nodes: Sequence[int]) -> Draft:
        """The draft of these nodes, ascending; the parent of each is one of them."""
        index = {node: place for place, node in enumerate(nodes)} | {-1: -1}
        return Draft(
            tuple(self.tokens[node] for node in nodes),
            tuple(index[self.parents[node]] for node in nodes),
            tuple(self.chances[node] for node in nodes),
        )

    @cached_property
    def _likeliest(self) -> dict[int, int]:
        """Of each node that has children, the likeliest."""
        found: dict[int, int] = {}
        for node, parent in enumerate(self.parents):
            if parent not in found or self.chances[node] > self.chances[found[parent]]:
                found[parent] = node
        return found

    def likely_path(self, node: int, most: int) -> list[int]:
        """`node` and those behind it, at most `most`, that the text likely takes if it takes `node`."""
        path = [node]
        while len(path) < most and (child := self._likeliest.get(path[-1])) is not None:
            if self.chances[child] < LIKELY * self.chances[path[-1]]:
                break
            path.append(child)
        return path

    def child(self, node: int, token: int) -> int | None:
        """The node that guesses `token` behind `node`, if one does."""
        return self._children.get((node, token))


def plain(token: int) -> Draft:
    """No guesses: a pass of plain decoding."""
    return Draft((token,), (-1,))


def grow(
    root: int,
    propose: Callable[[Sequence[int]], Proposals],
    worth: Callable[[int, float], bool],
    nodes: int,
    depth: int,
    promising: Callable[[int, float], bool] = lambda nodes, chance: True,
) -> Draft:
    """A tree behind the decided token `root`, its likeliest nodes first, of at most `nodes`, root included.

    propose(path): what may follow `root` and the guesses `path` behind it, asked only once no likelier guess
    is left. worth(n, chance): whether a tree of n nodes should get another that is reached with that chance;
    the first that it shouldn't ends it. promising(n, chance): whether to ask behind such a one.
    depth: guesses in a row, at most.
    """
    tokens, parents, chances = [root], [-1], [1.0]
    paths: list[tuple[int, ...]] = [()]
    # Missed chance, parent, order among its guesses, token. Asking behind a node bounds what comes of it.
    waiting: list[tuple[float, int, int, int]] = [(-1.0, 0, _ASK, root)] if depth > 0 else []
    while waiting and len(tokens) < nodes:
        missed, parent, order, token = heapq.heappop(waiting)
        if order == _ASK:
            if promising(len(tokens), -missed):
                for place, (guess, likely) in enumerate(propose(paths[parent])):
                    heapq.heappush(waiting, (missed * likely, parent, place, guess))
            continue
        if not worth(len(tokens), -missed):
            break
        tokens.append(token)
        parents.append(parent)
        chances.append(-missed)
        paths.append((*paths[parent], token))
        if len(paths[-1]) < min(depth, MAX_DEPTH):
            heapq.heappush(waiting, (missed, len(tokens) - 1, _ASK, token))
    return Draft(tuple(tokens), tuple(parents), tuple(chances))
