"""Checkpoint to bundle, streaming and resumable: `convert` is the entry.

    checkpoint -> disk space -> neurons, embedding, resident, tokenizer -> manifest -> trial -> rename

Everything is written in `<output>.partial`, which becomes `<output>` once it is a whole bundle. Three stages
overlap: one thread reads, one quantises (on every core), the calling one checksums and writes. Training, if
any, comes before the last renaming and works on a copy: interrupted, it begins with the same bytes again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import numpy as np

from ondevice.bundle.files import disk_errors, write_durably
from ondevice.bundle.layout import (
    EMBEDDING,
    MANIFEST,
    RECORDS_TENSOR,
    RESIDENT,
    file_layout,
    gate_file_name,
    neuron_file_name,
    resident_tensors,
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
from ondevice.config import QuantConfig
from ondevice.converters.architectures import tensors as names
from ondevice.converters.bundling import Chunk, pack
from ondevice.converters.checkpoints.base import Checkpoint
from ondevice.converters.checkpoints.opening import open_checkpoint
from ondevice.converters.error_log import ErrorLog
from ondevice.converters.fingerprint import fingerprint
from ondevice.converters.output_folder import OutputFolder
from ondevice.converters.pipeline import ahead
from ondevice.converters.progress import OnProgress, ProgressMeter
from ondevice.converters.quantize import SquaredError
from ondevice.converters.reading import read_blocks, resident_sources
from ondevice.converters.training.sidecars import copy_bundle
from ondevice.converters.trial import check_computes
from ondevice.errors import (
    BundleError,
    CheckpointError,
    ModelNotFoundError,
    UnsupportedModelError,
    UsageError,
)
from ondevice.kernels import _native
from ondevice.units import usable_cores

CONVERTER_VERSION = "4"
"""Changes whenever the same checkpoint would give other bytes."""
BLOCKS_AHEAD = 2
_MANIFEST_BYTES = 1 << 20
_NAMED_CHARS = 24
"""Of a checkpoint's name, in what identifies a conversion: that has 128 characters."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Training:
    """What a whole bundle gets before it takes its name.

    identity: of what it learns from, a word; with the checkpoint and the options it decides the bytes.
    run: trains the bundle in a folder, and adds to it.
    """

    identity: str
    run: Callable[[Path], object]


BeginTraining = Callable[[Checkpoint], Training | None]
"""Refuses a checkpoint before anything is written; None where there is nothing to train."""


def convert(
    source: str | Path,
    output: str | Path,
    quant: str | QuantConfig = "q4",
    on_progress: OnProgress | None = None,
    resume: bool = False,
    force: bool = False,
    begin_training: BeginTraining = lambda checkpoint: None,
) -> Path:
    """Convert the checkpoint `source` to a bundle in the new folder `output`, and return that.

    quant: q4, q8, f16, or a QuantConfig.
    resume: go on with what an interrupted run left; the result has the bytes of an uninterrupted one. That
    needs the source files as they were: one with another size or time of change is a UsageError. A finished
    bundle stays as it is. Training that was interrupted begins anew.
    force: replace an existing bundle, or start again over an unfinished one.
    on_progress: called from this thread, several times a second; what it raises stops the conversion, which
    can then be resumed.
    begin_training: gives what is trained before the bundle takes its name, if anything.

    Raises UsageError where `output` may not be written, ModelNotFoundError, UnsupportedModelError or
    CheckpointError for the source, OndeviceError where the disk is full or refuses.
    """
    quant_config = quant if isinstance(quant, QuantConfig) else QuantConfig.parse(quant)
    folder = OutputFolder(Path(output))
    checkpoint = open_checkpoint(Path(source))
    with closing(checkpoint), closing(folder):
        training = begin_training(checkpoint)
        origin = f"{CONVERTER_VERSION} {checkpoint.name[:_NAMED_CHARS]} {fingerprint(checkpoint)}"
        trained = origin if training is None else f"{origin} {training.identity}"
        if resume and _is_converted(folder.output, checkpoint, quant_config, trained):
            folder.discard_leftover()
            return folder.output
        if resume and _is_converted(folder.output, checkpoint, quant_config, origin):
            raise UsageError(
                f"{folder.output} is converted, but not with this text; `ondevice train predictors --model "
                f"{folder.output} --text FILE` adds what is trained on it, or start again with --force"
            )
        _check_manifest(checkpoint, quant_config, trained)
        folder.check(resume, force)
        folder.claim(resume)
        folder.check_space(_bundle_bytes(checkpoint, quant_config, twice=training is not None))
        _Conversion(checkpoint, quant_config, folder, origin).run(on_progress)
        _try_out(folder)
        if training is not None:
            _copy_as(Bundle.open(folder.partial), folder.copy, trained)
            training.run(folder.copy)
        folder.publish()
    return folder.output


