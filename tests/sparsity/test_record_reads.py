"""A batch of neurons read whole or row by row: the same bytes, and after an error nothing is under way."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ondevice.api import Model, load
from ondevice.bundle.layout import neuron_file_name
from ondevice.errors import FlashReadError
from ondevice.flash.reader import FlashReader
from ondevice.runtime.models import find_model
from ondevice.sparsity.record_reads import Parts, RecordReads, one_by_one
from tests.support.chat import PROMPT, fetch_with, squeeze
from tests.support.fault_rounds import assert_nothing_leaked
from tests.support.flash_files import HEADER_BYTES, PARTS, STRIDE, RecordFile, flip_byte, write_records

RECORDS = 300
WHOLE = Parts(0, 2)
IDS = np.array([0, 4, 5, 77, 299], dtype=np.int32)


def slots(count: int) -> tuple[np.ndarray, np.ndarray]:
    """(count, STRIDE) empty slots, and their addresses."""
    rows = np.zeros((count, STRIDE), np.uint8)
    return rows, rows.ctypes.data + np.arange(count, dtype=np.uint64) * np.uint64(STRIDE)


def test_parts_keep_their_places() -> None:
    assert one_by_one(Parts(0, 3), (10, 20, 30)) == [Parts(0, 1), Parts(1, 1, 10), Parts(2, 1, 30)]
    assert one_by_one(Parts(1, 2), (10, 20, 30)) == [Parts(1, 1), Parts(2, 1, 20)]
    assert one_by_one(Parts(1, 1, 7), (10, 20)) == [Parts(1, 1, 7)]


@pytest.mark.parametrize("groups", [[WHOLE], one_by_one(WHOLE, PARTS)])
def test_whole_or_one_by_one_the_bytes_are_the_same(
    reader: FlashReader, records: RecordFile, groups: list[Parts]
) -> None:
    reads = RecordReads(reader, groups, gap_bytes=0)
    for _ in range(3):
        rows, addresses = slots(len(IDS))
        before = reader.stats.reads
        reads.start(0, IDS, addresses)
        reads.finish()
        np.testing.assert_array_equal(rows, records.data[IDS])
        # Records 4 and 5 touch, their parts don't.
        assert reader.stats.reads - before == (4 if groups == [WHOLE] else 10)
    reads.close()


def test_damage_in_any_part_fails_the_batch_and_not_the_next(tmp_path: Path) -> None:
    records = write_records(tmp_path / "records.flash", RECORDS)
    flip_byte(records.checked.path, HEADER_BYTES + 4 * STRIDE)
    flip_byte(records.checked.path, HEADER_BYTES + 77 * STRIDE + PARTS[0])
    with FlashReader([records.checked], threads=3) as reader:
        reads = RecordReads(reader, one_by_one(WHOLE, PARTS), gap_bytes=0)
        for ids, damaged in [(IDS, 4 * STRIDE), (IDS[3:], 77 * STRIDE + PARTS[0])]:
            rows, addresses = slots(len(ids))
            reads.start(0, ids, addresses)
            with pytest.raises(FlashReadError, match=f"from {HEADER_BYTES + damaged} "):
                reads.finish()
        rows, addresses = slots(2)
        reads.start(0, IDS[[0, 2]], addresses)
        reads.finish()
        np.testing.assert_array_equal(rows, records.data[IDS[[0, 2]]])
        reads.close()


def test_what_had_begun_is_waited_for_where_the_rest_cannot(reader: FlashReader, records: RecordFile) -> None:
    reads = RecordReads(reader, [Parts(0, 1), Parts(5, 1)], gap_bytes=0)
    rows, addresses = slots(len(IDS))
    for _ in range(2):
        # Had the first part still been under way, the second time would have refused it.
        with pytest.raises(IndexError, match="from part 5"):
            reads.start(0, IDS, addresses)
        np.testing.assert_array_equal(rows[:, : PARTS[0]], records.data[IDS, : PARTS[0]])


def text(model: Model, **options: Any) -> tuple[int, ...]:
    return model.generate(PROMPT, max_tokens=30, logit_bias={0: -math.inf}, **options).tokens


def test_reads_row_by_row_that_fail_are_errors_and_the_session_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in filter(Path.is_file, find_model(None).iterdir()):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    with load(tmp_path, sparsity="predicted") as model:
        expected = text(model)
    fetch_with(monkeypatch, bundled=False, prefetch=False, fill_ahead=False)
    with load(tmp_path, sparsity="predicted") as model:
        squeeze(model, 1)
        assert text(model) == expected
        path = tmp_path / neuron_file_name(1)
        sound = path.read_bytes()
        path.write_bytes(sound[:4096] + bytes(len(sound) - 4096))
        with pytest.raises(FlashReadError, match=path.name):
            text(model)
        assert_nothing_leaked(model)
        path.write_bytes(sound)
        assert text(model) == expected
        assert_nothing_leaked(model)
