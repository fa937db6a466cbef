"""What stands in for a file after a download that went wrong is told for what it is, whichever file it is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ondevice.errors import CheckpointError, UnsupportedModelError
from tests.converters.test_tokenizer import byte_level, sentencepiece_model
from tests.support.command_line import Run
from tests.support.gguf_models import BYTE_LEVEL_TOKENS, add_byte_level, write_gguf
from tests.support.models import write_checkpoint
from tests.support.refusals import assert_refused

POINTER = b"version https://git-lfs.example/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 98362432\n"
PAGE = b"\xef\xbb\xbf\n<!DOCTYPE HTML>\n<html><head><title>model.gguf</title></head></html>"
EVERYWHERE = {
    "pointer": (
        POINTER,
        r"is a git-LFS pointer of \d+ bytes, not the file of 98362432 bytes.*git lfs pull",
    ),
    "pointer without a size": (
        POINTER[:60],
        r"is a git-LFS pointer of 60 bytes, not the file.*lfs pull",
    ),
    "page": (PAGE, "is a web page that was saved under the file's name.*download the file itself"),
    "page that a browser saved": (
        b"<!-- saved from url=(0050)https://example.org/model -->\n<html></html>",
        "is a web page",
    ),
    "answer as xml": (b"<?xml version='1.0'?><Error>denied</Error>", "is a web page"),
    "empty": (b"", "is empty; download it again"),
}
WEIGHTS = {
    "answer": (b"Entry not found", "is a text, 'Entry not found', as a server answers.*download it again"),
    "answer that ends its line": (
        b"Invalid username or password.\r\n",
        r"is a text, 'Invalid username or password\.', as a server answers.*download it again",
    ),
    "answer of two lines": (b"Repository\nnot found\n", "is a text, 'Repository not found', as a server"),
    "zeros": (bytes(5000), "begins with zeros, as a download .* never filled; download it again"),
}
"""What weights may be besides: a text could be JSON that is broken."""
FILES = (
    "model.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
)


def folder_with(path: Path, name: str) -> Path:
    """A sound checkpoint that has a file of this name."""
    source = write_checkpoint(path, shards=1 if name == "model.safetensors" else 2)
    if name == "tokenizer.model":
        (source / name).write_bytes(sentencepiece_model())
    else:
        byte_level().save(str(source / "tokenizer.json"))
    return source


CASES = [(name, kind) for name in FILES for kind in EVERYWHERE]
CASES += [(name, kind) for name in FILES if not name.endswith(".json") for kind in WEIGHTS]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_stand_in_for_a_file_of_a_folder_is_told_for_what_it_is(
    tmp_path: Path, name: str, kind: str
) -> None:
    content, message = (EVERYWHERE | WEIGHTS)[kind]
    source = folder_with(tmp_path / "source", name)
    (source / name).write_bytes(content)
    assert_refused(source, CheckpointError, f"{name} {message}")


@pytest.mark.parametrize("kind", EVERYWHERE | WEIGHTS)
@pytest.mark.parametrize("named", ["file", "part", "folder", "other suffix"])
def test_a_stand_in_for_a_gguf_file_is_told_for_what_it_is(tmp_path: Path, kind: str, named: str) -> None:
    content, message = (EVERYWHERE | WEIGHTS)[kind]
    folder = tmp_path / "source"
    folder.mkdir()
    name = {"other suffix": "model.bin", "part": "model-00001-of-00001.gguf"}.get(named, "model.gguf")
    (folder / name).write_bytes(content)
    assert_refused(folder if named == "folder" else folder / name, CheckpointError, f"{name} {message}")


ARCHIVES = {
    "zip": (b"PK\3\4 and so on", "is a zip archive.*PyTorch.*a pickle.*never.*unpack that"),
    "gzip": (b"\x1f\x8b\x08 and so on", "is a compressed archive; unpack it"),
    "zstd": (b"\x28\xb5\x2f\xfd and so on", "is a compressed archive; unpack it"),
    "pickle": (b"\x80\x02\x8a\x0a and so on", "is a pickle.*never"),
}


@pytest.mark.parametrize("name", ["model.gguf", "model.bin"])
@pytest.mark.parametrize("kind", ARCHIVES)
def test_an_archive_is_told_from_a_pickle(tmp_path: Path, kind: str, name: str) -> None:
    content, message = ARCHIVES[kind]
    (tmp_path / name).write_bytes(content)
    assert_refused(tmp_path / name, UnsupportedModelError, f"{name} {message}")


@pytest.mark.parametrize("kind", EVERYWHERE | WEIGHTS | ARCHIVES)
@pytest.mark.parametrize(
    "command", [("inspect", "-m"), ("chat",), ("chat", "--yes"), ("generate", "-p", "a")]
)
def test_commands_that_take_bundles_tell_it_too(
    ondevice: Run, tmp_path: Path, kind: str, command: tuple[str, ...]
) -> None:
    content, message = (EVERYWHERE | WEIGHTS | ARCHIVES)[kind]
    (tmp_path / "model.gguf").write_bytes(content)
    refused = ondevice(*command, tmp_path / "model.gguf")
    assert re.search(f"^error: .*model.gguf {message}", refused.err)
    assert "Convert it first" not in refused.err
    assert "If it is a checkpoint" not in refused.err


@pytest.mark.parametrize("share", [0.0001, 0.02, 0.3, 0.6, 0.999])
def test_a_truncated_download_is_refused(tmp_path: Path, share: float) -> None:
    """The header may be whole, and weights missing."""
    source = write_checkpoint(tmp_path / "source", vocab_size=BYTE_LEVEL_TOKENS)
    write_gguf(tmp_path / "model.gguf", source, change=add_byte_level)
    for file in (tmp_path / "model.gguf", source / "model.safetensors"):
        size = file.stat().st_size
        with file.open("r+b") as stream:
            stream.truncate(max(1, int(share * size)))
        assert_refused(
            source if file.parent == source else file,
            CheckpointError,
            rf"{file.name} (is truncated|ends at byte|isn't a).*download it again|{file.name} isn't a",
        )
