"""What reads cost: the line through measured rates, what is decided by it, and how it is kept."""

from __future__ import annotations

import dataclasses
import json
import logging
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ondevice.bundle.reader import Bundle, CheckedFile
from ondevice.errors import OndeviceError
from ondevice.flash import cost_model, throughput
from ondevice.flash.cost_model import GAP_BYTES, MAX_RUN_BYTES, THREADS, UNMEASURED, CostModel, device_costs
from ondevice.flash.throughput import ReadRate
from tests.support.bundles import convert_bundle
from tests.support.models import write_checkpoint

READ_BYTES = (8 << 10, 16 << 10, 32 << 10, 64 << 10)
TODAY = datetime.now(UTC).isoformat(timespec="seconds")


def costs_of(lines: dict[int, tuple[float, float]], noise: float = 0.0) -> CostModel:
    """Rates of reads that take read + byte * size seconds, by threads; every other one is off by noise."""
    rates = [
        ReadRate(size, threads, (1 + noise * (-1) ** at) * size / (read + byte * size))
        for threads, (read, byte) in lines.items()
        for at, size in enumerate(READ_BYTES)
    ]
    return CostModel(TODAY, tuple(rates))


@settings(max_examples=40)
@given(read=st.floats(5e-6, 2e-5), rate=st.floats(1e9, 2e9), noise=st.floats(0, 0.03))
def test_gap_is_where_a_second_read_costs_as_much(read: float, rate: float, noise: float) -> None:
    gap = costs_of({32: (read, 1 / rate)}, noise).gap_bytes(32)
    assert gap == pytest.approx(read * rate, rel=0.001 + 12 * noise, abs=1)


def test_the_designs_machine_breaks_even_near_16_kib() -> None:
    assert 12 << 10 < UNMEASURED.gap_bytes(32) < 20 << 10
    assert UNMEASURED.bytes_per_second(8 << 10, 32) == pytest.approx(0.55e9, rel=0.06)
    assert UNMEASURED.threads(7168) == 32


@pytest.mark.parametrize(
    ("rates", "gap"),
    [
        ((1e8, 2e8, 4e8, 8e8), GAP_BYTES.stop),  # bytes cost nothing
        ((1e9, 1e9, 1e9, 1e9), GAP_BYTES.start),  # reads cost nothing
        ((2e9, 1e9, 5e8, 2e8), GAP_BYTES.start),  # nonsense
    ],
)
def test_disturbed_measurements_stay_within_bounds(rates: tuple[float, ...], gap: int) -> None:
    measured = [ReadRate(size, 32, rate) for size, rate in zip(READ_BYTES, rates, strict=True)]
    assert CostModel(TODAY, tuple(measured)).gap_bytes(32) == gap


def test_disturbed_measurements_are_believed_for_an_hour() -> None:
    assert costs_of({32: (1e-5, 1e-9), 64: (8e-6, 1e-9)}, noise=0.1).kept == timedelta(days=30)
    rates = [ReadRate(size, 64, rate) for size, rate in zip(READ_BYTES, (5e8, 6e8, 7e8, 3e8), strict=True)]
    assert CostModel(TODAY, tuple(rates)).kept == timedelta(hours=1)


