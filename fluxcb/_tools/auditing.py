"""The audit of a set of callbacks, which trains two steps to find problems that the declarations do not show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fluxcb._declare.callback import Callback, unwrap
from fluxcb._declare.signatures import source_of
from fluxcb._errors import CheckError, FluxcbError
from fluxcb._tools.advising import early_end, host_syncs, unused_access
from fluxcb._tools.comparing import differing, same, short
from fluxcb._tools.laws import MayCancel
from fluxcb._tools.raised import problems_of
from fluxcb._tools.recording import recorded
from fluxcb._tools.restoring import changed, restored
from fluxcb._tools.trials import Trial, TrialError, Trials, steps_of

if TYPE_CHECKING:
    from fluxcb._run.learner import Learner

__all__ = ["Audit", "audit_learner"]

_RESUMED = "a run that resumes from a checkpoint would differ from an uninterrupted run"


@dataclass
class Audit:
    """The result of an audit of a set of callbacks.

    Attributes:
        problems: The problems of the set.
        advice: Possible improvements: permissions that nothing used, handlers that make the host wait for the device.
        syncs: For each handler, such as `Norms().show at StepEnd x TrainingPhase`, the values that the host read from
            the device, and how often.
    """

    problems: list[FluxcbError] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)
    syncs: dict[str, dict[str, int]] = field(default_factory=dict)


def audit_learner(make: Callable[[], Learner], *, steps: int = 2) -> Audit:
    """Train a few steps, several times, and compare the results with the declarations of the callbacks.

    1. The Learner can be built and trained: steps, EpochEnd, validation (with at most the same number of batches),
       Trigger, FitStopping, FitEnd.
    2. Fields of callbacks that change are restored by `load_state_dict(state_dict())`. This includes only plain data
       (numbers, texts, arrays, containers and dataclasses of these), and only if a second training gives the same
       values. Consoles, files and clocks are not state.
    3. The train state is the same, bit for bit, with other orders of the list of callbacks (`in_order` groups keep
       their order), and with single steps instead of windows.

    Args:
        make: Returns a new Learner with new callbacks each time it is called. The audit trains these Learners.
        steps: Number of steps of each training.
    """
    audit = Audit()
    try:
        with recorded() as recording:
            trials = Trials(make, steps)
        audit.advice += early_end(trials.first, steps)
        audit.advice += unused_access(trials.first, recording)
        audit.syncs, advice = host_syncs(trials.first)
        audit.advice += advice
        _audit_fields(trials, audit)
        if not (_audit_order(trials, audit) and _audit_windows(trials, audit)):
            _audit_chance(trials, audit)
    except TrialError as stopped:
        audit.problems += stopped.problems
    return audit


# -- state that is not saved -------------------------------------------------------------------


def _audit_fields(trials: Trials, audit: Audit) -> None:
    first = trials.first
    moved = [changed(*of) for of in zip(first.callbacks, first.before, first.after, strict=True)]
    if not any(moved) and not any(map(_saves, first.callbacks)):
        return
    labels = [declared.label for declared in first.learner._core.graph.declared]
    others = list(trials.made().callbacks)
    for position, (callback, other) in enumerate(zip(first.callbacks, others, strict=True)):
        label, where, after = labels[position], _place(callback), first.after[position]
        found = restored(callback, other, moved[position], after)
        if found.error is not None:
            audit.problems += problems_of(found.error, f"`load_state_dict(state_dict())` of {label}")
            continue
        if not found.faithful:
            audit.problems.append(
                CheckError(
                    f"`load_state_dict` of {label} does not restore the values that its `state_dict` returns.",
                    where=where,
                    why=_RESUMED,
                    fix="assign all values that `state_dict` returns",
                )
            )
        for name in found.lost:
            if same(after[name], trials.again.after[position].get(name)):  # otherwise the value is a clock or random
                values = f"from {short(moved[position][name])} to {short(after[name])}"
                audit.problems.append(
                    CheckError(
                        f"{label} changes its field `{name}` during training ({values}), and does not save it.",
                        where=where,
                        why=_RESUMED,
                        fix=[
                            "return it from `state_dict`, and assign it in `load_state_dict`",
                            "keep it in `learner.cbstate`",
                        ],
                    )
                )


def _saves(callback: Callback) -> bool:
    return type(unwrap(callback)).state_dict is not Callback.state_dict


def _place(callback: Callback) -> str:
    """Return the location at which a callback's state is saved, or at which a reader would look for it."""
    cls = type(unwrap(callback))
    for name in ("load_state_dict", "state_dict", "__init__", *(entry.name for entry in callback.handlers())):
        function = getattr(cls, name, None)
        if hasattr(function, "__code__") and function is not getattr(Callback, name, None):
            return f"{cls.__name__}.{name}  {source_of(function)}"
    return cls.__name__


