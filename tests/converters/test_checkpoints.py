"""Readers of source formats: blocks of tensors in any type, and llama2.c files with their tokenizer."""

from __future__ import annotations

import logging
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from ondevice.bundle.manifest import MAX_BLOB_BYTES
from ondevice.bundle.reader import Bundle
from ondevice.converters.checkpoints.base import SourceFile, StoredTensor
from ondevice.converters.checkpoints.llama2c import convert_tokenizer, is_llama2c
from ondevice.converters.checkpoints.opening import open_checkpoint
from ondevice.converters.checkpoints.piece_table import piece_table
from ondevice.converters.checkpoints.safetensors_file import floating, read_tensors
from ondevice.converters.convert import convert
from ondevice.errors import CheckpointError, UnsupportedModelError
from ondevice.tokenizer import Tokenizer, load_tokenizer
from tests.support import llama2c_reference as llama2c
from tests.support.engines import all_logits, running
from tests.support.llama2c_reference import Shape
from tests.support.models import save_safetensors, to_bfloat16


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_blocks_of_a_matrix(tmp_path: Path, dtype: str) -> None:
    matrix = np.random.default_rng(0).standard_normal((13, 7), dtype=np.float32)
    vector = np.arange(5, dtype=np.float32)
    save_safetensors(tmp_path / "x.safetensors", {"v": vector, "m": matrix}, dtype)
    raw = read_tensors(SourceFile(tmp_path / "x.safetensors"))
    tensors = {name: floating(tensor) for name, tensor in raw.items()}
    stored = {"F32": matrix, "F16": matrix.astype(np.float16), "BF16": to_bfloat16(matrix)}[dtype]
    tensor = tensors["m"]
    assert (tensor.shape, tensor.dtype, tensor.nbytes) == ((13, 7), dtype, stored.nbytes)
    for start, stop in ((0, 13), (0, 1), (5, 9), (12, 13)):
        assert (tensor.rows(start, stop) == stored[start:stop]).all()
    for start, stop in ((0, 7), (0, 1), (2, 5), (6, 7)):
        assert (tensor.columns(start, stop) == stored[:, start:stop]).all()
    assert (tensors["v"].vector() == vector).all()
    tensor.file.close()


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("head_dim", [2, 6])
def test_interleaved_rows_come_in_halves_whatever_the_block(
    tmp_path: Path, heads: int, head_dim: int
) -> None:
    rows = np.arange(heads * head_dim * 4, dtype=np.float32).reshape(heads * head_dim, 4)
    (tmp_path / "w").write_bytes(rows.tobytes())
    tensor = StoredTensor("w", "F32", rows.shape, SourceFile(tmp_path / "w"), 0, head_dim)
    expected = np.concatenate(
        [rows[h * head_dim + part : (h + 1) * head_dim : 2] for h in range(heads) for part in (0, 1)]
    )
    for start in range(len(rows)):
        for stop in range(start + 1, len(rows) + 1):
            assert (tensor.rows(start, stop) == expected[start:stop]).all()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shape", [Shape(), Shape(dim=96, heads=2, kv_heads=1, hidden_dim=64, layers=1)])
def test_a_llama2c_model_computes_what_llama2c_computes(tmp_path: Path, shape: Shape, tied: bool) -> None:
    """Its rotary embedding turns neighbouring rows; the bundle's turns halves, so rows must have moved."""
    weights = llama2c.write_checkpoint(tmp_path / "model.bin", shape, tied)
    output = convert(tmp_path / "model.bin", tmp_path / "b", "f16")
    rounded = {
        name: values if "norm" in name else values.astype(np.float16).astype(np.float32)
        for name, values in weights.items()
    }
    tokens = [1, 7, 299, 3, 3, 150, 42, 8, 9]
    theirs = llama2c.forward(shape, rounded, tokens)
    with running(output) as model:
        mine = all_logits(model, tokens, 32)
    assert np.abs(mine - theirs).max() < 1e-5 * np.abs(theirs).max()
    bundle = Bundle.open(output)
    assert (bundle.config.tie_embeddings, bundle.config.norm.eps) == (tied, 1e-5)
    assert (bundle.manifest.provenance.source, bundle.manifest.provenance.source_format) == (
        "model",
        "llama2.c",
    )


