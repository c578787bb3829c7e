"""`ThroughputTracker`: steps or samples per second."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from time import monotonic
from typing import Any

from fluxcb._declare.access import Append
from fluxcb._declare.callback import Callback
from fluxcb._declare.dispatch import Entry
from fluxcb._declare.events import EpochBegin, EpochEnd, Event, FitEnd, StepEnd, Trigger
from fluxcb._declare.handlers import on
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._declare.schedules import EverySeconds, Schedule, positive

__all__ = ["ThroughputTracker"]


class ThroughputTracker(Callback):
    """Put how many steps or samples were trained per second into `cbstate.monitors`.

    `Throughput (steps/sec)` is put after each epoch: the steps since the last time, by the time that epochs of training
    took for them. `Throughput now (steps/sec)` is put every `seconds` within an epoch: the steps since the last time.
    With `samples_per_step`, the names end in `(samples/sec)`.

    The time of handlers at steps counts, that of validation and of what happens after epochs does not. An epoch's last
    step has been waited for when its clock stops. The first value includes compiling.

    Args:
        samples_per_step: Samples in a batch, to count samples; None counts steps.
        seconds: How often to put the throughput within an epoch (seconds).

    Access:
        cbstate.monitors: Append.

    Runs:
        EpochBegin, EpochEnd x AbstractTrainingPhase, Trigger x AbstractTrainingPhase, FitEnd x Phase (host).
        StepEnd x AbstractTrainingPhase (host, every `seconds`).

    Cost:
        Reads the clock once per window. Fetches nothing, and bounds no window.

    Raises:
        DeclarationError: `samples_per_step` is no whole number of at least 1, or `seconds` no number above 0.
        MissingStateError: There is no `Monitors` (when the Learner is built).

    Example:
        >>> from fluxcb.callbacks import Monitors, ThroughputTracker
        >>> from fluxcb.testing import testlearner
        >>> learner = testlearner(Monitors(), ThroughputTracker())
        >>> history = learner.fit(2)
        >>> [step for step, rate in learner.cbstate["monitors"].history("Throughput (steps/sec)") if rate > 0]
        [4, 8]

    Source:
        tensorpack, `ThroughputTracker`, which fails when it is triggered twice at one step.
    """

    def __init__(self, samples_per_step: int | None = None, *, seconds: float = 10.0) -> None:
        if samples_per_step is not None:
            positive(samples_per_step, "`samples_per_step` of `ThroughputTracker`")
        self.samples_per_step = samples_per_step
        self.seconds = seconds
        self._schedule = EverySeconds(seconds)
        self._reset()

    def _reset(self) -> None:
        self._step: int | None = None  # where the steps of the next value begin
        self._taken = 0.0  # time that their epochs have taken (s)
        self._resumed: float | None = None  # when the epoch at hand began, or the last value in it was put
        self._now: tuple[int, float] | None = None  # step and time of the last value within the epoch

    def stateaccess(self) -> Mapping[str, Any]:
        """Return what it reads and writes; see the class."""
        return {"cbstate": {"monitors": Append()}}

    def entry_for(self, event: type[Event], phase: type[Phase]) -> tuple[Callback, Entry, tuple[Schedule, ...]] | None:
        """Return who handles a moment, at StepEnd with this instance's schedule."""
        found = super().entry_for(event, phase)
        if found is None or found[1].event is not StepEnd:
            return found
        return self, replace(found[1], when=self._schedule), (self._schedule,)

    def handlers(self) -> list[Entry]:
        """Return the handlers, that of StepEnd with this instance's schedule."""
        return [replace(e, when=self._schedule) if e.event is StepEnd else e for e in super().handlers()]

    def state_dict(self) -> dict[str, Any]:
        """Return where the steps of the next value begin, and the time that they have taken so far (s)."""
        running = self._resumed is not None
        taken = self._taken + (monotonic() - self._resumed if self._resumed is not None else 0.0)
        return {"step": self._step, "taken": taken, "running": running}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with that value; in the middle of an epoch, the clock runs on from here."""
        self._step, self._taken, self._now = state["step"], state["taken"], None
        self._resumed = monotonic() if state["running"] else None

    @on(EpochBegin, AbstractTrainingPhase, access={})
    def resume(self, event: Event, phase: Phase, learner: Any) -> None:
        """Start the clock."""
        step, now = learner.progress.step, monotonic()
        self._step = step if self._step is None else self._step
        self._resumed, self._now = now, (step, now)

    @on(StepEnd, AbstractTrainingPhase)
    def put_now(self, event: Event, phase: Phase, learner: Any) -> None:
        """Put the throughput since the last time."""
        step, now = learner.progress.step, monotonic()
        if self._now is not None:
            self._put(learner, "Throughput now", step - self._now[0], now - self._now[1])
        self._now = step, now

    @on(EpochEnd, AbstractTrainingPhase, access={})
    def pause(self, event: Event, phase: Phase, learner: Any) -> None:
        """Stop the clock."""
        if self._resumed is not None:
            self._taken += monotonic() - self._resumed
            self._resumed = self._now = None

    @on(Trigger, AbstractTrainingPhase)
    def put(self, event: Event, phase: Phase, learner: Any) -> None:
        """Put the throughput since the last Trigger; within an epoch, the clock runs on."""
        step, now = learner.progress.step, monotonic()
        if self._step is None:
            return
        if self._resumed is not None:
            self._taken += now - self._resumed
            self._resumed = now
        if self._put(learner, "Throughput", step - self._step, self._taken):
            self._step, self._taken = step, 0.0

    @on(FitEnd, Phase, access={})
    def end(self, event: Event, phase: Phase, learner: Any) -> None:
        """Forget the time: the next fit begins anew."""
        self._reset()

    def _put(self, learner: Any, name: str, steps: int, seconds: float) -> bool:
        """Put a throughput if there is one; tell whether there is."""
        if steps <= 0 or seconds <= 0:
            return False
        unit = "steps" if self.samples_per_step is None else "samples"
        rate = steps * (self.samples_per_step or 1) / seconds
        learner.cbstate.monitors.put_scalar(f"{name} ({unit}/sec)", rate)
        return True

    def __repr__(self) -> str:
        return f"ThroughputTracker({'' if self.samples_per_step is None else self.samples_per_step})"
