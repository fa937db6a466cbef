"""Options of the command line made from the settings' tables, where their values come from, and text read.

Prints nothing.
"""

from __future__ import annotations

import codecs
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from ondevice.errors import OndeviceError, UsageError
from ondevice.settings import (
    Option,
    Settings,
    check_value,
    read_settings,
    require_meaning,
    settings_path,
    variable,
)

log = logging.getLogger(__name__)

STDOUT = 1
BROKEN_PIPE = 141
"""Exit code of a command whose reader went away, as the shell would give it for the signal."""

MODEL_ARGUMENT = "named_model"
OTHER_VARIABLES = ("ONDEVICE_CONFIG", "ONDEVICE_HOME")
"""Environment variables that are read elsewhere than for an option."""
TEST_VARIABLES = "ONDEVICE_TEST_"
NEAR = 0.85
"""Share of two names' letters that agree where one is a slip for the other; the common prefix counts."""

PART_BYTES = 1 << 16
"""Bytes of a text that are read at a time."""
MAX_TEXT_CHARS = 1 << 20
"""Characters of a text that is held whole, because its paragraphs are prompts: some hundred pages."""

Decorated = TypeVar("Decorated", bound=Callable[..., None])


class SettableOption(click.Option):
    """An option that its environment variable and the settings file can set too; errors say which did."""

    def __init__(self, *arguments: Any, **attributes: Any) -> None:
        super().__init__(*arguments, **attributes)
        self.envvar = variable(self.flag)

    @property
    def flag(self) -> str:
        """How it is spelt in full."""
        return next(name for name in self.opts if name.startswith("--"))

    def origin(self, context: click.Context) -> str | None:
        """What set it, if not the command line."""
        source = context.get_parameter_source(self.name or "")
        if source is ParameterSource.ENVIRONMENT:
            return str(self.envvar)
        if source is ParameterSource.DEFAULT_MAP:
            return f"{context.obj.keys[self.name]} in {context.obj.path}"
        return None

    def consume_value(self, ctx: click.Context, opts: Mapping[str, Any]) -> tuple[Any, ParameterSource]:
        """As click's; where several may be given, the settings file may have one, as it is."""
        value, source = super().consume_value(ctx, opts)
        return ([value] if self.multiple and isinstance(value, str) else value), source

    def get_error_hint(self, ctx: click.Context | None) -> str:
        origin = None if ctx is None else self.origin(ctx)
        return origin or f"'{self.flag}'"


class SettingsContext(click.Context):
    """A command's context: the settings file changes its defaults. `obj` is what the file says, once read.

    It is read when a command that runs asks for a default, so help and completion work whatever is in it.
    """

    def read_settings(self) -> Settings:
        """What the settings file says. Raises UsageError."""
        if self.obj is None:
            self.obj = read_settings(settings_path())
            self.default_map = dict(self.obj.values)
        return self.obj  # type: ignore[no-any-return]

    def lookup_default(self, name: str, call: bool = True) -> Any:
        """As click's; it is help that doesn't call."""
        if call and not self.resilient_parsing:
            self.read_settings()
        return super().lookup_default(name, call)  # type: ignore[call-overload]


class Command(click.Command):
    """A command whose errors say where the settings they mention were made, if not in the command line."""

    context_class = SettingsContext

    def invoke(self, ctx: click.Context) -> Any:
        assert isinstance(ctx, SettingsContext)
        _start_logging(ctx.find_root(), ctx.read_settings())
        _warn_of_variables(ctx.find_root().command)
        _take_model(ctx)
        _require_meaning(ctx)
        try:
            return super().invoke(ctx)
        except OndeviceError as error:
            message = error.for_command_line
            for option in self.params:
                origin = option.origin(ctx) if isinstance(option, SettableOption) else None
                if origin and _is_mentioned(message, option, ctx.params[option.name or ""]):
                    error.add_note(f"{option.opts[0]} was set by {origin}")
            raise


class CommandGroup(click.Group):
    """A group that ends quietly, with the shell's code, when the reader of stdout goes away."""

    command_class = Command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            ctx.exit(broken_pipe())


