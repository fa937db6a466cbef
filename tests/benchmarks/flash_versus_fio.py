"""Dense streaming against the best that fio gets from the same file: sequential direct reads.

Our side is `ExtentStream`, with slots as the memory plan has them, over 7B-shape records, every checksum
compared, and a consumer that does nothing. fio (libaio, O_DIRECT) reads 1 and 4 MiB at depths 1, 4 and 16.
Each fio run is paired with one of ours, first and second in turn; a pair's ratio is ours over fio's. Exit 0
only when the median ratio to each of fio's settings is at least 0.9.

    python tests/benchmarks/flash_versus_fio.py --workdir FOLDER [--gigabytes 1.5] [--rounds 5]
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
from pathlib import Path

import numpy as np
from measure import drop_caches, machine, note, spread, summary

from ondevice.bundle.reader import CheckedFile
from ondevice.errors import BackendUnavailableError
from ondevice.flash.prefetch import Extent, ExtentStream
from ondevice.flash.reader import DEFAULT_THREADS, FlashReader
from ondevice.kernels import _native

AT_LEAST = 0.9
HEADER_BYTES = 4096
PARTS = (2560, 4608)  # a q4 neuron record of the 7B shape
STRIDE = sum(PARTS)
SETTINGS = [(block, depth) for block in (1 << 20, 4 << 20) for depth in (1, 4, 16)]


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


def fio_gigabytes_per_second(path: Path, block: int, depth: int) -> float:
    """One pass of fio over the file."""
    command = ["fio", "--name=read", f"--filename={path}", "--readonly", "--rw=read", "--direct=1"]
    command += ["--ioengine=libaio", f"--bs={block}", f"--iodepth={depth}", "--output-format=json"]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    # fio puts notes before the JSON when it has any.
    report = json.loads(result.stdout[result.stdout.index("{") :])
    return float(report["jobs"][0]["read"]["bw_bytes"]) / 1e9


def stream_once(file: CheckedFile, extent_bytes: int, slots: int, threads: int) -> dict[str, float]:
    """One pass of an `ExtentStream` over the file by a consumer that does nothing."""
    records = (file.nbytes - HEADER_BYTES) // STRIDE
    whole = math.lcm(STRIDE, 4096) // STRIDE  # extents end on pages
    per_extent = max(extent_bytes // STRIDE // whole, 1) * whole
    extents = [
        Extent(0, HEADER_BYTES + first * STRIDE, min(per_extent, records - first) * STRIDE)
        for first in range(0, records, per_extent)
    ]
    with FlashReader([file], io="direct", threads=threads) as reader:
        start = time.perf_counter()
        with ExtentStream(reader, extents, per_extent * STRIDE, slots, cyclic=False) as stream:
            for _ in extents:
                stream.next()
                stream.release()
            seconds = time.perf_counter() - start
            stats = stream.stats
    gigabytes = stats.bytes_read / 1e9
    return {"rate": gigabytes / seconds, "cpu_seconds_per_gigabyte": stats.cpu_seconds / gigabytes}


def measure(file: CheckedFile, options: argparse.Namespace) -> dict[str, object]:
    """All interleaved pairs, and what they say."""
    pairs: dict[str, list[tuple[float, float]]] = {f"{b >> 20} MiB, depth {d}": [] for b, d in SETTINGS}
    cpu = []
    for round_number in range(options.rounds):
        for (block, depth), results in zip(SETTINGS, pairs.values(), strict=True):
            drop_caches()
            if round_number % 2 == 0:
                theirs = fio_gigabytes_per_second(file.path, block, depth)
            ours = stream_once(file, options.extent_bytes, options.slots, options.threads)
            if round_number % 2 == 1:
                theirs = fio_gigabytes_per_second(file.path, block, depth)
            cpu.append(ours["cpu_seconds_per_gigabyte"])
            results.append((theirs, ours["rate"]))
            setting = f"{block >> 20} MiB, depth {depth}"
            note(f"{round_number + 1}: fio, {setting}: {theirs:.2f} GB/s; ours {ours['rate']:.2f}")
    ratios = {name: [ours / theirs for theirs, ours in results] for name, results in pairs.items()}
    lowest = min(statistics.median(values) for values in ratios.values())
    for name, values in ratios.items():
        fio = spread([theirs for theirs, _ in pairs[name]])
        print(f"fio {name:16} {fio} GB/s; ours / fio {spread(values)}")
    ours_all = [ours for results in pairs.values() for _, ours in results]
    print(f"ours                 {spread(ours_all)} GB/s, {statistics.median(cpu):.3f} CPU seconds per GB")
    return {
        "fio_gigabytes_per_second": {n: summary([t for t, _ in results]) for n, results in pairs.items()},
        "ours_gigabytes_per_second": summary(ours_all),
        "cpu_seconds_per_gigabyte": summary(cpu),
        "ratios": {name: summary(values) for name, values in ratios.items()},
        "lowest_median_ratio": lowest,
        "at_least": AT_LEAST,
        "passed": lowest >= AT_LEAST,
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
            result = measure(file, options)
        except BackendUnavailableError as error:
            raise SystemExit(f"direct reads are needed: {error}") from error
    chosen = {"threads": options.threads, "extent_bytes": options.extent_bytes, "slots": options.slots}
    print(
        json.dumps(
            {"benchmark": "flash_versus_fio", **result, **chosen, "io": "direct", "machine": machine()}
        )
    )
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
