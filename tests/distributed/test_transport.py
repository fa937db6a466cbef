"""Messages of the ring: every bit arrives, a sender doesn't wait, and a false message is a typed error."""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from ondevice.distributed.transport import (
    FIRST_BYTES,
    HANDSHAKE_BYTES,
    MAX_ARRAYS,
    MAX_MESSAGE_BYTES,
    PIECE_BYTES,
    _ring_ends,
    message_bytes,
    pack,
    unpack,
)
from ondevice.errors import RankError
from tests.support.distributed import ring_environments
from tests.support.paths import ROOT

DTYPES = ("float32", "float16", "int32", "uint8")


@st.composite
def arrays(draw: st.DrawFn) -> NDArray[Any]:
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    nbytes = int(np.prod(shape)) * dtype.itemsize
    bits = draw(st.binary(min_size=nbytes, max_size=nbytes))
    return np.frombuffer(bits, dtype=np.uint8).view(dtype).reshape(shape)


@given(st.binary(max_size=6000), st.lists(arrays(), max_size=5))
def test_what_is_packed_is_unpacked_bit_for_bit(header: bytes, sent: list[NDArray[Any]]) -> None:
    message = pack(header, sent)
    assert message_bytes(message[:FIRST_BYTES], len(message)) == len(message) >= FIRST_BYTES
    got_header, got = unpack(message)
    assert got_header == header
    assert [(a.dtype, a.shape, a.tobytes()) for a in got] == [(a.dtype, a.shape, a.tobytes()) for a in sent]


def test_a_strided_array_is_sent_as_its_values() -> None:
    array = np.arange(24, dtype=np.float32).reshape(4, 6)[:, ::2]
    (got,) = unpack(pack(b"", [array]))[1]
    assert np.array_equal(got, array)


@pytest.mark.parametrize("array", [np.zeros(2, np.float64), np.zeros(2, bool), np.array("text")])
def test_other_types_arent_sent(array: NDArray[Any]) -> None:
    with pytest.raises(ValueError, match="can't hold"):
        pack(b"", [array])


def test_too_many_arrays_arent_sent() -> None:
    with pytest.raises(ValueError, match="too large"):
        pack(b"", [np.zeros(1, np.uint8)] * (MAX_ARRAYS + 1))


def bent(message: NDArray[np.uint8], at: int, value: bytes) -> NDArray[np.uint8]:
    changed = message.copy()
    changed[at : at + len(value)] = np.frombuffer(value, dtype=np.uint8)
    return changed


@pytest.mark.parametrize(
    "total", [0, FIRST_BYTES - 1, MAX_MESSAGE_BYTES + 1, 2**64 - 1]
)  # fmt: skip
def test_a_false_length_is_refused_before_memory_is_taken(total: int) -> None:
    with pytest.raises(RankError, match="limit"):
        message_bytes(bent(pack(b"", []), 8, struct.pack("<Q", total)), MAX_MESSAGE_BYTES)


def test_a_header_without_an_end_is_refused() -> None:
    with pytest.raises(RankError, match="limit"):
        message_bytes(bent(pack(b"", []), 4, struct.pack("<I", 2**32 - 1)), MAX_MESSAGE_BYTES)
    with pytest.raises(RankError, match="ends inside"):
        unpack(bent(pack(b"", []), 4, struct.pack("<I", FIRST_BYTES)))


def test_what_is_no_message_is_refused() -> None:
    with pytest.raises(RankError, match="another program"):
        message_bytes(np.frombuffer(b"GET / HTTP/1.1".ljust(FIRST_BYTES), dtype=np.uint8), MAX_MESSAGE_BYTES)


@pytest.mark.parametrize(
    "table",
    [
        b'[["float32",[3000]]]',
        b'[["float32",[-1]]]',
        b'[["float64",[2]]]',
        b'[["float32",[2],1]]',
        b'[["float32",2]]',
        b'[["float32",[1,1,1,1,1,1,1,1,2]]]',
        b'[["float32",[268435456,268435456,268435456]]]',
        b'[["float32",[1.0]]]',
        b'{"float32":2}',
        b"[[[[[[[[[[[[[[[[[[[[",
        b'[["float32",[2]]',
        b"\xff",
        b"[" + b",".join([b'["uint8",[0]]'] * (MAX_ARRAYS + 1)) + b"]",
    ],
)
def test_a_false_table_of_arrays_is_refused(table: bytes) -> None:
    text = struct.pack("<I", 2) + b"{}" + table
    message = np.zeros(max(FIRST_BYTES, 16 + len(text) + 8), dtype=np.uint8)
    head = struct.pack("<4sIQ", b"odr1", len(text), len(message)) + text
    with pytest.raises(RankError):
        unpack(bent(message, 0, head))


