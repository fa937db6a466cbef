"""Trains sidecars for a converted bundle: predictors, streams, datastores and calibrations, measured on
held-out text.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypedDict, Unpack

import numpy as np

from ondevice.api import Name, open_model
from ondevice.budget.sizes import SlotShape
from ondevice.bundle.expert_costs import EXPERT_COSTS_SIDECAR, ExpertCosts, expert_costs_text
from ondevice.bundle.expert_use import ExpertUse
from ondevice.bundle.manifest import TokenizerInfo
from ondevice.bundle.ngrams import Ngrams
from ondevice.bundle.predictors import Predictors
from ondevice.bundle.sidecar import NO_SIDECARS, weights_digest
from ondevice.bundle.streams import MultiStreamMode, MultiStreams
from ondevice.callbacks import OnProgress, ignore_progress
from ondevice.config import (
    EXPERT_TOKENS,
    NGRAM_TOKENS,
    TRAIN_TOKENS,
    BackendName,
    RuntimeConfig,
)
from ondevice.errors import BackendUnavailableError, UnsupportedModelError, UsageError
from ondevice.generate import token_ids
from ondevice.host import text_tokenizer
from ondevice.runtime.conversion import Prepared
from ondevice.runtime.models import ConversionProgress, output_path
from ondevice.runtime.resolving import ResolvedModel
from ondevice.scoring import windows
from ondevice.settings import require_fields
from ondevice.tokenizer import Tokenizer, load_tokenizer
from ondevice.training.quality import Pieces, expert_costs, first_part_of, measured_points

PIECE_TOKENS = 512
MEASURED_TOKENS = 2048
"""Default for the most tokens on which the quality of each operating point is measured."""

Text = str | Iterable[str]
"""A text, or its parts as they are read. No more parts are read than needed."""


def train_predictors(
    model: Name | None = None,
    text: Text | None = None,
    *,
    pieces: Pieces | None = None,
    output: Name | None = None,
    tokens: int | None = None,
    measured_tokens: int = MEASURED_TOKENS,
    order: bool = False,
    backend: BackendName = "auto",
    dram_budget: str | int = "auto",
    on_progress: OnProgress = ignore_progress,
) -> Predictors:
    """Train predictors of the neurons that fire, and add them and each neuron's firing rate to the model.

    Args:
        model: a path, a name or an alias. The default is the model that ships.
        text: the text to learn from, or None for `pieces`.
        pieces: token ids instead of a text, each piece read from an empty context. The last only measure.
        output: a new folder for a copy with the predictors. The default is the model's folder.
        tokens: most tokens of the text to use.
        measured_tokens: most tokens that perplexity and agreement are measured on; they don't train.
        order: whether to sort the neurons' records first, so that neurons that fire together are read
            together. This rewrites the bundle, unless a text has ordered it before.
        backend: the backend that runs the model, fits, and measures quality: `cpu` or `mlx`.
        dram_budget: budget of the runs that measure quality, one run per recall target.
        on_progress: called with the share done, from 0 to 1, and the current step.

    Before training, raises UnsupportedModelError for a model whose gates are hardly ever zero, UsageError for
    too little text, an output that exists or a model that can't be written to, BackendUnavailableError for
    `reference` and for `mlx` if it isn't installed, and what else `load` raises.
    """
    from ondevice.converters.training.predictors import train as training

    runtime: dict[str, Any] = {"dram_budget": dram_budget, "backend": backend}
    resolved = open_model(model, RuntimeConfig(**runtime))
    settled = resolved.runtime.backend
    if settled not in ("cpu", "mlx"):
        raise BackendUnavailableError(
            f"--backend {settled} multiplies every neuron, so there is nothing to predict for it: training "
            "predictors takes cpu or mlx"
        )
    options = training.PredictorOptions()
    if tokens is not None:
        options = replace(options, tokens=tokens)
    goal = _check_target(resolved, output)
    pieces = _pieces(resolved, text, pieces, options.tokens)
    measured = training.check(resolved.bundle, pieces, options)
    with _target(resolved, goal) as folder:
        predictors = training.train_predictors(
            resolved.bundle,
            pieces,
            folder,
            options,
            first_part_of(on_progress),
            backend=settled,
            order=order,
        )
    # The bundle at `goal` is usable now: a failure while measuring loses no training.
    perplexity, points = measured_points(
        goal,
        predictors.points,
        [{"sparsity": "predicted", "predictor_recall": point.recall} for point in predictors.points],
        spread(measured, measured_tokens),
        runtime,
        on_progress,
    )
    predictors = replace(predictors, perplexity=perplexity, points=points)
    training.save_predictors(predictors, goal)
    return predictors


def train_expert_costs(
    model: Name | None = None,
    text: Text | None = None,
    *,
    pieces: Pieces | None = None,
    output: Name | None = None,
    tokens: int = TRAIN_TOKENS,
    measured_tokens: int = MEASURED_TOKENS,
    dram_budget: str | int = "auto",
    on_progress: OnProgress = ignore_progress,
) -> ExpertCosts:
    """Measure the quality that fewer experts per token cost, and add the figures to the model.

    The model runs once with its number of experts and once with each smaller number, always with the same
    memory. Runs go token by token, as decoding does, and each piece begins with an empty context. Any text
    will do that the model wasn't trained on.

    Args:
        model: as in `train_predictors`, like `text`, `pieces`, `output` and `on_progress`.
        tokens: most tokens of the text to take pieces from.
        measured_tokens: most tokens of the pieces, which are spread over the text.
        dram_budget: budget of the runs; "auto" leaves room for half of the experts.

    Before measuring, raises UnsupportedModelError for a model without experts, or whose router is a
    sparsemixer, UsageError for too little text, an output that exists or a model that can't be written to,
    and what else `load` raises.
    """
    from ondevice.converters.training.sidecars import save_sidecar

    runtime: dict[str, Any] = {
        "dram_budget": dram_budget,
        "backend": "cpu",
        "memory_pressure": "off",
        "speculation": "off",
        "prefill_chunk": 1,
    }
    resolved = open_model(model, RuntimeConfig(**runtime))
    goal = _check_target(resolved, output, has_experts=True)
    experts = resolved.bundle.config.experts
    assert experts is not None
    if experts.scoring == "sparsemixer":
        raise UnsupportedModelError(
            f"{resolved.bundle.name} has no lossy options to measure: its router is a sparsemixer"
        )
    measurable = [piece for piece in _pieces(resolved, text, pieces, tokens) if len(piece) > 1]
    if not measurable:
        raise UsageError("the text is too short to measure: it takes at least two tokens")
    chosen = spread(measurable, measured_tokens)
    # The budget holds a full context, so the context is only as long as the pieces.
    runtime["max_context"] = max(map(len, chosen))
    counts = range(experts.chosen, 0, -1)
    in_memory, points = expert_costs(resolved.bundle.path, counts, chosen, runtime, on_progress)
    costs = ExpertCosts(weights_digest(resolved.bundle.manifest), sum(map(len, chosen)), in_memory, points)
    with _target(resolved, goal) as folder:
        save_sidecar(EXPERT_COSTS_SIDECAR, expert_costs_text(costs), folder)
    on_progress(1.0, "done")
    return costs


def train_expert_use(
    model: Name | None = None,
    text: Text | None = None,
    *,
    pieces: Pieces | None = None,
    output: Name | None = None,
    tokens: int = EXPERT_TOKENS,
    dram_budget: str | int = "auto",
    on_progress: OnProgress = ignore_progress,
) -> ExpertUse:
    """Count how often tokens choose each expert, and the hits of expert caches by size.

    Adds both to the model, so that `inspect` shows the hit rate of a budget.

    Args:
        model: as in `train_predictors`, like `text`, `pieces`, `output` and `on_progress`.
        tokens: most tokens of the text to use.
        dram_budget: budget of the run; the counts don't depend on it.

    Before running, raises UnsupportedModelError for a model without experts, UsageError for too little text,
    an output that exists or a model that can't be written to, and what `load` raises.
    """
    from ondevice.converters.training import expert_use

    resolved = open_model(model, RuntimeConfig(dram_budget=dram_budget, backend="cpu"))
    pieces = _pieces(resolved, text, pieces, tokens)
    expert_use.check(resolved.bundle, pieces)
    goal = _check_target(resolved, output, has_experts=True)
    with _target(resolved, goal) as folder:
        room = _expert_room(resolved)
        return expert_use.calibrate_experts(resolved.bundle, pieces, folder, room, on_progress)


def train_ngrams(
    model: Name | None = None,
    text: Text | None = None,
    *,
    pieces: Pieces | None = None,
    output: Name | None = None,
    tokens: int = NGRAM_TOKENS,
    on_progress: OnProgress = ignore_progress,
) -> Ngrams:
    """Sort what follows every few tokens of `text` into a datastore for drafts, and add it to the model.

    The model doesn't run, so this takes only seconds. Text that resembles the model's answers is best.

    Args:
        model: as in `train_predictors`, like `text`, `pieces`, `output` and `on_progress`.
        tokens: most tokens of the text to use. Each takes 48 bytes of the file.

    Raises UsageError for a model without a tokenizer, too short or too long a text, ids outside the
    vocabulary, an output that exists or a model that can't be written to, and what `load` raises.
    """
    from ondevice.converters.training import ngrams

    resolved = open_model(model, RuntimeConfig(backend="cpu"))
    if (text is None) == (pieces is None):
        raise UsageError("give either a text or pieces of token ids")
    tokenizer = text_tokenizer(resolved)
    if pieces is None:
        parts = [text] if isinstance(text, str) else text or ()
        pieces = [tokenizer.encode_within(parts, add_bos=False, most=tokens)[:tokens]]
    goal = _check_target(resolved, output, has_experts=resolved.bundle.config.experts is not None)
    ids = token_ids(islice(chain.from_iterable(pieces), tokens))
    known = resolved.bundle.config.vocab_size
    for token in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= token < known:
            raise UsageError(f"token id {token} is outside the model's vocabulary of {known}")
    with _target(resolved, goal) as folder:
        return ngrams.train_ngrams(resolved.bundle, np.array(ids, np.uint32), folder, on_progress)


class MultiStreamKeywords(TypedDict, total=False):
    """Keyword options of `train_streams`: the fields of MultiStreamOptions, which holds their defaults."""

    mode: MultiStreamMode
    gamma: int
    layers: int
    attention_rank: int
    feed_forward_rank: int
    most_of_model: float
    bits: Literal[4, 8, 16]
    tokens: int
    learning_rate: float
    batch_tokens: int
    run_tokens: int
    steps: int
    seed: int


def train_streams(
    model: Name | None = None,
    text: Text | None = None,
    *,
    pieces: Pieces | None = None,
    output: Name | None = None,
    replace: bool = False,
    on_progress: OnProgress = ignore_progress,
    on_step: Callable[[int, float], None] = lambda tokens, loss: None,
    **options: Unpack[MultiStreamKeywords],
) -> MultiStreams:
    """Train streams, adapters that draft several tokens at once, and add them to the model.

    Args:
        model: as in `train_predictors`, like `text`, `pieces`, `output` and `on_progress`.
        replace: replace the model's streams, if it has some and there is no output.
        on_step: called after each step with the number of trained tokens and the loss in nats.
        options: how they are trained, such as `mode`. "lossless" leaves the model as it is;
            "shared" changes the model too.

    An interrupted training, called again with the same arguments, continues where it stopped and gives the
    same numbers. It keeps a folder `<name>.streams.training` next to the output or the model's folder.

    Before training, raises BackendUnavailableError without MLX, and UsageError for an option out of range,
    too little text, streams that would be lost, an output that exists, a model that can't be written to, or
    remains of a training with other arguments. Raises what `load` raises.
    """
    from ondevice.converters.training.streams.options import MultiStreamOptions

    require_fields(MultiStreamOptions, options)
    chosen = MultiStreamOptions(**options)
    resolved = open_model(model, RuntimeConfig())
    goal = _check_target(resolved, output)
    training = _stream_training()
    pieces = _pieces(resolved, text, pieces, chosen.tokens)
    training.check(resolved.bundle, pieces, chosen)
    old = resolved.bundle.streams
    if old is not None and output is None and not replace:
        raise UsageError(
            f"{resolved.bundle.name} has streams already, trained on {old.trained_tokens} tokens, which new "
            "ones would replace: name another folder with --output, or give --replace"
        )
    left = goal.with_name(f"{goal.name}.streams.training")
    trained = training.train_streams(resolved.bundle, pieces, left, chosen, on_progress, on_step)
    with _target(resolved, goal) as folder:
        streams: MultiStreams = trained.write(folder)
    training.forget(left)
    return streams


def _stream_training() -> ModuleType:
    """The module that trains streams. Raises BackendUnavailableError if MLX can't be imported."""
    try:
        from ondevice.converters.training.streams import train
    except ImportError as error:
        raise BackendUnavailableError(
            f"training streams takes MLX, which can't be imported ({error}): pip install 'ondevice[mlx]'"
        ) from error
    return train


