"""Predicted sparsity: predictors say what is read and multiplied; what that costs is measured and told."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ondevice import training
from ondevice.api import Model, inspect, load, verify
from ondevice.bundle.layout import neuron_file_name
from ondevice.bundle.predictors import PREDICTORS, PREDICTORS_MANIFEST, Predictors
from ondevice.bundle.reader import Bundle
from ondevice.converters.training.predictors.train import PredictorOptions, rank_options, save_predictors
from ondevice.errors import (
    BackendUnavailableError,
    BudgetError,
    BundleError,
    FlashReadError,
    OndeviceError,
    UnsupportedModelError,
    UsageError,
)
from ondevice.sparsity.neuron_cache import NeuronCache
from ondevice.training import train_predictors
from tests.support.bundles import (
    EOS,
    convert_bundle,
    copy_files,
    made_up_pieces,
    open_sound,
    write_chat_checkpoint,
)
from tests.support.chat import PROMPT, squeeze
from tests.support.command_line import Run
from tests.support.flash_files import flip_byte

SHAPE = {"num_hidden_layers": 3, "intermediate_size": 500, "hidden_act": "relu"}
TOKENS = 40
RECALL = 0.9


@pytest.fixture(scope="module")
def plain_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("relu")
    return convert_bundle(write_chat_checkpoint(folder / "checkpoint", **SHAPE), folder / "plain")


@pytest.fixture(scope="module")
def bundle(plain_bundle: Path) -> Path:
    output = plain_bundle.with_name("predicted")
    train_predictors(plain_bundle, pieces=made_up_pieces(), output=output)
    return output


@pytest.fixture
def copied(bundle: Path, tmp_path: Path) -> Path:
    return copy_files(bundle, tmp_path / "copied")


def found_in(bundle: Path) -> Predictors:
    found = Bundle.open(bundle).predictors
    assert found is not None
    return found


def text(model: Model, **options: Any) -> tuple[int, ...]:
    return model.generate(PROMPT, max_tokens=TOKENS, logit_bias={EOS: -math.inf}, **options).tokens


def with_offsets(found: Predictors, offset: float) -> Predictors:
    """Every score moved by so much."""
    return replace(
        found,
        points=tuple(replace(p, offsets=tuple(o + offset for o in p.offsets)) for p in found.points),
    )


def test_training_reports_more_selected_neurons_for_more_recall(bundle: Path, plain_bundle: Path) -> None:
    found = found_in(bundle)
    assert Bundle.open(plain_bundle).predictors is None
    hotness = Bundle.open(bundle).hotness
    assert hotness is not None
    assert hotness.tokens == found.trained_tokens
    assert len(found.ranks) == SHAPE["num_hidden_layers"]
    assert found.trained_tokens + found.measured_tokens == 8 * 128
    recalls = [point.recall for point in found.points]
    assert len(recalls) >= 5
    assert recalls == sorted(recalls)
    for point in found.points:
        # Of one piece of 128 tokens that set nothing.
        assert 0 < mean(point.false_negatives) < 1.5 * (1 - point.recall)
        assert point.perplexity is not None
        assert point.agreement is not None
    selected = [mean(point.selected) for point in found.points]
    assert selected == sorted(selected)
    best, worst = found.points[-1], found.points[0]
    assert (best.agreement or 0) >= (worst.agreement or 0) - 0.02
    assert found.perplexity is not None
    assert best.perplexity == pytest.approx(found.perplexity, rel=0.2)


@pytest.fixture(scope="module")
def small_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A layer of 300 neurons, for which predictors are trained quickly."""
    folder = tmp_path_factory.mktemp("small")
    shape = {**SHAPE, "num_hidden_layers": 1, "intermediate_size": 300}
    return convert_bundle(write_chat_checkpoint(folder / "checkpoint", **shape), folder / "plain")


def test_the_text_that_measures_sets_no_threshold(small_bundle: Path, tmp_path: Path) -> None:
    """Neither where it is like the other text nor where it is one token over and over."""
    usual = train_predictors(small_bundle, pieces=made_up_pieces(4), output=tmp_path / "usual")
    other = train_predictors(
        small_bundle, pieces=[*made_up_pieces(4)[:-1], [7] * 128], output=tmp_path / "other"
    )
    assert (other.ranks, other.sha256) == (usual.ranks, usual.sha256)
    for one, another in zip(usual.points, other.points, strict=True):
        assert one.offsets == another.offsets
        assert one.false_negatives != another.false_negatives
        assert one.perplexity != another.perplexity