def broken_pipe() -> int:
    """The reader of stdout went away. Python would complain again when it flushes stdout at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)
    return BROKEN_PIPE


def _start_logging(root: click.Context, settings: Settings) -> None:
    """`--verbose` comes before the command; whether the file has a say is known only now."""
    verbose = root.params["verbose"]
    if root.get_parameter_source("verbose") is ParameterSource.DEFAULT:
        verbose = settings.values.get("verbose", verbose)
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format="%(name)s: %(message)s")


def _variables(command: click.Command) -> Iterator[str]:
    """Those that set an option of the command, or of one below it."""
    yield from (str(it.envvar) for it in command.params if isinstance(it, SettableOption))
    for inner in getattr(command, "commands", {}).values():
        yield from _variables(inner)


def _warn_of_variables(root: click.Command) -> None:
    """Log what of the environment looks like an option's variable and sets none."""
    known = {*_variables(root), *OTHER_VARIABLES}
    for name in sorted(os.environ):
        if name.startswith("ONDEVICE_") and name not in known and not name.startswith(TEST_VARIABLES):
            from difflib import get_close_matches

            near = get_close_matches(name, known, 1, NEAR)
            log.warning("%s sets nothing%s", name, f"; did you mean {near[0]}?" if near else "")


def _take_model(context: click.Context) -> None:
    """The model may be named by an argument as well as by its option; the command gets one.

    Raises UsageError for two different ones.
    """
    if MODEL_ARGUMENT not in context.params:
        return
    named, flagged = context.params.pop(MODEL_ARGUMENT), context.params["model"]
    if named is None:
        return
    source = context.get_parameter_source("model")
    if source is ParameterSource.COMMANDLINE and flagged != named:
        raise UsageError(f"two models are named, {named} and --model {flagged}; give one")
    context.params["model"] = named
    context.set_parameter_source("model", ParameterSource.COMMANDLINE)


def _require_meaning(context: click.Context) -> None:
    """Refuse what the command line asks for and the modes it chooses have no use for.

    What is set elsewhere is meant for other commands too.
    """
    sparsity = context.params.get("sparsity")
    # An ablation chooses a mode that selects neurons, lossy or not.
    if sparsity is not None and not (sparsity == "auto" and context.params.get("ablation")):
        source = context.get_parameter_source
        given = {name for name in context.params if source(name) is ParameterSource.COMMANDLINE}
        require_meaning(given, sparsity)


def _is_mentioned(message: str, option: click.Parameter, value: object) -> bool:
    texts = {str(text) for text in (*option.opts, option.name, value)}
    return any(text in message for text in texts if len(text) > 2)


class Text(click.types.StringParamType):
    """Text that is UTF-8; an environment variable holds it as it stands, spaces and all."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(super().convert(value, param, ctx))
        try:
            return decode_text(text.encode("utf-8", "surrogateescape"), "it")
        except UsageError as error:
            self.fail(error.for_command_line, param, ctx)

    def split_envvar_value(self, rv: str) -> Sequence[str]:
        return (rv,)


def complete_path(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Leaves it to the shell, which knows its files."""
    return [CompletionItem(incomplete, type="file")]


