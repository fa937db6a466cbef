"""Reading flash against the best that fio gets from the same file: direct reads, in order and scattered.

In order: `ReadAhead`, with slots as the memory plan has them, over 7B-shape records, every checksum
compared, and a consumer that does nothing. fio (libaio, O_DIRECT) reads 1 and 4 MiB at depths 1, 4 and 16.

Scattered: `RecordBatch`, two batches of random records under way as in a pass over a model, every checksum
compared and every record in its slot, 32 reads at once (through io_uring where the system has it). fio
reads blocks of the records' size at random places, with 32 threads (psync) and at a depth of 32 (libaio).

Each fio run is paired with one of ours, first and second in turn; a pair's ratio is ours over fio's. Exit 0
only when the median ratio to each of fio's settings is at least 0.9 in order and 0.85 scattered.

    python -m tests.benchmarks.compare.flash_versus_fio --workdir FOLDER [--gigabytes 1.5] [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from ondevice.bundle.reader import CheckedFile
from ondevice.errors import BackendUnavailableError
from ondevice.flash.read_ahead import Extent, ReadAhead
from ondevice.flash.reader import DEFAULT_THREADS, FlashReader
from ondevice.kernels import _native
from ondevice.sparsity.fetch import BATCHES
from tests.benchmarks.lib.measure import drop_caches, machine, note, spread, summary

AT_LEAST = {"in order": 0.9, "scattered": 0.85}
HEADER_BYTES = 4096
PARTS = (2560, 4608)  # a q4 neuron record of the 7B shape
STRIDE = sum(PARTS)
SETTINGS = [(block, depth) for block in (1 << 20, 4 << 20) for depth in (1, 4, 16)]
DEPTH = 32
BLOCKS = (8 << 10, 12 << 10, 16 << 10, 32 << 10)
"""Sizes of scattered records."""
ENGINES = {
    "psync, 32 threads": ["--ioengine=psync", f"--numjobs={DEPTH}", "--thread"],
    "libaio, depth 32": ["--ioengine=libaio", f"--iodepth={DEPTH}"],
}
BATCH_RECORDS = 512
SCATTERED_SECONDS = 2
WARM_UP_BATCHES = 4

Pairs = dict[str, list[tuple[float, float]]]
"""By setting, what fio and we gave in GB/s."""


def make_file(path: Path, nbytes: int) -> CheckedFile:
    """Random records behind a page of header, with their checksums."""
    records = nbytes // STRIDE
    per_chunk = 1 << 13
    generator = np.random.default_rng(1)
    crcs = []
    with path.open("wb") as file:
        file.write(bytes(HEADER_BYTES))
        for first in range(0, records, per_chunk):
            chunk = generator.integers(0, 256, min(per_chunk, records - first) * STRIDE, dtype=np.uint8)
            crcs.append(_native.crc32c(chunk, PARTS))
            chunk.tofile(file)
    return CheckedFile(path, HEADER_BYTES + records * STRIDE, HEADER_BYTES, PARTS, np.concatenate(crcs))


def in_blocks(file: CheckedFile, block: int) -> CheckedFile:
    """The same file as records of `block` bytes; what is left over at its end belongs to none."""
    data = np.memmap(file.path, np.uint8, "r", HEADER_BYTES)
    step = max(1, (64 << 20) // block) * block
    crcs = [_native.crc32c(np.array(data[at : at + step]), (block,)) for at in range(0, len(data), step)]
    return replace(file, crc_units=(block,), crcs=np.concatenate(crcs))


def fio(path: Path, arguments: list[str]) -> float:
    """GB/s of one run of fio."""
    command = ["fio", "--name=read", f"--filename={path}", "--readonly", "--direct=1", "--output-format=json"]
    result = subprocess.run(
        [*command, "--group_reporting", *arguments], check=True, capture_output=True, text=True
    )
    # fio puts notes before the JSON when it has any.
    report = json.loads(result.stdout[result.stdout.index("{") :])
    return float(report["jobs"][0]["read"]["bw_bytes"]) / 1e9


def fio_in_order(path: Path, block: int, depth: int) -> float:
    """One pass of fio over the file."""
    return fio(path, ["--rw=read", "--ioengine=libaio", f"--bs={block}", f"--iodepth={depth}"])


def fio_scattered(path: Path, block: int, engine: str) -> float:
    """Random blocks of the file for SCATTERED_SECONDS."""
    arguments = ["--rw=randread", "--norandommap", f"--bs={block}", f"--offset={HEADER_BYTES}"]
    return fio(path, [*arguments, "--time_based", f"--runtime={SCATTERED_SECONDS}", *ENGINES[engine]])


def records_scattered(file: CheckedFile, seed: int) -> float:
    """GB/s of batches of random records for SCATTERED_SECONDS, once every thread is busy."""
    (block,) = file.crc_units
    records = (file.nbytes - HEADER_BYTES) // block
    random = np.random.default_rng(seed)
    slots = _native.allocate(BATCHES * BATCH_RECORDS * block)
    targets = slots.ctypes.data + np.arange(BATCHES * BATCH_RECORDS, dtype=np.uint64) * np.uint64(block)
    with FlashReader([file], io="direct", threads=DEPTH, ring=True) as reader:
        batches = [_native.RecordBatch(reader.native, urgent=True) for _ in range(BATCHES)]

        def start(index: int) -> None:
            ids = np.sort(random.choice(records, BATCH_RECORDS, replace=False)).astype(np.int32)
            own = targets[index * BATCH_RECORDS :][:BATCH_RECORDS]
            # Neighbours are reads of their own, so that all have the size of fio's.
            batches[index].start(0, 0, 1, ids, own, gap_bytes=-1)

        for index in range(BATCHES):
            start(index)
        done, started = 0, time.perf_counter()
        while done <= WARM_UP_BATCHES or time.perf_counter() - started < SCATTERED_SECONDS:
            if done == WARM_UP_BATCHES:
                started = time.perf_counter()
            batches[done % BATCHES].finish()
            start(done % BATCHES)
            done += 1
        seconds = time.perf_counter() - started
        for batch in batches:
            batch.close()
    return (done - WARM_UP_BATCHES) * BATCH_RECORDS * block / seconds / 1e9


def stream_once(file: CheckedFile, extent_bytes: int, slots: int, threads: int) -> dict[str, float]:
    """One pass of an `ReadAhead` over the file by a consumer that does nothing."""
    records = (file.nbytes - HEADER_BYTES) // STRIDE
    whole = math.lcm(STRIDE, 4096) // STRIDE  # extents end on pages
    per_extent = max(extent_bytes // STRIDE // whole, 1) * whole
    extents = [
        Extent(0, HEADER_BYTES + first * STRIDE, min(per_extent, records - first) * STRIDE)
        for first in range(0, records, per_extent)
    ]
    with FlashReader([file], io="direct", threads=threads) as reader:
        start = time.perf_counter()
        with ReadAhead(reader, extents, per_extent * STRIDE, slots, cyclic=False) as ahead:
            for _ in extents:
                ahead.next()
                ahead.release()
            seconds = time.perf_counter() - start
            stats = ahead.stats
    gigabytes = stats.bytes_read / 1e9
    return {"rate": gigabytes / seconds, "cpu_seconds_per_gigabyte": stats.cpu_seconds / gigabytes}


def paired(
    round_number: int, pairs: Pairs, name: str, theirs: Callable[[], float], ours: Callable[[], float]
) -> None:
    """One run of each, which of them first by the round's number."""
    drop_caches()
    first, second = (theirs, ours) if round_number % 2 == 0 else (ours, theirs)
    rates = {first: first(), second: second()}
    pairs.setdefault(name, []).append((rates[theirs], rates[ours]))
    note(f"{round_number + 1}: {name}: fio {rates[theirs]:.2f} GB/s; ours {rates[ours]:.2f}")


