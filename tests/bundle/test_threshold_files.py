"""The files of thresholds: nothing in them is believed before it is checked."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ondevice.api import load
from ondevice.bundle.reader import Bundle
from ondevice.bundle.thresholds import THRESHOLDS_MANIFEST, Thresholds
from ondevice.converters.training.thresholds import LayerThresholds, save_thresholds, write_thresholds
from ondevice.errors import BundleError
from tests.support.bundles import convert_bundle, open_sound, write_chat_checkpoint


def made_up_layers(bundle: Bundle, importance: float = 1.0) -> list[LayerThresholds]:
    values = np.full(bundle.config.intermediate_size, importance, dtype=np.float32)
    return [LayerThresholds(values, (0.1, 0.2), (0.5, 0.6))] * bundle.config.num_layers


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A bundle of 3 layers with thresholds, which a test may change."""
    folder = convert_bundle(write_chat_checkpoint(tmp_path / "checkpoint"), tmp_path / "bundle")
    bundle = Bundle.open(folder)
    write_thresholds(bundle, made_up_layers(bundle), folder, [0.5, 0.6], 100, 10)
    return folder


def found_in(bundle: Path) -> Thresholds:
    found = Bundle.open(bundle).thresholds
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"model": "0" * 64}, "other weights"),
        ({"points": ()}, "one or more"),
        ({"crcs": ()}, "checksums"),
        ({"crcs": (1 << 32,)}, "crcs"),
        ({"calibrated_tokens": -1}, "calibrated_tokens"),
        ({"perplexity": -1.0}, "perplexity"),
        ({"sparsity": 1.5}, "sparsity"),
        ({"thresholds": (1.0, 1.0)}, "2 values for 3 layers"),
        ({"thresholds": (1.0, -1.0, 1.0)}, "thresholds is -1.0"),
        ({"thresholds": (1.0, 1e39, 1.0)}, "thresholds"),
        ({"skipped": (0.5, 0.5, 1.5)}, "skipped"),
        ({"agreement": 2.0}, "agreement"),
    ],
)
def test_values_out_of_range_are_refused(copied: Path, changes: dict[str, Any], match: str) -> None:
    found = found_in(copied)
    if set(changes) <= set(found.__dataclass_fields__):
        save_thresholds(replace(found, **changes), copied)
    else:
        save_thresholds(replace(found, points=(replace(found.points[0], **changes),)), copied)
    with pytest.raises(BundleError, match=match):
        open_sound(copied)


def test_points_out_of_order_are_refused(copied: Path) -> None:
    found = found_in(copied)
    save_thresholds(replace(found, points=found.points[::-1]), copied)
    with pytest.raises(BundleError, match="ascending"):
        open_sound(copied)


def test_an_edit_without_its_hash_is_refused(copied: Path) -> None:
    path = copied / THRESHOLDS_MANIFEST
    document = json.loads(path.read_text())
    document["thresholds"]["calibrated_tokens"] += 1
    path.write_text(json.dumps(document))
    with pytest.raises(BundleError, match="damaged or edited"):
        open_sound(copied)


def test_importance_that_is_not_finite_is_refused(copied: Path) -> None:
    bundle = Bundle.open(copied)
    write_thresholds(bundle, made_up_layers(bundle, np.nan), copied, [0.5, 0.6], 100, 10)
    with pytest.raises(BundleError, match="not finite"):
        load(copied, sparsity="threshold", threshold_sparsity=0.5)
