"""Loading: every block read once, pieces bounded, damage reported, the same weights however they are cut."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ondevice.backends.base import Bytes, Float32
from ondevice.backends.reference import ReferenceBackend, ReferenceLinear
from ondevice.backends.tiled_source import TileChunk, TiledSource
from ondevice.bundle.layout import RESIDENT
from ondevice.bundle.reader import Bundle
from ondevice.converters.convert import convert
from ondevice.errors import BundleError, FlashReadError
from ondevice.flash.reader import FlashReader
from ondevice.model import parts
from ondevice.model.loading import bundle_files, load_weights
from ondevice.model.tensor_file import READ_AHEAD, TaskResults, TensorFile
from tests.support.engines import bundle_weights
from tests.support.models import write_checkpoint


class MemoryReader:
    """A flash reader over bytes in memory that remembers what it read."""

    def __init__(self, data: Bytes) -> None:
        self.data = data
        self.ranges: list[tuple[int, int]] = []

    def read(self, file: int, offset: int, nbytes: int, out: Bytes | None = None) -> Bytes:
        assert file == 0
        self.ranges.append((offset, offset + nbytes))
        found = self.data[offset : offset + nbytes]
        if out is None:
            return found.copy()
        out[:] = found
        return out


def file_over(data: Bytes, **spans: tuple[int, int]) -> tuple[TensorFile, MemoryReader]:
    """A file of tensors of these bytes; spans: tensor name -> (offset, nbytes)."""
    named = {name: SimpleNamespace(offset=at, nbytes=nbytes) for name, (at, nbytes) in spans.items()}
    bundle: Any = SimpleNamespace(tensor_span=named.get)
    file: Any = SimpleNamespace(path=Path("file"), nbytes=len(data), crc_units=(64,))
    reader: Any = MemoryReader(data)
    return TensorFile(bundle, reader, file, 0), reader


def test_reads_in_order_of_use_take_each_block_once() -> None:
    data = np.random.default_rng(0).integers(0, 256, 5000, dtype=np.uint8)
    file, reader = file_over(data)
    # A long tensor in pieces, three side by side (as codes, scales and biases are), then the rest.
    pieces = [(0, 30), *((30 + 100 * i, 100) for i in range(10))]
    for i in range(8):
        pieces += [(1030 + 300 * i, 300), (3430 + 9 * i, 9), (3502 + 9 * i, 9)]
    pieces += [(3574, 64), (3638, 2), (3640, 1360)]
    for offset, nbytes in pieces:
        assert (file.read(offset, nbytes) == data[offset : offset + nbytes]).all()
    blocks = [block for first, last in reader.ranges for block in range(first // 64, -(-last // 64))]
    assert sorted(blocks) == list(range(-(-5000 // 64)))
    assert all(first % 64 == 0 and (last % 64 == 0 or last == 5000) for first, last in reader.ranges)


def test_a_vector_that_is_not_finite_is_a_damaged_bundle() -> None:
    values = np.arange(8, dtype=np.float32)
    values[6] = np.nan
    file, _ = file_over(values.view(np.uint8), good=(0, 24), bad=(0, 32))
    assert file.vector("good").tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(BundleError, match="bad holds values that are not finite"):
        file.vector("bad")


def test_read_ahead_keeps_order_and_bounds() -> None:
    started = 0
    lock = threading.Lock()

    def task(index: int) -> Callable[[], int]:
        def work() -> int:
            nonlocal started
            with lock:
                started += 1
            time.sleep(0.01 if index % 3 == 0 else 0)
            return index

        return work

    with TaskResults(task(index) for index in range(30)) as ahead:
        for index in range(20):
            assert ahead.next() == index
            assert started <= index + 1 + READ_AHEAD
    assert started < 30


def test_read_ahead_raises_in_its_place() -> None:
    def fails() -> int:
        raise FlashReadError("bad bytes")

    tasks: list[Callable[[], int]] = [lambda: 1, fails, lambda: 3]
    with TaskResults(iter(tasks)) as ahead:
        assert ahead.next() == 1
        with pytest.raises(FlashReadError):
            ahead.next()
        assert ahead.next() == 3


@pytest.fixture(scope="module", params=["q4", "f16"])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Every kind of resident tensor: biases, q and k norms, a tied head."""
    root = tmp_path_factory.mktemp("loading")
    source = write_checkpoint(
        root / "source", "qwen3", attention_bias=True, tie_word_embeddings=request.param == "q4"
    )
    return Bundle.open(convert(source, root / "bundle", quant=request.param))


