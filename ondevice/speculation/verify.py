"""Lossless verification (Leviathan et al., arXiv 2211.17192), by keyed noise in place of the ratio test."""

from __future__ import annotations

from collections.abc import Callable

from ondevice.speculation.tree import Draft


def verify(draft: Draft, draw: Callable[[int], int | None]) -> list[int]:
    """The path of `draft` that the text takes, root first.

    draw(node): the target's own token behind `node`, drawn as plain decoding draws it, or None where the text
    ends. It is called once for each node of the path, in order, and its token is the text's next. Where no
    node holds that token the path ends, and the token is the next pass's root. The noise is keyed by seed and
    position, so the tokens are those of plain decoding, for any tree.
    """
    path = [0]
    while (token := draw(path[-1])) is not None and (child := draft.child(path[-1], token)) is not None:
        path.append(child)
    return path
