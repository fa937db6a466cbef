"""Continuations: training text whose replies are replaced by the base's own greedy ones.

    python -m recipe.continuations --part 0 --parts 2

Streams draft what the base says next, so they are trained on text that it has generated. A window follows the
true text, the base generates each reply, and the true text goes on with the next question. Free for longer, a
small model repeats the same made-up dialogue for ever. Novels alternate between true and generated text. In
some windows of every domain the base generates everything after a prefix. Groups of windows go to
BUILD/multi-stream/continuations. Each group has its own seed, so parts can be made at the same time.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from recipe.config import BUILD, CONTEXT, MODEL_FOLDER
from recipe.export import model_of_bundle
from recipe.frozen import Frozen
from recipe.pack import read_stream
from recipe.precision import product_type
from recipe.tokenizer import Encoder

FOLDER = "continuations"
WANTED = {"dialogue": 0.35, "sql": 0.25, "restaurants": 0.15, "novels": 0.20, "math": 0.05}
"""Share of the windows from each domain. The uses of streams weigh more than in the base's own mixture."""
GROUPS, ROWS = 14, 128
REPLY_TOKENS = 96
NOVEL_FORCED, NOVEL_FREE = (24, 96), 128
FREE_SHARE, FREE_PREFIX = 0.2, (24, 128)
"""Share of rows in which the base generates all text after a prefix, and range of the prefix in tokens."""

Tokens = NDArray[np.uint16]


@dataclass(frozen=True)
class Segment:
    """`forced` true tokens, then up to `free_tokens` of the base's own, until it says `end`."""

    forced: Tokens
    free_tokens: int
    end: int = -1


@dataclass(frozen=True)
class Marks:
    """Ids of the tokens that structure a chat."""

    begin: int
    assistant: int
    end: int

    @classmethod
    def of(cls, build: Path) -> Marks:
        encoder = Encoder((build / "tokenizer.model").read_bytes())
        begin, assistant, *_, end = encoder.encode((("assistant", ""),))
        return cls(begin, assistant, end)


def documents(stream: Tokens, marks: Marks) -> list[Tokens]:
    starts = np.flatnonzero(stream == marks.begin)
    return [np.array(document) for document in np.split(stream, starts)[1:]]


def replies(document: Tokens, marks: Marks) -> Iterator[Segment]:
    """Segments of a chat: the base generates every reply of the assistant's."""
    at = 0
    for turn in np.flatnonzero(document == marks.assistant).tolist():
        if turn >= at:
            yield Segment(document[at : turn + 1], REPLY_TOKENS, marks.end)
            ends = np.flatnonzero(document[turn:] == marks.end)
            at = turn + int(ends[0]) + 1 if len(ends) else len(document)


def plan(
    texts: list[Tokens], marks: Marks, rng: np.random.Generator, chat: bool, free: bool
) -> Iterator[Segment]:
    """Endless segments of a window, from documents at random.

    chat: replies are generated. free: all text after a prefix is generated.
    """
    while True:
        document = texts[int(rng.integers(len(texts)))]
        if free:
            at = int(rng.integers(*FREE_PREFIX))
            yield Segment(document[:at], CONTEXT)
        elif chat:
            yield from replies(document, marks)
        else:
            at = 0
            while at < len(document):
                forced = document[at : at + int(rng.integers(*NOVEL_FORCED))]
                yield Segment(forced, NOVEL_FREE)
                at += len(forced)


class Row:
    """A window that is being generated: it gives the next true token, or takes the base's."""

    def __init__(self, segments: Iterator[Segment]) -> None:
        self._segments = segments
        self._segment = Segment(np.zeros(0, np.uint16), 0)
        self._said = 0

    def next(self, own: int) -> tuple[int, bool]:
        """The next token, and true if it is `own`, the base's likeliest. Call it once per position."""
        forced, limit = len(self._segment.forced), len(self._segment.forced) + self._segment.free_tokens
        if self._said >= limit:
            self._segment, self._said = next(self._segments), 0
            return self.next(own)
        self._said += 1
        if self._said <= forced:
            return int(self._segment.forced[self._said - 1]), False
        if own == self._segment.end:
            self._said = limit
        return own, True


