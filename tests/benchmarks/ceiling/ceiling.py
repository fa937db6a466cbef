"""The budget is a ceiling: ten budgets from the minimum to the whole model, at a 1,500-token context.

Each budget is run twice, from cold caches. Inside a memory cgroup of that size nothing may be killed, and
once residency has filled the limit may be hit at most once a token (`failcnt`): that is a page of library
code coming back, where a stall in reclaim is thousands. (Before that it is hit while the program's own files,
read once at the start, leave the page cache for weights; decoding in the cgroup, the second rate, shows
whether anything waits for that.) Without a limit, the peak of resident memory (mapped
files included) may not pass the budget, and the plan's total must agree with it within the larger of 5 % and
16 MB. Ends with one JSON line; exits 0 only if all of that holds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.benchmarks.lib.measure import STEADY_TOKENS, Result, machine, note, require_rig, run_engine
from tests.benchmarks.lib.ondevice_bundle import ONDEVICE, bundle_folder
from tests.benchmarks.lib.random_model import LLAMA_7B, SMALL, Shape, huggingface_folder, random_tokens
from tests.support.paths import ROOT

CONTEXT = 1500
BUDGETS = 10
MAX_TOKENS = 16
SHAPES = {shape.name: shape for shape in (SMALL, LLAMA_7B)}


def inspect(
    bundle: Path, budget: int, threads: int, context: int = CONTEXT, sparsity: str = "dense"
) -> dict[str, Any]:
    """`ondevice inspect --json`: the plan, before anything is loaded."""
    command = [ONDEVICE, "inspect", "--model", str(bundle), "--json", "--sparsity", sparsity]
    command += ["--dram-budget", str(budget), "--max-context", str(context), "--kv-bits", "8"]
    command += ["--threads", str(threads)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if not result.stdout.strip():
        raise SystemExit(f"inspect said nothing: {result.stderr.strip()}")
    plan: dict[str, Any] = json.loads(result.stdout)
    return plan


def budgets(bundle: Path, threads: int) -> list[int]:
    """From the smallest that works to the one with room for the whole model, evenly spaced."""
    generous = inspect(bundle, 1 << 40, threads)
    lowest, highest = generous["minimum_budget_bytes"], generous["plan"]["total_bytes"]
    return [lowest + (highest - lowest) * step // (BUDGETS - 1) for step in range(BUDGETS)]


def measure_budget(bundle: Path, shape: Shape, budget: int, threads: int) -> dict[str, Any]:
    """Both runs of one budget, and what was wrong with them."""
    spec = {
        "model": str(bundle.resolve()),
        "prompt": random_tokens(CONTEXT - MAX_TOKENS, shape.vocab_size),
        "max_tokens": MAX_TOKENS,
        "context": CONTEXT,
        "threads": threads,
        "warm_up": 0,
        "dram_budget": budget,
        "io": "auto",
        "sparsity": "dense",
        "temperature": 0.0,
    }
    limited = run_engine("run_ondevice", spec, limit_bytes=budget)
    free = run_engine("run_ondevice", spec)
    row: dict[str, Any] = {"shape": shape.name, "budget_bytes": budget}
    row["wrong"] = complaints(budget, limited, free)
    if free["survived"]:
        row |= {key: free[key] for key in ("peak_memory_bytes", "plan_bytes", "decode_tokens_per_second")}
    if limited["survived"]:
        row |= {key: limited[key] for key in ("failcnt", "steady_failcnt")}
        row["decode_tokens_per_second_in_cgroup"] = limited["decode_tokens_per_second"]
    return row


def complaints(
    budget: int, limited: Result, free: Result | None, steady_tokens: int = MAX_TOKENS - STEADY_TOKENS
) -> list[str]:
    """What breaks the ceiling, in words; empty if it holds. steady_tokens: those `steady_failcnt` is of.

    free: the run without a limit; where there is none, the limited run's own peak is compared with the plan.
    """
    wrong = []
    if not limited["survived"]:
        wrong.append(f"in a cgroup of the budget: {limited['reason']}")
    elif limited["steady_failcnt"] > steady_tokens:
        wrong.append(f"the limit was hit {limited['steady_failcnt']} times in {steady_tokens} tokens")
    if free is None:
        free = limited
        if not limited["survived"]:
            return wrong
    if not free["survived"]:
        return [*wrong, f"unlimited: {free['reason']}"]
    peak, plan = free["peak_memory_bytes"], free["plan_bytes"]
    if peak > budget:
        wrong.append(f"the peak is {(peak - budget) / 1e6:.1f} MB above the budget")
    if abs(plan - peak) > max(0.05 * peak, 16e6):
        wrong.append(f"the plan's total is {(plan - peak) / 1e6:+.1f} MB off the peak")
    return wrong


def line(row: dict[str, Any]) -> str:
    """One row of the table."""
    figures = [f"{row.get(key, 0) / 1e6:.1f}" for key in ("budget_bytes", "plan_bytes", "peak_memory_bytes")]
    figures += [str(row.get("failcnt", "")), str(row.get("steady_failcnt", ""))]
    rates = ("decode_tokens_per_second", "decode_tokens_per_second_in_cgroup")
    figures += [f"{row.get(key, 0):.2f}" for key in rates]
    return f"| {row['shape']} | " + " | ".join(figures) + f" | {'; '.join(row['wrong']) or 'held'} |"


def main() -> int:
    """All budgets of the chosen shapes; 0 if the ceiling holds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", action="append", choices=sorted(SHAPES), help="default: all")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--workdir", type=Path, default=ROOT / "build/bench")
    args = parser.parse_args()
    require_rig()
    rows: list[dict[str, Any]] = []
    print(
        "| shape | budget MB | plan MB | peak MB | failcnt | of it steady | tokens/s | in the cgroup | |\n"
        + "|---" * 9
        + "|"
    )
    for name in args.shape or SHAPES:
        shape = SHAPES[name]
        bundle = bundle_folder(huggingface_folder(shape, args.workdir), args.workdir)
        for budget in budgets(bundle, args.threads):
            note(f"{name}: {budget / 1e6:.1f} MB")
            rows.append(measure_budget(bundle, shape, budget, args.threads))
            print(line(rows[-1]), flush=True)
    return verdict("ceiling", rows)


def verdict(benchmark: str, rows: list[dict[str, Any]]) -> int:
    """Print the line of JSON; 0 if nothing was wrong with any row."""
    passed = not any(row["wrong"] for row in rows)
    print(json.dumps({"benchmark": benchmark, "passed": passed, "machine": machine(), "budgets": rows}))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
