"""The declarations of a list of callbacks, read once, in the form that later stages use."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from fluxcb._declare.access import (
    Access,
    Append,
    Permission,
    dotted,
    line_to_add,
    lookup,
    normalise,
    overlap,
    writes,
)
from fluxcb._declare.callback import Callback, unwrap
from fluxcb._declare.deadlines import check_deadlines
from fluxcb._declare.dispatch import handler_at
from fluxcb._declare.events import Event
from fluxcb._declare.handlers import Handler
from fluxcb._declare.instances import check_instance
from fluxcb._declare.phases import Phase
from fluxcb._declare.proxy import access_declarer
from fluxcb._declare.resolution import InOrder
from fluxcb._declare.schedules import Schedule
from fluxcb._declare.signatures import as_code, current_definition, method_place, source_of
from fluxcb._errors import DeclarationError, did_you_mean
from fluxcb._typing import StatePath

__all__ = ["BoundHandler", "Declared", "Moment", "declare"]

Moment = tuple[type[Event], type[Phase]]


@dataclass(frozen=True, eq=False)
class BoundHandler:
    """A handler at one moment, with its callback.

    Attributes:
        declared: The callback that has the handler.
        handler: The handler as the callback declared it. Its event and phase may be base classes of the moment's.
        event: Event of the moment.
        phase: Phase of the moment.
        function: The bound method `(event, phase, learner)`.
        access: Its access in normal form.
        schedules: Its schedules. It is due when all of them are due, and always if there are none.
    """

    declared: Declared
    handler: Handler
    event: type[Event]
    phase: type[Phase]
    function: Callable[[Event, Phase, Any], Any]
    access: Access
    schedules: tuple[Schedule, ...]

    @property
    def where(self) -> str:
        """`Class.method  file:line`."""
        return self.declared.place_of(self.handler)

    @property
    def name(self) -> str:
        """Name of its method."""
        return self.handler.name

    @property
    def traced(self) -> bool:
        """Whether it is traced into the step."""
        return self.handler.traced


@dataclass(eq=False)
class Declared:
    """The declarations of one callback.

    Attributes:
        callback: The instance.
        handlers: Its handlers, read once.
        position: Its position in the list.
        label: Its name in messages, unique in the list.
        name: The name from which its random keys are derived, unique in the list.
        access: Its `stateaccess` in normal form.
        runafter: The classes that it runs after.
        where: `Class.stateaccess  file:line`.
        disabled: Whether its handlers are switched off; see `_run/switches.py`.
        gets_fit_end: Whether its FitEnd handler runs although it is disabled, because it has seen FitBegin.
    """

    callback: Callback
    handlers: tuple[Handler, ...]
    position: int
    label: str
    name: str
    access: Access
    runafter: tuple[type[Callback], ...]
    where: str
    disabled: bool = False
    gets_fit_end: bool = False
    _bound: dict[Moment, BoundHandler | None] = field(default_factory=dict, repr=False)
    _accesses: dict[Moment, Access] = field(default_factory=dict, repr=False)

    @functools.cached_property
    def cls(self) -> type[Callback]:
        """The class of the callback inside all wrappers."""
        return type(unwrap(self.callback))

    @functools.cached_property
    def pairs(self) -> frozenset[tuple[type[Event], type[Phase]]]:
        """The events and phases of the handlers."""
        return frozenset((handler.event, handler.phase) for handler in self.handlers)

    @functools.cached_property
    def code(self) -> str:
        """The callback as code, with `...` for arguments that its repr abbreviates; "" if its label is not code."""
        return as_code(self.label) if self.label == repr(self.callback) else ""

    @property
    def is_shipped(self) -> bool:
        """Whether the class of the callback is part of fluxcb."""
        return self.cls.__module__.partition(".")[0] == "fluxcb"

    def class_name_beside(self, other: Declared) -> str:
        """Return the name of the callback's class, with its module if the class of another callback has this name."""
        cls = self.cls
        if cls.__name__ != other.cls.__name__:
            return cls.__name__
        # Users import the classes of the library from `fluxcb.callbacks`, not from its submodules.
        module = ".".join(cls.__module__.split(".")[:2]) if self.is_shipped else cls.__module__
        return f"{module}.{cls.__qualname__}"

    @property
    def access_owner(self) -> str:
        """The place of the access declaration, for messages: `` `stateaccess` ``, or a constructor argument."""
        argument = access_declarer(self.callback).access_argument
        return "`stateaccess`" if argument is None else f"argument `{argument}`"

    @property
    def access_place(self) -> str:
        """The place of the access declaration with the name of the class: `` `MyCallback.stateaccess` ``."""
        declarer = access_declarer(self.callback)
        argument, cls = declarer.access_argument, type(declarer).__name__
        return f"`{cls}.stateaccess`" if argument is None else f"the argument `{argument}` of `{cls}`"

    def may_write(self, path: StatePath) -> bool:
        """Return whether the callback declares to write a path, a part of it, or the state that contains it."""
        return any(writes(permission) and overlap(own, path) for own, permission in self.access.items())

    def how_to_declare(self, path: StatePath, permission: Permission) -> str:
        """Return the edit that adds a path to the access of the callback."""
        return self.callback.how_to_declare(path, permission)

    def handler(self, event: type[Event], phase: type[Phase]) -> BoundHandler | None:
        """Return this callback's handler of a moment, or None.

        Raises:
            AmbiguityError: Two handlers fit equally well.
        """
        moment = (event, phase)
        if moment not in self._bound:
            self._bound[moment] = self._bind(event, phase)
        return self._bound[moment]

    def _bind(self, event: type[Event], phase: type[Phase]) -> BoundHandler | None:
        handler = handler_at(self.handlers, event, phase, self.cls)
        if handler is None:
            return None
        return BoundHandler(
            self,
            handler,
            event,
            phase,
            handler.bind(self.callback),
            self.access_of(handler),
            handler.schedules(event, phase),
        )

    def access_of(self, handler: Handler) -> Access:
        """Return a handler's access: its own if it narrows that of the class, else that of the class."""
        if handler.access is None:
            return self.access
        pair = (handler.event, handler.phase)
        if pair not in self._accesses:
            self._accesses[pair] = self._narrowed(handler)
        return self._accesses[pair]

    def accesses(self) -> Iterator[tuple[StatePath, Permission, str]]:
        """Yield each path that the class or one of its handlers declares, with its permission and source location."""
        for path, permission in self.access.items():
            yield path, permission, self.where
        for handler in self.handlers:
            if handler.access is not None:
                for path, permission in self.access_of(handler).items():
                    if path not in self.access:
                        yield path, permission, self.place_of(handler)

    def place_of(self, handler: Handler) -> str:
        """Return `Class.method  file:line` of a handler."""
        function, owner = handler.bind(self.callback), handler.owner or self.callback
        return method_place(type(owner), handler.name, getattr(function, "__func__", function))

    def _narrowed(self, handler: Handler) -> Access:
        where = self.place_of(handler)
        owner = where.partition("  ")[0]
        access = normalise(handler.access, owner=f"@on(access=...) of {owner}", where=where)
        for path, permission in access.items():
            allowed = lookup(self.access, path)
            if allowed is None or (writes(permission) and not writes(allowed)):
                raise DeclarationError(
                    f"The access of `{owner}` is wider than that of its class: {self.access_owner} does not grant "
                    f"{type(permission).__name__}() on `{dotted(path)}`.",
                    where=[where, self.where],
                    why="a handler's own access can only narrow what the class declares",
                    fix=f"add `{line_to_add(path, permission)}` to {self.access_place}",
                )
        return access


