"""The tree of error types: one class per cause, each with its exit code on the command line."""

from __future__ import annotations

import errno
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

INTERRUPTED = 130
"""Exit code after Ctrl-C."""
START_AGAIN = 256
"""Code beyond all exit codes: the command line is to be run again in a new process."""


_COMMAND_LINE = r"ondevice (?:convert|generate|inspect|remove|train|verify) [^`\n]*?(?=[`\n;]|\. |$)"
_CHOICES = (
    "auto|off|all|dense|exact|predicted|experts|cpu|mlx|reference|direct|buffered|streams|resident|"
    "recycling|lookup|ngrams|model|eagle|dflash|mtp|lossless|shared"
)
_FLAG = re.compile(
    rf"(?P<command>{_COMMAND_LINE})|(?<![\w-])--(?P<name>[a-z]+(?:-[a-z]+)*)(?![\w-])"
    rf"(?: (?:(?P<number>\d[\d.]*\b)|(?P<choice>(?:{_CHOICES})\b)))?"
)
_SWITCHES = ("force", "resume", "offline", "replace", "keep_source", "remove_source", "yes")


class OndeviceError(Exception):
    """Base of every error this package raises on purpose. The message names value, limit and remedy.

    Messages are written with command-line flags, as `for_command_line` returns them. `str(error)` replaces
    flags with Python parameters: `max_context=512` for `--max-context 512`.
    """

    exit_code = 1

    @property
    def for_command_line(self) -> str:
        """The message with command-line flags. Command lines to run are the same in `str(error)`."""
        return super().__str__()

    def __str__(self) -> str:
        return _FLAG.sub(_parameter, self.for_command_line)


def _parameter(match: re.Match[str]) -> str:
    """The Python spelling of a matched flag and its value."""
    if match["command"]:
        return match[0]
    name = "temperature" if match["name"] == "temp" else match["name"].replace("-", "_")
    if name in _SWITCHES:
        return f"{name}=True"
    if match["number"]:
        return f"{name}={match['number']}"
    return f'{name}="{match["choice"]}"' if match["choice"] else name


class StartAgainError(Exception):
    """Raised when a command has converted its model and must start again, to free the conversion's memory."""


class UsageError(OndeviceError, ValueError):
    """An argument that is wrong for every model, such as a malformed size or a negative temperature."""

    exit_code = 2


class InfillNotSupportedError(UsageError):
    """The model can't fill a gap: its tokenizer has no tokens that mark one."""


class ConstraintError(OndeviceError):
    """A schema, pattern or grammar that can't be enforced, or takes more than its share of memory or time.

    `keyword` is the unsupported keyword of a JSON schema, if one is at fault.
    """

    exit_code = 2

    def __init__(self, message: str, keyword: str | None = None) -> None:
        super().__init__(message)
        self.keyword = keyword


class ModelNotFoundError(OndeviceError):
    """No bundle has that name or path. The message has the `ondevice convert` line to run."""

    exit_code = 3


class DownloadError(OndeviceError):
    """The hub can't be read: it isn't reached, the connection keeps breaking, or its answers are unusable."""


class UnsupportedModelError(OndeviceError):
    """The checkpoint or bundle is sound, but uses something this runtime doesn't implement."""

    exit_code = 3


class ContextOverflowError(OndeviceError):
    """The prompt alone is longer than the context.

    `tokens` is the number of the prompt's tokens that were read, `limit` that of the context; 0 if unknown.
    """

    exit_code = 4

    def __init__(self, message: str, tokens: int = 0, limit: int = 0) -> None:
        super().__init__(message)
        self.tokens = tokens
        self.limit = limit


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


class RankError(OndeviceError):
    """A machine that shares the model died, stalled, differs, or sent what it mustn't. The run has ended."""


class TextChangedError(OndeviceError):
    """A drafter changed the text, which is a bug. Its measurements are void."""


class WrongThreadError(OndeviceError):
    """A loaded model was used on a thread that doesn't own it: a bug in this package."""


NO_DESCRIPTOR = errno.EMFILE, errno.ENFILE
"""errno values that mean no file descriptor is left: the file to be opened isn't at fault."""


def reading_failed(error: OSError, otherwise: OndeviceError) -> OndeviceError:
    """The error to raise for a file that can't be read.

    It is `descriptor_refused(error)` if no file descriptor is left, otherwise `otherwise`.
    """
    return descriptor_refused(error) if error.errno in NO_DESCRIPTOR else otherwise


def descriptor_refused(error: OSError) -> OndeviceError:
    """The error to raise if the system refuses to open another file (NO_DESCRIPTOR)."""
    named = f" for {error.filename}" if error.filename else ""
    return OndeviceError(
        f"the system refuses a file descriptor{named}: {error.strerror}; close other models, or raise the "
        "limit that the process runs under (ulimit -n)"
    )


def check_thread(owner: int) -> None:
    """Check the current thread. Raises WrongThreadError unless it is `owner`, a `threading.get_ident()`
    value.
    """
    if threading.get_ident() != owner:
        raise WrongThreadError(
            f"a model was run on the thread {threading.current_thread().name!r}, which doesn't own it; its "
            "owner may be at work, so nothing was touched. This is a mistake of ondevice's: please report it"
        )


def thread_refused(reason: RuntimeError) -> OndeviceError:
    """The error to raise when the system refuses to start a thread."""
    return OndeviceError(
        f"the system refuses a thread: {reason}; raise the limit that the process runs under"
    )


@contextmanager
def system_refusals() -> Iterator[None]:
    """A context that turns the system's refusal of memory or file descriptors into OndeviceError."""
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


def json_fault(error: Exception) -> str:
    """What is wrong with a text that `json` refused, in at most 200 characters."""
    # Python's message about huge numbers names one of its functions to call.
    if "int_max_str_digits" in str(error):
        return "a number has thousands of digits"
    return str(error)[:200]


class LibraryErrors:
    """A context in which exceptions of a library about bad input become errors of this package.

    Libraries raise Exception or, for failed checks in Rust, PanicException. The latter derives from
    BaseException and can't be imported, so it is recognised by its name.
    """

    def __init__(self, error_of: Callable[[str], OndeviceError]) -> None:
        """error_of: makes the error for a library's message."""
        self._error_of = error_of

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None or issubclass(kind, OndeviceError | MemoryError):
            return
        if issubclass(kind, Exception) or kind.__name__ == "PanicException":
            raise self._error_of(str(error)) from error
