"""The source check, which compares the state that handlers use in their source with their declarations.

Nothing runs. A reported problem is certain: the line raises AccessError when it runs with this callback. Places that
the analysis cannot follow are reported as unclear, and exclude all findings that would depend on them. A false alarm in
CI costs more than a missed problem, which the audit of real steps finds.

`fluxcb check` and the pytest plugin run the check. A Learner does not need it, because it checks each access when the
access happens. It only looks for values that are never assigned, before its first fit.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fluxcb._check.source.access_rules import NAMESPACES, AccessRules, Doubt, Refusal
from fluxcb._check.source.constants import field_of, identity
from fluxcb._check.source.touches import Reading, Runs, Touch
from fluxcb._check.source.visitor import Visitor
from fluxcb._check.unassigned import unassigned
from fluxcb._check.unused_writes import unused_writes
from fluxcb._declare.access import Access, Permission, Read, Write, dotted, line_to_add, lookup, overlap, writes
from fluxcb._declare.callback import Callback, unwrap
from fluxcb._declare.declared import BoundHandler, Declared
from fluxcb._declare.handlers import is_handler
from fluxcb._declare.phases import LossTrainingPhase, TrainingPhase, ValidationPhase
from fluxcb._declare.schedules import Predicate
from fluxcb._declare.signatures import source_of
from fluxcb._declare.state import ENGINE_STEP_NAMES, FIRST_LEVEL, PROGRESS, UNDECLARED, step_names
from fluxcb._declare.wrappers import Scheduled
from fluxcb._errors import CheckError, FluxcbError, UndeclaredAccessError, UnknownStateError, did_you_mean, nearest
from fluxcb._typing import StatePath

__all__ = ["Reader", "SourceAudit", "audit_source"]

_WHY_UNUSED = "declared access determines order, conflicts and device-to-host transfers, even if it is unused"

_Refused = dict[StatePath, list[tuple[Touch, Refusal]]]


@dataclass
class SourceAudit:
    """The results of the source check of a set of callbacks.

    Attributes:
        problems: Uses of state without a declaration. Each raises AccessError when its line runs.
        unused: Declared access that nothing uses, one text each.
        unclear: Places that the analysis could not follow, with file and line.
    """

    problems: list[CheckError] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    unclear: list[str] = field(default_factory=list)


class Reader:
    """Analyzes functions that take a learner, and keeps the results.

    Callbacks of one class share a result unless it depends on fields in which they differ.
    """

    def __init__(self) -> None:
        self._known: dict[Any, list[tuple[dict[str, Any], Reading]]] = {}

    def read(self, function: Callable[..., Any], *, before: int, me: Any) -> Reading:
        """Return the state that a function uses.

        Args:
            function: A bound handler, an `init`, or another function that takes a learner.
            before: The number of arguments before the learner: 2 for handlers, 0 for an `init`.
            me: The callback to which the function belongs.
        """
        plain = getattr(function, "__func__", function)
        me = getattr(function, "__self__", None) if me is None else me
        known = self._known.setdefault((identity(plain), type(me), before), [])
        for decided, reading in known:
            if all(identity(field_of(me, name)) == value for name, value in decided.items()):
                return reading
        visitor = Visitor(me)
        reading = visitor.read(function, before)
        known.append((visitor.constants.decided, reading))
        return reading


@dataclass(frozen=True)
class _Scope:
    """One access, and the functions to which it applies.

    Attributes:
        declared: The callback.
        access: The access.
        handler: The handler that has narrowed its access, or None for the access of the class.
        readings: The state that handlers, predicates and `init` with this access use.
        handlers: The handlers among them, each with the state that it uses.
    """

    declared: Declared
    access: Access
    handler: BoundHandler | None
    readings: tuple[Reading, ...]
    handlers: tuple[tuple[BoundHandler, Reading], ...]

    @property
    def where(self) -> str:
        return self.declared.where if self.handler is None else f"access of {self.handler.where}"

    def touches(self) -> Iterator[Touch]:
        for reading in self.readings:
            yield from reading.touches


def audit_source(declared: Sequence[Declared]) -> SourceAudit:
    """Compare the state that callbacks use, according to the source of their handlers, with their declarations.

    The check includes handlers, `init`, predicates (`when`), and the helper functions and methods to which these pass
    the learner. Nothing runs, and nothing is imported.

    Args:
        declared: The callbacks of a set.
    """
    audit = SourceAudit()
    reader = Reader()
    seen: set[Any] = set()
    for callback in declared:
        scopes = _scopes(callback, reader)
        # Callbacks of one class with the same readings and declarations have the same findings.
        key = tuple((s.where, frozenset(s.access.items()), tuple(map(id, s.readings))) for s in scopes)
        if key in seen:
            continue
        seen.add(key)
        judged = [_judged(scope) for scope in scopes]
        for scope, (refused, _) in zip(scopes, judged, strict=True):
            for write in unused_writes(scope.handlers):
                # After the fix of another problem for the same value, the write would still be refused.
                refused.pop(write.path, None)
                audit.problems.append(write.problem([scope.where], partial(_declaring, [scope])))
        audit.problems += _problems(callback, scopes, [refused for refused, _ in judged])
        audit.unclear += [f"{callback.label}: {text}" for _, doubts in judged for text in doubts]
        audit.unused += _unused(callback, scopes, [bool(doubts) for _, doubts in judged], reader)
    audit.problems = _once(audit.problems)
    audit.unclear, audit.unused = list(dict.fromkeys(audit.unclear)), list(dict.fromkeys(audit.unused))
    return audit


def _once(problems: Sequence[CheckError]) -> list[CheckError]:
    """Return the problems without repetitions for other callbacks of the same class at the same lines."""
    return list({(type(problem), problem.where, problem.fix): problem for problem in reversed(problems)}.values())[::-1]


def _scopes(declared: Declared, reader: Reader) -> list[_Scope]:
    """Return the functions for each access of a callback: that of the class, and those of handlers with their own."""
    callback = declared.callback
    shared: list[Reading] = []
    handlers: list[tuple[BoundHandler, Reading]] = []
    own: dict[Any, _Scope] = {}
    if type(callback).init is not Callback.init:
        shared.append(reader.read(callback.init, before=0, me=callback))
    for entry in declared.handlers:
        handler = declared.handler(entry.event, entry.phase)
        if handler is None:
            continue
        me = getattr(handler.function, "__self__", callback)
        readings = [reader.read(handler.function, before=2, me=me)]
        readings += [
            reader.read(schedule.function, before=0, me=None)
            for schedule in handler.schedules
            if isinstance(schedule, Predicate)
        ]
        if handler.access is declared.access:
            shared += [reading for reading in readings if all(reading is not known for known in shared)]
            handlers.append((handler, readings[0]))
        else:
            key = (handler.where, frozenset(handler.access.items()))
            scope = _Scope(declared, handler.access, handler, tuple(readings), ((handler, readings[0]),))
            own.setdefault(key, scope)
    return [_Scope(declared, declared.access, None, tuple(shared), tuple(handlers)), *own.values()]


def _judged(scope: _Scope) -> tuple[_Refused, list[str]]:
    """Return the refused uses by place, and the uses that are unclear."""
    grants = AccessRules(scope.access)
    refused: _Refused = {}
    doubts: list[str] = [text for reading in scope.readings for text in reading.unclear]
    for touch in scope.touches():
        found = None if touch.runs is Runs.NEVER else grants.judge(touch)
        if isinstance(found, Doubt):
            doubts.append(f"{found.what}  {touch.where}")
        elif isinstance(found, Refusal) and touch.runs is Runs.MAYBE:
            doubts.append(f"may {_base(found.verb)} `{dotted(found.path)}`, which is not declared  {touch.where}")
        elif isinstance(found, Refusal):
            refused.setdefault(found.path, []).append((touch, found))
    return refused, list(dict.fromkeys(doubts))


# -- undeclared access ---------------------------------------------------------------------------


def _problems(declared: Declared, scopes: Sequence[_Scope], refused: Sequence[_Refused]) -> Iterator[CheckError]:
    """Yield a problem for each place, with the lines that use it, regardless of which accesses lack it."""
    groups: dict[Any, list[_Scope]] = {}
    for scope, found in zip(scopes, refused, strict=True):
        for path, touches in found.items():
            groups.setdefault((path, tuple(touches)), []).append(scope)
    for (path, touches), lacking in groups.items():
        verbs = {refusal.verb for _, refusal in touches}
        verb = next(verb for verb in ("deletes", "writes", "reads") if verb in verbs)
        lines = list(dict.fromkeys(touch.where for touch, _ in touches))
        unknown = _unknown(path)
        if unknown is not None:
            what, fix = f"{verb} `{dotted(path)}`, {unknown[0]}", unknown[1]
        else:
            what, fix = _undeclared(lacking, path, verb, touches)
        yield (UndeclaredAccessError if unknown is None else UnknownStateError)(
            f"{declared.label} {what}",
            where=[*lines, *(scope.where for scope in lacking)],
            why="it raises AccessError when that line runs" if len(lines) == 1 else "each line raises AccessError",
            fix=fix,
        )


def _unknown(path: StatePath) -> tuple[str, Sequence[str]] | None:
    """Return the problem of a name that does not exist, and the fixes."""
    if path == ("control",):
        return "which is a permission and has no value.", ["raise CancelStep, CancelEpoch or CancelFitting"]
    if path[0] not in FIRST_LEVEL:
        if path[0] in step_names((TrainingPhase, LossTrainingPhase, ValidationPhase)) | set(ENGINE_STEP_NAMES):
            return "which is not a part of the Learner.", [f"write `learner.step.{path[0]}`"]
        return f"which is not a part of the Learner.{did_you_mean(path[0], FIRST_LEVEL)}", []
    if path[0] == "progress" and len(path) == 2 and path[1] not in PROGRESS:
        return f"which is not a counter.{did_you_mean(path[1], PROGRESS)}", [f"it has {', '.join(PROGRESS)}"]
    return None


def _undeclared(
    lacking: Sequence[_Scope], path: StatePath, verb: str, touches: Sequence[tuple[Touch, Refusal]]
) -> tuple[str, Sequence[str]]:
    """Return the problem of an undeclared use of existing state, and the fixes."""
    if verb == "deletes":
        return f"deletes `{dotted(path)}`; state of the Learner cannot be deleted.", ["assign a new value instead"]
    if verb == "writes" and path[0] in UNDECLARED:
        return f"writes `{dotted(path)}`, which only the engine may write.", [
            "keep your own counts in `learner.cbstate`"
        ]
    if verb == "writes" and len(path) == 1 and path[0] in NAMESPACES:
        what = f"assigns `{dotted(path)}` as a whole; only its parts can be assigned."
        return what, [f"assign them one by one: `learner.{dotted(path)}.<name> = ...`"]
    permission: Permission = Write() if verb == "writes" else Read()
    path = _written(path, [touch for touch, _ in touches]) if verb == "writes" else path
    fix = [_declaring(lacking, path, permission)]
    if lookup(lacking[0].access, path) is not None:
        return f"declares only Read() on `{dotted(path)}`, but writes it.", fix
    handler = lacking[0].handler
    cls = lacking[0].declared.cls.__name__
    declares = (
        f"its {lacking[0].declared.access_owner}" if handler is None else f"the `access` of `{cls}.{handler.name}`"
    )
    known = touches[0][1].known
    suggestion = nearest(path[-1], known) if len(path) > 1 and path[-1] not in known else ""
    if not suggestion:
        return f"{verb} `{dotted(path)}`, which {declares} does not declare.", fix
    suggested_path = (*path[:-1], suggestion)
    fix = [f"write `learner.{dotted(suggested_path)}`"]
    allowed = [lookup(scope.access, suggested_path) for scope in lacking]
    if not all(granted is not None and (verb == "reads" or writes(granted)) for granted in allowed):
        fix[0] += f", and {_declaring(lacking, suggested_path, permission)}"
    hint = f" Did you mean `{suggestion}`?"
    return f"{verb} `{dotted(path)}`, which {declares} does not declare.{hint}", fix


def _declaring(lacking: Sequence[_Scope], path: StatePath, permission: Permission) -> str:
    """Return the edits that add a path to the access of a class and to that of handlers with their own access."""
    declared = lacking[0].declared
    cls = declared.cls.__name__
    granted = lookup(declared.access, path)
    edits, added = [], f"add `{line_to_add(path, permission)}` to"
    if granted is None or (writes(permission) and not writes(granted)):
        edit = declared.how_to_declare(path, permission)
        edits.append(f"{added} {declared.access_place}" if edit == f"{added} `stateaccess`" else edit)
    narrowed = [f"`{cls}.{scope.handler.name}`" for scope in lacking if scope.handler is not None]
    if narrowed:
        start = "to" if edits and edits[0].startswith(added) else added
        edits.append(f"{start} the `access` in the `@on` of {' and '.join(dict.fromkeys(narrowed))}")
    return ", and ".join(edits)


def _written(refused: StatePath, touches: Iterable[Touch]) -> StatePath:
    """Return the path to declare if a line writes to a part of the refused place."""
    paths = {touch.path for touch in touches}
    longest = max(paths, key=len)
    if refused[0] in NAMESPACES or any(longest[: len(path)] != path for path in paths):
        return refused
    return longest


def _base(verb: str) -> str:
    return verb.removesuffix("s")


# -- unused access -----------------------------------------------------------------------------


def _unused(declared: Declared, scopes: Sequence[_Scope], doubtful: Sequence[bool], reader: Reader) -> Iterator[str]:
    """Yield a text for each permission that nothing uses, if all code could be followed."""
    if not _only_schedules(declared.callback):
        return
    cls = declared.cls.__name__
    remove = f"remove it from {declared.access_place}"
    nowhere: set[StatePath] = set()
    for path, text in unassigned(declared, reader.read):
        nowhere.add(path)
        yield text
    if not any(doubtful):
        everything = [touch for scope in scopes for touch in scope.touches()]
        for path, permission in _untouched(declared.access, everything):
            if path in nowhere:
                continue
            nowhere.add(path)
            granted = f"{declared.label} declares {type(permission).__name__}() on `{dotted(path)}`"
            unmarked = _unmarked_user(declared.callback, path, reader)
            if unmarked is not None:
                yield _advice(
                    f"{granted}, and only `{cls}.{unmarked.__name__}` uses it, which is not marked with `@on`.",
                    where=[f"{cls}.{unmarked.__name__}  {source_of(unmarked)}", declared.where],
                    why="the engine calls only methods that are marked, so this method never runs",
                    fix=[f"put `@on` above `def {unmarked.__name__}`", remove],
                )
                continue
            yield _advice(
                f"{granted}, but nothing in its source uses it.",
                where=declared.where,
                why=_WHY_UNUSED,
                fix=remove,
            )
    for scope, doubt in zip(scopes, doubtful, strict=True):
        if scope.handler is None or doubt:
            continue
        for path, permission in _untouched(scope.access, list(scope.touches())):
            if path not in nowhere:
                yield _advice(
                    f"The handler `{cls}.{scope.handler.name}` declares {type(permission).__name__}() on "
                    f"`{dotted(path)}` in its own access, but does not use it.",
                    where=scope.handler.where,
                    why=_WHY_UNUSED,
                    fix="remove it from the `access` in its `@on`",
                )


def _untouched(access: Access, touches: Sequence[Touch]) -> Iterator[tuple[StatePath, Permission]]:
    for path, permission in access.items():
        # Raising a Cancel is a use of `control`, and any function that is called may do that.
        if path[0] != "control" and not any(_uses(touch, path) for touch in touches):
            yield path, permission


def _uses(touch: Touch, path: StatePath) -> bool:
    """Return whether a use needs the declared path itself, and not only on the way to another path."""
    on_the_way = touch.how == "reads" and not touch.part
    if on_the_way and len(touch.path) < len(path) and path[: len(touch.path)] == touch.path:
        return False
    return not touch.path or overlap(touch.path, path)


def _only_schedules(callback: Callback) -> bool:
    """Return whether the wrappers of a callback are only `every`, `throttle` or `when`, which declare nothing."""
    while isinstance(callback, Scheduled):
        callback = callback.callback
    return not isinstance(getattr(callback, "callback", None), Callback)


def _unmarked_user(callback: Callback, path: StatePath, reader: Reader) -> Any:
    """Return a method that has the arguments of a handler and uses a path, but is not a handler, or None."""
    callback = unwrap(callback)
    cls = type(callback)
    handlers = {entry.name for entry in callback.handlers()}
    for name in dict.fromkeys(name for base in cls.__mro__ if base not in (Callback, object) for name in vars(base)):
        function = getattr(cls, name)
        if name.startswith("__"):  # a constructor may also have three arguments
            continue
        if not inspect.isfunction(function) or is_handler(function) or name in handlers:
            continue
        if function.__code__.co_argcount == 4:
            reading = reader.read(getattr(callback, name), before=2, me=callback)
            if any(_uses(touch, path) for touch in reading.touches):
                return function
    return None


def _advice(what: str, *, where: Sequence[str] | str, why: str, fix: Sequence[str] | str) -> str:
    return str(FluxcbError(what, where=where, why=why, fix=fix))
