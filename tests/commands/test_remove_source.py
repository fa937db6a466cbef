"""A GGUF file goes once its bundle is verified, if that is asked for, and never otherwise."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ondevice import api
from ondevice.commands import obtaining, terminal
from ondevice.errors import BundleError, OndeviceError, UsageError
from ondevice.runtime import local_source
from tests.support.command_line import Run
from tests.support.gguf_models import BYTE_LEVEL_TOKENS, add_byte_level, write_gguf
from tests.support.models import write_checkpoint


def write_source(folder: Path, **options: Any) -> list[Path]:
    """A GGUF file, or its parts, and one that is another model's beside it. Returns the model's."""
    source = write_checkpoint(folder / "authors", vocab_size=BYTE_LEVEL_TOKENS)
    write_gguf(folder / "other.gguf", source, "Q8_0", change=add_byte_level)
    write_gguf(folder / "model.gguf", source, "Q8_0", change=add_byte_level, **options)
    return sorted(folder.glob("model*.gguf"))


@pytest.mark.parametrize("options", [{}, {"split_max_tensors": 9}])
def test_the_file_with_all_parts_goes_and_nothing_else(
    ondevice: Run, tmp_path: Path, options: dict[str, Any]
) -> None:
    files = write_source(tmp_path, **options)
    assert len(files) == (3 if options else 1)
    nbytes = sum(file.stat().st_size for file in files)
    done = ondevice("convert", files[-1], "--output", tmp_path / "bundle", "--remove-source")
    assert done.code == 0, done.err
    assert f"verified, and deleted {nbytes / 1e3:.0f} kB" in done.err
    assert not any(file.exists() for file in files)
    assert (tmp_path / "other.gguf").exists()
    assert ondevice("verify", tmp_path / "bundle").code == 0


def test_by_default_the_file_stays(ondevice: Run, tmp_path: Path) -> None:
    (file,) = write_source(tmp_path)
    before = file.read_bytes()
    assert ondevice("convert", file).code == 0
    assert api.convert(file, tmp_path / "bundle").is_dir()
    assert file.read_bytes() == before


def test_convert_from_python_removes_the_source(tmp_path: Path) -> None:
    (file,) = write_source(tmp_path)
    assert api.verify(api.convert(file, tmp_path / "bundle", remove_source=True)).nbytes > 0
    assert not file.exists()


def test_a_bundle_that_fails_verification_leaves_the_source(
    ondevice: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = write_source(tmp_path, split_max_tensors=9)
    theirs = local_source.verify

    def damaged(bundle: Path, *arguments: Any) -> Any:
        neurons = next(bundle.glob("*0000*"))
        content = bytearray(neurons.read_bytes())
        content[len(content) // 2] ^= 1
        neurons.write_bytes(content)
        return theirs(bundle, *arguments)

    monkeypatch.setattr(local_source, "verify", damaged)
    done = ondevice("convert", files[0], "--output", tmp_path / "bundle", "--remove-source")
    assert done.code == 6
    assert "the source is kept" in done.err
    assert all(file.exists() for file in files)
    monkeypatch.setattr(local_source, "verify", theirs)
    with pytest.raises(BundleError):
        api.verify(tmp_path / "bundle")


def test_an_interrupted_run_leaves_the_source_and_a_later_one_removes_it(tmp_path: Path) -> None:
    """While it converts, and while it verifies; the same command then goes on."""
    (file,) = write_source(tmp_path)

    def stop(*progress: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        api.convert(file, tmp_path / "bundle", on_progress=stop, remove_source=True)
    assert file.exists()
    bundle = api.convert(file, tmp_path / "bundle", resume=True)
    with pytest.raises(KeyboardInterrupt):
        local_source.removable_source(file).remove(bundle, stop)
    assert file.exists()
    assert api.convert(file, tmp_path / "bundle", resume=True, remove_source=True) == bundle
    assert not file.exists()


def test_a_file_that_changed_meanwhile_stays(tmp_path: Path) -> None:
    (file,) = write_source(tmp_path)
    removable = local_source.removable_source(file)
    bundle = api.convert(file, tmp_path / "bundle")
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(content + b"\0")
    with pytest.raises(OndeviceError, match=r"model.gguf has changed since .* the source is kept"):
        removable.remove(bundle)
    assert file.exists()


def test_a_file_that_cant_be_deleted_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file,) = write_source(tmp_path)

    def refused(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    bundle = api.convert(file, tmp_path / "bundle")
    monkeypatch.setattr(Path, "unlink", refused)
    with pytest.raises(OndeviceError, match=r"model.gguf can't be deleted: Permission denied; the bundle is"):
        local_source.removable_source(file).remove(bundle)
    assert file.exists()


def test_what_is_no_file_of_this_disk_is_refused_before_anything_is_written(
    ondevice: Run, tmp_path: Path
) -> None:
    (file,) = write_source(tmp_path)
    (tmp_path / "link.gguf").symlink_to(file)
    (tmp_path / "plain.bin").write_bytes(b"24ka")
    for source, message in (
        (tmp_path / "authors", "is a folder, which may hold more"),
        (tmp_path / "link.gguf", f"is a link to {file}"),
        (tmp_path / "plain.bin", "which .*plain.bin isn't"),
    ):
        with pytest.raises(UsageError, match=message):
            api.convert(source, tmp_path / "bundle", remove_source=True)
    pytest.importorskip("huggingface_hub")
    done = ondevice("convert", "some/model", "--output", tmp_path / "bundle", "--remove-source", "--yes")
    assert done.code == 2
    assert "some/model is a repository" in done.err
    done = ondevice("convert", tmp_path / "authors", "--draft-for", "x", "--remove-source")
    assert done.code == 2
    assert not (tmp_path / "bundle").exists()
    assert file.exists()


def test_the_question_before_converting_says_both_sizes(
    ondevice: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (terminal, obtaining):
        monkeypatch.setattr(module, "can_ask", lambda: True)
    files = write_source(tmp_path, split_max_tensors=9)
    nbytes = sum(file.stat().st_size for file in files)
    done = ondevice("generate", files[0], "--prompt", "a", stdin="n\n")
    assert done.code == 2
    source = next(line for line in done.err.splitlines() if line.startswith("  source"))
    assert f"({nbytes} bytes), which stay: with the bundle " in source
    bundle = next(line for line in done.err.splitlines() if line.startswith("  write"))
    written = int(bundle.split("(")[1].split(" ")[0])
    assert f"({nbytes + written} bytes) of the disk" in source
    assert "`ondevice convert --remove-source` deletes" in source
    assert all(map(os.path.exists, files))
