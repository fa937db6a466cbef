"""The long proof of speculation, on the model that ships: drafting changes no token of any text.

Prompts of five kinds that others wrote, every drafter, greedy and with three seeds, dense, exact and
predicted, everything resident, with half of the neurons and at the smallest budget: each cell of that table
continues all prompts and is compared with plain decoding. A text doesn't depend on the budget, so plain
decoding runs once per kind of sparsity. On MLX everything is resident, and a row of cells stands for all.

The larger a tree the more can go wrong, and what drafts are worth depends on the machine: so drafts are as
large as a fixed cycle says, whatever they are worth. `auto` alone decides for itself.
"""

from __future__ import annotations

import bz2
import csv
import json
import lzma
import re
import tarfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import ondevice.runtime.engine
from ondevice.api import Model, load
from ondevice.config import SamplingConfig
from ondevice.response import gather
from ondevice.runtime.models import shipped_folder
from ondevice.speculation.policy import TreePolicy
from ondevice.speculation.registry import DRAFTERS
from ondevice.speculation.tree import DRAFT_NODES
from ondevice.training import train_ngrams
from tests.support.chat import squeeze
from tests.support.eagle_heads import add_mtp_layer
from tests.support.engines import always_draft
from tests.support.mlx_models import ON_GPU

pytestmark = pytest.mark.slow

SHIPPED = shipped_folder() / "small-relu"
KINDS = {"spec_bench": 65, "dialogues": 40, "sql": 40, "meanings": 30, "stories": 30}
"""Prompts of each kind."""
LEAST_PROMPTS = 200
MOST_CHARS = 500
"""Of a prompt: some of Spec-Bench are longer than the model's context."""
DATASTORE_CHARS = 400_000
NEW_TOKENS = {"cpu": 40, "mlx": 16}
"""Tokens of a text. One takes some ten times as long on MLX's CPU device as with our own kernels."""
SAMPLINGS = {
    backend: (
        SamplingConfig(max_tokens=tokens),
        *(
            SamplingConfig(max_tokens=tokens, temperature=0.8, top_p=top_p, seed=seed)
            for seed, top_p in enumerate((1.0, 0.95, 0.9))
        ),
    )
    for backend, tokens in NEW_TOKENS.items()
}
SPARSITIES = ("dense", "exact", "predicted")
PLACES = {"resident": None, "half": 0.5, "smallest": 0.0}
"""The share of the neurons that memory holds beyond the fewest; None: all, as the plan has it."""
SIZES = (DRAFT_NODES, 3, 8, 2, 5, 12)
"""Nodes of one draft after the other, at most."""
PROGRESS_SECONDS = 60.0

Written = tuple[tuple[int, ...], str, str]
"""Tokens, text, and how it ended."""


@dataclass
class Passes:
    """What drafting came to while it was counted."""

    passes: int = 0
    nodes: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class Cell:
    """What one cell of the table came to.

    wrong: the texts that aren't those of plain decoding. doubts: why the cell proves nothing, if it doesn't.
    """

    wrong: tuple[str, ...]
    doubts: tuple[str, ...]


class Report:
    """Progress and figures, past pytest's capture."""

    def __init__(self, config: pytest.Config) -> None:
        self._capture: Any = config.pluginmanager.getplugin("capturemanager")
        self.cells: list[dict[str, Any]] = []
        self.kinds: Counter[str] = Counter()

    def say(self, text: str) -> None:
        with self._capture.global_and_fixture_disabled():
            print(text, flush=True)


@pytest.fixture(scope="module")
def report(request: pytest.FixtureRequest) -> Iterator[Report]:
    """Ends with one line of JSON."""
    found, began = Report(request.config), time.monotonic()
    yield found
    total = {name: sum(cell[name] for cell in found.cells) for name in ("texts", "tokens", "differing")}
    figures = {"proof": "speculation_long", "prompts": sum(found.kinds.values()), "kinds": found.kinds}
    seconds = round(time.monotonic() - began)
    found.say("\n" + json.dumps(figures | total | {"seconds": seconds, "cells": found.cells}))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory, shared_data: Path) -> Path:
    """A copy of the model that ships, with what some drafters need and it lacks: a datastore of dialogues,
    and a draft layer of random weights, whose drafts are seldom right.
    """
    folder = tmp_path_factory.mktemp("drafters") / "small-relu"
    train_ngrams(SHIPPED, dialogue_text(shared_data)[:DATASTORE_CHARS], output=folder)
    add_mtp_layer(folder, neurons=256)
    return folder


def dialogue_text(data: Path) -> str:
    with lzma.open(data / "corpus/sgd_dialogues/dev.txt.xz", "rt", encoding="utf-8") as file:
        return file.read()


