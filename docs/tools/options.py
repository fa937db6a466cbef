"""Write docs/options.md from the tables that the command line itself is made of.

`make options` runs it; a test compares the page with what it would write today.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from ondevice import errors
from ondevice.cli import cli
from ondevice.settings import (
    PROMPT_CACHE_OPTIONS,
    RUNTIME_OPTIONS,
    SAMPLING_OPTIONS,
    TEMPLATE_OPTIONS,
    Option,
    variable,
)

PAGE = Path(__file__).resolve().parents[1] / "options.md"
INTRODUCTION = """# Options

Generated from the settings' tables and the command line by `make options`; edit those, not this page.

A flag on the command line beats an environment variable, which beats the settings file, which beats the
default. The variable of `--max-tokens` is `ONDEVICE_MAX_TOKENS`, and its key in the settings file is
`max_tokens`; every option below follows that pattern. The settings file is TOML: `config.toml` in the
platform's configuration folder, or the file that `ONDEVICE_CONFIG` names. `ONDEVICE_HOME` is the folder
of converted models. An unknown key in the file is an error, and a misspelt variable is a warning. A table
`[models.NAME]` has the `max_context` of one model, which is its folder's name.

`--help` of a command with more than 18 options shows those that most people need, and `--help-all` all of
them, as this page does.

Python takes the same options by their field names, which are the keys of the settings file except where
the tables say otherwise. [api.md](api.md) lists them.

A model is a path or a name. A name is a folder where you are, else one in `ONDEVICE_HOME` (without that
variable, in the platform's data folder), where `convert` puts what has no `--output`, else a model that
ships. `chat`, `generate` and `serve` also take what isn't converted yet, and [convert it first](hub.md).
`ondevice inspect --list` has the models that are here, and short names of public checkpoints.
"""
EXIT_CODES = {
    0: "done",
    1: "failed while running",
    2: "the command line can't be right",
    3: "the model wasn't found, or isn't supported",
    4: "the prompt is longer than the context",
    5: "the budget can't be met",
    6: "a bundle or a checkpoint is damaged, or storage fails",
    errors.INTERRUPTED: "interrupted",
}


def page() -> str:
    """The whole page."""
    commands = dict(_commands(cli))
    shared = RUNTIME_OPTIONS | PROMPT_CACHE_OPTIONS | TEMPLATE_OPTIONS | SAMPLING_OPTIONS
    parts = [
        INTRODUCTION,
        "## How a model runs\n",
        _settings_table(RUNTIME_OPTIONS, commands),
        "## What is kept on disk\n",
        "[prompt-cache.md](prompt-cache.md) says what these do.\n",
        _settings_table(PROMPT_CACHE_OPTIONS, commands),
        "## How conversations are written\n",
        _settings_table(TEMPLATE_OPTIONS, commands),
        "## How the next token is chosen\n",
        _settings_table(SAMPLING_OPTIONS, commands),
        "## Options of each command\n",
        "The options above aren't repeated here, but where a command means something else by one.\n",
    ]
    for name, command in commands.items():
        own = [it for it in _options(command) if it.name not in shared or _differs(it, shared)]
        arguments = [it.make_metavar(click.Context(command)) for it in command.params if not _is_option(it)]
        usage = " ".join(["ondevice", name, *arguments])
        parts.append(f"### {name}\n\n`{usage}`: {_help(command.help)}\n")
        if own:
            rows = [(_code(_flags(it)), _values(it), _own_default(it), _help(it.help)) for it in own]
            parts.append(_table(("option", "values", "default", "what"), rows))
    parts += [
        "## Exit codes\n",
        _table(("code", "meaning"), [(str(code), meaning) for code, meaning in EXIT_CODES.items()]),
    ]
    return "\n".join(parts).rstrip() + "\n"


def _commands(group: click.Group, prefix: str = "") -> Iterator[tuple[str, click.Command]]:
    """Every command that does something, by what is typed for it."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from _commands(command, f"{prefix}{name} ")
        else:
            yield prefix + name, command


def _options(command: click.Command) -> list[click.Option]:
    return [it for it in command.params if isinstance(it, click.Option)]


def _is_option(parameter: click.Parameter) -> bool:
    return isinstance(parameter, click.Option)


def _differs(option: click.Option, shared: Mapping[str, Option]) -> bool:
    """Whether a command's option isn't what the table says under that name."""
    entry = shared[option.name or ""]
    own = tuple(option.type.choices) if isinstance(option.type, click.Choice) else ()
    return own != entry.choices or _help(option.help) != _help(entry.help)


def _settings_table(options: Mapping[str, Option], commands: Mapping[str, click.Command]) -> str:
    rows = []
    for entry in options.values():
        where = [name for name, it in commands.items() if entry.flag in _flag_names(it)]
        values = ", ".join(_code([choice]) for choice in entry.choices) or _kind(entry.kind)
        field = "" if variable(entry.flag) == f"ONDEVICE_{entry.name.upper()}" else f" (`{entry.name}`)"
        own = (f"`{entry.flag}`{field}", values, _default(entry.default), _help(entry.help), ", ".join(where))
        rows.append(own)
    return _table(("option", "values", "default", "what", "commands"), rows)


def _flag_names(command: click.Command) -> set[str]:
    return {flag for it in _options(command) for flag in it.opts}


def _flags(option: click.Option) -> list[str]:
    return [*option.opts, *option.secondary_opts]


def _values(option: click.Option) -> str:
    if option.is_flag:
        return "a switch"
    if isinstance(option.type, click.Choice):
        return ", ".join(_code([str(choice)]) for choice in option.type.choices)
    if isinstance(option.type, click.Path) or (option.metavar or "").endswith("DIR"):
        return "a path" if option.metavar is None else _code([option.metavar])
    kinds: dict[type[click.ParamType[Any]], type] = {
        click.types.IntRange: int,
        click.types.IntParamType: int,
        click.types.FloatParamType: float,
    }
    return _kind(kinds.get(type(option.type), str))


def _own_default(option: click.Option) -> str:
    """The default, where there is one to say."""
    known = isinstance(option.default, str | int | float) and not isinstance(option.default, bool)
    return _default(option.default) if known and not option.is_flag else ""


def _kind(kind: type) -> str:
    return {int: "an integer", float: "a number", str: "text", tuple: "text, several times"}[kind]


def _default(value: object) -> str:
    return "none" if value in (None, (), "") else _code([str(value)])


def _help(text: str | None) -> str:
    """One paragraph, as a cell may hold it."""
    return " ".join((text or "").split("\n\n")[0].split()).replace("|", "\\|")


def _code(words: Sequence[str]) -> str:
    return ", ".join(f"`{word}`" for word in words).replace("|", "\\|")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
