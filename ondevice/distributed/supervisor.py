"""A rank's supervisor: the parent process of its engine, and the rank's end of the control channel.

All other supervisors are connected to that of rank 0. Every supervisor ends its engine, says why and exits as
soon as any rank dies, stalls, differs or fails. It imports little, because it stays in memory next to the
engine.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from types import FrameType
from typing import Protocol

from ondevice.distributed.control import (
    BEAT_SECONDS,
    STALL_SECONDS,
    Beat,
    End,
    Failure,
    Go,
    Hello,
    Join,
    Link,
    Message,
    Ready,
)
from ondevice.distributed.place import CHILD, EnginePlace, RankPlace
from ondevice.errors import OndeviceError, RankError

JOIN_SECONDS = 25.0
"""Seconds that ranks wait for each other at the start."""
CAUSE_SECONDS = 2.0
"""Seconds that an engine's broken connection waits for another rank to report the cause."""
FLUSH_SECONDS = 2.0
ENGINE_STOP_SECONDS = 6.0
"""Seconds that rank 0's engine has after SIGTERM: one more than `serve` gives to requests under way."""
MAX_STRANGERS = 64
"""Most connections that haven't identified themselves. The oldest makes room for the next."""
STRANGER_SECONDS = 5.0
"""Seconds that such a connection has, whatever it sends."""
_ENGINE = "its engine "
"""Beginnings of failures that the engine itself didn't report."""
_TICK_SECONDS = 0.2
_ENDING = (signal.SIGTERM, signal.SIGHUP)


class Launcher(Protocol):
    """Starts the other ranks, if this supervisor started them. `pid`: its process, which stays
    until the end.
    """

    pid: int

    def failure(self) -> str | None:
        """The reason why the other ranks can't come any more; None if they can."""

    def joined(self) -> None:
        """Called once all ranks have connected."""

    def budget(self, rank: int) -> str:
        """A rank's memory budget in the host file; "" if it has none."""

    def ring_ip(self, rank: int) -> str:
        """The address at which a rank's neighbours reach it."""

    def end(self) -> str:
        """End what was started, after giving it time to end by itself. Returns its last output."""


class EndedError(Exception):
    """Raised when the run is over. It has an exit code, and a failure if there was one."""

    def __init__(self, code: int, failure: Failure | None = None) -> None:
        super().__init__(code)
        self.code, self.failure = code, failure


def supervise(
    place: RankPlace, listener: socket.socket | None = None, launcher: Launcher | None = None
) -> int:
    """Run this process's command in a child process, as a rank's engine. Returns the exit code.

    listener: rank 0's socket, to which the others connect. By default it is opened at the address in `place`.
    """
    supervisor = Supervisor(place, launcher)
    with supervisor.signals():
        try:
            if place.rank == 0:
                supervisor.gather(listener or _listen(place))
            else:
                supervisor.connect()
            supervisor.watch()
        except EndedError as stop:
            return supervisor.end(stop)
        except OndeviceError as error:
            failure = Failure(place.rank, error.exit_code, error.for_command_line)
            return supervisor.end(EndedError(failure.code, failure))
    raise AssertionError("watching ends with an error")


def resident_bytes(pid: int) -> int:
    """Resident memory of a process in bytes; 0 if the system doesn't tell.

    It is read here, since importing `ondevice.units` would take another MB.
    """
    try:
        if sys.platform == "linux":
            with open(f"/proc/{pid}/status") as file:
                kibibytes = next(line.split()[1] for line in file if line.startswith("VmRSS:"))
        else:
            kibibytes = subprocess.check_output(["ps", "-o", "rss=", "-p", str(pid)], text=True)
        return 1024 * int(kibibytes)
    except (OSError, ValueError, StopIteration, subprocess.SubprocessError):
        return 0


def say(message: str) -> None:
    """Print a line to stderr. Characters that can't be printed are replaced."""
    shown = "".join(each if each.isprintable() or each == "\n" else "?" for each in message)
    with suppress(OSError):
        os.write(2, f"{shown}\n".encode("utf-8", "backslashreplace"))