# -- order, windows, randomness ----------------------------------------------------------------


def _audit_order(trials: Trials, audit: Audit) -> bool:
    """Train with other orders of the list. Return False if the cause of a difference cannot be determined."""
    items = range(len(trials.first.learner.callbacks._items))
    tried = [list(items)]
    arrangements: list[tuple[str, Callable[[list[Any]], list[Any]]]] = [
        ("with the callbacks list reversed", lambda items: items[::-1]),
        ("with the callbacks list rotated", lambda items: items[1:] + items[:1]),
    ]
    for how, arrange in arrangements:
        if arrange(list(items)) in tried:
            continue
        tried.append(arrange(list(items)))
        found = trials.arranged(how, arrange)
        if _same(trials.first, found):
            continue
        if not _same(trials.first, trials.again):
            return False
        # Not a problem if setting the same callbacks again makes the same difference, because then `init` causes it.
        if not _same(trials.arranged("with the same callbacks set again", list), found):
            audit.problems.append(
                CheckError(
                    f"The train state after {steps_of(found.steps)} differs {how}.",
                    where=_differences(trials.first, found),
                    why="the results of the callbacks depend on their order in the list, and nothing declares this "
                    "order",
                    fix=[
                        "declare the order with `in_order(first, second)` or `runafter`",
                        "keep shared state in `learner.cbstate`, and declare it in `stateaccess`",
                        "if several callbacks of one class draw random numbers, give each its own `name`",
                    ],
                )
            )
            break  # other orders would report the same problem
    return True


def _audit_windows(trials: Trials, audit: Audit) -> bool:
    """Train in windows and step by step. Return False if the cause of a difference cannot be determined."""
    per_call = trials.steps
    steps = 1 + per_call  # the first step always runs alone, because the duration of a step is not known yet
    single = trials.arranged("step by step", lambda items: [*items, MayCancel()], steps, per_call)
    ahead = trials.arranged(f"with {steps_of(per_call)} in a window", list, steps, per_call)
    if _same(single, ahead):
        return True
    if not _same(trials.first, trials.again):
        return False
    audit.problems.append(
        CheckError(
            f"The train state after {steps_of(steps)} differs if {per_call} of them run in one window.",
            where=_differences(single, ahead),
            why="the device runs ahead of the handlers in a window, so undeclared access uses the state of another "
            "step",
            fix="use only the handler's `learner` to read and write state, and declare the access in `stateaccess`",
        )
    )
    return True


def _audit_chance(trials: Trials, audit: Audit) -> None:
    audit.advice.append(
        str(
            FluxcbError(
                f"The same training of {steps_of(trials.steps)} ends with a different train state each time.",
                where=_differences(trials.first, trials.again),
                why="the audit therefore cannot check the order of the callbacks and the windows",
                fix="seed the shuffling of the data and the initialization of the model",
            )
        )
    )


def _same(one: Trial, other: Trial) -> bool:
    return differing(one.state, other.state) == []


def _differences(one: Trial, other: Trial) -> str:
    names = differing(one.state, other.state)
    if names is None:
        return "the structure of the train state"
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{', '.join(names[:5])}{more}"
