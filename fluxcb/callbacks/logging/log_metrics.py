"""`LogMetrics`: log the metrics of each phase, per step and per epoch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from fluxcb._calls import entry_point
from fluxcb._declare.access import Append, Read
from fluxcb._declare.callback import Callback
from fluxcb._declare.events import EpochEnd, Event, StepEnd
from fluxcb._declare.handlers import Handler, on
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._errors import DeclarationError

__all__ = ["LogMetrics"]

_OF_STEP = {"step": {"metrics": Read()}, "cbstate": {"monitors": Append()}}
_OF_EPOCH = {"cbstate": {"metrics_epoch": Read(), "monitors": Append()}}

_BACKEND = "pass the backend to `Monitors(...)`, and write `LogMetrics()`"
_PERIOD = "write `every(LogMetrics(), steps=10)`"
_FIXES = {
    "*": _BACKEND,
    "*numbers": _PERIOD,
    **dict.fromkeys(("backend", "backends", "logger", "loggers"), _BACKEND),
    **dict.fromkeys(("freq", "period", "interval", "every", "every_n_steps", "log_every_n_steps"), _PERIOD),
}
"""The fixes for arguments that `LogMetrics` does not have."""


class LogMetrics(Callback):
    """Log metrics per epoch (`training/loss`, `validation/accuracy`) and per training step (`training/step/loss`).

    The epoch value of a phase is logged when the phase ends. Steps of phases that do not train are not logged, because
    all of them belong to the same training step. Metrics whose values are arrays are not logged.

    `every(LogMetrics(), steps=50)` logs every 50th step and every epoch.

    Args:
        steps: Whether to log training steps.

    Access:
        step.metrics: Read.
        cbstate.metrics_epoch: Read.
        cbstate.monitors: Append.

    Runs:
        StepEnd x AbstractTrainingPhase (host, if `steps`).
        EpochEnd x Phase (host).

    Cost:
        Fetches one number per metric and step. A few microseconds per step, or less with a period. Does not shorten
        windows.

    Raises:
        DeclarationError: `steps` is not a bool.
        MissingStateError: There is no `Monitors` or no `Metrics` (when the Learner is built).

    Example:
        >>> from fluxcb.callbacks import LogMetrics, Metrics, Monitors
        >>> from fluxcb.testing import testlearner
        >>> learner = testlearner(Metrics(), LogMetrics(), Monitors())
        >>> history = learner.fit(2)
        >>> {name: len(learner.cbstate["monitors"].history(name)) for name in learner.cbstate["monitors"]}
        {'training/step/loss': 8, 'training/loss': 2, 'validation/loss': 2}

    Source:
        FluxTraining.jl, `LogMetrics`, which takes the backends as arguments.
    """

    @entry_point(fixes=_FIXES)
    def __init__(self, *, steps: bool = True) -> None:
        if not isinstance(steps, bool):
            raise DeclarationError(
                f"`steps` of `LogMetrics` must be True or False, not {steps!r}.",
                fix=f"write `every(LogMetrics(), steps={steps})`" if isinstance(steps, int) else _BACKEND,
            )
        self.steps = steps

    def stateaccess(self) -> Mapping[str, Any]:
        """Return the declared access; see the class docstring."""
        return {**(_OF_STEP if self.steps else {}), **_OF_EPOCH}

    def logged_names(self, metrics: Mapping[type[Phase], Collection[str]]) -> Collection[str] | None:
        """Return the names of the metrics, each with its phase as a prefix."""
        return [
            f"{phase.name}{part}/{name}"
            for phase, names in metrics.items()
            for part in (["", "/step"] if self.steps and issubclass(phase, AbstractTrainingPhase) else [""])
            for name in names
        ]

    def handlers(self) -> list[Handler]:
        """Return the handlers, without that of StepEnd if steps are not logged."""
        return [handler for handler in super().handlers() if self.steps or handler.event is not StepEnd]

    @on(StepEnd, AbstractTrainingPhase, access=_OF_STEP)
    def log_step(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Log the metrics of a training step."""
        for name, value in learner.step["metrics"].items():
            learner.cbstate.monitors.put_scalar(f"{phase.name}/step/{name}", value)

    @on(EpochEnd, Phase, access=_OF_EPOCH)
    def log_epoch(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Log the epoch metrics of a phase."""
        if learner.progress.step_in_epoch:  # an epoch without steps has no metrics
            for name, value in learner.cbstate.metrics_epoch[phase].at(learner.progress.epoch).items():
                learner.cbstate.monitors.put_scalar(f"{phase.name}/{name}", value)

    def __repr__(self) -> str:
        return "LogMetrics()" if self.steps else "LogMetrics(steps=False)"
