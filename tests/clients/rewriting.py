"""Recorded requests without what belongs to others: nobody's prose, paths, ids, dates or machine.

Every field, type, name, role and order stays. A sentence of a prompt or a description
becomes `{"$filler": [NUMBER, LENGTH]}`, and `expanded` makes a text of that many characters of it again:
equal texts of one program have one number, so that what a second request shares with the first one
stays shared.

    python -m tests.clients.rewriting FILE [NUMBER]

prints a recorded request with those texts, as `ondevice serve --warm` takes it; of several in a file, the
first, or the one of that number from 0.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from tests.clients.agents import NOTES, TASK
from tests.clients.chats import QUESTION
from tests.clients.recorder import DONE, SHELL

RECORDED = Path(__file__).parent / "recorded"
FILLER = "$filler"
PLAIN_PATH = "/workplace"
HEADERS = ("accept", "anthropic-beta", "anthropic-version", "authorization", "content-type", "originator")
HEADERS += ("user-agent", "x-api-key", "x-app")
STRUCTURAL = ("$schema", "format", "id", "model", "name", "object", "pattern", "role", "type")
"""Fields whose strings are kept as they are."""
PROSE = (
    "content",
    "definition",
    "description",
    "instructions",
    "output",
    "prompt",
    "system",
    "text",
    "title",
)
OUR_OWN = (TASK, NOTES, QUESTION, DONE, *SHELL)
HEAD = "x-anthropic-billing-header:"
LONGEST_NAME = 48
"""Strings of other fields are names up to that many characters, if they have no space."""

_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_HEX = re.compile(r"\b[0-9a-f]{32,}\b")
_WORDS = (
    *("river", "bends", "north", "where", "old", "mills", "grind", "corn", "and", "every", "boat", "waits"),
    *("for", "high", "water", "before", "it", "turns", "back", "to", "town", "because", "can", "row"),
    *("against", "such", "wind", "while", "snow", "melts", "upon", "those", "hills", "rain", "fills", "each"),
    *("small", "pond", "so", "farmers", "mend", "their", "fences", "early", "then", "carry", "seed", "past"),
    *("quiet", "barns", "until", "evening", "brings", "some", "rest", "a", "the", "of", "in", "with", "by"),
)


def filler(number: int, length: int) -> str:
    """A text of `length` characters that means nothing, another one for each number."""
    state, parts, size, start = number * 7919 + 17, [], 0, True
    while size < length:
        state = (state * 1103515245 + 12345) % 2**31
        word = _WORDS[(state >> 16) % len(_WORDS)]
        ends = (state >> 8) % 11 == 0
        behind = " " if not ends else ".\n" if state % 5 == 0 else ". "
        parts.append((word.capitalize() if start else word) + behind)
        start = ends
        size += len(parts[-1])
    return "".join(parts)[:length]


def expanded(value: Any, share: float = 1.0) -> Any:
    """A rewritten value with a text in place of each filler, of a share of its length."""
    if isinstance(value, dict):
        if set(value) == {FILLER}:
            number, length = value[FILLER]
            return filler(number, max(1, round(length * share)))
        return {name: expanded(each, share) for name, each in value.items()}
    return [expanded(each, share) for each in value] if isinstance(value, list) else value


def load_requests(path: Path, share: float = 1.0) -> list[dict[str, Any]]:
    """Recorded requests, each with `program`, `method`, `path`, `headers` and the expanded `body`."""
    value = expanded(json.loads(path.read_text()), share)
    return value if isinstance(value, list) else [value]


class Rewriter:
    """Rewrites the requests of one program, one after the other. workplace: the folder that it worked in."""

    def __init__(self, program: str, workplace: str) -> None:
        self.program = program
        self._folder = workplace
        self._numbers: dict[str, int] = {}

    def request(self, raw: dict[str, Any]) -> dict[str, Any]:
        """The request as it may be published."""
        headers = {name: text for name, text in raw["headers"].items() if name in HEADERS}
        if "user-agent" in headers:
            headers["user-agent"] = headers["user-agent"].split(" ")[0]
        path = self._plain(raw["path"])
        return {
            "program": self.program,
            "method": raw["method"],
            "path": path,
            "headers": headers,
            "body": self._value("", raw["body"]),
        }

    def _value(self, field: str, value: Any) -> Any:
        if isinstance(value, dict):
            # Codex's metadata come in another order each time.
            names = sorted(value) if field == "client_metadata" else value
            return {name: self._value(name, value[name]) for name in names if name != "workspaces"}
        if isinstance(value, list):
            return [self._value(field, each) for each in value]
        return self._text(field, value) if isinstance(value, str) else value

    def _text(self, field: str, text: str) -> Any:
        if text.strip(' "\n') in {own.strip() for own in OUR_OWN}:
            return text
        if text.startswith(HEAD):
            return re.sub(r"(cc_version=[\d.]*\.)\w+;", r"\g<1>000;", text)
        if text.startswith("{") and field not in PROSE:
            try:
                inner = json.loads(text)
            except ValueError:
                pass
            else:
                return json.dumps(expanded(_without_times(self._value("", inner))))
        text = self._plain(text)
        short = len(text) <= LONGEST_NAME or not text.strip("0")
        if field in STRUCTURAL or (field not in PROSE and short and " " not in text) or not text.strip():
            return text
        return {FILLER: [self._numbers.setdefault(text, len(self._numbers)), len(text)]}

    def _plain(self, text: str) -> str:
        text = text.replace(self._folder, PLAIN_PATH)
        return _HEX.sub(
            lambda found: "0" * len(found[0]), _UUID.sub("00000000-0000-4000-8000-000000000000", text)
        )


def _without_times(value: Any) -> Any:
    """An object with 0 for each number that a clock gave."""
    return {name: 0 if name.endswith("_ms") else each for name, each in value.items()}


def written(value: Any, depth: int = 0) -> str:
    """JSON with one line for each field, message and tool, and no more."""
    nested = isinstance(value, dict | list) and bool(value) and depth < 3
    if not nested or set(value) == {FILLER} if isinstance(value, dict) else not nested:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    pad = "\n" + " " * (depth + 1)
    if isinstance(value, dict):
        parts = [f"{json.dumps(name)}: {written(each, depth + 1)}" for name, each in value.items()]
        return "{" + pad + ("," + pad).join(parts) + pad[:-1] + "}"
    return "[" + pad + ("," + pad).join(written(each, depth + 1) for each in value) + pad[:-1] + "]"


if __name__ == "__main__":
    print(json.dumps(load_requests(Path(sys.argv[1]))[int(*sys.argv[2:3])]))
