"""Values of GGUF's quantised types, against the `gguf` package, and tensors read in blocks of rows and
columns."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ondevice.converters.checkpoints.base import SourceFile, StoredTensor
from ondevice.converters.checkpoints.gguf_codecs import DECODERS, decode
from ondevice.converters.checkpoints.gguf_file import TENSOR_TYPES, TensorEntry
from ondevice.converters.checkpoints.gguf_tensor import QuantizedTensor, source_tensor
from ondevice.errors import CheckpointError, UnsupportedModelError

gguf = pytest.importorskip("gguf")

TYPES = {kind.name: (number, kind) for number, kind in TENSOR_TYPES.items()}


def stored(name: str, rows: int, blocks: int, seed: int = 0) -> np.ndarray:
    """Random bytes (rows, bytes of a row) of a type: any codes, and any scales that floating point has."""
    kind = TYPES[name][1]
    return np.random.default_rng(seed).integers(0, 256, (rows, blocks * kind.nbytes), dtype=np.uint8)


def theirs(name: str, data: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return np.asarray(gguf.quants.dequantize(data, gguf.GGMLQuantizationType(TYPES[name][0])))


def same_bits(mine: np.ndarray, other: np.ndarray) -> bool:
    """Equal bits, where NaN may have any sign."""
    nan = np.isnan(mine)
    return bool((nan == np.isnan(other)).all()) and np.array_equal(
        mine[~nan].view(np.uint32), other[~nan].astype(np.float32).view(np.uint32)
    )


def test_the_table_of_types_is_that_of_the_gguf_package() -> None:
    for number, kind in TENSOR_TYPES.items():
        known = gguf.GGMLQuantizationType(number)
        assert (known.name, gguf.GGML_QUANT_SIZES[known]) == (kind.name, (kind.block, kind.nbytes))


@pytest.mark.parametrize("name", DECODERS)
def test_values_have_the_bits_that_the_gguf_package_gives(name: str) -> None:
    data = stored(name, 300, 2)
    mine = np.empty((300, 2 * TYPES[name][1].block), dtype=np.float32)
    decode(name, data.reshape(600, -1), mine.reshape(600, -1))
    assert same_bits(mine, theirs(name, data))


def test_every_scale_of_mxfp4_decodes_as_gguf_s_library_does() -> None:
    data = np.zeros((256, 17), dtype=np.uint8)
    data[:, 0] = np.arange(256)
    data[:, 1:] = np.arange(16) * 17
    mine = np.empty((256, 32), dtype=np.float32)
    decode("MXFP4", data, mine)
    assert same_bits(mine, theirs("MXFP4", data))


@pytest.fixture(params=["Q4_0", "Q8_0", "Q6_K"])
def tensor(request: pytest.FixtureRequest, tmp_path: Path) -> QuantizedTensor:
    """24 rows of 3 blocks that begin at byte 7 of a file."""
    kind = TYPES[request.param][1]
    (tmp_path / "w").write_bytes(b"1234567" + stored(request.param, 24, 3).tobytes())
    return QuantizedTensor("w", kind, (24, 3 * kind.block), SourceFile(tmp_path / "w"), 7)


def test_blocks_of_rows_and_columns(tensor: QuantizedTensor, monkeypatch: pytest.MonkeyPatch) -> None:
    block = tensor.type.block
    whole = theirs(tensor.type.name, stored(tensor.type.name, 24, 3))
    for start, stop in ((0, 24), (0, 1), (5, 17), (23, 24)):
        assert same_bits(tensor.rows(start, stop), whole[start:stop])
    spans = (
        (0, 3 * block),
        (0, 1),
        (1, block),
        (block, 2 * block),
        (block - 1, 2 * block + 1),
        (block, 3 * block),
    )
    for read_bytes in (1 << 20, 1000):
        monkeypatch.setattr("ondevice.converters.checkpoints.gguf_tensor._READ_BYTES", read_bytes)
        for start, stop in spans:
            assert same_bits(tensor.columns(start, stop), whole[:, start:stop])
    assert (tensor.values_nbytes, tensor.nbytes) == (whole.nbytes, 24 * 3 * tensor.type.nbytes)
    assert tensor.sample(5, 3) == stored(tensor.type.name, 24, 3).tobytes()[5:8]
    assert tensor.sample(tensor.nbytes - 2, 9) == stored(tensor.type.name, 24, 3).tobytes()[-2:]
    tensor.file.close()


def test_interleaved_rows_come_in_halves_whatever_the_block(tensor: QuantizedTensor) -> None:
    pairs = QuantizedTensor("w", tensor.type, tensor.shape, tensor.file, 7, interleaved_head_dim=6)
    whole = theirs(tensor.type.name, stored(tensor.type.name, 24, 3))
    halves = np.concatenate([whole[6 * h + i : 6 * h + 6 : 2] for h in range(4) for i in (0, 1)])
    for start, stop in ((0, 24), (1, 2), (5, 13), (6, 12), (23, 24)):
        assert same_bits(pairs.rows(start, stop), halves[start:stop])


def test_a_vector_is_decoded_and_its_heads_put_in_halves(tmp_path: Path) -> None:
    values = np.arange(12, dtype=np.float32)
    (tmp_path / "b").write_bytes(values.tobytes())
    plain = StoredTensor("b", "F32", (12,), SourceFile(tmp_path / "b"), 0, interleaved_head_dim=6)
    assert plain.vector().tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]
    data = gguf.quants.quantize(np.arange(64, dtype=np.float32)[None], gguf.GGMLQuantizationType.Q8_0)
    (tmp_path / "q").write_bytes(data.tobytes())
    file = SourceFile(tmp_path / "q")
    expected = theirs("Q8_0", data)[0]
    assert same_bits(QuantizedTensor("q", TYPES["Q8_0"][1], (64,), file, 0).vector(), expected)
    halves = QuantizedTensor("q", TYPES["Q8_0"][1], (64,), file, 0, interleaved_head_dim=64).vector()
    assert same_bits(halves, np.concatenate([expected[::2], expected[1::2]]))
    (tmp_path / "n").write_bytes(b"\x00\x7c" + bytes([1] * 32))
    with pytest.raises(CheckpointError, match="n holds NaN or infinity"):
        QuantizedTensor("n", TYPES["Q8_0"][1], (32,), SourceFile(tmp_path / "n"), 0).vector()


@pytest.mark.parametrize("name", ["IQ2_XS", "Q8_K", "I32", "F64", "TQ1_0"])
def test_other_types_are_refused_by_name(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.gguf").write_bytes(b"")
    entry = TensorEntry(TYPES[name][1], (1, 256), 0)
    with pytest.raises(
        UnsupportedModelError, match=rf"model\.gguf: blk\.0\.x is stored as {name}; .*take another"
    ):
        source_tensor("w", SourceFile(tmp_path / "model.gguf"), "blk.0.x", entry)
