"""What 4 bits cost by each way of rounding: perplexity, and KL divergence from the model before rounding.

The models are stories260K in float16, and the model that ships and its SwiGLU twin as their q8 bundles stand.
The text is the model's own, sampled at temperature 1, where it has learnt what it predicts; or `--text FILE`.
Its first part is what inputs are measured on, for the ways that use them; the rest, other texts, measures.
What `convert` writes without and with a text is measured, by numpy also formats that bundles don't have, and
what llama.cpp's own code makes of the same weights.
Runs on the `reference` backend, with float activations, so that weights alone are rounded. Ends with one JSON
line.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from ondevice.api import load
from ondevice.backends.base import EmbeddingSource, Float32, Int32, Norm
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.backends.reference import (
    ReferenceBackend,
    ReferenceFeedForward,
    ReferenceLinear,
    hidden,
)
from ondevice.bundle.reader import Bundle
from ondevice.converters.checkpoints.base import Checkpoint
from ondevice.converters.convert import Training, convert
from ondevice.converters.rounding.layers import random_pieces
from ondevice.flash.reader import FlashReader
from ondevice.model.loading import bundle_files, load_weights
from ondevice.model.sequence_state import KVLayout, SequenceState
from ondevice.model.transformer import Transformer
from ondevice.model_config import FeedForwardSpec
from tests.benchmarks.lib import rounding
from tests.benchmarks.lib.array_checkpoint import checkpoint_of
from tests.benchmarks.lib.llama_formats import MIXES, Kind, Mix, Rounder
from tests.benchmarks.lib.rounding import Float64, Format
from tests.support.paths import ROOT, SHARED_DATA, SHIPPED

MODELS = {
    "stories260K": SHARED_DATA / "models" / "stories260K",
    "small-relu": SHIPPED,
    "small-silu": ROOT / "tests" / "benchmarks" / "data" / "small-silu",
}
MEASURED_SHARE = 0.4
PIECE_TOKENS = 256
FORMATS = {
    "3 bits": Format(3),
    "3 bits, groups of 32": Format(3, 32),
    "4 bits": Format(4),
    "4 bits, groups of 32": Format(4, 32),
    "5 bits": Format(5),
    "6 bits": Format(6),
    "8 bits": Format(8),
}


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


class RoundedBackend(ReferenceBackend):
    """The reference, whose tied embedding is an array too, and which can sum its inputs' second moments."""

    def __init__(self) -> None:
        self.table: Float32 = np.empty((0, 0), np.float32)
        self.moments: dict[int, Float64] | None = None

    def embedding(self, table: EmbeddingSource, tokens: Int32) -> Float32:
        return self.table[tokens]

    def linear(
        self, x: Float32, weight: ReferenceLinear, norm: Norm | None = None, added: Float32 | None = None
    ) -> Float32:
        self._add(weight.weight, self.normed(x, norm))
        return super().linear(x, weight, norm, added)

    def feed_forward(
        self,
        x: Float32,
        weight: ReferenceFeedForward,
        spec: FeedForwardSpec,
        batch: ForwardBatch,
        norm: Norm | None = None,
        added: Float32 | None = None,
    ) -> Float32:
        if self.moments is not None:
            normed_rows = self.normed(x, norm)
            self._add(weight.gate, normed_rows)
            self._add(weight.down, hidden(normed_rows, weight, spec))
        return super().feed_forward(x, weight, spec, batch, norm, added)

    def _add(self, weight: Float32, x: Float32) -> None:
        if self.moments is not None:
            wide = x.astype(np.float64)
            self.moments[id(weight)] = self.moments.get(id(weight), 0.0) + wide.T @ wide


@dataclass(frozen=True)
class Matrix:
    """A weight that the model multiplies by, in place, and its values before any rounding.

    inputs: the weight that meets the same inputs, whose moments were summed. parts: the kinds of matrices
    whose rows it holds, and how many of each. A down projection has an input a row.
    """

    weight: Float32
    exact: Float32
    inputs: Float32
    layer: int
    parts: Sequence[tuple[Kind, int]]

    @property
    def by_row(self) -> bool:
        return self.parts[0][0] == "down"

    def round(self, form: Format, moments: dict[int, Float64] | None) -> None:
        """Put values of a format in the weight's place, with feedback if there are moments."""
        if moments is None:
            self.weight[:] = rounding.least_squares(self.exact, form)
        else:
            feed_back = rounding.rows_with_feedback if self.by_row else rounding.with_feedback
            self.weight[:] = feed_back(self.exact, moments[id(self.inputs)], form)

    def round_as(self, mix: Mix, layers: int, rounder: Rounder, moments: dict[int, Float64] | None) -> None:
        """Put what a file of llama.cpp would hold in the weight's place. It has no energies for the head."""
        exact, found = (x.T if self.by_row else x for x in (self.exact, self.weight))
        end = 0
        for kind, rows in self.parts:
            start, end = end, end + rows
            weighed = moments is not None and kind != "embedding"
            energies = np.diag(moments[id(self.inputs)]) if moments is not None and weighed else None
            form = mix.of(kind, self.layer, layers, exact.shape[1])
            found[start:end] = rounder.round(exact[start:end], form, energies)


