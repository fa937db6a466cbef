"""Products of one matrix in several formats of rows, round after round in turns: how fast each is.

Random codes, scales of one size; about gpt-oss-20b's gates and ups of four experts by default, which no cache
holds. Formats take turns within every round, and what counts is processor time, so that a busy machine
changes little. Ends with one JSON line: of every number of tokens and format the median milliseconds, its
ratio to 4 bits in groups of 64, and the gigabytes of weights a second.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import numpy as np
from numpy.typing import NDArray

from ondevice.bundle.matrix_layout import RowLayout, TiledMatrix
from ondevice.config import MXFP4, RowFormat
from ondevice.converters.checkpoints.gguf_codecs import TILE_FORMATS
from ondevice.kernels import _native

ROWS, COLS = 4 * 2 * 2880, 2816
FORMATS = {
    "q4": RowFormat(4),
    "q4 in groups of 32": RowFormat(4, 32),
    "q4 in groups of 32, implied": RowFormat(4, 32, "symmetric"),
    "MXFP4": MXFP4,
    "q6": RowFormat(6),
    "q8": RowFormat(8),
    **TILE_FORMATS,
}


def random_tiles(rows: int, cols: int, stored: RowFormat) -> NDArray[np.uint8]:
    """Tiles (bytes,) of random codes and integers, whose float16 scales are of one size."""
    matrix = TiledMatrix(rows, RowLayout(cols, *stored))
    tiles = np.frombuffer(np.random.default_rng(0).bytes(matrix.rows_bytes), np.uint8).copy()
    start, stop = matrix.halves[:2]
    blocks = tiles.reshape(-1, matrix.block_bytes)
    blocks[:, start:stop] = 120
    if not stored.mxfp4:
        blocks[:, start:stop] = np.full((stop - start) // 2, 0.01, np.float16).view(np.uint8)
    return tiles


def milliseconds(runner: _native.Runner, rows: int, cols: int, tokens: int, rounds: int) -> dict[str, float]:
    """Median processor time of a product by format."""
    matrices = {name: random_tiles(rows, cols, stored) for name, stored in FORMATS.items()}
    x = np.random.default_rng(1).standard_normal((tokens, cols), dtype=np.float32)
    out = np.empty((tokens, rows), dtype=np.float32)
    times: dict[str, list[float]] = {name: [] for name in FORMATS}
    for turn in range(rounds + 1):
        for name, tiles in matrices.items():
            started = time.process_time()
            _native.testing.multiply_tiles(runner, FORMATS[name], tiles, x, None, out)
            if turn:  # the first one allocates
                times[name].append(1e3 * (time.process_time() - started))
    return {name: statistics.median(found) for name, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--cols", type=int, default=COLS)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 32])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--target", default="auto")
    parser.add_argument("--rounds", type=int, default=21)
    args = parser.parse_args()
    runner = _native.Runner(args.threads, args.target)
    found: dict[int, dict[str, dict[str, float]]] = {}
    for tokens in args.tokens:
        times = milliseconds(runner, args.rows, args.cols, tokens, args.rounds)
        found[tokens] = {}
        for name, each in times.items():
            nbytes = TiledMatrix(args.rows, RowLayout(args.cols, *FORMATS[name])).nbytes
            speed, ratio = nbytes / each / 1e6, each / times["q4"]
            found[tokens][name] = {"ms": round(each, 3), "ratio": round(ratio, 3), "gb_s": round(speed, 2)}
            print(
                f"{tokens:3} tokens  {name:28} {each:8.3f} ms  {ratio:.2f} of q4  {speed:6.2f} GB/s",
                flush=True,
            )
    print(json.dumps({"target": runner.target, "threads": args.threads, "tokens": found}))


if __name__ == "__main__":
    main()
