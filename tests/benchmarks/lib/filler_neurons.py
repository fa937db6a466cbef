"""Neurons that fire as a trained model's do and add nothing: what fills a layer of an embedded model.

A filler's gate row is a mixture of two rows of a trained layer, rounded to q4. It reads what the trained
layer reads, so it fires in the same contexts, and for neighbouring tokens. Neurons that are neighbours in the
trained layer are mixed with neighbours, a block of 64 at a time, so that they still fire together. A constant
channel of the layer's input moves each filler's threshold to where it fires as often as the first of its two
rows, on text that the model itself continued.

Legend: T tokens, D hidden size, F neurons of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ondevice.api import load
from ondevice.backends.base import Float32, Norm
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.backends.kv_layout import KVLayout
from ondevice.backends.reference import ReferenceBackend, ReferenceFeedForward
from ondevice.config import GROUP_SIZE
from ondevice.converters.quantize import QuantizedRows, dequantize, quantize
from ondevice.flash.reader import FlashReader
from ondevice.kernels import _native
from ondevice.measure.prompts import BUILT_IN
from ondevice.model.loading import bundle_files, load_weights
from ondevice.model.sequence_state import SequenceState
from ondevice.model.transformer import Transformer
from ondevice.model_config import FeedForwardSpec, ModelConfig
from ondevice.units import usable_cores
from tests.benchmarks.lib.stored_model import Q4, StoredModel

MIXED = (0.5, 0.8)
"""Least and largest angle, in radians, between a filler and the first of its rows; the second is at a right
angle, where gates have a standard deviation of one."""
PIECE_TOKENS = 256
GAP_RECORDS = 4
"""Records between two that fire which a merged read reads along: 28 KB at the 7B shape, a usual gap."""


@dataclass(frozen=True)
class Recorded:
    """Residual streams (T, D) of a small model over a text."""

    entering: tuple[Float32, ...]
    """What enters each layer and, last, what leaves the model."""
    before: tuple[Float32, ...]
    """What enters each layer's feed-forward, before its norm."""

    def fed(self, layer: int, norm: Float32, eps: float) -> Float32:
        """The inputs of the gates of `layer`, (T, D)."""
        return normed(self.before[layer], norm, eps)


class RecordingBackend(ReferenceBackend):
    """Keeps the residual streams before and after every feed-forward, in the order that they come."""

    def __init__(self) -> None:
        self.before: list[Float32] = []
        self.after: list[Float32] = []

    def feed_forward(
        self,
        x: Float32,
        weight: ReferenceFeedForward,
        spec: FeedForwardSpec,
        batch: ForwardBatch,
        norm: Norm | None = None,
        added: Float32 | None = None,
    ) -> Float32:
        found = super().feed_forward(x, weight, spec, batch, norm, added)
        self.before.append(x)
        self.after.append(found)
        return found


def record(small: StoredModel, pieces: Sequence[Sequence[int]]) -> Recorded:
    """Run a small model over pieces of token ids in numpy: activations aren't rounded."""
    backend, bundle, embedded = RecordingBackend(), small.bundle, []
    with FlashReader(bundle_files(bundle)) as reader:
        model = Transformer(bundle.config, backend, load_weights(bundle, reader, backend))
        for piece in pieces:
            embedded.append(model.embedding(piece))
            model.hidden_states(piece, SequenceState(KVLayout(bundle.config)))
    layers = small.config.num_layers
    before, after = (
        tuple(np.concatenate(streams[layer::layers]) for layer in range(layers))
        for streams in (backend.before, backend.after)
    )
    return Recorded((np.concatenate(embedded), *after), before)


def own_text(folder: Path, tokens: int, part: int) -> list[list[int]]:
    """Pieces of text of the model in `folder`: its replies to the built-in prompts, sampled.

    part: 0 or 1, of the prompts and of the seeds, so that one part can measure what the other set.
    """
    pieces: list[list[int]] = []
    with load(folder, speculation="off", sparsity="dense", threads=1) as model:
        seed = part
        while sum(map(len, pieces)) < tokens:
            for task in BUILT_IN:
                for words in task.prompts[part::2]:
                    prompt = model.chat_ids([{"role": "user", "content": words}])
                    reply = model.generate(tokens=prompt, max_tokens=96, temperature=0.9, seed=seed)
                    pieces.append([*prompt, *reply.tokens][:PIECE_TOKENS])
            seed += 2
    kept, count = [], 0
    for piece in pieces:
        if count < tokens:
            kept.append(piece)
            count += len(piece)
    return kept


def root_mean_square(x: Float32, eps: float) -> Float32:
    """(T,) what an RMS norm of x (T, D) divides by."""
    return np.sqrt(np.mean(x * x, axis=1, dtype=np.float32) + np.float32(eps))


def normed(x: Float32, norm: Float32, eps: float) -> Float32:
    """The RMS norm of x (T, D)."""
    return ReferenceBackend().normed(x, Norm(norm, eps))


