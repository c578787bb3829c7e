"""What a list of callbacks declares, read once: the form in which later stages see callbacks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fluxcb._declare.access import Access, Permission, dotted, line_to_add, lookup, normalise, writes
from fluxcb._declare.callback import Callback, unwrap
from fluxcb._declare.chief import check_chief_only
from fluxcb._declare.dispatch import Entry, source_of
from fluxcb._declare.events import Event
from fluxcb._declare.phases import Phase
from fluxcb._declare.resolution import InOrder
from fluxcb._declare.schedules import Schedule
from fluxcb._errors import DeclarationError
from fluxcb._typing import StatePath

__all__ = ["Declared", "Handler", "Moment", "declare"]

Moment = tuple[type[Event], type[Phase]]


@dataclass(frozen=True, eq=False)
class Handler:
    """One callback's handler at one moment, bound and with its own access.

    Attributes:
        declared: The callback it belongs to.
        event: Event of the moment.
        phase: Phase of the moment.
        name: Its method's name.
        function: The bound method `(event, phase, learner)`.
        access: Its access in normal form.
        schedules: When it is due: when all of these are; empty for always.
        traced: Whether it is traced into the step.
        where: `Class.method  file:line`.
    """

    declared: Declared
    event: type[Event]
    phase: type[Phase]
    name: str
    function: Callable[[Event, Phase, Any], None]
    access: Access
    schedules: tuple[Schedule, ...]
    traced: bool
    where: str


@dataclass(eq=False)
class Declared:
    """One callback's declarations.

    Attributes:
        callback: The instance.
        position: Its place in the list.
        label: What messages call it; unique in the list.
        name: What its random keys are folded from; unique in the list.
        access: Its `stateaccess` in normal form.
        runafter: Classes it runs after.
        where: `Class.stateaccess  file:line`.
    """

    callback: Callback
    position: int
    label: str
    name: str
    access: Access
    runafter: tuple[type[Callback], ...]
    where: str
    _handlers: dict[Moment, Handler | None] = field(default_factory=dict, repr=False)
    _accesses: dict[Moment, Access] = field(default_factory=dict, repr=False)

    @property
    def cls(self) -> type[Callback]:
        """The class of the callback inside all wrappers."""
        return type(unwrap(self.callback))

    def how_to_declare(self, path: StatePath, permission: Permission) -> str:
        """Return the edit that adds a path to the access of the callback inside all wrappers."""
        return unwrap(self.callback).how_to_declare(path, permission)

    def handler(self, event: type[Event], phase: type[Phase]) -> Handler | None:
        """Return this callback's handler of a moment, or None.

        Raises:
            AmbiguityError: Two fit equally well.
        """
        moment = (event, phase)
        if moment not in self._handlers:
            self._handlers[moment] = self._make_handler(event, phase)
        return self._handlers[moment]

    def _make_handler(self, event: type[Event], phase: type[Phase]) -> Handler | None:
        found = self.callback.entry_for(event, phase)
        if found is None:
            return None
        instance, entry, schedules = found
        return Handler(
            self,
            event,
            phase,
            entry.name,
            entry.bind(instance),
            self.access_of(entry),
            schedules,
            entry.traced,
            self.place_of(entry),
        )

    def access_of(self, entry: Entry) -> Access:
        """Return a handler's access: its own if it narrows the class's, else the class's."""
        if entry.access is None:
            return self.access
        pair = (entry.event, entry.phase)
        if pair not in self._accesses:
            self._accesses[pair] = self._narrowed(entry)
        return self._accesses[pair]

    def accesses(self) -> Iterator[tuple[StatePath, Permission, str]]:
        """Yield each path that the class, or a handler on its own, declares, with its permission and its place."""
        for path, permission in self.access.items():
            yield path, permission, self.where
        for entry in self.callback.handlers():
            if entry.access is not None:
                for path, permission in self.access_of(entry).items():
                    if path not in self.access:
                        yield path, permission, self.place_of(entry)

    def place_of(self, entry: Entry) -> str:
        """Return `Class.method  file:line` of a handler."""
        function = entry.bind(unwrap(self.callback))
        return f"{self.cls.__name__}.{entry.name}  {source_of(getattr(function, '__func__', function))}"

    def _narrowed(self, entry: Entry) -> Access:
        owner = f"{self.cls.__name__}.{entry.name}"
        where = self.place_of(entry)
        access = normalise(entry.access, owner=f"@on(access=...) of {owner}", where=where)
        for path, permission in access.items():
            allowed = lookup(self.access, path)
            if allowed is None or (writes(permission) and not writes(allowed)):
                raise DeclarationError(
                    f"The access of `{owner}` is wider than its class's: `stateaccess` does not grant "
                    f"{type(permission).__name__}() on `{dotted(path)}`.",
                    where=[where, self.where],
                    why="a handler's own access can only narrow what the class declares",
                    fix=f"add `{line_to_add(path, permission)}` to `{self.cls.__name__}.stateaccess`",
                )
        return access


