"""What drafting brings: tokens per pass, and speed over plain decoding, for every drafter and kind of text.

The shipped model (or another whose text `make model-tables` packs) continues windows of held-out text with
every drafter in turn and without: each round is one interleaved pair per drafter. It samples, as a small
model's likeliest text repeats itself, which would flatter drafters. Texts must be those of plain decoding,
token for token: the exit status says so. Ends with one JSON line.

    python -m tests.benchmarks.explain.drafters [--sparsity exact] [--share 1] [--windows 8]
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import cast, get_args

import numpy as np

from ondevice.api import inspect, load
from ondevice.bundle.reader import Bundle
from ondevice.config import Sparsity, Speculation
from ondevice.speculation.registry import DRAFTERS
from tests.benchmarks.explain.cache_hit_rates import DOMAINS, held_out_windows
from tests.benchmarks.lib.measure import machine
from tests.support.paths import ROOT

PROMPT_TOKENS = 96
ALONE = [name for name, kind in DRAFTERS.items() if kind.needs == "nothing"]


def main() -> int:
    """Print the table and the JSON line; 0 if no drafter changed a token."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "weights/small-relu")
    parser.add_argument("--data", type=Path, default=ROOT / "build/recipe", help="where text is packed")
    parser.add_argument("--sparsity", default="exact", choices=get_args(Sparsity))
    parser.add_argument("--share", type=float, default=1.0, help="of the bytes above the smallest budget")
    parser.add_argument("--windows", type=int, default=8, help="of each kind of text")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temp", type=float, default=0.8, help="0 is greedy, and repeats itself")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    names = ("off", *ALONE)
    options = {"sparsity": args.sparsity, "threads": args.threads}
    # All texts are as long.
    no_end = dict.fromkeys(Bundle.open(args.model).manifest.tokenizer.eos_ids, -math.inf)
    changed = 0
    rows = []
    print("| text | drafter | tokens per pass | over plain decoding |\n|---|---|---|---|")
    with ExitStack() as open_models:
        models = {}
        for name in names:
            # Every model counts those before it as the process itself.
            plan = inspect(args.model, dram_budget="8GB", speculation=cast(Speculation, name), **options)
            least = plan.minimum_budget_bytes
            budget = int(least + args.share * (plan.full_bytes - least))
            models[name] = open_models.enter_context(
                load(args.model, dram_budget=budget, speculation=cast(Speculation, name), **options)
            )
        for domain in DOMAINS:
            ratios: dict[str, list[float]] = {name: [] for name in ALONE}
            per_pass: dict[str, list[float]] = {name: [] for name in ALONE}
            for window in held_out_windows(args.data, domain, 512 * args.windows):
                found = {
                    name: models[name].generate(
                        tokens=window[:PROMPT_TOKENS],
                        max_tokens=args.max_tokens,
                        temperature=args.temp,
                        seed=0,
                        logit_bias=no_end,
                    )
                    for name in names
                }
                plain = found["off"]
                for name in ALONE:
                    changed += found[name].tokens != plain.tokens
                    speed = found[name].stats.decode_tokens_per_second
                    ratios[name].append(speed / plain.stats.decode_tokens_per_second)
                    per_pass[name].append(found[name].stats.accepted_tokens_per_pass)
            for name in ALONE:
                low, median, high = np.quantile(ratios[name], (0.25, 0.5, 0.75))
                tokens = float(np.mean(per_pass[name]))
                rows.append({"text": domain, "drafter": name, "tokens_per_pass": tokens, "ratio": median})
                print(f"| {domain} | {name} | {tokens:.2f} | {median:.2f} ({low:.2f} to {high:.2f}) |")
    summary = {"benchmark": "drafters", "changed": changed, "machine": machine(), "rows": rows}
    asked = {name: getattr(args, name) for name in ("sparsity", "share", "windows", "max_tokens", "temp")}
    print(json.dumps(summary | asked))
    return 0 if changed == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
