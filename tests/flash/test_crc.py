"""The native CRC-32C against published vectors and a plain Python one."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ondevice.kernels import _native
from tests.support.crc32c import crc32c as oracle

# RFC 3720, appendix B.4, and the check value of the CRC catalogue.
VECTORS = [
    (b"123456789", 0xE3069283),
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (bytes(reversed(range(32))), 0x113FDB5C),
]


def crc32c(data: NDArray[np.uint8], units: Sequence[int], target: str = "auto") -> NDArray[np.uint32]:
    return _native.crc32c(data, units) if target == "auto" else _native.testing.crc32c_on(data, units, target)


def targets() -> list[str]:
    try:
        crc32c(np.zeros(1, np.uint8), (1,), "hardware")
    except ValueError:
        return ["auto", "table"]
    return ["auto", "table", "hardware"]


@pytest.mark.parametrize("target", targets())
@pytest.mark.parametrize(("data", "expected"), VECTORS)
def test_crc32c_gives_the_published_values(data: bytes, expected: int, target: str) -> None:
    crcs = crc32c(np.frombuffer(data, np.uint8), (len(data),), target)
    assert crcs.dtype == np.uint32
    assert crcs.tolist() == [expected]


@settings(max_examples=60)
@given(
    units=st.lists(st.integers(1, 400), min_size=1, max_size=5),
    nbytes=st.integers(0, 4000),
    seed=st.integers(0, 99),
)
def test_every_target_gives_the_oracles_values(units: list[int], nbytes: int, seed: int) -> None:
    data = np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)
    expected = oracle(data, tuple(units))
    for target in targets():
        np.testing.assert_array_equal(crc32c(data, units, target), expected)


@pytest.mark.parametrize("unit", [16383, 16384, 16385, 20011, 100_003, 1 << 20])
def test_long_units_are_split_without_a_trace(unit: int) -> None:
    data = np.random.default_rng(unit).integers(0, 256, unit + unit // 2, dtype=np.uint8)
    for target in targets():
        np.testing.assert_array_equal(crc32c(data, (unit,), target), crc32c(data, (unit,), "table"))
    one_by_one = [crc32c(data[:unit], (unit,))[0], crc32c(data[unit:], (unit,))[0]]
    assert crc32c(data, (unit,)).tolist() == one_by_one


@pytest.mark.parametrize(
    ("units", "target"), [((), "auto"), ((0,), "auto"), ((8, 0), "auto"), ((1 << 41,), "auto"), ((8,), "gpu")]
)
def test_impossible_arguments_are_refused(units: tuple[int, ...], target: str) -> None:
    with pytest.raises(ValueError, match=r"unit|target"):
        crc32c(np.zeros(64, np.uint8), units, target)


def test_strided_data_is_refused_instead_of_copied() -> None:
    with pytest.raises(TypeError):
        crc32c(np.zeros(64, np.uint8)[::2], (8,))


def test_other_threads_run_meanwhile() -> None:
    data = np.zeros(64 << 20, np.uint8)
    started, finished = threading.Event(), []

    def compute() -> None:
        started.set()
        crc32c(data, (4096,), "table")
        finished.append(True)

    interval = sys.getswitchinterval()
    # So long that only a released GIL lets this thread go on before the other one has finished.
    sys.setswitchinterval(100.0)
    try:
        thread = threading.Thread(target=compute)
        thread.start()
        started.wait()
        overtaken = not finished
        thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert overtaken
