"""`MonitorHub`: the object to which callbacks log values, and from which they read logged values."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, NoReturn

from fluxcb._calls import Constructed
from fluxcb._declare.access import Permission
from fluxcb._declare.schedules import positive
from fluxcb._declare.state import MONITOR_ALIASES, MONITOR_METHODS
from fluxcb._errors import AccessError, DeclarationError, MissingStateError, did_you_mean
from fluxcb._tracebacks import warn_user
from fluxcb.logging.loggable_state import loggable_of, loggable_state
from fluxcb.logging.loggables import Histogram, Image, Loggable, Text, Value
from fluxcb.logging.rows import COUNTERS

__all__ = ["MonitorHub", "Put", "article"]


class Put(NamedTuple):
    """A logged value.

    Attributes:
        name: Its name.
        loggable: The value.
        step: Number of finished training steps when it was logged.
        epoch: Number of the epoch.
        seconds: When it was logged (Unix time, s).
    """

    name: str
    loggable: Loggable
    step: int
    epoch: int
    seconds: float


class _Series:
    """The values of one name: their type, the latest value, and for numbers the last values with their steps."""

    def __init__(self, kind: type[Loggable]) -> None:
        self.kind = kind
        self.user: str | None = None  # the callback that logged it, if known
        self.latest: Any = None
        # Lists, because read-only views protect lists but not deques.
        self.steps: list[int] = []
        self.values: list[float] = []

    def __eq__(self, other: object) -> bool:
        # Compare the reprs, in which NaN equals NaN.
        return isinstance(other, _Series) and (self.steps, repr(self.values)) == (other.steps, repr(other.values))

    def __hash__(self) -> int:
        raise TypeError("a series is mutable, so it cannot be hashed")


class MonitorHub(Constructed):
    """Collect the values that callbacks log. Keep the latest value of each name and the history of numbers.

    `Monitors` creates a hub as `cbstate.monitors`, and passes logged values to its backends. A callback that logs
    values declares `Append()` on `cbstate.monitors`. A callback that reads values declares `Read()`.

    All values under one name must be of the same type. If a name is logged twice within a step, the history has both
    values. If two callbacks log under the same name, there is one warning for each name.

    Args:
        limit: Minimum number of values that `history` keeps for each name. The maximum is twice this number.

    Example:
        >>> hub = MonitorHub()
        >>> hub.follow(lambda: (7, 2))
        >>> hub.put_scalar("loss", 0.5)
        >>> hub.put_scalar("loss", 0.25)
        >>> hub.latest("loss"), hub.history("loss"), hub.names()
        (0.25, [(7, 0.5), (7, 0.25)], ['loss'])

    Source:
        tensorpack, `Monitors`.
    """

    # Methods whose first argument is a name, and the permission on `cbstate.monitors.<name>` that a call needs.
    by_name: ClassVar[Mapping[str, Permission]] = MONITOR_METHODS

    _clock: Callable[[], tuple[int, int]] = staticmethod(lambda: (0, 0))
    _user: str | None = None

    def __init__(self, limit: int = 10_000) -> None:
        self.limit = positive(limit, "The history of a name (values)")
        self._series: dict[str, _Series] = {}
        self._pending: list[Put] = []
        self._shared: set[str] = set()  # names for which a warning has been issued

    # -- logging ----------------------------------------------------------------------------

    def put_scalar(self, name: str, value: Any) -> None:
        """Log a number: a Python, NumPy or JAX scalar. A JAX scalar is fetched, which waits for the device.

        Raises:
            DeclarationError: `value` is not a number, `name` is invalid, or `name` has values of another type.
        """
        try:
            number = Value(value)
        except DeclarationError as error:
            raise _named(error, name) from error.__cause__
        self.put(name, number)

    def put_text(self, name: str, text: str) -> None:
        """Log a text."""
        self.put(name, _made(name, Text, text))

    def put_image(self, name: str, image: Any) -> None:
        """Log an image, or several images of the same size; see `Image`."""
        self.put(name, _made(name, Image, image))

    def put_histogram(self, name: str, values: Any, bins: int = 64) -> None:
        """Log the histogram of some numbers. Numbers that are not finite are ignored."""
        self.put(name, _made(name, Histogram.of, values, bins))

    def put(self, name: str, loggable: Loggable) -> None:
        """Log any `Loggable`.

        Raises:
            DeclarationError: `loggable` is not a `Loggable`, `name` is invalid, or `name` has values of another type.
        """
        series = self._series.get(name) if isinstance(name, str) else None
        if series is None or series.kind is not type(loggable):
            _require_fit(name, loggable, series.kind if series is not None else None)
        step, epoch = self._clock()
        self._pending.append(Put(name, loggable, step, epoch, time.time()))
        if series is None:
            series = self._series[name] = _Series(type(loggable))
        if series.user != self._user:
            self._note_user(name, series)
        if isinstance(loggable, Value):
            series.steps.append(step)
            series.values.append(loggable.data)
            if len(series.steps) >= 2 * self.limit:
                del series.steps[: -self.limit], series.values[: -self.limit]
            series.latest = loggable.data
        else:
            series.latest = loggable

    def _note_user(self, name: str, series: _Series) -> None:
        """Record which callback logs under a name, and warn if another callback already does."""
        if series.user is None:
            series.user = self._user
        elif self._user is not None and name not in self._shared:
            self._shared.add(name)
            warn_user(
                f"Two callbacks log `{name}`: {series.user} and {self._user}. The log mixes the values of both under "
                "this name. Give the values of one of them another name.",
                UserWarning,
            )

    def cbstate_part(self, name: str, *, writable: bool) -> _Named:
        """Return this hub's methods for one name, for access to `cbstate.monitors.<name>`."""
        return self[name]

    # -- reading ----------------------------------------------------------------------------

    def latest(self, name: str) -> Any:
        """Return the latest value of a name: a float, or a `Loggable` if it is not a number.

        Raises:
            MissingStateError: The name has no values.
        """
        return self._found(name).latest

    def history(self, name: str) -> list[tuple[int, float]]:
        """Return the numbers that were logged under a name, each with its step, oldest first.

        Raises:
            MissingStateError: The name has no values.
            DeclarationError: The values of the name are not numbers.
        """
        series = self._found(name)
        if series.kind is not Value:
            raise DeclarationError(
                f"`{name}` is {article(series.kind)}; only numbers have a history.", fix=f'`latest("{name}")`'
            )
        return list(zip(series.steps, series.values, strict=True))

    def names(self) -> list[str]:
        """Return the names that have values, in the order in which they were first logged."""
        return list(self._series)

    def _found(self, name: str) -> _Series:
        if name not in self._series:
            known = ", ".join(f"`{n}`" for n in list(self._series)[:8]) or "nothing"
            raise MissingStateError(
                f"No value has been logged as `{name}` yet.{did_you_mean(name, self._series)}",
                why=f"logged so far: {known}",
                fix=f'check first: `if "{name}" in learner.cbstate.monitors`',
            )
        return self._series[name]

    def __getitem__(self, name: str) -> _Named:
        return _Named(self, name)

    def __getattr__(self, name: str) -> _Named:  # `monitors.loss`, for names that have been logged
        if name.startswith("_") or name not in self._series:
            logged = vars(self).get("_series", ())  # missing in a copy until its state is restored
            raise _no_attribute("learner.cbstate.monitors", name, (*logged, *_public(MonitorHub)))
        return self[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and name != "limit":
            raise _assigned(name)  # otherwise, the value would be lost silently
        object.__setattr__(self, name, value)

    def __setitem__(self, name: str, value: Any) -> NoReturn:
        raise _assigned(name)

    def __contains__(self, name: object) -> bool:
        return name in self._series

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __len__(self) -> int:
        return len(self._series)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MonitorHub) and self._series == other._series

    def __hash__(self) -> int:
        raise TypeError("a MonitorHub is mutable, so it cannot be hashed")

    def __repr__(self) -> str:
        return f"<monitors: {', '.join(self._series) or 'nothing'}>"

    # -- for the callback that owns the hub -------------------------------------------------

    @property
    def pending(self) -> list[Put]:
        """The values that `take` has not returned yet. This is always the same list."""
        return self._pending

    def used_by(self, callback: str) -> MonitorHub:
        """Return a view of this hub for one callback. The hub attributes values logged through it to the callback."""
        hub = object.__new__(_UsedHub)
        hub.__dict__ = self.__dict__
        hub._user = callback
        return hub

    def forget_users(self) -> None:
        """Forget which callbacks have logged under which names, because the callbacks are replaced."""
        self._shared.clear()
        for series in self._series.values():
            series.user = None

    def follow(self, clock: Callable[[], tuple[int, int]]) -> None:
        """Use a function for the step and epoch of values that are logged from now on."""
        self._clock = clock

    def take(self, *, whole_steps: bool = False) -> list[Put]:
        """Return the values that were logged since the last call.

        Args:
            whole_steps: Whether to keep the values of the current step for later, because it may get more values.
        """
        pending = self._pending
        count = len(pending)
        if whole_steps:
            now = self._clock()[0]
            while count and pending[count - 1].step == now:
                count -= 1
        drained = pending[:count]
        pending[:count] = []
        return drained

    def cut(self, step: int) -> None:
        """Delete numbers that were logged after a step, because the training was rewound to it."""
        for name in self.names():
            series = self._series[name]
            keep = len(series.steps)
            while keep and series.steps[keep - 1] > step:
                keep -= 1
            if keep == len(series.steps):
                continue
            if keep:
                series.steps, series.values = series.steps[:keep], series.values[:keep]
                series.latest = series.values[-1]
            else:
                del self._series[name]

    def state_dict(self) -> dict[str, Any]:
        """Return numbers as `{"steps": int64[n], "values": float64[n]}`, others as `{"latest": state}`, by name."""
        import numpy as np

        found: dict[str, Any] = {}
        for name, series in self._series.items():
            if series.kind is Value:
                steps, values = np.array(series.steps, np.int64), np.array(series.values, np.float64)
                found[name] = {"steps": steps, "values": values}
            elif (latest := loggable_state(series.latest)) is not None:
                found[name] = {"latest": latest}
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace all values by those that `state_dict` returned."""
        self._series.clear()
        self._pending.clear()
        for name, saved in state.items():
            if "latest" in saved:
                latest = loggable_of(saved["latest"])
                if latest is not None:
                    self._series[name] = _Series(type(latest))
                    self._series[name].latest = latest
                continue
            series = self._series[name] = _Series(Value)
            series.steps, series.values = [int(s) for s in saved["steps"]], [float(v) for v in saved["values"]]
            series.latest = series.values[-1]

    def pending_state(self) -> list[dict[str, Any]]:
        """Return the pending values, except those of types that are not defined by fluxcb."""
        found = [(put, loggable_state(put.loggable)) for put in self._pending]
        return [{**put._asdict(), "loggable": state} for put, state in found if state is not None]

    def load_pending(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Replace the pending values by those that `pending_state` returned."""
        puts = [Put(**{**saved, "loggable": loggable_of(saved["loggable"])}) for saved in state]
        self._pending[:] = [put for put in puts if put.loggable is not None]

    def __getstate__(self) -> dict[str, Any]:
        # A copied or unpickled hub does not belong to a Learner.
        return {name: value for name, value in vars(self).items() if name != "_clock"}


