"""How long a text waits while another one's prefix is read from the prompt cache, by the length of a piece.

    .venv/bin/python -m tests.benchmarks.explain.restore_pauses --model BUNDLE --cache DIR

The prefix is written to DIR on the first call, 64 KiB a token for a model of the `small` shape, and read past
the page cache. One text decodes all the while, without drafts. A row a piece: the longest time between two of
its tokens while the other's first token is waited for, and that token's time. The first row reads at once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import ondevice
from ondevice.prompt_cache import store
from tests.benchmarks.lib.random_model import random_tokens
from tests.benchmarks.lib.text_beside import TextBeside

PIECES = (1e9, 0.5, 0.2, 0.05, 0.0)
MOST_TOKENS = 1000


def row(model: ondevice.Model, prompt: list[int], piece: float) -> dict[str, Any]:
    """Pauses in milliseconds."""
    with TextBeside(model, MOST_TOKENS) as text:
        asked = time.monotonic()
        events = model.stream(tokens=prompt, max_tokens=2)
        next(events)
        first = time.monotonic()
    stats = list(events)[-1].stats
    pauses = text.pauses(asked, first)
    return {
        "piece_seconds": piece,
        "restored": 0 if stats is None else stats.restored_tokens,
        "longest_pause_ms": round(1000 * max(pauses)),
        "first_token_ms": round(1000 * (first - asked)),
        "passes": len(pauses),
    }


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    options: dict[str, Any] = {"speculation": "off", "parallel": 2, "prompt_cache": args.cache}
    found: dict[float, list[dict[str, Any]]] = {piece: [] for piece in PIECES}
    with ondevice.load(args.model, **options) as model:
        prompt = random_tokens(args.tokens, model.config.vocab_size)
        model.generate(tokens=prompt, max_tokens=1)
    for _ in range(args.rounds):
        for piece in PIECES:
            store.PIECE_SECONDS = piece
            with ondevice.load(args.model, **options) as model:
                found[piece].append(row(model, prompt, piece))
            print(found[piece][-1], flush=True)
    medians = {
        str(piece): {
            name: statistics.median(it[name] for it in rows)
            for name in ("longest_pause_ms", "first_token_ms")
        }
        for piece, rows in found.items()
    }
    print(json.dumps({"tokens": args.tokens, "medians": medians}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
