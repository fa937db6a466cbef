"""The budget is a ceiling for long texts too: 2,000 tokens in one session whose topic changes half-way.

Synthetic models with planted sparsity (`synthetic.py`), exact and predicted, under three budgets from the
smallest on. A topic is 64 tokens, of which the text is drawn at random; half-way it is 64 others, and other
neurons fire, while keys and values go on growing into the cache's memory. Each topic begins with a prompt,
whose scratch memory the cache gives and has back. Each budget is run in a memory cgroup of its size and
without a limit, and held to what `ceiling.py` holds it to, once a cache that grows with what the text asks
for has filled and what the start has read has left the page cache: from the middle of the first topic on.
Beside that stands the cache's hit rate for each topic. Ends with one JSON line; exits 0 only if every ceiling
held.

With `--case`, the model, mode and budget of that case of `flash_versus_llama_cpp.py` instead, at its context:
full, a new session begins. It is run once, in the cgroup: there, not being killed and hardly ever hitting the
limit show that it keeps to the budget, and the plan is compared with the peak inside.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.ceiling.ceiling import SHAPES, complaints, inspect, verdict
from tests.benchmarks.compare.flash_versus_llama_cpp import CASES, TENTH
from tests.benchmarks.lib.measure import Result, note, require_rig, run_engine
from tests.benchmarks.lib.random_model import LLAMA_7B, Shape, gguf_file
from tests.benchmarks.lib.synthetic import synthetic_bundle
from tests.support.paths import ROOT

MODES = ("exact", "predicted")
BUDGETS = 3
TOPICS, TOPIC_WORDS = 2, 64
PROMPT_TOKENS = 256
"""As many as go through a model together."""
TIMEOUT_SECONDS = 7200.0


def topics(vocab_size: int) -> list[list[int]]:
    """Disjoint sets of tokens, away from the special ones at the table's start."""
    drawn = np.random.default_rng(11).permutation(np.arange(300, vocab_size))
    return [drawn[number * TOPIC_WORDS :][:TOPIC_WORDS].tolist() for number in range(TOPICS)]


