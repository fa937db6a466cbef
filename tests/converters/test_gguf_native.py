"""GGUF blocks in native code, against numpy's decoders and `quantize_reference`."""

from __future__ import annotations

import numpy as np
import pytest

from ondevice.config import MXFP4, RowFormat
from ondevice.converters.checkpoints.gguf_codecs import CODE_FORMATS, TILE_FORMATS, decode
from ondevice.converters.checkpoints.gguf_file import TENSOR_TYPES
from ondevice.converters.checkpoints.gguf_tensor import GgufColumns
from ondevice.converters.quantize import SourceCodes, dequantize
from ondevice.kernels import _native
from tests.support.gguf_blocks import HALVES
from tests.support.quantize_reference import quantize_reference

ALL_TYPES = {kind.name: kind for kind in TENSOR_TYPES.values()}
TYPES = {name: kind for name, kind in ALL_TYPES.items() if name in CODE_FORMATS}


def blocks_of(name: str, rows: int, blocks: int) -> np.ndarray:
    """Random bytes (rows, blocks * bytes), with finite scales near one."""
    kind = TYPES[name]
    data = np.random.default_rng(3).integers(0, 256, (rows, blocks, kind.nbytes), dtype=np.uint8)
    if name == "MXFP4":
        data[:, :, 0] = data[:, :, 0] % 16 + 116
        return data.reshape(rows, -1)
    # The high bytes of both float16 numbers. In types that have only one, the second is a code's byte.
    data[:, :, 1] = data[:, :, 1] & 0x83 | 0x38
    data[:, :, 3] = data[:, :, 3] & 0x83 | 0x38
    return data.reshape(rows, -1)


def same_bits(mine: np.ndarray, other: np.ndarray) -> bool:
    nan = np.isnan(mine)
    return bool((nan == np.isnan(other)).all()) and np.array_equal(
        mine[~nan].view(np.uint32), other[~nan].view(np.uint32)
    )


def held_formats(own: RowFormat) -> list[RowFormat]:
    """The formats that hold codes of `own`: with as many bits or more, biases implied or stored."""
    if own == MXFP4:
        return []  # of bytes
    bits = [bits for bits in (4, 5, 6, 8) if bits >= own.bits]
    return [RowFormat(b, 32, scales) for b in bits for scales in {own.scales: 0, "affine": 0}]


