"""`ondevice eval`: measures a model's perplexity on a text."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import click

from ondevice.commands.opening import loaded_model, resolved_model
from ondevice.commands.options import (
    Command,
    TextParts,
    add_options,
    complete_path,
    json_option,
    model_option,
    option,
)
from ondevice.commands.terminal import print_json, progress
from ondevice.settings import RUNTIME_OPTIONS


@click.command("eval", cls=Command)
@model_option
@option("--text", required=True, metavar="FILE|-", shell_complete=complete_path, help="The text to predict.")
@add_options(RUNTIME_OPTIONS)
@json_option
def evaluate(model: str | None, text: str, as_json: bool, **values: Any) -> None:
    """Measure how well a model predicts a text: its perplexity."""
    from ondevice.host import text_tokenizer
    from ondevice.scoring import scoring_windows

    parts, taken = TextParts(text), 0
    resolved = resolved_model(model, values)
    tokenizer = text_tokenizer(resolved)

    def tokens() -> Iterator[int]:
        nonlocal taken
        for ids in tokenizer.encode_parts(parts):
            taken += len(ids)
            yield from ids

    stream = tokens()
    begun = list(islice(stream, 2))
    # Refuses a text that is too short to score before weights are read.
    next(scoring_windows(resolved, begun))

    def on_progress(done: int) -> None:
        show(parts.share * done / max(1, taken), f"{done} tokens")

    with loaded_model(resolved) as loaded, progress() as show:
        score = loaded.score(tokens=chain(begun, stream), on_progress=on_progress)
    if as_json:
        print_json(score.to_dict())
    else:
        click.echo(
            f"perplexity {score.perplexity:.4f} ({score.nll_per_token:.6f} nats/token, {score.tokens} tokens)"
        )
