"""The typed error tree: one class per cause, each with the exit code the CLI maps it to."""

from __future__ import annotations

import errno
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager

INTERRUPTED = 130
"""Exit code after Ctrl-C."""


_COMMAND_LINE = r"ondevice (?:convert|generate|inspect|train|verify) [^`\n]*?(?=[`\n;]|\. |$)"
_CHOICES = (
    "auto|off|all|dense|exact|predicted|threshold|experts|cpu|mlx|reference|direct|buffered|streams|resident|"
    "recycling|lookup|model|lossless|shared"
)
_FLAG = re.compile(
    rf"(?P<command>{_COMMAND_LINE})|(?<![\w-])--(?P<name>[a-z]+(?:-[a-z]+)*)(?![\w-])"
    rf"(?: (?:(?P<number>\d[\d.]*\b)|(?P<choice>(?:{_CHOICES})\b)))?"
)
_SWITCHES = ("force", "resume", "offline", "replace")


class OndeviceError(Exception):
    """Base of every error this package raises on purpose. The message names value, limit and remedy.

    Messages are written with the command line's flags, as `for_command_line` has them; `str` of an error says
    Python's parameters instead: `max_context=512` for `--max-context 512`.
    """

    exit_code = 1

    @property
    def for_command_line(self) -> str:
        """The message with flags; lines to run are the same in both."""
        return super().__str__()

    def __str__(self) -> str:
        return _FLAG.sub(_parameter, self.for_command_line)


def _parameter(match: re.Match[str]) -> str:
    """A flag and its value as Python writes them."""
    if match["command"]:
        return match[0]
    name = "temperature" if match["name"] == "temp" else match["name"].replace("-", "_")
    if name in _SWITCHES:
        return f"{name}=True"
    if match["number"]:
        return f"{name}={match['number']}"
    return f'{name}="{match["choice"]}"' if match["choice"] else name


class UsageError(OndeviceError, ValueError):
    """An argument that can't be right whatever the model (a malformed size, a negative temperature)."""

    exit_code = 2


class ModelNotFoundError(OndeviceError):
    """No bundle by that name or path; the message has the `ondevice convert` line to run."""

    exit_code = 3


class UnsupportedModelError(OndeviceError):
    """The checkpoint or bundle is sound, but uses something this runtime doesn't implement."""

    exit_code = 3


class ContextOverflowError(OndeviceError):
    """The prompt alone is longer than the context."""

    exit_code = 4


class BudgetError(OndeviceError):
    """The DRAM budget can't be met. `required_bytes` is the smallest budget that works."""

    exit_code = 5

    def __init__(self, message: str, required_bytes: int) -> None:
        super().__init__(message)
        self.required_bytes = required_bytes


class BundleError(OndeviceError):
    """A bundle is damaged, truncated or hostile."""

    exit_code = 6


class CheckpointError(OndeviceError):
    """A source checkpoint is damaged, truncated or inconsistent."""

    exit_code = 6


class BackendUnavailableError(OndeviceError):
    """A backend, kernel target, I/O mode or plot that can't run on this machine."""


class FlashReadError(OndeviceError):
    """A read from flash failed: the file is unreadable, cut short, or doesn't match its checksum."""

    exit_code = 6


class TextChangedError(OndeviceError):
    """A drafter changed a text, which none may. Measurements of it mean nothing."""


class WrongThreadError(OndeviceError):
    """A loaded model was used on a thread that doesn't own it: a bug of this package, not of its user."""


NO_DESCRIPTOR = errno.EMFILE, errno.ENFILE
"""Errors of the system that don't concern the file that was to be opened."""


def reading_failed(error: OSError, otherwise: OndeviceError) -> OndeviceError:
    """The error for a file that can't be read: `otherwise`, unless the process has no descriptor left."""
    return descriptor_refused(error) if error.errno in NO_DESCRIPTOR else otherwise


def descriptor_refused(error: OSError) -> OndeviceError:
    """The error for NO_DESCRIPTOR: the process may open no more files."""
    named = f" for {error.filename}" if error.filename else ""
    return OndeviceError(
        f"the system refuses a file descriptor{named}: {error.strerror}; close other models, or raise the "
        "limit that the process runs under (ulimit -n)"
    )


def check_thread(owner: int) -> None:
    """Raises WrongThreadError unless this is the thread `owner`, by its `threading.get_ident`."""
    if threading.get_ident() != owner:
        raise WrongThreadError(
            f"a model was run on the thread {threading.current_thread().name!r}, which doesn't own it; its "
            "owner may be at work, so nothing was touched. This is a mistake of ondevice's: please report it"
        )


def thread_refused(reason: RuntimeError) -> OndeviceError:
    """The error for a thread that the system refuses."""
    return OndeviceError(
        f"the system refuses a thread: {reason}; raise the limit that the process runs under"
    )


@contextmanager
def system_refusals() -> Iterator[None]:
    """Turns the system's refusal of memory or files, which no plan can foresee, into an OndeviceError."""
    try:
        yield
    except (MemoryError, OSError) as error:
        if isinstance(error, OSError) and error.errno in NO_DESCRIPTOR:
            raise descriptor_refused(error) from error
        if isinstance(error, OSError) and error.errno != errno.ENOMEM:
            raise
        raise OndeviceError(
            "the system refuses memory that the budget allows; lower --dram-budget, or raise the limit that "
            "the process runs under"
        ) from error
