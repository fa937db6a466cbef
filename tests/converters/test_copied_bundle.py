"""The copy that a training with --output makes: whole, with all that belongs to it, or not there at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ondevice.api import verify
from ondevice.bundle.reader import Bundle
from ondevice.converters.training.sidecars import copied_bundle
from ondevice.errors import UsageError
from ondevice.runtime.models import shipped_folder

SHIPPED = shipped_folder() / "small-relu"


def test_it_takes_sidecars_and_documents_along(tmp_path: Path) -> None:
    output = tmp_path / "made"
    with copied_bundle(Bundle.open(SHIPPED), output) as folder:
        assert not output.exists()
        assert Bundle.open(folder).streams is not None
    made, shipped = Bundle.open(output), Bundle.open(SHIPPED)
    assert (made.streams, made.predictors) == (shipped.streams, shipped.predictors)
    assert made.hotness == shipped.hotness
    for name in ("NOTICE", "about.txt", "README.md"):
        assert (output / name).read_bytes() == (SHIPPED / name).read_bytes()
    verify(output)
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_a_document_that_is_a_link_out_of_the_bundle_stays_behind(tmp_path: Path) -> None:
    with copied_bundle(Bundle.open(SHIPPED), tmp_path / "first"):
        pass
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "first" / "NOTICE").unlink()
    (tmp_path / "first" / "NOTICE").symlink_to(tmp_path / "secret")
    with copied_bundle(Bundle.open(tmp_path / "first"), tmp_path / "second"):
        pass
    assert not (tmp_path / "second" / "NOTICE").exists()
    assert (tmp_path / "second" / "about.txt").exists()


def test_an_error_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        with copied_bundle(Bundle.open(SHIPPED), tmp_path / "made"):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("documents", [False, True])
def test_killed_it_leaves_nothing_whole_and_is_begun_again(tmp_path: Path, documents: bool) -> None:
    output = tmp_path / "made"
    child = os.fork()
    if not child:
        with copied_bundle(Bundle.open(SHIPPED), output) as folder:
            if documents:
                (folder / "NOTICE").write_text("half of it")
            os._exit(0)
    os.waitpid(child, 0)
    assert not output.exists()
    assert (tmp_path / "made.partial").is_dir()
    with copied_bundle(Bundle.open(SHIPPED), output):
        pass
    verify(output)
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_what_is_in_the_way_stays(tmp_path: Path) -> None:
    def copy() -> None:
        with copied_bundle(Bundle.open(SHIPPED), tmp_path / "made"):
            pass

    (tmp_path / "made.partial").mkdir()
    (tmp_path / "made.partial" / "diary.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"diary\.txt isn't part of a bundle"):
        copy()
    assert (tmp_path / "made.partial" / "diary.txt").read_text() == "mine"
