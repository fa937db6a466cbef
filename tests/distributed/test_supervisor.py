"""Supervisors: engines run under them as by themselves, and what happens to one rank ends all with an error.

Real processes over the loopback address. Ranks count as stalled after 8 seconds of silence here.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib.metadata import version
from pathlib import Path

import pytest

from ondevice.distributed import supervisor
from ondevice.distributed.control import Hello
from ondevice.distributed.place import RankPlace
from ondevice.distributed.supervisor import ENGINE_STOP_SECONDS, EndedError, Supervisor
from ondevice.errors import RankError
from ondevice.serve import config as serve_config
from tests.support.distributed import RankProcess, left_over, ring_environments, start_ranks, wait_for_all

pytest.importorskip("mlx.core")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it looks processes up in /proc")

ENGINE = str(Path(__file__).parents[1] / "support" / "engine_of_a_rank.py")
LIMIT_SECONDS = 30.0
STOPPED = "hasn't answered|it has gone away"
"""Its engine ends a stopped supervisor at about the time at which the other ranks take it for stalled."""


def start(folder: Path, count: int, word: str, seconds: float, typed: bytes = b"") -> list[RankProcess]:
    command = [ENGINE, "generate", word, str(seconds)]
    return start_ranks(ring_environments(folder, count), [command] * count, typed)


def wait_until_running(ranks: list[RankProcess]) -> None:
    deadline = time.monotonic() + 60
    while "running" not in ranks[0].printed:
        assert time.monotonic() < deadline, [rank.said for rank in ranks]
        time.sleep(0.02)


def require_ended(folder: Path, ranks: list[RankProcess]) -> None:
    """Nothing is left. Engines whose supervisor was killed take a moment."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while left := left_over(str(folder / "ring.json")):
        assert time.monotonic() < deadline, (left, [rank.said for rank in ranks])
        time.sleep(0.05)


def test_engines_run_under_supervisors_and_rank_0_has_stdin_and_the_exit_code(tmp_path: Path) -> None:
    ranks = start(tmp_path, 2, "around", 0.2, b"typed")
    wait_for_all(ranks, LIMIT_SECONDS)
    assert [rank.process.returncode for rank in ranks] == [7, 0], [rank.said for rank in ranks]
    assert [rank.said for rank in ranks] == ["", ""]
    assert ranks[0].printed == "running\ntyped\n"
    assert ranks[1].printed == ""
    require_ended(tmp_path, ranks)


def supervisor_of(rank: RankProcess) -> int:
    return rank.pid


def engine_of(rank: RankProcess) -> int:
    return rank.engine()


