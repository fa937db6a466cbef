"""Prefetches: whatever becomes of them, the text is the same, and they pay or are turned off for a while."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ondevice.api import Model, load
from ondevice.backends.base import Int32
from ondevice.runtime.models import shipped_folder
from ondevice.sparsity.fetch import NeuronFetcher
from ondevice.sparsity.prefetch import TRIAL_PASSES, Prefetcher
from ondevice.sparsity.record_reads import Parts
from ondevice.sparsity.reserved_reads import ReservedReads
from tests.support.bundles import convert_bundle, write_chat_checkpoint
from tests.support.chat import greedy, squeeze
from tests.support.fault_rounds import assert_nothing_leaked

SHAPE = {"num_hidden_layers": 6, "intermediate_size": 3000, "hidden_act": "relu"}
TOKENS = 36
UP_AND_DOWN = Parts(1, 1)


@pytest.fixture(scope="module")
def relu_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("relu")
    return convert_bundle(write_chat_checkpoint(folder / "checkpoint", **SHAPE), folder / "relu")


@pytest.fixture(scope="module")
def expected(relu_bundle: Path) -> tuple[int, ...]:
    with load(relu_bundle, sparsity="dense") as model:
        return greedy(model, TOKENS)


@pytest.fixture
def model(relu_bundle: Path) -> Iterator[Model]:
    """With room for a third of its neurons."""
    with load(relu_bundle, sparsity="exact") as loaded:
        segment = loaded.plan.segment
        squeeze(loaded, (segment.total - segment.least) // 3)
        yield loaded


def prefetching(model: Model) -> Prefetcher:
    neurons = model._engine._neurons
    assert isinstance(neurons, NeuronFetcher)
    return neurons._prefetcher


@pytest.fixture
def slow_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers take so long that all prefetches are read, where these small ones would leave no time."""

    def waiting(prefetcher: Prefetcher, *arguments: Any, original: Any = Prefetcher.prefetch) -> None:
        original(prefetcher, *arguments)
        while not all(it.reads.done() for it in prefetcher._prefetches):
            time.sleep(0.0001)

    monkeypatch.setattr(Prefetcher, "prefetch", waiting)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch, slow_layers: None) -> None:
    """They never rest."""
    monkeypatch.setattr("ondevice.sparsity.prefetch.TRIAL_PASSES", 1 << 40)


@pytest.mark.usefixtures("always")
def test_prefetches_hit_and_change_nothing(model: Model, expected: tuple[int, ...]) -> None:
    response = model.generate("Once upon a time", max_tokens=1)
    assert greedy(model, TOKENS) == expected
    quality, stats = prefetching(model).quality, model.stats
    # Random layers agree little on what fires; chance alone would find what is selected of everything.
    assert 0 < quality.used < quality.begun
    assert quality.wasted_bytes == (quality.begun - quality.used) * prefetching(model)._cache.slot_bytes
    assert 0 < stats.prefetch_recall < 1
    assert 0 < stats.prefetch_wasted_bytes <= quality.wasted_bytes
    assert stats.neuron_cache_hit_rate < 1
    assert response.stats.prefetch_wasted_bytes <= quality.wasted_bytes
    assert_nothing_leaked(model)


@pytest.mark.usefixtures("slow_layers")
def test_what_a_draft_lacked_is_read_first(model: Model, expected: tuple[int, ...]) -> None:
    """Of the first layer before the pass begins, of others beside what is prefetched; once each."""
    model.generate("Once upon a time", max_tokens=1)
    own, count = prefetching(model), 3000

    def prefetch_twice() -> None:
        wanted: dict[int, set[int]] = {}
        for layer in (0, 1):
            absent = own._cache.absent(layer)
            scores = np.zeros((2, count), np.float32)
            scores[1, absent[:5]], scores[0, absent[5:9]], scores[0, absent[9:12]] = 1, 2, -1
            own.expect(layer, scores)
            wanted[layer] = set(absent[:9].tolist())
        own.begin_expected()
        assert [set(one.reservation.ids.tolist()) for one in own._prefetches] == [wanted[0]]
        own.prefetch(1, 1, lambda: np.full((1, count), -1, np.float32))
        assert [set(one.reservation.ids.tolist()) for one in own._prefetches] == [wanted[0], wanted[1]]
        own.drop()
        own.begin_expected()
        assert not own._prefetches

    model._owner.call(prefetch_twice)
    assert greedy(model, TOKENS) == expected
    assert_nothing_leaked(model)


