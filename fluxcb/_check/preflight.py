"""Checks of a whole set: paths that do not exist, state that nothing provides, and values that are used too early."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from fluxcb._check.conflict_errors import ordering
from fluxcb._check.forgotten_creators import forgotten_creators, misspelled
from fluxcb._check.graph import CallbackGraph
from fluxcb._check.metric_names import MetricNames
from fluxcb._check.ordering import moment_name
from fluxcb._check.scheduled import overwritten_hyperparams, overwritten_in_step, scheduled_twice
from fluxcb._declare.access import Append, Permission, Read, Write, dotted, line_to_add, lookup, overlap, writes
from fluxcb._declare.callback import Callback
from fluxcb._declare.declared import BoundHandler, Declared, declare
from fluxcb._declare.events import BUILTIN_EVENTS, ComputeEnd, HostEvent, StepBegin, StepEnd, TracedEvent
from fluxcb._declare.phases import Phase
from fluxcb._declare.signatures import assigns, example_call
from fluxcb._declare.state import (
    ALIASES,
    ENGINE_STEP_NAMES,
    FIRST_LEVEL,
    PROGRESS,
    PROVIDERS,
    STEP_PROVIDERS,
    available,
    step_names,
    writable_at,
)
from fluxcb._declare.turns import InTurn, flat
from fluxcb._errors import CheckError, DeclarationError, MissingStateError, UnknownStateError, did_you_mean, nearest
from fluxcb._typing import StatePath

__all__ = ["checked_graph", "phase_types", "unchecked_graph"]


def phase_types(phases: Iterable[Any]) -> tuple[type[Phase], ...]:
    """Return the classes of phases given as classes or instances.

    Raises:
        DeclarationError: One of them is not a phase.
    """
    instances: tuple[Any, ...] = flat((phases,) if isinstance(phases, Phase | InTurn | type) else phases)
    types = tuple(p if isinstance(p, type) else type(p) for p in instances)
    for cls in types:
        if not issubclass(cls, Phase):
            raise DeclarationError(
                f"`phases` contains {cls.__name__}, which is not a phase.", fix="derive it from Phase"
            )
    return types


def checked_graph(callbacks: Iterable[Any], phases: Iterable[Any]) -> CallbackGraph:
    """Check a set of callbacks and derive its graph.

    Args:
        callbacks: Callback instances and `in_order(...)` groups.
        phases: Phases (classes or instances) that will be run.

    Returns:
        The graph, which is valid.

    Raises:
        DeclarationError: A single declaration is invalid.
        CheckError: The callbacks do not work together. The error has all problems.
    """
    graph = unchecked_graph(callbacks, phases)
    graph.require()
    return graph


def unchecked_graph(callbacks: Iterable[Any], phases: Iterable[Any]) -> CallbackGraph:
    """Derive the graph of a set of callbacks even if the set is invalid, to show the graph instead of running it.

    Args:
        callbacks: Callback instances and `in_order(...)` groups.
        phases: Phases (classes or instances) that would be run.

    Returns:
        The graph, with all problems in `problems`.

    Raises:
        DeclarationError: A single declaration is invalid.
    """
    declared, ordered = declare(callbacks)
    types = phase_types(phases)
    unknown = _unknown_paths(declared, types)
    graph = CallbackGraph(declared, ordered, types)
    graph.problems = [*unknown, *graph.problems, *_missing_state(declared), *_used_too_early(graph)]
    names = MetricNames(declared, graph.phases)
    conflicts = {(c.a.declared.position, c.b.declared.position) for c in graph.conflicts}
    graph.problems += [*names.unprovided(), *names.unprovided_parts(), *names.not_numbers(), *names.unlogged()]
    graph.problems += [*names.doubled(conflicts), *overwritten_hyperparams(declared, graph.phases)]
    graph.problems += overwritten_in_step(graph)
    twice = scheduled_twice(declared)
    # The error of such a conflict suggests an order.
    replaced = [c.error for c in graph.conflicts if (c.a.declared.position, c.b.declared.position) in twice]
    graph.problems = [p for p in graph.problems if not any(p is error for error in replaced)] + list(twice.values())
    return graph


def _unknown_paths(declared: Sequence[Declared], phases: Sequence[type[Phase]]) -> list[CheckError]:
    problems: list[CheckError] = []
    steps = step_names(phases) | set(ENGINE_STEP_NAMES) | _written_step_names(declared)
    shared = {path[1] for d in declared for path, _, _ in d.accesses() if path[0] == "cbstate" and len(path) > 1}
    names = {p.name for p in phases}
    for d in declared:
        for path, permission, where in d.accesses():
            problem = _unknown(path, steps, names)
            if problem:
                what, hint, known = problem
                nested = _nested(path[0], steps, shared) if path[0] not in FIRST_LEVEL else None
                hint = "" if nested else hint
                what = f"{d.label} declares access to `{dotted(path)}`, {what}.{hint}"
                fix = [f"name one of {', '.join(sorted(known))}" if known else f"write `{path[0]}` alone"]
                if nested:
                    fix = [f"write `{line_to_add((*nested, *path[1:]), permission)}`"]
                elif path[0] == "step" and path[1] in STEP_PROVIDERS:
                    fix = [f"add `{STEP_PROVIDERS[path[1]]}()` to the callbacks, which writes it"]
                elif path[0] == "step":
                    forgotten = forgotten_creators(path, d, declared)
                    fix = (
                        [_listed_in_provides(path[1], phase) for phase in phases if _assigns(phase, path[1])]
                        or [f"add `{example_call(cls)}` to the callbacks" for cls in forgotten]
                        or fix
                    )
                problems.append(UnknownStateError(what, where=where, fix=fix))
            elif path[0] in ("progress", "key", "*") and writes(permission):
                what = f"{d.label} declares a write to `{dotted(path)}`, which no callback can write."
                cure = "declare the paths it changes" if path[0] == "*" else f"remove it from {d.access_owner}"
                problems.append(UnknownStateError(what, where=where, fix=cure))
    return problems


def _assigns(phase: type[Phase], name: str) -> bool:
    """Return whether the `step` of a user's phase assigns an attribute with this name, such as `learner.step.name`."""
    return not phase.__module__.startswith("fluxcb.") and assigns(phase.step, name)