def _complete_model(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    from ondevice.runtime.models import known_models

    names = [CompletionItem(name) for name in known_models() if name.startswith(incomplete)]
    return [*names, CompletionItem(incomplete, type="dir")]


option = partial(click.option, cls=SettableOption)

_model_flag = option(
    "--model",
    "-m",
    metavar="NAME|DIR",
    shell_complete=_complete_model,
    help="As the argument: a bundle's folder, or a name of `inspect --list`; the shipped model if not given.",
)


def model_option(command: Decorated) -> Decorated:
    """A decorator: which model a command is for, as an argument or as an option."""
    argument = click.argument(
        MODEL_ARGUMENT, metavar="[NAME|DIR]", required=False, shell_complete=_complete_model
    )
    return argument(_model_flag(command))


json_option = option("--json", "as_json", is_flag=True, help="Print one JSON object on one line.")


def add_options(*tables: dict[str, Option]) -> Callable[[Decorated], Decorated]:
    """A decorator that gives a command every option of the tables, in order."""

    def add(command: Decorated) -> Decorated:
        for table in reversed(tables):
            for entry in reversed(table.values()):
                command = _click_option(entry)(command)
        return command

    return add


def _click_option(entry: Option) -> Callable[[Decorated], Decorated]:
    kind: Any = click.Choice(entry.choices) if entry.choices else entry.kind
    default = str(entry.default) if entry.choices else entry.default
    return option(
        entry.flag,
        entry.name,
        type=Text() if entry.multiple else kind,
        default=() if entry.multiple else default,
        multiple=entry.multiple,
        callback=_checked,
        help=entry.help,
    )


def _checked(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
    """Refuse what no model can have where its origin is known: before a model is even looked for."""
    try:
        check_value(parameter.name or "", value)
    except UsageError as error:
        raise click.BadParameter(error.for_command_line, context, parameter) from error
    return value


class TextParts:
    """The UTF-8 text of a file, or of stdin for `-`, a part at a time. Nothing is held of what was taken.

    Raises UsageError, when it is made, if there is no such file, and while it is read for what is no text.
    """

    def __init__(self, source: str) -> None:
        self._where = "stdin" if source == "-" else source
        self._size = self._offset = 0
        self._in_line = False
        try:
            self._file = sys.stdin.buffer if source == "-" else Path(source).open("rb")  # noqa: SIM115
            self._size = os.fstat(self._file.fileno()).st_size
        except (FileNotFoundError, IsADirectoryError) as error:
            raise UsageError(f"there is no file {self._where}") from error
        except OSError as error:
            if source != "-":
                raise
            log.debug("stdin has no descriptor: %s", error)

    @property
    def share(self) -> float:
        """How much of it has been read, from 0 to 1; 0 where its size isn't known."""
        return min(1.0, self._offset / self._size) if self._size else 0.0

    def __iter__(self) -> Iterator[str]:
        return self._decoded_parts(lambda: self._file.read(PART_BYTES))

    def line(self) -> Iterator[str]:
        """Parts of the line that comes next, with its end; nothing but empty ones behind the last.

        What isn't taken of it is skipped by `end_line`.
        """
        self._in_line = True
        return self._decoded_parts(self._read_line)

    def end_line(self) -> None:
        """Skip what is left of the line."""
        while data := self._read_line():
            self._offset += len(data)

    def _read_line(self) -> bytes:
        data: bytes = self._file.readline(PART_BYTES) if self._in_line else b""
        self._in_line = bool(data) and not data.endswith(b"\n")
        return data

    def _decoded_parts(self, read: Callable[[], bytes]) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")()
        while data := read():
            held = len(decoder.getstate()[0])
            if b"\0" in data:
                raise UsageError(
                    f"{self._where} is not text: byte 0x00 at offset {self._offset + data.index(0)}"
                )
            yield self._decoded(decoder, data, held)
            self._offset += len(data)
        yield self._decoded(decoder, b"", len(decoder.getstate()[0]))

    def _decoded(self, decoder: codecs.IncrementalDecoder, data: bytes, held: int) -> str:
        """held: bytes of an unfinished character that the decoder has already."""
        try:
            return decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            at = self._offset - held + error.start
            wrong = error.object[error.start]
            raise UsageError(f"{self._where} is not UTF-8 text: byte 0x{wrong:02x} at offset {at}") from error


def whole_text(source: str) -> str:
    """The whole of `TextParts(source)`. Raises UsageError where that has more than MAX_TEXT_CHARS."""
    parts: list[str] = []
    chars = 0
    for part in TextParts(source):
        parts.append(part)
        chars += len(part)
        if chars > MAX_TEXT_CHARS:
            raise UsageError(f"{source} has more than {MAX_TEXT_CHARS} characters; give a part of it")
    return "".join(parts)


def decode_text(data: bytes, where: str, offset: int = 0) -> str:
    """UTF-8 bytes as text. Raises UsageError naming the first wrong byte; offset: where data starts."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{where} is not UTF-8 text: byte 0x{data[error.start]:02x} at offset {offset + error.start}"
        ) from error