class _UsedHub(MonitorHub):
    """A hub that shares all state with another hub, except for the callback that uses it."""

    __slots__ = ("_user",)

    def __reduce__(self) -> Any:
        return MonitorHub, (self.limit,), self.__getstate__()


class _Named:
    """The methods of a hub for one name, for a callback that declares access to this name only."""

    def __init__(self, hub: MonitorHub, name: str) -> None:
        self._hub, self.name = hub, name

    def __getattr__(self, name: str) -> NoReturn:  # only called for names that do not exist
        logged = vars(self).get("name")
        raise _no_attribute(f"learner.cbstate.monitors[{logged!r}]", name, _public(_Named))

    def put_scalar(self, value: Any) -> None:
        self._hub.put_scalar(self.name, value)

    def put_text(self, text: str) -> None:
        self._hub.put_text(self.name, text)

    def put_image(self, image: Any) -> None:
        self._hub.put_image(self.name, image)

    def put_histogram(self, values: Any, bins: int = 64) -> None:
        self._hub.put_histogram(self.name, values, bins)

    def put(self, loggable: Loggable) -> None:
        self._hub.put(self.name, loggable)

    def latest(self) -> Any:
        return self._hub.latest(self.name)

    def history(self) -> list[tuple[int, float]]:
        return self._hub.history(self.name)

    def __repr__(self) -> str:
        return f"<monitors: {self.name}>"


