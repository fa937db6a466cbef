"""Click options made from the tables of settings, where their values come from, and reading of text files."""

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

from ondevice.distributed.place import CHILD, CONTROL, FRONT
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
"""Exit code when stdout has no reader any more: the shell's code for SIGPIPE."""

MAX_SHOWN_OPTIONS = 18
ALL_OPTIONS = "ondevice.all_options"
"""Key of a context's `meta` while the help shows every option."""
MODEL_ARGUMENT = "named_model"
OTHER_VARIABLES = ("ONDEVICE_CONFIG", "ONDEVICE_HOME", "ONDEVICE_REAL_MODELS", CHILD, CONTROL, FRONT)
"""Environment variables that belong to no option. `ondevice` sets the last three."""
TEST_VARIABLES = "ONDEVICE_TEST_"
NEAR = 0.85
"""Least `difflib` similarity at which a name counts as a misspelling, with the common prefix."""
PART_BYTES = 1 << 16
"""Bytes of a text read at a time."""
MAX_TEXT_CHARS = 1 << 20
"""Most characters of a text that is read at once: some hundred pages."""

Decorated = TypeVar("Decorated", bound=Callable[..., None])


class SettableOption(click.Option):
    """An option that its environment variable and the settings file can also set. Errors name the source.

    rare: whether only `--help-all` shows it, if a command has many options.
    """

    def __init__(self, *arguments: Any, rare: bool = False, **attributes: Any) -> None:
        super().__init__(*arguments, **attributes)
        self.rare = rare
        self.envvar = variable(self.flag)

    @property
    def flag(self) -> str:
        """The long flag, such as `--model`."""
        return next(name for name in self.opts if name.startswith("--"))

    def origin(self, context: click.Context) -> str | None:
        """The environment variable or settings-file key that set the value; None for other sources."""
        source = context.get_parameter_source(self.name or "")
        if source is ParameterSource.ENVIRONMENT:
            return str(self.envvar)
        if source is ParameterSource.DEFAULT_MAP:
            return f"{context.obj.keys[self.name]} in {context.obj.path}"
        return None

    def consume_value(self, ctx: click.Context, opts: Mapping[str, Any]) -> tuple[Any, ParameterSource]:
        """The option's value and its source, as in click. The settings file may give a string for an option
        with several values.
        """
        value, source = super().consume_value(ctx, opts)
        return ([value] if self.multiple and isinstance(value, str) else value), source

    def get_error_hint(self, ctx: click.Context | None) -> str:
        origin = None if ctx is None else self.origin(ctx)
        return origin or f"'{self.flag}'"


class SettingsContext(click.Context):
    """A command's context, with defaults from the settings file. `obj` is the file's `Settings`, once read.

    The file is read when a running command looks up a default, so help and completion work even if the file
    is wrong.
    """

    def read_settings(self) -> Settings:
        """The settings file's content, read once. Raises UsageError if it is wrong."""
        if self.obj is None:
            self.obj = read_settings(settings_path())
            self.default_map = dict(self.obj.values)
        return self.obj  # type: ignore[no-any-return]

    def of_model(self, name: str) -> dict[str, Any]:
        """The options in the settings file for one model, without those that a flag or variable sets."""
        explicit = ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT
        given = self.read_settings().models.get(name, {})
        return {key: it for key, it in given.items() if self.get_parameter_source(key) not in explicit}

    def lookup_default(self, name: str, call: bool = True) -> Any:
        """The default of an option, as in click. Reads the settings file first, except for help, which passes
        call=False.
        """
        if call and not self.resilient_parsing:
            self.read_settings()
        return super().lookup_default(name, call)  # type: ignore[call-overload]