def test_what_is_a_llama2c_file(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    llama2c.write_checkpoint(path, Shape(), tied=True)
    assert is_llama2c(path)
    whole = path.read_bytes()
    for content in (
        whole[:-1],
        whole + b"x",
        b"",
        whole[:20],
        struct.pack("<7i", *[-1] * 7),
        b"\x80\x02" + whole,
    ):
        path.write_bytes(content)
        assert not is_llama2c(path)
    path.write_bytes(whole[:-4])
    with pytest.raises(CheckpointError, match=r"model\.bin has \d+ bytes, but its header asks for \d+"):
        open_checkpoint(path)
    path.write_bytes(struct.pack("<7i", 1 << 20, 8, 1, 1 << 10, 1 << 10, 8, 8))
    with pytest.raises(UnsupportedModelError, match="hidden_size"):
        open_checkpoint(path)
    path.write_bytes(struct.pack("<7i", 64, 0, 1, 1, 1, 8, 8))
    with pytest.raises(CheckpointError, match=r"\.bin hasn't the header of a llama2\.c checkpoint.*; give "):
        open_checkpoint(path)


@pytest.mark.parametrize("header", [(1 << 27, 96, 2, 2, 2, 64, 64), (64, 96, (1 << 31) - 1, 4, 4, 64, 64)])
def test_numbers_of_any_other_file_are_not_computed_with(tmp_path: Path, header: tuple[int, ...]) -> None:
    """A zip archive that ends in .bin, read as such a header, has heads of millions of dimensions."""
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(struct.pack("<7i", *header) + bytes(1000))
    tracemalloc.start()
    try:
        assert not is_llama2c(path)
        with pytest.raises(CheckpointError, match="hasn't the header"):
            open_checkpoint(path)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_a_folder_with_one_llama2c_file_opens_and_with_two_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    llama2c.write_checkpoint(tmp_path / "a.bin", Shape(), tied=True)
    with caplog.at_level(logging.WARNING):
        assert open_checkpoint(tmp_path).name == "a"
    assert "tok300.bin" in caplog.text
    llama2c.write_checkpoint(tmp_path / "b.bin", Shape(), tied=True)
    with pytest.raises(CheckpointError, match=r"has 2 llama2\.c checkpoints; name one"):
        open_checkpoint(tmp_path)


def test_a_llama2c_tokenizer_that_the_runtime_would_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spaces take three bytes in the tokenizer.model that it becomes."""
    llama2c.write_checkpoint(tmp_path / "model.bin", Shape(), tied=True)
    pieces = [b"%d" % token + b" " * (100 if token >= 259 else 0) for token in range(300)]
    llama2c.write_vocabulary(tmp_path / "tok300.bin", llama2c.Vocabulary(pieces, [0.0] * 300))
    assert open_checkpoint(tmp_path).tokenizer.info.kind == "byte_pairs"
    size = (tmp_path / "tok300.bin").stat().st_size
    limits = (
        (size - 1, f"tok300.bin is larger than {size - 1} bytes"),
        (size, f"makes a tokenizer.model of .* limit is {size}, so remove it"),
    )
    for limit, message in limits:
        monkeypatch.setitem(MAX_BLOB_BYTES, "tokenizer.model", limit)
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(tmp_path)


@pytest.fixture
def stories(shared_data: Path) -> Path:
    return shared_data / "models" / "stories260K"


@pytest.fixture
def vocabulary(stories: Path) -> llama2c.Vocabulary:
    return llama2c.read_vocabulary(stories / "tok512.bin", 512)


@pytest.fixture
def tokenizer(stories: Path) -> Tokenizer:
    model = convert_tokenizer((stories / "tok512.bin").read_bytes(), 512, "tok512.bin")
    return load_tokenizer("sentencepiece", model, 1, (1, 2), True, vocab_size=512)


def test_the_tokenizer_tokenises_like_llama2c(vocabulary: llama2c.Vocabulary, tokenizer: Tokenizer) -> None:
    """All but U+2581 itself, which sentencepiece takes for a space."""
    rng = np.random.default_rng(0)
    alphabet = "Once upon a time, there was a girl named Lily.  She  loved\n\tto “play” — é ñ 日本 🙂 <s></s>"
    texts = ["", " ", "\n", "<s>", "<0x41>", alphabet, "Once upon a time"]
    texts += ["".join(rng.choice(list(alphabet), rng.integers(1, 60))) for _ in range(300)]
    for text in texts:
        assert tokenizer.encode(text) == llama2c.encode(vocabulary, text), text
        assert tokenizer.decode(tokenizer.encode(text)) == text


KNOWN_TEXT = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day, "
    "she saw a big, red ball. She wanted to play with it, but it was too high.\nLily's mom said, \"Lily, "
    "let's go to the park.\" Lily was sad and didn't know what to do. She said, \"I want to play with your "
    "ball, but I can't find it.\"\nLily was sad and didn't know what to do."
)


def test_the_stories_model_tells_its_known_story(stories: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    """The start of what llama2.c's own test expects of this model with a temperature of 0."""
    output = convert(stories, tmp_path / "b", "f16")
    bundle = Bundle.open(output)
    model = convert_tokenizer((stories / "tok512.bin").read_bytes(), 512, "tok512.bin")
    assert bundle.read_small("tokenizer.bin") == piece_table(model)
    assert (bundle.manifest.tokenizer.bos_id, bundle.manifest.tokenizer.eos_ids) == (1, (1, 2))
    tokens = tokenizer.encode(KNOWN_TEXT)
    with running(output) as model:
        logits = all_logits(model, tokens, 32)
    assert logits[:-1].argmax(axis=1).tolist() == tokens[1:]


@pytest.mark.parametrize("damage", ["short", "long", "length", "twice", "text", "other"])
def test_a_damaged_llama2c_tokenizer_is_refused(
    stories: Path, tmp_path: Path, damage: str, vocabulary: llama2c.Vocabulary
) -> None:
    data = bytearray((stories / "tok512.bin").read_bytes())
    pieces = list(vocabulary.pieces)
    if damage == "short":
        del data[-3:]
    elif damage == "long":
        data += b"more"
    elif damage == "length":
        data[8:12] = struct.pack("<i", -5)
    elif damage in ("twice", "text"):
        pieces[400] = pieces[401] if damage == "twice" else b"\xff"
        llama2c.write_vocabulary(tmp_path / "t", llama2c.Vocabulary(pieces, vocabulary.scores))
        data = bytearray((tmp_path / "t").read_bytes())
    size = 300 if damage == "other" else 512
    with pytest.raises(CheckpointError, match=r"tok\.bin.*(damaged|put this model's in its place)"):
        convert_tokenizer(bytes(data), size, "tok.bin")
