"""Errors and fixes for accesses of host handlers that would be refused even after the access is declared."""

import re
from typing import Any

from fluxcb._check.graph import CallbackGraph
from fluxcb._declare.access import STEP_FLAGS, Append, Permission, Read, Write, dotted, lookup, writes
from fluxcb._declare.declared import Declared
from fluxcb._declare.signatures import assigns
from fluxcb._declare.state import PROVIDERS, writable_at
from fluxcb._errors import AccessError, MissingStateError, did_you_mean
from fluxcb._run.shared_parts import is_hub, part_names
from fluxcb._run.state import HostState
from fluxcb._run.window import Window
from fluxcb._typing import StatePath

__all__ = [
    "computed_value_written",
    "flag_written_late",
    "missing_entry",
    "refuse_late_writes",
    "refused_step_write",
    "undeclared_fix",
]

_OTHER_EVENT = re.compile(r"\b(?:Fit|Epoch|Step)(?:Begin|End)\b|\bTrigger\b")


def refuse_late_writes(graph: CallbackGraph) -> None:
    """Check that callbacks that write a flag, or a value of the step, have a handler that runs within the step.

    Raises:
        AccessError: A callback has only host handlers.
    """
    for declared in graph.declared:
        if not declared.handlers or any(entry.traced for entry in declared.handlers):
            continue
        for path, permission in declared.access.items():
            if not writes(permission) or path[0] != "step" or len(path) < 2 or path[1] == "batch":
                continue
            if path in STEP_FLAGS:
                raise flag_written_late(declared, path, ", but it has no traced handler")
            # `Write()` includes reading, which a host handler may do.
            functions = [entry.function or getattr(declared.cls, entry.name, None) for entry in declared.handlers]
            if writable_at(path) is not None and any(assigns(function, path[1]) for function in functions):
                raise computed_value_written(declared, path)


def refused_step_write(declared: Declared, path: StatePath, window: Window | None) -> AccessError | None:
    """Return the error for a write to a step value that would also be refused after it is declared, otherwise None."""
    # A handler that declares the batch can replace it.
    if path[0] != "step" or window is None or path[1] == "batch":
        return None
    if path[:2] in STEP_FLAGS:
        return flag_written_late(declared, path, " in a host handler")
    # `window.has` does not know values that no callback declares.
    computed = window.computed and writable_at(path) is not None
    return computed_value_written(declared, path) if computed else None


def computed_value_written(declared: Declared, path: StatePath) -> AccessError:
    """Return the error for a write to a value of the step itself, such as the loss."""
    events = " or ".join(event.__name__ for event in writable_at(path) or ())
    own = ("step", f"my_{path[1]}")
    fix = [f"write to another name: `learner.{dotted(own)} = ...`, and {declared.how_to_declare(own, Write())}"]
    if events:
        fix.insert(0, f"write it in a handler of {events}{_declaring(declared, path, Write())}")
    return AccessError(
        f"{declared.label} writes `{dotted(path)}`, which the step has computed.",
        where=declared.where,
        why="the step has ended, so it would not use the new value",
        fix=fix,
    )


def flag_written_late(declared: Declared, path: StatePath, reason: str) -> AccessError:
    """Return the error for a write to `step.skip`, `step.hold` or `step.stop` that has no effect on the step.

    Args:
        declared: The callback.
        path: The path of the flag.
        reason: The end of the first sentence of the message.
    """
    flag = dotted(path)
    control = _declaring(declared, ("control",), Append())
    return AccessError(
        f"{declared.label} writes `{flag}`{reason}.",
        where=declared.where,
        why=f"`{flag}` takes effect while the step is computed; a host handler is too late",
        fix=[
            f"write `learner.{flag}` in a handler of BackwardEnd{_declaring(declared, path, Append())}",
            f"raise `CancelStep` in a host handler of StepBegin, to leave out the whole step{control}",
            f"raise `CancelFitting` in a host handler of StepEnd, to stop the fit{control}",
        ],
    )


