"""Output of the command line: results as text or JSON to stdout, everything else to stderr."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from ondevice.errors import UsageError

if TYPE_CHECKING:
    from ondevice.generate import Event


def say(message: str, newline: bool = True) -> None:
    # A file name may hold bytes that can't be encoded.
    click.echo(message.encode("utf-8", "backslashreplace").decode("utf-8"), err=True, nl=newline)


def take_interrupts() -> None:
    """From now on, let interrupts raise KeyboardInterrupt, so that commands can clean up."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def can_ask() -> bool:
    """Whether there is a terminal at which a question can be answered."""
    return sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()


def confirm(question: str, yes: bool, otherwise: str) -> None:
    """Ask on stderr, unless `yes`. Raises UsageError with the text `otherwise` unless the answer is yes."""
    if yes:
        return
    if not can_ask():
        raise UsageError(f"{otherwise}: this asks first, and there is no terminal to ask at; --yes answers")
    if not click.confirm(question, err=True):
        raise UsageError(f"{otherwise}, as the answer was no")


DIM, PLAIN = "\x1b[2m", "\x1b[22m"


def _writer() -> Callable[[str], None]:
    """A function that writes a model's text to stdout. On a terminal it replaces control characters."""
    from ondevice.commands.reports import harmless

    shown = harmless if sys.stdout and sys.stdout.isatty() else str

    def write(text: str) -> None:
        # Without `color`, click strips what looks like escape sequences from a pipe.
        click.echo(shown(text), nl=False, color=True)
        sys.stdout.flush()

    return write


def print_json(value: dict[str, Any]) -> None:
    click.echo(json.dumps(value, ensure_ascii=False, allow_nan=False))


def print_result(as_json: bool, value: dict[str, Any], text: str) -> None:
    """Print a result: `value` as JSON for programs, or `text` for people."""
    if as_json:
        print_json(value)
    else:
        click.echo(text)


def write_events(events: Iterator[Event]) -> str | None:
    """Write a text as it is generated, and return its finish reason. The line ends even on an interrupt.

    Thinking is dimmed on a terminal, with an empty line before the reply; elsewhere it is left out.
    """
    begun, thought, reason, write = False, False, None, _writer()
    terminal = sys.stdout is not None and sys.stdout.isatty()
    try:
        for event in events:
            begun, reason = True, event.finish_reason
            if event.thinking:
                thought = terminal and (thought or bool(event.text))
                _write_dimmed(event.text if terminal else "", write)
            elif event.text:
                write(f"\n\n{event.text}" if thought else event.text)
                thought = False
        return reason
    finally:
        events.close()  # type: ignore[attr-defined]
        if begun:
            write("\n")


def _write_dimmed(text: str, write: Callable[[str], None]) -> None:
    """Write text in faint letters to a terminal."""
    if text:
        click.echo(DIM, nl=False, color=True)
        write(text)
        click.echo(PLAIN, nl=False, color=True)


@contextmanager
def progress() -> Iterator[Callable[[float, str], None]]:
    """A context with a callback that shows progress: one updated line at a terminal, a line per tenth
    elsewhere.
    """
    terminal = sys.stderr.isatty()
    last = [-1.0, -1.0]

    def show(fraction: float, what: str) -> None:
        now = time.monotonic()
        if terminal and now - last[1] > 0.1:
            say(f"\r\x1b[K{100 * fraction:3.0f} %  {what}", newline=False)
            last[1] = now
        elif not terminal and int(10 * fraction) > int(10 * last[0]):
            say(f"{100 * fraction:3.0f} %  {what}")
            last[0] = fraction

    try:
        yield show
    finally:
        if terminal and last[1] >= 0:
            say("\r\x1b[K", newline=False)
