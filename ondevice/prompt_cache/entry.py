"""One file of a prompt cache: a run of tokens, and the state of a sequence at its positions.

A file is a header in whole pages and the state's parts, end to end:

    8 bytes   MAGIC
    4 bytes   bytes of the header's JSON, little-endian
    4 bytes   CRC-32C of the JSON, little-endian
    JSON      binding, parent, tokens, bytes of every part, CRC-32C of every CRC_BYTES after the header
    zeros     up to a whole page

A run's name has the digest of all tokens before it, the digest of these and its own, and its length. So a
file belongs to one place of one text, and runs of a text form a chain. Whatever doesn't match is damage:
`read_entry` returns None, and reading a part raises FlashReadError.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from ondevice.backends.base import Bytes
from ondevice.bundle.matrix_layout import padded
from ondevice.bundle.reader import CheckedFile
from ondevice.bundle.strict_json import MAX_JSON_BYTES, Section, canonical_json, parse_json
from ondevice.errors import BundleError
from ondevice.flash.reader import FlashReader
from ondevice.kernels import _native
from ondevice.records import dataclass
from ondevice.units import PAGE_BYTES

MAGIC = b"odstate1"
CRC_BYTES = 1 << 16
"""Bytes that a checksum covers, across borders of parts. Reading a part reads less than that more on each
side."""
READ_THREADS = 4
WRITE_BYTES = 4 << 20
"""Bytes after which written data is flushed to the disk and dropped from the page cache."""
MAX_RUN_TOKENS = 1 << 16
MAX_TOKEN = (1 << 31) - 1
MAX_PARTS = 1 << 12
MAX_PART_BYTES = 1 << 36
_PREFIX_BYTES = len(MAGIC) + 8
_NAME = re.compile(r"([0-9a-f]{32})-([0-9a-f]{32})-([1-9][0-9]{0,5})\.kv")

Part = Callable[[], Bytes]
"""A function that gives the bytes of a part, (n,) uint8, valid until its next call."""


class RunName(NamedTuple):
    """The name of a run of `tokens` tokens. parent, digest: digests of the text before the run, and with
    it.
    """

    parent: str
    digest: str
    tokens: int

    @property
    def file(self) -> str:
        return f"{self.parent}-{self.digest}-{self.tokens}.kv"


def parse_name(file: str) -> RunName | None:
    """The name of the run that a file name stands for; None for other files."""
    match = _NAME.fullmatch(file)
    return None if match is None else RunName(match[1], match[2], int(match[3]))


def run_name(parent: str, tokens: Sequence[int]) -> RunName:
    """The name of the run `tokens` that follows the text of digest `parent`."""
    from hashlib import blake2b

    digest = blake2b(bytes.fromhex(parent), digest_size=16)
    digest.update(np.asarray(tokens, dtype="<i4").tobytes())
    return RunName(parent, digest.hexdigest(), len(tokens))


def root_digest(binding: Mapping[str, Any]) -> str:
    """The digest of an empty text, which depends on everything that the state is bound to."""
    from hashlib import blake2b

    return blake2b(canonical_json(binding), digest_size=16).hexdigest()


@dataclass(frozen=True, eq=False)
class Entry:
    """An entry of the cache: a file with a valid header. Its parts are checked as they are read."""

    tokens: tuple[int, ...]
    sizes: tuple[int, ...]
    """Bytes of each part."""
    file: CheckedFile

    def reader(self, io: Literal["auto", "direct", "buffered"]) -> FlashReader:
        """A reader of the parts. Raises FlashReadError, OndeviceError."""
        return FlashReader([self.file], io, READ_THREADS)

    def read(self, reader: FlashReader, part: int, out: Bytes) -> None:
        """Read a part into `out`, (its bytes,) uint8. Raises FlashReadError."""
        offset = self.file.crc_start + sum(self.sizes[:part])
        reader.read(0, offset, self.sizes[part], out)


def read_entry(folder: Path, name: RunName, binding: Mapping[str, Any]) -> Entry | None:
    """The entry of a run; None if there is no valid one. binding: what the state depends on, apart from
    tokens.
    """
    path = folder / name.file
    try:
        with open(path, "rb", opener=_open_alone) as stream:
            state = os.fstat(stream.fileno())
            if not stat.S_ISREG(state.st_mode):
                return None
            prefix = stream.read(_PREFIX_BYTES)
            nbytes = int.from_bytes(prefix[8:12], "little")
            if prefix[:8] != MAGIC or nbytes > MAX_JSON_BYTES:
                return None
            text = stream.read(nbytes)
    except OSError:
        return None
    if len(text) != nbytes or _crcs(np.frombuffer(text, np.uint8), [max(1, nbytes)]) != prefix[12:]:
        return None
    try:
        return _entry(path, name, binding, text, state.st_size)
    except BundleError:
        return None


def _open_alone(path: str, flags: int) -> int:
    """A file descriptor of the file with exactly this name. Links aren't followed, and opening a pipe doesn't
    wait.
    """
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def _entry(path: Path, name: RunName, binding: Mapping[str, Any], text: bytes, nbytes: int) -> Entry | None:
    """The entry that a header describes. Raises BundleError if `text` isn't a valid header."""
    header = Section(parse_json(text, path.name), path.name)
    tokens = header.integers("tokens", MAX_RUN_TOKENS, 0, MAX_TOKEN)
    sizes = header.integers("parts", MAX_PARTS, 1, MAX_PART_BYTES)
    crcs, parent = header.get("crcs"), header.get("parent")
    if header.get("binding") != binding or parent != name.parent or not tokens:
        return None
    header.close()
    start = _header_bytes(len(text))
    if run_name(name.parent, tokens) != name or nbytes != start + sum(sizes):
        return None
    if not isinstance(crcs, str) or not re.fullmatch(r"[0-9a-f]*", crcs) or len(crcs) != 8 * _units(sizes):
        return None
    table = np.frombuffer(bytes.fromhex(crcs), "<u4")
    return Entry(tokens, sizes, CheckedFile(path, nbytes, start, (CRC_BYTES,), table))


