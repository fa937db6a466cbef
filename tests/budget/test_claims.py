"""Models of one process under budgets that each bound all of it: what one may take, no other is given."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import ondevice
from ondevice.api import Model, load
from ondevice.budget import claims
from ondevice.budget.claims import Claim, Others, others
from ondevice.budget.cpu_memory import CpuMemory
from ondevice.budget.plan import Plan, plan_memory
from ondevice.config import QuantConfig, RuntimeConfig
from ondevice.constraints.constraint import Constraint
from ondevice.constraints.grammars import grammars_bytes
from ondevice.converters.architectures.common import llama_config
from ondevice.errors import BudgetError, FlashReadError
from ondevice.runtime import resolving
from ondevice.units import ProcessMemory
from tests.support.bundles import convert_bundle, copy_files, write_chat_checkpoint
from tests.support.chat import PROMPT

MB = 10**6
PROCESS = 60 * MB
SHAPE = llama_config("llama", 1024, 12, 8, 8, 128, 3072, 32000, 1024, "silu", 1e-5, 1e4)
NOTHING = Others(0, 0)


@pytest.fixture(autouse=True)
def alone(quick_collections: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the models that other tests have left open, and without what those hold."""
    gc.collect()
    monkeypatch.setattr(claims, "_claims", {})


class Holder:
    """What a claim asks for what is held."""

    def __init__(self, nbytes: int = 0) -> None:
        self.nbytes = nbytes
        self.claim = Claim(self.held_bytes)

    def held_bytes(self) -> int:
        return self.nbytes


def plan_under(budget: int) -> Plan:
    runtime = RuntimeConfig(speculation="off")
    plan = plan_memory(CpuMemory(SHAPE, QuantConfig(4), runtime), budget_bytes=0, process_bytes=PROCESS)
    return plan.with_budget(budget)


SMALLEST, FULL = (getattr(plan_under(0), f"{name}_bytes") for name in ("minimum_budget", "full"))
TAKEN = FULL - plan_under(0).process_bytes
"""By a model that is all in memory."""


# --- the arithmetic -------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [SMALLEST, (SMALLEST + FULL) // 2, FULL, 2 * FULL])
def test_a_claim_is_what_a_plan_takes_whether_it_is_held_or_not(budget: int) -> None:
    holder = Holder()
    assert others() == NOTHING
    plan = holder.claim.promise(plan_under(budget), "first")
    assert plan.others_bytes == 0
    claimed = min(budget, FULL) - plan.process_bytes
    assert others() == Others(0, claimed)
    assert plan.total_bytes - plan.process_bytes <= claimed
    holder.nbytes = MB
    assert others() == Others(MB, claimed)
    assert others(holder.claim) == NOTHING
    holder.claim.release()
    assert others() == NOTHING


def test_what_one_has_claimed_counts_in_the_next_ones_plan() -> None:
    first, second = Holder(), Holder()
    first.claim.promise(plan_under(FULL), "first")
    with pytest.raises(BudgetError, match="what other models of this process may take 2"):
        second.claim.promise(plan_under(FULL), "second")
    assert others(first.claim) == NOTHING
    plan = second.claim.promise(plan_under(FULL + SMALLEST), "second")
    assert plan.others_bytes == TAKEN
    assert plan.total_bytes <= FULL + SMALLEST
    assert sum(plan.minimum_parts.values()) == plan.minimum_budget_bytes
    assert others().claimed_bytes + plan.process_bytes <= FULL + SMALLEST


def test_an_earlier_model_sees_what_later_ones_have_claimed() -> None:
    first, second = Holder(), Holder()
    plan = first.claim.promise(plan_under(FULL), "first")
    second.claim.promise(plan_under(2 * FULL), "second")
    with pytest.raises(BudgetError, match="other models"):
        first.claim.promise(plan.with_budget(FULL), "first")
    assert others(second.claim).claimed_bytes == TAKEN
    assert first.claim.promise(plan.with_budget(2 * FULL), "first").others_bytes == TAKEN


def test_what_a_shrunken_model_leaves_to_others_it_cannot_take_back() -> None:
    """Memory pressure shrinks the first; what the second takes of that, the first can't take back."""
    first, second = Holder(), Holder()
    plan = first.claim.promise(plan_under(FULL), "first")
    spare = (FULL - SMALLEST) // 2
    assert first.claim.follow(plan.with_budget(SMALLEST))
    second.claim.promise(plan_under(SMALLEST + TAKEN + spare), "second")
    assert others() == Others(0, SMALLEST - plan.process_bytes + TAKEN)
    assert not first.claim.follow(plan)
    assert first.claim.follow(plan.with_budget(SMALLEST + spare))
    assert not first.claim.follow(plan.with_budget(SMALLEST + spare + 1))
    second.claim.release()
    assert first.claim.follow(plan)


