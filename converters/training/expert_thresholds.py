"""Thresholds for experts that are stored neuron by neuron: how large a gate must be for its neuron to count.

As `thresholds.py` has it for dense layers, but a neuron is calibrated on the tokens that choose its expert:
its importance is measured on their inputs, and a layer's threshold on what all its chosen experts' neurons
add, before the router weighs it. Activations of these models make zeros, so a target is the share to leave
out of the neurons that fire. Neurons that aren't an expert's are multiplied whole. Memory: one expert's
packed gates and ups, the inputs and gates of CHUNK_TOKENS tokens, 8 MB of histograms, and the choices, two
bytes each; disk: the inputs, 2 bytes a value.

Legend: N tokens, D hidden size, F neurons of a layer, E experts of a layer, k chosen for a token.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ondevice.backends.base import Bytes, Float32
from ondevice.backends.cpu import CpuBackend, CpuFeedForward, make_runner
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.backends.routing import Routing
from ondevice.bundle.reader import Bundle
from ondevice.bundle.thresholds import Thresholds
from ondevice.callbacks import OnProgress, ignore_progress
from ondevice.converters.training.activations import Activations, check_room
from ondevice.converters.training.expert_use import (
    Choices,
    ExpertRoom,
    experts_running,
    run_pieces,
)
from ondevice.converters.training.thresholds import (
    BUCKETS,
    LayerGates,
    LayerThresholds,
    ThresholdOptions,
    check,
    layer_thresholds,
    write_thresholds,
)
from ondevice.flash.reader import FlashReader
from ondevice.kernels import _native
from ondevice.model.loading import bundle_files
from ondevice.model.records import NeuronRecords
from ondevice.model_config import LayerSpec
from ondevice.units import usable_cores

log = logging.getLogger(__name__)


class ExpertNeurons(NeuronRecords):
    """The neurons of one expert of a layer, by themselves: neuron 0 is the expert's first."""

    def __init__(self, bundle: Bundle, reader: FlashReader, layer: int, expert: int) -> None:
        super().__init__(bundle, reader, layer)
        spec = bundle.config.layers[layer]
        assert spec.experts is not None
        self.num_neurons = spec.experts.neurons
        self.first = bundle.config.dense_neurons(spec) + expert * self.num_neurons
        """Its first neuron in the layer."""

    def read(self, first: int, count: int) -> Bytes:
        return super().read(self.first + first, count)


@dataclass(frozen=True)
class InputRows:
    """Some of the inputs (N, D) of a file, `rows` ascending, which are read as they are sliced."""

    inputs: NDArray[np.float16]
    rows: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, span: slice) -> NDArray[np.float16]:
        return self.inputs[self.rows[span]]


class _Observed(CpuBackend):
    """The CPU backend, which writes down what the experts of every layer are given, and which are chosen."""

    def __init__(
        self, runner: _native.Runner, activations: Activations, layers: Sequence[int], room: ExpertRoom
    ) -> None:
        piece, neurons = room.backend_neurons
        super().__init__(runner, segment_neurons=64, piece_neurons=piece, dense_neurons=neurons)
        self.chosen: dict[int, list[Choices]] = {layer: [] for layer in layers}
        self._open = ExitStack()
        paths = {layer: activations.path("inputs", layer) for layer in layers}
        self._files = {layer: self._open.enter_context(path.open("wb")) for layer, path in paths.items()}

    def add_experts(
        self,
        x: Float32,
        weight: CpuFeedForward,
        spec: LayerSpec,
        routing: Routing,
        batch: ForwardBatch,
        total: Float32,
    ) -> None:
        self._files[weight.index].write(x.astype(np.float16).tobytes())
        self.chosen[weight.index].append(routing.ids.astype(np.int16))
        super().add_experts(x, weight, spec, routing, batch, total)

    def close(self) -> None:
        self._open.close()
        super().close()


def calibrate_expert_thresholds(
    bundle: Bundle,
    pieces: Sequence[Sequence[int]],
    output: Path,
    options: ThresholdOptions,
    room: ExpertRoom,
    on_progress: OnProgress = ignore_progress,
) -> Thresholds:
    """`calibrate_thresholds` for a model with experts. room: for experts while the text is read."""
    measured, total = sum(map(len, check(bundle, pieces, options))), sum(map(len, pieces))
    config, calibrated = bundle.config, total - measured
    layers = [index for index, spec in enumerate(config.layers) if spec.experts is not None]

    def recording(done: int) -> None:
        on_progress(0.5 * done / total, f"inputs of {done} of {total} tokens")

    with tempfile.TemporaryDirectory(prefix="ondevice-activations-") as scratch:
        folder = Path(scratch)
        check_room(folder, total, 2 * config.hidden_size * len(layers), "inputs of experts")
        activations = Activations(folder, config.hidden_size, config.widths)
        backend = _Observed(make_runner(usable_cores()), activations, layers, room)
        with experts_running(bundle, room, backend) as (model, _):
            run_pieces(model, pieces, recording)
        found = []
        with FlashReader(bundle_files(bundle)) as reader:
            for index, spec in enumerate(config.layers):
                on_progress(
                    0.5 + 0.5 * index / config.num_layers, f"layer {index + 1} of {config.num_layers}"
                )
                if spec.experts is None:
                    found.append(_without(config.widths[index], len(options.targets)))
                    continue
                chosen = np.concatenate(backend.chosen[index])
                inputs = activations.inputs(index)
                found.append(_of_layer(bundle, reader, index, inputs, chosen, calibrated, options.targets))
                log.info("layer %d: %s", index, " ".join(f"{it:.4g}" for it in found[-1].thresholds))
    thresholds = write_thresholds(bundle, found, output, options.targets, calibrated, measured)
    on_progress(1.0, "written")
    return thresholds


def _without(neurons: int, targets: int) -> LayerThresholds:
    """Thresholds of zero, for a layer without experts: all its neurons are multiplied."""
    return LayerThresholds(np.ones(neurons, np.float32), (0.0,) * targets, (0.0,) * targets)


def _of_layer(
    bundle: Bundle,
    reader: FlashReader,
    layer: int,
    inputs: NDArray[np.float16],
    chosen: Choices,
    calibrated: int,
    targets: Sequence[float],
) -> LayerThresholds:
    """A layer's thresholds. inputs: (N, D) of its experts. chosen: (N, k). calibrated: as in LayerGates."""
    spec = bundle.config.layers[layer]
    assert spec.experts is not None
    counted, measured = np.zeros(BUCKETS, np.int64), np.zeros(BUCKETS, np.int64)
    importance = np.ones(bundle.config.widths[layer], np.float32)
    for expert in range(spec.experts.count):
        neurons = ExpertNeurons(bundle, reader, layer, expert)
        gates = LayerGates(spec.feed_forward, neurons)
        rows = np.flatnonzero((chosen == expert).any(axis=1))
        first, rest = (InputRows(inputs, it) for it in np.split(rows, [np.searchsorted(rows, calibrated)]))
        # An expert that no token chose gets the importance that its neurons would have had for all.
        own = gates.importance(first if len(first) else inputs[:calibrated])
        importance[neurons.first : neurons.first + len(own)] = own
        counted += gates.histogram(first, own)
        measured += gates.histogram(rest, own)
    # What is zero counts for nothing anyway: a target is a share of the neurons that fire.
    counted[0] = 0
    return layer_thresholds(importance, counted, measured, targets)
