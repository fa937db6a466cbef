"""What a pass over a draft takes beside a plain one, where layers have the gated delta rule.

    .venv/bin/python -m tests.benchmarks.explain.recurrent_drafts

A random Qwen3.5 of four layers at 4 bits, three of them with 16 states of 128 x 128, everything in memory.
Plain passes and passes over drafts take turns, `--rounds` times. Processor time of a pass, its logits and
what keeps the accepted path, as medians over that of a plain pass. `wide`: a plain pass of as many rows,
which takes no token back. Prints a table, and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from ondevice.backends.forward_batch import ForwardBatch
from ondevice.backends.kv_layout import KVLayout
from ondevice.backends.token_tree import TokenTree
from ondevice.converters.convert import convert
from ondevice.model.sequence_state import SequenceState
from ondevice.model.transformer import Transformer
from tests.support.engines import random_tokens, running
from tests.support.families import write_model

SHAPE = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "head_dim": 128,
    "vocab_size": 4096,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
DRAFTS = (1, 2, 4, 8, 15)
"""Draft tokens behind the root."""


def seconds(model: Transformer, kv: SequenceState, batch: ForwardBatch, path: list[int]) -> float:
    """Processor time of a pass whose text takes `path`."""
    kv.reserve(kv.length + len(batch.tokens))
    start, began = kv.length, time.process_time()
    hidden = model.run(batch, kv).hidden
    model.logits(hidden)
    model.keep(kv, start, path)
    return time.process_time() - began


def arms(tokens: list[int], draft: int) -> dict[str, tuple[ForwardBatch, list[int]]]:
    """Passes over a root and `draft` tokens behind it."""
    rows = tokens[: draft + 1]
    half = [-1, *(max(0, node - 2) for node in range(1, draft + 1))]
    ahead = range(1, draft + 1)
    return {
        "wide": (ForwardBatch(rows), list(range(draft + 1))),
        "all taken": (ForwardBatch(rows, drafted=ahead), list(range(draft + 1))),
        "none taken": (ForwardBatch(rows, drafted=ahead), [0]),
        "two branches": (ForwardBatch(rows, TokenTree(half), drafted=ahead), [0]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        write_model(source, "Qwen3_5Text", SHAPE)
        bundle = convert(source, Path(folder) / "bundle", "q4")
        with running(bundle, "cpu") as model:
            measure(model, options.rounds)


def measure(model: Transformer, rounds: int) -> None:
    kv, rng = SequenceState(KVLayout(model.config, 16, drafts=True)), np.random.default_rng(1)
    model.forward(random_tokens(model.config, 64), kv, "none")
    found: dict[tuple[str, int], list[float]] = {}
    for at in range(rounds + 1):
        tokens = random_tokens(model.config, 16, int(rng.integers(1 << 30)))
        asked = {(name, draft): it for draft in DRAFTS for name, it in arms(tokens, draft).items()}
        asked["plain", 0] = ForwardBatch(tokens[:1]), [0]
        for key, (batch, path) in asked.items():
            taken = seconds(model, kv, batch, path)
            if at:
                found.setdefault(key, []).append(taken)
    plain, rows = statistics.median(found.pop(("plain", 0))), []
    print(f"{model.backend.name}: a plain pass takes {1e3 * plain:.2f} ms of processor time")
    for draft in DRAFTS:
        own = {name: statistics.median(times) / plain for (name, its), times in found.items() if its == draft}
        rows.append({"draft_tokens": draft} | {name: round(value, 3) for name, value in own.items()})
        print(f"{draft:3} draft tokens: " + ", ".join(f"{name} {value:.2f}" for name, value in own.items()))
    print(json.dumps({"plain_ms": round(1e3 * plain, 3), "rounds": rounds, "rows": rows}))


if __name__ == "__main__":
    main()
