"""`ondevice chat`: answers typed or piped messages, turn by turn."""

from __future__ import annotations

import sys
from dataclasses import replace
from textwrap import indent
from typing import TYPE_CHECKING, Any, get_args

import click
from click.core import ParameterSource

from ondevice.commands import sharing
from ondevice.commands.constraint import constraint_of, constraint_options
from ondevice.commands.opening import (
    CONTEXT_SHARE,
    loaded_model,
    require_fit,
    resolved_model,
    say_opening,
    say_stats,
)
from ondevice.commands.options import (
    Command,
    Text,
    add_options,
    hosts_option,
    model_option,
    option,
    yes_option,
)
from ondevice.commands.terminal import say, write_events
from ondevice.config import SamplingConfig, WhenFull
from ondevice.errors import ContextOverflowError, OndeviceError
from ondevice.records import dataclass
from ondevice.settings import (
    PROMPT_CACHE_OPTIONS,
    RUNTIME_OPTIONS,
    SAMPLING_OPTIONS,
    TEMPLATE_OPTIONS,
    sampling_config,
    with_model_defaults,
)

if TYPE_CHECKING:
    from ondevice.api import Model
    from ondevice.commands.chat_input import Interrupts, Turn
    from ondevice.session import Session


@click.command(cls=Command)
@model_option
@option("--system-prompt", type=Text(), help="What the model is told first.")
@option(
    "--when-full",
    type=click.Choice(get_args(WhenFull)),
    default="drop",
    help="Where the context is full: drop the oldest turns and go on, or stop the chat.",
    rare=True,
)
@option("--no-think", is_flag=True, help="The model shall not think before it replies, or little if it must.")
@constraint_options
@add_options(SAMPLING_OPTIONS, RUNTIME_OPTIONS, PROMPT_CACHE_OPTIONS, TEMPLATE_OPTIONS)
@hosts_option()
@yes_option
@click.pass_context
def chat(
    context: click.Context,
    /,
    model: str | None,
    system_prompt: str | None,
    when_full: WhenFull,
    no_think: bool,
    yes: bool,
    **values: Any,
) -> None:
    """Talk to a model; /help lists what else can be asked. From a pipe, every line is a turn.

    A checkpoint, a repository id of the Hugging Face hub (owner/name), a GGUF file of one
    (owner/name:file.gguf) or a short name of one is converted first, once, after saying what that takes.

    Sampling follows the model's own generation_config.json where no option says otherwise.
    """
    from ondevice.bundle.about import read_about
    from ondevice.commands import chat_input
    from ondevice.commands.slash_commands import is_known_command
    from ondevice.host import text_tokenizer

    sharing.start(model, values)
    chosen = {
        name for name in SAMPLING_OPTIONS if context.get_parameter_source(name) is not ParameterSource.DEFAULT
    }
    constraint = constraint_of(values)
    resolved = resolved_model(model, values, yes, context_share=CONTEXT_SHARE)
    require_fit(resolved)
    tokenizer = text_tokenizer(resolved)
    with loaded_model(resolved, say_opening) as loaded:
        sampling = _sampling(loaded, replace(sampling_config(values), constraint=constraint), chosen)
        if about := read_about(loaded.bundle.path):
            say(f"{loaded.name}, in its maker's words:\n{indent(about, '  ')}")
        session = loaded.session(system_prompt, when_full=when_full)
        if loaded.chat_template.is_default:
            say("this model has no chat template: it continues a plain User and Assistant transcript")
        limits = chat_input.Limits(tokenizer, loaded.plan.max_context, loaded.config.max_context)
        with chat_input.Interrupts() as interrupts:
            talk = _Talk(loaded, session, sampling, interrupts, think=False if no_think else None)
            for entry in chat_input.read_turns(say, interrupts, limits, is_known_command):
                if talk.take(entry):
                    break
        say_stats(loaded)
    if talk.refused:
        context.exit(ContextOverflowError.exit_code)


def _sampling(model: Model, sampling: SamplingConfig, chosen: set[str]) -> SamplingConfig:
    """`sampling` with a seed, and with the model authors' recommendations for fields not in `chosen`. Prints
    both.
    """
    recommended = model.bundle.manifest.generation
    sampling, taken = with_model_defaults(sampling, recommended, chosen)
    sampling = sampling.seeded()
    if sampling.is_random and "seed" not in chosen:
        say(f"seed {sampling.seed}, drawn at random: --seed {sampling.seed} gives the same replies again")
    if not sampling.is_random:
        # In greedy decoding, only the repetition penalty has an effect.
        taken = {name: value for name, value in taken.items() if name == "repetition_penalty"}
    if taken:
        listed = ", ".join(f"{name} {value}" for name, value in taken.items())
        say(f"as the model's authors recommend: {listed}")
    return sampling


@dataclass
class _Talk:
    """A conversation at a terminal or from a pipe. From a pipe, any error ends it, except a line that is too
    long.
    """

    model: Model
    session: Session
    sampling: SamplingConfig
    interrupts: Interrupts
    think: bool | None = None
    refused: bool = False
    """Whether a line of a pipe was too long to be answered."""

    def take(self, entry: Turn) -> bool:
        """Run a command or answer a message, and show its error. Returns whether the chat ends."""
        from ondevice.commands import slash_commands as commands

        if entry.text in commands.QUIT:
            return True
        try:
            with self.interrupts.heard():
                if entry.refusal is not None:
                    raise entry.refusal
                self._take(entry.text)
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            say("")
        except OndeviceError as error:
            advice = commands.advice(error, self.session)
            if sys.stdin.isatty():
                say(f"error: {error.for_command_line}{advice}")
            elif entry.refusal is not None or self._is_too_long(error):
                say(f"error: {error.for_command_line}{advice}; line {entry.number} of stdin wasn't answered")
                self.refused = True
            else:
                error.add_note(f"line {entry.number} of stdin, and what follows it, wasn't answered{advice}")
                raise
        return False

    def _is_too_long(self, error: OndeviceError) -> bool:
        """Whether the error is only that this message is too long for the context, so that others may still
        be answered.
        """
        return isinstance(error, ContextOverflowError) and self.session.when_full == "drop"

    def _take(self, line: str) -> None:
        from ondevice.commands import slash_commands as commands

        if commands.is_command(line):
            say(commands.chat_command(self.model, self.session, line))
            return
        before = self.session.dropped_turns
        message = commands.message(line)
        events = self.session.stream_response(message, think=self.think, sampling=self.sampling)
        reason = write_events(events)
        if reason == "length":
            say(commands.cut_short(self.model.stats, self.sampling, self.session))
        if before == 0 < self.session.dropped_turns:
            say(commands.forgets(self.model, self.session))
