"""Input of a chat: typed or pasted at a terminal, or piped. Prints nothing but a prompt."""

from __future__ import annotations

import select
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from types import FrameType, ModuleType, TracebackType

from ondevice.commands.options import TextParts, decode_text
from ondevice.commands.slash_commands import is_command
from ondevice.errors import ContextOverflowError, UsageError
from ondevice.generate import check_prompt
from ondevice.records import dataclass
from ondevice.tokenizer import Tokenizer
from ondevice.tokenizer.base import MAX_TOKEN_CHARS

PASTE_SECONDS = 0.05
"""Longest wait for the next line of a paste, in seconds. No line is typed that fast."""


@dataclass(frozen=True)
class Turn:
    """One message to the model. number: the line's number in a pipe, or the message's at a
    terminal, from 1.
    """

    number: int
    text: str
    refusal: ContextOverflowError | None = None
    """Set if the message is too long for the context; then `text` is a part of it."""


class Interrupts:
    """A context in which Ctrl-C at a terminal raises KeyboardInterrupt only inside `heard()`, and once.

    A second Ctrl-C must not hit the code that handles the first. With a pipe as input, nothing changes.
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
        """A context in which Ctrl-C raises KeyboardInterrupt. The exception must leave the context."""
        self._heard = True
        try:
            yield
        finally:
            self._heard = False

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._heard:
            self._heard = False
            raise KeyboardInterrupt


@dataclass(frozen=True)
class Limits:
    """The limits of a line from a pipe, which must fit the context."""

    tokenizer: Tokenizer
    max_context: int
    model_context: int
    """The model's limit."""


def read_turns(
    tell: Callable[[str], None],
    interrupts: Interrupts,
    limits: Limits,
    ends_paste: Callable[[str], bool],
) -> Iterator[Turn]:
    """Yields the messages typed at a terminal, or the lines of a pipe, without empty ones.

    ends_paste: returns True for a line that doesn't join the lines pasted before it, such as a command.
    Raises UsageError for a piped line that isn't text. At a terminal, the error is shown and the prompt is
    repeated.
    """
    if not sys.stdin.isatty():
        yield from _piped(limits)
        return
    for number, text in enumerate(_typed(tell, interrupts, ends_paste), 1):
        if text:
            yield Turn(number, text)


def _piped(limits: Limits) -> Iterator[Turn]:
    """Yields the lines of a pipe. At most as much of a line as fits the context is held; the remainder is
    skipped.
    """
    source, number = TextParts("-"), 0
    while True:
        number += 1
        text, refusal = _within(limits, source.line())
        if not text:
            return
        source.end_line()
        if refusal is not None or text.strip():
            yield Turn(number, text.strip(), refusal)


def _within(limits: Limits, line: Iterator[str]) -> tuple[str, ContextOverflowError | None]:
    """The part of a line that was read, and an error if the line is too long, in which case reading stops."""
    taken = [next(line, "")]
    if is_command(taken[0].lstrip()):
        return taken[0], None

    def parts() -> Iterator[str]:
        chars = len(taken[0])
        yield taken[0]
        for part in line:
            taken.append(part)
            chars += len(part)
            yield part
            # Some tokenizers have no tokens for white space, so characters are limited too.
            if chars > MAX_TOKEN_CHARS * limits.max_context:
                raise ContextOverflowError(
                    f"the line has {chars} characters or more, and the context holds {limits.max_context} "
                    "tokens; shorten it"
                )

    try:
        # The tokens that the chat template adds aren't counted here.
        ids = limits.tokenizer.encode_within(parts(), add_bos=False, most=limits.max_context)
        if ids:
            check_prompt(ids, limits.max_context, limits.model_context)
    except ContextOverflowError as error:
        return "".join(taken), error
    return "".join(taken), None


def _typed(
    tell: Callable[[str], None], interrupts: Interrupts, ends_paste: Callable[[str], bool]
) -> Iterator[str]:
    """Yields typed messages. Lines that are already waiting when one has been read count as
    pasted with it.
    """
    with suppress(ImportError):
        # With readline, input() has editing and a history, and returns a paste as one text.
        _enable_bracketed_paste(import_module("readline"))
    while True:
        lines: list[str] = []
        try:
            with interrupts.heard():
                lines.append(_typed_line("> "))
                while not ends_paste(lines[-1]) and _is_waiting():
                    lines.append(_typed_line(""))
        except KeyboardInterrupt:
            tell("\n(Ctrl-D quits)")
            continue
        except UsageError as error:
            tell(f"error: {error.for_command_line}")
            continue
        except EOFError:
            if not lines:
                tell("")
                return
        last = [lines.pop()] if len(lines) > 1 and ends_paste(lines[-1]) else []
        yield from ("\n".join(lines).strip(), *last)


def _enable_bracketed_paste(readline: ModuleType) -> None:
    if "libedit" not in (readline.__doc__ or ""):
        readline.parse_and_bind("set enable-bracketed-paste on")


def _is_waiting() -> bool:
    return bool(select.select([sys.stdin.fileno()], [], [], PASTE_SECONDS)[0])


def _typed_line(prompt: str) -> str:
    return decode_text(_input_bytes(prompt), "the line").rstrip()


def _input_bytes(prompt: str) -> bytes:
    """The bytes typed after `prompt`, even if Python can't decode them."""
    try:
        return input(prompt).encode("utf-8", "surrogateescape")
    except UnicodeDecodeError as error:
        return error.object
    except SystemError as error:
        # Python raises this for a second interrupt while input() raises for the first.
        if isinstance(error.__cause__, KeyboardInterrupt):
            raise error.__cause__ from None
        raise
