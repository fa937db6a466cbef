"""What lossy options of a mixture of experts cost: perplexity on held-out text, as decoding has it.

Fewer experts than the model's own: in passes over whole pieces, as a token's bits don't depend on what goes
through the model beside it. Experts in memory in the place of missing ones: token by token, in a cache with
room for half of the experts, each piece from an empty context. There the model's own choice is run too, and
must have the perplexity of whole passes. The model is a small mixture that was trained on text. Prints tables
and one JSON line.

With `--times`, the time of a token of dialogue: a model for each distance reads the same tokens, each in turn
by all of them, past the page cache. Medians over that of the model's own choice, and the experts that were
read.
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ondevice.backends.cpu import CpuBackend, make_runner
from ondevice.budget.sizes import expert_shape
from ondevice.bundle.reader import Bundle
from ondevice.flash.reader import FlashReader
from ondevice.model.loading import bundle_files, load_weights
from ondevice.model.sequence_state import KVLayout, SequenceState
from ondevice.model.transformer import Transformer
from ondevice.runtime.models import with_chosen_experts
from ondevice.scoring import Tally
from tests.benchmarks.lib.held_out_prompts import DOMAINS, held_out_tokens
from tests.support.engines import all_logits, every_logits, expert_fetcher
from tests.support.trained_models import MIXTURE

PIECES, PIECE_TOKENS = 8, 1024
SINGLE_TOKENS = 512
DISTANCES = (0.1, 0.25, 0.5, 1.0)
WARM_UP = 32
"""First tokens of a piece, whose times aren't counted."""

Pieces = list[list[int]]


@dataclass(frozen=True)
class Run:
    """One text under one choice of options: likeliest (T,) token ids, the others as in `ExpertCost`."""

    perplexity: float
    likeliest: NDArray[np.intp]
    hits: float
    substituted: float


def run(bundle: Bundle, experts: int, pieces: Pieces, single: bool, substitution: float = 0.0) -> Run:
    """The pieces in whole passes with all experts in memory, or token by token with room for half of them."""
    config = with_chosen_experts(bundle.config, experts)
    bundle, tally, likeliest = bundle.with_config(config), Tally(), []
    assert config.experts is not None
    with FlashReader(bundle_files(bundle), "buffered", 2) as reader:
        cpu = CpuBackend(make_runner(threads=1), segment_neurons=64, piece_neurons=64)
        model = Transformer(config, cpu, load_weights(bundle, reader, cpu))
        room = config.experts.count * len(config.expert_layers) // 2
        slots = room + expert_shape(config, bundle.quant, config.experts).reserve
        fetcher = expert_fetcher(bundle, reader, cpu, slots if single else None, substitution)
        for piece in pieces:
            kv = SequenceState(KVLayout(config, 16))
            whole = None if single else all_logits(model, piece[:-1], 16)
            for at, (token, following) in enumerate(pairwise(piece)):
                logits = every_logits(model, [token], kv) if whole is None else whole[at : at + 1]
                tally.add(logits, [following])
                likeliest.append(int(logits[0].argmax()))
        lookups = max(1, fetcher.lookups)
        found = Run(
            tally.score().perplexity,
            np.array(likeliest),
            fetcher.hits / lookups,
            fetcher.substituted / lookups,
        )
        fetcher.close()
    return found


