"""Checks of the disk: which folders are writable, and how fast a device's files can be read.

This module knows nothing of the content of models. It writes only temporary files, which are gone when a
check ends, even by an exception.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ondevice.bundle.layout import MANIFEST
from ondevice.doctor.check import Check, Status
from ondevice.errors import OndeviceError
from ondevice.units import format_bytes

if TYPE_CHECKING:
    from ondevice.bundle.reader import CheckedFile
    from ondevice.flash.throughput import ReadRate

PREFIX = ".ondevice-doctor-"
SAMPLE_BYTES, CHUNK_BYTES, WRITE_SECONDS = 64 << 20, 4 << 20, 1.0
"""Limits of a temporary file: most bytes, bytes written and synced at a time, most seconds of writing."""
SPARE_BYTES = 4 * SAMPLE_BYTES
"""Bytes of free space below which no temporary file is written."""
UNIT_BYTES = 4096
"""Bytes of a temporary file that one checksum covers."""
READ_BYTES = (16 << 10, 1 << 20)
"""Sizes of measured reads: about one neuron, and one read of a model that streams from flash."""
READ_SECONDS = 0.3
SLOW_BYTES_PER_SECOND = 300e6
"""Rate of large reads below which a warning is given.

At this rate, half the weights of a 7B at 4 bits take seven seconds."""


def models_folder(folder: Path) -> Check:
    """Check of the folder for converted models, which `convert` and downloads write to."""
    remedy = "make it writable, or set ONDEVICE_HOME to a folder that is"
    return _writable("models folder", folder, "failed", remedy)


def cache_folder(folder: Path) -> Check:
    """Check of the folder that keeps measurements of devices."""
    remedy = "make it writable, or every start measures the device's reads anew"
    return _writable("cache folder", folder, "warning", remedy)


def settings_file(path: Path) -> Check:
    """Check of the settings file, which is only read. Raises UsageError if it can't be read."""
    from ondevice.settings import read_settings

    values = read_settings(path).values
    what = f"sets {', '.join(values)}" if path.exists() else "isn't there; every option has its default"
    return Check("settings file", "ok", f"{path} {what}", figures={"path": str(path), "settings": [*values]})


def package_folder(folder: Path) -> Check:
    """Check of ondevice's own folder. It may be read-only, as inside an app; nothing is written there."""
    writable = os.access(folder, os.W_OK)
    how = "writable, which it needn't be" if writable else "read-only, as it may be"
    return Check(
        "package folder", "ok", f"{folder} is {how}", figures={"path": str(folder), "writable": writable}
    )


def flash(name: str, folders: Sequence[Path], files: Sequence[CheckedFile] = ()) -> Check:
    """Measure how fast files can be read on the device that `folders` (one or more) lie on.

    files: a model's neuron files. They are read if they are large enough. Otherwise a temporary file is read,
    in the first folder that can be written and doesn't contain a model, because an app's model must not
    change. Raises FlashReadError.
    """
    if sum(file.nbytes for file in files) >= SAMPLE_BYTES:
        return _measured(name, folders[0], files, "the model's own files")
    refusals = []
    for folder in folders:
        if (folder / MANIFEST).exists():
            refusals.append(f"{folder}: a model's, which isn't written to")
            continue
        try:
            with temporary_file(existing(folder)) as file:
                return _measured(name, folder, [file], f"a temporary file of {format_bytes(file.nbytes)}")
        except OSError as error:
            refusals.append(f"{folder}: {error.strerror or error}")
    value = "no file large enough to measure, and none could be written"
    return Check(name, "skipped", f"{value} ({'; '.join(refusals)})", figures={"folder": str(folders[0])})


def neuron_files(folder: Path) -> list[CheckedFile]:
    """The neuron files of the bundle in a folder; empty if it can't be opened, which another
    check reports.
    """
    from ondevice.bundle.reader import Bundle

    try:
        bundle = Bundle.open(folder)
    except OndeviceError:
        return []
    return [bundle.neuron_file(layer) for layer in range(bundle.config.num_layers)]


