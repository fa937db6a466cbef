"""A drafter and a policy at work on one text after another."""

from __future__ import annotations

from collections.abc import Callable

from ondevice.backends.base import Float32
from ondevice.speculation.drafter import Drafter
from ondevice.speculation.drafters.lookup import Lookup, index_bytes
from ondevice.speculation.drafters.recycling import Recycling, matrix_bytes
from ondevice.speculation.policy import TreePolicy
from ondevice.speculation.tree import Draft, grow

DRAFTERS: dict[str, Callable[[int], Drafter]] = {
    "lookup": lambda vocab_size: Lookup(),
    "recycling": Recycling,
}
"""By the name of `--speculation`, from the vocabulary's size."""


def drafter_bytes(name: str, vocab_size: int, max_context: int) -> int:
    """Memory that the drafter `name` may come to hold; 0 for what is none."""
    if name not in DRAFTERS:
        return 0
    return index_bytes(max_context) if name == "lookup" else matrix_bytes(vocab_size)


class Drafting:
    """Drafts for one model's texts, one at a time: what was learned of one helps the next."""

    def __init__(self, name: str, vocab_size: int, most_nodes: int) -> None:
        """name: one of DRAFTERS. most_nodes: of a draft, its root included."""
        self._drafter = DRAFTERS[name](vocab_size)
        self._policy = TreePolicy(most_nodes)

    def begin(self, text: list[int]) -> None:
        """A text is about to be continued: its token ids, of which there is at least one."""
        self._drafter.begin(text)

    def draft(self, root: int, most_nodes: int, most_tokens: int) -> Draft:
        """Guesses behind the text, whose last token is `root` and has not been through the model.

        most_nodes: that there is room for; most_tokens: that may still be drawn.
        """
        nodes = min(self._policy.begin(), most_nodes)
        return grow(root, self._drafter.propose, self._policy.worth, nodes, most_tokens - 1)

    def drew(self, last: int, token: int, logits: Float32) -> None:
        """`token` was drawn from logits (V,) and comes behind the text, which ends with `last`."""
        self._drafter.judge(token)
        self._drafter.learn(last, logits)
        self._drafter.add(token)

    def passed(self, draft: Draft, seconds: float) -> None:
        """A pass over `draft`, and drawing from it, took so long."""
        self._policy.record(len(draft), seconds)
