"""Recurrent layers on MLX's CPU device: any split, truncation, draft and saved state gives the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ondevice.converters.convert import convert
from ondevice.model.transformer import Transformer
from tests.conftest import mlx_on
from tests.model import test_recurrent_states as of_any
from tests.model.test_recurrent_states import LENGTH, empty
from tests.support.engines import every_logits, random_tokens, running
from tests.support.families import CASES, write_model

pytest.importorskip("mlx.core", exc_type=ImportError)
slow = pytest.mark.slow


@pytest.fixture(scope="module", params=["qwen3.5", pytest.param("lfm2", marks=slow)])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Transformer]:
    folder = tmp_path_factory.mktemp("recurrent")
    write_model(folder / "source", *CASES[request.param])
    bundle = convert(folder / "source", folder / "bundle", "q4")
    with mlx_on(gpu=False), running(bundle, "mlx") as loaded:
        yield loaded


@pytest.fixture(scope="module")
def text(model: Transformer) -> list[int]:
    return random_tokens(model.config, LENGTH)


@pytest.fixture(scope="module")
def whole(model: Transformer, text: list[int]) -> np.ndarray:
    return every_logits(model, text, empty(model))


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=slow), pytest.param(64, marks=slow)])
def test_chunks_of_any_size_give_the_same_bits(
    model: Transformer, text: list[int], whole: np.ndarray, step: int
) -> None:
    of_any.test_chunks_of_any_size_give_the_same_bits(model, text, whole, step)


def test_a_fork_is_independent(model: Transformer, text: list[int], whole: np.ndarray) -> None:
    of_any.test_a_fork_is_independent(model, text, whole)


def test_saved_states_are_found_again(
    model: Transformer, text: list[int], whole: np.ndarray, tmp_path: Path
) -> None:
    of_any.test_saved_states_are_found_again(model, text, whole, tmp_path)


def test_tokens_ahead_are_taken_back(model: Transformer, text: list[int], whole: np.ndarray) -> None:
    of_any.test_tokens_ahead_are_taken_back(model, text, whole)


def test_passes_that_fail_or_are_shared_leave_the_bits(
    model: Transformer, text: list[int], whole: np.ndarray
) -> None:
    of_any.test_a_cancelled_pass_leaves_the_states(model, text, whole)
    of_any.test_a_draft_that_fails_leaves_the_states(model, text, whole)
    of_any.test_texts_that_share_passes_are_those_that_they_are_alone(model, text, whole)


@slow
def test_drafts_leave_the_bits(model: Transformer, text: list[int], whole: np.ndarray) -> None:
    of_any.test_drafts_leave_the_bits(model, text, whole)
    of_any.test_drafts_of_texts_that_share_a_pass(model, text, whole)


@slow
def test_a_text_goes_on_from_any_place(model: Transformer, text: list[int], whole: np.ndarray) -> None:
    of_any.test_a_text_goes_on_from_any_place(model, text, whole)
