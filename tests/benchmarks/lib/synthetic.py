"""Synthetic bundles of real size whose feed-forward neurons fire as rarely, and overlap as much, as is asked.

Nothing is hooked: sparsity is planted in the weights of a Llama shape with a ReLU gate, and real gates, reads
and caches run. Results on such a bundle are labelled synthetic.

How: the residual stream has one constant channel (every embedding has it, nothing writes to it), through
which a gate row carries its neuron's threshold; fast channels, the embedding of the token itself; and slow
channels, to which the first layer's attention writes a mean over about the last 10 tokens, since its queries
and keys come from the constant channel and depend on distance alone. A neuron fires where

    threshold_n < sqrt(slow) * (what changes slowly) + sqrt(1 - slow) * (what is new with every token)

with thresholds spread normally around the one that gives the density. By default that gives the overlap
between tokens of the last layer of `small-relu`: at a density of 9 %, 25 % of the neurons are used by 4
neighbouring tokens and 56 % by 16.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import sqrt
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ondevice.bundle.predictors import PREDICTORS_MANIFEST
from ondevice.bundle.reader import Bundle
from ondevice.converters.training.activations import record_activations
from ondevice.converters.training.predictors.layer_predictor import LayerPredictor
from ondevice.converters.training.predictors.operating_points import HeldBack
from ondevice.converters.training.predictors.train import store_predictor, write_predictors
from tests.benchmarks.lib.ondevice_bundle import convert_command
from tests.benchmarks.lib.random_model import Shape, random_tokens, write_checkpoint

Float32 = npt.NDArray[np.float32]

STD = np.float32(0.02)
"""Of embeddings and of weights that nothing is planted in."""
CONSTANT = np.float32(8.0)
"""The constant channel after the norm, where others have a variance of one."""
SLOW_PART = 8
"""Channels of which one is slow."""
ROTARY_PAIRS = range(18, 25)
SCORE = 8.0
"""Sum of the products of queries and keys at distance 0, scaled by 1 / sqrt(head_dim)."""
PIECE_VALUES = 1 << 22
PROMPTS, PROMPT_TOKENS = 16, 128
"""For predictors: enough that thresholds' margins of two standard errors stay about one point of recall."""
BLOCK_TOKENS = 16
"""Tokens are random: what lasts, the slow channels, lasts for about ten of them."""
QUIET = np.float32(0.05)
"""What later layers add to the stream, of what is there."""


@dataclass(frozen=True)
class Plant:
    """density: neurons that fire, of all. slow: share of a gate's variance that lasts for tokens.

    spread: standard deviation of the thresholds, in standard deviations of a gate. rank: of what the gates of
    a layer have in common, which is what its predictor knows. noise: the rest, as a share of a gate's
    deviation, chosen so that predictors are about as precise as the shipped model's.
    """

    density: float
    noise: float
    slow: float = 0.4
    spread: float = 0.4
    rank: int = 256

    def thresholds(self, random: np.random.Generator, count: int) -> Float32:
        """(count,) in standard deviations of a gate: sums of two normals exceed 0 at `density`."""
        mean = statistics.NormalDist().inv_cdf(1.0 - self.density) * sqrt(1.0 + self.spread**2)
        return (mean + self.spread * random.standard_normal(count)).astype(np.float32)