def measure_in_order(file: CheckedFile, options: argparse.Namespace) -> dict[str, object]:
    """All interleaved pairs of reading in order, and what they say."""
    pairs: Pairs = {}
    cpu: list[float] = []

    def ours() -> float:
        found = stream_once(file, options.extent_bytes, options.slots, options.threads)
        cpu.append(found["cpu_seconds_per_gigabyte"])
        return found["rate"]

    for round_number in range(options.rounds):
        for block, depth in SETTINGS:
            name = f"{block >> 20} MiB, depth {depth}"
            paired(round_number, pairs, name, partial(fio_in_order, file.path, block, depth), ours)
    print(f"{statistics.median(cpu):.3f} CPU seconds per GB in order")
    return {**judged(pairs, "in order"), "cpu_seconds_per_gigabyte": summary(cpu)}


def measure_scattered(file: CheckedFile, rounds: int) -> dict[str, object]:
    """All interleaved pairs of reading random records, and what they say."""
    pairs: Pairs = {}
    for block in BLOCKS:
        records = in_blocks(file, block)
        for round_number in range(rounds):
            for engine in ENGINES:
                paired(
                    round_number,
                    pairs,
                    f"{block >> 10} KiB, {engine}",
                    partial(fio_scattered, file.path, block, engine),
                    partial(records_scattered, records, round_number),
                )
    return judged(pairs, "scattered")


def judged(pairs: Pairs, how: str) -> dict[str, object]:
    """Medians and spreads, printed, and whether they do."""
    ratios = {name: [ours / theirs for theirs, ours in results] for name, results in pairs.items()}
    for name, results in pairs.items():
        theirs, ours = (spread([pair[side] for pair in results]) for side in (0, 1))
        print(f"{name:26} fio {theirs} GB/s; ours {ours}; ours / fio {spread(ratios[name])}")
    lowest = min(statistics.median(values) for values in ratios.values())
    return {
        "fio_gigabytes_per_second": {n: summary([t for t, _ in results]) for n, results in pairs.items()},
        "ours_gigabytes_per_second": {n: summary([o for _, o in results]) for n, results in pairs.items()},
        "ratios": {name: summary(values) for name, values in ratios.items()},
        "lowest_median_ratio": lowest,
        "at_least": AT_LEAST[how],
        "passed": lowest >= AT_LEAST[how],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workdir", type=Path, required=True, help="folder on the storage to measure")
    parser.add_argument("--gigabytes", type=float, default=1.5, help="size of the file")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=DEFAULT_THREADS)
    parser.add_argument("--extent-bytes", type=int, default=2 << 20)
    parser.add_argument("--slots", type=int, default=8)
    options = parser.parse_args()
    if shutil.which("fio") is None:
        raise SystemExit("this benchmark needs fio (Debian package fio)")
    options.workdir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.workdir) as folder:
        note(f"writing {options.gigabytes} GB")
        file = make_file(Path(folder) / "records.bin", int(options.gigabytes * 1e9))
        try:
            results = {
                "in_order": measure_in_order(file, options),
                "scattered": measure_scattered(file, options.rounds),
            }
        except BackendUnavailableError as error:
            raise SystemExit(f"direct reads are needed: {error}") from error
    passed = all(result["passed"] for result in results.values())
    chosen = {"threads": options.threads, "extent_bytes": options.extent_bytes, "slots": options.slots}
    outcome = {"benchmark": "flash_versus_fio", **results, "passed": passed, **chosen, "io": "direct"}
    print(json.dumps({**outcome, "machine": machine()}))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
