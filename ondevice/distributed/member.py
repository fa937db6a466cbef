"""The engine's side of the link to its supervisor: heartbeats both ways, and errors for other ranks."""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ondevice.distributed.control import BEAT_SECONDS, STALL_SECONDS, Beat, Failure, Join, Link, Ready
from ondevice.distributed.place import EnginePlace
from ondevice.distributed.supervisor import say
from ondevice.errors import RankError

HEAD_START_SECONDS = 0.2
"""Delay with which the rank that connects first joins MLX's ring."""


class Member:
    """This process in its role as a rank's engine. A thread exchanges heartbeats with the supervisor, and
    ends when it ends.
    """

    def __init__(self, place: EnginePlace) -> None:
        self.place = place
        self._link = Link(socket.socket(fileno=place.fd))
        self._sending = threading.Lock()
        self._may_join = threading.Event()
        self._supervisor = os.getppid()
        threading.Thread(target=self._live, name="ondevice-member", daemon=True).start()

    def report(self, code: int, message: str, broken: bool) -> bool:
        """Report an error to the supervisor, which passes it on to every rank. Returns False if it can't be
        reached.

        code: the exit code. broken: whether the end of a neighbour may be the cause; then the supervisor
        waits for that rank's error, and ends this process.
        """
        with self._sending:
            self._link.send(Failure(self.place.rank, code, message, broken))
            deadline = time.monotonic() + BEAT_SECONDS
            while not self._link.flush() and not self._link.closed and time.monotonic() < deadline:
                time.sleep(0.01)
        if broken:
            time.sleep(2 * STALL_SECONDS)
        return not self._link.closed

    @contextmanager
    def joining(self) -> Iterator[None]:
        """A context for joining MLX's ring on the main thread. It is entered when every rank is ready.

        MLX blocks all threads while it waits for its neighbours, so a timer of the system ends the process if
        one never comes.
        """
        with self._sending:
            self._link.send(Ready())
        self._may_join.wait()
        if self.place.rank == self.place.size - 1:
            # It connects first, and MLX tries again after a second only.
            time.sleep(HEAD_START_SECONDS)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(int(2 * STALL_SECONDS))
        try:
            yield
        finally:
            signal.alarm(0)

    def leave(self) -> None:
        """Wait for a sign of life from the supervisor before the process ends: if it is stopped, nothing else
        would end it.

        On rank 0 an old sign of life is enough, so that the user needn't wait.
        """
        began = time.monotonic() - (0 if self.place.rank else 2 * BEAT_SECONDS)
        while self._link.heard < began:
            time.sleep(0.02)

    def _live(self) -> None:
        poll = select.poll()
        poll.register(self._link, select.POLLIN)
        beaten = 0.0
        while True:
            poll.poll(int(1000 * BEAT_SECONDS / 2))
            if time.monotonic() - beaten >= BEAT_SECONDS:
                beaten = time.monotonic()
                with self._sending:
                    self._link.send(Beat())
            if any(isinstance(message, Join) for message in self._link.receive()):
                self._may_join.set()
            if self._link.closed:
                _end("its supervisor has gone away")
            if self._link.silent_seconds > STALL_SECONDS:
                # It is stopped, and would stay.
                if os.getppid() == self._supervisor:
                    os.kill(self._supervisor, signal.SIGKILL)
                _end(f"its supervisor hasn't answered for {STALL_SECONDS:.0f} s")


def _end(why: str) -> None:
    say(f"error: this rank's engine ends: {why}")
    os._exit(RankError.exit_code)


_joined: Member | None = None


def join(text: str) -> None:
    """Make this process a rank's engine. text: the result of `EnginePlace.to_text`. The entry point calls it
    once.
    """
    global _joined
    _joined = Member(EnginePlace.from_text(text))


def joined() -> Member | None:
    """This process in its role as a rank's engine; None if it isn't one."""
    return _joined
