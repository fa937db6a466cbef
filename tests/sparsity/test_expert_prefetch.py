"""Prefetched experts: no bit depends on them, and whatever becomes of them costs no slot."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ondevice.api import Model, load
from ondevice.errors import FlashReadError
from ondevice.sparsity.expert_prefetch import KEPT_PASSES, TRIAL_PASSES, ExpertPrefetcher
from ondevice.sparsity.experts import ExpertFetcher
from ondevice.stats import PassTimes
from tests.support.bundles import convert_bundle
from tests.support.chat import squeeze
from tests.support.families import CASES, write_model
from tests.support.fault_rounds import assert_nothing_leaked
from tests.support.flash_files import flip_byte
from tests.support.slow_memory import slow_memory

PROMPT = [5, 9, 200, 31]
TOKENS = 50


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight experts, three for each token; three layers."""
    made = tmp_path_factory.mktemp("experts")
    write_model(made / "source", *CASES["olmoe"])
    return convert_bundle(made / "source", made / "bundle")


def text(model: Model) -> tuple[int, ...]:
    return tuple(model.generate(tokens=PROMPT, max_tokens=TOKENS, temperature=0.0).tokens)


@pytest.fixture(scope="module")
def expected(folder: Path) -> tuple[int, ...]:
    with load(folder) as model:
        return text(model)


def prefetcher(model: Model) -> ExpertPrefetcher:
    neurons = model._engine._neurons
    assert isinstance(neurons, ExpertFetcher)
    return neurons._prefetcher


