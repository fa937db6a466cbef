"""`ngrams.json` and `ngrams.safetensors`: a datastore of a text's short runs of tokens, to draft from.

A sidecar (`sidecar.py`), added to a finished bundle by `ondevice train ngrams`; no text depends on it. It
belongs to a tokenizer, not to weights: bundles of one model at several widths may share it.
`weights/README.md` is the specification.

Legend: N pages of windows, F pages of frequent contexts, M = MAX_CONTEXT, W = WINDOW.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace

import numpy as np
from numpy.typing import NDArray

from ondevice.bundle.file_layouts import FileLayout, TensorSpec, tensors_layout
from ondevice.bundle.manifest import Manifest
from ondevice.bundle.sidecar import SHA256, Sidecar, parse_sidecar, sidecar_text
from ondevice.bundle.strict_json import Section, canonical_json
from ondevice.errors import BundleError
from ondevice.hashing import sha256_hex
from ondevice.records import dataclass

NGRAMS = "ngrams.safetensors"
NGRAMS_MANIFEST = "ngrams.json"
WINDOW = 11
"""Tokens of a row: a context and its continuation."""
MAX_CONTEXT = 3
"""Tokens of the longest context. A fourth adds nothing to tokens per forward pass (docs/lab/README.md)."""
PAGE_BYTES = 16384
"""Bytes of a page, which is read at once and has one CRC32C."""
PAGE_ROWS = PAGE_BYTES // (4 * (WINDOW + 1))
"""Rows of a page: W tokens and a count each."""
NO_TOKEN = (1 << 32) - 1
"""Fills a row after its last token. It is larger than every token."""
NGRAMS_SIDECAR = Sidecar(
    "ngrams",
    NGRAMS_MANIFEST,
    NGRAMS,
    "ondevice train ngrams --model {model} --text FILE",
    "every --speculation but `ngrams`",
    {"version": 1, "window": WINDOW, "max_context": MAX_CONTEXT, "page_bytes": PAGE_BYTES},
)
MAX_PAGES = 1 << 16
MAX_TOKENS = (1 << 32) - 1

Words = NDArray[np.uint32]


@dataclass(frozen=True)
class Ngrams:
    """The content of `ngrams.json`, checksums aside.

    tokenizer: `tokenizer_digest` of the bundle that it belongs to. tokens: length of the text. pages: number
    of pages of the text's windows. frequent: number of contexts that have a separate page. sha256: that of
    `ngrams.safetensors`.
    """

    tokenizer: str
    tokens: int
    pages: int
    frequent: int
    sha256: str


def tokenizer_digest(manifest: Manifest) -> str:
    """A hash that identifies a bundle's tokenizer: how text is divided into tokens. Empty without a
    tokenizer.
    """
    info, size = manifest.tokenizer, manifest.config.vocab_size
    if info.kind is None or info.file is None:
        return ""
    document = [info.kind, size, manifest.files[info.file].sha256]
    return sha256_hex(canonical_json(document))


def ngrams_tensors(pages: int, frequent: int) -> Mapping[str, TensorSpec]:
    """The exact tensors of the file, in the order of their bytes."""
    return {
        "pages": TensorSpec("U32", (pages + frequent, PAGE_BYTES // 4)),
        "starts": TensorSpec("U32", (pages, MAX_CONTEXT)),
        "frequent": TensorSpec("U32", (frequent, MAX_CONTEXT)),
    }


def ngrams_layout(pages: int, frequent: int) -> FileLayout:
    """Size, header and checksum units of `ngrams.safetensors`: one unit for each page, then the index."""
    layout = tensors_layout(ngrams_tensors(pages, frequent))
    return replace(layout, crc_start=len(layout.header), crc_units=(PAGE_BYTES,))


def index_bytes(ngrams: Ngrams) -> int:
    """Bytes of the index in memory: the first tokens of each page, the frequent contexts, the checksums."""
    words = (MAX_CONTEXT + 1) * (ngrams.pages + ngrams.frequent)
    return 4 * words


def ngrams_text(ngrams: Ngrams, crcs: tuple[int, ...]) -> bytes:
    """The bytes of `ngrams.json`."""
    return sidecar_text(NGRAMS_SIDECAR, {**NGRAMS_SIDECAR.facts, **asdict(ngrams), "crcs": crcs})


def parse_ngrams(data: bytes, manifest: Manifest) -> tuple[Ngrams, tuple[int, ...]]:
    """The parsed `ngrams.json`, and the file's checksums.

    Raises BundleError if damaged, out of range, or made with another tokenizer.
    """
    values = parse_sidecar(NGRAMS_SIDECAR, data).values(
        {
            "tokenizer": SHA256,
            "tokens": (Section.integer, 1, MAX_TOKENS),
            "pages": (Section.integer, 1, MAX_PAGES),
            "frequent": (Section.integer, 0, MAX_PAGES),
            "sha256": SHA256,
            "crcs": (Section.integers, 2 * MAX_PAGES, 0, (1 << 32) - 1),
        }
    )
    crcs: tuple[int, ...] = values.pop("crcs")
    ngrams = Ngrams(**values)
    if ngrams.tokenizer != tokenizer_digest(manifest):
        raise BundleError(f"{NGRAMS_MANIFEST} was made with another tokenizer than this model's")
    layout = ngrams_layout(ngrams.pages, ngrams.frequent)
    expected = layout.crc_count(layout.nbytes or 0)
    if len(crcs) != expected:
        raise BundleError(f"{NGRAMS_MANIFEST} has {len(crcs)} checksums; it needs {expected}")
    return ngrams, crcs
