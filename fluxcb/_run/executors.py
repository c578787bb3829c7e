"""Executors: where host handlers run that the callback graph lets run at the same time."""

from __future__ import annotations

import concurrent.futures
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

from fluxcb._declare.extras import library
from fluxcb._declare.schedules import positive
from fluxcb._errors import DeclarationError

__all__ = ["DaskExecutor", "Executor", "Pool", "SerialExecutor", "ThreadExecutor"]


class Pool(Protocol):
    """Threads of this process that take jobs."""

    def submit(self, job: Callable[[], None], /) -> concurrent.futures.Future[Any]:
        """Have a job done."""
        ...

    def shutdown(self) -> None:
        """Wait for the jobs, and end the threads."""
        ...


class Executor(ABC):
    """Where host handlers run; give one to a Learner. Its results are the same with each of them, bit for bit."""

    @abstractmethod
    def open(self) -> Pool | None:
        """Return threads for one fit, or None if everything runs where `fit` was called."""


class SerialExecutor(Executor):
    """Run handlers one after the other, on the thread that called `fit`: the default.

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

    Handlers that share what one of them writes run one after the other, in the order they would have without threads,
    and so do those that may cancel. A moment is over when all its handlers are. The threads live as long as a fit, and
    start when two handlers can run at the same time for the first time.

    Args:
        workers: Threads at most.

    Raises:
        DeclarationError: `workers` is not positive.

    Example:
        >>> from fluxcb.testing import EventLog, testlearner
        >>> learner = testlearner(EventLog(), EventLog(), executor=ThreadExecutor(2))
        >>> history = learner.fit(1)
        >>> [len(log.entries) for log in learner.callbacks]
        [20, 20]
    """

    def __init__(self, workers: int = 4) -> None:
        self.workers = positive(workers, "`workers` of `ThreadExecutor`")

    def open(self) -> Pool:
        """Return a pool of threads."""
        return _Threads(self.workers, thread_name_prefix="fluxcb")

    def __repr__(self) -> str:
        return f"ThreadExecutor({self.workers})"


class _Threads(concurrent.futures.ThreadPoolExecutor):
    def shutdown(self, wait: bool = True, *, cancel_futures: bool = True) -> None:
        # What has not begun when a fit ends is never to begin.
        super().shutdown(wait, cancel_futures=cancel_futures)


class DaskExecutor(Executor):
    """Run handlers of one moment at the same time, like `ThreadExecutor`, on the threads of a Dask client.

    Handlers share memory, so the client's workers must be threads of this process; the dashboard then shows them.

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
        return list(client.scheduler_info(n_workers=-1)["workers"])
    except (AttributeError, TypeError):
        return []


_jobs: dict[int, Callable[[], None]] = {}
_numbers = itertools.count()


def _do(number: int) -> None:
    _jobs.pop(number)()


class _DaskThreads:
    """Jobs go by number: Dask pickles what it is given, and a handler's surroundings cannot be pickled."""

    def __init__(self, client: Any) -> None:
        self._own: Any = None
        if client is None:
            distributed = library("distributed", extra="dask", owner="DaskExecutor")
            client = self._own = distributed.Client(processes=False, dashboard_address=None)  # a dashboard opens a port
        self._executor = client.get_executor(pure=False)

    def submit(self, job: Callable[[], None], /) -> concurrent.futures.Future[Any]:
        number = next(_numbers)
        _jobs[number] = job
        return self._executor.submit(_do, number)

    def shutdown(self) -> None:
        self._executor.shutdown()
        if self._own is not None:
            self._own.close()
