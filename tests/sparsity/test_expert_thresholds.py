"""`--sparsity threshold` of a model with experts: of each expert only neurons with large gates. Lossy."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ondevice.api import load
from ondevice.bundle.reader import Bundle
from ondevice.bundle.thresholds import THRESHOLDS_MANIFEST
from ondevice.commands.inspection import inspection, inspection_text
from ondevice.config import RuntimeConfig
from ondevice.converters.convert import convert
from ondevice.converters.training.expert_thresholds import ExpertNeurons, _of_layer
from ondevice.converters.training.thresholds import CHUNK_TOKENS, TARGETS, save_thresholds
from ondevice.errors import BackendUnavailableError, BundleError, UnsupportedModelError
from ondevice.flash.reader import FlashReader
from ondevice.model.loading import bundle_files
from ondevice.runtime.resolving import resolve
from ondevice.training import train_thresholds
from tests.support.bundles import copy_files, made_up_pieces
from tests.support.chat import squeeze
from tests.support.command_line import Run
from tests.support.families import CASES, write_model

PROMPT = [5, 9, 17, 33, 5, 9, 17, 33, 5, 9, 17, 61, 5, 9]
PASSAGE = np.random.default_rng(1).integers(0, 250, 70).tolist()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Squared ReLU experts, eight in each layer, beside a shared one; thresholds aren't trained."""
    made = tmp_path_factory.mktemp("relu2")
    family, values = CASES["qwen2 moe"]
    write_model(made / "source", family, {**values, "hidden_act": "relu2"})
    return convert(made / "source", made / "plain", "q4")


@pytest.fixture(scope="module")
def folder(plain: Path) -> Path:
    output = plain.with_name("thresholds")
    train_thresholds(plain, pieces=made_up_pieces(), output=output, measured_tokens=128)
    return output


def test_what_calibration_reports(folder: Path) -> None:
    bundle = Bundle.open(folder)
    found, config = bundle.thresholds, bundle.config
    assert found is not None
    assert found.calibrated_tokens + found.measured_tokens == 8 * 128
    for point in found.points:
        # Squared ReLU makes about half of the activated gates zero. Of the others, thresholds take a share.
        assert point.skipped == pytest.approx([0.5 + 0.5 * point.sparsity] * config.num_layers, abs=0.06)
        assert point.perplexity is not None
        assert min(point.thresholds) > 1e-9
    for layer in zip(*(point.thresholds for point in found.points), strict=True):
        assert list(layer) == sorted(set(layer))
    assert RuntimeConfig().threshold_sparsity in {point.sparsity for point in found.points}
    assert found.points[-1].agreement != 1.0
    with FlashReader(bundle_files(bundle)) as reader:
        experts = config.experts
        assert experts is not None
        first = ExpertNeurons(bundle, reader, 1, 2)
        assert first.first == config.dense_neurons(config.layers[1]) + 2 * experts.neurons


def test_bits_depend_on_nothing(folder: Path) -> None:
    with load(folder, speculation="off", sparsity="experts") as model:
        exact = model.logits(PASSAGE)
    options = {"sparsity": "threshold", "threshold_sparsity": 0.8}
    with load(folder, speculation="off", **options) as model:
        expected, logits = model.generate(tokens=PROMPT, max_tokens=30), model.logits(PASSAGE)
        assert expected.stats.sparsity == "threshold"
    assert logits.tobytes() != exact.tobytes()
    for settings in ({"speculation": "off"}, {"speculation": "lookup", "threads": 2, "prefill_chunk": 3}):
        with load(folder, **options, **settings) as model:
            for segments in (None, 0, 3):
                if segments is not None:
                    squeeze(model, segments)
                assert model.generate(tokens=PROMPT, max_tokens=30).tokens == expected.tokens
                assert model.logits(PASSAGE).tobytes() == logits.tobytes()


@pytest.mark.parametrize("sparsity", [0.7, 0.9])
def test_the_reference_leaves_out_the_same(folder: Path, sparsity: float) -> None:
    options = {
        "sparsity": "threshold",
        "threshold_sparsity": sparsity,
        "speculation": "off",
        "max_context": 64,
    }
    with load(folder, **options) as model:
        ours = model.logits(PROMPT)
    with load(folder, backend="reference", **options) as model:
        oracle = model.logits(PROMPT)
    with load(folder, backend="reference", sparsity="experts", max_context=64) as model:
        whole = model.logits(PROMPT)
    off, cut = (float(np.linalg.norm(it - oracle) / np.linalg.norm(oracle)) for it in (ours, whole))
    # Activations of the kernels have 8 bits, so a gate near its threshold may fall on either side.
    assert off < 0.06
    assert cut > 2 * off, (cut, off)


