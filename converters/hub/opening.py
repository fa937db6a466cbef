"""Opens a repository of the hub: over the network, or from what the hub's own cache holds of it already."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from ondevice.converters.checkpoints.base import Checkpoint
from ondevice.converters.checkpoints.opening import open_checkpoint
from ondevice.converters.hub.client import HubClient
from ondevice.converters.hub.repository import Listing, open_listed, parse_listing
from ondevice.errors import DownloadError

OnFile = Callable[[str, int, int], None]
"""Called with a file's name, and the bytes that are done and to do, after each file of a download."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OpenedRepository:
    """A repository whose headers have been read.

    listing: the files that a conversion needs. is_kept: they are all in the hub's cache.
    """

    listing: Listing
    checkpoint: Checkpoint
    is_kept: bool


def open_repository(repository: str, spool_folder: Path) -> OpenedRepository:
    """Open a repository at its newest commit: from the hub's cache if that has it all, else over the network.

    Raises ModelNotFoundError if it doesn't exist or may not be had, DownloadError if the hub isn't reached,
    UnsupportedModelError and CheckpointError for what can't be converted.
    """
    client = HubClient()
    listing = parse_listing(repository, client.description(repository))
    checkpoint, needed = open_listed(client, listing, spool_folder)
    kept = cached(needed)
    if kept is None:
        return OpenedRepository(needed, checkpoint, False)
    checkpoint.close()
    return OpenedRepository(needed, open_checkpoint(kept), True)


def cached(listing: Listing) -> Path | None:
    """The folder of a repository's files in the hub's cache, if it has all of them."""
    found = {
        name: try_to_load_from_cache(listing.repository, name, revision=listing.commit)
        for name in listing.files
    }
    if not all(isinstance(path, str) for path in found.values()):
        return None
    return Path(str(found["config.json"])).parent


def cache_folder() -> Path:
    """The hub's cache, which `download` fills."""
    return Path(constants.HF_HUB_CACHE)


def hub_is_offline() -> bool:
    """True if HF_HUB_OFFLINE forbids to ask the hub."""
    return bool(constants.HF_HUB_OFFLINE)


def cached_offline(repository: str) -> Path | None:
    """The folder of what the hub's cache holds of a repository, for when nobody can ask if that is all."""
    found = try_to_load_from_cache(repository, "config.json")
    return Path(found).parent if isinstance(found, str) else None


def download(listing: Listing, on_file: OnFile) -> Path:
    """Download a repository's files into the hub's cache, and return their folder there.

    What an interrupted download left is used. Raises DownloadError.
    """
    total = sum(file.nbytes for file in listing.files.values())
    done, folder = 0, Path()
    # Asked for by the branch's name too, a file makes the cache note its commit, for `cached_offline`.
    wanted = [(name, listing.commit) for name in sorted(listing.files)] + [("config.json", "main")]
    for name, revision in wanted:
        on_file(name, done, total)
        try:
            with _without_bars():
                path = hf_hub_download(listing.repository, name, revision=revision)
        except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
            raise DownloadError(
                f"{name} of {listing.repository} couldn't be downloaded: {str(error)[:300]}; check the "
                "network, then run the same command again"
            ) from error
        if revision == listing.commit:
            folder = Path(path).parent
            done += listing.files[name].nbytes
    return folder


@contextmanager
def _without_bars() -> Iterator[None]:
    """Keep the hub's library from printing, and leave its settings as the program had them."""
    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
