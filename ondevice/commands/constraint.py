"""The options `--json-schema` and `--grammar`, and the constraint that they describe."""

from __future__ import annotations

from typing import Any

import click

from ondevice.commands.options import Decorated, complete_path, option, read_text
from ondevice.constraints.constraint import Constraint
from ondevice.errors import UsageError

_json_schema = option(
    "--json-schema",
    type=click.Path(),
    metavar="FILE|-",
    shell_complete=complete_path,
    help="Write JSON that obeys the schema in a file; - reads stdin. Needs the extra `constrain`.",
)
_grammar = option(
    "--grammar",
    type=click.Path(),
    metavar="FILE|-",
    shell_complete=complete_path,
    help="Write text of the Lark grammar in a file; - reads stdin. Needs the extra `constrain`.",
    rare=True,
)


def constraint_options(command: Decorated) -> Decorated:
    """A decorator that gives a command both options."""
    return _json_schema(_grammar(command))


def constraint_of(values: dict[str, Any]) -> Constraint | None:
    """The constraint that the options describe, which are removed from `values`; None without them.

    Raises UsageError if both are given or a file isn't text, ConstraintError if it isn't JSON or is too long.
    """
    schema, grammar = values.pop("json_schema"), values.pop("grammar")
    if schema is not None and grammar is not None:
        raise UsageError("--json-schema and --grammar are both given; a text can obey one of them")
    if schema is not None:
        return Constraint.json_schema(read_text(schema))
    return None if grammar is None else Constraint.lark(read_text(grammar))
