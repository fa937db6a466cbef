"""What every layer's feed-forward gets and what its gates are, over a text; recorded on disk for training.

Gates are observed of models whose gates are exactly zero for most neurons, inputs of any.

The CPU engine runs the model dense, within the memory that its weights and a stream from flash need; each
layer's record is a pair of files that are read back as they are needed. At 7B shape a token takes 300 KB.

Legend: N tokens, L layers, D hidden size, F neurons of a layer.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ondevice.backends.base import Float32, KVLayout, Norm
from ondevice.backends.cpu import CpuBackend, make_engine
from ondevice.backends.cpu_weights import CpuFeedForward
from ondevice.backends.fed_layer import BLOCK_NEURONS
from ondevice.bundle.files import disk_errors, temporary_path
from ondevice.bundle.reader import Bundle
from ondevice.config import Activation, Sparsity
from ondevice.errors import OndeviceError
from ondevice.flash.reader import FlashReader
from ondevice.kernels import _native
from ondevice.model.kv_cache import KVCache
from ondevice.model.loading import bundle_files, load_weights
from ondevice.model.transformer import Transformer
from ondevice.sparsity.policies import fires
from ondevice.sparsity.segments import SegmentPool
from ondevice.units import PAGE_BYTES, format_bytes, usable_cores

CHUNK_TOKENS = 256
STREAM_BYTES = 2 << 20
STREAM_SLOTS = 4

Observer = Callable[[int, Float32, Float32], None]
"""Gets a layer, what its gates multiply (T, D), and the gates (T, F) before the activation; valid until it
returns. The tokens of a layer come in order."""
InputObserver = Callable[[int, Float32], None]
"""The same without the gates."""


class Activations:
    """The records of `tokens` tokens of one model, in `folder`."""

    def __init__(self, folder: Path, layers: int, hidden_size: int, neurons: int) -> None:
        self._folder = folder
        self._layers = layers
        self._hidden_size = hidden_size
        self._neurons = neurons
        self.tokens = 0

    def inputs(self, layer: int) -> NDArray[np.float16]:
        """(N, D) what the layer's gates multiply, read from disk as it is used."""
        values = np.memmap(self.path("inputs", layer), np.float16, "r")
        return values.reshape(-1, self._hidden_size)

    def fired(self, layer: int) -> NDArray[np.uint8]:
        """(N, ceil(F / 8)) whether each neuron fired, eight to a byte as `numpy.packbits` has them."""
        values = np.memmap(self.path("fired", layer), np.uint8, "r")
        return values.reshape(-1, -(-self._neurons // 8))

    @contextmanager
    def recording(self) -> Iterator[Observer]:
        """What takes the values in, chunk by chunk."""
        with ExitStack() as stack:
            files = [
                tuple(stack.enter_context(self.path(kind, layer).open("wb")) for kind in ("inputs", "fired"))
                for layer in range(self._layers)
            ]

            def add(layer: int, x: Float32, gates: Float32) -> None:
                inputs, fired = files[layer]
                inputs.write(x.astype(np.float16).tobytes())
                fired.write(np.packbits(fires(gates), axis=1).tobytes())

            yield add

    def reorder(self, layer: int, order: NDArray[np.int32]) -> None:
        """What neuron `order[i]` did is neuron i's from now on; order (F,) is a permutation.

        Raises OndeviceError where the disk refuses.
        """
        fired, path = self.fired(layer), self.path("fired", layer)
        temporary = temporary_path(path)
        with disk_errors(path, "use a temporary folder (TMPDIR) with more room"):
            with temporary.open("wb") as file:
                for start in range(0, len(fired), CHUNK_TOKENS):
                    bits = np.unpackbits(fired[start : start + CHUNK_TOKENS], axis=1, count=self._neurons)
                    file.write(np.packbits(bits[:, order], axis=1).tobytes())
            temporary.replace(path)

    def path(self, kind: str, layer: int) -> Path:
        """Of a layer's `inputs` or `fired`."""
        return self._folder / f"{kind}-{layer:05d}"


class _ObservedBackend(CpuBackend):
    """Multiplies every neuron, and shows what the gates got and computed."""

    observe_inputs: InputObserver

    def feed_forward(
        self,
        x: Float32,
        weight: CpuFeedForward,
        activation: Activation,
        norm: Norm | None = None,
        added: Float32 | None = None,
        certain: int | None = None,
    ) -> Float32:
        layer = next(i for i, known in enumerate(self.feed_forwards) if known is weight)
        if norm is not None:
            normed = np.empty_like(x)
            _native.rms_norm(self.engine, x, *norm, normed)
            x = normed
        self.observe_inputs(layer, x)
        return self.dense_feed_forward(x, weight, activation, added=added)

    def observe_gates(self, observe: Observer) -> None:
        """From now on show the gates too. Raises OndeviceError, in a pass, for a model without selectors."""

        def observe_inputs(layer: int, x: Float32) -> None:
            selector = self.feed_forwards[layer].selector
            if selector is None:
                raise OndeviceError("only models whose gates are exactly zero have neurons that don't fire")
            observe(layer, x, self.scores(x, selector))

        self.observe_inputs = observe_inputs


def record_activations(
    bundle: Bundle,
    pieces: Sequence[Sequence[int]],
    folder: Path,
    on_progress: Callable[[int], None] = lambda tokens: None,
) -> Activations:
    """Run `pieces` of token ids, each from an empty context, and record them in `folder`, in order.

    on_progress gets the tokens done. Raises OndeviceError where the disk hasn't the room, FlashReadError.
    """
    config = bundle.config
    total = sum(len(piece) for piece in pieces)
    token_bytes = config.num_layers * (2 * config.hidden_size + -(-config.intermediate_size // 8))
    check_room(folder, total, token_bytes, "activations")
    activations = Activations(folder, config.num_layers, config.hidden_size, config.intermediate_size)
    with activations.recording() as observe:
        observe_gates(bundle, pieces, observe, on_progress)
    activations.tokens = total
    return activations


def record_inputs(
    bundle: Bundle,
    pieces: Sequence[Sequence[int]],
    folder: Path,
    on_progress: Callable[[int], None] = lambda tokens: None,
) -> Activations:
    """Like `record_activations`, of any model, without what fired."""
    config = bundle.config
    total = sum(len(piece) for piece in pieces)
    check_room(folder, total, config.num_layers * 2 * config.hidden_size, "activations")
    activations = Activations(folder, config.num_layers, config.hidden_size, config.intermediate_size)
    with ExitStack() as stack:
        files = [
            stack.enter_context(activations.path("inputs", layer).open("wb"))
            for layer in range(config.num_layers)
        ]

        def observe(layer: int, x: Float32) -> None:
            files[layer].write(x.astype(np.float16).tobytes())

        with _running(bundle, "dense") as (model, cpu):
            cpu.observe_inputs = observe
            _run(model, pieces, on_progress)
    activations.tokens = total
    return activations


def record_entering(
    bundle: Bundle,
    pieces: Sequence[Sequence[int]],
    path: Path,
    layer: int,
    on_progress: Callable[[int], None] = lambda tokens: None,
) -> None:
    """Run `pieces`, each from an empty context, and write what enters `layer` to `path`: (N, D) float32.

    Whole pieces that an earlier run has written stay. Only the layers before run; their residual stream has
    values that float16 hasn't. on_progress gets the tokens done. Raises what `record_inputs` raises.
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
        with _running(bundle, "dense") as (model, cpu):
            cpu.observe_inputs = lambda layer, x: None
            lower = _first_layers(model, layer)
            for piece in pieces[done:]:
                kv = KVCache(KVLayout(lower.config, 16))
                for start in range(0, len(piece), CHUNK_TOKENS):
                    chunk = piece[start : start + CHUNK_TOKENS]
                    x = lower.hidden_states(chunk, kv) if layer else lower.embedding(chunk)
                    file.write(x.tobytes())
                    kept += len(chunk)
                    on_progress(kept)
        file.flush()
        os.fsync(file.fileno())


def _first_layers(model: Transformer, count: int) -> Transformer:
    """A model's first layers, at least one."""
    count = max(1, count)
    config = replace(model.config, num_layers=count, layer_windows=model.config.layer_windows[:count])
    return Transformer(config, model.backend, replace(model.weights, layers=model.weights.layers[:count]))


def observe_gates(
    bundle: Bundle,
    pieces: Sequence[Sequence[int]],
    observe: Observer,
    on_progress: Callable[[int], None] = lambda tokens: None,
) -> None:
    """Run `pieces` of token ids, each from an empty context, and show what every layer's gates are.

    on_progress gets the tokens done. Raises BundleError for a model whose gates are hardly ever zero, which
    has no gates of their own to run; FlashReadError.
    """
    with _running(bundle, "exact") as (model, cpu):
        cpu.observe_gates(observe)
        _run(model, pieces, on_progress)


def _run(model: Transformer, pieces: Sequence[Sequence[int]], on_progress: Callable[[int], None]) -> None:
    done = 0
    for piece in pieces:
        kv = KVCache(KVLayout(model.config, 16))
        for start in range(0, len(piece), CHUNK_TOKENS):
            chunk = piece[start : start + CHUNK_TOKENS]
            # Every token passes every layer; of the logits, which nobody wants, one row is computed.
            next(model.every_logits(chunk, kv, 1))
            done += len(chunk)
            on_progress(done)


def check_room(folder: Path, tokens: int, token_bytes: int, what: str) -> None:
    """Raises OndeviceError where the disk hasn't the room to record so many tokens."""
    needed, free = tokens * token_bytes, shutil.disk_usage(folder).free
    if needed > free:
        raise OndeviceError(
            f"{folder} has {format_bytes(free)} left and {what} of {tokens} tokens take "
            f"{format_bytes(needed)}; use fewer tokens, or a temporary folder (TMPDIR) with more room"
        )


@contextmanager
def _running(bundle: Bundle, sparsity: Sparsity) -> Iterator[tuple[Transformer, _ObservedBackend]]:
    """The model, with its gates where they are `exact`, and its engine, which is to be told what to show.

    Its neurons are streamed from flash once per chunk, and none stays.
    """
    stride = bundle.neuron_layout.stride
    neurons = max(1, STREAM_BYTES // (stride * BLOCK_NEURONS)) * BLOCK_NEURONS
    with FlashReader(bundle_files(bundle, sparsity)) as reader, ExitStack() as undo:
        cpu = _ObservedBackend(make_engine(usable_cores()), segment_neurons=neurons, stream_neurons=neurons)
        weights = load_weights(bundle, reader, cpu, sparsity=sparsity)
        pool = SegmentPool(
            cpu.feed_forwards,
            reader,
            segment_bytes=neurons * stride,
            stream_neurons=neurons,
            # Records that begin and end in the middle of a page.
            slot_bytes=neurons * stride + 2 * PAGE_BYTES,
            slots=STREAM_SLOTS,
        )
        undo.callback(pool.close)
        yield Transformer(bundle.config, cpu, weights), cpu


def gate_rows(bundle: Bundle, layer: int) -> Float32:
    """(F, D) a layer's gate projection, as its quantised rows read back."""
    layout = bundle.gate_layout
    row = layout.parts[0][0]
    count, stride = bundle.config.intermediate_size, layout.stride
    file = bundle.gate_file(layer)
    with FlashReader([file], threads=2) as reader:
        records = reader.read(0, file.crc_start, count * stride).reshape(count, stride)
    out = np.empty((count, row.padded_cols), dtype=np.float32)
    _native.dequantize_rows(
        make_engine(usable_cores()), bundle.quant.bits, records, bundle.config.hidden_size, out
    )
    return np.ascontiguousarray(out[:, : bundle.config.hidden_size])
