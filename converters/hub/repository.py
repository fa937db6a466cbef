"""A repository of the hub at one commit, as a checkpoint folder: its list of files, and its small files.

Nothing of the list is trusted: only plain names that a conversion reads are seen, with sizes to be kept to.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ondevice.converters.checkpoints.base import Checkpoint, SourceFile
from ondevice.converters.checkpoints.huggingface import open_huggingface
from ondevice.converters.checkpoints.source_folder import MAX_JSON_BYTES, SourceFolder
from ondevice.converters.hub.client import HubClient
from ondevice.converters.hub.remote_file import RemoteFile, Spool
from ondevice.errors import CheckpointError, UnsupportedModelError

FILES = (
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer.model",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
"""Files that a conversion reads: no code and no pickles."""
MAX_FILES = 20_000
MAX_FILE_BYTES = 1 << 42
"""Most bytes of a listed file."""
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,199}", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_IDENTITY = re.compile(r"[0-9a-f]{40,64}")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True)
class ListedFile:
    """A file as the hub lists it. identity: the hash that the hub knows its content by, if any."""

    nbytes: int
    identity: str


@dataclass(frozen=True)
class Listing:
    """What the hub says of a repository. others: names of files that no conversion reads, for messages."""

    repository: str
    commit: str
    files: Mapping[str, ListedFile]
    others: tuple[str, ...]


def parse_listing(repository: str, answer: Any) -> Listing:
    """The files of a repository that a conversion may read, of the hub's JSON description.

    Names that aren't plain are left out, as nothing may refer to them. Raises CheckpointError for an answer
    without a commit or a list of files, or with sizes that no file has.
    """
    commit = answer.get("sha") if isinstance(answer, dict) else None
    entries = answer.get("siblings") if isinstance(answer, dict) else None
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit) or not isinstance(entries, list):
        raise CheckpointError(f"the hub's description of {repository} names no commit or no files")
    if len(entries) > MAX_FILES:
        raise CheckpointError(
            f"{repository} has {len(entries)} files, and the most is {MAX_FILES}; is it a model?"
        )
    files: dict[str, ListedFile] = {}
    others = []
    for entry in entries:
        name = entry.get("rfilename") if isinstance(entry, dict) else None
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            continue
        if any(fnmatchcase(name, pattern) for pattern in FILES):
            files[name] = _listed(repository, name, entry)
        else:
            others.append(name)
    return Listing(repository, commit, files, tuple(sorted(others)))


def _listed(repository: str, name: str, entry: dict[str, Any]) -> ListedFile:
    nbytes = entry.get("size")
    if type(nbytes) is not int or not 0 <= nbytes <= MAX_FILE_BYTES:
        raise CheckpointError(
            f"the hub lists {name} of {repository} with the size {str(nbytes)[:40]}, which no file has"
        )
    stored = entry.get("lfs")
    found = stored.get("sha256") if isinstance(stored, dict) else entry.get("blobId")
    return ListedFile(nbytes, found if isinstance(found, str) and _IDENTITY.fullmatch(found) else "")


class RemoteFolder(SourceFolder):
    """A repository as a SourceFolder. `path` is the repository's id, for messages."""

    def __init__(self, client: HubClient, listing: Listing, spool: Spool) -> None:
        # The base's own constructor looks for a folder on a disk.
        self.path = Path(listing.repository)
        self._client = client
        self._listing = listing
        self._spool = spool
        self.read_names: set[str] = set()
        """Names of the files that have been read or opened."""

    @property
    def name(self) -> str:
        return f"{self._listing.repository}@{self._listing.commit[:8]}"

    def names(self) -> list[str]:
        return sorted((*self._listing.files, *self._listing.others))

    def has(self, name: str) -> bool:
        return name in self._listing.files

    def read(self, name: str, limit: int = MAX_JSON_BYTES) -> bytes:
        listed = self._file(name)
        if listed.nbytes > limit:
            raise CheckpointError(f"{name} of {self.path} is larger than {limit} bytes; is it a model's?")
        data = self._client.whole(self._url(name), limit)
        if len(data) != listed.nbytes:
            raise CheckpointError(
                f"{name} of {self.path} has {len(data)} bytes, and {listed.nbytes} are listed; the hub "
                "contradicts itself, try later"
            )
        return data

    def open(self, name: str) -> SourceFile:
        listed = self._file(name)
        identity = listed.identity or f"{self.name} {name}"
        return RemoteFile(self._client, self._url(name), listed.nbytes, identity, self._spool)

    def _url(self, name: str) -> Any:
        return self._client.file(self._listing.repository, name, self._listing.commit)

    def _file(self, name: str) -> ListedFile:
        if name not in self._listing.files:
            raise CheckpointError(
                f"{self.path} has no {name[:80]!a} that can be read; the repository isn't complete"
            )
        self.read_names.add(name)
        return self._listing.files[name]


def open_listed(client: HubClient, listing: Listing, spool_folder: Path) -> tuple[Checkpoint, Listing]:
    """The checkpoint of a repository, and the listing of those of its files that it needs.

    Small files and headers are read, weights aren't. spool_folder: where the columns of very large matrices
    are kept while they are read.

    Raises UnsupportedModelError for a repository without safetensors or of an unknown architecture, and
    CheckpointError for one that is damaged.
    """
    _check_kinds(listing)
    folder = RemoteFolder(client, listing, Spool(spool_folder))
    checkpoint = open_huggingface(folder)
    needed = {name: listing.files[name] for name in sorted(folder.read_names)}
    return checkpoint, replace(listing, files=needed)


def _check_kinds(listing: Listing) -> None:
    """Raises UnsupportedModelError for a repository whose files are of another kind, by their names."""
    where, names = listing.repository, listing.others
    if any(name.endswith(".safetensors") for name in listing.files) and "config.json" in listing.files:
        return
    gguf = [name for name in names if name.endswith(".gguf")]
    pickles = [name for name in names if name.endswith(_PICKLES)]
    if gguf:
        raise UnsupportedModelError(
            f"{where} holds GGUF files, such as {gguf[0]}: {gguf_remedy(where, gguf[0])}"
        )
    if pickles:
        raise UnsupportedModelError(
            f"{where} has its weights in {pickles[0]}, a pickle, which can run code when it is opened, so it "
            "never is; look for a repository of the model with safetensors files"
        )
    if "config.json" not in listing.files:
        raise UnsupportedModelError(
            f"{where} has no config.json; it isn't a model that transformers can load"
        )
    raise UnsupportedModelError(f"{where} has no safetensors files; look for another repository of the model")


def gguf_remedy(repository: str, name: str) -> str:
    """What to do with a GGUF file of the hub."""
    return (
        "those are opened from disk, not from the hub. Name a repository of the model with safetensors "
        f"files, or fetch the file yourself: hf download {repository} {name}"
    )