class Supervisor:
    """The supervisor of one rank. Call `gather` or `connect`, `watch` until it raises EndedError,
    then `end`.
    """

    def __init__(self, place: RankPlace, launcher: Launcher | None) -> None:
        self.place, self.launcher = place, launcher
        self.version = version("ondevice")
        self.links: dict[int, Link] = {}
        """Connections to other supervisors by rank: rank 0's to all, the others' to rank 0."""
        self.engine: subprocess.Popen[bytes] | None = None
        self.engine_link: Link | None = None
        self.exited_at = 0.0
        self.suspect: tuple[float, Failure] | None = None
        """A failure that another rank's may explain, and the time at which to believe it."""
        self.signal = 0
        self.ready: set[int] = set()
        """Rank 0: ranks whose engines are about to join the ring."""
        self.selector = selectors.DefaultSelector()
        self.ring_file = ""
        self.next_beat = 0.0

    def gather(self, listener: socket.socket) -> None:
        """Rank 0: wait for all other ranks, compare them with this one, and start them all."""
        strangers: dict[Link, float] = {}  # When each was accepted, oldest first.
        ports: dict[int, int] = {}
        listener.setblocking(False)
        self.selector.register(listener, selectors.EVENT_READ)
        deadline = time.monotonic() + JOIN_SECONDS
        while len(self.links) < self.place.size - 1:
            self._require_hope(deadline)
            for key, _ in self.selector.select(_TICK_SECONDS):
                if key.fileobj is listener:
                    with suppress(OSError):
                        link = Link(listener.accept()[0])
                        strangers[link] = time.monotonic()
                        self.selector.register(link, selectors.EVENT_READ)
            for link, accepted in list(strangers.items()):
                if (hello := self._hello(link)) is not None:
                    del strangers[link]
                    self.links[hello.rank], ports[hello.rank] = link, hello.port
                elif link.closed or time.monotonic() > accepted + STRANGER_SECONDS:
                    del strangers[link]
                    self._drop(link)
            if len(strangers) > MAX_STRANGERS:
                # A rank says hello as soon as it is connected, so that the oldest is the least likely one.
                oldest = next(iter(strangers))
                del strangers[oldest]
                self._drop(oldest)
            self._beat()
            self._hear_links()
        self.selector.unregister(listener)
        listener.close()
        for link in strangers:
            self._drop(link)
        if self.launcher is not None:
            self.launcher.joined()
        self._start_all(ports)

    def _require_hope(self, deadline: float) -> None:
        missing = [str(rank) for rank in range(1, self.place.size) if rank not in self.links]
        why = None if self.launcher is None else self.launcher.failure()
        if why is not None:
            raise RankError(f"the other ranks couldn't be started: {why}")
        if time.monotonic() > deadline:
            raise RankError(
                f"rank {', '.join(missing)} of {self.place.size} didn't come within {JOIN_SECONDS:.0f} s; "
                f"each must reach {self.place.control[0]} at port {self.place.control[1]}"
            )
        if self.signal:
            raise EndedError(128 + self.signal)

    def _hello(self, link: Link) -> Hello | None:
        """The greeting that a new connection sent, if a rank sent it; other connections are closed.

        Raises RankError if ranks differ.
        """
        try:
            messages = link.receive()
        except RankError:
            link.closed = True
            return None
        if not messages:
            return None
        hello = messages[0]
        if not isinstance(hello, Hello) or hello.token != self.place.token or hello.rank in self.links:
            link.closed = True
            return None
        if hello.size != self.place.size:
            failure = f"rank {hello.rank} counts {hello.size} ranks, and rank 0 {self.place.size}"
        elif hello.version != self.version:
            failure = (
                f"rank {hello.rank} has ondevice {hello.version}, and rank 0 {self.version}; install the "
                "same release on every machine"
            )
        else:
            return hello
        self.links[hello.rank] = link
        raise RankError(failure)

    def _drop(self, link: Link) -> None:
        self.selector.unregister(link)
        link.close()

    def _start_all(self, ports: dict[int, int]) -> None:
        ring, launcher = self.place.addresses, self.launcher
        if launcher is not None:
            ports[0] = _free_port()
            ring = tuple((f"{launcher.ring_ip(rank)}:{ports[rank]}",) for rank in range(self.place.size))
        for rank, link in self.links.items():
            link.send(Go(ring, "" if launcher is None else launcher.budget(rank)))
        self._start(Go(ring, "" if launcher is None else launcher.budget(0)))

    def connect(self) -> None:
        """Every rank except 0: connect to rank 0, greet it, and start when it says so."""
        place = self.place
        deadline = time.monotonic() + JOIN_SECONDS
        while not self.links:
            try:
                self.links[0] = Link(socket.create_connection(place.control, timeout=STRANGER_SECONDS))
            except OSError as error:
                if time.monotonic() > deadline:
                    raise RankError(
                        f"rank 0 isn't reached at {place.control[0]}, port {place.control[1]}: {error}"
                    ) from error
                time.sleep(_TICK_SECONDS)
            if self.signal:
                raise EndedError(128 + self.signal)
        link = self.links[0]
        self.selector.register(link, selectors.EVENT_READ)
        port = 0 if place.addresses else _free_port()
        link.send(Hello(place.rank, place.size, self.version, place.token, port))
        while self.engine is None:
            self.selector.select(_TICK_SECONDS)
            self._beat()
            self._hear_links()
            if time.monotonic() > deadline + JOIN_SECONDS:
                raise RankError(f"rank 0 didn't start the run within {2 * JOIN_SECONDS:.0f} s")

    def _start(self, go: Go) -> None:
        """Start the engine: this command again, with a connection to this process and the ring's
        addresses.
        """
        place = self.place
        if len(go.ring) != place.size:
            raise RankError(f"the ring has {len(go.ring)} addresses for {place.size} ranks")
        ours, theirs = socket.socketpair()
        handle, self.ring_file = tempfile.mkstemp(prefix="ondevice-ring-")
        with os.fdopen(handle, "w") as file:
            json.dump(go.ring, file)
        parents = [os.getpid()] if self.launcher is None else [os.getpid(), self.launcher.pid]
        nbytes = sum(resident_bytes(pid) for pid in parents)
        told = EnginePlace(place.rank, place.size, theirs.fileno(), go.dram_budget, nbytes)
        environment = {**os.environ, CHILD: told.to_text()}
        environment |= {"MLX_HOSTFILE": self.ring_file, "MLX_RANK": str(place.rank)}
        silent = None if place.rank == 0 else subprocess.DEVNULL
        self.engine = subprocess.Popen(
            [sys.executable, *sys.orig_argv[1:]],
            env=environment,
            stdin=silent,
            stdout=silent,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        self.engine_link = Link(ours)
        self.selector.register(self.engine_link, selectors.EVENT_READ)

    def watch(self) -> None:
        """Watch the engine and the other ranks, until EndedError is raised."""
        while True:
            self.selector.select(_TICK_SECONDS)
            self._beat()
            self._hear_links()
            self._hear_engine()
            if self.suspect is not None and time.monotonic() > self.suspect[0]:
                raise EndedError(self.suspect[1].code, self.suspect[1])
            if self.signal:
                raise EndedError(128 + self.signal)

    def _beat(self) -> None:
        if time.monotonic() >= self.next_beat:
            self.next_beat = time.monotonic() + BEAT_SECONDS
            for link in (*self.links.values(), *([self.engine_link] if self.engine_link else [])):
                link.send(Beat())

    def _hear_links(self) -> None:
        for rank, link in self.links.items():
            try:
                for message in link.receive():
                    self._take(rank, message)
            except RankError as error:
                raise self._stop(rank, f"it sent what isn't a control message: {error}") from error
            if link.closed:
                raise self._stop(rank, "it has gone away: it was killed, or its machine can't be reached")
            if link.silent_seconds > STALL_SECONDS:
                raise self._stop(rank, f"it hasn't answered for {STALL_SECONDS:.0f} s")

    def _take(self, rank: int, message: Message) -> None:
        if isinstance(message, Failure):
            failure = message if self.place.rank else Failure(rank, message.code, message.message)
            if not message.broken:
                raise EndedError(failure.code, failure)
            self._suspect(failure)
        elif isinstance(message, Go) and self.place.rank and self.engine is None:
            self._start(message)
        elif isinstance(message, End) and self.place.rank:
            raise EndedError(0)
        elif isinstance(message, Join) and self.place.rank and self.engine_link is not None:
            self.engine_link.send(message)
        elif isinstance(message, Ready) and not self.place.rank:
            self._is_ready(rank)
        elif not isinstance(message, Beat):
            raise RankError(f"{type(message).__name__} has no meaning here")

    def _is_ready(self, rank: int) -> None:
        """Rank 0: record that a rank's engine is ready. Once all are, tell all to join the ring."""
        self.ready.add(rank)
        if len(self.ready) == self.place.size and self.engine_link is not None:
            for link in (*self.links.values(), self.engine_link):
                link.send(Join())

    def _stop(self, rank: int, why: str) -> EndedError:
        failure = Failure(rank, RankError.exit_code, why)
        return EndedError(failure.code, failure)

    def _suspect(self, failure: Failure) -> None:
        if self.suspect is None:
            self.suspect = (time.monotonic() + CAUSE_SECONDS, failure)

    def _hear_engine(self) -> None:
        engine, link = self.engine, self.engine_link
        assert engine is not None
        assert link is not None
        exited = engine.poll()
        try:
            for message in link.receive():
                if isinstance(message, Failure):
                    failure = Failure(self.place.rank, message.code, message.message)
                    if not message.broken:
                        raise EndedError(failure.code, failure)
                    self._suspect(failure)
                elif isinstance(message, Ready) and self.place.rank:
                    self.links[0].send(message)
                elif isinstance(message, Ready):
                    self._is_ready(0)
        except RankError as error:
            raise self._stop(self.place.rank, f"its engine said what it mustn't: {error}") from error
        if link.closed and link in {key.fileobj for key in self.selector.get_map().values()}:
            self.selector.unregister(link)
        if exited is None and link.silent_seconds > STALL_SECONDS:
            raise self._stop(self.place.rank, f"{_ENGINE}hasn't answered for {STALL_SECONDS:.0f} s")
        if exited is not None and self.suspect is None:
            self._engine_ended(exited)

    def _engine_ended(self, code: int) -> None:
        if code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
            raise self._stop(self.place.rank, f"{_ENGINE}was ended by the signal {name}")
        if self.place.rank == 0:
            raise EndedError(code)
        if code:
            raise self._stop(self.place.rank, f"{_ENGINE}ended with the exit code {code}")

    def end(self, stop: EndedError) -> int:
        """End the engine, inform the other ranks, report what failed, and return the exit code."""
        failure = stop.failure
        if self.engine is not None:
            if self.signal and self.engine.poll() is None:
                self.engine.send_signal(self.signal)
                self._wait_for_engine(FLUSH_SECONDS if self.place.rank else ENGINE_STOP_SECONDS)
            self.engine.kill()
        if failure is None and self.signal and self.place.rank:
            failure = Failure(self.place.rank, 1, f"it was ended by the signal {self.signal}")
        for rank, link in self.links.items():
            if failure is None or failure.rank != rank or not link.closed:
                link.send(End() if failure is None else failure)
        deadline = time.monotonic() + FLUSH_SECONDS
        while not all(link.flush() or link.closed for link in self.links.values()):
            if time.monotonic() > deadline:
                break
            time.sleep(_TICK_SECONDS / 10)
        if self.engine is not None:
            # Last: a process that the system can't end yet mustn't keep the others from hearing why.
            self.engine.wait()
        if failure is not None:
            where = "" if failure.rank == self.place.rank else f"rank {failure.rank}: "
            say(f"error: {where}{failure.message}")
        for link in self.links.values():
            link.close()
        written = "" if self.launcher is None else self.launcher.end()
        if written and failure is not None and failure.rank and failure.message.startswith(_ENGINE):
            # The reason is in it if anywhere, and nothing else shows what other ranks write.
            say(f"the other ranks have written:\n{written}")
        with suppress(OSError):
            os.unlink(self.ring_file)
        return stop.code

    def _wait_for_engine(self, seconds: float) -> None:
        """Wait until the engine ends, at most `seconds`. Other ranks are still served, because the engine may
        need them.
        """
        assert self.engine is not None
        deadline = time.monotonic() + seconds
        while self.engine.poll() is None and time.monotonic() < deadline:
            self._beat()
            time.sleep(_TICK_SECONDS / 10)

    @contextmanager
    def signals(self) -> Iterator[None]:
        """A context in which signals are passed on, and a terminal's settings are put back at the end.

        Ctrl-C at a terminal reaches the engine by itself. Ranks other than 0 ignore it and leave it to rank
        0.
        """
        kept = {each: signal.getsignal(each) for each in (signal.SIGINT, *_ENDING)}
        if self.place.rank:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        elif kept[signal.SIGINT] is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._interrupted)
        for each in _ENDING:
            if kept[each] is not signal.SIG_IGN:
                signal.signal(each, self._ended)
        restore = _terminal_settings()
        try:
            yield
        finally:
            restore()
            for each, handler in kept.items():
                signal.signal(each, handler)

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        if self.engine is None:
            self.signal = number
        elif not _in_foreground():
            self.engine.send_signal(number)

    def _ended(self, number: int, frame: FrameType | None) -> None:
        self.signal = number


def _in_foreground() -> bool:
    """Whether this process group is in the terminal's foreground, so that Ctrl-C reaches the engine too."""
    try:
        terminal = os.open("/dev/tty", os.O_RDWR)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def _terminal_settings() -> Callable[[], None]:
    """A function that restores stdin's present terminal settings, since an engine that is killed can't."""
    import termios

    try:
        settings = termios.tcgetattr(0)
    except termios.error:
        return lambda: None

    def restore() -> None:
        with suppress(termios.error):
            termios.tcsetattr(0, termios.TCSANOW, settings)

    return restore


def _listen(place: RankPlace) -> socket.socket:
    try:
        return socket.create_server(place.control)
    except OSError as error:
        raise RankError(
            f"rank 0 can't listen at {place.control[0]}, port {place.control[1]}: {error.strerror}; another "
            "run may have it, or the first host isn't this machine"
        ) from error


def _free_port() -> int:
    with socket.create_server(("", 0)) as listener:
        return int(listener.getsockname()[1])
