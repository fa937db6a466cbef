"""Tries out a bundle before it gets its final name, by running a few tokens through it, so that unusable
models are refused.

If a conversion runs without interruption, layers are tried out while the next ones are converted.

Only one layer's attention is in memory at a time, and a few MB of neurons or of the output head, or one
expert. So a trial takes no more memory than the conversion.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import replace
from functools import partial

import numpy as np

from ondevice.backends.base import (
    Bytes,
    Float32,
)
from ondevice.backends.cpu import CpuBackend, make_runner
from ondevice.backends.feed_forward_layer import BLOCK_NEURONS
from ondevice.bundle.file_layouts import resident_tensors
from ondevice.bundle.layout import (
    DATA_OFFSET,
    RESIDENT,
    RESIDENT_BLOCK_BYTES,
    RecordLayout,
    SliceLayout,
    embedding_layout,
    largest_neuron_layout,
    neuron_layout,
    record_counts,
)
from ondevice.bundle.matrix_layout import TILE_ROWS
from ondevice.bundle.reader import Bundle, CheckedFile, TensorSpan, tensor_spans
from ondevice.config import QuantConfig
from ondevice.converters import trial_layer
from ondevice.converters.trial_layer import LayerBackend, LayerByLayer, loaded_parts, through_layer
from ondevice.errors import BundleError, CheckpointError
from ondevice.flash.reader import FlashReader
from ondevice.kernels import _native
from ondevice.model.loading import (
    bundle_files,
    head_part,
    loaded_norm,
    model_weight_parts,
    norm_parts,
    position_parts,
)
from ondevice.model.parts import TiledSection
from ondevice.model.records import (
    FIRST_NEURON_FILE,
    RESIDENT_FILE,
    EmbeddingRecords,
    embedding_records,
    read_span,
)
from ondevice.model.tensor_file import TensorFile
from ondevice.model_config import ModelConfig
from ondevice.units import usable_cores

TRIAL_TOKENS = 64
"""Number of tokens tried, evenly spaced in the vocabulary. With 8, weights fuzzed to be unusable pass."""
SAMPLES = 16
"""Records of each layer, and blocks of the resident file, that are read back from the disk."""
_TABLE_FILE = FIRST_NEURON_FILE + 1
"""Index of the embedding in a reader of one layer's files."""
READ_THREADS = 2
"""Threads that read a layer for its trial, while others are converted."""


class LayersTrial:
    """Tries out layers while the next ones are converted. Each is read just after it was written.

    Its bytes come from the page cache, and are checked by CRC-32C. This doesn't test what the disk returns
    later: for that, `check_computes` reads a sample.
    """

    def __init__(self, config: ModelConfig, quant: QuantConfig) -> None:
        self._config = config
        self._quant = quant
        self._spans = tensor_spans(RESIDENT, resident_tensors(config, quant))
        self._tokens = trial_tokens(config)
        # Conversion has the other cores.
        self._backend = LayerBackend(make_runner(1), largest_neuron_layout(config, quant))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="converter-trial")
        self._pending: list[Future[None]] = []
        self._readers: list[FlashReader] = []
        self._buffers = [np.empty(trial_layer.PIECE_BYTES, np.uint8) for _ in range(2)]
        self._x: Float32 | None = None

    def tensor_span(self, name: str) -> TensorSpan:
        return self._spans[name]

    def add(self, resident: CheckedFile, embedding: CheckedFile, neurons: CheckedFile) -> None:
        """Begin to try out the next layer, after waiting until at most one trial is under way.

        Raises FlashReadError if a file can't be opened.
        """
        wait(self._pending[-2:-1])
        # Opened now: the resident file still grows.
        reader = FlashReader([resident, neurons, embedding], io="buffered", threads=READ_THREADS)
        self._readers.append(reader)
        layer = len(self._pending)
        self._pending.append(self._thread.submit(self._through, reader, resident, layer))

    def states(self) -> Float32 | None:
        """The output (T, D) of the last layer; None unless every layer was added.

        Raises the BundleError or FlashReadError of the first layer that failed.
        """
        for future in self._pending:
            future.result()
        return self._x if len(self._pending) == self._config.num_layers else None

    def close(self) -> None:
        """Wait for the layer that is being tried out, and forget the others. Idempotent."""
        self._thread.shutdown(cancel_futures=True)
        for reader in self._readers:
            reader.close()
        self._backend.close()

    def _through(self, reader: FlashReader, resident: CheckedFile, layer: int) -> None:
        x, self._x = self._x, None
        if layer and x is None:
            return  # The layer before has an error.
        config, quant = self._config, self._quant
        with reader:
            tensors = TensorFile(self, reader, resident, RESIDENT_FILE)
            table = EmbeddingRecords(
                config.vocab_size, reader, _TABLE_FILE, config.hidden_size, embedding_layout(config, quant)
            )
            source = _WrittenNeurons(config, quant, layer, reader, self._buffers)
            inputs = position_parts(config, tensors)
            self._x = through_layer(
                config, quant, tensors, table, source, self._backend, layer, self._tokens, x, inputs
            )
        self._readers.remove(reader)