def test_ranks_to_choose_from_leave_half_of_the_gates_memory() -> None:
    options = PredictorOptions()
    assert rank_options(options, 11008, 4096, 4) == list(options.ranks)
    assert rank_options(options, 1024, 256, 8) == [64, 128, 192]
    assert rank_options(options, 1024, 256, 4) == [64]
    assert rank_options(replace(options, bits=8), 1024, 256, 8) == [64]
    assert rank_options(options, 128, 48, 8) == [48]


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [(1, [6]), (19, [6]), (20, [3, 9]), (45, [1, 4, 7, 10]), (120, list(range(12)))],
)
def test_quality_is_measured_all_over_the_text(tokens: int, expected: list[int]) -> None:
    pieces = [[index] * 10 for index in range(12)]
    assert [piece[0] for piece in training.spread(pieces, tokens)] == expected


def test_predictors_that_select_everything_give_the_dense_bits(copied: Path) -> None:
    tokens = np.random.default_rng(0).integers(0, 250, 100).tolist()
    with load(copied, sparsity="dense") as model:
        expected = model.logits(tokens)
    with load(copied, sparsity="predicted", predictor_recall=RECALL) as model:
        assert model.logits(tokens).tobytes() != expected.tobytes()
    save_predictors(with_offsets(found_in(copied), 1e6), copied)
    with load(copied, sparsity="predicted", predictor_recall=RECALL) as model:
        assert model.logits(tokens).tobytes() == expected.tobytes()


def test_where_nothing_is_selected_nothing_is_read(copied: Path) -> None:
    """Where predictors select nothing, nothing is read and the feed-forward adds nothing."""
    save_predictors(with_offsets(found_in(copied), -1e6), copied)
    tokens = np.random.default_rng(0).integers(0, 250, 20).tolist()
    with load(copied, sparsity="predicted", predictor_recall=RECALL) as model:
        nothing = model.logits(tokens)
        assert model.generate(tokens=tokens, max_tokens=3).stats.neuron_cache_hit_rate == 0
    with load(copied, sparsity="dense") as model:
        assert np.abs(model.logits(tokens) - nothing).max() > 1e-3


def test_one_text_however_the_prompt_is_split_and_whatever_the_budget(bundle: Path) -> None:
    tokens = np.random.default_rng(1).integers(0, 250, 90).tolist()
    with load(bundle, sparsity="predicted", predictor_recall=RECALL) as model:
        expected, logits = text(model), model.logits(tokens)
    for options in ({"prefill_chunk": 1}, {"prefill_chunk": 7}, {"prefill_chunk": 31}, {"threads": 2}):
        with load(bundle, sparsity="predicted", predictor_recall=RECALL, **options) as model:
            assert model.logits(tokens).tobytes() == logits.tobytes(), options
    for quarters in (0, 2, 4):
        with load(bundle, sparsity="predicted", predictor_recall=RECALL) as model:
            segment = model.plan.segment
            squeeze(model, (segment.total - segment.least) * quarters // 4)
            assert text(model) == expected, quarters
            assert model.stats.sparsity == "predicted"


def test_auto_never_picks_it_and_what_is_not_there_is_refused(bundle: Path, plain_bundle: Path) -> None:
    assert inspect(bundle).sparsity == "exact"
    plan = inspect(bundle, sparsity="predicted")
    assert plan.sparsity == "predicted"
    assert plan.predictor_bytes > 0
    with pytest.raises(UnsupportedModelError, match="ondevice train predictors"):
        load(plain_bundle, sparsity="predicted")
    with pytest.raises(UnsupportedModelError, match=r"0\.42.*0\.9, 0\.95"):
        load(bundle, sparsity="predicted", predictor_recall=0.42)
    with pytest.raises(BackendUnavailableError, match='sparsity="dense"'):
        load(bundle, sparsity="predicted", backend="reference")


def test_damage_and_foreign_predictors_are_found(copied: Path, tmp_path: Path) -> None:
    flip_byte(copied / PREDICTORS, 9000)
    for refused in (lambda: load(copied, sparsity="predicted"), lambda: verify(copied)):
        with pytest.raises(BundleError, match=f"{PREDICTORS}.*CRC32C; `ondevice train predictors"):
            refused()
    with load(copied) as model:
        assert len(text(model)) == TOKENS
    flip_byte(copied / PREDICTORS, 9000)
    assert PREDICTORS in dict(verify(copied).files)
    flip_byte(copied / PREDICTORS, 100)
    with pytest.raises(BundleError, match=PREDICTORS):
        load(copied, sparsity="predicted")
    flip_byte(copied / PREDICTORS, 100)
    os.truncate(copied / PREDICTORS, 5000)
    with pytest.raises(BundleError, match=r"every sparsity but `predicted` runs without"):
        load(copied, sparsity="predicted")


def edited(folder: Path, **changes: Any) -> None:
    """`predictors.json` with other values, and a hash that is right for them."""
    save_predictors(replace(found_in(folder), **changes), folder)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"model": "0" * 64}, "other weights"),
        ({"bits": 5}, "bits is 5"),
        ({"ranks": (64, 64)}, "3 multiples of 64"),
        ({"ranks": (64, 65, 64)}, "3 multiples of 64"),
        ({"ranks": (64, 64, 1 << 20)}, "ranks"),
        ({"points": ()}, "one or more"),
        ({"crcs": ()}, "checksums"),
        ({"trained_tokens": -1}, "trained_tokens"),
        ({"perplexity": -1.0}, "perplexity"),
    ],
)
def test_values_out_of_range_are_refused(copied: Path, changes: dict[str, Any], match: str) -> None:
    edited(copied, **changes)
    with pytest.raises(BundleError, match=match):
        open_sound(copied)


