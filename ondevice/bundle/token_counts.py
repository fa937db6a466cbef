"""`token_counts.json` and `token_counts.safetensors`: how often each token occurs in a text.

The sidecar is added to a finished bundle by training, and can be removed again; nothing in `bundle.json`
refers to it. It tells drafters which tokens to choose from (`--draft-head`), and so no text depends on it.
`weights/README.md` is the specification.

Legend: n distinct tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
from numpy.typing import NDArray

from ondevice.bundle.file_layouts import FileLayout, TensorSpec, tensors_layout
from ondevice.bundle.manifest import Manifest
from ondevice.bundle.sidecar import Sidecar, parse_sidecar, sidecar_text, weights_digest
from ondevice.errors import BundleError
from ondevice.hashing import sha256_hex
from ondevice.records import dataclass

TOKEN_COUNTS = "token_counts.safetensors"
TOKEN_COUNTS_MANIFEST = "token_counts.json"
TOKEN_COUNTS_SIDECAR = Sidecar(
    "token_counts",
    TOKEN_COUNTS_MANIFEST,
    TOKEN_COUNTS,
    "ondevice train streams --model {model} --text FILE --mode lossless",
    "every drafter without --draft-head",
)
TOKEN_COUNTS_VERSION = 1
MAX_COUNT = (1 << 32) - 1


@dataclass(frozen=True)
class TokenCounts:
    """The content of `token_counts.json`.

    model: `weights_digest` of the weights that it belongs to. tokens: length of the text that was counted.
    distinct: number of different tokens in it. sha256: of the file with the tensors.
    """

    model: str
    tokens: int
    distinct: int
    sha256: str


@dataclass(frozen=True)
class CountedTokens:
    """The tokens of a text, (n,) ascending ids, and how often each occurs in it, (n,)."""

    tokens: NDArray[np.uint32]
    counts: NDArray[np.uint32]

    def most_frequent(self, number: int, vocab_size: int) -> NDArray[np.int64]:
        """The `number` most frequent tokens, at most all of the vocabulary, as ascending ids.

        Ties go to the lower id. Tokens that don't occur come last, lowest ids first: tokenizers number their
        pieces by how soon they were merged, which is how frequent they were in the tokenizer's own text.
        """
        counts = np.zeros(vocab_size, dtype=np.int64)
        counts[self.tokens] = self.counts
        return np.sort(np.argsort(-counts, kind="stable")[:number])


def token_counts_layout(distinct: int) -> FileLayout:
    """Size and header of `token_counts.safetensors`: `tokens` and `counts`, U32 (n,) each."""
    spec = TensorSpec("U32", (distinct,))
    return tensors_layout({"tokens": spec, "counts": spec})


def token_counts_text(counts: TokenCounts) -> bytes:
    """The bytes of `token_counts.json`."""
    return sidecar_text(TOKEN_COUNTS_SIDECAR, {"version": TOKEN_COUNTS_VERSION, **asdict(counts)})


def parse_token_counts(data: bytes, manifest: Manifest) -> TokenCounts:
    """`token_counts.json` parsed. Raises BundleError if damaged, out of range, or made for other weights."""
    section = parse_sidecar(TOKEN_COUNTS_SIDECAR, data)
    section.equal("version", TOKEN_COUNTS_VERSION)
    counts = TokenCounts(
        model=section.text("model", 64),
        tokens=section.integer("tokens", 1, MAX_COUNT),
        distinct=section.integer("distinct", 1, manifest.config.vocab_size),
        sha256=section.text("sha256", 64),
    )
    section.close()
    if counts.model != weights_digest(manifest):
        raise BundleError(f"{TOKEN_COUNTS_MANIFEST} was made for other weights than these")
    return counts


def counted_tokens_bytes(counted: CountedTokens) -> bytes:
    """The bytes of `token_counts.safetensors`."""
    arrays = (counted.tokens.astype("<u4"), counted.counts.astype("<u4"))
    return token_counts_layout(len(counted.tokens)).header + b"".join(array.tobytes() for array in arrays)


def parse_counted_tokens(data: bytes, counts: TokenCounts, vocab_size: int) -> CountedTokens:
    """The content of `token_counts.safetensors`. Raises BundleError if the file is damaged."""
    layout = token_counts_layout(counts.distinct)
    if len(data) != layout.nbytes or not data.startswith(layout.header):
        raise BundleError(
            f"{TOKEN_COUNTS} isn't the {layout.nbytes} bytes that {TOKEN_COUNTS_MANIFEST} implies"
        )
    if sha256_hex(data) != counts.sha256:
        raise BundleError(f"{TOKEN_COUNTS} doesn't match its sha256; it was damaged")
    tokens, times = np.frombuffer(data, "<u4", offset=len(layout.header)).reshape(2, counts.distinct)
    if int(tokens[-1]) >= vocab_size or (tokens[1:] <= tokens[:-1]).any():
        raise BundleError(f"{TOKEN_COUNTS}: its tokens aren't ascending ids below {vocab_size}")
    if not times.all() or int(times.sum(dtype=np.uint64)) != counts.tokens:
        raise BundleError(f"{TOKEN_COUNTS}: its counts aren't those of {counts.tokens} tokens")
    return CountedTokens(tokens, times)
