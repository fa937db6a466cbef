"""Checkpoint to bundle, streaming and resumable: `convert` is the entry.

    checkpoint -> disk space -> embedding, layers, head, tokenizer -> manifest -> trial -> rename

Everything is written to `<output>.partial`, which is renamed to `<output>` when it is a complete bundle. Four
stages overlap: one thread reads, one quantises (on every core), the calling thread computes checksums and
writes, and one tries out the layers that are written. Training, if there is any, precedes the renaming and
works on a copy. If it is interrupted, it starts again from the same bytes.
"""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Callable, Container, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import numpy as np

from ondevice.bundle.file_layouts import file_layout, resident_tensors
from ondevice.bundle.files import disk_errors, write_durably
from ondevice.bundle.layout import (
    EMBEDDING,
    MANIFEST,
    PER_LAYER,
    RECORDS_TENSOR,
    RESIDENT,
    expert_file_name,
    gate_file_name,
    neuron_file_name,
)
from ondevice.bundle.manifest import (
    FileEntry,
    Manifest,
    Provenance,
    bundle_files,
    manifest_text,
    parse_manifest,
)
from ondevice.bundle.reader import Bundle
from ondevice.bundle.resume import SourceStamp
from ondevice.bundle.writer import BundleWriter
from ondevice.config import AUTO_QUANT, MatrixKind, QuantConfig, RowFormat
from ondevice.converters.architectures import tensors as names
from ondevice.converters.bundling import Chunk, pack
from ondevice.converters.checkpoints.base import Checkpoint
from ondevice.converters.checkpoints.opening import open_checkpoint
from ondevice.converters.chosen_quant import chosen_quant
from ondevice.converters.error_log import ErrorLog
from ondevice.converters.fidelity import Fidelity, joined
from ondevice.converters.output_folder import OutputFolder
from ondevice.converters.pipeline import ahead
from ondevice.converters.progress import OnProgress, ProgressMeter
from ondevice.converters.quantize import RoundedRows
from ondevice.converters.reading import (
    EXPERT_KINDS,
    NAMES_OF_KINDS,
    NOT_ROUNDED,
    Wanted,
    layer_of,
    read_blocks,
    resident_sources,
)
from ondevice.converters.rounding.feedback import DAMPING, RANDOM_DAMPING
from ondevice.converters.rounding.layers import LayerRounding, rounds_any
from ondevice.converters.training.sidecars import copy_bundle
from ondevice.converters.trial import LayersTrial, check_computes, tries_layers
from ondevice.errors import (
    BundleError,
    CheckpointError,
    ModelNotFoundError,
    UnsupportedModelError,
    UsageError,
)
from ondevice.kernels import _native
from ondevice.units import usable_cores

