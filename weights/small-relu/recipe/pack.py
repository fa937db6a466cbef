"""Token streams: every domain's documents, shuffled, encoded and joined, as uint16 files.

    python -m recipe.pack

writes DOMAIN.train.bin and DOMAIN.held_out.bin, and prints the size of each. `Batches` draws training windows
from them in the proportions of the mixture. The windows depend only on the seed and on the number drawn
before, so a resumed run goes on exactly where it stopped.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recipe.config import BUILD, DATA, MIXTURE
from recipe.data import READERS, Document, split_documents
from recipe.tokenizer import Encoder

SHUFFLE_SEED = 20


def pack(documents: Sequence[Document], encoder: Encoder) -> NDArray[np.uint16]:
    """One stream of tokens from all documents, shuffled. Each begins with <s>, and needs no other mark."""
    order = np.random.default_rng(SHUFFLE_SEED).permutation(len(documents))
    return np.concatenate([np.array(encoder.encode(documents[i]), dtype=np.uint16) for i in order])


def write_streams(data: Path, build: Path, encoder: Encoder) -> dict[str, dict[str, int]]:
    """Write every domain's streams. Returns the stats of each."""
    figures = {}
    for domain in READERS:
        for split, documents in zip(("train", "held_out"), split_documents(data, domain), strict=True):
            stream = pack(documents, encoder)
            stream.tofile(build / f"{domain}.{split}.bin")
            counts = {"documents": len(documents), "tokens": len(stream), "bytes": encoder.text_bytes(stream)}
            figures[f"{domain}.{split}"] = counts
    return figures


def read_stream(build: Path, domain: str, split: str) -> NDArray[np.uint16]:
    return np.memmap(build / f"{domain}.{split}.bin", dtype=np.uint16, mode="r")


class Batches:
    """Windows of training text, in an order set by the seed. drawn: windows drawn so far, by domain."""

    def __init__(
        self,
        streams: Mapping[str, NDArray[np.uint16]],
        mixture: Mapping[str, float],
        context: int,
        seed: int,
        drawn: Mapping[str, int] | None = None,
    ) -> None:
        self._streams, self._context, self._seed = streams, context, seed
        total = sum(mixture.values())
        self._shares = {domain: share / total for domain, share in mixture.items() if share > 0}
        self.drawn = dict.fromkeys(self._shares, 0) | dict(drawn or {})
        self._orders: dict[str, tuple[int, NDArray[np.int64]]] = {}

    def draw(self, windows: int) -> NDArray[np.int64]:
        """(windows, context + 1) tokens: the inputs, and one position later the targets."""
        return np.stack([self._window(self._next_domain()) for _ in range(windows)]).astype(np.int64)

    def _next_domain(self) -> str:
        """The domain that is furthest behind its share."""
        total = sum(self.drawn.values()) + 1
        return max(self._shares, key=lambda domain: self._shares[domain] * total - self.drawn[domain])

    def _window(self, domain: str) -> NDArray[np.uint16]:
        stream = self._streams[domain]
        windows = (len(stream) - 1) // self._context - 1
        if windows < 1:
            raise ValueError(f"{domain} has {len(stream)} tokens; two windows of {self._context} are needed")
        epoch, index = divmod(self.drawn[domain], windows)
        self.drawn[domain] += 1
        if self._orders.get(domain, (-1, None))[0] != epoch:
            key = [self._seed, sorted(self._shares).index(domain), epoch]
            rng = np.random.default_rng(key)
            # Each epoch cuts the stream at different places.
            starts = rng.permutation(windows) * self._context + int(rng.integers(self._context))
            self._orders[domain] = epoch, starts
        start = int(self._orders[domain][1][index])
        return stream[start : start + self._context + 1]


def held_out_windows(build: Path, domain: str, context: int, limit: int) -> NDArray[np.int64]:
    """(n, context) first `limit` windows of held-out text. Each token but the first is predicted once."""
    stream = read_stream(build, domain, "held_out")
    count = min(limit, (len(stream) - 1) // (context - 1))
    starts = np.arange(count)[:, None] * (context - 1)
    return np.array(stream[starts + np.arange(context)], dtype=np.int64)


def main() -> None:
    parser = argparse.ArgumentParser(description="Encode all text into token streams.")
    parser.add_argument("--data", type=Path, default=DATA, help="the folder of text")
    parser.add_argument("--build", type=Path, default=BUILD, help="where the tokenizer is, and to write")
    arguments = parser.parse_args()
    encoder = Encoder((arguments.build / "tokenizer.model").read_bytes())
    figures: dict[str, Any] = write_streams(arguments.data, arguments.build, encoder)
    figures["mixture"] = MIXTURE
    (arguments.build / "streams.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
