"""Lossless verification (Leviathan et al., arXiv 2211.17192), with keyed noise instead of the ratio test."""

from __future__ import annotations

from collections.abc import Callable

from ondevice.speculation.tree import Draft


def verify(draft: Draft, draw: Callable[[int], int | None]) -> list[int]:
    """The path of `draft` that the text takes, root first.

    draw(node): draws the target's own token after `node`, as plain decoding draws it; None if the text ends.
        Called once for each node of the path, in order. Its token is the text's next.

    The path ends at a node without a child of that token, which is then the next pass's root. The noise is
    keyed by seed and position, so the tokens are those of plain decoding, for any tree.
    """
    path = [0]
    while (token := draw(path[-1])) is not None and (child := draft.child(path[-1], token)) is not None:
        path.append(child)
    return path