def continued(base: Frozen, plans: list[Iterator[Segment]], tokens: int) -> tuple[Tokens, NDArray[np.bool_]]:
    """(B, tokens) windows, and booleans (B, tokens): true where the token is the base's own."""
    rows = [Row(segments) for segments in plans]
    caches = base.caches(len(rows), tokens)
    windows = np.zeros((len(rows), tokens), dtype=np.uint16)
    own = np.zeros((len(rows), tokens), dtype=np.bool_)
    likeliest = [0] * len(rows)
    for at in range(tokens):
        for index, row in enumerate(rows):
            windows[index, at], own[index, at] = row.next(likeliest[index])
        ids = torch.from_numpy(windows[:, at].astype(np.int64))
        with torch.no_grad():
            likeliest = base.step(ids, at, caches).argmax(-1).tolist()
    return windows, own


def group_plans(
    texts: dict[str, list[Tokens]], marks: Marks, rng: np.random.Generator, rows: int
) -> list[Iterator[Segment]]:
    names = list(WANTED)
    drawn = rng.choice(len(names), size=rows, p=[WANTED[name] for name in names])
    seeds = rng.integers(1 << 62, size=rows)
    free = rng.random(rows) < FREE_SHARE
    return [
        plan(texts[names[d]], marks, np.random.default_rng(seed), names[d] != "novels", bool(let_go))
        for d, seed, let_go in zip(drawn, seeds, free, strict=True)
    ]


def write_group(base: Frozen, texts: dict[str, list[Tokens]], marks: Marks, path: Path, index: int) -> None:
    rng = np.random.default_rng([7, index])
    tokens = base.shape.max_position_embeddings
    windows, own = continued(base, group_plans(texts, marks, rng, ROWS), tokens)
    partial = path.with_suffix(".partial.npy")
    np.save(partial, np.stack([windows, own.astype(np.uint16)]))
    os.replace(partial, path)


def read_groups(build: Path) -> Tokens:
    """(2, n, T): windows, and 1 where a token is the base's own. Raises FileNotFoundError if none exists."""
    paths = sorted((build / "multi-stream" / FOLDER).glob("???.npy"))
    if not paths:
        raise FileNotFoundError(f"{build} has no continuations; python -m recipe.continuations makes them")
    return np.concatenate([np.load(path) for path in paths], axis=1)


def make(model: Path, build: Path, part: int, parts: int, groups: int) -> Iterator[dict[str, float]]:
    """Make the missing groups among every `parts`-th group, from `part` on. Yields a log entry for each."""
    folder = build / "multi-stream" / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    missing = [i for i in range(part, groups, parts) if not (folder / f"{i:03d}.npy").exists()]
    if not missing:
        return
    base, marks = Frozen(model_of_bundle(model), product_type()), Marks.of(build)
    texts = {name: documents(read_stream(build, name, "train"), marks) for name in WANTED}
    for index in missing:
        begun = time.monotonic()
        write_group(base, texts, marks, folder / f"{index:03d}.npy", index)
        yield {"group": index, "seconds": round(time.monotonic() - begun, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Let the base continue training text.")
    parser.add_argument("--model", type=Path, default=MODEL_FOLDER, help="a bundle of this recipe")
    parser.add_argument("--build", type=Path, default=BUILD)
    parser.add_argument("--groups", type=int, default=GROUPS, help=f"of {ROWS} windows")
    parser.add_argument("--part", type=int, default=0)
    parser.add_argument("--parts", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for line in make(arguments.model, arguments.build, arguments.part, arguments.parts, arguments.groups):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
