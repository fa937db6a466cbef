"""`ondevice train expert-costs` measures what fewer experts cost, and the bundle carries it."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ondevice.api import load
from ondevice.bundle.expert_costs import (
    EXPERT_COSTS_SIDECAR,
    ExpertCost,
    ExpertCosts,
    expert_costs_text,
)
from ondevice.bundle.reader import Bundle
from ondevice.bundle.sidecar import weights_digest
from ondevice.bundle.verify import verify
from ondevice.commands.inspection import inspection, inspection_text
from ondevice.commands.training_reports import expert_cost_table
from ondevice.config import RuntimeConfig
from ondevice.converters.convert import convert
from ondevice.errors import BundleError, UnsupportedModelError, UsageError
from ondevice.kernels import _native
from ondevice.runtime.resolving import resolve
from ondevice.scoring import Tally
from ondevice.training import train_expert_costs
from tests.support.command_line import Run
from tests.support.families import CASES, write_model
from tests.support.trained_models import MIXTURE

MANIFEST = EXPERT_COSTS_SIDECAR.manifest
PIECES = [[int(token) for token in row] for row in np.random.default_rng(3).integers(3, 256, (2, 30))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight experts in each of three layers, three for each token."""
    made = tmp_path_factory.mktemp("costs")
    write_model(made / "source", *CASES["olmoe"])
    return convert(made / "source", made / "bundle", "q4")


@pytest.fixture(scope="module")
def trained(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("trained") / "bundle"
    train_expert_costs(folder, pieces=PIECES, output=output)
    return output


def costs_of(folder: Path) -> ExpertCosts:
    found = Bundle.open(folder).expert_costs
    assert found is not None
    return found


def perplexity(folder: Path, **options: Any) -> float:
    """By single passes over one token each."""
    tally = Tally()
    with load(folder, backend="cpu", speculation="off", prefill_chunk=1, **options) as model:
        for piece in PIECES:
            tally.add(model.logits(piece[:-1]), piece[1:])
    return tally.score().perplexity


def test_costs_are_those_of_runs_token_by_token(folder: Path, trained: Path) -> None:
    found = costs_of(trained)
    assert [point.experts for point in found.points] == [3, 2, 1]
    assert found.measured_tokens == sum(map(len, PIECES))
    assert found.in_memory == 13
    for point in found.points:
        assert point.perplexity == perplexity(folder, experts=point.experts)
    assert found.baseline.agreement == 1.0
    assert found.points[2].agreement < 1.0
    assert 0.0 < found.baseline.hits < 1.0
    assert len({point.perplexity for point in found.points}) == 3


def test_inspect_prints_them(ondevice: Run, folder: Path, trained: Path) -> None:
    resolved = resolve(Bundle.open(trained), RuntimeConfig(backend="cpu"))
    shown, text = inspection(resolved)["expert_costs"], inspection_text(resolved)
    found = costs_of(trained)
    assert shown["in_memory"] == 13
    assert [point["perplexity"] for point in shown["points"]] == [it.perplexity for it in found.points]
    assert "token by token on 60 tokens, with room for 13 experts" in text
    own, cost = found.baseline.perplexity, found.points[2].perplexity
    assert own is not None
    assert cost is not None
    (line,) = (line for line in text.splitlines() if line.strip().startswith("--experts 1"))
    assert f"{cost:.3f}" in line
    assert f"{100 * (cost / own - 1):+.2f} %" in line
    plain = ondevice("inspect", "-m", folder, "--json").json
    assert plain["expert_costs"] is None
    assert plain["bundle_bytes"] + (trained / MANIFEST).stat().st_size == inspection(resolved)["bundle_bytes"]


def test_the_command_measures(ondevice: Run, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("The restaurant is near the river, and cheap.\n" * 8)
    command = ("train", "expert-costs", "-m", MIXTURE, "--text", tmp_path / "text", "--tokens", 20)
    shown = ondevice(*command, "-o", tmp_path / "a", "--json").json
    assert [point["experts"] for point in shown["points"]] == [4, 3, 2, 1]
    assert shown["in_memory"] == 104
    assert shown["points"] == [asdict(point) for point in costs_of(tmp_path / "a").points]
    table = ondevice(*command, "-o", tmp_path / "b").out
    assert table == expert_cost_table(costs_of(tmp_path / "b")) + "\n"
    measured = (costs_of(tmp_path / name) for name in "ab")
    assert len({tuple(point.perplexity for point in found.points) for found in measured}) == 1


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"model": "0" * 64}, "other weights"),
        ({"points": ()}, "must begin with"),
        ({"measured_tokens": 0}, "measured_tokens"),
        ({"in_memory": 25}, "in_memory"),
        ({"experts": 2}, "must begin with the model's own 3"),
        ({"experts": 4}, "experts"),
        ({"perplexity": -1.0}, "perplexity"),
        ({"agreement": 1.5}, "agreement"),
        ({"hits": -0.5}, "hits"),
    ],
)
def test_values_out_of_range_are_refused(
    trained: Path, tmp_path: Path, changes: dict[str, Any], match: str
) -> None:
    copied = Path(shutil.copytree(trained, tmp_path / "copied"))
    found = costs_of(copied)
    if set(changes) <= set(ExpertCosts.__dataclass_fields__):
        wrong = replace(found, **changes)
    else:
        wrong = replace(found, points=(replace(found.baseline, **changes), *found.points[1:]))
    (copied / MANIFEST).write_bytes(expert_costs_text(wrong))
    with pytest.raises(BundleError, match=match):
        verify(copied, _native.crc32c)
    # It is for people alone, so the model runs without it.
    with load(copied, experts=1) as model:
        assert model.generate(tokens=PIECES[0][:4], max_tokens=2).tokens


