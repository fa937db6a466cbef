"""Read-ahead: the schedule's bytes in order, held slots never overwritten, errors in their place."""

from __future__ import annotations

import mmap
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ondevice.errors import FlashReadError
from ondevice.flash.read_ahead import Extent, ReadAhead
from ondevice.flash.reader import FlashReader
from tests.support.flash_files import (
    HEADER_BYTES,
    STRIDE,
    RecordFile,
    flip_byte,
    slot_bytes,
    write_plain,
    write_records,
)

RECORDS = 4000


def extent_of(first: int, count: int, file: int = 0) -> Extent:
    return Extent(file, HEADER_BYTES + first * STRIDE, count * STRIDE)


def open_ahead(reader: FlashReader, extents: list[Extent], slots: int = 3, cyclic: bool = True) -> ReadAhead:
    return ReadAhead(reader, extents, slot_bytes(extents), slots, cyclic)


def settle(ahead: ReadAhead) -> int:
    """Bytes read once reading ahead has come to its end."""
    before = -1
    while ahead.stats.bytes_read != before:
        before = ahead.stats.bytes_read
        time.sleep(0.1)
    return before


@settings(max_examples=8)
@given(
    spans=st.lists(st.tuples(st.integers(0, RECORDS - 1), st.integers(1, 500)), min_size=1, max_size=6),
    slots=st.integers(2, 5),
    hold=st.integers(1, 4),
    steps=st.integers(0, 25),
)
def test_extents_arrive_in_the_schedule_s_order(
    reader: FlashReader,
    records: RecordFile,
    spans: list[tuple[int, int]],
    slots: int,
    hold: int,
    steps: int,
) -> None:
    extents = [extent_of(first, min(count, RECORDS - first)) for first, count in spans]
    with open_ahead(reader, extents, slots) as ahead:
        held: list[tuple[np.ndarray, np.ndarray]] = []
        for step in range(steps):
            extent = extents[step % len(extents)]
            held.append((ahead.next(), records.bytes_at(extent.offset, extent.nbytes)))
            if len(held) == min(hold, slots - 1):
                for view, expected in held:  # the oldest has been held longest
                    np.testing.assert_array_equal(view, expected)
                ahead.release()
                held.pop(0)
        for _ in held:
            ahead.release()
        with pytest.raises(ValueError, match="no extent is held"):
            ahead.release()


@settings(max_examples=40)
@given(
    bounds=st.lists(
        st.tuples(st.integers(0, RECORDS * STRIDE - 1), st.integers(1, 300_000)), min_size=1, max_size=4
    )
)
def test_extents_with_ragged_bounds(
    reader: FlashReader, records: RecordFile, bounds: list[tuple[int, int]]
) -> None:
    size = RECORDS * STRIDE
    extents = [Extent(0, HEADER_BYTES + at, min(nbytes, size - at)) for at, nbytes in bounds]
    with open_ahead(reader, extents, cyclic=False) as ahead:
        for extent in extents:
            np.testing.assert_array_equal(ahead.next(), records.bytes_at(extent.offset, extent.nbytes))
            ahead.release()
        with pytest.raises(IndexError, match="ended"):
            ahead.next()
        ahead.rewind()
        np.testing.assert_array_equal(ahead.next(), records.bytes_at(extents[0].offset, extents[0].nbytes))


def test_reading_ahead_stops_at_the_last_free_slot(reader: FlashReader, records: RecordFile) -> None:
    extents = [extent_of(16 * i, 16) for i in range(10)]
    one = 16 * STRIDE  # a whole number of pages
    with ReadAhead(reader, extents, one, 4, True) as ahead:
        assert ahead.nbytes == 4 * one
        assert settle(ahead) == 4 * one
        views = [ahead.next() for _ in range(3)]
        with pytest.raises(ValueError, match=r"release\(\).*3 of 4"):
            ahead.next()
        assert settle(ahead) == 4 * one
        for i, view in enumerate(views):
            np.testing.assert_array_equal(view, records.data[16 * i : 16 * i + 16].reshape(-1))
            assert not view.flags.writeable
            # Records keep the alignment they have on flash.
            assert view.ctypes.data % 4096 == extents[i].offset % 4096
        ahead.release()
        assert settle(ahead) == 5 * one
        ahead.release()
        ahead.release()
        with pytest.raises(ValueError, match="no extent is held"):
            ahead.release()