def _listed_in_provides(name: str, phase: type[Phase]) -> str:
    """Return the edit that lists a value of a phase's step in its `provides`."""
    names = ", ".join(f'"{known}"' for known in (*phase.provides.get(ComputeEnd, ()), name))
    entry = f"ComputeEnd: ({names}{',' * (', ' not in names)})"
    if "provides" in vars(phase):
        return f"add `{entry}` to `{phase.__name__}.provides`, because its `step` assigns `step.{name}`"
    base = next(cls.__name__ for cls in phase.__mro__ if "provides" in vars(cls))
    return (
        f"write `provides = {{**{base}.provides, {entry}}}` in the body of `{phase.__name__}`, because its `step` "
        f"assigns `step.{name}`"
    )


def _written_step_names(declared: Sequence[Declared]) -> set[str]:
    return {
        path[1]
        for d in declared
        for path, permission, _ in d.accesses()
        if path[0] == "step" and len(path) > 1 and writes(permission)
    }


def _nested(name: str, steps: Collection[str], shared: Collection[str]) -> StatePath | None:
    """Return the path of a value that a declaration names without its first part, such as `loss`, if there is one."""
    parts = {"step": steps, "cbstate": {*PROVIDERS, *shared}, "progress": PROGRESS}
    return next(((part, name) for part, known in parts.items() if name in known), ALIASES.get(name))


def _unknown(path: StatePath, steps: set[str], phase_names: set[str]) -> tuple[str, str, Iterable[str]] | None:
    """Return the problem of a path, a hint, and possible names to use instead, or None if the path is valid."""
    first = path[0]
    if first not in FIRST_LEVEL:
        return "which is not a part of the Learner", did_you_mean(first, FIRST_LEVEL), FIRST_LEVEL
    if first in ("*", "control") and len(path) > 1:
        return f"but `{first}` has no parts", "", ()
    if len(path) < 2:
        return None
    if first == "step" and path[1] not in steps:
        return "which no phase provides and no callback writes", did_you_mean(path[1], steps), steps
    if first == "progress" and path[1] not in PROGRESS:
        return "which is not a counter", did_you_mean(path[1], PROGRESS), PROGRESS
    if first == "data" and path[1] not in phase_names:
        return "which is not the name of a phase", did_you_mean(path[1], phase_names), phase_names
    return None