CONVERTER_VERSION = "9"
"""Version of the converter. It changes whenever the same checkpoint would give other bytes."""
BLOCKS_AHEAD = 4
_MANIFEST_BYTES = 1 << 20
_SAMPLE_BYTES = 512
"""Bytes of a tensor's beginning and middle that its checkpoint's fingerprint depends on."""
_NAMED_CHARS = 24
"""Characters of a checkpoint's name in the fingerprint of a conversion, which has 128 characters."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Training:
    """Training of a bundle before it gets its final name.

    identity: a word that identifies the training data. Together with the checkpoint and the options it
    determines the bytes of the bundle. run: trains the bundle in a folder, and adds the result to it; None if
    the text is used only for rounding. pieces: token ids of the text by which weights of 4 to 6 bits are
    rounded, at most `most_tokens` in all; empty to round without a text. is_random: whether the pieces are
    random tokens instead of a text.
    """

    identity: str
    run: Callable[[Path], object] | None
    pieces: Sequence[Sequence[int]] = ()
    is_random: bool = False


BeginTraining = Callable[[Checkpoint], Training | None]
"""A function from a checkpoint to its training, or None. It may refuse the checkpoint before anything is
written."""


def convert(
    source: str | Path | Checkpoint,
    output: str | Path,
    quant: str | QuantConfig = AUTO_QUANT,
    on_progress: OnProgress | None = None,
    resume: bool = False,
    force: bool = False,
    begin_training: BeginTraining = lambda checkpoint: None,
) -> Path:
    """Convert the checkpoint `source` to a bundle in the new folder `output`, and return that folder.

    Args:
        source: the path of a checkpoint, or an open checkpoint, which is closed at the end.
        output: the new folder.
        quant: q4, q5, q6, q8, f16, or a QuantConfig; auto is what `chosen_quant` chooses.
        on_progress: called from this thread, several times a second. An exception from it stops the
            conversion, which can then be resumed.
        resume: whether to continue an interrupted run. The result has the same bytes as that of an
            uninterrupted run. Source files must be unchanged: another size or time of change is a UsageError.
            A finished bundle stays as it is. Interrupted training begins again.
        force: whether to replace an existing bundle, or to start again in place of an unfinished one.
        begin_training: returns the training to do before the bundle gets its final name, or None.

    Raises UsageError if `output` may not be written, ModelNotFoundError, UnsupportedModelError or
    CheckpointError for the source, OndeviceError if the disk is full or refuses.
    """
    given = quant if isinstance(quant, QuantConfig) else None
    if not isinstance(quant, QuantConfig) and quant != AUTO_QUANT:
        given = QuantConfig.parse(quant)
    folder = OutputFolder(Path(output))
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(Path(source))
    with closing(checkpoint), closing(folder):
        quant_config = chosen_quant(checkpoint) if given is None else given
        training = begin_training(checkpoint)
        origin = _origin(checkpoint)
        trained = origin if training is None else f"{origin} {training.identity}"
        pieces = () if training is None else _rounding_pieces(checkpoint, training, quant_config)
        if resume and _is_converted(folder.output, checkpoint, quant_config, trained):
            folder.discard_leftover()
            return folder.output
        if resume and _is_converted(folder.output, checkpoint, quant_config, origin):
            remedy = f"start again with --force, which replaces {folder.output}"
            if checkpoint.config.experts is not None:
                command = f"ondevice train expert-use --model {folder.output} --text FILE"
                remedy = f"`{command}` counts what it uses of the experts, or start again with --force"
            elif checkpoint.config.zeros_gates:
                command = f"ondevice train predictors --model {folder.output} --text FILE"
                remedy = f"`{command}` adds what is trained on it, or start again with --force"
            raise UsageError(f"{folder.output} is converted, but not with this text; {remedy}")
        _check_manifest(checkpoint, quant_config, trained)
        folder.check(resume, force)
        folder.claim(resume)
        train = None if training is None else training.run
        folder.check_space(bundle_bytes(checkpoint, quant_config, twice=train is not None))
        # Weights that a text has rounded are another conversion's for another text.
        written, is_random = trained if pieces else origin, training is not None and training.is_random
        conversion = _Conversion(checkpoint, quant_config, folder, written, pieces, is_random)
        with closing(conversion):
            conversion.run(on_progress)
            _try_out(folder, conversion.trial)
        if train is not None:
            _copy_as(Bundle.open(folder.partial), folder.copy, trained)
            train(folder.copy)
        folder.publish()
    return folder.output


def _rounding_pieces(
    checkpoint: Checkpoint, training: Training, quant: QuantConfig
) -> Sequence[Sequence[int]]:
    """The pieces of text by which weights are rounded; empty for models with experts or latent attention,
    whose inputs aren't recorded.

    For such models, raises UnsupportedModelError for random pieces, which are of no other use.
    """
    config = checkpoint.config
    latent = config.any_layer(lambda layer: layer.attention.latent is not None)
    if config.experts is None and not latent:
        return training.pieces if rounds_any(quant) else ()
    if training.is_random:
        blocks = "latent attention" if config.experts is None else "experts"
        raise UnsupportedModelError(
            f"{checkpoint.name} can't be rounded by random tokens yet, as its layers have {blocks}; "
            "convert it without --random-text"
        )
    return ()


def is_bundle_of(folder: Path, checkpoint: Checkpoint) -> bool:
    """Whether `folder` is a complete bundle of this checkpoint, with any number of bits, trained or not."""
    try:
        bundle = Bundle.open(folder)
    except (BundleError, ModelNotFoundError, UnsupportedModelError):
        return False
    return _is_converted(folder, checkpoint, bundle.quant, _origin(checkpoint))


def fingerprint(checkpoint: Checkpoint) -> str:
    """sha256 (hex) of every tensor's name, type, shape, beginning and middle, and of the tokenizer files.

    A fine-tuned model differs from its base at least in the middle of some tensor. Times and paths are not
    part of it.
    """
    digest = hashlib.sha256(checkpoint.source_format.encode())
    for name, tensor in sorted(checkpoint.tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.sample(0, _SAMPLE_BYTES))
        digest.update(tensor.sample(tensor.nbytes // 2, _SAMPLE_BYTES))
    for name, blob in sorted(checkpoint.tokenizer.blobs.items()):
        digest.update(f"{name} {len(blob)}\n".encode())
        digest.update(blob)
    digest.update(repr((checkpoint.tokenizer.info, sorted(checkpoint.generation.items()))).encode())
    return digest.hexdigest()


def _origin(checkpoint: Checkpoint) -> str:
    """What determines a conversion's bytes, apart from its options."""
    return f"{CONVERTER_VERSION} {checkpoint.name[:_NAMED_CHARS]} {fingerprint(checkpoint)}"


