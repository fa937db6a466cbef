"""The tables of programs: what results come to, and that docs/serve.md has every program at its version."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.agents import AGENTS
from tests.clients.chats import CHATS, Client
from tests.clients.programs import PROGRAMS
from tests.clients.results import HEADINGS, agent_table, cell, client_table, is_right, packages
from tests.support.paths import ROOT


class Tried(Client):
    dialects = ("chat", "ollama")
    features = ("answer", "tools", "cached", "overflow")
    lacks = (("cached", "ollama"),)
    offers = ("ollama",)


CALL = ["weather", {"city": "Oslo"}]
RIGHT = {
    "answer": "It is Paris.",
    "tools": [CALL],
    "cached": 3,
    "structured": {"capital": "Rome"},
    "overflow": ["BadRequestError", "prompt is too long: 9 tokens > 8 maximum"],
}
WRONG: dict[str, Any] = {
    "answer": "It is Lyon.",
    "tools": [["other", {"city": "Oslo"}]],
    "cached": 0,
    "structured": {"capital": "Lyon"},
    "overflow": ["BadRequestError", "no"],
}


@pytest.mark.parametrize("feature", RIGHT)
def test_an_outcome_is_right_or_not(feature: str) -> None:
    assert is_right(Tried, feature, "chat", RIGHT[feature])
    assert not is_right(Tried, feature, "chat", WRONG[feature])
    assert [is_right(Tried, "tools", dialect, []) for dialect in Tried.dialects] == [False, True]


def test_a_cell_says_what_came_of_a_feature() -> None:
    def line(outcomes: dict[str, Any], passed: bool = True) -> dict[str, Any]:
        return {"passed": passed, "outcomes": outcomes}

    assert cell(Tried, "streamed", None) == "-"
    assert cell(Tried, "answer", None) == "not tried"
    assert cell(Tried, "answer", line({}, passed=False)) == "no"
    assert cell(Tried, "answer", line({"chat": "Paris"})) == "yes"
    assert cell(Tried, "tools", line({"chat": [CALL], "ollama": []})) == "yes, offered in Ollama's"
    assert cell(Tried, "tools", line({"chat": [], "ollama": []})) == "offered"
    assert cell(Tried, "cached", line({"chat": 3})) == "yes, not in Ollama's"
    two = {"chat": ["AError", "x"], "ollama": ["BError", "y"]}
    assert cell(Tried, "overflow", line(two)) == "`AError`, `BError`"


def test_the_newest_result_counts() -> None:
    old, new = (
        {"client": "anthropic", "feature": "answer", "passed": passed, "outcomes": {"messages": "Paris"}}
        for passed in (False, True)
    )
    head, _, *lines = client_table([old, new]).splitlines()
    assert head.split(" | ")[2:] == [*list(HEADINGS.values())[:-1], f"{HEADINGS['overflow']} |"]
    assert len(lines) == len(CHATS)
    assert f"| {packages('anthropic')} | Anthropic's | yes | not tried" in lines[1]


def test_an_agent_s_row_leaves_short_prompts_out() -> None:
    turns = [
        {"prompt": 548, "new": 548, "calls": []},
        {"prompt": 7000, "new": 7000, "calls": [["read", {}]]},
        {"prompt": 7200, "new": 90, "calls": []},
    ]
    line = {"client": "opencode", "version": "1.0", "model": "m", "exit": 0, "done": True}
    made = agent_table([line | {"turns": turns, "seconds": 12.6}]).splitlines()[2]
    assert made == "| opencode 1.0, m | 7,000 | 1 | 90 | done | 13 |"
    killed = line | {"exit": -1, "done": False, "turns": [], "seconds": 9}
    assert agent_table([killed]).splitlines()[2] == "| opencode 1.0, m | - | 0 | - | not ended | 9 |"


def test_the_document_has_every_program_at_its_version() -> None:
    text = (ROOT / "docs" / "serve.md").read_text()
    for name in CHATS:
        assert f"| {packages(name)} |" in text
    for name in AGENTS:
        assert f" {PROGRAMS[name].version} |" in text
