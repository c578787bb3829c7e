"""Joint dispatch on (event, phase), on top of `functools.singledispatchmethod`.

`functools` dispatches on one type, so each pair has a generated type `At[StepEnd, TrainingPhase]`,
which derives from the pairs that are one step more general in either part. `HandlerTable` solves three
problems of plain `singledispatchmethod`. First, registrations leak from a class to its siblings; here,
every class has its own table. Second, the bound method hides the registry. Third, the MRO silently
decides between ambiguous pairs; here, they are an error.

The handlers of an instance may differ from those of its class, so later stages use `handler_at`, which follows the same
rule. It also needs no generated types, which take 2.5 s for 1,000 callback classes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from fluxcb._calls import entry_point
from fluxcb._declare.events import Event
from fluxcb._declare.handlers import (
    Handler,
    Pair,
    check_options,
    check_pair,
    check_signature,
    handlers_of,
    is_handler,
    is_subclass,
    shown,
)
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import Phase
from fluxcb._declare.schedules import Schedule
from fluxcb._declare.shadowed_handlers import warn_about_shadowed
from fluxcb._declare.signatures import source_of
from fluxcb._errors import AmbiguityError, DeclarationError

__all__ = ["At", "HandlerTable", "handler_at"]


class At:
    """Base class of the generated types `At[Event, Phase]`, on which handlers are dispatched."""

    event: type[Event]
    phase: type[Phase]

    @entry_point
    def __class_getitem__(cls, pair: Pair) -> type[At]:
        parts = pair if isinstance(pair, tuple) else (pair,)
        if not (len(parts) == 2 and is_subclass(parts[0], Event) and is_subclass(parts[1], Phase)):
            raise DeclarationError(
                f"`At` takes an event class and a phase class, not {', '.join(map(shown, parts))}.",
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


def handler_at(handlers: Iterable[Handler], event: type[Event], phase: type[Phase], cls: type) -> Handler | None:
    """Return the most specific handler of a callback for a moment, or None.

    Args:
        handlers: The handlers that `Callback.handlers` returned.
        event: Event of the moment.
        phase: Phase of the moment.
        cls: The callback's class, for the message.

    Raises:
        AmbiguityError: Two handlers fit equally well.
    """
    fitting = [h for h in handlers if issubclass(event, h.event) and issubclass(phase, h.phase)]
    if len(fitting) < 2:  # the common case; this function runs for each callback at each moment
        return fitting[0] if fitting else None
    candidates = _most_specific(fitting, event, phase)
    _refuse_ambiguous(cls, candidates, event, phase)
    return candidates[0]


def _most_specific(entries: Iterable[Handler], event: type[Event], phase: type[Phase]) -> list[Handler]:
    fitting = [e for e in entries if issubclass(event, e.event) and issubclass(phase, e.phase)]
    return [
        e
        for e in fitting
        if not any(o is not e and issubclass(o.event, e.event) and issubclass(o.phase, e.phase) for o in fitting)
    ]


def _unhandled(self: Any, event: Event, phase: Phase, learner: LearnerView) -> None:
    """Do nothing, because the callback has no handler for this moment."""
    del self, event, phase, learner


class HandlerTable(functools.singledispatchmethod):
    """The handlers of one callback class, by (event, phase).

    Attributes:
        owner: The class.
        entries: All handlers by pair, including inherited handlers.
    """

    def __init__(self, owner: type) -> None:
        super().__init__(_unhandled)
        self.owner = owner
        self.entries: dict[Pair, Handler] = {}
        self._own: list[Handler] = []
        self._by_moment: dict[Pair, Handler | None] = {}

    @property
    def registry(self) -> Mapping[type, Callable[..., None]]:
        """The types `At[event, phase]` on which `functools` dispatches, each with the function that it calls."""
        return self.dispatcher.registry

    def define(self, own: list[Handler]) -> None:
        """Fill the table with the handlers of the class and of the classes after it in the MRO.

        Args:
            own: The handlers of the class body, and those registered on the class later.

        Raises:
            AmbiguityError: Two handlers fit some moment equally well.
        """
        self._own = own
        merged: dict[Pair, Handler] = {}
        for cls in reversed(self.owner.__mro__):
            rows = own if cls is self.owner else _rows(cls)
            # A decorated handler replaces an inherited handler of the same name, even one for another pair.
            redefined = {e.name for e in rows if e.function is None}
            merged = {pair: e for pair, e in merged.items() if e.function or e.name not in redefined}
            warn_about_shadowed(self.owner, own, cls, rows, merged.values())
            merged.update({(e.event, e.phase): e for e in rows})
        merged = {pair: e for pair, e in merged.items() if e.function or getattr(self.owner, e.name, None) is not None}
        _check_ambiguities(self.owner, merged)
        self.entries = merged
        self.dispatcher = functools.singledispatch(_unhandled)
        self._by_moment = {}
        for (event, phase), entry in merged.items():
            self.dispatcher.register(At[event, phase], _calling(entry))

    def lookup(self, event: type[Event], phase: type[Phase]) -> Handler | None:
        """Return the handler for a moment, or None.

        Raises:
            AmbiguityError: Two handlers fit equally well. This is possible only for classes defined later.
        """
        moment = (event, phase)
        if moment not in self._by_moment:
            _refuse_ambiguous(self.owner, _most_specific(self.entries.values(), event, phase), event, phase)
            implementation = self.dispatcher.dispatch(At[event, phase])
            self._by_moment[moment] = getattr(implementation, "entry", None)
        return self._by_moment[moment]

    @entry_point
    def register(  # pyright: ignore[reportIncompatibleMethodOverride]  # functools dispatches on one type, this on two
        self,
        event: type[Event],
        phase: type[Phase] = Phase,
        *,
        access: Mapping[str, Any] | None = None,
        when: Schedule | None = None,
    ) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """Return a decorator that adds a handler to the class from outside the class body.

        The handler also applies to subclasses and to Learners that are built later. An existing Learner keeps its plan
        until `learner.callbacks.set(...)`.

        Args:
            event: Event class.
            phase: Phase class.
            access: Narrower access for this handler.
            when: Schedule of the handler.

        Raises:
            DeclarationError: `event` or `phase` is not such a class, or the signature of the function is wrong.
            AmbiguityError: The handler would be ambiguous with another handler. The class is unchanged.
        """
        pair = check_pair(event, phase, f"{self.owner.__name__}.on.register")

        @entry_point
        def decorate(function: Callable[..., None]) -> Callable[..., None]:
            where = f"{self.owner.__name__}.on.register"
            if not inspect.isfunction(function):
                raise DeclarationError(
                    f"`on.register` adds functions, not {function!r}.", where=where, fix="put it above a `def`"
                )
            where = f"{where}  {source_of(function)}"
            check_signature(function, where)
            check_options(access, when, where)
            entry = Handler(*pair, name=function.__name__, access=access, when=when, function=function)
            before = self._own
            remaining = [e for e in before if (e.event, e.phase) != pair]
            try:
                self._redefine([*remaining, entry])
            except AmbiguityError:
                self._redefine(before)
                raise
            return function

        return decorate

    def _redefine(self, own: list[Handler]) -> None:
        self.define(own)
        for subclass in self.owner.__subclasses__():
            table = subclass.on
            table._redefine(table._own)

    def __get__(self, obj: Any, cls: type | None = None) -> Any:
        if obj is None:
            return self

        def dispatch(event: Event, phase: Phase, learner: LearnerView) -> None:
            entry = self.lookup(type(event), type(phase))
            if entry is not None:
                entry.bind(obj)(event, phase, learner)

        return dispatch


def _rows(cls: type) -> list[Handler]:
    """Return the handlers of one class, which may be a mixin that is not a Callback."""
    table = vars(cls).get("on")
    if isinstance(table, HandlerTable):
        return table._own
    return [e for name, value in vars(cls).items() if is_handler(value) for e in handlers_of(name, value)]


def _calling(entry: Handler) -> Callable[..., None]:
    def call(self: Any, event: Event, phase: Phase, learner: LearnerView) -> None:
        entry.bind(self)(event, phase, learner)

    vars(call)["entry"] = entry  # for `lookup` and other readers of the registry
    return call


def _check_ambiguities(owner: type, entries: dict[Pair, Handler]) -> None:
    """Check moments for which two handlers fit equally well. Classes defined later are checked at construction."""
    listed = list(entries.values())
    for index, a in enumerate(listed):
        for b in listed[index + 1 :]:
            event = _narrower(a.event, b.event)
            phase = _narrower(a.phase, b.phase)
            if event is not None and phase is not None:
                _refuse_ambiguous(owner, _most_specific(listed, event, phase), event, phase)


def _narrower(a: type, b: type) -> type | None:
    if issubclass(a, b):
        return a
    return b if issubclass(b, a) else None


def _refuse_ambiguous(owner: type, candidates: Sequence[Handler], event: type[Event], phase: type[Phase]) -> None:
    # A union may fit twice, but it is one handler.
    others = [e for e in candidates if (e.name, e.function) != (candidates[0].name, candidates[0].function)]
    if not others:
        return
    a, b = candidates[0], others[0]
    raise AmbiguityError(
        f"`{owner.__name__}` has two handlers that fit ({event.__name__}, {phase.__name__}) equally well: "
        f"`{a.name}` {a.title()} and `{b.name}` {b.title()}.",
        where=[
            f"{owner.__name__}.{e.name}  {source_of(e.function or getattr(e.owner or owner, e.name))}" for e in (a, b)
        ],
        why="neither handler is more specific in both event and phase, so the choice would be arbitrary",
        fix=f"add a handler for `@on({event.__name__}, {phase.__name__})`, which takes precedence over both",
    )
