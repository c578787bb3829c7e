"""`Callback`, the base class of all callbacks."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from fluxcb._calls import Constructed, entry_point
from fluxcb._declare.access import Permission, line_to_add, normalise, overlap, writes
from fluxcb._declare.described import describe_arguments
from fluxcb._declare.dispatch import HandlerTable
from fluxcb._declare.handlers import Handler, check_signature, handlers_of, is_handler
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import Phase
from fluxcb._declare.resolution import NotDefined, Resolution
from fluxcb._declare.signatures import runs_later, source_of
from fluxcb._declare.uncalled_methods import refuse_foreign_hooks, refuse_hidden, refuse_unmarked
from fluxcb._errors import DeclarationError, did_you_mean
from fluxcb._typing import StatePath

__all__ = ["DECLARATIONS", "Callback", "unwrap"]

DECLARATIONS = (
    *("stateaccess", "runafter", "resolveconflict", "init", "state_dict", "load_state_dict"),
    *("provided_metrics", "array_metrics", "metric_phases", "watched_metrics", "logged_names", "watched_names"),
)
"""The methods of a callback that fluxcb calls to read what it declares."""


class Callback(Constructed):
    """Base class of callbacks. A subclass declares the state that it uses and marks its handlers with `@on`.

    A subclass defines handlers and overrides some of these methods: `stateaccess` declares the state that the handlers
    read and write, `runafter` and `resolveconflict` declare the order relative to other callbacks, `init` creates
    shared state, and `state_dict` returns the callback's own state for checkpoints.

    Attributes:
        on: The handler table of the class, a `functools.singledispatchmethod`. `callback.on(event, phase, learner)`
            runs the callback's handler for that event and phase, if there is one.
        name: The name of the callback in messages. Its random keys are derived from this name.
        main_thread: Whether the callback's host handlers always run alone, on the thread that called `fit`, even with a
            `ThreadExecutor`. Set it for signal handlers, desktop windows, and handlers that run an epoch.
        chief_only: Whether host handlers run on process 0 only, under `jax.distributed`. `init` runs on all processes.
        needs_every_step: Whether the callback would lose values if a wrapper such as `every` skipped its handlers at
            some steps. Such a wrapper is then an error.
        validates_with: Name of a `cbstate` entry, or None. The callback replaces `params` with the `params` of this
            entry in each epoch whose EpochBegin it handles. Checkpoints record the name, and `learner.predict` uses
            the same parameters.
        parameter_average: Name of a `cbstate` entry, or None. The entry is a dict in the carry with an average of the
            parameters as `params`, and with counts. An assignment to `learner.params` or `learner.model` restarts it:
            `params` becomes the assigned parameters, and the counts become 0.
        measured_with: For callbacks that compute statistics of other data. It maps the name of the statistics to the
            `cbstate` entry whose `params` are used, or to None for `params`. Checkpoints record it.
        scheduled_hyperparams: Names of hyperparameters that a traced handler sets at each training step, whatever their
            value is. An assignment to `learner.hyperparams`, which would have no effect, is an error.
        carried_layout: A text about what the values in the callback's entries of the carry stand for, if their shapes
            do not tell, such as the names of metrics in one array. A checkpoint with another text is that of another
            run.
        access_argument: Name of the constructor argument that declares the access, for classes whose users declare it
            there. Error messages name this argument instead of `stateaccess`.

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
    needs_every_step: bool = False
    validates_with: str | None = None
    parameter_average: str | None = None
    measured_with: Mapping[str, str | None] = MappingProxyType({})
    scheduled_hyperparams: Collection[str] = ()
    carried_layout: str = ""
    access_argument: str | None = None

    def _record_arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        # A plain assignment would fail in a class that is a frozen dataclass.
        object.__setattr__(self, "_fluxcb_arguments", describe_arguments(type(self), args, kwargs))

    @entry_point
    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = vars(cls)
        # `dataclass(slots=True)` makes a second class from the names of the first, whose table is among them.
        if not isinstance(own.get("on"), HandlerTable | None):
            raise DeclarationError(
                f"`{cls.__name__}` defines `on`, which is reserved for the table of handlers.",
                where=_place(cls),
                fix="mark methods with the decorator: `@on` above `def anything(self, event: StepEnd, phase, learner)`",
            )
        _check_spelling(cls)
        entries = [entry for name, value in own.items() if is_handler(value) for entry in handlers_of(name, value)]
        _check_pairs_once(cls, entries)
        table = HandlerTable(cls)
        table.define(entries)
        for name in {entry.name for entry in table.entries.values() if entry.function is None}:
            function = getattr(cls, name)
            if not is_handler(function):  # an override of a handler is a handler even without the decorator
                check_signature(function, f"{cls.__name__}.{name}  {source_of(function)}")
        cls.on = table
        refuse_hidden(cls)
        refuse_unmarked(cls)
        refuse_foreign_hooks(cls)

    def __setattr__(self, name: str, value: Any) -> None:
        # The callbacks of fluxcb read some constructor arguments only at construction. Without this error, an
        # assignment to the name of such an argument would have no effect.
        of_library = name[0] != "_" and type(self).__module__.startswith("fluxcb.")
        if of_library and not hasattr(self, name) and hasattr(self, "_fluxcb_owner"):  # not in the constructor
            raise _unknown_attribute(self, name, value)
        object.__setattr__(self, name, value)

    # The declarations of a callback. Each default declares nothing.

    def stateaccess(self) -> Mapping[str, Any]:
        """Return what the callback reads and writes: nested names with Read, Write or Append at the leaves."""
        return {}

    def how_to_declare(self, path: StatePath, permission: Permission) -> str:
        """Return the edit that an error message suggests so that the callback declares a path.

        Override this method in a class whose users declare the path neither in `stateaccess` nor in `access_argument`.

        Args:
            path: The path, e.g. `("step", "loss")`.
            permission: The missing permission.
        """
        added = line_to_add(path, permission)
        if self.access_argument is None:
            return f"add `{added}` to `stateaccess`"
        if self.stateaccess():
            return f"add `{added}` to the argument `{self.access_argument}`"
        return f"pass the argument `{self.access_argument}={added}`"

    def runafter(self) -> tuple[type[Callback], ...]:
        """Return the callback classes that run before this callback at every shared moment, including subclasses."""
        return ()

    def resolveconflict(self, other: Callback) -> Resolution:
        """Return how to resolve a conflict with another callback. fluxcb calls this method on both callbacks."""
        del other
        return NotDefined()

    def init(self, learner: LearnerView) -> None:
        """Create shared state in `learner.cbstate`. Runs at construction, in graph order, and may run again."""

    def state_dict(self) -> dict[str, Any]:
        """Return the callback's own fields that a checkpoint must save (arrays, numbers, strings, containers)."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> str | None:
        """Restore the fields that `state_dict` returned.

        Returns:
            What was not restored and why, to show in the `ResumeWarning`, or None.
        """
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

    def left_out_batches(self) -> Mapping[str, Collection[tuple[int, int]]]:
        """Return batches that the fit leaves out, by the name of their data source.

        A fit calls it after all handlers of `FitBegin`. Each batch is a pair of the number of a pass over the data,
        from 1, and the position of the batch in the pass, from 0. The batch is read from the source and dropped: no
        event is emitted for it, and no counter advances.
        """
        return {}

    # Names that the callback provides or uses. Construction compares them, and rejects misspelled and duplicate names.

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

    def array_metrics(self, phase: type[Phase]) -> Collection[str]:
        """Return the names of those metrics in `provided_metrics` whose values are arrays instead of numbers.

        Callbacks that print, log or compare numbers pass over them. To watch one is an error at construction.

        Args:
            phase: One of the phases that the Learner runs, or one that `metric_phases` returned.
        """
        del phase
        return ()

    def metric_phases(self) -> Collection[type[Phase]]:
        """Return additional phases for which this callback provides metrics although the Learner does not run them.

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

    def watched_names(self) -> Collection[str]:
        """Return the names whose values this callback reads from `cbstate.monitors`, if they are known in advance."""
        return ()

    def _writes(self, entry: str) -> bool:
        declared = self.stateaccess()
        if not {"cbstate", "*"} & declared.keys():  # most callbacks
            return False
        # Construction has checked the declaration before, so an error here does not need its location.
        access = normalise(declared, owner=f"{type(self).__name__}.stateaccess", where="")
        return any(writes(permission) and overlap(path, ("cbstate", entry)) for path, permission in access.items())

    def handlers(self) -> list[Handler]:
        """Return the handlers of this callback, including inherited handlers.

        Override this method if the handlers depend on the constructor arguments. Start from `super().handlers()`, and
        filter it, add to it, or change a handler with `dataclasses.replace(handler, when=...)`. A Learner calls this
        method once. At each moment, the Learner runs the handler with the most specific event and phase.
        """
        return list(type(self).on.entries.values())

    def __getstate__(self) -> dict[str, Any]:
        # A copied or unpickled callback does not belong to a Learner, but has the arguments of the original.
        return {n: v for n, v in vars(self).items() if n == "_fluxcb_arguments" or not n.startswith("_fluxcb_")}

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


