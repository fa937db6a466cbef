"""Makes the datastore of continuations: a text's windows, sorted, in pages, with an index of their
beginnings.

The format is in `ondevice/bundle/ngrams.py`. "REST" (arXiv 2311.08252) keeps the text and an array of its
suffixes. Here the suffixes are stored in sorted order, cut to W tokens, so that reading one page gives
everything that followed a context. A context with more rows than fit into a page gets a separate page, with
the likeliest rows.

Legend: n tokens of text, R rows (distinct windows), W = WINDOW, M = MAX_CONTEXT.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ondevice.bundle.ngrams import (
    MAX_CONTEXT,
    MAX_PAGES,
    NGRAMS_SIDECAR,
    NO_TOKEN,
    PAGE_BYTES,
    PAGE_ROWS,
    WINDOW,
    Ngrams,
    Words,
    ngrams_layout,
    ngrams_text,
    tokenizer_digest,
)
from ondevice.bundle.reader import Bundle
from ondevice.callbacks import OnProgress, ignore_progress
from ondevice.converters.training.sidecars import save_sidecar, write_tensors
from ondevice.errors import UsageError

MIN_TOKENS = 2
"""Fewest tokens of a text: one context and what followed it."""
WRITTEN_PAGES = 64
"""Pages assembled at a time."""


@dataclass(frozen=True, eq=False)
class WindowRows:
    """Distinct windows in ascending order: their tokens (R, W), and how often each occurs in the
    text, (R,).
    """

    tokens: Words
    counts: NDArray[np.int64]

    def part(self, chosen: slice | NDArray[np.int64]) -> WindowRows:
        return WindowRows(self.tokens[chosen], self.counts[chosen])


def train_ngrams(
    bundle: Bundle, tokens: Words, output: Path, on_progress: OnProgress = ignore_progress
) -> Ngrams:
    """Sort the windows of a text, and write the sidecar to the folder `output`.

    Args:
        bundle: the model, with a tokenizer.
        tokens: (n,) ids of the text.
        output: the bundle's folder, or that of its copy. An earlier datastore there is replaced.
        on_progress: called with the share done, from 0 to 1, and the current step.

    Takes about 150 bytes of memory per token. Raises UsageError for too short or too long a text, and
    OndeviceError if the disk refuses.
    """
    if len(tokens) < MIN_TOKENS:
        raise UsageError(f"the text has {len(tokens)} tokens; a datastore takes {MIN_TOKENS} or more")
    on_progress(0.0, f"sorting {len(tokens)} tokens")
    rows = distinct_windows(tokens)
    on_progress(0.5, f"{len(rows.tokens)} distinct windows")
    contexts, frequent_rows = frequent_contexts(rows)
    starts = rows.tokens[::PAGE_ROWS, :MAX_CONTEXT]
    pages, frequent = len(starts), len(contexts)
    if pages + frequent > MAX_PAGES:
        raise UsageError(
            f"the text has {len(tokens)} tokens, which take {pages + frequent} pages; the limit is "
            f"{MAX_PAGES}: give a smaller --tokens"
        )
    on_progress(0.8, f"writing {pages + frequent} pages")
    parts = [rows.part(slice(start, start + PAGE_ROWS)) for start in range(0, len(rows.tokens), PAGE_ROWS)]
    arrays = [*_pages(parts), *_pages(frequent_rows), starts, contexts]
    layout = ngrams_layout(pages, frequent)
    sha256, crcs = write_tensors(NGRAMS_SIDECAR, layout, arrays, output)
    ngrams = Ngrams(tokenizer_digest(bundle.manifest), len(tokens), pages, frequent, sha256)
    save_sidecar(NGRAMS_SIDECAR, ngrams_text(ngrams, crcs), output)
    on_progress(1.0, "written")
    return ngrams


def distinct_windows(tokens: Words) -> WindowRows:
    """The windows of a text: every token with the W - 1 tokens after it, filled up with NO_TOKEN at the
    text's end.
    """
    padded = np.concatenate([tokens, np.full(WINDOW - 1, NO_TOKEN, np.uint32)])
    every = np.lib.stride_tricks.sliding_window_view(padded, WINDOW)
    order = np.lexsort(every.T[::-1])
    ones = np.ones(len(order), np.int64)
    return _merged(WindowRows(every[order], ones))


def frequent_contexts(rows: WindowRows) -> tuple[Words, list[WindowRows]]:
    """The contexts (F, M), ascending, with more rows than fit into a page, and the rows of each.

    A context of fewer than M tokens is filled with NO_TOKEN.
    """
    contexts_with_rows: list[tuple[Words, WindowRows]] = []
    for length in range(1, MAX_CONTEXT + 1):
        bounds = _bounds(rows.tokens[:, :length])
        for first in np.flatnonzero(np.diff(bounds) > PAGE_ROWS):
            chosen = rows.part(slice(bounds[first], bounds[first + 1]))
            context = np.full(MAX_CONTEXT, NO_TOKEN, np.uint32)
            context[:length] = chosen.tokens[0, :length]
            if NO_TOKEN not in context[:length]:
                contexts_with_rows.append((context, pruned(chosen, length, PAGE_ROWS)))
    contexts_with_rows.sort(key=lambda entry: entry[0].tolist())
    contexts = np.array([context for context, _ in contexts_with_rows], np.uint32).reshape(-1, MAX_CONTEXT)
    return contexts, [context_rows for _, context_rows in contexts_with_rows]


def pruned(rows: WindowRows, length: int, most: int) -> WindowRows:
    """At most `most` rows, which keep as much as possible of what follows the first `length` tokens of
    `rows`.

    rows: rows that all begin with these tokens. Each is cut after the last token up to which it occurs often
    enough. Rows that are then equal are merged, and their counts are added, so the counts of what remains are
    still those of the text.
    """
    occurring = np.zeros((len(rows.tokens), WINDOW - length), np.int64)
    nodes = []
    for end in range(length + 1, WINDOW + 1):
        bounds = _bounds(rows.tokens[:, :end])
        sums = np.add.reduceat(rows.counts, bounds[:-1])
        sums[rows.tokens[bounds[:-1], end - 1] == NO_TOKEN] = 0
        occurring[:, end - length - 1] = np.repeat(sums, np.diff(bounds))
        nodes.append(sums)
    every = np.sort(np.concatenate(nodes))[::-1]
    # Rows end at different nodes: one may end at the context itself.
    least = int(every[most - 1]) + 1 if len(every) >= most else 1
    kept = length + (occurring >= least).sum(axis=1)
    tokens = np.where(np.arange(WINDOW) < kept[:, None], rows.tokens, np.uint32(NO_TOKEN))
    order = np.lexsort(tokens.T[::-1])
    return _merged(WindowRows(tokens[order], rows.counts[order]))


def _merged(rows: WindowRows) -> WindowRows:
    """Sorted rows without duplicates, whose counts are added."""
    bounds = _bounds(rows.tokens)
    return WindowRows(
        np.ascontiguousarray(rows.tokens[bounds[:-1]]), np.add.reduceat(rows.counts, bounds[:-1])
    )


def _bounds(tokens: Words) -> NDArray[np.int64]:
    """The starts of runs of equal rows in sorted `tokens` (R, any), followed by R."""
    changes = (tokens[1:] != tokens[:-1]).any(axis=1)
    return np.concatenate([[0], np.flatnonzero(changes) + 1, [len(tokens)]])


def _pages(parts: list[WindowRows]) -> Iterator[Words]:
    """Yields pages of at most PAGE_ROWS rows: the tokens and the count of each row, filled up with NO_TOKEN
    and 0.
    """
    for start in range(0, len(parts), WRITTEN_PAGES):
        group = parts[start : start + WRITTEN_PAGES]
        padded = np.full((len(group), PAGE_ROWS, WINDOW + 1), NO_TOKEN, np.uint32)
        padded[:, :, WINDOW] = 0
        for page, rows in zip(padded, group, strict=True):
            page[: len(rows.tokens), :WINDOW] = rows.tokens
            page[: len(rows.counts), WINDOW] = rows.counts
        tail = np.zeros((len(group), PAGE_BYTES // 4 - PAGE_ROWS * (WINDOW + 1)), np.uint32)
        yield np.concatenate([padded.reshape(len(group), -1), tail], axis=1)
