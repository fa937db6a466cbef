"""What a person types into a chat, and asks of it besides answers: `/help` and its like. Prints nothing."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from types import FrameType, TracebackType

from ondevice.api import Model
from ondevice.errors import ContextOverflowError, OndeviceError, UsageError
from ondevice.options import decode_text
from ondevice.report import figures, plan_summary, pressure_summary
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


def chat_command(model: Model, session: Session, line: str) -> str:
    """Do what `line` asks and return what to tell the person.

    Raises UsageError for what is no command, and what doing it raises.
    """
    command, _, argument = line.partition(" ")
    argument = argument.strip()
    match command:
        case "/help":
            return CHAT_HELP
        case "/reset":
            session.reset()
            return "the conversation is forgotten"
        case "/stats":
            budget = f"{plan_summary(model.plan)}\n{pressure_summary(model.memory_pressure)}"
            return f"{figures(model.stats, model.plan)}\n{budget}"
        case "/save" if argument:
            session.save(argument)
            return f"saved to {argument}"
        case "/load" if argument:
            session.load(argument)
            return f"{len(session.transcript)} messages loaded"
        case "/budget" if argument:
            return plan_summary(model.set_dram_budget(argument))
    raise UsageError(
        f"{line!r} is not a command, or lacks its argument; /help lists them, and // begins a message "
        "with one /"
    )


class Interrupts:
    """Inside its `with`, a person's Ctrl-C raises KeyboardInterrupt only while it is `heard`, and once.

    People press it twice: the second must not hit what handles the first. From a pipe nothing changes.
    """

    def __init__(self) -> None:
        self._heard = False

    def __enter__(self) -> Interrupts:
        self._before = signal.getsignal(signal.SIGINT)
        if sys.stdin.isatty() and self._before is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._before)

    @contextmanager
    def heard(self) -> Iterator[None]:
        """While this lasts; to be left by the exception, too."""
        self._heard = True
        try:
            yield
        finally:
            self._heard = False

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._heard:
            self._heard = False
            raise KeyboardInterrupt


def read_turns(tell: Callable[[str], None], interrupts: Interrupts) -> Iterator[tuple[int, str]]:
    """What a person types, or the lines of a pipe, with their numbers; empty ones are skipped.

    Raises UsageError for a line of a pipe that isn't UTF-8; a person is told, and asked again.
    """
    for number, line in enumerate(_typed(tell, interrupts) if sys.stdin.isatty() else _piped(), 1):
        if line in QUIT:
            return
        if line:
            yield number, line


def is_command(line: str) -> bool:
    return line.startswith("/") and not line.startswith("//")


def message(line: str) -> str:
    """What a line that is no command says."""
    return line.removeprefix("/")


def cut_short(stats: GenerationStats, max_tokens: int) -> str:
    """What to tell of a reply that ended for its length."""
    if stats.context_full:
        return "(cut short: the context is full; /reset begins anew)"
    return f"(cut short after {max_tokens} tokens: --max-tokens)"


def advice(error: OndeviceError, session: Session) -> str:
    """What to add to an error in a conversation; empty if there is nothing."""
    if not isinstance(error, ContextOverflowError):
        return ""
    if any(said["role"] == "user" for said in session.transcript):
        return "; /reset begins anew"
    return "; the system prompt counts too" if session.transcript else ""


def _piped() -> Iterator[str]:
    offset = 0
    for data in sys.stdin.buffer:
        yield decode_text(data, "stdin", offset).strip()
        offset += len(data)


def _typed(tell: Callable[[str], None], interrupts: Interrupts) -> Iterator[str]:
    with suppress(ImportError):
        import_module("readline")  # input() then has editing and a history.
    while True:
        try:
            with interrupts.heard():
                typed = decode_text(_input_bytes(), "the line").strip()
        except KeyboardInterrupt:
            tell("\n(Ctrl-D quits)")
        except UsageError as error:
            tell(f"error: {error}")
        except EOFError:
            tell("")
            return
        else:
            yield typed


def _input_bytes() -> bytes:
    """What was typed, whether or not Python could decode it."""
    try:
        return input("> ").encode("utf-8", "surrogateescape")
    except UnicodeDecodeError as error:
        return error.object
    except SystemError as error:
        # What Python makes of a second interrupt while input() raises for the first.
        if isinstance(error.__cause__, KeyboardInterrupt):
            raise error.__cause__ from None
        raise
