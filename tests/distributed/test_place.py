"""Where a process stands among ranks, as its environment has it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ondevice.budget import claims
from ondevice.bundle.reader import Bundle
from ondevice.config import RuntimeConfig
from ondevice.distributed.place import CONTROL, EnginePlace, RankPlace, checked_ring, find_place
from ondevice.distributed.speed import measured_resources, usable_bytes
from ondevice.errors import RankError, UsageError
from ondevice.runtime.resolving import resolve
from tests.support.paths import ROOT


def test_mlx_launch_s_variables_give_the_place_in_the_ring(tmp_path: Path) -> None:
    file = tmp_path / "ring.json"
    file.write_text(json.dumps([["10.0.0.1:5000"], ["10.0.0.2:5001"]]))
    found = find_place({"MLX_RANK": "1", "MLX_HOSTFILE": str(file)})
    assert found == RankPlace(1, 2, ("10.0.0.1", 5002), "", (("10.0.0.1:5000",), ("10.0.0.2:5001",)))


def test_an_engine_reads_what_its_supervisor_told() -> None:
    place = EnginePlace(1, 3, 7, "4GB", 20_000_000)
    assert EnginePlace.from_text(place.to_text()) == place


def test_plans_and_the_meeting_count_what_runs_beside_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "_other_process_bytes", 0)
    bundle = Bundle.open(ROOT / "weights" / "small-relu")
    runtime = RuntimeConfig(dram_budget="2GB", backend="cpu", threads=1)
    resolve(bundle, runtime)
    before, room = resolve(bundle, runtime).plan.process_bytes, usable_bytes()
    claims.count_other_processes(500_000_000)
    assert abs(resolve(bundle, runtime).plan.process_bytes - before - 500_000_000) < 50_000_000
    assert measured_resources(bundle, resolve(bundle, runtime).runtime, "").process_bytes > 500_000_000
    assert usable_bytes() > room + 400_000_000


@pytest.mark.parametrize(
    "address",
    [
        "one.local:5000",
        "[::1]:5000",
        "10.0.0.1",
        "10.0.0.1:0",
        "10.0.0.1:65536",
        "10.0.0.1:\u0665",
        "10.0.0:5",
        5,
    ],
)
def test_what_is_no_address_of_ipv4_is_refused(address: object) -> None:
    with pytest.raises(RankError, match="is not an address of the ring"):
        checked_ring([[address]])


@pytest.mark.parametrize(
    "text", ["10.0.0.1:5/\u0662/t", "10.0.0.1:\u0665/2/t", "10.0.0.1:5/1/t", "x", "10.0.0.1:5/65/"]
)
def test_what_is_no_place_of_a_launched_rank_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="must be address:port/ranks/token"):
        find_place({CONTROL: text, "MLX_RANK": "0"})


@pytest.mark.parametrize(
    "variables",
    [
        {"MLX_RANK": "1"},
        {"MLX_RANK": "0", "MLX_WORLD_SIZE": "2"},
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"},
    ],
)
def test_ranks_without_a_ring_are_refused(variables: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="MLX's ring alone"):
        find_place(variables)


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"MLX_RANK": "0", "MLX_WORLD_SIZE": "1"},
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
    ],
)
def test_one_rank_runs_alone(variables: dict[str, str]) -> None:
    assert find_place(variables) is None


def test_a_command_that_runs_alone_imports_none_of_what_ranks_need() -> None:
    script = "import sys, ondevice.cli; print(*(it for it in sys.modules if '.distributed.' in it))"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["ondevice.distributed.place"]
