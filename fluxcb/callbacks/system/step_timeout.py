"""`StepTimeout`: report what hangs if no step finishes within a time limit."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from time import monotonic
from typing import IO, Any

from fluxcb._declare.callback import Callback
from fluxcb._declare.events import EpochBegin, EpochEnd, Event, FitBegin, FitEnd, StepEnd, Trigger
from fluxcb._declare.handlers import on
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._errors import FluxcbError
from fluxcb._terminal import escape_block
from fluxcb.callbacks.arguments import choice, finite_number
from fluxcb.callbacks.system.hanging import COMPILING, innermost_of_fluxcb, is_in, stacks, what_runs
from fluxcb.logging.consoles import text_file

__all__ = ["StepTimeout"]


class StepTimeout(Callback):
    """Report what hangs if no step finishes within a time limit: a handler, the data, compilation, or the device.

    A background thread checks that a step finishes at least every `seconds`. If none does, it prints what the training
    is doing, with the stacks of all threads. It prints another line when the training continues. The time for tracing
    and compiling a step does not count. Between epochs, for example while `Trigger` handlers save, there is no limit by
    default.

    With `action="abort"`, the callback also interrupts the training, like pressing Ctrl-C twice: handlers, data sources
    and waits for the device raise `KeyboardInterrupt`, and the handlers of FitEnd run. If the training cannot be
    interrupted, for example because it runs a C function or does not run on the main thread, the process exits with
    code 1 after another `seconds`, because Python cannot stop a running XLA program. The callback cannot detect code
    that hangs while it holds the global interpreter lock (GIL).

    Args:
        seconds: Maximum time for a step, including its handlers (seconds).
        first: Maximum time until the first step of a phase has finished, including compilation (seconds). By default,
            this is `seconds` without compilation.
        between: Maximum time between two epochs, and at the beginning and the end of a fit (seconds); None for no
            limit.
        action: `"warn"` prints a report. `"abort"` also ends the fit or the process.
        file: Where to print; standard error by default.

    Access:
        None.

    Runs:
        FitBegin, EpochBegin, StepEnd, EpochEnd, FitEnd x Phase (host).
        Trigger x AbstractTrainingPhase (host).

    Cost:
        Reads the clock at each step. A thread checks four times within the shortest limit, and at least once per
        second. Fetches nothing. Does not shorten windows.

    Raises:
        DeclarationError: A limit is not a positive number, or `action` is not one of these values.
        FluxcbError: When a fit ends: it was aborted.

    Example:
        >>> import io, time
        >>> from fluxcb.callbacks import CustomCallback, StepTimeout
        >>> from fluxcb.events import StepEnd
        >>> from fluxcb.testing import testlearner
        >>> def save(learner):
        ...     time.sleep(0.3 if learner.progress.step == 4 else 0)
        >>> learner = testlearner(StepTimeout(0.1, file=(file := io.StringIO())), CustomCallback(save, StepEnd))
        >>> history = learner.fit(1)
        >>> print(file.getvalue().splitlines()[1])
          where: the handler CustomCallback(save, StepEnd).run at StepEnd x TrainingPhase

    Source:
        tensorpack, `SessionRunTimeout`.
    """

    main_thread = True

    def __init__(
        self,
        seconds: float,
        *,
        first: float | None = None,
        between: float | None = None,
        action: str = "warn",
        file: IO[str] | None = None,
    ) -> None:
        self.seconds = finite_number(seconds, "`seconds` of `StepTimeout`", above=0)
        for name, limit in (("first", first), ("between", between)):
            if limit is not None:
                finite_number(limit, f"`{name}` of `StepTimeout` (seconds)", above=0)
        self.first, self.between = first, between
        choice(action, ("warn", "abort"), "`action` of `StepTimeout`")
        self.action = action
        self.file = text_file(file, "StepTimeout")
        self._reset()

    def _reset(self) -> None:
        self._watchdog: _Watchdog | None = None
        self._in_fit = False
        self._epochs: list[type[Phase]] = []  # phases of the running epochs, from outermost to innermost
        self._known: set[type[Phase]] = set()  # phases with at least one finished step

    @on(FitBegin, Phase)
    def begin_fit(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Begin monitoring."""
        self._stop()
        self._in_fit = True
        self._record_progress(learner)

    @on(EpochBegin, Phase)
    def begin_epoch(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Begin monitoring steps."""
        self._epochs.append(type(phase))
        self._record_progress(learner)

    @on(StepEnd, Phase)
    def end_step(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Record that a step has finished."""
        watchdog = self._watchdog
        if watchdog is None:
            return  # a single step outside an epoch, in a hand-written loop
        if type(phase) not in self._known:
            self._known.add(type(phase))
            self._record_progress(learner)
        watchdog.last_progress = monotonic()

    @on(EpochEnd, Phase)
    def end_epoch(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Monitor the time between epochs. A hand-written loop is not monitored there."""
        self._epochs = self._epochs[:-1]
        if self._epochs or self._in_fit:
            self._record_progress(learner)
        else:
            self._stop()

    @on(Trigger, AbstractTrainingPhase)
    def trigger(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Record that the training makes progress."""
        self._record_progress(learner)

    @on(FitEnd, Phase)
    def end_fit(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """End monitoring.

        Raises:
            FluxcbError: The fit was aborted.
        """
        aborted = self._watchdog.aborted if self._watchdog is not None else ""
        self._stop()
        if aborted:
            raise FluxcbError(
                f"{self!r} aborted this fit.", where=aborted, why="no step finished within the time limit"
            )

    def _record_progress(self, learner: LearnerView) -> None:
        """Record that the training makes progress, and set the limit until the next progress."""
        limit, counts_compilation, problem = self.between, True, "no progress between epochs"
        if self._epochs:
            phase = self._epochs[-1]
            counts_compilation = self.first is not None and phase not in self._known
            limit = self.first if counts_compilation else self.seconds
            problem = f"no step of {phase.__name__} finished"
        if self._watchdog is None:
            self._watchdog = _Watchdog(self, learner.progress)
        self._watchdog.watch(limit, counts_compilation, problem)

    def _stop(self) -> None:
        watchdog = self._watchdog
        self._reset()
        if watchdog is not None:
            watchdog.stop()

    def __repr__(self) -> str:
        return f"StepTimeout({self.seconds!r})"


class _Watchdog:
    """The monitoring thread.

    Args:
        owner: The callback.
        progress: The progress of the training.

    Attributes:
        last_progress: Time of the last progress (s).
        aborted: What the training was doing when it was interrupted, or an empty string.
    """

    def __init__(self, owner: StepTimeout, progress: Any) -> None:
        self._owner, self._progress = owner, progress
        self._training_thread = threading.get_ident()
        self.last_progress = monotonic()
        self.aborted = ""
        self._watched: tuple[float | None, bool, str] = None, True, ""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._monitor, name="fluxcb-step-timeout", daemon=True)
        self._thread.start()

    def watch(self, limit: float | None, counts_compilation: bool, problem: str) -> None:
        """Record progress, and set the limit until the next progress.

        Args:
            limit: Maximum time until the next progress (s), or None.
            counts_compilation: Whether the limit includes compilation.
            problem: The problem to report if the limit is exceeded.
        """
        self._watched = limit, counts_compilation, problem
        self.last_progress = monotonic()

    def stop(self) -> None:
        """Stop the thread."""
        self._stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _monitor(self) -> None:
        reported: float | None = None  # the value of `last_progress` at the last report
        limits = [limit for limit in (self._owner.seconds, self._owner.first, self._owner.between) if limit is not None]
        while not self._stopped.wait(min(min(limits) / 4, 1.0)):
            last_progress, (limit, counts_compilation, problem) = self.last_progress, self._watched
            if reported is not None and last_progress != reported:
                self._print(f"fluxcb: {self._owner!r}: training continues after {last_progress - reported:.3g} s.")
                reported = None
            if limit is None or last_progress == reported:
                continue
            late = monotonic() - last_progress >= limit
            # The activity is also checked before the limit, because the time limit of a step begins again when its
            # compilation ends.
            activity = what_runs(self._training_thread, self._owner) if late or not counts_compilation else ""
            if activity == COMPILING and not counts_compilation:
                self.last_progress = monotonic()
            if not late or self.last_progress != last_progress:
                continue
            reported = last_progress
            position = f"epoch {self._progress.epoch}, after step {self._progress.step}"
            waited = monotonic() - last_progress
            self._print(
                f"fluxcb: {self._owner!r}: {problem} for {waited:.3g} s (limit {limit:g} s), in {position}.\n"
                f"  where: {activity}\n\n{stacks()}"
            )
            if self._owner.action == "abort":
                self._abort(f"{activity}, {position}")

    def _abort(self, activity: str) -> None:
        """Interrupt the training, or end the process if the training cannot be interrupted."""
        hanging = innermost_of_fluxcb(self._training_thread)
        self.aborted = activity
        if self._training_thread == threading.main_thread().ident:
            # The first Ctrl-C ends the loop after the current steps, and the second one ends it immediately.
            for _ in range(2):
                signal.pthread_kill(self._training_thread, signal.SIGINT)
                if self._stopped.wait(0.5):
                    return
        # If the training has left this call, the interrupt worked, and the fit is ending.
        if not self._stopped.wait(self._owner.seconds) and is_in(self._training_thread, hanging):
            self._print(f"fluxcb: {self._owner!r}: the training cannot be interrupted, so the process exits.")
            os._exit(1)

    def _print(self, text: str) -> None:
        file = self._owner.file if self._owner.file is not None else sys.stderr
        with contextlib.suppress(OSError, ValueError):  # an error of the file must not end the monitoring
            print(escape_block(text), file=file, flush=True)
