"""Ranks of a ring as threads of one process, each with its own part of a model."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from ondevice.bundle.reader import Bundle
from ondevice.callbacks import never_cancelled
from ondevice.config import RuntimeConfig, SamplingConfig
from ondevice.distributed.handshake import handshake_as_first, handshake_as_other
from ondevice.distributed.layer_server import serve_layers, state_room
from ondevice.distributed.remote_layers import RemoteLayers, StateRoom
from ondevice.errors import OndeviceError, RankError
from ondevice.runtime.engine import Engine
from ondevice.runtime.resolving import resolve
from ondevice.stats import HopStats

WAIT_SECONDS = 120
"""Most time that a rank waits for a message: a test fails rather than hang."""


@dataclass
class QueueTransport:
    """A `Transport` between threads. `hops`: the bytes of each message that it sent."""

    rank: int
    size: int
    before: queue.Queue[Any]
    after: queue.Queue[Any]
    hops: list[int] = field(default_factory=list)
    stats: HopStats = field(default_factory=HopStats)

    def send(self, header: bytes, arrays: Sequence[NDArray[Any]]) -> None:
        self.hops.append(len(header) + sum(it.nbytes for it in arrays))
        # Copies, as the sender goes on with its arrays.
        self.after.put((header, [it.copy() for it in arrays]), timeout=WAIT_SECONDS)

    def receive(self) -> tuple[bytes, list[NDArray[Any]]]:
        try:
            found = self.before.get(timeout=WAIT_SECONDS)
        except queue.Empty:
            raise RankError("the rank before sent nothing") from None
        if isinstance(found, BaseException):
            raise RankError(f"another rank has ended: {found!r}") from found
        header, arrays = found
        return header, arrays


def ring_of(size: int) -> list[QueueTransport]:
    """Transports of a ring; each holds two messages."""
    queues: list[queue.Queue[Any]] = [queue.Queue(2) for _ in range(size)]
    return [QueueTransport(rank, size, queues[rank], queues[(rank + 1) % size]) for rank in range(size)]


@contextmanager
def end_ring(transport: QueueTransport, errors: list[BaseException]) -> Iterator[None]:
    """What is raised here goes to `errors`, and ends the other ranks."""
    try:
        yield
    except BaseException as error:
        errors.append(error)
        with suppress(queue.Full):
            transport.after.put(error, timeout=WAIT_SECONDS)


@dataclass
class Ranks:
    """A running ring. `engine` is rank 0's; `errors`: what the other ranks raised."""

    engine: Engine
    transports: list[QueueTransport]
    rooms: list[StateRoom]
    draft_tokens: int = 0
    """Draft tokens of all texts so far."""

    def text(self, prompt: Sequence[int], key: int | None = None, **sampling: Any) -> list[int]:
        """The tokens that follow a prompt."""
        wanted = SamplingConfig(**{"temperature": 0.0, "max_tokens": 24, **sampling})
        events = list(self.engine.generate(key, prompt, wanted, never_cancelled))
        assert events[-1].stats is not None
        self.draft_tokens += events[-1].stats.drafting.draft_tokens
        return [event.token for event in events if event.token is not None]


@contextmanager
def running_ranks(
    folder: Path,
    cuts: Sequence[int],
    expected: type[OndeviceError] | None = None,
    **options: Any,
) -> Iterator[Ranks]:
    """The bundle's model, divided before the layers `cuts`; without cuts on one machine.

    expected: an error that ends other ranks.
    """
    whole = Bundle.open(folder)
    runtime = RuntimeConfig(**{"memory_pressure": "off", "threads": 1, "dram_budget": "4GB", **options})
    edges = [0, *cuts, whole.config.num_layers]
    parts = [_part(whole, edges, rank, runtime) for rank in range(len(edges) - 1)]
    transports, errors = ring_of(len(parts)), list[BaseException]()

    def serve(rank: int) -> None:
        with end_ring(transports[rank], errors):
            serve_layers(parts[rank], transports[rank])

    threads = [threading.Thread(target=serve, args=(rank,), daemon=True) for rank in range(1, len(parts))]
    for thread in threads:
        thread.start()
    later, rooms = None, [state_room(it) for it in parts[1:]]
    if cuts:
        later = RemoteLayers(transports[0], parts[0].bundle.config, rooms)
    try:
        with closing(Engine(parts[0], never_cancelled, later=later)) as engine:
            yield Ranks(engine, transports, rooms)
    finally:
        if later is not None:
            later.end()
        with suppress(queue.Full):
            transports[0].after.put(RankError("rank 0 has ended"), timeout=WAIT_SECONDS)
        for thread in threads:
            thread.join(WAIT_SECONDS)
    assert all(expected is not None and isinstance(it, expected) for it in errors), errors


def text_of_met(
    folders: Sequence[Path], runtime: RuntimeConfig, prompt: Sequence[int], sampling: SamplingConfig
) -> list[int]:
    """The tokens that follow a prompt, of ranks that meet with a bundle or a slice each.

    Raises what the first rank that failed raised.
    """
    transports, errors = ring_of(len(folders)), list[BaseException]()

    def serve(rank: int) -> None:
        with end_ring(transports[rank], errors):
            resolved = handshake_as_other(transports[rank], lambda: Bundle.open(folders[rank]), runtime)
            serve_layers(resolved, transports[rank])

    threads = [threading.Thread(target=serve, args=(rank,), daemon=True) for rank in range(1, len(folders))]
    for thread in threads:
        thread.start()
    found: list[int] = []
    with end_ring(transports[0], errors):
        resolved, later = handshake_as_first(transports[0], Bundle.open(folders[0]), runtime)
        with closing(Engine(resolved, never_cancelled, later=later)) as engine:
            events = list(engine.generate(None, prompt, sampling, never_cancelled))
        found = [event.token for event in events if event.token is not None]
        later.end()
    for thread in threads:
        thread.join(WAIT_SECONDS)
    if errors:
        raise errors[0]
    return found


def _part(whole: Bundle, edges: Sequence[int], rank: int, runtime: RuntimeConfig) -> Any:
    first, stop = edges[rank], edges[rank + 1]
    return resolve(whole.slice(first, stop, heads=rank == 0), runtime)
