"""`Callback`: the base class of everything that happens around the gradient step."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from fluxcb._declare.access import Permission, line_to_add, normalise, overlap, writes
from fluxcb._declare.dispatch import Entry, HandlerTable, source_of
from fluxcb._declare.events import Event
from fluxcb._declare.handlers import check_signature, entries_of, is_handler, refuse_unmarked
from fluxcb._declare.phases import Phase
from fluxcb._declare.resolution import NotDefined, Resolution
from fluxcb._declare.schedules import Schedule
from fluxcb._declare.signatures import runs_later
from fluxcb._errors import DeclarationError
from fluxcb._typing import StatePath

__all__ = ["Callback", "unwrap"]

_DECLARATIONS = (
    *("stateaccess", "runafter", "resolveconflict", "init", "state_dict", "load_state_dict"),
    *("provided_metrics", "metric_phases", "watched_metrics", "logged_names"),
)


class Callback:
    """Base class of callbacks: derive, declare what is touched, and mark handlers with `@on`.

    A callback says what it does in handlers, what it touches in `stateaccess`, what it knows of
    others in `runafter` and `resolveconflict`, what it sets up in `init`, and what of its own
    must survive a checkpoint in `state_dict`.

    Attributes:
        on: The class's handler table, a `functools.singledispatchmethod`; calling
            `callback.on(event, phase, learner)` runs the handler of that moment, if any.
        name: What the callback is called in messages and what its random keys are folded from.
        main_thread: Whether its host handlers run by themselves, on the thread that called `fit`, also if others run
            on threads (`ThreadExecutor`): for signals, windows of a desktop, and for handlers that run an epoch.
        chief_only: Whether its host handlers run on process 0 only, under `jax.distributed`; `init` runs on all.
        validates_with: Name of a `cbstate` entry, or None. The callback replaces `params` with the `params` of this
            entry in each epoch whose EpochBegin it handles. Checkpoints record the name, and `learner.predict` uses
            the same parameters.
        measured_with: For callbacks that compute statistics of other data. It maps the name of the statistics to the
            `cbstate` entry whose `params` are used, or to None for `params`. Checkpoints record it.

    Example:
        >>> from fluxcb import Callback, Read, on
        >>> from fluxcb.events import StepEnd
        >>> class LossPrinter(Callback):
        ...     def stateaccess(self):
        ...         return {"step": {"loss": Read()}}
        ...
        ...     @on
        ...     def show(self, event: StepEnd, phase, learner):
        ...         print(f"{learner.step.loss:.4f}")
        >>> [handler.title() for handler in LossPrinter().handlers()]
        ['(StepEnd, Phase)']
    """

    on: ClassVar[HandlerTable]
    name: str | None = None
    main_thread: bool = False
    chief_only: bool = False
    validates_with: str | None = None
    measured_with: Mapping[str, str | None] = MappingProxyType({})

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = vars(cls)
        if "on" in own:
            raise DeclarationError(
                f"`{cls.__name__}` defines `on`, which is the table of its handlers.",
                where=_place(cls),
                fix="mark methods with the decorator: `@on` above `def anything(self, event: StepEnd, phase, learner)`",
            )
        _check_spelling(cls)
        entries = [entry for name, value in own.items() if is_handler(value) for entry in entries_of(name, value)]
        _check_pairs_once(cls, entries)
        table = HandlerTable(cls)
        table.define(entries)
        for name in {entry.name for entry in table.entries.values() if entry.function is None}:
            function = getattr(cls, name)
            if not is_handler(function):  # an undecorated override of a handler is one
                check_signature(function, f"{cls.__name__}.{name}  {source_of(function)}")
        cls.on = table
        refuse_unmarked(cls)

    # What a callback declares; each has a default that says nothing.

    def stateaccess(self) -> Mapping[str, Any]:
        """Return what the callback reads and writes: nested names with Read, Write or Append at the leaves."""
        return {}

    def how_to_declare(self, path: StatePath, permission: Permission) -> str:
        """Return the edit that an error message suggests so that `stateaccess` declares a path.

        Override it in a class whose `stateaccess` returns what its constructor was given: name that argument.

        Args:
            path: The path, e.g. `("step", "loss")`.
            permission: The permission that is missing.
        """
        return f"add `{line_to_add(path, permission)}` to `stateaccess`"

    def runafter(self) -> tuple[type[Callback], ...]:
        """Return the callback classes (subclasses included) that run before this one at every shared moment."""
        return ()

    def resolveconflict(self, other: Callback) -> Resolution:
        """Say how a conflict with another callback is settled; both sides are asked."""
        del other
        return NotDefined()

    def init(self, learner: Any) -> None:
        """Set up shared state (`learner.cbstate`); runs at construction, in graph order, and may run again."""

    def state_dict(self) -> dict[str, Any]:
        """Return the callback's own fields that must survive a checkpoint (arrays, numbers, strings, containers)."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        if state:
            raise DeclarationError(
                f"`{type(self).__name__}` was given a saved state but has no `load_state_dict`.",
                where=_place(type(self)),
                fix="define `load_state_dict(self, state)` next to `state_dict`",
            )

    def output_locations(self) -> Iterable[Path | str]:
        """Return the paths of files and directories that the callback writes, or the addresses of services as text.

        The default callback `FitSummary` lists them at the end of a fit and omits paths that do not exist.
        """
        return ()

    # The names that the callback uses. Construction compares them, so a misspelled or duplicate name is an error there.

    def provided_metrics(self, phase: type[Phase]) -> Collection[str] | None:
        """Return the names of the metrics that this callback writes to `cbstate.metrics_epoch` for a phase.

        Return None if the names are not known. Then fluxcb does not check the names that other callbacks watch in that
        phase. The default is None for callbacks that declare write access to `cbstate.metrics_epoch`, and no names for
        all others.

        Args:
            phase: One of the phases that the Learner runs, or one that `metric_phases` returned.
        """
        del phase
        return None if self._writes("metrics_epoch") else ()

    def metric_phases(self) -> Collection[type[Phase]]:
        """Return additional phases that this callback provides metrics for, although the Learner does not run them.

        For example, `InferenceRunner` stores its statistics under its own name, as if this were the name of a phase.
        """
        return ()

    def watched_metrics(self) -> Iterable[Any]:
        """Return the metrics that this callback reads, as instances of `fluxcb.callbacks.Watched`."""
        return ()

    def logged_names(self, metrics: Mapping[type[Phase], Collection[str]]) -> Collection[str] | None:
        """Return the names under which this callback logs values to `cbstate.monitors`.

        Return None if the names are only known during training. The default is None for callbacks that declare
        `Append()` on `cbstate.monitors`, and no names for all others.

        Args:
            metrics: For each phase that the Learner runs, the known names of its metrics.
        """
        del metrics
        return None if self._writes("monitors") else ()

    def _writes(self, entry: str) -> bool:
        access = normalise(self.stateaccess(), owner=f"{type(self).__name__}.stateaccess", where=_place(type(self)))
        return any(writes(permission) and overlap(path, ("cbstate", entry)) for path, permission in access.items())

    # What the engine asks; wrappers answer for the callback they wrap.

    def handlers(self) -> list[Entry]:
        """Return all handlers of this callback, inherited ones included."""
        return list(type(self).on.entries.values())

    def entry_for(self, event: type[Event], phase: type[Phase]) -> tuple[Callback, Entry, tuple[Schedule, ...]] | None:
        """Return who handles a moment, with which handler, and when it is due; or None."""
        entry = type(self).on.lookup(event, phase)
        if entry is None:
            return None
        return self, entry, (entry.when,) if entry.when is not None else ()

    def __getstate__(self) -> dict[str, Any]:
        # A copy, or what comes out of a pickle, belongs to no Learner.
        return {name: value for name, value in vars(self).items() if not name.startswith("_fluxcb_")}

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


