"""Reads small files of a checkpoint folder without leaving the folder.

Nothing in the folder is trusted. Names must be plain names. Links must stay inside, or lead to the blobs of
the Hugging Face cache that the folder belongs to. Sizes are bounded before anything is read.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ondevice.bundle.strict_json import unique_keys
from ondevice.converters.checkpoints.base import SourceFile, plain
from ondevice.converters.checkpoints.stand_ins import START_BYTES, refuse_stand_in
from ondevice.errors import CheckpointError, ModelNotFoundError, json_fault, reading_failed

MAX_JSON_BYTES = 16 << 20
"""Most bytes of a JSON file. The largest are the indices of models in hundreds of files, 9 MB."""


class SourceFolder:
    """A checkpoint folder. `path` is what the user gave, made absolute."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        try:
            self._real = path.resolve(strict=True)
        except (OSError, RuntimeError) as error:
            raise ModelNotFoundError(f"no checkpoint at {path}") from error
        self._allowed = [self._real]
        self._snapshot = next(
            (p for p in (self._real, *self._real.parents) if p.parent.name == "snapshots"), None
        )
        if self._snapshot is not None:
            self._allowed.append(self._snapshot.parent.parent / "blobs")

    @property
    def name(self) -> str:
        """The folder's name. In a Hugging Face cache, the repository and the beginning of the revision."""
        return self._revision() or self._real.name

    def repository_file(self, name: str) -> str:
        """The name of a file with its repository and revision; empty for a folder outside a cache."""
        revision = self._revision()
        if not revision or self._snapshot is None:
            return ""
        return f"{revision}:{(self._real / name).relative_to(self._snapshot).as_posix()}"

    def _revision(self) -> str:
        """The repository and the beginning of the revision of a folder in a Hugging Face cache; empty for
        other folders.
        """
        if self._snapshot is None or not self._snapshot.parent.parent.name.startswith("models--"):
            return ""
        repository = self._snapshot.parent.parent.name.removeprefix("models--").replace("--", "/")
        return f"{repository}@{self._snapshot.name[:8]}"

    def names(self) -> list[str]:
        """Names of all entries, sorted."""
        return sorted(path.name for path in self.path.iterdir())

    def has(self, name: str) -> bool:
        """True if there is an entry of that name, of any kind."""
        return (self.path / name).is_symlink() or (self.path / name).exists()

    def folder(self, name: str) -> SourceFolder | None:
        """The subfolder of this name; None if there is none. Links aren't followed."""
        path = self.path / name
        return SourceFolder(path) if path.is_dir() and not path.is_symlink() else None

    def file(self, name: str) -> Path:
        """The real path of a file of the folder.

        Raises CheckpointError if `name` isn't a plain name, isn't there, or leads out of the folder.
        """
        if not name or name in (".", "..") or any(mark in name for mark in ("/", "\\", "\0", ":")):
            raise CheckpointError(
                f"'{plain(name)}' is not the name of a file in {self.path}; download the checkpoint again, "
                "from a source you trust"
            )
        try:
            real = (self.path / name).resolve(strict=True)
        except (OSError, RuntimeError, UnicodeEncodeError) as error:
            raise CheckpointError(f"{self.path} has no {plain(name)}; is the download complete?") from error
        if real.parent not in self._allowed:
            raise CheckpointError(
                f"{name} is a link that leads out of {self.path}; put the file itself there, or convert the "
                "folder it is in"
            )
        if not real.is_file():
            raise CheckpointError(f"{self.path / name} is not a regular file")
        return real

    def open(self, name: str) -> SourceFile:
        """A file of the folder, to be read by position. Raises what `file` and `refuse_stand_in` raise."""
        path = self.file(name)
        refuse_stand_in(name, *self._start(name, path, START_BYTES))
        return SourceFile(path)

    def read(self, name: str, limit: int = MAX_JSON_BYTES) -> bytes:
        """The content of a file of at most `limit` bytes."""
        data, nbytes = self._start(name, self.file(name), limit + 1)
        if len(data) > limit:
            raise CheckpointError(f"{name} is larger than {limit} bytes; download it again")
        refuse_stand_in(name, data[:START_BYTES], nbytes)
        return data

    @staticmethod
    def _start(name: str, path: Path, limit: int) -> tuple[bytes, int]:
        """The first bytes of a file, at most `limit`, and the file's size."""
        try:
            with path.open("rb") as stream:
                return stream.read(limit), os.fstat(stream.fileno()).st_size
        except OSError as error:
            refused = CheckpointError(f"{name} can't be read: {error.strerror}")
            raise reading_failed(error, refused) from error

    def json(self, name: str, limit: int = MAX_JSON_BYTES) -> dict[str, Any]:
        """The JSON object in a file of at most `limit` bytes. Raises CheckpointError for anything else."""
        try:
            value = json.loads(self.read(name, limit), object_pairs_hook=unique_keys)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(
                f"{name} isn't valid JSON ({json_fault(error)}); download it again"
            ) from error
        if not isinstance(value, dict):
            raise CheckpointError(f"{name} doesn't hold a JSON object; download it again")
        return value

    def optional_json(self, name: str, limit: int = MAX_JSON_BYTES) -> dict[str, Any]:
        """The JSON object in a file of at most `limit` bytes, empty if there is no such file."""
        return self.json(name, limit) if self.has(name) else {}
