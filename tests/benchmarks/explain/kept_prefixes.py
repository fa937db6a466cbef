"""Seconds to the first token of a long prompt, new and after what earlier requests have read of it.

    .venv/bin/python -m tests.benchmarks.explain.kept_prefixes --model BUNDLE [--tokens 3000] [--rounds 3]

A server answers `/completion` over HTTP. Each round has prompts of its own; columns are `new`; `repeated`;
`edited`, another token in the middle; `abandoned`, asked again after the connection was closed at half of the
time that `new` took; and `both`, what the two of these took together.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time

import ondevice
from tests.benchmarks.lib.random_model import random_tokens
from tests.support.serving import Serving, serving


def seconds(server: Serving, prompt: list[int]) -> tuple[float, int]:
    """Until the answer of one token has come, and how many of the prompt's were kept."""
    begun = time.monotonic()
    answer = server.post("/completion", {"prompt": prompt, "n_predict": 1}).json
    return time.monotonic() - begun, answer["timings"]["cache_n"]


def leave(server: Serving, prompt: list[int], after: float) -> None:
    """Ask, and go after so many seconds."""
    connection = server.connection()
    body = json.dumps({"prompt": prompt, "n_predict": 1, "stream": True}).encode()
    connection.request("POST", "/completion", body)
    time.sleep(after)
    connection.close()


def measured(server: Serving, tokens: int, number: int) -> dict[str, tuple[float, int]]:
    vocab_size = server.model.config.vocab_size
    prompt, other = (random_tokens(tokens - 1, vocab_size, seed=2 * number + at) for at in range(2))
    found = {"new": seconds(server, [1, *prompt]), "repeated": seconds(server, [1, *prompt])}
    middle = tokens // 2
    found["edited"] = seconds(server, [1, *prompt[:middle], 3, *prompt[middle + 1 :]])
    begun = time.monotonic()
    leave(server, [1, *other], found["new"][0] / 2)
    found["abandoned"] = seconds(server, [1, *other])
    found["both"] = time.monotonic() - begun, found["abandoned"][1]
    return found


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokens", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    model = ondevice.load(args.model, max_context=args.tokens + 64, dram_budget="2GB", parallel=2)
    with serving(model) as server:
        seconds(server, random_tokens(64, model.config.vocab_size))
        rounds = [measured(server, args.tokens, number) for number in range(1, args.rounds + 1)]
    medians = {
        name: {
            "seconds": round(statistics.median(it[name][0] for it in rounds), 3),
            "kept": statistics.median(it[name][1] for it in rounds),
        }
        for name in rounds[0]
    }
    print(json.dumps({"tokens": args.tokens, "medians": medians}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
