"""Damaged predictors, streams, hotness: what needs them is refused, nothing else is stopped."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ondevice.api import load, verify
from ondevice.bundle.hotness import HOTNESS, HOTNESS_MANIFEST
from ondevice.bundle.predictors import PREDICTORS, PREDICTORS_MANIFEST
from ondevice.bundle.reader import Bundle
from ondevice.bundle.streams import STREAMS, STREAMS_MANIFEST
from ondevice.errors import BundleError
from ondevice.runtime.models import shipped_folder
from ondevice.training import train_predictors
from tests.support.bundles import convert_bundle, copy_files, made_up_pieces, write_chat_checkpoint
from tests.support.command_line import Run
from tests.support.flash_files import flip_byte
from tests.support.made_up_streams import add_streams

Damage = Callable[[Path, str, str], str]
"""(folder, JSON file, file of tensors) -> the file that is to be named."""


def cut_short(folder: Path, manifest: str, tensors: str) -> str:
    os.truncate(folder / tensors, (folder / tensors).stat().st_size // 2)
    return tensors


def missing(folder: Path, manifest: str, tensors: str) -> str:
    (folder / tensors).unlink()
    return tensors


def flipped(folder: Path, manifest: str, tensors: str) -> str:
    """Found when it is read only."""
    flip_byte(folder / tensors, (folder / tensors).stat().st_size - 3)
    return tensors


def edited(folder: Path, manifest: str, tensors: str) -> str:
    text = (folder / manifest).read_text()
    (folder / manifest).write_text(text.replace('"measured_tokens": ', '"measured_tokens": 1'))
    return manifest


def extended(folder: Path, manifest: str, tensors: str) -> str:
    with (folder / manifest).open("a") as file:
        file.write("}")
    return manifest


def emptied(folder: Path, manifest: str, tensors: str) -> str:
    (folder / manifest).write_bytes(b"")
    return manifest


def a_folder(folder: Path, manifest: str, tensors: str) -> str:
    (folder / manifest).unlink()
    (folder / manifest).mkdir()
    return manifest


def said(folder: Path, **options: Any) -> str:
    with load(folder, **options) as model:
        return model.generate("I'm looking for", max_tokens=12).text


def assert_refused(folder: Path, name: str, remedy: str, **options: Any) -> None:
    """Both who runs a mode that needs a file and who verifies are told which, and how it is made anew."""
    for refused in (lambda: load(folder, **options), lambda: verify(folder)):
        with pytest.raises(BundleError) as caught:
            refused()
        assert name in str(caught.value)
        assert remedy in str(caught.value)
        assert "Errno" not in str(caught.value)
        assert "convert" not in str(caught.value)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """The shipped model: predictors, streams and hotness lie beside it."""
    return copy_files(shipped_folder() / "small-relu", tmp_path / "small")


def assert_unaffected(
    folder: Path, text: str, caplog: pytest.LogCaptureFixture, *options: dict[str, Any]
) -> None:
    """These write the text and say nothing; what `auto` chooses writes it, too."""
    for chosen in options:
        assert said(folder, **chosen) == text
    assert caplog.text == ""
    assert said(folder) == text


@pytest.fixture(scope="module")
def text() -> str:
    return said(shipped_folder() / "small-relu")


@pytest.mark.fast("cut_short", "flipped")
@pytest.mark.parametrize("damage", [cut_short, missing, edited, extended, emptied, a_folder, flipped])
def test_damaged_predictors_stop_the_mode_that_needs_them(
    copied: Path, text: str, damage: Damage, caplog: pytest.LogCaptureFixture
) -> None:
    name = damage(copied, PREDICTORS_MANIFEST, PREDICTORS)
    assert_unaffected(copied, text, caplog, {"sparsity": "dense"}, {"sparsity": "exact"})
    # `auto` never chooses them, so their bytes aren't read.
    assert (name in caplog.text) == (damage is not flipped)
    remedy = f"`ondevice train predictors --model {copied} --text FILE` makes both files anew"
    assert_refused(copied, name, remedy, sparsity="predicted")


@pytest.mark.fast("flipped")
@pytest.mark.parametrize("damage", [cut_short, missing, edited, extended, flipped])
def test_damaged_streams_stop_the_drafting_that_needs_them(
    copied: Path, text: str, damage: Damage, caplog: pytest.LogCaptureFixture
) -> None:
    name = damage(copied, STREAMS_MANIFEST, STREAMS)
    assert_unaffected(copied, text, caplog, {"speculation": "off"}, {"speculation": "lookup"})
    assert name in caplog.text
    remedy = f"`ondevice train streams --model {copied} --text FILE --mode lossless` makes both files anew"
    assert_refused(copied, name, remedy, speculation="streams")


@pytest.mark.fast("flipped")
@pytest.mark.parametrize("damage", [cut_short, missing, edited, extended, emptied, flipped])
def test_damaged_streams_that_are_part_of_the_model_stop_it(
    chat_bundle: Path, tmp_path: Path, damage: Damage
) -> None:
    copied = copy_files(chat_bundle, tmp_path / "shared")
    add_streams(copied, mode="shared")
    name = damage(copied, STREAMS_MANIFEST, STREAMS)
    remedy = f"Delete {STREAMS_MANIFEST}, which leaves the model that they were trained for"
    for speculation in ("off", "auto", "lookup"):
        assert_refused(copied, name, remedy, speculation=speculation)
    (copied / STREAMS_MANIFEST).unlink()
    assert said(copied) == said(chat_bundle)


def test_streams_that_do_not_say_whose_they_are_stop_the_model(copied: Path) -> None:
    """A text of another model would be worse than none."""
    emptied(copied, STREAMS_MANIFEST, STREAMS)
    assert_refused(copied, STREAMS_MANIFEST, "may be part of the model", speculation="off")


@pytest.mark.fast("flipped")
@pytest.mark.parametrize("damage", [cut_short, missing, extended, emptied, flipped])
def test_damaged_hotness_stops_nothing(
    copied: Path, text: str, damage: Damage, caplog: pytest.LogCaptureFixture
) -> None:
    name = damage(copied, HOTNESS_MANIFEST, HOTNESS)
    assert said(copied, sparsity="dense") == text
    assert caplog.text == ""
    assert said(copied, sparsity="exact") == text
    assert name in caplog.text
    with pytest.raises(BundleError, match=f"{name}.*every mode runs without"):
        verify(copied)


def test_a_damaged_bundle_is_told_before_what_was_added_to_it(copied: Path) -> None:
    missing(copied, PREDICTORS_MANIFEST, PREDICTORS)
    flip_byte(copied / "neurons-00000.safetensors", 9000)
    with pytest.raises(BundleError, match=r"neurons-00000.*convert the model again"):
        verify(copied)


def test_inspect_says_what_is_damaged(ondevice: Run, copied: Path) -> None:
    for damage, names in (
        (missing, (PREDICTORS_MANIFEST, PREDICTORS)),
        (edited, (STREAMS_MANIFEST, STREAMS)),
        (cut_short, (HOTNESS_MANIFEST, HOTNESS)),
    ):
        damage(copied, *names)
    shown = ondevice("inspect", "-m", copied, "--json").json
    assert list(shown["damaged"]) == ["predictors", "streams", "hotness"]
    assert "predicted" not in shown["sparsity_modes"]
    text = ondevice("inspect", "-m", copied).out
    assert f"predicted no: {PREDICTORS} is missing" in text
    assert f"streams: {STREAMS_MANIFEST} doesn't match" in text
    assert f"hotness: {HOTNESS} isn't" in text


@pytest.mark.slow
def test_the_remedy_mends(tmp_path: Path) -> None:
    source = write_chat_checkpoint(tmp_path / "checkpoint", hidden_act="relu", num_hidden_layers=1)
    folder = convert_bundle(source, tmp_path / "bundle")
    train_predictors(folder, pieces=made_up_pieces())
    emptied(folder, PREDICTORS_MANIFEST, PREDICTORS)
    flip_byte(folder / HOTNESS, 5000)
    assert set(Bundle.open(folder).damaged) == {"predictors", "hotness"}
    train_predictors(folder, pieces=made_up_pieces())
    assert Bundle.open(folder).damaged == {}
    verify(folder)