def spec_bench(data: Path) -> Iterator[list[dict[str, str]]]:
    """As many questions of every category."""
    with open(data / "prompts/spec_bench/question.jsonl", encoding="utf-8") as file:
        questions = [json.loads(line) for line in file]
    by_category: dict[str, list[str]] = {}
    for question in questions:
        by_category.setdefault(question["category"], []).append(question["turns"][0])
    for group in zip(*by_category.values(), strict=False):
        for words in group:
            yield [{"role": "user", "content": words[:MOST_CHARS]}]


def dialogues(data: Path) -> Iterator[list[dict[str, str]]]:
    """Openings of dialogues: one turn, or three, and so on."""
    blocks = dialogue_text(data).strip().split("\n\n")
    for number, block in enumerate(blocks[::7]):
        turns = [line.partition(": ") for line in block.split("\n")][: 1 + 2 * (number % 3)]
        if [speaker for speaker, _, _ in turns] == (["User", "Assistant"] * len(turns))[: len(turns)]:
            yield [{"role": speaker.lower(), "content": said} for speaker, _, said in turns]


def sql(data: Path) -> Iterator[list[dict[str, str]]]:
    """Questions about a table, with the columns that their query names; every fourth without."""
    with bz2.open(data / "prompts/wikisql/wikisql.json.bz2", "rt", encoding="utf-8") as file:
        groups = json.load(file)
    for number, group in enumerate(groups[::997]):
        columns = sorted({name.lower() for name in re.findall(r"(\w+)_FIELD", group["sql"][0])})
        named = f" [{', '.join(columns)}]" if number % 4 else ""
        yield [{"role": "user", "content": group["sentences"][0]["original"].strip() + named}]


def meanings(data: Path) -> Iterator[list[dict[str, str]]]:
    """Meaning representations of restaurants, each once."""
    with open(data / "prompts/e2e_nlg/devset.csv", encoding="utf-8", newline="") as file:
        distinct = list(dict.fromkeys(row["mr"] for row in csv.DictReader(file)))
    for meaning in distinct[::9]:
        yield [{"role": "user", "content": meaning}]


def stories(data: Path) -> Iterator[str]:
    """A few hundred characters from inside novels, to be continued as they stand."""
    with tarfile.open(data / "corpus/english_novels/english_novels.tar.xz") as archive:
        for member in islice((member for member in archive if member.name.endswith(".txt")), 10):
            file = archive.extractfile(member)
            assert file is not None
            words = file.read().decode("utf-8", "replace").split()
            for third in range(1, 4):
                start = len(words) * third // 4
                yield " ".join(words[start : start + 20 * third])


READERS: dict[str, Callable[[Path], Iterator[Any]]] = {
    "spec_bench": spec_bench,
    "dialogues": dialogues,
    "sql": sql,
    "meanings": meanings,
    "stories": stories,
}


@pytest.fixture(scope="module")
def prompts(shared_data: Path, report: Report) -> list[list[int]]:
    """Token ids of all prompts."""
    found = []
    with load(SHIPPED, speculation="off", threads=1) as model:
        for kind, count in KINDS.items():
            for words in islice(READERS[kind](shared_data), count):
                found.append(
                    model.tokenizer.encode(words) if isinstance(words, str) else model.chat_ids(words)
                )
                report.kinds[kind] += 1
        assert max(map(len, found)) + max(NEW_TOKENS.values()) < model.plan.max_context
    assert report.kinds == KINDS
    assert len({tuple(prompt) for prompt in found}) == len(found) >= LEAST_PROMPTS
    return found


@pytest.fixture(scope="module")
def plain_texts(prompts: list[list[int]], report: Report) -> Callable[[str, str], list[Written]]:
    """What plain decoding makes of every prompt and sampling, by backend and kind of sparsity."""
    known: dict[tuple[str, str], list[Written]] = {}

    def of(backend: str, sparsity: str) -> list[Written]:
        if (backend, sparsity) not in known:
            options: dict[str, Any] = {"backend": backend, "sparsity": sparsity, "speculation": "off"}
            with load(SHIPPED, threads=1, **options) as model:
                found = list(texts(model, backend, prompts, report, f"off {backend} {sparsity}"))
            assert len(set(found)) > 0.7 * len(found)
            known[backend, sparsity] = found
        return known[backend, sparsity]

    return of


def texts(
    model: Model, backend: str, prompts: list[list[int]], report: Report, name: str
) -> Iterator[Written]:
    """Every prompt under every sampling; a prompt's keys and values are kept from one to the next."""
    said = time.monotonic()
    for number, prompt in enumerate(prompts):
        key = model._host.new_key()
        for sampling in SAMPLINGS[backend]:
            answer = gather(model._host.stream_ids(key, prompt, sampling))
            yield answer.tokens, answer.text, answer.finish_reason
        model._host.retire(key)
        if time.monotonic() - said > PROGRESS_SECONDS:
            said = time.monotonic()
            report.say(f"\n{name}: {number + 1} of {len(prompts)} prompts")


