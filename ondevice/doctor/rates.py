"""Rates that bound a token's time: how fast flash is read, and how fast weights in DRAM are multiplied."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ondevice.doctor.check import Check
from ondevice.flash.cost_model import UNMEASURED, CostModel, device_costs, known_costs
from ondevice.records import dataclass
from ondevice.units import format_bytes, memory_rooms, usable_cores

if TYPE_CHECKING:
    from ondevice.bundle.reader import CheckedFile

MATRICES, ROWS, COLUMNS, BITS = 12, 4096, 4096, 4
"""Matrices that are multiplied in turns: 113 MB in all, more than the caches of most processors hold."""
MEMORY_SHARE = 4
"""Divisor of the free memory that gives what the matrices may take, where that is less."""
ROUNDS = 8
CACHED_ROWS, CACHED_COLUMNS, CACHED_TOKENS, CACHED_ROUNDS = 64, 256, 16, 10_000
"""A matrix and its tokens that fit into 32 KB, and products with them in one measurement, 20 to 60 ms."""
QUICK_PART = 10
"""Divisor of all products that gives how many count as undisturbed."""


@dataclass(frozen=True)
class MachineRates:
    """The measured rates of this machine.

    flash: the costs of random reads on one device. multiply_bytes_per_second: bytes of weights in DRAM that
    `threads` threads multiply by one token's activations in a second.
    """

    flash: CostModel
    multiply_bytes_per_second: float
    threads: int

    @property
    def flash_measured(self) -> str | None:
        """When flash was measured, as ISO 8601 in UTC; None if the rates are those of a typical device."""
        return None if self.flash is UNMEASURED else self.flash.measured


def machine_rates(threads: int, folder: Path, files: Sequence[CheckedFile] = ()) -> MachineRates:
    """The rates of this machine, with those of the device that `folder` lies on, or would lie on.

    files: a model's neuron files in that folder, which are read if the device hasn't been measured yet.
    Without files, a temporary file is written and read, which takes up to two seconds.
    """
    return MachineRates(_flash_costs(folder, files), multiply_rate(threads), threads)


def dram() -> Check:
    """Check how fast weights in DRAM are multiplied, which limits the tokens per second."""
    threads = usable_cores()
    rate = round(multiply_rate(threads))
    value = f"{format_bytes(rate)}/s of 4-bit weights are multiplied, {threads} threads"
    return Check("dram", "ok", value, figures={"multiply_bytes_per_second": rate, "threads": threads})


def multiply_rate(threads: int) -> float:
    """Bytes per second of 4-bit weights in DRAM that the kernels multiply by one token's activations.

    The quickest tenth of ROUNDS rounds through all matrices counts, since other programs use the machine too.
    """
    import numpy as np

    from ondevice.kernels import _native

    runner, rng = _native.Runner(threads), np.random.default_rng(1)
    codes = rng.integers(0, 256, (ROWS, COLUMNS * BITS // 8), dtype=np.uint8)
    scales = np.full((ROWS, COLUMNS // 64 * 2), 0x11, dtype=np.uint8)
    x, out = np.ones((1, COLUMNS), dtype=np.float32), np.empty((1, ROWS), dtype=np.float32)
    nbytes = codes.nbytes + 2 * scales.nbytes
    free_bytes = min(room.available_bytes for room in memory_rooms())
    count = max(1, min(MATRICES, free_bytes // MEMORY_SHARE // nbytes))
    matrices = [_native.Matrix(ROWS, COLUMNS, BITS) for _ in range(count)]
    for matrix in matrices:
        matrix.load_rows(runner, 0, codes, scales, scales)
    seconds = []
    for matrix in matrices * ROUNDS:
        begun = time.perf_counter()
        matrix.forward(runner, x, None, out)
        seconds.append(time.perf_counter() - begun)
    return nbytes / sorted(seconds)[len(seconds) // QUICK_PART]


def product_rate(threads: int) -> float:
    """Products of two numbers per second that the kernels compute on `threads` threads, from caches.

    The quickest of ROUNDS rounds counts.
    """
    from ondevice.kernels import _native

    runner, count = _native.Runner(threads), CACHED_ROWS * CACHED_COLUMNS * CACHED_TOKENS * CACHED_ROUNDS
    sizes = (CACHED_ROWS, CACHED_COLUMNS, CACHED_TOKENS, CACHED_ROUNDS)
    return threads * count / min(_native.seconds_in_cache(runner, *sizes) for _ in range(ROUNDS))


def _flash_costs(folder: Path, files: Sequence[CheckedFile]) -> CostModel:
    """Costs of the device that `folder` lies on: stored ones, or measured now; UNMEASURED if that isn't
    possible.
    """
    from ondevice.doctor.storage import existing, temporary_file

    if files:
        return device_costs(files)
    try:
        place = existing(folder)
        if (costs := known_costs(place)) is not None:
            return costs
        with temporary_file(place) as file:
            return device_costs([file])
    except OSError:
        return UNMEASURED