def missing_entry(declared: Declared, path: StatePath, container: Any) -> MissingStateError:
    """Return the error for reading a shared entry, or a part of it, that does not exist.

    Args:
        declared: The callback.
        path: The path of the missing entry.
        container: The object that would contain it.
    """
    label, where, name = declared.label, declared.where, path[-1]
    hint = did_you_mean(name, part_names(container))
    # The parts of a hub appear while the training runs, so the fix is a test and not an `init`.
    if is_hub(container):
        return MissingStateError(
            f"{label} reads `{dotted(path)}`, which has no value yet.{hint}",
            where=where,
            why=f"so far, `{dotted(path[:-1])}` has {', '.join(map(repr, part_names(container))) or 'nothing'}",
            fix=f'check first: `if "{name}" in learner.{dotted(path[:-1])}`',
        )
    return MissingStateError(
        f"{label} reads `{dotted(path)}`, which does not exist.{hint}",
        where=where,
        why="an entry exists after a callback's `init`, or an earlier handler, has assigned it",
        fix=[
            "create it in `init` of the callback that writes it",
            f'check first: `if "{name}" in learner.{dotted(path[:-1])}`',
        ],
    )


def _declaring(declared: Declared, path: StatePath, permission: Permission) -> str:
    """Return the end of a fix that declares a write, or an empty string if it is declared."""
    known = lookup(declared.access, path)
    return "" if known is not None and writes(known) else f", and {declared.how_to_declare(path, permission)}"


def undeclared_fix(declared: Declared, path: StatePath, permission: Permission, state: HostState) -> str:
    """Return the complete fix for an undeclared access if its declaration alone is not sufficient, otherwise "".

    Without it, the user would declare the path and get the next error.

    Args:
        declared: The callback.
        path: The path that it uses in a host handler.
        permission: The permission that the access needs.
        state: The state.
    """
    declare = declared.how_to_declare(path, permission)
    if path[0] == "hyperparams":
        return state.train.hyperparams.undeclared_fix(path[1], permission, declared)
    if path[0] == "model":
        params = declared.how_to_declare(("params",), Read())
        return (
            f"for the arrays, read `learner.params`, and {params}. For metrics of other data, add an `InferenceRunner` "
            "to the callbacks. `learner.model` has only shapes in handlers, so it cannot be called; for these, "
            f"{declare}"
        )
    if path[0] == "callbacks":
        return (
            f"to read the callbacks, {declare}. To add, remove or replace callbacks, call "
            "`learner.callbacks.add(...)`, for example, between two calls of `fit`"
        )
    if path[0] == "optimizer":
        rate = declared.how_to_declare(("hyperparams", "learning_rate"), Write())
        return (
            f"to change the learning rate, assign `learner.hyperparams.learning_rate`, and {rate}. For the optimizer "
            f"itself, whose functions do not read attributes, {declare}"
        )
    if path[0] == "step" and not writes(permission):
        window = state.moment.window
        # At StepBegin, a window has only the batch.
        exists = window is not None and (window.computed or path[1] == "batch")
        # A fix for `CustomCallback` names the event of the handler.
        return "" if exists else f"handle StepEnd instead, and {_OTHER_EVENT.sub('StepEnd', declare)}"
    # For an entry that exists, the declaration is sufficient.
    if path[0] == "cbstate" and len(path) == 2 and not _exists(path[1], state):
        if path[1] in PROVIDERS:
            return f"add `{PROVIDERS[path[1]]}()` to the callbacks, which creates it, and {declare}"
        declare = declared.how_to_declare(path, Write())
        return f"for a value of your own, create `learner.cbstate.{path[1]}` in `init`, and {declare}"
    return ""


def _exists(entry: str, state: HostState) -> bool:
    return entry in state.cbstate or state.train.in_carry(entry)
