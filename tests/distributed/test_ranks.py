"""Commands over several ranks, as users run them: real processes, MLX's ring, and the model that ships."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ondevice.api import load, write_slice
from ondevice.bundle.reader import Bundle
from ondevice.cli import cli
from ondevice.distributed import launch
from ondevice.distributed.remote_layers import PIPELINED_ROWS
from ondevice.errors import StartAgainError
from tests.support.command_line import Run
from tests.support.distributed import (
    MARK,
    RankProcess,
    left_over,
    ring_environments,
    start_ranks,
    wait_for_all,
)
from tests.support.paths import ROOT

pytest.importorskip("mlx.core")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it looks processes up in /proc")

SHIPPED = ROOT / "weights" / "small-relu"
LIMIT_SECONDS = 30.0
START_SECONDS = 60.0
GENERATE = ("-m", "ondevice", "generate", "--max-tokens", "24", "--threads", "1", "--json")
BUDGET = ("--dram-budget", "400MB")


def hosts_file(folder: Path, budgets: Sequence[str]) -> Path:
    path = folder / "hosts.json"
    host = {"ssh": "127.0.0.1", "ips": ["127.0.0.1"]}
    path.write_text(json.dumps([host | {"dram_budget": each} for each in budgets]))
    return path


def run_hosts(
    folder: Path, count: int, *arguments: str, typed: bytes = b"", budgets: Sequence[str] = ()
) -> RankProcess:
    """Run a command with `--hosts`, to its end. budgets: by default some that are enough."""
    environment = {**os.environ, MARK: str(folder), "TMPDIR": str(folder)}
    path = hosts_file(folder, budgets or [f"{300 + 20 * rank}MB" for rank in range(count)])
    (rank,) = start_ranks([environment], [(*arguments, "--hosts", str(path))], typed)
    rank.process.wait(START_SECONDS)
    require_gone(str(folder))
    return rank


def require_gone(mark: str) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while left := left_over(mark):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def alone(prompt: str = "Once", **options: Any) -> tuple[str, list[int]]:
    """What one process generates."""
    with load(SHIPPED, dram_budget="4GB", threads=1) as model:
        found = model.generate(prompt, max_tokens=24, **options)
        return found.text, list(found.tokens)


def test_hosts_gives_the_text_of_one_machine(tmp_path: Path) -> None:
    rank = run_hosts(tmp_path, 2, *GENERATE, "--prompt", "Once", "--temp", "0.8", "--seed", "7")
    assert rank.process.returncode == 0, rank.said
    found = json.loads(rank.printed)
    assert (found["text"], found["tokens"]) == alone(temperature=0.8, seed=7)
    ranks = found["stats"]["ranks"]
    assert [it["rank"] for it in ranks] == [0, 1]
    edges = [edge for it in ranks for edge in (it["first_layer"], it["first_layer"] + it["layers"])]
    assert edges == [0, edges[1], edges[1], 6]
    assert [it["budget_bytes"] for it in ranks] == [300_000_000, 320_000_000]
    for it in ranks:
        assert 0 < it["peak_memory_bytes"] <= it["budget_bytes"]
        assert it["flash_bytes_read"] > 0
        assert it["hops"]["messages"] > 20
        assert it["hops"]["sent_bytes"] > 20 * 4096
    assert re.search(r"^small-relu, layers? 0.* of 6: plan: budget 300 MB", rank.said)
    assert rank.said.count("plan: ") == 1
    assert re.search(
        r"^rank 1: layers? (\d to )?5; peak .* of 320 MB; .* sent; waited", rank.said, re.MULTILINE
    )
    assert "warning" not in rank.said


@pytest.mark.slow
def test_mlx_over_its_ring_gives_the_text_of_one_machine(tmp_path: Path, chat_bundle: Path) -> None:
    """Behind a prompt of two chunks, which are pipelined, and with drafts."""
    prompt = "one two three " * 10
    options = ("--backend", "mlx", "--speculation", "lookup", "-m", str(chat_bundle))
    sampled = ("--temp", "0.8", "--seed", "3")
    rank = run_hosts(tmp_path, 2, *GENERATE, "--prompt", prompt, *options, *sampled)
    assert rank.process.returncode == 0, rank.said
    found = json.loads(rank.printed)
    assert found["stats"]["prompt_tokens"] > PIPELINED_ROWS
    with load(chat_bundle, backend="mlx", speculation="off", threads=1) as model:
        expected = model.generate(prompt, max_tokens=24, temperature=0.8, seed=3)
    assert (found["text"], found["tokens"]) == (expected.text, list(expected.tokens))
    assert found["stats"]["backend"] == "mlx"
    assert [it["rank"] for it in found["stats"]["ranks"]] == [0, 1]


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["eagle", "off", "lookup", "streams", "auto"])
def test_the_smallest_budgets_that_are_said_are_enough(tmp_path: Path, drafter: str) -> None:
    """They stay as they are, which is said, and a prompt that looks like the help option is a prompt."""
    options = ("--speculation", drafter, "--threads", "1", "--memory-pressure", "auto")
    inspect = ("-m", "ondevice", "inspect", *options, "--json", "--hosts")
    said = subprocess.run(
        [sys.executable, *inspect, str(hosts_file(tmp_path, ["300MB"] * 2))], capture_output=True, check=True
    )
    smallest = [str(rank["plan"]["minimum_budget_bytes"]) for rank in json.loads(said.stdout)["ranks"]]
    rank = run_hosts(tmp_path, 2, *GENERATE, "--prompt", "-h", *options, budgets=smallest)
    assert rank.process.returncode == 0, rank.said
    assert rank.said.count("warning: --memory-pressure auto does nothing") == 1
    found = json.loads(rank.printed)
    assert (found["text"], found["tokens"]) == alone("-h")
    assert [str(it["budget_bytes"]) for it in found["stats"]["ranks"]] == smallest
    assert all(it["peak_memory_bytes"] <= it["budget_bytes"] for it in found["stats"]["ranks"])


@pytest.mark.slow
def test_a_chat_of_three_ranks_reads_stdin_to_its_end(tmp_path: Path) -> None:
    """What it saves on its way it loads again, without the states of which other ranks have parts."""
    saved = tmp_path / "talk"
    typed = f"hi\n/save {saved}\n/reset\n/load {saved}\nwhat?\n".encode()
    chat = ("-m", "ondevice", "chat", "--max-tokens", "12", "--threads", "1", "--temp", "0")
    rank = run_hosts(tmp_path, 3, *chat, typed=typed)
    assert rank.process.returncode == 0, rank.said
    assert "2 messages loaded" in rank.said
    assert saved.is_file()
    assert not saved.with_name("talk.state").exists()
    single = subprocess.run([sys.executable, *chat], input=typed, capture_output=True, check=True, timeout=60)
    assert rank.printed.encode() == single.stdout
    assert saved.with_name("talk.state").is_dir()


@pytest.mark.slow
def test_under_mlx_launch_ranks_find_themselves(tmp_path: Path) -> None:
    """mlx.launch sets these two variables, and starts the same command everywhere. Each has a slice here."""
    whole = Bundle.open(SHIPPED)
    slices = [write_slice(whole.slice(*ends), tmp_path / f"rank-{ends[0]}") for ends in ((0, 2), (2, 6))]
    commands = [(*GENERATE, "--prompt", "Once", *BUDGET, "--model", str(path)) for path in slices]
    ranks = start_ranks(ring_environments(tmp_path, 2), commands)
    wait_for_all(ranks, START_SECONDS)
    assert [rank.process.returncode for rank in ranks] == [0, 0], [rank.said for rank in ranks]
    found = json.loads(ranks[0].printed)
    assert (found["text"], found["tokens"]) == alone()
    assert [it["layers"] for it in found["stats"]["ranks"]] == [2, 4]
    assert (ranks[1].printed, ranks[1].said) == ("", "")


def bent(folder: Path) -> Path:
    """The shipped model with a changed byte in its last layer, which its manifest doesn't tell."""
    target = shutil.copytree(SHIPPED, folder / "bent")
    file = target / "gates-00005.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    return target


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bent", "another"])
def test_a_damaged_or_another_model_on_one_rank_is_an_error_on_all(
    tmp_path: Path, kind: str, chat_bundle: Path
) -> None:
    other = bent(tmp_path) if kind == "bent" else chat_bundle
    models = [SHIPPED, other]
    commands = [(*GENERATE, "--prompt", "Once", *BUDGET, "--model", str(model)) for model in models]
    ranks = start_ranks(ring_environments(tmp_path, 2), commands)
    wait_for_all(ranks, START_SECONDS)
    said = "checksum" if kind == "bent" else "rank 1 has another model"
    for rank in ranks:
        assert rank.process.returncode == (6 if kind == "bent" else 1), rank.said
        assert said in rank.said
        assert "Traceback" not in rank.said
        assert rank.printed == ""
    require_gone(str(tmp_path / "ring.json"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("generate", "--prompt", "a", "--hosts", "none.json"), "there is no host file none.json"),
        (("generate", "--prompt", "a", "--hosts", "hosts.json"), "takes 2 to 64"),
        (("bench", "--ablation", "--hosts", "none.json"), "--ablation runs on one machine only"),
        (("serve", "one", "two", "--hosts", "none.json"), "a server of several models runs on one"),
        *(
            ((*command, "--prompt-cache", "x", "--hosts", "none.json"), "--prompt-cache runs on one machine")
            for command in (("generate", "--prompt", "a"), ("chat",), ("serve",))
        ),
    ],
)
def test_wrong_uses_are_refused_before_anything_starts(
    ondevice: Run, arguments: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts_file(tmp_path, ["300MB"])
    monkeypatch.chdir(tmp_path)
    refused = ondevice(*arguments)
    assert (refused.code, said in refused.err) == (2, True), refused.err


def test_a_host_that_ssh_does_not_reach_is_named(tmp_path: Path) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\necho no route >&2\nexit 255\n")
    ssh.chmod(0o755)
    hosts = json.loads(hosts_file(tmp_path, ["300MB"] * 2).read_bytes())
    hosts[1]["ssh"] = "laptop.invalid"
    (tmp_path / "hosts.json").write_text(json.dumps(hosts))
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, MARK: str(tmp_path), "TMPDIR": str(tmp_path), "PATH": path}
    command = (*GENERATE, "--prompt", "a", "--hosts", str(tmp_path / "hosts.json"))
    (rank,) = start_ranks([environment], [command])
    assert rank.process.wait(LIMIT_SECONDS) == 1
    assert "error: the other ranks couldn't be started: mlx.launch, which counts" in rank.said
    assert "Check that ssh reaches laptop.invalid without asking for a password" in rank.said
    assert "[33m" not in rank.said
    require_gone(str(tmp_path))


