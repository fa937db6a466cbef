"""What a conversion may replace and delete beside its output: bundles and its own files, nothing else."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from ondevice.bundle.reader import Bundle
from ondevice.bundle.verify import SIDECARS
from ondevice.converters.convert import convert
from ondevice.converters.output_folder import OutputFolder
from ondevice.converters.progress import Progress
from ondevice.errors import OndeviceError, UsageError
from tests.support.models import write_checkpoint


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "source", num_hidden_layers=1)


def thesis(folder: Path) -> Path:
    """A file of the user's own in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "thesis.txt"
    path.write_text("years of work")
    return path


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("options", [{}, {"resume": True}, {"force": True}])
@pytest.mark.parametrize("place", ["b.replaced", "b.replaced/folder", "b.partial", "b.partial/folder", "b"])
def test_what_is_not_a_conversions_stays(
    source: Path, tmp_path: Path, place: str, options: dict[str, bool]
) -> None:
    thesis(tmp_path / place)
    before = everything(tmp_path)
    with pytest.raises(UsageError, match=f"{tmp_path / place.split('/')[0]}.*"):
        convert(source, tmp_path / "b", **options)
    assert everything(tmp_path) == before


@pytest.mark.parametrize("name", ["b", "b.replaced", "b.partial"])
def test_a_users_file_in_a_bundle_is_not_deleted_with_it(source: Path, tmp_path: Path, name: str) -> None:
    convert(source, tmp_path / name)
    thesis(tmp_path / name)
    before = everything(tmp_path)
    with pytest.raises(UsageError, match=r"thesis\.txt isn't part of a bundle.* move it elsewhere"):
        convert(source, tmp_path / "b", "q8", force=True)
    assert everything(tmp_path) == before


def test_what_training_added_goes_with_its_bundle(source: Path, tmp_path: Path) -> None:
    old = convert(source, tmp_path / "b")
    for name in (name for sidecar in SIDECARS for name in sidecar.files):
        (old / name).write_bytes(b"of the old bundle")
    assert Bundle.open(convert(source, old, "q8", force=True)).damaged == {}


def test_another_bundle_under_the_name_is_kept_without_force(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "b.replaced")
    with pytest.raises(UsageError, match=r"b\.replaced exists.* choose another output"):
        convert(source, tmp_path / "b")
    assert Bundle.open(tmp_path / "b.replaced")


@pytest.mark.parametrize(("new", "option"), [("b.partial", "resume"), ("b", "force")])
def test_a_crash_while_replacing_leaves_nothing_behind(
    source: Path, tmp_path: Path, new: str, option: str
) -> None:
    """The old bundle had been put aside; the new one had its name already, or not yet."""
    convert(source, tmp_path / "old").rename(tmp_path / "b.replaced")
    convert(source, tmp_path / "c", "q8").rename(tmp_path / new)
    convert(source, tmp_path / "b", "q8", **{option: True})
    assert Bundle.open(tmp_path / "b").quant.bits == 8
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "source"]


def test_what_appears_in_the_middle_is_not_replaced(source: Path, tmp_path: Path) -> None:
    def meanwhile(_: Progress) -> None:
        thesis(tmp_path / "b")

    with pytest.raises(UsageError, match="exists"):
        convert(source, tmp_path / "b", on_progress=meanwhile)
    assert (tmp_path / "b" / "thesis.txt").exists()


def test_what_takes_the_spare_name_in_the_middle_is_kept(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "b")

    def meanwhile(_: Progress) -> None:
        thesis(tmp_path / "b.replaced")

    with pytest.raises(OndeviceError, match="not empty; mend that, then run again with resume=True"):
        convert(source, tmp_path / "b", "q8", force=True, on_progress=meanwhile)
    assert (tmp_path / "b.replaced" / "thesis.txt").exists()
    assert Bundle.open(tmp_path / "b").quant.bits == 4


def test_a_link_to_a_bundle_is_replaced_and_the_bundle_kept(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "b")
    thesis(tmp_path / "b")
    before = everything(tmp_path / "b")
    (tmp_path / "link").symlink_to("b")
    for _ in range(2):
        convert(source, tmp_path / "link", "q8", force=True)
        assert not (tmp_path / "link").is_symlink()
        assert Bundle.open(tmp_path / "link").quant.bits == 8
        assert everything(tmp_path / "b") == before
        assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "link", "source"]


def test_a_link_to_nothing_is_not_a_bundle(source: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("nothing")
    with pytest.raises(UsageError, match="isn't a bundle"):
        convert(source, tmp_path / "link", force=True)
    assert (tmp_path / "link").is_symlink()


def test_an_old_bundle_that_cannot_be_deleted_is_a_warning(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The new bundle is whole and has its name, so nothing failed."""
    convert(source, tmp_path / "b")
    unlink = Path.unlink

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path.parent.name == "b.replaced":
            raise PermissionError(1, "Operation not permitted", str(path))
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    with caplog.at_level(logging.WARNING):
        convert(source, tmp_path / "b", "q8", force=True)
    assert "b.replaced, the bundle that was there before, can't be deleted: Operation not" in caplog.text
    assert Bundle.open(tmp_path / "b").quant.bits == 8
    monkeypatch.undo()
    convert(source, tmp_path / "b", force=True)
    assert not (tmp_path / "b.replaced").exists()


def test_a_half_deleted_bundle_can_still_be_told_for_one(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(source, tmp_path / "b")
    unlink = Path.unlink

    def die(path: Path, missing_ok: bool = False) -> None:
        unlink(path, missing_ok)
        if path.parent.name == "b.replaced":
            raise KeyboardInterrupt

    monkeypatch.setattr(Path, "unlink", die)
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "b", force=True)
    monkeypatch.undo()
    convert(source, tmp_path / "b", force=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "source"]


def test_the_root_folder_is_refused_as_an_output(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="can't be an output folder"):
        OutputFolder(Path("/")).check(resume=False, force=True)
