"""`--json-schema` and `--grammar` in `generate` and `chat`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.command_line import Run

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {"warm": {"type": "boolean"}},
    "required": ["warm"],
    "additionalProperties": False,
}


@pytest.fixture
def schema(tmp_path: Path) -> Path:
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(SCHEMA))
    return path


def test_generate_obeys_a_schema_and_a_grammar(
    ondevice: Run, chat_bundle: Path, schema: Path, tmp_path: Path
) -> None:
    answer = ondevice("generate", chat_bundle, "-p", "Warm?", "--json-schema", schema, "--json")
    assert set(json.loads(answer.json["text"])) == {"warm"}
    grammar = tmp_path / "grammar.lark"
    grammar.write_text('start: " " ("yes" | "no")')
    answer = ondevice("generate", chat_bundle, "-p", "Warm?", "--grammar", grammar)
    assert answer.out.strip() in ("yes", "no")


def test_a_chat_s_replies_obey(ondevice: Run, chat_bundle: Path, schema: Path) -> None:
    options = ("--json-schema", schema, "--seed", 1)
    answer = ondevice("chat", chat_bundle, *options, stdin="Warm?\nReally?\n")
    assert [set(json.loads(line)) for line in answer.out.splitlines() if line] == [{"warm"}, {"warm"}]


def test_what_is_wrong_is_said(ondevice: Run, chat_bundle: Path, schema: Path, tmp_path: Path) -> None:
    both = ondevice("generate", chat_bundle, "-p", "a", "--json-schema", schema, "--grammar", schema)
    assert (both.code, "--json-schema and --grammar are both given" in both.err) == (2, True)
    absent = ondevice("generate", chat_bundle, "-p", "a", "--grammar", tmp_path / "absent")
    assert (absent.code, "there is no file" in absent.err) == (2, True)
    schema.write_text("{")
    wrong = ondevice("generate", chat_bundle, "-p", "a", "--json-schema", schema)
    assert (wrong.code, "the schema isn't JSON" in wrong.err) == (2, True)
    schema.write_text('{"not": {}}')
    unsupported = ondevice("generate", chat_bundle, "-p", "a", "--json-schema", schema)
    assert (unsupported.code, "for its keyword not" in unsupported.err) == (2, True)
