"""Float16 values that aren't finite are found in whatever is read, and nothing else is refused for them."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ondevice.bundle.matrix_layout import HalfRange
from ondevice.bundle.reader import CheckedFile
from ondevice.errors import FlashReadError
from ondevice.flash.reader import FlashReader
from ondevice.kernels import _native
from tests.support.flash_files import HEADER_BYTES, PARTS, STRIDE, RecordFile, write_records

RECORDS = 37
HALVES = (HalfRange(64, 128), HalfRange(130, 132), HalfRange(140, 148, 24, 20), HalfRange(630, 700))
"""Of a record; the last ones lie in both parts."""
END = HEADER_BYTES + RECORDS * STRIDE
many = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])


def half_places() -> list[int]:
    return [
        HEADER_BYTES + record * STRIDE + at
        for record in range(RECORDS)
        for start, stop, step, count, _ in HALVES
        for begin in (start + step * i for i in range(count))
        for at in range(begin, begin + stop - start, 2)
    ]


def with_halves(path: Path, broken: int | None, once: bool) -> CheckedFile:
    """A file of records whose float16 values are 1, but one. once: the ranges are spelt out for the file."""
    records = write_records(path, RECORDS)
    data = bytearray(path.read_bytes())
    for place in half_places():
        data[place : place + 2] = b"\x00\x3c"
    # Elsewhere every bit is set: what isn't float16 may be anything.
    if broken is not None:
        data[broken : broken + 2] = b"\xff\xff"
    path.write_bytes(data)
    crcs = _native.crc32c(np.frombuffer(data, np.uint8)[HEADER_BYTES:], PARTS)
    halves = HALVES
    if once:
        starts = range(HEADER_BYTES, END, STRIDE)
        halves = tuple(places.shifted(first) for first in starts for places in halves)
    return replace(records.checked, crcs=crcs, halves=halves, halves_period=0 if once else STRIDE)


@many
@given(
    broken=st.sampled_from(half_places()),
    once=st.booleans(),
    first=st.integers(0, 2 * RECORDS - 1),
    count=st.integers(1, 8),
)
def test_a_value_is_found_where_it_is_read(
    tmp_path: Path, broken: int, once: bool, first: int, count: int
) -> None:
    """What is read are whole parts, `count` from number `first` on."""
    file = with_halves(tmp_path / "records.flash", broken, once)
    edges = [HEADER_BYTES + i // 2 * STRIDE + i % 2 * PARTS[0] for i in range(2 * RECORDS + 1)]
    start, stop = edges[first], edges[min(first + count, 2 * RECORDS)]
    with FlashReader([file], io="buffered", threads=1) as reader:
        if start <= broken < stop:
            with pytest.raises(FlashReadError, match="are not finite"):
                reader.read(0, start, stop - start)
        else:
            reader.read(0, start, stop - start)
        ids = np.arange(RECORDS, dtype=np.int64)[(broken - HEADER_BYTES) // STRIDE + 1 :]
        reader.read_records(0, ids, np.empty((len(ids), STRIDE), np.uint8))


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("value", [0x7C00, 0xFC00, 0x7C01, 0xFFFF])
def test_every_value_that_is_no_number_is_found(tmp_path: Path, value: int, once: bool) -> None:
    file = with_halves(tmp_path / "records.flash", None, once)
    with FlashReader([file], threads=2) as reader:
        reader.read(0, HEADER_BYTES, END - HEADER_BYTES)
    data = bytearray(file.path.read_bytes())
    data[HEADER_BYTES + 66 : HEADER_BYTES + 68] = value.to_bytes(2, "little")
    file.path.write_bytes(data)
    crcs = _native.crc32c(np.frombuffer(data, np.uint8)[HEADER_BYTES:], PARTS)
    with FlashReader([replace(file, crcs=crcs)], threads=2) as reader, pytest.raises(FlashReadError):
        reader.read(0, HEADER_BYTES, END - HEADER_BYTES)


@pytest.mark.parametrize("place", [64, 127, 140, 147, 165, 603])
def test_scales_of_mxfp4_may_be_252_and_no_more(tmp_path: Path, place: int) -> None:
    records = write_records(tmp_path / "records.flash", RECORDS)
    scales = (HalfRange(64, 128, mxfp4=True), HalfRange(140, 148, 24, 20, mxfp4=True))
    for value in (252, 253, 254, 255):
        data = bytearray(b"\xff") * END
        data[:HEADER_BYTES] = records.checked.path.read_bytes()[:HEADER_BYTES]
        for record in range(HEADER_BYTES, END, STRIDE):
            for start, stop, step, times, _ in scales:
                for begin in range(record + start, record + start + (step or 1) * times, step or 1):
                    data[begin : begin + stop - start] = bytes([252]) * (stop - start)
        data[HEADER_BYTES + 2 * STRIDE + place] = value
        records.checked.path.write_bytes(data)
        crcs = _native.crc32c(np.frombuffer(data, np.uint8)[HEADER_BYTES:], PARTS)
        file = replace(records.checked, crcs=crcs, halves=scales, halves_period=STRIDE)
        with FlashReader([file], threads=2) as reader:
            if value == 252:
                reader.read(0, HEADER_BYTES, END - HEADER_BYTES)
                continue
            with pytest.raises(FlashReadError, match="are not finite"):
                reader.read(0, HEADER_BYTES, END - HEADER_BYTES)


@pytest.mark.parametrize(
    ("halves", "period"),
    [
        (((1, 4),), STRIDE),
        (((0, 3),), STRIDE),
        (((4, 4),), STRIDE),
        (((8, 4),), STRIDE),
        (((8, 12), (10, 14)), STRIDE),
        (((0, STRIDE + 2),), STRIDE),
        (((-2, 4),), STRIDE),
        (((0, 4),), -2),
        (((0, 4, 2, 2),), STRIDE),
        (((0, 4, 5, 2),), STRIDE),
        (((0, 4, -4, 2),), STRIDE),
        (((0, 4, 4, 0),), STRIDE),
        (((0, 4, STRIDE, 2),), STRIDE),
        (((0, 4, 1 << 40, 1 << 40),), STRIDE),
        (((0, 4, 8, 3), (12, 16)), STRIDE),
        (((0, 4),), 0),
        (((HEADER_BYTES, END + 2),), 0),
    ],
)
def test_impossible_places_are_refused(
    tmp_path: Path, halves: tuple[tuple[int, ...], ...], period: int
) -> None:
    records: RecordFile = write_records(tmp_path / "records.flash", RECORDS)
    places = tuple(HalfRange(*place) for place in halves)
    with pytest.raises(ValueError, match="float16 values must ascend"):
        FlashReader([replace(records.checked, halves=places, halves_period=period)])


@pytest.mark.parametrize("ring", [False, True])
def test_closing_under_those_who_read(tmp_path: Path, ring: bool) -> None:
    """They get what they asked for, or hear that it is closed: never another file's bytes, nor an error."""
    records = write_records(tmp_path / "records.flash", RECORDS)
    for _ in range(20):
        reader = FlashReader([records.checked], threads=2, ring=ring)
        heard: list[str] = []
        begun = threading.Barrier(4)

        def read(reader: FlashReader = reader, heard: list[str] = heard, begun: Any = begun) -> None:
            begun.wait()
            try:
                while True:
                    got = reader.read(0, HEADER_BYTES, END - HEADER_BYTES)
                    assert got.tobytes() == records.data.tobytes()
            except Exception as error:
                heard.append(repr(error))

        threads = [threading.Thread(target=read) for _ in range(3)]
        for thread in threads:
            thread.start()
        begun.wait()
        reader.close()
        for thread in threads:
            thread.join()
        assert heard == ["ValueError('the reader is closed')"] * 3
