"""What it costs to let each token choose fewer experts than the model's own: perplexity on held-out text.

Each token's loss follows from its own experts and those of the tokens before it, however the text is split,
so one pass gives what decoding token by token gives. Weights of those that are left stay as they are. The
model is a small mixture that was trained on text. Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
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


def scored(bundle: Bundle, count: int, pieces: list[list[int]]) -> tuple[float, NDArray[np.intp]]:
    """Perplexity, and the likeliest token at every position."""
    tally, likeliest = Tally(), []
    with FlashReader(bundle_files(bundle), "buffered", 2) as reader:
        cpu = CpuBackend(make_runner(threads=1), segment_neurons=64, piece_neurons=64)
        model = Transformer(with_chosen_experts(bundle.config, count), cpu, load_weights(bundle, reader, cpu))
        fetcher = expert_fetcher(bundle, reader, cpu)
        for piece in pieces:
            logits = all_logits(model, piece[:-1], 16)
            tally.add(logits, piece[1:])
            likeliest.append(logits.argmax(axis=1))
        fetcher.close()
    return tally.score().perplexity, np.concatenate(likeliest)


def main() -> None:
    """Print the table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=MIXTURE, help="a bundle with experts")
    args = parser.parse_args()
    bundle = Bundle.open(args.model)
    experts = bundle.config.experts
    if experts is None:
        parser.error(f"{args.model} has no experts")
    length = min(PIECE_TOKENS, bundle.config.max_context)
    texts = {}
    for name in DOMAINS:
        tokens = held_out_tokens(name, PIECES * length)
        texts[name] = [tokens[at : at + length] for at in range(0, len(tokens) - 1, length)]
    print("| chosen | " + " | ".join(f"{name}: perplexity, agrees" for name in texts) + " |")
    print("|---|" + "---|" * len(texts))
    own = {name: scored(bundle, experts.chosen, pieces) for name, pieces in texts.items()}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in texts}
    for count in range(experts.chosen, 0, -1):
        cells = []
        for name, pieces in texts.items():
            whole, best = own[name]
            perplexity, likeliest = scored(bundle, count, pieces)
            agrees = float(np.mean(likeliest == best))
            cells.append(f"{perplexity:.2f} (+{100 * (perplexity / whole - 1):.1f} %), {100 * agrees:.1f} %")
            found[name].append({"chosen": count, "perplexity": perplexity, "agrees": agrees})
        print(f"| {count} | " + " | ".join(cells) + " |", flush=True)
    print(json.dumps({"benchmark": "fewer_experts", "texts": found}))


if __name__ == "__main__":
    main()
