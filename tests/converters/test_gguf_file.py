"""The header of a GGUF file: what is read equals what the `gguf` package reads, and lies are refused
cheaply."""

from __future__ import annotations

import random
import resource
import struct
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ondevice.converters.checkpoints import gguf_file
from ondevice.converters.checkpoints.base import SourceFile
from ondevice.converters.checkpoints.gguf_file import GgufHeader, read_header
from ondevice.converters.checkpoints.opening import open_checkpoint
from ondevice.errors import CheckpointError, OndeviceError, UnsupportedModelError
from tests.support.gguf_models import add_byte_level, add_sentencepiece, changed_gguf, write_gguf
from tests.support.models import write_checkpoint

gguf = pytest.importorskip("gguf")

MUTATIONS = 500
"""In all."""


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def entry(name: str, sizes: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


def header(
    pairs: list[bytes],
    entries: list[bytes],
    data: bytes = b"",
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    """A file's bytes. counts: of tensors and of pairs, if others than there are."""
    tensor_count, pair_count = counts or (len(entries), len(pairs))
    body = struct.pack("<4sIQQ", b"GGUF", version, tensor_count, pair_count)
    body += b"".join(pairs) + b"".join(entries)
    return body + bytes(-len(body) % 32) + data


def parsed(path: Path, content: bytes) -> GgufHeader:
    path.write_bytes(content)
    file = SourceFile(path)
    try:
        return read_header(file)
    finally:
        file.close()


def made(folder: Path, change: Callable[[Any], None]) -> Path:
    """A whole model, whose tokenizer `change` adds."""
    source = write_checkpoint(folder / "source", vocab_size=300, num_hidden_layers=1, intermediate_size=96)
    write_gguf(folder / "model.gguf", source, "Q8_0", change=change)
    return folder / "model.gguf"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole model with every part that a header has."""

    def metadata(writer: Any) -> None:
        writer.add_name("tiny")
        writer.add_bool("general.some.flag", True)
        writer.add_float64("general.some.number", 0.25)
        writer.add_int8("general.small", -3)
        writer.add_uint64("general.large", (1 << 64) - 1)
        writer.add_array("general.tags", ["a", "öß"])
        writer.add_array("general.numbers", [1, 2, 3])
        add_byte_level(writer)

    return made(tmp_path_factory.mktemp("gguf"), metadata)


def test_what_the_gguf_package_writes_is_read(sound: Path) -> None:
    found = read_header(SourceFile(sound))
    reader = gguf.GGUFReader(sound)
    assert found.version == 3
    names = [name for name in reader.fields if not name.startswith("GGUF.")]
    assert list(found.metadata) == names
    for name in names:
        value, expected = found.metadata[name], reader.fields[name].contents()
        if isinstance(value, bytes):
            value = value.decode()
        elif isinstance(value, list):
            value = [item.decode() for item in value]
        elif isinstance(value, np.ndarray):
            value = value.tolist()
        if isinstance(value, float):
            assert np.float32(value) == np.float32(expected)
        else:
            assert (value, type(value)) == (expected, type(expected)), name
    assert found.metadata["llama.attention.layer_norm_rms_epsilon"] == 1e-6
    assert list(found.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        mine = found.tensors[tensor.name]
        assert (mine.type.name, mine.offset) == (tensor.tensor_type.name, tensor.data_offset)
        assert (list(mine.shape), mine.nbytes) == (tensor.shape.tolist()[::-1], tensor.n_bytes)


def test_a_file_that_is_cut_anywhere_is_refused(sound: Path, tmp_path: Path) -> None:
    whole = sound.read_bytes()
    tensors = list(read_header(SourceFile(sound)).tensors.values())
    end, last = tensors[0].offset, tensors[-1].offset + tensors[-1].nbytes
    places = {*range(0, 64), *range(64, end, 61), *range(end - 40, end + 2), *range(end, last, 9973)}
    for place in (*sorted(places), last - 1):
        with pytest.raises(
            CheckpointError, match=r"x\.gguf (is truncated or isn't a sound GGUF file|isn't a GGUF)"
        ):
            parsed(tmp_path / "x.gguf", whole[:place])


LIES: dict[str, tuple[bytes, str]] = {
    "magic": (b"GGML" + bytes(40), "doesn't begin with GGUF"),
    "tensor count": (header([], [], counts=(1 << 40, 0)), "1099511627776 tensors; the limit is"),
    "pair count": (header([], [], counts=(0, 1 << 63)), "metadata pairs; the limit is"),
    "counts beyond the file": (header([], [], counts=(0, 4000)), "would end at byte"),
    "key length": (header([struct.pack("<Q", 1 << 62)], []), "a key would have 4611686018427387904 bytes"),
    "key twice": (header([pair("a", 0, b"\1")] * 2, []), "the key a twice"),
    "key bytes": (header([pair("a", 0, b"\1").replace(b"a", b"\xff")], []), "isn't UTF-8"),
    "type": (header([pair("a", 13, b"\1")], []), "the value of a is of the unknown type 13"),
    "truth": (header([pair("a", 7, b"\2")], []), "neither true nor false"),
    "string length": (
        header([pair("a", 8, struct.pack("<Q", 1 << 40))], []),
        "1099511627776 bytes; the limit",
    ),
    "string beyond the file": (header([pair("a", 8, struct.pack("<Q", 1 << 20))], []), "would end at byte"),
    "array length": (
        header([pair("a", 9, struct.pack("<IQ", 0, 1 << 60))], []),
        "items; 2097152 is the limit",
    ),
    "array beyond the file": (
        header([pair("a", 9, struct.pack("<IQ", 10, 1 << 20))], []),
        "would end at byte",
    ),
    "strings beyond the file": (
        header([pair("a", 9, struct.pack("<IQ", 8, 1 << 20))], []),
        "would end at byte",
    ),
    "array type": (header([pair("a", 9, struct.pack("<IQ", 77, 1))], []), "unknown type 77"),
    "nesting": (header([pair("a", 9, struct.pack("<IQ", 9, 1) * 1000)], []), "an array of arrays"),
    "alignment": (header([pair("general.alignment", 4, struct.pack("<I", 48))], []), "alignment is 48"),
    "alignment 0": (header([pair("general.alignment", 4, bytes(4))], []), "alignment is 0"),
    "alignment type": (header([pair("general.alignment", 8, text("32"))], []), "alignment is b'32'"),
    "huge alignment": (
        header([pair("general.alignment", 4, struct.pack("<I", 1 << 31))], []),
        "alignment is",
    ),
    "tensor twice": (header([], [entry("t", [8])] * 2, bytes(64)), "the tensor t twice"),
    "dimensions": (header([], [entry("t", [2] * 5)], bytes(256)), "t has 5 dimensions"),
    "no dimensions": (header([], [entry("t", [])], bytes(256)), "t has 0 dimensions"),
    "zero rows": (header([], [entry("t", [8, 0])], bytes(256)), r"t has the dimensions \[8, 0\]"),
    "huge rows": (header([], [entry("t", [8, 1 << 63])], bytes(256)), "t has the dimensions"),
    "product": (header([], [entry("t", [200] * 4)], bytes(256)), "t would end at byte 6400000096"),
    "half a block": (header([], [entry("t", [48], 2)], bytes(256)), "of type Q4_0"),
    "offset": (header([], [entry("t", [8], 0, 32)], bytes(256)), "begins at byte 32 of the data, not at 0"),
    "overlap": (
        header([], [entry("t", [16]), entry("u", [16], 0, 32)], bytes(256)),
        "at byte 32 .* not at 64",
    ),
    "end": (header([], [entry("t", [16])], bytes(63)), "t would end at byte"),
}


@pytest.mark.parametrize("lie", LIES)
def test_lies_are_refused_before_anything_is_allocated(tmp_path: Path, lie: str) -> None:
    content, message = LIES[lie]
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=message):
            parsed(tmp_path / "x.gguf", content)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_versions_byte_orders_and_types_that_are_not_known(tmp_path: Path) -> None:
    for version, message in ((1, "of GGUF version 1"), (4, "of GGUF version 4"), (3 << 24, "big-endian")):
        with pytest.raises(UnsupportedModelError, match=f"x.gguf is {message}.*make it again"):
            parsed(tmp_path / "x.gguf", header([], [], version=version))
    with pytest.raises(UnsupportedModelError, match=r"blk\.0 is stored in GGUF's type 36.*take another"):
        parsed(tmp_path / "x.gguf", header([], [entry("blk.0", [8], 36)], bytes(64)))
    assert parsed(tmp_path / "x.gguf", header([], [entry("t", [8])], bytes(32), version=2)).version == 2


def test_alignment_moves_the_data(tmp_path: Path) -> None:
    pairs = [pair("general.alignment", 4, struct.pack("<I", 512))]
    content = header(pairs, [entry("t", [1]), entry("u", [1], 0, 512)])
    found = parsed(tmp_path / "x.gguf", content + bytes(1024 + 4 - len(content)))
    assert [tensor.offset for tensor in found.tensors.values()] == [512, 1024]


def test_many_strings_take_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strings of two bytes take the most memory for their share of the file."""
    most = 1 << 15
    monkeypatch.setattr(gguf_file, "MAX_ITEMS", most)
    strings = [pair("a", 9, struct.pack("<IQ", 8, count) + text(b"ab") * count) for count in (most, most + 1)]
    with pytest.raises(CheckpointError, match=f"{most} is the limit"):
        parsed(tmp_path / "x.gguf", header([strings[1]], []))
    with pytest.raises(CheckpointError, match=f"{most} is the limit"):
        parsed(tmp_path / "x.gguf", header([strings[0], strings[0].replace(b"a", b"b", 1)], []))
    (tmp_path / "x.gguf").write_bytes(header([strings[0]], []))
    tracemalloc.start()
    try:
        assert read_header(SourceFile(tmp_path / "x.gguf")).metadata["a"] == [b"ab"] * most
        assert tracemalloc.get_traced_memory()[1] < 100 * most
    finally:
        tracemalloc.stop()
    assert 4 * gguf_file.MAX_HEADER_BYTES > 100 * (1 << 21)


def test_metadata_of_another_kind_than_expected_are_refused() -> None:
    made = GgufHeader("m.gguf", 3, {"s": b"\xff", "i": 1, "l": [b"\xff"], "n": np.arange(2), "b": True}, {})
    reads: list[tuple[Callable[[str], object], str]] = [
        (made.text, "s"), (made.text, "i"), (made.integer, "s"), (made.integer, "b"), (made.boolean, "i"),
        (made.texts, "l"), (made.texts, "n"), (made.numbers, "l"),
    ]  # fmt: skip
    for read, key in reads:
        with pytest.raises(CheckpointError, match=rf"m\.gguf: {key} must be .*the file is damaged"):
            read(key)
        assert read("missing") is None


@pytest.mark.parametrize("tokenizer", [add_byte_level, add_sentencepiece])
def test_hundreds_of_changed_headers_open_or_are_refused(
    tmp_path: Path, tokenizer: Callable[[Any], None]
) -> None:
    """Half of them with each kind of tokenizer."""
    file = made(tmp_path, tokenizer)
    data, rng = file.read_bytes(), random.Random(5)
    end = next(iter(read_header(SourceFile(file)).tensors.values())).offset
    path = tmp_path / "model.gguf"
    opened = refused = 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(MUTATIONS // 2):
        path.write_bytes(changed_gguf(data, end, rng))
        started = time.process_time()
        try:
            open_checkpoint(path).close()
            opened += 1
        except OndeviceError:
            refused += 1
        assert time.process_time() - started < 5
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown * (1 if sys.platform == "darwin" else 1024) < 128 << 20
    assert opened > 5
    assert refused > opened
