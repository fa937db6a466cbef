"""Counts how often each token occurs in a text, and writes the counts beside a bundle.

The format is in `ondevice/bundle/token_counts.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ondevice.bundle.files import disk_errors, write_durably
from ondevice.bundle.reader import Bundle
from ondevice.bundle.sidecar import weights_digest
from ondevice.bundle.token_counts import (
    TOKEN_COUNTS,
    TOKEN_COUNTS_MANIFEST,
    CountedTokens,
    TokenCounts,
    counted_tokens_bytes,
    token_counts_text,
)


def count_tokens(pieces: Sequence[Sequence[int]]) -> CountedTokens:
    """The tokens of `pieces`, which hold at least one, and how often each occurs."""
    ids = np.concatenate([np.asarray(piece, dtype=np.uint32) for piece in pieces])
    tokens, counts = np.unique(ids, return_counts=True)
    return CountedTokens(tokens, counts.astype(np.uint32))


def write_token_counts(bundle: Bundle, counted: CountedTokens, output: Path) -> None:
    """Write both files to the folder `output`. bundle: the model whose tokens were counted.

    The JSON file is deleted first and written last, so that no crash leaves one that doesn't describe the
    data. Raises OndeviceError if the disk refuses.
    """
    data, total = counted_tokens_bytes(counted), int(counted.counts.sum(dtype=np.uint64))
    sha256 = hashlib.sha256(data).hexdigest()
    counts = TokenCounts(weights_digest(bundle.manifest), total, len(counted.tokens), sha256)
    with disk_errors(output, "make room, or choose another --output"):
        (output / TOKEN_COUNTS_MANIFEST).unlink(missing_ok=True)
        write_durably(output / TOKEN_COUNTS, data)
        write_durably(output / TOKEN_COUNTS_MANIFEST, token_counts_text(counts))
