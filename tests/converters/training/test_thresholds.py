"""Calibrating thresholds: what a layer's neurons are worth, and where a share of them is cut off."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ondevice.backends.reference import activate
from ondevice.bundle.reader import Bundle
from ondevice.converters.training import thresholds
from ondevice.converters.training.thresholds import (
    BUCKETS,
    LayerGates,
    bucket_end,
    bucket_of,
    calibrate_thresholds,
    quantile_bucket,
)
from ondevice.errors import BundleError
from ondevice.flash.reader import FlashReader
from ondevice.model.loading import bundle_files
from ondevice.model.records import NeuronRecords
from tests.support.bundles import convert_bundle
from tests.support.engines import bundle_weights
from tests.support.models import write_checkpoint

TARGETS = (0.25, 0.5, 0.9)


@pytest.fixture(scope="module", params=["silu", "gelu"])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Float16 weights: products are those of numpy but for rounding. 72 columns, 100 neurons."""
    folder = tmp_path_factory.mktemp(request.param)
    shape = {"hidden_size": 72, "num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 100}
    write_checkpoint(folder / "checkpoint", hidden_act=request.param, **shape)
    return convert_bundle(folder / "checkpoint", folder / "bundle", "f16")


def made_up_inputs(bundle: Path, tokens: int) -> np.ndarray:
    rng = np.random.default_rng(3)
    return rng.standard_normal((tokens, Bundle.open(bundle).config.hidden_size)).astype(np.float16)


def test_importance_and_thresholds_are_those_of_numpy(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thresholds, "READ_BYTES", 7 * Bundle.open(bundle).neuron_layout.stride)
    opened = Bundle.open(bundle)
    weights, prefix = bundle_weights(bundle), "model.layers.1.mlp"
    gate, up, down = (weights[f"{prefix}.{name}_proj.weight"] for name in ("gate", "up", "down"))
    inputs = made_up_inputs(bundle, 300)
    x = inputs.astype(np.float32)
    importance = np.sqrt(np.mean((x[:200] @ up.T) ** 2, axis=0)) * np.linalg.norm(down, axis=0)
    contributions = np.abs(activate(x @ gate.T, opened.config.activation)) * importance
    with FlashReader(bundle_files(opened), "buffered", 2) as reader:
        layer = LayerGates(opened.config.feed_forward, NeuronRecords(opened, reader, 1))
    found = layer.thresholds(layer.importance(inputs[:200]), inputs, 200, TARGETS)
    assert found.importance == pytest.approx(importance, rel=1e-4)
    expected = np.quantile(contributions[:200], TARGETS)
    assert found.thresholds == pytest.approx(expected, rel=2e-3)
    skipped = [(contributions[200:] <= threshold).mean() for threshold in found.thresholds]
    assert found.skipped == pytest.approx(skipped, abs=1e-3)


def test_products_that_are_not_finite_are_refused(bundle: Path) -> None:
    opened = Bundle.open(bundle)
    with FlashReader(bundle_files(opened), "buffered", 2) as reader:
        layer = LayerGates(opened.config.feed_forward, NeuronRecords(opened, reader, 0))
    inputs = made_up_inputs(bundle, 20)
    inputs[:, 0] = np.inf
    with pytest.raises(BundleError, match="finite"):
        layer.thresholds(layer.importance(inputs[:10]), inputs, 10, TARGETS)


def test_buckets_order_as_values_do() -> None:
    values = np.sort(np.abs(np.random.default_rng(0).standard_cauchy(10000)).astype(np.float32))
    values[:10] = 0
    buckets = bucket_of(values)
    assert (np.diff(buckets.astype(np.int64)) >= 0).all()
    assert buckets.max() < BUCKETS
    ends = np.array([bucket_end(int(bucket)) for bucket in buckets])
    assert (values <= ends).all()
    assert (ends[10:] <= values[10:] * 1.0005).all()
    assert bucket_of(np.nextafter(ends[-1:].astype(np.float32), np.float32(np.inf)))[0] == buckets[-1] + 1


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 0.999, 1.0])
def test_a_share_of_all_that_was_counted_lies_up_to_its_bucket(share: float) -> None:
    counts = np.random.default_rng(1).integers(0, 50, BUCKETS)
    bucket = quantile_bucket(counts, share)
    assert counts[: bucket + 1].sum() >= share * counts.sum()
    assert counts[:bucket].sum() < share * counts.sum() or bucket == 0


def test_the_text_that_measures_sets_no_threshold(bundle: Path, tmp_path: Path) -> None:
    pieces = np.random.default_rng(4).integers(0, 250, (8, 100)).tolist()
    others = [*pieces[:-1], [7] * 100]
    found = []
    for name, text in (("a", pieces), ("b", others)):
        (tmp_path / name).mkdir()
        options = thresholds.ThresholdOptions(targets=TARGETS)
        found.append(calibrate_thresholds(Bundle.open(bundle), text, tmp_path / name, options))
    for one, other in zip(found[0].points, found[1].points, strict=True):
        assert one.thresholds == other.thresholds
        assert one.skipped != other.skipped
    assert found[0].sha256 == found[1].sha256
    assert (found[0].calibrated_tokens, found[0].measured_tokens) == (700, 100)