class _WrittenNeurons:
    """The `FeedForwardSource` of a layer whose neuron file is the reader's first.

    buffers: two buffers of PIECE_BYTES.
    """

    def __init__(
        self,
        config: ModelConfig,
        quant: QuantConfig,
        layer: int,
        reader: FlashReader,
        buffers: list[Bytes],
    ) -> None:
        self.file = FIRST_NEURON_FILE
        self.num_neurons = config.widths[layer]
        self.hidden_size = config.hidden_size
        self.layout: RecordLayout | SliceLayout = neuron_layout(config, quant, layer)
        self.experts = None
        self._reader = reader
        self._buffers = buffers

    def read(self, first: int, count: int) -> Bytes:
        """The records of neurons first .. first + count, valid until the read after the next one, because
        buffers are reused.
        """
        self._buffers.reverse()
        layout, nbytes = self.layout, self.layout.nbytes(count)
        record, records = first // layout.neurons, layout.num_records(count)
        if nbytes > trial_layer.PIECE_BYTES:
            return read_span(self._reader, self.file, layout, record, records)
        out = self._buffers[0][:nbytes]
        self._reader.read(self.file, DATA_OFFSET + record * layout.stride, nbytes, out)
        return out.reshape(records, layout.stride)

    def check_gates(self, first: int, records: Bytes) -> None:
        """Compare the copies of gates with these records, if the bundle has such copies."""


def tries_layers(config: ModelConfig) -> bool:
    """Whether `LayersTrial` can try out the model's layers."""
    # Copies of gates are compared with a file that is written after the neurons; matrices that make an
    # embedding as wide as a layer are written last.
    return config.is_plain and not config.zeros_gates and not config.embedding_width


