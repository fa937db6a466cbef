"""What one forward pass is about: its tokens, and how far the results of each row are wanted.

The decode loop makes it, and it travels one way: through the model and the backend to the source of neurons.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ondevice.backends.token_tree import TokenTree


@dataclass(frozen=True)
class ForwardBatch:
    """The rows of one forward pass: first the T tokens, then the streams of some of them."""

    tokens: Sequence[int]
    """(T,) token ids; none where streams run alone."""
    tree: TokenTree | None = None
    """How rows follow each other; None: each follows the one before."""
    draft_rows: int = 0
    """Draft tokens, which come last among the tokens: no part of the text until they are accepted."""
    stream_rows: int = 0
    """Rows of streams. Their results are estimates, computed with the neurons that are in memory."""
    resident_only: bool = False
    """Every row's results are estimates: the pass reads no neurons, and is no part of the text."""
    last_only: bool = False
    """Only the last token's results are wanted."""
    unpruned_rows: Sequence[int] | None = None
    """(T,) each token's row before draft tokens were pruned; None where none were."""

    @property
    def text_rows(self) -> int:
        """Tokens that are part of the text: the first ones."""
        return len(self.tokens) - self.draft_rows

    @property
    def num_exact_rows(self) -> int:
        """Rows whose results must be exact: the first ones. All neurons that they select are read."""
        return 0 if self.resident_only else len(self.tokens)

    def pruned(self, kept: Sequence[int], tree: TokenTree, stream_rows: int) -> ForwardBatch:
        """The batch that goes on with the tokens `kept` (ascending rows), followed by rows of streams.

        tree: of all rows that go on.
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
        """The last token alone, as the last layer's feed-forward gets it where only that is wanted."""
        return ForwardBatch(self.tokens[-1:], resident_only=self.resident_only)
