"""Measures a model's quality under several options: perplexity of a text, and agreement with the exact
model's choices.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ondevice.api import Model, load
from ondevice.budget.plan import Plan
from ondevice.bundle.expert_costs import ExpertCost
from ondevice.bundle.predictors import OperatingPoint
from ondevice.callbacks import OnProgress
from ondevice.model_config import ModelConfig
from ondevice.scoring import Tally

TRAINED_SHARE = 0.9
"""Share of the progress that is training; the rest is measuring."""

Pieces = Sequence[Sequence[int]]


def first_part_of(on_progress: OnProgress) -> OnProgress:
    """A callback whose progress from 0 to 1 is reported as a part of the training's progress."""
    return lambda done, what: on_progress(TRAINED_SHARE * done, what)


def measured_points(
    folder: Path,
    points: Sequence[OperatingPoint],
    options: Sequence[dict[str, Any]],
    pieces: Pieces,
    runtime: dict[str, Any],
    on_progress: OnProgress,
) -> tuple[float | None, tuple[OperatingPoint, ...]]:
    """The perplexity of the dense model, and the points completed by their perplexity and their agreement
    with it.

    options: for each point, the options of `load` that run the model at it, in addition to `runtime`.
    """
    steps = 1 + len(points)
    on_progress(TRAINED_SHARE, f"quality, 1 of {steps}")
    perplexity, best = _run(folder, pieces, runtime)
    measured: list[OperatingPoint] = []
    for point, chosen in zip(points, options, strict=True):
        step = 1 + len(measured)
        on_progress(TRAINED_SHARE + (1 - TRAINED_SHARE) * step / steps, f"quality, {step + 1} of {steps}")
        theirs, likeliest = _run(folder, pieces, runtime | chosen)
        measured.append(replace(point, perplexity=theirs, agreement=float(np.mean(best == likeliest))))
    on_progress(1.0, "done")
    return perplexity, tuple(measured)


def _run(folder: Path, pieces: Pieces, options: dict[str, Any]) -> tuple[float | None, NDArray[np.intp]]:
    """The perplexity of the pieces, None if it is infinite, and the likeliest token at every position.

    options: options for `load`. The model runs exactly unless they choose a lossy mode.
    """
    with load(folder, **options) as model:
        return _scored(model, pieces)


def _scored(model: Model, pieces: Pieces) -> tuple[float | None, NDArray[np.intp]]:
    """Perplexity of the pieces, None if it is infinite, and the likeliest token at every position."""
    tally, likeliest = Tally(), []
    for piece in pieces:
        logits = model.logits(piece[:-1])
        tally.add(logits, piece[1:])
        likeliest.append(logits.argmax(axis=1))
    perplexity = tally.score().perplexity
    return perplexity if math.isfinite(perplexity) else None, np.concatenate(likeliest)


def expert_costs(
    folder: Path,
    counts: Sequence[int],
    pieces: Pieces,
    runtime: dict[str, Any],
    on_progress: OnProgress,
) -> tuple[int, tuple[ExpertCost, ...]]:
    """The number of experts in memory, and the cost of choosing each of `counts` experts per token.

    The first count is the model's, with which the others are compared.
    """
    points: list[ExpertCost] = []
    best: NDArray[np.intp] | None = None
    in_memory = 0
    for experts in counts:
        step = len(points)
        on_progress(step / len(counts), f"quality, {step + 1} of {len(counts)}")
        with load(folder, **runtime, experts=experts) as model:
            if runtime["dram_budget"] == "auto":
                model.set_dram_budget(_half_budget(model.plan, model.config))
            before = model.counters
            perplexity, likeliest = _scored(model, pieces)
            after = model.counters
            room = min(_experts_in_all(model.config), model.plan.kept_slots)
        in_memory, best = (room, likeliest) if best is None else (in_memory, best)
        lookups = max(1, after.neuron_cache_lookups - before.neuron_cache_lookups)
        points.append(
            ExpertCost(
                experts,
                perplexity,
                agreement=float(np.mean(best == likeliest)),
                hits=(after.neuron_cache_hits - before.neuron_cache_hits) / lookups,
            )
        )
    return in_memory, tuple(points)


def _experts_in_all(config: ModelConfig) -> int:
    """The number of experts in all layers together."""
    return sum(layer.experts.count for layer in config.layers if layer.experts is not None)


def _half_budget(plan: Plan, config: ModelConfig) -> int:
    """The smallest budget, in bytes, that keeps half of the experts in memory, or as many as `plan` keeps if
    that is less.
    """
    half = min(_experts_in_all(config) // 2, plan.kept_slots)
    budgets = range(plan.least_budget_bytes, max(plan.budget_bytes, plan.least_budget_bytes) + 1)
    return budgets[bisect_left(budgets, half, key=lambda nbytes: plan.with_budget(nbytes).kept_slots)]