class Model:
    """A bundle whose weights can be rounded in place. Its embedding is tied."""

    def __init__(self, folder: Path) -> None:
        bundle = Bundle.open(folder)
        self._backend = RoundedBackend()
        with FlashReader(bundle_files(bundle), "buffered", 2) as reader:
            weights = load_weights(bundle, reader, self._backend)
            self._model = Transformer(bundle.config, self._backend, weights)
        if not bundle.config.tie_embeddings:
            raise SystemExit(f"{folder} has a head of its own, which isn't measured here")
        self.matrices: list[Matrix] = []
        config = bundle.config
        kv_rows = config.num_kv_heads * config.head_dim
        for number, layer in enumerate(weights.layers):
            ffn, qkv, out = layer.feed_forward, layer.qkv.weight, layer.out.weight
            self._add(qkv, qkv, number, ("q", config.query_size), ("k", kv_rows), ("v", kv_rows))
            self._add(out, out, number, ("out", len(out)))
            self._add(ffn.gate, ffn.gate, number, ("gate", len(ffn.gate)))
            self._add(ffn.up, ffn.gate, number, ("up", len(ffn.up)))
            self._add(ffn.down, ffn.down, number, ("down", ffn.down.shape[1]))
        head = weights.head.weight
        self._add(head, head, config.num_layers, ("embedding", len(head)))
        self._backend.table = head
        self.layers = config.num_layers

    def _add(self, weight: Float32, inputs: Float32, layer: int, *parts: tuple[Kind, int]) -> None:
        self.matrices.append(Matrix(weight, weight.copy(), inputs, layer, parts))

    def moments(self, pieces: Sequence[Sequence[int]]) -> dict[int, Float64]:
        """Second moments of the inputs of every matrix, by the id of the weight that meets them."""
        self._backend.moments = {}
        for piece in pieces:
            self.logits(piece)
        found, self._backend.moments = self._backend.moments, None
        return {key: total / sum(map(len, pieces)) for key, total in found.items()}

    def logits(self, piece: Sequence[int]) -> Float32:
        """(T, V), the logits after every token of a piece that begins an empty context."""
        layout = KVLayout(self._model.config, 32)
        kv = SequenceState(layout, self._backend.allocate_block)
        rows = self._model.every_logits(ForwardBatch(list(piece)), kv, len(piece))
        return np.concatenate(list(rows))