class _Conversion:
    """One run over the partial folder, from whatever is there to a whole bundle."""

    def __init__(self, checkpoint: Checkpoint, quant: QuantConfig, folder: OutputFolder, origin: str) -> None:
        self._checkpoint = checkpoint
        self._quant = quant
        self._folder = folder
        self._origin = origin
        layers = range(checkpoint.config.num_layers)
        self._neurons = [neuron_file_name(layer) for layer in layers]
        gates = [gate_file_name(layer) for layer in layers if checkpoint.config.zeros_gates]
        self._record_files = [*self._neurons, *gates, EMBEDDING]
        self._open()

    def run(self, on_progress: OnProgress | None) -> None:
        """Write what is missing, the manifest last; then only what it lists is left in the folder."""
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
        )
        self._errors = ErrorLog(self._folder.partial)

    def _is_complete(self) -> bool:
        """Whether only the last renaming was missed."""
        return _is_converted(self._folder.partial, self._checkpoint, self._quant, self._origin) and all(
            self._writer.finished(name) for name in (*self._record_files, RESIDENT)
        )

    def _errors_are_known(self) -> bool:
        """Whether the error of everything finished was saved; only damage can have lost it."""
        if self._quant.bits == 16:
            return True
        finished = [name for name in (*self._neurons, EMBEDDING) if self._writer.finished(name)]
        resident = list(resident_tensors(self._checkpoint.config, self._quant))
        finished += [n for n in resident[: self._writer.resident_finished()] if n.endswith(".codes")]
        return all(name in self._errors for name in finished)

    def _write_weights(self, on_progress: OnProgress | None) -> None:
        """Every file that isn't finished, three stages at a time."""
        resident = list(resident_tensors(self._checkpoint.config, self._quant))
        missing = set(resident[self._writer.resident_finished() :])

        def wanted(file: str, tensor: str) -> bool:
            if file != RESIDENT:
                return not self._writer.finished(file)
            return not missing.isdisjoint({tensor, f"{tensor}.codes", f"{tensor}.scales", f"{tensor}.biases"})

        meter = self._meter(wanted, on_progress)
        engine = _native.Engine(usable_cores())
        blocks = ahead(read_blocks(self._checkpoint, wanted), BLOCKS_AHEAD)
        chunks = ahead(pack(blocks, self._checkpoint.config, self._quant, engine), BLOCKS_AHEAD)
        with closing(chunks):
            counted = _counted(chunks, meter)
            for file, group in groupby(counted, key=lambda chunk: chunk.file):
                if file == RESIDENT:
                    self._write_resident(chunk for chunk in group if chunk.tensor in missing)
                else:
                    self._writer.write_records(file, self._data(file, group))

    def _write_resident(self, chunks: Iterator[Chunk]) -> None:
        self._writer.write_resident(
            (tensor, self._data(tensor, group)) for tensor, group in groupby(chunks, key=lambda c: c.tensor)
        )

    def _data(self, name: str, chunks: Iterator[Chunk]) -> Iterator[np.ndarray]:
        """The chunks' bytes; their error is saved before the writer learns that there are no more."""
        error = SquaredError()
        for chunk in chunks:
            error += chunk.error
            yield chunk.data
        counted = name.endswith(".codes") or name in self._neurons or name == EMBEDDING
        if self._quant.bits != 16 and counted:
            self._errors.save(name, error)

    def _meter(self, wanted: Callable[[str, str], bool], on_progress: OnProgress | None) -> ProgressMeter:
        sizes = _source_bytes(self._checkpoint)
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
        )
        self._writer.finish(tokenizer.info, self._checkpoint.generation, provenance)


