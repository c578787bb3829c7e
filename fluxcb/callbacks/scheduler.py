"""`Scheduler`: hyperparameters as functions of the step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from fluxcb._declare.access import Permission, Write, normalise, overlap, writes
from fluxcb._declare.callback import Callback
from fluxcb._declare.events import Event, ForwardBegin, Trigger
from fluxcb._declare.handlers import on
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._declare.resolution import NotDefined, Resolution
from fluxcb._declare.schedules import positive
from fluxcb._declare.signatures import accepts
from fluxcb._errors import ConflictError, DeclarationError
from fluxcb._typing import StatePath
from fluxcb.callbacks.arguments import number_above, number_between
from fluxcb.callbacks.hyperparameter import hyperparameter_name, shown_hyperparameter

__all__ = ["Scheduler", "onecycle"]


class Scheduler(Callback):
    """Set hyperparameters at every training step, inside the compiled step.

    A schedule is called with the number of training steps finished since the Learner was built, so it starts at 0 and
    goes on over several fits and after a resume.

    Args:
        schedules: For each hyperparameter (a `HyperParameter` class, or its name), an optax schedule, any other
            `schedule(step) -> float[]` in `jax.numpy`, or a number.

    Access:
        hyperparams.<name>: Write, for each name.

    Runs:
        ForwardBegin x AbstractTrainingPhase (traced).
        Trigger x AbstractTrainingPhase (host): does nothing, and lets those be found who set the same at Trigger.

    Cost:
        A few scalar operations inside the step; nothing is recompiled, fetched or bounded.

    Raises:
        ConflictError: Another callback sets one of the hyperparameters at Trigger, where it would never count.
        DeclarationError: Nothing is scheduled, a key names no hyperparameter, or a schedule cannot be called.
        MissingStateError: The optimizer was not built with `fluxcb.inject` (when the Learner is built).

    Example:
        >>> import jax.numpy as jnp, optax, fluxcb
        >>> from fluxcb.callbacks import LearningRate, Scheduler
        >>> learner = fluxcb.Learner.from_loss(
        ...     {"w": jnp.ones(())},
        ...     lambda params, batch, key: jnp.mean(params["w"] * batch),
        ...     fluxcb.inject(optax.sgd, learning_rate=0.0),
        ...     data=[jnp.ones(2)] * 3,
        ...     default_callbacks=False,
        ...     callbacks=[Scheduler({LearningRate: optax.linear_schedule(1.0, 0.0, 4)})],
        ... )
        >>> history = learner.fit(1)  # with 1.0, 0.75 and 0.5
        >>> learner.hyperparams
        {'learning_rate': 0.5}

    Source:
        FluxTraining.jl, `Scheduler`; tensorpack, `ScheduledHyperParamSetter`.
    """

    def __init__(self, schedules: Mapping[Any, Any]) -> None:
        if not isinstance(schedules, Mapping) or not schedules:
            raise DeclarationError(
                f"`Scheduler` takes a mapping of hyperparameters to schedules, not {schedules!r}.",
                fix="write `Scheduler({LearningRate: optax.cosine_decay_schedule(1e-3, 1000)})`",
            )
        self.schedules: dict[str, Callable[[Any], Any] | float] = {}
        for key, schedule in schedules.items():
            name = hyperparameter_name(key)
            if name in self.schedules:
                raise DeclarationError(f"`Scheduler` is given two schedules for `{name}`.", fix="give one")
            if not callable(schedule) and (isinstance(schedule, bool) or not isinstance(schedule, int | float)):
                raise DeclarationError(
                    f"The schedule of `{name}` must be a function of the step or a number, not {schedule!r}.",
                    fix="e.g. `optax.cosine_decay_schedule(1e-3, 1000)`, or `onecycle(1000, 1e-2)`",
                )
            if callable(schedule) and not accepts(schedule, 1):
                raise DeclarationError(
                    f"The schedule of `{name}` takes {inspect.signature(schedule)}, and is called with the step.",
                    fix="write `def schedule(step):`, or give e.g. `optax.cosine_decay_schedule(1e-3, 1000)`",
                )
            self.schedules[name] = schedule

    def stateaccess(self) -> Mapping[str, Any]:
        """Return what it reads and writes; see the class."""
        return {"hyperparams": {name: Write() for name in self.schedules}}

    def how_to_declare(self, path: StatePath, permission: Permission) -> str:
        """Return the edit that adds a path: hyperparameters are named in an argument."""
        if path[0] == "hyperparams" and len(path) == 2:
            return f"write `Scheduler({{{shown_hyperparameter(path[1])}: ...}})`"
        return super().how_to_declare(path, permission)

    def resolveconflict(self, other: Callback) -> Resolution:
        """Refuse who sets one of the same hyperparameters at Trigger: the next step would overwrite it in any order."""
        for entry in other.handlers():
            access = other.stateaccess() if entry.access is None else entry.access
            if entry.event is Trigger:
                for name in self.schedules:
                    self._refuse(name, other, access)
        return NotDefined()

    def _refuse(self, name: str, other: Callback, access: Mapping[str, Any]) -> None:
        for path, permission in normalise(access, owner=repr(other), where="").items():
            if writes(permission) and path[0] == "hyperparams" and overlap(path, ("hyperparams", name)):
                raise ConflictError(
                    f"{self!r} sets `hyperparams.{name}` at every step, so what {other!r} sets at Trigger "
                    "never counts.",
                    where=["Scheduler.set_hyperparams, at ForwardBegin", f"{type(other).__name__}, at Trigger"],
                    why="between a Trigger and the next update there always is a ForwardBegin, so no order would help",
                    fix=[
                        "leave one of the two out of the callbacks list",
                        "for a warm-up, write `ScheduledHyperParamSetter(LearningRate, [(0, 0.0), (500, 0.1)], "
                        '"linear", step_based=True)`, which sets nothing after its last step',
                    ],
                )

    @on(Trigger, AbstractTrainingPhase, access={})
    def meet(self, event: Event, phase: Phase, learner: Any) -> None:
        """Do nothing; only callbacks that share a moment are asked how they get on, see `resolveconflict`."""

    @on(ForwardBegin, AbstractTrainingPhase)
    def set_hyperparams(self, event: Event, phase: Phase, learner: Any) -> None:
        """Set each hyperparameter to its schedule's value at this step."""
        step = learner.progress.step
        for name, schedule in self.schedules.items():
            learner.hyperparams[name] = schedule(step) if callable(schedule) else schedule

    def __repr__(self) -> str:
        return f"Scheduler({', '.join(self.schedules)})"


