"""Options of the command line made from the settings' table, and text arguments read. Prints nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from ondevice.errors import UsageError
from ondevice.settings import Option

Command = TypeVar("Command", bound=Callable[..., None])

model_option = click.option(
    "--model",
    "-m",
    envvar="ONDEVICE_MODEL",
    metavar="NAME|DIR",
    help="A bundle's folder, a name under the model folders, or an alias; the shipped model if not given.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on one line.")


class _WholeString(click.types.StringParamType):
    """Text that an environment variable holds as it stands, spaces and all."""

    def split_envvar_value(self, rv: str) -> Sequence[str]:
        return (rv,)


def add_options(*tables: dict[str, Option]) -> Callable[[Command], Command]:
    """A decorator that gives a command every option of the tables, in order."""

    def add(command: Command) -> Command:
        for table in reversed(tables):
            for option in reversed(table.values()):
                command = _click_option(option)(command)
        return command

    return add


def _click_option(option: Option) -> Callable[[Command], Command]:
    kind: Any = click.Choice(option.choices) if option.choices else option.kind
    default = str(option.default) if option.choices else option.default
    return click.option(
        option.flag,
        option.name,
        type=_WholeString() if option.multiple else kind,
        default=() if option.multiple else default,
        multiple=option.multiple,
        envvar=option.variable,
        help=option.help,
    )


def read_text(source: str) -> str:
    """The UTF-8 text of a file, or of stdin for `-`. Raises UsageError if there is none."""
    where = "stdin" if source == "-" else source
    try:
        data = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
        return data.decode("utf-8")
    except (FileNotFoundError, IsADirectoryError) as error:
        raise UsageError(f"there is no file {where}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{where} is not UTF-8 text: {error}") from error
