"""The division of a model's layers among machines, against all divisions that there are."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest

from ondevice.budget.plan import REPEAT_MARGIN_BYTES, plan_memory
from ondevice.bundle.reader import Bundle
from ondevice.config import RuntimeConfig
from ondevice.distributed.division import (
    TOLERANCE,
    Division,
    RankResources,
    divide,
    fastest,
    least_sum,
    rank_bundle,
)
from ondevice.errors import BudgetError, UnsupportedModelError
from ondevice.runtime.backend_choice import memory_model
from tests.golden.build import golden_config
from tests.support.made_up_streams import add_streams
from tests.support.small_models import MODELS, write_small

PLENTY = RankResources("plenty", 1 << 30, 30 << 20, 1e9, 1e8)
RUNTIME = RuntimeConfig(backend="cpu", sparsity="dense", speculation="off", threads=1)


def all_divisions(count: int, ranks: int) -> list[list[int]]:
    """Indices of the bounds of every division of `count` bounds among as many ranks."""
    return [[0, *cuts, count - 1] for cuts in combinations(range(1, count - 1), ranks - 1)]


def costs_of(seconds: np.ndarray, cuts: list[int]) -> list[float]:
    return [float(seconds[rank, low, high]) for rank, (low, high) in enumerate(pairwise(cuts))]


@pytest.mark.parametrize("seed", range(60))
def test_the_fastest_division_is_that_of_brute_force(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ranks, count = int(rng.integers(1, 5)), int(rng.integers(5, 9))
    seconds = rng.random((ranks, count, count))
    if seed % 3 == 1:
        # Nearly equal costs, so that the slowest rank decides.
        seconds = np.abs(np.subtract.outer(range(count), range(count))) + seconds / 100 * np.ones(
            (ranks, 1, 1)
        )
    seconds[:, *np.tril_indices(count)] = np.inf
    if seed % 2:
        seconds[rng.random(seconds.shape) < 0.3] = np.inf
    divisions = all_divisions(count, ranks)
    sums = [sum(costs_of(seconds, cuts)) for cuts in divisions]
    assert least_sum(seconds)[0] == pytest.approx(min(sums))
    found = fastest(seconds)
    if not np.isfinite(min(sums)):
        assert found is None
        return
    assert found in divisions
    near = [cuts for cuts, total in zip(divisions, sums, strict=True) if total <= (1 + TOLERANCE) * min(sums)]
    assert found in near
    assert max(costs_of(seconds, found)) == min(max(costs_of(seconds, cuts)) for cuts in near)


@pytest.fixture(scope="module")
def prime(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    config = golden_config(num_layers=61, hidden_act="silu")
    return Bundle.open(write_small(tmp_path_factory.mktemp("prime") / "model", config))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    config = golden_config(num_layers=11, hidden_act="silu")
    return Bundle.open(write_small(tmp_path_factory.mktemp("small") / "model", config))


def require_all_layers(found: Division, layers: int) -> None:
    assert [first for first, _ in found.ranges] == [0, *(stop for _, stop in found.ranges[:-1])]
    assert found.ranges[-1][1] == layers
    assert all(first < stop for first, stop in found.ranges)


@pytest.mark.fast("3")
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_equal_machines_get_equal_shares_of_61_layers(prime: Bundle, count: int) -> None:
    found = divide(prime, RUNTIME, [PLENTY] * count, 0.001)
    require_all_layers(found, 61)
    sizes = [stop - first for first, stop in found.ranges]
    # Rank 0 has the head too, which is as much as two or three of these layers.
    assert max(sizes) - min(sizes) <= 3
    assert sizes[0] == min(sizes)
    assert len(set(sizes[1:])) <= 2
    hops = count if count > 1 else 0
    assert found.seconds_per_token == pytest.approx(sum(it.seconds for it in found.shares) + hops * 0.001)


def test_a_faster_machine_gets_what_it_has_room_for(model: Bundle) -> None:
    fast = replace(PLENTY, name="fast", compute_bytes_per_second=4e9)
    found = divide(model, RUNTIME, [PLENTY, fast, PLENTY])
    assert [stop - first for first, stop in found.ranges] == [1, 9, 1]
    plan = found.shares[1].plan
    tight = replace(fast, budget_bytes=plan.full_bytes - plan.segment.bytes_of(plan.segment.total) // 2)
    slow_flash = replace(tight, flash_bytes_per_second=1e6)
    less = divide(model, RUNTIME, [PLENTY, slow_flash, PLENTY])
    require_all_layers(less, 11)
    assert less.ranges[1][1] - less.ranges[1][0] < 9
    assert not less.shares[1].plan.offloads_weights


def test_budgets_that_do_for_no_division_are_refused_with_those_that_would(model: Bundle) -> None:
    least = divide(model, RUNTIME, [PLENTY] * 2).shares[0].plan.least_budget_bytes
    small = replace(PLENTY, name="small", budget_bytes=least // 2)
    with pytest.raises(
        BudgetError, match=r"small has \d+ bytes .* of the \d+ bytes .* for layer 0\. Raise"
    ) as caught:
        divide(model, RUNTIME, [small, PLENTY])
    needed = caught.value.required_bytes
    found = divide(model, RUNTIME, [replace(small, budget_bytes=needed), PLENTY])
    assert found.ranges == ((0, 1), (1, 11))
    # The budget that was named must do for a process that measures itself a little larger.
    grown = replace(small, budget_bytes=needed, process_bytes=small.process_bytes + REPEAT_MARGIN_BYTES)
    assert divide(model, RUNTIME, [grown, PLENTY]).ranges == found.ranges
    with pytest.raises(BudgetError):
        divide(model, RUNTIME, [replace(grown, process_bytes=grown.process_bytes + 1), PLENTY])


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_division_that_surely_fits_comes_first(prime: Bundle, count: int) -> None:
    """However much faster one is that only this measurement of the processes has room for."""
    fast = replace(PLENTY, name="fast", compute_bytes_per_second=1e12)
    wide = divide(prime, RUNTIME, [fast, PLENTY]).shares[0]
    assert wide.stop == 60
    budget = wide.plan.minimum_budget_bytes
    cases = [(budget - 1, 59), (budget, 60), (wide.plan.least_budget_bytes, 59)]
    for budget_bytes, stop in cases[-count:]:
        found = divide(prime, RUNTIME, [replace(fast, budget_bytes=budget_bytes), PLENTY]).shares[0]
        assert found.plan.minimum_budget_bytes <= found.plan.budget_bytes
        assert found.stop <= stop


def test_more_machines_than_places_are_refused(tmp_path: Path) -> None:
    bundle = Bundle.open(write_small(tmp_path / "model", MODELS["many blocks"]))
    require_all_layers(divide(bundle, RUNTIME, [PLENTY] * 3), 5)
    with pytest.raises(UnsupportedModelError, match=r"4 hosts are too many .* into 3 parts at most"):
        divide(bundle, RUNTIME, [PLENTY] * 4)


@pytest.mark.parametrize("name", MODELS)
def test_plans_are_those_of_the_slices(name: str, tmp_path: Path) -> None:
    """What a share is planned with is what its slice is planned with alone."""

    bundle = Bundle.open(write_small(tmp_path / "model", MODELS[name]))
    runtime = replace(RUNTIME, sparsity="experts" if bundle.config.experts else "dense")
    for share in divide(bundle, runtime, [PLENTY] * 3).shares:
        alone = rank_bundle(bundle, share.first, share.stop)
        memory = memory_model(alone.config, alone.quant, runtime, alone.predictors, alone.streams)
        planned = plan_memory(memory, budget_bytes=1 << 30, process_bytes=30 << 20)
        assert share.plan == planned


def test_only_rank_0_has_the_ends_of_a_model_with_streams(tmp_path: Path) -> None:
    folder = write_small(tmp_path / "model", golden_config(num_layers=6))
    add_streams(folder, layers=3)
    bundle = Bundle.open(folder)
    parts = [rank_bundle(bundle, *pair) for pair in ((0, 2), (2, 5), (5, 6))]
    assert [part.config.part.heads for part in parts] == [True, False, False]
    assert [part.config.part.embeds for part in parts] == [True, False, False]
    assert [None if part.streams is None else part.streams.first_layer for part in parts] == [3, 1, 0]
    require_all_layers(divide(bundle, replace(RUNTIME, speculation="streams"), [PLENTY] * 3), 6)
