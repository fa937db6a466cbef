"""Inputs and gates of every layer's feed-forward over a text, recorded on disk for training.

They are recorded for models whose gates are exactly zero for most neurons.

A backend runs the model dense, within the memory that its weights and a stream from flash need. Each layer is
recorded in a pair of files, which are read back as needed. At 7B shape a token takes 300 KB.

Legend: N tokens, L layers, D hidden size, F neurons of a layer.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ondevice.backends.base import Float32
from ondevice.backends.cpu import make_runner
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.backends.kv_layout import KVLayout
from ondevice.bundle.files import disk_errors, temporary_path
from ondevice.bundle.layout import largest_neuron_layout
from ondevice.bundle.reader import Bundle
from ondevice.callbacks import OnProgress
from ondevice.config import Sparsity
from ondevice.converters.training.observed import ObservedCpu, Observer
from ondevice.converters.training.predictors.arrays import TrainingBackend
from ondevice.errors import OndeviceError
from ondevice.flash.reader import FlashReader
from ondevice.kernels import _native
from ondevice.model.loading import bundle_files, load_weights
from ondevice.model.records import NeuronRecords
from ondevice.model.sequence_state import SequenceState
from ondevice.model.transformer import Transformer
from ondevice.sparsity.policies import fires
from ondevice.sparsity.segments import SegmentPool
from ondevice.units import PAGE_BYTES, format_bytes, usable_cores

if TYPE_CHECKING:
    from ondevice.converters.training.observed_mlx import ObservedMlx

ObservedBackend: TypeAlias = "ObservedCpu | ObservedMlx"

CHUNK_TOKENS = 256
STREAM_BYTES = {"cpu": 2 << 20, "mlx": 16 << 20}
"""Bytes of a layer's neurons streamed at a time. MLX gets larger pieces, as each is a launch."""
STREAM_SLOTS = 4


