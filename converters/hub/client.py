"""Bounded reads from the hub, in huggingface_hub's session: its endpoint, token, proxies, offline switch.

The hub isn't trusted. Answers are limited in bytes and time, and a part of a file is accepted only if it is
the requested part, of a file of the listed size.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from threading import Event
from typing import Any
from urllib.parse import urlsplit

from huggingface_hub import constants, get_session, hf_hub_url
from huggingface_hub.errors import OfflineModeIsEnabled
from huggingface_hub.utils import build_hf_headers

from ondevice.bundle.strict_json import unique_keys
from ondevice.errors import CheckpointError, DownloadError, ModelNotFoundError, OndeviceError, UsageError

MAX_LISTING_BYTES = 16 << 20
"""Most bytes of a repository's description, which has room for some 50,000 files."""
ANSWER_SECONDS = 30.0
"""Longest wait for a connection, and for its next bytes."""
FILE_SECONDS = 300.0
"""Longest time for reading a complete file."""
STALL_SECONDS, STALL_BYTES = 60.0, 1 << 16
"""A connection that brings fewer bytes than STALL_BYTES in STALL_SECONDS counts as broken."""
MAX_WAIT_SECONDS = 300.0
"""Longest wait that a server may ask for: the hub counts requests over five minutes."""
RETRY_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Waits before a request is repeated. After as many failures in a row without progress it is given up."""
FIRST_RETRY_SECONDS = (0.5, 1.0)
"""Waits at first contact, short enough to tell soon that there is no network."""
INTERRUPTED = "the download was interrupted; run the same command again to go on with it"
HTTP_LIBRARIES = ("httpx", "httpx2")
_RETRIED = (408, 425, 429, 500, 502, 503, 504)
_SECONDS = re.compile(r"(\d{1,6})", re.ASCII)
_RESET = re.compile(r"\br=0;\s*t=(\d{1,6})\b", re.ASCII)
_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19})")

logger = logging.getLogger(__name__)


class BrokenConnectionError(Exception):
    """Raised when a request fails in a way that may pass. seconds: the wait that the server asks
    for, or 0.
    """

    def __init__(self, reason: str, seconds: float = 0.0) -> None:
        super().__init__(reason)
        self.seconds = seconds


@dataclass(frozen=True)
class RemoteUrl:
    """A URL of a repository's file or description, and the names that messages need."""

    url: str
    repository: str
    what: str
    """The file's name, or another description of what is at the URL."""
    commit: str = ""
    """The commit that the URL names, if it names one."""
    identity: str = ""
    """The hash under which the hub lists the file, if any."""


class Attempts:
    """Counts consecutive failures of one read, and waits after each."""

    def __init__(self, source: RemoteUrl, waits: Sequence[float], stopped: Event) -> None:
        """waits: seconds to wait after each failure. stopped: ends a wait, and with it the attempts."""
        self._source = source
        self._waits = waits
        self._stopped = stopped
        self._failures = 0

    def progressed(self) -> None:
        self._failures = 0

    def failed(self, error: BrokenConnectionError) -> None:
        """Wait before the next try. Raises DownloadError if there have been too many."""
        if self._failures == len(self._waits):
            raise DownloadError(
                f"{self._source.what} of {self._source.repository} can't be read: {error}, "
                f"{self._failures + 1} times in a row; check the network, then run the same command again"
            ) from error
        wait = min(MAX_WAIT_SECONDS, max(self._waits[self._failures], error.seconds))
        self._failures += 1
        logger.info("%s of %s: %s; again in %.1f s", self._source.what, self._source.repository, error, wait)
        if self._stopped.wait(wait):
            raise DownloadError(INTERRUPTED) from error


