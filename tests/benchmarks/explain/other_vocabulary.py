"""A second model with another vocabulary: drafts by strings and by shared tokens, beside each other.

Two pairs. The shipped model is drafted for by `small-silu` with one piece of its tokenizer renamed, so that
nearly all tokens are shared; and stories260K (512 tokens, of which the shipped model has 401) by the shipped
model. Drafts are as large as they may be. Texts must be those of plain decoding: the exit status says so.

    python -m tests.benchmarks.explain.other_vocabulary [--max-tokens 48]
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from ondevice.api import load
from ondevice.bundle.reader import Bundle
from ondevice.converters.convert import convert
from ondevice.runtime.opening import open_tokenizer
from ondevice.speculation.drafters import intersection
from tests.benchmarks.explain.ngrams import draft_always
from tests.benchmarks.lib.measure import machine
from tests.fuzz.signing import sign
from tests.support.paths import ROOT, SHARED_DATA, SHIPPED

SILU = ROOT / "tests/benchmarks/data/small-silu"
RENAMED = 3000
MIN_CHANCE = 0.05
"""Least chance of a draft token."""
PROMPTS = (
    "Once upon a time, there was a little girl named Lily. She",
    "Tom and his dog went to the park. They",
    "The old man looked at the sea and",
    "One day, a small bird wanted to fly. His mother",
)


def renamed(folder: Path) -> Path:
    """`small-silu` with another name for one of its pieces."""
    shutil.copytree(SILU, folder)
    bundle = Bundle.open(folder)
    tokenizer = open_tokenizer(bundle)
    assert tokenizer is not None
    piece = tokenizer.piece(RENAMED).encode()
    head, data = bytes([10, len(piece)]), (folder / "tokenizer.model").read_bytes()
    (folder / "tokenizer.model").write_bytes(data.replace(head + piece, head + piece[:-1] + b"~"))
    sign(folder, bundle.config, bundle.quant)
    return folder


def written(target: Path, draft: Path | None, max_tokens: int, temp: float) -> tuple[list[Any], float, float]:
    """Texts, tokens per forward pass, and milliseconds per token."""
    options: dict[str, Any] = {"speculation": "off"}
    if draft is not None:
        options = {"speculation": "model", "draft_model": draft}
    ends = dict.fromkeys(Bundle.open(target).manifest.tokenizer.eos_ids, -math.inf)
    with load(target, threads=1, **options) as model:
        found = [
            model.generate(prompt, max_tokens=max_tokens, temperature=temp, seed=0, logit_bias=ends)
            for prompt in PROMPTS
        ]
    passes = sum(it.stats.decode_passes for it in found)
    tokens = sum(round(it.stats.accepted_tokens_per_pass * it.stats.decode_passes) for it in found)
    seconds = sum(it.stats.decode_seconds for it in found)
    return [it.tokens for it in found], tokens / passes, 1e3 * seconds / tokens


def main() -> int:
    """Print the table and the JSON line; 0 if no drafter changed a token."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--temps", type=float, nargs="+", default=[0.0, 0.8])
    args = parser.parse_args()
    draft_always(MIN_CHANCE)
    rows, changed = [], 0
    print("| target, second model | temperature | drafts by | tokens per forward pass | ms per token |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        pairs = {"small-relu, small-silu": (SHIPPED, renamed(Path(name) / "silu"))}
        if SHARED_DATA.is_dir():
            stories = convert(SHARED_DATA / "models/stories260K", Path(name) / "stories", "q8")
            pairs["stories260K, small-relu"] = (stories, SHIPPED)
        for pair, (target, draft) in pairs.items():
            for temp in args.temps:
                plain, _, _ = written(target, None, args.max_tokens, temp)
                for matching, least in (("strings", math.inf), ("shared tokens", 0.0)):
                    intersection.LEAST_SHARED = least
                    texts, per_pass, ms = written(target, draft, args.max_tokens, temp)
                    changed += texts != plain
                    print(f"| {pair} | {temp:g} | {matching} | {per_pass:.2f} | {ms:.1f} |", flush=True)
                    rows.append({"pair": pair, "temp": temp, "by": matching, "per_pass": per_pass, "ms": ms})
    print(
        json.dumps({"benchmark": "other_vocabulary", "changed": changed, "machine": machine(), "rows": rows})
    )
    return 0 if changed == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
