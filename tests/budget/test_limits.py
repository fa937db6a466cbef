"""Budgets beside what the machine and its control groups have: refused, warned of, and what `auto` takes."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import ondevice
from ondevice.api import load
from ondevice.budget import claims
from ondevice.budget.cpu_memory import CpuMemory
from ondevice.budget.limits import allowance, auto_budget, budget_warnings, require_fit
from ondevice.budget.plan import Plan, plan_memory
from ondevice.budget.sizes import PREFILL_CHUNK
from ondevice.config import QuantConfig, RuntimeConfig
from ondevice.converters.architectures.common import llama_config
from ondevice.errors import BudgetError
from ondevice.runtime import resolving
from ondevice.runtime.models import shipped_folder
from ondevice.units import MemoryRoom, format_bytes, group_rooms, machine_room, process_memory
from tests.support.command_line import Run
from tests.support.fake_system import GIB, FakeSystem

SHIPPED = shipped_folder() / "small-relu"
MB = 10**6
MACHINE = MemoryRoom("this machine", 16000 * MB, 12000 * MB)
SMALL = llama_config("llama", 1024, 12, 8, 8, 128, 3072, 32000, 4096, "silu", 1e-5, 1e4)
Rooms = Callable[..., MemoryRoom]


def group(limit: int, available: int | None = None) -> MemoryRoom:
    return MemoryRoom("the control group /box", limit, limit if available is None else available)


def plan_under(budget: int, limit: MemoryRoom | None = None) -> Plan:
    memory = CpuMemory(SMALL, QuantConfig(4), RuntimeConfig(speculation="off"))
    plan = plan_memory(memory, budget_bytes=budget, process_bytes=60 * MB)
    return replace(plan, limit=limit)


@pytest.fixture
def rooms(monkeypatch: pytest.MonkeyPatch) -> Rooms:
    """Puts this process into a made-up control group of `limit` bytes, all of them free."""

    def put(limit: int, available: int | None = None) -> MemoryRoom:
        found = group(limit, available)
        monkeypatch.setattr(resolving, "memory_rooms", lambda: [MACHINE, found])
        for module in (resolving, claims):
            monkeypatch.setattr(module, "group_limit", lambda: found)
        return found

    return put


# --- auto -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "available", "reserve"),
    [
        # As it is where there is plenty: a tenth of what is free, at least 256 MiB.
        (25000, 20000, 2000 * MB),
        (8000, 1000, 256 << 20),
        # A sixteenth of what is smaller.
        (450, 400, 40 * MB),
        (300, 100, 18_750_000),
        (200, 20, 12_500_000),
        # Never more than there is, whatever the process holds.
        (200, 2, 2 * MB),
        (25000, 0, 0),
    ],
)
def test_auto_keeps_back_a_part_of_what_there_is(limit: int, available: int, reserve: int) -> None:
    found = allowance(60 * MB, [group(limit * MB, available * MB)])
    assert found.reserve_bytes == reserve
    assert found.usable_bytes == min(limit * MB, (60 + available) * MB) - reserve


def test_auto_takes_from_where_memory_is_scarcest_and_never_more_than_the_model_can_use() -> None:
    plan, rooms = plan_under(0), [MACHINE, group(450 * MB, 380 * MB), group(900 * MB)]
    found = allowance(60 * MB, rooms)
    assert found.room is rooms[1]
    assert auto_budget(plan, found) == 440 * MB - 38 * MB
    assert auto_budget(plan, allowance(60 * MB, [MACHINE])) == plan.full_bytes
    assert auto_budget(plan, allowance(70 * MB, [group(100 * MB, 0)])) == 70 * MB


def test_auto_never_takes_more_than_a_group_has() -> None:
    """What a process holds may be charged to another group, so that its own seems emptier than it is."""
    assert allowance(60 * MB, [group(300 * MB, 290 * MB)]).usable_bytes == 300 * MB - 29 * MB


def test_auto_says_what_it_keeps_back_where_that_is_too_little(rooms: Rooms) -> None:
    held = process_memory().current_bytes
    rooms(held + 20 * MB, 20 * MB)
    with pytest.raises(BudgetError) as caught:
        load(SHIPPED, dram_budget="auto")
    kept = format_bytes(min(20 * MB, (held + 20 * MB) // 16))
    assert re.search(
        r"\(auto: this process holds .*; 20\.0 MB of the .* of the control group /box are free, and "
        + re.escape(f"{kept} of them are kept back"),
        str(caught.value),
    )
    assert "0 B" not in str(caught.value)


def test_auto_fits_into_a_group_that_a_large_fixed_reserve_would_fill(rooms: Rooms) -> None:
    needed = ondevice.inspect(SHIPPED, sparsity="dense", speculation="off").minimum_budget_bytes
    held = process_memory().current_bytes
    rooms(needed * 5 // 4, needed * 5 // 4 - held)
    with load(SHIPPED) as model:
        assert model.generate("One", max_tokens=2).tokens
        assert model.plan.budget_bytes <= needed * 5 // 4


# --- advice ---------------------------------------------------------------------------------------------


def test_shorter_contexts_are_advised_only_where_they_can_help() -> None:
    plan = plan_under(1)
    without = plan.least_budget_bytes - plan.kv_cache_bytes - plan.activation_bytes
    advice = "or lower max_context or kv_bits"
    for budget, is_advised in ((without, True), (without - 1, False)):
        with pytest.raises(BudgetError) as caught:
            require_fit(plan.with_budget(budget), "a-model")
        assert (advice in str(caught.value)) is is_advised
    tokenizer = replace(plan, opening_bytes=without + 2).with_budget(without + 1)
    with pytest.raises(BudgetError) as caught:
        require_fit(tokenizer, "a-model")
    assert str(caught.value).endswith("Raise dram_budget.")


# --- a group's limit ------------------------------------------------------------------------------------


def test_a_plan_above_a_groups_limit_does_not_fit_and_names_both() -> None:
    plan = plan_under(430 * MB, group(400 * MB))
    assert plan.suffices
    assert not plan.fits
    with pytest.raises(BudgetError) as caught:
        require_fit(plan, "a-model")
    said = str(caught.value)
    assert "is more than the control group /box allows, 400 MB (400000000 bytes)" in said
    assert "Raise that limit, or take dram_budget=400000000 or less" in said
    assert caught.value.required_bytes == plan.minimum_budget_bytes < 400 * MB
    require_fit(plan.with_budget(400 * MB), "a-model")


def test_a_limit_is_whole_pages_and_a_budget_needn_t_be() -> None:
    plan = plan_under(0)
    exact = plan.with_budget(plan.minimum_budget_bytes)
    rounded = exact.total_bytes // 4096 * 4096
    assert replace(exact, limit=group(rounded)).fits
    assert not replace(exact, limit=group(rounded - 4096)).fits
    assert replace(exact, limit=group(exact.total_bytes - 4095)).fits
    assert not replace(exact, limit=group(exact.total_bytes - 4096)).fits
    held = plan.process_bytes
    assert budget_warnings(exact.with_budget(rounded + 4095), "a-model", held, [group(rounded)]) == []


def test_a_model_that_a_limit_leaves_no_room_for_at_all() -> None:
    plan = plan_under(100 * MB, group(200 * MB))
    assert plan.minimum_budget_bytes > 200 * MB
    for budget, said in (
        (
            100 * MB,
            "too small for a-model: .* Raise the limit of the control group /box, 200 MB .* larger dram_b",
        ),
        (
            1000 * MB,
            "is more than the control group /box allows, 200 MB .* Raise that limit, or lower max_",
        ),
    ):
        with pytest.raises(BudgetError, match=said):
            require_fit(plan.with_budget(budget), "a-model", fitting_context=1536)
    with pytest.raises(BudgetError, match=r"; max_context=1536 would fit\.$"):
        require_fit(plan, "a-model", fitting_context=1536)


def test_caches_of_several_sessions_keep_to_the_limit_too() -> None:
    plan = plan_under(2000 * MB, group(1000 * MB))
    assert plan.fits
    fixed = plan.total_bytes - plan.kv_cache_bytes
    assert plan.kv_limit_bytes == 1000 * MB - fixed
    assert replace(plan, limit=None).kv_limit_bytes == 2000 * MB - fixed


@pytest.mark.usefixtures("steady_process")
def test_a_budget_above_a_groups_limit_is_refused_before_anything_is_read(
    rooms: Rooms, ondevice: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = shipped_plan()
    limit = (plan.minimum_budget_bytes + plan.full_bytes) // 2
    rooms(limit)
    # With small chunks all of it would fit.
    monkeypatch.setattr("ondevice.runtime.resolving.SMALL_CHUNK", PREFILL_CHUNK)
    options = ("-m", SHIPPED, "--sparsity", "dense", "--speculation", "off")
    shown = ondevice("inspect", *options, "--dram-budget", "4GB")
    assert re.search(r"^fits: no; the control group /box allows ", shown.out, re.MULTILINE)
    monkeypatch.setattr("ondevice.runtime.engine.Engine._load", None)
    refused = ondevice("generate", *options, "--dram-budget", "4GB", "-p", "One")
    assert refused.code == 5
    assert "is more than the control group /box allows" in refused.err
    assert f"or take --dram-budget {limit} or less" in refused.err


def shipped_plan() -> Plan:
    return ondevice.inspect(SHIPPED, sparsity="dense", speculation="off")


@pytest.mark.usefixtures("steady_process")
def test_a_loaded_model_is_not_given_more_than_the_limit(rooms: Rooms) -> None:
    plan = shipped_plan()
    with load(SHIPPED, sparsity="dense", speculation="off", dram_budget=plan.minimum_budget_bytes) as model:
        rooms((plan.minimum_budget_bytes + plan.full_bytes) // 2)
        before = model.plan
        with pytest.raises(BudgetError, match="the control group /box allows"):
            model.set_dram_budget("4GB")
        assert model.plan is before


# --- warnings -------------------------------------------------------------------------------------------


def test_a_budget_above_all_there_is_is_warned_of_before_loading(
    rooms: Rooms, ondevice: Run, caplog: pytest.LogCaptureFixture
) -> None:
    rooms(8000 * MB)
    shown = ondevice("inspect", "-m", SHIPPED, "--dram-budget", "9GB")
    assert "fits: yes\nwarning: a DRAM budget of 9.00 GB is more than all 8.00 GB of the control" in shown.out
    assert "warning:" not in ondevice("inspect", "-m", SHIPPED, "--dram-budget", "7GB").out
    with load(SHIPPED, dram_budget="9GB") as model:
        assert "more than all 8.00 GB of the control group /box; small-relu takes up to" in caplog.text
        caplog.clear()
        model.set_dram_budget("7GB")
        assert not caplog.text
        model.set_dram_budget("1TB")
        assert "more than all 8.00 GB" in caplog.text
    assert caplog.records[-1].levelno == logging.WARNING


def test_a_plan_above_what_is_free_now_is_warned_of() -> None:
    plan = plan_under(400 * MB)
    wanted = f"{(plan.total_bytes - 60 * MB) / MB:.0f} MB"
    assert budget_warnings(plan, "a-model", 60 * MB, [MACHINE]) == []
    (said,) = budget_warnings(plan, "a-model", 60 * MB, [replace(MACHINE, available_bytes=200 * MB)])
    assert f"takes up to {wanted} more than this process holds, and 200 MB of the 16.0 GB of this" in said


# --- where the numbers come from ------------------------------------------------------------------------


@pytest.fixture
def system(tmp_path: Path) -> FakeSystem:
    if sys.platform != "linux":
        pytest.skip("reads /proc")
    return FakeSystem(tmp_path)


@pytest.mark.parametrize("version", [1, 2])
def test_groups_of_both_versions_are_rooms(system: FakeSystem, version: int) -> None:
    """Cache that programs have mapped is in use, whatever list it is in."""
    if version == 1:
        folder, names = system.cgroup / "memory" / "box", ("limit_in_bytes", "usage_in_bytes")
        system.join("4:memory:/box\n0::/")
        stat = f"inactive_file 1\ntotal_inactive_file {GIB // 2}\nmapped_file 2\ntotal_mapped_file {GIB // 8}"
    else:
        folder, names = system.cgroup / "box", ("max", "current")
        system.join("0::/box")
        stat = f"inactive_file {GIB // 2}\nfile_mapped {GIB // 8}"
    for name, text in ((names[0], 2 * GIB), (names[1], GIB), ("stat", stat)):
        system.write(folder / f"memory.{name}", text)
    assert group_rooms(system.proc, system.cgroup) == [
        MemoryRoom(f"the control group {folder}", 2 * GIB, GIB + GIB // 2 - GIB // 8)
    ]
    assert machine_room(system.proc) == MemoryRoom("this machine", 8 * GIB, 6 * GIB)
    assert system.available == GIB + GIB // 2 - GIB // 8
