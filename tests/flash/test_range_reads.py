"""Ranges read straight to given addresses: exact bytes, any order of waiting, damage found."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from ondevice.errors import FlashReadError
from ondevice.flash.reader import FlashReader
from ondevice.kernels import _native
from tests.support.flash_files import HEADER_BYTES, STRIDE, RecordFile, flip_byte, write_records

PAGE = 4096
RECORDS = 3000


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> RecordFile:
    return write_records(tmp_path_factory.mktemp("ranges") / "records", RECORDS)


@pytest.fixture(params=["auto", "buffered"])
def reader(file: RecordFile, request: pytest.FixtureRequest) -> FlashReader:
    return FlashReader([file.checked], request.param, 3)


class Target:
    """Memory for `count` records from `first` on, which lie in their page as in the file."""

    def __init__(self, first: int, count: int) -> None:
        self.offset, self.nbytes = HEADER_BYTES + first * STRIDE, count * STRIDE
        self.phase = self.offset % PAGE
        self.memory: NDArray[np.uint8] = _native.allocate(self.nbytes + 2 * PAGE)
        self.address = self.memory.__array_interface__["data"][0] + self.phase

    def assert_holds(self, file: RecordFile) -> None:
        found = self.memory[self.phase : self.phase + self.nbytes]
        np.testing.assert_array_equal(found, file.bytes_at(self.offset, self.nbytes))


def test_ranges_arrive_whatever_the_order_of_waiting(reader: FlashReader, file: RecordFile) -> None:
    reads = _native.RangeReads(reader.native)
    targets = [Target(first, count) for first, count in ((0, 1), (7, 3), (400, 1200), (2999, 1), (16, 16))]
    tickets = [reads.begin(0, it.offset, it.nbytes, it.address) for it in targets]
    for at in (3, 0, 2, 4, 1):
        reads.wait(tickets[at])
        targets[at].assert_holds(file)
    with pytest.raises(ValueError, match="ticket"):
        reads.wait(tickets[0])
    reads.close()


def test_damage_is_found_in_its_range_alone(tmp_path: Path) -> None:
    file = write_records(tmp_path / "records", 100)
    flip_byte(file.checked.path, HEADER_BYTES + 50 * STRIDE)
    with FlashReader([file.checked], "auto", 2) as reader:
        reads, targets = _native.RangeReads(reader.native), [Target(0, 30), Target(40, 20), Target(70, 30)]
        tickets = [reads.begin(0, it.offset, it.nbytes, it.address) for it in targets]
        with pytest.raises(FlashReadError, match="checksum"):
            reads.wait(tickets[1])
        for at in (0, 2):
            reads.wait(tickets[at])
            targets[at].assert_holds(file)
        reads.close()


def test_impossible_ranges_are_refused(reader: FlashReader) -> None:
    reads, target = _native.RangeReads(reader.native), Target(8, 4)
    with pytest.raises(ValueError, match="whole checked units"):
        reads.begin(0, target.offset, target.nbytes - 1, target.address)
    with pytest.raises(ValueError, match="lies in its page"):
        reads.begin(0, target.offset, target.nbytes, target.address + 64)
    with pytest.raises(IndexError, match="outside"):
        reads.begin(0, HEADER_BYTES + RECORDS * STRIDE, STRIDE, target.address)
    with pytest.raises(IndexError):
        reads.begin(1, target.offset, target.nbytes, target.address)
    reads.close()


def test_after_cancel_tickets_are_forgotten_and_others_can_begin(
    reader: FlashReader, file: RecordFile
) -> None:
    reads, targets = _native.RangeReads(reader.native), [Target(first, 300) for first in range(0, 2400, 300)]
    tickets = [reads.begin(0, it.offset, it.nbytes, it.address) for it in targets]
    reads.cancel()
    with pytest.raises(ValueError, match="ticket"):
        reads.wait(tickets[-1])
    reads.wait(reads.begin(0, targets[0].offset, targets[0].nbytes, targets[0].address))
    targets[0].assert_holds(file)
    reads.close()
    with pytest.raises(ValueError, match="closed"):
        reads.begin(0, targets[0].offset, targets[0].nbytes, targets[0].address)


def test_ranges_ahead_arrive_are_dropped_or_hurried(reader: FlashReader, file: RecordFile) -> None:
    reads, large = _native.RangeReads(reader.native), Target(0, 3000)
    kept, dropped, hurried = (Target(first, 10) for first in (0, 100, 200))
    begin = lambda it, ahead: reads.begin(0, it.offset, it.nbytes, it.address, ahead)  # noqa: E731
    for _ in range(100):
        demanded = begin(large, False)
        tickets = [begin(it, True) for it in (kept, dropped, hurried)]
        reads.hurry(tickets[2])
        reads.hurry(tickets[2])
        reads.hurry(demanded)
        assert not reads.drop(tickets[2])
        # Others wait for the large one, unless this thread didn't run until that had arrived.
        if was_dropped := reads.drop(tickets[1]):
            break
        reads.cancel()
    assert was_dropped
    with pytest.raises(ValueError, match="ticket"):
        reads.arrived(tickets[1])
    for ticket, target in ((tickets[2], hurried), (demanded, large), (tickets[0], kept)):
        reads.wait(ticket)
        target.assert_holds(file)
    ended = begin(dropped, True)
    while not reads.arrived(ended):
        time.sleep(0.001)
    assert not reads.drop(ended)
    begin(kept, True)
    reads.cancel()
    with pytest.raises(ValueError, match="ticket"):
        reads.wait(ended)
    reads.close()


def test_a_closed_reader_ends_waiting(file: RecordFile) -> None:
    reader = FlashReader([file.checked], "auto", 1)
    reads, target = _native.RangeReads(reader.native), Target(0, 3000)
    reader.close()
    with pytest.raises(ValueError, match="closed"):
        reads.begin(0, target.offset, target.nbytes, target.address)
    reads.close()
