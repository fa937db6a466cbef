"""The one verifier: what a pass over a draft says the text is."""

from __future__ import annotations

from collections.abc import Callable

from ondevice.speculation.tree import Draft


def verify(draft: Draft, draw: Callable[[int], int | None]) -> list[int]:
    """The nodes of `draft` that are the text, from the first on.

    draw(node): the target's own token behind `node`, which is then the text's next, drawn as plain decoding
    draws it; None where the text ends. It is asked once for each node that is returned, in order. Where no
    node guessed the token, its pass is the next one. So the text has the law, and with noise that is keyed
    by position the very tokens, of plain decoding, for any tree.
    """
    path = [0]
    while (token := draw(path[-1])) is not None and (child := draft.child(path[-1], token)) is not None:
        path.append(child)
    return path
