"""`StartProcOrThread`: threads and processes that work beside the training, started and stopped with it."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fluxcb._declare.callback import Callback
from fluxcb._declare.events import Event, FitBegin, FitEnd
from fluxcb._declare.handlers import on
from fluxcb._declare.phases import Phase
from fluxcb._declare.signatures import accepts
from fluxcb._errors import DeclarationError
from fluxcb.callbacks.arguments import number_above
from fluxcb.callbacks.functions import name_of

__all__ = ["StartProcOrThread"]


class StartProcOrThread(Callback):
    """Start threads or processes before training, and stop them after it, also after an error.

    What is started is a thread with a method `stop()`, a `multiprocessing.Process`, a `subprocess.Popen`, or a function
    that makes one of these. A thread or process starts once, so a Learner that is fitted twice needs functions: each
    fit then has fresh ones. Threads are asked to `stop()` and waited for; processes are terminated, and killed if that
    does not end them in time. Ctrl-C goes to the training alone.

    JAX has threads of its own, so make processes with `multiprocessing.get_context("spawn")`: forking may hang.

    Args:
        startable: A thread, a process, a function that returns one, or a list of these; they are started in order, and
            stopped in the opposite order.
        stop_at_last: Whether to stop them after training. If not, those still running at the next fit go on.
        timeout: How long each may take to end when it is told to (seconds).

    Access:
        Nothing.

    Runs:
        FitBegin x Phase (host, on the thread that called `fit`); FitEnd x Phase (host, there, too).

    Cost:
        Nothing per step.

    Raises:
        DeclarationError: Something that cannot be started, or could not be stopped; at `fit`, one that has been
            started before.
        RuntimeError: At the end of `fit`, a thread does not end in time.

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
        tensorpack, `StartProcOrThread`; there, a thread without `stop()` is left running, and so is what was started
        before something failed to start.
    """

    main_thread = True  # handlers of signals are set there

    def __init__(self, startable: Any, stop_at_last: bool = True, *, timeout: float = 5.0) -> None:
        items = list(startable) if isinstance(startable, list | tuple) else [startable]
        if not items:
            raise DeclarationError("`StartProcOrThread` got an empty list.", fix="give what is to be started")
        if not isinstance(stop_at_last, bool):
            raise DeclarationError(
                f"`stop_at_last` of `StartProcOrThread` must be True or False, not {stop_at_last!r}."
            )
        self.timeout = number_above(0, timeout, "`timeout` of `StartProcOrThread` (seconds)")
        self.stop_at_last = stop_at_last
        for item in items:
            if not _is_factory(item):
                self._check(item)
            elif not accepts(item, 0):
                raise DeclarationError(
                    f"`{name_of(item)}`, given to `StartProcOrThread`, must be callable without arguments.",
                    why="each fit calls it for a fresh thread or process",
                    fix=f"write `lambda: {name_of(item)}(...)`",
                )
        self.startable: Sequence[Any] = items
        self._running: dict[int, Any] = {}

    def _check(self, item: Any) -> None:
        if isinstance(item, subprocess.Popen):
            raise DeclarationError(
                f"`StartProcOrThread` was given {item!r}, which runs already.",
                why="a `Popen` starts when it is made",
                fix="give a function: `StartProcOrThread(lambda: subprocess.Popen([...]))`",
            )
        if not (callable(getattr(item, "start", None)) and callable(getattr(item, "is_alive", None))):
            raise DeclarationError(
                f"`StartProcOrThread` starts threads, processes and functions that make them, not {item!r}.",
                why="what is started needs `start()` and `is_alive()`",
                fix="give a `threading.Thread`, a `multiprocessing.Process`, or `lambda: subprocess.Popen([...])`",
            )
        if self.stop_at_last and not (hasattr(item, "terminate") or callable(getattr(item, "stop", None))):
            raise DeclarationError(
                f"`StartProcOrThread` could not stop {_named(item)}: it has no method `stop()`.",
                why="a thread ends by itself only, so it would be left behind",
                fix=[
                    "derive it from `threading.Thread`, with a `stop()` that makes its `run()` return",
                    "let it run on: `StartProcOrThread(..., stop_at_last=False)`",
                ],
            )

    @on(FitBegin)
    def start(self, event: Event, phase: Phase, learner: Any) -> None:
        """Start what is not running; if one fails, stop those that were started."""
        try:
            with _without_interrupts():
                for place, item in enumerate(self.startable):
                    if place not in self._running or not _alive(self._running[place]):
                        self._start(place, item)
        except BaseException:
            self._stop_all()
            raise

    def _start(self, place: int, item: Any) -> None:
        made = item
        if _is_factory(item):
            made = item()
            if isinstance(made, subprocess.Popen):
                self._running[place] = made
                return
            self._check(made)
        if _was_started(made):
            raise DeclarationError(
                f"{_named(made)} has been started before.",
                why="a thread or a process starts once, and each fit starts it",
                fix="give a function that makes a fresh one: `StartProcOrThread(lambda: Thread(...))`",
            )
        made.start()
        self._running[place] = made

    @on(FitEnd)
    def stop(self, event: Event, phase: Phase, learner: Any) -> None:
        """Stop what is running, the last one first."""
        if self.stop_at_last:
            self._stop_all()

    def _stop_all(self) -> None:
        problems: list[str] = []
        for place in sorted(self._running, reverse=True):
            item = self._running.pop(place)
            try:
                if not _ended(item, self.timeout):
                    problems.append(f"{_named(item)} was told to stop, and still runs {self.timeout:g} s later")
            except Exception as error:  # the others are stopped all the same
                problems.append(f"{_named(item)} could not be stopped: {error!r}")
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
    """Tell something to end, and return whether it does."""
    if not _alive(item):
        return True
    ways: list[Callable[[], None]] = [item.terminate, item.kill] if hasattr(item, "terminate") else [item.stop]
    for end in ways:
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


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Ignore Ctrl-C; a process that is started meanwhile ignores it, too."""
    if threading.current_thread() is not threading.main_thread():  # nobody else may say who gets signals
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
