"""The smallest budget of each real model, run in a memory cgroup of that size.

The budget is the smallest that `inspect` names with a context of 512 tokens and no drafts. Inside a cgroup of
that size nothing may be killed, the peak may not pass the budget, and decoding may not wait for reclaim. Ends
with one JSON line; exits 0 only if all of that holds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.benchmarks.ceiling.ceiling import verdict
from tests.benchmarks.lib.measure import STEADY_TOKENS, require_rig, run_engine
from tests.benchmarks.lib.ondevice_bundle import ONDEVICE

CONTEXT = 512
PROMPT_TOKENS, MAX_TOKENS = 400, 24
STEP_BYTES = 1 << 20
"""More budget after a refusal: a process that runs a benchmark is larger than the one that inspects."""


KEPT = ("peak_memory_bytes", "failcnt", "steady_failcnt", "decode_tokens_per_second")


def measure_floor(bundle: Path, threads: int) -> dict[str, Any]:
    """The run of a bundle's smallest budget, and what was wrong with it."""
    spec = {
        "model": str(bundle.resolve()),
        "prompt": [100 + 7 * index % 9000 for index in range(PROMPT_TOKENS)],
        "max_tokens": MAX_TOKENS,
        "context": CONTEXT,
        "threads": threads,
        "warm_up": 0,
        "kv_bits": 16,
        "io": "auto",
        "sparsity": "dense",
        "temperature": 0.0,
    }
    budget = smallest(bundle, threads)
    limited = run_engine("run_ondevice", spec | {"dram_budget": budget}, limit_bytes=budget)
    while "required_bytes" in limited:
        budget += STEP_BYTES
        limited = run_engine("run_ondevice", spec | {"dram_budget": budget}, limit_bytes=budget)
    row: dict[str, Any] = {"model": bundle.name, "budget_bytes": budget, "wrong": []}
    if not limited["survived"]:
        return row | {"wrong": [limited["reason"]]}
    row |= {key: limited[key] for key in KEPT}
    if row["steady_failcnt"] > MAX_TOKENS - STEADY_TOKENS:
        row["wrong"].append(f"the limit was hit {row['steady_failcnt']} times while decoding")
    if row["peak_memory_bytes"] > budget:
        row["wrong"].append(
            f"the peak is {(row['peak_memory_bytes'] - budget) / 1e6:.1f} MB above the budget"
        )
    return row


def smallest(bundle: Path, threads: int) -> int:
    """The smallest budget that `ondevice inspect` names."""
    command = [ONDEVICE, "inspect", str(bundle), "--json", "--max-context", str(CONTEXT)]
    command += ["--sparsity", "dense", "--speculation", "off", "--threads", str(threads)]
    plan = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    budget: int = plan["minimum_budget_bytes"]
    return budget


def main() -> int:
    """All bundles that are named; 0 if each runs in its smallest budget."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundles", nargs="+", type=Path, help="bundles of models")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    require_rig()
    rows = []
    for bundle in args.bundles:
        rows.append(measure_floor(bundle, args.threads))
        print(
            {key: value for key, value in rows[-1].items() if key != "wrong"}, rows[-1]["wrong"], flush=True
        )
    print(f"# {MAX_TOKENS - STEADY_TOKENS} steady tokens each")
    return verdict("floors", rows)


if __name__ == "__main__":
    sys.exit(main())
