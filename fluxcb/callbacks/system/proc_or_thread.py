"""`StartProcOrThread`: start threads and processes before training, and stop them after it."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Callable, Sequence
from typing import Any

from fluxcb._declare.callback import Callback
from fluxcb._declare.events import Event, FitBegin, FitEnd
from fluxcb._declare.handlers import on
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import Phase
from fluxcb._declare.signatures import accepts
from fluxcb._errors import DeclarationError
from fluxcb._interruptions import ctrl_c_handled_by
from fluxcb.callbacks.arguments import finite_number, flag, name_of

__all__ = ["StartProcOrThread"]


class StartProcOrThread(Callback):
    """Start threads or processes before training, and stop them after it, even if training fails.

    An item can be a thread with a method `stop()`, a `multiprocessing.Process`, or a function that returns a thread, a
    process or a `subprocess.Popen`. A thread or process can only be started once. If you call `fit` more than once,
    pass functions, so that each fit creates new ones. To stop a thread, the callback calls `stop()` and waits for it.
    To stop a process, the callback terminates it, and kills it if it does not end in time. Ctrl-C only affects the
    training.

    Because JAX uses threads, create processes with `multiprocessing.get_context("spawn")`. A forked process may hang.

    Args:
        startable: A thread, a process, a function that returns one, or a list of these. They are started in this order
            and stopped in reverse order.
        stop_at_last: Whether to stop them after training. Otherwise, the next fit does not restart those that are still
            running.
        timeout: Time for each one to end after it is told to stop (seconds).

    Access:
        None.

    Runs:
        FitBegin, FitEnd x Phase (host, on the thread that called `fit`).

    Cost:
        None per step.

    Raises:
        DeclarationError: An item cannot be started or cannot be stopped. When a fit begins: an item has already been
            started.
        RuntimeError: When a fit ends: a thread or process does not end in time.

    Example:
        >>> import threading
        >>> from fluxcb.callbacks import StartProcOrThread
        >>> from fluxcb.testing import testlearner
        >>> class Watch(threading.Thread):
        ...     def __init__(self):
        ...         super().__init__(name="watch")
        ...         self.done = threading.Event()
        ...
        ...     def run(self):
        ...         self.done.wait()
        ...         print("stopped")
        ...
        ...     def stop(self):
        ...         self.done.set()
        >>> history = testlearner(StartProcOrThread(Watch)).fit(1)
        stopped

    Source:
        tensorpack, `StartProcOrThread`, which does not stop threads without `stop()`, or the other items if one fails
        to start.
    """

    main_thread = True  # signal handlers can only be set on the main thread

    def __init__(self, startable: Any, stop_at_last: bool = True, *, timeout: float = 5.0) -> None:
        items = list(startable) if isinstance(startable, list | tuple) else [startable]
        if not items:
            raise DeclarationError(
                "`StartProcOrThread` received an empty list.",
                fix="pass at least one thread or process, or a function that returns one",
            )
        flag(stop_at_last, "`stop_at_last` of `StartProcOrThread`")
        self.timeout = finite_number(timeout, "`timeout` of `StartProcOrThread` (seconds)", above=0)
        self.stop_at_last = stop_at_last
        for item in items:
            if not _is_factory(item):
                self._check(item)
            elif not accepts(item, 0):
                raise DeclarationError(
                    f"`{name_of(item)}`, an argument of `StartProcOrThread`, must be callable without arguments.",
                    why="each fit calls it to create a new thread or process",
                    fix=f"write `lambda: {name_of(item)}(...)`",
                )
        self.startable: Sequence[Any] = items
        self._running: dict[int, Any] = {}

    def _check(self, item: Any) -> None:
        if isinstance(item, subprocess.Popen):
            raise DeclarationError(
                f"`StartProcOrThread` received {item!r}, which is already running.",
                why="a `Popen` starts when it is created",
                fix="pass a function: `StartProcOrThread(lambda: subprocess.Popen([...]))`",
            )
        if not (callable(getattr(item, "start", None)) and callable(getattr(item, "is_alive", None))):
            raise DeclarationError(
                f"`StartProcOrThread` accepts threads, processes and functions that return them, not {item!r}.",
                why="a thread or process has the methods `start()` and `is_alive()`",
                fix="pass a `threading.Thread`, a `multiprocessing.Process`, or `lambda: subprocess.Popen([...])`",
            )
        if self.stop_at_last and not (hasattr(item, "terminate") or callable(getattr(item, "stop", None))):
            raise DeclarationError(
                f"`StartProcOrThread` cannot stop {_named(item)}, because it has no method `stop()`.",
                why="a thread cannot be ended from outside, so it would outlive the fit",
                fix=[
                    "write a subclass of `threading.Thread` whose method `stop` makes its `run` return",
                    "let it run after the fit: `StartProcOrThread(..., stop_at_last=False)`",
                ],
            )

    @on(FitBegin)
    def start(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Start the items that are not running. If one fails to start, stop all of them."""
        try:
            # Processes inherit this setting. Ctrl-C then reaches only the training, which stops them in order.
            with ctrl_c_handled_by(signal.SIG_IGN):
                for index, item in enumerate(self.startable):
                    if index not in self._running or not _alive(self._running[index]):
                        self._start(index, item)
        except BaseException:
            self._stop_all()
            raise

    def _start(self, index: int, item: Any) -> None:
        worker = item
        if _is_factory(item):
            worker = item()
            if isinstance(worker, subprocess.Popen):  # a `Popen` starts when it is created
                self._running[index] = worker
                return
            self._check(worker)
        if _was_started(worker):
            raise DeclarationError(
                f"{_named(worker)} has already been started.",
                why="a thread or process can only be started once, but each fit starts it",
                fix="pass a function that returns a new one: `StartProcOrThread(lambda: Thread(...))`",
            )
        worker.start()
        self._running[index] = worker

    @on(FitEnd)
    def stop(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Stop the running items in reverse order."""
        if self.stop_at_last:
            self._stop_all()

    def _stop_all(self) -> None:
        problems: list[str] = []
        for index in sorted(self._running, reverse=True):
            item = self._running.pop(index)
            try:
                if not _ended(item, self.timeout):
                    problems.append(f"{_named(item)} is still running {self.timeout:g} s after it was told to stop")
            except Exception as error:  # the other items must still be stopped
                problems.append(f"cannot stop {_named(item)}: {error!r}")
        if problems:
            raise RuntimeError("; ".join(problems))

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_running": {}}

    def __repr__(self) -> str:
        shown = ", ".join(name_of(item) if _is_factory(item) else _named(item) for item in self.startable)
        return f"StartProcOrThread({shown})"


def _is_factory(item: Any) -> bool:
    return isinstance(item, type) or (callable(item) and not hasattr(item, "is_alive"))


def _was_started(item: Any) -> bool:
    return getattr(item, "ident", None) is not None  # the number of a thread, or of a process


def _alive(item: Any) -> bool:
    return item.poll() is None if isinstance(item, subprocess.Popen) else item.is_alive()


def _ended(item: Any, timeout: float) -> bool:
    """Stop a thread or process, and return whether it ended in time."""
    if not _alive(item):
        return True
    attempts: list[Callable[[], None]] = [item.terminate, item.kill] if hasattr(item, "terminate") else [item.stop]
    for end in attempts:
        end()
        if isinstance(item, subprocess.Popen):
            with contextlib.suppress(subprocess.TimeoutExpired):
                item.wait(timeout)
        else:
            item.join(timeout)
        if not _alive(item):
            return True
    return False


def _named(item: Any) -> str:
    if isinstance(item, subprocess.Popen):
        return f"process {item.pid}"
    return f"{type(item).__name__} `{getattr(item, 'name', repr(item))}`"