class HubClient:
    """Requests to one hub. Raises UsageError for an HF_ENDPOINT that is no address.

    Methods raise ModelNotFoundError for repositories and files that don't exist or aren't accessible,
    DownloadError for a connection that keeps breaking, CheckpointError for answers that differ from what was
    listed, and UsageError for a token that can't be sent.
    """

    def __init__(self) -> None:
        self.stopped = Event()
        """Set to make all reads end soon, with DownloadError."""
        self.endpoint = _checked_endpoint(constants.ENDPOINT.rstrip("/"))
        self._session = get_session()
        self._http = _http_library(self._session)

    def attempts(self, source: RemoteUrl, waits: Sequence[float] = ()) -> Attempts:
        """A counter of failed reads of `source`. waits: seconds between attempts; RETRY_SECONDS
        by default.
        """
        return Attempts(source, waits or RETRY_SECONDS, self.stopped)

    def file(self, repository: str, name: str, commit: str, identity: str = "") -> RemoteUrl:
        """The URL of a file. identity: as in RemoteUrl; answers with other content are refused."""
        url = hf_hub_url(repository, name, revision=commit, endpoint=self.endpoint)
        return RemoteUrl(url, repository, name, commit, identity)

    def description(self, repository: str) -> Any:
        """The hub's JSON description of a repository, with its files and their sizes."""
        url = f"{self.endpoint}/api/models/{repository}?blobs=true"
        source = RemoteUrl(url, repository, "the list of files")
        data = self.read(source, MAX_LISTING_BYTES, FIRST_RETRY_SECONDS)
        try:
            return json.loads(data, object_pairs_hook=unique_keys)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(
                f"the hub's list of files of {repository} isn't sound JSON; try again later"
            ) from error

    def read(self, source: RemoteUrl, limit: int, waits: Sequence[float] = ()) -> bytes:
        """The bytes of a file, at most `limit`. waits: as in `attempts`."""
        attempts = self.attempts(source, waits)
        while True:
            try:
                return self._read_once(source, limit)
            except BrokenConnectionError as error:
                attempts.failed(error)

    def _read_once(self, source: RemoteUrl, limit: int) -> bytes:
        deadline = time.monotonic() + FILE_SECONDS
        response = self._answer(source, {})
        data = bytearray()
        try:
            for chunk in self._chunks(response):
                data += chunk
                if len(data) > limit:
                    raise CheckpointError(
                        f"{source.what} of {source.repository} is larger than {limit} bytes; is it a model's?"
                    )
                if time.monotonic() > deadline:
                    raise BrokenConnectionError(f"it took more than {FILE_SECONDS:.0f} s")
        finally:
            response.close()
        return bytes(data)

    def part(self, source: RemoteUrl, start: int, stop: int, total: int) -> PartStream:
        """Bytes [start, stop) of a file of `total` bytes, as a stream. Also raises BrokenConnectionError."""
        response = self._answer(source, {"Range": f"bytes={start}-{stop - 1}"})
        try:
            self._check_part(source, response, start, stop, total)
        except OndeviceError:
            response.close()
            raise
        return PartStream(response, self._chunks(response), stop - start)

    def _check_part(self, source: RemoteUrl, response: Any, start: int, stop: int, total: int) -> None:
        where = f"{source.what} of {source.repository}"
        if (
            response.status_code == 200
            and start == 0
            and response.headers.get("content-length") == str(total)
        ):
            return
        match = _RANGE.fullmatch(response.headers.get("content-range", ""))
        if response.status_code != 206 or match is None:
            raise DownloadError(
                f"{where} can't be read in parts: the server ignores which bytes are asked for; download the "
                "repository with --keep-source"
            )
        first, last, size = map(int, match.groups())
        if size != total:
            raise CheckpointError(
                f"{where} has {size} bytes, and {total} are listed; the hub contradicts itself, try later"
            )
        if (first, last) != (start, stop - 1):
            raise CheckpointError(f"{where}: bytes {first} to {last} came for {start} to {stop - 1}")

    def _answer(self, source: RemoteUrl, headers: dict[str, str]) -> Any:
        """The response to a GET request, whose body hasn't been read yet. The caller must close it."""
        headers = build_hf_headers(library_name="ondevice") | {"Accept-Encoding": "identity"} | headers
        try:
            request = self._session.build_request("GET", source.url, headers=headers, timeout=ANSWER_SECONDS)
        except ValueError as error:
            raise UsageError(
                f"the hub can't be asked for {source.repository}: {error}; is the token in HF_TOKEN whole?"
            ) from error
        try:
            response = self._session.send(request, stream=True, follow_redirects=True)
        except OfflineModeIsEnabled as error:
            raise ModelNotFoundError(
                f"{source.repository} isn't here, and HF_HUB_OFFLINE forbids to ask the hub for it; "
                "unset it, or give the path of a downloaded copy"
            ) from error
        except (
            self._http.TooManyRedirects,
            self._http.InvalidURL,
            self._http.UnsupportedProtocol,
            # A host's name that can't be one.
            ValueError,
        ) as error:
            raise DownloadError(
                f"{source.what} of {source.repository}: the server's redirects lead nowhere ({error})"
            ) from error
        except self._http.TransportError as error:
            raise BrokenConnectionError(f"{urlsplit(source.url).netloc} isn't reached ({error})") from error
        try:
            self._check_answer(source, response)
        except (OndeviceError, BrokenConnectionError):
            response.close()
            raise
        return response

    def _check_answer(self, source: RemoteUrl, response: Any) -> None:
        status, code = response.status_code, response.headers.get("x-error-code", "")
        if status in _RETRIED:
            raise BrokenConnectionError(f"the server answers {status}", _requested_wait(response.headers))
        if status not in (200, 206):
            raise _refusal(source, status, code, self.endpoint)
        answers = (*response.history, response)
        if self.endpoint.startswith("https:") and any(answer.url.scheme != "https" for answer in answers):
            raise DownloadError(
                f"{source.what} of {source.repository}: redirected to where nothing is encrypted"
            )
        for answer in answers:
            _check_version(source, answer.headers)
        if response.headers.get("content-encoding", "identity") != "identity":
            raise DownloadError(
                f"{source.what} of {source.repository} comes compressed, though not asked for"
            )

    def _chunks(self, response: Any) -> Iterator[bytes]:
        try:
            for chunk in response.iter_raw():
                if self.stopped.is_set():
                    raise DownloadError(INTERRUPTED)
                yield chunk
        except (self._http.TransportError, self._http.StreamError) as error:
            raise BrokenConnectionError(f"the connection broke ({error})") from error