@dataclass(frozen=True)
class Fillers:
    """The fillers of a layer, n of them, in blocks of 64.

    first, second: (n,) the neurons of the trained layer that each is mixed of. gate: their rows, D wide.
    offset: (n,) float16, what the constant channel adds to each gate; fires: (n, T), whether each fires.
    """

    first: NDArray[np.int64]
    second: NDArray[np.int64]
    gate: QuantizedRows
    offset: NDArray[np.float16]
    fires: NDArray[np.bool_]


def make_fillers(
    gate: Float32,
    frequency: Float32,
    states: Float32,
    norm: tuple[Float32, float],
    blocks: NDArray[np.int64],
    random: np.random.Generator,
) -> Fillers:
    """Fillers that read the residual streams `states`.

    Args:
        gate: (F, D) gate rows of the trained layer.
        frequency: (F,) share of tokens for which each of its neurons fires.
        states: (T, D) residual streams before the norm.
        norm: weights and epsilon of the norm.
        blocks: the block of 64 trained neurons that each block of fillers is like.
        random: chooses which blocks they are mixed with.
    """
    x, count = normed(states, *norm), len(gate) // GROUP_SIZE
    angle = np.repeat(random.uniform(*MIXED, len(blocks)), GROUP_SIZE).astype(np.float32)[:, None]
    apart = random.integers(1, count, len(blocks))
    within = np.arange(GROUP_SIZE)
    first = (blocks[:, None] * GROUP_SIZE + within).ravel()
    second = ((blocks + apart)[:, None] % count * GROUP_SIZE + within).ravel()
    spreads = (x @ gate.T).std(axis=0) + np.float32(1e-6)
    ratio = (spreads[first] / spreads[second])[:, None]
    mixed = np.cos(angle) * gate[first] + np.sin(angle) * ratio * gate[second]
    rows = quantize(_native.Runner(usable_cores()), np.ascontiguousarray(mixed), Q4.bits, "a filler")
    gates = dequantize(rows, Q4.bits, x.shape[1]) @ x.T
    channel = 1 / root_mean_square(states, norm[1])
    gates /= channel
    offset = _thresholds(gates, np.rint(frequency[first] * len(x)).astype(np.int64))
    return Fillers(first, second, rows, offset, gates + offset[:, None].astype(np.float32) > 0)


def _thresholds(gates: Float32, counts: NDArray[np.int64]) -> NDArray[np.float16]:
    """(n,) what to add to gates (n, T) so that `counts` (n,) of each row are above zero."""
    ordered, tokens = np.sort(gates, axis=1), gates.shape[1]
    rows, counts = np.arange(len(gates)), np.minimum(counts, tokens - 1)
    below = ordered[rows, tokens - 1 - counts]
    above = ordered[rows, np.minimum(tokens - counts, tokens - 1)]
    margin = np.where(counts == 0, ordered.std(axis=1), 0)
    return np.asarray(-(below + above) / 2 - margin, np.float16)


def statistics(fired: NDArray[np.bool_]) -> dict[str, float]:
    """How neurons fire, fired (T, F): shares, overlap between tokens, and runs of neighbours.

    share: mean share of neurons that fire for a token. spread: standard deviation of that over tokens, as a
    part of the mean. again: share of what fires that fired for the token before. in_4, in_16: share of
    neurons that 4 or 16 tokens in a row use. run: mean number of neighbours that fire together. run_2: share
    of what fires that has such a neighbour. read, fired: mean records of a read that is merged over
    GAP_RECORDS, and those of them that fire.
    """
    share = fired.mean(axis=1)
    both = (fired[1:] & fired[:-1]).sum()
    padded = np.pad(fired, ((0, 0), (1, 1)))
    starts = padded[:, 1:-1] & ~padded[:, :-2]
    joined = padded[:, 1:-1] & (padded[:, :-2] | padded[:, 2:])
    total = max(1, int(fired.sum()))
    found = {
        "share": float(share.mean()),
        "spread": float(share.std() / max(share.mean(), 1e-9)),
        "again": float(both / max(1, int(fired[1:].sum()))),
        "run": float(total / max(1, int(starts.sum()))),
        "run_2": float(joined.sum() / total),
    }
    token, neuron = np.nonzero(fired)
    begins = np.flatnonzero((np.diff(token, prepend=-1) > 0) | (np.diff(neuron, prepend=0) > GAP_RECORDS + 1))
    if len(begins):
        lasts = np.append(begins[1:], len(neuron)) - 1
        found["read"] = float((neuron[lasts] - neuron[begins] + 1).mean())
        found["fired"] = total / len(begins)
    for tokens in (4, 16):
        whole = fired[: len(fired) // tokens * tokens].reshape(-1, tokens, fired.shape[1])
        found[f"in_{tokens}"] = float(whole.any(axis=1).mean())
    return found


def mean_of(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean of each statistic over layers."""
    return {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}


def source_layers(config: ModelConfig, places: Sequence[int], layers: int) -> list[int]:
    """For each of `layers` layers, the trained layer that is nearest."""
    assert len(places) == config.num_layers
    return [int(np.argmin([abs(place - layer) for place in places])) for layer in range(layers)]


def facts_line(name: str, found: dict[str, Any]) -> str:
    """A line of a table of `statistics`."""
    return f"{name:<32}" + "".join(f"{value:>9.3f}" for value in found.values())
