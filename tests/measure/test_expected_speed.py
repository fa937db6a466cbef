"""Speeds to expect: bytes of a token, the slower of two rates, and what the rates are measured by."""

from __future__ import annotations

from pathlib import Path

import pytest

from ondevice import api
from ondevice.budget.token_costs import token_bytes
from ondevice.bundle.reader import Bundle
from ondevice.config import RuntimeConfig
from ondevice.doctor.rates import MachineRates, machine_rates
from ondevice.flash import cost_model
from ondevice.flash.cost_model import UNMEASURED, CostModel
from ondevice.flash.throughput import ReadRate
from ondevice.measure import expected_speed
from ondevice.measure.expected_speed import LAYER_SECONDS, forecast_model
from tests.support.small_models import MODELS, write_small

SECONDS_PER_BYTE = 1e-9
FLASH = CostModel(
    "2026-01-01T00:00:00+00:00",
    tuple(ReadRate(size, 16, size / (1e-7 + SECONDS_PER_BYTE * size)) for size in (4096, 65536)),
)


@pytest.mark.parametrize("name", ["dense", "experts"])
def test_a_token_takes_what_the_slower_rate_takes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_small(tmp_path / "model", MODELS[name])
    resolved = api.open_model(path, RuntimeConfig(backend="cpu", speculation="off"))
    layers = resolved.bundle.config.num_layers
    for multiply in (1e3, 1e12):
        monkeypatch.setattr(
            expected_speed, "machine_rates", lambda *given, rate=multiply: MachineRates(FLASH, rate, 1)
        )
        forecast = forecast_model(resolved)
        least, full = forecast.by_budget[0], forecast.by_budget[-1]
        assert least.budget_bytes == resolved.smallest_plan.plan.minimum_budget_bytes
        assert full.flash_bytes_per_token == 0 <= least.flash_bytes_per_token
        assert least.tokens_per_second <= full.tokens_per_second
        if multiply > 1e9:
            assert full.tokens_per_second == pytest.approx(1 / (LAYER_SECONDS * layers), rel=0.01)
        else:
            assert full.tokens_per_second < 1


def test_what_is_read_for_a_token_is_what_no_memory_holds(tmp_path: Path) -> None:
    bundle = Bundle.open(write_small(tmp_path / "model", MODELS["dense"]))
    plan = api.inspect(bundle.path, backend="cpu", speculation="off")
    active = [1.0] * bundle.config.num_layers
    least = token_bytes(bundle.config, bundle.quant, plan.with_budget(plan.minimum_budget_bytes), active)
    full = token_bytes(bundle.config, bundle.quant, plan.with_budget(plan.full_bytes), active)
    assert full.read == 0
    assert least.computed == full.computed
    held = plan.with_budget(plan.minimum_budget_bytes)
    assert plan.matrices is None or least.read >= plan.matrices.total_bytes - plan.matrices.held_bytes(
        held.held_units
    )


def test_flash_is_measured_once_where_no_model_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = tmp_path / "flash.json"
    monkeypatch.setattr(cost_model, "_default_store", lambda: store)
    measured = machine_rates(1, tmp_path / "models" / "none")
    assert measured.flash is not UNMEASURED
    assert measured.flash_measured is not None
    before = store.read_bytes()
    assert machine_rates(1, tmp_path).flash == measured.flash
    assert store.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["flash.json"]
