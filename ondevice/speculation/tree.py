"""Draft trees, grown where acceptance is likeliest.

"SpecExec" (arXiv 2406.02532) grows trees the same way. Verification is exact for any tree: a draft affects
how many tokens a forward pass gives, never which.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from ondevice.backends.token_tree import MAX_DEPTH, TokenTree

_ASK = -1
"""Rank of entries in `grow`'s queue that are questions to the drafter, not draft tokens."""
DRAFT_NODES = 16
"""Maximum nodes of a draft, its root included."""
STREAM_ROWS = 16
"""Maximum rows of streams in a forward pass, in addition to the nodes of its draft."""
LOGITS_AHEAD = 4
"""Maximum nodes of a draft whose logits are computed together."""
LIKELY_SHARE = 0.5
"""Smallest share of its parent's chance with which a node counts as likely to be accepted after it."""

Proposals = Iterable[tuple[int, float]]
"""Distinct token ids, each with the chance from 0 to 1 that it comes next."""


@dataclass(frozen=True)
class Draft:
    """A tree of n tokens. The root is part of the text and has no parent; the others are draft tokens."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    chances: tuple[float, ...] = (1.0,)
    """The drafter's chance that the text reaches each node."""

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
        """The draft reduced to `nodes`, which are ascending and include the parent of each."""
        index = {node: place for place, node in enumerate(nodes)} | {-1: -1}
        return Draft(
            tuple(self.tokens[node] for node in nodes),
            tuple(index[self.parents[node]] for node in nodes),
            tuple(self.chances[node] for node in nodes),
        )

    @cached_property
    def _likeliest(self) -> dict[int, int]:
        """The likeliest child of each node that has children."""
        found: dict[int, int] = {}
        for node, parent in enumerate(self.parents):
            if parent not in found or self.chances[node] > self.chances[found[parent]]:
                found[parent] = node
        return found

    def likely_path(self, node: int, max_nodes: int) -> list[int]:
        """`node` and the nodes after it that are likely to be accepted if it is."""
        path = [node]
        while len(path) < max_nodes and (child := self._likeliest.get(path[-1])) is not None:
            if self.chances[child] < LIKELY_SHARE * self.chances[path[-1]]:
                break
            path.append(child)
        return path

    def child(self, node: int, token: int) -> int | None:
        """The child of `node` with `token`, or None."""
        return self._children.get((node, token))


def plain(token: int) -> Draft:
    """A draft without draft tokens: a pass of plain decoding."""
    return Draft((token,), (-1,))


def grow(
    root: int,
    propose: Callable[[Sequence[int]], Proposals],
    is_worth_adding: Callable[[int, float], bool],
    max_nodes: int,
    max_depth: int,
    is_worth_asking: Callable[[int, float], bool] = lambda nodes, chance: True,
    branches: bool = True,
) -> Draft:
    """Grow a draft from `root`, likeliest nodes first.

    Args:
        root: the text's last token, which is decided.
        propose: returns tokens that may follow `root` and the draft tokens of a path. Called for a path only
            once no likelier draft token is left.
        is_worth_adding: takes the number of nodes and a chance; returns whether the draft should get another
            node that is reached with this chance. The first refused node ends the draft.
        max_nodes: most nodes of the draft, its root included.
        max_depth: most draft tokens on a path.
        is_worth_asking: takes the number of nodes and a chance; returns whether to ask what follows a node
            that is reached with this chance.
        branches: whether a node may have several children.
    """
    tokens, parents, chances = [root], [-1], [1.0]
    paths: list[tuple[int, ...]] = [()]
    # Chance, negated, parent, rank among its proposals, token. A node's own chance bounds its children's.
    queue: list[tuple[float, int, int, int]] = [(-1.0, 0, _ASK, root)] if max_depth > 0 else []
    while queue and len(tokens) < max_nodes:
        negated, parent, rank, token = heapq.heappop(queue)
        if rank == _ASK:
            if is_worth_asking(len(tokens), -negated):
                for place, (proposed, chance) in enumerate(propose(paths[parent])):
                    heapq.heappush(queue, (negated * chance, parent, place, proposed))
            continue
        if not branches and parent != len(tokens) - 1:
            continue
        if not is_worth_adding(len(tokens), -negated):
            break
        tokens.append(token)
        parents.append(parent)
        chances.append(-negated)
        paths.append((*paths[parent], token))
        if len(paths[-1]) < min(max_depth, MAX_DEPTH):
            heapq.heappush(queue, (negated, len(tokens) - 1, _ASK, token))
    return Draft(tuple(tokens), tuple(parents), tuple(chances))
