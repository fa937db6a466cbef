"""Reading only the neurons that fire against llama.cpp, on a synthetic Llama-7B shape, in cold pairs.

Ours is a ReLU model whose sparsity is planted in its weights (`synthetic.py`), at q4; llama.cpp holds the
same shape in Q4_0, whose speed doesn't depend on the values. Both have 8-bit KV, a context of 512 tokens, and
a memory cgroup of the budget, which is a share of the GGUF's size. Tokens are drawn at random, lest a greedy
loop over random weights repeat itself and make the cache look good. Ends with one JSON line; exits 0 only if
every `at least` holds.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from measure import HERE, machine, require_rig
from random_model import LLAMA_7B, gguf_file
from synthetic import Plant, synthetic_bundle
from versus_llama_cpp import PLAIN_MMAP, Case, Rivals, measure_case, table

DENSITY = 0.10
RANDOM_TEXT = 50.0
"""A temperature at which a random head's choice is all but uniform."""
CASES = (
    Case(
        "exact-75",
        5.0,
        8.0,
        max_tokens=48,
        warm_up=False,
        share=0.75,
        sparsity="exact",
        temperature=RANDOM_TEXT,
        rival=(PLAIN_MMAP,),
    ),
    Case("exact-resident", 2.0, 2.5, max_tokens=96, sparsity="exact", temperature=RANDOM_TEXT),
)


def main() -> int:
    """Run the chosen cases; 0 if all hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", action="append", choices=[case.name for case in CASES], help="default: all")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--workdir", type=Path, default=HERE.parents[1] / "build/bench")
    args = parser.parse_args()
    require_rig()
    bundle = synthetic_bundle(LLAMA_7B, Plant(DENSITY), args.workdir)
    rivals = Rivals(bundle, gguf_file(LLAMA_7B, args.workdir), args.threads)
    rows = [
        measure_case(rivals, case, args.pairs)
        for case in CASES
        if args.case is None or case.name in args.case
    ]
    passed = all(row["passed"] for row in rows)
    print(table(rows))
    summary = {"benchmark": "flash_versus_llama_cpp", "passed": passed, "machine": machine()}
    print(json.dumps(summary | {"density": DENSITY, "pairs": args.pairs, "cases": rows}))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
