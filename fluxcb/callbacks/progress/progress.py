"""`ProgressBar`: show the progress, the speed and the loss of a fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import IO, Any

from fluxcb._declare.access import Read
from fluxcb._declare.callback import Callback, unwrap
from fluxcb._declare.events import EpochBegin, EpochEnd, Event, FitBegin, FitEnd, StepEnd
from fluxcb._declare.handlers import on
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import AbstractTrainingPhase, AbstractValidationPhase, Phase
from fluxcb._declare.schedules import AtWindowEnds
from fluxcb.callbacks.arguments import finite_number
from fluxcb.callbacks.progress.bars import Display, open_display
from fluxcb.callbacks.progress.console import console_for
from fluxcb.callbacks.progress.printer import MetricsPrinter
from fluxcb.logging.consoles import text_file

__all__ = ["ProgressBar"]

_LOSS = {"step": {"loss": Read()}}


class ProgressBar(Callback):
    """Show epoch, steps, loss and steps per second while a phase runs.

    In a terminal and in a notebook, this is a live bar, which disappears when the fit ends. In a terminal,
    `MetricsPrinter` and `print` write above the bar. In a notebook, the bar and the table of `MetricsPrinter` share one
    output, which is updated in place.

    In a file or a pipe, a line is printed every 10 s. A line is also printed at the end of each training epoch, and at
    the end of any other epoch that took more than 10 s, unless a `MetricsPrinter` prints a row to the same file.

    While the step of a phase is being compiled, the bar shows `compiling`, and a file or a pipe gets a line.

    Args:
        file: Where to print; standard output by default.
        interval: Time between two drawings of the bar (seconds).

    The bar of an `InTurn` shows the steps of its first phase.

    Access:
        step.loss: Read.
        callbacks: Read.

    Runs:
        FitBegin, EpochBegin, EpochEnd, FitEnd x Phase (host).
        StepEnd x AbstractTrainingPhase, AbstractValidationPhase (host, at the ends of windows).
        StepEnd x Phase (host, at the ends of windows). For phases that may not compute a loss.

    Cost:
        Fetches the loss, and reads it once per interval and at the end of an epoch. Does not shorten windows.

    Raises:
        DeclarationError: `interval` is not a positive number.

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
        epoch 1/1 training: compiling the step
        epoch 1/1 training: 3/3 steps, loss 0.8000, ... steps/s

    Source:
        tensorpack, `ProgressBar`; FluxTraining.jl, `ProgressPrinter`.
    """

    chief_only = True  # one process prints

    def __init__(self, file: IO[str] | None = None, interval: float = 0.1) -> None:
        self.file = text_file(file, "ProgressBar")
        finite_number(interval, "`interval` of `ProgressBar` (seconds)", above=0)
        self.interval = interval
        self._display: Display | None = None

    def stateaccess(self) -> Mapping[str, Any]:
        """Return the declared access; see the class docstring."""
        return {**_LOSS, "callbacks": Read()}

    def runafter(self) -> tuple[type[Callback], ...]:
        """Run after `MetricsPrinter`, so that the header of the table is printed before lines about progress."""
        return (MetricsPrinter,)

    @on(FitBegin, Phase, access={"callbacks": Read()})
    def begin_fit(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Begin the display of a fit."""
        self._close()
        self._display = self._open(learner, of_fit=True)
        if not learner.progress.compiled:  # if the fit resumes within an epoch, EpochBegin is not emitted
            self._display.announce(type(phase).name, _title(phase, learner.progress))

    @on(EpochBegin, Phase, access={"callbacks": Read()})
    def begin_epoch(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Begin an epoch. Hand-written loops have one display per epoch."""
        if _is_other_turn(phase, learner.progress):
            return
        if self._display is None:
            self._display = self._open(learner, of_fit=False)
        progress = learner.progress
        steps, compiling = progress.steps_in_epoch, not progress.compiled
        self._display.begin(type(phase).name, _title(phase, progress), steps, 0, compiling=compiling)

    @on(StepEnd, AbstractTrainingPhase | AbstractValidationPhase, access=_LOSS, when=AtWindowEnds())
    def show(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Show the step and its loss."""
        display = self._begun(phase, learner.progress)
        if display is not None and display.looks(learner.progress.step_in_epoch, self.interval):
            display.update(learner.progress.step_in_epoch, float(learner.step.loss))

    @on(StepEnd, Phase, access={}, when=AtWindowEnds())
    def show_step(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Show the step of a phase that may have no loss."""
        display = self._begun(phase, learner.progress)
        if display is not None and display.looks(learner.progress.step_in_epoch, self.interval):
            display.update(learner.progress.step_in_epoch, None)

    @on(EpochEnd, Phase, access={})
    def end_epoch(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """End a bar."""
        display = self._begun(phase, learner.progress)
        if display is not None:
            display.end(learner.progress.step_in_epoch, trains=type(phase).trains)
            if not display.of_fit:
                self._close()

    @on(FitEnd, Phase, access={})
    def end_fit(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Close the display, whether or not the fit succeeded."""
        self._close()

    def _begun(self, phase: Phase, progress: Any) -> Display | None:
        """Return the display. If a resumed fit continues an epoch, EpochBegin is not emitted, so it begins here."""
        if _is_other_turn(phase, progress):
            return None
        if self._display is not None and not self._display.begun:
            steps, done = progress.steps_in_epoch, progress.step_in_epoch
            self._display.begin(type(phase).name, _title(phase, progress), steps, done, compiling=False)
        return self._display

    def _open(self, learner: LearnerView, *, of_fit: bool) -> Display:
        printers = [c for c in map(unwrap, learner.callbacks) if isinstance(c, MetricsPrinter)]
        rows_follow = any(printer.file is self.file for printer in printers)
        return open_display(console_for(self.file), of_fit=of_fit, interval=self.interval, rows_follow=rows_follow)

    def _close(self) -> None:
        if self._display is not None:
            self._display.close()
            self._display = None


def _is_other_turn(phase: Phase, progress: Any) -> bool:
    """Return whether a phase is one of an `InTurn` but not the first one, whose bar shows the epoch."""
    return any(type(phase).name in names[1:] for names in progress.in_turn)


def _title(phase: Phase, progress: Any) -> str:
    name = type(phase).name
    if not progress.epoch:  # e.g. validation before any training
        return name
    return f"epoch {progress.epoch}/{progress.epochs} {name}" if progress.epochs else f"epoch {progress.epoch} {name}"