def count_passes(monkeypatch: pytest.MonkeyPatch) -> Passes:
    """Count what passes bring from here on."""
    found, record = Passes(), TreePolicy.record

    def counting(policy: TreePolicy, nodes: int, tokens: int, *seconds: float) -> None:
        found.passes += 1
        found.nodes += nodes
        found.tokens += tokens
        record(policy, nodes, tokens, *seconds)

    monkeypatch.setattr(TreePolicy, "record", counting)
    return found


def drafter_options(drafter: str, sparsity: str, place: str, stories: Path) -> dict[str, Any]:
    """A second model is the one that ships itself, or one of another vocabulary: each of them in all places.

    By sparsity they change places, so that this takes no cell more.
    """
    itself = (place == "resident") == (sparsity != "exact")
    second = {"draft_model": str(SHIPPED if itself else stories)} if drafter == "model" else {}
    return {"speculation": drafter} | second


@pytest.fixture
def continued(
    bundle: Path,
    stories_bundle: Path,
    prompts: list[list[int]],
    plain_texts: Callable[[str, str], list[Written]],
    report: Report,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., Cell]:
    """Continues all prompts in one cell of the table, and compares the texts with plain decoding's."""

    def run(backend: str, sparsity: str, drafter: str, place: str) -> Cell:
        expected = plain_texts(backend, sparsity)
        if drafter == "auto":
            monkeypatch.setattr(ondevice.runtime.engine, "MIN_PASS_SECONDS", 0.0)
        else:
            always_draft(monkeypatch, SIZES)
        counted, began = count_passes(monkeypatch), time.monotonic()
        name = f"{drafter} {backend} {sparsity} {place}"
        options = drafter_options(drafter, sparsity, place, stories_bundle)
        options |= {"backend": backend, "sparsity": sparsity}
        with load(bundle, threads=1, **options) as model:
            share = PLACES[place]
            if share is not None:
                segment = model.plan.segment
                squeeze(model, int((segment.total - segment.least) * share))
            found = list(texts(model, backend, prompts, report, name))
            done_by = model.stats.speculation
        samplings = SAMPLINGS[backend]
        wrong = tuple(
            f"prompt {at // len(samplings)}, {samplings[at % len(samplings)]}: {mine[0]} for {plain[0]}"
            for at, (mine, plain) in enumerate(zip(found, expected, strict=True))
            if mine != plain
        )
        cell = {"cell": name, "texts": len(found), "tokens": sum(len(tokens) for tokens, _, _ in found)}
        cell |= {"differing": len(wrong), "passes": counted.passes, "nodes": counted.nodes}
        cell |= {"tokens_in_passes": counted.tokens, "seconds": round(time.monotonic() - began, 1)}
        report.cells.append(cell)
        report.say(f"\n{json.dumps(cell)}")
        hopeless = drafter == "mtp" or options.get("draft_model") == str(stories_bundle)
        return Cell(wrong, tuple(doubts(drafter, done_by, counted, place, hopeless)))

    return run


def doubts(drafter: str, done_by: str, counted: Passes, place: str, hopeless: bool) -> Iterator[str]:
    """Why nothing is proven: no drafts were verified, or none was right.

    hopeless: drafts are seldom right of a layer that nobody trained, and of a model that learned other words.
    """
    if drafter == "auto" and done_by == "off":
        # By its plan: what drafting holds was what was missing.
        if counted.passes:
            yield f"{counted.passes} passes were counted without a drafter"
    elif drafter == "auto":
        # Where passes wait for flash it drafts; how often depends on what they take.
        if place != "resident" and counted.nodes <= counted.passes:
            yield "auto drafted nothing"
    else:
        if done_by != drafter:
            yield f"drafts were {done_by}'s"
        if counted.nodes <= 1.5 * counted.passes:
            yield f"{counted.nodes} nodes in {counted.passes} passes"
        if not hopeless and counted.tokens <= 1.05 * counted.passes:
            yield f"{counted.tokens} tokens from {counted.passes} passes"


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("sparsity", SPARSITIES)
def test_every_text_is_that_of_plain_decoding(
    sparsity: str, drafter: str, place: str, continued: Callable[..., Cell]
) -> None:
    """On our own kernels. Some two minutes of one core's time each."""
    cell = continued("cpu", sparsity, drafter, place)
    assert cell.wrong == ()
    assert cell.doubts == ()


@pytest.mark.skipif(ON_GPU, reason="a proof of MLX's CPU device")
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.usefixtures("mlx_device")
def test_every_text_on_mlx_is_that_of_plain_decoding(drafter: str, continued: Callable[..., Cell]) -> None:
    """Ten to forty minutes of one core's time each."""
    cell = continued("mlx", "exact", drafter, "resident")
    assert cell.wrong == ()
    assert cell.doubts == ()
