"""Slash commands of a chat, such as `/help`, and its notices. Prints nothing."""

from __future__ import annotations

import os.path

from ondevice.api import Model
from ondevice.commands.reports import plan_summary, pressure_summary, stats_line
from ondevice.config import SamplingConfig
from ondevice.errors import ContextOverflowError, OndeviceError, UsageError
from ondevice.session import Session
from ondevice.stats import GenerationStats

CHAT_HELP = """\
/help           this list
/reset          forget the conversation
/save FILE      write the conversation to a file
/load FILE      go on with one from a file
/stats          figures of the last reply, and the memory plan
/budget SIZE    another DRAM budget from now on
//...           a message that begins with one /
Ctrl-C stops a reply; Ctrl-D, /quit and /exit end the chat."""
QUIT = ("/quit", "/exit")
COMMANDS = ("/help", "/reset", "/save", "/load", "/stats", "/budget", *QUIT)


def chat_command(model: Model, session: Session, line: str) -> str:
    """Run the slash command in `line` and return the text to show.

    Raises UsageError for an unknown command or a missing argument, and what the command raises.
    """
    command, _, argument = line.partition(" ")
    argument = argument.strip()
    path = os.path.expanduser(argument)
    match command:
        case "/help":
            return CHAT_HELP
        case "/reset":
            session.reset()
            return "the conversation is forgotten"
        case "/stats":
            budget = f"{plan_summary(model.plan)}\n{pressure_summary(model.memory_pressure)}"
            return f"{stats_line(model.stats, model.plan)}\n{budget}"
        case "/save" if argument:
            session.save(path)
            return f"saved to {path}"
        case "/load" if argument:
            session.load(path)
            return f"{len(session.transcript)} messages loaded"
        case "/budget" if argument:
            return plan_summary(model.set_dram_budget(argument))
    raise UsageError(
        f"{line!r} is not a command, or lacks its argument; /help lists them, and // begins a message "
        "with one /"
    )


def is_command(line: str) -> bool:
    return line.startswith("/") and not line.startswith("//")


def is_known_command(line: str) -> bool:
    """Whether a line begins with a known command, which pasted text hardly does by chance."""
    return line.partition(" ")[0] in COMMANDS


def message(line: str) -> str:
    """The message in a line that isn't a command. A line that begins with `//` stands for one that begins
    with `/`.
    """
    return line.removeprefix("/")


def cut_short(stats: GenerationStats, sampling: SamplingConfig, session: Session) -> str:
    """A notice for a reply that ended because it reached its maximal length."""
    if not stats.context_full:
        return f"(cut short after {sampling.max_tokens} tokens: --max-tokens)"
    if session.when_full == "stop":
        return "(cut short: the context is full; /reset begins anew)"
    return "(cut short: the context is full)"


def forgets(model: Model, session: Session) -> str:
    """A notice for a conversation that exceeds its context for the first time."""
    room = "--max-context makes room, " if model.plan.max_context < model.config.max_context else ""
    return (
        f"(the context of {model.plan.max_context} tokens is full: the oldest turns are forgotten, "
        f"{session.dropped_turns} now, more later; {room}--when-full stop ends the chat instead)"
    )


def advice(error: OndeviceError, session: Session) -> str:
    """Advice to append to an error message in a conversation; empty if there is none."""
    if not isinstance(error, ContextOverflowError):
        return ""
    roles = [said["role"] for said in session.transcript]
    if "user" in roles and session.when_full == "stop":
        return "; /reset begins anew"
    return "; the system prompt counts too" if "system" in roles else ""
