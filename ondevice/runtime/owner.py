"""The one thread that does a model's work: any thread submits jobs and gets their items and errors.

A job is a generator. Jobs run on the owner thread in order of arrival, one at a time, except joint ones
(`joint_jobs.py`), which run together. A job never waits for its consumer; urgent calls run between its items.
This module knows nothing of models.
"""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Any, Generic, Literal, TypeVar

from ondevice.errors import OndeviceError, thread_refused
from ondevice.runtime.joint_jobs import JointJobs

IDLE_SECONDS = 0.005
"""Seconds without a job after which the thread does idle work, a step at a time."""

T = TypeVar("T")
Cancelled = Callable[[], bool]
"""Returns whether the consumer has cancelled; safe from any thread."""


class _End:
    """The last item that a job delivers: its end, and an error if there was one."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


class _Job:
    """Work and where its items go. Leaving its context delivers the end, with or without an error.

    kind: `joint` jobs run together with other joint ones, after `run_jointly`. `brief` jobs may run between
    two rounds of joint jobs.
    """

    def __init__(
        self,
        work: Callable[[Cancelled], Iterator[Any]],
        deliver: Callable[[Any], None],
        kind: Literal["alone", "joint", "brief"] = "alone",
    ) -> None:
        self.work = work
        self.deliver = deliver
        self.kind = kind
        self.cancelled = threading.Event()
        self.ended = False

    def run(self, between_items: Callable[[], None] = lambda: None) -> None:
        with self:
            for item in self.work(self.cancelled.is_set):
                self.deliver(item)
                between_items()

    def refuse(self) -> None:
        """Deliver the end of the job without running it."""
        self.end(closed_error())

    def is_cancelled(self) -> bool:
        """Whether the consumer has cancelled."""
        return self.cancelled.is_set()

    def end(self, error: BaseException | None = None) -> None:
        """Deliver the end, with or without an error."""
        self.ended = True
        self.deliver(_End(error))

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        # Every exception, including SystemExit, goes to the consumer; this thread goes on.
        self.end(error)
        return True


class OwnerThread(Generic[T]):
    """A thread that starts at the first job and ends with `close()`, or when this object is collected.

    In a child of fork() the object exists without its thread, and submitting work raises OndeviceError.

    kept: whether the thread waits to serve another owner instead of ending, for work that leaks memory with
    every new thread.
    """

    def __init__(self, name: str, kept: bool = False) -> None:
        self._jobs = _Jobs()
        self._runner = _Runner(self._jobs, name, kept)
        self._process = os.getpid()
        self._started = False
        self._lock = threading.Lock()
        # The finaliser also runs at exit, while the thread can still run.
        self._finalizer = weakref.finalize(self, _finish, self._process, self._jobs, self._runner)

    @property
    def is_current(self) -> bool:
        """Whether the calling thread is the owner thread."""
        return self._runner.is_current

    @property
    def is_inherited(self) -> bool:
        """Whether this is a child of fork(): the thread is missing, and locks may be held forever."""
        return os.getpid() != self._process

    def require_own_process(self) -> None:
        """Check the process. Raises OndeviceError in a child of fork()."""
        if self.is_inherited:
            raise OndeviceError(
                f"the model was loaded by process {self._process}, and this is a fork of it, without the "
                "threads that do its work; load the model here, or start processes by spawning them"
            )

    def require_open(self) -> None:
        """Check that work can be submitted. Raises OndeviceError after `close`, and in a child of fork()."""
        self.require_own_process()
        if self._jobs.closed:
            raise closed_error()

    @property
    def run_urgent(self) -> Callable[[], None]:
        """A function that runs the waiting urgent calls, for work that yields items rarely."""
        return self._jobs.run_urgent

    def call(self, work: Callable[[], T], urgent: bool = False) -> T:
        """The result of `work` on the owner thread; raises its error.

        urgent: whether to run before waiting jobs, between two items of the running job or where it runs
        urgent calls.
        """
        self.require_own_process()
        if self.is_current:
            return work()

        def one_item(cancelled: Cancelled) -> Iterator[T]:
            yield work()

        (result,) = self._items(one_item, urgent, "brief")
        return result

    def run_jointly(self, joint: JointJobs) -> None:
        """From now on, run joint jobs together, with `joint`."""
        self._jobs.joint = joint

    def stream(self, work: Callable[[Cancelled], Iterator[T]], joint: bool = False) -> Iterator[T]:
        """Yields the items of `work(cancelled)`, which runs on the owner thread. Closing the iterator cancels
        the work.

        The job is queued when the first item is requested. joint: whether to run it with other joint jobs; it
        may then yield requests, which aren't delivered.
        """
        return self._items(work, urgent=False, kind="joint" if joint else "alone")

    def _items(
        self, work: Callable[[Cancelled], Iterator[T]], urgent: bool, kind: Literal["alone", "joint", "brief"]
    ) -> Iterator[T]:
        items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        job = _Job(work, items.put, kind)
        self._submit(job, urgent)
        try:
            while not isinstance(item := items.get(), _End):
                yield item
                self.require_own_process()
            if item.error is not None:
                raise item.error
        finally:
            job.cancelled.set()

    async def astream(
        self, work: Callable[[Cancelled], Iterator[T]], joint: bool = False
    ) -> AsyncGenerator[T, None]:
        """`stream` for asyncio; cancelling the task that iterates cancels the job."""
        import asyncio  # Slow to import; callers have already imported it.

        loop = asyncio.get_running_loop()
        items: asyncio.Queue[Any] = asyncio.Queue()

        def deliver(item: Any) -> None:
            try:
                loop.call_soon_threadsafe(items.put_nowait, item)
            except RuntimeError:
                job.cancelled.set()  # The loop is closed: nothing can be delivered.

        job = _Job(work, deliver, "joint" if joint else "alone")
        self._submit(job)
        try:
            while not isinstance(item := await items.get(), _End):
                yield item
                self.require_own_process()
            if item.error is not None:
                raise item.error
        finally:
            job.cancelled.set()

    def when_idle(self, step: Callable[[], bool]) -> None:
        """Run `step` on the owner thread while no job waits, until it returns False or raises.

        Its error is dropped, because later jobs will raise it too.
        """
        jobs = self._jobs

        def begin(cancelled: Cancelled) -> Iterator[None]:
            # On the owner thread, so that it can't restart work that has already ended.
            jobs.idle = step
            return iter(())

        self._submit(_Job(begin, _drop))

    def close(self, last: Callable[[], None] | None = None) -> None:
        """Cancel the running job, refuse the waiting ones, run `last` and end the thread. Idempotent.

        Does nothing in a child of fork().
        """
        if self.is_inherited:
            return
        if last is not None and self._started and not self._jobs.closed:
            self._jobs.close(last)
            self._runner.join()
        self._finalizer()

    def _submit(self, job: _Job, urgent: bool = False) -> None:
        self.require_own_process()
        with self._lock:
            if not self._started:
                try:
                    self._runner.start()
                except RuntimeError as error:
                    raise thread_refused(error) from error
                self._started = True
        self._jobs.put(job, urgent)


class _Jobs:
    """The queue of one owner thread. After `close` it refuses jobs."""

    def __init__(self) -> None:
        self.closed = False
        self.idle: Callable[[], bool] | None = None
        """A step of idle work, which returns False if there is nothing to do."""
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._urgent: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self.joint: JointJobs | None = None
        self._next: list[_Job | None] = []
        """At most one job that was taken from the queue and hasn't run."""
        self._running: list[_Job] = []
        self._lock = threading.Lock()

    def put(self, job: _Job, urgent: bool) -> None:
        with self._lock:
            if self.closed:
                raise closed_error()
            if urgent:
                self._urgent.put(job)
                job = _Job(_nothing, _drop, "brief")  # Wakes the thread if it is idle.
            self._queue.put(job)

    def run_next(self) -> bool:
        """Run the next job. Returns False at the end. Keeps no reference to the job, which may hold the
        model.
        """
        job = self.next()
        if job is None:
            return False
        self.run_urgent()
        joint = self.joint
        if job.kind == "joint" and joint is not None:
            joint.run(job, self._following, self.run_urgent)
        else:
            job.run(self.run_urgent)
        with self._lock:
            self._running.clear()
        return True

    def _following(self) -> _Job | None:
        """The next job, if it can join the running ones; otherwise None. Runs brief jobs that
        wait before it.
        """
        while self._next or not self._queue.empty():
            if not self._next:
                self._next.append(self._queue.get())
            job = self._next[0]
            with self._lock:
                if job is None or job.kind == "alone" or self.closed:
                    return None
                self._next.clear()
                if job.kind == "joint":
                    self._running = [*(it for it in self._running if not it.ended), job]
                    return job
            job.run()
        return None

    def run_urgent(self) -> None:
        """Run the urgent calls that have arrived."""
        while not self._urgent.empty():
            self._urgent.get().run()

    def next(self) -> _Job | None:
        """The next job to run, or None at the end. Jobs that waited when the queue was closed are refused."""
        while (job := self._get()) is not None:
            with self._lock:
                self._running = [job]
                refused = self.closed and not isinstance(job, _LastJob)
            if not refused:
                return job
            job.refuse()
            while not self._urgent.empty():
                self._urgent.get().refuse()
        return None

    def _get(self) -> _Job | None:
        """The next item of the queue. Does idle work until it comes."""
        if self._next:
            return self._next.pop()
        while self.idle is not None:
            with suppress(queue.Empty):
                return self._queue.get(timeout=IDLE_SECONDS)
            if not self._idle_step():
                break
        return self._queue.get()

    def _idle_step(self) -> bool:
        """Do a step of idle work. Returns True if there is more to do."""
        results: list[Any] = []
        step = self.idle
        if step is not None:
            _Job(lambda cancelled: iter([step()]), results.append).run()
        return results[:1] == [True]

    def close(self, last: Callable[[], None] | None = None) -> None:
        with self._lock:
            if self.closed:
                return
            self.closed = True
            self.idle = None
            self.joint = None
            for job in self._running:
                job.cancelled.set()
            if last is not None:
                self._queue.put(_LastJob(last))
            self._queue.put(None)


