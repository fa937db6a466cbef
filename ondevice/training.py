"""What is trained for a bundle once it is converted, and measured on text that wasn't trained on."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ondevice.api import Name, load, open_model, text_tokenizer
from ondevice.bundle.predictors import OperatingPoint, Predictors
from ondevice.config import RuntimeConfig
from ondevice.engine import Prepared
from ondevice.errors import UsageError
from ondevice.scoring import Tally, windows

PIECE_TOKENS = 512
MEASURED_TOKENS = 2048
"""Most tokens on which the quality of every recall target is measured."""
TRAINED_SHARE = 0.9
"""Of the progress: the rest is measuring."""

OnProgress = Callable[[float, str], None]


def train_predictors(
    model: Name | None = None,
    text: str | None = None,
    *,
    pieces: Sequence[Sequence[int]] | None = None,
    output: Name | None = None,
    tokens: int | None = None,
    dram_budget: str | int = "auto",
    on_progress: OnProgress = lambda fraction, what: None,
) -> Predictors:
    """Train predictors of which neurons fire on `text`, and add them, and how often each fires, to the model.

    pieces: token ids instead of a text, each to be read from an empty context; the last ones measure.
    output: a new folder for a copy of the bundle that has them, whose files are links where they can be;
    without it they are added to the model's own. tokens: how much of the text to use at most.
    dram_budget: of the runs that measure quality, one per recall target. on_progress gets the share done,
    from 0 to 1, and what is being done.

    Raises, before it trains, UnsupportedModelError for a model whose gates are hardly ever zero, UsageError
    for too little text, an output that exists or a model that can't be written to, and what `load` raises.
    """
    from ondevice.converters import predictors as training

    prepared = open_model(model, RuntimeConfig(dram_budget=dram_budget))
    bundle = prepared.bundle
    options = training.PredictorOptions()
    if tokens is not None:
        options = replace(options, tokens=tokens)
    if (text is None) == (pieces is None):
        raise UsageError("give either a text or pieces of token ids")
    if pieces is None:
        pieces = text_pieces(prepared, text or "", options.tokens)
    measured = training.check(bundle, pieces, options)
    prepared.plan.require_fit(bundle.name)
    folder = bundle.path
    if output is None and not os.access(folder, os.W_OK):
        raise UsageError(f"{folder} can't be written to; give a new folder with --output")
    with ExitStack() as undo:
        if output is not None:
            folder = Path(output)
            training.copy_bundle(bundle, folder)
            # Made just now, so nothing in it is anybody's.
            undo.callback(shutil.rmtree, folder, ignore_errors=True)
        found = training.train_predictors(
            bundle, pieces, folder, options, lambda done, what: on_progress(TRAINED_SHARE * done, what)
        )
        # Usable from here on: what goes wrong in measuring loses no training.
        undo.pop_all()
    found = _measured(found, folder, measured, dram_budget, on_progress)
    training.save_predictors(found, folder)
    return found


def text_pieces(prepared: Prepared, text: str, tokens: int) -> list[list[int]]:
    """Ids of the text's first `tokens` tokens, in pieces that are read from an empty context each.

    None of a text of fewer than two. Raises UsageError if the model has no tokenizer.
    """
    ids = text_tokenizer(prepared).encode(text)[:tokens]
    settings = prepared.bundle.manifest.tokenizer
    context = min(PIECE_TOKENS, prepared.plan.max_context)
    return windows(ids, context, settings.bos_id if settings.add_bos else None) if len(ids) > 1 else []


def _measured(
    found: Predictors,
    folder: Path,
    pieces: Sequence[Sequence[int]],
    dram_budget: str | int,
    on_progress: OnProgress,
) -> Predictors:
    """With the perplexity of the dense model and of every operating point, and how often they agree."""
    count = max(1, sum(1 for index in range(len(pieces)) if _length(pieces[: index + 1]) <= MEASURED_TOKENS))
    pieces = pieces[:count]
    steps = 1 + len(found.points)
    on_progress(TRAINED_SHARE, f"quality, 1 of {steps}")
    perplexity, best = _run(folder, pieces, dram_budget, None)
    points: list[OperatingPoint] = []
    for point in found.points:
        step = 1 + len(points)
        on_progress(TRAINED_SHARE + (1 - TRAINED_SHARE) * step / steps, f"quality, {step + 1} of {steps}")
        theirs, chosen = _run(folder, pieces, dram_budget, point.recall)
        points.append(replace(point, perplexity=theirs, agreement=float(np.mean(best == chosen))))
    on_progress(1.0, "done")
    return replace(found, perplexity=perplexity, points=tuple(points))


def _run(
    folder: Path, pieces: Sequence[Sequence[int]], dram_budget: str | int, recall: float | None
) -> tuple[float | None, NDArray[np.intp]]:
    """Perplexity of pieces, and the likeliest token at every position; recall None: with every neuron.

    None for a perplexity that is infinite.
    """
    tally, likeliest = Tally(), []
    options = {} if recall is None else {"sparsity": "predicted", "predictor_recall": recall}
    with load(folder, dram_budget=dram_budget, **options) as model:
        for piece in pieces:
            logits = model.logits(piece[:-1])
            tally.add(logits, piece[1:])
            likeliest.append(logits.argmax(axis=1))
    perplexity = tally.score().perplexity
    return perplexity if math.isfinite(perplexity) else None, np.concatenate(likeliest)


def _length(pieces: Sequence[Sequence[int]]) -> int:
    return sum(len(piece) for piece in pieces)