class Recorder(ReferenceBackend):
    """Remembers the size of every chunk of tiles."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def load_tiles(self, sections: Sequence[TiledSource], bias: Float32 | None = None) -> ReferenceLinear:
        return super().load_tiles([self._watched(section) for section in sections], bias)

    def _watched(self, section: TiledSource) -> Any:
        def chunks() -> Iterator[TileChunk]:
            for chunk in section.chunks():
                self.sizes.append(chunk.tiles.nbytes)
                yield chunk

        return SimpleNamespace(matrix=section.matrix, chunks=chunks)


@pytest.mark.parametrize("chunk_bytes", [1, 1000, 4 << 20])
def test_weights_are_the_same_however_they_are_cut(
    bundle: Bundle, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "CHUNK_BYTES", chunk_bytes)
    backend, config, expected = Recorder(), bundle.config, bundle_weights(bundle.path)
    with FlashReader(bundle_files(bundle), "buffered") as reader:
        weights = load_weights(bundle, reader, backend)
    largest_tile = 16 * 2 * 64
    assert max(backend.sizes) <= max(chunk_bytes, largest_tile)
    head = "model.embed_tokens" if config.tie_embeddings else "lm_head"
    assert (weights.head.weight == expected[f"{head}.weight"]).all()
    assert (weights.final_norm.weight == expected["model.norm.weight"]).all()
    for i, layer in enumerate(weights.layers):
        theirs = {name.removeprefix(f"model.layers.{i}."): values for name, values in expected.items()}
        for part in ("weight", "bias"):
            qkv = np.concatenate([theirs[f"self_attn.{name}_proj.{part}"] for name in "qkv"])
            assert (getattr(layer.qkv, part) == qkv).all()
            assert (getattr(layer.out, part) == theirs[f"self_attn.o_proj.{part}"]).all()
        assert layer.head_norms is not None
        assert layer.attention_norm is not None
        assert layer.feed_forward_norm is not None
        assert (layer.head_norms.q.weight == theirs["self_attn.q_norm.weight"]).all()
        assert (layer.head_norms.k.weight == theirs["self_attn.k_norm.weight"]).all()
        assert (layer.attention_norm.weight == theirs["input_layernorm.weight"]).all()
        assert (layer.feed_forward_norm.weight == theirs["post_attention_layernorm.weight"]).all()
        assert (layer.feed_forward.gate == theirs["mlp.gate_proj.weight"]).all()
        assert (layer.feed_forward.up == theirs["mlp.up_proj.weight"]).all()
        assert (layer.feed_forward.down == theirs["mlp.down_proj.weight"].T).all()


def test_a_flipped_byte_is_found_while_loading(bundle: Bundle, tmp_path: Path) -> None:
    span = bundle.tensor_span("layers.1.attention.out")
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in bundle.path.iterdir():
        data = bytearray(path.read_bytes())
        if path.name == RESIDENT:
            data[span.offset + 11] ^= 4
        (copy / path.name).write_bytes(data)
    damaged = Bundle.open(copy)
    with (
        FlashReader(bundle_files(damaged), "buffered") as reader,
        pytest.raises(FlashReadError, match=RESIDENT),
    ):
        load_weights(damaged, reader, ReferenceBackend())
