"""Runs stages of work at the same time: each stage is a generator that runs ahead on a separate thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def ahead(source: Generator[T, None, None], depth: int) -> Generator[T, None, None]:
    """Yields the items of `source` in order. Another thread computes up to `depth` of them ahead.

    An exception of `source` is raised here, after the items that precede it. Closing this generator waits for
    the item that is being computed, then closes `source`.
    """
    end = object()
    pool = ThreadPoolExecutor(1, thread_name_prefix="converter-stage")
    try:
        pending = deque(pool.submit(next, source, end) for _ in range(depth))
        while (item := pending.popleft().result()) is not end:
            pending.append(pool.submit(next, source, end))
            yield item  # type: ignore[misc]
            # Don't keep the item alive while the next one is awaited.
            del item
    finally:
        pool.shutdown(cancel_futures=True)
        source.close()
