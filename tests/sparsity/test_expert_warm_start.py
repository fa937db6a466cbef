"""Experts read while the model is idle: the hottest first, more hits at once, and never another text."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from ondevice.api import Model, load
from ondevice.bundle.layout import expert_file_name
from ondevice.bundle.reader import Bundle
from ondevice.errors import FlashReadError
from ondevice.sparsity.experts import ExpertFetcher
from tests.support.bundles import copy_files
from tests.support.chat import squeeze
from tests.support.fault_rounds import assert_nothing_leaked
from tests.support.flash_files import flip_byte
from tests.support.trained_models import MIXTURE

PROMPT, TOKENS, CONTEXT, SEGMENTS = 16, 32, 512, 2
LAYERS, EXPERTS = 6, 32


@pytest.fixture(scope="module")
def text(pieces: list[list[int]]) -> list[int]:
    return pieces[0]


def fetcher(model: Model) -> ExpertFetcher:
    neurons = model._engine._neurons
    assert isinstance(neurons, ExpertFetcher)
    return neurons


def held(model: Model) -> NDArray[np.bool_]:
    """(L, E), whether each expert has a slot."""
    slots = model._owner.call(lambda: np.array(fetcher(model)._cache._slots))
    return slots.reshape(LAYERS, EXPERTS) >= 0


def wait_until(holds: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < give_up
        time.sleep(0.01)


def loaded(folder: Path) -> Model:
    """A model with room for two thirds of its experts, idle, whose cache was emptied."""
    model = load(folder, backend="cpu", max_context=CONTEXT)
    squeeze(model, SEGMENTS)

    def empty() -> None:
        room = fetcher(model)._cache._quota
        fetcher(model).resize([0])
        fetcher(model).resize([room])

    model._owner.call(empty)
    # What was idle work before may have ended at a full cache.
    model._owner.when_idle(model._engine.fill_ahead)
    return model


def is_full(model: Model) -> bool:
    return bool(model._owner.call(lambda: fetcher(model)._pool._spare <= 0))


def tokens(model: Model, text: list[int], **options: float) -> tuple[int, ...]:
    return tuple(model.generate(tokens=text[-PROMPT:], max_tokens=TOKENS, **options).tokens)


@pytest.mark.fast("options0")
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 5}])
def test_the_hottest_are_read_and_the_text_stays(
    calibrated: Path, text: list[int], options: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as never:
        never.setattr(ExpertFetcher, "fill", lambda _: False)
        with loaded(MIXTURE) as model:
            assert not held(model).any()
            expected, cold = tokens(model, text, **options), model.stats.neuron_cache_hit_rate
    counts = Bundle.open(calibrated).expert_counts()
    assert counts is not None
    with loaded(calibrated) as model:
        wait_until(lambda: is_full(model))
        found = held(model)
        # The best by worth: counts times how soon a layer comes.
        assert counts[found].mean() > 2 * counts[~found].mean()
        assert_nothing_leaked(model)
        assert fetcher(model).lookups == 0
        assert tokens(model, text, **options) == expected
        warm = model.stats.neuron_cache_hit_rate
        assert warm is not None
        assert cold is not None
        assert warm > cold + 0.02


def test_without_a_calibration_the_first_layers_are_read(text: list[int]) -> None:
    with loaded(MIXTURE) as model:
        wait_until(lambda: is_full(model))
        found = held(model).all(axis=1)
        assert found.any()
        assert not found[-1]
        assert found[: found.sum()].all()


def test_an_expert_that_cannot_be_read_ends_the_filling_and_no_more(
    calibrated: Path, text: list[int], tmp_path: Path
) -> None:
    folder = copy_files(calibrated, tmp_path / "bent")
    with loaded(calibrated) as model:
        wait_until(lambda: is_full(model))
        layer, expert = np.argwhere(held(model))[0].tolist()
        expected = tokens(model, text)
        records = fetcher(model)._records(layer)
        name, offset = expert_file_name(layer), records.offset(expert)
    flip_byte(folder / name, offset + 64)
    with loaded(folder) as model:
        wait_until(lambda: bool(held(model).any()))
        time.sleep(0.3)
        assert not is_full(model)
        assert not held(model)[layer, expert]
        assert_nothing_leaked(model)
        try:
            assert tokens(model, text) == expected
        except FlashReadError:
            assert_nothing_leaked(model)
