"""`ScheduledHyperParamSetter`, which sets a hyperparameter from a table of epochs or steps."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any, Literal

from fluxcb._declare.events import Event, ForwardBegin, Trigger
from fluxcb._declare.handlers import Handler, on
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._declare.state import RATE_FIX, RATE_WHY, is_negative_rate
from fluxcb._errors import DeclarationError
from fluxcb.callbacks.arguments import choice
from fluxcb.callbacks.hyperparams.hyperparameter import ObjAttrParam
from fluxcb.callbacks.hyperparams.setters import HyperParamSetter

__all__ = ["ScheduledHyperParamSetter"]


class ScheduledHyperParamSetter(HyperParamSetter):
    """Set a hyperparameter after given epochs, or after given steps.

    A point `(n, value)` takes effect when `n` epochs (or steps) are finished: `(0, v)` applies from the first epoch on,
    and `(3, v)` from the fourth. With `interp="linear"`, the value is also interpolated between points, once per epoch
    or per step. Otherwise, nothing is set between points. Nothing is ever set before the first point and after the last
    one, so other callbacks can set the hyperparameter there. A warm-up, for example, ends with its last point.

    Checkpoints save which points have been set, so a resumed run does not set them again. The current value of the
    table is set in three other cases: a new instance starts in the middle of a training, the Learner returns to an
    earlier state (`learner.state = ...`), or the setter missed a point because of `every(..., epochs=2)`.

    With `step_based=True`, the setter is traced into the compiled step. It does not wait for the host and does not
    shorten windows. For curves that are not piecewise linear, use `Scheduler`, which sets the value at every step. A
    `Scheduler` and a step-based table can set the same hyperparameter if their order is declared:
    `in_order(Scheduler(...), ScheduledHyperParamSetter(...))`.

    Args:
        param: A `HyperParameter` class, a name in `hyperparams`, or an `ObjAttrParam`.
        schedule: Points `(n, value)` with increasing `n`, at least 0.
        interp: `linear` to interpolate between points, None for a step function.
        step_based: Whether `n` counts steps instead of epochs.

    Access:
        hyperparams.<name>: Write (cbstate.attributes.<name> for an `ObjAttrParam`).

    Runs:
        FitBegin x AbstractTrainingPhase (host).
        Trigger x AbstractTrainingPhase (host, for epochs).
        ForwardBegin x AbstractTrainingPhase (traced, for steps).

    Cost:
        For epochs, a few Python operations per epoch. For steps, a few scalar operations inside the step. Fetches
        nothing and does not recompile.

    Raises:
        DeclarationError: The schedule is empty, not increasing, not a list of pairs of numbers, or has a negative
            learning rate; `interp` is unknown; or `step_based=True` is used with an `ObjAttrParam`.
        MissingStateError: The optimizer was not built with `fluxcb.inject` (when the Learner is built).

    Example:
        >>> from fluxcb.callbacks import LearningRate, ScheduledHyperParamSetter
        >>> from fluxcb.testing import testlearner
        >>> learner = testlearner(ScheduledHyperParamSetter(LearningRate, [(0, 0.5), (2, 0.05)]))
        >>> history = learner.fit(2)  # with 0.5 and 0.5
        >>> round(learner.hyperparams["learning_rate"], 3)
        0.05

    Source:
        tensorpack, `ScheduledHyperParamSetter`; its `set_at_beginning=True` is always on here.
    """

    def __init__(
        self,
        param: Any,
        schedule: Iterable[tuple[int, float]],
        interp: Literal["linear"] | None = None,
        step_based: bool = False,
    ) -> None:
        super().__init__(param)
        choice(interp, ("linear", None), "`interp` of `ScheduledHyperParamSetter`")
        if step_based and isinstance(param, ObjAttrParam):
            raise DeclarationError(
                f"{param!r} cannot be set after steps.",
                why="steps run inside a compiled program, which cannot change Python objects",
                fix=[
                    "leave out `step_based=True` to set it after epochs",
                    "write `every(HyperParamSetterWithFunc(param, func), steps=100)`, which shortens windows",
                ],
            )
        self.schedule = _checked(schedule, "steps" if step_based else "epochs")
        for point in self.schedule:
            if is_negative_rate(self.param_name, point[1]):
                raise DeclarationError(
                    f"A point of the schedule of {self!r} is {point!r}, a negative learning rate.",
                    why=RATE_WHY,
                    fix=f"use {RATE_FIX}",
                )
        self.interp = interp
        self.step_based = step_based
        self._seen: int | None = None  # finished epochs or steps at the last call

    # The handlers depend on `step_based`. Handlers without a task are removed, so that they cannot cause conflicts.

    def handlers(self) -> list[Handler]:
        """Return the handlers that this instance needs."""
        return [handler for handler in super().handlers() if self._has(handler.event)]

    def _has(self, event: type[Event]) -> bool:
        return event is not (Trigger if self.step_based else ForwardBegin)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of finished epochs or steps at the last call."""
        return {**super().state_dict(), "seen": self._seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        super().load_state_dict(state)
        self._seen = state["seen"]

    def value_at(self, finished: int) -> float | None:
        """Return the value for a number of finished epochs or steps, or None before the first point."""
        passed = [point for point in self.schedule if point[0] <= finished]
        if not passed:
            return None
        (start, value), rest = passed[-1], self.schedule[len(passed) :]
        if self.interp is None or not rest or start == finished:
            return value
        end, goal = rest[0]
        return value + (goal - value) * (finished - start) / (end - start)

    def next_value(self, learner: LearnerView) -> float | None:
        """Return the value if a point was reached since the last call, or if the value is interpolated now."""
        finished = learner.progress.step if self.step_based else learner.progress.epoch
        seen, self._seen = self._seen, finished
        if seen is None or finished < seen:  # a new instance, or the Learner returned to an earlier state
            return self.value_at(finished)
        if self.step_based:  # `set_in_step` has set the points since then
            return None
        newest = max((n for n, _ in self.schedule if n <= finished), default=None)
        moving = self.interp is not None and self.schedule[0][0] < finished < self.schedule[-1][0] and finished > seen
        return self.value_at(finished) if moving or (newest is not None and newest > seen) else None

    @on(ForwardBegin, AbstractTrainingPhase)
    def set_in_step(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Set the value at each point and, with `interp`, between points."""
        import jax.numpy as jnp

        step = learner.progress.step
        points = jnp.array([n for n, _ in self.schedule], jnp.int32)
        values = jnp.array([value for _, value in self.schedule], jnp.float32)
        if self.interp is None:
            here = points == step
            due, value = jnp.any(here), jnp.sum(jnp.where(here, values, 0))
        else:
            due = (points[0] <= step) & (step <= points[-1])
            value = jnp.interp(jnp.asarray(step, jnp.float32), points.astype(jnp.float32), values)
        learner.hyperparams[self.param_name] = jnp.where(due, value, learner.hyperparams[self.param_name])


def _checked(schedule: Any, unit: str) -> list[tuple[int, float]]:
    """Return the points of a schedule as a list, with `n` as an int.

    Raises:
        DeclarationError: The schedule is not a list of points with increasing `n`.
    """
    example = "write e.g. `[(0, 0.1), (30, 0.01)]`"
    points = list(schedule) if isinstance(schedule, Iterable) and not isinstance(schedule, Mapping | str) else None
    if not points:
        raise DeclarationError(
            f"The schedule of `ScheduledHyperParamSetter` must be a list of pairs ({unit}, value), not {schedule!r}.",
            fix=example,
        )
    checked: list[tuple[int, float]] = []
    for point in points:
        if not _is_point(point):
            raise DeclarationError(
                f"A point of the schedule of `ScheduledHyperParamSetter` must be a number of finished {unit}, 0 or "
                f"more, and a finite value, not {point!r}.",
                fix=example,
            )
        n = operator.index(point[0])
        if checked and n <= checked[-1][0]:
            raise DeclarationError(
                f"The {unit} of the schedule of `ScheduledHyperParamSetter` must increase, but {n} comes after "
                f"{checked[-1][0]}.",
                fix="sort the points, and use each number once",
            )
        checked.append((n, point[1]))
    return checked


def _is_point(point: Any) -> bool:
    if not isinstance(point, tuple | list) or len(point) != 2 or any(isinstance(part, bool) for part in point):
        return False
    n, value = point
    return hasattr(n, "__index__") and n >= 0 and isinstance(value, Real) and math.isfinite(value)
