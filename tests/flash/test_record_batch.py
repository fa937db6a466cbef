"""Records from a part on, read into slots on demand: exact bytes, few reads, damage found."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ondevice.budget.sizes import FETCH_DEPTH, fetch_shape
from ondevice.errors import FlashReadError
from ondevice.flash.reader import FlashReader
from ondevice.kernels import _native
from tests.support.flash_files import HEADER_BYTES, PARTS, STRIDE, RecordFile, flip_byte, write_records

RECORDS = 600
OFFSETS = (0, PARTS[0])


class Slots:
    """Slots for parts of some records, in an order of their own, filled with what no record has."""

    def __init__(self, ids: list[int], part: int, parts: int = 1) -> None:
        self.ids = np.array(ids, dtype=np.int32)
        self.start = OFFSETS[part]
        self.nbytes = sum(PARTS[part : part + parts])
        self.rows = np.zeros((len(ids) + 1, self.nbytes + 8), np.uint8)
        self.places = np.random.default_rng(len(ids)).permutation(len(ids))

    @property
    def targets(self) -> NDArray[np.uint64]:
        base, stride = self.rows.ctypes.data, self.rows.strides[0]
        return np.array([base + int(place) * stride for place in self.places], dtype=np.uint64)

    def assert_hold(self, records: RecordFile) -> None:
        for record, place in zip(self.ids, self.places, strict=True):
            expected = records.data[record, self.start : self.start + self.nbytes]
            np.testing.assert_array_equal(self.rows[place, : self.nbytes], expected)
        # Nothing beside what is wanted, and nothing behind the last slot.
        assert not self.rows[:, self.nbytes :].any()
        assert not self.rows[len(self.ids)].any()


ascending = st.lists(st.integers(0, RECORDS - 1), max_size=80, unique=True).map(sorted)


@settings(max_examples=30)
@given(
    ids=ascending,
    which=st.sampled_from([(0, 1), (0, 2), (1, 1)]),
    gap=st.sampled_from([0, 700, 5000, 1 << 20]),
)
def test_any_records_read_their_bytes(
    reader: FlashReader, records: RecordFile, ids: list[int], which: tuple[int, int], gap: int
) -> None:
    batch, slots = _native.RecordBatch(reader.native, urgent=True), Slots(ids, *which)
    batch.start(0, *which, slots.ids, slots.targets, gap)
    batch.finish()
    slots.assert_hold(records)


def test_a_gap_that_may_be_read_through_makes_one_read_of_two(reader: FlashReader) -> None:
    def bytes_read(ids: list[int], gap: int) -> int:
        batch, slots = _native.RecordBatch(reader.native, urgent=True), Slots(ids, 1)
        batch.start(0, 1, 1, slots.ids, slots.targets, gap)
        batch.finish()
        return batch.stats()[0]

    # Between the second parts of records 8 and 18 lie nine whole records and a first part.
    between = 9 * STRIDE + PARTS[0]
    apart, together = bytes_read([8, 18], between - 1), bytes_read([8, 18], between)
    assert apart == bytes_read([8], 0) + bytes_read([18], 0)
    assert together > apart
    batch, slots = _native.RecordBatch(reader.native, urgent=True), Slots([8, 18], 1)
    for gap, reads in [(between - 1, 2), (between, 1)]:
        before = batch.stats()[3]
        batch.start(0, 1, 1, slots.ids, slots.targets, gap)
        batch.finish()
        assert batch.stats()[3] - before == reads
    # One read has 64 KiB at most, however near its records are.
    before, everything = batch.stats()[3], Slots(list(range(RECORDS)), 1)
    batch.start(0, 1, 1, everything.ids, everything.targets, 1 << 20)
    batch.finish()
    in_a_run = ((64 << 10) - PARTS[1]) // STRIDE + 1
    assert batch.stats()[3] - before == -(-RECORDS // in_a_run)


def test_staging_is_what_the_plan_counts(records: RecordFile) -> None:
    with FlashReader([records.checked], threads=FETCH_DEPTH, ring=True) as ringed:
        batch, slots = _native.RecordBatch(ringed.native, urgent=True), Slots(list(range(0, RECORDS, 2)), 0)
        for _ in range(20):
            batch.start(0, 0, 1, slots.ids, slots.targets, 0)
            batch.finish()
        assert 0 < ringed.staging_bytes <= fetch_shape(STRIDE).nbytes
        slots.assert_hold(records)


@pytest.mark.parametrize("ring", [False, True])
def test_what_lies_on_blocks_is_read_straight_to_its_slot(tmp_path: Path, ring: bool) -> None:
    parts, slot_bytes = (4096, 8192), 12288
    records = write_records(tmp_path / "records.flash", 40, parts=parts)
    flip_byte(records.checked.path, HEADER_BYTES + 9 * slot_bytes + parts[0] + 5)
    memory = _native.allocate(41 * slot_bytes)
    rows = memory.reshape(41, slot_bytes)
    targets = memory.ctypes.data + np.arange(40, dtype=np.uint64) * np.uint64(slot_bytes)

    def read(ids: list[int], offset: int, first: int, count: int, gap_bytes: int) -> None:
        rows[:] = 0
        where = targets[: len(ids)] + np.uint64(offset)
        batch.start(0, first, count, np.array(ids, np.int32), where, gap_bytes)
        batch.finish()
        nbytes = sum(parts[first : first + count])
        expected = np.zeros_like(rows)
        skipped = sum(parts[:first])
        expected[: len(ids), offset : offset + nbytes] = records.data[ids, skipped : skipped + nbytes]
        np.testing.assert_array_equal(rows, expected)

    with FlashReader([records.checked], io="direct", threads=3, ring=ring) as reader:
        batch = _native.RecordBatch(reader.native, urgent=True)
        reader.trim()
        for ids in ([0, 1, 2, 30, 39], list(range(10, 40, 2))):
            read(ids, 0, 0, 2, -1)
            read(ids, 0, 1, 1, -1)
            read(ids, 4096, 1, 1, -1)
        for _ in range(3):
            with pytest.raises(FlashReadError, match=f"from {HEADER_BYTES + 9 * slot_bytes + parts[0]} "):
                read([2, 9, 30], 0, 0, 2, -1)
            read([2, 9, 30], 0, 0, 1, -1)
        assert reader.staging_bytes == 0
        # Slots that don't begin on a block, and neighbours read together, have theirs copied.
        read([2, 30], 8, 1, 1, -1)
        read([2, 3, 30], 0, 0, 2, 0)
        assert reader.staging_bytes > 0
        batch.close()


def test_two_batches_are_under_way_at_once(reader: FlashReader, records: RecordFile) -> None:
    batches = [_native.RecordBatch(reader.native, urgent=True) for _ in range(2)]
    slots = [Slots(list(range(first, 300, 2)), 1) for first in (0, 1)]
    for _ in range(3):
        for batch, half in zip(batches, slots, strict=True):
            half.rows[:] = 0
            batch.start(0, 1, 1, half.ids, half.targets, 0)
        for batch, half in zip(batches, slots, strict=True):
            batch.finish()
            half.assert_hold(records)


def test_damage_names_the_lowest_record_and_the_next_batch_is_sound(tmp_path: Path) -> None:
    records = write_records(tmp_path / "records.flash", 200)
    for record in (50, 120):
        flip_byte(records.checked.path, HEADER_BYTES + record * STRIDE + PARTS[0] + 5)
    flip_byte(records.checked.path, HEADER_BYTES + 70 * STRIDE + 5)
    with FlashReader([records.checked], threads=3) as reader:
        batch = _native.RecordBatch(reader.native, urgent=True)
        for _ in range(5):
            slots = Slots(list(range(0, 200, 10)), 1)
            batch.start(0, 1, 1, slots.ids, slots.targets, 0)
            with pytest.raises(FlashReadError, match=f"from {HEADER_BYTES + 50 * STRIDE + PARTS[0]} "):
                batch.finish()
            sound = Slots([3, 49, 51, 121], 1)
            batch.start(0, 1, 1, sound.ids, sound.targets, 0)
            batch.finish()
            sound.assert_hold(records)
        # What lies between two parts that are wanted isn't.
        around = Slots([49, 51], 1)
        batch.start(0, 1, 1, around.ids, around.targets, 1 << 16)
        batch.finish()
        around.assert_hold(records)
        # Nor is a damaged first part where only the second is wanted; whole records have it.
        second = Slots([70], 1)
        batch.start(0, 1, 1, second.ids, second.targets, 0)
        batch.finish()
        second.assert_hold(records)
        whole = Slots([69, 70], 0, 2)
        batch.start(0, 0, 2, whole.ids, whole.targets, 0)
        with pytest.raises(FlashReadError, match=f"from {HEADER_BYTES + 70 * STRIDE} "):
            batch.finish()


def test_a_file_that_shrank_is_an_error(tmp_path: Path) -> None:
    records = write_records(tmp_path / "records.flash", 100)
    with FlashReader([records.checked], threads=2) as reader:
        os.truncate(records.checked.path, HEADER_BYTES + 60 * STRIDE)
        batch, slots = _native.RecordBatch(reader.native, urgent=True), Slots([10, 90], 1)
        batch.start(0, 1, 1, slots.ids, slots.targets, 0)
        with pytest.raises(FlashReadError):
            batch.finish()


@pytest.mark.parametrize("ids", [[3, 3], [5, 4], [-1, 2], [2, RECORDS]])
def test_ids_that_do_not_ascend_within_the_file_are_refused(reader: FlashReader, ids: list[int]) -> None:
    batch, slots = _native.RecordBatch(reader.native, urgent=True), Slots(ids, 1)
    with pytest.raises(IndexError):
        batch.start(0, 1, 1, slots.ids, slots.targets, 0)
    batch.finish()


def test_misuse_is_refused(reader: FlashReader, records: RecordFile) -> None:
    batch, slots = _native.RecordBatch(reader.native, urgent=True), Slots([1, 2], 1)
    for first, parts in [(2, 1), (1, 2), (0, 3), (0, 0), (2, 0), (1 << 63, 1 << 63)]:
        with pytest.raises(IndexError, match=f"{parts} parts from part {first} on of 2"):
            batch.start(0, first, parts, slots.ids, slots.targets, 0)
    with pytest.raises(ValueError, match=r"\(n,\)"):
        batch.start(0, 1, 1, slots.ids, slots.targets[:1], 0)
    batch.start(0, 1, 1, slots.ids, slots.targets, 0)
    with pytest.raises(ValueError, match="finish"):
        batch.start(0, 1, 1, slots.ids, slots.targets, 0)
    batch.finish()
    slots.assert_hold(records)
    batch.close()
    batch.close()
    with pytest.raises(ValueError, match="closed"):
        batch.start(0, 1, 1, slots.ids, slots.targets, 0)


def test_close_waits_for_what_is_being_read(tmp_path: Path) -> None:
    records = write_records(tmp_path / "records.flash", 3000)
    for _ in range(8):
        with FlashReader([records.checked], threads=4) as reader:
            batch, slots = _native.RecordBatch(reader.native, urgent=True), Slots(list(range(0, 3000, 2)), 1)
            batch.start(0, 1, 1, slots.ids, slots.targets, 0)
            batch.close()
            seen = slots.rows.copy()
            with pytest.raises(ValueError, match="closed"):
                batch.finish()
        # The reader's threads have ended: had one still been at it, the slots would have changed.
        np.testing.assert_array_equal(slots.rows, seen)
        # A slot is untouched or whole.
        for record, place in zip(slots.ids, slots.places, strict=True):
            part = slots.rows[place, : PARTS[1]]
            assert not part.any() or np.array_equal(part, records.data[record, PARTS[0] :])
