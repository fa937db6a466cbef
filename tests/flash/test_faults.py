"""Storage that misbehaves: a preloaded shim makes reads fail, come short or stall (Linux, needs a compiler).

What each test asserts is a function of this file that runs in a process of its own under the shim.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.faults import assert_holds_under, output_of
from tests.support.flash_files import STRIDE


def every_byte_is_right(folder: Path) -> None:
    import os

    import numpy as np

    from ondevice.flash.read_ahead import Extent, ReadAhead
    from ondevice.flash.reader import FlashReader
    from ondevice.kernels import _native
    from tests.support.flash_files import HEADER_BYTES, PARTS, STRIDE, slot_bytes, write_plain, write_records

    records = write_records(folder / "records.flash", 3000)
    plain, data = write_plain(folder / "plain.flash", 2_500_001, 1 << 20)
    extents = [Extent(0, HEADER_BYTES + 250 * STRIDE * i, 250 * STRIDE) for i in range(12)]
    for io in ("direct", "buffered"):
        with FlashReader([records.checked, plain], io=io, threads=3, ring=True) as reader:
            assert reader.has_ring == (io == "direct" and "FLASH_FAULT_RING" in os.environ)
            np.testing.assert_array_equal(reader.read(1, 0, data.size), data)
            rows = np.empty((200, STRIDE), np.uint8)
            ids = np.random.default_rng(0).integers(0, 3000, 200)
            reader.read_records(0, ids, rows)
            np.testing.assert_array_equal(rows, records.data[ids])
            wanted, batch = np.unique(ids).astype(np.int32), _native.RecordBatch(reader.native, urgent=True)
            slots = np.zeros((len(wanted), PARTS[1]), np.uint8)
            targets = slots.ctypes.data + np.arange(len(wanted), dtype=np.uint64) * PARTS[1]
            batch.start(0, 1, 1, wanted, targets, 0)
            batch.finish()
            np.testing.assert_array_equal(slots, records.data[wanted, PARTS[0] : sum(PARTS[:2])])
            with ReadAhead(reader, extents, slot_bytes(extents), 3, True) as ahead:
                for step in range(24):
                    extent = extents[step % 12]
                    np.testing.assert_array_equal(
                        ahead.next(), records.bytes_at(extent.offset, extent.nbytes)
                    )
                    ahead.release()


@pytest.mark.fast("4096-5-eintr")
@pytest.mark.parametrize("fault", ["short", "eintr"])
@pytest.mark.parametrize("every", [2, 5])
@pytest.mark.parametrize("block", [512, 4096])
def test_short_and_interrupted_reads_go_on(
    shim: Path, tmp_path: Path, fault: str, every: int, block: int
) -> None:
    settings = {"fault": fault, "fault_every": every, "fault_block": block}
    assert_holds_under(shim, tmp_path, every_byte_is_right, **settings)


@pytest.mark.fast("end-1")
@pytest.mark.parametrize(
    ("fault", "every"), [("short", 2), ("eintr", 2), ("eio", 3), ("end", 3), ("eio", 1), ("end", 1)]
)
def test_what_fails_in_the_ring_is_read_again(
    shim: Path, tmp_path: Path, io_uring: None, fault: str, every: int
) -> None:
    settings = {"fault": fault, "fault_every": every, "fault_ring": "only"}
    assert_holds_under(shim, tmp_path, every_byte_is_right, **settings)


@pytest.mark.fast("short")
@pytest.mark.parametrize("fault", ["short", "eintr"])
def test_short_and_interrupted_reads_go_on_in_the_ring_and_after_it(
    shim: Path, tmp_path: Path, io_uring: None, fault: str
) -> None:
    settings = {"fault": fault, "fault_every": 2, "fault_ring": "also"}
    assert_holds_under(shim, tmp_path, every_byte_is_right, **settings)


def ring_errors_are_typed_and_pass(folder: Path) -> None:
    import os

    import numpy as np
    import pytest

    from ondevice.errors import FlashReadError
    from ondevice.flash.read_ahead import Extent, ReadAhead
    from ondevice.flash.reader import FlashReader
    from ondevice.kernels import _native
    from tests.support.flash_files import HEADER_BYTES, PARTS, STRIDE, slot_bytes, write_records

    message = {
        "eio": r"records\.flash: read at byte \d+ failed: Input/output error",
        "end": r"records\.flash: read at byte \d+ failed: reads keep coming back short",
        "damage": r"records\.flash: the bytes from \d+ don't match their checksum",
    }[os.environ["FLASH_FAULT"]]
    records = write_records(folder / "records.flash", 800)
    extents = [Extent(0, HEADER_BYTES + 16 * STRIDE * i, 16 * STRIDE) for i in range(10)]
    ids = np.arange(0, 800, 40, dtype=np.int32)
    wanted = records.data[ids, PARTS[0] : sum(PARTS[:2])]
    slots = np.zeros_like(wanted)
    targets = slots.ctypes.data + np.arange(len(ids), dtype=np.uint64) * PARTS[1]
    off = folder / "off"
    off.touch()
    with FlashReader([records.checked], io="direct", threads=4, ring=True) as reader:
        assert reader.has_ring
        batch = _native.RecordBatch(reader.native, urgent=True)
        with ReadAhead(reader, extents, slot_bytes(extents), 3, True) as ahead:

            def read_all() -> None:
                ahead.rewind()
                for extent in extents:
                    expected = records.bytes_at(extent.offset, extent.nbytes)
                    np.testing.assert_array_equal(ahead.next(), expected)
                    ahead.release()

            for _ in range(3):
                off.unlink()
                slots[:] = 0
                batch.start(0, 1, 1, ids, targets, 0)
                with pytest.raises(FlashReadError, match=message):
                    batch.finish()
                delivered = slots.any(axis=1)  # what is damaged beside the wanted bytes is none the worse
                np.testing.assert_array_equal(slots[delivered], wanted[delivered])
                assert not delivered.all()
                with pytest.raises(FlashReadError, match=message):
                    read_all()
                off.touch()
                batch.start(0, 1, 1, ids, targets, 0)
                batch.finish()
                np.testing.assert_array_equal(slots, wanted)
                read_all()


@pytest.mark.fast("eio-also", "damage-only")
@pytest.mark.parametrize(("fault", "ring"), [("eio", "also"), ("end", "also"), ("damage", "only")])
def test_errors_in_the_ring_and_after_it_are_typed_and_pass(
    shim: Path, tmp_path: Path, io_uring: None, fault: str, ring: str
) -> None:
    settings = {"fault": fault, "fault_every": 1, "fault_ring": ring, "fault_off": tmp_path / "off"}
    assert_holds_under(shim, tmp_path, ring_errors_are_typed_and_pass, **settings)


def bytes_of_small_reads(folder: Path) -> None:
    import mmap
    import os

    import numpy as np

    from ondevice.flash.reader import FlashReader
    from tests.support.flash_files import STRIDE, write_records

    records = write_records(folder / "records.flash", 300)
    # Not a name that the shim knows: what the device itself allows.
    other = folder / "other"
    other.write_bytes(bytes(8192))
    file = os.open(other, os.O_RDONLY | os.O_DIRECT)
    try:
        os.preadv(file, [memoryview(mmap.mmap(-1, 4096))[:512]], 512)
    except OSError:
        print("pages only")
    with FlashReader([records.checked], io="direct", threads=2) as reader:
        ids = np.arange(0, 300, 10)
        rows = np.empty((len(ids), STRIDE), np.uint8)
        reader.read_records(0, ids, rows)
        np.testing.assert_array_equal(rows, records.data[ids])
        print(reader.stats.bytes_read)


def test_small_reads_are_widened_to_blocks(shim: Path, tmp_path: Path) -> None:
    header = Path("/usr/include/linux/stat.h")
    if not header.exists() or "STATX_DIOALIGN" not in header.read_text():
        pytest.skip("needs Linux headers that know what direct reads must be aligned to")
    read = {}
    for block in (512, 4096):
        printed = output_of(
            shim, tmp_path, bytes_of_small_reads, fault="eintr", fault_every=5, fault_block=block
        )
        if "pages only" in printed:
            pytest.skip("direct reads are of whole pages here")
        read[block] = int(printed)
    wanted = 30 * STRIDE
    assert wanted <= read[512] < wanted + 30 * 2 * 512
    assert read[512] + 30 * 1024 < read[4096] < wanted + 30 * 2 * 4096


def io_errors_come_in_order_and_pass(folder: Path) -> None:
    import numpy as np
    import pytest

    from ondevice.errors import FlashReadError
    from ondevice.flash.read_ahead import Extent, ReadAhead
    from ondevice.flash.reader import FlashReader
    from tests.support.flash_files import HEADER_BYTES, STRIDE, slot_bytes, write_records

    records = write_records(folder / "records.flash", 800)
    extents = [Extent(0, HEADER_BYTES + 16 * STRIDE * i, 16 * STRIDE) for i in range(50)]
    (folder / "off").touch()
    with FlashReader([records.checked], threads=3) as reader:
        (folder / "off").unlink()
        messages = []
        for i in range(200):
            try:
                got = reader.read(0, HEADER_BYTES + i * STRIDE, STRIDE)
                np.testing.assert_array_equal(got, records.data[i])
            except FlashReadError as error:
                offset = (HEADER_BYTES + i * STRIDE) // 4096 * 4096
                messages.append(
                    (str(error), f"records.flash: read at byte {offset} failed: Input/output error")
                )
        assert 20 < len(messages) < 180
        assert all(expected in message for message, expected in messages)
        with ReadAhead(reader, extents, slot_bytes(extents), 4, True) as ahead:
            failures = 0
            for step in range(200):
                extent = extents[step % 50]
                try:
                    view = ahead.next()
                except FlashReadError:
                    failures += 1
                    continue
                np.testing.assert_array_equal(view, records.bytes_at(extent.offset, extent.nbytes))
                ahead.release()
            assert 20 < failures < 180, failures
            with pytest.raises(FlashReadError):
                reader.read_records(0, range(0, 800, 2), np.empty((400, STRIDE), np.uint8))
            (folder / "off").touch()
            while True:  # what was read ahead may still have failed; stand inside the schedule
                try:
                    ahead.next()
                    break
                except FlashReadError:
                    continue
            ahead.rewind()
            for step in range(100):
                extent = extents[step % 50]
                np.testing.assert_array_equal(ahead.next(), records.bytes_at(extent.offset, extent.nbytes))
                ahead.release()


def test_io_errors_are_typed_in_order_and_pass(shim: Path, tmp_path: Path) -> None:
    assert_holds_under(
        shim,
        tmp_path,
        io_errors_come_in_order_and_pass,
        fault="eio",
        fault_every=3,
        fault_off=tmp_path / "off",
    )


def closing_waits_for_one_read(folder: Path) -> None:
    import os
    import threading
    import time

    from ondevice.flash.read_ahead import Extent, ReadAhead
    from ondevice.flash.reader import FlashReader
    from tests.support.flash_files import HEADER_BYTES, STRIDE, slot_bytes, write_records

    # Extents of four pieces: when the end comes, most of what the consumer waits for hasn't been asked for.
    records = write_records(folder / "records.flash", 4000)
    extents = [Extent(0, HEADER_BYTES + first * STRIDE, 2000 * STRIDE) for first in (0, 2000)]
    (folder / "off").touch()
    reader = FlashReader([records.checked], threads=2, ring=True)
    assert reader.has_ring == ("FLASH_FAULT_RING" in os.environ)
    (folder / "off").unlink()
    outcomes: list[str] = []

    def consume(ahead: ReadAhead) -> None:
        try:
            while True:
                ahead.next()
                ahead.release()
        except ValueError as error:
            outcomes.append(str(error))

    for end in ("ahead", "reader"):
        ahead = ReadAhead(reader, extents, slot_bytes(extents), 20, True)
        consumer = threading.Thread(target=consume, args=(ahead,))
        consumer.start()
        time.sleep(0.25)
        start = time.monotonic()
        ahead.close() if end == "ahead" else reader.close()
        # One stalled read of 0.5 s per thread, not the 20 s of the slots still to be filled.
        assert time.monotonic() - start < 5
        consumer.join()
        ahead.close()
    assert outcomes == ["the read-ahead is closed", "the read-ahead's reader is closed"]


def test_closing_waits_for_the_reads_in_flight_only(shim: Path, tmp_path: Path) -> None:
    settings = {"fault": "stall", "fault_every": 1, "fault_stall_ms": 500, "fault_off": tmp_path / "off"}
    assert_holds_under(shim, tmp_path, closing_waits_for_one_read, **settings)


def test_closing_waits_for_the_reads_in_the_ring_only(shim: Path, tmp_path: Path, io_uring: None) -> None:
    settings = {"fault": "stall", "fault_every": 1, "fault_stall_ms": 500, "fault_off": tmp_path / "off"}
    assert_holds_under(shim, tmp_path, closing_waits_for_one_read, **settings, fault_ring="only")


def refused_direct_reads_are_noticed(folder: Path) -> None:
    import logging

    import numpy as np
    import pytest

    from ondevice.errors import BackendUnavailableError
    from ondevice.flash.reader import FlashReader
    from tests.support.flash_files import HEADER_BYTES, STRIDE, write_records

    records = write_records(folder / "records.flash", 100)
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("ondevice").addHandler(handler)
    with pytest.raises(BackendUnavailableError, match=r"records\.flash.*refuses direct reads"):
        FlashReader([records.checked], io="direct")
    assert not messages
    with FlashReader([records.checked], io="auto") as reader:
        assert reader.io == "buffered"
        np.testing.assert_array_equal(reader.read(0, HEADER_BYTES, STRIDE), records.data[0])
    assert len(messages) == 1
    assert "records.flash" in messages[0]


@pytest.mark.parametrize("fault", ["refuse_open", "refuse_read"])
def test_a_file_system_that_refuses_direct_reads(shim: Path, tmp_path: Path, fault: str) -> None:
    assert_holds_under(shim, tmp_path, refused_direct_reads_are_noticed, fault=fault)