def _try_out(folder: OutputFolder) -> None:
    """Raises CheckpointError for a bundle that can say nothing; then nothing of it is kept."""
    try:
        check_computes(Bundle.open(folder.partial))
    except CheckpointError:
        folder.discard()
        raise


def _copy_as(bundle: Bundle, folder: Path, origin: str) -> None:
    """Make the new `folder` with the bundle's files, of which another origin is said."""
    copy_bundle(bundle, folder)
    provenance = replace(bundle.manifest.provenance, fingerprint=origin)
    with disk_errors(folder, "make room, then run again with --resume"):
        write_durably(folder / MANIFEST, manifest_text(replace(bundle.manifest, provenance=provenance)))


def _is_converted(folder: Path, checkpoint: Checkpoint, quant: QuantConfig, origin: str) -> bool:
    """Whether `folder` is a whole bundle of this very checkpoint: trained as `origin` says, if it does."""
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
    """Raises CheckpointError for what no manifest may hold: better now than after the weights."""
    entry = FileEntry(0, "0" * 64, None)
    files = dict.fromkeys(bundle_files(checkpoint.config, checkpoint.tokenizer.info), entry)
    provenance = Provenance(checkpoint.name, checkpoint.source_format, CONVERTER_VERSION, fingerprint=origin)
    info, generation = checkpoint.tokenizer.info, checkpoint.generation
    try:
        parse_manifest(manifest_text(Manifest(checkpoint.config, quant, info, generation, provenance, files)))
    except BundleError as error:
        raise CheckpointError(f"{checkpoint.name} can't be described in a bundle: {error}") from error


def _bundle_bytes(checkpoint: Checkpoint, quant: QuantConfig, twice: bool) -> int:
    """Size of the bundle to be made, to within the manifest's. twice: its neurons get another order."""
    total = _MANIFEST_BYTES
    for name in bundle_files(checkpoint.config, checkpoint.tokenizer.info)[:-1]:
        layout = file_layout(name, checkpoint.config, quant)
        nbytes = len(checkpoint.tokenizer.blobs[name]) if layout.nbytes is None else layout.nbytes
        copies = 2 if twice and layout.record is not None and name != EMBEDDING else 1
        total += copies * (nbytes + 4 * layout.crc_count(nbytes))
    return total


def _source_bytes(checkpoint: Checkpoint) -> dict[tuple[str, str], int]:
    """Checkpoint bytes by what they become: a record file, or a resident tensor."""
    tensors = checkpoint.tensors
    sizes = {(EMBEDDING, RECORDS_TENSOR): tensors[names.EMBEDDING].nbytes}
    for layer in range(checkpoint.config.num_layers):
        name = names.LayerNames(layer)
        nbytes = sum(tensors[source].nbytes for source in (name.gate, name.up, name.down))
        sizes[neuron_file_name(layer), RECORDS_TENSOR] = nbytes
        if checkpoint.config.zeros_gates:
            sizes[gate_file_name(layer), RECORDS_TENSOR] = tensors[name.gate].nbytes
    for tensor, sources in resident_sources(checkpoint):
        sizes[RESIDENT, tensor] = sum(source.nbytes for source in sources)
    return sizes


def _counted(chunks: Iterator[Chunk], meter: ProgressMeter) -> Iterator[Chunk]:
    """Reports a chunk once it has been written, when the next one is asked for."""
    for chunk in chunks:
        yield chunk
        meter.advance(chunk.file, chunk.source_bytes)
