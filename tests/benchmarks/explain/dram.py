"""What reading alone gets from DRAM, beside engines that can't be faster than that. Prints GB/s."""

from __future__ import annotations

import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np


def dram_gigabytes_per_second(threads: int, repeats: int = 15) -> float:
    """`threads` threads that do nothing but read: median over passes of 512 MB each."""
    arrays = [np.ones(1 << 26, dtype=np.int64) for _ in range(threads)]
    rates = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(repeats):
            started = time.perf_counter()
            list(pool.map(np.bitwise_or.reduce, arrays))
            rates.append(sum(array.nbytes for array in arrays) / (time.perf_counter() - started) / 1e9)
    return statistics.median(rates)


if __name__ == "__main__":
    print(f"{dram_gigabytes_per_second(int(sys.argv[1]) if len(sys.argv) > 1 else 2):.1f}")
