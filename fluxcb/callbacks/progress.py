"""`ProgressBar`: where a training stands, how fast it goes, and its loss."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import IO, Any

from fluxcb._declare.access import Read
from fluxcb._declare.callback import Callback
from fluxcb._declare.events import EpochBegin, EpochEnd, Event, FitBegin, FitEnd, StepEnd
from fluxcb._declare.handlers import on
from fluxcb._declare.phases import AbstractTrainingPhase, AbstractValidationPhase, Phase
from fluxcb._declare.schedules import AtWindowEnds
from fluxcb._errors import DeclarationError
from fluxcb.callbacks.console import console_for, is_plain, print_line
from fluxcb.logging.consoles import text_file

__all__ = ["ProgressBar"]

_PLAIN_SECONDS = 10.0


class ProgressBar(Callback):
    """Show epoch, steps, loss and steps per second while a phase runs.

    On a terminal it is a live bar, which `MetricsPrinter` and `print` write above, and which is gone when the fit ends.
    Elsewhere (files, pipes, notebooks) it is a line every 10 s and at the end of each training epoch; other phases get
    one at their end if they took longer than that.

    Args:
        file: Where to print; standard output by default.
        interval: Time between two drawings of the bar (seconds).

    Access:
        step.loss: Read.

    Runs:
        FitBegin, EpochBegin, EpochEnd, FitEnd x Phase (host).
        StepEnd x AbstractTrainingPhase, AbstractValidationPhase (host, at the ends of windows).
        StepEnd x Phase (host, at the ends of windows): without a loss, for phases that may compute none.

    Cost:
        Fetches the loss, and looks at it once an interval and at the end of an epoch. Bounds no window.

    Raises:
        DeclarationError: `interval` is not above 0.

    Example:
        >>> import io, jax.numpy as jnp, optax, fluxcb
        >>> from fluxcb.callbacks import ProgressBar
        >>> learner = fluxcb.Learner.from_loss(
        ...     {"w": jnp.ones(())},
        ...     lambda params, batch, key: jnp.mean(params["w"] * batch),
        ...     optax.sgd(0.1),
        ...     data=[jnp.ones(2)] * 3,
        ...     callbacks=[ProgressBar(file := io.StringIO())],
        ...     default_callbacks=False,
        ... )
        >>> history = learner.fit(1)
        >>> print(file.getvalue().rstrip())
        epoch 1/1 training: 3/3 steps, loss 0.8000, ... steps/s

    Source:
        tensorpack, `ProgressBar`; FluxTraining.jl, `ProgressPrinter`.
    """

    chief_only = True  # one process prints

    def __init__(self, file: IO[str] | None = None, interval: float = 0.1) -> None:
        self.file = text_file(file, "ProgressBar")
        if isinstance(interval, bool) or not isinstance(interval, int | float) or not 0 < interval < math.inf:
            raise DeclarationError(
                f"The `interval` of `ProgressBar` (seconds) must be a number above 0, not {interval!r}.",
                fix="give a positive number of seconds: `ProgressBar(interval=0.1)`",
            )
        self.interval = interval
        self._display: _Display | None = None

    def stateaccess(self) -> Mapping[str, Any]:
        """Return what it reads and writes; see the class."""
        return {"step": {"loss": Read()}}

    @on(FitBegin, Phase, access={})
    def begin_fit(self, event: Event, phase: Phase, learner: Any) -> None:
        """Begin the display of a fit."""
        self._close()
        self._display = self._open(of_fit=True)

    @on(EpochBegin, Phase, access={})
    def begin_epoch(self, event: Event, phase: Phase, learner: Any) -> None:
        """Begin a bar; loops written by hand have one display per epoch."""
        if self._display is None:
            self._display = self._open(of_fit=False)
        name, progress = type(phase).name, learner.progress
        self._display.begin(name, _title(phase, progress), progress.steps_in_epoch, 0)

    @on(StepEnd, AbstractTrainingPhase | AbstractValidationPhase, when=AtWindowEnds())
    def show(self, event: Event, phase: Phase, learner: Any) -> None:
        """Show the step and its loss."""
        display = self._begun(phase, learner.progress)
        if display is not None and display.looks(learner.progress.step_in_epoch, self.interval):
            display.update(learner.progress.step_in_epoch, float(learner.step.loss))

    @on(StepEnd, Phase, access={}, when=AtWindowEnds())
    def show_step(self, event: Event, phase: Phase, learner: Any) -> None:
        """Show the step of a phase that may have no loss."""
        display = self._begun(phase, learner.progress)
        if display is not None and display.looks(learner.progress.step_in_epoch, self.interval):
            display.update(learner.progress.step_in_epoch, None)

    @on(EpochEnd, Phase, access={})
    def end_epoch(self, event: Event, phase: Phase, learner: Any) -> None:
        """End a bar."""
        display = self._begun(phase, learner.progress)
        if display is not None:
            display.end(learner.progress.step_in_epoch, always=type(phase).trains)
            if not display.of_fit:
                self._close()

    @on(FitEnd, Phase, access={})
    def end_fit(self, event: Event, phase: Phase, learner: Any) -> None:
        """Close the display, whatever happened."""
        self._close()

    def _begun(self, phase: Phase, progress: Any) -> _Display | None:
        """Return the display; in an epoch that a resumed fit goes on with, whose EpochBegin is past, with its bar."""
        if self._display is not None and not self._display.title:
            steps, done = progress.steps_in_epoch, progress.step_in_epoch
            self._display.begin(type(phase).name, _title(phase, progress), steps, done)
        return self._display

    def _open(self, *, of_fit: bool) -> _Display:
        console = console_for(self.file)
        return _Lines(console, of_fit) if is_plain(console) else _Bar(console, of_fit, self.interval)

    def _close(self) -> None:
        if self._display is not None:
            self._display.close()
            self._display = None


def _title(phase: Phase, progress: Any) -> str:
    of = f"/{progress.epochs}" if progress.epochs else ""
    return f"epoch {progress.epoch}{of} {type(phase).name}"


class _Display(ABC):
    """What is shown of the epoch at hand."""

    def __init__(self, console: Any, of_fit: bool) -> None:
        self.console = console
        self.of_fit = of_fit
        self.name = self.title = ""
        self.total = self.done = 0
        self.loss: float | None = None
        self.began = self.looked = time.monotonic()
        self._lengths: dict[str, int] = {}  # steps of the last epoch, by phase

    def begin(self, name: str, title: str, total: int, done: int) -> None:
        self.name, self.title, self.total, self.done, self.loss = name, title, total, done, None
        self.began = time.monotonic()

    def looks(self, steps: int, interval: float) -> bool:
        """Tell whether to look: once an interval, and at what may be the last step of the epoch."""
        # To look costs a read of the device where steps are single calls.
        now, expected = time.monotonic(), self.total or self._lengths.get(self.name)
        if now - self.looked < interval and expected is not None and steps != expected:
            return False
        self.looked = now
        return True

    def update(self, steps: int, loss: float | None) -> None:
        self.loss = loss
        self.show(steps)

    def end(self, steps: int, *, always: bool) -> None:
        """Note how long the epoch was, and show it, if it is to be shown in any case or if it is time."""
        self._lengths[self.name] = steps
        if not 0 < self.done == steps:  # all its steps were run before the fit was resumed
            self.finish(steps, always=always)

    def finish(self, steps: int, *, always: bool) -> None:
        self.show(steps)

    @abstractmethod
    def show(self, steps: int) -> None: ...

    def rate(self, steps: int, now: float) -> str:
        return f"{(steps - self.done) / max(now - self.began, 1e-9):,.0f} steps/s"

    @abstractmethod
    def close(self) -> None:
        """Leave the terminal as it was."""


class _Lines(_Display):
    """Plain lines, now and then."""

    shown = 0.0

    def begin(self, name: str, title: str, total: int, done: int) -> None:
        super().begin(name, title, total, done)
        self.shown = self.began

    def close(self) -> None:
        """Do nothing: lines leave nothing open."""

    def show(self, steps: int) -> None:
        if time.monotonic() - self.shown >= _PLAIN_SECONDS:
            self._print(steps)

    def finish(self, steps: int, *, always: bool) -> None:
        if always or time.monotonic() - self.began >= _PLAIN_SECONDS:
            self._print(steps)

    def _print(self, steps: int) -> None:
        self.shown = time.monotonic()
        of = f"/{self.total}" if self.total else ""
        loss = f", loss {self.loss:.4f}" if self.loss is not None else ""
        print_line(self.console, f"{self.title}: {steps}{of} steps{loss}, {self.rate(steps, self.shown)}")


class _Bar(_Display):
    """A live bar at the foot of the terminal."""

    def __init__(self, console: Any, of_fit: bool, interval: float) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        super().__init__(console, of_fit)
        self.interval = interval
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            auto_refresh=False,  # no thread: the handler refreshes, at most once an interval
        )
        self._progress.start()
        self._task: Any = None
        self._losses: dict[str, str] = {}
        self._drawn = -math.inf

    def begin(self, name: str, title: str, total: int, done: int) -> None:
        super().begin(name, title, total, done)
        if self._task is not None:
            self._progress.remove_task(self._task)
        # Until there is a loss, that of the phase's epoch before stands there: short epochs would never show one.
        loss = self._losses.get(name, "")
        self._task = self._progress.add_task(title, total=total or None, loss=loss, rate="")

    def show(self, steps: int) -> None:
        if self.loss is not None:
            self._losses[self.name] = f"loss {self.loss:.4f}"
        now = time.monotonic()
        if now - self._drawn < self.interval:  # epochs of milliseconds would draw more than they train
            return
        self._drawn = now
        loss = self._losses.get(self.name, "")
        self._progress.update(self._task, completed=steps, loss=loss, rate=self.rate(steps, now), refresh=True)

    def close(self) -> None:
        self._progress.stop()
