"""Models in memory control groups: they keep to the limit and yield to others, and nothing is killed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.benchmarks.lib.measure import MEMORY_CGROUP, MemoryCgroup, memory_cgroup
from tests.support.bundles import convert_bundle
from tests.support.command_line import command
from tests.support.models import save_safetensors, tensor_shapes, tiny_config

pytestmark = [
    pytest.mark.slow,
    pytest.mark.cgroup,
    pytest.mark.skipif(
        not (MEMORY_CGROUP / "memory.limit_in_bytes").exists() or os.geteuid() != 0,
        reason="needs root and a cgroup v1 memory controller",
    ),
]
SHAPE = {"hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": 6, "num_attention_heads": 8}
SPARE_BYTES = 32 << 20
"""What the control group has beside the model's budget."""
LEFT_BYTES, WANTED_BYTES = 12 << 20, 20 << 20
"""The other process takes all but so much of what is free, and a little later so much more."""
MODEL = """
import json, sys
import ondevice
from ondevice import api
from ondevice.budget.pressure import PressureConfig

api.DEFAULT_PRESSURE = PressureConfig(
    interval_seconds=0.05, settle_seconds=0.2, calm_seconds=0.5, grow_seconds=0.1
)
with ondevice.load(sys.argv[1], dram_budget=int(sys.argv[2]), threads=1) as model:
    while True:
        response, found = model.generate(tokens=[1, 2, 3], max_tokens=6), model.memory_pressure
        filled = response.stats.neuron_cache_hit_rate == 1.0
        print(json.dumps(vars(found) | {"tokens": response.tokens, "filled": filled}), flush=True)
"""
EATER = """
import sys
held = []
for line in sys.stdin:
    for _ in range(int(line) >> 20):
        held.append(b"x" * (1 << 20))
    print("eaten", flush=True)
"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 MB of feed-forward."""
    folder = tmp_path_factory.mktemp("pressure")
    config = tiny_config(**SHAPE)  # type: ignore[arg-type]
    noise = np.random.default_rng(0).standard_normal(1 << 18, dtype=np.float32) / 32
    tensors = {
        name: np.ones(shape, np.float32) if name.endswith("norm.weight") else np.resize(noise, shape)
        for name, shape in tensor_shapes(config).items()
    }
    (folder / "hf").mkdir()
    (folder / "hf" / "config.json").write_text(json.dumps(config))
    save_safetensors(folder / "hf" / "model.safetensors", tensors, "F16")
    return convert_bundle(folder / "hf", folder / "bundle", "q8")