def budgets(bundle: Path, threads: int, context: int, sparsity: str) -> list[int]:
    """The smallest that works, and others evenly spaced below the one with room for the whole model."""
    generous = inspect(bundle, 1 << 40, threads, context, sparsity)
    lowest, highest = generous["minimum_budget_bytes"], generous["plan"]["total_bytes"]
    return [lowest + (highest - lowest) * step // BUDGETS for step in range(BUDGETS)]


def run_limited(spec: dict[str, Any], budget: int) -> Result:
    """One run in a cgroup of the budget."""
    return run_engine("run_two_topics", spec | {"limited": True}, budget, TIMEOUT_SECONDS)


def row_of(name: str, spec: dict[str, Any], limited: Result, free: Result | None) -> dict[str, Any]:
    """What a row of the table says of the runs, the second of which there may be, and what was wrong."""
    budget = spec["dram_budget"]
    row: dict[str, Any] = {"shape": name, "sparsity": spec["sparsity"], "budget_bytes": budget}
    steady_tokens = TOPICS * spec["max_tokens"] - spec["max_tokens"] // 2
    row["wrong"] = complaints(budget, limited, free, steady_tokens)
    if free is not None and free["survived"]:
        row |= {key: free[key] for key in ("peak_memory_bytes", "plan_bytes", "tokens", "topics")}
    elif limited["survived"]:
        row |= {key: limited[key] for key in ("peak_memory_bytes", "plan_bytes", "tokens")}
    if limited["survived"]:
        row |= {key: limited[key] for key in ("failcnt", "steady_failcnt", "cgroup_peak_bytes")}
        row["peak_memory_bytes_in_cgroup"] = limited["peak_memory_bytes"]
        row["topics_in_cgroup"] = limited["topics"]
    return row


def measure_budget(spec: dict[str, Any], shape: Shape, budget: int) -> dict[str, Any]:
    """Both runs of one budget, and what was wrong with them."""
    spec = spec | {"dram_budget": budget}
    limited = run_limited(spec, budget)
    free = run_engine("run_two_topics", spec | {"limited": False}, None, TIMEOUT_SECONDS)
    return row_of(shape.name, spec, limited, free)


def measure_case(name: str, tokens: int, threads: int, workdir: Path) -> dict[str, Any]:
    """The one run of a case of the speed table. Without a budget of its own, it has the whole model's."""
    plant, case = next((plant, case) for plant, case in CASES if case.name == name)
    bundle = synthetic_bundle(LLAMA_7B, plant, workdir)
    budget = int(case.share * gguf_file(LLAMA_7B, workdir).stat().st_size)
    if not budget:
        plan = inspect(bundle, 1 << 40, threads, case.context, case.sparsity)["plan"]
        budget = plan["full_bytes"]
    note(f"{name}: {case.sparsity}, {budget / 1e6:.1f} MB")
    spec = session_spec(bundle, LLAMA_7B, tokens, case.context, threads)
    spec |= {"sparsity": case.sparsity, "dram_budget": budget}
    return row_of(name, spec, run_limited(spec, budget), None)


def session_spec(bundle: Path, shape: Shape, tokens: int, context: int, threads: int) -> dict[str, Any]:
    """What every run of a model is told."""
    return {
        "model": str(bundle.resolve()),
        "topics": topics(shape.vocab_size),
        "prompt_tokens": PROMPT_TOKENS,
        "max_tokens": tokens,
        "context": context,
        "threads": threads,
        "io": "auto",
    }


def line(row: dict[str, Any]) -> str:
    """One row of the table."""
    sizes = ("budget_bytes", "plan_bytes", "peak_memory_bytes")
    figures = [f"{row.get(key, 0) / 1e6:.1f}" for key in sizes]
    figures += [str(row.get(key, "")) for key in ("failcnt", "steady_failcnt")]
    halves = row.get("topics") or row.get("topics_in_cgroup", [])
    figures.append(", ".join(f"{half['neuron_cache_hit_rate']:.0%}" for half in halves))
    for key in ("topics", "topics_in_cgroup"):
        figures.append(", ".join(f"{half['decode_tokens_per_second']:.1f}" for half in row.get(key, [])))
    cells = [row["shape"], row["sparsity"], *figures, "; ".join(row["wrong"]) or "held"]
    return "| " + " | ".join(cells) + " |"


def main() -> int:
    """All modes and budgets of the chosen shapes; 0 if the ceiling holds."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = [case.name for _, case in CASES]
    parser.add_argument("--shape", action="append", choices=sorted(SHAPES), help="default: small")
    parser.add_argument("--case", action="append", choices=names, help="default: all")
    parser.add_argument("--sparsity", action="append", choices=MODES, help="of shapes; default: both")
    parser.add_argument("--tokens", type=int, default=1000, help="of each topic")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--workdir", type=Path, default=ROOT / "build/bench")
    args = parser.parse_args()
    require_rig()
    rows: list[dict[str, Any]] = []
    print(
        "| shape | mode | budget MB | plan MB | peak MB | failcnt | of it steady | hits by topic "
        "| tokens/s by topic | in the cgroup | |\n" + "|---" * 11 + "|"
    )
    for name in args.case or ([] if args.shape else names):
        rows.append(measure_case(name, args.tokens, args.threads, args.workdir))
        print(line(rows[-1]), flush=True)
    for name in args.shape or ([] if args.case else ["small"]):
        shape = SHAPES[name]
        bundle = synthetic_bundle(shape, TENTH, args.workdir)
        spec = session_spec(bundle, shape, args.tokens, TOPICS * (PROMPT_TOKENS + args.tokens), args.threads)
        for sparsity in args.sparsity or MODES:
            for budget in budgets(bundle, args.threads, spec["context"], sparsity):
                note(f"{name}, {sparsity}: {budget / 1e6:.1f} MB")
                rows.append(measure_budget(spec | {"sparsity": sparsity}, shape, budget))
                print(line(rows[-1]), flush=True)
    return verdict("long_ceiling", rows)


if __name__ == "__main__":
    sys.exit(main())