def log_probabilities(logits: Float32) -> Float64:
    """(T, V) natural logarithms of the chances that logits (T, V) stand for."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    found: Float64 = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
    return found


@dataclass(frozen=True)
class Loss:
    """Log-likelihood that a model lost, and its standard error; KL divergence. All are nats per token."""

    mean: float
    error: float
    divergence: float


def measure(model: Model, pieces: Sequence[Sequence[int]], exact: Sequence[Float32]) -> Loss:
    """What a model lost against `exact`, the logarithms of chances before rounding.

    On text that was sampled from these, the expected loss is the divergence, which varies less.
    """
    lost, divergence = [], 0.0
    for piece, theirs in zip(pieces, exact, strict=True):
        mine, wide = log_probabilities(model.logits(piece[:-1])), theirs.astype(np.float64)
        lost.append((wide - mine)[np.arange(len(mine)), list(piece[1:])])
        divergence += float((np.exp(wide) * (wide - mine)).sum())
    tokens = np.concatenate(lost)
    return Loss(float(tokens.mean()), float(tokens.std() / len(tokens) ** 0.5), divergence / len(tokens))


class Comparison:
    """One model's figures: perplexity, its loss, and the KL divergence, by way of rounding."""

    def __init__(self, folder: Path, pieces: Sequence[Sequence[int]], show: Callable[[str], None]) -> None:
        self._folder, self._show = folder, show
        first = math.ceil(len(pieces) * (1 - MEASURED_SHARE))
        self._calibrating, self._measuring = pieces[:first], pieces[first:]
        self.model = Model(folder)
        self._moments = self.model.moments(self._calibrating)
        self._exact = [
            log_probabilities(self.model.logits(piece[:-1])).astype(np.float32) for piece in self._measuring
        ]
        chances = [
            theirs[np.arange(len(theirs)), list(piece[1:])]
            for theirs, piece in zip(self._exact, self._measuring, strict=True)
        ]
        self._base = -float(np.concatenate(chances).mean(dtype=np.float64))
        self.found: dict[str, dict[str, float]] = {}

    @property
    def summary(self) -> dict[str, object]:
        predicted = sum(len(piece) - 1 for piece in self._measuring)
        return {"perplexity": math.exp(self._base), "tokens": predicted, "ways": self.found}

    def range(self) -> None:
        """The rounding of converter version 4, by which the others are judged."""
        for matrix in self.model.matrices:
            matrix.weight[:] = rounding.to_range(matrix.exact)
        self._add("range", rounding.Q4.weight_bits, self.model)

    def convert(self, scratch: Path) -> None:
        """What `convert` writes without a text, by random tokens, and with the calibrating pieces."""
        ways = {
            "convert": None,
            "convert --random-text": Training("random", None, self._random_pieces(), is_random=True),
            "convert --text": Training("text", None, self._calibrating),
        }
        for bits in (4, 5, 6):
            for way, training in ways.items():
                began = time.perf_counter()
                folder = scratch / f"{way} {bits}"
                checkpoint = checkpoint_of(self._folder)
                convert(checkpoint, folder, f"q{bits}", begin_training=partial(_given, training))
                seconds = time.perf_counter() - began
                name = way if bits == 4 else f"{way}, {bits} bits"
                self._add(name, Format(bits).weight_bits, Model(folder), seconds)

    def _random_pieces(self) -> list[list[int]]:
        bundle = Bundle.open(self._folder)
        return random_pieces(bundle.config, bundle.manifest.tokenizer.bos_id)

    def formats(self) -> None:
        """Every format without and with the inputs' moments, by numpy."""
        for name, form in FORMATS.items():
            for way, moments in (("", None), (", feedback", self._moments)):
                for matrix in self.model.matrices:
                    matrix.round(form, moments)
                self._add(name + way, form.weight_bits, self.model)

    def llama_cpp(self) -> None:
        """What files of llama.cpp hold, without and with an importance matrix."""
        for name, mix in MIXES.items():
            for way, moments in (("", None), (", importance matrix", self._moments)):
                rounder = Rounder()
                for matrix in self.model.matrices:
                    matrix.round_as(mix, self.model.layers, rounder, moments)
                self._add(f"llama.cpp {name}{way}", rounder.weight_bits, self.model)

    def _add(self, way: str, bits: float, model: Model, seconds: float = 0.0) -> None:
        lost = measure(model, self._measuring, self._exact)
        loss, divergence = math.expm1(lost.mean), lost.divergence
        self.found[way] = {
            "bits": bits,
            "perplexity": math.exp(self._base + lost.mean),
            "loss": loss,
            "loss_error": lost.error,
            "kl": divergence,
            "seconds": seconds,
        }
        before = self.found["range"]
        self._show(
            f"| {way} | {bits:.3g} | {100 * loss:.2f} ± {100 * lost.error:.2f} % "
            f"({100 * (loss / before['loss'] - 1):+.0f} %) | "
            f"{divergence:.5f} ({100 * (divergence / before['kl'] - 1):+.0f} %) | {seconds:.1f} |"
        )


def _given(training: Training | None, checkpoint: Checkpoint) -> Training | None:
    return training


def main() -> None:
    """Print a table for each model, and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=tuple(MODELS))
    parser.add_argument("--text", type=Path, help="instead of the model's own text")
    parser.add_argument("--tokens", type=int, default=16_384, help="in all, 60 %% of them for the inputs")
    parser.add_argument("--formats", action="store_true", help="other bits and groups too, by numpy")
    parser.add_argument("--llama-cpp", action="store_true", help="llama.cpp's formats, by its own code")
    args = parser.parse_args()
    figures: dict[str, object] = {}
    for name in args.models:
        if not MODELS[name].exists():
            print(f"{name}: skipped, as {MODELS[name]} isn't there")
            continue
        with tempfile.TemporaryDirectory() as scratch:
            folder = MODELS[name]
            if not (folder / "bundle.json").exists():
                folder = convert(folder, Path(scratch) / name, "f16")
            if args.text is None:
                pieces = own_text(folder, args.tokens)
            else:
                pieces = given_text(folder, args.text.read_text(errors="replace"), args.tokens)
            print(
                f"\n{name}\n\n| rounding | bits a weight | perplexity lost | KL, nats | seconds |"
                "\n|---|---|---|---|---|"
            )
            comparison = Comparison(folder, pieces, lambda line: print(line, flush=True))
            comparison.range()
            comparison.convert(Path(scratch))
            if args.formats:
                comparison.formats()
            if args.llama_cpp:
                comparison.llama_cpp()
            figures[name] = comparison.summary
    print(json.dumps({"benchmark": "rounding", "models": figures}))


if __name__ == "__main__":
    main()
