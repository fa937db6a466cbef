"""Any byte or value of a checkpoint folder changed: a bundle or a typed error, nothing else."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from ondevice.converters.convert import convert
from ondevice.errors import OndeviceError
from tests.converters.test_tokenizer import byte_level, sentencepiece_model, write_json
from tests.fuzz.mutations import paths
from tests.support.models import LLAMA3_ROPE, write_checkpoint

VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 1 << 31, 1 << 63, 10**400, 1.5, 1e308, float("nan"), "", "x", "../x",
    "\ud800", [], {}, [None], [[]], {"a": None}, [1, 2, 3],
]  # fmt: skip
ROUNDS = 60


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with everything a folder may hold."""
    source = write_checkpoint(
        tmp_path_factory.mktemp("fuzz") / "sound",
        "qwen3",
        shards=2,
        num_hidden_layers=1,
        vocab_size=300,
        rope_scaling=LLAMA3_ROPE,
    )
    byte_level("<bos>").save(str(source / "tokenizer.json"))
    (source / "tokenizer.model").write_bytes(sentencepiece_model())
    templates = [{"name": "default", "template": "{{ messages }}"}]
    special = {"bos_token": "<bos>", "eos_token": {"content": "<eos>"}, "add_bos_token": True}
    write_json(source / "tokenizer_config.json", **special, chat_template=templates)
    write_json(source / "generation_config.json", eos_token_id=[2, 3], do_sample=True, temperature=0.5)
    return source


def changed_json(data: bytes, rng: random.Random) -> bytes:
    value = json.loads(data)
    *path, last = rng.choice(list(paths(value)))
    inner = value
    for key in path:
        inner = inner[key]
    if rng.random() < 0.2:
        del inner[last]
    else:
        inner[last] = rng.choice(VALUES)
    return json.dumps(value).encode()


def changed_bytes(data: bytes, rng: random.Random) -> bytes:
    content = bytearray(data)
    how = rng.randrange(3)
    if how == 0:
        for _ in range(rng.randint(1, 4)):
            content[rng.randrange(min(len(content), rng.choice([64, 4096, 1 << 30])))] = rng.randrange(256)
    elif how == 1:
        del content[rng.randrange(len(content)) :]
    else:
        content += rng.randbytes(rng.randint(1, 50))
    return bytes(content)


def changed(path: Path, rng: random.Random) -> bytes:
    data = path.read_bytes()
    if rng.random() < 0.4 or path.suffix == ".model":
        return changed_bytes(data, rng)
    if path.suffix == ".json":
        return changed_json(data, rng)
    length = int.from_bytes(data[:8], "little")
    header = changed_json(data[8 : 8 + length], rng)
    return len(header).to_bytes(8, "little") + header + data[8 + length :]


@pytest.mark.fast("0")
@pytest.mark.parametrize("seed", range(4))
def test_a_changed_checkpoint_converts_or_is_refused(sound: Path, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    converted = refused = 0
    for _ in range(ROUNDS):
        source = shutil.copytree(sound, tmp_path / "source")
        if rng.random() < 0.3:
            (source / "tokenizer.json").unlink()
        victim = rng.choice(sorted(source.iterdir()))
        victim.write_bytes(changed(victim, rng))
        try:
            convert(source, tmp_path / "bundle", force=True)
            converted += 1
        except OndeviceError:
            refused += 1
        shutil.rmtree(source)
    assert converted > 0
    assert refused > converted