def _missing_state(declared: Sequence[Declared]) -> list[CheckError]:
    """Find shared state that is read or appended to, but that no callback creates."""
    # Group by the name of the entry, because different entries share no state.
    created: dict[str, list[tuple[StatePath, Permission]]] = {}
    appended: dict[str, list[tuple[StatePath, Permission]]] = {}
    for d in declared:
        for path, permission, _ in d.accesses():
            if path == ("cbstate",) and isinstance(permission, Write) and d.cls.init is not Callback.init:
                return []  # its `init` may create any entry, and a Learner checks again after `init`
            if path[0] == "cbstate" and len(path) > 1 and writes(permission):
                kind = appended if _only_appends(d, path, permission) else created
                kind.setdefault(path[1], []).append((path, permission))
    problems: list[CheckError] = []
    for d in declared:
        for path, permission, where in d.accesses():
            if path[0] != "cbstate" or len(path) < 2 or getattr(permission, "optional", False):
                continue
            appends = _only_appends(d, path, permission)
            if writes(permission) and not appends:
                continue
            exists = [entry for entry in created.get(path[1], ()) if overlap(entry[0], path)]
            # `Append()` on a whole hub may add any name, but does not guarantee one.
            promised = [
                p
                for p, by in (*exists, *appended.get(path[1], ()))
                if overlap(p, path) and not (isinstance(by, Append) and len(p) < len(path))
            ]
            if exists and (promised or appends):
                continue
            if exists and path[1] in PROVIDERS:
                problems.append(_unpromised(d, path, where, appended.get(path[1], ())))
            else:
                written = [p for entries in created.values() for p, _ in entries]
                problems.append(_missing(d, path, where, written, declared))
    return problems


def _only_appends(d: Declared, path: StatePath, permission: Permission) -> bool:
    """Return whether a callback without `init` only appends to a known hub, which another callback creates."""
    if not isinstance(permission, Append):
        return False
    return permission.optional or (path[1] in PROVIDERS and d.cls.init is Callback.init)


def _unpromised(
    d: Declared, path: StatePath, where: str, appended: Iterable[tuple[StatePath, Permission]]
) -> MissingStateError:
    """Return the error for a name in a hub that no callback declares, although some may add any name."""
    hint = did_you_mean(path[-1], {p[-1] for p, _ in appended if len(p) == len(path)})
    return MissingStateError(
        f"{d.label} reads `{dotted(path)}`, but no callback declares a write to it.{hint}",
        where=where,
        why=f"`Append()` on the whole of `{dotted(path[:2])}` does not declare which names it adds",
        fix=[
            f"declare `Append()` on `{dotted(path)}` in the callback that writes it",
            f"declare `Read()` on `{dotted(path[:2])}`, which runs after all callbacks that write to it",
        ],
    )


def _missing(
    d: Declared, path: StatePath, where: str, written: Sequence[StatePath], declared: Sequence[Declared]
) -> CheckError:
    provider, appends = PROVIDERS.get(path[1]), writes(lookup(d.access, path) or Read())
    others = {p[: len(path)][-1] for p in written}
    known = sorted(others | set(PROVIDERS))
    # Users choose the names of entries, so a name that is merely similar to another one is usually meant.
    suggestion = "" if provider else misspelled(path[1], known) if len(path) == 2 else nearest(path[-1], known)
    hint = f" Did you mean `{suggestion}`?" if suggestion else ""
    creator = next((o.cls for o in (d, *declared) if not o.is_shipped and assigns(o.cls.init, path[-1])), None)
    fix = [f"add a callback that declares `Write()` on `{dotted(path)}` and creates it in its `init`"]
    if provider:
        fix = [f"add `{provider}()` to the callbacks, which creates it"]
    elif creator is not None:
        place = "" if creator is d.cls else f" in `{creator.__name__}.stateaccess`"
        fix = [f"declare `Write()` on `{dotted(path)}`{place}, because `{creator.__name__}.init` creates it"]
    elif suggestion in others:
        fix.insert(0, f"write `{suggestion}` instead of `{path[-1]}`")
    elif suggestion:
        added = f"add `{PROVIDERS[suggestion]}()` to the callbacks"
        fix.insert(0, f"write `{suggestion}` instead of `{path[-1]}`, and {added}")
    if not provider and creator is None and all(p[1] != path[1] for p in written):
        fix[:0] = [f"add `{example_call(cls)}` to the callbacks" for cls in forgotten_creators(path, d, declared)]
    return MissingStateError(
        f"{d.label} {'appends to' if appends else 'reads'} `{dotted(path)}`, which no callback creates.{hint}",
        where=where,
        why=f"it would fail at the first handler that {'appends to' if appends else 'reads'} it",
        fix=fix,
    )


