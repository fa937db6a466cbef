"""Other names of models: what they match, where they are listed, and what is wrong with one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")

from ondevice.api import load
from ondevice.errors import UsageError
from ondevice.serve.config import ServeConfig
from tests.support.command_line import Run
from tests.support.serving import Serving, serving

HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def aliased(chat_bundle: Path) -> Iterator[Serving]:
    model = load(chat_bundle, threads=1, speculation="off", dram_budget="2GB")
    pairs = ("gpt-5=second", f"claude-*={model.name}", "*-[0-9]=second", f"second={model.name}")

    def again(budget: int) -> Any:
        return load(chat_bundle, threads=1, speculation="off", dram_budget=budget)

    with serving(model, ServeConfig(port=0, alias=pairs), {"second": again}) as running:
        yield running


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("claude-sonnet-4-5", None),
        ("claude-9", None),
        ("gpt-5", "second"),
        ("gpt-9", "second"),
        ("gpt-5:latest", "second"),
        # A model's name goes before every alias.
        ("second", "second"),
        ("second:latest", "second"),
    ],
)
def test_an_alias_reaches_its_model_in_every_dialect(aliased: Serving, alias: str, name: str | None) -> None:
    name = name or aliased.model.name
    for path in ("/v1/chat/completions", "/v1/messages"):
        assert aliased.post(path, HELLO | {"model": alias}).json["model"] == name
    answer = aliased.post("/api/chat", {"model": alias, "messages": []})
    assert (answer.status, answer.json["model"]) == (200, name)


def test_what_matches_nothing_is_not_found(aliased: Serving) -> None:
    for name in ("gpt-5x", "Claude-x", "xclaude-", "gpt-5:new"):
        assert aliased.post("/v1/chat/completions", HELLO | {"model": name}).status == 404


def test_plain_aliases_are_listed_and_patterns_are_not(aliased: Serving) -> None:
    names = [aliased.model.name, "second"]
    listed = aliased.request("GET", "/v1/models").json["data"]
    assert [it["id"] for it in listed] == [*names, "gpt-5"]
    shown = aliased.request("GET", "/v1/models", anthropic_version="2023-06-01").json
    assert ([it["id"] for it in shown["data"]], shown["last_id"]) == ([*names, "gpt-5"], "gpt-5")
    tags = aliased.request("GET", "/api/tags").json["models"]
    assert [it["name"] for it in tags] == [*names, "gpt-5"]
    assert aliased.request("GET", "/v1/models/claude-x").json["id"] == "claude-x"
    assert aliased.request("GET", "/v1/models/other").status == 404


@pytest.mark.parametrize("alias", ["a", "=x", "a=", "a=y"])
def test_an_alias_of_no_model_is_refused(ondevice: Run, chat_bundle: Path, alias: str) -> None:
    with pytest.raises(UsageError, match="alias"):
        ServeConfig(alias=(alias,)).aliases(["x"])
    result = ondevice("serve", chat_bundle, "--alias", alias)
    assert (result.code, "--alias" in result.err) == (2, True)


def test_aliases_come_from_the_settings_file_too(ondevice: Run, chat_bundle: Path, tmp_path: Path) -> None:
    for text, words in (
        ('alias = ["a=other", "b=other"]', "--alias a=other names no model that is served"),
        ('alias = "a=other"', "--alias a=other names no model that is served"),
        ("alias = [5]", "it must be a string or a list of strings"),
        ("strict = 1", "it must be true or false"),
    ):
        (tmp_path / "config.toml").write_text(text)
        result = ondevice("serve", chat_bundle)
        assert (result.code, words in result.err) == (2, True), result.err
