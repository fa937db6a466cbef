"""Steps that all trainers of sidecars share: the part of a text for measuring, the copy of the bundle, the
files.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ondevice.bundle.about import DOCUMENTS
from ondevice.bundle.digest import FileDigest
from ondevice.bundle.file_layouts import FileLayout
from ondevice.bundle.files import (
    contained,
    disk_errors,
    link_or_copy,
    publish,
    read_file,
    temporary_path,
    write_durably,
)
from ondevice.bundle.layout import MANIFEST
from ondevice.bundle.reader import Bundle
from ondevice.bundle.sidecar import Sidecar, no_streams
from ondevice.bundle.strict_json import MAX_JSON_BYTES
from ondevice.bundle.verify import SIDECARS
from ondevice.converters.output_folder import OutputFolder
from ondevice.errors import BundleError, UnsupportedModelError, UsageError
from ondevice.kernels import _native

MIN_TRAINING_TOKENS = 512
"""Fewest tokens of a text to train on."""
MEASURED_SHARE = 0.1
"""Share of the text's pieces that measure and don't train."""
_REMEDY = "make room, or choose another --output"


def check_streams_possible(bundle: Bundle) -> None:
    """Check that a model can have streams. Raises UnsupportedModelError if not."""
    if not bundle.config.is_plain:
        raise UnsupportedModelError(f"{bundle.name} can't have streams: {no_streams(bundle.config)}")


def check_feed_forwards(bundle: Bundle) -> None:
    """Check a model's layers. Raises UnsupportedModelError for layers that have no neurons to record."""
    for layer, spec in enumerate(bundle.config.layers):
        if not spec.has_feed_forward:
            raise UnsupportedModelError(
                f"{bundle.name} can't be trained from its activations: layer {layer} has no feed-forward, "
                "and this release records models with one in each layer. The model runs without"
            )


def held_out(pieces: Sequence[Sequence[int]], share: float = MEASURED_SHARE) -> Sequence[Sequence[int]]:
    """The pieces used only for measuring: the last ones, at least one and never all.

    Raises UsageError if the text is too short.
    """
    count = max(1, round(share * len(pieces)))
    total = sum(len(piece) for piece in pieces)
    if total < MIN_TRAINING_TOKENS or count >= len(pieces):
        raise UsageError(
            f"the text has {total} tokens in {len(pieces)} pieces; training takes "
            f"{MIN_TRAINING_TOKENS} in two or more: what it makes is measured on other text"
        )
    return pieces[len(pieces) - count :]


def copy_bundle(bundle: Bundle, output: Path) -> None:
    """Make the new folder `output` with the bundle's files and its undamaged sidecars.

    Files are linked if possible, otherwise copied. Raises UsageError if the folder exists.
    """
    if os.path.lexists(output):
        raise UsageError(f"{output} exists; choose a new folder, or leave --output out to add to the bundle")
    with disk_errors(output, _REMEDY):
        output.mkdir(parents=True)
        for name in (*bundle.manifest.files, MANIFEST):
            link_or_copy(bundle.path / name, output / name)
        for sidecar in SIDECARS:
            names = [bundle.path / name for name in sidecar.files]
            if sidecar.key not in bundle.damaged and all(name.is_file() for name in names):
                for name in sidecar.files:
                    link_or_copy(bundle.path / name, output / name)


@contextmanager
def copied_bundle(bundle: Bundle, output: Path) -> Iterator[Path]:
    """A context with a copy of the bundle in a partial folder, which gets the name `output` at the end.

    If the context raises, the copy is deleted. If the process is killed, `output` doesn't exist. At the end
    the copy gets the bundle's documents. Raises UsageError and OndeviceError as a conversion to `output`
    does.
    """
    with closing(OutputFolder(output)) as folder:
        # An unfinished copy is of no use: claiming the folder deletes it.
        folder.check(resume=True, force=False)
        folder.claim(resume=False)
        complete = False
        try:
            copy_bundle(bundle, folder.copy)
            yield folder.copy
            _copy_documents(bundle.path, folder.copy)
            complete = True
        finally:
            if not complete:
                folder.discard()
        folder.publish()


def _copy_documents(source: Path, output: Path) -> None:
    with disk_errors(output, _REMEDY):
        for name in DOCUMENTS:
            with suppress(BundleError):  # missing, or no file of the bundle's own
                write_durably(output / name, read_file(contained(source.resolve(), name), MAX_JSON_BYTES))


def write_tensors(
    sidecar: Sidecar, layout: FileLayout, arrays: Iterable[NDArray[np.generic]], output: Path
) -> tuple[str, tuple[int, ...]]:
    """Write the file of tensors, durably, and return its sha256 and checksums.

    arrays: the values of each tensor in their stored form, in the order of `layout`. The JSON file is deleted
    first, so that no crash leaves one that doesn't describe the tensors.
    """
    digest = FileDigest(layout, _native.crc32c)
    path = output / sidecar.tensors
    with disk_errors(path, _REMEDY):
        (output / sidecar.manifest).unlink(missing_ok=True)
        with temporary_path(path).open("wb") as file:
            for array in (np.frombuffer(layout.header, np.uint8), *arrays):
                data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
                file.write(data.data)
                digest.update(data)
            file.flush()
            os.fsync(file.fileno())
        publish(temporary_path(path), path)
    return digest.sha256(), tuple(int(crc) for crc in digest.crcs())


def save_sidecar(sidecar: Sidecar, text: bytes, folder: Path) -> None:
    """Write the JSON file durably. This must be the last step, because it makes both files part of the
    bundle.
    """
    with disk_errors(folder, _REMEDY):
        write_durably(folder / sidecar.manifest, text)
