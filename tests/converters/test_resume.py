"""Interrupted conversions: what is kept, what is redone, and that the bytes are those of one that wasn't."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ondevice.bundle.reader import Bundle
from ondevice.bundle.writer import BundleWriter
from ondevice.converters.convert import convert
from ondevice.converters.progress import Progress
from ondevice.errors import OndeviceError, UsageError
from tests.support.models import write_checkpoint

KILLER = "tests.support.kill_and_resume"


class StopError(Exception):
    """Raised from a progress callback."""


def folder_bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "source", num_hidden_layers=3)


@pytest.fixture(autouse=True)
def every_block_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ondevice.converters.progress.REPORT_SECONDS", 0.0)


def stop_at(step: str, fraction: float = 0.0) -> object:
    def on_progress(progress: Progress) -> None:
        if progress.step == step and progress.fraction >= fraction:
            raise StopError

    return on_progress


def interrupted(source: Path, output: Path, step: str, quant: str = "q4", fraction: float = 0.0) -> Path:
    """The partial folder of a conversion stopped once it writes `step` and so much is done."""
    with pytest.raises(StopError):
        convert(source, output, quant, on_progress=stop_at(step, fraction))  # type: ignore[arg-type]
    assert not output.exists()
    return output.with_name(output.name + ".partial")


@pytest.mark.fast("q4-neurons-00001*", "q4-resident*", "f16-neurons-00002*")
@pytest.mark.parametrize(
    ("step", "fraction"),
    [("neurons-00001.safetensors", 0), ("neurons-00002.safetensors", 0), ("resident.safetensors", 0.8)],
)
@pytest.mark.parametrize("quant", ["q4", "f16"])
def test_a_stopped_conversion_resumes(
    source: Path, tmp_path: Path, step: str, fraction: float, quant: str
) -> None:
    expected = folder_bytes(convert(source, tmp_path / "expected", quant))
    partial = interrupted(source, tmp_path / "b", step, quant, fraction)
    seen: list[Progress] = []
    convert(source, tmp_path / "b", quant, resume=True, on_progress=seen.append)
    assert folder_bytes(tmp_path / "b") == expected
    assert not partial.exists()
    # What was finished isn't done again, but counts as done.
    assert "neurons-00000.safetensors" not in {progress.step for progress in seen}
    assert seen[0].done_bytes > 0.2 * seen[0].total_bytes
    assert seen[-1].fraction == 1.0


def test_nothing_half_written_is_loadable(source: Path, tmp_path: Path) -> None:
    partial = interrupted(source, tmp_path / "b", "resident.safetensors")
    with pytest.raises(OndeviceError):
        Bundle.open(partial)


def test_resume_without_anything_to_resume_converts(source: Path, tmp_path: Path) -> None:
    assert Bundle.open(convert(source, tmp_path / "b", resume=True)).config.num_layers == 3


def test_resume_of_a_finished_conversion_does_nothing(source: Path, tmp_path: Path) -> None:
    output = convert(source, tmp_path / "b")
    before = {path: path.stat().st_mtime_ns for path in output.iterdir()}
    assert convert(source, tmp_path / "b", resume=True) == output
    assert {path: path.stat().st_mtime_ns for path in output.iterdir()} == before
    with pytest.raises(UsageError, match="exists"):
        convert(source, tmp_path / "b", "q8", resume=True)


def test_a_conversion_that_only_missed_its_last_renaming_resumes_to_the_same_bytes(
    source: Path, tmp_path: Path
) -> None:
    output = convert(source, tmp_path / "b")
    expected = folder_bytes(output)
    output.rename(tmp_path / "b.partial")
    (tmp_path / "b.partial" / "quantisation-error.json").write_text("{}")
    assert folder_bytes(convert(source, output, resume=True)) == expected


def test_damage_in_between_is_found_and_repaired(source: Path, tmp_path: Path) -> None:
    expected = folder_bytes(convert(source, tmp_path / "expected"))
    partial = interrupted(source, tmp_path / "b", "neurons-00002.safetensors")
    damaged = partial / "neurons-00000.safetensors"
    content = bytearray(damaged.read_bytes())
    content[5000] ^= 1
    damaged.write_bytes(content)
    assert folder_bytes(convert(source, tmp_path / "b", resume=True)) == expected


@pytest.mark.fast("None", "{}")
@pytest.mark.parametrize("content", [None, b"", b"[1]", b"{}", b'{"neurons-00000.safetensors": 3}'])
def test_a_lost_error_log_starts_again(source: Path, tmp_path: Path, content: bytes | None) -> None:
    expected = folder_bytes(convert(source, tmp_path / "expected"))
    partial = interrupted(source, tmp_path / "b", "neurons-00002.safetensors")
    log = partial / "quantisation-error.json"
    log.unlink()
    if content is not None:
        log.write_bytes(content)
    assert folder_bytes(convert(source, tmp_path / "b", resume=True)) == expected


def test_an_unfinished_conversion_is_not_overwritten_by_accident(source: Path, tmp_path: Path) -> None:
    partial = interrupted(source, tmp_path / "b", "neurons-00002.safetensors")
    before = folder_bytes(partial)
    with pytest.raises(UsageError, match="resume=True"):
        convert(source, tmp_path / "b")
    assert folder_bytes(partial) == before
    convert(source, tmp_path / "b", force=True)
    assert not partial.exists()


def test_another_source_or_option_is_not_mixed_in(source: Path, tmp_path: Path) -> None:
    """The other source has the same shapes, sizes and names; only its values differ."""
    interrupted(source, tmp_path / "b", "neurons-00002.safetensors")
    with pytest.raises(UsageError, match="begun with quant q4, and this run has quant q8; repeat"):
        convert(source, tmp_path / "b", "q8", resume=True)
    write_checkpoint(source, num_hidden_layers=3, seed=1)
    with pytest.raises(UsageError, match="another source or with other options"):
        convert(source, tmp_path / "b", resume=True)


def touched(path: Path) -> None:
    times = path.stat()
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns + 1))


def flipped(path: Path) -> None:
    """Bits of a weight between the samples that tell checkpoints apart."""
    content = bytearray(path.read_bytes())
    content[-700] ^= 1
    path.write_bytes(content)
    touched(path)


@pytest.mark.fast("flipped")
@pytest.mark.parametrize("change", [touched, flipped])
def test_a_source_that_changed_in_between_is_not_mixed_in(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    source = write_checkpoint(tmp_path / "source", num_hidden_layers=3, shards=2)
    partial = interrupted(source, tmp_path / "b", "neurons-00002.safetensors")
    before = folder_bytes(partial)
    change(source / "model-00002-of-00002.safetensors")
    with pytest.raises(
        UsageError, match=r"model-00002-of-00002\.safetensors' has changed since .* force=True"
    ):
        convert(source, tmp_path / "b", resume=True)
    assert folder_bytes(partial) == before
    expected = folder_bytes(convert(source, tmp_path / "expected"))
    assert folder_bytes(convert(source, tmp_path / "b", force=True)) == expected


def test_a_moved_source_is_the_same_source(source: Path, tmp_path: Path) -> None:
    expected = folder_bytes(convert(source, tmp_path / "expected"))
    interrupted(source, tmp_path / "b", "neurons-00002.safetensors")
    (tmp_path / "elsewhere").mkdir()
    moved = source.rename(tmp_path / "elsewhere" / "source")
    assert folder_bytes(convert(moved, tmp_path / "b", resume=True)) == expected


def test_an_existing_output_needs_force(source: Path, tmp_path: Path) -> None:
    output = convert(source, tmp_path / "b")
    before = folder_bytes(output)
    with pytest.raises(UsageError, match="force=True"):
        convert(source, output, "q8")
    assert folder_bytes(output) == before
    convert(source, output, "q8", force=True)
    assert Bundle.open(output).quant.bits == 8
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "source"]


def test_force_replaces_only_bundles(source: Path, tmp_path: Path) -> None:
    mine = tmp_path / "documents"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    for output in (mine, mine / "thesis.txt"):
        with pytest.raises(UsageError, match="isn't a bundle"):
            convert(source, output, force=True)
    (tmp_path / "b.partial" / "folder").mkdir(parents=True)
    (tmp_path / "b.partial" / "folder" / "thesis.txt").write_text("years of work")
    with pytest.raises(UsageError, match="folder isn't part of a bundle"):
        convert(source, tmp_path / "b", force=True)
    assert (mine / "thesis.txt").read_text() == "years of work"


def test_the_old_bundle_lives_until_the_new_one_is_whole(source: Path, tmp_path: Path) -> None:
    output = convert(source, tmp_path / "b")
    before = folder_bytes(output)
    with pytest.raises(StopError):
        convert(source, output, "q8", force=True, on_progress=stop_at("neurons-00002.safetensors"))  # type: ignore[arg-type]
    assert folder_bytes(output) == before


@pytest.mark.fast("options0", "options1")
@pytest.mark.parametrize("options", [{"resume": True}, {"force": True}, {}])
def test_two_conversions_do_not_share_a_folder(
    source: Path, tmp_path: Path, options: dict[str, bool]
) -> None:
    """The second is started while the first is inside its progress callback."""
    refused: list[OndeviceError] = []

    def again(_: Progress) -> None:
        if not refused:
            with pytest.raises(OndeviceError, match="another conversion") as error:
                convert(source, tmp_path / "b", **options)
            refused.append(error.value)

    convert(source, tmp_path / "b", on_progress=again)
    assert len(refused) == 1


def test_a_resumed_resident_file_is_not_begun_again(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = folder_bytes(convert(source, tmp_path / "expected"))
    create = BundleWriter.__init__

    def eager(self: BundleWriter, *args: object, **options: object) -> None:
        create(self, *args, **options, checkpoint_bytes=1)  # type: ignore[arg-type]

    monkeypatch.setattr(BundleWriter, "__init__", eager)
    seen: list[Progress] = []

    def stop_late(progress: Progress) -> None:
        seen.append(progress)
        if progress.fraction > 0.9:
            raise StopError

    with pytest.raises(StopError):
        convert(source, tmp_path / "b", on_progress=stop_late)
    done = seen[-1].done_bytes
    seen.clear()
    convert(source, tmp_path / "b", resume=True, on_progress=seen.append)
    assert folder_bytes(tmp_path / "b") == expected
    assert 0.75 * done < seen[0].done_bytes


def kill_and_resume(tmp_path: Path, quant: str, kills: int, seed: int) -> dict[str, int]:
    source = write_checkpoint(tmp_path / "source", num_hidden_layers=3, shards=2)
    work = tmp_path / "work"
    work.mkdir()
    command = [sys.executable, "-m", KILLER, str(source), str(work), quant, str(kills), str(seed)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=250)
    assert result.returncode == 0, result.stderr
    report: dict[str, int] = json.loads(result.stdout)
    return report


@pytest.mark.fast("q4")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("quant", ["q4", "f16"])
def test_killed_at_any_moment_it_resumes_to_the_same_bytes(tmp_path: Path, quant: str) -> None:
    report = kill_and_resume(tmp_path, quant, kills=3, seed=1)
    assert report["killed"] >= 3
    assert (report["different"], report["left"]) == (0, 0)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("seed", [2, 3])
def test_a_conversion_killed_fifty_times_resumes_to_the_same_bundle(tmp_path: Path, seed: int) -> None:
    report = kill_and_resume(tmp_path, "q4", kills=50, seed=seed)
    assert report["killed"] >= 50
    assert (report["different"], report["left"]) == (0, 0)