class PartStream:
    """The bytes of a part of a file, in order, as they arrive."""

    def __init__(self, response: Any, chunks: Iterator[bytes], nbytes: int) -> None:
        self._response = response
        self._chunks = chunks
        self._rest = memoryview(b"")
        self._left = nbytes
        self._waited = 0.0
        self._arrived = 0

    @property
    def is_done(self) -> bool:
        """True if nothing is left to read."""
        return not self._left and not self._rest

    def read_some(self, view: memoryview) -> int:
        """Fill the beginning of `view` with the next bytes and return their number, 1 or more.

        Raises BrokenConnectionError if no bytes come.
        """
        while not self._rest:
            begun = time.monotonic()
            chunk = next(self._chunks, None)
            if chunk is None or self._left == 0:
                raise BrokenConnectionError("the answer ended too early")
            self._rest = memoryview(chunk)[: self._left]
            self._left -= len(self._rest)
            self._require_pace(time.monotonic() - begun, len(chunk))
        count = min(len(view), len(self._rest))
        view[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count

    def _require_pace(self, waited: float, nbytes: int) -> None:
        """Add up the seconds of waiting for bytes, and give up a connection that is too slow. Time between
        reads doesn't count.
        """
        self._waited += waited
        self._arrived += nbytes
        if self._waited > STALL_SECONDS:
            if self._arrived < STALL_BYTES:
                raise BrokenConnectionError(f"{self._arrived} bytes came in {self._waited:.0f} s")
            self._waited, self._arrived = 0.0, 0

    def close(self) -> None:
        """End the answer. Its connection is reusable only if the answer was read to the end."""
        if self.is_done:
            with suppress(BrokenConnectionError):
                next(self._chunks, None)
        self._response.close()


def _check_version(source: RemoteUrl, headers: Any) -> None:
    """Check an answer of the hub. Raises CheckpointError if it belongs to another commit, or to another file,
    than listed.

    Answers of the hosts that store the files contain neither, and pass.
    """
    commit = headers.get("x-repo-commit", "")
    tag = headers.get("x-linked-etag") or (headers.get("etag", "") if commit else "")
    hashed = tag.removeprefix("W/").strip('"')
    is_other = len(hashed) == len(source.identity) and hashed != source.identity
    if source.commit and (commit not in ("", source.commit) or is_other):
        raise CheckpointError(
            f"{source.what} of {source.repository} isn't the file that the hub listed: it has been replaced, "
            "or the hub contradicts itself; run the same command again"
        )


def _requested_wait(headers: Any) -> float:
    """The seconds that an answer asks to wait: by Retry-After, or until the hub's limits are reset."""
    match = _SECONDS.fullmatch(headers.get("retry-after", "")) or _RESET.search(headers.get("ratelimit", ""))
    return float(match[1]) if match else 0.0


def _checked_endpoint(endpoint: str) -> str:
    """The hub's address, checked. Raises UsageError if no request can be sent to it."""
    try:
        parts = urlsplit(endpoint)
        is_sound = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        is_sound = False
    if not is_sound:
        raise UsageError(
            f"HF_ENDPOINT is {endpoint[:80]!a}; it must be an address such as https://hub.example"
        )
    return endpoint


def http_errors() -> tuple[type[Exception], ...]:
    """The error types of the HTTP library that huggingface_hub doesn't catch."""
    library = _http_library(get_session())
    return library.HTTPError, library.StreamError, library.InvalidURL


def _http_library(session: object) -> Any:
    """The HTTP library of a session of huggingface_hub, which differs between releases.

    Raises DownloadError for an unknown one.
    """
    for kind in type(session).__mro__:
        name = kind.__module__.partition(".")[0]
        if name in HTTP_LIBRARIES:
            return import_module(name)
    raise DownloadError("this version of huggingface_hub isn't known: pip install -U 'ondevice[hub]'")


def _refusal(source: RemoteUrl, status: int, code: str, endpoint: str) -> OndeviceError:
    """The error for an answer that will be the same if the request is repeated."""
    repository, page = source.repository, f"{endpoint}/{source.repository}"
    login = "`hf auth login`, or a token in HF_TOKEN"
    if code == "GatedRepo" or status == 403:
        return ModelNotFoundError(
            f"{repository} is gated: the hub gives it only to those who have been granted access ({status}). "
            f"Ask for access at {page}, then say who you are: {login}"
        )
    if code == "RepoNotFound" or (status == 401 and code != "EntryNotFound"):
        return ModelNotFoundError(
            f"the hub has no repository {repository}, or it is private ({status}): check the name at {page}; "
            f"for a private one, say who you are: {login}"
        )
    if status == 404 and source.what == "the list of files":
        return ModelNotFoundError(f"the hub has no repository {repository}: check the name at {page}")
    if status == 404:
        return CheckpointError(f"{repository} has no {source.what}, though the hub lists it; try again later")
    if status == 416:
        return CheckpointError(f"{source.what} of {repository} is shorter than the hub says; try again later")
    return DownloadError(f"{source.what} of {repository}: the server answers {status} {code[:80]}".rstrip())
