"""What a datastore of continuations brings: tokens per forward pass with and without, and a lookup's time.

Datastores of several sizes are made from a kind's training text, for the shipped model. It continues windows
of held-out text with each drafter. Drafts are as large as they may be, so that no clock decides; `auto`
is what it combines, with and without the datastore. Texts must be those of plain decoding: the exit status
says so. `--path` writes the datastores to a folder on the disk that is to be measured.

    python -m tests.benchmarks.explain.ngrams [--tokens 100000 1000000] [--windows 8] [--temp 0.8]
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import ondevice.runtime.engine
from ondevice.api import Model, load
from ondevice.bundle.ngrams import NGRAMS
from ondevice.bundle.reader import Bundle
from ondevice.speculation.datastore import Datastore
from ondevice.speculation.drafters.ngrams import NgramDrafter
from ondevice.speculation.policy import TreePolicy
from ondevice.training import train_ngrams
from tests.benchmarks.explain.cache_hit_rates import held_out_windows
from tests.benchmarks.lib.measure import machine
from tests.support.paths import ROOT

PROMPT_TOKENS = 96
LOOKUPS = 400
MIN_CHANCE = 0.01
"""Least chance of a draft token."""


def draft_always(least_chance: float = MIN_CHANCE) -> None:
    """Drafts of as many nodes as there may be, without draft tokens of less than `least_chance`."""
    always: list[tuple[object, str, Any]] = [
        (TreePolicy, "begin", lambda policy: policy._max_nodes),
        (TreePolicy, "throttle", lambda policy: False),
        (TreePolicy, "is_backing_off", False),
        (TreePolicy, "is_throttling", False),
        (ondevice.runtime.engine, "MIN_PASS_SECONDS", 0.0),
        (NgramDrafter, "is_cheap", True),
    ]
    for owner, name, value in always:
        setattr(owner, name, value)
    for question in ("is_worth_adding", "is_worth_asking"):
        setattr(TreePolicy, question, lambda policy, nodes, chance: chance >= least_chance)


def texts(model: Model, windows: list[list[int]], **sampling: Any) -> tuple[list[tuple[int, ...]], float]:
    """The model's continuations of `windows`, and its tokens per forward pass over all of them."""
    found = [model.generate(tokens=window[:PROMPT_TOKENS], **sampling) for window in windows]
    passes = sum(it.stats.decode_passes for it in found)
    tokens = sum(round(it.stats.accepted_tokens_per_pass * it.stats.decode_passes) for it in found)
    return [it.tokens for it in found], tokens / passes


def lookup_seconds(folder: Path, text: list[int]) -> tuple[float, float]:
    """Median seconds of a lookup, by the clock, and seconds of processor time."""
    bundle = Bundle.open(folder)
    assert bundle.ngrams is not None
    store = Datastore(bundle.sidecar_file(NGRAMS), bundle.ngrams, bundle.config.vocab_size, "auto")
    taken, cpu = [], time.process_time()
    for at in range(3, 3 + LOOKUPS):
        started = time.perf_counter()
        store.lookup(text[at - 3 : at])
        taken.append(time.perf_counter() - started)
    store.close()
    return median(taken), (time.process_time() - cpu) / LOOKUPS


def main() -> int:
    """Print the table and the JSON line; 0 if no drafter changed a token."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "weights/small-relu")
    parser.add_argument("--data", type=Path, default=ROOT / "build/recipe", help="where text is packed")
    parser.add_argument("--kinds", nargs="+", default=["dialogue", "sql", "restaurants"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[100_000, 1_000_000])
    parser.add_argument("--windows", type=int, default=8, help="of each kind of text")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temp", type=float, default=0.8, help="0 is greedy, and repeats itself")
    parser.add_argument("--path", type=Path, help="where datastores are written")
    args = parser.parse_args()
    draft_always()
    ends = Bundle.open(args.model).manifest.tokenizer.eos_ids
    sampling = {"temperature": args.temp, "seed": 0, "max_tokens": args.max_tokens}
    sampling["logit_bias"] = dict.fromkeys(ends, -math.inf)
    rows, changed = [], 0
    print("| text | datastore | file, MB | lookup, ms (processor) | drafter | tokens per forward pass |")
    print("|---|---|---|---|---|---|")
    for kind in args.kinds:
        windows = held_out_windows(args.data, kind, 512 * args.windows)
        with load(args.model, speculation="off", threads=1) as model:
            plain, _ = texts(model, windows, **sampling)
        train = np.memmap(args.data / f"{kind}.train.bin", np.uint16)
        for tokens in (0, *args.tokens):
            with tempfile.TemporaryDirectory(dir=args.path) as name:
                folder, seconds, nbytes = args.model, (0.0, 0.0), 0
                if tokens:
                    folder = Path(name) / "bundle"
                    train_ngrams(args.model, pieces=[train[:tokens].tolist()], output=folder, tokens=tokens)
                    seconds, nbytes = lookup_seconds(folder, windows[0]), (folder / NGRAMS).stat().st_size
                for drafter in ("ngrams", "auto") if tokens else ("lookup", "recycling", "auto"):
                    with load(folder, speculation=drafter, threads=1) as model:
                        found, per_pass = texts(model, windows, **sampling)
                    changed += sum(one != other for one, other in zip(found, plain, strict=True))
                    stored = min(tokens, len(train))
                    clock, cpu = (f"{1e3 * it:.2f}" for it in seconds)
                    shown = f"{stored:,} | {nbytes / 1e6:.1f} | {clock} ({cpu})"
                    print(f"| {kind} | {shown if tokens else 'none | | '} | `{drafter}` | {per_pass:.2f} |")
                    rows.append({"text": kind, "tokens": stored, "drafter": drafter, "per_pass": per_pass})
    print(json.dumps({"benchmark": "ngrams", "changed": changed, "machine": machine(), "rows": rows}))
    return 0 if changed == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