@pytest.fixture
def model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Model]:
    """With room for a third of its experts. All prefetches arrive, and they never rest."""

    def next_pass(own: ExpertPrefetcher, *arguments: Any, original: Any = ExpertPrefetcher.next_pass) -> None:
        original(own, *arguments)
        own.on = True

    monkeypatch.setattr(ExpertPrefetcher, "next_pass", next_pass)

    def commit(own: ExpertPrefetcher, *arguments: Any, original: Any = ExpertPrefetcher.commit) -> Any:
        while not all(own._reads.arrived(one.ticket) for one in own._coming):
            time.sleep(0.0001)
        return original(own, *arguments)

    monkeypatch.setattr(ExpertPrefetcher, "commit", commit)
    with load(folder) as loaded:
        segment = loaded.plan.segment
        squeeze(loaded, (segment.total - segment.least) // 3)
        yield loaded


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Memory comes late. How many segments are missing at every prefetch is listed."""
    slow_memory(monkeypatch, 0.5)
    missing: list[int] = []

    def start(own: ExpertPrefetcher, *arguments: Any, original: Any = ExpertPrefetcher._start) -> None:
        missing.append(own._cache._quota - len(own._cache._segments))
        original(own, *arguments)

    monkeypatch.setattr(ExpertPrefetcher, "_start", start)
    return missing


def test_memory_that_comes_late_is_not_waited_for(
    late: list[int], model: Model, expected: tuple[int, ...]
) -> None:
    """Experts are prefetched into slots of others meanwhile."""
    assert text(model) == expected
    assert max(late) > 0
    assert_nothing_leaked(model)


def test_they_hit_and_change_nothing(model: Model, expected: tuple[int, ...]) -> None:
    assert text(model) == expected
    quality, stats = prefetcher(model).quality, model.stats
    assert 0 < quality.used < quality.begun
    assert quality.wasted_bytes == (quality.begun - quality.used) * prefetcher(model)._cache.slot_bytes
    assert 0 < stats.prefetch_recall < 1
    assert_nothing_leaked(model)


def test_wrong_estimates_change_nothing(
    model: Model, expected: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of other experts, more than can be on their way, and of a layer that doesn't come next."""
    rng = np.random.default_rng(1)

    def expect(own: ExpertPrefetcher, turn: int, _: Any, original: Any = ExpertPrefetcher.expect) -> None:
        original(own, int(rng.integers(3)), lambda: rng.integers(0, 8, (3, 3)).astype(np.int32))

    monkeypatch.setattr(ExpertPrefetcher, "expect", expect)
    assert text(model) == expected
    assert prefetcher(model).quality.begun > 0
    assert_nothing_leaked(model)


def test_a_cancelled_pass_leaves_nothing(
    model: Model, expected: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, calls = ExpertPrefetcher.begin, []

    def failing(own: ExpertPrefetcher, *arguments: Any) -> None:
        begin(own, *arguments)
        calls.append(own)
        if len(calls) % 7 == 0:
            raise ValueError("of a test")

    with monkeypatch.context() as patch:
        patch.setattr(ExpertPrefetcher, "begin", failing)
        for _ in range(3):
            with pytest.raises(ValueError, match="of a test"):
                text(model)
            assert_nothing_leaked(model)
    assert text(model) == expected


def test_damage_is_an_error_where_it_is_wanted_alone(
    model: Model, folder: Path, expected: tuple[int, ...]
) -> None:
    neurons = model._engine._neurons
    assert isinstance(neurons, ExpertFetcher)
    places = [neurons._records(1).offset(expert) + 5 for expert in range(8)]
    file = folder / "experts-00001.safetensors"
    for place in places:
        flip_byte(file, place)
    try:
        with pytest.raises(FlashReadError, match="experts-00001"):
            text(model)
    finally:
        for place in places:
            flip_byte(file, place)
    assert_nothing_leaked(model)
    assert text(model) == expected


@pytest.mark.parametrize("pays", [True, False])
def test_they_are_on_where_they_pay(folder: Path, expected: tuple[int, ...], pays: bool) -> None:
    with load(folder) as model:
        own = prefetcher(model)
        assert text(model) == expected
        assert own.quality.begun == 0  # all experts fit in memory
        segment = model.plan.segment
        squeeze(model, (segment.total - segment.least) // 3)
        assert text(model) == expected
        own._passes, on, waited, managed = 0, [], own._before.waited, own._before.managed
        for at in range(2 * (TRIAL_PASSES + KEPT_PASSES)):
            own.next_pass(1, PassTimes(waited, managed))
            on.append(own.on)
            # Twice as many are missing with it in the first trial, and half as many in the second.
            missing = (1 + own.on if at < TRIAL_PASSES else 2 - own.on) * (1 + at // 2 % 3)
            own.count_missing(missing)
            waited += missing * (0.9 if own.on == pays else 1.0)
            managed += 100.0
        tried, kept = [False, True] * (TRIAL_PASSES // 2), [pays] * KEPT_PASSES
        assert on == 2 * [*tried, *kept]
        assert (own.quality.hidden_seconds > 0.1) == pays
        assert (own.quality.spent_seconds > 0.1) != pays


@pytest.mark.parametrize("pays", [True, False])
def test_what_beginning_reads_and_estimates_take_is_compared(
    folder: Path, expected: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, pays: bool
) -> None:
    """Passes are slow that don't prefetch and begin a layer's reads at its turn, or those that estimate."""

    def begin(own: ExpertFetcher, *arguments: Any, original: Any = ExpertFetcher._begin) -> None:
        time.sleep(0.001 if pays and not own._prefetcher.on else 0.0)
        original(own, *arguments)

    def expect(own: ExpertPrefetcher, *arguments: Any, original: Any = ExpertPrefetcher.expect) -> None:
        time.sleep(0.0 if pays else 0.003)
        original(own, *arguments)

    monkeypatch.setattr(ExpertFetcher, "_begin", begin)
    monkeypatch.setattr(ExpertPrefetcher, "expect", expect)
    with load(folder, speculation="off") as model:
        segment = model.plan.segment
        squeeze(model, (segment.total - segment.least) // 3)
        assert text(model) == expected
        assert prefetcher(model)._passes >= TRIAL_PASSES
        assert prefetcher(model).on == pays