def times(bundle: Bundle, pieces: Pieces) -> list[dict[str, float]]:
    """Print and return the median time of a token by distance, all in turn."""
    config, quant = bundle.config, bundle.quant
    assert config.experts is not None
    room = config.experts.count * len(config.expert_layers) // 2
    distances, models, fetchers = (0.0, *DISTANCES), [], []
    with ExitStack() as stack:
        for distance in distances:
            reader = stack.enter_context(FlashReader(bundle_files(bundle), "direct", 2))
            cpu = CpuBackend(make_runner(threads=1), segment_neurons=64, piece_neurons=64)
            models.append(Transformer(config, cpu, load_weights(bundle, reader, cpu)))
            slots = room + expert_shape(config, quant, config.experts).reserve
            fetchers.append(expert_fetcher(bundle, reader, cpu, slots, distance))
            stack.callback(fetchers[-1].close)
        taken: list[list[float]] = [[] for _ in distances]
        missed = np.zeros(len(distances))
        counted = 0
        for piece in pieces:
            caches = [SequenceState(KVLayout(config, 16)) for _ in models]
            for at, token in enumerate(piece):
                for place in np.roll(np.arange(len(models)), at).tolist():
                    before, begun = fetchers[place].lookups - fetchers[place].hits, time.perf_counter()
                    every_logits(models[place], [token], caches[place])
                    if at >= WARM_UP:
                        taken[place].append(time.perf_counter() - begun)
                        missed[place] += fetchers[place].lookups - fetchers[place].hits - before
                counted += at >= WARM_UP
    seconds = np.median(taken, axis=1)
    print("| within | ms a token | over the model's own choice | experts read a token |\n|---|---|---|---|")
    for place, distance in enumerate(distances):
        ratio, read = seconds[place] / seconds[0], missed[place] / counted
        print(f"| {distance:g} | {1e3 * seconds[place]:.2f} | {ratio:.2f} | {read:.2f} |")
    return [
        {"within": distance, "seconds": float(own), "read": float(read / counted)}
        for distance, own, read in zip(distances, seconds, missed, strict=True)
    ]


def texts_of(tokens: int, length: int) -> dict[str, Pieces]:
    """`tokens` tokens of each kind of text, in pieces."""
    found = {name: held_out_tokens(name, tokens) for name in DOMAINS}
    return {
        name: [ids[at : at + length] for at in range(0, len(ids) - 1, length)] for name, ids in found.items()
    }


def compared(label: str, texts: dict[str, Pieces], runs: dict[str, Run], own: dict[str, Run]) -> list[Any]:
    """Print a row of a table; its figures for JSON."""
    cells, figures = [], []
    for name in texts:
        one, whole = runs[name], own[name]
        agrees = float(np.mean(one.likeliest == whole.likeliest))
        cost = one.perplexity / whole.perplexity - 1
        shares = ", ".join(f"{100 * share:.1f} %" for share in (agrees, one.hits, one.substituted))
        cells.append(f"{one.perplexity:.2f} ({100 * cost:+.2f} %), {shares}")
        row = {"options": label, "text": name, "tokens": len(one.likeliest), "perplexity": one.perplexity}
        figures.append(row | {"agrees": agrees, "hits": one.hits, "substituted": one.substituted})
    print(f"| {label} | " + " | ".join(cells) + " |", flush=True)
    return figures


def main() -> None:
    """Print the tables and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=MIXTURE, help="a bundle with experts")
    parser.add_argument("--pieces", type=int, default=PIECES, help="pieces of each kind of text")
    parser.add_argument("--single", type=int, default=SINGLE_TOKENS, help="tokens of each that go one by one")
    parser.add_argument("--times", action="store_true", help="the time of a token, and nothing else")
    args = parser.parse_args()
    bundle = Bundle.open(args.model)
    experts = bundle.config.experts
    if experts is None:
        parser.error(f"{args.model} has no experts")
    length, figures = min(PIECE_TOKENS, bundle.config.max_context), []
    if args.times:
        pieces = [held_out_tokens("dialogue", min(args.single, length))]
        print(json.dumps({"benchmark": "lossy_experts", "times": times(bundle, pieces)}))
        return
    print("| options | " + " | ".join(f"{name}: cost, agrees, hits, substituted" for name in DOMAINS) + " |")
    print("|---|" + "---|" * len(DOMAINS))
    texts = texts_of(args.single, length)
    whole = {name: run(bundle, experts.chosen, pieces, False) for name, pieces in texts.items()}
    own: dict[str, Run] = {}
    for distance in (0.0, *DISTANCES):
        runs = {name: run(bundle, experts.chosen, pieces, True, distance) for name, pieces in texts.items()}
        own = own or runs
        figures += compared(f"within {distance:g}", texts, runs, own)
    if any(own[name].perplexity != whole[name].perplexity for name in texts):
        raise SystemExit("token by token the model's own choice has another perplexity than in whole passes")
    texts = texts_of(args.pieces * length, length)
    for count in range(experts.chosen, 0, -1):
        runs = {name: run(bundle, count, pieces, False) for name, pieces in texts.items()}
        own = runs if count == experts.chosen else own
        figures += compared(f"{count} experts", texts, runs, own)
    print(json.dumps({"benchmark": "lossy_experts", "runs": figures}))


if __name__ == "__main__":
    main()
