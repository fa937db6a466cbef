"""SHA-256 of short data without `hashlib`, which imports OpenSSL and so takes 4 MB of memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hashlib import _Hash

try:
    from _sha2 import sha256  # type: ignore[import-not-found, unused-ignore]
except ImportError:  # before Python 3.12
    try:
        from _sha256 import sha256  # type: ignore[import-not-found, no-redef, unused-ignore]
    except ImportError:  # a Python that was built without it
        from hashlib import sha256


SLOW_BYTES = 64 << 20
"""Bytes that take a fifth of a second without OpenSSL, which hashes longer files."""


def sha256_hex(data: bytes) -> str:
    """The SHA-256 of `data` in lower-case hex digits."""
    digest: str = sha256(data).hexdigest()
    return digest


def sha256_of(nbytes: int) -> _Hash:
    """A new SHA-256, to which `nbytes` bytes will be added."""
    if nbytes > SLOW_BYTES:
        from hashlib import sha256 as openssl_sha256

        return openssl_sha256()
    empty: _Hash = sha256()
    return empty
