"""Streams from flash into the memory of MLX arrays against streams into memory of their own.

The neuron records of a bundle are streamed as the MLX backend streams them, a segment at a time, through the
same reader: into the ring's own slots, and into slots that lie in an MLX array. Rounds alternate; as many
bytes are read in each. Ends with one JSON line; exits 0 if the median ratio of rates is at least 0.95. Fails
if MLX's array doesn't hold what was read. On CUDA, where flash isn't read so, it says so and exits 0.

    python -m tests.benchmarks.explain.flash_into_mlx [--model DIR] [--rounds 15] [--mib 256]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np

from ondevice.backends.mlx import compute_type
from ondevice.backends.mlx_memory import on_cuda
from ondevice.backends.mlx_weights import RecordMemory
from ondevice.budget.mlx_memory import MlxMemory
from ondevice.bundle.layout import DATA_OFFSET
from ondevice.bundle.matrix_layout import RowLayout
from ondevice.bundle.reader import Bundle
from ondevice.config import RuntimeConfig
from ondevice.flash.read_ahead import Extent, ReadAhead
from ondevice.flash.reader import FlashReader
from tests.benchmarks.lib.measure import machine, spread
from tests.support.paths import ROOT

BAR = 0.95


def rate(ahead: ReadAhead, count: int) -> float:
    """Bytes per second of `count` extents."""
    started, nbytes = time.perf_counter(), 0
    for _ in range(count):
        nbytes += ahead.next().nbytes
        ahead.release()
    return nbytes / (time.perf_counter() - started)


def main() -> int:
    """Print the rates and the JSON line; 0 if the ratio reaches the bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "weights" / "small-relu")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--mib", type=int, default=256, help="read in each round")
    args = parser.parse_args()
    if on_cuda():
        print("on CUDA nothing is read into MLX's memory: there is nothing to compare")
        return 0
    bundle = Bundle.open(args.model)
    config, layout = bundle.config, bundle.neuron_layouts[0]
    shape = MlxMemory(config, bundle.quant, RuntimeConfig(), operand_bytes=compute_type().size).buffers
    files = [bundle.neuron_file(layer) for layer in range(config.num_layers)]
    extents = [
        Extent(file, DATA_OFFSET + first * layout.stride, count * layout.stride)
        for file in range(len(files))
        for first in range(0, config.intermediate_size, shape.neurons)
        for count in (min(shape.neurons, config.intermediate_size - first),)
    ]
    count = -(-(args.mib << 20) // extents[0].nbytes)
    memory, row = (
        RecordMemory(shape.slots * shape.slot_bytes),
        RowLayout(config.hidden_size, bundle.quant.bits),
    )
    rates: dict[str, list[float]] = {"mlx": [], "plain": []}
    with FlashReader(files, "auto") as reader:
        for number in range(args.rounds):
            for name in ("mlx", "plain") if number % 2 else ("plain", "mlx"):
                view = memory.view if name == "mlx" else None
                with ReadAhead(reader, extents, shape.slot_bytes, shape.slots, True, view) as ahead:
                    rates[name].append(rate(ahead, count))
        with ReadAhead(reader, extents, shape.slot_bytes, shape.slots, True, memory.view) as ahead:
            records = ahead.next().reshape(-1, layout.stride)
            found = memory.matrix(records, 0, row, compute_type()).arrays[0]
            read = reader.read(extents[0].file, extents[0].offset, extents[0].nbytes).reshape(records.shape)
            codes = np.ascontiguousarray(np.array(found)).view(np.uint8)
            assert (codes == read[:, : row.codes_bytes]).all(), "the array isn't what was read"
        io = reader.io
    ratios = [mlx / plain for mlx, plain in zip(rates["mlx"], rates["plain"], strict=True)]
    gigabytes = {name: [value / 1e9 for value in values] for name, values in rates.items()}
    print(
        f"{extents[0].nbytes / 2**20:.1f} MiB a piece, {io}: plain {spread(gigabytes['plain'])}, "
        f"mlx {spread(gigabytes['mlx'])} GB/s; ratio {spread(ratios, 3)}"
    )
    print(json.dumps({"io": io, "rates": rates, "ratio": statistics.median(ratios)} | machine()))
    return 0 if statistics.median(ratios) >= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
