"""Headers of safetensors files that lie, are huge, or are cut while they are read."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ondevice.converters.checkpoints import huggingface
from ondevice.converters.checkpoints.base import SourceFile
from ondevice.converters.checkpoints.opening import open_checkpoint
from ondevice.errors import CheckpointError, OndeviceError
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


@pytest.mark.parametrize(
    ("limit", "match"), [("MAX_SHARDS", "3 files; the most"), ("MAX_TENSORS", "more than")]
)
def test_files_and_tensors_of_an_index_are_bounded(
    source: Path, monkeypatch: pytest.MonkeyPatch, limit: str, match: str
) -> None:
    monkeypatch.setattr(huggingface, limit, 2)
    assert_refused(source, CheckpointError, match)


EVIL = "\x1b[2J\n" + "\u202e" * 100_000
"""A name that would steer a terminal, and fill it."""


def with_tensor(source: Path, shard: str, values: np.ndarray) -> None:
    save_file(load_file(source / shard) | {EVIL: values}, source / shard)


@pytest.mark.parametrize("case", ["extra", "type", "twice", "unlisted", "shard", "outside", "config", "end"])
def test_names_in_messages_are_short_and_plain(source: Path, case: str) -> None:
    index = source / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    config = json.loads((source / "config.json").read_text())
    if case in ("extra", "type", "twice"):
        with_tensor(source, SHARD, np.zeros(2, np.int32 if case == "type" else np.float32))
    if case == "twice":
        with_tensor(source, SHARD.replace("2", "3", 1), np.zeros(2, np.float32))
    if case in ("unlisted", "shard", "outside"):
        name = {"unlisted": SHARD, "shard": f"{EVIL}.safetensors", "outside": f"../{EVIL}.safetensors"}[case]
        content["weight_map"][EVIL] = name
    index.write_text(json.dumps(content))
    if case == "config":
        (source / "config.json").write_text(json.dumps(config | {EVIL: 1}))
    if case == "end":
        (source / "generation_config.json").write_text(json.dumps({"eos_token_id": EVIL}))
    with pytest.raises(OndeviceError) as refused:
        open_checkpoint(source)
    message = str(refused.value).replace(str(source), "")
    assert len(message) < 500
    assert message.isascii()
    assert message.isprintable()


def test_a_value_that_nests_as_deeply_as_can_be_parsed_is_refused(source: Path) -> None:
    """It can be parsed where the stack is short, and not be written in a message where that is longer."""
    text = (source / "config.json").read_text()
    for depth in range(960, 1000):
        nested = "[" * depth + "]" * depth
        (source / "config.json").write_text(text.replace('"hidden_size": 64', f'"hidden_size": {nested}'))
        with pytest.raises(CheckpointError):
            open_checkpoint(source)
