"""Jobs of an owner thread that run together, with one call that answers all their requests.

A joint job is a generator of items and requests. It runs until it yields a request. When all running jobs
have yielded one, a single call answers all requests. Jobs join and leave between two such rounds. This module
knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from types import TracebackType
from typing import Any, Protocol

Cancelled = Callable[[], bool]


class Job(Protocol):
    """A job: its work, and where its items and its end go."""

    @property
    def work(self) -> Callable[[Cancelled], Iterator[Any]]: ...

    def is_cancelled(self) -> bool: ...

    def deliver(self, item: Any) -> None: ...

    def end(self, error: BaseException | None = None) -> None: ...


class JointJobs:
    """Runs jobs together. Only the owner thread may use it, except for `running`."""

    def __init__(
        self,
        max_jobs: int,
        request: type,
        answer: Callable[[Sequence[Any]], Sequence[BaseException | Any | None]],
    ) -> None:
        """Args:
        max_jobs: most jobs that run together.
        request: the type of requests; everything else that a job yields is an item.
        answer: called with the requests of all running jobs, oldest job first. Returns one answer per
            request, which is sent to the job, or raised in it if it is an exception. The answer `WAIT`
            repeats the request.
        """
        self.max_jobs = max_jobs
        self.running = 0
        """Number of running jobs. Safe from any thread."""
        self._request = request
        self._answer = answer
        self._running: list[_Running] = []

    @property
    def is_leaving(self) -> bool:
        """Whether a running job has been cancelled, so that it ends before the next round."""
        return any(one.job.is_cancelled() for one in self._running)

    def run(self, first: Job, following: Callable[[], Job | None], between: Callable[[], None]) -> None:
        """Run `first` and jobs that join it, until all have ended. Errors are delivered to the jobs.

        following: returns the next job to run, or None. between: called between items and rounds.
        """
        running = self._running = [_Running(first, self._request)]
        with _ToAll(running):
            while running:
                while len(running) < self.max_jobs and (job := following()) is not None:
                    running.append(_Running(job, self._request))
                self.running = len(running)
                for one in list(running):
                    one.advance(between)
                    if one.ended:
                        running.remove(one)
                        self.running = len(running)
                self._take_answers(running)
                between()
        self.running = 0

    def _take_answers(self, running: list[_Running]) -> None:
        """Answer the requests of the running jobs. Answers are freed before the next ones are computed."""
        requests = [one.request for one in running]
        for one, answer in zip(running, self._answer(requests) if requests else (), strict=True):
            one.take(answer)


class _Wait:
    """The type of `WAIT`."""


WAIT = _Wait()
"""The answer that repeats a request in the next round."""


class _Running:
    """A job that has begun."""

    def __init__(self, job: Job, request: type) -> None:
        self.job = job
        self.request: Any = None
        """The unanswered request, or None."""
        self.ended = False
        self._type = request
        self._steps: Generator[Any, Any, None] | None = None
        self._answer: BaseException | Any | None = None

    def take(self, answer: BaseException | Any | None) -> None:
        """Take the answer to the job's request."""
        if answer is not WAIT:
            self.request, self._answer = None, answer

    def advance(self, between: Callable[[], None]) -> None:
        """Run until the job yields a request or ends."""
        if self.request is not None:
            return
        with _JobEnd(self):
            item = self._next()
            while not isinstance(item, self._type):
                self.job.deliver(item)
                between()
                item = self._next()
            self.request = item

    def _next(self) -> Any:
        """The next item or request. Raises StopIteration at the end."""
        if self._steps is None:
            self._steps = self.job.work(self.job.is_cancelled)  # type: ignore[assignment]
            assert self._steps is not None
        answer, self._answer = self._answer, None
        if isinstance(answer, BaseException):
            return self._steps.throw(answer)
        return self._steps.send(answer)


class _JobEnd:
    """A context that ends a job when its work ends, with or without an error."""

    def __init__(self, running: _Running) -> None:
        self._running = running

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is not None:
            self._running.ended = True
            self._running.job.end(None if isinstance(error, StopIteration) else error)
        return True


class _ToAll:
    """A context that ends all running jobs if an error occurs that belongs to no single job."""

    def __init__(self, running: list[_Running]) -> None:
        self._all = running

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        for one in self._all:
            one.job.end(error)
        self._all.clear()
        return True
