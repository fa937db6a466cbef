"""The use of a mixture's experts: what is counted, and that hits come as `inspect` lets expect."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ondevice.api import Model, load
from ondevice.backends.base import Float32
from ondevice.bundle.expert_use import ExpertUse
from ondevice.bundle.reader import Bundle
from ondevice.commands.inspection import inspection, inspection_text
from ondevice.config import RuntimeConfig
from ondevice.converters.convert import convert
from ondevice.converters.training.expert_use import cache_sizes
from ondevice.errors import UnsupportedModelError, UsageError
from ondevice.generate import watched
from ondevice.meter import Counters
from ondevice.runtime.resolving import resolve
from ondevice.sparsity.expert_reuse import ExpertReuse
from ondevice.sparsity.replay import expert_hit_rate
from ondevice.training import train_expert_use, train_predictors
from tests.benchmarks.compare.expert_replay import rate
from tests.benchmarks.lib.expert_trace import RoutingTrace
from tests.sparsity.conftest import PIECE, PIECES
from tests.support.bundles import (
    VOCAB_SIZE,
    convert_bundle,
    copy_files,
    made_up_pieces,
    write_chat_checkpoint,
)
from tests.support.chat import fetch_with, squeeze
from tests.support.command_line import Run
from tests.support.families import CASES, write_model
from tests.support.trained_models import MIXTURE, own_text

LAYERS, EXPERTS, CHOSEN = 6, 32, 4
CONTEXT, PROMPT, DECODED = 512, 448, 64
SEGMENTS = (1, 3, 6)
WITHIN = 0.05
"""Runs of 64 tokens hit some points more or less than their mean, and texts differ by more."""


@pytest.fixture(scope="module")
def text() -> list[int]:
    """What the trained mixture makes up: it begins with the pieces, the rest is run."""
    return own_text(MIXTURE, PIECES * (PIECE + PROMPT))


def use_of(folder: Path) -> ExpertUse:
    use = Bundle.open(folder).expert_use
    assert use is not None
    return use


def test_every_choice_is_counted(
    calibrated: Path, pieces: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted again by what the cache's policy is told while the public API scores the same pieces."""
    counts = np.zeros((LAYERS, EXPERTS), dtype=np.int64)

    def observe(_: ExpertReuse, turn: int, gates: Float32) -> None:
        counts[turn] += (gates > 0).sum(axis=0)

    monkeypatch.setattr(ExpertReuse, "observe", observe)
    with load(MIXTURE, backend="cpu", speculation="off") as model:
        squeeze(model, 2)
        for piece in pieces:
            model.logits(piece)
    np.testing.assert_array_equal(Bundle.open(calibrated).expert_counts(), counts)
    assert counts.sum() == PIECES * PIECE * LAYERS * CHOSEN
    use = use_of(calibrated)
    assert (use.tokens, use.replayed_tokens) == (PIECES * PIECE, PIECES * PIECE * 3 // 4)


def test_hits_rise_with_memory_from_below_a_cycle_on(calibrated: Path) -> None:
    points = use_of(calibrated).points
    assert [point.experts for point in points] == [12, 24, 32, 43, 59, 79, 106, 143]
    hits = [point.hits for point in points]
    assert hits == sorted(hits)
    # Below one token's cycle the policy still hits, and hardly anything is missed near the whole.
    assert hits[0] > 0.15
    assert hits[-1] > 0.85


def test_caches_are_those_of_the_benchmark() -> None:
    random = np.random.default_rng(3)
    chosen = np.argsort(random.random((60, 3, 10)) + np.linspace(0, 1, 10), axis=2)[:, :, :2]
    trace = RoutingTrace(chosen.astype(np.int32), 20, 10, np.full(3, 2**20))
    for size in (3, 6, 15, 30):
        expected = rate(trace, size, partial(ExpertReuse, 3, 10, 2)) / 100
        assert expert_hit_rate(chosen, 10, size, 20) == pytest.approx(expected, rel=1e-12)


def test_sizes_are_never_none_or_all() -> None:
    experts = Bundle.open(MIXTURE).config.experts
    assert experts is not None
    assert cache_sizes(1, replace(experts, count=2, chosen=1)) == [1]
    assert cache_sizes(1, replace(experts, count=4, chosen=4)) == [2]


@pytest.fixture(scope="module")
def model(calibrated: Path) -> Iterator[Model]:
    options: dict[str, Any] = {"kv_bits": 8, "max_context": CONTEXT, "memory_pressure": "off"}
    with pytest.MonkeyPatch.context() as patch:
        # What is read ahead takes slots, and whether that pays is measured: by up to 2 points fewer hits.
        fetch_with(patch, prefetch=False)
        with load(calibrated, backend="cpu", speculation="off", **options) as model:
            yield model


@pytest.mark.slow
@pytest.mark.parametrize("segments", SEGMENTS)
def test_a_run_hits_what_inspect_lets_expect(
    model: Model, text: list[int], segments: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The context is nearly full, as what is to be expected counts with: else there is room for more."""
    squeeze(model, segments)
    facts = inspection(replace(model._resolved, plan=model.plan))["experts"]
    assert 0 < facts["in_memory"] < LAYERS * EXPERTS
    ends = model.bundle.manifest.tokenizer.eos_ids
    hits = lookups = 0
    engine, steps, counted = model._engine, model._engine.steps, list[Counters]()
    # On the engine's own thread, as it is some tokens ahead of what is read of its events.
    see = partial(watched, see=lambda event: counted.append(engine.counters()))
    monkeypatch.setattr(engine, "steps", lambda *arguments: see(steps(*arguments)))
    for number in range(PIECES):
        first = PIECES * PIECE + number * PROMPT
        options = {"temperature": 1.0, "seed": number, "logit_bias": dict.fromkeys(ends, -math.inf)}
        counted.clear()
        model.generate(tokens=text[first : first + PROMPT], max_tokens=DECODED, **options)
        before, after = counted[0], counted[-1]
        hits += after.neuron_cache_hits - before.neuron_cache_hits
        lookups += after.neuron_cache_lookups - before.neuron_cache_lookups
    assert lookups == PIECES * (DECODED - 1) * LAYERS * CHOSEN
    assert hits / lookups == pytest.approx(facts["expected_hits"], abs=WITHIN)


@pytest.mark.usefixtures("steady_process")
def test_inspect_says_what_to_expect(calibrated: Path, ondevice: Run) -> None:
    least = Bundle.open(calibrated)
    budget = resolve(least, RuntimeConfig(backend="cpu")).smallest_plan.plan.minimum_budget_bytes + (1 << 20)
    arguments = ("--backend", "cpu", "--dram-budget", budget)
    found = ondevice("inspect", "-m", calibrated, *arguments, "--json").json["experts"]
    use = use_of(calibrated)
    assert found["expected_hits"] == use.expected_hits(found["in_memory"], LAYERS * EXPERTS)
    text = ondevice("inspect", "-m", calibrated, *arguments).out
    assert f"hits to expect with a full context: {100 * found['expected_hits']:.1f} % of lookups" in text
    # Fewer experts than the model's own are another routing, and without a calibration nothing is known.
    fewer = ondevice("inspect", "-m", calibrated, *arguments, "--experts", 2, "--json").json["experts"]
    plain = ondevice("inspect", "-m", MIXTURE, *arguments, "--json").json["experts"]
    assert fewer["expected_hits"] is plain["expected_hits"] is None
    assert fewer["hits_by_budget"] is plain["hits_by_budget"] is None
    assert "hits to expect" not in ondevice("inspect", "-m", MIXTURE, *arguments).out


@pytest.mark.usefixtures("steady_process")
def test_inspect_says_what_other_budgets_hit(calibrated: Path) -> None:
    runtime = RuntimeConfig(backend="cpu", speculation="off", max_context=CONTEXT, dram_budget="200MB")
    resolved = resolve(Bundle.open(calibrated), runtime)
    table = inspection(resolved)["experts"]["hits_by_budget"]
    assert table[0]["budget_bytes"] == resolved.plan.minimum_budget_bytes
    kept = [row["in_memory"] for row in table]
    assert kept == sorted(set(kept))
    assert kept[-1] == LAYERS * EXPERTS
    for row in table:
        there = replace(resolved, plan=resolved.plan.with_budget(row["budget_bytes"]))
        facts = inspection(there)["experts"]
        assert (facts["in_memory"], facts["expected_hits"]) == (row["in_memory"], row["expected_hits"])
        assert f"{100 * row['expected_hits']:.1f} % in " in inspection_text(resolved)


def test_all_in_memory_hits_always(calibrated: Path) -> None:
    resolved = resolve(Bundle.open(calibrated), RuntimeConfig(backend="cpu", dram_budget="8GB"))
    assert inspection(resolved)["experts"]["expected_hits"] == 1
    assert "hits to expect with a full context: 100.0 % of lookups" in inspection_text(resolved)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small mixture's checkpoint with a tokenizer, `source`, and its bundle of 4 bits, `bundle`."""
    folder = tmp_path_factory.mktemp("small")
    tokenizer = write_chat_checkpoint(folder / "plain")
    family, options = CASES["olmoe"]
    write_model(folder / "source", family, {**options, "vocab_size": VOCAB_SIZE})
    for file in tokenizer.glob("tokenizer*"):
        (folder / "source" / file.name).write_bytes(file.read_bytes())
    convert(folder / "source", folder / "bundle", "q4")
    return folder


def test_the_command_adds_to_the_model(small: Path, tmp_path: Path, ondevice: Run) -> None:
    folder = copy_files(small / "bundle", tmp_path / "model")
    (tmp_path / "text").write_text("user: where is the station? It is near the park, she said. " * 60)
    arguments = ("train", "expert-use", "-m", folder, "--text", tmp_path / "text", "--tokens", 600)
    found = ondevice(*arguments, "--json")
    assert found.code == 0, found.err
    use = use_of(folder)
    # Each piece begins with a token of its own.
    assert 600 <= use.tokens == found.json["tokens"] < 610
    assert len(found.json["points"]) == len(use.points) > 3
    shown = ondevice(*arguments[:-1], 700)
    use = use_of(folder)
    assert use.tokens >= 700
    assert f"counted on {use.tokens} tokens; hits of {use.replayed_tokens} by experts kept:" in shown.out
    assert ondevice("verify", "-m", folder).code == 0
    short = ondevice(*arguments[:-1], 300)
    assert short.code == 2
    assert "the text has 300 tokens; counting the use of experts takes 512" in short.err


def test_only_mixtures_have_it(tmp_path: Path, pieces: list[list[int]]) -> None:
    dense = convert_bundle(write_chat_checkpoint(tmp_path / "checkpoint"), tmp_path / "dense")
    with pytest.raises(UnsupportedModelError, match="has no experts"):
        train_expert_use(dense, pieces=made_up_pieces())
    folder = copy_files(MIXTURE, tmp_path / "model")
    with pytest.raises(UnsupportedModelError):
        train_predictors(folder, pieces=pieces)
    with pytest.raises(UsageError, match="exists"):
        train_expert_use(folder, pieces=pieces, output=dense)


def test_convert_with_a_text_counts(small: Path, tmp_path: Path, ondevice: Run) -> None:
    (tmp_path / "text").write_text("words of a text " * 60)
    arguments = ("convert", small / "source", "-o", tmp_path / "counted", "--text", tmp_path / "text")
    found = ondevice(*arguments)
    assert found.code == 0, found.err
    assert "--text has rounded and ordered nothing" in found.err
    assert "by experts kept" in found.err
    counted = Bundle.open(tmp_path / "counted")
    assert counted.expert_use is not None
    assert counted.manifest.files == Bundle.open(small / "bundle").manifest.files
    assert ondevice(*arguments, "--resume").code == 0
