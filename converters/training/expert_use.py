"""Measures which experts a text uses: records choices, replays them through caches of several sizes, and
writes both results.

The format is in `ondevice/bundle/expert_use.py`. The model runs as it does when it generates, with as many
experts in memory as its plan has room for. In addition it holds the choices, two bytes each.

Legend: T tokens, L layers with experts, E experts of a layer, k chosen for a token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ondevice.backends.cpu import CpuBackend, make_runner
from ondevice.backends.feed_forward_layer import FeedForwardLayer
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.backends.kv_layout import KVLayout
from ondevice.backends.routing import Routing
from ondevice.bundle.expert_use import (
    EXPERT_USE,
    EXPERT_USE_SIDECAR,
    ExpertUse,
    HitPoint,
    expert_counts_bytes,
    expert_use_text,
)
from ondevice.bundle.files import disk_errors, write_durably
from ondevice.bundle.reader import Bundle
from ondevice.bundle.sidecar import weights_digest
from ondevice.callbacks import OnProgress, ignore_progress
from ondevice.config import GROUP_SIZE
from ondevice.converters.training.sidecars import MIN_TRAINING_TOKENS, save_sidecar
from ondevice.errors import UnsupportedModelError, UsageError
from ondevice.flash.reader import FlashReader
from ondevice.model.loading import bundle_files, load_weights
from ondevice.model.sequence_state import SequenceState
from ondevice.model.transformer import Transformer
from ondevice.model_config import ExpertsSpec
from ondevice.sparsity.experts import ExpertFetcher
from ondevice.sparsity.replay import expert_hit_rate
from ondevice.sparsity.segments import SegmentPool
from ondevice.units import usable_cores

CHUNK_TOKENS = 256
"""Tokens of a pass: each expert that any of them chooses is read once for all."""
SIZES = 8
"""Sizes of caches that are replayed."""
WARM_UP_SHARE = 0.25
"""Share of the replayed tokens that fill the caches and aren't counted."""

Choices = NDArray[np.int16]


@dataclass(frozen=True)
class ExpertRoom:
    """Memory for experts: `segments` segments of `slots` slots of `slot_bytes` bytes each.

    dense: memory for the model's other neurons; None if it has none.
    """

    slot_bytes: int
    slots: int
    segments: int
    dense: DenseRoom | None = None

    @property
    def backend_neurons(self) -> tuple[int, int]:
        """The arguments `piece_neurons` and `dense_neurons` for a CpuBackend that runs within this memory."""
        return (GROUP_SIZE, 0) if self.dense is None else (self.dense.piece_neurons, self.dense.neurons)


@dataclass(frozen=True)
class DenseRoom:
    """Memory for neurons that belong to no expert: segments of `neurons` neurons and `segment_bytes` bytes.

    quota: number of segments for each layer. Neurons without a segment are read `piece_neurons` at a time
    into `buffers` buffers of `buffer_bytes` bytes.
    """

    neurons: int
    segment_bytes: int
    quota: tuple[int, ...]
    piece_neurons: int
    buffer_bytes: int
    buffers: int

    def pool(self, layers: Sequence[FeedForwardLayer], reader: FlashReader) -> SegmentPool:
        """An empty segment pool for `layers` with this memory."""
        pool = SegmentPool(
            layers,
            reader,
            segment_bytes=[self.segment_bytes] * len(layers),
            piece_neurons=self.piece_neurons,
            slot_bytes=self.buffer_bytes,
            slots=self.buffers,
        )
        pool.resize(self.quota)
        return pool


def check(bundle: Bundle, pieces: Sequence[Sequence[int]]) -> ExpertsSpec:
    """The model's experts, checked. Raises UnsupportedModelError if it has none, UsageError if the text is
    too short.
    """
    experts, total = bundle.config.experts, sum(map(len, pieces))
    if experts is None:
        raise UnsupportedModelError(f"{bundle.name} has no experts that a router chooses among")
    if total < MIN_TRAINING_TOKENS:
        raise UsageError(
            f"the text has {total} tokens; counting the use of experts takes {MIN_TRAINING_TOKENS}"
        )
    return experts