def test_where_everything_counts_it_is_the_exact_model(folder: Path, tmp_path: Path) -> None:
    copied = copy_files(folder, tmp_path / "copied")
    found = Bundle.open(copied).thresholds
    assert found is not None
    zeros = (0.0,) * len(found.points[0].thresholds)
    save_thresholds(replace(found, points=(replace(found.points[0], thresholds=zeros),)), copied)
    with load(copied, speculation="off", sparsity="experts") as model:
        exact = model.logits(PASSAGE)
    with load(copied, speculation="off", sparsity="threshold", threshold_sparsity=0.25) as model:
        assert model.logits(PASSAGE).tobytes() == exact.tobytes()


def test_labels_and_refusals(folder: Path, plain: Path, tmp_path: Path, ondevice: Run) -> None:
    runtime = RuntimeConfig(backend="cpu", sparsity="threshold", threshold_sparsity=0.8)
    resolved = resolve(Bundle.open(folder), runtime)
    facts, text = inspection(resolved)["experts"], inspection_text(resolved)
    assert (facts["lossy"], facts["threshold_sparsity"]) == (True, 0.8)
    found = resolved.bundle.thresholds
    assert found is not None
    kept = 1 - float(np.mean(found.point(0.8).skipped))
    assert kept < 0.15
    assert f"lossy: of each expert only neurons whose gate is large enough, {100 * kept:.1f} %" in text
    assert "--sparsity threshold" in text
    exact = inspection(resolve(Bundle.open(folder), RuntimeConfig(backend="cpu")))["experts"]
    assert (exact["lossy"], exact["threshold_sparsity"]) == (False, 0.0)
    made = ondevice("inspect", "-m", folder, "--json")
    assert json.loads(made.out)["sparsity_modes"] == ["threshold", "experts"]
    with pytest.raises(UnsupportedModelError, match="train thresholds"):
        load(plain, sparsity="threshold")
    with pytest.raises(BackendUnavailableError, match="mlx"):
        load(folder, sparsity="threshold", backend="mlx")
    matrices = convert(_silu(tmp_path), tmp_path / "matrices", "q4")
    for refused in (
        lambda: load(matrices, sparsity="threshold"),
        lambda: train_thresholds(matrices, pieces=made_up_pieces()),
    ):
        with pytest.raises(
            UnsupportedModelError, match="multiplied whole, so leaving out neurons would save"
        ):
            refused()
    (matrices / THRESHOLDS_MANIFEST).write_bytes((folder / THRESHOLDS_MANIFEST).read_bytes())
    with pytest.raises(BundleError, match="is there, but an expert's matrices"):
        load(matrices, sparsity="threshold")


def _silu(folder: Path) -> Path:
    write_model(folder / "silu", *CASES["olmoe"])
    return folder / "silu"


def test_inputs_are_read_as_they_are_needed(plain: Path) -> None:
    """Of a memory map, rows that a mask picks would be a copy of all of them, which no budget counts."""

    class Watched(np.ndarray):
        most = 0

        def __getitem__(self, key: Any) -> Any:
            found = super().__getitem__(key)
            if not isinstance(key, slice):
                Watched.most = max(Watched.most, len(found))
            return found

    bundle = Bundle.open(plain)
    config, tokens = bundle.config, 5 * CHUNK_TOKENS
    inputs = np.random.default_rng(2).standard_normal((tokens, config.hidden_size)).astype(np.float16)
    chosen = np.zeros((tokens, 1), np.int16)
    with FlashReader(bundle_files(bundle)) as reader:
        expected = _of_layer(bundle, reader, 1, inputs, chosen, 4 * CHUNK_TOKENS, TARGETS)
        watched = inputs.view(Watched)
        found = _of_layer(bundle, reader, 1, watched, chosen, 4 * CHUNK_TOKENS, TARGETS)
    assert (found.thresholds, found.skipped) == (expected.thresholds, expected.skipped)
    assert 0 < Watched.most <= CHUNK_TOKENS
