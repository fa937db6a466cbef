"""Files of runs: what was written is read, whatever the sizes of its parts, and a bent byte is noticed."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from ondevice.backends.base import Bytes
from ondevice.errors import FlashReadError
from ondevice.prompt_cache.entry import (
    CRC_BYTES,
    Entry,
    RunName,
    entry_bytes,
    read_entry,
    root_digest,
    run_name,
    write_entry,
)

BINDING = {"bundle": "of a test"}
TOKENS = [3, 1, 4, 1, 5]
SIZES: dict[str, list[int]] = {
    "one byte": [1],
    "a unit": [CRC_BYTES],
    "one more": [CRC_BYTES + 1],
    "a block of a 7B": [32 * 64 * 4096 * 2 * 2],
    "many odd ones": [1000 + 7919 * at % 200_000 for at in range(130)],
    "smaller than a unit": [5000] * 40,
}


def written(folder: Path, sizes: list[int]) -> tuple[RunName, list[Bytes]]:
    """A run with random parts of these sizes."""
    random = np.random.default_rng(len(sizes))
    parts = [random.integers(0, 256, size, dtype=np.uint8) for size in sizes]
    name = run_name(root_digest(BINDING), TOKENS)
    with (folder / name.file).open("wb") as file:
        given = [partial(np.array, part) for part in parts]
        write_entry(file.fileno(), BINDING, name, TOKENS, sizes, given)
    return name, parts


def found(folder: Path, name: RunName) -> Entry:
    entry = read_entry(folder, name, BINDING)
    assert entry is not None
    return entry


def read(entry: Entry) -> list[Bytes]:
    """All parts of a run."""
    parts = [np.empty(size, np.uint8) for size in entry.sizes]
    with entry.reader("auto") as reader:
        for index, part in enumerate(parts):
            entry.read(reader, index, part)
    return parts


@pytest.mark.fast("one*", "a unit", "many odd ones", "smaller than a unit")
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_what_was_written_is_read(tmp_path: Path, sizes: list[int]) -> None:
    name, parts = written(tmp_path, sizes)
    assert (tmp_path / name.file).stat().st_size == entry_bytes(BINDING, name, TOKENS, sizes)
    entry = found(tmp_path, name)
    assert entry.tokens == tuple(TOKENS)
    for part, again in zip(parts, read(entry), strict=True):
        assert np.array_equal(part, again)


@pytest.mark.fast("one*", "a unit", "many odd ones", "smaller than a unit")
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_a_bent_byte_is_noticed_in_every_part(tmp_path: Path, sizes: list[int]) -> None:
    name, _ = written(tmp_path, sizes)
    path, start = tmp_path / name.file, found(tmp_path, name).file.crc_start
    sound = path.read_bytes()
    for part in sorted({0, len(sizes) // 2, len(sizes) - 1}):
        bent = bytearray(sound)
        bent[start + sum(sizes[: part + 1]) - 1] ^= 1
        path.write_bytes(bent)
        with pytest.raises(FlashReadError, match="checksum"):
            read(found(tmp_path, name))


@pytest.mark.parametrize(
    "put",
    [Path.mkdir, os.mkfifo, Path.touch, lambda path: path.symlink_to(os.devnull)],
    ids=["folder", "pipe", "empty", "link"],
)
def test_what_is_no_run_takes_no_descriptor(tmp_path: Path, put: Callable[[Path], object]) -> None:
    name = run_name(root_digest(BINDING), TOKENS)
    put(tmp_path / name.file)
    before = next_descriptor()
    assert read_entry(tmp_path, name, BINDING) is None
    assert next_descriptor() == before


def next_descriptor() -> int:
    """The number that the process's next descriptor has."""
    file = os.open(os.devnull, os.O_RDONLY)
    os.close(file)
    return file
