"""The files of a local checkpoint, and the removal of a GGUF file after its bundle is verified."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from ondevice.bundle.verify import verify
from ondevice.errors import CheckpointError, OndeviceError, UsageError
from ondevice.kernels import _native
from ondevice.records import dataclass
from ondevice.runtime.models import find_source
from ondevice.runtime.repository import Repository

_WEIGHTS = (".safetensors", ".gguf", ".bin")
_PART = re.compile(r"(.+-)\d{5}(-of-\d{5}\.gguf)", re.DOTALL)
"""Name of a GGUF file that is part of a model; all parts share the groups."""
_KEPT = "the source is kept"


def weight_files(path: Path) -> list[Path]:
    """The files of a checkpoint's weights; for a GGUF file in parts, all parts that exist."""
    if path.is_dir():
        return sorted(file for file in path.iterdir() if file.suffix in _WEIGHTS and file.is_file())
    part = _PART.fullmatch(path.name)
    if part is None:
        return [path]
    parts = (other for file in path.parent.iterdir() if (other := _PART.fullmatch(file.name)) is not None)
    names = sorted(other[0] for other in parts if other.groups() == part.groups())
    return [file for name in names if (file := path.with_name(name)).is_file()]


@dataclass(frozen=True)
class RemovableSource:
    """A local GGUF file, with all its parts, that a conversion may delete.

    stamps: the files' paths, each with metadata that shows whether the file was replaced.
    """

    stamps: tuple[tuple[Path, tuple[int, ...]], ...]
    nbytes: int

    @property
    def paths(self) -> list[Path]:
        return [path for path, _ in self.stamps]

    def remove(self, bundle: Path, on_progress: Callable[[int, int], None] | None = None) -> None:
        """Delete the files, after verifying all bytes of their bundle.

        on_progress: called with (bytes read, total bytes). Raises BundleError if the bundle is damaged,
        OndeviceError if a file has changed or can't be deleted.
        """
        try:
            verify(bundle, _native.crc32c, on_progress)
        except OndeviceError as error:
            error.add_note(_KEPT)
            raise
        for path, stamp in self.stamps:
            if _stamp(path) != stamp:
                raise OndeviceError(
                    f"{path} has changed since it was converted to {bundle}, so it isn't deleted; {_KEPT}"
                )
        for path, _ in self.stamps:
            try:
                path.unlink()
            except OSError as error:
                raise OndeviceError(
                    f"{path} can't be deleted: {error.strerror}; the bundle is whole at {bundle}"
                ) from error


def removable_source(source: str | os.PathLike[str]) -> RemovableSource:
    """The source of a conversion that may be deleted later. Deletes nothing.

    Raises UsageError unless it is a local GGUF file that isn't a link, and ModelNotFoundError.
    """
    path = find_source(source)
    if isinstance(path, Repository):
        raise UsageError(
            f"--remove-source deletes a GGUF file of this disk, and {path} is a repository: its files aren't "
            "stored unless --keep-source asks for that; leave --remove-source out"
        )
    if path.is_dir():
        raise UsageError(
            f"--remove-source deletes a GGUF file, and {path} is a folder, which may hold more; "
            "name the file, or delete the folder by hand"
        )
    files = weight_files(path)
    for file in files:
        if file.is_symlink():
            raise UsageError(
                f"--remove-source deletes a GGUF file, and {file} is a link to {file.resolve()}; give that "
                "path, if nothing else needs the file"
            )
        if not _is_gguf(file):
            raise UsageError(f"--remove-source deletes a GGUF file, which {file} isn't; delete it by hand")
    return RemovableSource(
        tuple((file.absolute(), _stamp(file)) for file in files), sum(file.stat().st_size for file in files)
    )


def _is_gguf(path: Path) -> bool:
    try:
        with path.open("rb") as stream:
            return stream.read(4) == b"GGUF"
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror}") from error


def _stamp(path: Path) -> tuple[int, ...]:
    """A file's device, inode, size in bytes and time of change; empty if the file is missing."""
    try:
        status = path.lstat()
    except OSError:
        return ()
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
