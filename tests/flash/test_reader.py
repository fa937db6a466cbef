"""Reads on demand: exact bytes, every damage found, nothing left in the page cache."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ondevice.errors import FlashReadError
from ondevice.flash.reader import FlashReader
from tests.support.flash_files import (
    HEADER_BYTES,
    PARTS,
    STRIDE,
    RecordFile,
    cached_pages,
    drop_from_cache,
    flip_byte,
    write_plain,
    write_records,
)

RECORDS = 997
END = HEADER_BYTES + RECORDS * STRIDE


@settings(max_examples=40)
@given(offset=st.integers(HEADER_BYTES, END - 1), length=st.integers(1, END), into=st.booleans())
def test_any_range_reads_its_bytes(
    reader: FlashReader, records: RecordFile, offset: int, length: int, into: bool
) -> None:
    nbytes = min(length, END - offset)
    out = np.zeros(nbytes, np.uint8) if into else None
    got = reader.read(0, offset, nbytes, out)
    assert out is None or got is out
    np.testing.assert_array_equal(got, records.bytes_at(offset, nbytes))


@settings(max_examples=25)
@given(ids=st.lists(st.integers(0, RECORDS - 1), max_size=40), straight=st.booleans())
def test_any_records_read_their_bytes(
    reader: FlashReader, records: RecordFile, ids: list[int], straight: bool
) -> None:
    if straight and ids:
        ids = list(range(ids[0], min(ids[0] + 300, RECORDS)))  # longer than one staging buffer
    out = np.zeros((len(ids), STRIDE), np.uint8)
    reader.read_records(0, ids, out)
    np.testing.assert_array_equal(out, records.data[ids])


def test_neighbours_are_one_read(reader: FlashReader) -> None:
    def reads_and_bytes(ids: list[int]) -> tuple[int, int]:
        before = reader.stats
        reader.read_records(0, ids, np.empty((len(ids), STRIDE), np.uint8))
        return reader.stats.reads - before.reads, reader.stats.bytes_read - before.bytes_read

    reads, nbytes = reads_and_bytes(list(range(8, 40)))
    assert reads == 1
    assert 32 * STRIDE <= nbytes < 32 * STRIDE + 2 * 4096
    assert reads_and_bytes(list(range(39, 7, -1)))[0] == 32


def test_an_unaligned_end_and_a_short_last_unit(tmp_path: Path) -> None:
    for nbytes in (1, 4095, 4097, (1 << 20) - 1, (1 << 20) + 1, 3 * (1 << 20) + 12345):
        checked, data = write_plain(tmp_path / f"{nbytes}.flash", nbytes, 1 << 20)
        for io in ("direct", "buffered"):
            with FlashReader([checked], io=io, threads=2) as reader:  # type: ignore[arg-type]
                np.testing.assert_array_equal(reader.read(0, 0, nbytes), data)
                np.testing.assert_array_equal(reader.read(0, nbytes - 1, 1), data[-1:])


@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [(0, 10), (HEADER_BYTES - 1, 1), (END, 1), (END - 5, 6), (HEADER_BYTES, END), (1 << 62, 1 << 62)],
)
def test_ranges_outside_the_checked_bytes_are_refused(reader: FlashReader, offset: int, nbytes: int) -> None:
    with pytest.raises(IndexError, match=r"records\.flash"):
        reader.read(0, offset, nbytes) if nbytes > 100 else reader.read(
            0, offset, nbytes, np.empty(nbytes, "u1")
        )


def test_impossible_arguments_are_refused(reader: FlashReader, records: RecordFile) -> None:
    with pytest.raises(IndexError):
        reader.read(1, HEADER_BYTES, 1)
    with pytest.raises(IndexError, match="record 997 of 997"):
        reader.read_records(0, [0, RECORDS], np.empty((2, STRIDE), np.uint8))
    with pytest.raises(IndexError, match="record -1"):
        reader.read_records(0, [-1], np.empty((1, STRIDE), np.uint8))
    with pytest.raises(ValueError, match="a row of 1792 bytes for each of the 2"):
        reader.read_records(0, [0, 1], np.empty((2, STRIDE + 64), np.uint8))
    with pytest.raises(ValueError, match="must be"):
        reader.read(0, HEADER_BYTES, 10, np.empty(11, np.uint8))
    read_only = np.zeros((1, STRIDE), np.uint8)
    read_only.flags.writeable = False
    with pytest.raises(TypeError):
        reader.read_records(0, [0], read_only)
    for threads in (0, 1000):
        with pytest.raises(ValueError, match="reads at once"):
            FlashReader([records.checked], threads=threads)
    with pytest.raises(ValueError, match="io is"):
        FlashReader([records.checked], io="mmap")  # type: ignore[arg-type]
    assert reader.read(0, HEADER_BYTES, 0).size == 0


def test_a_flipped_byte_fails_its_own_unit_only(tmp_path: Path) -> None:
    records = write_records(tmp_path / "records.flash", 500)
    damaged = HEADER_BYTES + 250 * STRIDE + PARTS[0] + 7
    flip_byte(records.checked.path, damaged)
    out = np.empty((500, STRIDE), np.uint8)
    with FlashReader([records.checked], threads=2) as reader:
        for read in (
            lambda: reader.read(0, damaged, 1),
            lambda: reader.read(0, damaged, 1, np.empty(1, np.uint8)),
            lambda: reader.read(0, HEADER_BYTES, 500 * STRIDE),
            lambda: reader.read_records(0, range(500), out),
            lambda: reader.read_records(0, [3, 250, 7], out[:3]),
        ):
            with pytest.raises(FlashReadError, match=rf"records\.flash.*from {damaged - 7} .*checksum"):
                read()
        part = reader.read(0, damaged - 7 - PARTS[0], PARTS[0])
        np.testing.assert_array_equal(part, records.data[250, : PARTS[0]])
        reader.read_records(0, [249, 251], out[:2])
        np.testing.assert_array_equal(out[:2], records.data[[249, 251]])


def test_a_file_that_changes_while_open(tmp_path: Path) -> None:
    records = write_records(tmp_path / "records.flash", 100)
    path = records.checked.path
    for io in ("direct", "buffered"):
        write_records(path, 100)
        with FlashReader([records.checked], io=io, threads=2) as reader:  # type: ignore[arg-type]
            os.truncate(path, HEADER_BYTES + 50 * STRIDE + 100)
            with pytest.raises(FlashReadError, match=r"records\.flash.*shrunk to"):
                reader.read(0, HEADER_BYTES + 49 * STRIDE, 2 * STRIDE)
            with pytest.raises(FlashReadError, match="shrunk"):
                reader.read(0, HEADER_BYTES + 90 * STRIDE, STRIDE)
            np.testing.assert_array_equal(
                reader.read(0, HEADER_BYTES, 49 * STRIDE), records.bytes_at(HEADER_BYTES, 49 * STRIDE)
            )
        write_records(path, 100)
        with FlashReader([records.checked], io=io, threads=2) as reader:  # type: ignore[arg-type]
            # A file put in the open one's place, or deleted, doesn't disturb what was opened.
            write_records(tmp_path / "other", 10, seed=1)
            (tmp_path / "other").replace(path)
            np.testing.assert_array_equal(
                reader.read(0, HEADER_BYTES, 100 * STRIDE), records.bytes_at(HEADER_BYTES, 100 * STRIDE)
            )
            path.unlink()
            reader.read(0, HEADER_BYTES, STRIDE)


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    good = write_records(tmp_path / "good.flash", 10).checked
    with pytest.raises(FlashReadError, match=r"gone\.flash.*No such file"):
        FlashReader([good, dataclasses.replace(good, path=tmp_path / "gone.flash")])
    with pytest.raises(
        FlashReadError, match=f"has {good.nbytes} bytes instead of {good.nbytes + 2 * STRIDE}"
    ):
        FlashReader(
            [dataclasses.replace(good, nbytes=good.nbytes + 2 * STRIDE, crcs=np.zeros(24, np.uint32))]
        )
    with pytest.raises(FlashReadError, match="regular file"):
        FlashReader([dataclasses.replace(good, path=tmp_path)], io="buffered")
    os.mkfifo(tmp_path / "pipe.flash")
    with pytest.raises(FlashReadError, match="regular file"):
        FlashReader([dataclasses.replace(good, path=tmp_path / "pipe.flash")], io="buffered")
    strange = tmp_path / os.fsdecode(b"\xff\xfe.flash")
    with pytest.raises(FlashReadError, match="No such file"):
        FlashReader([dataclasses.replace(good, path=strange)])


@pytest.mark.parametrize(
    "change",
    [
        {"crcs": np.zeros(19, np.uint32)},
        {"crcs": np.zeros(21, np.uint32)},
        {"crc_units": ()},
        {"crc_units": (0, STRIDE)},
        {"crc_start": 512},
        {"crc_start": -4096},
        {"crc_start": 1 << 20},
    ],
    ids=str,
)
def test_a_wrong_table_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    good = write_records(tmp_path / "good.flash", 10).checked
    with pytest.raises((ValueError, IndexError)):
        FlashReader([dataclasses.replace(good, **change)])


@pytest.mark.skipif(sys.platform != "linux", reason="looks into Linux's page cache")
@pytest.mark.parametrize("io", ["direct", "buffered"])
def test_nothing_stays_in_the_page_cache(tmp_path: Path, io: str) -> None:
    records = write_records(tmp_path / "records.flash", 3000)
    path = records.checked.path
    drop_from_cache(path)
    if cached_pages(path):
        pytest.skip("this file system lives in the page cache")
    with FlashReader([records.checked], io=io, threads=2) as reader:  # type: ignore[arg-type]
        reader.read(0, HEADER_BYTES, 2500 * STRIDE)
        reader.read_records(0, [5, 6, 7, 2000], np.empty((4, STRIDE), np.uint8))
    assert cached_pages(path) == 0


def test_staging_is_bounded_and_stats_add_up(records: RecordFile) -> None:
    with FlashReader([records.checked], threads=2) as reader:
        assert reader.staging_bytes == 0
        reader.read(0, HEADER_BYTES, RECORDS * STRIDE, np.empty(RECORDS * STRIDE, np.uint8))
        reader.read_records(0, range(RECORDS), np.empty((RECORDS, STRIDE), np.uint8))
        # One buffer of 256 KiB and its pages' edges for each thread and the caller.
        assert 0 < reader.staging_bytes <= 3 * ((1 << 18) + 2 * 4096)
        stats = reader.stats
    assert stats.bytes_read >= RECORDS * STRIDE
    assert stats.read_seconds > 0
    # Two threads and the caller, none of which can compute for longer than reads were in flight.
    assert 0 < stats.cpu_seconds <= 3 * stats.read_seconds


def test_a_closed_reader_refuses_to_read(records: RecordFile) -> None:
    reader = FlashReader([records.checked], threads=2)
    reader.close()
    reader.close()
    with pytest.raises(ValueError, match="closed"):
        reader.read(0, HEADER_BYTES, STRIDE)
    with pytest.raises(ValueError, match="closed"):
        reader.read_records(0, [1], np.empty((1, STRIDE), np.uint8))


def test_no_files_are_no_error() -> None:
    with FlashReader([]) as reader:
        assert reader.stats.bytes_read == 0
