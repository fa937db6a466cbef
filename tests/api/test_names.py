"""Names that a system doesn't allow, that aren't text, or of another type: typed errors everywhere."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ondevice
from ondevice.converters.progress import Progress
from ondevice.errors import CheckpointError, ModelNotFoundError, UsageError
from tests.converters.test_resume import StopError, folder_bytes
from tests.support.command_line import command
from tests.support.models import write_checkpoint

WRONG = [
    "x" * 300,
    "/" + "x" * 5000,
    "a/" + "x" * 300,
    "x\0y",
    "x\ud800",
    "~nobody-at-all/x",
    Path("x" * 300),
]
NOT_UTF_8 = os.fsdecode(b"name-\xff")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("names") / "source", num_hidden_layers=1)


@pytest.mark.parametrize("name", WRONG, ids=range(len(WRONG)))
@pytest.mark.parametrize("use", [ondevice.load, ondevice.inspect, ondevice.verify])
def test_a_model_that_cannot_be_there_is_not_found(use: Callable[..., object], name: Any) -> None:
    with pytest.raises(ModelNotFoundError) as error:
        use(name)
    assert error.value.exit_code == 3


@pytest.mark.parametrize("named", [True, False], ids=["an-output", "no-output"])
@pytest.mark.parametrize("name", WRONG, ids=range(len(WRONG)))
def test_nor_is_a_checkpoint(tmp_path: Path, name: Any, named: bool) -> None:
    with pytest.raises(ModelNotFoundError):
        ondevice.convert(name, tmp_path / "b" if named else None, offline=True)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["x" * 300, "x" * 250, "x/" * 3000, "x\0y", "x\ud800"])
def test_an_output_that_cannot_be_made_is_refused(source: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=r"can't be the name of a folder.* choose another output"):
        ondevice.convert(source, tmp_path / name)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("wrong", [5, None, b"x", ["x"]])
def test_a_name_of_another_type_is_a_usage_error(source: Path, tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(UsageError, match="a checkpoint is a path, a repository id or an alias, not"):
        ondevice.convert(wrong, tmp_path / "b")
    with pytest.raises(UsageError, match="quantisation"):
        ondevice.convert(source, tmp_path / "b", wrong)
    # None is the place, or the model, that is taken if nobody names one.
    if wrong is not None:
        with pytest.raises(UsageError, match="the output is a path, not"):
            ondevice.convert(source, wrong)
        with pytest.raises(UsageError, match="a model is a path, a name or an alias, not"):
            ondevice.verify(wrong)
    assert not any(tmp_path.iterdir())


def test_no_name_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="empty"):
        ondevice.convert("", tmp_path / "b")


def with_shard(folder: Path, name: str) -> Path:
    """A checkpoint in two shards, the first of another name; of which the file is made if it can be."""
    source = write_checkpoint(folder, num_hidden_layers=3, shards=2)
    index, first = source / "model.safetensors.index.json", "model-00001-of-00002.safetensors"
    content = json.loads(index.read_text())
    content["weight_map"] = {k: name if v == first else v for k, v in content["weight_map"].items()}
    index.write_text(json.dumps(content))
    if len(name) < 256:
        (source / first).rename(source / name)
    return source


@pytest.mark.parametrize("name", ["x" * 300, "x" * 5000])
def test_a_shard_with_a_name_too_long_is_refused(tmp_path: Path, name: str) -> None:
    source = with_shard(tmp_path / "source", f"{name}.safetensors")
    with pytest.raises(CheckpointError, match="is the download complete"):
        ondevice.convert(source, tmp_path / "b")


def test_a_shard_whose_name_is_no_text_is_refused(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", num_hidden_layers=3, shards=2)
    index = source / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-00001", "model-\\ud800"))
    with pytest.raises(CheckpointError, match="has no model-"):
        ondevice.convert(source, tmp_path / "b")


@pytest.mark.skipif(os.name != "posix" or os.uname().sysname == "Darwin", reason="names are UTF-8 there")
def test_a_name_that_is_not_utf_8_is_a_name(tmp_path: Path) -> None:
    """Of a shard, resumed too, of a checkpoint and of a bundle; written to stdout byte for byte."""
    source, output = with_shard(tmp_path / NOT_UTF_8, f"{NOT_UTF_8}.safetensors"), tmp_path / f"b{NOT_UTF_8}"

    def stop(progress: Progress) -> None:
        if progress.step == "neurons-00002.safetensors":
            raise StopError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ondevice.converters.progress.REPORT_SECONDS", 0.0)
        with pytest.raises(StopError):
            ondevice.convert(source, tmp_path / "b", on_progress=stop)
    resumed = ondevice.convert(source, tmp_path / "b", resume=True)
    environment = os.environ | {"PYTHONIOENCODING": "utf-8:strict"}
    for arguments in (("convert", source, "-o", output), ("inspect", "-m", output)):
        done = subprocess.run(command(*arguments), capture_output=True, check=False, env=environment)
        assert done.returncode == 0, done.stderr
        if arguments[0] == "convert":
            assert done.stdout == os.fsencode(output) + b"\n"
    assert ondevice.verify(output).checksums > 0
    assert folder_bytes(output) == folder_bytes(resumed)
