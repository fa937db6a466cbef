"""The batch of one forward pass: its tokens, and which results of each row are wanted.

The decode loop makes it, and passes it through the model and the backend to the source of neurons.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ondevice.backends.token_tree import TokenTree
from ondevice.records import dataclass


@dataclass(frozen=True)
class ForwardBatch:
    """The rows of one forward pass: first the T tokens, then the streams of some of them."""

    tokens: Sequence[int]
    """(T,) token ids; empty if streams run alone."""
    tree: TokenTree | None = None
    """The order in which rows follow each other; None: each follows the one before."""
    drafted: Sequence[int] = ()
    """Rows of the draft tokens, ascending; only accepted ones become part of their text."""
    stream_rows: int = 0
    """Number of rows of streams. Their results are estimates, computed with the neurons in memory."""
    resident_only: bool = False
    """Whether every row's results are estimates: the pass reads no neurons, and is no part of the text."""
    last_only: bool = False
    """Whether only the last token's results are wanted."""
    silent: bool = False
    """Whether no results are wanted: the pass only adds its tokens. It may still have some."""

    @property
    def text_rows(self) -> Sequence[int]:
        """Rows of the tokens that are part of a text, ascending."""
        drafted = set(self.drafted)
        return [row for row in range(len(self.tokens)) if row not in drafted]

    def accepted(self, rows: Sequence[int]) -> list[int]:
        """Indices into `drafted` of the rows that are draft tokens; `rows` are numbers of tokens."""
        places = {row: place for place, row in enumerate(self.drafted)}
        return [places[row] for row in rows if row in places]

    @property
    def num_exact_rows(self) -> int:
        """Number of exact rows; they come first. All neurons that they select are read."""
        return 0 if self.resident_only else len(self.tokens)

    def with_streams(self, streamed: Sequence[int], count: int) -> ForwardBatch:
        """The batch with `count` rows of streams, one path, behind each of the tokens in rows `streamed`."""
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
        """A batch of the last token alone, for the last layer's feed-forward if `last_only`."""
        return ForwardBatch(self.tokens[-1:], resident_only=self.resident_only)


def joint_batch(batches: Iterable[ForwardBatch]) -> ForwardBatch:
    """The batch of a pass of several sequences: the rows of one after those of another."""
    tokens, drafted = list[int](), list[int]()
    for own in batches:
        drafted += [len(tokens) + row for row in own.drafted]
        tokens += own.tokens
    return ForwardBatch(tokens, drafted=drafted)
