"""Checks and errors for what callbacks cannot do in a hand-written loop."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from fluxcb._check.metric_names import mode_warnings
from fluxcb._compile.plan import PhasePlan, Plan
from fluxcb._declare.access import dotted, writes
from fluxcb._declare.declared import Declared
from fluxcb._declare.events import ComputeEnd, EpochEnd, ForwardBegin, StepBegin
from fluxcb._declare.phases import Phase
from fluxcb._declare.schedules import EverySteps
from fluxcb._declare.state import ENGINE_STEP_NAMES, step_names
from fluxcb._errors import DeclarationError, MissingStateError, UnknownStateError
from fluxcb._run.external_state import TREES
from fluxcb._run.external_steps import AFTER_STEP
from fluxcb._tracebacks import warn_user

__all__ = [
    "check_access",
    "check_handlers",
    "check_names",
    "check_step_number",
    "check_tree",
    "not_begun",
    "step_not_begun",
    "warn_about_other_phases",
    "warn_of_idle",
    "warn_of_missed",
    "warn_of_stale_state",
]

# State that exists without a model, an optimizer, and data.
_ALWAYS_AVAILABLE = ("step", "cbstate", "progress", "control", "key", "callbacks")
_OF_STATE = (*TREES, "hyperparams", "snapshots")
# Values that a step has even if the loop does not report them.
_IN_STEP = ("batch", "skip")

# The loop computes these, and callbacks may read them if it reports them.
_OF_THE_STEP_FUNCTION = ("grads", "updates")

_INSTEAD = "train with a `Learner`, or implement this callback in the loop"


def check_tree(state: Any, set_state: Any, *, resume: bool) -> None:
    """Check the functions that connect callbacks with the loop's state.

    Raises:
        DeclarationError: An argument is not a function, or a required one is missing.
    """
    for name, function, example in (
        ("state", state, "state=lambda: (params, opt_state)"),
        ("set_state", set_state, "set_state=put"),
    ):
        # Users may pass the state itself, which would be the state before the first step forever.
        if function is not None and not callable(function):
            raise DeclarationError(
                f"`{name}` of `callbacks_as_hook` must be a function, not {type(function).__name__}.",
                why="the loop replaces its state at each step, so the hook has to get the current one",
                fix=f"write e.g. `{example}`",
            )
    if set_state is not None and state is None:
        raise DeclarationError(
            "`callbacks_as_hook` was given `set_state` without `state`.",
            fix="pass both: `callbacks_as_hook(callbacks, values, state=get, set_state=put)`",
        )
    if resume and set_state is None:
        raise DeclarationError(
            "`resume=True` of `callbacks_as_hook` needs `state` and `set_state`.",
            why="a checkpoint holds the train state, which belongs to the loop",
            fix="write `callbacks_as_hook(callbacks, values, state=get, set_state=put, resume=True)`",
        )


def check_access(declared: Declared, names: Iterable[str], *, has_state: bool, has_put: bool) -> None:
    """Check that a callback uses only what the loop provides.

    Args:
        declared: The callback.
        names: The names of the values that the loop reports.
        has_state: Whether the loop provides its train state.
        has_put: Whether callbacks can change it.

    Raises:
        DeclarationError: The callback uses something else.
    """
    step = (*names, "batch") if has_state else (*names, *_IN_STEP)
    if has_state:
        # With `set_state`, a callback may skip an update, because the hook then returns the previous state to the loop.
        step = (*step, *_OF_THE_STEP_FUNCTION, "hold") if has_put else (*step, *_OF_THE_STEP_FUNCTION, "hold", "skip")
    for path, permission, where in declared.accesses():
        writing = writes(permission)
        # Savers declare to read everything, which works if the loop provides its state.
        available = path[0] in _ALWAYS_AVAILABLE or (
            has_state and (path[0] in _OF_STATE or (path == ("*",) and not writing))
        )
        unavailable = not available and (path != ("data",) or writing)  # `data` is empty, but can be read
        # A reported value must stay what the loop computed.
        overwrites = path[0] == "step" and writing and (len(path) == 1 or path[1] in step)
        if unavailable or overwrites:
            raise DeclarationError(
                f"{declared.label} {'writes' if writing else 'reads'} `{dotted(path)}`, which belongs to "
                "the hand-written loop.",
                where=where,
                why="`callbacks_as_hook` can read the values that the loop reports, and cannot change its training",
                fix=["write `callbacks_as_hook(callbacks, values, state=get, set_state=put)`", _INSTEAD]
                if not has_state
                and (path[0] in _OF_STATE or path == ("step", "skip") or (path == ("*",) and not writing))
                else _INSTEAD,
            )
        if writing and path[0] in (*TREES, "hyperparams") and not has_put:
            raise DeclarationError(
                f"{declared.label} writes `{dotted(path)}`, and `callbacks_as_hook` has no `set_state`.",
                where=where,
                why="the train state belongs to the loop, which has to receive the new one",
                fix="write `callbacks_as_hook(callbacks, values, state=get, set_state=put)`",
            )


def check_names(callbacks: Sequence[Declared], names: Iterable[str], phase: type[Phase]) -> None:
    """Check that the loop reports the values, and can have the metrics, that callbacks read; warn of assumed modes.

    Args:
        callbacks: All callbacks.
        names: The names of the values that the loop reports.
        phase: The phase of the loop.

    Raises:
        UnknownStateError: The loop does not report a value.
        MissingStateError: A callback watches a metric of another phase.
    """
    accesses = [(declared, *access) for declared in callbacks for access in declared.accesses() if access[0] != ("*",)]
    # A value that a callback writes exists at the step even if the loop does not report it.
    written = {path[:2] for _, path, permission, _ in accesses if path[0] == "step" and writes(permission)}
    known = {*step_names((phase,)), *ENGINE_STEP_NAMES}
    for declared, path, _, where in accesses:
        if path[0] != "step" or len(path) == 1 or path[:2] in written or path[1] in known:
            continue
        reported = ", ".join(f'"{name}": ...' for name in (*names, path[1]))
        raise UnknownStateError(
            f"{declared.label} reads `{dotted(path[:2])}`, which the loop does not report.",
            where=where,
            fix=f"report it: `callbacks_as_hook(callbacks, {{{reported}}})`, and pass it to `after_step`",
        )
    for text in mode_warnings(callbacks):
        warn_user(text, UserWarning)
    # A callback of the user may write metrics of any phase.
    if any(d.may_write(("cbstate", "metrics_epoch")) and not d.cls.__module__.startswith("fluxcb.") for d in callbacks):
        return
    for declared in callbacks:
        for watched in declared.callback.watched_metrics():
            if watched.phase != phase.name:
                raise MissingStateError(
                    f"{declared.label} watches `{watched}`, and a hand-written loop has only metrics of "
                    f"`{phase.name}`.",
                    why="all steps and epochs of the loop belong to one training phase",
                    fix=[
                        f'watch the mean of a reported value: `metric="{phase.name}/loss"`',
                        "for metrics of a validation, build a Learner, and call `learner.run_epoch` in your loop",
                    ],
                )


def check_handlers(declared: Declared, phase: type[Phase], *, has_state: bool) -> None:
    """Check that a callback acts only at events that the loop emits.

    Raises:
        DeclarationError: It has a handler of another event.
    """
    for entry in declared.handlers:
        # Handlers of other phases never run in a loop, which has one phase.
        if not issubclass(phase, entry.phase):
            continue
        # Without the state, handlers of the other events would have nothing to read.
        events = AFTER_STEP if has_state else (ComputeEnd,)
        # A handler of a base class, such as `TracedEvent`, runs at those of its events that the loop emits.
        inside = entry.traced and not any(issubclass(event, entry.event) for event in events)
        access = declared.access_of(entry)
        # A `Scheduler` is allowed: its hyperparameters can be set before the loop's step.
        before = has_state and entry.event is ForwardBegin and all(path[0] == "hyperparams" for path in access)
        # A handler of all host events is accepted, because it also runs at events that the loop emits.
        if (inside and not before) or (entry.event is StepBegin and not has_state):
            raise DeclarationError(
                f"{declared.label} has a handler of {entry.event.__name__}, which a hand-written loop does not emit.",
                where=declared.place_of(entry),
                why=_EMITTED_WITH_STATE
                if has_state
                else "the loop reports a step after it has finished; it emits StepEnd and, traced, ComputeEnd",
                fix=_INSTEAD,
            )
        written = (path for path, permission in access.items() if writes(permission))
        changed = [dotted(path) for path in written if path[0] in (*TREES, "hyperparams")]
        if entry.traced and not before and changed:
            raise DeclarationError(
                f"{declared.label} writes `{changed[0]}` in a traced handler, but the loop's step is not traced.",
                where=declared.place_of(entry),
                why="traced handlers can read the state after the loop's step, but cannot replace it",
                fix="write it in a host handler, for example of StepEnd, or train with a `Learner`",
            )


def warn_about_other_phases(declared: Declared, phase: type[Phase]) -> None:
    """Warn about a callback that does nothing in the loop, because all its handlers are for other phases."""
    phases = {handler.phase for handler in declared.handlers}
    if phases and not any(issubclass(phase, other) for other in phases):
        names = " and ".join(sorted(other.__name__ for other in phases))
        warn_user(
            f"{declared.label} does nothing in a hand-written loop, because it has handlers only for {names}. All "
            "steps and epochs of the loop belong to one training phase. Write `Phase` instead in the handlers that "
            "should run.",
            UserWarning,
        )


_EMITTED_WITH_STATE = (
    "the loop reports a step after it has finished; it emits StepBegin and StepEnd and, traced, BackwardEnd, UpdateEnd "
    "and ComputeEnd; at ForwardBegin, handlers can only set hyperparameters"
)


def check_step_number(step: Any, last: int) -> None:
    """Check that the number of a finished step is larger than the last one.

    Raises:
        DeclarationError: It is not.
    """
    # `True` is an int for Python.
    if not isinstance(step, int | np.integer) or isinstance(step, bool) or step <= last:
        raise DeclarationError(
            f"`after_step` was called with step {step!r} after step {last}.",
            why="steps are numbered from 1, and the periods of callbacks refer to these numbers",
            fix="count the steps of all epochs: `hook.after_step(hook.step + 1, values)`",
        )


def not_begun(method: str) -> DeclarationError:
    """Return the error for a method that is called before the training has begun or after its end."""
    return DeclarationError(
        f"`hook.{method}` was called before FitBegin or after FitEnd.",
        why="callbacks open files and restore state at FitBegin, and write their last values at FitEnd",
        fix=[
            "put the loop inside a block: `with hook:`",
            "call `hook.before_training()` before the loop, and `hook.after_training()` after it, also after an error",
        ],
    )


def step_not_begun(acting_before: Iterable[str]) -> DeclarationError:
    """Return the error for a step whose StepBegin was not emitted, which these callbacks need."""
    return DeclarationError(
        f"{' and '.join(dict.fromkeys(acting_before))} acts before each step, and the loop has not called "
        "`hook.before_step()`.",
        why="the loop reports a step only after it has finished",
        fix="call `hook.before_step()` before the loop's step function",
    )


def warn_of_idle(plan: Plan, phase: type[Phase]) -> None:
    """Warn about callbacks that act only at the end of an epoch, because the loop has not ended one."""
    at_steps, at_epochs = plan.phase(phase), (*plan.calls(EpochEnd, phase), *plan.epoch_triggers(phase))
    # A callback that also acts at steps, such as a saver with a period, has had an effect without `after_epoch`.
    acted = {call.handler.declared.label for call in (*at_steps.begin, *at_steps.end, *at_steps.trigger)}
    idle = [call.handler for call in at_epochs if call.handler.declared.label not in acted]
    if idle:
        warn_user(
            "The loop has not called `hook.after_epoch()`, so these handlers of EpochEnd and Trigger have not run: "
            f"{', '.join(f'{handler.declared.label}.{handler.name}' for handler in idle)}. Call `hook.after_epoch()` "
            "at the end of each epoch.",
            UserWarning,
        )


def warn_of_missed(calls: PhasePlan, last: int, step: int) -> bool:
    """Warn if a callback is due at a step that the loop has left out, and return whether there is one.

    Args:
        calls: The host calls around the steps.
        last: The number of the last reported step.
        step: The number of the next one.
    """
    for call in (*calls.end, *calls.trigger):
        for schedule in call.schedules:
            # A loop may report only the steps that are due, such as each multiple of the period.
            if isinstance(schedule, EverySteps) and step % schedule.steps and schedule.next_due(last, 0) < step:
                warn_user(
                    f"{call.handler.declared.label} is due at step {schedule.next_due(last, 0)}, but the loop has "
                    f"reported step {step} after step {last}, so it does not run. Report each step, or each multiple "
                    f"of {schedule.steps}.",
                    UserWarning,
                )
                return True  # the hook then checks no further gaps, so it warns only once
    return False


def warn_of_stale_state(steps: int) -> None:
    """Warn that `state` returns the parameters from before the training, after a number of steps."""
    warn_user(
        f"`state` of `callbacks_as_hook` still returns the parameters from before the training, after {steps} steps. "
        "Callbacks and checkpoints do not get the trained parameters. Let `state` return the variables that the loop "
        "assigns, e.g. `state=lambda: (params, opt_state)`.",
        UserWarning,
    )
