"""A loaded model whose budget follows memory pressure, on a script of the test's own."""

from __future__ import annotations

import gc
import logging
import math
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ondevice import host
from ondevice.api import Model, load
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.budget.pressure import DEFAULT_PRESSURE, Reading
from ondevice.errors import BackendUnavailableError, BudgetError, OndeviceError
from ondevice.runtime import budget_watch
from tests.support.bundles import EOS, convert_bundle, write_chat_checkpoint
from tests.support.chat import PROMPT, greedy

GB = 10**9
ROOMY = Reading(limit_bytes=16 * GB, available_bytes=12 * GB, process_bytes=0)
SCARCE = replace(ROOMY, available_bytes=0)
STEPS = DEFAULT_PRESSURE.steps


def settles(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 60.0
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.002)
    return condition()


class Script:
    """A source that says what the test does; errors are raised."""

    def __init__(self) -> None:
        self.says: Reading | Exception = ROOMY
        self.closed = False

    def read(self) -> Reading:
        if isinstance(self.says, Exception):
            raise self.says
        return self.says

    def close(self) -> None:
        self.closed = True


class Watched:
    """A model whose pressure the test makes, by a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, bundle: Path, **options: Any) -> None:
        self.now = 0.0
        self.script = Script()
        monkeypatch.setattr(host, "BudgetWatch", self.watch)
        options = {"dram_budget": "8GB", "threads": 1, "io": "buffered", "memory_pressure": "off"} | options
        self.model = load(bundle, **options)
        self.look(ROOMY)
        self.floor = self.model.plan.minimum_budget_bytes

    def watch(self, *arguments: Any) -> budget_watch.BudgetWatch:
        return budget_watch.BudgetWatch(*arguments, clock=lambda: self.now)

    def look(self, says: Reading | Exception, seconds: float = 5.0) -> int:
        """The budget after one look."""
        self.now += seconds
        self.script.says = says
        self.model._watch.look(self.script)
        return self.model.plan.budget_bytes


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its budgets from the smallest to the largest differ by more than a margin."""
    folder = tmp_path_factory.mktemp("watched")
    shape = {"num_hidden_layers": 4, "intermediate_size": 8192}
    return convert_bundle(write_chat_checkpoint(folder / "checkpoint", **shape), folder / "bundle")


@pytest.fixture(scope="module")
def model(bundle: Path) -> Iterator[Model]:
    """What nobody disturbs."""
    with load(bundle, dram_budget="8GB", threads=1, io="buffered", memory_pressure="off") as loaded:
        yield loaded


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch, bundle: Path) -> Iterator[Watched]:
    found = Watched(monkeypatch, bundle)
    yield found
    found.model.close()


def test_a_text_is_the_same_while_the_budget_shrinks_and_grows(watched: Watched, model: Model) -> None:
    tokens: list[int | None] = []
    budgets = []
    looks = [SCARCE, *[ROOMY] * 15, SCARCE, *[ROOMY] * 15]
    for event in watched.model.stream(PROMPT, max_tokens=40, logit_bias={EOS: -math.inf}):
        tokens.append(event.token)
        if looks:
            budgets.append(watched.look(looks.pop(0)))
    assert tuple(tokens[:-1]) == greedy(model, 40)
    assert not looks
    assert budgets[0] == budgets[16] == watched.floor
    assert budgets[15] == budgets[31] == 8 * GB
    assert len(set(budgets)) == STEPS + 1
    found = watched.model.memory_pressure
    assert (found.level, found.budget_bytes, found.user_budget_bytes) == ("normal", 8 * GB, 8 * GB)
    assert (found.shrinks, found.growths) == (2, 2 * STEPS)


