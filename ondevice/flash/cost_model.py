"""Cost model of random reads on the device that holds a model: measured once, then stored with its date.

With `threads` reads at once, a read of s bytes takes the device a + c * s seconds: a per read, c per byte. So
reading through a gap of up to a / c bytes between two records costs less than a second read. The rate at a
record's size tells how many threads pay off and how much can be read ahead in a given time.

A device may be slower or faster than usual while it is measured. So `RateCheck` in `rate_check.py` compares
the reads of passes with stored costs, and marks costs that are wrong by a factor of DIFFERENT as doubted;
then the next load measures again.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from ondevice.errors import OndeviceError
from ondevice.flash.throughput import ReadRate, measure_records
from ondevice.records import dataclass

if TYPE_CHECKING:
    from ondevice.bundle.reader import CheckedFile

log = logging.getLogger(__name__)

THREADS = (16, 32, 48)
MIN_READ_BYTES, MAX_RUN_BYTES = 4 << 10, 64 << 10
BATCH_BYTES, SLICES = 3 << 20, 5
"""Bytes per batch, and batches per size and number of threads: about 200 MB, in under half a second."""
WORTH = 1.1
"""Speed-up above which more threads are used."""
KEPT, KEPT_DISTURBED = timedelta(days=30), timedelta(hours=1)
"""Time for which a cost model is trusted, normally and after a disturbed measurement."""
TOLERANCE = 0.33
"""Relative distance of a rate from the fitted line above which the measurement counts as disturbed."""
GAP_BYTES = range(4 << 10, 48 << 10)
"""Smallest and largest result of `gap_bytes`, whatever a disturbed measurement suggests."""
AGREED_READS = 16 << 10, THREADS[1]
"""Bytes and threads of the reads by which two measurements are compared."""
DIFFERENT = 2.0
"""Smallest factor between a rate and a stored one with which the stored one is wrong."""
VERSION = 3
MAX_STORE_BYTES = 1 << 20

Standing = Literal["measured", "doubted", "confirmed"]
"""How far costs are trusted.

`doubted` ones are measured again when they are next needed. `confirmed` ones were doubted, and a second
measurement agreed with the first: they are never doubted again."""


@dataclass(frozen=True)
class CostModel:
    """The cost of random reads on one device.

    measured: the time of the measurement, as ISO 8601 in UTC. rates: the measured rates; every
    `bytes_per_second` is known. device: the device's name in the store.
    """

    measured: str
    rates: tuple[ReadRate, ...]
    device: str = ""
    standing: Standing = "measured"

    def threads(self, nbytes: int) -> int:
        """The fewest threads with which reads of `nbytes` are about as fast (`WORTH`) as with the best
        number.
        """
        rates = {threads: self.bytes_per_second(nbytes, threads) for threads in self._threads}
        return min(threads for threads, rate in rates.items() if rate * WORTH >= max(rates.values()))

    def bytes_per_second(self, nbytes: int, threads: int) -> float:
        """Bytes per second with reads of `nbytes`, taken from a line fitted to the measured rates."""
        read, byte = self._line(threads)
        return nbytes / (read + byte * nbytes)

    @property
    def kept(self) -> timedelta:
        """How long the costs are trusted. Short if a rate is far from the fitted line, 0 if the costs are
        doubted.
        """
        if self.standing == "doubted":
            return timedelta(0)
        disturbed = any(
            rate.bytes_per_second
            and abs(self.bytes_per_second(rate.read_bytes, rate.threads) / rate.bytes_per_second - 1)
            > TOLERANCE
            for rate in self.rates
        )
        return KEPT_DISTURBED if disturbed else KEPT

    @property
    def is_trusted(self) -> bool:
        """Whether the costs are new enough to be used."""
        return _age(self) < self.kept

    def gap_bytes(self, threads: int) -> int:
        """Largest gap between two records, in bytes, that costs less to read through than a second read."""
        read, byte = self._line(threads)
        gap = int(min(read / byte, GAP_BYTES.stop))
        return max(GAP_BYTES.start, min(gap, GAP_BYTES.stop))

    def agrees(self, other: CostModel) -> bool:
        """Whether both give about the same rate: less than DIFFERENT times the other's."""
        first, second = (costs.bytes_per_second(*AGREED_READS) for costs in (self, other))
        return max(first, second) < DIFFERENT * min(first, second)

    @property
    def _threads(self) -> list[int]:
        return sorted({rate.threads for rate in self.rates})

    def _line(self, threads: int) -> tuple[float, float]:
        """Seconds per read and seconds per byte, both above zero, fitted by least squares of
        relative errors.
        """
        near = min(self._threads, key=lambda count: abs(count - threads))
        points = [
            (rate.read_bytes, rate.bytes_per_second)
            for rate in self.rates
            if rate.threads == near and rate.bytes_per_second
        ]
        sizes, rates = (np.array(column, dtype=np.float64) for column in zip(*points, strict=True))
        # size / rate = read + byte * size, divided by its left side.
        terms = np.stack([rates / sizes, rates], axis=1)
        (read, byte), *_ = np.linalg.lstsq(terms, np.ones(len(sizes)), rcond=None)
        if read <= 0 or byte <= 0:
            # Noise, or a single point: the time is attributed to bytes alone, or to reads alone.
            return (1e-9, float(np.median(1 / rates))) if read <= 0 else (float(read), 1e-15)
        return float(read), float(byte)