def test_large_extents_are_read_once_and_shared_by_threads(records: RecordFile) -> None:
    extents = [extent_of(0, 2000), extent_of(2000, 2000)]  # about 3.5 MB each
    with (
        FlashReader([records.checked], threads=4) as reader,
        open_ahead(reader, extents, 2, False) as ahead,
    ):
        for extent in extents:
            np.testing.assert_array_equal(ahead.next(), records.bytes_at(extent.offset, extent.nbytes))
            ahead.release()
        assert ahead.stats.bytes_read == 4000 * STRIDE
        assert ahead.stats.read_seconds > 0
        assert ahead.stats.cpu_seconds > 0
        assert ahead.stats.wait_seconds >= 0
        assert reader.stats.bytes_read == ahead.stats.bytes_read


def test_reschedule_goes_on_with_another_schedule_in_the_same_slots(
    reader: FlashReader, records: RecordFile
) -> None:
    with open_ahead(reader, [extent_of(16 * i, 16) for i in range(5)], slots=3) as ahead:
        for first in (0, 160, 48):
            ahead.next()  # held, and slots behind it read ahead
            ahead.reschedule([extent_of(first, 16), extent_of(first + 32, 8)])
            for start, count in 2 * ((first, 16), (first + 32, 8)):
                np.testing.assert_array_equal(ahead.next(), records.data[start : start + count].reshape(-1))
                ahead.release()
        for wrong, error in (([], ValueError), ([extent_of(0, 2000)], ValueError)):
            with pytest.raises(error):
                ahead.reschedule(wrong)
        np.testing.assert_array_equal(ahead.next(), records.data[48:64].reshape(-1))


def test_a_schedule_of_small_extents_has_more_slots(reader: FlashReader, records: RecordFile) -> None:
    large, small = extent_of(0, 64), [extent_of(16 * i, 16) for i in range(10)]
    with ReadAhead(reader, [large], 64 * STRIDE, 2, True) as ahead:
        before = settle(ahead)
        ahead.reschedule(small)
        assert settle(ahead) == before + 8 * 16 * STRIDE
        views = [ahead.next() for _ in range(7)]
        with pytest.raises(ValueError, match=r"release\(\).*7 of 8"):
            ahead.next()
        for index, view in enumerate(views):
            np.testing.assert_array_equal(view, records.bytes_at(small[index].offset, 16 * STRIDE))
        ahead.reschedule([large])
        np.testing.assert_array_equal(ahead.next(), records.bytes_at(large.offset, large.nbytes))


def test_a_rewind_starts_the_schedule_again(reader: FlashReader, records: RecordFile) -> None:
    extents = [extent_of(16 * i, 16) for i in range(5)]

    def expect(ahead: ReadAhead, index: int) -> None:
        np.testing.assert_array_equal(ahead.next(), records.data[16 * index : 16 * index + 16].reshape(-1))

    with open_ahead(reader, extents, slots=3) as ahead:
        for steps in (1, 2, 7, 4):
            for step in range(steps):
                expect(ahead, step % 5)
                if step % 2 == 0:
                    ahead.release()
                    continue
                ahead.rewind()  # gives back what is held, too
                with pytest.raises(ValueError, match="no extent is held"):
                    ahead.release()
                break
            ahead.rewind()
        # At its start a cyclic schedule keeps what it has read ahead, after a whole turn as well.
        for _ in range(2):
            before = settle(ahead)
            ahead.rewind()
            assert settle(ahead) == before
            for step in range(5):
                expect(ahead, step)
                ahead.release()


