"""What decides a step of the recipe's training: the arithmetic's type, updates, learning rate, penalty."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from recipe import optimizer, precision  # noqa: E402
from recipe.config import SIZES, Training  # noqa: E402
from recipe.schedule import Penalty, Schedule  # noqa: E402

TINY = Training(shape=SIZES["tiny"], tokens=8 * 4 * 64, batch_windows=4, micro_windows=2, warmup_steps=2)


def test_matrices_are_multiplied_in_what_the_processor_has(monkeypatch: pytest.MonkeyPatch) -> None:
    for has, expected in (({"amx_bf16": True}, torch.bfloat16), ({"bf16": False}, torch.float32)):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda has=has: has)
        assert precision.product_type() == expected


def test_updates_of_matrices_are_orthogonal_and_momentum_is_saved() -> None:
    stack = torch.randn(3, 16, 40, generator=torch.Generator().manual_seed(1))
    values = torch.linalg.svdvals(optimizer.orthogonal(stack))
    assert 0.5 < values.min() <= values.max() < 1.4
    layer = torch.nn.Linear(8, 20, bias=False)
    muon = optimizer.Muon([layer.weight], weight_decay=0.5)
    before = layer.weight.detach().clone()
    layer.weight.grad = torch.randn(20, 8, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        muon.step(0.1)
    change = layer.weight.detach() - before * (1 - 0.1 * 0.5)
    assert change.square().mean().sqrt() == pytest.approx(0.1 * optimizer.UPDATE_RMS, rel=0.2)
    assert (change * layer.weight.grad).sum() < 0


def test_the_learning_rate_warms_up_holds_and_falls_even_when_called_early() -> None:
    training = replace(TINY, tokens=100 * TINY.batch_tokens, warmup_steps=10)
    schedule = Schedule.of(training)
    rates = [schedule.learning_rate(step) / training.learning_rate for step in range(schedule.steps)]
    assert schedule.steps == 100
    assert rates[0] == 0.1
    assert rates[9:80] == [1.0] * 71
    assert rates[-1] == pytest.approx(1 / 20)
    schedule.decay_now(40)
    assert (schedule.decay_from, schedule.steps) == (40, 50)
    assert schedule.learning_rate(45) == pytest.approx(training.learning_rate / 2)


def test_the_penalty_grows_while_zeros_lack_and_shrinks_when_there_are_enough() -> None:
    few, many = Penalty(TINY), Penalty(TINY)
    for step in range(100, 200):
        few.observe(0.6, step, 100)
        many.observe(0.99, step, 100)
    assert many.weight < 1e-2 < few.weight
    assert few.target(0, 100) == 0.5
    assert few.target(100, 100) == TINY.target_zeros
