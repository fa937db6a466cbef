"""Draft trees, which grow where acceptance is likeliest.

"SpecExec" (arXiv 2406.02532) grows trees the same way. Verification is exact for any tree: a draft affects
how many tokens a forward pass gives, never which.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property

from ondevice.backends.recurrent import AHEAD_TOKENS
from ondevice.backends.token_tree import MAX_DEPTH, TokenTree
from ondevice.records import dataclass

_ASK, _COMPUTE = -1, -2
"""Ranks in `grow`'s queue of questions to the drafter. Ranks from 0 on are draft tokens."""
DRAFT_NODES = AHEAD_TOKENS
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

    @cached_property
    def _likeliest(self) -> dict[int, int]:
        """The likeliest child of each node that has children."""
        likeliest: dict[int, int] = {}
        for node, parent in enumerate(self.parents):
            if parent not in likeliest or self.chances[node] > self.chances[likeliest[parent]]:
                likeliest[parent] = node
        return likeliest

    def likely_path(self, node: int, max_nodes: int) -> list[int]:
        """The nodes from `node` on that are likely to be accepted if `node` is, including `node`."""
        path = [node]
        while len(path) < max_nodes and (child := self._likeliest.get(path[-1])) is not None:
            if self.chances[child] < LIKELY_SHARE * self.chances[path[-1]]:
                break
            path.append(child)
        return path

    def child(self, node: int, token: int) -> int | None:
        """The child of `node` that has `token`; None without one."""
        return self._children.get((node, token)) if len(self.tokens) > 1 else None


def plain(token: int) -> Draft:
    """A draft that has only a root, as in plain decoding."""
    return Draft((token,), (-1,))


@dataclass(frozen=True)
class Root:
    """The root of a draft.

    Args:
        token: the text's last token.
        propose: returns tokens that may follow `token` and a path of draft tokens. Called for a path when no
            draft has a likelier token left.
        max_nodes: most nodes of the draft, root included.
        max_depth: most draft tokens on a path.
        compute: like propose, but slow.
        computed_chance: chance that compute's likeliest token comes, and no proposed one.
    """

    token: int
    propose: Callable[[Sequence[int]], Proposals]
    max_nodes: int
    max_depth: int
    compute: Callable[[Sequence[int]], Proposals] = lambda path: ()
    computed_chance: float = 0.0


class _Growing:
    """A draft that is still growing."""

    def __init__(self, root: Root) -> None:
        self.root = root
        self.tokens, self.parents, self.chances = [root.token], [-1], [1.0]
        self.paths: list[tuple[int, ...]] = [()]
        self._places = set[tuple[int, int]]()

    def has(self, token: int, parent: int) -> bool:
        """Whether `token` is already a child of `parent`; propose and compute may both return it."""
        return (parent, token) in self._places

    def add(self, token: int, parent: int, chance: float) -> None:
        self.tokens.append(token)
        self.parents.append(parent)
        self.chances.append(chance)
        self.paths.append((*self.paths[parent], token))
        self._places.add((parent, token))

    @property
    def may_go_on(self) -> bool:
        """Whether the newest node may have children."""
        return len(self.paths[-1]) < min(self.root.max_depth, MAX_DEPTH)


def grow(
    roots: Sequence[Root],
    is_worth_adding: Callable[[int, float], bool],
    max_nodes: int,
    is_worth_asking: Callable[[int, float], bool] = lambda nodes, chance: True,
    branches: bool = True,
    is_worth_computing: Callable[[int, float], bool] = lambda nodes, chance: True,
) -> list[Draft]:
    """Grow the drafts of a pass, one from each root, likeliest nodes first.

    Each `is_worth_...` takes the number of nodes of all drafts and a chance from 0 to 1.

    Args:
        roots: of different texts.
        is_worth_adding: whether to add a node that is reached with that chance. False ends all drafts.
        max_nodes: most nodes of all drafts, roots included.
        is_worth_asking: whether to call `propose` for a node that is reached with that chance.
        branches: whether a node may have several children.
        is_worth_computing: whether to compute what follows a node, if that adds this chance to the
            proposals'.
    """
    growing = [_Growing(root) for root in roots]
    # Chance, negated, draft, parent, rank among its proposals, token. A node's own chance bounds its
    # children's.
    queue = [(-1.0, at, 0, _ASK, root.token) for at, root in enumerate(roots) if root.max_depth > 0]
    nodes = len(roots)
    while queue and nodes < max_nodes:
        negated, at, parent, rank, token = heapq.heappop(queue)
        one = growing[at]
        if len(one.tokens) >= one.root.max_nodes:
            continue
        if rank in (_ASK, _COMPUTE):
            reached, gained = -one.chances[parent], one.root.computed_chance
            if rank == _ASK and is_worth_asking(nodes, -negated):
                answers = list(one.root.propose(one.paths[parent]))
                gained *= 1 - max((chance for _, chance in answers), default=0.0)
                if gained > 0:
                    heapq.heappush(queue, (reached * gained, at, parent, _COMPUTE, token))
            elif rank == _COMPUTE and is_worth_computing(nodes, -negated):
                answers = list(one.root.compute(one.paths[parent]))
            else:
                continue
            for place, (proposed, chance) in enumerate(answers):
                heapq.heappush(queue, (reached * chance, at, parent, place, proposed))
            continue
        if one.has(token, parent) or (not branches and parent != len(one.tokens) - 1):
            continue
        if not is_worth_adding(nodes, -negated):
            break
        one.add(token, parent, -negated)
        nodes += 1
        if one.may_go_on:
            heapq.heappush(queue, (negated, at, len(one.tokens) - 1, _ASK, token))
    return [Draft(tuple(one.tokens), tuple(one.parents), tuple(one.chances)) for one in growing]
