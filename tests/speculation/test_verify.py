"""Verification by itself: the path that a text takes through a draft, and which nodes are drawn at."""

from __future__ import annotations

import pytest

from ondevice.speculation.tree import Draft, plain
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


def test_a_draft_of_one_token_is_accepted_too() -> None:
    assert verify(Draft((9, 4), (-1, 0)), lambda node: 4 if node == 0 else 1) == [0, 1]
    assert verify(plain(9), lambda node: 9) == [0]


def test_nodes_that_are_likely_after_a_node_are_at_least_half_as_likely_as_it() -> None:
    draft = Draft((9, 1, 2, 3, 4, 5), (-1, 0, 0, 1, 3, 4), (1.0, 0.6, 0.3, 0.5, 0.25, 0.1))
    for most in range(1, 7):
        assert draft.likely_path(0, most) == [0, 1, 3, 4][:most]
    assert draft.likely_path(2, 6) == [2]
    assert draft.likely_path(4, 6) == [4]
