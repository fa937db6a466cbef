"""`ondevice train`: trains optional sidecars with which a bundle runs better."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ondevice.commands.options import (
    CommandGroup,
    TextParts,
    add_options,
    complete_path,
    json_option,
    model_option,
    option,
)
from ondevice.commands.terminal import print_result, progress, take_interrupts
from ondevice.config import EXPERT_TOKENS, MAX_STREAMS, NGRAM_TOKENS, TRAIN_TOKENS
from ondevice.settings import RUNTIME_OPTIONS

if TYPE_CHECKING:
    from ondevice.bundle.streams import MultiStreamMode


def training_options(command: Callable[..., Any], tokens: int = TRAIN_TOKENS) -> Callable[..., Any]:
    """A decorator that adds the options of every training. tokens: the default of --tokens."""
    decorators = (
        model_option,
        option(
            "--text",
            required=True,
            metavar="FILE|-",
            shell_complete=complete_path,
            help="The text to learn from, or to measure on.",
        ),
        option(
            "--output", "-o", type=click.Path(path_type=Path), help="A new folder for a copy that has them."
        ),
        option("--tokens", type=click.IntRange(1), default=tokens, help="Tokens of the text to use at most."),
        json_option,
    )
    for decorate in reversed(decorators):
        command = decorate(command)
    return command


measuring_options = add_options({"dram_budget": RUNTIME_OPTIONS["dram_budget"]})
"""Further options of a training that measures its result."""
TRAINING_BACKENDS = tuple(name for name in RUNTIME_OPTIONS["backend"].choices if name != "reference")
"""Without `reference`, which multiplies every neuron, so that there is nothing to predict."""
backend_options = add_options({"backend": replace(RUNTIME_OPTIONS["backend"], choices=TRAINING_BACKENDS)})
"""Further options of a training that more than one backend can do."""


def _print_trained(run: Callable[..., Any], table: Callable[[Any], str], text: str, as_json: bool) -> None:
    """Train on a text, and print the result. run: takes the text and `on_progress`."""
    from ondevice.commands.training_reports import trained_facts

    content = TextParts(text)
    take_interrupts()
    with progress() as show:
        sidecar = run(content, on_progress=show)
    print_result(as_json, trained_facts(sidecar), table(sidecar))


@click.group(cls=CommandGroup)
def train() -> None:
    """Train what a bundle can do without, and runs better with."""


@train.command()
@training_options
@backend_options
@measuring_options
def predictors(model: str | None, text: str, as_json: bool, **options: Any) -> None:
    """Train predictors of which neurons fire, for --sparsity predicted.

    They are measured on the last tenth of the text, which isn't used for training or for thresholds: what
    they miss, what they select needlessly, and what that costs in perplexity. Models with ReLU gates only,
    and --backend cpu or mlx, which runs the model, fits and measures.
    """
    from ondevice import training
    from ondevice.commands import training_reports as reports

    run = partial(training.train_predictors, model, **options)
    _print_trained(run, reports.predictor_table, text, as_json)


@train.command()
@partial(training_options, tokens=EXPERT_TOKENS)
@measuring_options
def expert_use(model: str | None, text: str, as_json: bool, **options: Any) -> None:
    """Count which experts a text uses, and what caches of them hit, so that `inspect` can say what to expect.

    Models with experts only.
    """
    from ondevice import training
    from ondevice.commands import training_reports as reports

    run = partial(training.train_expert_use, model, **options)
    _print_trained(run, reports.expert_use_table, text, as_json)


@train.command()
@training_options
@measuring_options
def expert_costs(model: str | None, text: str, as_json: bool, **options: Any) -> None:
    """Measure what --experts costs, for models with experts.

    Nothing is trained. Perplexity is measured token by token, as decoding goes, on pieces spread over the
    text: with the model's number of experts and with each smaller one. With a budget of auto, half of the
    experts have room. The figures join the bundle, and `inspect` prints them.
    """
    from ondevice import training
    from ondevice.commands import training_reports as reports

    run = partial(training.train_expert_costs, model, **options)
    _print_trained(run, reports.expert_cost_table, text, as_json)


@train.command()
@partial(training_options, tokens=NGRAM_TOKENS)
def ngrams(model: str | None, text: str, as_json: bool, **options: Any) -> None:
    """Sort what follows every few tokens of a text into a datastore, for --speculation ngrams.

    The datastore is stored with the model on flash; only a small index of it is read into memory. The model
    doesn't run. Drafts come from this text, so it should resemble what the model writes. It works for every
    bundle with the same tokenizer.
    """
    from ondevice import training
    from ondevice.commands import training_reports as reports

    run = partial(training.train_ngrams, model, **options)
    _print_trained(run, reports.ngrams_table, text, as_json)


@train.command()
@training_options
@option(
    "--mode",
    type=click.Choice(("lossless", "shared")),
    required=True,
    help="lossless: the text stays what it is; shared: the model changes with its streams.",
)
@option("--steps", type=click.IntRange(1), help="Gradient steps; the more, the longer, the better.")
@option("--gamma", type=click.IntRange(1, MAX_STREAMS), help="Streams of a token: how far ahead they draft.")
@option("--layers", type=click.IntRange(0), help="Last layers that have streams; 0: half of them, at most 8.")
@option("--attention-rank", type=click.IntRange(1), help="Rank of the adapters in attention.")
@option(
    "--feed-forward-rank", type=click.IntRange(1), help="Rank of the adapters in the feed-forward blocks."
)
@option("--replace", is_flag=True, help="Replace the model's own streams, if it has some.")
def streams(
    model: str | None,
    text: str,
    output: Path | None,
    tokens: int,
    as_json: bool,
    mode: MultiStreamMode,
    replace: bool,
    **shape: int | None,
) -> None:
    """Train streams, which draft several tokens at once, for --speculation streams.

    They are measured on the last tenth of the text, which doesn't train them: how often each is right
    where all before it were. What was interrupted goes on if the same command is given again. Takes MLX.
    """
    from ondevice import training
    from ondevice.bundle.reader import Bundle
    from ondevice.commands import training_reports as reports
    from ondevice.runtime.models import find_model

    content = TextParts(text)
    take_interrupts()
    chosen: Any = {"mode": mode, "tokens": tokens}
    chosen |= {name: value for name, value in shape.items() if value is not None}
    with progress() as show:
        sidecar = training.train_streams(
            model,
            content,
            output=output,
            replace=replace,
            on_progress=show,
            **chosen,
        )
    config = Bundle.open(find_model(model)).config
    print_result(as_json, reports.stream_facts(sidecar, config), reports.stream_table(sidecar, config))
