"""Looks up the continuations of a text's last tokens in a datastore on flash.

Only an index is in memory: the first tokens of each page. A lookup reads the pages of all contexts at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ondevice.bundle.ngrams import (
    MAX_CONTEXT,
    NGRAMS,
    NO_TOKEN,
    PAGE_BYTES,
    PAGE_ROWS,
    WINDOW,
    Ngrams,
    Words,
    ngrams_tensors,
)
from ondevice.bundle.reader import CheckedFile, tensor_spans
from ondevice.errors import BundleError
from ondevice.flash.reader import FlashReader
from ondevice.records import dataclass

READERS = MAX_CONTEXT
"""Reads at once: the pages of each context are one read."""
MAX_SPAN = 2
"""Most adjacent pages of a context; a context with more rows has a separate page."""
READER_BYTES = READERS * (2 * MAX_SPAN * PAGE_BYTES + (64 << 10)) + (MAX_CONTEXT * MAX_SPAN + 2) * PAGE_BYTES
"""Memory of the reader's staging buffers and stacks, and of the pages that were read last."""
MAX_RANKED = 8
"""Most next tokens of a context."""


@dataclass(frozen=True, eq=False)
class Continuations:
    """What followed a context of `length` tokens: the continuations as sorted rows (k, W - length), and their
    counts (k,).
    """

    length: int
    tokens: Words
    counts: NDArray[np.int64]

    def after(self, path: Sequence[int]) -> Continuations | None:
        """The continuations of the context followed by `path`; None if there are none."""
        tokens, first, end = self.tokens, 0, len(self.counts)
        if len(path) >= tokens.shape[1]:
            return None
        for depth, token in enumerate(path):
            column = tokens[first:end, depth]
            low, high = np.searchsorted(column, np.array([token, token + 1], np.uint32)).tolist()
            first, end = first + low, first + high
            if first == end:
                return None
        return Continuations(self.length + len(path), tokens[first:end, len(path) :], self.counts[first:end])

    def next_tokens(self) -> tuple[list[int], list[int], int]:
        """The next tokens, most frequent first, the count of each, and the count of the context."""
        column = self.tokens[:, 0]
        firsts = np.concatenate([[0], np.flatnonzero(column[1:] != column[:-1]) + 1])
        sums = np.add.reduceat(self.counts, firsts)
        total = int(sums.sum())
        order = np.argsort(-sums, kind="stable")
        ranked = [(int(column[firsts[at]]), int(sums[at])) for at in order[: MAX_RANKED + 1]]
        known = [(token, count) for token, count in ranked if token != NO_TOKEN][:MAX_RANKED]
        return [token for token, _ in known], [count for _, count in known], total


class Datastore:
    """An open `ngrams.safetensors`. Only one thread may use it."""

    def __init__(
        self, file: CheckedFile, ngrams: Ngrams, vocab_size: int, io: Literal["auto", "direct", "buffered"]
    ) -> None:
        """Read the index. Raises FlashReadError for a damaged file, BundleError for a hostile one."""
        self._ngrams = ngrams
        self._vocab_size = vocab_size
        with ExitStack() as undo:
            self._reader = undo.enter_context(FlashReader([file], io, READERS))
            self._starts = self._keys("starts")
            self._frequent = self._keys("frequent")
            undo.pop_all()

    def lookup(self, text: Sequence[int]) -> list[Continuations]:
        """The continuations of each context that ends `text` and is in the datastore, longest context first.

        Raises FlashReadError for damage, BundleError for tokens that the model doesn't have.
        """
        spans = [
            (length, self._span(np.asarray(text[-length:], dtype=np.uint32)))
            for length in range(min(MAX_CONTEXT, len(text)), 0, -1)
        ]
        wanted = sorted({page for _, span in spans for page in span})
        pages = np.empty((len(wanted), PAGE_BYTES), np.uint8)
        self._reader.read_records(0, wanted, pages)
        place = {page: at for at, page in enumerate(wanted)}
        words = pages.view("<u4")[:, : PAGE_ROWS * (WINDOW + 1)].reshape(len(wanted), PAGE_ROWS, WINDOW + 1)
        continuations = []
        for length, span in spans:
            rows = words[place[span[0]] : place[span[-1]] + 1].reshape(-1, WINDOW + 1)
            context = np.asarray(text[-length:], dtype=np.uint32)
            rows = rows[(rows[:, :length] == context).all(axis=1)]
            if len(rows):
                continuations.append(self._continuations(length, rows))
        return continuations

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._reader.close()

    def _continuations(self, length: int, rows: Words) -> Continuations:
        tokens, counts = rows[:, length:WINDOW], rows[:, WINDOW].astype(np.int64)
        if ((tokens >= self._vocab_size) & (tokens != NO_TOKEN)).any() or not counts.all():
            raise BundleError(f"{NGRAMS} has tokens that this model's vocabulary of {self._vocab_size} lacks")
        return Continuations(length, tokens, counts)

    def _span(self, context: Words) -> range:
        """The range of pages that hold all rows that begin with `context`."""
        key = _key(context, NO_TOKEN)
        at = int(np.searchsorted(self._frequent, key))
        if at < len(self._frequent) and self._frequent[at] == key:
            return range(self._ngrams.pages + at, self._ngrams.pages + at + 1)
        first = max(0, int(np.searchsorted(self._starts, _key(context, 0))) - 1)
        last = max(first, int(np.searchsorted(self._starts, key, side="right")) - 1)
        return range(first, min(last, first + MAX_SPAN - 1) + 1)

    def _keys(self, name: str) -> NDArray[np.bytes_]:
        """The rows of an index tensor as byte strings that sort in the same order. Raises BundleError."""
        tensors = ngrams_tensors(self._ngrams.pages, self._ngrams.frequent)
        span = tensor_spans(NGRAMS, tensors)[name]
        data = self._reader.read(0, span.offset, span.nbytes)
        keys = data.view("<u4").astype(">u4").view(f"S{4 * MAX_CONTEXT}")
        if (keys[1:] < keys[:-1]).any():
            raise BundleError(f"{NGRAMS}: its {name} aren't in ascending order")
        return keys


def _key(context: Words, filling: int) -> np.bytes_:
    """`context`, filled up with `filling` to MAX_CONTEXT tokens, as an element of the index."""
    filled = np.full(MAX_CONTEXT, filling, ">u4")
    filled[: len(context)] = context
    key: np.bytes_ = filled.view(f"S{4 * MAX_CONTEXT}")[0]
    return key
