"""Files that are endless, no files, cut while they are read, or named as none can be: each has its error."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from ondevice.api import Model, load
from ondevice.bundle.layout import RESIDENT
from ondevice.bundle.reader import Bundle
from ondevice.bundle.verify import verify
from ondevice.commands import options
from ondevice.converters.convert import convert
from ondevice.errors import (
    BundleError,
    CheckpointError,
    FlashReadError,
    ModelNotFoundError,
    OndeviceError,
    UsageError,
)
from ondevice.kernels import _native
from ondevice.model.tensor_file import TensorFile
from ondevice.session import MAX_FILE_BYTES
from tests.golden.build import GOLDEN
from tests.malformed.rules import put
from tests.support.bundles import copy_files, write_chat_checkpoint
from tests.support.command_line import Run
from tests.support.models import write_checkpoint

LONG = "m" * 5000
NOT_UTF8 = os.fsdecode(b"mod\xffel")


@pytest.mark.parametrize("keep", [0, 100, 5000, -1])
def test_a_resident_file_that_is_cut_while_it_is_loaded(
    chat_bundle: Path, tmp_path: Path, keep: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copy_files(chat_bundle, tmp_path / "copy")
    size = (folder / RESIDENT).stat().st_size
    begin = TensorFile.__init__

    def cut(file: TensorFile, *arguments: Any) -> None:
        os.truncate(folder / RESIDENT, keep % size)
        begin(file, *arguments)

    monkeypatch.setattr(TensorFile, "__init__", cut)
    with pytest.raises(FlashReadError, match=f"{RESIDENT}.*has shrunk to {keep % size} bytes"):
        load(folder, threads=1)
    with pytest.raises(BundleError, match=f"{RESIDENT} has {keep % size} bytes on disk"):
        Bundle.open(folder)


@pytest.mark.parametrize("name", [LONG, f"/tmp/{LONG}", "/".join(["m"] * 3000), NOT_UTF8, "~nobody-here/m"])
def test_a_name_that_no_model_has(ondevice: Run, name: str) -> None:
    for command in (
        ["verify", "--model", name],
        ["inspect", "-m", name],
        ["generate", "-m", name, "-p", "a"],
    ):
        result = ondevice(*command)
        assert result.code == ModelNotFoundError.exit_code, result.err
        assert result.err.startswith(("error: no ", "error: nothing can be found by the name "))
        assert len(result.err) < 7000
    with pytest.raises(ModelNotFoundError):
        load(name)
    with pytest.raises(ModelNotFoundError):
        load(Path(name))


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/urandom", "/dev/full"])
def test_an_endless_file_in_the_place_of_a_small_one_is_refused(
    tmp_path: Path, device: str, ondevice: Run, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match=r"is not (UTF-8 )?text"):
        options.read_text(device)
    with pytest.raises(UsageError, match="there is no saved session"):
        model.session().load(device)
    with pytest.raises(CheckpointError, match="neither a folder nor a regular file"):
        convert(device, tmp_path / "output")
    for name in ("config.json", "generation_config.json", "tokenizer_config.json", "chat_template.jinja"):
        checkpoint = write_chat_checkpoint(tmp_path / name.split(".")[0])
        (checkpoint / name).unlink(missing_ok=True)
        (checkpoint / name).symlink_to(device)
        with pytest.raises(CheckpointError, match=name):
            convert(checkpoint, tmp_path / "output")
    monkeypatch.setenv("ONDEVICE_CONFIG", device)
    result = ondevice("inspect")
    assert (result.code, "settings file" in result.err) == (UsageError.exit_code, True)
    sidecars = ("hotness", "streams", "predictors", "expert_costs")
    for name in ("bundle.json", *(f"{sidecar}.json" for sidecar in sidecars)):
        bundle = Path(shutil.copytree(GOLDEN, tmp_path / "bundle", dirs_exist_ok=True))
        (bundle / name).unlink(missing_ok=True)
        (bundle / name).symlink_to(device)
        with pytest.raises(BundleError, match=f"{name} is a link that leaves the bundle"):
            verify(bundle, _native.crc32c)
        (bundle / name).unlink()


def test_a_pipe_in_the_place_of_a_checkpoint_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.bin")
    for source in (tmp_path / "model.bin", tmp_path):
        with pytest.raises(CheckpointError):
            convert(source, tmp_path.parent / "output")


def test_an_endless_text_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "MAX_TEXT_CHARS", 100_000)
    (tmp_path / "text").write_text("a" * 100_000)
    assert len(options.read_text(str(tmp_path / "text"))) == 100_000
    os.truncate(tmp_path / "text", 0)
    (tmp_path / "text").write_text("a" * 1_000_000)
    with pytest.raises(UsageError, match="more than 100000 characters"):
        options.read_text(str(tmp_path / "text"))


def test_a_configuration_has_a_size(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "source")
    text = (checkpoint / "config.json").read_text()
    for name in ("config.json", "generation_config.json"):
        (checkpoint / name).write_text(text + " " * (2 << 20))
        with pytest.raises(CheckpointError, match=f"{name} is larger than 1048576 bytes"):
            convert(checkpoint, tmp_path / "output")
        (checkpoint / name).write_text(text)


def test_what_a_session_saves_it_loads_and_no_more(model: Model, tmp_path: Path) -> None:
    session = model.session()
    path = tmp_path / "talk.json"
    session.save(path)
    content = json.loads(path.read_text())
    content["messages"] = [{"role": "user", "content": "a" * (MAX_FILE_BYTES - 1000)}]
    path.write_text(json.dumps(content))
    session.load(path)
    session.save(path)
    content["messages"][0]["content"] += "a" * 1000
    path.write_text(json.dumps(content))
    before = path.read_bytes()
    with pytest.raises(UsageError, match=f"more than {MAX_FILE_BYTES} bytes"):
        session.load(path)
    session._messages = content["messages"]
    with pytest.raises(OndeviceError, match=f"at most {MAX_FILE_BYTES}"):
        session.save(path)
    assert path.read_bytes() == before


def test_verify_mentions_what_nothing_refers_to(tmp_path: Path, ondevice: Run) -> None:
    bundle = Path(shutil.copytree(GOLDEN, tmp_path / "bundle"))
    assert verify(bundle, _native.crc32c).unused == ()
    for name in ("streams", "hotness"):
        (bundle / f"{name}.safetensors").write_bytes(b"x")
    assert verify(bundle, _native.crc32c).unused == ("hotness.safetensors", "streams.safetensors")
    result = ondevice("verify", "--model", bundle)
    assert result.code == 0
    assert "not used, and not checked: hotness.safetensors, streams.safetensors" in result.err


@pytest.mark.parametrize(("key", "value", "message"), [
    ("num_records", 97, r"manifest\.neurons\.num_records is 97; it must be 96"),
    ("part_bytes", [64, 64], r"manifest\.neurons\.part_bytes is \[64, 64\]; it must be \[64, 128\]"),
    ("part_bytes", list(range(99)), r"manifest\.neurons\.part_bytes is a list of 99; it must be \[64, 128\]"),
    ("more", 1, r"manifest\.neurons has an unknown key 'more'"),
])  # fmt: skip
def test_a_wrong_layout_names_the_field(tmp_path: Path, key: str, value: object, message: str) -> None:
    bundle = Path(shutil.copytree(GOLDEN, tmp_path / "bundle"))
    put("neurons", key, value=value)(bundle)
    with pytest.raises(BundleError, match=message):
        Bundle.open(bundle)
