"""What a hop between two ranks costs: our messages beside plain sends of MLX, over the loopback address.

    python -m tests.benchmarks.explain.ring_hops

For each size, two processes send a row or a chunk to and fro: with `MlxTransport`, and with a bare
`mx.distributed.send` and `recv` of as many bytes. Microseconds are half of a round trip, medians; `us_cpu` is
what rank 0 took of them. `waiting_cpu_share` is the share of a core that waiting for a second takes.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ondevice.distributed.transport import MlxTransport
from tests.support.distributed import ring_environments

SHAPES = {"row of 288": (1, 288), "row of 4096": (1, 4096), "chunk of 256 x 4096": (256, 4096)}
TRIPS, WARM_UP = 60, 5
WAIT_SECONDS = 1.0
MOST_BYTES = 64 << 20
"""Memory that messages may take, as a plan would say it."""


def timed(trip: Callable[[], None]) -> tuple[float, float]:
    """Microseconds of a hop: of the clock, and of this process's cores."""
    times, cores = [], []
    for index in range(WARM_UP + TRIPS):
        began, busy = time.perf_counter(), time.process_time()
        trip()
        if index >= WARM_UP:
            times.append(time.perf_counter() - began)
            cores.append(time.process_time() - busy)
    return statistics.median(times) / 2 * 1e6, statistics.median(cores) / 2 * 1e6


def waiting(receive: Callable[[], Any], rank: int, send: Callable[[], None]) -> float:
    """Share of a core that rank 0 takes while it waits for rank 1."""
    if rank:
        time.sleep(WAIT_SECONDS)
        send()
        return 0.0
    began, busy = time.perf_counter(), time.process_time()
    receive()
    return (time.process_time() - busy) / (time.perf_counter() - began)


def rank_main() -> None:
    """One rank: prints its figures if it is rank 0."""
    import mlx.core as core

    ring = MlxTransport("ring")
    ring.plan(MOST_BYTES)
    peer = 1 - ring.rank
    rows = []
    for name, shape in SHAPES.items():
        array = np.ones(shape, dtype=np.float32)

        def ours(array: np.ndarray = array) -> None:
            if ring.rank == 0:
                ring.send(b"{}", [array])
            ring.receive()
            if ring.rank:
                ring.send(b"{}", [array])

        def send(array: np.ndarray = array) -> None:
            core.eval(core.distributed.send(core.array(array), peer, stream=core.cpu))

        def receive(shape: tuple[int, int] = shape) -> None:
            core.eval(core.distributed.recv(shape, core.float32, peer, stream=core.cpu))

        def plain(send: Callable[[], None] = send, receive: Callable[[], None] = receive) -> None:
            if ring.rank == 0:
                send()
            receive()
            if ring.rank:
                send()

        before = ring.stats.sent_bytes
        hop, busy = timed(ours)
        sent = (ring.stats.sent_bytes - before) / (WARM_UP + TRIPS)
        theirs, their_busy = timed(plain)
        rows.append(
            {
                "what": name,
                "array_bytes": array.nbytes,
                "message_bytes": round(sent),
                "us": round(hop, 1),
                "us_cpu": round(busy, 1),
                "plain_us": round(theirs, 1),
                "plain_us_cpu": round(their_busy, 1),
            }
        )
    share = waiting(ring.receive, ring.rank, lambda: ring.send(b"", []))
    plain_share = waiting(receive, ring.rank, send)
    ring.close()
    if ring.rank == 0:
        found = {"waiting_cpu_share": round(share, 3), "plain_waiting_cpu_share": round(plain_share, 3)}
        print(json.dumps({"hops": rows, **found}))


def main() -> None:
    """Run both ranks, show a table on stderr, and print rank 0's JSON."""
    if len(sys.argv) > 1:
        rank_main()
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.benchmarks.explain.ring_hops", "rank"]
        ranks = [
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
            for environment in ring_environments(Path(folder), 2)
        ]
        said = [rank.communicate()[0] for rank in ranks]
        found = json.loads(said[0])
    for row in found["hops"]:
        print(*(f"{key} {value}" for key, value in row.items()), sep="  ", file=sys.stderr)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
