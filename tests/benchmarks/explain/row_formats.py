"""Products of one matrix in several formats of rows, round after round in turns: how fast each is.

Random codes, scales of one size; gpt-oss-20b's gates and ups of four experts by default, which no cache
holds. Formats take turns within every round, and what counts is processor time, so that a busy machine
changes little. Ends with one JSON line: of every number of tokens and format the median milliseconds, and its
ratio to 4 bits in groups of 64.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import numpy as np

from ondevice.bundle.layout import RowLayout
from ondevice.config import MXFP4, RowFormat
from ondevice.kernels import _native

ROWS, COLS = 4 * 2 * 2880, 2880
FORMATS = {
    "q4": RowFormat(4),
    "q4 in groups of 32": RowFormat(4, 32),
    "q4 in groups of 32, implied": RowFormat(4, 32, True),
    "MXFP4": MXFP4,
}


def random_matrix(runner: _native.Runner, rows: int, cols: int, stored: RowFormat) -> _native.Matrix:
    layout, rng = RowLayout(cols, *stored), np.random.default_rng(0)
    matrix, step = _native.Matrix(rows, cols, stored), 4096
    for row0 in range(0, rows, step):
        count = min(step, rows - row0)
        codes = rng.integers(0, 256, (count, layout.codes_bytes), np.uint8)
        scales = np.full((count, layout.groups), 120 if stored.mxfp4 else 0.01, layout.scale_type)
        matrix.load_rows(runner, row0, codes, scales.view(np.uint8), scales.view(np.uint8))
    return matrix


def milliseconds(runner: _native.Runner, rows: int, cols: int, tokens: int, rounds: int) -> dict[str, float]:
    """Median processor time of a product by format."""
    matrices = {name: random_matrix(runner, rows, cols, stored) for name, stored in FORMATS.items()}
    x = np.random.default_rng(1).standard_normal((tokens, cols), dtype=np.float32)
    out = np.empty((tokens, rows), dtype=np.float32)
    times: dict[str, list[float]] = {name: [] for name in FORMATS}
    for turn in range(rounds + 1):
        for name, matrix in matrices.items():
            started = time.process_time()
            matrix.forward(runner, x, None, out)
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
    found = {}
    for tokens in args.tokens:
        times = milliseconds(runner, args.rows, args.cols, tokens, args.rounds)
        found[tokens] = {
            name: {"ms": round(each, 3), "ratio": round(each / times["q4"], 3)}
            for name, each in times.items()
        }
        for name, each in times.items():
            print(f"{tokens:3} tokens  {name:28} {each:8.3f} ms  {each / times['q4']:.2f} of q4", flush=True)
    print(json.dumps({"target": runner.target, "threads": args.threads, "tokens": found}))


if __name__ == "__main__":
    main()
