"""What texts that share passes gain and lose: by how many there are, and by the rows of a prompt beside them.

    .venv/bin/python -m tests.benchmarks.explain.shared_rows --workdir DIR

A random dense model of six layers, made in DIR on the first call, is all in memory, on one thread of
computing: processor time is then the time that it takes on an idle machine. Rounds go through all settings in
turn. Two tables: for each number of texts, tokens per second of all together, and the speed of each as a part
of that alone; for each number of a prompt's rows beside a text that writes, the usual and the longest seconds
between two of its tokens while the prompt is read, and the seconds until the other text's first token.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ondevice
from ondevice.model import prefill_schedule
from tests.benchmarks.lib.ondevice_bundle import bundle_folder
from tests.benchmarks.lib.random_model import Shape, huggingface_folder, random_tokens
from tests.benchmarks.lib.text_beside import TextBeside

SHAPE = Shape("six-layers", 1024, 6, 2816, 8, vocab_size=4608, head_dim=128)
CLIENTS = (1, 2, 4, 8, 16)
PROMPT_ROWS = (16, 32, 64, 128, 256)
NO_END = {2: -math.inf}


def clients_seconds(model: ondevice.Model, clients: int, tokens: int) -> float:
    """Processor seconds of a token of each of so many texts, once all write."""
    moments: list[list[float]] = [[] for _ in range(clients)]

    def run(at: int) -> None:
        prompt = random_tokens(8, model.config.vocab_size, at)
        for event in model.stream(tokens=prompt, max_tokens=tokens, logit_bias=NO_END):
            if event.token is not None:
                moments[at].append(time.process_time())

    _all_of([threading.Thread(target=run, args=(at,)) for at in range(clients)])
    begun, ended = max(its[0] for its in moments), min(its[-1] for its in moments)
    written = sum(begun < moment <= ended for its in moments for moment in its)
    return clients * (ended - begun) / written


def prompt_seconds(model: ondevice.Model, prompt: Sequence[int]) -> dict[str, float]:
    """Processor seconds of a text between two tokens while a prompt is read, and until that one's first."""
    with TextBeside(model, 1000, time.process_time, logit_bias=NO_END) as text:
        begun = time.process_time()
        next(iter(model.stream(tokens=prompt, max_tokens=2)))
        first = time.process_time()
    pauses = text.pauses(begun, first)
    return {"longest": max(pauses), "usual": statistics.median(pauses), "first": first - begun}


def _all_of(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workdir", type=Path, default=Path())
    parser.add_argument("--model", help="a bundle instead of the random model")
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--clients", type=int, nargs="+", default=CLIENTS)
    parser.add_argument("--tokens", type=int, default=12)
    parser.add_argument("--prompt", type=int, default=512, help="its tokens; 0: no second table")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    options: dict[str, Any] = {
        "backend": args.backend,
        "sparsity": "dense",
        "speculation": "off",
        "threads": 1,
        "memory_pressure": "off",
        "pass_seconds": 0,
    }
    clients: dict[int, list[float]] = {count: [] for count in args.clients}
    rows: dict[int, list[dict[str, float]]] = {count: [] for count in PROMPT_ROWS if args.prompt}
    bundle = args.model or bundle_folder(huggingface_folder(SHAPE, args.workdir), args.workdir)
    with ondevice.load(bundle, parallel=max(args.clients), **options) as model:
        prompt = random_tokens(args.prompt, model.config.vocab_size)
        clients_seconds(model, 1, 4)
        for _ in range(args.rounds):
            for count, seconds in clients.items():
                seconds.append(clients_seconds(model, count, args.tokens))
            for count, found in rows.items():
                prefill_schedule.UNTIMED_ROWS = count
                found.append(prompt_seconds(model, prompt))
    alone = statistics.median(clients[1])
    table = []
    for count, seconds in clients.items():
        one = statistics.median(seconds)
        table.append({"texts": count, "tokens_per_second": count / one, "speed_of_each": alone / one})
    beside = [
        {"rows": count, **{name: statistics.median(it[name] for it in found) for name in found[0]}}
        for count, found in rows.items()
    ]
    for row in (*table, *beside):
        print({name: round(value, 4) for name, value in row.items()})
    print(json.dumps({"alone_seconds": alone, "texts": table, "prompts": beside}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
