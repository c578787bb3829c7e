"""`Scheduler`, which sets hyperparameters at every step, and `onecycle`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

from fluxcb._calls import entry_point
from fluxcb._declare.access import Permission, Read, Write
from fluxcb._declare.callback import Callback
from fluxcb._declare.events import ComputeEnd, Event, ForwardBegin
from fluxcb._declare.handlers import Handler, on
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._declare.resolution import NotDefined, Resolution
from fluxcb._declare.schedules import positive
from fluxcb._declare.signatures import parameter_names
from fluxcb._errors import ConflictError, DeclarationError
from fluxcb._tracebacks import warn_user
from fluxcb._typing import StatePath
from fluxcb.callbacks.arguments import choice, finite_number, function_of
from fluxcb.callbacks.hyperparams.hyperparameter import hyperparameter_name, shown_hyperparameter

__all__ = ["Scheduler", "onecycle"]


_MAPPING = "write `Scheduler({LearningRate: optax.cosine_decay_schedule(1e-3, 1000)})`"


class Scheduler(Callback):
    """Set hyperparameters at every training step, inside the compiled step.

    By default, a schedule is called with the number of training steps finished since the Learner was built. This number
    starts at 0 and continues over several fits and after a resume. With `count="updates"`, a schedule is called with
    the number of updates, like a schedule inside an Optax optimizer. Steps whose update is skipped (`step.skip`) or
    held (`step.hold`) then do not count: with `AccumulateGradients(4)`, 8 steps are 2 updates.

    Args:
        schedules: A mapping from hyperparameters (`HyperParameter` classes or names) to schedules. A schedule is an
            Optax schedule, any other function `schedule(step) -> float[]` written in `jax.numpy`, or a number.
        count: What the schedules count, "steps" or "updates". Updates are counted from the first training step with
            this callback.

    Access:
        hyperparams.<name>: Write, for each name.
        step.skip, step.hold: Read (if `count="updates"`).
        cbstate.<name>_updates: Write (if `count="updates"`). The number of updates, int32[]; `<name>` is the first
            hyperparameter.

    Runs:
        ForwardBegin x AbstractTrainingPhase (traced).
        ComputeEnd x AbstractTrainingPhase (traced, if `count="updates"`).

    Cost:
        A few scalar operations inside the step. Fetches nothing, does not shorten windows, and does not recompile.

    Raises:
        ConflictError: A host handler of another callback sets one of the hyperparameters, which would have no effect.
        DeclarationError: `schedules` is empty, a key does not name a hyperparameter, a schedule cannot be called, or
            `count` is neither "steps" nor "updates".
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

    @entry_point(fixes=dict.fromkeys(("learning_rate", "lr", "schedule", "scheduler"), _MAPPING))
    def __init__(self, schedules: Mapping[Any, Any], *, count: Literal["steps", "updates"] = "steps") -> None:
        if not isinstance(schedules, Mapping) or not schedules:
            raise DeclarationError(
                f"`Scheduler` takes a mapping of hyperparameters to schedules, not {schedules!r}.",
                fix=_MAPPING,
            )
        self.schedules: dict[str, Callable[[Any], Any] | float] = {}
        for key, schedule in schedules.items():
            name = hyperparameter_name(key)
            if name in self.schedules:
                raise DeclarationError(f"`Scheduler` has two schedules for `{name}`.", fix="remove one of them")
            is_number = isinstance(schedule, int | float) and not isinstance(schedule, bool)
            if not is_number:
                example = "optax.cosine_decay_schedule(1e-3, 1000)"
                function_of(schedule, f"The schedule of `{name}`", "step", example=example, other="a number or ")
                _warn_of_epochs(schedule, name, key)
            self.schedules[name] = schedule
        self.scheduled_hyperparams = tuple(self.schedules)
        self.count = choice(count, ("steps", "updates"), "`count` of `Scheduler`")
        # The name contains a hyperparameter, so that schedulers of different hyperparameters have separate counts. The
        # name of a hyperparameter in a group contains dots, such as `head.learning_rate`.
        self.updates_entry = f"{next(iter(self.schedules))}_updates".replace(".", "_")

    def stateaccess(self) -> Mapping[str, Any]:
        """Return the paths that the callback reads and writes."""
        return {**self._setting(), **self._counting()} if self.count == "updates" else self._setting()

    # The access depends on the arguments, so it is computed for each instance and assigned to its handlers.

    def _setting(self) -> Mapping[str, Any]:
        hyperparams = {"hyperparams": {name: Write() for name in self.schedules}}
        return {**hyperparams, "cbstate": {self.updates_entry: Read()}} if self.count == "updates" else hyperparams

    def _counting(self) -> Mapping[str, Any]:
        return {"step": {"skip": Read(), "hold": Read()}, "cbstate": {self.updates_entry: Write()}}

    def handlers(self) -> list[Handler]:
        """Return the handlers; the one that counts updates only if `count="updates"`."""
        return [self._own(h) for h in super().handlers() if self.count == "updates" or h.event is not ComputeEnd]

    def _own(self, handler: Handler) -> Handler:
        if handler.event is ComputeEnd:
            return replace(handler, access=self._counting())
        return replace(handler, access=self._setting()) if handler.event is ForwardBegin else handler

    def init(self, learner: LearnerView) -> None:
        """Create the count of updates in `cbstate` if `count="updates"`."""
        import jax
        import numpy as np

        if self.count == "updates" and self.updates_entry not in learner.cbstate:
            learner.cbstate[self.updates_entry] = jax.device_put(np.int32(0))

    def how_to_declare(self, path: StatePath, permission: Permission) -> str:
        """Return the edit that declares a path: for a hyperparameter, the argument of the constructor."""
        if path[0] == "hyperparams" and len(path) == 2:
            return f"write `Scheduler({{{shown_hyperparameter(path[1])}: ...}})`"
        return super().how_to_declare(path, permission)

    def resolveconflict(self, other: Callback) -> Resolution:
        """Refuse another `Scheduler` that counts updates in the same entry."""
        if (
            isinstance(other, Scheduler)
            and self.count == other.count == "updates"
            and self.updates_entry == other.updates_entry
        ):
            name = next(iter(self.schedules))
            raise ConflictError(
                f"{self!r} and {other!r} both set `hyperparams.{name}` and count updates.",
                where=[repr(self), repr(other)],
                why=f"both would count each update in `cbstate.{self.updates_entry}`",
                fix="join the schedules into one: `optax.join_schedules([first, second], [updates])`",
            )
        return NotDefined()

    @on(ForwardBegin, AbstractTrainingPhase)
    def set_hyperparams(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Set each hyperparameter to the value of its schedule at this step."""
        step = learner.cbstate[self.updates_entry] if self.count == "updates" else learner.progress.step
        for name, schedule in self.schedules.items():
            learner.hyperparams[name] = schedule(step) if callable(schedule) else schedule

    @on(ComputeEnd, AbstractTrainingPhase)
    def count_update(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Count this step unless its update was skipped or held."""
        import jax.numpy as jnp

        flags = [getattr(learner.step, flag) for flag in ("skip", "hold") if flag in learner.step]
        updated = ~functools.reduce(jnp.logical_or, flags) if flags else True
        learner.cbstate[self.updates_entry] = learner.cbstate[self.updates_entry] + jnp.asarray(updated, jnp.int32)

    def __repr__(self) -> str:
        count = [] if self.count == "steps" else [f'count="{self.count}"']
        return f"Scheduler({', '.join([*self.schedules, *count])})"


def _warn_of_epochs(schedule: Any, name: str, key: Any) -> None:
    """Warn if the parameter of a schedule is called `epoch`, because a schedule is called with a number of steps."""
    called = parameter_names(schedule)[:1]
    if called and called[0] in ("epoch", "epochs"):
        param = key.__name__ if isinstance(key, type) else repr(name)
        warn_user(
            f"The schedule of `{name}` takes `{called[0]}`, but `Scheduler` calls it with the number of finished "
            "steps. For a function of the epoch, write "
            f"`HyperParamSetterWithFunc({param}, lambda epoch, current: ...)`.",
            UserWarning,
        )


@entry_point
def onecycle(
    total_steps: int,
    max_value: float,
    *,
    warmup: float = 0.3,
    start_factor: float = 25.0,
    end_factor: float = 1e4,
) -> Callable[[Any], Any]:
    """Return a one-cycle schedule: a cosine from `max_value / start_factor` up to `max_value`, then down to nearly 0.

    Args:
        total_steps: Length of the cycle (steps). After it, the value stays constant.
        max_value: The highest value.
        warmup: Fraction of the steps in which the value increases, at least 0 and below 1.
        start_factor: Ratio of the highest value to the initial value.
        end_factor: Ratio of the initial value to the final value.

    Returns:
        `schedule(step) -> float32[]`: `optax.cosine_onecycle_schedule`.

    Raises:
        DeclarationError: A number is out of range.

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
        finite_number(factor, f"`{name}` of `onecycle`", above=0)
    finite_number(warmup, "`warmup` of `onecycle`", least=0, below=1)
    return optax.cosine_onecycle_schedule(
        total_steps, max_value, pct_start=warmup, div_factor=start_factor, final_div_factor=end_factor
    )
