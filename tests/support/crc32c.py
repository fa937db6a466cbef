"""CRC32C (Castagnoli) in numpy: the oracle for the native one, and its stand-in in tests of the format."""

from __future__ import annotations

from functools import cache

import numpy as np

_POLYNOMIAL = 0x82F63B78
_LANE_BYTES = 256


def _table() -> np.ndarray:
    values = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        values = (values >> np.uint32(1)) ^ np.where(values & 1, np.uint32(_POLYNOMIAL), np.uint32(0))
    return values


_TABLE = _table()


def crc32c(data: np.ndarray, units: tuple[int, ...]) -> np.ndarray:
    """CRC32C (uint32) of consecutive units of `data` (uint8, 1-D). Lengths repeat; the last may be short."""
    cycle = sum(units)
    cycles = data.size // cycle
    rows = data[: cycles * cycle].reshape(cycles, cycle)
    result = np.empty((cycles, len(units)), np.uint32)
    start = 0
    for unit, nbytes in enumerate(units):
        result[:, unit] = _crc_of_rows(rows[:, start : start + nbytes])
        start += nbytes
    tail = data[cycles * cycle :]
    rest = []
    for nbytes in units:
        if tail.size:
            rest.append(_crc_of_rows(tail[None, :nbytes]))
            tail = tail[nbytes:]
    return np.concatenate((result.reshape(-1), *rest))


def _crc_of_rows(rows: np.ndarray) -> np.ndarray:
    """CRC32C of each row of uint8 (rows, n)."""
    state = np.full(rows.shape[0], 0xFFFFFFFF, np.uint32)
    if not rows.size:
        return ~state
    lanes = rows.shape[1] // _LANE_BYTES
    if lanes:
        # The CRC is linear: lanes are fed alone from a zero state, then joined one after the other.
        cut = rows[:, : lanes * _LANE_BYTES].reshape(-1, _LANE_BYTES)
        alone = _feed(np.zeros(cut.shape[0], np.uint32), cut).reshape(-1, lanes)
        for lane in alone.T:
            state = _after_zeros(state) ^ lane
    return ~_feed(state, rows[:, lanes * _LANE_BYTES :])


def _feed(state: np.ndarray, rows: np.ndarray) -> np.ndarray:
    for column in rows.T:
        state = _TABLE[(state ^ column) & 0xFF] ^ (state >> np.uint32(8))
    return state


@cache
def _zeros_table() -> np.ndarray:
    """(4, 256): what each value of each byte of the state becomes after a lane of zero bytes."""
    starts = np.arange(256, dtype=np.uint32)[None] << np.array([[0], [8], [16], [24]], np.uint32)
    return _feed(starts.reshape(-1), np.zeros((1024, _LANE_BYTES), np.uint8)).reshape(4, 256)


def _after_zeros(state: np.ndarray) -> np.ndarray:
    table = _zeros_table()
    pieces = [table[byte, (state >> np.uint32(8 * byte)) & 0xFF] for byte in range(4)]
    return pieces[0] ^ pieces[1] ^ pieces[2] ^ pieces[3]