def declare(callbacks: Iterable[Any]) -> tuple[list[Declared], list[tuple[int, int]]]:
    """Read the declarations of a list of callbacks.

    Args:
        callbacks: Callback instances, and `in_order(...)` groups of them.

    Returns:
        The declarations, in list order, and the position pairs `(earlier, later)` that `in_order` stated.

    Raises:
        DeclarationError: An entry of the list is not a callback, appears twice, or has an invalid declaration.
    """
    flat, ordered = _flatten(callbacks)
    declared = []
    label_counts: dict[str, int] = {}
    name_counts: dict[str, int] = {}
    for position, callback in enumerate(flat):
        label = _numbered(repr(callback), label_counts, " #")
        name = _numbered(callback.name or type(unwrap(callback)).__name__, name_counts, "#")
        declared.append(_declare_one(callback, position, label, name))
        check_deadlines(declared[-1])
    _check_chief_only(declared)
    return declared, ordered


def _numbered(text: str, counts: dict[str, int], separator: str) -> str:
    counts[text] = counts.get(text, 0) + 1
    return text if counts[text] == 1 else f"{text}{separator}{counts[text]}"


def _flatten(callbacks: Iterable[Any]) -> tuple[list[Callback], list[tuple[int, int]]]:
    # A set has another order in each process, and the keys of a mapping are not callbacks.
    if isinstance(callbacks, Callback | Set | Mapping) or not isinstance(callbacks, Iterable):
        raise DeclarationError(
            f"`callbacks` must be a list of callback instances, not {callbacks!r}.",
            fix="put it into a list: `callbacks=[...]`",
        )
    flat: list[Callback] = []
    positions: dict[int, int] = {}
    ungrouped: set[int] = set()
    ordered: list[tuple[int, int]] = []

    def place(callback: Any, *, grouped: bool) -> int:
        check_instance(callback)
        inner = unwrap(callback)
        if id(inner) in positions:
            first = positions[id(inner)]
            # An instance may appear again in in_order(...), because a callback can be part of several orders.
            if flat[first] is callback and (grouped or first not in ungrouped):
                return first
            raise DeclarationError(
                f"The callback {callback!r} appears twice in the list; first as {flat[first]!r} at position {first}.",
                why="an instance has only one state, and it would run twice at each moment",
                fix="remove one of the two, or create a second instance",
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
    cls, declarer = type(unwrap(callback)), type(access_declarer(callback))
    where = _where_access(declarer)
    access = normalise(callback.stateaccess(), owner=f"{declarer.__name__}.stateaccess", where=where)
    handlers = _checked_handlers(callback)
    return Declared(callback, handlers, position, label, name, access, _classes(callback.runafter(), cls), where)


def _checked_handlers(callback: Callback) -> tuple[Handler, ...]:
    """Return the handlers of a callback, after checking the result of an overridden `handlers` method."""
    handlers: Any = callback.handlers()
    listed = isinstance(handlers, list | tuple)
    for wrong in (h for h in handlers if not isinstance(h, Handler)) if listed else (handlers,):
        cls = type(callback)
        raise DeclarationError(
            f"`{cls.__name__}.handlers` must return a list of `Handler`, not {'one with ' * listed}{wrong!r}.",
            where=method_place(cls, "handlers"),
            fix='return e.g. `[*super().handlers(), Handler(StepEnd, TrainingPhase, "method")]`',
        )
    for handler in handlers:
        owner = handler.owner or callback
        if handler.function is None and not callable(getattr(owner, handler.name, None)):
            cls = type(owner)
            raise DeclarationError(
                f"`{cls.__name__}.handlers` names the method `{handler.name}`, which `{cls.__name__}` does not have."
                f"{did_you_mean(handler.name, dir(cls))}",
                where=method_place(cls, "handlers"),
                fix=f"define `def {handler.name}(self, event, phase, learner):`",
            )
    return tuple(handlers)


def _where_access(cls: type[Callback]) -> str:
    if cls.stateaccess is not Callback.stateaccess:
        return method_place(cls, "stateaccess")
    own = next((value for value in vars(cls).values() if inspect.isfunction(value)), None)
    return f"{cls.__name__}, which has no stateaccess  {source_of(own)}" if own else cls.__qualname__


def _classes(classes: Any, cls: type[Callback]) -> tuple[type[Callback], ...]:
    if isinstance(classes, type | str) or not isinstance(classes, Sequence):
        shown = classes.__name__ if isinstance(classes, type) else repr(classes)
        # A string is usually the name of the class.
        name = classes if isinstance(classes, str) and classes.isidentifier() else shown
        named = isinstance(classes, type) or name is classes
        raise DeclarationError(
            f"`{cls.__name__}.runafter` must return a tuple of callback classes, not {shown}.",
            where=method_place(cls, "runafter"),
            fix=f"return `({name},)`" if named else "return e.g. `(Recorder,)`",
        )
    for entry in classes:
        if not (isinstance(entry, type) and issubclass(entry, Callback)):
            raise DeclarationError(
                f"`{cls.__name__}.runafter` names {entry!r}, which is not a callback class.",
                where=method_place(cls, "runafter"),
                fix=f"name the class: `({type(entry).__name__},)`"
                if isinstance(entry, Callback)
                else "return a tuple of subclasses of Callback",
            )
        # A subclass may inherit the method. Its callbacks then run after those of the class that defines it.
        if current_definition(entry) is current_definition(cls):
            raise DeclarationError(
                f"`{cls.__name__}.runafter` names `{cls.__name__}`, its own class.",
                where=method_place(cls, "runafter"),
                why="a callback cannot run before itself",
                fix=[
                    "name the class of the callback that runs first",
                    f"for two instances of `{cls.__name__}`, leave `{cls.__name__}` out of `runafter`, and write "
                    "`in_order(first, second)` in the callbacks list",
                ],
            )
    return tuple(classes)


# -- callbacks that act on process 0 only ----------------------------------------------------------

# The state that all processes train with, which must stay equal on all of them.
_TRAINED_WITH = (
    *((name,) for name in ("params", "model_state", "opt_state", "hyperparams", "data", "model")),
    *(("step", name) for name in ("batch", "xs", "ys")),
)


def _check_chief_only(declared: Sequence[Declared]) -> None:
    """Check the callbacks that act on process 0 only.

    Raises:
        DeclarationError: One of them has a traced handler, or writes state with which all processes train, or writes
            state that a callback on all processes reads.
    """
    for chief in declared:
        if not chief.callback.chief_only:
            continue
        for handler in chief.handlers:
            if handler.traced:
                raise _traced(chief, handler)
            for path in _written(chief, handler):
                if any(overlap(path, part) for part in _TRAINED_WITH):
                    raise _writes(chief, handler, path)
                for other in declared:
                    if not other.callback.chief_only and any(overlap(path, read) for read in _read(other)):
                        raise _read_by(chief, handler, path, other)


def _written(chief: Declared, handler: Handler) -> Iterator[StatePath]:
    for path, permission in chief.access_of(handler).items():
        # Log records may differ between processes, and the processes agree on `control`.
        if writes(permission) and not isinstance(permission, Append):
            yield path


def _read(other: Declared) -> Iterator[StatePath]:
    """Iterate over the paths that the handlers of a callback read. A callback that reads all state only saves it."""
    for handler in other.handlers:
        for path, permission in other.access_of(handler).items():
            if not isinstance(permission, Append) and path != ("*",):
                yield path


def _traced(chief: Declared, handler: Handler) -> DeclarationError:
    return DeclarationError(
        f"{chief.label} is `chief_only`, and its handler `{handler.name}` of {handler.title()} "
        "is traced into the step.",
        where=chief.place_of(handler),
        why="all processes must compile the same step, so a traced handler runs on each of them",
        fix=[
            "move the traced handler into a separate callback that is not `chief_only`",
            "remove `chief_only = True`, and test `jax.process_index() == 0` in the host handlers",
        ],
    )


def _writes(chief: Declared, handler: Handler, path: StatePath) -> DeclarationError:
    return DeclarationError(
        f"{chief.label} is `chief_only`, and its handler `{handler.name}` may write `{dotted(path)}`.",
        where=chief.place_of(handler),
        why="process 0 would train with a different state than the other processes",
        fix=["remove `chief_only = True`", "declare `Read()` if the handler only reads it"],
    )


def _read_by(chief: Declared, handler: Handler, path: StatePath, other: Declared) -> DeclarationError:
    return DeclarationError(
        f"{chief.label} is `chief_only`, and may write `{dotted(path)}`, which {other.label} reads on every process.",
        where=[chief.place_of(handler), other.where],
        why="the other processes would never receive the value that process 0 writes, so their states would differ",
        fix=[f"remove `chief_only = True` from {chief.cls.__name__}", f"also make {other.cls.__name__} `chief_only`"],
    )
