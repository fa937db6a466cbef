"""Runs on disk, one JSON object per line as they end, and the document that their medians make."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Row = dict[str, Any]
LIMIT_REASONS = ("killed", "refused", "skipped", "no end")
"""How the reason of a run begins that failed by its limit."""


class RunId(NamedTuple):
    """What a run is of. arm: an engine, or a drafter."""

    model: str
    case: str
    arm: str
    pair: int


class Results:
    """The runs of one file. The first line says what they belong to; each later line is a run."""

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        """Goes on with a file that is there, if it belongs to the same `header` but for its date.

        Raises SystemExit if it doesn't.
        """
        self.path, self.header, self.rows = path, dict(header), dict[RunId, Row]()
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._append(self.header)
            return
        stored, rows = read(path)
        differing = sorted(key for key in {*stored, *header} - {"date"} if stored.get(key) != header.get(key))
        if differing:
            raise SystemExit(
                f"{path} has runs of another {', '.join(differing)}; without RESUME=1 they are put aside"
            )
        self.header = stored
        if not path.read_bytes().endswith(b"\n"):
            path.write_bytes(path.read_bytes() + b"\n")
        self.rows = {run_id(row): row for row in rows}

    def add(self, of: RunId, figures: Mapping[str, Any]) -> Row:
        """Store a run; returns its row."""
        row = self.rows[of] = {**of._asdict(), **figures}
        self._append(row)
        return row

    def failed(self, of: RunId) -> bool:
        """Whether an earlier pair's run of the same arm failed, as this one then would."""
        return any(
            not row.get("survived", True) for key, row in self.rows.items() if key[:3] == of[:3] and key != of
        )

    def _append(self, line: Mapping[str, Any]) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def read(path: Path) -> tuple[Row, list[Row]]:
    """The header and the runs of a file. A line that was cut short is left out."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return lines[0], lines[1:]


def run_id(row: Row) -> RunId:
    return RunId(*(row[field] for field in RunId._fields))


def put_aside(path: Path) -> None:
    """Rename a file of earlier runs after the date that it says, if there is one."""
    if path.exists():
        date = re.sub(r"\D", "", read(path)[0]["date"])
        path.rename(path.with_name(f"{path.stem}-{date}{path.suffix}"))


def document(header: Row, rows: Sequence[Row]) -> Row:
    """Everything that the page and the last line say: medians, least and most of each figure of a case."""
    cases: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        cases.setdefault((row["model"], row["case"], row["arm"]), []).append(row)
    others = [row["others"] for row in rows if "others" in row]
    return header | {
        "others": {"median": statistics.median(others or [0.0]), "max": max(others, default=0.0)},
        "cases": [
            {"model": model, "case": case, "arm": arm, **summarise(runs)}
            for (model, case, arm), runs in cases.items()
        ],
        "changed_texts": changed_texts(rows),
        "crashes": crashes(rows),
    }


def summarise(runs: Sequence[Row]) -> Row:
    """Number of runs that ended, the reason of one that didn't, and [median, least, most] of each figure."""
    survivors = [run for run in runs if run.get("survived", True)]
    failures = [without_paths(run["reason"]) for run in runs if not run.get("survived", True)]
    summary: Row = {"runs": len(survivors)}
    if failures:
        summary["failed"] = failures[0]
    names = dict.fromkeys(name for run in survivors for name, value in run.items() if _is_figure(name, value))
    figures = {}
    for name in names:
        values = [run[name] for run in survivors if name in run]
        figures[name] = [_rounded(it) for it in (statistics.median(values), min(values), max(values))]
    return summary | {"figures": figures}


def _is_figure(name: str, value: object) -> bool:
    return name not in ("pair", "others") and isinstance(value, int | float) and not isinstance(value, bool)


def _rounded(value: float) -> float:
    """Five digits, so that stored documents change only where figures do."""
    return int(value) if value == int(value) else float(f"{value:.5g}")


def changed_texts(rows: Iterable[Row]) -> list[str]:
    """Runs of drafters whose text isn't that of plain decoding, by name."""
    texts = {run_id(row): row["texts"] for row in rows if "texts" in row}
    changed = []
    for of, text in texts.items():
        kind = of.case.partition("-")[0]
        plain = texts.get(of._replace(arm="off", case=f"{kind}-resident"))
        if plain is not None and any(plain[kind] != digest for kind, digest in text.items()):
            changed.append(f"{of.model}, {of.case}, {of.arm}")
    return sorted(set(changed))


def crashes(rows: Iterable[Row]) -> list[str]:
    """Runs that failed otherwise than by their limit, with the reason."""
    return sorted(
        {
            f"{row['model']}, {row['case']}, {row['arm']}: {without_paths(row['reason'])}"
            for row in rows
            if not row.get("survived", True) and not row["reason"].startswith(LIMIT_REASONS)
        }
    )


def without_paths(reason: str) -> str:
    """A reason without absolute paths, which name a machine's folders."""
    return re.sub(r"(?<![\w.])/[\w./-]+", "PATH", reason)
