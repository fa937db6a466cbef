"""Lossless verification (Leviathan et al., arXiv 2211.17192), with keyed noise instead of the ratio test."""

from __future__ import annotations

from collections.abc import Callable

from ondevice.speculation.tree import Draft


def verify(draft: Draft, draw: Callable[[int], int | None]) -> list[int]:
    """The accepted path of `draft`, root first.

    draw(node): draws the token after `node` from the target, as plain decoding does; None if the text ends.
    Called once for each node of the path, in order. The token that it returns is the text's next token.

    The path ends at a node that has no child with the drawn token. This token is then the root of the next
    pass. Noise depends only on seed and position, so the tokens are those of plain decoding, for any tree.
    """
    path = [0]
    while (token := draw(path[-1])) is not None and (child := draft.child(path[-1], token)) is not None:
        path.append(child)
    return path
