"""OPT's shape with sparse neurons against llama.cpp on an ungated shape of as many bytes, in cold pairs.

Ours is OPT-6.7B's shape at q4, with 97 % of the neurons silent by what is planted in the weights
(`planted_opt.py`); the mode is `predicted`, the budget a half of the GGUF's size. llama.cpp has no OPT: it
runs StarCoder 2's blocks in the same shape, in Q4_0. Both have 8-bit KV, a context of 512 tokens and a memory
cgroup of the budget. Ends with one JSON line; exits 0 only if every `at least` holds.

`--small` takes a shape of 140 million parameters, to try the script.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from tests.benchmarks.compare.versus_llama_cpp import Case, Rivals, measure_case, report_synthetic
from tests.benchmarks.lib.measure import PLAIN_MMAP, require_rig
from tests.benchmarks.lib.planted_opt import OPT_6_7B, OPT_SMALL, PlantedOpt, ungated_gguf
from tests.benchmarks.lib.synthetic import Plant, synthetic_bundle
from tests.support.paths import ROOT

RANDOM_TEXT = 50.0
"""A temperature at which a random head's choice is all but uniform."""
PLANT = Plant(0.03, noise=0.05)
CASE = Case(
    "ungated-predicted-50",
    8.0,
    15.0,
    max_tokens=48,
    warm_up=0,
    share=0.50,
    sparsity="predicted",
    temperature=RANDOM_TEXT,
    rival=(PLAIN_MMAP,),
)


def main() -> int:
    """Run the case; 0 if it holds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="a small shape, whose figures mean nothing")
    parser.add_argument("--make", action="store_true", help="make both models, and measure nothing")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--workdir", type=Path, default=ROOT / "build/bench")
    args = parser.parse_args()
    shape = OPT_SMALL if args.small else OPT_6_7B
    gguf = ungated_gguf(shape, args.workdir)
    bundle = synthetic_bundle(shape, PLANT, args.workdir, PlantedOpt)
    if args.make:
        return 0
    require_rig()
    # Beside the process itself, half of a small file is nothing.
    case = replace(CASE, share=2.5) if args.small else CASE
    rows = [measure_case(Rivals(bundle, gguf, args.threads), case, args.pairs)]
    return report_synthetic("ungated_versus_llama_cpp", rows, args.pairs)


if __name__ == "__main__":
    sys.exit(main())
