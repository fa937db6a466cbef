"""Where a conversion writes: `<output>.partial`, until it is whole and takes the name `<output>`.

What this refuses to do: replace or delete anything that isn't a bundle or an unfinished one.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from collections.abc import Container
from pathlib import Path

from ondevice.bundle.files import sync_folder
from ondevice.bundle.layout import MANIFEST
from ondevice.errors import OndeviceError, UsageError
from ondevice.units import format_bytes

logger = logging.getLogger(__name__)


class OutputFolder:
    """The folder being written, held by this process alone between `claim` and `close`."""

    def __init__(self, output: Path) -> None:
        self.output = output.absolute()
        self.partial = self._sibling(".partial")
        self._replaced = self._sibling(".replaced")
        self._descriptor = -1

    def check(self, resume: bool, force: bool) -> None:
        """Raises UsageError where writing would touch what the options don't allow to be touched."""
        if not self.output.name:
            raise UsageError(f"{self.output} can't be an output folder")
        if self.output.exists():
            if not force:
                raise UsageError(f"{self.output} exists; choose another --output, or replace it with --force")
            if not (self.output / MANIFEST).is_file():
                raise UsageError(f"{self.output} exists and isn't a bundle, so --force won't replace it")
        if not (resume or force) and self.partial.is_dir() and any(self.partial.iterdir()):
            raise UsageError(
                f"{self.partial} holds an unfinished conversion; continue it with --resume, or start again "
                "with --force"
            )

    def claim(self, resume: bool) -> None:
        """Make the partial folder, empty unless resuming. Raises OndeviceError if that can't be done."""
        try:
            self.partial.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self.partial, os.O_RDONLY)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OndeviceError(
                f"another conversion is writing {self.partial}; wait for it, or stop it"
            ) from error
        except OSError as error:
            raise OndeviceError(
                f"{self.partial} can't be made: {error.strerror}; choose an --output you may write to"
            ) from error
        if not resume:
            self.clear()

    def clear(self, keep: Container[str] = ()) -> None:
        """Delete the files of the partial folder but those to `keep`. Raises OndeviceError on a subfolder."""
        try:
            for entry in sorted(self.partial.iterdir()):
                if entry.name not in keep:
                    entry.unlink()
        except OSError as error:
            raise OndeviceError(
                f"{error.filename} can't be deleted: {error.strerror}; delete it yourself"
            ) from error

    def check_space(self, bundle_bytes: int) -> None:
        """Raises OndeviceError unless the disk has room for what is still missing of `bundle_bytes`."""
        present = sum(entry.stat().st_size for entry in self.partial.iterdir())
        needed = max(0, bundle_bytes - present)
        free = shutil.disk_usage(self.partial).free
        if needed > free:
            if not present:
                self.partial.rmdir()
            raise OndeviceError(
                f"the bundle needs {_size(needed)} more, but {self.partial.parent} has {_size(free)} free; "
                "make room, or choose an --output on another disk"
            )

    def publish(self) -> None:
        """Give the whole bundle its name; an older one under that name goes."""
        try:
            if self.output.exists():
                self._discard_replaced()
                self.output.rename(self._replaced)
            self.partial.rename(self.output)
            sync_folder(self.output.parent)
            self._discard_replaced()
        except OSError as error:
            raise OndeviceError(
                f"{self.partial} is complete, but couldn't be renamed to {self.output.name}: {error.strerror}"
            ) from error

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _discard_replaced(self) -> None:
        if self._replaced.exists():
            shutil.rmtree(self._replaced)

    def _sibling(self, suffix: str) -> Path:
        return self.output.with_name(self.output.name + suffix) if self.output.name else self.output


def _size(nbytes: int) -> str:
    return f"{format_bytes(nbytes)} ({nbytes} bytes)"
