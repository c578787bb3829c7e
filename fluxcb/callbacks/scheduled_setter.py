"""`ScheduledHyperParamSetter`: a hyperparameter from a table of epochs or steps."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any, Literal

from fluxcb._declare.callback import Callback
from fluxcb._declare.dispatch import Entry
from fluxcb._declare.events import Event, ForwardBegin, Trigger
from fluxcb._declare.handlers import on
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._declare.schedules import Schedule
from fluxcb._errors import DeclarationError
from fluxcb.callbacks.hyperparameter import ObjAttrParam
from fluxcb.callbacks.setters import HyperParamSetter

__all__ = ["ScheduledHyperParamSetter"]


class ScheduledHyperParamSetter(HyperParamSetter):
    """Set a hyperparameter after given epochs, or after given steps.

    A point `(n, value)` takes effect once `n` epochs (or steps) are finished: `(0, v)` holds from the first on,
    `(3, v)` from the fourth. With `interp="linear"` it also moves between two points, once per epoch or per step. In
    between, before the first and after the last point it sets nothing, so that others may: a warm-up ends with its
    last point.

    It knows how far it has come, and that is saved with a checkpoint: after a resume it sets nothing a second time. A
    new instance in a training that is under way, and one whose Learner was set back (`learner.state = ...`), begin with
    the value that belongs to the epoch or step at hand; so does one that missed a point, under `every(..., epochs=2)`.

    With `step_based=True` it is traced into the step: nothing waits for the host, and windows are as long as before.
    For other curves than straight lines use `Scheduler`, which sets at every step. Such a `Scheduler` and a table of
    steps may set one hyperparameter together: `in_order(Scheduler(...), ScheduledHyperParamSetter(...))`.

    Args:
        param: A `HyperParameter` class, a name in `hyperparams`, or an `ObjAttrParam`.
        schedule: Points `(n, value)`, with `n` rising from 0 or more.
        interp: `linear` to move from point to point, None to jump.
        step_based: Whether `n` counts steps, and not epochs.

    Access:
        hyperparams.<name>: Write (cbstate.attributes.<name> for an `ObjAttrParam`).

    Runs:
        FitBegin x AbstractTrainingPhase (host).
        Trigger x AbstractTrainingPhase (host, for epochs).
        ForwardBegin x AbstractTrainingPhase (traced, for steps).

    Cost:
        For epochs, a few Python operations each; for steps, a few scalar operations inside the step. Nothing is
        recompiled or fetched.

    Raises:
        DeclarationError: The schedule is empty, not rising or no list of pairs of numbers; `interp` is unknown; or the
            attribute of a Python object is to be set after steps.
        MissingStateError: The optimizer was not built with `fluxcb.inject` (when the Learner is built).

    Example:
        >>> from fluxcb.callbacks import LearningRate, ScheduledHyperParamSetter
        >>> from fluxcb.testing import testlearner
        >>> learner = testlearner(ScheduledHyperParamSetter(LearningRate, [(0, 0.5), (2, 0.05)]))
        >>> history = learner.fit(2)  # with 0.5 and 0.5
        >>> round(learner.hyperparams["learning_rate"], 3)
        0.05

    Source:
        tensorpack, `ScheduledHyperParamSetter`, whose `set_at_beginning=True` this always does, where it is needed.
    """

    def __init__(
        self,
        param: Any,
        schedule: Iterable[tuple[int, float]],
        interp: Literal["linear"] | None = None,
        step_based: bool = False,
    ) -> None:
        super().__init__(param)
        if interp not in (None, "linear"):
            raise DeclarationError(
                f'`interp` of `ScheduledHyperParamSetter` is "linear" or None, not {interp!r}.', fix='write `"linear"`'
            )
        if step_based and isinstance(param, ObjAttrParam):
            raise DeclarationError(
                f"{param!r} cannot be set after steps.",
                why="steps run inside a compiled program, which reaches no Python object",
                fix=[
                    "give epochs: leave out `step_based=True`",
                    "write `every(HyperParamSetterWithFunc(param, func), steps=100)`, which ends the windows of steps",
                ],
            )
        self.schedule = _checked(schedule, "steps" if step_based else "epochs")
        self.interp = interp
        self.step_based = step_based
        self._seen: int | None = None  # how far it has come

    # Which handlers there are is a matter of `step_based`; the other ones would order and conflict for nothing.

    def handlers(self) -> list[Entry]:
        """Return the handlers that this instance has."""
        return [entry for entry in super().handlers() if self._has(entry.event)]

    def entry_for(self, event: type[Event], phase: type[Phase]) -> tuple[Callback, Entry, tuple[Schedule, ...]] | None:
        """Return who handles a moment."""
        found = super().entry_for(event, phase)
        return found if found is None or self._has(event) else None

    def _has(self, event: type[Event]) -> bool:
        return event is not (Trigger if self.step_based else ForwardBegin)

    def state_dict(self) -> dict[str, Any]:
        """Return how far it has come."""
        return {**super().state_dict(), "seen": self._seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it back."""
        super().load_state_dict(state)
        self._seen = state["seen"]

    def value_at(self, finished: int) -> float | None:
        """Return the value that belongs to a number of finished epochs or steps, or None before the first point."""
        passed = [point for point in self.schedule if point[0] <= finished]
        if not passed:
            return None
        (start, value), rest = passed[-1], self.schedule[len(passed) :]
        if self.interp is None or not rest or start == finished:
            return value
        end, goal = rest[0]
        return value + (goal - value) * (finished - start) / (end - start)

    def next_value(self, learner: Any) -> float | None:
        """Return the value if a point was passed, or is being neared, since the last time."""
        at = learner.progress.step if self.step_based else learner.progress.epoch
        seen, self._seen = self._seen, at
        if seen is None or at < seen:
            return self.value_at(at)
        if self.step_based:  # what came since has been set inside the steps
            return None
        newest = max((n for n, _ in self.schedule if n <= at), default=None)
        moving = self.interp is not None and self.schedule[0][0] < at < self.schedule[-1][0] and at > seen
        return self.value_at(at) if moving or (newest is not None and newest > seen) else None

    @on(ForwardBegin, AbstractTrainingPhase)
    def set_in_step(self, event: Event, phase: Phase, learner: Any) -> None:
        """Set the value where a point is reached, or lies ahead and behind."""
        import jax.numpy as jnp

        step = learner.progress.step
        points = jnp.array([n for n, _ in self.schedule], jnp.int32)
        values = jnp.array([value for _, value in self.schedule], jnp.float32)
        if self.interp is None:
            here = points == step
            due, value = jnp.any(here), jnp.sum(jnp.where(here, values, 0))
        else:
            due = (points[0] <= step) & (step <= points[-1])
            value = jnp.interp(step.astype(jnp.float32), points.astype(jnp.float32), values)
        learner.hyperparams[self.param_name] = jnp.where(due, value, learner.hyperparams[self.param_name])


