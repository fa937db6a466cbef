"""Whether llama.cpp says with an embedded model's GGUF what ondevice says with its bundle.

    python -m tests.benchmarks.explain.embedded_agreement --folder DIR [--held-out 6]

DIR is what `embedded_model.py` and `embedded_gguf.py` wrote. Both engines read our greedy replies to the
built-in prompts, token by token, and name the next token at every place: until they disagree, that is
llama.cpp's own greedy text. Our logits are those of DIR/small, which have the bits of DIR/large. llama.cpp
rounds activations in its own way, so texts may part at a near tie: the margin there, which is the difference
between our two largest logits, is printed. Ends with one JSON line; exits 0 only if no id without a token
comes near to winning.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ondevice.api import Model, load
from ondevice.backends.base import Float32
from ondevice.measure.prompts import BUILT_IN, Task
from tests.benchmarks.lib.held_out_prompts import held_out_tasks
from tests.benchmarks.lib.run_llama_cpp import Engine

CONTEXT = 512
LOWEST_WITH_TOKEN = -500.0
"""Logit below any that the model gives a token."""


@dataclass(frozen=True)
class Compared:
    """What both name along our reply to one prompt.

    places: tokens of the reply, and the place behind it.
    common: places before the first at which they differ.
    margin: difference between our two largest logits where they differ first; None if they never do.
    agreed: places at which they name the same token.
    error: root mean square of the logits' difference, over that of our logits around their mean.
    absent: largest logit of an id without a token.
    """

    task: str
    places: int
    common: int
    margin: float | None
    agreed: int
    error: float
    absent: float

    @property
    def equal(self) -> bool:
        return self.margin is None


def engine_of(folder: Path, threads: int) -> Engine:
    """llama.cpp with the GGUF in `folder`."""
    spec = {"model": str(folder / "large.gguf"), "load_mode": "default", "repack": True}
    return Engine(spec | {"context": CONTEXT, "threads": threads, "micro_batch": 0})


def compare(model: Model, engine: Engine, task: Task, words: str, max_tokens: int) -> Compared:
    """Compare one prompt's replies. model: the small one."""
    encode = model.tokenizer.encode
    prompt = model.chat_ids([{"role": "user", "content": words}]) if task.chat else encode(words)
    ours = list(model.generate(tokens=prompt, max_tokens=max_tokens, temperature=0.0).tokens)
    expected = model.logits([*prompt, *ours])[len(prompt) - 1 :]
    engine.clear()
    found = [engine.logits(prompt).copy()]
    found += [engine.logits([token]).copy() for token in ours]
    named = np.array([logits.argmax() for logits in found])
    vocabulary = expected.shape[1]
    agrees = named == expected.argmax(axis=1)
    common, margin = len(agrees), None
    if not agrees.all():
        common = int(np.argmin(agrees))
        margin = float(np.diff(np.sort(expected[common])[-2:])[0])
    differences = np.stack(found)[:, :vocabulary] - expected
    spread = expected - expected.mean(axis=1, keepdims=True)
    absent = max(float(logits[vocabulary:].max(initial=-np.inf)) for logits in found)
    error = root_mean_square(differences) / root_mean_square(spread)
    return Compared(task.name, len(agrees), common, margin, int(agrees.sum()), error, absent)


def root_mean_square(x: Float32) -> float:
    """Over all elements."""
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64))))


def summary(rows: list[Compared]) -> dict[str, Any]:
    """What is said of all prompts."""
    places = sum(row.places for row in rows)
    return {
        "texts": len(rows),
        "equal_texts": sum(row.equal for row in rows),
        "margins_where_texts_part": sorted(row.margin for row in rows if row.margin is not None),
        "places": places,
        "equal_tokens": sum(row.agreed for row in rows) / places,
        "logit_error": float(np.mean([row.error for row in rows])),
        "largest_logit_without_token": max(row.absent for row in rows),
    }


def main() -> int:
    """Print the table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--held-out", type=int, default=0, help="prompts of each held-out kind instead")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    engine = engine_of(args.folder, args.threads)
    with load(args.folder / "small", kv_bits=8, speculation="off", threads=args.threads) as model:
        tasks = held_out_tasks(args.held_out) if args.held_out else BUILT_IN
        prompts = [(task, words) for task in tasks for words in task.prompts]
        rows = [compare(model, engine, task, words, args.max_tokens) for task, words in prompts]
    print("| text | places | before the first difference | margin there | equal | logit error |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        margin = "" if row.margin is None else f"{row.margin:.3f}"
        print(f"| {row.task} | {row.places} | {row.common} | {margin} | {row.agreed} | {row.error:.4f} |")
    found = summary(rows)
    print(json.dumps({"benchmark": "embedded_agreement"} | found | {"rows": [asdict(row) for row in rows]}))
    return 0 if found["largest_logit_without_token"] < LOWEST_WITH_TOKEN else 1


if __name__ == "__main__":
    sys.exit(main())
