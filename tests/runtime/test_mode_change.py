"""What a smaller budget changes beside residency: the modes that `auto` takes, and what a refusal advises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ondevice import api
from ondevice.api import open_model
from ondevice.config import RuntimeConfig
from ondevice.errors import BudgetError
from ondevice.runtime.mode_change import mode_change
from ondevice.runtime.resolving import ResolvedModel
from tests.support.bundles import convert_bundle, write_chat_checkpoint

SHIPPED = api.find_model()
pytestmark = pytest.mark.usefixtures("steady_process")


def resolved(**options: Any) -> ResolvedModel:
    named = {"max_context": 512, "threads": 1, "prefill_chunk": 256}
    return open_model(SHIPPED, RuntimeConfig(**named | options))


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
    assert found.plan.least_budget_bytes == found.smallest_plan.plan.least_budget_bytes
    assert mode_change(resolved(dram_budget="1MB")) is None


@pytest.mark.parametrize(
    ("activation", "steps"),
    [("relu", 6), *(pytest.param(kind, 12, marks=pytest.mark.slow) for kind in ("silu", "relu"))],
)
def test_a_larger_budget_takes_neither_drafts_nor_context_back(
    tmp_path: Path, activation: str, steps: int
) -> None:
    """Whatever else it brings into memory; and what is said of the modes below it is so for all of them."""
    shape = {"head_dim": 256, "max_position_embeddings": 8192, "intermediate_size": 1 << 14}
    checkpoint = write_chat_checkpoint(tmp_path / "checkpoint", hidden_act=activation, **shape)
    bundle = convert_bundle(checkpoint, tmp_path / "bundle")

    def taken(budget: int) -> ResolvedModel:
        return open_model(bundle, RuntimeConfig(threads=1, dram_budget=budget, context_share=0.25))

    ample = taken(1 << 40)
    least, most = ample.smallest_plan.plan.minimum_budget_bytes, ample.plan.full_bytes
    budgets = [least + (most - least) * step // steps for step in range(steps + 1)]
    found = [taken(budget) for budget in [*budgets, 2 * most, 4 * most]]
    drafts = [it.runtime.speculation == "auto" for it in found]
    assert drafts == sorted(drafts)
    assert (found[0].plan.max_context, found[-1].plan.max_context) == (512, 8192)
    for mode in set(map(modes, found)):
        contexts = [it.plan.max_context for it in found if modes(it) == mode]
        assert contexts == sorted(contexts)
    for at, larger in enumerate(found):
        change = mode_change(larger)
        for smaller in found[:at]:
            same = change is None or smaller.plan.budget_bytes >= change.budget_bytes
            assert not same or modes(smaller) == modes(larger)
        if change is not None:
            assert modes(taken(change.budget_bytes - 1)) == (change.sparsity, change.speculation)


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
