"""Slices that are written: whole bundles of their own, equal to what they were cut from."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from ondevice import api
from ondevice.bundle.file_layouts import resident_tensors, tensors_layout
from ondevice.bundle.layout import MANIFEST, RESIDENT, neuron_file_name
from ondevice.bundle.manifest import parse_manifest
from ondevice.bundle.parts import model_digest
from ondevice.bundle.reader import Bundle
from ondevice.converters import slices
from ondevice.converters.training.hotness import write_hotness
from ondevice.errors import BundleError, FlashReadError, OndeviceError, UnsupportedModelError, UsageError
from ondevice.flash.reader import FlashReader
from ondevice.measure.profiling import profile
from ondevice.model.tensor_file import TensorFile
from ondevice.runtime.models import shipped_folder
from ondevice.training import train_streams
from tests.support.bundles import copy_files, open_sound
from tests.support.command_line import Run
from tests.support.flash_files import flip_byte
from tests.support.made_up_predictors import add_predictors
from tests.support.made_up_streams import add_streams
from tests.support.small_models import MODELS, write_small


def written(bundle: Bundle, cuts: Sequence[int], folder: Path) -> list[Path]:
    """The bundle's slices between these cuts, each written."""
    ends = [0, *cuts, bundle.config.num_layers]
    return [
        api.write_slice(bundle.slice(*pair), folder / f"rank-{rank}")
        for rank, pair in enumerate(pairwise(ends))
    ]


def tensors(bundle: Bundle) -> dict[str, bytes]:
    """Bytes of every tensor that is read by name: resident ones and sidecars'."""
    found = {}
    for name in bundle._spans:
        span = bundle.tensor_span(name)
        file = bundle.file(RESIDENT) if span.file == RESIDENT else bundle.sidecar_file(span.file)
        with FlashReader([file], "buffered", 1) as reader:
            found[name] = TensorFile(bundle, reader, file, 0).read(span.offset, span.nbytes).tobytes()
    return found


@pytest.mark.fast("mixers", "experts", "every plain block", "latent")
@pytest.mark.parametrize("name", MODELS)
def test_a_written_slice_is_the_slice(name: str, tmp_path: Path) -> None:
    bundle = Bundle.open(write_small(tmp_path / "model", MODELS[name]))
    for path in written(bundle, (1, 2), tmp_path / "slices"):
        found, report = open_sound(path), api.verify(path)
        assert len(report.files) == len(found.manifest.files)
        first = found.config.part.first
        view = bundle.slice(first, first + found.config.num_layers)
        assert found.config == view.config
        assert found.manifest.part_of == model_digest(bundle.manifest)
        own = tensors(found)
        assert own == {it: data for it, data in tensors(view).items() if it in own}
        assert parse_manifest((path / MANIFEST).read_bytes()) == found.manifest
        for layer in range(found.config.num_layers):
            stored = path / neuron_file_name(layer)
            assert stored.samefile(bundle.path / neuron_file_name(first + layer))


@pytest.fixture
def trained(tmp_path: Path) -> Bundle:
    """A model of five layers with predictors, hotness and streams."""
    folder = write_small(tmp_path / "model", MODELS["dense"])
    bundle, values = Bundle.open(folder), np.random.default_rng(3).random((5, 96), np.float32)
    add_predictors(folder)
    write_hotness(bundle, [own / 2 for own in values], 100, folder)
    add_streams(folder, layers=3)
    return open_sound(folder)


def test_sidecars_go_along(trained: Bundle, tmp_path: Path) -> None:
    for path in written(trained, (1, 3, 4), tmp_path / "slices"):
        api.verify(path)
        found = open_sound(path)
        first = found.config.part.first
        view = trained.slice(first, first + found.config.num_layers)
        own = tensors(found)
        assert own == {it: data for it, data in tensors(view).items() if it in own}
        assert found.predictors is not None
        assert view.predictors is not None
        assert found.predictors.points == view.predictors.points
        shares = [own.tobytes() for own in found.frequencies() or ()]
        assert shares == [own.tobytes() for own in view.frequencies() or ()]
        assert found.streams is not None
        assert view.streams is not None
        layers, begins = found.streams.first_layer, found.streams.begins
        assert (layers, begins) == (view.streams.first_layer, view.streams.begins)
        assert begins == (first <= 2 < first + found.config.num_layers)


def test_a_slice_of_a_written_slice_is_that_of_the_model(trained: Bundle, tmp_path: Path) -> None:
    path = api.write_slice(trained.slice(1, 5), tmp_path / "slice")
    twice, direct = Bundle.open(path).slice(3, 5), trained.slice(3, 5)
    assert twice.config == direct.config
    assert twice.manifest.part_of == direct.manifest.part_of
    assert twice.streams == direct.streams or (
        twice.streams is not None and direct.streams is not None and twice.streams.begins is False
    )
    own = tensors(twice)
    assert own == {it: data for it, data in tensors(direct).items() if it in own}


