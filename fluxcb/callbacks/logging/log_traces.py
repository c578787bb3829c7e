"""`LogTraces`: log the values that `Traces` record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fluxcb._declare.access import Append, Read
from fluxcb._declare.callback import Callback
from fluxcb._declare.events import EpochEnd, Event, StepEnd
from fluxcb._declare.handlers import on
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import AbstractTrainingPhase, Phase

__all__ = ["LogTraces"]

_TRACES = {"cbstate": {"traces": Read(), "monitors": Append()}}


class LogTraces(Callback):
    """Log the values that `Traces` record as `training/traces/<name>`: numbers as scalars, arrays as histograms.

    In training, every step is logged. In other phases, only the value of the last step is logged, because all steps of
    the phase belong to the same training step.

    `every(LogTraces(), steps=50)` logs every 50th step.

    Access:
        cbstate.traces: Read.
        cbstate.monitors: Append.

    Runs:
        StepEnd x AbstractTrainingPhase (host).
        EpochEnd x Phase (host).

    Cost:
        A few microseconds per step, or less with a period. Fetches nothing. Does not shorten windows.

    Raises:
        MissingStateError: There is no `Monitors` or no `Traces` (when the Learner is built).

    Example:
        >>> from fluxcb import Read
        >>> from fluxcb.callbacks import LogTraces, Monitors, Traces
        >>> from fluxcb.testing import testlearner
        >>> squares = Traces({"square": lambda learner: learner.step.loss**2}, access={"step": {"loss": Read()}})
        >>> learner = testlearner(squares, LogTraces(), Monitors())
        >>> history = learner.fit(2)
        >>> {name: len(learner.cbstate["monitors"].history(name)) for name in learner.cbstate["monitors"]}
        {'training/traces/square': 8, 'validation/traces/square': 2}

    Source:
        FluxTraining.jl, `LogTraces`, which takes the backends as arguments.
    """

    def stateaccess(self) -> Mapping[str, Any]:
        """Return the declared access; see the class docstring."""
        return _TRACES

    @on(StepEnd, AbstractTrainingPhase)
    def log_step(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Log the values of a training step."""
        self._log(phase, learner)

    @on(EpochEnd, Phase)
    def log_epoch(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Log the last values of a phase that does not train."""
        if not type(phase).trains and learner.progress.step_in_epoch:
            self._log(phase, learner)

    def _log(self, phase: Phase, learner: LearnerView) -> None:
        import numpy as np

        traces, monitors = learner.cbstate.traces[phase], learner.cbstate.monitors
        for trace in traces:
            value = traces.last(trace)
            put = monitors.put_histogram if np.ndim(value) else monitors.put_scalar
            put(f"{phase.name}/traces/{trace}", value)