class _Conversion:
    """One run over the partial folder, which completes its files to a finished bundle."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        quant: QuantConfig,
        folder: OutputFolder,
        origin: str,
        pieces: Sequence[Sequence[int]],
        is_random: bool,
    ) -> None:
        self._checkpoint = checkpoint
        self._pieces = pieces
        self._is_random = is_random
        self._quant = quant
        self._folder = folder
        self._origin = origin
        layers = range(checkpoint.config.num_layers)
        self._neurons = [neuron_file_name(layer) for layer in layers]
        self._gates = [gate_file_name(layer) for layer in layers if checkpoint.config.zeros_gates]
        self._tables = [EMBEDDING, *([PER_LAYER] if checkpoint.config.per_layer_width else [])]
        self._experts = [expert_file_name(layer) for layer in checkpoint.config.expert_layers]
        self._resident = resident_tensors(checkpoint.config, quant)
        self._record_files = [*self._neurons, *self._gates, *self._experts, *self._tables]
        self.trial: LayersTrial | None = None
        """The trial of the layers, where this run has written all of them."""
        self._open()

    def close(self) -> None:
        """End the trial of layers."""
        if self.trial is not None:
            self.trial.close()

    def run(self, on_progress: OnProgress | None) -> None:
        """Write the missing files, the manifest last. Then delete files that aren't in the manifest."""
        if not self._is_complete():
            if not self._errors_are_known():
                logger.warning("%s has lost part of its state; starting again", self._folder.partial)
                self._folder.clear()
                self._open()
            self._write_weights(on_progress)
            self._finish()
        listed = bundle_files(self._checkpoint.config, self._checkpoint.tokenizer.info)
        self._folder.clear(keep={MANIFEST, *listed})

    def _open(self) -> None:
        self._writer = BundleWriter(
            self._folder.partial,
            self._checkpoint.config,
            self._quant,
            _native.crc32c,
            fingerprint=self._origin,
            sources={
                file.path.name: SourceStamp(file.nbytes, file.modified_ns)
                for file in self._checkpoint.source_files
            },
            options=self._options(),
        )
        self._errors = ErrorLog(self._folder.partial)

    def _options(self) -> dict[str, str]:
        """The options on which the bytes depend, by name, in words."""
        quant, text = self._quant.name, "none"
        if self._quant != QuantConfig.parse(quant):
            quant += " with formats of the source"
        if self._pieces:
            digest = hashlib.sha256(repr(self._pieces).encode()).hexdigest()[:8]
            text = f"of {self._count} tokens ({digest})"
        return {"--quant": quant, "--text": text}

    @property
    def _count(self) -> int:
        return sum(map(len, self._pieces))

    def _is_complete(self) -> bool:
        """Whether the bundle in the partial folder is complete, so that only the renaming is missing."""
        return _is_converted(self._folder.partial, self._checkpoint, self._quant, self._origin) and all(
            self._writer.finished(name) for name in (*self._record_files, RESIDENT)
        )

    @property
    def _measured(self) -> list[str]:
        """The record files whose quantisation error is measured: all that aren't copies."""
        return [*self._neurons, *self._experts, *self._tables]

    def _is_matrix(self, name: str) -> bool:
        """Whether `name` is a matrix of the resident file."""
        spec = self._resident.get(name)
        return spec is not None and spec.matrix is not None

    def _errors_are_known(self) -> bool:
        """Whether the errors of all finished files are saved. Only damage can have lost one."""
        if self._quant.bits == 16:
            return True
        finished = [name for name in self._measured if self._writer.finished(name)]
        resident = list(self._resident)
        finished += [name for name in resident[: self._writer.resident_finished()] if self._is_matrix(name)]
        return all(name in self._errors for name in finished)

    def _write_weights(self, on_progress: OnProgress | None) -> None:
        """Write every file that isn't finished, layer by layer, in overlapping stages."""
        resident = list(self._resident)
        missing = set(resident[self._writer.resident_finished() :])

        def wanted(file: str, tensor: str) -> bool:
            if file != RESIDENT:
                return not self._writer.finished(file)
            return tensor in missing

        meter = self._meter(wanted, on_progress)
        runner = _native.Runner(usable_cores())
        begun = self._writer.resident_finished() or any(map(self._writer.finished, self._record_files))
        # A text rounds the embedding last.
        if not begun and not self._pieces and tries_layers(self._checkpoint.config):
            self.trial = LayersTrial(self._checkpoint.config, self._quant)
        for names_of in (self._neurons, self._gates):
            for name, records in zip(names_of, self._checkpoint.config.records, strict=False):
                if not records:
                    self._writer.write_records(name, self._data(name, iter(())))
        chunks = self._rounded_chunks if self._pieces else self._plain_chunks
        self._write_chunks(chunks(wanted, meter, runner), missing)

    def _chunks(
        self, wanted: Wanted, runner: _native.Runner, rounded: Mapping[str, RoundedRows] = NOT_ROUNDED
    ) -> Generator[Chunk, None, None]:
        """Yields the blocks that `wanted` selects, read and packed ahead."""
        blocks = ahead(read_blocks(self._checkpoint, wanted, self._quant, rounded), BLOCKS_AHEAD)
        chunks = ahead(pack(blocks, self._checkpoint.config, self._quant, runner), BLOCKS_AHEAD)
        # Closing the stages waits for the reads that are under way, so these are interrupted first:
        # `yield from` would close the stages before.
        with closing(chunks), _interrupting(self._checkpoint):
            for chunk in chunks:  # noqa: UP028
                yield chunk

    def _plain_chunks(
        self, wanted: Wanted, meter: ProgressMeter, runner: _native.Runner
    ) -> Generator[Chunk, None, None]:
        with closing(self._chunks(wanted, runner)) as chunks:
            yield from _counted(chunks, meter)

    def _rounded_chunks(
        self, wanted: Wanted, meter: ProgressMeter, runner: _native.Runner
    ) -> Generator[Chunk, None, None]:
        """Yields the blocks that `wanted` selects, layer by layer, then those of no layer.

        Each layer is rounded just before it is packed.
        """
        rounding = LayerRounding(
            self._checkpoint,
            self._quant,
            self._pieces,
            runner,
            lambda step: meter.advance(step, 0),
            RANDOM_DAMPING if self._is_random else DAMPING,
        )
        layers, places = self._checkpoint.config.num_layers, list(source_bytes(self._checkpoint))
        for layer in range(layers + 1):

            def part(file: str, tensor: str, layer: int = layer) -> bool:
                return layer_of(file, tensor, layers) == layer and wanted(file, tensor)

            is_wanted = any(part(*place) for place in places)
            if layer < layers:
                rounded = rounding.layer(layer, is_wanted)
            else:
                rounded = rounding.head() if is_wanted else {}
            with closing(self._chunks(part, runner, rounded)) as chunks:
                yield from _counted(chunks, meter)

    def _write_chunks(self, chunks: Generator[Chunk, None, None], missing: Container[str]) -> None:
        """Write chunks of record files as they arrive, and those of the resident file between them."""

        def resident() -> Iterator[Chunk]:
            for chunk in chunks:
                if chunk.file != RESIDENT:
                    self._write_records(chunk, chunks)
                elif chunk.tensor in missing:
                    yield chunk

        with closing(chunks):
            tensors = resident()
            self._write_resident(tensors)
            # A finished resident file asks for nothing.
            deque(tensors, maxlen=0)

    def _write_records(self, first: Chunk, following: Iterator[Chunk]) -> None:
        """Write the record file that begins with the chunk `first`. When it is complete, its layer can be
        tried out.
        """
        self._writer.write_records(first.file, self._data(first.file, _until_last(first, following)))
        if self.trial is not None and first.file in self._neurons:
            self.trial.add(*map(self._writer.written, (RESIDENT, EMBEDDING, first.file)))

    def _write_resident(self, chunks: Iterator[Chunk]) -> None:
        self._writer.write_resident(
            (tensor, self._data(tensor, group)) for tensor, group in groupby(chunks, key=lambda c: c.tensor)
        )

    def _data(self, name: str, chunks: Iterator[Chunk]) -> Iterator[np.ndarray]:
        """Yields the data of chunks, whose error is saved before the writer sees the end."""
        fidelity: dict[str, Fidelity] = {}
        for chunk in chunks:
            fidelity = joined(fidelity, chunk.fidelity)
            yield chunk.data
        if self._quant.bits != 16 and (self._is_matrix(name) or name in self._measured):
            self._errors.save(name, fidelity)

    def _meter(self, wanted: Callable[[str, str], bool], on_progress: OnProgress | None) -> ProgressMeter:
        sizes = source_bytes(self._checkpoint)
        meter = ProgressMeter(sum(sizes.values()), on_progress)
        meter.skip(sum(nbytes for place, nbytes in sizes.items() if not wanted(*place)))
        return meter

    def _finish(self) -> None:
        tokenizer = self._checkpoint.tokenizer
        for name, blob in tokenizer.blobs.items():
            self._writer.add_blob(name, blob)
        provenance = Provenance(
            source=self._checkpoint.name,
            source_format=self._checkpoint.source_format,
            converter_version=CONVERTER_VERSION,
            quantisation_error=self._errors.summary(),
            notes=(*self._checkpoint.notes, *self._notes()),
        )
        self._writer.finish(tokenizer.info, self._checkpoint.generation, provenance)

    def _notes(self) -> tuple[str, ...]:
        """Notes for users: whether a text rounded the weights, and how quantised ones were
        stored, by kind.
        """
        text: tuple[str, ...] = ()
        if self._pieces:
            tokens = "random tokens" if self._is_random else "tokens of a text"
            text = (f"weights are rounded with error feedback (GPTQ) on {self._count} {tokens}",)
        if not any(tensor.code_bits for tensor in self._checkpoint.tensors.values()):
            return text
        if self._quant.bits == 16:
            return ("quantised weights are stored as float16 values",)
        kinds = self._errors.kinds().items()
        return (*text, *(f"{kind}: {fidelity.note(self._formats_of(kind))}" for kind, fidelity in kinds))

    def _formats_of(self, kind: str) -> tuple[RowFormat, ...]:
        """The formats of a kind of matrix that the notes distinguish."""
        matrices: dict[str, MatrixKind] = {
            "embedding": "embedding",
            "gate": "feed_forward",
            "up": "feed_forward",
            "down": "down",
            **{f"expert_{which}": kind for which, kind in EXPERT_KINDS.items()},
            **{name: matrix for matrix, name in NAMES_OF_KINDS.items() if matrix is not None},
        }
        return self._quant.formats_of(matrices[kind]) if kind in matrices else (self._quant.plain,)