def existing(folder: Path) -> Path:
    """The folder, or its nearest ancestor that exists."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def device(folder: Path) -> int:
    """The number of the file system that a folder is on. Equal for folders on the same one.
    Raises OSError.
    """
    return existing(folder).stat().st_dev


@contextmanager
def temporary_file(folder: Path) -> Iterator[CheckedFile]:
    """A context with a temporary file to read, as large as WRITE_SECONDS and SAMPLE_BYTES allow. Its bytes
    can't be compressed.

    Raises OSError if it can't be written, or if less than SPARE_BYTES are free.
    """
    import numpy as np

    from ondevice.bundle.reader import CheckedFile
    from ondevice.kernels import _native

    if shutil.disk_usage(folder).free < SPARE_BYTES:
        raise OSError(f"less than {format_bytes(SPARE_BYTES)} are free")
    chunk = np.frombuffer(np.random.default_rng(0).bytes(CHUNK_BYTES), np.uint8)
    crcs, count, end = _native.crc32c(chunk, (UNIT_BYTES,)), 0, time.monotonic() + WRITE_SECONDS
    # FlashReader opens the file by name, so it must have one.
    with tempfile.NamedTemporaryFile(dir=folder, prefix=PREFIX) as file:
        while count * CHUNK_BYTES < SAMPLE_BYTES and (not count or time.monotonic() < end):
            file.write(chunk.data)
            file.flush()
            os.fsync(file.fileno())
            count += 1
        nbytes = count * CHUNK_BYTES
        yield CheckedFile(Path(file.name), nbytes, 0, (UNIT_BYTES,), np.tile(crcs, count))


def _writable(name: str, folder: Path, otherwise: Status, remedy: str) -> Check:
    """Check that files can be created in the folder, or in its nearest ancestor that exists.

    otherwise: the status if they can't.
    """
    try:
        place = existing(folder)
        with tempfile.TemporaryFile(dir=place, prefix=PREFIX) as file:
            file.write(b"\0")
        free = shutil.disk_usage(place).free
    except OSError as error:
        figures = {"path": str(folder), "writable": False}
        return Check(name, otherwise, f"{folder} can't be written: {error.strerror}", remedy, figures)
    exists = "" if place == folder else "doesn't exist yet; it "
    figures = {"path": str(folder), "writable": True, "free_bytes": free}
    return Check(name, "ok", f"{folder} {exists}is writable, {format_bytes(free)} free", figures=figures)


def _measured(name: str, folder: Path, files: Sequence[CheckedFile], what: str) -> Check:
    from ondevice.flash.reader import DEFAULT_THREADS, FlashReader
    from ondevice.flash.throughput import measure_throughput

    with FlashReader(files, threads=1, ring=True) as reader:
        refusal, has_ring = reader.native.fallback_reason, reader.has_ring
    throughput = measure_throughput(files, (DEFAULT_THREADS,), READ_BYTES, READ_SECONDS)
    rates = [rate for rate in throughput.rates if rate.bytes_per_second is not None]
    ways = f"{throughput.io}{', io_uring' if has_ring else ''}"
    shown = ", ".join(map(_rate, rates)) or "no read that fits"
    value = f"{folder}: {ways}; {shown} (of {what})"
    figures = {
        "folder": str(folder),
        "io": throughput.io,
        "io_uring": has_ring,
        "rates": [
            {"read_bytes": rate.read_bytes, "bytes_per_second": rate.bytes_per_second} for rate in rates
        ],
    }
    if refusal:
        value += f"; direct reads aren't possible, so these may be memory's figures: {refusal}"
        remedy = "keep models on a local disk whose file system takes direct reads"
        return Check(name, "warning", value, remedy, figures)
    fastest = max((rate.bytes_per_second or 0.0 for rate in rates), default=0.0)
    if fastest < SLOW_BYTES_PER_SECOND:
        value += f"; slower than {format_bytes(round(SLOW_BYTES_PER_SECOND))}/s"
        remedy = "keep models that are larger than their memory on an internal SSD"
        return Check(name, "warning", value, remedy, figures)
    return Check(name, "ok", f"{value}; a GB takes {1e9 / fastest:.2g} s", figures=figures)


def _rate(rate: ReadRate) -> str:
    size = f"{rate.read_bytes >> 10} KiB" if rate.read_bytes < 1 << 20 else f"{rate.read_bytes >> 20} MiB"
    return f"{size} at {format_bytes(round(rate.bytes_per_second or 0))}/s"
