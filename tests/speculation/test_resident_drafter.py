"""Drafts of the model itself are chosen from frequent tokens, whose rows of the head are held first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np
import pytest

import ondevice.bundle.matrix_units
from ondevice.api import Model, load
from ondevice.backends.cpu_matrices import StreamedHead
from ondevice.config import SamplingConfig
from ondevice.model.transformer import Transformer
from ondevice.speculation.drafters.resident import ResidentDrafter
from tests.support.trained_models import TWIN

T = TypeVar("T")


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[Model]:
    """A model whose head is cut into units, of which a third is the draft head."""
    monkeypatch.setattr(ondevice.bundle.matrix_units, "HEAD_UNIT_BYTES", 32 << 10)
    with load(TWIN, sparsity="dense", speculation="resident", max_context=128, threads=1) as model:
        yield model


def on_its_thread(model: Model, call: Callable[[Transformer], T]) -> T:
    transformer = model._engine._generator.transformer
    return model._owner.call(lambda: call(transformer))


def test_frequent_tokens_are_the_first_and_have_the_bits_of_the_head(model: Model) -> None:
    def logits(transformer: Transformer) -> tuple[int, bytes, bytes]:
        states = np.random.default_rng(5).standard_normal((3, transformer.config.hidden_size), np.float32)
        first = transformer.frequent_tokens
        return (
            first,
            transformer.checked_logits(states)[:, :first].tobytes(),
            transformer.frequent_logits(states).tobytes(),
        )

    first, expected, logits_of_frequent = on_its_thread(model, logits)
    assert 0 < first < model.config.vocab_size // 2
    assert logits_of_frequent == expected


def test_rare_tokens_are_chosen_where_the_head_is_held_and_else_nothing_is_computed(model: Model) -> None:
    def chances(transformer: Transformer) -> list[float]:
        head, frequent = transformer.weights.head, transformer.frequent_tokens
        assert isinstance(head, StreamedHead)
        chances = []
        for token in (0, frequent):
            for held in (True, False):
                drafter = ResidentDrafter(transformer)
                for text in ([frequent - token] * 8, [token] * 8):
                    drafter.begin(text, SamplingConfig())
                last = head.units[-1]
                kept, last.held = last.held, last.held if held else None
                chances.append(drafter.computed_chance)
                last.held = kept
        return chances

    model.generate("Hi", max_tokens=2)
    frequent_held, frequent_missing, rare_held, rare_missing = on_its_thread(model, chances)
    assert frequent_held == frequent_missing == rare_held > 0
    assert rare_missing == 0
