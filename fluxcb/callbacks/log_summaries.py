"""`LogSummaries`: numbers of the step, as they are now and then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fluxcb._declare.callback import Callback
from fluxcb._declare.dispatch import Entry
from fluxcb._declare.events import EpochEnd, Event, StepEnd
from fluxcb._declare.handlers import on
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._declare.schedules import EverySteps, Schedule, positive
from fluxcb.callbacks.step_scalars import StepScalars

__all__ = ["LogSummaries"]


class LogSummaries(StepScalars):
    """Log numbers of the step: at the last step of each epoch, and every `period` steps.

    They are logged as `step/loss`, `step/aux/kl`. For averages over the steps between there are `MovingAverage`,
    `SimpleMovingAverage`, and `Metrics` with `LogMetrics`.

    Args:
        names: Path or paths of numbers: `step.loss`, `step.aux.kl`, `hyperparams.learning_rate`. There is no
            collection of all that anybody could log: what is logged is named here.
        period: Log at multiples of it, too (steps); 0 for none.

    Access:
        What the names say: Read.
        cbstate.summaries.<name>: Write (traced), Read (host); the last step's, float32[].
        cbstate.monitors: Append.

    Runs:
        ComputeEnd x AbstractTrainingPhase (traced).
        StepEnd x AbstractTrainingPhase (host, every `period` steps).
        EpochEnd x AbstractTrainingPhase (host).

    Cost:
        A copy of the numbers inside the step. With a period, they are fetched with the step; no window is bounded.

    Raises:
        DeclarationError: A name is no path, or `period` is negative or no whole number; a value is not one number.
        MissingStateError: There is no `Monitors` (when the Learner is built).

    Example:
        >>> from fluxcb.callbacks import LogSummaries, Monitors
        >>> from fluxcb.testing import testlearner
        >>> learner = testlearner(LogSummaries("step.loss", period=3), Monitors())  # epochs have 4 steps
        >>> history = learner.fit(2)
        >>> [step for step, _ in learner.cbstate["monitors"].history("step/loss")]
        [3, 4, 6, 8]

    Source:
        tensorpack, `MergeAllSummaries`, which takes what is in a collection of TensorFlow's, and counts the steps of
        each epoch anew.
    """

    entry = "summaries"

    def __init__(self, names: str | Sequence[str], period: int = 0) -> None:
        super().__init__(names)
        none = period == 0 and not isinstance(period, bool)
        self.period = 0 if none else positive(period, "`period` of LogSummaries (steps), if it is not 0,")

    # Without a period the handler of StepEnd is not there at all.

    def handlers(self) -> list[Entry]:
        """Return the handlers that this instance has."""
        return [entry for entry in super().handlers() if self.period or entry.event is not StepEnd]

    def entry_for(self, event: type[Event], phase: type[Phase]) -> tuple[Callback, Entry, tuple[Schedule, ...]] | None:
        """Return who handles a moment; nobody at StepEnd without a period."""
        return super().entry_for(event, phase) if self.period or not issubclass(event, StepEnd) else None

    def own(self, entry: Entry) -> Entry:
        """Return a handler with this instance's access and schedule."""
        entry = super().own(entry)
        return replace(entry, when=EverySteps(self.period)) if self.period and entry.event is StepEnd else entry

    def fresh(self) -> Any:
        """Return the number of a step that has not run."""
        return float("nan")

    def updated(self, kept: Any, value: Any, step: Any) -> Any:
        """Keep the value."""
        return value

    @on(StepEnd, AbstractTrainingPhase)
    def log_now_and_then(self, event: Event, phase: Phase, learner: Any) -> None:
        """Log the step's numbers."""
        self._log(learner)

    @on(EpochEnd, AbstractTrainingPhase)
    def log_last(self, event: Event, phase: Phase, learner: Any) -> None:
        """Log those of the epoch's last step, unless that is done."""
        progress = learner.progress
        if progress.step_in_epoch and not (self.period and progress.step % self.period == 0):
            self._log(learner)

    def _log(self, learner: Any) -> None:
        for name, value in self.kept(learner).items():
            learner.cbstate.monitors.put_scalar(name, value)

    def __repr__(self) -> str:
        period = f", period={self.period}" if self.period else ""
        return f"LogSummaries({', '.join(map(repr, self.names))}{period})"