def calibrate_experts(
    bundle: Bundle,
    pieces: Sequence[Sequence[int]],
    output: Path,
    room: ExpertRoom,
    on_progress: OnProgress = ignore_progress,
) -> ExpertUse:
    """Record the experts that `pieces` choose, and write the sidecar to the folder `output`.

    Args:
        bundle: the model.
        pieces: each is read from an empty context.
        output: the bundle's folder, or that of its copy. An earlier calibration there is replaced.
        room: memory for experts, at least for as many as a token chooses in a layer.
        on_progress: called with the share done, from 0 to 1, and the current step.

    Raises what `check` raises, FlashReadError, and OndeviceError if the disk refuses.
    """
    experts, total = check(bundle, pieces), sum(map(len, pieces))

    def recording(done: int) -> None:
        on_progress(0.8 * done / total, f"experts of {done} of {total} tokens")

    chosen = record_choices(bundle, pieces, room, recording)
    layers = chosen.shape[1]
    flat = np.arange(layers)[:, None] * experts.count + chosen
    counts = np.bincount(flat.ravel(), minlength=layers * experts.count).reshape(layers, experts.count)
    warm_up, sizes, points = int(WARM_UP_SHARE * total), cache_sizes(layers, experts), []
    for index, size in enumerate(sizes):
        on_progress(0.8 + 0.2 * index / len(sizes), f"caches, {index + 1} of {len(sizes)}")
        points.append(HitPoint(size, round(expert_hit_rate(chosen, experts.count, size, warm_up), 6)))
    data = expert_counts_bytes(counts)
    use = ExpertUse(
        model=weights_digest(bundle.manifest),
        tokens=total,
        replayed_tokens=total - warm_up,
        points=tuple(points),
        sha256=hashlib.sha256(data).hexdigest(),
    )
    with disk_errors(output, "make room, or choose another --output"):
        (output / EXPERT_USE_SIDECAR.manifest).unlink(missing_ok=True)
        write_durably(output / EXPERT_USE, data)
    save_sidecar(EXPERT_USE_SIDECAR, expert_use_text(use), output)
    on_progress(1.0, "written")
    return use


def cache_sizes(layers: int, experts: ExpertsSpec) -> list[int]:
    """Sizes of caches, in experts: half of what a token uses in all layers, all of that, and evenly from
    there to all experts.
    """
    cycle, total = layers * experts.chosen, layers * experts.count
    rising = np.geomspace(cycle, total, SIZES).round().astype(int).tolist()[:-1]
    return sorted({size for size in (cycle // 2, *rising) if 0 < size < total})


def record_choices(
    bundle: Bundle,
    pieces: Sequence[Sequence[int]],
    room: ExpertRoom,
    on_progress: Callable[[int], None] = lambda tokens: None,
) -> Choices:
    """The experts that each token of `pieces` chooses in each layer with experts, (T, L, k).

    room: as in `calibrate_experts`. on_progress gets the number of tokens done.
    """
    with _experts_running(bundle, room) as (model, fetcher):
        _run_pieces(model, pieces, on_progress)
        return fetcher.choices()


@contextmanager
def _experts_running(bundle: Bundle, room: ExpertRoom) -> Iterator[tuple[Transformer, _Recording]]:
    """A context with the model, and with the source of its experts, which records the choices."""
    config = bundle.config
    assert config.experts is not None
    piece, neurons = room.backend_neurons
    with ExitStack() as stack:
        backend = stack.enter_context(
            closing(
                CpuBackend(
                    make_runner(usable_cores()),
                    segment_neurons=64,
                    piece_neurons=piece,
                    dense_neurons=neurons,
                )
            )
        )
        reader = stack.enter_context(FlashReader(bundle_files(bundle)))
        model = Transformer(config, backend, load_weights(bundle, reader, backend))
        layers, dense = backend.feed_forwards, None
        if room.dense is not None:
            dense = stack.enter_context(closing(room.dense.pool(layers, reader)))
        specs, reserve = [layer.experts for layer in config.layers], config.experts.chosen
        fetcher = _Recording(layers, reader, specs, room.slot_bytes, room.slots, reserve, dense=dense)
        stack.enter_context(closing(fetcher))
        fetcher.resize([room.segments])
        yield model, fetcher


def _run_pieces(
    model: Transformer, pieces: Sequence[Sequence[int]], on_progress: Callable[[int], None]
) -> None:
    """Run the model over `pieces` of token ids, each from an empty context. on_progress gets the number of
    tokens done.
    """
    done = 0
    for piece in pieces:
        kv = SequenceState(KVLayout(model.config, 16))
        for start in range(0, len(piece), CHUNK_TOKENS):
            chunk = piece[start : start + CHUNK_TOKENS]
            model.hidden_states(chunk, kv)
            done += len(chunk)
            on_progress(done)


class _Recording(ExpertFetcher):
    """An ExpertFetcher that records which experts every pass chose."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._chosen: dict[int, list[Choices]] = {}

    def experts(
        self, layer: int, routing: Routing, batch: ForwardBatch, needs_expert_order: bool
    ) -> Iterator[tuple[int, int]]:
        self._chosen.setdefault(layer, []).append(routing.ids.astype(np.int16))
        return super().experts(layer, routing, batch, needs_expert_order)

    def choices(self) -> Choices:
        """The experts chosen so far, (T, L, k)."""
        return np.stack([np.concatenate(self._chosen[layer]) for layer in sorted(self._chosen)], axis=1)
