"""`LogSummaries`: log numbers of individual steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fluxcb._declare.events import EpochEnd, Event, StepEnd
from fluxcb._declare.handlers import Handler, on
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._declare.schedules import EverySteps, positive
from fluxcb.callbacks.logging.step_scalars import StepScalars

__all__ = ["LogSummaries"]


class LogSummaries(StepScalars):
    """Log numbers of the step at the last step of each epoch and, optionally, every `period` steps.

    They are logged under names such as `step/loss` and `step/aux/kl`. To log averages instead, use `MovingAverage`,
    `SimpleMovingAverage`, or `Metrics` with `LogMetrics`.

    Args:
        names: One path or several, such as `step.loss`, `step.aux.kl` or `hyperparams.learning_rate`. Each value must
            be a number.
        period: Period of additional values (steps); 0 for none.

    Access:
        The paths in `names`: Read.
        cbstate.summaries.<name>: Write (traced), Read (host). The value of the last step, float32[].
        cbstate.monitors: Append.

    Runs:
        ComputeEnd x AbstractTrainingPhase (traced).
        StepEnd x AbstractTrainingPhase (host, every `period` steps).
        EpochEnd x AbstractTrainingPhase (host).

    Cost:
        Copies the numbers inside the step. With a period, fetches them with the step. Does not shorten windows.

    Raises:
        DeclarationError: A path is invalid, `period` is not a non-negative integer, or a value is not a single number.
        MissingStateError: There is no `Monitors` (when the Learner is built).

    Example:
        >>> from fluxcb.callbacks import LogSummaries, Monitors
        >>> from fluxcb.testing import testlearner
        >>> learner = testlearner(LogSummaries("step.loss", period=3), Monitors())  # epochs have 4 steps
        >>> history = learner.fit(2)
        >>> [step for step, _ in learner.cbstate["monitors"].history("step/loss")]
        [3, 4, 6, 8]

    Source:
        tensorpack, `MergeAllSummaries`, which logs all values in a TensorFlow collection and restarts the step count in
        each epoch.
    """

    entry = "summaries"

    def __init__(self, names: str | Sequence[str], period: int = 0) -> None:
        super().__init__(names)
        no_period = period == 0 and not isinstance(period, bool)
        self.period = 0 if no_period else positive(period, "`period` of LogSummaries (steps), if it is not 0,")

    def handlers(self) -> list[Handler]:
        """Return the handlers, without that of StepEnd if there is no period."""
        return [handler for handler in super().handlers() if self.period or handler.event is not StepEnd]

    def configured(self, handler: Handler) -> Handler:
        """Return a handler with the access and the schedule of this instance."""
        handler = super().configured(handler)
        scheduled = self.period and handler.event is StepEnd
        return replace(handler, when=EverySteps(self.period)) if scheduled else handler

    def initial(self) -> Any:
        """Return NaN, because no step has run."""
        return float("nan")

    def updated(self, stored: Any, value: Any, step: Any) -> Any:
        """Return the value of this step."""
        return value

    @on(StepEnd, AbstractTrainingPhase)
    def log_step(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Log the numbers of the step."""
        self._log(learner)

    @on(EpochEnd, AbstractTrainingPhase)
    def log_last(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Log the numbers of the last step of the epoch, unless `log_step` has logged them."""
        progress = learner.progress
        if progress.step_in_epoch and not (self.period and progress.step % self.period == 0):
            self._log(learner)

    def _log(self, learner: LearnerView) -> None:
        for name, value in self.stored(learner).items():
            learner.cbstate.monitors.put_scalar(name, value)

    def __repr__(self) -> str:
        period = f", period={self.period}" if self.period else ""
        return f"LogSummaries({', '.join(map(repr, self.names))}{period})"
