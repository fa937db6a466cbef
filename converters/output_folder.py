"""The folder that a conversion writes: `<output>.partial`, renamed to `<output>` when the bundle is complete.

It replaces and deletes only bundles and unfinished bundles. Files are deleted one by one, by the names that
conversions use, never as a tree.

Training works on a copy of the bundle inside the partial folder, where ordering neurons needs further
folders. Afterwards the copy gets the name `<output>`.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
from collections.abc import Container
from contextlib import closing, suppress
from pathlib import Path

from ondevice.bundle.about import DOCUMENTS
from ondevice.bundle.files import disk_errors, sync_folder
from ondevice.bundle.layout import (
    CHAT_TEMPLATE,
    CHECKSUMS,
    EMBEDDING,
    MANIFEST,
    PARTIAL,
    PER_LAYER,
    RESIDENT,
    TOKENIZER_FILES,
)
from ondevice.bundle.resume import STATE_FILE
from ondevice.bundle.verify import SIDECARS
from ondevice.converters.error_log import ErrorLog
from ondevice.errors import OndeviceError, UsageError
from ondevice.units import format_bytes

REPLACED = ".replaced"
"""Suffix of an older bundle's name while the new one takes its place."""
_NAMES = frozenset(
    {MANIFEST, RESIDENT, EMBEDDING, PER_LAYER, CHECKSUMS, *TOKENIZER_FILES.values(), CHAT_TEMPLATE}
    | {name for sidecar in SIDECARS for name in sidecar.files}
    | {STATE_FILE, ErrorLog.FILE}
)
_LAYERS = re.compile(r"(neurons|gates|experts)-\d{5}\.safetensors", re.ASCII)

logger = logging.getLogger(__name__)