def trial_tokens(config: ModelConfig) -> Sequence[int]:
    """The token ids that a trial runs."""
    return range(0, config.vocab_size, -(-config.vocab_size // TRIAL_TOKENS))


def check_computes(bundle: Bundle, layers: LayersTrial | None = None) -> None:
    """Check a bundle's logits. Raises CheckpointError if they aren't finite, or are equal for all tokens of
    the vocabulary.

    layers: a trial of the bundle's layers; with it, only a sample of them is read. Raises FlashReadError if
    the disk doesn't return what was written.
    """
    config = bundle.config
    try:
        logits = trial_logits(bundle, trial_tokens(config), None if layers is None else layers.states())
    except BundleError as error:
        raise _refusal(bundle, str(error)) from error
    if not np.isfinite(logits).all():
        raise _refusal(bundle, "what it computes is not finite")
    if config.vocab_size > 1 and (logits == logits[:, :1]).all():
        raise _refusal(bundle, "every token is as likely as any other, whatever the text")


def trial_logits(bundle: Bundle, tokens: Sequence[int], x: Float32 | None = None) -> Float32:
    """The logits (T, V) of a text of T tokens, equal to those of the loaded model. Raises BundleError.

    x: the last layer's output (T, D), if it is known; then only a sample of the layers is read.
    """
    runner = make_runner(usable_cores())
    with FlashReader(bundle_files(bundle)) as reader:
        resident = TensorFile(bundle, reader, bundle.file(RESIDENT), RESIDENT_FILE)
        if x is not None:
            _read_sample(bundle, reader)
        else:
            with closing(LayerBackend(runner, largest_neuron_layout(bundle.config, bundle.quant))) as backend:
                x = LayerByLayer(bundle, reader, resident, backend, tokens).run()
        return np.concatenate(list(_logits(bundle, reader, resident, runner, x)), axis=1)


def _read_sample(bundle: Bundle, reader: FlashReader) -> None:
    """Read evenly spaced records of every layer and blocks of the resident file. Raises FlashReadError."""
    nbytes = bundle.file(RESIDENT).nbytes
    blocks = range(0, -(-nbytes // RESIDENT_BLOCK_BYTES))
    for block in np.linspace(0, len(blocks) - 1, min(SAMPLES, len(blocks))).astype(int).tolist():
        start = block * RESIDENT_BLOCK_BYTES
        reader.read(RESIDENT_FILE, start, min(RESIDENT_BLOCK_BYTES, nbytes - start))
    for layer, count in enumerate(record_counts(bundle.config, bundle.quant)):
        picks = np.unique(np.linspace(0, count - 1, min(SAMPLES, count)).astype(np.int64))
        records = np.empty((len(picks), bundle.neuron_layouts[layer].stride), np.uint8)
        reader.read_records(FIRST_NEURON_FILE + layer, picks, records)


def _refusal(bundle: Bundle, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{bundle.manifest.provenance.source} isn't a usable model: {reason}; check its weights, or download "
        "them again"
    )


def _logits(
    bundle: Bundle, reader: FlashReader, resident: TensorFile, runner: _native.Runner, x: Float32
) -> Iterator[Float32]:
    """Yields the logits (T, V) in pieces of a few columns. x: the last layer's output, (T, D)."""
    config, x = bundle.config, _narrowed(bundle, resident, runner, x)
    head = head_part(bundle, resident, embedding_records(bundle, reader))
    biases = resident.vector("head.bias") if config.head_bias else None
    (section,) = head.sections
    count = max(1, trial_layer.PIECE_BYTES // section.matrix.tile_bytes) * TILE_ROWS
    for first in range(0, config.vocab_size, count):

        def tiles(tile: int, number: int, first: int = first) -> Bytes:
            return section.read(first // TILE_ROWS + tile, number)

        backend = CpuBackend(runner, segment_neurons=BLOCK_NEURONS, piece_neurons=BLOCK_NEURONS)
        with closing(backend):
            number = min(count, config.vocab_size - first)
            bias = None if biases is None else partial(biases.__getitem__, slice(first, first + number))
            piece = TiledSection(replace(section.matrix, rows=number), tiles, section.place)
            part = replace(head, sections=(piece,), bias=bias)
            logits = backend.linear(x, loaded_parts(backend, [part])["head"])
            cap = config.logit_soft_cap
            yield np.array(backend.soft_cap(logits, cap) if cap else logits)


def _narrowed(bundle: Bundle, resident: TensorFile, runner: _native.Runner, x: Float32) -> Float32:
    """The head's input, (T, E), from the last layer's output x (T, D): normed, and projected to width E."""
    config, backend = (
        bundle.config,
        CpuBackend(runner, segment_neurons=BLOCK_NEURONS, piece_neurons=BLOCK_NEURONS),
    )
    with closing(backend):
        norm = norm_parts(config, resident, "final_norm") if config.final_norm else []
        loaded = loaded_parts(backend, [*norm, *model_weight_parts(bundle, resident)])
        if config.final_norm:
            x = backend.normed(x, loaded_norm(config, loaded, "final_norm"))
        return np.array(backend.linear(x, loaded["project_out"])) if config.embedding_width else x