def test_an_edit_and_a_number_named_twice_are_refused(trained: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(trained, tmp_path / "copied"))
    found = costs_of(copied)
    (copied / MANIFEST).write_bytes(expert_costs_text(replace(found, points=(*found.points, found.baseline))))
    with pytest.raises(BundleError, match="name no number twice"):
        verify(copied, _native.crc32c)
    (copied / MANIFEST).write_bytes(expert_costs_text(found))
    verify(copied, _native.crc32c)
    document = json.loads((copied / MANIFEST).read_text())
    document["expert_costs"]["in_memory"] += 1
    (copied / MANIFEST).write_text(json.dumps(document))
    with pytest.raises(BundleError, match=r"edited; `ondevice train expert-costs --model .* makes it anew"):
        verify(copied, _native.crc32c)


def test_a_model_without_experts_has_none(chat_bundle: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(chat_bundle, tmp_path / "copied"))
    point = ExpertCost(1, 2.0, 1.0, 1.0)
    costs = ExpertCosts(weights_digest(Bundle.open(copied).manifest), 10, 1, (point,))
    (copied / MANIFEST).write_bytes(expert_costs_text(costs))
    with pytest.raises(BundleError, match="this model has no experts: delete it"):
        verify(copied, _native.crc32c)
    with pytest.raises(UnsupportedModelError, match="can't be trained for: it has no experts"):
        train_expert_costs(chat_bundle, pieces=PIECES, output=tmp_path / "a")


def test_what_cannot_be_measured_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="too short to measure"):
        train_expert_costs(folder, pieces=[[5]], output=tmp_path / "a")
    with pytest.raises(UsageError, match="exists; choose a new folder"):
        train_expert_costs(folder, pieces=PIECES, output=folder)
    write_model(tmp_path / "source", *CASES["phimoe"])
    mixer = convert(tmp_path / "source", tmp_path / "bundle", "q4")
    with pytest.raises(UnsupportedModelError, match="its router is a sparsemixer"):
        train_expert_costs(mixer, pieces=PIECES, output=tmp_path / "a")
    assert not (tmp_path / "a").exists()
    assert math.isfinite(perplexity(folder))
