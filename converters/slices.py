"""Writes a slice of a bundle as a separate bundle, for a machine that runs some of a model's layers.

Files of records are linked, or copied if no link is possible. The resident tensors and sidecars are copied
layer by layer, and checked while they are read.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ondevice.bundle.digest import FileDigest
from ondevice.bundle.draft_layers import draft_layer_text
from ondevice.bundle.expert_use import (
    EXPERT_USE,
    EXPERT_USE_SIDECAR,
    expert_counts_bytes,
    expert_use_text,
)
from ondevice.bundle.file_layouts import TensorSpec, resident_tensors, tensors_layout
from ondevice.bundle.files import disk_errors, link_or_copy, publish, temporary_path, write_durably
from ondevice.bundle.hotness import HOTNESS, HOTNESS_SIDECAR, frequencies_bytes, hotness_text
from ondevice.bundle.layout import CHECKSUMS, MANIFEST, RESIDENT
from ondevice.bundle.manifest import (
    CrcRange,
    FileEntry,
    Manifest,
    bundle_files,
    manifest_text,
    parse_manifest,
)
from ondevice.bundle.ngrams import NGRAMS_SIDECAR
from ondevice.bundle.predictors import PREDICTORS_SIDECAR, predictor_tensors, predictors_text
from ondevice.bundle.reader import Bundle, CheckedFile
from ondevice.bundle.sidecar import Sidecar, weights_digest
from ondevice.bundle.streams import STREAMS_SIDECAR, stream_tensors, streams_text
from ondevice.converters.output_folder import OutputFolder
from ondevice.converters.training.sidecars import save_sidecar
from ondevice.errors import UsageError
from ondevice.flash.reader import FlashReader
from ondevice.kernels import _native
from ondevice.model.tensor_file import TensorFile
from ondevice.model_config import FULL_MODEL

PIECE_BYTES = 8 << 20
"""Bytes that are copied at a time."""
_REMEDY = "make room, or choose another --output"


def write_slice(bundle: Bundle, output: Path, force: bool = False) -> Path:
    """Write `bundle`, a result of `Bundle.slice`, as the bundle `output`, and return its path.

    The folder gets the name `output` when it is complete. Damaged sidecars are left out. Raises UsageError if
    `output` exists and `force` is False, FlashReadError for damaged tensors, and OndeviceError if the disk
    refuses.
    """
    if bundle.config.part == FULL_MODEL:
        raise UsageError(f"{bundle.name} would be whole in one slice; copy its folder")
    with closing(OutputFolder(output)) as folder:
        # What an interrupted run left is of no use: claiming the folder deletes it.
        folder.check(resume=True, force=force)
        folder.claim(resume=False)
        complete = False
        try:
            folder.check_space(_written_bytes(bundle, folder.partial))
            _fill(bundle, folder.partial)
            complete = True
        finally:
            if not complete:
                folder.discard()
        folder.publish()
    return output


def _written_bytes(bundle: Bundle, folder: Path) -> int:
    """The disk space in bytes that a slice takes in `folder`.

    It is that of its resident file, and of record files that can't be linked because they are on another
    disk.
    """
    names = bundle_files(bundle.config, bundle.manifest.tokenizer)[:-1]
    files, disk = [bundle.file(name) for name in names if name != RESIDENT], _disk(folder)
    copied = [it.nbytes for it in files if _disk(it.path) != disk]
    return (tensors_layout(resident_tensors(bundle.config, bundle.quant)).nbytes or 0) + sum(copied)


def _disk(path: Path) -> int:
    return path.stat().st_dev


def _fill(bundle: Bundle, folder: Path) -> None:
    """Write all files of a slice, the manifest last."""
    config, files, offset = bundle.config, dict[str, FileEntry](), 0
    tables = []
    for name in bundle_files(config, bundle.manifest.tokenizer)[:-1]:
        if name == RESIDENT:
            tensors = resident_tensors(config, bundle.quant)
            digest = _copy_tensors(bundle, bundle.file(RESIDENT), tensors, folder / name)
            nbytes, sha256, crcs = digest.nbytes, digest.sha256(), digest.crcs()
        else:
            file = bundle.file(name)
            with disk_errors(folder / name, _REMEDY):
                link_or_copy(Path(os.path.realpath(file.path)), folder / name)
            nbytes, sha256, crcs = file.nbytes, bundle.manifest.files[name].sha256, file.crcs
        files[name] = FileEntry(nbytes, sha256, CrcRange(offset, len(crcs)))
        offset += len(crcs)
        tables.append(np.asarray(crcs, dtype="<u4"))
    checksums = np.concatenate(tables).tobytes()
    files[CHECKSUMS] = FileEntry(len(checksums), hashlib.sha256(checksums).hexdigest(), None)
    text = manifest_text(replace(bundle.manifest, files=files))
    manifest = parse_manifest(text)
    with disk_errors(folder, _REMEDY):
        write_durably(folder / CHECKSUMS, checksums)
    _copy_sidecars(bundle, manifest, folder)
    with disk_errors(folder, _REMEDY):
        write_durably(folder / MANIFEST, text)


def _copy_sidecars(bundle: Bundle, manifest: Manifest, folder: Path) -> None:
    """Write the slice's sidecars, bound to the weights of `manifest`."""
    config, digest_of_weights = bundle.config, weights_digest(manifest)
    layered: list[tuple[Sidecar, Any, Callable[[Any], bytes], Callable[[], Mapping[str, TensorSpec]]]] = []
    if (predictors := bundle.predictors) is not None:
        of_predictors = predictor_tensors(config, predictors.bits, predictors.ranks)
        layered.append((PREDICTORS_SIDECAR, predictors, predictors_text, lambda: of_predictors))
    if (streams := bundle.streams) is not None:
        layered.append((STREAMS_SIDECAR, streams, streams_text, lambda: stream_tensors(config, streams)))
    for sidecar, content, text, tensors in layered:
        source = bundle.sidecar_file(sidecar.tensors)
        digest = _copy_tensors(bundle, source, tensors(), folder / sidecar.tensors)
        crcs = tuple(map(int, digest.crcs()))
        save_sidecar(
            sidecar,
            text(replace(content, model=digest_of_weights, sha256=digest.sha256(), crcs=crcs)),
            folder,
        )
    if bundle.hotness is not None and (shares := bundle.frequencies()) is not None:
        data = frequencies_bytes(shares, config)
        hotness = replace(bundle.hotness, model=digest_of_weights, sha256=hashlib.sha256(data).hexdigest())
        _save(HOTNESS_SIDECAR, {HOTNESS: data}, hotness_text(hotness), folder)
    if bundle.expert_use is not None and (counts := bundle.expert_counts()) is not None:
        data = expert_counts_bytes(counts)
        use = replace(bundle.expert_use, model=digest_of_weights, sha256=hashlib.sha256(data).hexdigest())
        _save(EXPERT_USE_SIDECAR, {EXPERT_USE: data}, expert_use_text(use), folder)
    if bundle.ngrams is not None:
        for name in NGRAMS_SIDECAR.files:
            _link(bundle.path / name, folder)
    for layer in bundle.draft_layers.values():
        _link(bundle.path / layer.sidecar.tensors, folder)
        _save(layer.sidecar, {}, draft_layer_text(replace(layer, model=digest_of_weights)), folder)