def declare(callbacks: Iterable[Any]) -> tuple[list[Declared], list[tuple[int, int]]]:
    """Read the declarations of a callbacks list.

    Args:
        callbacks: Callback instances, and `in_order(...)` groups of them.

    Returns:
        The declarations, in list order, and the position pairs `(earlier, later)` that `in_order` stated.

    Raises:
        DeclarationError: Something in the list is no callback, stands in it twice, or declares nonsense.
    """
    flat, ordered = _flatten(callbacks)
    declared = []
    label_counts: dict[str, int] = {}
    name_counts: dict[str, int] = {}
    for position, callback in enumerate(flat):
        label = _numbered(repr(callback), label_counts, " #")
        name = _numbered(callback.name or type(unwrap(callback)).__name__, name_counts, "#")
        declared.append(_declare_one(callback, position, label, name))
    check_chief_only(declared)
    return declared, ordered


def _numbered(text: str, counts: dict[str, int], separator: str) -> str:
    counts[text] = counts.get(text, 0) + 1
    return text if counts[text] == 1 else f"{text}{separator}{counts[text]}"


def _flatten(callbacks: Iterable[Any]) -> tuple[list[Callback], list[tuple[int, int]]]:
    if isinstance(callbacks, Callback) or not isinstance(callbacks, Iterable):
        raise DeclarationError(
            f"`callbacks` must be a list of callback instances, not {callbacks!r}.",
            fix="put it into a list: `callbacks=[...]`",
        )
    flat: list[Callback] = []
    positions: dict[int, int] = {}
    ungrouped: set[int] = set()
    ordered: list[tuple[int, int]] = []

    def place(callback: Any, *, grouped: bool) -> int:
        if not isinstance(callback, Callback):
            hint = f"{callback.__name__}()" if isinstance(callback, type) and issubclass(callback, Callback) else None
            raise DeclarationError(
                f"The callbacks list contains {callback!r}, which is no callback instance.",
                fix=f"write `{hint}`" if hint else "wrap a function with `CustomCallback(function, StepEnd)`",
            )
        inner = unwrap(callback)
        if id(inner) in positions:
            first = positions[id(inner)]
            # A list may name an instance again by way of in_order(...): several orders, one callback.
            if flat[first] is callback and (grouped or first not in ungrouped):
                return first
            raise DeclarationError(
                f"The callback {callback!r} stands in the list twice; first as {flat[first]!r} at position {first}.",
                why="one instance has one state, and would run twice per moment",
                fix="remove one, or construct a second instance",
            )
        positions[id(inner)] = len(flat)
        flat.append(callback)
        return len(flat) - 1

    for item in callbacks:
        if isinstance(item, InOrder):
            group = [place(callback, grouped=True) for callback in item]
            ordered += [(a, b) for i, a in enumerate(group) for b in group[i + 1 :]]
        else:
            ungrouped.add(place(item, grouped=False))
    return flat, ordered


def _declare_one(callback: Callback, position: int, label: str, name: str) -> Declared:
    cls = type(unwrap(callback))
    where = _where_access(cls)
    access = normalise(callback.stateaccess(), owner=f"{cls.__name__}.stateaccess", where=where)
    return Declared(callback, position, label, name, access, _classes(callback.runafter(), cls), where)


def _where_access(cls: type[Callback]) -> str:
    if cls.stateaccess is not Callback.stateaccess:
        return f"{cls.__name__}.stateaccess  {source_of(cls.stateaccess)}"
    own = next((value for value in vars(cls).values() if inspect.isfunction(value)), None)
    return f"{cls.__name__}, which has no stateaccess  {source_of(own)}" if own else cls.__qualname__


def _classes(classes: Any, cls: type[Callback]) -> tuple[type[Callback], ...]:
    where = f"{cls.__name__}.runafter  {source_of(cls.runafter)}"
    if isinstance(classes, type) or not isinstance(classes, Sequence):
        shown = classes.__name__ if isinstance(classes, type) else repr(classes)
        raise DeclarationError(
            f"`{cls.__name__}.runafter` must return a tuple of callback classes, not {shown}.",
            where=where,
            fix=f"return `({shown},)`" if isinstance(classes, type) else "return e.g. `(Recorder,)`",
        )
    for entry in classes:
        if not (isinstance(entry, type) and issubclass(entry, Callback)):
            raise DeclarationError(
                f"`{cls.__name__}.runafter` names {entry!r}, which is no callback class.",
                where=where,
                fix=f"name the class: `({type(entry).__name__},)`"
                if isinstance(entry, Callback)
                else "return a tuple of subclasses of Callback",
            )
    return tuple(classes)