def onecycle(
    total_steps: int,
    max_value: float,
    *,
    warmup: float = 0.3,
    start_factor: float = 25.0,
    end_factor: float = 1e4,
) -> Callable[[Any], Any]:
    """Return a one-cycle schedule: up from `max_value / start_factor` on a cosine, then down to nearly 0.

    Args:
        total_steps: Length of the cycle (steps); afterwards the last value stays.
        max_value: The highest value.
        warmup: Part of the steps that go up, between 0 and 1.
        start_factor: How much lower than the highest it starts.
        end_factor: How much lower than the start it ends.

    Returns:
        `schedule(step) -> float32[]`: `optax.cosine_onecycle_schedule`.

    Raises:
        DeclarationError: A number is out of its range.

    Example:
        >>> schedule = onecycle(100, 1.0)
        >>> [round(float(schedule(step)), 4) for step in (0, 30, 100)]
        [0.04, 1.0, 0.0]

    Source:
        Smith and Topin (2018), Super-convergence, arXiv:1708.07120; FluxTraining.jl, `onecycle`.
    """
    import optax

    positive(total_steps, "`total_steps` of `onecycle`")
    for factor, name in ((max_value, "max_value"), (start_factor, "start_factor"), (end_factor, "end_factor")):
        number_above(0, factor, f"`{name}` of `onecycle`")
    number_between(0, 1, warmup, "`warmup` of `onecycle`")
    return optax.cosine_onecycle_schedule(
        total_steps, max_value, pct_start=warmup, div_factor=start_factor, final_div_factor=end_factor
    )
