"""The neurons' order on flash: what fires together lies together, and the model is the same function."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from ondevice.api import Model, load, verify
from ondevice.backends.base import Float32
from ondevice.bundle.layout import RESIDENT, neuron_file_name
from ondevice.bundle.reader import Bundle
from ondevice.converters import output_folder
from ondevice.converters.convert import convert
from ondevice.converters.training import neuron_order
from ondevice.converters.training.activations import Activations, observe_gates, record_activations
from ondevice.converters.training.neuron_order import (
    co_firing_counts,
    nearest_neighbour_chain,
    order_neurons,
)
from ondevice.errors import BundleError, OndeviceError, UsageError
from ondevice.sparsity.policies import fires
from ondevice.training import train_predictors
from tests.converters.test_resume import StopError, folder_bytes
from tests.support.bundles import EOS, convert_bundle, write_chat_checkpoint
from tests.support.chat import PROMPT, squeeze
from tests.support.engines import all_logits, bundle_weights, running
from tests.support.flash_files import flip_byte
from tests.support.models import save_safetensors, write_checkpoint

LAYERS, NEURONS, KIND = 2, 600, 12
SHAPE = {"num_hidden_layers": LAYERS, "intermediate_size": NEURONS, "hidden_act": "relu"}
KILLER = "tests.support.kill_while_ordering"


def pieces(seed: int, count: int = 8) -> list[list[int]]:
    return np.random.default_rng(seed).integers(0, 250, (count, 128)).tolist()


def plant_kinds(checkpoint: Path) -> None:
    """Neurons of twelve of a kind, whose gates are nearly the same, scattered over every layer."""
    tensors, rng = load_file(checkpoint / "model.safetensors"), np.random.default_rng(9)
    for name in [name for name in tensors if "gate_proj" in name]:
        rows = np.repeat(tensors[name][: NEURONS // KIND], KIND, axis=0)
        rows += 0.1 * rng.standard_normal(rows.shape, dtype=np.float32) * rows.std()
        tensors[name] = rows[rng.permutation(NEURONS)]
    save_safetensors(checkpoint / "model.safetensors", tensors)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("order")
    checkpoint = write_chat_checkpoint(folder / "checkpoint", **SHAPE)
    plant_kinds(checkpoint)
    return convert_bundle(checkpoint, folder / "plain")


@pytest.fixture(scope="module")
def ordered(plain: Path) -> Path:
    output = plain.with_name("ordered")
    train_predictors(plain, pieces=pieces(1), output=output, order=True)
    return output


@pytest.fixture
def copied(plain: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    (tmp_path / "copied").mkdir()
    for name, data in folder_bytes(plain).items():
        (tmp_path / "copied" / name).write_bytes(data)
    return tmp_path / "copied"


def recorded(bundle: Path, folder: Path, seed: int = 1) -> Activations:
    folder.mkdir()
    return record_activations(Bundle.open(bundle), pieces(seed), folder)


def runs_per_batch(bundle: Path, seed: int) -> list[float]:
    """Of every layer: runs of neighbours among the neurons that fire for a token, mean over a text."""
    runs: list[list[int]] = [[] for _ in range(LAYERS)]

    def observe(layer: int, x: Float32, gates: Float32) -> None:
        runs[layer] += [int((np.diff(np.flatnonzero(row)) > 1).sum()) + 1 for row in fires(gates)]

    observe_gates(Bundle.open(bundle), pieces(seed, 2), observe)
    return [float(np.mean(layer)) for layer in runs]


def mlp_rows(weights: dict[str, NDArray[Any]], layer: int) -> NDArray[Any]:
    """(F, 3 D) gate row, up row and down column of every neuron."""
    gate, up, down = (
        weights[f"model.layers.{layer}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down")
    )
    return np.concatenate([gate, up, down.T], axis=1)


def text(model: Model, **options: Any) -> tuple[int, ...]:
    return model.generate(PROMPT, max_tokens=20, logit_bias={EOS: -math.inf}, **options).tokens


def test_counts_are_those_of_whole_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neuron_order, "COUNTED_TOKENS", 64)
    monkeypatch.setattr(neuron_order, "COUNTED_NEURONS", 50)
    fired = np.random.default_rng(0).random((300, 171)) < 0.3
    expected = fired.T.astype(np.int64) @ fired.astype(np.int64)
    np.testing.assert_array_equal(co_firing_counts(np.packbits(fired, axis=1), 171), expected)


def test_the_chain_is_the_one_that_sets_of_tokens_give() -> None:
    fired = np.random.default_rng(1).random((40, 60)) < 0.2
    fired[:, [3, 17]] = False
    tokens = [set(np.flatnonzero(column)) for column in fired.T]

    def likeness(one: int, other: int) -> np.float32:
        union = tokens[one] | tokens[other]
        return np.float32(len(tokens[one] & tokens[other])) / np.float32(max(1, len(union)))

    chain = [max(range(60), key=lambda neuron: len(tokens[neuron]))]
    while left := [neuron for neuron in range(60) if neuron not in chain]:
        chain.append(max(left, key=lambda neuron: likeness(chain[-1], neuron)))
    found = nearest_neighbour_chain(co_firing_counts(np.packbits(fired, axis=1), 60))
    assert found.tolist() == chain


def test_the_weights_are_a_permutation_of_the_unordered_bundles(plain: Path, ordered: Path) -> None:
    before, after = bundle_weights(plain), bundle_weights(ordered)
    for layer in range(LAYERS):
        rows, moved = mlp_rows(before, layer), mlp_rows(after, layer)
        assert not np.array_equal(rows, moved)
        np.testing.assert_array_equal(rows[np.lexsort(rows.T)], moved[np.lexsort(moved.T)])
    for name in before:
        if ".mlp." not in name:
            np.testing.assert_array_equal(before[name], after[name])
    # Checks that the gate files have the gate rows of the records, too.
    verify(ordered)


def test_the_manifest_says_on_how_much_text(plain: Path, ordered: Path) -> None:
    before, after = (Bundle.open(bundle).manifest.provenance for bundle in (plain, ordered))
    assert before.ordered_tokens is None
    assert after.ordered_tokens == 7 * 128
    assert after.fingerprint == before.fingerprint
    assert "ordered_tokens" not in (plain / "bundle.json").read_text()


def test_much_text_is_counted_at_equal_distances(
    copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neuron_order, "MAX_ORDER_TOKENS", 300)
    found = order_neurons(Bundle.open(copied), recorded(copied, tmp_path / "records"), 1000)
    assert found.manifest.provenance.ordered_tokens == 250


def test_what_fires_on_other_text_is_read_in_fewer_reads(plain: Path, ordered: Path) -> None:
    for before, after in zip(runs_per_batch(plain, seed=2), runs_per_batch(ordered, seed=2), strict=True):
        assert after < 0.4 * before


def test_no_mode_or_budget_changes_the_text_of_an_ordered_bundle(ordered: Path) -> None:
    tokens = np.random.default_rng(0).integers(0, 250, 100).tolist()
    with load(ordered, sparsity="dense") as model:
        expected, logits = text(model), model.logits(tokens)
    for quarters in (0, 2, 4):
        with load(ordered, sparsity="exact") as model:
            segment = model.plan.segment
            squeeze(model, (segment.total - segment.least) * quarters // 4)
            assert text(model) == expected, quarters
            assert model.logits(tokens).tobytes() == logits.tobytes(), quarters


def test_another_order_is_another_rounding_and_no_more(plain: Path, ordered: Path) -> None:
    """The kernels round what 64 neighbours give with one scale; the reference backend doesn't."""
    tokens = np.random.default_rng(0).integers(0, 250, 100).tolist()
    exact, errors = [], []
    for bundle in (plain, ordered):
        with running(bundle) as model:
            exact.append(all_logits(model, tokens))
        with load(bundle) as model:
            errors.append(float(np.abs(model.logits(tokens) - exact[-1]).mean()))
    np.testing.assert_allclose(exact[0], exact[1], atol=1e-3)
    assert errors[1] == pytest.approx(errors[0], rel=0.3)


