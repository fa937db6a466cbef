"""`inspect --hosts`: each machine's layers, and what is said of figures that were not measured."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ondevice.bundle.reader import Bundle
from ondevice.distributed.planning import LAUNCHER_BYTES, RING_BYTES, SUPERVISOR_BYTES
from tests.support.command_line import Run
from tests.support.small_models import MODELS, write_small


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return write_small(tmp_path / "model", MODELS["dense"])


def host_file(folder: Path, *budgets: str | None) -> Path:
    hosts = [
        {"ssh": f"host{rank}", "ips": ["127.0.0.1"]} | ({} if budget is None else {"dram_budget": budget})
        for rank, budget in enumerate(budgets)
    ]
    path = folder / "hosts.json"
    path.write_text(json.dumps(hosts))
    return path


def test_inspect_says_who_holds_what(ondevice: Run, bundle: Path, tmp_path: Path) -> None:
    hosts = host_file(tmp_path, "5GB", "4GB", None)
    options = ("-m", bundle, "--hosts", hosts, "--max-context", "64")
    found = ondevice("inspect", *options, "--json").json
    assert (found["model"], found["layers"], found["hops"]) == ("model", 5, 3)
    ranks = found["ranks"]
    assert [rank["name"] for rank in ranks] == ["host0", "host1", "host2"]
    assert ranks[0]["first_layer"] == 0
    assert sum(rank["layers"] for rank in ranks) == 5
    assert [rank["plan"]["budget_bytes"] for rank in ranks[:2]] == [5_000_000_000, 4_000_000_000]
    assert all(rank["plan"]["fits"] and rank["plan"]["max_context"] == 64 for rank in ranks)
    total = sum(rank["seconds_per_token"] for rank in ranks) + 3 * found["hop_seconds"]
    assert found["seconds_per_token"] == pytest.approx(total)
    for rank in ranks:
        computing = rank["computed_bytes_per_token"] / found["compute_bytes_per_second"]
        assert rank["seconds_per_token"] == pytest.approx(computing, rel=0.01)
    text = ondevice("inspect", *options).out
    assert "model: 5 layers over 3 hosts" in text
    assert "layer 0, the embedding and the output head;" in text
    assert "measured on this machine, rank 0, and are taken for the other hosts too" in text
    assert "the budget of host2 follows that machine's memory" in text


def test_wrong_hosts_and_small_budgets_have_their_exit_codes(
    ondevice: Run, bundle: Path, tmp_path: Path
) -> None:
    small = ondevice("inspect", "-m", bundle, "--hosts", host_file(tmp_path, "4GB", "1MB"))
    assert small.code == 5
    assert "host1 has 1000000 bytes" in small.err
    first = ondevice("inspect", "-m", bundle, "--hosts", host_file(tmp_path, "1MB", "4GB"))
    assert first.code == 5
    assert "the dram_budget '1MB' of its host in the host file, which goes before" in first.err
    many = ondevice("inspect", "-m", bundle, "--hosts", host_file(tmp_path, *["4GB"] * 6))
    assert many.code == 3
    assert "6 hosts are too many" in many.err
    missing = ondevice("inspect", "-m", bundle, "--hosts", tmp_path / "none.json")
    assert missing.code == 2
    assert "there is no host file" in missing.err


def test_a_slice_is_not_divided(ondevice: Run, bundle: Path, tmp_path: Path) -> None:
    hosts = host_file(tmp_path, "5GB", "5GB")
    assert ondevice("split", bundle, "--hosts", hosts, "-o", tmp_path / "slices").code == 0
    for command in ("inspect", "split"):
        found = ondevice(command, tmp_path / "slices" / "rank-0", "--hosts", hosts)
        assert found.code == 3
        assert "a slice of a model: layer" in found.err
        assert "Only a whole model is divided among hosts: name that" in found.err


def test_slices_of_the_model_that_ships_lie_among_models(
    ondevice: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in the package, where nothing is written."""
    monkeypatch.setenv("ONDEVICE_HOME", str(tmp_path / "home"))
    hosts = host_file(tmp_path, "5GB", "5GB")
    found = ondevice("split", "--hosts", hosts, "--json").json
    folder = tmp_path / "home" / "small-relu-slices"
    assert [rank["path"] for rank in found["ranks"]] == [str(folder / f"rank-{rank}") for rank in (0, 1)]
    assert Bundle.open(folder / "rank-1").config.part.layers == 6


def test_the_smallest_budget_has_room_for_the_ring_and_supervisors(
    ondevice: Run, bundle: Path, tmp_path: Path
) -> None:
    """A rank's process takes more than the one that plans: what is promised here must do there."""
    smallest = []
    for budgets in (("1MB",), ("1MB", "1MB")):
        hosts = host_file(tmp_path, *budgets)
        found = ondevice("inspect", "-m", bundle, "--hosts", hosts, "--max-context", "64")
        assert found.code == 5
        said = re.search(r"the smallest that works is (\d+) bytes", found.err)
        assert said, found.err
        smallest.append(int(said[1]))
    # One layer instead of five takes little from it.
    more = RING_BYTES + SUPERVISOR_BYTES + LAUNCHER_BYTES
    assert more - 5_000_000 < smallest[1] - smallest[0] < more + 1_000_000