def others_of(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[str, list[str]]:
    """The host file, and what the other ranks are started with."""
    started: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(launch, "start_ranks", lambda *given: started.append(given))
    with pytest.raises(StartAgainError):
        cli.main([*arguments, "--hosts", "hosts.json"], standalone_mode=False)
    return started[0]


def test_other_ranks_are_given_the_model_and_how_to_run_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no prompt, key or file: those are the first machine's."""
    fixed = ["generate", "--prompt="]
    own = ("-p", "secret", "--json-schema", "none.json", "--temp", "0.5", "--seed", "3")
    given = ("small-relu", "--threads", "2", "--sparsity", "dense", "--dram-budget", "1GB")
    passed = ["--model=small-relu", "--dram-budget=1GB", "--threads=2", "--sparsity=dense"]
    assert others_of(monkeypatch, "generate", *given, *own) == ("hosts.json", [*fixed, *passed])
    assert others_of(monkeypatch, "generate", "-p", "-") == ("hosts.json", fixed)
    chat = ("chat", "--model", "small-relu", "--system-prompt", "secret", "--grammar", "-")
    assert others_of(monkeypatch, *chat)[1] == [*fixed, "--model=small-relu"]
    server = ("serve", "small-relu", "--api-key", "secret", "--kv-bits", "8")
    assert others_of(monkeypatch, *server)[1] == [*fixed, "--model=small-relu", "--kv-bits=8"]
    bench = ("bench", "--speculation", "lookup", "--runs", "1")
    assert others_of(monkeypatch, *bench)[1] == [*fixed, "--speculation=lookup"]


@pytest.mark.slow
def test_what_an_engine_wrote_before_it_died_is_said_on_the_first_machine(tmp_path: Path) -> None:
    died = "import os\nif os.environ.get('MLX_RANK') == '1' and 'ONDEVICE_CHILD' in os.environ:\n"
    died += "    os.write(2, b'the library is broken\\n')\n    os._exit(9)\n"
    (tmp_path / "sitecustomize.py").write_text(died)
    path = hosts_file(tmp_path, ["300MB"] * 2)
    found = {"hosts": json.loads(path.read_text()), "envs": [f"PYTHONPATH={tmp_path}"]}
    path.write_text(json.dumps(found))
    environment = {**os.environ, MARK: str(tmp_path), "TMPDIR": str(tmp_path)}
    (rank,) = start_ranks([environment], [(*GENERATE, "--prompt", "Once", "--hosts", str(path))])
    rank.process.wait(START_SECONDS)
    require_gone(str(tmp_path))
    assert rank.process.returncode == 1
    assert "error: rank 1: its engine ended with the exit code 9" in rank.said
    assert "the library is broken" in rank.said


def test_the_first_rank_has_the_variables_of_the_host_file_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = hosts_file(tmp_path, ["300MB"] * 2)
    path.write_text(json.dumps({"hosts": json.loads(path.read_text()), "envs": ["ONDEVICE_TEST_A=b=c"]}))
    monkeypatch.setenv("ONDEVICE_TEST_A", "before")
    monkeypatch.setenv(launch.FRONT, "")
    launch.start_ranks(str(path), ["generate"])
    started: list[Any] = []
    monkeypatch.setattr(launch, "MlxLauncher", lambda *given: started.append(given[2]))
    monkeypatch.setattr(
        launch, "supervise", lambda *given: started.append(os.environ["ONDEVICE_TEST_A"]) or 7
    )
    assert launch.launch(os.environ[launch.FRONT]) == 7
    assert started == [["generate"], "b=c"]
    assert launch.FRONT not in os.environ


@pytest.mark.slow
def test_a_budget_of_the_host_file_is_named(tmp_path: Path) -> None:
    hosts = json.loads(hosts_file(tmp_path, ["300MB"] * 2).read_bytes())
    hosts[1]["dram_budget"] = "1MB"
    (tmp_path / "small.json").write_text(json.dumps(hosts))
    environment = {**os.environ, MARK: str(tmp_path), "TMPDIR": str(tmp_path)}
    command = (*GENERATE, "-m", str(SHIPPED), "-p", "a", *BUDGET, "--hosts", str(tmp_path / "small.json"))
    (rank,) = start_ranks([environment], [command])
    assert rank.process.wait(START_SECONDS) == 5
    assert "rank 1: " in rank.said
    assert "the dram_budget '1MB' of its host in the host file, which goes before --dram-budget" in rank.said
    require_gone(str(tmp_path))


@pytest.mark.slow
def test_one_host_is_too_few(tmp_path: Path) -> None:
    rank = run_hosts(tmp_path, 1, *GENERATE, "--prompt", "a")
    assert rank.process.returncode == 2
    assert "takes 2 to 64" in rank.said


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("number", "runs"), [(signal.SIGKILL, 50), (signal.SIGSTOP, 20)])
def test_a_rank_lost_at_a_random_moment_ends_all_with_an_error(
    tmp_path: Path, number: signal.Signals, runs: int
) -> None:
    """A supervisor or an engine is killed or stopped while ranks start, read, compute and wait."""
    choose = random.Random(int(number))
    command = ("-m", "ondevice", "bench", "--runs", "99", "--max-tokens", "300", "--threads", "1", *BUDGET)
    for run in range(runs):
        folder = tmp_path / str(run)
        folder.mkdir()
        ranks = start_ranks(ring_environments(folder, 2), [command] * 2)
        engines = [rank.engine() for rank in ranks]
        time.sleep(choose.uniform(0.0, 5.0))
        target = choose.choice([*engines, *(rank.pid for rank in ranks)])
        assert all(rank.process.poll() is None for rank in ranks), [rank.said for rank in ranks]
        os.kill(target, number)
        seconds = wait_for_all(ranks, LIMIT_SECONDS)
        require_gone(str(folder / "ring.json"))
        said = [rank.said for rank in ranks]
        print(run, number.name, "supervisor" if target not in engines else "engine", f"{seconds:.1f} s", said)
        assert all(rank.process.returncode != 0 for rank in ranks), said
        # An engine whose supervisor is killed while it joins MLX's ring can't say so.
        assert all("error: " in rank.said for rank in ranks if rank.pid != target), said
