"""The batch of one forward pass: its tokens, and which results of each row are wanted.

It goes from the decode loop through the model and the backend to the source of neurons.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ondevice.backends.token_tree import TokenTree
from ondevice.records import dataclass


@dataclass(frozen=True)
class ForwardBatch:
    """The rows of one forward pass: T tokens, then the streams of some of them."""

    tokens: Sequence[int]
    """(T,) token ids; empty if streams run alone."""
    tree: TokenTree | None = None
    """The tree of the rows; None: each row follows the one before."""
    drafted: Sequence[int] = ()
    """Rows of the draft tokens, ascending; accepted ones become part of the text."""
    stream_rows: int = 0
    """Number of stream rows. Their results are estimates from the neurons in memory."""
    resident_only: bool = False
    """Whether all results are estimates: the pass reads no neurons, and is no part of the text."""
    last_only: bool = False
    """Whether only the last token's results are wanted."""
    silent: bool = False
    """Whether no results are wanted: the pass only adds its tokens to the cache."""

    @property
    def text_rows(self) -> Sequence[int]:
        """Rows of the tokens that aren't drafts, ascending."""
        drafted = set(self.drafted)
        return [row for row in range(len(self.tokens)) if row not in drafted]

    def accepted(self, rows: Sequence[int]) -> list[int]:
        """The accepted draft tokens, as indices into `drafted`. rows: rows of the batch that were
        accepted.
        """
        places = {row: place for place, row in enumerate(self.drafted)}
        return [places[row] for row in rows if row in places]

    @property
    def num_exact_rows(self) -> int:
        """The number of exact rows, which come first in the batch. All neurons that exact rows select are
        read.
        """
        return 0 if self.resident_only else len(self.tokens)

    def with_streams(self, streamed: Sequence[int], count: int) -> ForwardBatch:
        """The batch with a path of `count` stream rows after each of the rows `streamed`."""
        size = len(self.tokens)
        parents = list(range(-1, size - 1)) if self.tree is None else self.tree.parents.tolist()
        for token in streamed:
            parents += [token, *range(len(parents), len(parents) + count - 1)]
        return ForwardBatch(
            self.tokens,
            TokenTree(parents),
            drafted=self.drafted,
            stream_rows=len(parents) - size,
            resident_only=self.resident_only,
        )

    def last_row(self) -> ForwardBatch:
        """The batch that the last layer's feed-forward runs: only the last token if `last_only`, otherwise
        this batch.
        """
        return ForwardBatch(self.tokens[-1:], resident_only=self.resident_only)


def joint_batch(batches: Iterable[ForwardBatch]) -> ForwardBatch:
    """The batch of a pass over several sequences, whose rows follow each other."""
    tokens, drafted = list[int](), list[int]()
    for batch in batches:
        drafted += [len(tokens) + row for row in batch.drafted]
        tokens += batch.tokens
    return ForwardBatch(tokens, drafted=drafted)