def entry_bytes(
    binding: Mapping[str, Any], name: RunName, tokens: Sequence[int], sizes: Sequence[int]
) -> int:
    """Size of the file of a run whose state has parts of these sizes."""
    text = _header(binding, name, tokens, sizes, bytes(4 * _units(sizes)))
    return _header_bytes(len(text)) + sum(sizes)


def write_entry(
    file: int,
    binding: Mapping[str, Any],
    name: RunName,
    tokens: Sequence[int],
    sizes: Sequence[int],
    parts: Sequence[Part],
) -> None:
    """Write a run's file to an open, empty file, and flush it to the disk. Raises OSError."""
    start = _header_bytes(len(_header(binding, name, tokens, sizes, bytes(4 * _units(sizes)))))
    offset, checksums = start, _Checksums()
    for size, part in zip(sizes, parts, strict=True):
        data = part()
        checksums.add(data)
        for at in range(0, size, WRITE_BYTES):
            _write(file, data[at : at + WRITE_BYTES].data, offset + at)
            _put_on_disk(file)
        offset += size
    text = _header(binding, name, tokens, sizes, checksums.end())
    assert _header_bytes(len(text)) == start
    prefix = MAGIC + len(text).to_bytes(4, "little") + _crcs(np.frombuffer(text, np.uint8), [len(text)])
    _write(file, memoryview((prefix + text).ljust(start, b"\0")), 0)
    _put_on_disk(file)


def _header(
    binding: Mapping[str, Any], name: RunName, tokens: Sequence[int], sizes: Sequence[int], crcs: bytes
) -> bytes:
    content = {
        "binding": binding,
        "parent": name.parent,
        "tokens": list(tokens),
        "parts": list(sizes),
        "crcs": crcs.hex(),
    }
    return json.dumps(content, separators=(",", ":"), allow_nan=False).encode("ascii")


def _header_bytes(nbytes: int) -> int:
    return padded(_PREFIX_BYTES + nbytes, PAGE_BYTES)


def _units(sizes: Sequence[int]) -> int:
    """Number of checksums for parts of these sizes."""
    return -(-sum(sizes) // CRC_BYTES)


class _Checksums:
    """Computes checksums over consecutive parts."""

    def __init__(self) -> None:
        self._digests: list[bytes] = []
        self._rest: Bytes = np.empty(0, np.uint8)
        """Bytes of the unfinished unit so far: a copy."""

    def add(self, data: Bytes) -> None:
        """Add the next part."""
        if len(self._rest):
            missing = CRC_BYTES - len(self._rest)
            self._rest, data = np.concatenate([self._rest, data[:missing]]), data[missing:]
            if len(self._rest) < CRC_BYTES:
                return
            self._digests.append(_crcs(self._rest, [CRC_BYTES]))
        complete = len(data) // CRC_BYTES * CRC_BYTES
        if complete:
            self._digests.append(_crcs(data[:complete], [CRC_BYTES]))
        self._rest = data[complete:].copy()

    def end(self) -> bytes:
        """All checksums, concatenated."""
        if len(self._rest):
            self._digests.append(_crcs(self._rest, [CRC_BYTES]))
        return b"".join(self._digests)


def _crcs(data: Bytes, units: Sequence[int]) -> bytes:
    return _native.crc32c(data, units).astype("<u4").tobytes()


def _write(file: int, data: memoryview, offset: int) -> None:
    while len(data):
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written


def _put_on_disk(file: int) -> None:
    """Wait until written data is on the disk, and drop it from the page cache."""
    getattr(os, "fdatasync", os.fsync)(file)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