def _used_too_early(graph: CallbackGraph) -> list[CheckError]:
    """Find step values that exist at none of the moments at which their reader runs."""
    groups: dict[tuple[int, int], tuple[BoundHandler, list[Any]]] = {}
    of_callback: dict[int, list[Any]] = {}
    for moment, handlers in graph.orders.items():
        for handler in handlers:
            groups.setdefault((handler.declared.position, id(handler.access)), (handler, []))[1].append(moment)
            of_callback.setdefault(handler.declared.position, []).append(moment)
    written = _written_step_names(graph.declared)
    known = step_names(graph.phases) | set(ENGINE_STEP_NAMES)
    problems: list[CheckError] = []
    for handler, moments in groups.values():
        # The class may declare a path for a handler that has narrowed its own access.
        uses_class_access = handler.access is handler.declared.access
        places = of_callback[handler.declared.position] if uses_class_access else moments
        sets = [available(event, phase) for event, phase in places]
        if any(names is None for names in sets):
            continue
        reachable = {name for names in sets if names for name in names}
        if any(event is StepEnd or issubclass(event, TracedEvent) for event, _ in places):
            reachable |= written - known  # fluxcb does not know when handlers add their own names
        for path, permission in handler.access.items():
            if path[0] != "step" or len(path) < 2:
                continue
            if path[1] in reachable:
                writer = _later_writer(graph, handler, places, path) if path[1] in written - known else None
                if writer is not None and not writes(permission):
                    problems.append(_before_writer(handler, writer, path))
                continue
            if path[1] in known or (path[1] in written and not writes(permission)):
                problems.append(_too_early(handler, path, moments, added=path[1] not in known))
    return problems


def _later_writer(
    graph: CallbackGraph, reader: BoundHandler, places: Sequence[Any], path: StatePath
) -> BoundHandler | None:
    """Return the handler that writes a value after its reader, in the same moment, if no handler writes it before."""
    later = None
    for moment, handlers in graph.orders.items():
        before = True
        for handler in handlers:
            if handler.declared.position == reader.declared.position:
                before = False
            elif any(writes(p) and overlap(written, path) for written, p in handler.access.items()):
                if before or moment not in places:
                    return None
                later = handler
    # Host handlers run after the step, which has all values then.
    return later if all(issubclass(event, TracedEvent) for event, _ in places) else None


def _before_writer(reader: BoundHandler, writer: BoundHandler, path: StatePath) -> CheckError:
    return MissingStateError(
        f"{reader.declared.label} reads `{dotted(path)}` before {writer.declared.label} writes it.",
        where=[reader.where, writer.where],
        why="`in_order` or `runafter` states this order, and the value does not exist before it is written",
        fix=f"state the other order: {ordering(writer.declared, reader.declared)}",
    )


def _too_early(handler: BoundHandler, path: StatePath, moments: Sequence[Any], *, added: bool) -> CheckError:
    shown = ", ".join(dict.fromkeys(moment_name(m) for m in moments[:2]))
    host = all(issubclass(event, HostEvent) for event, _ in moments)
    only_outside = host and not any(event in (StepBegin, StepEnd) for event, _ in moments)
    why = (
        "host handlers see step values only at StepBegin and StepEnd"
        if only_outside
        else f"`{dotted(path)}` does not exist yet there"
    )
    phases = [phase for _, phase in moments]
    later = StepEnd.__name__ if added else _first_with(path[1], phases, host)
    if writes(handler.access[path]) and (events := writable_at(path)):
        # At StepEnd, it is too late to write what the step uses.
        later = next(
            (e.__name__ for e in events[::-1] if any(path[1] in (available(e, p) or ()) for p in phases)), None
        )
    fix = f"handle {later} instead" if later else "use it in a phase that provides it"
    if later is None and path[1] in ("xs", "ys"):
        why = f"{phases[0].__name__} does not split the batch, because the loss function gets `step.batch`"
        fix = "write `step.batch` in a handler of ForwardBegin instead"
    if handler.declared.cls.__module__.startswith("fluxcb.") and not only_outside:  # users do not edit its handlers
        fix = "use it in a phase that provides it; those of `Learner(model, loss_fn)` with `loss_fn(outputs, ys)` do"
    return MissingStateError(
        f"{handler.declared.label} uses `{dotted(path)}` at {shown}, where it does not exist.",
        where=handler.where,
        why=why,
        fix=fix,
    )


def _first_with(name: str, phases: Sequence[type[Phase]], host: bool) -> str | None:
    for event in BUILTIN_EVENTS:
        if issubclass(event, HostEvent) is host and any(name in (available(event, p) or ()) for p in phases):
            return event.__name__
    return None