@pytest.mark.usefixtures("always")
def test_prefetches_know_a_real_model() -> None:
    """Half of what is prefetched is wanted, where a fourteenth of all neurons fires."""
    with load(shipped_folder() / "small-relu", sparsity="exact") as model:
        squeeze(model, model.plan.segment.total // 3)
        model.generate("It was a cold morning, and the old man", max_tokens=60)
        quality = prefetching(model).quality
        assert quality.begun > 300, "too few to judge by"
        assert quality.used > 0.4 * quality.begun


@pytest.mark.usefixtures("always")
def test_a_prefetch_that_fails_is_read_again(
    model: Model, expected: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A third of the prefetches fails after all; their neurons are absent then, and read once more."""
    finish, failed = Prefetcher._ends, []

    def failing(prefetcher: Prefetcher, one: Any) -> bool:
        assert finish(prefetcher, one)
        failed.append(len(failed) % 3 == 0)
        return not failed[-1]

    monkeypatch.setattr(Prefetcher, "_ends", failing)
    assert greedy(model, TOKENS) == expected
    assert sum(failed) > TOKENS
    assert_nothing_leaked(model)


@pytest.mark.usefixtures("always")
def test_a_pass_given_up_leaves_no_prefetch_behind(model: Model, expected: tuple[int, ...]) -> None:
    for most in (1, 3, 7):
        stream = model.stream("Once upon a time", max_tokens=TOKENS)
        for _, _ in zip(range(most), stream, strict=False):
            pass
        stream.close()
        assert_nothing_leaked(model)
    assert greedy(model, TOKENS) == expected


@pytest.mark.usefixtures("slow_layers")
def test_prefetches_that_only_cost_are_off_and_try_again(
    model: Model, expected: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def useless(
        prefetcher: Prefetcher, begun: int, used: int, *times: float, original: Any = Prefetcher.count
    ) -> None:
        original(prefetcher, begun, 0, *times)

    monkeypatch.setattr(Prefetcher, "count", useless)
    on = []

    def passing(prefetcher: Prefetcher, original: Any = Prefetcher.next_pass) -> None:
        original(prefetcher)
        on.append(prefetcher.on)

    monkeypatch.setattr(Prefetcher, "next_pass", passing)
    back_off = 40
    monkeypatch.setattr("ondevice.sparsity.prefetch.BACK_OFF_PASSES", back_off)
    while len(on) <= 2 * TRIAL_PASSES + back_off:
        assert greedy(model, TOKENS) == expected
    changes = [index for index in range(1, len(on)) if on[index] != on[index - 1]]
    again = TRIAL_PASSES + back_off
    assert changes[:3] == [TRIAL_PASSES - 1, again - 1, again + TRIAL_PASSES - 1]
    assert not on[TRIAL_PASSES]


@pytest.mark.usefixtures("slow_layers")
def test_predicted_text_is_the_same_with_prefetches_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    shipped: dict[bool, tuple[int, ...]] = {}
    for prefetch in (True, False):
        with monkeypatch.context() as patch:
            if not prefetch:
                patch.setattr(Prefetcher, "prefetch", lambda *arguments: None)
            with load(sparsity="predicted") as loaded:
                squeeze(loaded, 2)
                shipped[prefetch] = loaded.generate("Once upon a time", max_tokens=TOKENS).tokens
                assert (prefetching(loaded).quality.begun > 0) is prefetch
    assert shipped[True] == shipped[False]


@pytest.mark.usefixtures("slow_layers")
def test_what_was_filled_ahead_meanwhile_is_not_read_into_a_slot_that_is_free(
    model: Model, expected: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between a prefetch and its turn the same neurons are filled ahead; its own slots stay taken."""
    twice = []

    def meanwhile(prefetcher: Prefetcher, layer: int, original: Any = Prefetcher.commit) -> Int32:
        cache = prefetcher._cache
        for reservation, halt in [
            (it.reservation, it.halt) for it in prefetcher._prefetches if it.reservation.layer == layer
        ]:
            count = min(halt(), 20)
            reads = ReservedReads(model._engine._reader, cache, UP_AND_DOWN, gap_bytes=0)
            filled = reads.begin(prefetcher._layers[layer].source.file, layer, reservation.ids[:count])
            assert filled is not None
            assert reads.ends()
            cache.commit(layer, filled.ids, filled.slots)
            ids = original(prefetcher, layer)
            assert not np.isin(reservation.ids[:count], ids).any()
            assert not np.isin(reservation.slots[:count], cache._free[: cache._num_free]).any()
            twice.append(count)
            return ids
        return original(prefetcher, layer)

    monkeypatch.setattr(Prefetcher, "commit", meanwhile)
    assert greedy(model, TOKENS) == expected
    assert sum(twice) > 0
    assert_nothing_leaked(model)
