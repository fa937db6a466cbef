"""Stages of work that run at the same time: each stage is a generator, run ahead on a thread of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def ahead(source: Generator[T, None, None], depth: int) -> Generator[T, None, None]:
    """The items of `source`, computed up to `depth` ahead on another thread, in order.

    An exception of `source` is raised here, after the items before it. Closing this generator waits for the
    item under way, then closes `source`.
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
