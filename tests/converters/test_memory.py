"""Converting takes the same few hundred MB whatever the model's size, inside a 1 GiB cgroup too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Generator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ondevice.bundle.reader import Bundle
from ondevice.converters.pipeline import ahead
from tests.benchmarks.lib.measure import MEMORY_CGROUP, memory_cgroup
from tests.support.models import tensor_shapes, tiny_config

pytestmark = pytest.mark.usefixtures("usual_threads")

# ru_maxrss isn't reset when a process is started, and pytest with torch may be large; VmHWM is its own.
PROGRAM = """
import sys
from pathlib import Path
from ondevice.converters.convert import convert
convert(sys.argv[1], sys.argv[2])
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
print(int(status["VmHWM"].split()[0]) * 1024)
"""


def sparse_checkpoint(folder: Path, **options: int) -> Path:
    """A float32 checkpoint that takes no room on the disk: zeros, but for what makes it say something."""
    config = tiny_config("llama", vocab_size=64, num_hidden_layers=1, **options)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    header: dict[str, Any] = {}
    offset = 0
    for name, shape in tensor_shapes(config).items():
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, offset + 4 * prod(shape)]}
        offset += 4 * prod(shape)
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)
        for name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"):
            first, last = header[name]["data_offsets"]
            file.seek(8 + len(text) + first)
            file.write(np.linspace(0.1, 1, (last - first) // 4, dtype=np.float32).tobytes())
    return folder


def one_layer(folder: Path, neurons: int) -> Path:
    """A checkpoint of D 4096: with 22016 neurons its down projection alone is three times what is held."""
    heads = {"num_attention_heads": 32, "num_key_value_heads": 32}
    return sparse_checkpoint(folder, hidden_size=4096, intermediate_size=neurons, **heads)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("neurons", [11008, pytest.param(22016, marks=pytest.mark.slow)])
def test_memory_stays_far_below_the_models_size(neurons: int, tmp_path: Path) -> None:
    large = one_layer(tmp_path / "model", neurons)
    assert (large / "model.safetensors").stat().st_size > 250_000_000 + 12 * 4096 * neurons
    command = [sys.executable, "-c", PROGRAM, str(large), str(tmp_path / "b")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) < 400 << 20
    assert Bundle.open(tmp_path / "b").config.intermediate_size == neurons


@pytest.mark.slow
@pytest.mark.cgroup
@pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or not (MEMORY_CGROUP / "memory.limit_in_bytes").exists(),
    reason="needs root and a cgroup v1 memory controller",
)
def test_conversion_fits_in_a_cgroup_of_half_a_gibibyte(tmp_path: Path) -> None:
    """The page cache counts here too, and files of three times the limit pass through it."""
    large = one_layer(tmp_path / "model", 22016)
    with memory_cgroup(512 << 20) as group:
        command = group.command([sys.executable, "-c", PROGRAM, str(large), str(tmp_path / "b")])
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def numbers(log: list[str], stop_at: int | None = None) -> Generator[int, None, None]:
    try:
        for number in range(10):
            if number == stop_at:
                raise ValueError("no more")
            log.append(f"made {number}")
            yield number
    finally:
        log.append("closed")


@pytest.mark.parametrize("depth", [1, 3, 20])
def test_a_stage_hands_over_everything_in_order(depth: int) -> None:
    log: list[str] = []
    threads = threading.active_count()
    assert list(ahead(ahead(numbers(log), depth), depth)) == list(range(10))
    assert log[-1] == "closed"
    assert threading.active_count() == threads


def test_a_stage_raises_after_what_came_before() -> None:
    log: list[str] = []
    stage = ahead(numbers(log, stop_at=4), 2)
    assert [next(stage) for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="no more"):
        next(stage)
    assert log.count("closed") == 1


def test_a_stage_that_is_left_stops() -> None:
    log: list[str] = []
    threads = threading.active_count()
    stage = ahead(numbers(log), 2)
    assert next(stage) == 0
    stage.close()
    assert log[-1] == "closed"
    assert len(log) < 6, "it ran on"
    assert threading.active_count() == threads