Callback.on = HandlerTable(Callback)


def unwrap(callback: Callback) -> Callback:
    """Return the callback inside all wrappers."""
    inner = getattr(callback, "callback", None)
    return unwrap(inner) if isinstance(inner, Callback) else callback


def _place(cls: type) -> str:
    functions = [value for value in vars(cls).values() if inspect.isfunction(value)]
    place = f"  {source_of(functions[0])}" if functions else ""
    return f"{cls.__module__}.{cls.__qualname__}{place}"


def _check_spelling(cls: type) -> None:
    """Refuse a declaration that nobody would ever call because its name is not quite right."""
    for name, value in vars(cls).items():
        if name in _DECLARATIONS:
            if not callable(value) and not isinstance(value, classmethod | staticmethod):
                returning = f"write `def {name}(self): return {value!r}`"
                raise DeclarationError(
                    f"`{cls.__name__}.{name}` must be a method, not {type(value).__name__} {value!r}.",
                    where=f"{cls.__module__}.{cls.__qualname__}",
                    fix=returning if name in ("stateaccess", "runafter") else "write a method",
                )
            if later := runs_later(value):
                raise DeclarationError(
                    f"`{cls.__name__}.{name}` is {later}; it must run when it is called.",
                    where=f"{cls.__name__}.{name}  {source_of(value)}",
                    why="its call would return at once, and nothing would ever run its body",
                    fix="make it a plain method, without `async` and `yield`",
                )
            continue
        declares = inspect.isfunction(value) or isinstance(value, Mapping | tuple | list)
        if not declares or is_handler(value) or name.startswith("_"):
            continue
        squeezed = name.replace("_", "").lower()
        by_squeezing = {d.replace("_", ""): d for d in _DECLARATIONS}
        near = difflib.get_close_matches(squeezed, by_squeezing, n=1, cutoff=0.88)
        inherited = any(name in vars(base) for base in cls.__mro__[1:])
        if near and not inherited:
            raise DeclarationError(
                f"`{cls.__name__}.{name}` looks like a misspelt `{by_squeezing[near[0]]}`, and would never be called.",
                where=f"{cls.__name__}.{name}  {source_of(value)}" if inspect.isfunction(value) else _place(cls),
                fix=f"rename it to `{by_squeezing[near[0]]}`, or to something less alike if you mean another method",
            )


def _check_pairs_once(cls: type, entries: list[Entry]) -> None:
    seen: dict[Any, Entry] = {}
    for entry in entries:
        first = seen.setdefault((entry.event, entry.phase), entry)
        if first is not entry:
            raise DeclarationError(
                f"`{cls.__name__}` handles {entry.title()} twice: in `{first.name}` and in `{entry.name}`.",
                where=[f"{cls.__name__}.{e.name}  {source_of(getattr(cls, e.name))}" for e in (first, entry)],
                why="one handler runs per callback and moment",
                fix="merge the two, or split the callback",
            )