def train_converted(
    prepared: Prepared,
    text: Text,
    *,
    on_progress: Callable[[ConversionProgress], None] | None = None,
    on_training: OnProgress = ignore_progress,
    resume: bool = False,
    force: bool = False,
) -> Path:
    """Convert an open checkpoint. Use `text` to round weights of 4 to 6 bits, to order the neurons, and to
    train predictors.

    For a model with experts, the choices of experts are counted instead. If gates are hardly ever zero, the
    text is used only for rounding.

    The bundle gets its name at the end: an interrupted run leaves no bundle under that name. A resumed run
    runs the text through the layers again and gives the same bytes as an uninterrupted one. on_training is
    called with the share of the training that is done, and its current step.

    Raises what `convert` and `train_predictors` raise. Before anything is written, raises UsageError for a
    model without a tokenizer and for too little text.
    """
    from ondevice.converters.checkpoints.base import Checkpoint
    from ondevice.converters.convert import Training
    from ondevice.converters.rounding.layers import most_tokens
    from ondevice.converters.training.predictors import train as training
    from ondevice.converters.training.sidecars import held_out

    options = training.PredictorOptions()

    def begin(checkpoint: Checkpoint) -> Training | None:
        config, info = checkpoint.config, checkpoint.tokenizer.info
        if info.kind is None or info.file is None:
            raise UsageError(
                f"{checkpoint.name} has no tokenizer, so it can learn nothing from a text: convert it "
                "without --text, or put its tokenizer's files beside it"
            )
        data = checkpoint.tokenizer.blobs[info.file]
        tokenizer = load_tokenizer(info.kind, data, info.bos_id, info.eos_ids, info.add_bos)
        pieces = _text_pieces(tokenizer, info, text, options.tokens, config.original_context)
        measured = held_out(pieces, options.measured_share)
        rounding = spread(pieces[: len(pieces) - len(measured)], most_tokens(config))

        def train(folder: Path) -> None:
            if config.experts is not None:
                train_expert_use(folder, pieces=spread(pieces, EXPERT_TOKENS), on_progress=on_training)
            else:
                train_predictors(folder, pieces=pieces, order=True, on_progress=on_training)

        # A text only rounds weights if every neuron is multiplied, or if a layer has none.
        records = config.experts is not None or (
            config.zeros_gates and not config.any_layer(lambda it: not it.has_feed_forward)
        )
        name = hashlib.sha256(repr(pieces).encode()).hexdigest()[:32]
        return Training(name, train if records else None, rounding)

    return prepared.run(on_progress, resume=resume, force=force, begin_training=begin)


