"""What lossy options of a mixture of experts cost, token by token: perplexity on held-out text.

Fewer experts than the model's own, and experts in memory in the place of missing ones, in a cache that has
room for half of the experts. Every pass has one token, as in decoding; each piece begins with an empty
context, and the cache goes on. The model is a small mixture that was trained on text. Prints a table and one
JSON line.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ondevice.backends.cpu import CpuBackend, make_runner
from ondevice.budget.sizes import expert_shape
from ondevice.bundle.reader import Bundle
from ondevice.flash.reader import FlashReader
from ondevice.model.kv_cache import KVCache, KVLayout
from ondevice.model.loading import bundle_files, load_weights
from ondevice.model.transformer import Transformer
from ondevice.runtime.models import with_chosen_experts
from ondevice.scoring import Tally
from tests.benchmarks.lib.held_out_prompts import DOMAINS, held_out_tokens
from tests.support.engines import every_logits, expert_fetcher
from tests.support.trained_models import MIXTURE

PIECES, PIECE_TOKENS = 4, 1024
DISTANCES = (0.1, 0.25, 0.5, 1.0)


@dataclass(frozen=True)
class Run:
    """One text under one choice of options: likeliest (T,) token ids, the others as in `ExpertCost`."""

    perplexity: float
    likeliest: NDArray[np.intp]
    hits: float
    substituted: float


def run(bundle: Bundle, experts: int, substitution: float, pieces: list[list[int]]) -> Run:
    """The pieces, token by token."""
    config = with_chosen_experts(bundle.config, experts)
    bundle, tally, likeliest = bundle.with_config(config), Tally(), []
    assert config.experts is not None
    with FlashReader(bundle_files(bundle), "buffered", 2) as reader:
        cpu = CpuBackend(make_runner(threads=1), segment_neurons=64, piece_neurons=64)
        model = Transformer(config, cpu, load_weights(bundle, reader, cpu))
        room = config.experts.count * len(config.expert_layers) // 2
        slots = room + expert_shape(config, bundle.quant, config.experts).reserve
        fetcher = expert_fetcher(bundle, reader, cpu, slots, substitution)
        for piece in pieces:
            kv = KVCache(KVLayout(config, 16))
            for token, following in zip(piece[:-1], piece[1:], strict=True):
                logits = every_logits(model, [token], kv)
                tally.add(logits, [following])
                likeliest.append(int(logits[0].argmax()))
        hits, lookups, substituted = fetcher.hits, fetcher.lookups, fetcher.substituted
        fetcher.close()
    return Run(tally.score().perplexity, np.array(likeliest), hits / lookups, substituted / lookups)


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
    length = min(PIECE_TOKENS, bundle.config.max_context)
    texts = {}
    for name in DOMAINS:
        tokens = held_out_tokens(name, args.pieces * length)
        texts[name] = [tokens[at : at + length] for at in range(0, len(tokens) - 1, length)]
    options = [(count, 0.0) for count in range(experts.chosen, 0, -1)]
    options += [(experts.chosen, distance) for distance in DISTANCES]
    print("| options | " + " | ".join(f"{name}: cost, agrees, hits, substituted" for name in texts) + " |")
    print("|---|" + "---|" * len(texts))
    own: dict[str, Run] = {}
    found = []
    for count, distance in options:
        cells = []
        for name, pieces in texts.items():
            one = run(bundle, count, distance, pieces)
            whole = own.setdefault(name, one)
            agrees = float(np.mean(one.likeliest == whole.likeliest))
            cost = one.perplexity / whole.perplexity - 1
            shares = f"{100 * agrees:.1f} %, {100 * one.hits:.1f} %, {100 * one.substituted:.1f} %"
            cells.append(f"{one.perplexity:.2f} ({100 * cost:+.2f} %), {shares}")
            row = {"text": name, "experts": count, "substitution": distance, "agrees": agrees}
            row |= {"tokens": len(one.likeliest), "perplexity": one.perplexity}
            found.append(row | {"hits": one.hits, "substituted": one.substituted})
        print(f"| {count}, {distance:g} | " + " | ".join(cells) + " |", flush=True)
    print(json.dumps({"benchmark": "lossy_experts", "runs": found}))


if __name__ == "__main__":
    main()
