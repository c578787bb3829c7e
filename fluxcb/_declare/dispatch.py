"""Joint dispatch on (event, phase), on top of `functools.singledispatchmethod`.

`functools` dispatches on one type, so each pair gets a generated type `At[StepEnd, TrainingPhase]`
that derives from the pairs one step more general in either part. Three things plain
`singledispatchmethod` gets wrong for us are mended by `HandlerTable`: registrations leak from a
class to its siblings (here every class has a table of its own), the bound method hides the
registry, and ambiguous pairs are settled silently by the MRO (here they are an error).
"""

from __future__ import annotations

import functools
import inspect
import os
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fluxcb._declare.events import Event, HostEvent, TracedEvent
from fluxcb._declare.phases import Phase
from fluxcb._declare.schedules import Schedule
from fluxcb._errors import AmbiguityError, DeclarationError

__all__ = ["At", "Entry", "HandlerTable", "Pair", "check_pair", "most_specific", "shown_path", "source_of"]

Pair = tuple[type[Event], type[Phase]]


class At:
    """Base of the generated types `At[Event, Phase]`, one per pair, that dispatch goes through."""

    event: type[Event]
    phase: type[Phase]

    def __class_getitem__(cls, pair: Pair) -> type[At]:
        parts = pair if isinstance(pair, tuple) else (pair,)
        if not (len(parts) == 2 and _is_a(parts[0], Event) and _is_a(parts[1], Phase)):
            raise DeclarationError(
                f"`At` takes an event class and a phase class, not {', '.join(map(_named, parts))}.",
                fix="write e.g. `At[StepEnd, TrainingPhase]`",
            )
        return _product(*parts)


@functools.cache
def _product(event: type[Event], phase: type[Phase]) -> type[At]:
    parents = [_product(base, phase) for base in event.__bases__ if issubclass(base, Event)]
    parents += [_product(event, base) for base in phase.__bases__ if issubclass(base, Phase)]
    bases = tuple(dict.fromkeys(parents)) or (At,)
    name = f"At[{event.__name__}, {phase.__name__}]"
    return type(name, bases, {"event": event, "phase": phase, "__slots__": ()})


def source_of(function: Any) -> str:
    """Return `file:line` of a function, the file relative to the working directory if it is inside."""
    code = getattr(function, "__code__", None)
    if code is None:
        return getattr(function, "__qualname__", repr(function))
    return f"{shown_path(code.co_filename)}:{code.co_firstlineno}"


def shown_path(path: str) -> str:
    """Return a file's path, relative to the working directory if it is inside."""
    return _relative(path, os.getcwd())


@functools.lru_cache(maxsize=256)
def _relative(path: str, folder: str) -> str:
    relative = os.path.relpath(path, folder) if os.path.isabs(path) else path
    return path if relative.startswith("..") else relative


@dataclass(frozen=True)
class Entry:
    """One row of a handler table: for this pair, call this.

    Attributes:
        event: Event class the handler names.
        phase: Phase class the handler names.
        name: Method name, looked up on the instance, so that overriding by name works.
        function: The function itself where it was registered from outside and has no name.
        access: The handler's own narrower access, as written, or None for the class's.
        when: When it is due (host handlers), or None for always.
    """

    event: type[Event]
    phase: type[Phase]
    name: str
    function: Callable[..., None] | None = None
    access: Mapping[str, Any] | None = None
    when: Schedule | None = None

    @property
    def traced(self) -> bool:
        """Whether the handler is traced into the step."""
        return issubclass(self.event, TracedEvent)

    def bind(self, instance: Any) -> Callable[..., None]:
        """Return the handler bound to an instance."""
        if self.function is not None:
            return types.MethodType(self.function, instance)
        return getattr(instance, self.name)

    def title(self) -> str:
        """Return `(StepEnd, TrainingPhase)`."""
        return f"({self.event.__name__}, {self.phase.__name__})"