class Activations:
    """The recorded activations of one model for `tokens` tokens, in files in `folder`."""

    def __init__(self, folder: Path, hidden_size: int, widths: Sequence[int]) -> None:
        """widths: the number F of neurons of each layer."""
        self._folder = folder
        self._hidden_size = hidden_size
        self._widths = widths
        self.tokens = 0

    def inputs(self, layer: int) -> NDArray[np.float16]:
        """The inputs (N, D) of the layer's gates, read from disk when they are used."""
        values = np.memmap(self.path("inputs", layer), np.float16, "r")
        return values.reshape(-1, self._hidden_size)

    def fired(self, layer: int) -> NDArray[np.uint8]:
        """Bits (N, ceil(F / 8)), packed as by `numpy.packbits`: 1 for a neuron that fired."""
        values = np.memmap(self.path("fired", layer), np.uint8, "r")
        return values.reshape(-1, -(-self._widths[layer] // 8))

    @contextmanager
    def recording(self) -> Iterator[Observer]:
        """A context with an observer that writes values to disk, chunk by chunk."""
        with ExitStack() as stack:
            files = [
                tuple(stack.enter_context(self.path(kind, layer).open("wb")) for kind in ("inputs", "fired"))
                for layer in range(len(self._widths))
            ]

            def add(layer: int, x: Float32, gates: Float32) -> None:
                inputs, fired = files[layer]
                inputs.write(x.astype(np.float16).tobytes())
                fired.write(np.packbits(fires(gates), axis=1).tobytes())

            yield add

    def reorder(self, layer: int, order: NDArray[np.int32]) -> None:
        """Renumber the neurons: neuron `order[i]` becomes neuron i. order: (F,), a permutation.

        Raises OndeviceError if the disk refuses.
        """
        fired, path, neurons = self.fired(layer), self.path("fired", layer), self._widths[layer]
        temporary = temporary_path(path)
        with disk_errors(path, "use a temporary folder (TMPDIR) with more room"):
            with temporary.open("wb") as file:
                for start in range(0, len(fired), CHUNK_TOKENS):
                    bits = np.unpackbits(fired[start : start + CHUNK_TOKENS], axis=1, count=neurons)
                    file.write(np.packbits(bits[:, order], axis=1).tobytes())
            temporary.replace(path)

    def path(self, kind: str, layer: int) -> Path:
        """The path of a layer's file. kind: `inputs` or `fired`."""
        return self._folder / f"{kind}-{layer:05d}"


def record_activations(
    bundle: Bundle,
    pieces: Sequence[Sequence[int]],
    folder: Path,
    on_progress: Callable[[int], None] = lambda tokens: None,
    *,
    backend: TrainingBackend = "cpu",
) -> Activations:
    """Run the model over `pieces` of token ids and record its activations in `folder`, in order.

    Args:
        bundle: the model.
        pieces: token ids; each piece runs from an empty context.
        folder: where the files go.
        on_progress: gets the number of tokens done.
        backend: the backend that runs the model. ImportError for `mlx` if MLX is missing.

    Raises OndeviceError if the disk has no room, FlashReadError.
    """
    config = bundle.config
    total = sum(len(piece) for piece in pieces)
    token_bytes = sum(2 * config.hidden_size + -(-neurons // 8) for neurons in config.widths)
    check_room(folder, total, token_bytes, "activations")
    activations = Activations(folder, config.hidden_size, config.widths)
    with activations.recording() as observe:
        observe_gates(bundle, pieces, observe, on_progress, backend=backend)
    activations.tokens = total
    return activations


def record_entering(
    bundle: Bundle,
    pieces: Sequence[Sequence[int]],
    path: Path,
    layer: int,
    on_progress: Callable[[int], None] = lambda tokens: None,
) -> None:
    """Write the hidden states that enter `layer` to `path`: (N, D) float32.

    Only the layers before `layer` run, over pieces that each start from an empty context. Complete pieces
    that an earlier run has written are kept. The states are float32, because the residual stream has values
    beyond float16. on_progress gets the number of tokens done.

    Raises OndeviceError if the disk has no room, FlashReadError.
    """
    token_bytes = 4 * bundle.config.hidden_size
    written = path.stat().st_size // token_bytes if path.exists() else 0
    ends = np.cumsum([len(piece) for piece in pieces])
    done = int(np.searchsorted(ends, written, side="right"))
    kept = int(ends[done - 1]) if done else 0
    check_room(path.parent, int(ends[-1]) - kept, token_bytes, "hidden states")
    with disk_errors(path, "make room, or use fewer tokens"), path.open("ab") as file:
        file.truncate(kept * token_bytes)
        if done == len(pieces):
            return
        with _running(bundle, "dense", "cpu") as (model, observed):
            lower = _first_layers(model, layer)
            for piece in pieces[done:]:
                kv = _empty_context(lower, observed)
                for start in range(0, len(piece), CHUNK_TOKENS):
                    chunk = piece[start : start + CHUNK_TOKENS]
                    x = lower.hidden_states(chunk, kv) if layer else lower.embedding(chunk, start)
                    file.write(x.tobytes())
                    kept += len(chunk)
                    on_progress(kept)
        file.flush()
        os.fsync(file.fileno())


def _empty_context(model: Transformer, observed: ObservedBackend) -> SequenceState:
    layout = KVLayout(model.config, 16)
    return SequenceState(layout, observed.allocate_block, arrays=observed.new_arrays(layout))


def _first_layers(model: Transformer, count: int) -> Transformer:
    """The model's first `count` layers, at least one."""
    count = max(1, count)
    config = replace(model.config, layers=model.config.layers[:count])
    return Transformer(config, model.backend, replace(model.weights, layers=model.weights.layers[:count]))


def observe_gates(
    bundle: Bundle,
    pieces: Sequence[Sequence[int]],
    observe: Observer,
    on_progress: Callable[[int], None] = lambda tokens: None,
    *,
    backend: TrainingBackend = "cpu",
) -> None:
    """Run the model over `pieces` of token ids and show every layer's gates.

    Args:
        bundle: the model.
        pieces: token ids; each piece runs from an empty context.
        observe: gets every layer's inputs and gates.
        on_progress: gets the number of tokens done.
        backend: as for `record_activations`.

    Raises BundleError for a model whose gates are hardly ever zero, because its bundle has no gate files.
    Raises FlashReadError.
    """
    with _running(bundle, "exact", backend) as (model, observed):
        observed.observe_gates(observe)
        _run(model, observed, pieces, on_progress)


def _run(
    model: Transformer,
    observed: ObservedBackend,
    pieces: Sequence[Sequence[int]],
    on_progress: Callable[[int], None],
) -> None:
    done = 0
    for piece in pieces:
        kv = _empty_context(model, observed)
        for start in range(0, len(piece), CHUNK_TOKENS):
            chunk = piece[start : start + CHUNK_TOKENS]
            # Every token passes every layer. The logits aren't used, so only one row of them is computed.
            next(model.every_logits(ForwardBatch(chunk), kv, 1))
            done += len(chunk)
            on_progress(done)


@contextmanager
def temporarily_recorded(
    bundle: Bundle,
    pieces: Sequence[Sequence[int]],
    on_progress: OnProgress,
    *,
    backend: TrainingBackend,
) -> Iterator[Activations]:
    """A context with what `record_activations` records, in a temporary folder.

    on_progress: called with a share done from 0 to 0.5. Raises what `record_activations` raises.
    """
    total = sum(len(piece) for piece in pieces)

    def progress(tokens: int) -> None:
        on_progress(0.5 * tokens / total, f"activations of {tokens} of {total} tokens")

    with tempfile.TemporaryDirectory(prefix="ondevice-activations-") as scratch:
        yield record_activations(bundle, pieces, Path(scratch), progress, backend=backend)


def check_room(folder: Path, tokens: int, token_bytes: int, what: str) -> None:
    """Check the disk. Raises OndeviceError if it has no room for `tokens` tokens of `token_bytes`
    bytes each.
    """
    needed, free = tokens * token_bytes, shutil.disk_usage(folder).free
    if needed > free:
        raise OndeviceError(
            f"{folder} has {format_bytes(free)} left and {what} of {tokens} tokens take "
            f"{format_bytes(needed)}; use fewer tokens, or a temporary folder (TMPDIR) with more room"
        )


@contextmanager
def _running(
    bundle: Bundle, sparsity: Sparsity, backend: TrainingBackend
) -> Iterator[tuple[Transformer, ObservedBackend]]:
    """A context with the model and its backend. The caller chooses what the backend reports.

    With sparsity `exact`, the model's gates are loaded. Its neurons are streamed from flash once per chunk,
    and none stays in memory.
    """
    layout = largest_neuron_layout(bundle.config, bundle.quant)
    neurons = layout.neurons_in(STREAM_BYTES[backend])
    with FlashReader(bundle_files(bundle, sparsity)) as reader, ExitStack() as undo:
        observed = _observed(backend, neurons)
        undo.callback(observed.close)
        weights = load_weights(bundle, reader, observed, sparsity=sparsity)
        pool = SegmentPool(
            observed.feed_forwards,
            reader,
            segment_bytes=[layout.nbytes(neurons)] * bundle.config.num_layers,
            piece_neurons=neurons,
            # Records may begin and end in the middle of a page.
            slot_bytes=layout.nbytes(neurons) + 2 * PAGE_BYTES,
            slots=STREAM_SLOTS,
        )
        undo.callback(pool.close)
        yield Transformer(bundle.config, observed, weights), observed


def _observed(backend: TrainingBackend, neurons: int) -> ObservedBackend:
    """A backend that reports gates, and streams `neurons` neurons at a time.

    MLX is imported only for `mlx`; ImportError if it is missing.
    """
    if backend == "cpu":
        return ObservedCpu(make_runner(usable_cores()), segment_neurons=neurons, piece_neurons=neurons)
    from ondevice.converters.training.observed_mlx import ObservedMlx

    return ObservedMlx(neurons)


def gate_shift(bundle: Bundle, layer: int) -> Float32 | None:
    """The values (F,) to add to a layer's gate products so that neurons fire above zero; None if nothing is
    added.

    They are the gates' bias minus the activation's threshold.
    """
    spec = bundle.config.feed_forward
    if not spec.bias and not spec.threshold:
        return None
    with FlashReader(bundle_files(bundle), threads=2) as reader:
        bias = NeuronRecords(bundle, reader, layer).gate_bias()
    shift = np.zeros(bundle.config.widths[layer], np.float32) if bias is None else bias
    return shift - np.float32(spec.threshold)


def gate_rows(bundle: Bundle, layer: int) -> Float32:
    """A layer's gate projection, (F, D), dequantised from its stored rows."""
    layout = bundle.gate_layout
    row = layout.parts[0][0]
    count, stride = bundle.config.widths[layer], layout.stride
    file = bundle.gate_file(layer)
    with FlashReader([file], threads=2) as reader:
        records = reader.read(0, file.crc_start, count * stride).reshape(count, stride)
    out = np.empty((count, row.padded_cols), dtype=np.float32)
    _native.dequantize_rows(make_runner(usable_cores()), row.stored, records, bundle.config.hidden_size, out)
    return np.ascontiguousarray(out[:, : bundle.config.hidden_size])
