"""The owner thread: order, errors, cancellation and its end, from threads and from asyncio."""

from __future__ import annotations

import asyncio
import gc
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ondevice.callbacks import IsCancelled
from ondevice.errors import FlashReadError, OndeviceError
from ondevice.runtime import owner as owner_module
from ondevice.runtime.owner import OwnerThread


@pytest.fixture
def owner() -> Iterator[OwnerThread[object]]:
    thread: OwnerThread[object] = OwnerThread("test-owner")
    yield thread
    thread.close()


def endless(cancelled: IsCancelled) -> Iterator[int]:
    count = 0
    while not cancelled():
        yield count
        count += 1
        time.sleep(0.001)


def settles(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 60.0
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return condition()


def test_nothing_starts_before_the_first_job() -> None:
    def begun() -> set[threading.Thread]:
        return set(threading.enumerate()) - before

    before = set(threading.enumerate())
    thread: OwnerThread[int] = OwnerThread("idle")
    assert not begun()
    assert thread.call(lambda: 7) == 7
    assert len(begun()) == 1
    thread.close()
    assert not begun()


def test_work_runs_on_one_thread_from_many(owner: OwnerThread[object]) -> None:
    seen: list[object] = []
    callers = [
        threading.Thread(target=lambda: seen.append(owner.call(threading.get_ident))) for _ in range(16)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(seen) == 16
    assert len(set(seen)) == 1
    assert seen[0] != threading.get_ident()


def test_a_call_from_the_owner_itself_runs_at_once(owner: OwnerThread[object]) -> None:
    assert owner.call(lambda: owner.call(lambda: "inner")) == "inner"


@pytest.mark.parametrize("error", [FlashReadError("torn"), MemoryError("full"), SystemExit(3)])
def test_errors_surface_as_they_are_and_the_thread_lives_on(
    owner: OwnerThread[object], error: BaseException
) -> None:
    def work(cancelled: IsCancelled) -> Iterator[int]:
        yield 1
        raise error

    items = owner.stream(work)
    assert next(items) == 1
    with pytest.raises(type(error)) as caught:
        next(items)
    assert caught.value is error
    assert owner.call(lambda: "alive") == "alive"


def test_closing_an_iterator_cancels_its_job(owner: OwnerThread[object]) -> None:
    items = owner.stream(endless)
    assert [next(items), next(items)] == [0, 1]
    items.close()  # type: ignore[attr-defined]
    assert owner.call(lambda: "next job") == "next job"


def test_dropping_an_iterator_cancels_its_job(owner: OwnerThread[object]) -> None:
    next(owner.stream(endless))
    gc.collect()
    assert owner.call(lambda: "next job") == "next job"


def test_close_ends_the_running_job_refuses_the_waiting_and_runs_the_last(
    owner: OwnerThread[object],
) -> None:
    order: list[str] = []
    running = owner.stream(endless)
    next(running)
    refused: list[OndeviceError] = []

    def wait_in_line() -> None:
        try:
            owner.call(lambda: order.append("waiting job ran"))
        except OndeviceError as error:
            refused.append(error)

    waiter = threading.Thread(target=wait_in_line)
    waiter.start()
    assert settles(lambda: not owner._jobs._queue.empty())
    owner.close(lambda: order.append("last"))
    waiter.join()
    assert order == ["last"]
    assert len(refused) == 1
    assert all(isinstance(item, int) for item in running)
    owner.close(lambda: order.append("again"))
    assert order == ["last"]
    with pytest.raises(OndeviceError, match="closed"):
        owner.call(lambda: None)


def test_a_forgotten_owner_ends_its_thread() -> None:
    thread: OwnerThread[threading.Thread] = OwnerThread("forgotten")
    native = weakref.ref(thread.call(threading.current_thread))
    del thread
    gc.collect()
    assert settles(lambda: (found := native()) is None or not found.is_alive())


def test_a_kept_thread_serves_one_owner_after_another() -> None:
    current = threading.current_thread
    first, second, third = (OwnerThread[Any](name, kept=True) for name in ("first", "second", "third"))
    thread, other = first.call(current), second.call(current)
    assert thread is not other
    first.close()
    assert thread.is_alive()
    with pytest.raises(OndeviceError, match="closed"):
        first.call(current)
    assert third.call(current) is thread
    assert thread.name == "third"
    assert third.call(lambda: (first.is_current, third.is_current)) == (False, True)
    ended: list[threading.Thread] = []
    third.close(lambda: ended.append(current()))
    assert ended == [thread]
    second.close()


def test_a_kept_thread_that_a_fork_left_behind_is_nobodys() -> None:
    gone = threading.Thread(target=lambda: None)
    gone.start()
    gone.join()
    owner_module._IDLE_THREADS.append((gone, queue.SimpleQueue()))
    owner: OwnerThread[int] = OwnerThread("after", kept=True)
    assert owner.call(lambda: 3) == 3
    owner.close()


def test_asyncio_gets_items_and_errors(owner: OwnerThread[object]) -> None:
    def work(cancelled: IsCancelled) -> Iterator[int]:
        yield from (1, 2, 3)
        raise FlashReadError("torn")

    items: list[object] = []

    async def consume() -> None:
        async for item in owner.astream(work):
            items.append(item)

    with pytest.raises(FlashReadError):
        asyncio.run(consume())
    assert items == [1, 2, 3]


def test_cancelling_the_task_cancels_the_work(owner: OwnerThread[object]) -> None:
    ended = threading.Event()

    def work(cancelled: IsCancelled) -> Iterator[int]:
        yield from endless(cancelled)
        ended.set()

    async def cancel_midway() -> None:
        first = asyncio.Event()

        async def consume() -> None:
            async for _ in owner.astream(work):
                first.set()

        task = asyncio.create_task(consume())
        await first.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel_midway())
    assert ended.wait(60.0)


def test_a_closed_event_loop_cancels_the_work(owner: OwnerThread[object]) -> None:
    ended = threading.Event()

    def work(cancelled: IsCancelled) -> Iterator[int]:
        yield from endless(cancelled)
        ended.set()

    loop = asyncio.new_event_loop()
    items = owner.astream(work)
    assert loop.run_until_complete(anext(items)) == 0
    loop.close()
    assert ended.wait(60.0)


def test_an_urgent_call_runs_between_two_items_before_what_waits(owner: OwnerThread[object]) -> None:
    order: list[str] = []
    running = owner.stream(endless)
    next(running)
    waiter = threading.Thread(target=lambda: owner.call(lambda: order.append("waiting")))
    waiter.start()
    assert owner.call(lambda: order.append("urgent") or "done", urgent=True) == "done"
    assert order == ["urgent"]
    assert isinstance(next(running), int)
    running.close()  # type: ignore[attr-defined]
    waiter.join()
    assert order == ["urgent", "waiting"]


def test_an_urgent_call_reaches_an_idle_thread_and_brings_its_error_back(owner: OwnerThread[object]) -> None:
    def fail() -> object:
        raise FlashReadError("torn")

    assert owner.call(lambda: 5, urgent=True) == 5
    with pytest.raises(FlashReadError):
        owner.call(fail, urgent=True)
    assert owner.call(lambda: 6) == 6


def test_close_refuses_urgent_calls_that_wait() -> None:
    delivered: list[object] = []
    jobs = owner_module._Jobs()
    jobs.put(owner_module._Job(endless, delivered.append), urgent=True)
    jobs.close()
    assert jobs.next() is None
    (end,) = delivered
    assert isinstance(end, owner_module._End)
    assert isinstance(end.error, OndeviceError)


def test_idle_work_goes_on_until_it_is_done_and_again_after_a_job(owner: OwnerThread[object]) -> None:
    steps, done = [], threading.Event()

    def step() -> bool:
        steps.append(threading.current_thread())
        if len(steps) % 3 == 0:
            done.set()
        return len(steps) % 3 != 0

    owner.when_idle(step)
    assert done.wait(60.0)
    done.clear()
    assert owner.call(lambda: len(steps)) == 3
    assert done.wait(60.0)
    assert len(steps) == 6
    assert set(steps) == {owner.call(threading.current_thread)}


def test_idle_work_waits_for_jobs_and_ends_with_the_thread() -> None:
    owner: OwnerThread[object] = OwnerThread("test")
    steps: list[int] = []
    owner.when_idle(lambda: steps.append(1) is None)
    running = owner.stream(endless)
    next(running)
    before = len(steps)
    time.sleep(0.1)
    assert len(steps) == before
    running.close()  # type: ignore[attr-defined]
    while len(steps) == before:
        time.sleep(0.001)
    owner.close()
    before = len(steps)
    time.sleep(0.05)
    assert len(steps) == before


def test_an_error_ends_idle_work_and_harms_no_job(owner: OwnerThread[object]) -> None:
    failed: list[int] = []

    def fail() -> bool:
        failed.append(1)
        raise FlashReadError("torn")

    owner.when_idle(fail)
    while not failed:
        time.sleep(0.001)
    time.sleep(0.05)
    assert len(failed) == 1
    assert owner.call(lambda: 5) == 5
