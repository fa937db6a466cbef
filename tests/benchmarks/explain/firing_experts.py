"""Time of one expert that is stored neuron by neuron, by the share of its neurons that fire for a token.

Qwen3-30B-A3B's shape, 2048 wide with 768 neurons at 4 bits, random weights, on one thread. A threshold sets
how many fire. Beside it stands an activation without zeros, which multiplies every neuron whole. All take
turns, over more experts than any cache holds. Prints what a fifth of the passes stay below, relative to the
latter. Nothing is read.

    python -m tests.benchmarks.explain.firing_experts [--rounds 40]
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from ondevice.backends.base import Bytes, Float32
from ondevice.backends.cpu_neurons import native_form
from ondevice.bundle.layout import RecordLayout
from ondevice.bundle.matrix_layout import RowLayout
from ondevice.kernels import _native
from ondevice.model_config import FeedForwardSpec

HIDDEN, NEURONS = 2048, 768
EXPERTS = 48
"""127 MB."""
SHARES = (0.02, 0.05, 0.1, 0.2, 0.5)
TOKENS = (1, 4, 16, 64)
ROW = RowLayout(HIDDEN, 4)
RECORD = RecordLayout(((ROW,), (ROW, ROW)))


def random_records(rng: np.random.Generator) -> Bytes:
    """(EXPERTS * NEURONS, stride) records whose weights have a mean of zero."""
    records = _native.allocate(EXPERTS * NEURONS * RECORD.stride).reshape(EXPERTS * NEURONS, -1)
    records[:] = rng.integers(0, 256, records.shape, dtype=np.uint8)
    for half in RECORD.halves:
        shape = len(records), (half.stop - half.start) // 2
        records[:, half.start : half.stop] = (rng.normal(0, 1 / 64, shape)).astype(np.float16).view(np.uint8)
    return records


def gates(runner: _native.Runner, records: Bytes, x: Float32) -> Float32:
    """(T, NEURONS) of the first expert."""
    matrix, at = _native.Matrix(NEURONS, HIDDEN, ROW.stored), RECORD.row_offsets[0]
    parts = np.split(
        records[:NEURONS, at : at + ROW.nbytes], [ROW.codes_bytes, ROW.nbytes - ROW.biases_bytes], 1
    )
    matrix.load_rows(runner, 0, *(np.ascontiguousarray(part) for part in parts))
    out = np.empty((len(x), NEURONS), np.float32)
    matrix.forward(runner, x, None, out)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    rng, runner = np.random.default_rng(0), _native.Runner(1)
    records = random_records(rng)
    gate, up, down = RECORD.row_offsets
    layer = _native.FeedForward(HIDDEN, ROW.stored, RECORD.stride, gate, up, down)
    print("tokens  all, ms  " + "  ".join(f"{share:5.0%}" for share in SHARES))
    for tokens in TOKENS:
        x = rng.standard_normal((tokens, HIDDEN)).astype(np.float32)
        # At a half it is zero but for chance.
        limits = np.maximum(0, np.quantile(gates(runner, records, x), [1 - share for share in SHARES]))
        forms = [native_form(FeedForwardSpec("silu"))]
        forms += [native_form(FeedForwardSpec("fatrelu", threshold=float(np.float32(it)))) for it in limits]
        times, out = np.zeros((rounds, len(forms))), np.empty_like(x)
        for turn, place in np.ndindex(times.shape):
            address = records[turn % EXPERTS * NEURONS :].ctypes.data
            begun = time.perf_counter()
            layer.forward_records(runner, x, address, NEURONS, forms[place], out)
            times[turn, place] = time.perf_counter() - begun
        least = np.quantile(times, 0.2, axis=0)
        ratios = "  ".join(f"{it:5.2f}" for it in least[1:] / least[0])
        print(f"{tokens:6}  {1e3 * least[0]:7.3f}  {ratios}")


if __name__ == "__main__":
    main()