def test_errors_come_in_order_and_pass(tmp_path: Path) -> None:
    records = write_records(tmp_path / "records.flash", 160)
    extents = [extent_of(16 * i, 16) for i in range(10)]
    damaged = (0, 4, 5, 9)
    for index in damaged:
        flip_byte(records.checked.path, extents[index].offset + 5 * STRIDE)
    with FlashReader([records.checked], threads=3) as reader, open_ahead(reader, extents, 4) as ahead:
        for _ in range(3):
            held = 0
            for index in range(10):
                if index in damaged:
                    with pytest.raises(FlashReadError, match=f"from {extents[index].offset + 5 * STRIDE} "):
                        ahead.next()
                    continue
                view = ahead.next()
                np.testing.assert_array_equal(view, records.bytes_at(extents[index].offset, view.size))
                held += 1
                while held and index != 3:  # which is held across the errors behind it
                    ahead.release()
                    held -= 1
            ahead.rewind()
        settle(ahead)  # the first extents are read before the repair
        for index in damaged:
            flip_byte(records.checked.path, extents[index].offset + 5 * STRIDE)
        # What was read ahead before the repair is still bad; a rewind from inside the schedule reads again.
        with pytest.raises(FlashReadError):
            ahead.next()
        ahead.rewind()
        for index in range(10):
            np.testing.assert_array_equal(ahead.next(), records.bytes_at(extents[index].offset, 16 * STRIDE))
            ahead.release()


def test_only_errors_behind_a_held_extent_fill_the_ring(tmp_path: Path) -> None:
    records = write_records(tmp_path / "records.flash", 64)
    extents = [extent_of(16 * i, 16) for i in range(4)]
    for index in (1, 2, 3):
        flip_byte(records.checked.path, extents[index].offset)
    one = 16 * STRIDE
    with (
        FlashReader([records.checked], threads=1) as reader,
        ReadAhead(reader, extents, one, 3, True) as ahead,
    ):
        ahead.next()
        for _ in range(2):
            with pytest.raises(FlashReadError):
                ahead.next()
        with pytest.raises(ValueError, match=r"release\(\)"):
            ahead.next()  # the held slot and two failed ones: nothing left to read into
        ahead.release()
        with pytest.raises(FlashReadError):
            ahead.next()
        np.testing.assert_array_equal(ahead.next(), records.data[:16].reshape(-1))


def test_a_file_cut_while_reading_ahead_raises_only_for_its_lost_extents(tmp_path: Path) -> None:
    records = write_records(tmp_path / "records.flash", 160)
    extents = [extent_of(16 * i, 16) for i in range(10)]
    with FlashReader([records.checked], threads=2) as reader, open_ahead(reader, extents, 2) as ahead:
        ahead.next()
        with records.checked.path.open("r+b") as file:
            file.truncate(extents[5].offset + 1000)
        ahead.release()
        for _ in range(4):
            ahead.next()
            ahead.release()
        for _ in range(5):
            with pytest.raises(FlashReadError, match=r"records\.flash"):
                ahead.next()
        ahead.next()


def test_two_read_aheads_and_record_reads_share_the_threads(records: RecordFile, tmp_path: Path) -> None:
    plain, data = write_plain(tmp_path / "plain.flash", 5_000_000, 1 << 20)
    first = [extent_of(300 * i, 300) for i in range(13)]
    second = [Extent(1, 700_000 * i, 700_000) for i in range(7)]
    with (
        FlashReader([records.checked, plain], threads=2) as reader,
        open_ahead(reader, first, 3) as a,
        ReadAhead(reader, second, slot_bytes(second, 1 << 20), 2, True) as b,
    ):
        rows = np.empty((2, STRIDE), np.uint8)
        for step in range(60):
            np.testing.assert_array_equal(
                a.next(), records.bytes_at(first[step % 13].offset, first[0].nbytes)
            )
            start = second[step % 7].offset
            np.testing.assert_array_equal(b.next(), data[start : start + 700_000])
            reader.read_records(0, [step, 3999 - step], rows)
            np.testing.assert_array_equal(rows, records.data[[step, 3999 - step]])
            a.release()
            b.release()
        total = reader.stats.bytes_read
        assert total >= a.stats.bytes_read + b.stats.bytes_read - 10_000_000