def _checked(schedule: Any, unit: str) -> list[tuple[int, float]]:
    """Return the points of a schedule."""
    example = "e.g. `[(0, 0.1), (30, 0.01)]`"
    points = list(schedule) if isinstance(schedule, Iterable) and not isinstance(schedule, Mapping | str) else None
    if not points:
        raise DeclarationError(
            f"The schedule of `ScheduledHyperParamSetter` must be a list of pairs ({unit}, value), not {schedule!r}.",
            fix=example,
        )
    found: list[tuple[int, float]] = []
    for point in points:
        if not _is_point(point):
            raise DeclarationError(
                f"A point of the schedule of `ScheduledHyperParamSetter` is a number of finished {unit}, 0 or more, "
                f"and a finite value, not {point!r}.",
                fix=example,
            )
        n = operator.index(point[0])
        if found and n <= found[-1][0]:
            raise DeclarationError(
                f"The {unit} of the schedule of `ScheduledHyperParamSetter` must rise, but {n} comes after "
                f"{found[-1][0]}.",
                fix="sort the points, and give each number once",
            )
        found.append((n, point[1]))
    return found


def _is_point(point: Any) -> bool:
    if not isinstance(point, tuple | list) or len(point) != 2 or any(isinstance(part, bool) for part in point):
        return False
    n, value = point
    return hasattr(n, "__index__") and n >= 0 and isinstance(value, Real) and math.isfinite(value)