def test_predictors_and_hotness_are_of_the_ordered_neurons(ordered: Path, tmp_path: Path) -> None:
    bundle = Bundle.open(ordered)
    assert bundle.predictors is not None
    assert max(bundle.predictors.points[0].false_negatives) < 0.15
    known = bundle.frequencies()
    assert known is not None
    activations = recorded(ordered, tmp_path / "records")
    for layer in range(LAYERS):
        fired = np.unpackbits(activations.fired(layer)[: 7 * 128], axis=1, count=NEURONS)
        np.testing.assert_allclose(known[layer], fired.mean(axis=0), atol=0.03)


def test_a_bundle_is_ordered_once(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training that is stopped after the ordering, and begun again with another text, trains and no more."""

    def stop(*arguments: object) -> None:
        raise StopError

    monkeypatch.setattr("ondevice.converters.training.predictors.train.firing_frequencies", stop)
    before = folder_bytes(copied)
    with pytest.raises(StopError):
        train_predictors(copied, pieces=pieces(1), order=True)
    once = folder_bytes(copied)
    assert once != before
    with pytest.raises(StopError):
        train_predictors(copied, pieces=pieces(3), order=True)
    assert folder_bytes(copied) == once
    assert sorted(path.name for path in copied.parent.iterdir()) == ["copied"]


def test_a_full_disk_is_told_before_anything_is_recorded(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = folder_bytes(copied)
    monkeypatch.setattr(output_folder.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    monkeypatch.setattr("ondevice.converters.training.activations.record_activations", pytest.fail)
    with pytest.raises(OndeviceError, match="make room"):
        train_predictors(copied, pieces=pieces(1), order=True)
    assert folder_bytes(copied) == before
    assert sorted(path.name for path in copied.parent.iterdir()) == ["copied"]


def test_a_users_file_in_the_bundle_stays(copied: Path) -> None:
    (copied / "thesis.txt").write_text("years of work")
    with pytest.raises(UsageError, match="thesis"):
        train_predictors(copied, pieces=pieces(1), order=True)
    assert (copied / "thesis.txt").exists()


@pytest.mark.fast("neurons-*")
@pytest.mark.parametrize(("name", "match"), [(RESIDENT, "sha256"), (neuron_file_name(1), "checksum")])
def test_damage_is_found_and_the_old_bundle_stays(
    copied: Path, tmp_path: Path, name: str, match: str
) -> None:
    activations = recorded(copied, tmp_path / "records")
    flip_byte(copied / name, 9000)
    before = folder_bytes(copied)
    with pytest.raises(OndeviceError, match=match):
        order_neurons(Bundle.open(copied), activations, 100)
    assert folder_bytes(copied) == before
    assert not any((tmp_path / "copied.partial").iterdir())


def test_padding_that_is_not_zero_is_refused(
    copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    activations = recorded(copied, tmp_path / "records")
    read = neuron_order.FlashReader.read_records

    def stained(reader: Any, index: int, ids: NDArray[Any], out: NDArray[np.uint8]) -> None:
        read(reader, index, ids, out)
        out[0, -1] = 1

    monkeypatch.setattr(neuron_order.FlashReader, "read_records", stained)
    with pytest.raises(BundleError, match="padding isn't zero"):
        order_neurons(Bundle.open(copied), activations, 100)


def test_files_are_copied_where_they_cannot_be_links(
    copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError

    monkeypatch.setattr(os, "link", refuse)
    resident = (copied / RESIDENT).read_bytes()
    order_neurons(Bundle.open(copied), recorded(copied, tmp_path / "records"), 100)
    assert (copied / RESIDENT).read_bytes() == resident
    verify(copied)


@pytest.mark.slow
def test_resuming_a_conversion_leaves_an_ordered_bundle_as_it_is(plain: Path, tmp_path: Path) -> None:
    checkpoint = plain.with_name("checkpoint")
    output = convert(checkpoint, tmp_path / "b")
    order_neurons(Bundle.open(output), recorded(output, tmp_path / "records"), 100)
    expected = folder_bytes(output)
    # As a kill between the last two names leaves it.
    output.rename(tmp_path / "b.partial")
    convert(checkpoint, tmp_path / "b.replaced")
    assert folder_bytes(convert(checkpoint, output, resume=True)) == expected
    assert not (tmp_path / "b.replaced").exists()
    convert(checkpoint, tmp_path / "b.replaced")
    assert folder_bytes(convert(checkpoint, output, resume=True)) == expected
    assert not (tmp_path / "b.replaced").exists()


def kill_while_ordering(tmp_path: Path, step: int) -> dict[str, int]:
    source = write_checkpoint(tmp_path / "source", hidden_act="relu")
    (tmp_path / "work").mkdir()
    command = [sys.executable, "-m", KILLER, str(source), str(tmp_path / "work"), str(step)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=250)
    assert result.returncode == 0, result.stderr
    report: dict[str, int] = json.loads(result.stdout)
    return report


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_while_ordering_it_leaves_one_of_two_bundles(tmp_path: Path) -> None:
    report = kill_while_ordering(tmp_path, step=15)
    assert report["killed"] >= 2
    assert (report["invalid"], report["different"], report["left"]) == (0, 0, 0)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_kill_at_any_step_of_ordering_leaves_a_sound_bundle(tmp_path: Path) -> None:
    report = kill_while_ordering(tmp_path, step=1)
    assert report["killed"] >= 40
    # Between the two renamings there is no bundle under the name.
    assert report["absent"] >= 1
    assert (report["invalid"], report["different"], report["left"]) == (0, 0, 0)