# The design's machine: 4 KiB 0.35, 8 KiB 0.55, 16 KiB 0.85, 32 KiB 1.05 GB/s on 32 threads.
UNMEASURED = CostModel(
    "1970-01-01T00:00:00+00:00",
    tuple(
        ReadRate(size, 32, rate)
        for size, rate in ((4 << 10, 0.35e9), (8 << 10, 0.55e9), (16 << 10, 0.85e9), (32 << 10, 1.05e9))
    ),
)
"""Costs of a typical device, used when files are too small to measure or measuring fails."""
_warned: set[str] = set()
"""Devices about which this process has logged a warning."""


def device_costs(files: Sequence[CheckedFile], store: Path | None = None) -> CostModel:
    """The cost model of the device that holds `files`: the stored one, or one measured in half a second.

    files: files whose records all have the same size. store: a JSON file with the costs of all devices, by
    default in the user's cache folder. An unreadable store is ignored. A device that can't be measured gets
    `UNMEASURED`, with one warning.
    """
    store = store or _default_store()
    try:
        device = _device(Path(files[0].path))
    except OSError as error:
        # The file is gone; its reader reports that.
        log.info("no cost model: %s", error)
        return UNMEASURED
    known = _read_store(store)
    before = known.get(device)
    if before is not None and before.is_trusted:
        return before
    record = sum(files[0].crc_units)
    least = -(-MIN_READ_BYTES // record)
    runs = [least << double for double in range(8) if (least << double) * record <= MAX_RUN_BYTES] or [1]
    try:
        rates = measure_records(files, THREADS, runs, BATCH_BYTES // record, SLICES)
    except OndeviceError as error:
        if device not in _warned:
            _warned.add(device)
            log.warning(
                "the read speed of %s couldn't be measured, so reads are planned for a typical one: %s",
                device,
                error.for_command_line,
            )
        return UNMEASURED
    if len({rate.read_bytes for rate in rates}) < 2:
        return UNMEASURED
    measured = CostModel(datetime.now(UTC).isoformat(timespec="seconds"), rates, device)
    if before is not None and before.standing == "doubted" and before.agrees(measured):
        measured = replace(measured, standing="confirmed")
    log.info("measured %s: %s", device, measured)
    _write_store(store, known | {device: measured})
    return measured


def known_costs(path: Path) -> CostModel | None:
    """The stored costs of the device that holds `path`; None if there are none, or if they are too old.

    Raises OSError if `path` doesn't exist.
    """
    costs = _read_store(_default_store()).get(_device(path))
    return costs if costs is not None and costs.is_trusted else None


def doubt(costs: CostModel, store: Path | None = None) -> None:
    """Mark a device's costs as doubted, so that they are measured again when next needed.

    Does nothing if they have been measured since. costs: as `device_costs` returned them. store: as in
    `device_costs`.
    """
    store = store or _default_store()
    known = _read_store(store)
    if known.get(costs.device) == costs:
        _write_store(store, known | {costs.device: replace(costs, standing="doubted")})


def _default_store() -> Path:
    import platformdirs

    return platformdirs.user_cache_path("ondevice", appauthor=False) / "flash.json"


def _device(path: Path) -> str:
    """The mount point of the file system that holds `path`."""
    path = path.resolve()
    device = path.stat().st_dev
    while path != path.parent and path.parent.stat().st_dev == device:
        path = path.parent
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _age(costs: CostModel) -> timedelta:
    """Time since the measurement. A date in the future counts as expired."""
    age = datetime.now(UTC) - datetime.fromisoformat(costs.measured)
    return age if age >= timedelta(0) else KEPT


def _read_store(store: Path) -> dict[str, CostModel]:
    try:
        with store.open("rb") as file:
            content = json.loads(file.read(MAX_STORE_BYTES))
        if content["version"] != VERSION:
            return {}
        return {str(device): _parse(str(device), entry) for device, entry in content["devices"].items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        log.info("%s isn't used: %s", store, error)
        return {}


def _parse(device: str, entry: dict[str, Any]) -> CostModel:
    """The costs in a device's entry of the store.

    Raises ValueError, KeyError or TypeError if `_write_store` can't have written the entry.
    """
    rates = tuple(
        ReadRate(int(rate["read_bytes"]), int(rate["threads"]), float(rate["bytes_per_second"]))
        for rate in entry["rates"]
    )
    sane = all(
        0 < rate.read_bytes <= 1 << 30
        and rate.threads in THREADS
        and 1e3 < (rate.bytes_per_second or 0.0) < 1e12
        for rate in rates
    )
    measured = datetime.fromisoformat(str(entry["measured"]))
    standing: Standing = entry["standing"]
    if not sane or not rates or measured.tzinfo is None or standing not in get_args(Standing):
        raise ValueError(f"no cost model: {entry}")
    return CostModel(measured.isoformat(), rates, device, standing)


def _write_store(store: Path, known: dict[str, CostModel]) -> None:
    entries = {
        device: {
            "measured": costs.measured,
            "standing": costs.standing,
            "rates": [asdict(rate) for rate in costs.rates],
        }
        for device, costs in known.items()
    }
    content = {"version": VERSION, "devices": entries}
    part = store.with_name(f"{store.name}.{os.getpid()}")
    try:
        store.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(content, indent=1))
        part.replace(store)
    except OSError as error:
        log.info("%s can't be written: %s", store, error)
        with suppress(OSError):
            part.unlink()
