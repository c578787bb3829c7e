"""Executors: they run host handlers at the same time if the callback graph allows it."""

from __future__ import annotations

import concurrent.futures
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

from fluxcb._calls import Constructed
from fluxcb._declare.extras import library
from fluxcb._declare.schedules import positive
from fluxcb._errors import DeclarationError

__all__ = ["DaskExecutor", "Executor", "Pool", "SerialExecutor", "ThreadExecutor"]


class Pool(Protocol):
    """Threads of this process that run jobs."""

    def submit(self, job: Callable[[], None], /) -> concurrent.futures.Future[Any]:
        """Start a job."""
        ...

    def shutdown(self) -> None:
        """Wait for the running jobs, and end the threads."""
        ...


class Executor(Constructed, ABC):
    """Base class of executors, which determine where host handlers run: the argument `executor` of a Learner.

    A subclass defines `open`. An executor does not decide which handlers run at the same time, or in which order they
    start. All executors therefore give the same results bitwise. A moment ends when all of its handlers have finished,
    so no job runs between two moments.

    Example:
        >>> from concurrent.futures import ThreadPoolExecutor
        >>> from fluxcb import Executor
        >>> from fluxcb.testing import EventLog, testlearner
        >>> class Threads(Executor):
        ...     def open(self):
        ...         return ThreadPoolExecutor(2)
        >>> history = testlearner(EventLog(), EventLog(), executor=Threads()).fit(1)
    """

    @abstractmethod
    def open(self) -> Pool | None:
        """Return a pool of threads for one fit, or None to run everything on the thread that called `fit`.

        It is called when two handlers can first run at the same time in a fit.

        Returns:
            An object with two methods, such as a `concurrent.futures.ThreadPoolExecutor`. `submit(job)` runs `job()` on
            a thread of this process, and returns a `concurrent.futures.Future`. `shutdown()` is called when the fit
            ends.
        """


class SerialExecutor(Executor):
    """Run handlers one after the other, on the thread that called `fit`. This is the default.

    Example:
        >>> from fluxcb.testing import testlearner
        >>> history = testlearner(executor=SerialExecutor()).fit(1)
    """

    def open(self) -> None:
        """Return no threads."""
        return

    def __repr__(self) -> str:
        return "SerialExecutor()"


class ThreadExecutor(Executor):
    """Run handlers of one moment at the same time on threads, as far as the callback graph allows.

    Handlers run one after the other, in their serial order, if one of them writes what another one uses, or if one of
    them may cancel. A moment ends when all of its handlers have finished. The threads start when two handlers can first
    run at the same time, and end with the fit.

    Args:
        workers: Maximum number of threads. Handlers that wait, for example for files or the network, need a thread
            each. More threads do not make computations in Python faster.

    Raises:
        DeclarationError: `workers` is not positive.

    Example:
        >>> from fluxcb.testing import EventLog, testlearner
        >>> learner = testlearner(EventLog(), EventLog(), executor=ThreadExecutor(2))
        >>> history = learner.fit(1)
        >>> [len(log.entries) for log in learner.callbacks]
        [20, 20]
    """

    def __init__(self, workers: int = 8) -> None:
        self.workers = positive(workers, "`workers` of `ThreadExecutor`")

    def open(self) -> Pool:
        """Return a pool of threads."""
        # The tracks of a timeline have the names of the threads.
        return _Threads(self.workers, thread_name_prefix="fluxcb")

    def __repr__(self) -> str:
        return f"ThreadExecutor({self.workers})"


class _Threads(concurrent.futures.ThreadPoolExecutor):
    def shutdown(self, wait: bool = True, *, cancel_futures: bool = True) -> None:
        # Jobs that have not begun when a fit ends must never begin.
        super().shutdown(wait, cancel_futures=cancel_futures)


class DaskExecutor(Executor):
    """Run handlers of one moment at the same time, like `ThreadExecutor`, on the threads of a Dask client.

    It is for programs that already have a Dask client. Handlers share the threads of the client with its other work,
    and the Dask dashboard shows each handler as a task. Starting a handler costs more than with `ThreadExecutor`,
    because each handler is a task of Dask's scheduler.

    Handlers share memory, so the workers of the client must be threads of this process. Therefore, handlers cannot run
    in other processes or on other machines, and handlers that compute in Python do not run in parallel. A handler that
    raises an error is not run again.

    Needs `pip install 'fluxcb[dask]'`.

    Args:
        client: A `distributed.Client(processes=False)`; None starts one for each fit.

    Raises:
        DeclarationError: Dask is not installed, `client` is not a client, or its workers are other processes.
    """

    def __init__(self, client: Any = None) -> None:
        if client is None:
            library("distributed", extra="dask", owner="DaskExecutor")
        else:
            addresses = _addresses(client)
            # Worker addresses show whether the workers are threads of this process.
            if not addresses or not all(address.startswith("inproc://") for address in addresses):
                raise DeclarationError(
                    f"`DaskExecutor` needs a Dask client whose workers are threads of this process, not {client!r}.",
                    why="handlers share the Learner's memory, which other processes do not have",
                    fix="start it with `distributed.Client(processes=False)`",
                )
        self.client = client

    def open(self) -> Pool:
        """Return the client's threads."""
        return _DaskThreads(self.client)

    def __repr__(self) -> str:
        return f"DaskExecutor({'' if self.client is None else self.client})"


def _addresses(client: Any) -> list[str]:
    try:
        # All workers: recent versions of Dask list only some of them by default.
        return list(client.scheduler_info(n_workers=-1)["workers"])
    except (AttributeError, TypeError):
        return []


# Module-level, because Dask pickles `_run_job` by name, and the pickled function must find the same jobs.
_jobs: dict[int, Callable[[], None]] = {}
_numbers = itertools.count()


def _run_job(number: int) -> None:
    _jobs.pop(number)()


class _DaskThreads:
    """Passes jobs by number, because Dask pickles its arguments, and a handler's context cannot be pickled."""

    def __init__(self, client: Any) -> None:
        self._started_client: Any = None
        if client is None:
            distributed = library("distributed", extra="dask", owner="DaskExecutor")
            # Without the dashboard, which would open a port.
            client = self._started_client = distributed.Client(processes=False, dashboard_address=None)
        # Handlers act by side effects, so Dask must not reuse the result of an equal task.
        self._executor = client.get_executor(pure=False)

    def submit(self, job: Callable[[], None], /) -> concurrent.futures.Future[Any]:
        number = next(_numbers)
        _jobs[number] = job
        return self._executor.submit(_run_job, number)

    def shutdown(self) -> None:
        self._executor.shutdown()
        if self._started_client is not None:
            self._started_client.close()
