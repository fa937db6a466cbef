"""Models with experts, delta rules and latent attention, changed anywhere: a checkpoint or a typed error.

In folders of either kind, and in the metadata of GGUF files. Nothing is converted, as most cases end before:
`make fuzz` converts what opens.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ondevice.converters.checkpoints.opening import open_checkpoint
from ondevice.errors import OndeviceError
from tests.converters import test_mlx_experts, test_mlx_hybrids
from tests.converters.test_gguf_families import MODELS, written
from tests.converters.test_mlx_hostile import shortened
from tests.fuzz.mutations import NUMBERS, VALUES, change_json, changed_header, nearby
from tests.support.families import CASES, write_model
from tests.support.gguf_families import write_family
from tests.support.mlx_folders import MlxFolder, Scheme, save_typed

gguf = pytest.importorskip("gguf")

FOLDERS = (
    "qwen2 moe", "granite moe", "phimoe longrope", "gemma4 moe with inputs", "gpt-oss moe", "glm4 moe",
    "deepseek v2 moe groups", "deepseek v3 moe", "qwen3 next", "qwen3.5", "mimo v2 moe",
)  # fmt: skip
FILES = ("qwen2 moe", "gpt-oss", "deepseek v3 moe", "qwen3.5 moe even")
ROUNDS = 30
FILE_ROUNDS = 10
"""Fewer, as each is a file that is written anew."""
SECONDS = 5.0
"""Most of the processor's time that a case may take."""


class Tally(Counter[str]):
    """How many opened, and how many were refused."""

    def add(self, path: Path) -> None:
        """Open the checkpoint. Any other error than a typed one fails, and so does a long time."""
        started = time.process_time()
        try:
            open_checkpoint(path).close()
            self["opened"] += 1
        except OndeviceError:
            self["refused"] += 1
        assert time.process_time() - started < SECONDS


def changed_config(config: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """The config with a key's value replaced, or any place in it changed."""
    changed: dict[str, Any] = json.loads(json.dumps(config))
    if rng.random() < 0.5:
        key = rng.choice(sorted(changed))
        changed[key] = rng.choice([nearby(changed[key], rng), rng.choice(VALUES), rng.choice(NUMBERS)])
    else:
        change_json(changed, rng)
    return changed


@pytest.mark.fast("gpt-oss moe")
@pytest.mark.parametrize("case", FOLDERS)
def test_changed_configs_and_headers_of_a_folder_are_refused_cleanly(tmp_path: Path, case: str) -> None:
    family, options = CASES[case]
    write_model(tmp_path / "source", family, options)
    config, weights = (tmp_path / "source" / name for name in ("config.json", "model.safetensors"))
    sound, data, rng, tally = (
        json.loads(config.read_bytes()),
        weights.read_bytes(),
        random.Random(case),
        Tally(),
    )
    for _ in range(ROUNDS):
        config.write_text(json.dumps(changed_config(sound, rng)))
        tally.add(config.parent)
    config.write_text(json.dumps(sound))
    assert tally["refused"] > ROUNDS // 4
    for _ in range(ROUNDS // 2):
        weights.write_bytes(changed_header(data, rng))
        tally.add(config.parent)
    weights.write_bytes(data)
    refused = tally["refused"]
    tally.add(config.parent)
    assert tally["refused"] == refused


def expert_stacks(folder: Path) -> MlxFolder:
    return test_mlx_experts.folders(folder, "qwen3 moe", Scheme(4))[1]


def latents(folder: Path) -> MlxFolder:
    return test_mlx_hybrids.folders(folder, "deepseek v3")[1]


def delta_rules(folder: Path) -> MlxFolder:
    return test_mlx_hybrids.folders(folder, "qwen3 next")[1]


@pytest.mark.fast("expert_stacks")
@pytest.mark.parametrize("made", [expert_stacks, latents, delta_rules])
def test_changed_configs_and_tensors_of_an_mlx_folder_are_refused_cleanly(
    tmp_path: Path, made: Callable[[Path], MlxFolder]
) -> None:
    sound = made(tmp_path)
    for path in sound.path.glob("model*"):
        path.unlink()
    weights, config = sound.path / "model.safetensors", sound.path / "config.json"
    rng, tally = random.Random(made.__name__), Tally()
    save_typed(weights, sound.stored)
    tally.add(sound.path)
    assert tally["opened"] == 1
    for _ in range(ROUNDS):
        config.write_text(json.dumps(changed_config(sound.config, rng)))
        tally.add(sound.path)
    config.write_text(json.dumps(sound.config))
    for _ in range(ROUNDS // 2):
        save_typed(weights, shortened(sound.stored, rng))
        tally.add(sound.path)
    assert tally["refused"] > ROUNDS // 2


def changed_key(writer: Any, rng: random.Random) -> None:
    """Another value, or another type, for one key of the metadata."""
    kinds, pairs = gguf.GGUFValueType, writer.kv_data[0]
    key = rng.choice(sorted(name for name in pairs if name != "general.architecture"))
    old = pairs.pop(key)
    values: list[tuple[Any, Any]] = [
        (kinds.UINT32, rng.choice([0, 1, 2, 3, 7, 64, 65, 1 << 16, (1 << 31) - 1, (1 << 32) - 1])),
        (kinds.INT32, rng.choice([-1, -(1 << 31)])),
        (kinds.UINT64, (1 << 64) - 1),
        (kinds.FLOAT32, rng.choice([0.0, -1.5, 1e-40, 3e38, float("inf"), float("nan")])),
        (kinds.BOOL, rng.random() < 0.5),
        (kinds.STRING, rng.choice(["", "x", "linear", "\n"])),
    ]
    if rng.random() < 0.3:
        writer.add_array(
            key, rng.choice([[1], [0] * 3, [1.5] * 4, ["a"] * 3, [True, False] * 2, [1 << 30] * 4])
        )
    elif rng.random() < 0.5 and isinstance(old.value, int):
        writer.add_key_value(key, max(0, old.value + rng.choice([-1, 1, 2])), kinds.UINT32)
    else:
        kind, value = rng.choice(values)
        writer.add_key_value(key, value, kind)


@pytest.mark.fast("gpt-oss")
@pytest.mark.parametrize("case", FILES)
def test_changed_metadata_of_a_gguf_file_are_refused_cleanly(tmp_path: Path, case: str) -> None:
    """Sound bytes, as a converter of another release might write them, or somebody who knows the format."""
    assert case in MODELS
    source, path = written(tmp_path / "source", case), tmp_path / "model.gguf"
    rng, tally = random.Random(case), Tally()
    for _ in range(FILE_ROUNDS):
        write_family(path, source, "Q8_0", change=lambda writer: changed_key(writer, rng))
        tally.add(path)
    assert tally["refused"] > FILE_ROUNDS // 3
