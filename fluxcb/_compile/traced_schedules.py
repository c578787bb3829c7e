"""Schedules of traced handlers: whether a handler is due, computed on the device."""

from __future__ import annotations

from typing import Any

from fluxcb._compile.step_setup import StepSetup
from fluxcb._declare.declared import BoundHandler
from fluxcb._declare.schedules import EveryEpochs, EverySteps, Schedule, StepRange, Switched
from fluxcb._errors import TraceError

__all__ = ["is_due"]


def is_due(schedule: Schedule, handler: BoundHandler, setup: StepSetup, counters: Any, *, trains: bool) -> Any:
    """Return whether a traced handler is due in the step that is being traced (bool[]).

    Args:
        schedule: One of its schedules.
        handler: The handler.
        setup: The fixed inputs of the step.
        counters: The carry's `counters` before the step.
        trains: Whether the phase trains.

    Raises:
        TraceError: The schedule cannot be computed on the device.
    """
    if isinstance(schedule, Switched):
        # The flags are the last words of `counters`, after the words of the random key.
        number = setup.switches.index(handler.declared.name)
        return counters[number - len(setup.switches)] != 0
    if isinstance(schedule, StepRange):
        # The step that is traced is the one after those that `counters` has counted.
        return (counters[0] + 1 >= schedule.first) & (counters[0] + 1 <= schedule.last)
    if isinstance(schedule, EverySteps):
        finished = counters[0 if trains else 2]  # the same count as for host schedules
        return (finished + 1) % schedule.steps == 0
    if isinstance(schedule, EveryEpochs):
        # Single steps before the first epoch have the epoch 0, which is a multiple of every period.
        return (counters[1] > 0) & (counters[1] % schedule.epochs == 0)
    raise TraceError(
        f"{handler.declared.label} has the schedule {schedule!r} on a traced handler.",
        where=handler.where,
        why="the compiled step has the step and epoch numbers, but cannot read a clock or call Python",
        fix="use EverySteps or EveryEpochs, or a host handler",
    )
