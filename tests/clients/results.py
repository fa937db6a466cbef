"""What the programs of the table did, a JSON line each time, and the tables of docs/serve.md made of it.

    python -m tests.clients.results

prints both tables, of the newest line of each program and feature.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from datetime import date
from typing import Any

from tests.clients.chats import CHATS, CITIES, Client
from tests.clients.programs import FOLDER, PROGRAMS

RESULTS = FOLDER / "results.jsonl"
HEADINGS = {
    "answer": "whole",
    "streamed": "streamed",
    "tools": "tools",
    "cached": "cached prompts",
    "pings": "pings",
    "structured": "JSON by a schema",
    "overflow": "a full context is",
}
DIALECTS = {"chat": "chats", "responses": "Responses", "messages": "Anthropic's", "ollama": "Ollama's"}
OVERFLOW = re.compile(r"context|too long", re.IGNORECASE)
"""Words by which a program knows that a prompt is too long."""
AGENT_HEADINGS = ("agent and model", "first prompt", "calls", "new of later prompts", "the task", "seconds")
Line = dict[str, Any]


def tell(**facts: Any) -> None:
    """Add a line to the results, with today's date."""
    with RESULTS.open("a") as file:
        file.write(json.dumps({"date": date.today().isoformat()} | facts) + "\n")


def read_results() -> list[Line]:
    """The lines of all runs, the oldest first."""
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.is_file() else []


def packages(name: str) -> str:
    """A program's packages and their versions, as the tables have them."""
    return ", ".join(re.sub(r"\[\w[\w,]*\]", "", it).replace("==", " ") for it in PROGRAMS[name].packages)


def is_right(client: type[Client], feature: str, dialect: str, outcome: Any) -> bool:
    """Whether what came of a feature in a dialect is right. A model needn't call a tool that is offered."""
    if feature == "tools":
        calls = [(name, arguments["city"]) for name, arguments in outcome]
        return all(name == "weather" and city in CITIES for name, city in calls) and (
            bool(calls) or dialect in client.offers
        )
    if feature == "cached":
        return bool(outcome > 0)
    if feature == "structured":
        return bool(outcome["capital"] in CITIES)
    if feature == "overflow":
        return OVERFLOW.search(outcome[1]) is not None
    return "Paris" in outcome


def cell(client: type[Client], feature: str, line: Line | None) -> str:
    """What the table says of a feature. line: the newest result; None: it wasn't tried.

    Tools are `offered` where the model called none, and the client can't ask for a call.
    """
    if feature not in client.features:
        return "-"
    if line is None:
        return "not tried"
    if not line["passed"]:
        return "no"
    if feature == "overflow":
        return ", ".join(f"`{kind}`" for kind in dict.fromkeys(kind for kind, _ in line["outcomes"].values()))
    offered = [dialect for dialect, outcome in line["outcomes"].items() if outcome == []]
    notes = ["offered" if len(offered) == len(line["outcomes"]) else "yes"]
    notes += [f"offered in {DIALECTS[dialect]}" for dialect in offered if notes == ["yes"]]
    notes += [f"not in {DIALECTS[dialect]}" for name, dialect in client.lacks if name == feature]
    return ", ".join(notes)


def rows(headings: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    """A table in Markdown."""
    head = list(headings)
    ruled = "|---" * len(head) + "|"
    return "\n".join([f"| {' | '.join(head)} |", ruled, *(f"| {' | '.join(line)} |" for line in lines)])


def client_table(lines: Iterable[Line]) -> str:
    """The table of clients and what they can do, in Markdown."""
    newest = {(line["client"], line["feature"]): line for line in lines if "feature" in line}
    made = []
    for name, client in CHATS.items():
        dialects = ", ".join(DIALECTS[dialect] for dialect in client.dialects)
        cells = [cell(client, feature, newest.get((name, feature))) for feature in HEADINGS]
        made.append([packages(name), dialects, *cells])
    return rows(("client", "dialects", *HEADINGS.values()), made)


def agent_table(lines: Iterable[Line]) -> str:
    """The table of agents' runs, in Markdown: the newest of each program and model."""
    newest = {(line["client"], line["model"]): line for line in lines if "done" in line}
    return rows(AGENT_HEADINGS, [_agent_row(line) for line in newest.values()])


def _agent_row(line: Line) -> list[str]:
    """How an agent fared. Short prompts, such as those for a title, aren't the task's."""
    most = max((it["prompt"] for it in line["turns"]), default=0)
    prompts = [it for it in line["turns"] if it["prompt"] > most / 2]
    calls = sum(len(it["calls"]) for it in line["turns"])
    later = ", ".join(str(it["new"]) for it in prompts[1:]) or "-"
    task = "done" if line["done"] else "not done" if line["exit"] != -1 else "not ended"
    first = f"{prompts[0]['prompt']:,}" if prompts else "-"
    name = f"{line['client']} {line['version']}, {line['model']}"
    return [name, first, str(calls), later, task, f"{line['seconds']:.0f}"]


if __name__ == "__main__":
    print(client_table(read_results()), agent_table(read_results()), sep="\n\n")