class _LastJob(_Job):
    """The clean-up at the end, which runs after the queue is closed."""

    def __init__(self, last: Callable[[], None]) -> None:
        def work(cancelled: Cancelled) -> Iterator[None]:
            last()
            yield None

        super().__init__(work, _drop)


def _nothing(cancelled: Cancelled) -> Iterator[None]:
    return iter(())


def _drop(item: Any) -> None:
    """Do nothing with an item."""


class _Runner:
    """Runs the jobs of one owner, on a new thread or on a kept one."""

    def __init__(self, jobs: _Jobs, name: str, kept: bool) -> None:
        self._jobs = jobs
        self._name = name
        self._kept = kept
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()

    @property
    def is_current(self) -> bool:
        return self._thread is threading.current_thread() and not self._ended.is_set()

    def start(self) -> None:
        """Start on a kept thread or a new one. Raises RuntimeError if the system refuses a thread."""
        while self._kept and _IDLE_THREADS:
            with suppress(IndexError):
                thread, following = _IDLE_THREADS.pop()
                if thread.is_alive():  # Not in a child of fork().
                    self._thread, thread.name = thread, self._name
                    following.put(self)
                    return
        # Daemon, so that a forgotten model can't keep the interpreter alive.
        self._thread = threading.Thread(target=_serve, args=(self,), name=self._name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self._thread = None
            raise

    def join(self) -> None:
        """Wait until the last job has run. Returns at once if no job has begun, or if a job calls this."""
        if self._thread is None or self.is_current:
            return
        self._ended.wait()
        if not self._kept:
            self._thread.join()

    def run(self) -> bool:
        """Run all jobs. Returns whether the thread is kept."""
        while self._jobs.run_next():
            pass
        return self._kept

    def end(self) -> None:
        self._ended.set()


_IDLE_THREADS: list[tuple[threading.Thread, queue.SimpleQueue[_Runner]]] = []
"""Kept threads without an owner, and the queues in which they wait for the next owner."""


def _serve(runner: _Runner) -> None:
    """Run the jobs of one owner, then those of the next owners. Keeps no reference to a finished owner."""
    following: queue.SimpleQueue[_Runner] = queue.SimpleQueue()
    while runner.run():
        _IDLE_THREADS.append((threading.current_thread(), following))
        runner.end()
        del runner
        runner = following.get()
    runner.end()


def _finish(process: int, jobs: _Jobs, runner: _Runner) -> None:
    if os.getpid() == process:
        jobs.close()
        runner.join()


def closed_error() -> OndeviceError:
    """The error that every use of a closed model raises."""
    return OndeviceError("the model is closed; load it again")
