"""Writes a bundle: streaming, resumable, reproducible byte for byte.

Each file gets its name once it is complete and on the disk, `bundle.json` last. So a folder with a manifest
is complete, and one without is unfinished.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np

from ondevice.bundle.digest import Crc32c, FileDigest
from ondevice.bundle.file_layouts import FileLayout, TensorSpec, file_layout, resident_tensors
from ondevice.bundle.files import (
    disk_errors,
    link_or_copy,
    publish,
    sync_folder,
    temporary_path,
    write_durably,
)
from ondevice.bundle.layout import (
    CHECKSUMS,
    MANIFEST,
    RESIDENT,
    ExpertLayout,
    PartLayout,
    SliceLayout,
)
from ondevice.bundle.manifest import (
    MAX_BLOB_BYTES,
    CrcRange,
    FileEntry,
    Manifest,
    Provenance,
    TokenizerInfo,
    bundle_files,
    manifest_text,
    parse_manifest,
)
from ondevice.bundle.reader import CheckedFile
from ondevice.bundle.resume import FileClaim, ResidentClaim, SourceStamp, load_state
from ondevice.config import QuantConfig
from ondevice.errors import BundleError
from ondevice.model_config import ModelConfig


class BundleWriter:
    """Writes a bundle to `folder`, which is made if it is missing, or continues one that an interrupted
    writer left.

    Methods raise ValueError for arguments of the wrong shape, OndeviceError if the disk refuses. Not
    thread-safe.

    Args:
        folder: the bundle's folder.
        config, quant: the model and its quantization.
        crc32c: computes CRCs.
        fingerprint: identifies the source and the options that decide the bytes.
        sources: stamps of the files that the bytes are read from. A folder begun with another fingerprint or
            other sources is refused.
        options: values of options that are part of the fingerprint, in words, for the message of a refusal.
        checkpoint_bytes: about the most bytes that are repeated after an interrupted `write_resident`.
    """

    def __init__(
        self,
        folder: Path,
        config: ModelConfig,
        quant: QuantConfig,
        crc32c: Crc32c,
        *,
        fingerprint: str | None = None,
        sources: Mapping[str, SourceStamp] | None = None,
        options: Mapping[str, str] | None = None,
        checkpoint_bytes: int = 64 << 20,
    ) -> None:
        """Raises UsageError if `folder` was begun with another model, other options or other sources."""
        self.folder = folder
        self._config = config
        self._quant = quant
        self._layout = cache(partial(file_layout, config=config, quant=quant))
        """Returns the layout of a file, by name."""
        self._crc32c = crc32c
        self._fingerprint = fingerprint
        self._checkpoint_bytes = checkpoint_bytes
        self._finished: dict[str, FileDigest] = {}
        self._resident: FileDigest | None = None
        with _disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._state = load_state(folder, config, quant, fingerprint, sources or {}, options or {})
            self._prefix = self._resident_prefix()

    def finished(self, name: str) -> bool:
        """Whether the file `name` is complete. A file from an earlier run is read and checked, once."""
        if name not in self._finished:
            digest = self._state.finished(name, self._layout(name), self._crc32c)
            if digest is not None:
                self._finished[name] = digest
        return name in self._finished

    def write_records(self, name: str, records: Iterable[np.ndarray]) -> None:
        """Writes the record file `name` from uint8 arrays (n, stride); does nothing if it is finished.

        Experts that are stored as matrices are given as arrays (n,), each with the next bytes.
        """
        if self.finished(name):
            return
        record = self._layout(name).record
        if record is None:
            raise ValueError(f"{name!r} is not a record file of a bundle")
        with self._sink(name) as sink:
            sink.begin()
            for chunk in records:
                _check_records(name, chunk, record)
                sink.write(chunk.reshape(-1))
            sink.publish()
            self._record(name, sink.digest)

    def resident_finished(self) -> int:
        """Number of leading tensors of `resident_tensors()` that need not be written again."""
        if self.finished(RESIDENT):
            return len(resident_tensors(self._config, self._quant))
        return 0 if self._state.resident is None else self._state.resident.tensors

    def write_resident(self, tensors: Iterable[tuple[str, Iterable[np.ndarray]]]) -> None:
        """Writes the unfinished resident tensors, in the order of `resident_tensors()`.

        tensors: names, each with arrays of the tensor's dtype whose elements, in C order, make up the tensor.
        """
        if self.finished(RESIDENT):
            return
        expected = list(resident_tensors(self._config, self._quant).items())
        prefix, self._prefix = self._prefix or self._resident_prefix(), None
        count = self.resident_finished()
        with self._sink(RESIDENT, prefix) as sink:
            self._resident = sink.digest
            sink.begin()
            for name, chunks in tensors:
                if count == len(expected) or name != expected[count][0]:
                    raise ValueError(f"tensor {name!r} is out of order at position {count}")
                _write_tensor(sink, name, expected[count][1], chunks)
                count += 1
                self._checkpoint_resident(sink, count)
            if count != len(expected):
                raise ValueError(f"{RESIDENT} got {count} tensors of {len(expected)}")
            sink.publish()
            self._record(RESIDENT, sink.digest)

    def written(self, name: str) -> CheckedFile:
        """The finished file `name`, for reading; of the resident file, the part that is already written."""
        path, digest, layout = self.folder / name, self._finished.get(name), self._layout(name)
        if digest is None and name == RESIDENT and self._resident is not None:
            path, digest = temporary_path(path), self._resident
        if digest is None:
            raise ValueError(f"{name!r} isn't written yet")
        file = CheckedFile.of(path, digest.nbytes, layout, digest.crcs())
        if layout.halves_period:
            return file
        return replace(file, halves=tuple(part for part in file.halves if part.stop <= file.nbytes))

    def add_blob(self, name: str, data: bytes) -> None:
        """Writes a tokenizer file or chat template."""
        if name not in MAX_BLOB_BYTES:
            raise ValueError(f"{name!r} is not a tokenizer file of a bundle")
        if not 1 <= len(data) <= MAX_BLOB_BYTES[name]:
            raise ValueError(f"{name} has {len(data)} bytes; it must have 1 to {MAX_BLOB_BYTES[name]}")
        digest = FileDigest(self._layout(name), self._crc32c)
        digest.update(np.frombuffer(data, np.uint8))
        with _disk_errors(self.folder / name):
            write_durably(self.folder / name, data)
        self._finished[name] = digest

    def adopt(self, name: str, source: Path, entry: FileEntry) -> None:
        """Use a file of another bundle, `source`, as the file `name`, by a link or a copy.

        Raises BundleError if the file doesn't match `entry`.
        """
        with _disk_errors(self.folder / name):
            link_or_copy(source, self.folder / name)
        self._state.files[name] = FileClaim(entry.nbytes, entry.sha256)
        if not self.finished(name):
            raise BundleError(f"{name} doesn't match its sha256; the bundle is damaged, convert it again")

    def finish(
        self, tokenizer: TokenizerInfo, generation: Mapping[str, float], provenance: Provenance
    ) -> Manifest:
        """Writes the checksum table and then the manifest, which completes the bundle.

        Raises ValueError if a file is missing, BundleError for values that a manifest can't have.
        """
        names = bundle_files(self._config, tokenizer)[:-1]
        missing = [name for name in names if not self.finished(name)]
        if missing:
            raise ValueError(f"{missing[0]} isn't written yet ({len(missing)} files are missing)")
        tables = {name: self._finished[name].crcs() for name in names}
        files: dict[str, FileEntry] = {}
        offset = 0
        for name, table in tables.items():
            digest = self._finished[name]
            files[name] = FileEntry(digest.nbytes, digest.sha256(), CrcRange(offset, table.size))
            offset += table.size
        checksums = np.concatenate(list(tables.values())).tobytes()
        files[CHECKSUMS] = FileEntry(len(checksums), hashlib.sha256(checksums).hexdigest(), None)
        provenance = replace(provenance, fingerprint=self._fingerprint)
        text = manifest_text(Manifest(self._config, self._quant, tokenizer, generation, provenance, files))
        manifest = parse_manifest(text)
        with _disk_errors(self.folder):
            write_durably(self.folder / CHECKSUMS, checksums)
            write_durably(self.folder / MANIFEST, text)
            self._state.remove()
            sync_folder(self.folder)
        return manifest

    def _record(self, name: str, digest: FileDigest) -> None:
        self._finished[name] = digest
        self._state.files[name] = FileClaim(digest.nbytes, digest.sha256())
        if name == RESIDENT:
            self._state.resident = None
        with _disk_errors(self.folder):
            self._state.save()

    def _resident_prefix(self) -> FileDigest | None:
        return self._state.resident_prefix(self._layout(RESIDENT), self._crc32c)

    def _sink(self, name: str, prefix: FileDigest | None = None) -> _FileSink:
        layout = self._layout(name)
        return _FileSink(self.folder / name, layout, prefix or FileDigest(layout, self._crc32c))

    def _checkpoint_resident(self, sink: _FileSink, tensors: int) -> None:
        done = 0 if self._state.resident is None else self._state.resident.nbytes
        if sink.digest.nbytes - done >= self._checkpoint_bytes:
            sink.sync()
            self._state.resident = ResidentClaim(sink.digest.nbytes, sink.digest.sha256(), tensors)
            with _disk_errors(self.folder):
                self._state.save()


class _FileSink:
    """A file that is being written under its temporary name, continued after the bytes in `digest`."""

    def __init__(self, path: Path, layout: FileLayout, digest: FileDigest) -> None:
        self.path = path
        self.digest = digest
        self._layout = layout
        with _disk_errors(path):
            self._file = temporary_path(path).open("r+b" if digest.nbytes else "wb", buffering=0)
            self._file.truncate(digest.nbytes)
            self._file.seek(digest.nbytes)

    def __enter__(self) -> _FileSink:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def begin(self) -> None:
        """Writes the header, unless the file is continued."""
        if not self.digest.nbytes:
            self.write(np.frombuffer(self._layout.header, np.uint8))

    def write(self, data: np.ndarray) -> None:
        """Appends bytes, (n,) uint8."""
        rest = data.data
        with _disk_errors(self.path):
            while rest:
                rest = rest[self._file.write(rest) :]
            self._begin_writeback(data.nbytes)
        self.digest.update(data)

    def _begin_writeback(self, nbytes: int) -> None:
        """Let the system start to write the last bytes now, so that `sync` has less to wait for.

        Pages that aren't on the disk yet are not dropped.
        """
        if hasattr(os, "posix_fadvise"):
            with suppress(OSError):
                os.posix_fadvise(self._file.fileno(), self.digest.nbytes, nbytes, os.POSIX_FADV_DONTNEED)

    def sync(self) -> None:
        """Makes the bytes written so far durable."""
        with _disk_errors(self.path):
            os.fsync(self._file.fileno())

    def publish(self) -> None:
        """Gives the file its final name. Raises ValueError if its size differs from its layout's."""
        if self.digest.nbytes != self._layout.nbytes:
            raise ValueError(f"{self.path.name} got {self.digest.nbytes} bytes of {self._layout.nbytes}")
        self.sync()
        with _disk_errors(self.path):
            publish(temporary_path(self.path), self.path)


