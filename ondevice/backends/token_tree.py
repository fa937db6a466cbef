"""Trees of tokens in one forward pass, such as draft trees.

Legend: n nodes, flattened so that a parent comes before its children.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]

MAX_DEPTH = 63
"""Largest depth of a node: a path has at most 64 tokens, the size of a block of keys."""


class TokenTree:
    """A tree of tokens. Node i follows node parents[i] < i, or the text before the tree if
    parents[i] is -1.
    """

    def __init__(self, parents: Sequence[int]) -> None:
        """Raises ValueError if a parent doesn't come before its child, or if a path is too long."""
        depths: list[int] = []
        for node, parent in enumerate(parents):
            if not -1 <= parent < node:
                raise ValueError(f"node {node} can't follow node {parent}")
            depths.append(0 if parent < 0 else depths[parent] + 1)
            if depths[-1] > MAX_DEPTH:
                raise ValueError(f"a path of more than {MAX_DEPTH + 1} tokens ends in node {node}")
        self.parents: Int32 = np.array(parents, dtype=np.int32)
        self.depths: Int32 = np.array(depths, dtype=np.int32)
        """(n,) number of nodes before each node on its path."""

    def __len__(self) -> int:
        return len(self.parents)

    @cached_property
    def is_chain(self) -> bool:
        """Whether every node follows the one before it, as in a text."""
        return bool((self.parents == np.arange(-1, len(self) - 1)).all())

    def path(self, node: int) -> list[int]:
        """The nodes from a root to `node`, including both."""
        nodes = []
        while node >= 0:
            nodes.append(node)
            node = int(self.parents[node])
        return nodes[::-1]

    def visible(self, position: int, window: int) -> NDArray[np.bool_]:
        """(n, position + n) booleans, True where node i sees the token stored at place p.

        Nodes are stored from place `position` on. A node sees the tokens before the tree, its ancestors and
        itself; with window > 0, only the last `window` of these.
        """
        ancestors = np.zeros((len(self), len(self)), dtype=bool)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                ancestors[node] = ancestors[parent]
            ancestors[node, node] = True
        seen = np.concatenate([np.ones((len(self), position), dtype=bool), ancestors], axis=1)
        if window:
            lies_at = np.concatenate([np.arange(position), position + self.depths])
            seen &= lies_at[None, :] > position + self.depths[:, None] - window
        return seen
