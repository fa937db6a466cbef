"""What selects neurons best per byte of memory: trained low-rank predictors, or coarsely rounded gates.

Held-out text of the shipped model (`make model-tables` packs it), layer by layer, at a recall of 0.95 on
tokens that nothing was fitted to. Rounded gates have 1 to 4 bits and the 4 bytes of scale and offset of every
64 weights, whichever rounding has the least squared error where the layer's inputs are large; low-rank
predictors are trained and stored as `ondevice train predictors` does it. The last column is what the form
would take for the gates of a Llama-7B, whose own rank would be chosen anew. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from ondevice.backends.base import Float32
from ondevice.bundle.matrix_layout import RowLayout
from ondevice.bundle.reader import Bundle
from ondevice.config import GROUP_SIZE
from ondevice.converters.training.activations import Activations, gate_rows, record_activations
from ondevice.converters.training.predictors.arrays import NumpyArrays
from ondevice.converters.training.predictors.layer_predictor import (
    LayerPredictor,
    OperatingPoint,
    PredictorTraining,
    bits,
)
from ondevice.converters.training.predictors.low_rank import split, train_layer
from ondevice.converters.training.predictors.operating_points import measure, thresholds
from ondevice.converters.training.predictors.train import store_predictor
from tests.benchmarks.explain.cache_hit_rates import DOMAINS, held_out_windows
from tests.benchmarks.lib.random_model import LLAMA_7B
from tests.support.paths import ROOT

RECALL = 0.95
BITS, RANKS = (1, 2, 3, 4), (64, 128, 192)
RANK_BITS: Final = 4
CLIPS = np.linspace(0.4, 1.0, 13)
TRAINING = PredictorTraining(recall=RECALL)
NUMPY = NumpyArrays()


def rounded(gate: Float32, importance: Float32, width: int) -> Float32:
    """gate (F, D) as `width` bits hold it; importance (D,): mean squares of what it multiplies."""
    groups = gate.reshape(len(gate), -1, GROUP_SIZE)
    weights = importance.reshape(1, -1, GROUP_SIZE)
    low, high = groups.min(axis=-1, keepdims=True), groups.max(axis=-1, keepdims=True)
    best, least, steps = groups, np.full_like(low, np.inf), 2**width - 1
    for clip in CLIPS:
        start = (low + high) / 2 - clip * (high - low) / 2
        step = clip * (high - low) / steps + np.float32(1e-12)
        found = start + step * np.clip(np.round((groups - start) / step), 0, steps)
        error = (weights * np.square(found - groups)).sum(axis=-1, keepdims=True)
        best, least = np.where(error < least, found, best), np.minimum(error, least)
    return best.reshape(gate.shape).astype(np.float32)


def gate_bytes(hidden: int, neurons: int, width: Any) -> int:
    return neurons * RowLayout(hidden, width).nbytes


def rank_bytes(hidden: int, neurons: int, rank: int) -> int:
    return rank * RowLayout(hidden, RANK_BITS).nbytes + neurons * RowLayout(rank, RANK_BITS).nbytes


def points(bundle: Bundle, seen: Activations, layer: int) -> Iterator[tuple[str, int, OperatingPoint]]:
    """Name, bits or rank, and operating point of every form for one layer."""
    inputs, fired, gate = seen.inputs(layer), seen.fired(layer), gate_rows(bundle, layer)
    trained, held = split(len(inputs), TRAINING)
    importance = np.square(inputs[trained].astype(np.float32)).mean(axis=0)
    identity, no_bias = np.eye(gate.shape[1], dtype=np.float32), np.zeros(1, dtype=np.float32)
    for width in BITS:
        form = LayerPredictor(identity, rounded(gate, importance, width), no_bias)
        scores = form.scores(inputs[held.calibrating])
        found = thresholds(scores, bits(fired, held.calibrating, len(gate)), held.block, (RECALL,))
        wanted = [(RECALL, found[0])]
        yield "gates", width, measure(form.scores, inputs, fired, held.measuring, len(gate), wanted)[0]
    for rank in RANKS:
        low_rank = train_layer(inputs, fired, gate, [rank], TRAINING, np.random.default_rng(layer), NUMPY)
        stored = store_predictor(low_rank, inputs, fired, held, RANK_BITS)
        yield "rank", rank, next(point for point in stored.points if point.recall == RECALL)


def main() -> None:
    """Print the table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "weights/small-relu")
    parser.add_argument("--data", type=Path, default=ROOT / "build/recipe", help="where text is packed")
    parser.add_argument("--tokens", type=int, default=2048, help="of each domain, at most")
    args = parser.parse_args()
    bundle = Bundle.open(args.model)
    pieces = [window for domain in DOMAINS for window in held_out_windows(args.data, domain, args.tokens)]
    found: dict[tuple[str, int], list[OperatingPoint]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        seen = record_activations(bundle, pieces, Path(scratch))
        for layer in range(bundle.config.num_layers):
            for form, size, point in points(bundle, seen, layer):
                found.setdefault((form, size), []).append(point)
    rows = []
    print("| form | KB a layer | missed | selected | precision | a 7B, MB |\n" + "|---" * 6 + "|")
    for (form, size), layers in found.items():
        count = gate_bytes if form == "gates" else rank_bytes
        nbytes = count(bundle.config.hidden_size, bundle.config.intermediate_size, size)
        large = LLAMA_7B.num_layers * count(LLAMA_7B.hidden_size, LLAMA_7B.intermediate_size, size)
        missed, chosen, precision = (
            float(np.mean([getattr(point, name) for point in layers]))
            for name in ("false_negatives", "selected", "precision")
        )
        rows.append({"form": form, "size": size, "layer_bytes": nbytes, "bytes_7b": large})
        rows[-1] |= {"false_negatives": missed, "selected": chosen, "precision": precision}
        name = f"gates of {size} bits" if form == "gates" else f"rank {size} of {RANK_BITS} bits"
        print(
            f"| {name} | {nbytes / 1e3:.0f} | {missed:.1%} | {chosen:.1%} | {precision:.2f} "
            f"| {large / 1e6:.0f} |"
        )
    print(json.dumps({"benchmark": "coarse_gates", "recall": RECALL, "tokens": seen.tokens, "rows": rows}))


if __name__ == "__main__":
    main()