def test_growth_does_not_wait_for_a_claim_that_is_being_made() -> None:
    holder = Holder()
    plan = holder.claim.promise(plan_under(FULL), "first")
    with claims._lock:
        assert holder.claim.follow(plan.with_budget(SMALLEST))
        assert not holder.claim.follow(plan)
        holder.claim.release()
    assert others() == NOTHING


def test_more_than_one_full_context_is_taken_from_what_nobody_has_claimed() -> None:
    first, second = Holder(), Holder()
    plan = first.claim.promise(plan_under(3 * FULL), "first")
    spare = 3 * FULL - plan.process_bytes - TAKEN
    assert first.claim.go_beyond(plan, spare)
    assert not first.claim.go_beyond(plan, spare + 1)
    with pytest.raises(BudgetError):
        second.claim.promise(plan_under(3 * FULL), "second")
    assert first.claim.go_beyond(plan, 10 * MB)
    second.claim.promise(plan_under(3 * FULL), "second")
    assert first.claim.go_beyond(plan, spare - TAKEN)
    assert not first.claim.go_beyond(plan, spare - TAKEN + 1)


def test_a_claim_keeps_nothing_alive_and_goes_with_it() -> None:
    holder = Holder(MB)
    kept = weakref.ref(holder)
    holder.claim.promise(plan_under(FULL), "first")
    claim = holder.claim
    del holder
    assert kept() is None
    assert others() == Others(0, TAKEN)
    del claim
    assert others() == NOTHING
    assert claims._claims == {}


def test_of_many_at_once_no_more_are_promised_than_there_is() -> None:
    holders = [Holder() for _ in range(16)]
    budget = plan_under(0).process_bytes + 5 * TAKEN + TAKEN // 2
    start = threading.Barrier(len(holders))

    def promise(holder: Holder) -> bool:
        start.wait()
        try:
            holder.claim.promise(plan_under(FULL).with_budget(budget), "one of many")
        except BudgetError:
            return False
        return True

    with ThreadPoolExecutor(len(holders)) as pool:
        promised = list(pool.map(promise, holders))
    # The last that fits takes the smaller half that is left, if its smallest budget allows it.
    assert promised.count(True) in (5, 6)
    assert plan_under(0).process_bytes + others().claimed_bytes <= budget


# --- loaded models --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its budgets from the smallest to the largest differ by more than a margin."""
    folder = tmp_path_factory.mktemp("claims")
    shape = {"num_hidden_layers": 4, "intermediate_size": 8192}
    return convert_bundle(write_chat_checkpoint(folder / "checkpoint", **shape), folder / "bundle")


OPTIONS: dict[str, Any] = {"threads": 1, "memory_pressure": "off"}


@pytest.fixture
def first(bundle: Path) -> Iterator[Model]:
    with load(bundle, dram_budget="8GB", **OPTIONS) as model:
        yield model


