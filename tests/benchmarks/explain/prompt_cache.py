"""The first token of a prompt behind a restart, with and without a prompt cache, on a 7B shape.

Random weights, which a bundle is made of once (a checkpoint of 13.5 GB and a bundle of 3.9 GB for all layers;
`--layers` takes fewer), or `--bundle`, with the vocabulary of that shape. Each run is a process of its own
under the same budget: without a cache, one that fills the cache, and one behind it that finds everything
there. Times are from the request, with the model loaded, to the first token. Ends with one JSON line; exits 0
only if the cache is at least 10 times as fast, the tokens and their log-probabilities are equal, and no peak
exceeds the budget.

    python -m tests.benchmarks.explain.prompt_cache --workdir DIR [--layers 32] [--tokens 2000] [--budget 60%]
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import ondevice
from ondevice.units import format_bytes
from tests.benchmarks.lib.measure import machine
from tests.benchmarks.lib.ondevice_bundle import bundle_folder
from tests.benchmarks.lib.random_model import LLAMA_7B, huggingface_folder, random_tokens

LEAST_RATIO = 10.0
COUNT = 4


def answered(bundle: Path, args: argparse.Namespace, cache: str) -> dict[str, Any]:
    """One run in this process: seconds to the first token, and to what was written is on the disk."""
    prompt = random_tokens(args.tokens, LLAMA_7B.vocab_size)
    options: dict[str, Any] = {"kv_bits": args.kv_bits, "speculation": "off", "max_context": args.tokens + 64}
    with ondevice.load(bundle, dram_budget=args.budget, prompt_cache=cache, **options) as model:
        begun = time.perf_counter()
        events = model.stream(tokens=prompt, max_tokens=COUNT, top_logprobs=0)
        said = [next(events)]
        first = time.perf_counter() - begun
        *rest, last = events
        decoded = time.perf_counter() - begun - first
        said += rest
        budget, idle = model.plan.budget_bytes, time.perf_counter()
    assert last.stats is not None
    return {
        "first_token_seconds": first,
        "decode_seconds": decoded,
        "write_seconds": time.perf_counter() - idle,
        "restored_tokens": last.stats.restored_tokens,
        "peak_memory_bytes": last.stats.peak_memory_bytes,
        "budget_bytes": budget,
        "text": [(event.token, event.logprob) for event in said],
    }


def run(args: argparse.Namespace, bundle: Path, cache: str) -> dict[str, Any]:
    """One run in a process of its own."""
    command = [sys.executable, "-m", "tests.benchmarks.explain.prompt_cache", "--workdir", str(args.workdir)]
    command += ["--tokens", str(args.tokens), "--kv-bits", str(args.kv_bits), "--budget", args.budget]
    done = subprocess.run(
        [*command, "--once", "--bundle", str(bundle), "--cache", cache],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> int:
    """Print the table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workdir", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=LLAMA_7B.num_layers)
    parser.add_argument("--tokens", type=int, default=2000, help="of the prompt")
    parser.add_argument("--kv-bits", type=int, choices=(16, 8), default=16)
    parser.add_argument("--budget", default="60%")
    parser.add_argument("--runs", type=int, default=3, help="behind the one that fills the cache")
    parser.add_argument("--bundle", type=Path, help="measured instead of the shape's")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--cache", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.once:
        print(json.dumps(answered(args.bundle, args, args.cache)))
        return 0
    shape = replace(LLAMA_7B, name=f"llama-7b-{args.layers}", num_layers=args.layers)
    bundle = args.bundle or bundle_folder(huggingface_folder(shape, args.workdir), args.workdir)
    cache = args.workdir / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    plain, filling = run(args, bundle, ""), run(args, bundle, str(cache))
    nbytes = sum(path.stat().st_size for path in cache.rglob("*") if path.is_file())
    again = [run(args, bundle, str(cache)) for _ in range(args.runs)]
    shutil.rmtree(cache)
    runs = {"without": plain, "filling it": filling} | {
        f"with it, {at + 1}": it for at, it in enumerate(again)
    }
    print(f"{'':12} {'first token':>11} {'restored':>8} {'at the end':>10} {'peak':>8} {'budget':>8}")
    for name, it in runs.items():
        times = f"{it['first_token_seconds']:9.2f} s {it['restored_tokens']:8} {it['write_seconds']:8.2f} s"
        peak, budget = format_bytes(it["peak_memory_bytes"]), format_bytes(it["budget_bytes"])
        print(f"{name:12} {times} {peak:>8} {budget:>8}")
    median = statistics.median(it["first_token_seconds"] for it in again)
    ratio = plain["first_token_seconds"] / median
    equal = all(it["text"] == plain["text"] for it in runs.values())
    inside = all(it["peak_memory_bytes"] <= it["budget_bytes"] for it in runs.values())
    found = {"ratio": ratio, "equal": equal, "inside": inside, "cache_bytes": nbytes, "runs": runs}
    found |= {"bundle": bundle.name, "tokens": args.tokens, "kv_bits": args.kv_bits, "machine": machine()}
    print(json.dumps(found))
    return 0 if ratio >= LEAST_RATIO and equal and inside else 1


if __name__ == "__main__":
    raise SystemExit(main())
