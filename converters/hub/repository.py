"""A repository of the hub at one commit, as a checkpoint folder: its list of files, and its small files.

The list isn't trusted: only plain names of files that a conversion reads are used, and files must have the
listed sizes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ondevice.converters.architectures.config_reader import shown
from ondevice.converters.checkpoints.base import PICKLES, Checkpoint, SourceFile
from ondevice.converters.checkpoints.gguf_model import open_gguf_of
from ondevice.converters.checkpoints.gguf_parts import gguf_models
from ondevice.converters.checkpoints.huggingface import open_huggingface
from ondevice.converters.checkpoints.source_folder import MAX_JSON_BYTES, SourceFolder
from ondevice.converters.checkpoints.template_files import OTHER_TEMPLATES
from ondevice.converters.hub.client import HubClient, RemoteUrl
from ondevice.converters.hub.remote_file import RemoteFile, Spool
from ondevice.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError
from ondevice.units import format_bytes

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
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
"""Files that a conversion reads, beside GGUF files and templates: no code and no pickles."""
MAX_FILES = 20_000
MAX_FILE_BYTES = 1 << 42
"""Most bytes of a listed file."""
_PART = r"[A-Za-z0-9][\w.-]{0,199}"
_NAME = re.compile(_PART, re.ASCII)
_GGUF_NAME = re.compile(rf"(?:{_PART}/){{0,4}}{_PART}\.gguf", re.ASCII)
"""Pattern of GGUF files, also in folders, as many repositories have a folder for each quantisation."""
_TEMPLATE_NAME = re.compile(rf"{OTHER_TEMPLATES}/{_PART}\.jinja", re.ASCII)
SHOWN_MODELS = 40
"""Most GGUF models that an error lists."""
_USUAL = ("q4_k_m", "q4_0", "q8_0")
"""Parts of the names of quantisations that are suggested first."""
_COMMIT = re.compile(r"[0-9a-f]{40}")
_IDENTITY = re.compile(r"[0-9a-f]{40,64}")


@dataclass(frozen=True)
class ListedFile:
    """A file as the hub lists it. identity: the hash of its content, if listed."""

    nbytes: int
    identity: str


@dataclass(frozen=True)
class Listing:
    """What the hub lists of a repository.

    others: names of files that no conversion reads, for messages. file: the GGUF file to convert; empty for
    none.
    """

    repository: str
    commit: str
    files: Mapping[str, ListedFile]
    others: tuple[str, ...]
    file: str = ""


def parse_listing(repository: str, answer: Any) -> Listing:
    """The files of a repository that a conversion may read, from the hub's JSON description.

    Names that aren't plain are left out, because nothing may refer to them. Raises CheckpointError for an
    answer without a commit or a list of files, or with sizes that no file has.
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
        if not isinstance(name, str):
            continue
        if _GGUF_NAME.fullmatch(name) or _TEMPLATE_NAME.fullmatch(name):
            files[name] = _listed(repository, name, entry)
        elif not _NAME.fullmatch(name):
            continue
        elif any(fnmatchcase(name, pattern) for pattern in FILES):
            files[name] = _listed(repository, name, entry)
        else:
            others.append(name)
    return Listing(repository, commit, files, tuple(sorted(others)))


def _listed(repository: str, name: str, entry: dict[str, Any]) -> ListedFile:
    nbytes = entry.get("size")
    if type(nbytes) is not int or not 0 <= nbytes <= MAX_FILE_BYTES:
        raise CheckpointError(
            f"the hub lists {name} of {repository} with the size {shown(nbytes)}, which no file has"
        )
    stored = entry.get("lfs")
    digest = stored.get("sha256") if isinstance(stored, dict) else entry.get("blobId")
    return ListedFile(nbytes, digest if isinstance(digest, str) and _IDENTITY.fullmatch(digest) else "")


