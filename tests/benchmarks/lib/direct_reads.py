"""What a device gives to direct reads of one size, by plain `preadv` on threads, not the runtime's reader."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np

DEPTHS = (2, 4, 8)
SECONDS = 1.0
PAGE = 4096


def direct_read_rate(files: Sequence[Path], nbytes: int, seconds: float = SECONDS) -> float:
    """GB/s of random reads of `nbytes`, whole pages, at the best of `DEPTHS` threads. Linux alone."""
    with ExitStack() as stack:
        opened = []
        for file in files:
            descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT)
            stack.callback(os.close, descriptor)
            opened.append((descriptor, (file.stat().st_size - nbytes) // PAGE))
        return max(_rate(opened, nbytes, depth, seconds) for depth in DEPTHS)


def _rate(opened: Sequence[tuple[int, int]], nbytes: int, depth: int, seconds: float) -> float:
    started = time.perf_counter()

    def read(seed: int) -> int:
        random, done = np.random.default_rng(seed), 0
        with mmap.mmap(-1, nbytes) as buffer:
            while time.perf_counter() - started < seconds:
                descriptor, pages = opened[int(random.integers(len(opened)))]
                done += os.preadv(descriptor, [buffer], int(random.integers(pages + 1)) * PAGE)
        return done

    with ThreadPoolExecutor(depth) as pool:
        done = sum(pool.map(read, range(depth)))
    return done / (time.perf_counter() - started) / 1e9
