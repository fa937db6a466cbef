"""Headers of safetensors files that lie, are huge, or are cut while they are read."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ondevice.converters.checkpoints.base import SourceFile
from ondevice.errors import CheckpointError
from tests.support.models import write_checkpoint
from tests.support.refusals import assert_refused

SHARD = "model-00002-of-00003.safetensors"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "source", shards=3)


def test_a_shard_that_shrinks_as_its_header_is_read(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mapping of it would end the process."""
    read = SourceFile.read

    def truncated(file: SourceFile, offset: int, nbytes: int) -> bytes:
        if offset == 8:
            os.truncate(file.path, 100)
        return read(file, offset, nbytes)

    monkeypatch.setattr(SourceFile, "read", truncated)
    assert_refused(source, CheckpointError, "ends at byte 100, too early; download it again")


class Header(NamedTuple):
    """A safetensors header that is wrong, and what is said of it."""

    entries: Any
    match: str


@pytest.mark.parametrize("header", [
    Header({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}}, "safetensors file"),
    Header({"w": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}}, "safetensors file"),
    Header({"w": {"dtype": "F32", "shape": [1 << 62, 8], "data_offsets": [0, 16]}}, "safetensors file"),
    Header({"w": {"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]}}, "safetensors file"),
    Header({"w": {"dtype": "F99", "shape": [4], "data_offsets": [0, 16]}}, "safetensors file"),
    Header({"w": 3}, "safetensors file"), Header([], "safetensors file"),
    Header("[" * 9000, "safetensors file"),
    Header('{"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}, "w": 1}', "same key twice"),
    Header({"w": {"dtype": "F32", "shape": [True, 4], "data_offsets": [0, 16]}}, "has the shape"),
    Header({"w": {"dtype": "F32", "shape": [1] * 9, "data_offsets": [0, 4]}}, "has the shape"),
    Header({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16, 32]}}, "has the data_offsets"),
    Header({"w": {"dtype": "F32", "shape": [4]}}, "has the data_offsets"),
    Header({"w": {"dtype": ["F32"], "shape": [4], "data_offsets": [0, 16]}}, "unknown type"),
    Header({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, "its header asks for"),
    Header({name: {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]} for name in "ab"}, "at byte 0"),
    Header({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]},
            "b": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}}, "begins at byte 8"),
])  # fmt: skip
def test_a_header_that_lies(source: Path, header: Header) -> None:
    text = header.entries if isinstance(header.entries, str) else json.dumps(header.entries)
    (source / SHARD).write_bytes(len(text).to_bytes(8, "little") + text.encode() + bytes(16))
    assert_refused(source, CheckpointError, header.match)


@pytest.mark.parametrize("length", [1 << 26, 1 << 40, (1 << 64) - 1])
def test_a_huge_header_is_not_read(source: Path, length: int) -> None:
    (source / SHARD).write_bytes(length.to_bytes(8, "little") + b"{}" * 100)
    assert_refused(source, CheckpointError, "its header would be")