def _save(sidecar: Sidecar, files: Mapping[str, bytes], text: bytes, folder: Path) -> None:
    """Write a sidecar's files, its JSON file last."""
    with disk_errors(folder, _REMEDY):
        for name, data in files.items():
            write_durably(folder / name, data)
    save_sidecar(sidecar, text, folder)


def _link(source: Path, folder: Path) -> None:
    with disk_errors(folder / source.name, _REMEDY):
        link_or_copy(Path(os.path.realpath(source)), folder / source.name)


def _copy_tensors(
    bundle: Bundle, source: CheckedFile, tensors: Mapping[str, TensorSpec], path: Path
) -> FileDigest:
    """Write some tensors of `source` to the safetensors file `path`, checking them while they are read."""
    # The unit of the source's checksums is that of every file of its kind.
    layout = tensors_layout(tensors, source.crc_units[0])
    digest = FileDigest(layout, _native.crc32c)
    with FlashReader([source]) as reader, disk_errors(path, _REMEDY):
        file = TensorFile(bundle, reader, source, 0)
        with temporary_path(path).open("wb") as out:

            def put(data: np.ndarray) -> None:
                out.write(data.data)
                digest.update(data)

            put(np.frombuffer(layout.header, np.uint8))
            for name in tensors:
                span = bundle.tensor_span(name)
                for start in range(0, span.nbytes, PIECE_BYTES):
                    put(file.read(span.offset + start, min(PIECE_BYTES, span.nbytes - start)))
            out.flush()
            os.fsync(out.fileno())
        publish(temporary_path(path), path)
    return digest
