"""`LogMetrics`: the metrics of each phase, per step and per epoch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from fluxcb._declare.access import Append, Read
from fluxcb._declare.callback import Callback
from fluxcb._declare.dispatch import Entry
from fluxcb._declare.events import EpochEnd, Event, StepEnd
from fluxcb._declare.handlers import on
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._declare.schedules import Schedule

__all__ = ["LogMetrics"]

_OF_STEP = {"step": {"metrics": Read()}, "cbstate": {"monitors": Append()}}
_OF_EPOCH = {"cbstate": {"metrics_epoch": Read(), "monitors": Append()}}


class LogMetrics(Callback):
    """Log metrics: of epochs as `training/loss` and `validation/accuracy`, of training steps as `training/step/loss`.

    An epoch's value of a phase is logged when the phase ends, and so once each. Steps of phases that do not train
    are not logged: they would all be at one training step.

    `every(LogMetrics(), steps=50)` logs every 50th step, and every epoch.

    Args:
        steps: Whether steps are logged.

    Access:
        step.metrics: Read.
        cbstate.metrics_epoch: Read.
        cbstate.monitors: Append.

    Runs:
        StepEnd x AbstractTrainingPhase (host, if `steps`).
        EpochEnd x Phase (host).

    Cost:
        Fetches the step's metrics, one number each, and bounds no window. A few microseconds per step; less with a
        period.

    Raises:
        MissingStateError: There is no `Monitors` or no `Metrics` (when the Learner is built).

    Example:
        >>> from fluxcb.callbacks import LogMetrics, Metrics, Monitors
        >>> from fluxcb.testing import testlearner
        >>> learner = testlearner(Metrics(), LogMetrics(), Monitors())
        >>> history = learner.fit(2)
        >>> {name: len(learner.cbstate["monitors"].history(name)) for name in learner.cbstate["monitors"]}
        {'training/step/loss': 8, 'training/loss': 2, 'validation/loss': 2}

    Source:
        FluxTraining.jl, `LogMetrics`, which takes the backends itself.
    """

    def __init__(self, *, steps: bool = True) -> None:
        self.steps = steps

    def stateaccess(self) -> Mapping[str, Any]:
        """Return what it reads and writes; see the class."""
        return {**(_OF_STEP if self.steps else {}), **_OF_EPOCH}

    def logged_names(self, metrics: Mapping[type[Phase], Collection[str]]) -> Collection[str] | None:
        """Return the names of the metrics, prefixed with their phase."""
        return [
            f"{phase.name}{part}/{name}"
            for phase, names in metrics.items()
            for part in (["", "/step"] if self.steps and issubclass(phase, AbstractTrainingPhase) else [""])
            for name in names
        ]

    def handlers(self) -> list[Entry]:
        """Return the handlers that this instance has."""
        return [entry for entry in super().handlers() if self.steps or entry.event is not StepEnd]

    def entry_for(self, event: type[Event], phase: type[Phase]) -> tuple[Callback, Entry, tuple[Schedule, ...]] | None:
        """Return who handles a moment; nobody at StepEnd if steps are not logged."""
        return super().entry_for(event, phase) if self.steps or not issubclass(event, StepEnd) else None

    @on(StepEnd, AbstractTrainingPhase, access=_OF_STEP)
    def log_step(self, event: Event, phase: Phase, learner: Any) -> None:
        """Log a step's values."""
        for name, value in learner.step.metrics.items():
            learner.cbstate.monitors.put_scalar(f"{phase.name}/step/{name}", value)

    @on(EpochEnd, Phase, access=_OF_EPOCH)
    def log_epoch(self, event: Event, phase: Phase, learner: Any) -> None:
        """Log the values of a phase's epoch."""
        if learner.progress.step_in_epoch:
            for name, value in learner.cbstate.metrics_epoch[phase].at(learner.progress.epoch).items():
                learner.cbstate.monitors.put_scalar(f"{phase.name}/{name}", value)

    def __repr__(self) -> str:
        return "LogMetrics()" if self.steps else "LogMetrics(steps=False)"