class OutputFolder:
    """The folder being written; only this process holds it between `claim` and `close`."""

    def __init__(self, output: Path) -> None:
        """output: the final folder. Raises UsageError if the system doesn't allow its name, or longer names
        made from it.
        """
        self.output = output.absolute()
        self.partial = self._sibling(PARTIAL)
        self.copy = self.partial / self.output.name
        """Folder of the copy of the whole bundle that is trained; `clear` deletes it."""
        self._replaced = self._sibling(REPLACED)
        self._force = False
        self._may_discard = False
        self._descriptor = -1
        check_names(self.output)

    def check(self, resume: bool, force: bool) -> None:
        """Check the output. Raises UsageError if writing would touch files that `resume` and `force` don't
        allow to touch.
        """
        if not self.output.name:
            raise UsageError(f"{self.output} can't be an output folder")
        self._force = force
        self._check_output()
        if self.partial.is_dir():
            self._check_partial()
            if not (resume or force) and any(self.partial.iterdir()):
                self._require_unlocked()
                raise UsageError(
                    f"{self.partial} holds an unfinished conversion; continue it with --resume, or start "
                    "again with --force"
                )
        if os.path.lexists(self._replaced):
            self._check_leftover(resume or force)

    def claim(self, resume: bool) -> None:
        """Make the partial folder, or take over the one to resume. Raises OndeviceError if that can't be
        done.
        """
        try:
            self.partial.mkdir(parents=True, exist_ok=True)
            self._descriptor = self._locked()
        except OSError as error:
            raise OndeviceError(
                f"{self.partial} can't be made: {error.strerror}; choose an --output you may write to"
            ) from error
        if not resume:
            self.clear()

    def clear(self, keep: Container[str] = ()) -> None:
        """Delete the conversion's files in the partial folder, except those in `keep`. Raises
        OndeviceError.
        """
        try:
            for folder in self._inner_folders():
                _delete_files(folder, also=DOCUMENTS)
                folder.rmdir()
            _delete_files(self.partial, keep)
        except OSError as error:
            raise OndeviceError(
                f"{error.filename} can't be deleted: {error.strerror}; delete it yourself"
            ) from error

    def check_space(self, bundle_bytes: int) -> None:
        """Check the disk. Raises OndeviceError unless it has room for those of `bundle_bytes` that are still
        missing.
        """
        present = sum(entry.stat().st_size for entry in self.partial.iterdir() if entry.is_file())
        needed = max(0, bundle_bytes - present)
        free = shutil.disk_usage(self.partial).free
        if needed > free:
            if not any(self.partial.iterdir()):
                self.partial.rmdir()
            raise OndeviceError(
                f"the bundle needs {_size(needed)} more, but {self.partial.parent} has {_size(free)} free; "
                "make room, or choose an --output on another disk"
            )

    def publish(self) -> None:
        """Give the finished bundle, or its trained copy if there is one, the name `output`.

        An older bundle of that name is deleted. Raises UsageError if something else has taken the name
        meanwhile, OndeviceError if the disk refuses.
        """
        self._check_output()
        try:
            if os.path.lexists(self.output):
                self._discard_replaced()
                self.output.rename(self._replaced)
                self._may_discard = True
            (self.copy if self.copy.is_dir() else self.partial).rename(self.output)
            sync_folder(self.output.parent)
        except OSError as error:
            raise OndeviceError(
                f"{self.partial} is complete, but couldn't be renamed to {self.output.name}: "
                f"{error.strerror}; mend that, then run again with --resume"
            ) from error
        self._discard_replaced()
        self.discard()

    def discard_leftover(self) -> None:
        """Delete the files of a run that was interrupted after `output` got its name.

        Raises UsageError if one of them is a file of the user.
        """
        if self.partial.is_dir():
            self._check_partial()
            self.claim(resume=False)
            self.discard()
        if (self._replaced / MANIFEST).is_file():
            self._check_leftover(allowed=True)
            self._discard_replaced()

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _require_unlocked(self) -> None:
        """Check that no other conversion uses the partial folder. Raises OndeviceError if one does."""
        with suppress(OSError):
            os.close(self._locked())

    def _locked(self) -> int:
        """A descriptor of the partial folder, which is locked until it is closed. Raises OndeviceError,
        OSError.
        """
        descriptor = os.open(self.partial, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if not isinstance(error, BlockingIOError):
                raise
            raise OndeviceError(
                f"another conversion is writing {self.partial}; wait for it, or stop it"
            ) from error
        return descriptor

    def _check_output(self) -> None:
        if not os.path.lexists(self.output):
            return
        if not (self.output / MANIFEST).is_file():
            raise UsageError(
                f"{self.output} exists and isn't a bundle, so nothing replaces it; choose another --output"
            )
        if not self._force:
            raise UsageError(f"{self.output} exists; choose another --output, or replace it with --force")
        if not self.output.is_symlink():
            _check_contents(self.output, "--force replaces nothing but a bundle")

    def _check_leftover(self, allowed: bool) -> None:
        """Check that `<output>.replaced` is a bundle that an interrupted run moved there, and not a folder of
        the user.

        Raises UsageError if it isn't, or if it isn't `allowed`.
        """
        if not (allowed and (self._replaced / MANIFEST).is_file()):
            raise UsageError(
                f"{self._replaced} exists, a name this conversion needs; move it elsewhere, or choose "
                "another --output"
            )
        if not self._replaced.is_symlink():
            _check_contents(self._replaced, "this conversion needs that name")
        self._may_discard = True

    def _check_partial(self) -> None:
        """Check the partial folder. Raises UsageError if it contains anything that no conversion
        put there.
        """
        why = "conversions work there"
        inner = self._inner_folders()
        _check_contents(self.partial, why, besides=inner)
        for folder in inner:
            _check_contents(folder, why, besides=[folder / name for name in DOCUMENTS])

    def _inner_folders(self) -> list[Path]:
        """The trained copy, and the folders that an interrupted ordering leaves next to it."""
        folders = [self.partial / (self.output.name + suffix) for suffix in ("", PARTIAL, REPLACED)]
        return [folder for folder in folders if folder.is_dir() and not folder.is_symlink()]

    def discard(self) -> None:
        """Delete the partial folder with the files that conversions put there. Raises OndeviceError."""
        if self.partial.is_dir():
            self.clear()
            with disk_errors(self.partial, "delete it yourself"):
                self.partial.rmdir()

    def _discard_replaced(self) -> None:
        """Delete the replaced bundle, its manifest last, so that it is recognised as a bundle until then."""
        if not self._may_discard:
            return
        try:
            if self._replaced.is_symlink():
                self._replaced.unlink()
            elif self._replaced.is_dir():
                _delete_files(self._replaced, keep={MANIFEST})
                (self._replaced / MANIFEST).unlink(missing_ok=True)
                self._replaced.rmdir()
        except OSError as error:
            logger.warning(
                "%s, the bundle that was there before, can't be deleted: %s; delete it yourself",
                self._replaced,
                error.strerror,
            )

    def _sibling(self, suffix: str) -> Path:
        return _sibling(self.output, suffix)


def remove_bundle(folder: Path) -> int:
    """Delete a bundle or an unfinished one, `<name>.partial`, and return the bytes that it took.

    Raises UsageError, and deletes nothing, if the folder contains anything that isn't part of a bundle.
    Raises OndeviceError if a conversion is using the folder, or if the disk refuses.
    """
    if folder.is_symlink():
        raise UsageError(f"{folder} is a link; delete it yourself, and what it leads to if you mean that")
    why, documents = "remove deletes nothing but bundles", [folder / name for name in DOCUMENTS]
    if folder.name.endswith(PARTIAL):
        output = OutputFolder(folder.with_name(folder.name.removesuffix(PARTIAL)))
        with closing(output):
            nbytes = _bytes_of(folder)
            output._check_partial()
            output.claim(resume=True)
            output.discard()
        return nbytes
    _check_contents(folder, why, besides=documents)
    nbytes = _bytes_of(folder)
    with disk_errors(folder, "delete it yourself"):
        # The manifest last: until then, it is known as a bundle.
        _delete_files(folder, keep={MANIFEST}, also=DOCUMENTS)
        (folder / MANIFEST).unlink(missing_ok=True)
        folder.rmdir()
    return nbytes


def _bytes_of(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())


def check_names(output: Path) -> None:
    """Check an output's name. Raises UsageError if the system doesn't allow it, or longer names
    made from it.
    """
    for suffix in ("", PARTIAL, REPLACED):
        _check_name(_sibling(output, suffix))


def _sibling(output: Path, suffix: str) -> Path:
    return output.with_name(output.name + suffix) if output.name else output


def _check_name(path: Path) -> None:
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{str(path.name)!a} can't be the name of a folder: {getattr(error, 'strerror', None) or error}; "
            "choose another --output"
        ) from error


def _is_made_here(name: str) -> bool:
    """Whether a name is that of a file that conversions make, finished or not."""
    name = name.removesuffix(".tmp")
    return name in _NAMES or _LAYERS.fullmatch(name) is not None


def _check_contents(folder: Path, why: str, besides: Container[Path] = ()) -> None:
    """Check a folder's content. Raises UsageError for anything that conversions don't put there and that
    isn't in `besides`.
    """
    for entry in sorted(folder.iterdir()):
        if entry in besides:
            continue
        if not _is_made_here(entry.name) or (entry.is_dir() and not entry.is_symlink()):
            raise UsageError(
                f"{entry} isn't part of a bundle, and {why}; move it elsewhere, or choose another --output"
            )


def _delete_files(folder: Path, keep: Container[str] = (), also: Container[str] = ()) -> None:
    """Delete those files in `folder` that a conversion makes or that are named in `also`, except those in
    `keep`.

    Raises OSError.
    """
    for entry in sorted(folder.iterdir()):
        made_here = _is_made_here(entry.name) or entry.name.removesuffix(".tmp") in also
        if made_here and entry.name not in keep:
            entry.unlink()


def _size(nbytes: int) -> str:
    return f"{format_bytes(nbytes)} ({nbytes} bytes)"
