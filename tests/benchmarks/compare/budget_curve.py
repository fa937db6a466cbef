"""Decoding from the smallest budget to everything resident, beside what flash allows and beside others.

For each budget, inside a cgroup of that size with dropped caches: ondevice without drafts, and llama.cpp by
plain mmap; with --layers, a loader that keeps one layer in memory, once. Before each round the bundle's
slices are read alone, for the rate that flash gives then. A token needs at least the longer of its reads at
that rate and of its time with everything resident: `over the bound` is its time over that. Prints a table
and one JSON line.

    python -m tests.benchmarks.compare.budget_curve --model BUNDLE [--gguf FILE] [--layers] [--points 10]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import ondevice
from ondevice.bundle.reader import Bundle
from ondevice.flash.reader import FlashReader
from tests.benchmarks.explain.slice_reads import extents, rate
from tests.benchmarks.lib.measure import (
    LIMITED_TIMEOUT_SECONDS,
    PLAIN_MMAP,
    STEADY_TOKENS,
    machine,
    note,
    require_rig,
    run_engine,
)

MAX_TOKENS, CONTEXT = 32, 512
RUN: dict[str, object] = {
    "prompt": list(range(100, 164)),
    "max_tokens": MAX_TOKENS,
    "context": CONTEXT,
    "warm_up": 0,
    "kv_bits": 16,
}
"""What every engine is told of a run."""
SLOTS = 16
LOADER_TOKENS = 5


def budgets(model: Path, points: int) -> list[int]:
    """Budgets from the smallest that works to that of everything resident, evenly apart, ascending."""
    plan = ondevice.inspect(
        model, backend="cpu", sparsity="dense", speculation="off", max_context=CONTEXT, kv_bits=16
    )
    smallest, largest = plan.minimum_budget_bytes, plan.full_bytes
    return [smallest + (largest - smallest) * at // (points - 1) for at in range(points)]


def flash_rate(model: Path) -> float:
    """Bytes per second at which the bundle's slices come while nothing else is done."""
    bundle = Bundle.open(model)
    files = [bundle.neuron_file(layer) for layer in range(bundle.config.num_layers)]
    with FlashReader(files) as reader:
        return rate(reader, extents(bundle, whole=True), SLOTS)


def ours(args: argparse.Namespace, budget: int | str) -> dict[str, Any]:
    """One run of ondevice without drafts."""
    spec = {
        **RUN,
        "model": str(args.model),
        "threads": args.threads,
        "dram_budget": budget,
        "io": "auto",
        "sparsity": "dense",
        "temperature": 0.0,
        "speculation": "off",
    }
    return run_engine("run_ondevice", spec, budget if isinstance(budget, int) else None)


def llama_cpp(args: argparse.Namespace, limit: int) -> dict[str, Any]:
    """One run of llama.cpp under a limit."""
    spec = {**RUN, **PLAIN_MMAP, "model": str(args.gguf), "threads": args.threads}
    return run_engine("run_llama_cpp", spec, limit, LIMITED_TIMEOUT_SECONDS)


def layer_loader(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One run of the loader that keeps one layer in memory."""
    spec = {"gguf": str(args.gguf), "folder": str(folder), "threads": args.threads}
    run_engine("run_layer_loader", {**spec, "only_store": True})
    # Each file is read once in a pass, and the limit keeps none of them for the next one.
    limit = args.gguf.stat().st_size
    return run_engine(
        "run_layer_loader", {**spec, "prompt": RUN["prompt"], "max_tokens": LOADER_TOKENS}, limit
    )


def speed(result: dict[str, Any]) -> float | None:
    """Tokens per second of a run that survived."""
    return float(result["decode_tokens_per_second"]) if result["survived"] else None


def measure(args: argparse.Namespace, budget: int, resident: float) -> dict[str, Any]:
    """Medians of one budget's rounds."""
    rows: dict[str, list[float]] = {}
    for _ in range(args.rounds):
        flash = flash_rate(args.model)
        result = ours(args, budget)
        values = {"flash": flash / 1e9, "ondevice": speed(result)}
        if result["survived"]:
            read = result["steady"]["flash_bytes_read"] / (MAX_TOKENS - STEADY_TOKENS)
            seconds = 1 / result["decode_tokens_per_second"]
            values |= {"read_mb": read / 1e6, "over": seconds / max(read / flash, 1 / resident)}
        if args.gguf is not None:
            values["llama.cpp"] = speed(llama_cpp(args, budget))
        for name, value in values.items():
            if value is not None:
                rows.setdefault(name, []).append(value)
        note(f"{budget / 1e6:.0f} MB: {values}")
    return {"budget_mb": budget / 1e6, **{name: statistics.median(some) for name, some in rows.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--gguf", type=Path, help="the same model, for the other engines")
    parser.add_argument("--layers", action="store_true", help="also run a loader of single layers")
    parser.add_argument("--points", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    require_rig()
    resident = float(speed(ours(args, "auto")) or 0.0)
    note(f"everything resident: {resident:.1f} tokens/s")
    rows = [measure(args, budget, resident) for budget in budgets(args.model, args.points)]
    columns = ("budget_mb", "ondevice", "llama.cpp", "read_mb", "flash", "over")
    titles = ("budget, MB", "ondevice, tokens/s", "llama.cpp", "MB read", "flash, GB/s", "over the bound")
    print("| " + " | ".join(titles) + " |")
    print("| --- |" + " --- |" * (len(columns) - 1))
    for row in rows:
        print("| " + " | ".join(f"{row[name]:.3g}" if name in row else "" for name in columns) + " |")
    line: dict[str, Any] = {"benchmark": "budget_curve", "resident": resident, "rows": rows}
    if args.layers and args.gguf is not None:
        with tempfile.TemporaryDirectory() as folder:
            line["layer_loader"] = layer_loader(args, Path(folder))
    print(json.dumps(line | {"machine": machine()}))


if __name__ == "__main__":
    main()