@contextmanager
def _interrupting(checkpoint: Checkpoint) -> Iterator[None]:
    """A context that interrupts the checkpoint's reads if the work in it fails or is stopped."""
    with ExitStack() as failed:
        failed.callback(checkpoint.interrupt)
        yield
        failed.pop_all()


def _try_out(folder: OutputFolder, layers: LayersTrial | None) -> None:
    """Check that the bundle computes usable logits. If it doesn't, delete it and raise CheckpointError."""
    try:
        check_computes(Bundle.open(folder.partial), layers)
    except CheckpointError:
        folder.discard()
        raise


def _copy_as(bundle: Bundle, folder: Path, origin: str) -> None:
    """Make the new `folder` with the bundle's files and with the fingerprint `origin`."""
    copy_bundle(bundle, folder)
    provenance = replace(bundle.manifest.provenance, fingerprint=origin)
    with disk_errors(folder, "make room, then run again with --resume"):
        write_durably(folder / MANIFEST, manifest_text(replace(bundle.manifest, provenance=provenance)))


def _is_converted(folder: Path, checkpoint: Checkpoint, quant: QuantConfig, origin: str) -> bool:
    """Whether `folder` is a complete bundle of this checkpoint, and trained if `origin` names a training."""
    try:
        bundle = Bundle.open(folder)
    except (BundleError, ModelNotFoundError, UnsupportedModelError):
        return False
    provenance = bundle.manifest.provenance
    same_model = (bundle.config, bundle.quant, provenance.source) == (
        checkpoint.config,
        quant,
        checkpoint.name,
    )
    return same_model and f"{provenance.fingerprint} ".startswith(f"{origin} ")


