"""`Profiler`: a profile of some training steps or epochs."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fluxcb._declare.access import Read, Write
from fluxcb._declare.callback import Callback
from fluxcb._declare.dispatch import Entry
from fluxcb._declare.events import EpochBegin, EpochEnd, Event, FitEnd, StepBegin, StepEnd
from fluxcb._declare.handlers import on
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._declare.schedules import Schedule, positive
from fluxcb._errors import DeclarationError
from fluxcb.logging.record_file import checked_path

__all__ = ["Profiler"]

_RUNNING = {"cbstate": {"profiler": Write()}}


class Profiler(Callback):
    """Profile some training steps, or epochs, with JAX's profiler: what runs when on the host and the devices.

    The first step begins when the profile has begun and no step before it is running, and the profile ends when the
    last step is done: windows end there. `Profiler("profile", steps=(100, 120))` has 21 steps. A fit that ends earlier,
    with an error too, ends the profile. Leave out the first steps, in which programs are compiled.

    The folder gets `plugins/profile/<time>/perfetto_trace.json.gz`, which https://ui.perfetto.dev opens, and what
    TensorBoard's profile plugin and XProf read. Some ten steps are enough: a profile is held in memory, and one of many
    steps is large.

    Args:
        folder: Where the profile goes.
        steps: The first and the last step to profile, counted over the whole training from 1.
        epochs: The first and the last epoch to profile instead, from 1; with the validation between them.

    Access:
        cbstate.profiler: Write. The folder that is being written, or None.
        params: Read (borrowed), with `steps`.

    Runs:
        With `steps`: StepBegin, StepEnd x AbstractTrainingPhase (host), at the first and at the last step.
        With `epochs`: EpochBegin, EpochEnd x AbstractTrainingPhase (host).
        FitEnd x Phase (host). All on process 0 only.

    Cost:
        Ends a window before the first step and behind the last one. The steps between are slower by what recording
        costs, and writing the profile takes seconds. Nothing before and after.

    Raises:
        DeclarationError: `folder` cannot be written to, not just one of `steps` and `epochs` is given, or it is no pair
            of first and last; in the fit, another profile is running.

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
                "`Profiler` takes exactly one of steps and epochs.", fix="e.g. `Profiler('profile', steps=(100, 120))`"
            )
        self.steps = None if steps is None else _checked(steps, "steps")
        self.epochs = None if epochs is None else _checked(epochs, "epochs")
        self.folder: Path = checked_path(folder, owner="`Profiler`", folder=True)

    def output_locations(self) -> Iterable[Path | str]:
        """Return the folder."""
        return (self.folder,)

    def stateaccess(self) -> Mapping[str, Any]:
        """Return what it reads and writes; see the class."""
        return _RUNNING if self.steps is None else {**_RUNNING, "params": Read(borrow=True)}

    def init(self, learner: Any) -> None:
        """Create `cbstate.profiler`."""
        if "profiler" not in learner.cbstate:
            learner.cbstate.profiler = None

    def handlers(self) -> list[Entry]:
        """Return those handlers that there are with `steps`, or with `epochs`."""
        return [entry for entry in super().handlers() if self._has(entry.event)]

    def entry_for(self, event: type[Event], phase: type[Phase]) -> tuple[Callback, Entry, tuple[Schedule, ...]] | None:
        """Return who handles a moment, at StepBegin and StepEnd with the step at which it is due."""
        found = super().entry_for(event, phase)
        if found is None or not self._has(found[1].event):
            return None
        if self.steps is None or issubclass(event, FitEnd):
            return found
        return self, found[1], (_AtStep(self.steps[issubclass(event, StepEnd)]),)

    def _has(self, event: type[Event]) -> bool:
        return not issubclass(event, (EpochBegin, EpochEnd) if self.steps is not None else (StepBegin, StepEnd))

    @on(StepBegin, AbstractTrainingPhase)
    def begin_at_step(self, event: Event, phase: Phase, learner: Any) -> None:
        """Begin the profile when the steps before are done."""
        _wait_for(learner.params)
        self._begin(learner)

    @on(StepEnd, AbstractTrainingPhase)
    def end_at_step(self, event: Event, phase: Phase, learner: Any) -> None:
        """End the profile when the step is done."""
        _wait_for(learner.params)
        self._end(learner)

    @on(EpochBegin, AbstractTrainingPhase, access=_RUNNING)
    def begin_at_epoch(self, event: Event, phase: Phase, learner: Any) -> None:
        """Begin the profile in its first epoch; an epoch ends with a wait for its last step."""
        if self.epochs is not None and learner.progress.epoch == self.epochs[0]:
            self._begin(learner)

    @on(EpochEnd, AbstractTrainingPhase, access=_RUNNING)
    def end_at_epoch(self, event: Event, phase: Phase, learner: Any) -> None:
        """End the profile in its last epoch."""
        if self.epochs is not None and learner.progress.epoch == self.epochs[1]:
            self._end(learner)

    @on(FitEnd, Phase, access=_RUNNING)
    def end_fit(self, event: Event, phase: Phase, learner: Any) -> None:
        """End the profile, also after an error."""
        self._end(learner)

    def _begin(self, learner: Any) -> None:
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
                f"{self!r} cannot begin: there is a profile already ({running}).",
                why="JAX has one profiler, which one profile at a time can use",
                fix=["give the two steps or epochs that do not overlap", "leave one of them out"],
            )

    def _end(self, learner: Any) -> None:
        if learner.cbstate.profiler != str(self.folder):
            return
        import jax

        learner.cbstate.profiler = None
        try:
            jax.profiler.stop_trace()
        except Exception as error:  # a full disk: the training is worth more than its profile
            text = f"{self!r}: the profile could not be written: {type(error).__name__}: {error}"
            warnings.warn(text, UserWarning, stacklevel=2)

    def __repr__(self) -> str:
        unit, (first, last) = ("steps", self.steps) if self.steps is not None else ("epochs", self.epochs or (0, 0))
        return f"Profiler({self.folder.name!r}, {unit}=({first}, {last}))"


@dataclass(frozen=True)
class _AtStep(Schedule):
    """Due at one step of the whole training."""

    number: int

    def __repr__(self) -> str:
        return f"at step {self.number}"

    def due(self, step: int, epoch: int, learner: Any) -> bool:
        """Tell whether it is this one."""
        return step == self.number

    def next_due(self, step: int, epoch: int) -> int | None:
        """Return it, as long as it is to come."""
        return self.number if step < self.number else None


def _checked(given: Any, unit: str) -> tuple[int, int]:
    if not isinstance(given, Sequence) or isinstance(given, str) or len(given) != 2:
        raise DeclarationError(
            f"`{unit}` of `Profiler` are the first and the last to profile, not {given!r}.",
            fix=f"e.g. `{unit}=(10, 20)`",
        )
    first, last = (positive(number, f"Each of `{unit}` of `Profiler`") for number in given)
    if first > last:
        raise DeclarationError(
            f"`{unit}` of `Profiler` end before they begin: {given!r}.", fix=f"`{unit}=({last}, {first})`"
        )
    return first, last


def _wait_for(params: Any) -> None:
    import jax

    jax.block_until_ready(params)
