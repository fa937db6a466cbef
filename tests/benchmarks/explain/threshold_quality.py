"""What thresholds cost a SwiGLU or GeGLU model: a layer's (CATS) against each neuron's, by share left out.

The text is the model's own, sampled at temperature 1, where it has learnt what it predicts; or `--text FILE`.
The last tenth measures, and the rest sets the thresholds. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ondevice.api import load
from ondevice.backends.base import Float32
from ondevice.bundle.reader import Bundle
from ondevice.converters.training.activations import Activations, record_inputs
from ondevice.converters.training.sidecars import copy_bundle, held_out
from ondevice.converters.training.thresholds import LayerGates, write_thresholds
from ondevice.flash.reader import FlashReader
from ondevice.model.loading import bundle_files
from ondevice.model.records import NeuronRecords
from ondevice.scoring import Tally

TARGETS = (0.1, 0.25, 0.4, 0.5, 0.6, 0.7, 0.8)
PIECE_TOKENS = 256
VARIANTS = ("per layer", "per neuron")


def own_text(folder: Path, tokens: int) -> list[list[int]]:
    """Pieces that begin with the first token of every text, sampled from the model itself."""
    pieces: list[list[int]] = []
    with load(folder) as model:
        first = model.bundle.manifest.tokenizer.bos_id or 0
        while sum(map(len, pieces)) < tokens:
            seed = len(pieces)
            made = model.generate(tokens=[first], max_tokens=PIECE_TOKENS - 1, temperature=1.0, seed=seed)
            pieces.append([first, *made.tokens])
    return [piece for piece in pieces if len(piece) > 1]


def given_text(folder: Path, text: str, tokens: int) -> list[list[int]]:
    """Pieces of a text's first tokens."""
    with load(folder) as model:
        if model.tokenizer is None:
            raise SystemExit(f"{folder} has no tokenizer")
        settings = model.bundle.manifest.tokenizer
        first = [settings.bos_id] if settings.add_bos and settings.bos_id is not None else []
        ids = model.tokenizer.encode(text)[:tokens]
    return [[*first, *ids[start : start + PIECE_TOKENS]] for start in range(0, len(ids), PIECE_TOKENS)]


def score(
    folder: Path, pieces: Sequence[Sequence[int]], sparsity: float = 0.0
) -> tuple[float, NDArray[np.intp]]:
    """Perplexity, and the likeliest token at every position; without a sparsity of the dense model."""
    tally, likeliest = Tally(), []
    with load(
        folder, sparsity="threshold" if sparsity else "dense", threshold_sparsity=sparsity or 0.5
    ) as model:
        for piece in pieces:
            logits = model.logits(piece[:-1])
            tally.add(logits, piece[1:])
            likeliest.append(logits.argmax(axis=1))
    return tally.score().perplexity, np.concatenate(likeliest)


def calibrated(bundle: Bundle, variant: str, activations: Activations, tokens: int, output: Path) -> Path:
    """A copy of the bundle with thresholds of a variant, set by the first `tokens` tokens."""
    copy_bundle(bundle, output)
    layers = []
    with FlashReader(bundle_files(bundle)) as reader:
        for layer in range(bundle.config.num_layers):
            gates = LayerGates(bundle.config.layers[layer].feed_forward, NeuronRecords(bundle, reader, layer))
            inputs = activations.inputs(layer)
            importance: Float32 = gates.importance(inputs[:tokens])
            if variant == "per layer":
                importance = np.ones_like(importance)
            layers.append(gates.thresholds(importance, inputs, tokens, TARGETS))
    write_thresholds(bundle, layers, output, TARGETS, tokens, activations.tokens - tokens)
    return output


def main() -> None:
    """Print the table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="a bundle with SiLU or GELU gates")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--tokens", type=int, default=40_000)
    args = parser.parse_args()
    bundle = Bundle.open(args.model)
    if args.text is None:
        pieces = own_text(args.model, args.tokens)
    else:
        pieces = given_text(args.model, args.text.read_text(errors="replace"), args.tokens)
    measuring = held_out(pieces)
    tokens = sum(map(len, pieces)) - sum(map(len, measuring))
    dense, best = score(args.model, measuring)
    predicted = len(best)
    print(f"dense: perplexity {dense:.3f} of {predicted} tokens; calibrated on {tokens}\n")
    print(
        "| left out | " + " | ".join(f"{name}: perplexity, agrees" for name in VARIANTS) + " |\n|---|---|---|"
    )
    found: dict[str, list[dict[str, object]]] = {name: [] for name in VARIANTS}
    with tempfile.TemporaryDirectory() as scratch:
        activations = record_inputs(bundle, pieces, Path(scratch))
        folders = {
            name: calibrated(bundle, name, activations, tokens, Path(scratch) / name) for name in VARIANTS
        }
        for index, target in enumerate(TARGETS):
            cells = []
            for name, folder in folders.items():
                perplexity, likeliest = score(folder, measuring, target)
                agreement = float(np.mean(likeliest == best))
                thresholds = Bundle.open(folder).thresholds
                skipped = thresholds.points[index].skipped if thresholds is not None else ()
                cost = 100 * (perplexity / dense - 1)
                cells.append(f"{perplexity:.3f} (+{cost:.1f} %), {100 * agreement:.1f} %")
                found[name].append(
                    {"sparsity": target, "perplexity": perplexity, "agreement": agreement, "skipped": skipped}
                )
            print(f"| {target:.0%} | " + " | ".join(cells) + " |", flush=True)
    figures = {"dense_perplexity": dense, "tokens": predicted, "variants": found}
    print(json.dumps({"benchmark": "threshold_quality", **figures}))


if __name__ == "__main__":
    main()