def check_pair(event: Any, phase: Any, where: str) -> Pair:
    """Return the pair if it is an event and a phase class, `Event` standing for `HostEvent`.

    Raises:
        DeclarationError: One of the two is something else.
    """
    for value, base, role in ((event, Event, "event"), (phase, Phase, "phase")):
        if not _is_a(value, base):
            raise DeclarationError(
                f"A handler's {role} must be a subclass of `{base.__name__}`, not {_named(value)}.",
                where=where,
                fix=f"name one of `fluxcb.{role}s`, or a class derived from `fluxcb.{role}s.{base.__name__}`",
            )
    if event is Event:
        return HostEvent, phase
    if not issubclass(event, HostEvent | TracedEvent):
        raise DeclarationError(
            f"`{event.__name__}` is neither a host nor a traced event, so its handlers could run nowhere.",
            where=where,
            fix=f"derive `{event.__name__}` from HostEvent or TracedEvent",
        )
    return event, phase


def _is_a(value: Any, base: type) -> bool:
    return isinstance(value, type) and issubclass(value, base)


def _named(value: Any) -> str:
    return f"the class `{value.__name__}`" if isinstance(value, type) else f"{value!r}"


def most_specific(entries: Iterable[Entry], event: type[Event], phase: type[Phase]) -> list[Entry]:
    """Return the entries that apply to a moment and have no more specific one beside them."""
    fitting = [e for e in entries if issubclass(event, e.event) and issubclass(phase, e.phase)]
    return [
        e
        for e in fitting
        if not any(o is not e and issubclass(o.event, e.event) and issubclass(o.phase, e.phase) for o in fitting)
    ]


def _unhandled(self: Any, event: Event, phase: Phase, learner: Any) -> None:
    """Do nothing: the callback has no handler for this moment."""
    del self, event, phase, learner


class HandlerTable(functools.singledispatchmethod):
    """The handlers of one callback class, by (event, phase).

    Attributes:
        owner: The class.
        entries: All handlers, inherited ones included, by pair.
    """

    def __init__(self, owner: type) -> None:
        super().__init__(_unhandled)
        self.owner = owner
        self.entries: dict[Pair, Entry] = {}
        self._own: list[Entry] = []
        self._by_moment: dict[Pair, Entry | None] = {}

    @property
    def registry(self) -> Mapping[type, Callable[..., None]]:
        """What `functools` dispatches on: `At[event, phase]` types, each with what it calls."""
        return self.dispatcher.registry

    def define(self, own: list[Entry]) -> None:
        """Fill the table from the class's own entries and those of the classes behind it in the MRO.

        Args:
            own: Entries of the class body, and those registered on the class later.

        Raises:
            AmbiguityError: Two entries fit some moment equally well.
        """
        self._own = own
        merged: dict[Pair, Entry] = {}
        for cls in reversed(self.owner.__mro__):
            rows = own if cls is self.owner else _rows(cls)
            # A decorated handler replaces one of the same name, whatever pair that one was for.
            redefined = {e.name for e in rows if e.function is None}
            merged = {pair: e for pair, e in merged.items() if e.function or e.name not in redefined}
            merged.update({(e.event, e.phase): e for e in rows})
        merged = {pair: e for pair, e in merged.items() if e.function or getattr(self.owner, e.name, None) is not None}
        _check_ambiguities(self.owner, merged)
        self.entries = merged
        self.dispatcher = functools.singledispatch(_unhandled)
        self._by_moment = {}
        for (event, phase), entry in merged.items():
            self.dispatcher.register(At[event, phase], _calling(entry))

    def lookup(self, event: type[Event], phase: type[Phase]) -> Entry | None:
        """Return the entry that handles a moment, or None.

        Raises:
            AmbiguityError: Two fit equally well (possible for classes defined later only).
        """
        moment = (event, phase)
        if moment not in self._by_moment:
            _refuse_ambiguous(self.owner, most_specific(self.entries.values(), event, phase), event, phase)
            implementation = self.dispatcher.dispatch(At[event, phase])
            self._by_moment[moment] = getattr(implementation, "entry", None)
        return self._by_moment[moment]

    def register(  # pyright: ignore[reportIncompatibleMethodOverride]  # functools dispatches on one type, this on two
        self,
        event: type[Event],
        phase: type[Phase] = Phase,
        *,
        access: Mapping[str, Any] | None = None,
        when: Schedule | None = None,
    ) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """Return a decorator that adds a handler to the class from outside.

        It reaches subclasses, and Learners built later; a Learner that exists keeps its plan
        until `learner.callbacks.set(...)`.

        Args:
            event: Event class.
            phase: Phase class.
            access: Narrower access for this handler.
            when: When it is due.

        Raises:
            DeclarationError: No event, no phase, or the function's signature does not fit.
            AmbiguityError: It would be ambiguous with another handler; nothing is changed then.
        """
        pair = check_pair(event, phase, f"{self.owner.__name__}.on.register")

        def decorate(function: Callable[..., None]) -> Callable[..., None]:
            from fluxcb._declare.handlers import check_options, check_signature

            where = f"{self.owner.__name__}.on.register"
            if not inspect.isfunction(function):
                raise DeclarationError(
                    f"`on.register` adds functions, not {function!r}.", where=where, fix="put it above a `def`"
                )
            where = f"{where}  {source_of(function)}"
            check_signature(function, where)
            check_options(access, when, where)
            entry = Entry(*pair, name=function.__name__, function=function, access=access, when=when)
            before = self._own
            kept = [e for e in before if (e.event, e.phase) != pair]
            try:
                self._redefine([*kept, entry])
            except AmbiguityError:
                self._redefine(before)
                raise
            return function

        return decorate

    def _redefine(self, own: list[Entry]) -> None:
        self.define(own)
        for subclass in self.owner.__subclasses__():
            table = subclass.on
            table._redefine(table._own)

    def __get__(self, obj: Any, cls: type | None = None) -> Any:
        if obj is None:
            return self

        def dispatch(event: Event, phase: Phase, learner: Any) -> None:
            entry = self.lookup(type(event), type(phase))
            if entry is not None:
                entry.bind(obj)(event, phase, learner)

        return dispatch


