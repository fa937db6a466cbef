"""`ondevice generate`: continues a text as it stands."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import click

from ondevice.commands import sharing
from ondevice.commands.constraint import constraint_of, constraint_options
from ondevice.commands.opening import loaded_model, resolved_model, say_stats
from ondevice.commands.options import (
    Command,
    Text,
    TextParts,
    add_options,
    hosts_option,
    json_option,
    model_option,
    option,
    yes_option,
)
from ondevice.commands.terminal import print_json, say, write_events
from ondevice.settings import PROMPT_CACHE_OPTIONS, RUNTIME_OPTIONS, SAMPLING_OPTIONS, sampling_config


@click.command(cls=Command)
@model_option
@option(
    "--prompt",
    "-p",
    required=True,
    type=Text(),
    metavar="TEXT|-",
    help="The text to continue; - reads stdin.",
)
@option("--no-special", is_flag=True, help="Read special tokens' names in the prompt as plain text.")
@constraint_options
@add_options(SAMPLING_OPTIONS, RUNTIME_OPTIONS, PROMPT_CACHE_OPTIONS)
@hosts_option()
@yes_option
@json_option
def generate(
    model: str | None, prompt: str, no_special: bool, yes: bool, as_json: bool, **values: Any
) -> None:
    """Continue a text as it stands. Greedy unless --temp says otherwise.

    Names of special tokens in the text, such as <|im_end|>, become those tokens.
    """
    from ondevice.host import text_tokenizer
    from ondevice.runtime.resolving import check_tokens

    sharing.start(model, values)
    constraint = constraint_of(values)
    sampling = replace(sampling_config(values), constraint=constraint)
    text = TextParts(prompt) if prompt == "-" else [prompt]
    resolved = resolved_model(model, values, yes)
    # Encoding stops where the context is full, because a prompt from stdin may have no end.
    tokenizer, most = text_tokenizer(resolved), resolved.plan.max_context
    tokens = tokenizer.encode_within(text, special=not no_special, most=most)
    check_tokens(resolved, tokens)
    with loaded_model(resolved) as loaded:
        if as_json:
            response = loaded.generate(tokens=tokens, sampling=sampling)
            print_json(response.to_dict())
        else:
            write_events(loaded.stream(tokens=tokens, sampling=sampling))
        if loaded.stats.context_full:
            room = loaded.plan.max_context < loaded.config.max_context
            more = "--max-context makes room" if room else "that is the model's limit"
            say(f"(cut short: the context of {loaded.plan.max_context} tokens is full; {more})")
        say_stats(loaded)
