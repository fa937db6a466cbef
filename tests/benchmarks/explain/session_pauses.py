"""How long a text waits while another conversation is saved and loaded, by the length of a piece.

    .venv/bin/python -m tests.benchmarks.explain.session_pauses --model BUNDLE --workdir DIR

The conversation is keys and values of zeros behind random tokens, as nothing here depends on what they are.
One text decodes all the while, without drafts. A row for saving and for loading, with pieces and all at once
(`1e9`): the time that it takes, and the longest time between two tokens of the text meanwhile.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ondevice
from ondevice.prompt_cache import store
from tests.benchmarks.lib.random_model import random_tokens
from tests.benchmarks.lib.text_beside import TextBeside

PIECES = (1e9, store.PIECE_SECONDS)
MOST_TOKENS = 4000


def fill(model: ondevice.Model, key: int, tokens: list[int]) -> None:
    """Have the cache of a key hold these tokens."""
    with model._engine.kv.use(key) as kv:
        kv.reserve(len(tokens))
        kv.extend(tokens)


def pause(model: ondevice.Model, work: Callable[[], None]) -> dict[str, float]:
    """Milliseconds of `work`, and the longest between two tokens of a text meanwhile."""
    with TextBeside(model, MOST_TOKENS) as text:
        begun = time.monotonic()
        work()
        done = time.monotonic()
        time.sleep(0.2)
    longest = max(text.pauses(begun, done))
    return {"milliseconds": round(1000 * (done - begun)), "longest_pause_ms": round(1000 * longest)}


def rows(bundle: str, folder: Path, count: int) -> list[dict[str, Any]]:
    """Saving and loading with every length of a piece, each once."""
    found = []
    options: dict[str, Any] = {"speculation": "off", "parallel": 2, "memory_pressure": "off"}
    with ondevice.load(bundle, dram_budget="1GB", **options) as model:
        engine, tokens = model._engine, random_tokens(count, model.config.vocab_size)
        model._owner.call(partial(fill, model, -1, tokens))
        for piece in PIECES:
            store.PIECE_SECONDS = piece
            shutil.rmtree(folder, ignore_errors=True)
            works = {
                "save": lambda cancelled: engine.save_state(-1, folder, cancelled),
                "load": lambda cancelled: engine.load_state(-2, tokens, folder, cancelled),
            }
            for name, steps in works.items():
                own = pause(model, lambda steps=steps: model._host._run_jointly(steps))  # type: ignore[misc]
                found.append({"work": name, "piece_seconds": piece, **own})
                print(found[-1], flush=True)
            held = engine.kv.state_of(-2)
            assert held.tokens == tokens
            model._owner.call(partial(held.truncate, 0))
    return found


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--workdir", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    found = [row for _ in range(args.rounds) for row in rows(args.model, args.workdir / "state", args.tokens)]
    shutil.rmtree(args.workdir / "state", ignore_errors=True)
    medians = {
        f"{work} {piece}": {
            name: statistics.median(
                row[name] for row in found if (row["work"], row["piece_seconds"]) == (work, piece)
            )
            for name in ("milliseconds", "longest_pause_ms")
        }
        for work in ("save", "load")
        for piece in PIECES
    }
    print(json.dumps({"tokens": args.tokens, "medians": medians}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
