"""BundleWriter: the same bytes from any interruption, nothing half-written loadable, misuse refused."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ondevice.bundle.layout import neuron_file_name
from ondevice.bundle.manifest import TokenizerInfo
from ondevice.bundle.reader import Bundle
from ondevice.bundle.verify import verify
from ondevice.bundle.writer import BundleWriter
from ondevice.config import QuantConfig
from ondevice.errors import BundleError, ModelNotFoundError, OndeviceError, UsageError
from ondevice.kernels._native import crc32c
from tests.golden.build import PROVENANCE, Recipe, fill, records, tensors

RECIPE = Recipe(
    tokenizer=TokenizerInfo("tokenizers", chat_template="chat_template.jinja"),
    blobs={"tokenizer.json": b"{}", "chat_template.jinja": b"{{ x }}"},
)


class Killed(BaseException):
    """Stands for SIGKILL: nothing in the project catches it."""


def open_writer(folder: Path, recipe: Recipe = RECIPE, **options: Any) -> BundleWriter:
    options.setdefault("fingerprint", recipe.fingerprint)
    return BundleWriter(folder, recipe.config, recipe.quant, crc32c, checkpoint_bytes=1024, **options)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    fill(open_writer(folder), RECIPE)
    return content(folder)


class Machine:
    """Counts the steps of a run (a sync, before a rename, after one) and ends it at one of them.

    `lose_power` then takes away what was written to each file after its last sync.
    """

    def __init__(self, folder: Path, killed_at: int = 0) -> None:
        self.steps = 0
        self._folder = folder
        self._killed_at = killed_at
        self._durable: dict[int, bytes] = {}

    @contextmanager
    def running(self) -> Iterator[None]:
        rename = os.replace

        def replace(source: Path, target: Path) -> None:
            self._step()
            rename(source, target)
            self._step()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", self._sync)
            patch.setattr(os, "replace", replace)
            yield

    def lose_power(self) -> None:
        for path in self._folder.iterdir():
            path.write_bytes(self._durable.get(path.stat().st_ino, b""))

    def _sync(self, descriptor: int) -> None:
        self._step()
        synced = os.fstat(descriptor).st_ino
        for path in self._folder.iterdir():
            if path.stat().st_ino == synced:
                self._durable[synced] = path.read_bytes()

    def _step(self) -> None:
        self.steps += 1
        if self.steps == self._killed_at:
            raise Killed


@pytest.mark.parametrize(
    ("stride", "power_lost"),
    [(5, True), *(pytest.param(1, lost, marks=pytest.mark.slow) for lost in (False, True))],
)
def test_kill_at_every_step_resumes_to_the_same_bytes(
    stride: int, power_lost: bool, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    """stride: of how many steps one is tried."""
    undisturbed = Machine(tmp_path / "undisturbed")
    with undisturbed.running():
        fill(open_writer(tmp_path / "undisturbed"), RECIPE)
    assert undisturbed.steps > 60
    for step in range(1, undisturbed.steps + 1, stride):
        folder = tmp_path / str(step)
        machine = Machine(folder, step)
        with machine.running(), pytest.raises(Killed):
            fill(open_writer(folder), RECIPE)
        if power_lost:
            machine.lose_power()
        if (folder / "bundle.json").exists():
            verify(folder, crc32c)
        else:
            with pytest.raises(ModelNotFoundError):
                Bundle.open(folder)
        with Machine(folder).running():
            fill(open_writer(folder), RECIPE)
        assert content(folder) == whole


def test_a_checkpoint_is_on_the_disk_before_it_is_claimed(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    with machine.running(), pytest.raises(ValueError, match="got 5 tensors"):
        open_writer(tmp_path).write_resident(list(tensors(RECIPE))[:5])
    machine.lose_power()
    assert open_writer(tmp_path).resident_finished() >= 4


def test_two_kills_in_the_resident_file(tmp_path: Path, whole: dict[str, bytes]) -> None:
    def cut(iterator: Iterator[Any], count: int) -> Iterator[Any]:
        for _ in range(count):
            yield next(iterator)
        raise Killed

    writer = open_writer(tmp_path)
    with pytest.raises(Killed):
        writer.write_resident(cut(tensors(RECIPE), 3))
    done = writer.resident_finished()
    assert 0 < done <= 3
    with pytest.raises(Killed):
        writer.write_resident(cut(tensors(RECIPE, done), 5))
    writer = open_writer(tmp_path)
    assert done < writer.resident_finished() <= done + 5
    fill(writer, RECIPE)
    assert content(tmp_path) == whole


def test_finished_files_are_not_asked_for_again(
    tmp_path: Path, whole: dict[str, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    writer = open_writer(tmp_path)
    writer.write_records(neuron_file_name(0), records(RECIPE, 0))
    writer.write_resident(tensors(RECIPE))
    writer = open_writer(tmp_path)
    assert writer.finished("neurons-00000.safetensors")
    assert not writer.finished("neurons-00001.safetensors")

    def never() -> Iterator[Any]:
        raise AssertionError("a finished file was made again")
        yield

    writer.write_records(neuron_file_name(0), never())
    writer.write_resident(never())
    fill(writer, RECIPE)
    assert content(tmp_path) == whole
    assert not caplog.records


@pytest.mark.parametrize("change", ["flip", "cut", "gone"])
def test_a_finished_file_that_changed_is_made_again(
    change: str, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    open_writer(tmp_path).write_records(neuron_file_name(0), records(RECIPE, 0))
    path = tmp_path / "neurons-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[6000] ^= 4
    path.write_bytes(data if change == "flip" else data[:-1])
    if change == "gone":
        path.unlink()
    writer = open_writer(tmp_path)
    assert not writer.finished(path.name)
    fill(writer, RECIPE)
    assert content(tmp_path) == whole


@pytest.mark.parametrize(
    "damage", [b"", b"{", b"[]", b'{"origin": 1, "sources": {}, "files": {}, "resident": null}']
)
def test_a_damaged_state_starts_again(damage: bytes, tmp_path: Path, whole: dict[str, bytes]) -> None:
    writer = open_writer(tmp_path)
    writer.write_records(neuron_file_name(0), records(RECIPE, 0))
    (tmp_path / "resume.json").write_bytes(damage)
    (tmp_path / "bundle.json").write_bytes(b"left over")
    writer = open_writer(tmp_path)
    assert not (tmp_path / "bundle.json").exists()
    assert not writer.finished("neurons-00000.safetensors")
    fill(writer, RECIPE)
    assert content(tmp_path) == whole


def test_what_follows_a_checkpoint_is_dropped(tmp_path: Path, whole: dict[str, bytes]) -> None:
    with pytest.raises(ValueError, match="got 5 tensors"):
        open_writer(tmp_path).write_resident(list(tensors(RECIPE))[:5])
    with (tmp_path / "resident.safetensors.tmp").open("ab") as file:
        file.write(bytes(30_000))
    writer = open_writer(tmp_path)
    assert writer.resident_finished() >= 4
    fill(writer, RECIPE)
    assert content(tmp_path) == whole


def test_a_resident_prefix_that_changed_is_made_again(tmp_path: Path, whole: dict[str, bytes]) -> None:
    some = dict(list(tensors(RECIPE))[:3])
    with pytest.raises(ValueError, match="got 3 tensors"):
        open_writer(tmp_path).write_resident(some.items())
    with (tmp_path / "resident.safetensors.tmp").open("r+b") as file:
        file.seek(4100)
        file.write(b"\xff\xff")
    writer = open_writer(tmp_path)
    assert writer.resident_finished() == 0
    fill(writer, RECIPE)
    assert content(tmp_path) == whole


@pytest.mark.parametrize("finished", [False, True])
def test_another_source_is_refused(finished: bool, tmp_path: Path) -> None:
    writer = open_writer(tmp_path)
    if finished:
        fill(writer, RECIPE)
    else:
        writer.write_records(neuron_file_name(0), records(RECIPE, 0))
    before = content(tmp_path)
    for recipe in (Recipe(fingerprint="another"), Recipe(quant=QuantConfig(8))):
        with pytest.raises(UsageError, match="another source or with other options"):
            open_writer(tmp_path, recipe)
    assert content(tmp_path) == before


def test_finish_names_what_is_missing(tmp_path: Path) -> None:
    writer = open_writer(tmp_path)
    with pytest.raises(ValueError, match=r"resident.safetensors isn't written yet \(8 files are missing\)"):
        writer.finish(RECIPE.tokenizer, {}, PROVENANCE)
    assert not (tmp_path / "bundle.json").exists()


def test_finish_refuses_what_no_manifest_may_hold(tmp_path: Path) -> None:
    writer = open_writer(tmp_path)
    fill(writer, RECIPE)
    (tmp_path / "bundle.json").unlink()
    with pytest.raises(BundleError, match=r"generation.temperature is 101"):
        writer.finish(RECIPE.tokenizer, {"temperature": 101.0}, PROVENANCE)
    assert not (tmp_path / "bundle.json").exists()


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([np.zeros((95, 192), np.uint8)], "got 22336 bytes of 22528"),
        ([np.zeros((97, 192), np.uint8)], "got 22720 bytes of 22528"),
        ([np.zeros((96, 191), np.uint8)], "isn't uint8"),
        ([np.zeros((96, 192), np.int8)], "isn't uint8"),
        ([np.ones((96, 192), np.uint8)], "padding isn't zero"),
    ],
)
def test_wrong_records_are_refused(chunks: list[np.ndarray], message: str, tmp_path: Path) -> None:
    writer = open_writer(tmp_path)
    with pytest.raises(ValueError, match=message):
        writer.write_records(neuron_file_name(1), chunks)
    assert not writer.finished("neurons-00001.safetensors")
    assert not (tmp_path / "neurons-00001.safetensors").exists()


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("final_norm.weight", np.ones(64, np.float32), "out of order at position 0"),
        ("layers.0.attention_norm.weight", np.ones(63, np.float32), "got 252 bytes"),
        ("layers.0.attention_norm.weight", np.ones(64, np.float64), "got float64"),
    ],
)
def test_wrong_tensors_are_refused(name: str, tensor: np.ndarray, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        open_writer(tmp_path).write_resident([(name, [tensor])])
    assert not (tmp_path / "resident.safetensors").exists()


@pytest.mark.parametrize(
    ("name", "data"), [("model.py", b"x"), ("../tokenizer.json", b"x"), ("tokenizer.json", b"")]
)
def test_wrong_blobs_are_refused(name: str, data: bytes, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=name):
        open_writer(tmp_path).add_blob(name, data)


def test_arrays_of_any_stride_are_written_in_order(tmp_path: Path) -> None:
    plain, strided = open_writer(tmp_path / "a"), open_writer(tmp_path / "b")
    rows = np.concatenate(list(records(RECIPE, 0)))
    plain.write_records(neuron_file_name(0), [rows])
    strided.write_records(
        neuron_file_name(0), [np.asfortranarray(rows[:50]), np.repeat(rows[50:], 2, axis=0)[::2], rows[:0]]
    )
    name = "neurons-00000.safetensors"
    assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_is_a_typed_error(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = open_writer(tmp_path)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, full)
    with pytest.raises(OndeviceError, match=r"No space left on device.*resume=True"):
        writer.write_records(neuron_file_name(0), records(RECIPE, 0))


def test_a_real_full_disk_is_a_typed_error(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full here")
    (tmp_path / "neurons-00000.safetensors.tmp").symlink_to("/dev/full")
    with pytest.raises(OndeviceError, match="can't be written"):
        open_writer(tmp_path).write_records(neuron_file_name(0), records(RECIPE, 0))


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OndeviceError, match="can't be written"):
        open_writer(tmp_path / "file" / "bundle")


def test_manifest_keeps_the_fingerprint(tmp_path: Path) -> None:
    fill(open_writer(tmp_path), RECIPE)
    assert (
        json.loads((tmp_path / "bundle.json").read_text())["manifest"]["provenance"]["fingerprint"]
        == "golden"
    )
    assert Bundle.open(tmp_path).manifest.provenance.source == PROVENANCE.source
