"""What memory keeps where texts share passes under a budget that moves, without a server around it.

    .venv/bin/python -m tests.benchmarks.explain.moving_budgets [--rounds 9]

Each round sets 30 budgets between the least and all of the shipped model, and writes four texts at once under
each. A row a round, under the largest budget and with heaps trimmed: the process's memory that no file is
behind, what the C library's heaps have handed out (glibc), and Python's blocks.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import random
import sys
import threading
from pathlib import Path

import ondevice
from ondevice.units import trim_heap
from tests.support.paths import SHIPPED

FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
BUDGETS, TEXTS = 30, 4


class Heaps(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in FIELDS.split())
    uordblks: int


def anonymous_kilobytes() -> int:
    """Memory of this process that no file is behind, in KiB."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon"))


def write(model: ondevice.Model, number: int) -> None:
    """One of a few texts."""
    for _ in model.stream(f"Find me a restaurant {number} that is cheap.", max_tokens=8, seed=1):
        pass


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    chance, heaps = random.Random(0), ctypes.CDLL(None).mallinfo2
    heaps.restype = Heaps
    with ondevice.load(SHIPPED, parallel=TEXTS, memory_pressure="off", threads=2) as model:
        least, full = model.plan.minimum_budget_bytes, model.plan.full_bytes
        for turn in range(args.rounds):
            for _ in range(BUDGETS):
                model.set_dram_budget(chance.randint(least, full))
                numbers = [chance.randrange(24) for _ in range(TEXTS)]
                threads = [threading.Thread(target=write, args=(model, number)) for number in numbers]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
            model.set_dram_budget(full)
            write(model, 0)
            gc.collect()
            trim_heap()
            row = {"round": turn, "anonymous_kib": anonymous_kilobytes(), "heaps_kib": heaps().uordblks >> 10}
            print(row | {"python_blocks": sys.getallocatedblocks()}, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
