"""A conversion with a text: it has no name before it is trained, and resumed it has the bytes of one run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ondevice.api import verify
from ondevice.bundle.reader import Bundle
from ondevice.converters.convert import convert
from ondevice.errors import UsageError
from tests.converters.test_resume import StopError, folder_bytes
from tests.support.bundles import copy_files, write_chat_checkpoint
from tests.support.models import write_checkpoint
from tests.support.trained_conversion import convert_and_train

KILLER = "tests.support.kill_while_training"
PREDICTORS, ORDER = (
    "ondevice.converters.training.predictors.train",
    "ondevice.converters.training.neuron_order",
)
STAGES = [
    (f"{ORDER}.nearest_neighbour_chain", 2),
    (f"{PREDICTORS}.fit_layer", 2),
    ("ondevice.training.measured_points", 1),
]
"""Functions, and for which of their calls the training ends: in the middle of three of its stages."""
MORE_STAGES = [
    ("ondevice.converters.training.activations.record_activations", 1),
    (f"{ORDER}.nearest_neighbour_chain", 1),
    (f"{PREDICTORS}.firing_frequencies", 1),
    (f"{PREDICTORS}.fit_layer", 1),
    (f"{PREDICTORS}.write_predictors", 1),
]
TEXT = (
    (np.random.default_rng(2).integers(97, 122, 1200).astype(np.uint8)).tobytes().decode().replace("e", " ")
)
OTHER_TEXT = TEXT[::-1]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("training") / "checkpoint"
    return write_chat_checkpoint(folder, hidden_act="relu", num_hidden_layers=2, intermediate_size=256)


@pytest.fixture(scope="module")
def expected(source: Path) -> dict[str, bytes]:
    """The files of a conversion that nothing interrupted."""
    return folder_bytes(convert_and_train(source, source.with_name("expected"), TEXT))


def stopped(
    monkeypatch: pytest.MonkeyPatch, source: Path, output: Path, stage: str, calls: int, quant: str = "q4"
) -> None:
    """A conversion that ends where `stage` is called for the time `calls`."""
    module, _, name = stage.rpartition(".")
    real, left = getattr(sys.modules[module], name), [calls]

    def stop(*arguments: object, **options: object) -> object:
        left[0] -= 1
        if not left[0]:
            raise StopError
        return real(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(stage, stop)
        with pytest.raises(StopError):
            convert_and_train(source, output, TEXT, quant)


@pytest.mark.fast("*fit_layer-2")
@pytest.mark.parametrize(
    ("stage", "calls"), [*STAGES, *(pytest.param(*stage, marks=pytest.mark.slow) for stage in MORE_STAGES)]
)
def test_an_interrupted_training_resumes_to_the_same_bytes(
    source: Path,
    expected: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stage: str,
    calls: int,
) -> None:
    stopped(monkeypatch, source, tmp_path / "b", stage, calls)
    assert [path.name for path in tmp_path.iterdir()] == ["b.partial"]
    assert folder_bytes(convert_and_train(source, tmp_path / "b", TEXT, resume=True)) == expected
    assert [path.name for path in tmp_path.iterdir()] == ["b"]
    verify(tmp_path / "b")


def changed(path: Path) -> tuple[int, int, int]:
    """What no write leaves as it is."""
    status = path.stat()
    return status.st_ino, status.st_mtime_ns, status.st_ctime_ns


def test_a_finished_bundle_stays_as_it_is(source: Path, expected: dict[str, bytes], tmp_path: Path) -> None:
    output = copy_files(source.with_name("expected"), tmp_path / "b")
    before = {path: changed(path) for path in [output, *output.iterdir()]}
    assert convert_and_train(source, output, TEXT, resume=True) == output
    assert convert(source, output, resume=True) == output
    assert {path: changed(path) for path in [output, *output.iterdir()]} == before
    with pytest.raises(UsageError, match="not with this text; `ondevice train predictors --model"):
        convert_and_train(source, output, OTHER_TEXT, resume=True)
    assert folder_bytes(output) == expected


@pytest.mark.slow
def test_what_was_converted_serves_another_text_or_none(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At more than 4 bits, where no text has rounded the weights."""
    stopped(monkeypatch, source, tmp_path / "b", *STAGES[1], "q8")
    written = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "b.partial").glob("neurons*")}
    output = convert(source, tmp_path / "b", "q8", resume=True)
    assert Bundle.open(output).predictors is None
    assert {path.name: path.stat().st_mtime_ns for path in output.glob("neurons*")} == written
    with pytest.raises(UsageError, match="ondevice train predictors --model"):
        convert_and_train(source, output, TEXT, "q8", resume=True)
    # As a kill after the last renaming leaves it, and one while an older bundle made room.
    output.rename(tmp_path / "b.partial")
    expected = folder_bytes(convert_and_train(source, tmp_path / "b", TEXT, "q8", force=True))
    convert(source, tmp_path / "b.partial", "q8")
    assert folder_bytes(convert_and_train(source, tmp_path / "b", TEXT, "q8", resume=True)) == expected
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_a_users_file_beside_what_was_trained_stays(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped(monkeypatch, source, tmp_path / "b", *STAGES[2])
    thesis = tmp_path / "b.partial" / "b" / "thesis.txt"
    thesis.write_text("years of work")
    for options in ({"resume": True}, {"force": True}):
        with pytest.raises(UsageError, match=r"thesis\.txt isn't part of a bundle"):
            convert_and_train(source, tmp_path / "b", TEXT, **options)
    assert thesis.exists()


@pytest.mark.parametrize("hidden_act", ["relu", "silu"])
def test_a_text_for_a_model_without_tokenizer_is_refused_at_once(tmp_path: Path, hidden_act: str) -> None:
    source = write_checkpoint(tmp_path / "source", hidden_act=hidden_act)
    with pytest.raises(UsageError, match=r"no tokenizer.* without text"):
        convert_and_train(source, tmp_path / "b", TEXT)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_too_short_a_text_is_refused_at_once(source: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="training takes 512"):
        convert_and_train(source, tmp_path / "b", "a few words")
    assert not any(tmp_path.iterdir())


def test_a_long_folder_name_identifies_a_checkpoint_too(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / ("long" * 30), num_hidden_layers=1)
    output = convert(source, tmp_path / "b")
    assert Bundle.open(output).manifest.provenance.source == "long" * 30
    assert convert(source, output, resume=True) == output


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_before_any_step_it_resumes_to_the_same_bytes(source: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text(TEXT)
    (tmp_path / "work").mkdir()
    command = [sys.executable, "-m", KILLER, str(source), str(tmp_path / "text"), str(tmp_path / "work"), "7"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["killed"] >= 15
    assert report["absent"] >= 15
    assert (report["different"], report["left"]) == (0, 0)