def convert_by_random_tokens(
    prepared: Prepared,
    *,
    on_progress: Callable[[ConversionProgress], None] | None = None,
    resume: bool = False,
    force: bool = False,
) -> Path:
    """Convert a checkpoint, with error feedback from random tokens instead of a text.

    Raises what `convert` raises, and UsageError if no weights have 4 to 6 bits.
    """
    from ondevice.converters.checkpoints.base import Checkpoint
    from ondevice.converters.convert import Training
    from ondevice.converters.rounding.layers import random_pieces, rounds_any

    if not rounds_any(prepared.quant):
        raise UsageError(
            f"--random-text rounds weights of 4 to 6 bits, and there would be none as {prepared.quant.name}; "
            "take --quant q4, q5 or q6, or convert without it"
        )

    def begin(checkpoint: Checkpoint) -> Training:
        pieces = random_pieces(checkpoint.config, checkpoint.tokenizer.info.bos_id)
        return Training("random tokens", None, pieces, is_random=True)

    return prepared.run(on_progress, resume=resume, force=force, begin_training=begin)


def text_pieces(resolved: ResolvedModel, text: Text, tokens: int) -> list[list[int]]:
    """The ids of the text's first `tokens` tokens, in pieces that each begin with an empty context.

    If the text has fewer than two tokens, there are no pieces. Raises UsageError if the model has no
    tokenizer.
    """
    info = resolved.bundle.manifest.tokenizer
    return _text_pieces(text_tokenizer(resolved), info, text, tokens, resolved.plan.max_context)


