"""The check of declared parts, such as `params.dense` or `cbstate.history.training`, once the state exists."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fluxcb._check.graph import CallbackGraph
from fluxcb._compile.carry_paths import names_in
from fluxcb._declare.access import Permission, dotted, overlap, writes
from fluxcb._declare.declared import Declared
from fluxcb._declare.phases import defined_phase_names
from fluxcb._errors import CheckError, UnknownStateError, did_you_mean
from fluxcb._run.shared_parts import is_hub
from fluxcb._traced_values import describe
from fluxcb._typing import PyTree, StatePath
from fluxcb.callbacks.by_phase import ByPhase

__all__ = ["check_parts"]

_SHOWN = 10  # maximum number of names in a message


def check_parts(graph: CallbackGraph, carry: Mapping[str, PyTree], cbstate: Mapping[str, Any]) -> None:
    """Check that the declared parts of the carry and of state that is kept by phase exist.

    Parts of other shared state are not checked, because a handler may create them during training.

    Args:
        graph: The graph of the callbacks.
        carry: The carry.
        cbstate: The shared state on the host.

    Raises:
        CheckError: A declared part does not exist.
    """
    # By path, because a callback can declare one path for several handlers.
    problems: dict[tuple[str, StatePath], CheckError] = {}
    for declared in graph.declared:
        for path, permission, where in declared.accesses():
            for what, why, fix in _problem(path, permission, declared, graph, carry, cbstate):
                problem = UnknownStateError(
                    f"{declared.label} declares access to `{dotted(path)}`, but {what}", where=where, why=why, fix=fix
                )
                problems.setdefault((declared.label, path), problem)
    if problems:
        raise CheckError.of(list(problems.values()))


def _phase_names(graph: CallbackGraph) -> list[str]:
    """Return the names of the phases that the Learner runs or that callbacks provide metrics for."""
    phases = [*graph.phases, *(phase for d in graph.declared for phase in d.callback.metric_phases())]
    return list(dict.fromkeys(phase.name for phase in phases))


def _problem(
    path: StatePath,
    permission: Permission,
    declared: Declared,
    graph: CallbackGraph,
    carry: Mapping[str, PyTree],
    cbstate: Mapping[str, Any],
) -> Iterator[tuple[str, str, str]]:
    """Yield the problem of a path, why it matters, and the fix. Yield nothing if the path can exist."""
    root = path[0]
    if root in ("params", "model_state", "opt_state"):
        value, start = carry[root], 1
        why = f"the structure of `{root}` is fixed when the Learner is built"
    elif root == "cbstate" and len(path) > 2 and path[1] in carry["cbstate"]:
        value, start = carry["cbstate"][path[1]], 2
        why = f"`{dotted(path[:2])}` is part of the compiled step, so its structure is fixed"
    # State that is kept by phase has a known set of names, so a typo can be found.
    elif root == "cbstate" and len(path) > 2 and isinstance(hub := cbstate.get(path[1]), ByPhase):
        phases = _phase_names(graph)
        name = path[2]
        # A phase that has not run yet has no entry. A new one has the same attributes.
        value, start = hub[name] if name in hub else hub.make(), 3
        # A phase that this Learner does not have by itself can still run, by `run_epoch`, so it is no typo.
        if name not in {*phases, *hub, *defined_phase_names()} and not _may_be_added(graph, path[:3]):
            what = f"no phase is named `{name}`.{did_you_mean(name, phases)}"
            yield what, f"`{dotted(path[:2])}` has one entry for each phase", f"name one of {', '.join(phases)}"
            return
        why = f"`{dotted(path[:3])}` has only these attributes"
    else:
        return
    for end in range(start, len(path)):
        if is_hub(value):  # its parts are created during training
            return
        name, prefix = path[end], dotted(path[:end])
        if not _has(value, name):
            # Names with an underscore are internal, so they are no suggestions.
            known = [part for part in names_in(value) if isinstance(part, str) and not part.startswith("_")]
            if known:
                fix = f"name one of {', '.join(known[:_SHOWN])}{', ...' if len(known) > _SHOWN else ''}"
            else:
                fix = f"declare all of `{prefix}` instead: {declared.how_to_declare(path[:end], permission)}"
            yield f"{_lacks(value, name, prefix)}{did_you_mean(name, known)}", why, fix
            return
        value = value[name] if isinstance(value, Mapping) else getattr(value, name)


def _may_be_added(graph: CallbackGraph, path: StatePath) -> bool:
    """Return whether a callback may add this entry to state that is kept by phase."""
    for declared in graph.declared:
        # A user's callback may add any name below a path that it can write.
        of_user = declared.cls.access_argument is not None or declared.cls.__module__.partition(".")[0] != "fluxcb"
        for written, permission in declared.access.items():
            named = written[: len(path)] == path  # the callbacks of this library add only entries of phases
            if writes(permission) and (named or (of_user and overlap(written, path))):
                return True
    return False


def _has(value: Any, name: str) -> bool:
    """Return whether a name can be read from a container of a pytree."""
    if isinstance(value, Mapping):
        return name in value
    if hasattr(value, "_fields"):  # not the methods of a tuple
        return name in value._fields
    return not _is_array(value) and not isinstance(value, list | tuple) and hasattr(value, name)


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _lacks(value: Any, name: str, prefix: str) -> str:
    """Return the text that a name does not exist in a container of a pytree."""
    if _is_array(value):
        return f"`{prefix}` is an array, {describe(value)}, which has no parts."
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return f"`{prefix}` is a {type(value).__name__}, whose parts have no names."
    if isinstance(value, Mapping) and not value:
        return f"`{prefix}` is empty."
    return f"`{prefix}` has no `{name}`."