def _check_records(name: str, chunk: np.ndarray, record: PartLayout) -> None:
    if isinstance(record, ExpertLayout | SliceLayout):
        if chunk.dtype != np.uint8 or chunk.ndim != 1:
            raise ValueError(f"{name}: {chunk.dtype} {chunk.shape} isn't uint8 (n,)")
        return
    if chunk.dtype != np.uint8 or chunk.ndim != 2 or chunk.shape[1] != record.stride:
        raise ValueError(f"{name}: {chunk.dtype} {chunk.shape} isn't uint8 (n, {record.stride})")
    if any(chunk[:, start:stop].any() for start, stop in record.padding):
        raise ValueError(f"{name}: record padding isn't zero")


def _write_tensor(sink: _FileSink, name: str, spec: TensorSpec, chunks: Iterable[np.ndarray]) -> None:
    nbytes = 0
    for chunk in chunks:
        if chunk.dtype != spec.numpy_dtype:
            raise ValueError(f"tensor {name!r} got {chunk.dtype}; it is stored as {spec.numpy_dtype}")
        sink.write(np.ascontiguousarray(chunk).reshape(-1).view(np.uint8))
        nbytes += chunk.nbytes
    if nbytes != spec.nbytes:
        raise ValueError(f"tensor {name!r} got {nbytes} bytes; its shape {spec.shape} needs {spec.nbytes}")


def _disk_errors(path: Path) -> AbstractContextManager[None]:
    return disk_errors(path, "make room or choose another folder, then run again with --resume")
