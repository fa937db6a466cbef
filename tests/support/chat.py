"""Short generations of the small chat bundle, which several test files compare."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import ondevice
from ondevice import host
from ondevice.api import Model
from ondevice.budget.plan import REPEAT_MARGIN_BYTES
from ondevice.callbacks import Cancelled, IsCancelled
from ondevice.errors import OndeviceError
from ondevice.generate import Steps, watched
from ondevice.model.shared_passes import PassRequest
from ondevice.runtime.engine import Engine
from ondevice.sparsity.fetch import FetchOptions
from tests.support.bundles import EOS

PROMPT = "Once upon a time"
GROWN_BYTES = 1 << 20


def greedy(model: Model, count: int = 24, **options: Any) -> tuple[int, ...]:
    return model.generate(PROMPT, max_tokens=count, logit_bias={EOS: -math.inf}, **options).tokens


def budget_between(bundle: Path, quarters: float, **options: Any) -> int:
    """A budget from the smallest (0) to everything resident (4), by what this process holds right now.

    It may hold a little more once the model is loaded, which everything resident has no room for.
    """
    plan = ondevice.inspect(bundle, **options)
    budget = plan.minimum_budget_bytes + (plan.full_bytes - plan.minimum_budget_bytes) * quarters / 4
    return int(budget + GROWN_BYTES * (quarters // 4))


def squeeze(model: Model, segments: int = 0) -> None:
    """Keep a loaded model to what it needs with a full context, and to `segments` segments if there are any.

    Beside small models' neurons the scratch memory of a long prompt is large: it isn't theirs here. Matrices
    of every token are in memory where segments are.
    """
    model._engine.plan = replace(model.plan, decode_activation_bytes=model.plan.activation_bytes)
    bare = model.plan.minimum_budget_bytes - REPEAT_MARGIN_BYTES
    matrices = model.plan.matrices
    if segments and matrices is not None:
        bare += matrices.total_bytes - matrices.shared_bytes
    model.set_dram_budget(bare + segments * model.plan.segment.nbytes)


def fetch_with(monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    """Models that are loaded from here on keep and read their selected neurons as `FetchOptions` say."""
    monkeypatch.setattr(host, "Engine", partial(Engine, fetch=FetchOptions(**options)))


def pause_engine(
    model: Model, monkeypatch: pytest.MonkeyPatch, work: str = "steps", after: int = 2
) -> list[Any]:
    """After `after` items of its work the engine waits to be cancelled; what it makes is listed.

    Requests for passes aren't items.
    """
    made: list[Any] = []
    run = getattr(model._engine, work)

    def pausing(*arguments: Any) -> Iterator[Any]:
        cancelled: IsCancelled = next(filter(callable, arguments))
        answer: Any = None
        made_by = run(*arguments)
        while True:
            try:
                item = made_by.throw(answer) if isinstance(answer, Exception) else made_by.send(answer)
            except StopIteration:
                return
            if not isinstance(item, PassRequest):
                made.append(item)
            try:
                answer = yield item
            except (OndeviceError, Cancelled) as error:
                answer = error
            if not isinstance(item, PassRequest) and len(made) == after:
                give_up = time.monotonic() + 20.0
                while not cancelled() and time.monotonic() < give_up:
                    time.sleep(0.001)

    monkeypatch.setattr(model._engine, work, pausing)
    return made


def slow_down(model: Model, monkeypatch: pytest.MonkeyPatch, seconds: float = 0.02) -> None:
    """Have the engine take longer for a token, so that there is time to act meanwhile."""
    steps = model._engine.steps

    def slow(*arguments: Any) -> Steps[None]:
        return watched(steps(*arguments), lambda event: time.sleep(seconds))

    monkeypatch.setattr(model._engine, "steps", slow)