def test_the_shipped_model_is_split_for_the_hosts_of_a_file(ondevice: Run, tmp_path: Path) -> None:
    """With its predictors, streams, hotness and draft layer."""
    hosts = [{"ssh": f"host{rank}", "ips": ["127.0.0.1"], "dram_budget": "4GB"} for rank in range(2)]
    (tmp_path / "hosts.json").write_text(json.dumps(hosts))
    shipped = shipped_folder() / "small-relu"
    options = ("--hosts", tmp_path / "hosts.json", "--output", tmp_path / "slices")
    found = ondevice("split", shipped, *options, "--json").json
    paths = [Path(rank["path"]) for rank in found["ranks"]]
    assert paths == [tmp_path / "slices" / f"rank-{rank}" for rank in range(2)]
    for path, rank in zip(paths, found["ranks"], strict=True):
        facts = ondevice("inspect", path, "--json").json["part"]
        assert (facts["first_layer"], facts["layers"]) == (rank["first_layer"], rank["layers"])
        assert facts["part_of"] == model_digest(Bundle.open(shipped).manifest)
        assert not Bundle.open(path).damaged
    assert ondevice("verify", paths[0]).code == 0
    alone = ondevice("generate", "-m", paths[1], "--prompt", "hi")
    assert alone.code == 3
    assert "a slice of a model: layers " in alone.err
    assert "It runs with the other layers' machines alone" in alone.err
    for opens in (api.load, profile, partial(train_streams, text="text")):
        with pytest.raises(UnsupportedModelError, match="is a slice of a model"):
            opens(paths[0])
    assert api.inspect(paths[0]).fits
    again = ondevice("split", shipped, *options)
    assert again.code == 2
    assert "exists" in again.err


def test_a_write_that_fails_leaves_nothing(trained: Bundle, tmp_path: Path) -> None:
    spoilt = Bundle.open(copy_files(trained.path, tmp_path / "spoilt"))
    flip_byte(spoilt.path / RESIDENT, spoilt.tensor_span("layers.4.attention.out").offset)
    with pytest.raises(FlashReadError):
        api.write_slice(spoilt.slice(1, 5), tmp_path / "slice")
    assert not any(tmp_path.glob("slice*"))
    # What a killed run leaves isn't taken for a slice, and is in the way of no other run.
    partial = tmp_path / "slice.partial"
    partial.mkdir()
    os.link(trained.path / neuron_file_name(3), partial / neuron_file_name(0))
    (partial / (RESIDENT + ".tmp")).write_bytes(b"half")
    open_sound(api.write_slice(trained.slice(1, 5), tmp_path / "slice"))
    assert not partial.exists()
    with pytest.raises(UsageError, match="exists"):
        api.write_slice(trained.slice(1, 5), tmp_path / "slice")
    with pytest.raises(UsageError, match="whole in one slice"):
        api.write_slice(trained, tmp_path / "all")


def test_files_that_no_link_reaches_need_room(
    trained: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part, output = trained.slice(1, 5), tmp_path / "slice"
    records = sum(part.file(neuron_file_name(layer)).nbytes for layer in range(4))
    resident = tensors_layout(resident_tensors(part.config, part.quant)).nbytes or 0
    free = resident + records - 1
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(free, 0, free))
    monkeypatch.setattr(slices, "_disk", lambda path: path.is_relative_to(trained.path))
    with pytest.raises(OndeviceError, match="make room"):
        api.write_slice(part, output)
    assert not any(tmp_path.glob("slice*"))
    monkeypatch.setattr(slices, "_disk", lambda path: 0)
    open_sound(api.write_slice(part, output))


@pytest.mark.fast("changes0-*", "changes4-*")
@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"first": 4}, "layers 4 to 6 of a model of 5"),
        ({"layers": 0}, r"part.layers is 0"),
        ({"embeds": True}, "has the model's first layer"),
        ({"widths": [96, 96]}, "widths of 2 layers"),
        ({"more": 1}, "more"),
    ],
)
def test_hostile_parts_are_refused(
    trained: Bundle, tmp_path: Path, changes: dict[str, object], match: str
) -> None:
    path = api.write_slice(trained.slice(1, 4), tmp_path / "slice")
    document = json.loads((path / MANIFEST).read_text())
    document["manifest"]["model"]["part"] |= changes
    _save(document, path)
    with pytest.raises((BundleError, UnsupportedModelError), match=match):
        Bundle.open(path)


def test_a_slice_without_its_model_is_refused(trained: Bundle, tmp_path: Path) -> None:
    path = api.write_slice(trained.slice(1, 4), tmp_path / "slice")
    document = json.loads((path / MANIFEST).read_text())
    document["manifest"]["part_of"] = "0" * 63
    _save(document, path)
    with pytest.raises(BundleError, match=r"part_of is '0+'; it must be 64"):
        Bundle.open(path)


def _save(document: dict[str, object], folder: Path) -> None:
    canonical = json.dumps(document["manifest"], sort_keys=True, separators=(",", ":"))
    document["sha256"] = hashlib.sha256(canonical.encode("ascii")).hexdigest()
    (folder / MANIFEST).write_text(json.dumps(document))
