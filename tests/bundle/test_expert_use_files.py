"""The use of experts in a bundle: what is stored, what it lets expect, what damaged or hostile files give."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ondevice
from ondevice.api import verify
from ondevice.bundle.expert_use import (
    EXPERT_USE,
    EXPERT_USE_MANIFEST,
    ExpertUse,
    HitPoint,
    expert_counts_bytes,
    expert_use_text,
)
from ondevice.bundle.files import write_durably
from ondevice.bundle.reader import Bundle
from ondevice.bundle.sidecar import weights_digest
from ondevice.converters.convert import convert
from ondevice.converters.training.sidecars import copy_bundle
from ondevice.errors import BundleError
from tests.support.bundles import convert_bundle, copy_files, open_sound, write_chat_checkpoint
from tests.support.command_line import Run
from tests.support.families import CASES, write_model
from tests.support.flash_files import flip_byte

EXPERTS, CHOSEN, TOKENS = 8, 3, 40
POINTS = (HitPoint(2, 0.25), HitPoint(6, 0.75))


@pytest.fixture(scope="module")
def plain_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("experts")
    write_model(made / "source", *CASES["olmoe"])
    return convert(made / "source", made / "plain", "q4")


@pytest.fixture
def bundle(plain_bundle: Path, tmp_path: Path) -> Path:
    """A copy with the use of its experts, which a test may change."""
    return write(copy_files(plain_bundle, tmp_path / "used"))


def layers(folder: Path) -> int:
    return sum(layer.experts is not None for layer in Bundle.open(folder).config.layers)


def counts_of(folder: Path) -> np.ndarray:
    """(L, E) of which every row is what `TOKENS` tokens could have chosen."""
    row = [TOKENS, TOKENS, 20, 20, 0, 0, 0, 0]
    return np.array([np.roll(row, layer) for layer in range(layers(folder))])


def write(folder: Path, counts: np.ndarray | None = None, **changes: Any) -> Path:
    """Write both files, with another content of the JSON file if there are changes."""
    data = expert_counts_bytes(counts_of(folder) if counts is None else counts)
    digest = weights_digest(Bundle.open(folder).manifest)
    use = ExpertUse(digest, TOKENS, 30, POINTS, hashlib.sha256(data).hexdigest())
    write_durably(folder / EXPERT_USE, data)
    write_durably(folder / EXPERT_USE_MANIFEST, expert_use_text(replace(use, **changes)))
    return folder


def test_it_is_read_verified_and_copied(bundle: Path, plain_bundle: Path, tmp_path: Path) -> None:
    opened = Bundle.open(bundle)
    assert opened.config.experts is not None
    assert (opened.config.experts.count, opened.config.experts.chosen) == (EXPERTS, CHOSEN)
    use, counts = opened.expert_use, opened.expert_counts()
    assert use is not None
    assert (use.tokens, use.replayed_tokens, use.points) == (TOKENS, 30, POINTS)
    np.testing.assert_array_equal(counts, counts_of(bundle))
    nbytes = (bundle / EXPERT_USE).stat().st_size
    assert (EXPERT_USE, nbytes) in verify(bundle).files
    more = nbytes + (bundle / EXPERT_USE_MANIFEST).stat().st_size
    assert opened.bundle_bytes == Bundle.open(plain_bundle).bundle_bytes + more
    copy_bundle(opened, tmp_path / "copy")
    assert Bundle.open(tmp_path / "copy").expert_use == use
    assert Bundle.open(plain_bundle).expert_use is None
    assert Bundle.open(plain_bundle).expert_counts() is None


def test_hits_are_interpolated_between_none_and_all(bundle: Path) -> None:
    use = Bundle.open(bundle).expert_use
    assert use is not None
    found = [use.expected_hits(kept, 16) for kept in (0, 1, 2, 3, 6, 11, 16)]
    np.testing.assert_allclose(found, [0, 0.125, 0.25, 0.375, 0.75, 0.875, 1])


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"model": "0" * 64}, "other weights"),
        ({"tokens": 0}, "tokens"),
        ({"tokens": 1 << 32}, "tokens"),
        ({"tokens": TOKENS + 1}, "counts aren't those"),
        ({"replayed_tokens": 0}, "replayed_tokens"),
        ({"points": ()}, "points"),
        ({"points": (HitPoint(3, 0.1), HitPoint(3, 0.2))}, "ascending experts"),
        ({"points": (HitPoint(4, 0.1), HitPoint(3, 0.2))}, "ascending experts"),
        ({"points": tuple(HitPoint(size, 0.1) for size in range(1, 18))}, "points"),
        ({"points": (HitPoint(0, 0.1),)}, "experts"),
        ({"points": (HitPoint(1 << 40, 0.1),)}, "experts"),
        ({"points": (HitPoint(3, 1.01),)}, "hits"),
        ({"points": (HitPoint(3, -0.01),)}, "hits"),
        ({"points": (HitPoint(3, "0.5"),)}, "hits"),
        ({"points": (HitPoint(3, None),)}, "hits"),
        ({"points": ((3, 0.5),)}, "points"),
        ({"sha256": "0" * 64}, "sha256"),
    ],
)
def test_values_out_of_range_are_refused(bundle: Path, changes: dict[str, Any], match: str) -> None:
    write(bundle, **changes)
    with pytest.raises(BundleError, match=match):
        open_sound(bundle)
    with pytest.raises(BundleError, match="ondevice train expert-use"):
        verify(bundle)


@pytest.mark.parametrize("place", [(0, 0), (-1, -1)])
@pytest.mark.parametrize("value", [TOKENS + 1, (1 << 32) - 1, 7])
def test_signed_counts_are_checked(bundle: Path, place: tuple[int, int], value: int) -> None:
    counts = counts_of(bundle)
    counts[place] = value
    write(bundle, counts)
    with pytest.raises(BundleError, match="counts aren't those of 40 tokens that choose 3 experts"):
        open_sound(bundle)


@pytest.mark.parametrize("word", ["NaN", "Infinity", '"0.5"', "null"])
def test_hits_are_finite_numbers(bundle: Path, word: str) -> None:
    path = bundle / EXPERT_USE_MANIFEST
    path.write_text(path.read_text().replace("0.25", word))
    with pytest.raises(BundleError, match=EXPERT_USE_MANIFEST):
        open_sound(bundle)


def test_damage_stops_nothing_and_inspect_names_it(bundle: Path, ondevice: Run) -> None:
    flip_byte(bundle / EXPERT_USE, os.stat(bundle / EXPERT_USE).st_size - 1)
    opened = Bundle.open(bundle)
    assert opened.expert_use is None
    assert list(opened.damaged) == ["expert_use"]
    shown = ondevice("inspect", "-m", bundle)
    assert f"expert_use: {EXPERT_USE} doesn't match its sha256" in shown.out
    assert "hits to expect" not in shown.out
    assert ondevice("inspect", "-m", bundle, "--json").json["experts"]["expected_hits"] is None


def test_it_may_be_damaged_after_opening(bundle: Path) -> None:
    opened = Bundle.open(bundle)
    (bundle / EXPERT_USE).write_bytes(b"")
    with pytest.raises(BundleError, match="ondevice train expert-use --model"):
        opened.expert_counts()


def test_an_edited_manifest_is_refused(bundle: Path) -> None:
    path = bundle / EXPERT_USE_MANIFEST
    document = json.loads(path.read_text())
    document["expert_use"]["points"][0]["hits"] = 0.9
    path.write_text(json.dumps(document))
    with pytest.raises(BundleError, match="damaged or edited"):
        open_sound(bundle)


def test_a_model_without_experts_has_none(bundle: Path, tmp_path: Path) -> None:
    dense = convert_bundle(write_chat_checkpoint(tmp_path / "checkpoint"), tmp_path / "dense")
    for name in (EXPERT_USE, EXPERT_USE_MANIFEST):
        (dense / name).write_bytes((bundle / name).read_bytes())
    with pytest.raises(BundleError, match="has no experts: delete it"):
        open_sound(dense)
    with ondevice.load(dense) as model:
        assert model.bundle.expert_use is None
