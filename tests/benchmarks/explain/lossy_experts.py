"""What fewer experts than the model's own cost a mixture: perplexity and agreement on held-out text.

Runs go in passes over pieces, as a token's bits don't depend on what goes through the model beside it. The
model is a small mixture that was trained on text. Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ondevice.backends.cpu import CpuBackend, make_runner
from ondevice.bundle.reader import Bundle
from ondevice.flash.reader import FlashReader
from ondevice.model.loading import bundle_files, load_weights
from ondevice.model.transformer import Transformer
from ondevice.runtime.models import with_chosen_experts
from ondevice.scoring import Tally
from tests.benchmarks.lib.held_out_prompts import DOMAINS, held_out_tokens
from tests.support.engines import all_logits, expert_fetcher
from tests.support.trained_models import MIXTURE

PIECES, PIECE_TOKENS = 8, 1024


@dataclass(frozen=True)
class Run:
    """One text under one number of experts: likeliest (T,) token ids."""

    perplexity: float
    likeliest: NDArray[np.intp]


def run(bundle: Bundle, experts: int, pieces: list[list[int]]) -> Run:
    """The pieces, each from an empty context, with all experts in memory."""
    config = with_chosen_experts(bundle.config, experts)
    bundle, tally, likeliest = bundle.with_config(config), Tally(), []
    with FlashReader(bundle_files(bundle), "buffered", 2) as reader:
        cpu = CpuBackend(make_runner(threads=1), segment_neurons=64, piece_neurons=64)
        model = Transformer(config, cpu, load_weights(bundle, reader, cpu))
        fetcher = expert_fetcher(bundle, reader, cpu)
        for piece in pieces:
            logits = all_logits(model, piece[:-1], 16)
            tally.add(logits, piece[1:])
            likeliest.append(logits.argmax(axis=1))
        fetcher.close()
    return Run(tally.score().perplexity, np.concatenate(likeliest))


def main() -> None:
    """Print the table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=MIXTURE, help="a bundle with experts")
    parser.add_argument("--pieces", type=int, default=PIECES, help="pieces of each kind of text")
    args = parser.parse_args()
    bundle = Bundle.open(args.model)
    experts = bundle.config.experts
    if experts is None:
        parser.error(f"{args.model} has no experts")
    length, figures = min(PIECE_TOKENS, bundle.config.max_context), []
    print("| chosen | " + " | ".join(f"{name}: perplexity, agrees" for name in DOMAINS) + " |")
    print("|---|" + "---|" * len(DOMAINS))
    baseline: dict[str, Run] = {}
    for count in range(experts.chosen, 0, -1):
        cells = []
        for name in DOMAINS:
            ids = held_out_tokens(name, args.pieces * length)
            one = run(bundle, count, [ids[at : at + length] for at in range(0, len(ids) - 1, length)])
            reference = baseline.setdefault(name, one)
            agrees = float(np.mean(one.likeliest == reference.likeliest))
            cost = one.perplexity / reference.perplexity - 1
            cells.append(f"{one.perplexity:.2f} ({100 * cost:+.1f} %), {100 * agrees:.1f} %")
            row = {"experts": count, "text": name, "tokens": len(one.likeliest)}
            figures.append(row | {"perplexity": one.perplexity, "agrees": agrees})
        print(f"| {count} | " + " | ".join(cells) + " |", flush=True)
    print(json.dumps({"benchmark": "lossy_experts", "runs": figures}))


if __name__ == "__main__":
    main()
