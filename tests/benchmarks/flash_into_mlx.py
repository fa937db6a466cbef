"""Reads from flash into the memory of MLX arrays against reads into plain memory, and that none is copied.

The neuron records of a bundle are read, in random order and so many neighbours at a time, through the
engine's reader: into a numpy array of its own, and into the view of an MLX array. Rounds alternate. Ends with
one JSON line; fails if the array doesn't hold what was read into its view.

    python tests/benchmarks/flash_into_mlx.py [--model DIR] [--rounds 9] [--run 1 8 64]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import mlx.core as mx
import numpy as np
from measure import machine
from numpy.typing import NDArray

from ondevice.backends.mlx_weights import writable
from ondevice.bundle.reader import Bundle
from ondevice.flash.reader import FlashReader

ROOT = Path(__file__).resolve().parents[2]
BATCH_BYTES = 64 << 20


def rate(reader: FlashReader, ids: list[NDArray[np.int64]], out: NDArray[np.uint8]) -> float:
    """Bytes per second of reading records `ids[i]` of neuron file i into `out` (n, stride), over and over."""
    started, nbytes = time.perf_counter(), 0
    for file, wanted in enumerate(ids):
        reader.read_records(file, wanted, out[: len(wanted)])
        nbytes += len(wanted) * out.shape[1]
    return nbytes / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "weights" / "small-relu")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--run", type=int, nargs="+", default=[1, 8, 64], help="neighbouring records per read"
    )
    args = parser.parse_args()
    bundle = Bundle.open(args.model)
    layers, stride = bundle.config.num_layers, bundle.neuron_layout.stride
    files = [bundle.neuron_file(layer) for layer in range(layers)]
    neurons, rng = bundle.config.intermediate_size, np.random.default_rng(0)
    rows = min(neurons, BATCH_BYTES // stride)
    array, view = writable((rows, stride), mx.uint8)
    plain = np.zeros((rows, stride), dtype=np.uint8)
    found = {}
    with FlashReader(files, "auto", threads=16) as reader:
        for run in args.run:
            starts = [rng.permutation(neurons // run)[: rows // run] * run for _ in range(layers)]
            ids = [(first[:, None] + np.arange(run)).ravel().astype(np.int64) for first in starts]
            rates: dict[str, list[float]] = {"plain": [], "mlx": []}
            for _ in range(args.rounds):
                for name, out in (("plain", plain), ("mlx", view)):
                    rates[name].append(rate(reader, ids, out))
            count = len(ids[-1])
            assert np.array_equal(np.array(array[:count]), plain[:count]), "the array isn't what was read"
            ratios = [a / b for a, b in zip(rates["mlx"], rates["plain"], strict=True)]
            found[run * stride] = {
                "plain": statistics.median(rates["plain"]),
                "mlx": statistics.median(rates["mlx"]),
                "ratio": statistics.median(ratios),
                "low": min(ratios),
                "high": max(ratios),
            }
            it = found[run * stride]
            print(
                f"{run * stride / 1024:.1f} KiB: plain {it['plain'] / 1e9:.2f}, "
                f"mlx {it['mlx'] / 1e9:.2f} GB/s; "
                f"ratio {it['ratio']:.3f} ({it['low']:.3f} to {it['high']:.3f})"
            )
        io = reader.io
    print(json.dumps({"machine": machine(), "io": io, "reads": found}))


if __name__ == "__main__":
    main()