class PlantedModel:
    """The tensors of one model, row by row, from a seed.

    fixed: number of the first channels, which carry no text. Here it is the constant one.
    """

    fixed = 1

    def __init__(self, shape: Shape, plant: Plant) -> None:
        self._shape = shape
        self._plant = plant
        self._slow = shape.hidden_size - shape.hidden_size // SLOW_PART
        """The first slow channel; those between fixed and slow ones are fast."""
        self._predictor = lru_cache(maxsize=1)(self.predictor)
        self._noise = np.random.default_rng(20).standard_normal(1 << 24, np.float32)

    def rows(self, number: int, name: str, start: int, stop: int, cols: int) -> Float32:
        """Rows start .. stop of tensor `name`, the number-th of the model: (stop - start, cols)."""
        rows = self._drawn(number, start, stop, cols)
        layer = int(name.split(".")[2]) if ".layers." in name else -1
        kind = name.split(".")[-2]
        if kind == "embed_tokens":
            rows[:, self._slow :] = 0
            rows[:, 0] = CONSTANT * STD
        elif kind in ("q_proj", "k_proj"):
            rows[:] = 0
            rows[:, 0] = self._distances(start, stop)
        elif kind == "v_proj":
            rows[:, : self.fixed] = rows[:, self._slow :] = 0
        elif kind == "o_proj":
            self._write_slow(rows, start, np.float32(1) if layer == 0 else QUIET)
        elif kind == "gate_proj":
            self._gate(rows, layer, start, stop)
        elif kind == "down_proj":
            self._down(rows, start, stop, cols)
        return rows

    def write(self, folder: Path) -> None:
        """Write the model as a Hugging Face folder with float16 shards."""
        folder.mkdir(parents=True)
        write_checkpoint(folder, self._shape, "relu", self.pieces)

    def pieces(self, number: int, name: str, size: tuple[int, ...]) -> Iterator[Float32]:
        """A matrix in pieces of rows."""
        step = max(1, PIECE_VALUES // size[1])
        for start in range(0, size[0], step):
            yield self.rows(number, name, start, min(start + step, size[0]), size[1])

    def _down(self, rows: Float32, start: int, stop: int, cols: int) -> None:
        # A sum over the neurons that fire of products near one.
        rows *= QUIET / np.float32(sqrt(self._plant.density * cols))
        rows[: max(0, min(stop, self.fixed) - start)] = 0
        rows[max(0, self._slow - start) :] = 0

    def _drawn(self, number: int, start: int, stop: int, cols: int) -> Float32:
        offset = (number * 65_537 + start * cols) % len(self._noise)
        count = (stop - start) * cols
        repeated = np.tile(self._noise, 1 + (offset + count) // len(self._noise))
        return STD * repeated[offset : offset + count].reshape(-1, cols)

    def _distances(self, start: int, stop: int) -> Float32:
        """Weights on the constant channel that give every query and key the same few rotary pairs."""
        head_dim = self._shape.hidden_size // self._shape.num_heads
        value = sqrt(SCORE * sqrt(head_dim) / len(ROTARY_PAIRS)) / float(CONSTANT)
        within = np.arange(start, stop) % head_dim
        return np.where(np.isin(within, ROTARY_PAIRS), value, 0).astype(np.float32)

    def _write_slow(self, rows: Float32, start: int, strength: np.float32) -> None:
        """Attention adds to slow channels alone, there about as much as an embedding has elsewhere."""
        width = self._shape.hidden_size
        # A value: `width` products of STD with a variance of one; its mean over 10 tokens; `width` of those.
        reached = float(STD) * sqrt(width) / sqrt(10.0) * sqrt(width)
        rows *= strength * STD / (STD * np.float32(reached))
        rows[: max(0, self._slow - start)] = 0

    def predictor(self, layer: int) -> tuple[Float32, Float32, Float32]:
        """What the layer's gates have in common: down (R, D), up (F, R), bias (F,); scores in deviations."""
        shape, random = self._shape, np.random.default_rng([22, layer])
        down = random.standard_normal((self._plant.rank, shape.hidden_size), np.float32)
        up = random.standard_normal((shape.intermediate_size, self._plant.rank), np.float32)
        up /= np.sqrt(np.square(up).sum(axis=1, keepdims=True))
        down[:, : self.fixed] = 0
        self._scale_slow(down)
        down /= np.float32(sqrt((self._slow - self.fixed) / (1 - self._plant.slow)))
        return down, up * np.float32(sqrt(1 - self._plant.noise**2)), -self.thresholds(layer)

    def thresholds(self, layer: int) -> Float32:
        return self._plant.thresholds(np.random.default_rng([21, layer]), self._shape.intermediate_size)

    def _scale_slow(self, rows: Float32) -> None:
        """Weights on slow channels, so that these have their share of a product's variance."""
        fast, slow = self._slow - self.fixed, self._shape.hidden_size - self._slow
        share = self._plant.slow
        # The stream's mean square is one after the norm, in slow and fast channels alike.
        rows[:, self._slow :] *= np.float32(sqrt(share / (1 - share) * fast / slow))

    @property
    def deviation(self) -> np.float32:
        """Standard deviation of a gate."""
        return np.float32(float(STD) * sqrt((self._slow - self.fixed) / (1 - self._plant.slow)))

    def _gate(self, rows: Float32, layer: int, start: int, stop: int) -> None:
        self._scale_slow(rows)
        down, up, bias = self._predictor(layer)
        rows *= np.float32(self._plant.noise)
        rows += self.deviation * (up[start:stop] @ down)
        rows[:, : self.fixed] = 0
        rows[:, 0] = bias[start:stop] * self.deviation / CONSTANT


def synthetic_bundle(
    shape: Shape, plant: Plant, workdir: Path, make: type[PlantedModel] = PlantedModel
) -> Path:
    """q4 bundle of a planted model with its predictors, made where none of this plant is there."""
    output = workdir / f"{shape.name}-synthetic-{plant.density:.0%}-q4".replace("%", "")
    label = output.with_suffix(".plant")
    if (output / PREDICTORS_MANIFEST).is_file() and label.is_file() and label.read_text() == repr(plant):
        return output
    label.unlink(missing_ok=True)
    source = workdir / f"{output.name}.hf"
    shutil.rmtree(source, ignore_errors=True)
    model = make(shape, plant)
    model.write(source)
    subprocess.run(convert_command(source, output, "--force"), check=True, stdout=sys.stderr)
    shutil.rmtree(source)
    planted_predictors(shape, model, output)
    label.write_text(repr(plant))
    return output


def planted_predictors(shape: Shape, model: PlantedModel, folder: Path) -> None:
    """Add predictors to the bundle in `folder`: the planted matrices, calibrated on what really fires."""
    bundle = Bundle.open(folder)
    prompts = [random_tokens(PROMPT_TOKENS, shape.vocab_size, seed) for seed in range(PROMPTS)]
    tokens = np.arange(PROMPTS * PROMPT_TOKENS)
    calibrating, measuring = np.split(tokens, [len(tokens) - PROMPT_TOKENS])
    held = HeldBack(calibrating, measuring, BLOCK_TOKENS)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        seen = record_activations(bundle, prompts, Path(scratch))
        stored = []
        for layer in range(shape.num_layers):
            predictor = LayerPredictor(*model.predictor(layer))
            stored.append(store_predictor(predictor, seen.inputs(layer), seen.fired(layer), held, 4))
            point = stored[-1].points[1]
            print(
                f"layer {layer}: {point.active:.1%} fire, {point.selected:.1%} selected at a recall of "
                f"{point.recall:g}: {point.false_negatives:.1%} missed, precision {point.precision:.2f}",
                file=sys.stderr,
            )
    write_predictors(bundle, stored, folder, len(calibrating), len(measuring))
    # Freshly written files must not lie in the page cache of what is measured next.
    os.sync()