Callback.on = HandlerTable(Callback)


def unwrap(callback: Callback) -> Callback:
    """Return the callback inside all wrappers."""
    inner = getattr(callback, "callback", None)
    return unwrap(inner) if isinstance(inner, Callback) else callback


def _unknown_attribute(callback: Callback, name: str, value: Any) -> DeclarationError:
    """Return the error for an assignment to an attribute that a callback of fluxcb does not have."""
    cls = type(callback)
    fix = f"remove the assignment.{did_you_mean(name, (n for n in dir(callback) if not n.startswith('_')))}"
    if name in inspect.signature(cls).parameters:
        made = f"{cls.__name__}({name}={value!r})"
        fix = f"pass it to the constructor of a new callback: `learner.callbacks.replace({made})`"
    return DeclarationError(
        f"`{cls.__name__}` has no attribute `{name}`, so an assignment to it would have no effect.", fix=fix
    )


def _place(cls: type) -> str:
    functions = [value for value in vars(cls).values() if inspect.isfunction(value)]
    place = f"  {source_of(functions[0])}" if functions else ""
    return f"{cls.__module__}.{cls.__qualname__}{place}"


def _check_spelling(cls: type) -> None:
    """Raise an error for a method whose misspelled name means that it would never be called."""
    for name, value in vars(cls).items():
        if name in DECLARATIONS:
            if not callable(value) and not isinstance(value, classmethod | staticmethod):
                returning = f"write `def {name}(self): return {_code(value)}`"
                if isinstance(value, property):
                    raise DeclarationError(
                        f"`{cls.__name__}.{name}` must be a method, not a property.",
                        where=f"{cls.__name__}.{name}  {source_of(value.fget)}",
                        fix="remove `@property`",
                    )
                raise DeclarationError(
                    f"`{cls.__name__}.{name}` must be a method, not {type(value).__name__} {value!r}.",
                    where=f"{cls.__module__}.{cls.__qualname__}",
                    fix=returning if name in ("stateaccess", "runafter") else "write a method",
                )
            if later := runs_later(value):
                raise DeclarationError(
                    f"`{cls.__name__}.{name}` is {later}; it must run when it is called.",
                    where=f"{cls.__name__}.{name}  {source_of(value)}",
                    why="calling it would return immediately, without running its body",
                    fix="make it a plain method, without `async` and `yield`",
                )
            _check_parameters(cls, name, value)
            continue
        declares = inspect.isfunction(value) or isinstance(value, Mapping | tuple | list)
        if not declares or is_handler(value) or name.startswith("_"):
            continue
        squeezed = name.replace("_", "").lower()
        by_squeezing = {d.replace("_", ""): d for d in DECLARATIONS}
        near = difflib.get_close_matches(squeezed, by_squeezing, n=1, cutoff=0.88)
        inherited = any(name in vars(base) for base in cls.__mro__[1:])
        if near and not inherited:
            raise DeclarationError(
                f"`{cls.__name__}.{name}` looks like a misspelled `{by_squeezing[near[0]]}` and would never be called.",
                where=f"{cls.__name__}.{name}  {source_of(value)}" if inspect.isfunction(value) else _place(cls),
                fix=f"rename it to `{by_squeezing[near[0]]}`, or to a less similar name if it is a different method",
            )


