"""Host files: what they hold, and that each way to get one wrong is refused with the field's name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ondevice.distributed.hosts import MAX_FILE_BYTES, HostEntry, HostFile, read_host_file, read_hosts
from ondevice.distributed.place import MAX_RANKS
from ondevice.errors import UsageError

ONE = {"ssh": "one.local", "ips": ["10.0.0.1", "10.1.0.1"], "dram_budget": "4GB"}
TWO = {"ssh": "me@10.0.0.2", "ips": ["10.0.0.2"], "rdma": [None, "rdma_en2"]}


def written(folder: Path, value: object) -> Path:
    path = folder / "hosts.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def test_both_of_the_formats_that_mlx_takes(tmp_path: Path) -> None:
    hosts = (HostEntry("one.local", ("10.0.0.1", "10.1.0.1"), "4GB"), HostEntry("me@10.0.0.2", ("10.0.0.2",)))
    assert read_hosts(written(tmp_path, [ONE, TWO])) == hosts
    whole = {"backend": "ring", "envs": ["MLX_A=b c"], "hosts": [ONE, TWO]}
    assert read_host_file(written(tmp_path, whole)) == HostFile(hosts, ("MLX_A=b c",))


def test_a_budget_may_be_a_number_of_bytes_or_auto(tmp_path: Path) -> None:
    budgets = [
        host.dram_budget
        for host in read_hosts(
            written(tmp_path, [ONE | {"dram_budget": budget} for budget in (4_000_000_000, "auto", "60%")])
        )
    ]
    assert budgets == ["4000000000", "auto", "60%"]


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("[", "isn't valid JSON"),
        ("[" * 100 + "]" * 100, "nests deeper"),
        (" " * (MAX_FILE_BYTES + 1), "the limit is"),
        (3, "must be an object"),
        ([], "names no hosts"),
        ([ONE] * (MAX_RANKS + 1), f"a list of at most {MAX_RANKS}"),
        ([{"ips": ["10.0.0.1"]}], "lacks 'ssh'"),
        ([ONE | {"ssh": "-oProxyCommand=reboot"}], "hosts[0].ssh"),
        ([ONE | {"ssh": "a;reboot"}], "hosts[0].ssh"),
        ([ONE | {"ssh": ""}], "hosts[0].ssh"),
        ([ONE, ONE | {"ips": []}], "hosts[1].ips is empty"),
        ([ONE | {"ips": ["one.local"]}], "IPv4"),
        ([ONE | {"ips": ["::1"]}], "IPv4"),
        ([ONE | {"dram_budget": "4G"}], "hosts[0].dram_budget"),
        ([ONE | {"dram_budget": True}], "hosts[0].dram_budget"),
        ([ONE | {"dram_budget": -1}], "hosts[0].dram_budget"),
        ([ONE | {"budget": "4GB"}], "unknown key 'budget'"),
        ({"hosts": [ONE], "backend": "jaccl"}, "ring alone"),
        ({"hosts": [ONE], "envs": ["A-B=1"]}, "NAME=value"),
        ({"hosts": [ONE], "extra": 1}, "unknown key 'extra'"),
    ],
)  # fmt: skip
def test_each_way_to_get_it_wrong_is_refused_by_name(tmp_path: Path, value: object, named: str) -> None:
    with pytest.raises(UsageError) as raised:
        read_hosts(written(tmp_path, value))
    assert named in raised.value.for_command_line
    assert len(raised.value.for_command_line) < 400 + len(str(tmp_path))


def test_no_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(UsageError, match="there is no host file"):
            read_hosts(path)
