"""What `--speculation auto` costs where no draft token can be right: random text, drawn at temperature 1.5.

A prompt of random tokens is continued with `auto` and with `off`, in pairs that take turns at going first;
all texts must be equal. Prints the median of the pairs' ratios of tokens per second and its spread, ends with
one JSON line, and exits 0 if no text changed and the median is at least 0.97.

    python -m tests.benchmarks.explain.auto_versus_off [--sparsity dense] [--share 0.3] [--pairs 40]
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import get_args

import numpy as np

from ondevice.api import Model, inspect, load
from ondevice.config import Sparsity
from tests.benchmarks.lib.measure import machine
from tests.support.paths import ROOT

BAR = 0.97


def main() -> int:
    """Print the ratio and the JSON line; 0 if it reaches the bar."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "weights/small-relu")
    parser.add_argument("--sparsity", default="auto", choices=get_args(Sparsity))
    parser.add_argument("--share", type=float, default=1.0, help="of the bytes above the smallest budget")
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temp", type=float, default=1.5)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    options = {"sparsity": args.sparsity, "threads": args.threads}
    ratios, per_pass, changed = [], [], 0
    with ExitStack() as open_models:
        models = {}
        for name in ("off", "auto"):
            # The second model counts the first as the process itself.
            plan = inspect(args.model, dram_budget="8GB", speculation=name, **options)
            budget = int(
                plan.minimum_budget_bytes + args.share * (plan.full_bytes - plan.minimum_budget_bytes)
            )
            models[name] = open_models.enter_context(
                load(args.model, dram_budget=budget, speculation=name, **options)
            )
        random = np.random.default_rng(0)
        for pair in range(args.pairs):
            prompt = random.integers(3, models["off"].config.vocab_size, args.prompt_tokens).tolist()
            found = {}
            for name in ("off", "auto") if pair % 2 else ("auto", "off"):
                found[name] = write(models[name], prompt, pair, args)
            changed += found["auto"][0] != found["off"][0]
            ratios.append(found["auto"][1] / found["off"][1])
            per_pass.append(found["auto"][2])
    low, median, high = np.quantile(ratios, (0.25, 0.5, 0.75))
    print(f"auto over off: {median:.3f} ({low:.3f} to {high:.3f}), {np.mean(per_pass):.3f} tokens per pass")
    asked = {key: getattr(args, key) for key in ("sparsity", "share", "pairs", "max_tokens", "temp")}
    found_stats = {"ratio": median, "low": low, "high": high, "changed": changed}
    print(json.dumps({"benchmark": "auto_versus_off", **found_stats, "machine": machine(), **asked}))
    return 0 if changed == 0 and median >= BAR else 1


def write(
    model: Model, prompt: list[int], seed: int, args: argparse.Namespace
) -> tuple[tuple[int, ...], float, float]:
    """The text, tokens per second and tokens per pass."""
    ends = dict.fromkeys(model.bundle.manifest.tokenizer.eos_ids, -math.inf)
    answer = model.generate(
        tokens=prompt, max_tokens=args.max_tokens, temperature=args.temp, seed=seed, logit_bias=ends
    )
    stats = answer.stats
    return answer.tokens, stats.decode_tokens_per_second, stats.accepted_tokens_per_pass


if __name__ == "__main__":
    sys.exit(main())