def _assigned(name: str) -> AccessError:
    return AccessError(
        f"A value was assigned to `{name}` of `learner.cbstate.monitors`.",
        why="assigning a value does not log it",
        fix=f'write `learner.cbstate.monitors.put_scalar("{name}", value)`',
    )


def _no_attribute(owner: str, name: str, known: Iterable[str]) -> AttributeError:
    meant = MONITOR_ALIASES.get(name)
    hint = f" Did you mean `{meant}`?" if meant else did_you_mean(name, known)
    return AttributeError(f"`{owner}` has no `{name}`.{hint}")


def _public(cls: type) -> list[str]:
    return [name for name in dir(cls) if not name.startswith("_")]


def _made(name: str, make: Callable[..., Loggable], *args: Any) -> Loggable:
    try:
        return make(*args)
    except DeclarationError as error:
        raise _named(error, name) from error.__cause__


def _named(error: DeclarationError, name: str) -> DeclarationError:
    """Return an error about a value, extended by the name under which the value was logged."""
    return DeclarationError(error.what, where=(f"put as `{name}`", *error.where), why=error.why, fix=error.fix)


def _require_fit(name: Any, loggable: Any, kind: type[Loggable] | None) -> None:
    """Raise an error for an invalid name, and for a value whose type differs from earlier values of the name."""
    if not isinstance(loggable, Loggable):
        raise DeclarationError(
            f"`put` takes a Value, Text, Image or another loggable, not {type(loggable).__name__} {loggable!r}.",
            where=f"put as `{name}`",
            fix="for numbers, `put_scalar(name, value)`",
        )
    if kind is not None:
        raise DeclarationError(
            f"`{name}` is {article(kind)} so far, and {article(type(loggable))} now.",
            why="backends store values of only one kind under a name",
            fix="use another name",
        )
    if not isinstance(name, str) or not name.strip() or not name.isprintable():
        raise DeclarationError(
            f"The name of a logged value must be a printable str, not {name!r}.", fix='write e.g. "validation/accuracy"'
        )
    if name in COUNTERS:
        raise DeclarationError(
            f"No value can be logged as `{name}`.",
            why=f"{', '.join(f'`{c}`' for c in COUNTERS)} are recorded with every value",
            fix=f'use another name, e.g. "train/{name}"',
        )


def article(kind: type[Loggable]) -> str:
    """Return the name of a type of value with its article, e.g. `an Image`."""
    return f"{'an' if kind.__name__[0] in 'AEIOU' else 'a'} {kind.__name__}"
