"""Verification by itself: the path that a text takes through a draft, and which nodes are drawn at."""

from __future__ import annotations

import pytest

from ondevice.speculation.tree import Draft
from ondevice.speculation.verify import verify

#          node:  0  1  2  3  4  5  6
TREE = Draft((9, 0, 5, 0, 7, 0, 5), (-1, 0, 0, 1, 1, 3, 2))
"""Tokens and parents. Token 0 is one of them, and the same token occurs below several nodes."""


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ([0, 0, 0, 0], [0, 1, 3, 5]),
        ([0, 7, 5], [0, 1, 4]),
        ([5, 5, 1], [0, 2, 6]),
        ([5, 0], [0, 2]),
        ([7], [0]),
        ([0, None], [0, 1]),
        ([None], [0]),
    ],
)
def test_the_path_follows_the_text_and_every_node_of_it_is_drawn_at_once(
    text: list[int | None], path: list[int]
) -> None:
    drawn: list[int] = []

    def draw(node: int) -> int | None:
        drawn.append(node)
        return text[len(drawn) - 1]

    assert verify(TREE, draw) == path
    assert drawn == path