def _show_all_options(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value and not context.resilient_parsing:
        context.meta[ALL_OPTIONS] = True
        click.echo(context.get_help(), color=context.color)
        context.exit()


HELP_ALL = click.Option(
    ["--help-all"],
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_all_options,
    help="Show every option and exit.",
)


class Command(click.Command):
    """A command whose errors name the source of each setting that they mention, unless it is a flag.

    With more than MAX_SHOWN_OPTIONS options, `--help` leaves rare ones to `--help-all`.
    """

    context_class = SettingsContext

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        parameters = super().get_params(ctx)
        options = [it for it in parameters if isinstance(it, click.Option)]
        return parameters if len(options) <= MAX_SHOWN_OPTIONS else [*parameters, HELP_ALL]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options = [it for it in self.get_params(ctx) if isinstance(it, click.Option)]
        if HELP_ALL in options and ALL_OPTIONS not in ctx.meta:
            options = [it for it in options if not (isinstance(it, SettableOption) and it.rare)]
        records = [record for it in options if (record := it.get_help_record(ctx)) is not None]
        with formatter.section("Options"):
            formatter.write_dl(records)

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
    """A group that exits quietly with BROKEN_PIPE when the reader of stdout goes away."""

    command_class = Command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            ctx.exit(broken_pipe())


def broken_pipe() -> int:
    """Silence stdout after its reader went away, because Python flushes it at exit. Returns BROKEN_PIPE."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)
    return BROKEN_PIPE


def _start_logging(root: click.Context, settings: Settings) -> None:
    """Start logging, verbosely if `--verbose` or the settings file says so."""
    verbose = root.params["verbose"]
    if root.get_parameter_source("verbose") is ParameterSource.DEFAULT:
        verbose = settings.values.get("verbose", verbose)
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format="%(name)s: %(message)s")


def _variables(command: click.Command) -> Iterator[str]:
    """Yields the environment variables that set an option of the command or of one of its subcommands."""
    yield from (str(it.envvar) for it in command.params if isinstance(it, SettableOption))
    for inner in getattr(command, "commands", {}).values():
        yield from _variables(inner)


def _warn_of_variables(root: click.Command) -> None:
    """Log a warning for each environment variable that looks like an option's but sets nothing."""
    known = {*_variables(root), *OTHER_VARIABLES}
    for name in sorted(os.environ):
        if name.startswith("ONDEVICE_") and name not in known and not name.startswith(TEST_VARIABLES):
            from difflib import get_close_matches

            near = get_close_matches(name, known, 1, NEAR)
            log.warning("%s sets nothing%s", name, f"; did you mean {near[0]}?" if near else "")


def _take_model(context: click.Context) -> None:
    """Move the model's argument into the option `--model`, so that the command gets one value.

    Raises UsageError if the command line names two different models.
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
    """Check that each option on the command line means something with the other options' values.

    Raises UsageError for one that doesn't. Options from other sources are meant for other commands too.
    """
    values = {name: context.params.get(name) for name in ("sparsity", "speculation")}
    chosen = {name: value for name, value in values.items() if value is not None}
    if chosen.get("sparsity") == "auto" and context.params.get("ablation"):
        # The ablation chooses a mode that selects neurons, which may be lossy.
        del chosen["sparsity"]
    source = context.get_parameter_source
    given = {name for name in context.params if source(name) is ParameterSource.COMMANDLINE}
    require_meaning(given, chosen)


def _is_mentioned(message: str, option: click.Parameter, value: object) -> bool:
    texts = {str(text) for text in (*option.opts, option.name, value)}
    return any(text in message for text in texts if len(text) > 2)


class Text(click.types.StringParamType):
    """A parameter type for UTF-8 text. The value of an environment variable isn't split at spaces."""

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
    """Leave the completion of file names to the shell."""
    return [CompletionItem(incomplete, type="file")]


def _complete_model(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    from ondevice.runtime.models import known_models

    names = [CompletionItem(name) for name in known_models() if name.startswith(incomplete)]
    return [*names, CompletionItem(incomplete, type="dir")]


option = partial(click.option, cls=SettableOption)

model_flag = option(
    "--model",
    "-m",
    metavar="NAME|DIR",
    shell_complete=_complete_model,
    help="As the argument: a bundle's folder, or a name of `inspect --list`; the shipped model if not given.",
)


def model_option(command: Decorated) -> Decorated:
    """A decorator that lets a command's model be named by an argument or by `--model`."""
    argument = click.argument(
        MODEL_ARGUMENT, metavar="[NAME|DIR]", required=False, shell_complete=_complete_model
    )
    return argument(model_flag(command))


yes_option = option(
    "--yes", "-y", is_flag=True, help="Convert a model that isn't a bundle yet without asking."
)


def hosts_option(
    text: str = "Share the model with other machines: MLX's host file names them, this one first.",
    required: bool = False,
) -> Callable[[Decorated], Decorated]:
    """`--hosts HOSTFILE`. text: its help."""
    return option(
        "--hosts",
        metavar="HOSTFILE",
        type=Text(),
        required=required,
        shell_complete=complete_path,
        help=text,
        rare=True,
    )


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
        rare=entry.rare,
    )


def _checked(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
    """A value, checked before a model is looked up. Raises an error that names the option if no model can
    have it.
    """
    try:
        check_value(parameter.name or "", value)
    except UsageError as error:
        raise click.BadParameter(error.for_command_line, context, parameter) from error
    return value


class TextParts:
    """The UTF-8 text of a file, or of stdin for `-`, part by part. Each part is read once and not kept.

    Construction raises UsageError for a missing file, reading for bytes that aren't text.
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
        """Share of the file that has been read, from 0 to 1; 0 if its size is unknown."""
        return min(1.0, self._offset / self._size) if self._size else 0.0

    def __iter__(self) -> Iterator[str]:
        return self._decoded_parts(lambda: self._file.read(PART_BYTES))

    def line(self) -> Iterator[str]:
        """Parts of the next line, line end included. After the last line, only empty parts.

        `end_line` skips parts that are still unread.
        """
        self._in_line = True
        return self._decoded_parts(self._read_line)

    def end_line(self) -> None:
        """Skip the rest of the line."""
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
        """`data` as text. held: number of bytes of an unfinished character already in the decoder."""
        try:
            return decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            at = self._offset - held + error.start
            wrong = error.object[error.start]
            raise UsageError(f"{self._where} is not UTF-8 text: byte 0x{wrong:02x} at offset {at}") from error


def read_text(source: str) -> str:
    """The text of `TextParts(source)`. Raises UsageError if it has more than MAX_TEXT_CHARS."""
    parts: list[str] = []
    chars = 0
    for part in TextParts(source):
        parts.append(part)
        chars += len(part)
        if chars > MAX_TEXT_CHARS:
            raise UsageError(f"{source} has more than {MAX_TEXT_CHARS} characters; give a part of it")
    return "".join(parts)


def decode_text(data: bytes, where: str) -> str:
    """UTF-8 bytes as text. Raises UsageError that names the first wrong byte."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{where} is not UTF-8 text: byte 0x{data[error.start]:02x} at offset {error.start}"
        ) from error