class RemoteFolder(SourceFolder):
    """A repository, or one of its folders, as a SourceFolder. `path` is the repository's id, for messages."""

    def __init__(self, client: HubClient, listing: Listing, spool: Spool, folder: str = "") -> None:
        """folder: the folder's path with a slash at its end; empty for the complete repository."""
        # The base's own constructor looks for a folder on a disk.
        self.path = Path(listing.repository) / folder
        self._folder = folder
        self._client = client
        self._listing = listing
        self._spool = spool
        self.read_names: set[str] = set()
        """Names of the files that have been read or opened."""

    @property
    def name(self) -> str:
        return f"{self._listing.repository}@{self._listing.commit[:8]}"

    def repository_file(self, name: str) -> str:
        return f"{self.name}:{self._folder}{name}"

    def names(self) -> list[str]:
        return sorted((*self._listing.files, *self._listing.others))

    def has(self, name: str) -> bool:
        return self._folder + name in self._listing.files

    def folder(self, name: str) -> RemoteFolder | None:
        place = f"{self._folder}{name}/"
        if not any(file.startswith(place) for file in self._listing.files):
            return None
        subfolder = RemoteFolder(self._client, self._listing, self._spool, place)
        subfolder.read_names = self.read_names
        return subfolder

    def read(self, name: str, limit: int = MAX_JSON_BYTES) -> bytes:
        listed = self._file(name)
        if listed.nbytes > limit:
            raise CheckpointError(f"{name} of {self.path} is larger than {limit} bytes; is it a model's?")
        data = self._client.read(self._url(name), limit)
        if len(data) != listed.nbytes:
            raise CheckpointError(
                f"{name} of {self.path} has {len(data)} bytes, and {listed.nbytes} are listed; the hub "
                "contradicts itself, try later"
            )
        return data

    def open(self, name: str) -> SourceFile:
        listed = self._file(name)
        identity = listed.identity or self.repository_file(name)
        return RemoteFile(self._client, self._url(name), listed.nbytes, identity, self._spool)

    def _url(self, name: str) -> RemoteUrl:
        file = self._folder + name
        identity = self._listing.files[file].identity
        return self._client.file(self._listing.repository, file, self._listing.commit, identity)

    def _file(self, name: str) -> ListedFile:
        if not self.has(name):
            raise CheckpointError(
                f"{self.path} has no {name[:80]!a} that can be read; the repository isn't complete"
            )
        self.read_names.add(self._folder + name)
        return self._listing.files[self._folder + name]


def open_listed(client: HubClient, listing: Listing, spool_folder: Path) -> tuple[Checkpoint, Listing]:
    """The checkpoint of a repository, and the listing of the files that it consists of.

    Small files and headers are read, weights aren't. spool_folder: where the columns of very large matrices
    are kept while they are read.

    Raises UnsupportedModelError for a repository without safetensors or of an unknown architecture,
    ModelNotFoundError for a GGUF file that it doesn't have, and CheckpointError for what is damaged.
    """
    if listing.file:
        _check_file(listing)
        place, slash, name = listing.file.rpartition("/")
        folder = RemoteFolder(client, listing, Spool(spool_folder), place + slash)
        checkpoint = open_gguf_of(folder, name)
    else:
        _check_kinds(listing)
        folder = RemoteFolder(client, listing, Spool(spool_folder))
        checkpoint = open_huggingface(folder)
    needed = {name: listing.files[name] for name in sorted(folder.read_names)}
    return checkpoint, replace(listing, files=needed)


def _check_kinds(listing: Listing) -> None:
    """Check the repository's kind by the names of its files. Raises UnsupportedModelError for
    another kind.
    """
    where, names = listing.repository, listing.others
    if any(name.endswith(".safetensors") for name in listing.files) and "config.json" in listing.files:
        return
    gguf = gguf_models(listing.files)
    pickles = [name for name in names if name.endswith(PICKLES)]
    if gguf:
        raise UnsupportedModelError(f"{where} holds GGUF files; name the one to take{_choices(listing)}")
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


def _check_file(listing: Listing) -> None:
    """Check that the repository has the chosen GGUF file. Raises ModelNotFoundError if not."""
    if listing.file in listing.files:
        return
    where = f"{listing.repository} has no {listing.file}"
    if not gguf_models(listing.files):
        raise ModelNotFoundError(f"{where}, nor any other GGUF file; `{listing.repository}` names all of it")
    raise ModelNotFoundError(f"{where}; name one that it has{_choices(listing)}")


def _choices(listing: Listing) -> str:
    """The end of a message: a line to type, then the repository's GGUF models with their sizes."""
    models = list(gguf_models(listing.files).values())
    usual = [files[0] for kind in _USUAL for files in models if kind in files[0].lower()]
    lines = [f", as in `ondevice chat {listing.repository}:{(usual or models[0])[0]}`"]
    for files in models[:SHOWN_MODELS]:
        size = format_bytes(sum(listing.files[name].nbytes for name in files))
        parts = f" in {len(files)} parts" if len(files) > 1 else ""
        lines.append(f"  {size:>9}  {listing.repository}:{files[0]}{parts}")
    if len(models) > SHOWN_MODELS:
        lines.append(f"  and {len(models) - SHOWN_MODELS} more")
    return "\n".join(lines)