def test_fewest_threads_that_are_fast_enough() -> None:
    slow, fast, hardly_faster = (2e-5, 1e-9), (1e-5, 1e-9), (0.98e-5, 1e-9)
    assert costs_of({8: slow, 16: fast, 32: hardly_faster}).threads(8192) == 16
    assert costs_of({8: fast, 16: fast, 32: slow}).threads(8192) == 8
    assert costs_of({8: slow, 16: slow, 32: fast}).threads(8192) == 32


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[CheckedFile]:
    """Neuron files with enough records."""
    folder = tmp_path_factory.mktemp("costs")
    shape = {"num_hidden_layers": 2, "intermediate_size": 16384, "hidden_act": "relu"}
    bundle = Bundle.open(convert_bundle(write_checkpoint(folder / "checkpoint", **shape), folder / "bundle"))
    return [bundle.neuron_file(layer) for layer in range(2)]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An item for every measurement, whose outcome is made up."""
    counted: list[int] = []

    def counting(*arguments: Any) -> tuple[ReadRate, ...]:
        counted.append(1)
        return costs_of({32: (1e-5, 1e-9)}).rates

    monkeypatch.setattr(cost_model, "measure_records", counting)
    return counted


def test_measured_once_and_kept(
    files: list[CheckedFile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "deep" / "flash.json"
    first = device_costs(files, store)
    monkeypatch.setattr(cost_model, "measure_records", None)
    assert {rate.threads for rate in first.rates} == set(THREADS)
    sizes = [rate.read_bytes for rate in first.rates if rate.threads == THREADS[0]]
    assert sizes == sorted(set(sizes))
    assert 4096 <= sizes[0] < 3 * sizes[0] < sizes[-1] < MAX_RUN_BYTES + 8192
    assert all(rate.bytes_per_second and rate.bytes_per_second > 0 for rate in first.rates)
    assert device_costs(files, store) == first
    assert abs(datetime.fromisoformat(first.measured) - datetime.now(UTC)) < timedelta(minutes=5)
    assert [path.name for path in store.parent.iterdir()] == ["flash.json"]


@pytest.mark.parametrize("days", [-1, 31])
def test_old_measurements_and_those_of_tomorrow_are_made_again(
    days: int, files: list[CheckedFile], tmp_path: Path, counted: list[int]
) -> None:
    store = tmp_path / "flash.json"
    device_costs(files, store)
    content = json.loads(store.read_text())
    other = dict(next(iter(content["devices"].values())))
    for entry in content["devices"].values():
        entry["measured"] = (datetime.now(UTC) - timedelta(days=days)).isoformat()
    content["devices"]["/another"] = other
    store.write_text(json.dumps(content))
    device_costs(files, store)
    assert len(counted) == 2
    kept = json.loads(store.read_text())["devices"]
    assert kept["/another"] == other
    assert all(cost_model._age(cost_model._parse("", entry)) < timedelta(days=1) for entry in kept.values())


def test_a_disturbed_measurement_is_made_again_after_an_hour(
    files: list[CheckedFile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, rates = tmp_path / "flash.json", costs_of({32: (1e-5, 1e-9)}).rates
    odd = (*rates[:-1], ReadRate(READ_BYTES[-1], 32, rates[0].bytes_per_second / 2))  # type: ignore[operator]
    for measured, again in ((odd, 2), (rates, 1)):
        store.unlink(missing_ok=True)
        counted: list[int] = []

        def measure(
            *_: Any, found: tuple[ReadRate, ...] = measured, calls: list[int] = counted
        ) -> tuple[ReadRate, ...]:
            calls.append(1)
            return found

        monkeypatch.setattr(cost_model, "measure_records", measure)
        device_costs(files, store)
        content = json.loads(store.read_text())
        for entry in content["devices"].values():
            entry["measured"] = (datetime.now(UTC) - timedelta(hours=2)).isoformat()
        store.write_text(json.dumps(content))
        device_costs(files, store)
        assert len(counted) == again


@pytest.mark.parametrize(("times", "standing"), [(1.4, "confirmed"), (0.7, "confirmed"), (3.0, "measured")])
def test_doubted_costs_are_measured_again_once(
    times: float, standing: str, files: list[CheckedFile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "flash.json"
    measured = [costs_of({32: (1e-5, 1e-9)}), costs_of({32: (1e-5 / times, 1e-9 / times)})]
    monkeypatch.setattr(cost_model, "measure_records", lambda *_: measured.pop(0).rates)
    first = device_costs(files, store)
    assert first.standing == "measured"
    cost_model.doubt(dataclasses.replace(first, measured="2026-01-01T00:00:00+00:00"), store)
    assert device_costs(files, store) == first, "another measurement than the stored one is doubted"
    cost_model.doubt(first, store)
    second = device_costs(files, store)
    assert second.standing == standing
    assert second.rates != first.rates
    assert device_costs(files, store) == second
    assert not measured


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"version": 1, "devices": {}}',
        '{"version": 3, "devices": []}',
        '{"version": 3, "devices": {"/": {"measured": "never", "rates": []}}}',
        '{"version": 3, "devices": {"/": {"measured": "2026-01-01", "standing": "measured", "rates": []}}}',
        '{"version": 3, "devices": {"/": null}}',
        "[" * 100_000,
        '{"version": 3, "devices": {"/": {"measured": "2026-01-01T00:00:00+00:00", "standing": "measured", '
        '"rates": [{"read_bytes": 0, "threads": 32, "bytes_per_second": 1e9}]}}}',
    ],
)
def test_a_damaged_store_is_measured_again(
    text: str, files: list[CheckedFile], tmp_path: Path, counted: list[int]
) -> None:
    store = tmp_path / "flash.json"
    store.write_text(text)
    found = device_costs(files, store)
    assert len(counted) == 1
    assert device_costs(files, store) == found
    assert len(counted) == 1


def test_a_store_that_cant_be_written_stops_nobody(
    files: list[CheckedFile], tmp_path: Path, counted: list[int]
) -> None:
    (tmp_path / "file").touch()
    for _ in range(2):
        assert device_costs(files, tmp_path / "file" / "flash.json") != UNMEASURED
    assert len(counted) == 2


def test_files_too_small_to_measure_give_no_costs(
    token_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = Bundle.open(token_bundle)
    monkeypatch.setattr(throughput, "MIN_RUNS", 1 << 20)
    assert device_costs([bundle.neuron_file(0)], tmp_path / "flash.json") == UNMEASURED
    assert not (tmp_path / "flash.json").exists()


def test_a_file_that_is_gone_has_the_costs_of_unmeasured(files: list[CheckedFile], tmp_path: Path) -> None:
    gone = dataclasses.replace(files[0], path=tmp_path / "gone")
    assert device_costs([gone], tmp_path / "flash.json") == UNMEASURED


def test_a_device_that_cant_be_measured_is_warned_of_once(
    files: list[CheckedFile],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refused(*arguments: Any) -> Any:
        raise OndeviceError("no reads today")

    monkeypatch.setattr(cost_model, "measure_records", refused)
    monkeypatch.setattr(cost_model, "_warned", set())
    for _ in range(2):
        assert device_costs(files, tmp_path / "flash.json") == UNMEASURED
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "couldn't be measured, so reads are planned for a typical one: no reads today" in warning.message
