"""File access for bundles: reads that stay inside the bundle's folder, and writes that survive a crash."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ondevice.errors import BundleError, OndeviceError, reading_failed

_COPIED_BYTES = 4 << 20


def contained(folder: Path, name: str) -> Path:
    """The regular file `name` of the resolved `folder`. Raises BundleError if it leads anywhere else."""
    try:
        path = (folder / name).resolve(strict=True)
        mode = path.stat().st_mode
    except FileNotFoundError as error:
        raise BundleError(f"{name} is missing from {folder}") from error
    except OSError as error:
        raise reading_failed(error, BundleError(f"{name} in {folder} can't be reached: {error}")) from error
    except RuntimeError as error:  # links in a circle
        raise BundleError(f"{name} in {folder} can't be reached: {error}") from error
    if not path.is_relative_to(folder):
        raise BundleError(f"{name} is a link that leaves the bundle {folder}")
    if not stat.S_ISREG(mode):
        raise BundleError(f"{name} in {folder} isn't a regular file")
    return path


def read_range(path: Path, offset: int, nbytes: int) -> bytes:
    """Exactly `nbytes` bytes of `path` from `offset` on.

    Raises BundleError if they can't be read, OndeviceError if the process has no descriptor left for it.
    """
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read(nbytes)
    except OSError as error:
        raise reading_failed(error, BundleError(f"{path.name} can't be read: {error}")) from error
    if len(data) != nbytes:
        raise BundleError(f"{path.name} ends {nbytes - len(data)} bytes early")
    return data


def read_file(path: Path, most: int) -> bytes:
    """All bytes of `path`. Raises BundleError if there are more than `most`."""
    try:
        size = path.stat().st_size
    except OSError as error:
        raise BundleError(f"{path.name} can't be read: {error}") from error
    if size > most:
        raise BundleError(f"{path.name} has {size} bytes; the limit is {most}")
    return read_range(path, 0, size)


def write_durably(path: Path, data: bytes) -> None:
    """Writes `path` so that after a crash it has all of the old or all of the new content. Raises OSError."""
    temporary = temporary_path(path)
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    publish(temporary, path)


def link_or_copy(source: Path, path: Path) -> None:
    """Makes `path` a hard link to `source`, or a durable copy if no link can be made.

    Raises OSError.
    """
    import shutil

    try:
        os.link(source, path)
    except OSError:
        temporary = temporary_path(path)
        with source.open("rb") as original, temporary.open("wb") as file:
            shutil.copyfileobj(original, file, _COPIED_BYTES)
            file.flush()
            os.fsync(file.fileno())
        publish(temporary, path)


def temporary_path(path: Path) -> Path:
    """The name under which `path` is written until it is complete."""
    return path.with_name(path.name + ".tmp")


def publish(temporary: Path, path: Path) -> None:
    """Gives a complete, synced file its final name, durably. Raises OSError."""
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes the names in `folder` durable. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def disk_errors(path: Path, remedy: str) -> Iterator[None]:
    """Turns OSError from writing `path` into an OndeviceError with the `remedy`."""
    try:
        yield
    except OSError as error:
        raise OndeviceError(f"{path} can't be written: {error.strerror or error}; {remedy}") from error
