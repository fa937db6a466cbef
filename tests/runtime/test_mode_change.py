"""What a smaller budget changes beside residency: the modes that `auto` takes, and what a refusal advises."""

from __future__ import annotations

from typing import Any

import pytest

from ondevice import api
from ondevice.api import open_model
from ondevice.config import RuntimeConfig
from ondevice.errors import BudgetError
from ondevice.runtime.resolving import ResolvedModel, mode_change

SHIPPED = api.find_model()
pytestmark = pytest.mark.usefixtures("steady_process")


def resolved(**options: Any) -> ResolvedModel:
    return open_model(SHIPPED, RuntimeConfig(**{"max_context": 512, "threads": 1} | options))


def modes(found: ResolvedModel) -> tuple[str, str]:
    return found.runtime.sparsity, found.runtime.speculation


def test_modes_change_just_below_the_budget_that_is_named() -> None:
    found, seen = resolved(dram_budget="1TB"), []
    while (change := mode_change(found)) is not None:
        seen.append(modes(found))
        assert change.budget_bytes <= found.plan.budget_bytes
        assert modes(resolved(dram_budget=change.budget_bytes)) == modes(found)
        found = resolved(dram_budget=change.budget_bytes - 1)
        assert modes(found) == (change.sparsity, change.speculation) != seen[-1]
    assert seen[0] == ("exact", "auto")
    assert modes(found) == ("dense", "off")
    # Below that, nothing fits.
    assert found.plan.least_budget_bytes == found.frugal.plan.least_budget_bytes
    assert mode_change(resolved(dram_budget="1MB")) is None


def test_modes_that_are_named_never_change() -> None:
    assert mode_change(resolved(sparsity="dense", speculation="off", dram_budget="1TB")) is None


def refusal(**options: Any) -> str:
    with pytest.raises(BudgetError) as caught:
        resolved(**options).require_fit()
    return caught.value.for_command_line


def test_a_refusal_advises_only_modes_that_fit() -> None:
    exact = {"sparsity": "exact", "speculation": "lookup"}
    bare = resolved(sparsity="dense", speculation="off").plan.least_budget_bytes
    drafted = resolved(sparsity="dense", speculation="lookup").plan.least_budget_bytes
    needed = resolved(**exact).plan.least_budget_bytes
    assert bare < drafted < needed
    assert ", or take --sparsity dense" in refusal(**exact, dram_budget=drafted)
    assert ", or take --sparsity dense and --speculation off" in refusal(**exact, dram_budget=bare)
    too_small = refusal(**exact, dram_budget="1MB")
    assert "--sparsity" not in too_small
    assert "--speculation" not in too_small
