"""`ProxyCallback`: the base of what wraps a callback."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fluxcb._declare.callback import Callback
from fluxcb._declare.dispatch import Entry
from fluxcb._declare.events import Event
from fluxcb._declare.phases import Phase
from fluxcb._declare.resolution import Resolution
from fluxcb._declare.schedules import Schedule
from fluxcb._errors import DeclarationError

__all__ = ["ProxyCallback"]


class ProxyCallback(Callback):
    """Stand for another callback: every declaration, every handler and the saved state are that callback's own.

    A base class for wrappers. A subclass may override any of the methods. A handler of its own runs in the place of the
    wrapped callback's, where that one is due, and can call it with `forward`. To others (`runafter`,
    `resolveconflict`, `learner.callbacks.get`) a wrapper counts as what it wraps.

    Args:
        callback: The callback.

    Attributes:
        callback: The wrapped callback.

    Access:
        The wrapped callback's.

    Runs:
        As the wrapped callback does.

    Cost:
        The wrapped callback's.

    Raises:
        DeclarationError: `callback` is no callback instance.

    Example:
        >>> from fluxcb import on
        >>> from fluxcb.callbacks import CallbackFactory, ProxyCallback
        >>> from fluxcb.events import Trigger
        >>> from fluxcb.testing import testlearner
        >>> class Announced(ProxyCallback):
        ...     @on
        ...     def announce(self, event: Trigger, phase, learner):
        ...         print("now comes", self.callback)
        ...         self.forward(event, phase, learner)
        >>> save = CallbackFactory(trigger=lambda learner: print("saved at step", learner.progress.step), name="save")
        >>> history = testlearner(Announced(save)).fit(1)
        now comes CallbackFactory(save)
        saved at step 4

    Source:
        tensorpack, `ProxyCallback`; there, `chief_only` is copied, and a change of it has no effect.
    """

    def __init__(self, callback: Callback) -> None:
        if not isinstance(callback, Callback):
            name = type(self).__name__
            inner = callback.__name__ if isinstance(callback, type) else "Recorder"
            made = f"{name}({inner}())" if type(self) is ProxyCallback else f"{name}({inner}(), ...)"
            raise DeclarationError(f"`{name}` wraps a callback instance, not {callback!r}.", fix=f"pass e.g. `{made}`")
        self.callback = callback

    # What is said of the class in a plain callback, a wrapper hands on, also if it is changed later.

    @property
    def name(self) -> str | None:  # pyright: ignore[reportIncompatibleVariableOverride]  # read-only here
        """What the wrapped callback is called."""
        return self.callback.name

    @property
    def main_thread(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]  # read-only here
        """Whether the wrapped callback's handlers run where `fit` was called."""
        return self.callback.main_thread

    @property
    def chief_only(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]  # read-only here
        """Whether the wrapped callback's handlers run on process 0 only."""
        return self.callback.chief_only

    def stateaccess(self) -> Mapping[str, Any]:
        """Return the wrapped callback's access."""
        return self.callback.stateaccess()

    def runafter(self) -> tuple[type[Callback], ...]:
        """Return what the wrapped callback runs after."""
        return self.callback.runafter()

    def resolveconflict(self, other: Callback) -> Resolution:
        """Ask the wrapped callback."""
        return self.callback.resolveconflict(other)

    def init(self, learner: Any) -> None:
        """Set up the wrapped callback."""
        self.callback.init(learner)

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped callback's state."""
        return self.callback.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Hand the state to the wrapped callback."""
        self.callback.load_state_dict(state)

    def output_locations(self) -> Iterable[Path | str]:
        """Return the locations that the wrapped callback writes to."""
        return self.callback.output_locations()

    def provided_metrics(self, phase: type[Phase]) -> Collection[str] | None:
        """Return the metrics that the wrapped callback provides."""
        return self.callback.provided_metrics(phase)

    def metric_phases(self) -> Collection[type[Phase]]:
        """Return the additional phases of the wrapped callback."""
        return self.callback.metric_phases()

    def watched_metrics(self) -> Iterable[Any]:
        """Return the metrics that the wrapped callback watches."""
        return self.callback.watched_metrics()

    def logged_names(self, metrics: Mapping[type[Phase], Collection[str]]) -> Collection[str] | None:
        """Return the names under which the wrapped callback logs."""
        return self.callback.logged_names(metrics)

    def handlers(self) -> list[Entry]:
        """Return the wrapped callback's handlers, and those of this class."""
        return [*self.callback.handlers(), *map(self._own, super().handlers())]

    def entry_for(self, event: type[Event], phase: type[Phase]) -> tuple[Callback, Entry, tuple[Schedule, ...]] | None:
        """Return the wrapped callback's answer, or a handler of this class when that one is due."""
        inner, own = self.callback.entry_for(event, phase), super().entry_for(event, phase)
        if own is None:
            return inner
        return self, self._own(own[1]), (*(inner[2] if inner is not None else ()), *own[2])

    def _own(self, entry: Entry) -> Entry:
        # By name, it would be looked up on the wrapped callback.
        return entry if entry.function is not None else replace(entry, function=getattr(type(self), entry.name))

    def forward(self, event: Event, phase: Phase, learner: Any) -> None:
        """Run the wrapped callback's handler of a moment, if it has one, due or not."""
        found = self.callback.entry_for(type(event), type(phase))
        if found is not None:
            owner, entry, _ = found
            entry.bind(owner)(event, phase, learner)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.callback!r})"
