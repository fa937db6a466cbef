"""What thresholds inside experts cost and save: a squared ReLU mixture's quality, and one expert's time.

Quality: thresholds are set on nine tenths of held-out text and measured on the last. The model is a folder
that `python -m tests.benchmarks.lib.squared_relu_mixture FOLDER` has written; without it, times alone. Time:
an expert of Qwen3-30B-A3B's shape with squared ReLU, random weights at 4 bits, on one thread, by the share of
neurons that a threshold leaves out, over that of the same expert without one, which leaves out zeros. All
take turns.

    python -m tests.benchmarks.explain.expert_thresholds [FOLDER] [--rounds 40] [--tokens 8192]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np

from ondevice.api import convert
from ondevice.backends.base import Float32
from ondevice.backends.cpu import native_form
from ondevice.kernels import _native
from ondevice.model_config import FeedForwardSpec
from ondevice.training import train_thresholds
from tests.benchmarks.explain.firing_experts import (
    EXPERTS,
    HIDDEN,
    NEURONS,
    RECORD,
    ROW,
    gates,
    random_records,
)
from tests.benchmarks.lib.held_out_prompts import held_out_tokens
from tests.benchmarks.lib.squared_relu_mixture import KINDS

SHARES = (0.5, 0.6, 0.7, 0.8, 0.9)
TOKENS = (1, 4, 16, 64)
PIECE_TOKENS = 256
FORM = native_form(FeedForwardSpec("relu2"))


def quality(folder: Path, tokens: int) -> None:
    """Print perplexity by the share of neurons that thresholds leave out."""
    text = [held_out_tokens(kind, tokens // len(KINDS)) for kind in KINDS]
    pieces = [own[at : at + PIECE_TOKENS] for own in text for at in range(0, len(own), PIECE_TOKENS)]
    # The kinds in turn, so that the last tenth has both.
    pieces = [pieces[at] for at in np.argsort([at % (len(pieces) // 2) for at in range(len(pieces))])]
    with tempfile.TemporaryDirectory() as made:
        bundle = convert(folder, Path(made) / "bundle", quant="q8")
        found = train_thresholds(bundle, pieces=pieces, tokens=tokens)
    print(f"exact: perplexity {found.perplexity:.3f} on {found.measured_tokens} tokens")
    for point in found.points:
        assert found.perplexity is not None
        assert point.perplexity is not None
        assert point.agreement is not None
        print(
            f"{point.sparsity:4.0%} asked: {np.mean(point.skipped):6.1%} left out, perplexity "
            f"{point.perplexity / found.perplexity - 1:+.2%}, {point.agreement:.1%} alike"
        )


def times(rounds: int) -> None:
    """Print the time of an expert by the share of its neurons that a threshold leaves out."""
    rng, runner = np.random.default_rng(0), _native.Runner(1)
    records = random_records(rng)
    gate, up, down = RECORD.row_offsets
    layer = _native.FeedForward(HIDDEN, ROW.stored, RECORD.stride, gate, up, down)
    importance = np.ones(NEURONS, np.float32)
    print("tokens  exact, ms  " + "  ".join(f"{share:5.0%}" for share in SHARES))
    for tokens in TOKENS:
        x = rng.standard_normal((tokens, HIDDEN)).astype(np.float32)
        sizes = np.square(np.maximum(0, gates(runner, records, x)))
        limits = [float(np.quantile(sizes, share)) for share in SHARES]
        cutoffs: list[tuple[Float32 | None, float]] = [(None, 0.0), *((importance, it) for it in limits)]
        ids, weights = np.zeros((tokens, 1), np.int32), np.ones((tokens, 1), np.float32)
        found, total = np.zeros((rounds, len(cutoffs))), np.zeros_like(x)
        for turn, place in np.ndindex(found.shape):
            address = records[turn % EXPERTS * NEURONS :].ctypes.data
            begun = time.perf_counter()
            forward = _native.ExpertPass(
                runner, layer, None, NEURONS, x, ids, weights, FORM, True, total, *cutoffs[place]
            )
            forward.add(0, address)
            forward.finish()
            found[turn, place] = time.perf_counter() - begun
        least = np.quantile(found, 0.2, axis=0)
        print(f"{tokens:6}  {1e3 * least[0]:9.3f}  " + "  ".join(f"{it:5.2f}" for it in least[1:] / least[0]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=8192)
    arguments = parser.parse_args()
    if arguments.folder is not None:
        quality(arguments.folder, arguments.tokens)
    times(arguments.rounds)


if __name__ == "__main__":
    main()