@given(st.binary(min_size=20, max_size=400))
def test_no_bytes_crash_it(data: bytes) -> None:
    message = np.frombuffer(b"odr1" + data.ljust(FIRST_BYTES - 4, b"\0"), dtype=np.uint8)
    try:
        message_bytes(message, MAX_MESSAGE_BYTES)
        header, arrays = unpack(message)
    except RankError as error:
        refused = str(error)
        assert "message" in refused
        return
    # What is taken says itself how long it is.
    assert len(header) + sum(array.nbytes for array in arrays) < len(message)


PEER = f"""
import sys, time, numpy as np
from ondevice.distributed.transport import MlxTransport
from ondevice.errors import RankError
ring = MlxTransport("ring")
generator = np.random.default_rng(7)
sizes = [(0,), (), (3, 5), (1, {FIRST_BYTES}), (7, {PIECE_BYTES})]
ring.plan({MAX_MESSAGE_BYTES})
sent = [(generator.random(shape) * 99).astype(dtype) for dtype in {DTYPES!r} for shape in sizes]
for each in ([], sent[:1], sent):
    if ring.rank == 0:
        ring.send(b"around", each)
    header, got = ring.receive()
    assert header == b"around"
    assert [(a.dtype, a.shape, a.tobytes()) for a in got] == [(a.dtype, a.shape, a.tobytes()) for a in each]
    if ring.rank:
        ring.send(header, each)
large = np.zeros((256, 4096), dtype=np.float32)
ring.plan(large.nbytes)
if ring.rank == 0:
    began, busy = time.perf_counter(), time.process_time()
    for _ in range(3):
        ring.send(b"chunk", [large])
    print("queued", time.perf_counter() - began)
    ring.receive()
    print("answered", time.perf_counter() - began, time.process_time() - busy)
    ring._limit, planned = 99, ring._limit
    ring.send(b"small", [])
    try:
        ring.receive()
    except RankError as error:
        print("refused", planned, error)
    ring.send(b"end", [])
    try:
        ring.receive()
    except RankError as error:
        print("lost", error)
elif ring.rank == 1:
    time.sleep(1)
    for _ in range(3):
        ring.receive()
    ring.send(b"done", [])
    ring.send(*ring.receive())
    ring.receive()
else:
    ring.send(*ring.receive())
ring.close()
"""


def test_the_ring_s_ends_are_watched_and_failed_attempts_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.create_connection(listening.getsockname()) as right,
        listening.accept()[0] as left,
        socket.socket() as never_connected,
    ):
        (tmp_path / "ring.json").write_text(json.dumps([[f"127.0.0.1:{listening.getsockname()[1]}"]]))
        monkeypatch.setenv("MLX_HOSTFILE", str(tmp_path / "ring.json"))
        monkeypatch.setenv("MLX_RANK", "0")
        opened = {it.fileno() for it in (listening, left, right, never_connected)}
        ends = _ring_ends(opened)
        for found, expected in zip(ends, (left, right), strict=True):
            assert found is not None
            with found:
                assert found.getsockname() == expected.getsockname()
            # The options are the connection's, whichever descriptor has them set.
            assert expected.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            if sys.platform == "linux":
                names = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
                values = [expected.getsockopt(socket.IPPROTO_TCP, name) for name in names]
                assert values == [5, 3, 3]


def test_processes_pass_everything_around_and_a_sender_doesnt_wait(tmp_path: Path) -> None:
    """Three chunks are sent while the next rank sleeps for a second: sending returns long before."""
    pytest.importorskip("mlx.core")
    peers = [
        subprocess.Popen(
            [sys.executable, "-c", PEER],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for environment in ring_environments(tmp_path, 2)
    ]  # fmt: skip
    said = [peer.communicate(timeout=60) for peer in peers]
    assert [peer.returncode for peer in peers] == [0, 0], said
    found = dict(line.split(" ", 1) for line in said[0][0].splitlines())
    answered, busy = map(float, found["answered"].split())
    assert float(found["queued"]) < answered / 2
    # MLX alone would keep a core busy for the second.
    assert busy < answered / 2
    assert "closed its connection" in found["lost"]
    assert found["refused"].startswith(f"{HANDSHAKE_BYTES + 256 * 4096 * 4} ")
    assert "the limit is 99" in found["refused"]


@pytest.mark.slow
def test_hops_are_measured() -> None:
    command = [sys.executable, "-m", "tests.benchmarks.explain.ring_hops"]
    found = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout)
    assert [hop["array_bytes"] for hop in found["hops"]] == [1152, 16384, 256 * 16384]
    assert all(hop["us"] > 0 and hop["message_bytes"] > hop["array_bytes"] for hop in found["hops"])
    assert found["waiting_cpu_share"] < 0.5