class Running:
    """A process in a control group, which says a line at a time."""

    def __init__(self, group: MemoryCgroup, program: str, *arguments: object) -> None:
        command = group.command([sys.executable, "-c", program, *map(str, arguments)])
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def line(self) -> str:
        """The next, empty at the end."""
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def eat(self, nbytes: int) -> str:
        """What it says when it has."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{nbytes}\n")
        self.process.stdin.flush()
        return self.line()

    def until(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The first line, read as JSON, that meets the condition."""
        while line := self.line():
            if condition(found := json.loads(line)):
                return found
        raise AssertionError(f"it ended with {self.end()}")

    def end(self) -> int:
        """The exit status, below 0 for the signal that it died of."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()
        return self.process.returncode


@pytest.fixture(scope="module")
def budget(bundle: Path) -> int:
    """Everything resident."""
    program = "import sys, ondevice; print(ondevice.inspect(sys.argv[1], threads=1).full_bytes)"
    told = subprocess.run([sys.executable, "-c", program, str(bundle)], stdout=subprocess.PIPE, check=True)
    return int(told.stdout) + (4 << 20)


def free_bytes(group: MemoryCgroup) -> int:
    """What can be had in it without killing anything."""
    stat = dict(line.split() for line in (group.path / "memory.stat").read_text().splitlines())
    cached = int(stat["total_active_file"]) + int(stat["total_inactive_file"])
    return group.read("limit_in_bytes") - group.read("usage_in_bytes") + cached


def test_the_budget_yields_to_another_process_and_comes_back(bundle: Path, budget: int) -> None:
    """With `memory_pressure="off"` a process is killed, or both stand still, reading their programs anew."""
    with memory_cgroup(budget + SPARE_BYTES) as group:
        model, eater = Running(group, MODEL, bundle, budget), Running(group, EATER)
        try:
            before = model.until(lambda found: found["filled"])
            assert (before["budget_bytes"], before["shrinks"]) == (budget, 0)
            assert eater.eat(0) == "eaten\n"
            assert eater.eat(free_bytes(group) - LEFT_BYTES) == "eaten\n"
            shrunk = model.until(lambda found: found["shrinks"])
            assert shrunk["budget_bytes"] < budget
            assert eater.eat(WANTED_BYTES) == "eaten\n"
            scarce = model.until(lambda found: found["budget_bytes"] < shrunk["budget_bytes"])
            assert (eater.process.poll(), scarce["user_budget_bytes"]) == (None, budget)
            eater.end()
            back = model.until(lambda found: found["budget_bytes"] == budget and found["filled"])
            assert (back["level"], back["growths"] > 0) == ("normal", True)
            assert before["tokens"] == shrunk["tokens"] == scarce["tokens"] == back["tokens"]
        finally:
            eater.end()
            model.end()


def test_a_model_that_fills_its_group_alone_keeps_its_budget(bundle: Path, budget: int) -> None:
    with memory_cgroup(budget) as group:
        model = Running(group, MODEL, bundle, budget)
        try:
            model.until(lambda found: found["filled"])
            found = [model.until(lambda found: True) for _ in range(20)]
            assert [it["budget_bytes"] for it in found] == [budget] * 20
            assert found[-1]["shrinks"] == 0
        finally:
            model.end()


def run(group: MemoryCgroup, *arguments: object) -> subprocess.CompletedProcess[str]:
    """A command line in the group."""
    return subprocess.run(group.command(command(*arguments)), capture_output=True, text=True, timeout=120)


def bench(bundle: Path) -> tuple[object, ...]:
    """A little work."""
    few = ("--threads", 1, "--runs", 1, "--prompt-tokens", 32, "--max-tokens", 8)
    return ("bench", "-m", bundle, *few, "--json")


@pytest.fixture(scope="module")
def smallest(bundle: Path) -> int:
    """The budget that has room for a context, and for no neurons."""
    shown = subprocess.run(
        command("inspect", "-m", bundle, "--threads", 1, "--speculation", "off", "--json"),
        stdout=subprocess.PIPE,
        check=True,
    )
    return int(json.loads(shown.stdout)["minimum_budget_bytes"])


def test_a_budget_above_the_groups_limit_is_refused_where_it_was_killed(
    bundle: Path, budget: int, smallest: int
) -> None:
    limit = (budget + smallest) // 2
    with memory_cgroup(limit) as group:
        refused = run(group, *bench(bundle), "--dram-budget", budget)
        assert (refused.returncode, refused.stdout) == (5, "")
        assert f"is more than the control group {group.path} allows" in refused.stderr
        remedy = re.search(r"Raise that limit, or take --dram-budget (\d+) or less", refused.stderr)
        assert remedy is not None
        assert group.read("failcnt") == 0
        assert run(group, "inspect", "-m", bundle, "--dram-budget", remedy[1]).stdout.endswith("fits: yes\n")


@pytest.mark.parametrize("budget", ["auto", "100%"])
def test_a_small_group_holds_what_fits_into_it(bundle: Path, smallest: int, budget: str) -> None:
    """A fixed reserve of 256 MiB left a model nothing."""
    with memory_cgroup(smallest * 5 // 4) as group:
        done = run(group, *bench(bundle), "--dram-budget", budget)
        assert done.returncode == 0, done.stderr
        assert "is more than" not in done.stderr


@pytest.mark.parametrize("limit", [200_000_000, 300_000_000])
def test_the_doctor_tests_every_backend_in_a_small_group(limit: int) -> None:
    with memory_cgroup(limit) as group:
        found = json.loads(run(group, "doctor", "--json").stdout)
        assert found["ok"], [check for check in found["checks"] if check["status"] == "failed"]