def test_an_edit_without_its_hash_is_refused(copied: Path) -> None:
    path = copied / PREDICTORS_MANIFEST
    document = json.loads(path.read_text())
    document["predictors"]["trained_tokens"] += 1
    path.write_text(json.dumps(document))
    with pytest.raises(BundleError, match="damaged or edited"):
        open_sound(copied)


def test_reads_that_fail_are_errors_and_the_session_goes_on(copied: Path) -> None:
    with load(copied, sparsity="predicted", predictor_recall=RECALL) as model:
        squeeze(model, 0)
        expected = text(model)
        path = copied / neuron_file_name(1)
        sound = path.read_bytes()
        path.write_bytes(sound[:4096] + bytes(len(sound) - 4096))
        with pytest.raises(FlashReadError, match=path.name):
            text(model)
        path.write_bytes(sound)
        assert text(model) == expected


def test_what_cannot_be_trained_is_refused(plain_bundle: Path, chat_bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="silu gates"):
        train_predictors(chat_bundle, pieces=made_up_pieces(), output=tmp_path / "a")
    with pytest.raises(UsageError, match="128 tokens in 1 pieces"):
        train_predictors(plain_bundle, pieces=made_up_pieces(1), output=tmp_path / "a")
    with pytest.raises(UsageError, match="either"):
        train_predictors(plain_bundle, output=tmp_path / "a")
    assert not (tmp_path / "a").exists()
    (tmp_path / "there").mkdir()
    with pytest.raises(UsageError, match="exists"):
        train_predictors(plain_bundle, pieces=made_up_pieces(), output=tmp_path / "there")


def test_the_command_trains_and_the_mode_runs(ondevice: Run, small_bundle: Path, tmp_path: Path) -> None:
    words = np.random.default_rng(2).integers(97, 122, 2000).astype(np.uint8).tobytes()
    (tmp_path / "text").write_bytes(words.replace(b"e", b" "))
    output = tmp_path / "trained"
    shown = ondevice(
        "train", "predictors", "-m", small_bundle, "--text", tmp_path / "text", "-o", output, "--json"
    )
    assert shown.code == 0, shown.err
    figures = shown.json
    assert figures["ranks"] == list(found_in(output).ranks)
    assert figures["points"][1]["recall"] == 0.95
    made = ondevice(
        "generate", "-m", output, "-p", "hello", "--max-tokens", "4", "--sparsity", "predicted", "--json"
    )
    assert made.code == 0, made.err
    assert made.json["stats"]["sparsity"] == "predicted"
    inspected = ondevice("inspect", "-m", output, "--sparsity", "predicted")
    assert "predicted yes: " in inspected.out
    assert "predictors" in inspected.out


def test_a_disk_without_room_is_told(
    plain_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ondevice.converters.training import activations

    monkeypatch.setattr(activations.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    with pytest.raises(OndeviceError, match="fewer tokens"):
        train_predictors(plain_bundle, pieces=made_up_pieces(), output=tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_what_is_wrong_is_said_before_training_and_afterwards_loses_none(
    small_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BudgetError, match="smallest that works"):
        train_predictors(small_bundle, pieces=made_up_pieces(), output=tmp_path / "a", dram_budget="2MB")
    monkeypatch.setattr(training.os, "access", lambda path, mode: False)
    with pytest.raises(UsageError, match="output"):
        train_predictors(small_bundle, pieces=made_up_pieces())
    assert not (tmp_path / "a").exists()
    monkeypatch.undo()

    def refuse(*arguments: object) -> None:
        raise OndeviceError("no measuring today")

    monkeypatch.setattr(training, "measured_points", refuse)
    with pytest.raises(OndeviceError, match="today"):
        train_predictors(small_bundle, pieces=made_up_pieces(), output=tmp_path / "a")
    assert found_in(tmp_path / "a").points[0].perplexity is None
    with load(tmp_path / "a", sparsity="predicted") as model:
        assert len(text(model)) == TOKENS


def test_no_memory_to_read_ahead_into_harms_nothing(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with load(bundle, sparsity="predicted") as model:
        expected = text(model)

    def refuse(*arguments: object) -> None:
        raise MemoryError

    monkeypatch.setattr(NeuronCache, "reserve", refuse)
    with load(bundle, sparsity="predicted") as model:
        assert text(model) == expected
