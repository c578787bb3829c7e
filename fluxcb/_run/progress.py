"""The progress of a training: how many steps and epochs have run, and how many are expected."""

from __future__ import annotations

from fluxcb._declare.phases import Phase
from fluxcb._run.fit_record import Position

__all__ = ["Progress"]

# A validation epoch inside a training epoch changes these counters, and restores them at its end.
_OF_EPOCH = ("step_in_epoch", "steps_in_epoch", "cancelled_in_epoch", "compiled")


class Progress:
    """The counters of a training, as the host knows them.

    They refer to the steps whose handlers have run. The carry has its own counters, which are ahead of these while
    windows are in flight.

    `StepLoop` counts steps and cancelled steps. `Epoch` and `run_epoch` set the counters of an epoch.
    `run_fit` sets where the fit ends. Restoring a checkpoint and `callbacks_as_hook` replace the counters.

    Args:
        in_turn: Names of the training phases that alternate, a tuple for each `InTurn`.

    Attributes:
        step: Finished training steps.
        epoch: Number of the current epoch.
        step_in_epoch: Finished steps of the current epoch.
        cancelled: Number of training steps that were cancelled at StepBegin.
        cancelled_in_epoch: Number of cancelled steps of the current epoch, if the epoch does not train.
        epochs: Number of the epoch that this fit ends with; 0 if unknown.
        last_step: Number of the training step that this fit ends with; 0 if unknown.
        steps_in_epoch: Expected steps of the current epoch; 0 if unknown.
        compiled: Whether the step was already compiled when the current epoch began or resumed.
        outer_step_in_epoch: Finished steps of the training epoch around a validation.
        in_turn: See the argument.
        other_turns: Finished steps of the other phases in the current epoch of an `InTurn`, by name.
    """

    def __init__(self, in_turn: tuple[tuple[str, ...], ...] = ()) -> None:
        self.step = self.epoch = self.step_in_epoch = 0
        self.cancelled = self.cancelled_in_epoch = 0
        self.epochs = self.last_step = self.steps_in_epoch = 0
        self.compiled = True
        self.outer_step_in_epoch = 0
        self.in_turn = in_turn
        self.other_turns: dict[str, int] = {}

    def count(self, steps: int, *, trains: bool) -> None:
        """Count finished steps of the current epoch; `trains` tells whether they are training steps."""
        if trains:
            self.step += steps
        self.step_in_epoch += steps

    def count_cancelled(self, *, trains: bool) -> None:
        """Count a step that was cancelled at StepBegin."""
        # Schedules count training steps over the whole run, and steps of validation within an epoch.
        if trains:
            self.cancelled += 1
        else:
            self.cancelled_in_epoch += 1

    def cancelled_of(self, phase: Phase) -> int:
        """Return the number of steps cancelled at StepBegin: in the training, or in a validation epoch."""
        return self.cancelled if type(phase).trains else self.cancelled_in_epoch

    def position(self, phase: Phase) -> Position:
        """Return the position in the current epoch of a phase."""
        others = self.other_turns if type(phase).trains else {}
        return Position(type(phase).name, self.step_in_epoch, self.outer_step_in_epoch, others)

    def of_epoch(self) -> dict[str, int]:
        """Return the counters that belong to the current epoch, by name."""
        return {name: getattr(self, name) for name in _OF_EPOCH}

    def replace(self, **counters: int) -> None:
        """Replace counters by name."""
        for name, value in counters.items():
            setattr(self, name, value)
