"""WikiSQL, in the form of text2sql-data, as questions and queries that SQLite can parse.

The source's queries have placeholders for values, and the real column names in capitals. A table's columns
are gathered from all queries about it.
"""

from __future__ import annotations

import bz2
import hashlib
import json
import re
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

TABLE = "records"
PLAIN_ONE_IN = 4
"""One of this many questions comes without its table's columns."""

_AGGREGATES = ("COUNT", "MAX", "MIN", "SUM", "AVG")
_STRING = re.compile(r"'(?:[^']|'')*'")
_UNKNOWN = "no such column"
_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?")


@dataclass(frozen=True)
class Example:
    """A question about a table, and its query. `prompt` is the question as the model gets it."""

    split: str
    question: str
    columns: tuple[str, ...]
    query: str

    @property
    def prompt(self) -> str:
        digest = hashlib.sha256(self.question.encode()).digest()
        return self.question if digest[0] % PLAIN_ONE_IN == 0 else with_columns(self.question, self.columns)


@dataclass(frozen=True)
class _Query:
    """A query before its values are filled in. conditions: (column, operator, variable)."""

    aggregate: str
    column: str
    conditions: tuple[tuple[str, str, str], ...]

    @property
    def columns(self) -> set[str]:
        return {self.column, *(column for column, _, _ in self.conditions)}


def with_columns(question: str, columns: tuple[str, ...]) -> str:
    """The question with the columns of its table after it."""
    return f"{question} [{', '.join(columns)}]"


def read(path: Path) -> Iterator[Example]:
    """All examples of the file whose query can be written for SQLite."""
    with bz2.open(path, "rt", encoding="utf-8") as file:
        groups: list[dict[str, Any]] = json.load(file)
    queries = [_parse(group["sql"][0]) for group in groups]
    columns: dict[str, set[str]] = {}
    for group, query in zip(groups, queries, strict=True):
        for sentence in group["sentences"]:
            columns.setdefault(sentence["table-id"], set()).update(query.columns if query else ())
    for group, query in zip(groups, queries, strict=True):
        if query is None:
            continue
        for sentence in group["sentences"]:
            question = " ".join(sentence["original"].split())
            text = _filled(query, question, sentence["variables"])
            if question and text is not None:
                names = tuple(sorted(columns[sentence["table-id"]]))
                yield Example(sentence["question-split"], question, names, text)


def parses(query: str) -> bool:
    """True if `query` is a query by SQLite's grammar, whatever columns it names."""
    return query.startswith("SELECT ") and (_error(query, ("anything",)) or _UNKNOWN).startswith(_UNKNOWN)


def compiles(query: str, columns: tuple[str, ...]) -> bool:
    """True if `query` is a query that SQLite can run on a table with these columns.

    Double quotes are allowed only inside strings: SQLite takes a quoted name that is no column for a string.
    """
    return parses(query) and '"' not in _STRING.sub("", query) and _error(query, columns) is None


def _error(query: str, columns: tuple[str, ...]) -> str | None:
    database = sqlite3.connect(":memory:")
    try:
        database.execute(f"CREATE TABLE {TABLE} ({', '.join(columns)})")
        database.execute(f"EXPLAIN {query}")
    except (sqlite3.Error, sqlite3.Warning) as error:
        return str(error)
    finally:
        database.close()
    return None


def _parse(template: str) -> _Query | None:
    """Parse `SELECT MAX A_FIELD FROM TABLE AS TABLEalias0 WHERE B_FIELD = "var0" AND ... ;`, or None."""
    match = re.fullmatch(r"SELECT (.+) FROM TABLE AS TABLEalias0(?: WHERE (.+))? ;", template)
    if match is None:
        return None
    *aggregate, column = match[1].split(" ")
    conditions = []
    for condition in match[2].split(" AND ") if match[2] else ():
        parts = condition.split(" ")
        if len(parts) != 3 or parts[1] not in ("=", "<", ">"):
            return None
        conditions.append((_column(parts[0]), parts[1], parts[2].strip('"')))
    if len(aggregate) > 1 or any(name not in _AGGREGATES for name in aggregate):
        return None
    return _Query("".join(aggregate), _column(column), tuple(conditions))


def _filled(query: _Query, question: str, variables: dict[str, str]) -> str | None:
    """The query with the values of one question; None if one is missing."""
    selected = f"{query.aggregate}({query.column})" if query.aggregate else query.column
    conditions = []
    for column, operator, variable in query.conditions:
        value = variables.get(variable, "").strip()
        if not value:
            return None
        # Take the question's spelling, because the source has many values in lower case.
        at = question.lower().find(value.lower())
        value = question[at : at + len(value)] if at >= 0 else value
        literal = value if _NUMBER.fullmatch(value) else "'" + value.replace("'", "''") + "'"
        conditions.append(f"{column} {operator} {literal}")
    where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
    return f"SELECT {selected} FROM {TABLE}{where}"


@cache
def _column(field: str) -> str:
    """`TABLEalias0.HOME_TEAM_FIELD` as an identifier, `home_team`, that SQLite takes without quotes."""
    name = field.removeprefix("TABLEalias0.").removesuffix("_FIELD").lower()
    name = name.replace("%", " percent ").replace("#", " number ")
    name = re.sub(r"[^a-z0-9]+", "_", name).strip("_") or "value"
    name = f"n_{name}" if name[0].isdigit() else name
    return name if compiles(f"SELECT {name} FROM {TABLE}", (name,)) else f"{name}_"