def test_a_long_prompt_is_no_reason_to_wait(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget changes between two chunks of it, before a token comes."""
    watched = Watched(monkeypatch, bundle, prefill_chunk=8)
    prompt, engine = list(range(3, 60)), watched.model._engine
    expected = watched.model.generate(tokens=prompt, max_tokens=5).tokens
    looking = threading.Thread(target=watched.look, args=(SCARCE,))
    streaming: list[bool] = []

    def note(batch: ForwardBatch) -> None:
        if not streaming:
            looking.start()
            assert settles(lambda: not watched.model._owner._jobs._urgent.empty())
        before_pass(batch)
        streaming.append(engine.plan.offloads_weights)

    before_pass = engine._generator.before_pass
    engine._generator = replace(engine._generator, before_pass=note)
    with watched.model as model:
        assert model.generate(tokens=prompt, max_tokens=5).tokens == expected
        assert streaming[0]
        assert model.memory_pressure.shrinks == 1


def test_the_users_budget_is_the_ceiling(watched: Watched) -> None:
    plan = watched.model.plan
    lower = (watched.floor + plan.full_bytes) // 2
    assert watched.look(SCARCE) == watched.floor
    assert watched.model.set_dram_budget(lower).budget_bytes == lower
    assert watched.look(SCARCE) == watched.floor
    budgets = [watched.look(ROOMY) for _ in range(30)]
    assert budgets[-1] == max(budgets) == lower
    with pytest.raises(BudgetError):
        watched.model.set_dram_budget("1MB")
    assert watched.model.memory_pressure.user_budget_bytes == lower
    assert watched.model.set_dram_budget("9GB").budget_bytes == 9 * GB


def test_what_another_model_has_claimed_meanwhile_is_not_taken_back(watched: Watched, bundle: Path) -> None:
    assert watched.look(SCARCE) == watched.floor
    with load(bundle, dram_budget="8GB", threads=1, memory_pressure="off") as other:
        assert other.plan.others_bytes >= watched.model.plan.claim_bytes > 0
        other._engine._claim._planned_bytes = 8 * GB  # as of a model that fills its budget
        assert {watched.look(ROOMY) for _ in range(30)} == {watched.floor}
        assert watched.model.memory_pressure.growths == 0
    assert [watched.look(ROOMY) for _ in range(30)][-1] == 8 * GB


def test_what_the_user_says_meanwhile_counts(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shrink that was decided under another budget is no more."""
    call = watched.model._owner.call

    def interrupted(work: Callable[[], Any], urgent: bool = False) -> Any:
        monkeypatch.undo()
        watched.model.set_dram_budget("9GB")
        return call(work, urgent)

    monkeypatch.setattr(watched.model._owner, "call", interrupted)
    assert watched.look(SCARCE) == 9 * GB
    assert watched.model.memory_pressure.shrinks == 0
    assert watched.look(SCARCE) == watched.floor


def test_changes_are_logged_and_errors_once(watched: Watched, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="ondevice.runtime.budget_watch")
    for error in (BackendUnavailableError("no figures"), OSError("gone"), ValueError("odd")):
        assert watched.look(error) == 8 * GB
    watched.look(SCARCE)
    for _ in range(10):
        watched.look(ROOMY)
    levels = [record.levelno for record in caplog.records]
    assert levels == [logging.WARNING] * 2 + [logging.INFO] * (len(levels) - 2)
    assert "no figures" in caplog.messages[0]
    assert "critical: the DRAM budget goes from 8.00 GB to" in caplog.messages[1]


def test_what_the_system_refuses_is_no_end(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(budget_bytes: int) -> bool:
        raise OndeviceError("the system refuses memory")

    with monkeypatch.context() as patch:
        patch.setattr(watched.model._engine, "shift_budget", refuse)
        assert watched.look(SCARCE) == 8 * GB
    assert "stays 8.00 GB: the system refuses memory" in caplog.text
    assert watched.look(SCARCE) == watched.floor


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Script:
    """What models that are loaded from here on watch, with a look every millisecond."""
    script = Script()
    monkeypatch.setattr(host, "system_source", lambda wake: script)
    monkeypatch.setattr(host, "DEFAULT_PRESSURE", replace(DEFAULT_PRESSURE, interval_seconds=0.001))
    return script


def watchers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "ondevice-memory-pressure"]


def test_a_loaded_model_is_watched_until_it_is_closed(bundle: Path, scripted: Script) -> None:
    with load(bundle, dram_budget="8GB") as model:
        assert len(watchers()) == 1
        scripted.says = SCARCE
        assert settles(lambda: model.memory_pressure.shrinks == 1)
        assert model.plan.budget_bytes == model.plan.minimum_budget_bytes
    assert not watchers()
    assert scripted.closed
    assert model.memory_pressure.shrinks == 1


def test_off_watches_nothing(bundle: Path, scripted: Script) -> None:
    with load(bundle, memory_pressure="off") as model:
        assert not watchers()
        assert model.memory_pressure.level == "normal"


def test_a_model_is_closed_while_a_shrink_waits(bundle: Path, scripted: Script) -> None:
    model = load(bundle, dram_budget="8GB")
    busy, go_on = threading.Event(), threading.Event()

    def work() -> None:
        busy.set()
        go_on.wait(120.0)

    working = threading.Thread(target=lambda: model._owner.call(work))
    working.start()
    busy.wait()
    scripted.says = SCARCE
    assert settles(lambda: not model._owner._jobs._urgent.empty())
    closing = threading.Thread(target=model.close)
    closing.start()
    assert settles(lambda: model._owner._jobs.closed)
    go_on.set()
    for thread in (closing, working):
        thread.join(60.0)
        assert not thread.is_alive()
    assert not watchers()
    assert model.memory_pressure.user_budget_bytes == 8 * GB


def test_a_model_nobody_holds_is_collected(bundle: Path, scripted: Script) -> None:
    model = load(bundle)
    kept = weakref.ref(model)
    del model
    gc.collect()
    assert kept() is None
    assert settles(lambda: not watchers())


@pytest.mark.parametrize("error", [OSError("no library"), AttributeError("no symbol")])
def test_a_system_without_a_source_has_no_watch(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    def refuse(wake: object) -> Script:
        raise error

    monkeypatch.setattr(host, "system_source", refuse)
    with load(bundle) as model:
        assert settles(lambda: not watchers())
        assert model.generate(PROMPT, max_tokens=2).tokens
    assert str(error) in caplog.text


def test_a_system_without_a_thread_has_no_watch(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "ondevice-memory-pressure":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with load(bundle) as model:
        assert model.generate(PROMPT, max_tokens=2).tokens
    assert "can't start new thread" in caplog.text


def test_the_interpreter_ends_with_a_watched_model(bundle: Path) -> None:
    program = "import sys, ondevice; model = ondevice.load(sys.argv[1]); print(model.memory_pressure.level)"
    done = subprocess.run(
        [sys.executable, "-c", program, str(bundle)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "normal\n", "")
