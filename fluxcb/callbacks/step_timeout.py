"""`StepTimeout`: say what hangs when no step is finished for too long."""

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
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._errors import DeclarationError, FluxcbError
from fluxcb.callbacks.arguments import number_above
from fluxcb.callbacks.hanging import COMPILING, innermost_of_fluxcb, is_in, stacks, what_runs
from fluxcb.logging.consoles import text_file

__all__ = ["StepTimeout"]


class StepTimeout(Callback):
    """Watch that steps go on, and say what hangs if they do not: a handler, the data, compiling, or the device.

    A thread looks whether a step is finished at least every `seconds`. If none is, it prints what the training is at,
    with the stacks of all threads, and once more when it goes on. Time in which a step is traced or compiled does not
    count, and between epochs, where `Trigger` saves and draws, there is no limit unless you give one.

    With `action="abort"`, it then interrupts the training as two Ctrl-C do: handlers, data sources and waits for the
    device raise `KeyboardInterrupt`, and the handlers of FitEnd run. What cannot be interrupted so (a C function, a fit
    that does not run in the main thread) ends the process with exit code 1 after another `seconds`: nothing in Python
    can stop a running XLA program. Nobody sees code that hangs while it holds Python's lock, this thread neither.

    Args:
        seconds: How long a step may take, with its handlers (seconds).
        first: How long it may take until the first step of a phase is finished, with compiling (seconds); by default
            `seconds`, without compiling.
        between: How long it may take between two epochs, and at a fit's ends (seconds); None for no limit.
        action: `"warn"` prints; `"abort"` also ends the fit, or the process.
        file: Where to print; standard error by default.

    Access:
        Nothing.

    Runs:
        FitBegin, EpochBegin, StepEnd, EpochEnd, FitEnd x Phase (host).
        Trigger x AbstractTrainingPhase (host).

    Cost:
        Reads the clock at each step; a thread looks four times within the shortest limit, at least once a second.
        Fetches nothing, and bounds no window.

    Raises:
        DeclarationError: A limit is no number above 0, or `action` is none of these.
        FluxcbError: At the end of a fit that was aborted.

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
        self.seconds = number_above(0, seconds, "`seconds` of `StepTimeout`")
        for name, limit in (("first", first), ("between", between)):
            if limit is not None:
                number_above(0, limit, f"`{name}` of `StepTimeout` (seconds)")
        self.first, self.between = first, between
        if action not in ("warn", "abort"):
            raise DeclarationError(
                f'`action` of `StepTimeout` is "warn" or "abort", not {action!r}.', fix='write `action="warn"`'
            )
        self.action = action
        self.file = text_file(file, "StepTimeout")
        self._reset()

    def _reset(self) -> None:
        self._watchdog: _Watchdog | None = None
        self._in_fit = False
        self._epochs: list[type[Phase]] = []  # that run, one inside the other
        self._known: set[type[Phase]] = set()  # phases of which a step has been finished

    @on(FitBegin, Phase)
    def begin_fit(self, event: Event, phase: Phase, learner: Any) -> None:
        """Begin to watch."""
        self._stop()
        self._in_fit = True
        self._note(learner)

    @on(EpochBegin, Phase)
    def begin_epoch(self, event: Event, phase: Phase, learner: Any) -> None:
        """Watch steps."""
        self._epochs.append(type(phase))
        self._note(learner)

    @on(StepEnd, Phase)
    def end_step(self, event: Event, phase: Phase, learner: Any) -> None:
        """Note that a step is finished."""
        watchdog = self._watchdog
        if watchdog is None:
            return  # a step that was run by hand
        if type(phase) not in self._known:
            self._known.add(type(phase))
            self._note(learner)
        watchdog.noted = monotonic()

    @on(EpochEnd, Phase)
    def end_epoch(self, event: Event, phase: Phase, learner: Any) -> None:
        """Watch what happens between epochs; a loop written by hand is not watched there."""
        self._epochs = self._epochs[:-1]
        if self._epochs or self._in_fit:
            self._note(learner)
        else:
            self._stop()

    @on(Trigger, AbstractTrainingPhase)
    def trigger(self, event: Event, phase: Phase, learner: Any) -> None:
        """Note that the training goes on."""
        self._note(learner)

    @on(FitEnd, Phase)
    def end_fit(self, event: Event, phase: Phase, learner: Any) -> None:
        """Cease to watch.

        Raises:
            FluxcbError: The fit was aborted.
        """
        aborted = self._watchdog.aborted if self._watchdog is not None else ""
        self._stop()
        if aborted:
            raise FluxcbError(f"{self!r} has ended this fit.", where=aborted, why="no step was finished for too long")

    def _note(self, learner: Any) -> None:
        """Note that the training goes on, and which limit holds from now on."""
        limit, compiles, what = self.between, True, "nothing has happened between epochs"
        if self._epochs:
            phase = self._epochs[-1]
            compiles = self.first is not None and phase not in self._known
            limit = self.first if compiles else self.seconds
            what = f"no step of {phase.__name__} has been finished"
        if self._watchdog is None:
            self._watchdog = _Watchdog(self, learner.progress)
        self._watchdog.watch(limit, compiles, what)

    def _stop(self) -> None:
        watchdog = self._watchdog
        self._reset()
        if watchdog is not None:
            watchdog.stop()

    def __repr__(self) -> str:
        return f"StepTimeout({self.seconds!r})"


class _Watchdog:
    """The thread that looks.

    Attributes:
        noted: When the training was last seen to go on (s).
        aborted: What it was at when it was interrupted, or an empty string.
    """

    def __init__(self, owner: StepTimeout, progress: Any) -> None:
        self._owner, self._progress = owner, progress
        self._trains = threading.get_ident()
        self.noted = monotonic()
        self.aborted = ""
        self._watched: tuple[float | None, bool, str] = None, True, ""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._look, name="fluxcb-step-timeout", daemon=True)
        self._thread.start()

    def watch(self, limit: float | None, compiles: bool, what: str) -> None:
        """Note that the training goes on.

        Args:
            limit: How long it may take until it is noted again (s), or None.
            compiles: Whether compiling counts.
            what: What has not happened then.
        """
        self._watched = limit, compiles, what
        self.noted = monotonic()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _look(self) -> None:
        told: float | None = None  # `noted` at the time of the last alarm
        limits = [limit for limit in (self._owner.seconds, self._owner.first, self._owner.between) if limit is not None]
        while not self._stopped.wait(min(min(limits) / 4, 1.0)):
            noted, (limit, compiles, what) = self.noted, self._watched
            if told is not None and noted != told:
                self._print(f"fluxcb: {self._owner!r}: it goes on, after {noted - told:.3g} s.")
                told = None
            if limit is None or noted == told:
                continue
            late = monotonic() - noted >= limit
            # It is looked at each time, for a step that is compiled may take long afterwards.
            at = what_runs(self._trains, self._owner) if late or not compiles else ""
            if at == COMPILING and not compiles:
                self.noted = monotonic()
            if not late or self.noted != noted:
                continue
            told = noted
            place = f"epoch {self._progress.epoch}, after step {self._progress.step}"
            self._print(
                f"fluxcb: {self._owner!r}: {what} for {monotonic() - noted:.3g} s (limit {limit:g} s), in {place}.\n"
                f"  where: {at}\n\n{stacks()}"
            )
            if self._owner.action == "abort":
                self._abort(f"{at}, {place}")

    def _abort(self, at: str) -> None:
        """Interrupt the training; if that does not help, end the process."""
        hanging = innermost_of_fluxcb(self._trains)
        self.aborted = at
        if self._trains == threading.main_thread().ident:
            # The first Ctrl-C asks the loop to end after the steps at hand, the second one does not wait.
            for _ in range(2):
                signal.pthread_kill(self._trains, signal.SIGINT)
                if self._stopped.wait(0.5):
                    return
        if not self._stopped.wait(self._owner.seconds) and is_in(self._trains, hanging):
            self._print(f"fluxcb: {self._owner!r}: it cannot be interrupted, so the process ends.")
            os._exit(1)

    def _print(self, text: str) -> None:
        file = self._owner.file if self._owner.file is not None else sys.stderr
        with contextlib.suppress(OSError, ValueError):  # a file that is closed or full must not end the watch
            print(text, file=file, flush=True)