def test_a_slot_holds_whole_units_and_pages_and_no_more(reader: FlashReader, records: RecordFile) -> None:
    # Sixteen records are seven pages; two units within one page; one unit across the end of a page.
    for offset, nbytes, needed in ((0, 16 * STRIDE, 7 * 4096), (100, 640, 4096), (4000, 100, 2 * 4096)):
        extent = Extent(0, HEADER_BYTES + offset, nbytes)
        with ReadAhead(reader, [extent], needed, 2, True) as ahead:
            for _ in range(5):
                np.testing.assert_array_equal(ahead.next(), records.bytes_at(extent.offset, nbytes))
                ahead.release()
        with pytest.raises(ValueError, match=f"can't hold the largest extent \\({needed} bytes"):
            ReadAhead(reader, [extent], needed - 4096, 2, True)


def test_impossible_schedules_are_refused(reader: FlashReader) -> None:
    extent, needed = extent_of(0, 16), 16 * STRIDE
    with pytest.raises(ValueError, match="at least 2 slots"):
        ReadAhead(reader, [extent], needed, 1, True)
    with pytest.raises(ValueError, match="at least one extent"):
        ReadAhead(reader, [], needed, 2, True)
    for bad in (Extent(1, HEADER_BYTES, 1), Extent(0, 0, 8192), extent_of(RECORDS, 1), Extent(0, 4096, 0)):
        with pytest.raises(IndexError):
            ReadAhead(reader, [bad], 1 << 20, 2, True)


def test_views_outlive_a_closed_read_ahead_and_reader(records: RecordFile) -> None:
    reader = FlashReader([records.checked], threads=2)
    ahead = open_ahead(reader, [extent_of(0, 16)])
    view = ahead.next()
    other = open_ahead(reader, [extent_of(0, 16)])
    ahead.close()
    ahead.close()
    for call in (ahead.next, ahead.release, ahead.rewind):
        with pytest.raises(ValueError, match="read-ahead is closed"):
            call()
    reader.close()
    with pytest.raises(ValueError, match="reader is closed"):
        other.next()
    with pytest.raises(ValueError, match="closed"):
        open_ahead(reader, [extent_of(0, 16)])
    other.close()
    del ahead, other, reader
    np.testing.assert_array_equal(view, records.data[:16].reshape(-1))


def test_a_read_ahead_dropped_without_close(records: RecordFile) -> None:
    for _ in range(20):
        with FlashReader([records.checked], threads=2) as reader:
            ahead = open_ahead(reader, [extent_of(0, 2000), extent_of(2000, 2000)])
            ahead.next()
            del ahead
            # What it was reading ended with it; the reader goes on.
            np.testing.assert_array_equal(reader.read(0, HEADER_BYTES, STRIDE), records.data[0])


def test_reads_land_in_memory_that_is_lent(reader: FlashReader, records: RecordFile) -> None:
    extents = [extent_of(first, 500) for first in (0, 500, 1000)]
    slot = -(-slot_bytes(extents) // 4096) * 4096
    room = np.zeros(3 * slot + 4096, dtype=np.uint8)
    start = -room.ctypes.data % 4096
    memory = room[start : start + 3 * slot]
    with ReadAhead(reader, extents, slot, 3, False, memory) as ahead:
        # The lender may use a slot to its end, so slots are as large as they were lent.
        assert ahead.nbytes == memory.nbytes
        for index, extent in enumerate(extents):
            found = ahead.next()
            assert 0 <= found.ctypes.data - memory.ctypes.data - index * slot < slot
            assert (found == records.bytes_at(extent.offset, extent.nbytes)).all()
            ahead.release()
    for wrong in (memory[:-4096], room[start + 1 : start + 1 + 3 * slot]):
        with pytest.raises(ValueError, match="memory"):
            ReadAhead(reader, extents, slot, 3, False, wrong)


def test_lent_memory_lives_as_long_as_who_uses_it(reader: FlashReader, records: RecordFile) -> None:
    extents = [extent_of(0, 500)]
    slot = -(-slot_bytes(extents) // 4096) * 4096
    room = mmap.mmap(-1, 2 * slot)
    owner = np.frombuffer(room, dtype=np.uint8)
    gone = weakref.ref(owner)
    ahead = ReadAhead(reader, extents, slot, 2, True, owner)
    del owner
    found = ahead.next()
    ahead.close()
    assert gone() is not None
    assert (found == records.bytes_at(extents[0].offset, extents[0].nbytes)).all()
    del found
    assert gone() is None
