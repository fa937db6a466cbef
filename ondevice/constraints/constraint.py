"""`Constraint`: what a text has to satisfy. Pure data; `grammars.py` makes masks of it with llguidance."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from ondevice.errors import ConstraintError, UsageError, json_fault
from ondevice.records import dataclass

Kind = Literal["json_schema", "regex", "lark"]
KINDS: dict[str, str] = {"json_schema": "JSON schema", "regex": "pattern", "lark": "grammar"}
"""Names of the kinds in messages."""
MAX_SOURCE_CHARS = 1 << 16
"""Most characters of a schema, pattern or grammar. With the stack that grammars are read on, it bounds how
deep rules and references may lead."""


@dataclass(frozen=True)
class Constraint:
    """What a text has to satisfy, from its first character to its last. One of the class methods makes it.

    kind: what `source` is: a JSON schema, a regular expression, or a grammar in llguidance's Lark format.
    most_digits: the most digits of a number, in a grammar whose JSON stands between marks without quotes; 0
    for no limit. A schema implies its limit.

    It doesn't apply to thinking: if a model thinks first, only its reply obeys.
    """

    kind: Kind
    source: str
    most_digits: int = 0

    def __post_init__(self) -> None:
        """Check all values. Raises UsageError for one of another type, ConstraintError for a source that is
        too long.
        """
        if self.kind not in KINDS:
            raise UsageError(f"the constraint's kind is {self.kind!r}; it must be one of {', '.join(KINDS)}")
        if not isinstance(self.source, str):
            raise UsageError(f"the constraint is of type {type(self.source).__name__}; it must be a string")
        if len(self.source) > MAX_SOURCE_CHARS:
            raise ConstraintError(
                f"the {KINDS[self.kind]} has {len(self.source)} characters; it may have {MAX_SOURCE_CHARS}"
            )

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str) -> Constraint:
        """A constraint to JSON that matches a schema, written as `json.dumps` writes it: with one space after
        `,` and `:`.

        schema: the schema, or its JSON text. Objects' keys come in the order of its `properties`.

        Raises ConstraintError for text that isn't JSON, UsageError for another type. Keywords are checked
        when a generation begins.
        """
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise ConstraintError(f"the schema isn't JSON: {json_fault(error)}") from error
        if not isinstance(schema, Mapping | bool):
            raise UsageError(f"the schema is of type {type(schema).__name__}; it must be an object or a bool")
        try:
            return cls("json_schema", json.dumps(schema, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise ConstraintError(f"the schema isn't JSON: {json_fault(error)}") from error

    @classmethod
    def json_object(cls) -> Constraint:
        """A constraint to any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> Constraint:
        """A constraint to texts that a regular expression matches completely, in the syntax of Rust's `regex`
        crate.
        """
        return cls("regex", pattern)

    @classmethod
    def lark(cls, grammar: str, most_digits: int = 0) -> Constraint:
        """A constraint to texts of a grammar in llguidance's Lark format, with `start` as its first rule.

        A rule may hold a schema, as `json_rule` writes it, and special tokens by name, such as `<|call|>`.
        """
        return cls("lark", grammar, most_digits)
