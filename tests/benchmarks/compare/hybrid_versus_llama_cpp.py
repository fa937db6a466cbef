"""A dense hybrid in the shape of Qwen3.5-4B, gated delta rules and attention, against llama.cpp, in memory.

Both run one GGUF file of random codes in Q4_0, ours as the bundle that `ondevice convert` makes of it, in
interleaved cold pairs. Then ours alone with 8,000 tokens in a cgroup of 4 GB: whether it keeps to the budget,
and its speed behind that many tokens over its roofline, the bytes that a token's pass reads of memory over
the measured rate. Ends with one JSON line; exits 0 only if every `at least` holds.

    python -m tests.benchmarks.compare.hybrid_versus_llama_cpp --workdir DIR
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from ondevice.backends.kv_layout import BLOCK_TOKENS, KVLayout
from ondevice.bundle.reader import Bundle
from tests.benchmarks.compare.versus_llama_cpp import Case, Rivals, measure_case, table
from tests.benchmarks.explain.dram import dram_gigabytes_per_second
from tests.benchmarks.lib.hybrid_gguf import HYBRID_4B, hybrid_file
from tests.benchmarks.lib.measure import machine, note, require_rig, run_engine
from tests.benchmarks.lib.ondevice_bundle import bundle_folder
from tests.benchmarks.lib.random_model import random_tokens
from tests.support.paths import ROOT

CASES = (
    Case("decode", 1.2, 1.5),
    Case("prefill-512", 1.0, 1.2, "prefill_tokens_per_second", prompt_tokens=512, max_tokens=1, context=576),
)
LONG_TOKENS, LONG_DECODED, LONG_BYTES = 8000, 64, 4_000_000_000
LONG_AT_LEAST = 0.8
"""Of the roofline."""


def token_bytes(bundle: Bundle, length: int) -> int:
    """Bytes of memory that one token's pass reads behind `length` tokens, all weights in memory.

    The head is the embedding, so that a pass reads all files. States are read and written.
    """
    kv = KVLayout(bundle.config, 8)
    weights = sum(file.stat().st_size for file in bundle.path.glob("*.safetensors"))
    return weights + length * kv.block_bytes // BLOCK_TOKENS + 2 * kv.states.nbytes


def long_text(bundle: Path, threads: int, rounds: int) -> dict[str, Any]:
    """Runs of `LONG_TOKENS` tokens in a cgroup, the last of them decoded."""
    read = token_bytes(Bundle.open(bundle), LONG_TOKENS)
    prompt = random_tokens(LONG_TOKENS - LONG_DECODED, 32_000)
    spec = {"model": str(bundle.resolve()), "prompt": prompt, "max_tokens": LONG_DECODED}
    spec |= {"context": LONG_TOKENS + 16, "threads": threads, "warm_up": 0, "dram_budget": LONG_BYTES}
    spec |= {"io": "auto", "sparsity": "dense", "temperature": 0.0}
    shares, runs = [], []
    for number in range(rounds):
        run = run_engine("run_ondevice", spec, LONG_BYTES, 1800.0)
        if not run["survived"]:
            return {"case": "long", "passed": False, "reason": run["reason"]}
        rate = dram_gigabytes_per_second(threads) * 1e9
        shares.append(run["decode_tokens_per_second"] * read / rate)
        runs.append(run)
        note(
            f"long {number + 1}/{rounds}: {run['decode_tokens_per_second']:.2f} tokens/s, {shares[-1]:.2f} "
            f"of the roofline at {rate / 1e9:.0f} GB/s; peak {run['peak_memory_bytes'] / 1e9:.2f} GB, "
            f"limit hit {run['steady_failcnt']} times before the last tokens"
        )
    share = statistics.median(shares)
    return {
        "case": "long",
        "at_least": LONG_AT_LEAST,
        "share_of_roofline": share,
        "shares": shares,
        "bytes_per_token": read,
        "runs": runs,
        "passed": share >= LONG_AT_LEAST,
    }


def main() -> int:
    """Run the chosen cases; 0 if all hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = [*(case.name for case in CASES), "long"]
    parser.add_argument("--case", action="append", choices=names, help="default: all")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--workdir", type=Path, default=ROOT / "build/bench")
    args = parser.parse_args()
    require_rig()
    gguf = hybrid_file(HYBRID_4B, args.workdir)
    bundle = bundle_folder(gguf, args.workdir, "auto")
    rivals, chosen = Rivals(bundle, gguf, args.threads), args.case or names
    rows = [measure_case(rivals, case, args.pairs) for case in CASES if case.name in chosen]
    print(table(rows))
    if "long" in chosen:
        rows.append(long_text(bundle, args.threads, min(args.pairs, 3)))
        print(f"8,000 tokens in 4 GB: {rows[-1].get('share_of_roofline', rows[-1].get('reason'))}")
    passed = all(row["passed"] for row in rows)
    line = {"benchmark": "hybrid_versus_llama_cpp", "passed": passed, "machine": machine()}
    print(json.dumps(line | {"pairs": args.pairs, "cases": rows}))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
