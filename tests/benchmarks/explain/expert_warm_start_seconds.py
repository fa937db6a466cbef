"""What filling an idle model's cache with experts gains the first prompt, in seconds.

Takes the routed bundle that `tests.benchmarks.compare.experts_versus_llama_cpp --make` writes. The use of
experts is counted on the first half of its trace; prompts come from the second half. The bundle is loaded in
turns: with a prompt at once, with one that comes when the cache is full, and the same where the bundle knows
the counts. At the end the bundle is as it was. Prints every turn, and one JSON line with medians.

    python -m tests.benchmarks.explain.expert_warm_start_seconds BUNDLE [--dram-budget 8GB] [--turns 3]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import ondevice
from ondevice.bundle.expert_use import EXPERT_USE, EXPERT_USE_MANIFEST
from tests.benchmarks.lib.routed_experts import FIRST

CALIBRATED, PIECE, PROMPT, DECODED = 512, 128, 16, 16
SETTLED_SECONDS = 2.0
STARTS = AT_ONCE, IDLE, COUNTED = "at once", "idle", "idle, counted"


def wait_until_filled(model: ondevice.Model) -> float:
    """Wait until nothing is read any more. Returns the seconds until then."""
    began = last = time.perf_counter()
    read = -1
    while time.perf_counter() < last + SETTLED_SECONDS:
        now = model.counters.flash_bytes_read
        if now != read:
            read, last = now, time.perf_counter()
        time.sleep(0.05)
    return last - began


def turn(folder: Path, budget: str, first: int, idle: bool) -> dict[str, float]:
    """Seconds that the cache took to fill, to the first token, and for each of the others."""
    with ondevice.load(
        folder, dram_budget=budget, backend="cpu", speculation="off", max_context=2048, kv_bits=8
    ) as model:
        filled = wait_until_filled(model) if idle else 0.0
        began = time.perf_counter()
        prompt, times = range(FIRST + first, FIRST + first + PROMPT), []
        for event in model.stream(tokens=list(prompt), max_tokens=1 + DECODED, temperature=0.0):
            if event.token is not None:
                times.append(time.perf_counter())
        return {
            "filled": filled,
            "first_token": times[0] - began,
            "next_tokens": (times[-1] - times[0]) / DECODED,
        }


def main() -> int:
    """Count, load in turns, print; always 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--dram-budget", default="8GB")
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    added = [args.bundle / name for name in (EXPERT_USE, EXPERT_USE_MANIFEST)]
    if any(path.exists() for path in added):
        parser.error(f"{args.bundle} knows the use of its experts already")
    steps = range(FIRST, FIRST + CALIBRATED)
    pieces = [list(steps[at : at + PIECE]) for at in range(0, CALIBRATED, PIECE)]
    figures: dict[str, list[dict[str, float]]] = {start: [] for start in STARTS}
    try:
        ondevice.train_expert_use(args.bundle, pieces=pieces, dram_budget=args.dram_budget)
        kept = [(path, path.read_bytes()) for path in added]
        for number in range(args.turns):
            first = CALIBRATED + number * (PROMPT + DECODED)
            for start, found in figures.items():
                for path, data in kept:
                    path.write_bytes(data) if start == COUNTED else path.unlink(missing_ok=True)
                found.append(turn(args.bundle, args.dram_budget, first, start != AT_ONCE))
                print(start, {name: round(seconds, 3) for name, seconds in found[-1].items()}, flush=True)
    finally:
        for path in added:
            path.unlink(missing_ok=True)
    medians = {
        start: {name: statistics.median(one[name] for one in found) for name in found[0]}
        for start, found in figures.items()
    }
    print(json.dumps({"benchmark": "expert_warm_start_seconds", "budget": args.dram_budget} | medians))
    return 0


if __name__ == "__main__":
    sys.exit(main())