def _check_parameters(cls: type, name: str, value: Any) -> None:
    """Raise an error for a method that cannot be called with the arguments that fluxcb passes."""
    if not inspect.isfunction(value) or name not in vars(Callback):
        return
    expected = inspect.signature(getattr(Callback, name))
    try:
        inspect.signature(value).bind(*expected.parameters)
    except TypeError:
        raise DeclarationError(
            f"`{cls.__name__}.{name}` must take ({', '.join(expected.parameters)}).",
            where=f"{cls.__name__}.{name}  {source_of(value)}",
            why="fluxcb calls it with these arguments",
            fix=f"write `def {name}({', '.join(expected.parameters)}):`",
        ) from None


def _code(value: Any) -> str:
    """Return a value as code; the name of a class instead of `<class ...>`."""
    if isinstance(value, tuple):
        return f"({', '.join(map(_code, value))}{',' * (len(value) == 1)})"
    return value.__name__ if isinstance(value, type) else repr(value)


def _check_pairs_once(cls: type, entries: list[Handler]) -> None:
    seen: dict[Any, Handler] = {}
    for entry in entries:
        first = seen.setdefault((entry.event, entry.phase), entry)
        if first is not entry:
            raise DeclarationError(
                f"`{cls.__name__}` handles {entry.title()} twice: in `{first.name}` and in `{entry.name}`.",
                where=[f"{cls.__name__}.{e.name}  {source_of(getattr(cls, e.name))}" for e in (first, entry)],
                why="each callback has at most one handler per moment",
                fix="merge the two, or split the callback",
            )
