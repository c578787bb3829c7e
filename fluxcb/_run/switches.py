"""Disabling and enabling the callbacks of a Learner between two epochs or fits, without compiling anything."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from fluxcb._check.graph import CallbackGraph
from fluxcb._declare.access import Append, Permission, Read, dotted, overlap, writes
from fluxcb._declare.callback import unwrap
from fluxcb._declare.declared import Declared
from fluxcb._declare.events import FitBegin
from fluxcb._declare.schedules import Switched
from fluxcb._declare.state import ENGINE_STEP_NAMES, step_names
from fluxcb._errors import DeclarationError, did_you_mean
from fluxcb._typing import StatePath

if TYPE_CHECKING:
    from fluxcb._run.learner_core import LearnerCore

__all__ = [
    "apply_switches",
    "dependents",
    "end_switches",
    "flags",
    "has_switches",
    "keep_switches",
    "restored_switches",
    "set_disabled",
    "silent_names",
    "switch",
    "switched_names",
]


def switch(core: LearnerCore, names: Collection[str], *, on: bool) -> None:
    """Enable or disable callbacks by name; see `CallbackSet.disable`."""
    verb = "enable" if on else "disable"
    if core.engine.running and not core.fitting:
        raise DeclarationError(
            f"`learner.callbacks.{verb}` was called in an epoch that `learner.run_epoch` runs.",
            why="a callback would miss the EpochEnd of the epoch whose EpochBegin it has seen",
            fix="call it after the epoch, or train with `learner.fit`",
        )
    known = [declared.name for declared in core.graph.declared]
    # A call without names gets the same error, whose fix lists the names.
    for name in names or ("",):
        if name not in known:
            shown = f"{name!r} is not the name of a callback" if names else "no name was passed"
            raise DeclarationError(
                f"`learner.callbacks.{verb}` takes names of callbacks, and {shown}.{did_you_mean(str(name), known)}",
                fix=f"pass some of these names: {', '.join(map(_quoted, known))}" if known else "add callbacks to it",
            )
    before = {declared.name for declared in core.graph.declared if declared.disabled}
    # An earlier call in this epoch has not been applied yet.
    if core.switching is not None:
        before = set(core.switching)
    after = before.difference(names) if on else before.union(names)
    if not core.fitting:
        set_disabled(core, after)
        return
    # Now, so that the caller gets the error and not the end of the epoch.
    _check(core.graph, after)
    for declared in core.graph.declared:
        missed = declared.disabled and not declared.gets_fit_end and declared.name not in after
        if missed and any(handler.event is FitBegin for handler in declared.handlers):
            raise DeclarationError(
                f"{declared.label} cannot be enabled in this fit, because it was disabled at FitBegin.",
                where=declared.where,
                why="its other handlers may need what its handler of FitBegin prepares",
                fix="enable it between two calls of `fit`",
            )
    core.switching = frozenset(after)


def apply_switches(core: LearnerCore) -> None:
    """Disable and enable what handlers of the running fit have requested. It is called between two epochs.

    A callback that is disabled here gets no further event except FitEnd, at which callbacks close what they opened at
    FitBegin.
    """
    if core.switching is None:
        return
    names, core.switching = core.switching, None
    # Only the calls of these callbacks are replaced, because a new call would restart its clock.
    changed = [declared for declared in core.graph.declared if declared.disabled != (declared.name in names)]
    for declared in changed:
        declared.disabled = declared.name in names
        declared.gets_fit_end = declared.disabled
    _show_device(core)
    programs = core.engine.programs
    core.engine.use(programs.plan.with_switched([declared.name for declared in changed]), programs.setup)


def end_switches(core: LearnerCore) -> None:
    """Disable the callbacks completely that the fit has disabled. It is called after FitEnd."""
    # A handler of FitEnd can request a switch as well.
    apply_switches(core)
    # Their handlers of FitEnd, which were still in the plan, have run.
    ended = [declared.name for declared in core.graph.declared if declared.gets_fit_end]
    for declared in core.graph.declared:
        declared.gets_fit_end = False
    if ended:
        programs = core.engine.programs
        core.engine.use(programs.plan.with_switched(ended), programs.setup)


def set_disabled(core: LearnerCore, names: Collection[str]) -> None:
    """Disable the callbacks with these names, and enable all others.

    Raises:
        DeclarationError: A callback cannot be disabled. Nothing has changed then.
    """
    # A new plan would restart the clocks of all handlers.
    if {declared.name for declared in core.graph.declared if declared.disabled} == set(names):
        return
    _check(core.graph, names)
    for declared in core.graph.declared:
        declared.disabled = declared.name in names
    _show_device(core)
    core.rewrap_handlers()  # the plan replaces the handlers of disabled callbacks


def _show_device(core: LearnerCore) -> None:
    """Write the flags of the traced handlers into the carry."""
    train = core.state.train
    if train.built:
        train.switches = flags(core.graph)
    if train.alive:  # a fit that has lost the train state ends here as well
        train.set_counters(core.state.progress)


def keep_switches(graph: CallbackGraph, previous: CallbackGraph | None) -> None:
    """Disable the callbacks of a new graph that were disabled in the previous one.

    Raises:
        DeclarationError: A new callback depends on what one of them writes.
    """
    # By identity, because adding or removing a callback can change the names of the others.
    disabled = [unwrap(d.callback) for d in previous.declared if d.disabled] if previous is not None else []
    for declared in graph.declared:
        declared.disabled = any(unwrap(declared.callback) is callback for callback in disabled)
    _check(graph, [declared.name for declared in graph.declared if declared.disabled])


def restored_switches(core: LearnerCore, host: Mapping[str, Any]) -> tuple[list[str], frozenset[str] | None]:
    """Return the disabled callbacks of a checkpoint, as far as this Learner has them.

    Returns:
        The callbacks to disable now, and those that will be disabled at the end of the epoch, or None.

    Raises:
        DeclarationError: This Learner cannot disable one of them.
    """
    present = {declared.name for declared in core.graph.declared}
    now, later = host["disabled"], host["switching"]
    if later is not None and host["at"] is None:  # written between two epochs, so nothing has to wait
        now, later = later, None
    # The caller restores the state only after this check, so an error changes nothing.
    for names in (now, later or ()):
        _check(core.graph, present.intersection(names))
    return [name for name in now if name in present], None if later is None else frozenset(present.intersection(later))


def switched_names(graph: CallbackGraph) -> tuple[str, ...]:
    """Return the names of the callbacks with a flag on the device, in the order of the flags."""
    return tuple(declared.name for declared in graph.declared if any(_is_switched(declared)))


def flags(graph: CallbackGraph) -> tuple[int, ...]:
    """Return whether each callback of `switched_names` is enabled, as 0 or 1."""
    names = switched_names(graph)
    return tuple(int(not declared.disabled) for declared in graph.declared if declared.name in names)


def has_switches(declared: Declared) -> bool:
    """Return whether all traced handlers of a callback have a switch, or there are none."""
    return all(_is_switched(declared))


def silent_names(graph: CallbackGraph, keep: Collection[str] = ()) -> list[str]:
    """Return the names of the callbacks that only produce output, so that they can be disabled without any effect.

    These are callbacks without traced handlers that write no state, and callbacks that write files.

    Args:
        graph: The graph.
        keep: Names of callbacks that stay enabled.
    """
    silent = [declared.name for declared in graph.declared if _only_outputs(declared) and declared.name not in keep]
    # A callback whose values a remaining callback reads has to remain.
    return [name for name in silent if set(dependents(graph, [name])) <= set(silent)]


def _only_outputs(declared: Declared) -> bool:
    if not has_switches(declared):
        return False
    # An entry in a log is output, and does not change the training.
    written = [p for p, permission, _ in declared.accesses() if writes(permission) and not _appends(p, permission)]
    return not written or any(True for _ in declared.callback.output_locations())


def _appends(path: StatePath, permission: Permission) -> bool:
    return path[0] == "cbstate" and isinstance(permission, Append)


def _is_switched(declared: Declared) -> Iterator[bool]:
    """Iterate over the traced handlers of a callback, and tell whether each one has a switch."""
    for handler in declared.handlers:
        if handler.traced:
            yield any(isinstance(schedule, Switched) for schedule in handler.schedules(handler.event, handler.phase))


def _check(graph: CallbackGraph, names: Collection[str]) -> None:
    """Check that the callbacks with these names can be disabled together.

    Raises:
        DeclarationError: One of them has traced handlers without a switch, or an enabled callback depends on what one
            of them writes.
    """
    disabled = [declared for declared in graph.declared if declared.name in names]
    for declared in disabled:
        if not has_switches(declared):
            raise DeclarationError(
                f"{declared.label} cannot be disabled, because the compiled step contains its handlers.",
                where=declared.where,
                why="without a condition in the step, switching its traced handlers off would compile another step",
                fix=f"write `switchable({declared.cls.__name__}(...))` in the list of callbacks",
            )
    enabled = [declared for declared in graph.declared if declared.name not in names]
    for declared in disabled:
        for path in _own_values(graph, declared):
            # The other writer keeps the value current.
            if any(_may_write(other, path) for other in enabled):
                continue
            readers = [other for other in enabled if _reads(other, path)]
            if readers:
                together = _call("disable", dependents(graph, names))
                raise DeclarationError(
                    f"{declared.label} cannot be disabled: {readers[0].label} reads `{dotted(path)}`, "
                    "which no enabled callback writes.",
                    where=[declared.where, readers[0].where],
                    why=f"{readers[0].label} would read a value that no longer changes",
                    fix=[
                        f"disable all of them: {together}",
                        # If the writer is disabled already, the reader is being enabled.
                        *([f"enable {declared.label} first: {_call('enable', [declared.name])}"] * declared.disabled),
                    ],
                )


def _quoted(name: str) -> str:
    return f'"{name}"'


def _call(verb: str, names: Iterable[str]) -> str:
    return f"`learner.callbacks.{verb}({', '.join(map(_quoted, names))})`"


def dependents(graph: CallbackGraph, names: Collection[str]) -> list[str]:
    """Return these callbacks, and those that depend on them directly or indirectly, in the order of the list."""
    found = set(names)
    while True:
        writers = [declared for declared in graph.declared if declared.name in found]
        rest = [declared for declared in graph.declared if declared.name not in found]
        paths = [p for d in writers for p in _own_values(graph, d) if not any(_may_write(r, p) for r in rest)]
        # Repeated until nothing is found, because these callbacks can have dependents themselves.
        new = {reader.name for reader in rest for path in paths if _reads(reader, path)}
        if not new:
            return [declared.name for declared in writers]
        found |= new


def _own_values(graph: CallbackGraph, declared: Declared) -> Iterable[StatePath]:
    """Return the named values that callbacks create and this one assigns; all other state exists without it."""
    engine = {*step_names(graph.phases), *ENGINE_STEP_NAMES}
    for path, permission, _ in declared.accesses():
        created = path[0] == "cbstate" or (path[0] == "step" and path[1:2] and path[1] not in engine)
        # A log to which nothing is appended is still a log.
        if created and len(path) > 1 and writes(permission) and not isinstance(permission, Append):
            yield path


def _may_write(declared: Declared, path: StatePath) -> bool:
    return any(
        overlap(path, p) and writes(permission) and not isinstance(permission, Append)
        for p, permission, _ in declared.accesses()
    )


def _reads(declared: Declared, path: StatePath) -> bool:
    # A callback that reads all state only saves it.
    return any(
        overlap(path, p) and isinstance(permission, Read) and p != ("*",) for p, permission, _ in declared.accesses()
    )
