"""What a checkpoint says twice: which of the two is meant isn't known, so each is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from ondevice.converters.checkpoints import sentencepiece_model as proto
from ondevice.errors import CheckpointError
from tests.support.models import random_tensors, save_safetensors, tiny_config, write_checkpoint
from tests.support.refusals import assert_refused

INDEX = "model.safetensors.index.json"
FIRST, LAST = (f"model-0000{n}-of-00003.safetensors" for n in (1, 3))
NORM = "model.norm.weight"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "source", shards=3, vocab_size=300)


def repeat(path: Path, entry: str, other: str) -> None:
    """Put `other`, which has the same key, before `entry`."""
    text = path.read_text()
    assert text.count(entry) == 1
    path.write_text(text.replace(entry, f"{other}, {entry}"))


def test_a_repeated_key_of_the_config_is_refused(source: Path) -> None:
    repeat(source / "config.json", '"hidden_act": "silu"', '"hidden_act": "relu"')
    assert_refused(source, CheckpointError, r"config\.json isn't valid JSON .*same key twice")


def test_a_tensor_listed_twice_in_the_index_is_refused(source: Path) -> None:
    repeat(source / INDEX, f'"{NORM}": "{LAST}"', f'"{NORM}": "{FIRST}"')
    assert_refused(source, CheckpointError, r"index\.json isn't valid JSON .*same key twice")


@pytest.mark.parametrize("listed", [FIRST, LAST])
def test_a_tensor_in_two_shards_is_refused(source: Path, listed: str) -> None:
    index = json.loads((source / INDEX).read_text())
    tensors = random_tensors(tiny_config(vocab_size=300))
    held = {name: tensors[name] for name, shard in index["weight_map"].items() if shard == FIRST}
    save_safetensors(source / FIRST, held | {NORM: np.ones(64, np.float32)})
    index["weight_map"][NORM] = listed
    (source / INDEX).write_text(json.dumps(index))
    assert_refused(source, CheckpointError, rf"{FIRST} and {LAST} both hold {NORM}")


def test_a_tensor_listed_twice_in_a_header_is_refused(source: Path) -> None:
    path = source / LAST
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length].decode().rstrip()
    entry = f'"{NORM}": ' + json.dumps(json.loads(header)[NORM])
    assert header.count(entry) == 1
    header = header.replace(entry, f"{entry}, {entry}")
    header += " " * (-len(header) % 8)
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + data[8 + length :])
    assert_refused(source, CheckpointError, rf"{LAST} .*isn't sound JSON.*same key twice")


def vocabulary() -> dict[str, Any]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(alphabet)}, []))
    return dict(json.loads(tokenizer.to_str()))


def test_a_repeated_piece_of_a_tokenizer_is_refused(source: Path) -> None:
    (source / "tokenizer.json").write_text(json.dumps(vocabulary(), ensure_ascii=False))
    repeat(source / "tokenizer.json", '"A": 32', '"A": 290')
    assert_refused(source, CheckpointError, "same key twice")


def test_an_id_of_two_pieces_is_refused(source: Path) -> None:
    values = vocabulary()
    values["model"]["vocab"]["A"] = values["model"]["vocab"]["B"]
    (source / "tokenizer.json").write_text(json.dumps(values))
    assert_refused(source, CheckpointError, r"tokenizer\.json gives two pieces the same id")


def test_a_repeated_piece_of_a_sentencepiece_model_is_refused(source: Path) -> None:
    pieces = [("<unk>", 0.0, proto.UNKNOWN), ("<s>", 0.0, proto.CONTROL), ("</s>", 0.0, proto.CONTROL)]
    pieces += [("a", -1.0, proto.NORMAL), ("b", -2.0, proto.NORMAL), ("a", -3.0, proto.NORMAL)]
    (source / "tokenizer.model").write_bytes(proto.bpe_model(pieces, 0, 1, 2))
    assert_refused(source, CheckpointError, "a is already defined")
