"""Opens a repository of the hub: over the network, or from the hub's local cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from huggingface_hub import (
    constants,
    get_hf_file_metadata,
    hf_hub_download,
    hf_hub_url,
    try_to_load_from_cache,
)
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from ondevice.converters.checkpoints.base import Checkpoint
from ondevice.converters.checkpoints.opening import open_checkpoint
from ondevice.converters.hub.client import HubClient, http_errors
from ondevice.converters.hub.repository import Listing, open_listed, parse_listing
from ondevice.errors import DownloadError

OnFile = Callable[[str, int, int], None]
"""Called after each file of a download with its name, the bytes done and the bytes in all."""


@dataclass(frozen=True)
class OpenedRepository:
    """A repository whose headers have been read.

    listing: the files that a conversion needs. is_kept: whether all of them are in the hub's cache.
    """

    listing: Listing
    checkpoint: Checkpoint
    is_kept: bool


def open_repository(repository: str, file: str, spool_folder: Path) -> OpenedRepository:
    """Open a repository at its newest commit: from the hub's cache if all files are there, otherwise over the
    network.

    file: a GGUF file in the repository; empty for the repository's safetensors.

    Raises ModelNotFoundError if it doesn't exist or isn't accessible, DownloadError if the hub can't be
    reached, UnsupportedModelError and CheckpointError for what can't be converted.
    """
    client = HubClient()
    listing = replace(parse_listing(repository, client.description(repository)), file=file)
    checkpoint, needed = open_listed(client, listing, spool_folder)
    kept = cached(needed)
    if kept is None:
        return OpenedRepository(needed, checkpoint, False)
    checkpoint.close()
    return OpenedRepository(needed, open_checkpoint(kept), True)


def cached(listing: Listing) -> Path | None:
    """The checkpoint of a repository in the hub's cache, if all of its files are there; otherwise None."""
    paths = {
        name: try_to_load_from_cache(listing.repository, name, revision=listing.commit)
        for name in listing.files
    }
    if not all(isinstance(path, str) for path in paths.values()):
        return None
    return _checkpoint(listing.file, str(paths[listing.file or "config.json"]))


def _checkpoint(file: str, cached_file: str) -> Path:
    """The path to open: the GGUF file `file`, or the folder that contains `config.json`."""
    return Path(cached_file) if file else Path(cached_file).parent


def cache_folder() -> Path:
    """The folder of the hub's cache, which `download` fills."""
    return Path(constants.HF_HUB_CACHE)


def hub_is_offline() -> bool:
    """True if HF_HUB_OFFLINE forbids to ask the hub."""
    return bool(constants.HF_HUB_OFFLINE)


def cached_offline(repository: str, file: str) -> Path | None:
    """The part of a repository, or of a GGUF file in it, that is in the hub's cache; None if nothing is.

    Used offline, when the hub can't be asked whether this is everything.
    """
    path = try_to_load_from_cache(repository, file or "config.json")
    return _checkpoint(file, path) if isinstance(path, str) else None


def download(listing: Listing, on_file: OnFile) -> Path:
    """Download a repository's files into the hub's cache, and return the checkpoint there.

    Continues an interrupted download. Raises DownloadError.
    """
    total = sum(file.nbytes for file in listing.files.values())
    done, first, first_path = 0, listing.file or "config.json", ""
    for name in sorted(listing.files):
        on_file(name, done, total)
        path = _downloaded(listing, name, listing.commit)
        first_path = path if name == first else first_path
        done += listing.files[name].nbytes
    # Asked for by the branch's name too, a file makes the cache note its commit, for `cached_offline`. All is
    # here already, so that nothing is lost if that fails.
    with suppress(DownloadError):
        if _newest_commit(listing) == listing.commit:
            _downloaded(listing, first, "main")
    return _checkpoint(listing.file, first_path)


def _downloaded(listing: Listing, name: str, revision: str) -> str:
    with _download_errors(listing, name), _without_bars():
        return str(hf_hub_download(listing.repository, name, revision=revision))


def _newest_commit(listing: Listing) -> str | None:
    """The hub's current commit. A download would fetch the files of that commit."""
    name = listing.file or "config.json"
    with _download_errors(listing, name):
        commit: str | None = get_hf_file_metadata(hf_hub_url(listing.repository, name)).commit_hash
        return commit


@contextmanager
def _download_errors(listing: Listing, name: str) -> Iterator[None]:
    # The library for Xet's storage raises RuntimeError, a name that no host can have ValueError.
    others = (HfHubHTTPError, LocalEntryNotFoundError, OSError, RuntimeError, ValueError)
    try:
        yield
    except (*others, *http_errors()) as error:
        raise DownloadError(
            f"{name} of {listing.repository} couldn't be downloaded: {str(error)[:300]}; check the "
            "network, then run the same command again"
        ) from error


@contextmanager
def _without_bars() -> Iterator[None]:
    """A context in which the hub's library prints nothing, and after which its settings are as before."""
    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
