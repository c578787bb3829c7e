"""`Profiler`: profile a range of training steps or epochs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fluxcb._declare.access import Read, Write
from fluxcb._declare.callback import Callback
from fluxcb._declare.events import EpochBegin, EpochEnd, Event, FitEnd, StepBegin, StepEnd
from fluxcb._declare.handlers import Handler, on
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._declare.schedules import Schedule, positive
from fluxcb._errors import DeclarationError
from fluxcb._tracebacks import warn_user
from fluxcb.callbacks.arguments import require
from fluxcb.logging.record_file import checked_path

__all__ = ["Profiler"]

_RUNNING = {"cbstate": {"profiler": Write()}}


class Profiler(Callback):
    """Profile a range of training steps or epochs with the JAX profiler.

    The profile begins when all earlier steps have finished, and ends when the last step of the range has finished.
    `Profiler("profile", steps=(100, 120))` records 21 steps. If the fit ends before that, even with an error, the
    profile ends with it. If the fit ends before the first step of the range, a warning says so. Exclude the first
    steps, because they include compilation.

    The profiler writes `plugins/profile/<time>/perfetto_trace.json.gz`, which you can open in https://ui.perfetto.dev,
    and files for XProf and the profile plugin of TensorBoard. About ten steps are enough. JAX keeps the profile in
    memory until it is written, and a profile of many steps is large.

    Args:
        folder: The output directory.
        steps: The first and the last step to profile. Steps are counted from 1 over the whole training.
        epochs: The first and the last epoch to profile, counted from 1, instead of `steps`. The profile includes the
            validation between these epochs.

    Access:
        cbstate.profiler: Write. The directory of the active profile, or None.
        params: Read (borrowed), with `steps`.

    Runs:
        With `steps`: StepBegin, StepEnd x AbstractTrainingPhase (host, at the first and at the last step).
        With `epochs`: EpochBegin, EpochEnd x AbstractTrainingPhase (host).
        FitEnd x Phase (host). All on process 0 only.

    Cost:
        Ends a window before the first step and after the last one. Recording slows down the profiled steps, and writing
        the profile takes seconds. Other steps have no overhead.

    Raises:
        DeclarationError: `folder` is not writable, both or neither of `steps` and `epochs` are given, or the range is
            not a pair of numbers, the first and the last. During the fit: another profile is being recorded.

    Example:
        >>> from pathlib import Path
        >>> from fluxcb.callbacks import Profiler
        >>> from fluxcb.testing import testlearner
        >>> learner = testlearner(Profiler("profile", steps=(3, 5)))
        >>> history = learner.fit(2)
        >>> [path.name for path in Path("profile").rglob("perfetto*")]
        ['perfetto_trace.json.gz']

    Source:
        tensorpack, `GraphProfiler`.
    """

    chief_only = True

    def __init__(
        self,
        folder: str | os.PathLike[str],
        steps: tuple[int, int] | None = None,
        *,
        epochs: tuple[int, int] | None = None,
    ) -> None:
        if (steps is None) == (epochs is None):
            raise DeclarationError(
                "`Profiler` takes exactly one of `steps` and `epochs`.",
                fix="write e.g. `Profiler('profile', steps=(100, 120))`",
            )
        self.steps = None if steps is None else _checked_range(steps, "steps")
        self.epochs = None if epochs is None else _checked_range(epochs, "epochs")
        self.folder: Path = checked_path(folder, owner="`Profiler`", folder=True)

    def output_locations(self) -> Iterable[Path | str]:
        """Return the output directory."""
        return (self.folder,)

    def stateaccess(self) -> Mapping[str, Any]:
        """Return the declared access; see the class docstring."""
        return _RUNNING if self.steps is None else {**_RUNNING, "params": Read(borrow=True)}

    def init(self, learner: LearnerView) -> None:
        """Create `cbstate.profiler`."""
        if "profiler" not in learner.cbstate:
            learner.cbstate.profiler = None

    def handlers(self) -> list[Handler]:
        """Return the handlers for epochs, or those for steps with the schedule of the first and the last step."""
        if self.steps is None:
            return [handler for handler in super().handlers() if handler.event not in (StepBegin, StepEnd)]
        due = dict(zip((StepBegin, StepEnd), map(_AtStep, self.steps), strict=True))
        return [
            replace(handler, when=due[handler.event]) if handler.event in due else handler
            for handler in super().handlers()
            if handler.event not in (EpochBegin, EpochEnd)
        ]

    @on(StepBegin, AbstractTrainingPhase)
    def begin_at_step(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Begin the profile when all earlier steps have finished."""
        _wait_for(learner.params)
        self._begin(learner)

    @on(StepEnd, AbstractTrainingPhase)
    def end_at_step(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """End the profile when the step has finished."""
        _wait_for(learner.params)
        self._end(learner)

    @on(EpochBegin, AbstractTrainingPhase, access=_RUNNING)
    def begin_at_epoch(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Begin the profile at its first epoch. No wait is needed, because EpochEnd waits for the last step."""
        begins = self.epochs is not None and learner.progress.epoch == self.epochs[0]
        if begins and learner.cbstate.profiler != str(self.folder):  # the phases of `InTurn` each emit EpochBegin
            self._begin(learner)

    @on(EpochEnd, AbstractTrainingPhase, access=_RUNNING)
    def end_at_epoch(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """End the profile after its last epoch."""
        if self.epochs is not None and learner.progress.epoch == self.epochs[1]:
            self._end(learner)

    @on(FitEnd, Phase, access=_RUNNING)
    def end_fit(self, event: FitEnd, phase: Phase, learner: LearnerView) -> None:
        """End a profile that is still being recorded, for example after an error. Warn if it has not begun."""
        self._end(learner)
        unit, (first, _) = ("step", self.steps) if self.steps is not None else ("epoch", self.epochs or (0, 0))
        reached = learner.progress.step if unit == "step" else learner.progress.epoch
        if event.outcome == "finished" and reached < first:
            text = f"{self!r} has recorded nothing, because the fit ended after {unit} {reached}."
            warn_user(text, UserWarning)

    def _begin(self, learner: LearnerView) -> None:
        import jax

        running = learner.cbstate.profiler
        if running is None:
            try:
                jax.profiler.start_trace(self.folder, create_perfetto_trace=True)
            except RuntimeError:
                running = "another profiler in this process"
            else:
                learner.cbstate.profiler = str(self.folder)
        if running is not None:
            raise DeclarationError(
                f"{self!r} cannot begin while another profile is being recorded ({running}).",
                why="JAX records one profile at a time",
                fix=["choose steps or epochs that do not overlap", "remove one of the two"],
            )

    def _end(self, learner: LearnerView) -> None:
        if learner.cbstate.profiler != str(self.folder):
            return
        import jax

        learner.cbstate.profiler = None
        try:
            jax.profiler.stop_trace()
        except Exception as error:  # e.g. a full disk, which must not end the training
            text = f"{self!r} could not write the profile: {type(error).__name__}: {error}"
            warn_user(text, UserWarning)

    def __repr__(self) -> str:
        unit, (first, last) = ("steps", self.steps) if self.steps is not None else ("epochs", self.epochs or (0, 0))
        return f"Profiler({self.folder.name!r}, {unit}=({first}, {last}))"


@dataclass(frozen=True)
class _AtStep(Schedule):
    """Due at a single step, counted over the whole training."""

    number: int

    def __repr__(self) -> str:
        return f"at step {self.number}"

    def due(self, step: int, epoch: int, learner: LearnerView) -> bool:
        """Return whether this is the step."""
        return step == self.number

    def next_due(self, step: int, epoch: int) -> int | None:
        """Return the step, or None if it has passed."""
        return self.number if step < self.number else None


def _checked_range(value: Any, unit: str) -> tuple[int, int]:
    fits = isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 2
    require(fits, value, f"`{unit}` of `Profiler`", "a pair of the first and the last one", f"{unit}=(10, 20)")
    first, last = (positive(number, f"Each of `{unit}` of `Profiler`") for number in value)
    if first > last:
        raise DeclarationError(
            f"The first of the `{unit}` of `Profiler` is after the last: {value!r}.",
            fix=f"write `{unit}=({last}, {first})`",
        )
    return first, last


def _wait_for(params: Any) -> None:
    import jax

    jax.block_until_ready(params)