def _rows(cls: type) -> list[Entry]:
    """Return the entries of one class alone; a class that is no Callback may be mixed into one."""
    from fluxcb._declare.handlers import entries_of, is_handler

    table = vars(cls).get("on")
    if isinstance(table, HandlerTable):
        return table._own
    return [e for name, value in vars(cls).items() if is_handler(value) for e in entries_of(name, value)]


def _calling(entry: Entry) -> Callable[..., None]:
    def call(self: Any, event: Event, phase: Phase, learner: Any) -> None:
        entry.bind(self)(event, phase, learner)

    vars(call)["entry"] = entry  # what `lookup` and readers of the registry want to know
    return call


def _check_ambiguities(owner: type, entries: dict[Pair, Entry]) -> None:
    """Check the moments that two entries span between them; classes defined later are checked at construction."""
    listed = list(entries.values())
    for index, a in enumerate(listed):
        for b in listed[index + 1 :]:
            event = _narrower(a.event, b.event)
            phase = _narrower(a.phase, b.phase)
            if event is not None and phase is not None:
                _refuse_ambiguous(owner, most_specific(listed, event, phase), event, phase)


def _narrower(a: type, b: type) -> type | None:
    if issubclass(a, b):
        return a
    return b if issubclass(b, a) else None


def _refuse_ambiguous(owner: type, candidates: list[Entry], event: type[Event], phase: type[Phase]) -> None:
    if len({(e.name, e.function) for e in candidates}) < 2:
        return  # a union may fit twice, but it is one handler
    a = candidates[0]
    b = next(e for e in candidates if (e.name, e.function) != (a.name, a.function))
    raise AmbiguityError(
        f"`{owner.__name__}` has two handlers that fit ({event.__name__}, {phase.__name__}) equally well: "
        f"`{a.name}` {a.title()} and `{b.name}` {b.title()}.",
        where=[f"{owner.__name__}.{e.name}  {source_of(e.function or getattr(owner, e.name))}" for e in (a, b)],
        why="neither is more specific in both event and phase, so which one runs would be chance",
        fix=f"add a handler for `@on({event.__name__}, {phase.__name__})` that says what should happen there",
    )
