"""The model that ships: whole, small, found without a name, and saying what its card says it says."""

from __future__ import annotations

import re
import shlex
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import ondevice
from ondevice.bundle.reader import Bundle
from ondevice.runtime.models import shipped_folder
from tests.support.chat import squeeze
from tests.support.command_line import command
from tests.support.paths import ROOT

NAME = "small-relu"
LIMIT_BYTES = 24 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ondevice.Model]:
    """Loaded without a name, in a home without models."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONDEVICE_HOME", str(tmp_path_factory.mktemp("home")))
        with ondevice.load(threads=1) as loaded:
            yield loaded


def recorded_conversation() -> tuple[str, list[str], str]:
    """The card's: what was typed, the arguments of `ondevice chat`, and what came out."""
    text = (ROOT / "weights/small-relu/README.md").read_text(encoding="utf-8")
    match = re.search(r"^    \$ (printf .* \| make chat .*)\n((?:    .*\n|\n)+?)(?=^\S)", text, re.MULTILINE)
    assert match is not None
    words = shlex.split(match[1])
    typed = words[1].replace("\\n", "\n")
    options = next(word for word in words if word.startswith("CHAT_ARGS=")).removeprefix("CHAT_ARGS=")
    return typed, shlex.split(options), re.sub(r"^    ", "", match[2], flags=re.MULTILINE).strip("\n") + "\n"


def test_it_is_small_enough_and_whole(model: ondevice.Model) -> None:
    assert model.name == NAME
    found = ondevice.verify()
    assert found.nbytes <= LIMIT_BYTES
    assert {name for name, _ in found.files} <= {path.name for path in (shipped_folder() / NAME).iterdir()}


def test_it_is_what_the_flash_engine_needs() -> None:
    bundle = Bundle.open(shipped_folder() / NAME)
    assert bundle.config.activation == "relu"
    assert bundle.config.tie_embeddings
    assert bundle.config.max_context >= 512
    assert 4096 <= bundle.config.vocab_size <= 8192
    assert bundle.manifest.tokenizer.kind == "sentencepiece"
    assert bundle.manifest.tokenizer.chat_template is not None


def test_the_conversation_on_its_card_is_what_comes_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONDEVICE_HOME", str(tmp_path))
    typed, options, expected = recorded_conversation()
    assert typed.count("\n") >= 3
    done = subprocess.run(command("chat", *options), input=typed, capture_output=True, text=True, check=True)
    assert done.stdout == expected


@pytest.mark.parametrize(
    ("question", "columns"),
    [
        ("Which player has more than 3 wins?", "country, player, wins"),
        ("What is the total attendance when the opponent was Chicago?", "attendance, date, opponent"),
        ("How many silver medals did Norway win?", "bronze, gold, nation, silver"),
    ],
)
def test_it_writes_sql(model: ondevice.Model, question: str, columns: str) -> None:
    answer = model.session().respond(f"{question} [{columns}]", max_tokens=80).text
    tables = sqlite3.connect(":memory:")
    tables.execute(f"CREATE TABLE records ({columns})")
    assert answer.startswith("SELECT ")
    assert len(tables.execute(answer).description) == 1


def test_its_text_does_not_depend_on_the_budget(model: ondevice.Model) -> None:
    prompt = "It was a cold morning, and the old man"
    expected = model.generate(prompt, max_tokens=60).text
    assert expected
    for segments in (0, 5, model.plan.segment.total):
        squeeze(model, segments)
        assert model.generate(prompt, max_tokens=60).text == expected


def test_predicted_text_does_not_depend_on_how_the_prompt_is_split() -> None:
    folder = shipped_folder() / NAME
    if Bundle.open(folder).predictors is None:
        pytest.skip("the model that ships has no predictors")
    prompt = "It was a cold morning, and the old man " * 8
    seen = set()
    for chunk in (256, 31):
        with ondevice.load(folder, sparsity="predicted", threads=1, prefill_chunk=chunk) as model:
            assert len(model.tokenizer.encode(prompt)) > 2 * 31
            tokens = model.generate(prompt, max_tokens=30).tokens
            seen.add((tokens, model.logits(tokens).tobytes()))
    assert len(seen) == 1
