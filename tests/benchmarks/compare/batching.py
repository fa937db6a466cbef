"""Texts that share passes: total tokens per second with 1, 2, 4 and 8 of them.

    python -m tests.benchmarks.compare.batching --model BUNDLE

Under a budget of half the bundle, where every pass reads weights from flash, and under one that holds it all;
8-bit keys and values, with `--speculation off` and with `auto`. Each client asks a question of its own, of
the kinds of `tests/benchmarks/real/texts.py`; tokens count from when all have their first until one has its
last. Four texts of the most clients must be those that they are alone. Ends with one JSON line; exits 0 only
if four clients give 2.5 times the tokens of one from flash and 1.5 times from memory, without drafts.
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
from dataclasses import asdict, dataclass
from pathlib import Path

import ondevice
from ondevice.config import Speculation
from tests.benchmarks.lib.measure import machine, note
from tests.benchmarks.real.texts import KINDS, prompts
from tests.support.paths import SHARED_DATA

CONTEXT = 1024
TEXTS_OF_A_KIND = 4
MOST_CLIENTS = TEXTS_OF_A_KIND * len(KINDS)
WARM_TOKENS = 4
ROOM_BYTES = 1 << 30
"""Beyond the bundle: keys and values of all clients, and the process. `auto` has those of one context."""
CHECKED = 4
"""Texts of the most clients that are compared with their own alone; the first one always is."""
AT_LEAST = {"half": 2.5, "resident": 1.5}
"""Of the tokens per second of one client, with four, without drafts."""


@dataclass(frozen=True)
class Row:
    """One number of clients. Rates are medians of rounds, per second; memory is the process's peak."""

    budget: str
    speculation: str
    clients: int
    tokens_per_second: float
    every_rate: tuple[float, ...]
    flash_bytes_per_token: float
    peak_memory_bytes: int
    same_text: bool


def questions(model: ondevice.Model, count: int) -> list[list[int]]:
    """Token ids of the first `count` questions, of each kind in turn."""
    kinds = prompts(SHARED_DATA, TEXTS_OF_A_KIND).values()
    mixed = [text for texts in zip(*kinds, strict=True) for text in texts]
    return [model.chat_ids([{"role": "user", "content": text}]) for text in mixed[:count]]


@dataclass
class Client:
    """A text and when its tokens came."""

    prompt: list[int]
    tokens: list[int]
    times: list[float]

    def run(self, model: ondevice.Model, count: int) -> None:
        """Continue the prompt by `count` tokens."""
        no_end = dict.fromkeys(model.tokenizer.eos_ids, -math.inf)
        for event in model.stream(tokens=self.prompt, max_tokens=count, logit_bias=no_end):
            if event.token is not None:
                self.tokens.append(event.token)
                self.times.append(time.monotonic())


def together(model: ondevice.Model, prompts: Sequence[list[int]], count: int) -> list[Client]:
    """A client for each prompt, all at once."""
    texts = [Client(prompt, [], []) for prompt in prompts]
    threads = [threading.Thread(target=client.run, args=(model, count)) for client in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return texts


def rate(clients: Sequence[Client]) -> float:
    """Tokens of all per second, from when all have their first until one has its last."""
    begin, end = max(client.times[0] for client in clients), min(client.times[-1] for client in clients)
    if end <= begin:
        raise SystemExit("a text ended before another began; give more --tokens")
    return sum(begin < moment <= end for client in clients for moment in client.times) / (end - begin)


def rows(
    bundle: Path, budget: str, speculation: Speculation, counts: Sequence[int], tokens: int, rounds: int
) -> list[Row]:
    """One row for each number of clients. Rounds go through all, so that a busy machine slows each."""
    size = sum(file.stat().st_size for file in bundle.iterdir())
    rates: dict[int, list[float]] = {count: [] for count in counts}
    read: dict[int, list[float]] = {count: [] for count in counts}
    texts: dict[int, list[int]] = {}
    same = True
    with ondevice.load(
        bundle,
        dram_budget=size // 2 if budget == "half" else size + ROOM_BYTES,
        backend="cpu",
        speculation=speculation,
        kv_bits=8,
        max_context=CONTEXT,
        parallel=max(counts),
        memory_pressure="off",
    ) as model:
        of_clients = questions(model, max(counts))
        together(model, of_clients[:1], WARM_TOKENS)
        for _ in range(rounds):
            for count in counts:
                before = model.counters.flash_bytes_read
                clients = together(model, of_clients[:count], tokens)
                read[count].append((model.counters.flash_bytes_read - before) / (count * tokens))
                rates[count].append(round(rate(clients), 3))
                note(f"{budget}, {speculation}, {count} clients: {rates[count][-1]} tokens/s")
                for at, client in enumerate(clients):
                    same = same and texts.setdefault(at, client.tokens) == client.tokens
        for at in range(1, min(len(texts), CHECKED)):
            same = same and texts[at] == together(model, of_clients[at : at + 1], tokens)[0].tokens
        peak = model.counters.peak_memory_bytes
    return [
        Row(
            budget,
            speculation,
            count,
            statistics.median(rates[count]),
            tuple(rates[count]),
            statistics.median(read[count]),
            peak,
            same,
        )
        for count in counts
    ]


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.compare.batching")
    parser.add_argument("--model", type=Path, required=True, help="a bundle with a chat template")
    parser.add_argument(
        "--clients", type=int, nargs="+", default=[1, 2, 4, 8], help=f"at most {MOST_CLIENTS}"
    )
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budgets", nargs="+", choices=tuple(AT_LEAST), default=list(AT_LEAST))
    parser.add_argument("--speculation", nargs="+", choices=("off", "auto"), default=["off", "auto"])
    options = parser.parse_args()
    measured = [
        row
        for budget in options.budgets
        for speculation in options.speculation
        for row in rows(options.model, budget, speculation, options.clients, options.tokens, options.rounds)
    ]
    rates = {(row.budget, row.speculation, row.clients): row.tokens_per_second for row in measured}
    ratios = {
        budget: round(rates[budget, "off", 4] / rates[budget, "off", 1], 2)
        for budget in AT_LEAST
        if (budget, "off", 4) in rates and (budget, "off", 1) in rates
    }
    held = all(ratio >= AT_LEAST[budget] for budget, ratio in ratios.items())
    held = held and all(row.same_text for row in measured)
    result = {"machine": machine(), "rows": list(map(asdict, measured)), "four to one": ratios, "held": held}
    print(json.dumps(result))
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