@pytest.mark.parametrize(
    ("name", "stored"), [(name, stored) for name, own in CODE_FORMATS.items() for stored in held_formats(own)]
)
@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (5, 3), (16, 2)])
def test_codes_stand_for_the_values_that_numpy_decodes(
    name: str, stored: RowFormat, rows: int, blocks: int
) -> None:
    data, cols = blocks_of(name, rows, blocks), blocks * TYPES[name].block
    values = np.empty((rows, cols), dtype=np.float32)
    decode(name, data.reshape(rows * blocks, -1), values.reshape(rows * blocks, -1))
    codes = np.full((rows, cols * stored.bits // 8), 0xAA, dtype=np.uint8)
    scales = np.full((rows, cols // 32), np.nan, dtype=np.float32)
    biases = scales[:, : 0 if stored.implied_bias else None].copy()
    _native.copy_gguf_codes(name, data, stored, codes, scales, biases)
    assert np.array_equal(dequantize(SourceCodes(codes, scales, biases), stored, cols), values)


@pytest.mark.parametrize(
    "name", [name for name, own in CODE_FORMATS.items() if held_formats(own) and TYPES[name].block == 32]
)
@pytest.mark.parametrize("wider", [0, 1])
def test_scales_that_are_float16_stay_as_they_are(name: str, wider: int) -> None:
    own, data = CODE_FORMATS[name], blocks_of(name, 5, 3)
    stored = [each for each in held_formats(own) if each.implied_bias == own.implied_bias][-wider]
    codes, again = np.empty((2, 5, 3 * 32 * stored.bits // 8), np.uint8)
    halves, floats = np.empty((2, 5, 3), np.uint16), np.empty((2, 5, 3), np.float32)
    biased = slice(0 if own.implied_bias else None)
    held, numbers = halves[1][:, biased].copy(), floats[1][:, biased].copy()
    _native.copy_gguf_codes_and_halves(name, data, stored, codes, halves[0], held)
    _native.copy_gguf_codes(name, data, stored, again, floats[0], numbers)
    assert np.array_equal(codes, again)
    assert same_bits(halves[0].view(np.float16).astype(np.float32), floats[0])
    assert same_bits(held.view(np.float16).astype(np.float32), numbers)


@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (5, 3), (255, 2)])
def test_mxfp4_codes_stand_for_the_values_that_numpy_decodes(rows: int, blocks: int) -> None:
    data, cols = blocks_of("MXFP4", rows, blocks), 32 * blocks
    data.reshape(rows, blocks, 17)[:, 0, 0] = np.arange(rows) % 253
    values = np.empty((rows, cols), dtype=np.float32)
    decode("MXFP4", data.reshape(rows * blocks, -1), values.reshape(rows * blocks, -1))
    codes, scales = np.empty((rows, cols // 2), np.uint8), np.empty((rows, blocks), np.uint8)
    _native.copy_mxfp4_blocks(data, codes, scales)
    none = np.empty((rows, 0), np.float16)
    assert np.array_equal(dequantize(SourceCodes(codes, scales, none), MXFP4, cols), values)
    for column in (0, 15, 16, cols - 1):
        found = np.empty(rows, np.float32)
        _native.decode_gguf_column("MXFP4", data, column, found)
        assert same_bits(found, np.ascontiguousarray(values[:, column]))


@pytest.mark.parametrize("name", TILE_FORMATS)
@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (70, 3)])
def test_rows_of_tiles_have_the_bits_that_numpy_decodes(name: str, rows: int, blocks: int) -> None:
    """Random bytes, but for the exponents of their float16 numbers; the first rows are all of one byte."""
    kind, stored = ALL_TYPES[name], TILE_FORMATS[name]
    data = np.random.default_rng(3).integers(0, 256, (rows, blocks, kind.nbytes), dtype=np.uint8)
    data[:4] = np.array([0, 0x55, 0x80, 0xFF], np.uint8)[:rows, None, None]
    for at in HALVES[name]:
        data[:, :, at + 1] = data[:, :, at + 1] & 0x83 | 0x38
    data, cols = data.reshape(rows, -1), blocks * kind.block
    values = np.empty((rows, cols), dtype=np.float32)
    decode(name, data.reshape(rows * blocks, -1), values.reshape(rows * blocks, -1))
    codes = np.full((rows, cols * stored.bits // 8), 0xAA, dtype=np.uint8)
    each = stored.header_bytes if stored.two_levels else 2
    scales, none = np.full((rows, blocks * each), 0xAA, dtype=np.uint8), np.empty((rows, 0), np.float16)
    _native.copy_gguf_rows(name, data, codes, scales)
    found = SourceCodes(codes, scales if stored.two_levels else scales.view(np.float16), none)
    assert dequantize(found, stored, cols).tobytes() == values.tobytes()


def test_rows_of_tiles_of_other_types_and_sizes_are_refused() -> None:
    data, codes, scales = (np.zeros((2, size), np.uint8) for size in (210, 192, 18))
    _native.copy_gguf_rows("Q6_K", data, codes, scales)
    for name, source, to, headers in (
        ("Q8_0", data, codes, scales),
        ("Q6_K", data[:, :209].copy(), codes, scales),
        ("Q6_K", data, codes[:, 1:].copy(), scales),
        ("Q6_K", data, codes, scales[:1]),
    ):
        with pytest.raises(ValueError, match=r"the type is|data is|codes are|scales are"):
            _native.copy_gguf_rows(name, source, to, headers)


def test_every_float16_scale_is_widened_exactly() -> None:
    halves = np.arange(1 << 16, dtype=np.uint16)
    data = np.zeros((len(halves), TYPES["Q4_1"].nbytes), dtype=np.uint8)
    data[:, :2] = data[:, 2:4] = halves.view(np.uint8).reshape(-1, 2)
    codes, (scales, biases) = np.empty((len(halves), 16), np.uint8), np.empty((2, len(halves), 1), np.float32)
    _native.copy_gguf_codes("Q4_1", data, CODE_FORMATS["Q4_1"], codes, scales, biases)
    wanted = halves.view(np.float16).astype(np.float32)
    assert same_bits(scales[:, 0], wanted)
    assert same_bits(biases[:, 0], wanted)


@pytest.mark.fast(
    "70-16-33-2-stored0-*",
    "64-48-5-1-stored2-*",
    "7-0-32-1-stored1-*",
    "7-0-32-1-stored3-Q8_0",
)
@pytest.mark.parametrize("name", CODE_FORMATS)
@pytest.mark.parametrize("stored", [RowFormat(4), RowFormat(4, 32), RowFormat(5), RowFormat(8)])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("rows", "start", "count"), [(7, 0, 32), (70, 16, 33), (64, 48, 5)])
def test_columns_are_rounded_as_their_values_are(
    name: str, stored: RowFormat, threads: int, rows: int, start: int, count: int
) -> None:
    kind = TYPES[name]
    blocks = 96 // min(kind.block, 96) if kind.block == 32 else 1
    data = blocks_of(name, rows, blocks)
    values = np.empty((rows * blocks, kind.block), dtype=np.float32)
    decode(name, data.reshape(rows * blocks, -1), values)
    wanted = values.reshape(rows, -1)[:, start : start + count].T
    columns = GgufColumns(kind, data, 0, blocks * kind.block).taken(start, start + count)
    assert same_bits(columns.decoded(np.arange(count)), np.ascontiguousarray(wanted))
    expected, found = quantize_reference(wanted, stored), columns.quantised(_native.Runner(threads), stored)
    assert found is not None
    for mine, other in zip(vars(found).values(), vars(expected).values(), strict=True):
        assert mine.tobytes() == other.tobytes()


@pytest.mark.parametrize("target", _native.available_targets())
@pytest.mark.parametrize("bad", [0x7C00, 0x7E00, 0x7BFF])
def test_values_beyond_float16_are_reported(target: str, bad: int) -> None:
    data = blocks_of("Q8_0", 70, 1)
    data[69, :2] = np.frombuffer(np.uint16(bad).tobytes(), np.uint8)
    data[69, 2:] = 127
    columns = GgufColumns(TYPES["Q8_0"], data, 0, 32)
    assert columns.quantised(_native.Runner(2, target), RowFormat(4)) is None
    assert columns.quantised(_native.Runner(2, target), RowFormat(8)) is None


def test_shapes_that_lie_are_refused() -> None:
    data = blocks_of("Q4_0", 4, 2)
    codes, scales = np.empty((4, 32), np.uint8), np.empty((4, 2), np.float32)
    own, none = RowFormat(4, 32, "symmetric"), np.empty((4, 0), np.float32)
    for kind, stored, held, numbers in (
        ("Q6_K", own, codes, none),
        ("Q5_1", own, codes, none),
        ("Q4_0", RowFormat(4), codes, scales),
        ("Q4_0", own, codes[:3], none),
        ("Q4_0", own, codes, scales),
        ("Q4_1", own, codes, none),
    ):
        with pytest.raises(ValueError, match=r"is|holds|are"):
            _native.copy_gguf_codes(kind, data, stored, held, scales, numbers)
    halves = np.empty((4, 2), np.uint16)
    for kind, blocks, stored, numbers16 in (
        ("Q4_0", data, RowFormat(4, 32), halves),
        ("Q4_K", blocks_of("Q4_K", 4, 1), RowFormat(4, 32), np.empty((4, 8), np.uint16)),
    ):
        held = np.empty((4, 16 * numbers16.shape[1]), np.uint8)
        with pytest.raises(ValueError, match="float16 in the type"):
            _native.copy_gguf_codes_and_halves(kind, blocks, stored, held, numbers16, numbers16)
    eight, powers = np.empty((4, 16), np.uint8), np.empty((4, 2), np.uint8)
    blocks = blocks_of("MXFP4", 4, 2)
    for given, held, numbers8 in ((blocks[:, :33].copy(), eight, powers), (blocks, eight, powers),
                                  (blocks, codes, powers[:, :1].copy())):  # fmt: skip
        with pytest.raises(ValueError, match=r"whole blocks|codes are|scales are"):
            _native.copy_mxfp4_blocks(given, held, numbers8)
    with pytest.raises(ValueError, match="holds the type's codes"):
        _native.copy_gguf_codes("MXFP4", blocks, MXFP4, codes, scales, none)
    columns = GgufColumns(TYPES["Q4_0"], data, 0, 64)
    for start, stop in ((8, 16), (48, 65), (0, 0), (-16, 0)):
        with pytest.raises(ValueError, match="columns are"):
            columns.taken(start, stop).quantised(_native.Runner(1), RowFormat(4))
    for column in (-1, 64):
        with pytest.raises(ValueError, match="one of the matrix"):
            _native.decode_gguf_column("Q4_0", data, column, np.empty(4, np.float32))
