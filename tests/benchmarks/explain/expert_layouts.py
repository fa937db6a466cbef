"""Time of one expert of Qwen3-30B-A3B's shape, 2048 wide with 768 neurons at 4 bits, in both layouts.

`neurons`: a run of neuron records, whose rows are gathered; `matrices`: a record of whole matrices in tiles.
Layouts take turns, expert by expert, over more experts than any cache holds, on one and on two threads, for
1 token and for 64. Prints of each what a tenth of the passes stay below, which other programs disturb least,
and the ratio. Random weights; nothing is read.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from ondevice.backends.base import Bytes, Float32
from ondevice.backends.cpu_neurons import native_form
from ondevice.bundle.layout import ExpertLayout, RecordLayout
from ondevice.bundle.matrix_layout import RowLayout, TiledMatrix
from ondevice.kernels import _native
from ondevice.model_config import FeedForwardSpec

HIDDEN, NEURONS = 2048, 768
EXPERTS = 48
"""Experts of each layout: 127 MB."""
FORM = native_form(FeedForwardSpec("silu"))


def random_bytes(nbytes: int, halves: list[tuple[int, int]]) -> Bytes:
    """(nbytes,) random codes, with small float16 values in the ranges `halves`."""
    rng, data = np.random.default_rng(0), _native.allocate(nbytes)
    data[:] = rng.integers(0, 256, nbytes, dtype=np.uint8)
    for start, stop in halves:
        data[start:stop] = (rng.random((stop - start) // 2) / 64).astype(np.float16).view(np.uint8)
    return data


def neuron_records() -> tuple[_native.FeedForward, Bytes]:
    """Neurons' shape, and all experts' records."""
    row = RowLayout(HIDDEN, 4)
    layout = RecordLayout(((row,), (row, row)))
    halves = [(half.start, half.stop) for half in layout.halves]
    record = random_bytes(layout.stride, halves)
    gate, up, down = layout.row_offsets
    native = _native.FeedForward(HIDDEN, row.stored, layout.stride, gate, up, down)
    data = _native.allocate(EXPERTS * NEURONS * layout.stride).reshape(EXPERTS * NEURONS, -1)
    data[:] = record
    return native, data.reshape(EXPERTS, -1)


def matrix_records() -> tuple[_native.Expert, Bytes]:
    """Experts' shape, and all their records."""
    wide = TiledMatrix(NEURONS, RowLayout(HIDDEN, 4))
    layout = ExpertLayout((wide, wide, TiledMatrix(HIDDEN, RowLayout(NEURONS, 4))))
    halves = [
        (half.start + half.step * at, half.stop + half.step * at)
        for half in layout.halves
        for at in range(half.times)
    ]
    gate, up, down = layout.places
    data = _native.allocate(EXPERTS * layout.stride).reshape(EXPERTS, -1)
    data[:] = random_bytes(layout.stride, halves)
    return _native.Expert(HIDDEN, NEURONS, gate, up, down), data


def measured(threads: int, tokens: int, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of every pass through an expert: of neurons, of matrices."""
    runner = _native.Runner(threads)
    neurons, records = neuron_records()
    expert, matrices = matrix_records()
    x = np.random.default_rng(1).standard_normal((tokens, HIDDEN)).astype(np.float32)
    out: Float32 = np.empty_like(x)
    found: tuple[list[float], list[float]] = ([], [])
    for at in range(rounds + 8):
        place = at % EXPERTS
        begun = time.perf_counter()
        neurons.forward_records(runner, x, records[place].ctypes.data, NEURONS, FORM, out)
        between = time.perf_counter()
        expert.forward(runner, x, matrices[place].ctypes.data, FORM, out)
        ended = time.perf_counter()
        if at >= 8:
            found[0].append(between - begun)
            found[1].append(ended - between)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=400, help="passes through each layout for one token")
    rounds = parser.parse_args().rounds
    print("threads  tokens  neurons, ms  matrices, ms  ratio")
    for threads in (1, 2):
        for tokens in (1, 64):
            neurons, matrices = measured(threads, tokens, rounds if tokens == 1 else rounds // 10)
            one, other = (1e3 * float(np.quantile(each, 0.1)) for each in (neurons, matrices))
            print(f"{threads:7}  {tokens:6}  {one:11.3f}  {other:12.3f}  {other / one:5.2f}")


if __name__ == "__main__":
    main()
