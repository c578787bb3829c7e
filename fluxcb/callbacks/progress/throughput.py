"""`ThroughputTracker`: log the steps or samples per second."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from time import monotonic
from typing import Any

from fluxcb._declare.access import Append
from fluxcb._declare.callback import Callback
from fluxcb._declare.events import EpochBegin, EpochEnd, Event, FitEnd, StepEnd, Trigger
from fluxcb._declare.handlers import Handler, on
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._declare.schedules import EverySeconds, positive

__all__ = ["ThroughputTracker"]


class ThroughputTracker(Callback):
    """Log the number of training steps or samples per second to `cbstate.monitors`.

    `Throughput (steps/sec)` is logged after each epoch. It is the number of steps since the last value, divided by the
    time that training spent on them. `Throughput now (steps/sec)` is logged every `seconds` within an epoch and covers
    the time since the last value. With `samples_per_step`, the names end in `(samples/sec)`.

    The time includes handlers that run at steps, but not validation or other work after an epoch. The clock stops when
    the last step of the epoch has finished on the device. The first value includes compilation.

    Args:
        samples_per_step: Number of samples in a batch. If None, steps are counted instead of samples.
        seconds: Period of the values within an epoch (seconds).

    Access:
        cbstate.monitors: Append.

    Runs:
        EpochBegin, EpochEnd x AbstractTrainingPhase, Trigger x AbstractTrainingPhase, FitEnd x Phase (host).
        StepEnd x AbstractTrainingPhase (host, every `seconds`).

    Cost:
        Reads the clock once per window. Fetches nothing. Does not shorten windows.

    Raises:
        DeclarationError: `samples_per_step` is not a positive integer, or `seconds` is not a positive number.
        MissingStateError: There is no `Monitors` (when the Learner is built).

    Example:
        >>> from fluxcb.callbacks import Monitors, ThroughputTracker
        >>> from fluxcb.testing import testlearner
        >>> learner = testlearner(Monitors(), ThroughputTracker())
        >>> history = learner.fit(2)
        >>> [step for step, rate in learner.cbstate["monitors"].history("Throughput (steps/sec)") if rate > 0]
        [4, 8]

    Source:
        tensorpack, `ThroughputTracker`, which fails if it is triggered twice at the same step.
    """

    def __init__(self, samples_per_step: int | None = None, *, seconds: float = 10.0) -> None:
        if samples_per_step is not None:
            positive(samples_per_step, "`samples_per_step` of `ThroughputTracker`")
        self.samples_per_step = samples_per_step
        self.seconds = seconds
        self._schedule = EverySeconds(seconds)
        self._reset()

    def _reset(self) -> None:
        self._step: int | None = None  # the step at which the last value was logged
        self._taken = 0.0  # training time since then, up to `_resumed` (s)
        self._resumed: float | None = None  # when the clock was last started; None while it is stopped
        self._now: tuple[int, float] | None = None  # step and time of the last `Throughput now`

    def stateaccess(self) -> Mapping[str, Any]:
        """Return the declared access; see the class docstring."""
        return {"cbstate": {"monitors": Append()}}

    def logged_names(self, metrics: Mapping[type[Phase], Collection[str]]) -> Collection[str]:
        """Return the names of the two values."""
        return [self._name("Throughput"), self._name("Throughput now")]

    def _name(self, name: str) -> str:
        return f"{name} ({'steps' if self.samples_per_step is None else 'samples'}/sec)"

    def handlers(self) -> list[Handler]:
        """Return the handlers. That of StepEnd has the schedule of this instance."""
        return [replace(h, when=self._schedule) if h.event is StepEnd else h for h in super().handlers()]

    def state_dict(self) -> dict[str, Any]:
        """Return the step of the last value, the training time since then (s), and whether the clock is running."""
        running = self._resumed is not None
        taken = self._taken + (monotonic() - self._resumed if self._resumed is not None else 0.0)
        return {"step": self._step, "taken": taken, "running": running}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state. If the clock was running, it continues from now."""
        self._step, self._taken, self._now = state["step"], state["taken"], None
        self._resumed = monotonic() if state["running"] else None

    @on(EpochBegin, AbstractTrainingPhase, access={})
    def resume(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Start the clock."""
        step, now = learner.progress.step, monotonic()
        self._step = step if self._step is None else self._step
        self._resumed, self._now = now, (step, now)

    @on(StepEnd, AbstractTrainingPhase)
    def put_now(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Log the throughput since the last value."""
        step, now = learner.progress.step, monotonic()
        if self._now is not None:
            self._put(learner, "Throughput now", step - self._now[0], now - self._now[1])
        self._now = step, now

    @on(EpochEnd, AbstractTrainingPhase, access={})
    def pause(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Stop the clock."""
        if self._resumed is not None:
            self._taken += monotonic() - self._resumed
            self._resumed = self._now = None

    @on(Trigger, AbstractTrainingPhase)
    def put(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Log the throughput since the last Trigger. Within an epoch, the clock keeps running."""
        step, now = learner.progress.step, monotonic()
        if self._step is None:
            return
        if self._resumed is not None:
            self._taken += now - self._resumed
            self._resumed = now
        if self._put(learner, "Throughput", step - self._step, self._taken):
            self._step, self._taken = step, 0.0

    @on(FitEnd, Phase, access={})
    def end(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Reset the clock for the next fit."""
        self._reset()

    def _put(self, learner: LearnerView, name: str, steps: int, seconds: float) -> bool:
        """Log a throughput if steps have run, and return whether they have."""
        if steps <= 0 or seconds <= 0:
            return False
        rate = steps * (self.samples_per_step or 1) / seconds
        learner.cbstate.monitors.put_scalar(self._name(name), rate)
        return True

    def __repr__(self) -> str:
        return f"ThroughputTracker({'' if self.samples_per_step is None else self.samples_per_step})"