def _check_manifest(checkpoint: Checkpoint, quant: QuantConfig, origin: str) -> None:
    """Check the manifest before weights are written. Raises CheckpointError for impossible values."""
    entry = FileEntry(0, "0" * 64, None)
    files = dict.fromkeys(bundle_files(checkpoint.config, checkpoint.tokenizer.info), entry)
    provenance = Provenance(checkpoint.name, checkpoint.source_format, CONVERTER_VERSION, fingerprint=origin)
    info, generation = checkpoint.tokenizer.info, checkpoint.generation
    try:
        parse_manifest(manifest_text(Manifest(checkpoint.config, quant, info, generation, provenance, files)))
    except BundleError as error:
        raise CheckpointError(f"{checkpoint.name} can't be described in a bundle: {error}") from error


def bundle_bytes(checkpoint: Checkpoint, quant: QuantConfig, twice: bool) -> int:
    """The bytes that the bundle takes on disk. Only the size of its manifest is estimated.

    twice: whether to count the neurons twice, since they are written again in another order. Experts aren't.
    """
    total, twice = _MANIFEST_BYTES, twice and checkpoint.config.experts is None
    for name in bundle_files(checkpoint.config, checkpoint.tokenizer.info)[:-1]:
        layout = file_layout(name, checkpoint.config, quant)
        nbytes = len(checkpoint.tokenizer.blobs[name]) if layout.nbytes is None else layout.nbytes
        copies = 2 if twice and layout.record is not None and name not in (EMBEDDING, PER_LAYER) else 1
        total += copies * (nbytes + 4 * layout.crc_count(nbytes))
    return total