def test_the_second_model_plans_beside_what_the_first_may_still_take(
    bundle: Path, first: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = first._engine._held_bytes()
    assert first.plan.resident_weights_bytes <= held < first.plan.claim_bytes
    monkeypatch.setattr(resolving, "process_memory", lambda: ProcessMemory(1000 * MB, 1000 * MB))
    plan = ondevice.inspect(bundle, **OPTIONS)
    assert plan.others_bytes == first.plan.claim_bytes
    assert plan.process_bytes - (4 << 20) == 1000 * MB - held
    first.generate(PROMPT, max_tokens=40)
    filled = first._engine._held_bytes()
    assert held < filled <= first.plan.claim_bytes
    assert ondevice.inspect(bundle, **OPTIONS).process_bytes - (4 << 20) == 1000 * MB - filled


def test_budgets_of_one_process_are_divided_among_its_models(bundle: Path, first: Model) -> None:
    smallest = ondevice.inspect(bundle, **OPTIONS).minimum_budget_bytes
    with load(bundle, dram_budget=smallest, **OPTIONS) as second:
        assert second.plan.others_bytes == first.plan.claim_bytes
        assert second.plan.offloads_weights
        with pytest.raises(BudgetError, match="what other models of this process may take") as caught:
            load(bundle, dram_budget=smallest, **OPTIONS)
        assert caught.value.required_bytes > smallest
        assert others() == Others(
            sum(model._engine._held_bytes() for model in (first, second)),
            first.plan.claim_bytes + second.plan.claim_bytes,
        )
        with pytest.raises(BudgetError, match="other models"):
            first.set_dram_budget(first.plan.full_bytes)
        assert first.set_dram_budget("8GB").others_bytes == second.plan.claim_bytes
        assert first.generate(PROMPT, max_tokens=20).tokens == second.generate(PROMPT, max_tokens=20).tokens
    assert first.set_dram_budget("8GB").others_bytes == 0


@pytest.mark.parametrize("end", [Model.close, lambda model: None], ids=["closed", "collected"])
def test_what_a_model_had_is_free_after_it(bundle: Path, end: Callable[[Model], None]) -> None:
    model = load(bundle, **OPTIONS)
    assert others().claimed_bytes == model.plan.claim_bytes
    end(model)
    del model
    gc.collect()
    assert others() == NOTHING


def test_a_model_that_fails_to_load_claims_nothing(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged = copy_files(bundle, tmp_path / "damaged")
    resident = damaged / "resident.safetensors"
    resident.write_bytes(resident.read_bytes()[:-4096] + bytes(4096))
    with pytest.raises(FlashReadError):
        load(damaged, **OPTIONS)
    assert others() == NOTHING
    with pytest.raises(BudgetError):
        load(bundle, dram_budget=0, **OPTIONS)
    assert others() == NOTHING
    monkeypatch.setattr("ondevice.runtime.loaded_model.load_weights", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load(bundle, **OPTIONS)
    assert others() == NOTHING


def interrupted(*arguments: Any) -> None:
    raise KeyboardInterrupt


def test_two_that_were_planned_alone_are_not_both_loaded(bundle: Path) -> None:
    """What was resolved before another model was loaded is divided anew when it is loaded itself."""
    plan = ondevice.inspect(bundle, **OPTIONS)
    runtime = RuntimeConfig(dram_budget=plan.minimum_budget_bytes + MB, **OPTIONS)
    resolved = [ondevice.api.open_model(bundle, runtime) for _ in range(2)]
    assert [it.plan.fits for it in resolved] == [True, True]
    with Model(resolved[0]), pytest.raises(BudgetError, match="other models"):
        Model(resolved[1])
    with Model(resolved[1]) as model:
        assert model.generate(PROMPT, max_tokens=2).tokens


def test_sessions_beyond_one_context_take_nothing_from_other_models(bundle: Path, first: Model) -> None:
    """The first model's budget has room for dozens of contexts, until another one claims that."""
    session = first.session()
    expected = session.respond("a" * 120, max_tokens=3).tokens
    forks = [session.fork() for _ in range(8)]
    beyond = first._engine.kv.nbytes - first.plan.kv_cache_bytes
    assert beyond > 0
    assert others().claimed_bytes == first.plan.claim_bytes + beyond
    forks.clear()
    gc.collect()
    second = load(bundle, dram_budget="8GB", **OPTIONS)
    try:
        # It takes all that the largest budget has left.
        second._engine._claim._planned_bytes = 8000 * MB
        forks += [session.fork() for _ in range(8)]
        assert first._engine.kv.nbytes <= first.plan.kv_cache_bytes
        assert first.session().respond("a" * 120, max_tokens=3).tokens == expected
    finally:
        second.close()


def test_what_constraints_take_is_in_a_models_claim(bundle: Path, first: Model) -> None:
    """A model that was loaded before them plans beside them from then on."""
    pytest.importorskip("llguidance")
    with load(bundle, dram_budget="8GB", **OPTIONS) as second:
        before = first.plan.claim_bytes
        first.generate(PROMPT, constraint=Constraint.json_object(), max_tokens=2)
        taken = grammars_bytes(first.config.vocab_size, first.runtime.parallel)
        assert first.plan.claim_bytes == before + taken
        assert second.plan.others_bytes == before
        plan = second.replanned
        assert plan.others_bytes == before + taken
        with pytest.raises(BudgetError, match="other models"):
            second.set_dram_budget(plan.minimum_budget_bytes - taken // 2)
        assert second.set_dram_budget(plan.minimum_budget_bytes).others_bytes == before + taken
    with load(bundle, dram_budget="8GB", **OPTIONS) as second:
        assert second.plan.others_bytes == before + taken


def test_a_second_model_that_drafts_is_claimed_once(bundle: Path) -> None:
    with load(bundle, speculation="model", draft_model=bundle, **OPTIONS) as model:
        assert model.plan.draft_bytes > 0
        assert others().claimed_bytes == model.plan.claim_bytes
        assert len(claims._live()) == 1
        second = model._resolved.draft
        assert second is not None
        own = model.plan.resident_weights_bytes + second.plan.resident_weights_bytes
        assert own < model._engine._held_bytes() < model.plan.claim_bytes


def test_a_fork_has_none_of_its_parents_claims(bundle: Path) -> None:
    program = (
        "import os, sys, ondevice\n"
        "from ondevice.budget import claims\n"
        "model = ondevice.load(sys.argv[1], threads=1)\n"
        "assert claims.others().claimed_bytes == model.plan.claim_bytes\n"
        "with claims._lock:\n"
        "    child = os.fork()\n"
        "if not child:\n"
        "    os._exit(0 if claims.others() == claims.Others(0, 0) and not claims._lock.locked() else 1)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "assert claims.others().claimed_bytes == model.plan.claim_bytes\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, str(bundle)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
