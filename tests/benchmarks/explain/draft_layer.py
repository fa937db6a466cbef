"""What a draft layer brings: tokens per forward pass beside other drafters', greedily and sampled, by text.

Replies to the prompts of `ondevice bench`, with the same number of nodes in every draft whatever they are
worth, so that the figures are the drafters' own. Texts must be those of plain decoding, token for token: the
exit status says so. Ends with one JSON line.

    python -m tests.benchmarks.explain.draft_layer [--model DIR] [--drafters eagle,streams] [--nodes 16]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from ondevice.api import Model, load
from ondevice.config import Speculation
from ondevice.measure.prompts import BUILT_IN
from ondevice.response import Response
from tests.benchmarks.lib.measure import machine
from tests.support.engines import always_draft
from tests.support.paths import SHIPPED

SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.6, "top_p": 0.9, "seed": 1},
}


def replies(model: Model, count: int, tokens: int) -> dict[tuple[str, str, str], Response]:
    """The reply to each prompt, by its task, sampling and text."""
    found = {}
    for task in BUILT_IN:
        for prompt in task.at_most(count).prompts:
            for name, sampling in SAMPLINGS.items():
                say = model.session().respond if task.chat else model.generate
                found[task.name, name, prompt] = say(prompt, max_tokens=tokens, **sampling)
    return found


def per_pass(texts: list[Response]) -> float:
    """Tokens behind the first of each text, over the passes that gave them."""
    tokens = sum(len(text.tokens) - 1 for text in texts)
    return round(tokens / sum(text.stats.decode_passes for text in texts), 3)


def main() -> int:
    """Print the table and the JSON line; 0 if no drafter changed a token."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=SHIPPED)
    parser.add_argument("--drafters", default="eagle,streams")
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--prompts", type=int, default=4, help="of each kind of text")
    parser.add_argument("--tokens", type=int, default=64, help="of each reply")
    args = parser.parse_args()
    patch, rows, changed = pytest.MonkeyPatch(), dict[str, dict[str, float]](), 0
    always_draft(patch, [args.nodes])
    with load(args.model, speculation="off") as plain:
        expected = replies(plain, args.prompts, args.tokens)
    print("| drafter | text | tokens per forward pass |\n|---|---|---|")
    for name in args.drafters.split(","):
        with load(args.model, speculation=cast(Speculation, name)) as model:
            found = replies(model, args.prompts, args.tokens)
        changed += sum(found[key].tokens != text.tokens for key, text in expected.items())
        kinds = dict.fromkeys((f"{sampling}, {task}", task, sampling) for task, sampling, _ in found)
        rows[name] = {
            label: per_pass([text for key, text in found.items() if key[:2] == (task, sampling)])
            for label, task, sampling in kinds
        }
        for sampling in SAMPLINGS:
            rows[name][sampling] = per_pass([text for key, text in found.items() if key[1] == sampling])
        for label, value in rows[name].items():
            print(f"| `{name}` | {label} | {value:.2f} |")
    patch.undo()
    print(json.dumps({"machine": machine(), "nodes": args.nodes, "changed": changed, "rows": rows}))
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
