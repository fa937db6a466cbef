"""Drafts of texts that share passes: total tokens per second with `auto`, over those of `off`, by clients.

    python -m tests.benchmarks.explain.drafts_beside --model DIR/large [--share 0.5] [--clients 1 2 4 8]

DIR/large as `tests.benchmarks.lib.embedded_model` makes it, so that drafts are right as often as a trained
model's. Clients write replies to the prompts that `ondevice bench` has, each to another one. Both ways run on
one loaded model, in pairs that take turns at going first; memory is divided as `auto` has it for both. Every
text must be the same both ways. Prints a line for each number of clients, and ends with one JSON line; exits
0 if no text changed.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

from ondevice.api import Model, inspect, load
from ondevice.measure.prompts import BUILT_IN
from tests.benchmarks.compare.batching import Client, rate
from tests.benchmarks.lib.measure import machine


def prompts(model: Model) -> list[list[int]]:
    """Tokens of the prompts, of one kind after another."""
    found = []
    for texts in zip(*(task.prompts for task in BUILT_IN), strict=False):
        for task, text in zip(BUILT_IN, texts, strict=True):
            message = [{"role": "user", "content": text}]
            found.append(list(model.chat_ids(message)) if task.chat else model.tokenizer.encode(text))
    return found


def together(model: Model, given: list[list[int]], tokens: int) -> list[Client]:
    """A client for each prompt, all at once."""
    bias = dict.fromkeys(model.bundle.manifest.tokenizer.eos_ids, -math.inf)
    clients = [Client(prompt, [], []) for prompt in given]
    threads = [threading.Thread(target=it.run, args=(model, tokens, bias)) for it in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return clients


def measured(model: Model, clients: int, args: argparse.Namespace) -> dict[str, Any]:
    """The row of a number of clients."""
    engine, every = model._engine, prompts(model)
    ways = {"off": None, "auto": engine._drafting}
    rates: dict[str, list[float]] = {name: [] for name in ways}
    changed, decision = 0, ""
    for pair in range(args.pairs):
        given = [every[(pair * clients + at) % len(every)] for at in range(clients)]
        texts = {}
        for name in ("off", "auto") if pair % 2 else ("auto", "off"):
            model._owner.call(lambda name=name: engine.draft_with(name, ways[name]))  # type: ignore[misc]
            found = together(model, given, args.tokens)
            rates[name].append(rate(found))
            texts[name] = [client.tokens for client in found]
            decision = model.stats.drafting.decision or decision
        changed += texts["off"] != texts["auto"]
    ratios = [auto / off for auto, off in zip(rates["auto"], rates["off"], strict=True)]
    row = {name: statistics.median(its) for name, its in rates.items()}
    quarters = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
    return {"clients": clients, **row, "over_off": quarters, "changed": changed, "decision": decision}


def main() -> int:
    """Print the rows; 0 if no text changed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--speculation", default="auto")
    parser.add_argument("--sparsity", default="dense")
    parser.add_argument("--share", type=float, default=1.0, help="of the bytes above the smallest budget")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--processor-time", action="store_true", help="for busy machines, where everything is in memory"
    )
    args = parser.parse_args()
    if args.processor_time:
        time.perf_counter = time.monotonic = time.process_time
    options: dict[str, Any] = {
        "speculation": args.speculation,
        "sparsity": args.sparsity,
        "threads": args.threads,
        "parallel": max(args.clients),
        "memory_pressure": "off",
    }
    plan = inspect(args.model, dram_budget="8GB", **options)
    least, rows = plan.minimum_budget_bytes, []
    budget = int(least + args.share * (plan.full_bytes - least) + (64 << 20 if args.share == 1 else 0))
    with load(args.model, dram_budget=budget, **options) as model:
        together(model, prompts(model)[: max(args.clients)], 16)
        for clients in args.clients:
            rows.append(measured(model, clients, args))
            row, (low, middle, high) = rows[-1], rows[-1]["over_off"]
            print(
                f"{clients} clients: {row['off']:.1f} tokens/s, {row['auto']:.1f} with drafts, "
                f"{middle:.2f} ({low:.2f} to {high:.2f}) {row['decision']}",
                flush=True,
            )
    print(
        json.dumps(
            {"benchmark": "drafts_beside", "machine": machine(), **vars(args), "rows": rows}, default=str
        )
    )
    return 0 if not any(row["changed"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
