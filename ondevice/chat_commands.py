"""What a person may ask of a chat besides answers: `/help` and its like. Prints nothing."""

from __future__ import annotations

from ondevice.api import Model
from ondevice.errors import OndeviceError
from ondevice.report import figures, plan_summary
from ondevice.session import Session

CHAT_HELP = """\
/help           this list
/reset          forget the conversation
/save FILE      write the conversation to a file
/load FILE      go on with one from a file
/stats          figures of the last reply, and the memory plan
/budget SIZE    another DRAM budget from now on
Ctrl-C stops a reply, Ctrl-D quits."""


def chat_command(model: Model, session: Session, line: str) -> str:
    """Do what `line` asks and return what to tell the person; what is wrong with it is told as well."""
    command, _, argument = line.partition(" ")
    argument = argument.strip()
    try:
        match command:
            case "/help":
                return CHAT_HELP
            case "/reset":
                session.reset()
                return "the conversation is forgotten"
            case "/stats":
                return f"{figures(model.stats)}\n{plan_summary(model.plan)}"
            case "/save" if argument:
                session.save(argument)
                return f"saved to {argument}"
            case "/load" if argument:
                session.load(argument)
                return f"{len(session.transcript)} messages loaded"
            case "/budget" if argument:
                return plan_summary(model.set_dram_budget(argument))
    except (OndeviceError, OSError) as error:
        return f"error: {error}"
    return f"{line!r} is not a command, or lacks its argument; /help lists them"
