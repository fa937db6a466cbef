"""Jobs that run together on an owner thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from ondevice.runtime.joint_jobs import WAIT, JointJobs
from ondevice.runtime.owner import OwnerThread

PATIENCE = 20.0


class Ask:
    """A request that is answered by its number."""

    def __init__(self, number: int) -> None:
        self.number = number


def counting(count: int, seen: list[Any] | None = None) -> Callable[[Any], Iterator[Any]]:
    """Asks `count` times, and yields the answers."""

    def work(cancelled: Callable[[], bool]) -> Iterator[Any]:
        for number in range(count):
            if cancelled():
                return
            try:
                yield (yield Ask(number))  # type: ignore[misc]
            except KeyError as error:
                yield f"caught {error}"

    return work


@pytest.fixture
def owner() -> Iterator[OwnerThread[Any]]:
    made: OwnerThread[Any] = OwnerThread("joint")
    yield made
    made.close()


def all_of(streams: Sequence[Iterator[Any]]) -> list[list[Any]]:
    """The items of all, which begin at once."""
    found: list[list[Any]] = [[] for _ in streams]
    threads = [
        threading.Thread(target=lambda at=at, it=it: found[at].extend(it)) for at, it in enumerate(streams)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    return found


def test_rounds_answer_all_that_run(owner: OwnerThread[Any]) -> None:
    rounds: list[int] = []

    def answer(requests: Sequence[Ask]) -> list[Any]:
        rounds.append(len(requests))
        return [KeyError(1) if it.number == 2 else it.number for it in requests]

    joint = JointJobs(3, Ask, answer)
    owner.run_jointly(joint)
    gate = threading.Event()
    blocked = owner.stream(lambda cancelled: iter([gate.wait(PATIENCE)]))
    holding = threading.Thread(target=lambda: list(blocked))
    holding.start()
    streams = [owner.stream(counting(5), joint=True) for _ in range(7)]
    results: list[list[list[Any]]] = []
    running = threading.Thread(target=lambda: results.append(all_of(streams)))
    running.start()
    while owner._jobs._queue.qsize() < 7:
        gate.wait(0.01)
    gate.set()
    running.join(PATIENCE)
    assert results == [[[0, 1, "caught 1", 3, 4]] * 7]
    assert max(rounds) == 3
    assert sum(rounds) == 35
    assert joint.running == 0


def test_who_waits_keeps_its_request(owner: OwnerThread[Any]) -> None:
    asked: list[int] = []

    def answer(requests: Sequence[Ask]) -> list[Any]:
        asked.extend(it.number for it in requests)
        return [WAIT if len(asked) < 4 else it.number for it in requests]

    owner.run_jointly(JointJobs(2, Ask, answer))
    assert list(owner.stream(counting(2), joint=True)) == [0, 1]
    assert asked == [0, 0, 0, 0, 1]


def test_an_error_of_the_round_reaches_all_and_the_thread_goes_on(owner: OwnerThread[Any]) -> None:
    def answer(requests: Sequence[Ask]) -> list[Any]:
        raise ZeroDivisionError

    owner.run_jointly(JointJobs(2, Ask, answer))
    with pytest.raises(ZeroDivisionError):
        list(owner.stream(counting(2), joint=True))
    assert owner.call(lambda: 7) == 7


def test_calls_run_between_rounds_and_other_work_afterwards(owner: OwnerThread[Any]) -> None:
    order: list[str] = []
    called = threading.Event()

    def answer(requests: Sequence[Ask]) -> list[Any]:
        order.append("round")
        if requests[0].number == 5:
            called.wait(PATIENCE)
        return [it.number for it in requests]

    owner.run_jointly(JointJobs(2, Ask, answer))
    running = owner.stream(counting(9), joint=True)
    next(running)

    def call() -> None:
        owner.call(lambda: order.append("call"))

    def work() -> None:
        list(owner.stream(lambda cancelled: iter([order.append("work")])))

    threads = [threading.Thread(target=target) for target in (call, work)]
    for thread in threads:
        thread.start()
        while owner._jobs._queue.qsize() + len(owner._jobs._next) == 0 and "call" not in order:
            called.wait(0.001)
    called.set()
    assert list(running) == list(range(1, 9))
    for thread in threads:
        thread.join(PATIENCE)
    assert order[-1] == "work"
    assert "round" in order[order.index("call") :]


def test_jobs_that_ended_are_forgotten_while_others_run(owner: OwnerThread[Any]) -> None:
    owner.run_jointly(JointJobs(2, Ask, lambda requests: [it.number for it in requests]))
    running = owner.stream(counting(1_000_000), joint=True)
    next(running)
    for _ in range(20):
        assert list(owner.stream(counting(2), joint=True)) == [0, 1]
    assert len(owner._jobs._running) <= 3
    running.close()  # type: ignore[attr-defined]


def test_closing_cancels_all_that_run() -> None:
    owner: OwnerThread[Any] = OwnerThread("joint")
    owner.run_jointly(JointJobs(2, Ask, lambda requests: [it.number for it in requests]))
    streams = [owner.stream(counting(1_000_000), joint=True) for _ in range(2)]
    for it in streams:
        next(it)
    owner.close()
    assert all(len(list(it)) < 999_999 for it in streams)
