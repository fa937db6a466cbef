"""The folder of a prompt cache: which runs it holds, and which are removed when it is full.

It has a folder for every binding, named by the binding's digest. Files and folders of other names aren't
touched. Several processes may share it: a file gets its name when it is complete, and the least recently used
files are removed first, whichever process wrote them. A file's time of modification is the time of its last
use.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import re
import stat
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from pathlib import Path

from ondevice.prompt_cache.entry import RunName, parse_name
from ondevice.records import dataclass

MAX_ENTRIES = 8192
"""Most files: listing as many takes some 20 ms."""
UNFINISHED = ".unfinished"
_BINDING = re.compile(r"[0-9a-f]{32}")
_numbers = itertools.count()


@dataclass(frozen=True)
class _Held:
    """A file that exists in the cache."""

    used: int
    """Time of last use, in nanoseconds since 1970."""
    nbytes: int
    path: str


class CacheFolder:
    """The runs of one binding in a prompt cache's folder, which other bindings share."""

    def __init__(self, folder: Path, binding: str, limit_bytes: int) -> None:
        """Args:
        folder: the prompt cache's folder, made when something is written.
        binding: digest of everything that the states depend on, apart from tokens.
        limit_bytes: most bytes of all files of the cache.
        """
        self.path = folder / binding
        self._folder = folder
        self._limit_bytes = limit_bytes

    def has(self, name: RunName) -> bool:
        """True if there is a file for this run."""
        return os.path.lexists(self.path / name.file)

    def runs_after(self, parent: str) -> list[RunName]:
        """The runs that follow the tokens of digest `parent`."""
        try:
            with os.scandir(self.path) as entries:
                names = [parse_name(each.name) for each in entries if each.name.startswith(parent)]
        except OSError:
            return []
        return [name for name in names if name is not None]

    def remove(self, name: RunName) -> None:
        """Remove a run's file, if possible."""
        with suppress(OSError):
            os.unlink(self.path / name.file)

    def touch(self, names: Iterable[RunName]) -> None:
        """Record that a chain of runs was used. The last runs of a chain are removed first."""
        for name in reversed(list(names)):
            with suppress(OSError):
                os.utime(self.path / name.file, follow_symlinks=False)

    def write(
        self, name: RunName, nbytes: int, keep: Collection[RunName], write: Callable[[int], None]
    ) -> bool:
        """Write a run's file of `nbytes` bytes with `write`, which gets a descriptor. Raises OSError.

        Returns False if there is no room for it in addition to the runs in `keep`.
        """
        os.makedirs(self.path, 0o700, exist_ok=True)
        if not stat.S_ISDIR(os.lstat(self.path).st_mode) or not self._make_room(nbytes, keep):
            return False
        partial = self.path / f"{os.getpid()}-{next(_numbers)}{UNFINISHED}"
        file = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            # Locked for as long as its writer lives.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            write(file)
            os.replace(partial, self.path / name.file)
        finally:
            # Once it has its name, there is nothing to remove.
            with suppress(OSError):
                os.unlink(partial)
            os.close(file)
        return True

    def _make_room(self, nbytes: int, keep: Collection[RunName]) -> bool:
        """Remove the least recently used files until `nbytes` more fit. Returns False if they can't."""
        held = sorted(self._held(), key=lambda it: it.used)
        used, count = sum(it.nbytes for it in held), len(held)
        kept = {str(self.path / name.file) for name in keep}
        for each in held:
            if used + nbytes <= self._limit_bytes and count < MAX_ENTRIES:
                break
            if each.path in kept or each.path.endswith(UNFINISHED):
                continue
            with suppress(OSError):
                os.unlink(each.path)
                used, count = used - each.nbytes, count - 1
        return used + nbytes <= self._limit_bytes and count < MAX_ENTRIES

    def _held(self) -> list[_Held]:
        """All files of the cache, of every binding. Half-written files of processes that were killed are
        removed first.
        """
        files: list[_Held] = []
        for folder in _listed(self._folder):
            if _BINDING.fullmatch(folder.name) is None or not folder.is_dir(follow_symlinks=False):
                continue
            for each in _listed(Path(folder.path)):
                partial = each.name.endswith(UNFINISHED)
                if not partial and parse_name(each.name) is None:
                    continue
                with suppress(OSError):
                    state = each.stat(follow_symlinks=False)
                    if stat.S_ISDIR(state.st_mode) or (partial and _is_left_over(each.path)):
                        continue
                    files.append(_Held(state.st_mtime_ns, state.st_size, each.path))
        return files


def _listed(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


def _is_left_over(path: str) -> bool:
    """Remove a half-written file if its writer is gone. Returns whether it was removed. Raises OSError."""
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Between its creation and its lock a file is empty, and its writer may live.
        if os.fstat(file).st_size:
            os.unlink(path)
            return True
    except BlockingIOError:
        pass
    finally:
        os.close(file)
    return False