def source_bytes(checkpoint: Checkpoint) -> dict[tuple[str, str], int]:
    """The number of checkpoint bytes for each (file, tensor) of the bundle: a record file or
    resident tensor.
    """
    tensors = checkpoint.tensors
    sizes = {(EMBEDDING, RECORDS_TENSOR): tensors[names.EMBEDDING].nbytes}
    if checkpoint.config.per_layer_width:
        sizes[PER_LAYER, RECORDS_TENSOR] = tensors[names.PER_LAYER].nbytes
    for layer, spec in enumerate(checkpoint.config.layers):
        name = names.LayerNames(layer)
        if checkpoint.config.records[layer]:
            nbytes = sum(tensors[source].nbytes for source in name.neurons(spec))
            sizes[neuron_file_name(layer), RECORDS_TENSOR] = nbytes
        if layer in checkpoint.config.expert_layers:
            experts = names.expert_shapes(name, spec, checkpoint.config.hidden_size)
            nbytes = sum(tensors[source].nbytes for source in experts)
            sizes[expert_file_name(layer), RECORDS_TENSOR] = nbytes
        if checkpoint.config.zeros_gates and checkpoint.config.records[layer]:
            sizes[gate_file_name(layer), RECORDS_TENSOR] = tensors[name.gate].nbytes
    for tensor, sources in resident_sources(checkpoint):
        sizes[RESIDENT, tensor] = sum(source.nbytes for source in sources)
    return sizes


def _until_last(first: Chunk, following: Iterator[Chunk]) -> Iterator[Chunk]:
    """Yields the chunks of a record file, with the last one marked. What follows it may take minutes."""
    chunk = first
    yield chunk
    while not chunk.last:
        chunk = next(following)
        yield chunk


def _counted(chunks: Iterator[Chunk], meter: ProgressMeter) -> Iterator[Chunk]:
    """Yields the chunks. Each is reported when the next one is requested, since it has been written then."""
    for chunk in chunks:
        yield chunk
        meter.advance(chunk.file, chunk.source_bytes)
