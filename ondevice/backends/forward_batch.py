"""The batch of one forward pass: its tokens, and which results of each row are wanted.

The decode loop makes it, and passes it through the model and the backend to the source of neurons.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ondevice.backends.token_tree import TokenTree


@dataclass(frozen=True)
class ForwardBatch:
    """The rows of one forward pass: first the T tokens, then the streams of some of them."""

    tokens: Sequence[int]
    """(T,) token ids; empty if streams run alone."""
    tree: TokenTree | None = None
    """The order in which rows follow each other; None: each follows the one before."""
    draft_rows: int = 0
    """Number of draft tokens. They come last among the tokens; only accepted ones become part of the text."""
    stream_rows: int = 0
    """Number of rows of streams. Their results are estimates, computed with the neurons in memory."""
    resident_only: bool = False
    """Whether every row's results are estimates: the pass reads no neurons, and is no part of the text."""
    last_only: bool = False
    """Whether only the last token's results are wanted."""
    unpruned_rows: Sequence[int] | None = None
    """(T,) each token's row before draft tokens were pruned; None if none were."""

    @property
    def text_rows(self) -> int:
        """Number of tokens that are part of the text; they come first."""
        return len(self.tokens) - self.draft_rows

    @property
    def num_exact_rows(self) -> int:
        """Number of exact rows; they come first. All neurons that they select are read."""
        return 0 if self.resident_only else len(self.tokens)

    def pruned(self, kept: Sequence[int], tree: TokenTree, stream_rows: int) -> ForwardBatch:
        """The batch after pruning: the tokens in rows `kept` (ascending), followed by rows of streams.

        tree: how all remaining rows follow each other.
        """
        return ForwardBatch(
            [self.tokens[row] for row in kept],
            tree,
            draft_rows=sum(row >= self.text_rows for row in kept),
            stream_rows=stream_rows,
            resident_only=self.resident_only,
            unpruned_rows=kept,
        )

    def last_row(self) -> ForwardBatch:
        """A batch of the last token alone, for the last layer's feed-forward if `last_only`."""
        return ForwardBatch(self.tokens[-1:], resident_only=self.resident_only)
