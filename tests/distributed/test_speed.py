"""What is measured of this machine, on every kind of model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ondevice.budget.plan import plan_memory
from ondevice.budget.token_costs import flash_rate
from ondevice.bundle.reader import Bundle
from ondevice.config import RuntimeConfig
from ondevice.distributed.speed import compute_rate, measured_resources
from ondevice.errors import BudgetError
from ondevice.flash.cost_model import UNMEASURED
from ondevice.runtime.backend_choice import memory_model
from ondevice.runtime.resolving import held_bytes
from ondevice.units import process_memory
from tests.support.small_models import MODELS, write_small


@pytest.mark.fast("dense", "experts", "many blocks", "delta")
@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_model_is_measured(name: str, tmp_path: Path) -> None:
    bundle = Bundle.open(write_small(tmp_path / "model", MODELS[name]))
    runtime = RuntimeConfig(backend="cpu", threads=1, dram_budget="4GB", sparsity="auto")
    before = process_memory().current_bytes
    found = measured_resources(bundle, runtime, "here")
    assert found.name == "here"
    assert found.budget_bytes == 4 * 10**9
    assert abs(found.process_bytes - before) < 64 << 20
    # A core multiplies more than that, and less than any memory gives.
    assert 1e5 < found.compute_bytes_per_second < 1e12
    assert 1e6 < found.flash_bytes_per_second < 1e12


def test_reads_are_as_long_as_the_mode_makes_them(tmp_path: Path) -> None:
    bundle = Bundle.open(write_small(tmp_path / "model", MODELS["relu, tied"]))
    long, short = (flash_rate(bundle.config, bundle.quant, mode, UNMEASURED) for mode in ("dense", "exact"))
    assert long > 2 * short


def test_too_small_a_budget_is_named_whole(tmp_path: Path) -> None:
    """With the process's memory, which is most of it."""
    bundle = Bundle.open(write_small(tmp_path / "model", MODELS["dense"]))
    held = process_memory().current_bytes
    runtime = RuntimeConfig(backend="cpu", threads=1, dram_budget=f"{held + 100_000}")
    with pytest.raises(BudgetError, match=rf"a DRAM budget of .* \({held + 100_000} bytes\)") as found:
        measured_resources(bundle, runtime, "here")
    assert found.value.required_bytes > held


def test_a_budget_for_a_short_context_is_enough(tmp_path: Path) -> None:
    """Where the default context has no room, `--max-context` may."""
    config = replace(MODELS["dense"], max_context=4096)
    bundle = Bundle.open(write_small(tmp_path / "model", config))
    runtime = RuntimeConfig(backend="cpu", threads=1, sparsity="dense", speculation="off", max_context=16)
    held, layer = held_bytes(), bundle.slice(2, 3)
    short, long = (
        plan_memory(memory_model(layer.config, layer.quant, its), budget_bytes=0, process_bytes=held)
        for its in (runtime, replace(runtime, max_context=0))
    )
    assert short.least_budget_bytes + (1 << 21) < long.least_budget_bytes
    assert compute_rate(bundle, runtime, short.least_budget_bytes, held) > 1e5