def _text_pieces(
    tokenizer: Tokenizer, info: TokenizerInfo, text: Text, tokens: int, max_context: int
) -> list[list[int]]:
    parts = [text] if isinstance(text, str) else text
    ids = tokenizer.encode_within(parts, most=tokens)[:tokens]
    context = min(PIECE_TOKENS, max_context)
    return list(windows(ids, context, info.bos_id if info.add_bos else None)) if len(ids) > 1 else []


def spread(pieces: Pieces, tokens: int) -> Pieces:
    """Evenly spaced ones of `pieces`, as many as have at most `tokens` tokens in all, but at least one piece.

    The first pieces alone might all be from one kind of text.
    """
    for count in range(min(len(pieces), tokens), 1, -1):
        chosen = [pieces[(2 * index + 1) * len(pieces) // (2 * count)] for index in range(count)]
        if sum(len(piece) for piece in chosen) <= tokens:
            return chosen
    return [pieces[len(pieces) // 2]]


def _pieces(resolved: ResolvedModel, text: Text | None, pieces: Pieces | None, tokens: int) -> Pieces:
    if (text is None) == (pieces is None):
        raise UsageError("give either a text or pieces of token ids")
    return text_pieces(resolved, text or "", tokens) if pieces is None else pieces


def _expert_room(resolved: ResolvedModel) -> Any:
    """The memory that the plan has for neurons of a model with experts, during a pass over a text."""
    from ondevice.converters.training.expert_use import DenseRoom, ExpertRoom

    plan, shape, dense = resolved.plan, resolved.plan.segment, None
    if plan.dense is not None:
        buffers = plan.buffers
        dense = DenseRoom(
            plan.dense.neurons,
            plan.dense.nbytes,
            plan.dense_quota,
            buffers.neurons,
            buffers.slot_bytes,
            buffers.slots,
        )
    assert isinstance(shape, SlotShape)
    segments = max(shape.least, plan.segments_for(plan.kv_cache_bytes))
    return ExpertRoom(shape.slot_bytes, shape.slots, segments, dense)


def _check_target(resolved: ResolvedModel, output: Name | None, has_experts: bool = False) -> Path:
    """The folder for the result of a training: the model's folder, or `output`.

    Raises UsageError if the model's folder can't be written to or `output` exists, UnsupportedModelError if
    the model can't be trained for, and what `load` raises for a budget that is too small.
    """
    if (resolved.bundle.config.experts is not None) != has_experts:
        why = "it has no experts" if has_experts else NO_SIDECARS
        raise UnsupportedModelError(f"{resolved.bundle.name} can't be trained for: {why}")
    resolved.require_fit(only_budget=True)
    folder = resolved.bundle.path if output is None else output_path(output).absolute()
    if output is None and not os.access(folder, os.W_OK):
        raise UsageError(f"{folder} can't be written to; give a new folder with --output")
    if output is not None and os.path.lexists(folder):
        raise UsageError(f"{output} exists; choose a new folder, or leave --output out to add to the bundle")
    return folder


@contextmanager
def _target(resolved: ResolvedModel, goal: Path) -> Iterator[Path]:
    """A context with the folder to write to: the model's, or a copy that becomes `goal` at the end."""
    from ondevice.converters.training.sidecars import copied_bundle

    if goal == resolved.bundle.path:
        yield goal
        return
    with copied_bundle(resolved.bundle, goal) as folder:
        yield folder