@pytest.mark.fast("1-engine_of-*", "1-supervisor_of-9-*")
@pytest.mark.parametrize(
    ("victim", "of", "number", "said"),
    [
        (1, engine_of, signal.SIGKILL, "its engine was ended by the signal SIGKILL"),
        pytest.param(
            0, engine_of, signal.SIGKILL, "its engine was ended by the signal SIGKILL", marks=pytest.mark.slow
        ),
        (1, supervisor_of, signal.SIGKILL, "it has gone away"),
        pytest.param(0, supervisor_of, signal.SIGKILL, "it has gone away", marks=pytest.mark.slow),
        (1, engine_of, signal.SIGSTOP, "its engine hasn't answered"),
        pytest.param(1, supervisor_of, signal.SIGSTOP, STOPPED, marks=pytest.mark.slow),
        pytest.param(0, supervisor_of, signal.SIGSTOP, STOPPED, marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_dies_or_stalls_ends_all_with_an_error(
    tmp_path: Path, victim: int, of: Callable[[RankProcess], int], number: signal.Signals, said: str
) -> None:
    ranks = start(tmp_path, 2, "around", 100)
    wait_until_running(ranks)
    os.kill(of(ranks[victim]), number)
    assert wait_for_all(ranks, LIMIT_SECONDS) < LIMIT_SECONDS
    require_ended(tmp_path, ranks)
    for index, rank in enumerate(ranks):
        assert rank.process.returncode != 0
        if index != victim or of is engine_of:
            assert "error: " in rank.said
            assert re.search(said, rank.said), [each.said for each in ranks]
            assert (f"rank {victim}: " in rank.said) == (index != victim)


@pytest.mark.parametrize(
    ("word", "code", "said"),
    [
        ("raises", 6, "neurons.bin is damaged at byte 4096"),
        ("another-version", 1, "rank 1 has ondevice 0.0.1"),
    ],
)
def test_an_error_of_one_rank_is_said_on_all_with_its_exit_code(
    tmp_path: Path, word: str, code: int, said: str
) -> None:
    ranks = start(tmp_path, 2, word, 100)
    wait_for_all(ranks, LIMIT_SECONDS)
    assert [rank.process.returncode for rank in ranks] == [code, code], [rank.said for rank in ranks]
    assert all(said in rank.said and "Traceback" not in rank.said for rank in ranks), [r.said for r in ranks]
    require_ended(tmp_path, ranks)


@pytest.mark.slow
def test_strangers_at_the_control_port_change_nothing(tmp_path: Path) -> None:
    environments = ring_environments(tmp_path, 2)
    command = [ENGINE, "generate", "around", "0.1"]
    (first,) = start_ranks(environments[:1], [command])
    port = 1 + max(int(one[0].split(":")[1]) for one in json.loads((tmp_path / "ring.json").read_bytes()))
    deadline = time.monotonic() + LIMIT_SECONDS
    strangers = []
    hello = {"type": "hello", "protocol": 1, "rank": 1, "size": 2, "version": "1", "port": 0}
    for said in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"{" * 100_000,
        json.dumps({**hello, "token": "another"}).encode() + b"\n",
        json.dumps({**hello, "token": "", "rank": 7}).encode() + b"\n",
        b'{"type":"beat"}\n',
        b"\xff\n",
        b"",
    ):
        while True:
            try:
                strangers.append(socket.create_connection(("127.0.0.1", port), timeout=5))
                break
            except ConnectionRefusedError:
                assert time.monotonic() < deadline, first.said
                time.sleep(0.05)
        with suppress(OSError):
            strangers[-1].sendall(said)
    (second,) = start_ranks(environments[1:], [command])
    ranks = [first, second]
    wait_for_all(ranks, LIMIT_SECONDS)
    assert [rank.process.returncode for rank in ranks] == [7, 0], [rank.said for rank in ranks]
    for stranger in strangers:
        stranger.close()


def hello_of(rank: int, size: int) -> bytes:
    """What a rank's supervisor says first."""
    return json.dumps(Hello(rank, size, version("ondevice"), "", 0).to_dict()).encode() + b"\n"


@contextmanager
def gathering(size: int) -> Iterator[tuple[str, int]]:
    """Rank 0's supervisor waits for the others. Its address."""
    listener = socket.create_server(("127.0.0.1", 0))
    address: tuple[str, int] = listener.getsockname()
    gatherer = Supervisor(RankPlace(0, size, address), None)
    thread = threading.Thread(target=lambda: _gather(gatherer, listener))
    thread.start()
    try:
        yield address
    finally:
        gatherer.signal = signal.SIGTERM
        thread.join(LIMIT_SECONDS)
        assert not thread.is_alive()


def _gather(gatherer: Supervisor, listener: socket.socket) -> None:
    with pytest.raises((EndedError, RankError)):
        gatherer.gather(listener)


def test_ranks_that_are_there_hear_of_rank_0_while_it_waits_for_a_late_one() -> None:
    with gathering(3) as address, socket.create_connection(address, timeout=5) as rank:
        rank.sendall(hello_of(1, 3))
        assert b'"beat"' in rank.recv(100)


def test_strangers_are_closed_in_time_whatever_they_send(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "STRANGER_SECONDS", 0.5)
    with gathering(2) as address, socket.create_connection(address, timeout=0.1) as stranger:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            try:
                stranger.sendall(b" ")
                assert stranger.recv(1) == b""
                return
            except TimeoutError:
                continue
            except ConnectionError:
                return
    raise AssertionError("it kept its place")


def test_a_rank_comes_through_more_strangers_than_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "STRANGER_SECONDS", 60.0)
    with gathering(3) as address, ExitStack() as kept:
        strangers = [
            kept.enter_context(socket.create_connection(address, timeout=5))
            for _ in range(supervisor.MAX_STRANGERS + 1)
        ]
        rank = kept.enter_context(socket.create_connection(address, timeout=5))
        rank.sendall(hello_of(1, 3))
        assert b'"beat"' in rank.recv(100)
        assert strangers[0].recv(1) == b""


@pytest.mark.slow
def test_ctrl_c_is_the_engines(tmp_path: Path) -> None:
    """An interrupt that only the supervisor gets goes to the engine, which here has no handler for it."""
    ranks = start(tmp_path, 2, "around", 100)
    wait_until_running(ranks)
    ranks[0].process.send_signal(signal.SIGINT)
    wait_for_all(ranks, LIMIT_SECONDS)
    assert "KeyboardInterrupt" in ranks[0].said
    require_ended(tmp_path, ranks)


@pytest.mark.slow
def test_a_terminated_supervisor_ends_all(tmp_path: Path) -> None:
    ranks = start(tmp_path, 2, "around", 100)
    wait_until_running(ranks)
    ranks[0].process.terminate()
    wait_for_all(ranks, LIMIT_SECONDS)
    assert ranks[0].process.returncode == 128 + signal.SIGTERM
    require_ended(tmp_path, ranks)


@pytest.mark.slow
def test_a_terminated_engine_has_the_seconds_that_serve_promises(tmp_path: Path) -> None:
    ranks = start(tmp_path, 2, "stops-late", 100, b"typed")
    wait_until_running(ranks)
    ranks[0].process.terminate()
    wait_for_all(ranks, LIMIT_SECONDS)
    assert ranks[0].printed == "running\ntyped\n"
    assert [rank.process.returncode for rank in ranks] == [128 + signal.SIGTERM, 0], [r.said for r in ranks]
    assert serve_config.STOP_SECONDS < ENGINE_STOP_SECONDS
    require_ended(tmp_path, ranks)
