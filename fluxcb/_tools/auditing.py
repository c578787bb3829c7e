"""Auditing a set of callbacks: two real steps, to see what no declaration shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fluxcb._declare.callback import Callback, unwrap
from fluxcb._declare.dispatch import source_of
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

_RESUMED = "a training that goes on from a checkpoint would differ from one that was never interrupted"


@dataclass
class Audit:
    """What two steps of training showed about a set of callbacks.

    Attributes:
        problems: What is wrong with it.
        advice: What could be better, and is not wrong: permissions that nothing used, handlers that hold the device up.
        syncs: For each handler, as in `Norms().show at StepEnd x TrainingPhase`, which values the host read from the
            device in it, and how often.
    """

    problems: list[FluxcbError] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)
    syncs: dict[str, dict[str, int]] = field(default_factory=dict)


def audit_learner(make: Callable[[], Learner], *, steps: int = 2) -> Audit:
    """Train a few steps, several times, and compare what happens with what the callbacks declare.

    1. The Learner can be built, and trains: steps, EpochEnd, validation (as many batches at most), Trigger,
       FitStopping, FitEnd.
    2. Fields of callbacks that change come back with `load_state_dict(state_dict())`. Only plain data count (numbers,
       texts, arrays, containers and dataclasses of them), and only if a second training gives them the same values:
       consoles, files and clocks are no state.
    3. The train state is the same, bit for bit, with the callbacks list in other orders (`in_order` groups stay as they
       are), and whether handlers look at each step before the next or at several that ran in one window.

    Args:
        make: Returns a new Learner with new callbacks each time it is called; what it returns is trained.
        steps: Steps of a training.
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
    labels = [declared.label for declared in first.learner._parts.graph.declared]
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
                    f"`load_state_dict` of {label} does not bring back what its `state_dict` gave.",
                    where=where,
                    why=_RESUMED,
                    fix="assign there whatever `state_dict` returns",
                )
            )
        for name in found.lost:
            if same(after[name], trials.again.after[position].get(name)):  # else it is a clock, or drawn by chance
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
    """Return where a callback's state is saved, or where one would look for it."""
    cls = type(unwrap(callback))
    for name in ("load_state_dict", "state_dict", "__init__", *(entry.name for entry in callback.handlers())):
        function = getattr(cls, name, None)
        if hasattr(function, "__code__") and function is not getattr(Callback, name, None):
            return f"{cls.__name__}.{name}  {source_of(function)}"
    return cls.__name__


# -- order, windows, chance --------------------------------------------------------------------


def _audit_order(trials: Trials, audit: Audit) -> bool:
    """Train with the list in other orders; return False if it cannot be said what makes the difference."""
    items = range(len(trials.first.learner.callbacks._items))
    tried = [list(items)]
    arrangements: list[tuple[str, Callable[[list[Any]], list[Any]]]] = [
        ("with the callbacks list turned round", lambda items: items[::-1]),
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
        # Not if setting the same callbacks again makes the same difference: their `init` does, then.
        if not _same(trials.arranged("with the same callbacks set again", list), found):
            audit.problems.append(
                CheckError(
                    f"The train state after {steps_of(found.steps)} is another one {how}.",
                    where=_differences(trials.first, found),
                    why="what the callbacks compute hangs on their places in the list, and nothing declares that",
                    fix=[
                        "state the order: `in_order(first, second)` or `runafter`",
                        "declare in `stateaccess` what they share, and keep it in `learner.cbstate`",
                        "give each callback of a class that draws random numbers a `name` of its own",
                    ],
                )
            )
            break  # another order would say it again
    return True


def _audit_windows(trials: Trials, audit: Audit) -> bool:
    """Train in windows, and step by step; return False if it cannot be said what makes the difference."""
    per_call = trials.steps
    steps = 1 + per_call  # the first step always runs by itself: nobody knows yet how long one takes
    single = trials.arranged("step by step", lambda items: [*items, MayCancel()], steps, per_call)
    ahead = trials.arranged(f"with {steps_of(per_call)} in a window", list, steps, per_call)
    if _same(single, ahead):
        return True
    if not _same(trials.first, trials.again):
        return False
    audit.problems.append(
        CheckError(
            f"The train state after {steps_of(steps)} is another one if {per_call} of them run in one window.",
            where=_differences(single, ahead),
            why="in a window the device is ahead of the handlers, which must not reach around their declarations",
            fix="read and write through the handler's `learner` alone, and declare it in `stateaccess`",
        )
    )
    return True


def _audit_chance(trials: Trials, audit: Audit) -> None:
    audit.advice.append(
        str(
            FluxcbError(
                f"The same training of {steps_of(trials.steps)} ends in another train state each time.",
                where=_differences(trials.first, trials.again),
                why="so nothing can be said about the order of the callbacks and about windows",
                fix="seed what shuffles the data, and what initialises the model",
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
