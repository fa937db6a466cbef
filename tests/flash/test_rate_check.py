"""Reads of passes against stored costs: which passes count, which rates are doubted, and what comes of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import platformdirs
import pytest

import ondevice
from ondevice.flash import cost_model, rate_check
from ondevice.flash.cost_model import UNMEASURED, CostModel
from ondevice.flash.rate_check import BUSY_READS, CHECKED_BYTES, CHECKED_PASSES, RateCheck
from ondevice.flash.reader import FlashReader, FlashStats
from ondevice.flash.throughput import ReadRate
from ondevice.runtime.models import shipped_folder

SHIPPED = shipped_folder() / "small-relu"
LAYERS, THREADS, READ = 4, 32, 16 << 10
COSTS = CostModel(
    "2026-11-28T00:00:00+00:00",
    tuple(ReadRate(size, THREADS, size / (1e-5 + 1e-9 * size)) for size in (4 << 10, READ, 64 << 10)),
    "/disk",
)
BUSY = BUSY_READS * THREADS * LAYERS


class Device:
    """A reader whose reads come at given rates."""

    threads = THREADS

    def __init__(self) -> None:
        self.stats = FlashStats(0, 0.0, 0.0, 0)

    def read(self, reads: int, rate: float) -> None:
        was, nbytes = self.stats, reads * READ
        self.stats = FlashStats(
            was.bytes_read + nbytes, was.read_seconds + nbytes / rate, 0.0, was.reads + reads
        )


@pytest.fixture
def doubted(monkeypatch: pytest.MonkeyPatch) -> list[CostModel]:
    found: list[CostModel] = []
    monkeypatch.setattr(rate_check, "doubt", found.append)
    return found


def check_of(device: Device, costs: CostModel = COSTS) -> RateCheck:
    return RateCheck(cast(FlashReader, device), costs, LAYERS)


def passes(device: Device, check: RateCheck, times: float, count: int, reads: int = BUSY) -> None:
    for _ in range(count):
        device.read(reads, times * COSTS.bytes_per_second(READ, THREADS))
        check.end_pass()


ENOUGH = max(CHECKED_PASSES, -(-CHECKED_BYTES // (BUSY * READ)))


@pytest.mark.parametrize(
    ("times", "wrong"), [(0.45, True), (0.55, False), (1.0, False), (1.9, False), (2.1, True), (20.0, True)]
)
def test_rates_twice_or_half_the_stored_ones_are_doubted_once(
    times: float, wrong: bool, doubted: list[CostModel]
) -> None:
    check = check_of(device := Device())
    passes(device, check, times, ENOUGH - 1)
    assert not check.judged
    passes(device, check, times, 3 * ENOUGH)
    assert check.judged
    assert doubted == ([COSTS] if wrong else [])


def test_a_few_slow_passes_and_passes_that_read_little_count_for_nothing(doubted: list[CostModel]) -> None:
    check = check_of(device := Device())
    passes(device, check, 0.1, 100 * ENOUGH, reads=BUSY - 1)
    passes(device, check, 1.0, 5, reads=0)
    assert not check.judged
    passes(device, check, 0.01, (ENOUGH - 1) // 2)
    passes(device, check, 1.0, ENOUGH)
    assert check.judged
    assert not doubted


@pytest.mark.parametrize("costs", [UNMEASURED, replace(COSTS, standing="confirmed")])
def test_unmeasured_and_confirmed_costs_are_not_judged(costs: CostModel, doubted: list[CostModel]) -> None:
    check = check_of(device := Device(), costs)
    passes(device, check, 9.0, 2 * ENOUGH)
    assert not doubted


def test_a_device_that_was_slow_while_measured_is_measured_at_the_next_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, measure, calls = [1e-4, 1.0], cost_model.measure_records, list[float]()

    def measured(*arguments: Any) -> tuple[ReadRate, ...]:
        calls.append(factor := slow.pop(0))
        return tuple(
            replace(rate, bytes_per_second=factor * (rate.bytes_per_second or 0.0))
            for rate in measure(*arguments)
        )

    monkeypatch.setattr(platformdirs, "user_cache_path", lambda *_, **__: tmp_path)
    monkeypatch.setattr(cost_model, "measure_records", measured)
    monkeypatch.setattr(rate_check, "CHECKED_BYTES", 1 << 10)
    monkeypatch.setattr(rate_check, "CHECKED_PASSES", 1)
    monkeypatch.setattr(rate_check, "BUSY_READS", 0)
    options: dict[str, Any] = {"sparsity": "exact", "speculation": "off", "threads": 1}
    for loads in (1, 2):
        with ondevice.load(SHIPPED, **options) as model:
            if loads == 1:
                model.measure(24, 3)
                (stored,) = cost_model._read_store(tmp_path / "flash.json").values()
                assert stored.standing == "doubted"
        assert len(calls) == loads
