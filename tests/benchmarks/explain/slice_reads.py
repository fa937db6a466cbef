"""How fast a model's slices, and their low planes alone, come from flash, by the number of read-ahead slots.

Each round reads every layer once in every way, past the page cache, and nothing is multiplied. Prints GB/s,
medians of the rounds, as one JSON line.

    python -m tests.benchmarks.explain.slice_reads --model BUNDLE [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

from ondevice.bundle.layout import DATA_OFFSET, SliceLayout
from ondevice.bundle.reader import Bundle
from ondevice.flash.read_ahead import Extent, ReadAhead
from ondevice.flash.reader import FlashReader
from ondevice.units import PAGE_BYTES
from tests.benchmarks.lib.measure import machine

SLOTS = (8, 12, 16, 24, 32)


def extents(bundle: Bundle, whole: bool) -> list[Extent]:
    """Every slice, or its low plane, in the order in which a forward pass reads them."""
    schedule = []
    for layer, layout in enumerate(bundle.neuron_layouts):
        assert isinstance(layout, SliceLayout)
        behind = 0 if whole else layout.high_bytes
        for record in range(layout.num_records(bundle.config.widths[layer])):
            start = DATA_OFFSET + record * layout.stride + behind
            schedule.append(Extent(layer, start, layout.stride - behind))
    return schedule


def rate(reader: FlashReader, schedule: list[Extent], slots: int) -> float:
    """Bytes per second at which the extents come."""
    slot_bytes = max(extent.nbytes for extent in schedule) + 2 * PAGE_BYTES
    with ReadAhead(reader, schedule, slot_bytes, slots, cyclic=False) as ahead:
        begun = time.perf_counter()
        for _ in schedule:
            ahead.next()
            ahead.release()
        return sum(extent.nbytes for extent in schedule) / (time.perf_counter() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    bundle = Bundle.open(options.model)
    files = [bundle.neuron_file(layer) for layer in range(bundle.config.num_layers)]
    schedules = {"slices": extents(bundle, whole=True), "low planes": extents(bundle, whole=False)}
    rates: dict[str, list[float]] = {}
    with FlashReader(files) as reader:
        for _ in range(options.rounds):
            for name, schedule in schedules.items():
                for slots in SLOTS:
                    rates.setdefault(f"{name}, {slots} slots", []).append(rate(reader, schedule, slots) / 1e9)
    medians = {name: round(statistics.median(values), 2) for name, values in rates.items()}
    print(json.dumps({"benchmark": "slice_reads", "gb_per_second": medians, "machine": machine()}))


if __name__ == "__main__":
    main()
