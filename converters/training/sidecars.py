"""What training adds to a finished bundle: which text measures it, where it goes, and its file of tensors."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ondevice.bundle.digest import FileDigest
from ondevice.bundle.files import disk_errors, link_or_copy, publish, temporary_path, write_durably
from ondevice.bundle.layout import MANIFEST, TensorSpec, tensors_layout
from ondevice.bundle.reader import Bundle
from ondevice.bundle.sidecar import Sidecar
from ondevice.errors import UsageError
from ondevice.kernels import _native

LEAST_TOKENS = 512
MEASURED_SHARE = 0.1
"""Of the text: what measures, and doesn't train."""
_REMEDY = "make room, or choose another --output"


def held_out(pieces: Sequence[Sequence[int]], share: float = MEASURED_SHARE) -> Sequence[Sequence[int]]:
    """The pieces that measure and don't train: the last, at least one and never all.

    Raises UsageError for too little text.
    """
    count = max(1, round(share * len(pieces)))
    total = sum(len(piece) for piece in pieces)
    if total < LEAST_TOKENS or count >= len(pieces):
        raise UsageError(
            f"the text has {total} tokens in {len(pieces)} pieces; training takes {LEAST_TOKENS} in two or "
            "more: what it makes is measured on other text"
        )
    return pieces[len(pieces) - count :]


def copy_bundle(bundle: Bundle, output: Path) -> None:
    """Make the new folder `output` with the bundle's files: linked where they can be, else copied.

    Raises UsageError if it exists.
    """
    if os.path.lexists(output):
        raise UsageError(f"{output} exists; choose a new folder, or leave --output out to add to the bundle")
    with disk_errors(output, _REMEDY):
        output.mkdir(parents=True)
        for name in (*bundle.manifest.files, MANIFEST):
            link_or_copy(bundle.path / name, output / name)


def write_tensors(
    sidecar: Sidecar, tensors: Mapping[str, TensorSpec], arrays: Iterable[NDArray[np.uint8]], output: Path
) -> tuple[str, tuple[int, ...]]:
    """Write the file of tensors, durably, and return its sha256 and checksums.

    arrays: (n,) each, in the order of `tensors`. The JSON file goes first, so that no crash leaves one that
    isn't true.
    """
    layout = tensors_layout(tensors)
    digest = FileDigest(layout, _native.crc32c)
    path = output / sidecar.tensors
    with disk_errors(path, _REMEDY):
        (output / sidecar.manifest).unlink(missing_ok=True)
        with temporary_path(path).open("wb") as file:
            for data in (np.frombuffer(layout.header, np.uint8), *arrays):
                file.write(data.data)
                digest.update(data)
            file.flush()
            os.fsync(file.fileno())
        publish(temporary_path(path), path)
    return digest.sha256(), tuple(int(crc) for crc in digest.crcs())


def save_sidecar(sidecar: Sidecar, text: bytes, folder: Path) -> None:
    """Write the JSON file, durably: the last step, which makes both part of the bundle."""
    with disk_errors(folder, _REMEDY):
        write_durably(folder / sidecar.manifest, text)
