"""`ProxyCallback`, the base class of wrappers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fluxcb._declare.access import Permission, line_to_add
from fluxcb._declare.callback import Callback, unwrap
from fluxcb._declare.dispatch import handler_at
from fluxcb._declare.events import Event
from fluxcb._declare.handlers import Handler, Pair
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import Phase
from fluxcb._declare.resolution import Resolution
from fluxcb._errors import DeclarationError
from fluxcb._typing import StatePath

__all__ = ["ProxyCallback", "access_declarer", "in_place_of"]


class ProxyCallback(Callback):
    """Wrap another callback, and use its declarations, handlers and saved state.

    This is a base class for wrappers. A subclass may override any of the methods. A handler of the subclass runs in
    place of the wrapped callback's handler whenever that one is due, and can call it with `forward`. In `runafter`,
    `resolveconflict` and `learner.callbacks.get`, a wrapper counts as the wrapped callback.

    Args:
        callback: The callback.

    Attributes:
        callback: The wrapped callback.

    Access:
        The wrapped callback's.

    Runs:
        The wrapped callback's.

    Cost:
        The wrapped callback's.

    Raises:
        DeclarationError: `callback` is not a callback instance.

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
        tensorpack, `ProxyCallback`; there, `chief_only` is copied, and later changes have no effect.
    """

    # The functions that `forward` calls at each moment. Pickles and copies omit attributes with this prefix.
    _fluxcb_forwarded: Mapping[Pair, Callable[..., None] | None] | None = None

    def __init__(self, callback: Callback) -> None:
        if not isinstance(callback, Callback):
            name = type(self).__name__
            inner = callback.__name__ if isinstance(callback, type) else "Recorder"
            made = f"{name}({inner}())" if type(self) is ProxyCallback else f"{name}({inner}(), ...)"
            raise DeclarationError(f"`{name}` wraps a callback instance, not {callback!r}.", fix=f"pass e.g. `{made}`")
        self.callback = callback

    # Class attributes of a plain callback are properties of a wrapper, so that later changes take effect.

    @property
    def name(self) -> str | None:  # pyright: ignore[reportIncompatibleVariableOverride]  # read-only here
        """The name of the wrapped callback."""
        return self.callback.name

    @property
    def main_thread(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]  # read-only here
        """Whether the wrapped callback's handlers run on the thread that called `fit`."""
        return self.callback.main_thread

    @property
    def chief_only(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]  # read-only here
        """Whether the wrapped callback's handlers run on process 0 only."""
        return self.callback.chief_only

    def stateaccess(self) -> Mapping[str, Any]:
        """Return the wrapped callback's access."""
        return self.callback.stateaccess()

    def how_to_declare(self, path: StatePath, permission: Permission) -> str:
        """Return the edit of the wrapped callback's access, or of the wrapper's own if it has one."""
        if access_declarer(self) is not self:
            return self.callback.how_to_declare(path, permission)
        inner = type(unwrap(self.callback)).__name__
        added = line_to_add(path, permission)
        return f"add `{added}` to `{type(self).__name__}.stateaccess`, which replaces that of `{inner}`"

    def runafter(self) -> tuple[type[Callback], ...]:
        """Return the classes that the wrapped callback runs after."""
        return self.callback.runafter()

    def resolveconflict(self, other: Callback) -> Resolution:
        """Return the wrapped callback's resolution."""
        return self.callback.resolveconflict(other)

    def init(self, learner: LearnerView) -> None:
        """Run the wrapped callback's `init`."""
        self.callback.init(learner)

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped callback's state."""
        return self.callback.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> str | None:
        """Restore the wrapped callback's state."""
        return self.callback.load_state_dict(state)

    def output_locations(self) -> Iterable[Path | str]:
        """Return the locations that the wrapped callback writes to."""
        return self.callback.output_locations()

    def left_out_batches(self) -> Mapping[str, Collection[tuple[int, int]]]:
        """Return the batches that the wrapped callback leaves out."""
        return self.callback.left_out_batches()

    def provided_metrics(self, phase: type[Phase]) -> Collection[str] | None:
        """Return the metrics that the wrapped callback provides."""
        return self.callback.provided_metrics(phase)

    def array_metrics(self, phase: type[Phase]) -> Collection[str]:
        """Return the provided metrics whose values are arrays."""
        return self.callback.array_metrics(phase)

    def metric_phases(self) -> Collection[type[Phase]]:
        """Return the additional phases of the wrapped callback."""
        return self.callback.metric_phases()

    def watched_metrics(self) -> Iterable[Any]:
        """Return the metrics that the wrapped callback watches."""
        return self.callback.watched_metrics()

    def logged_names(self, metrics: Mapping[type[Phase], Collection[str]]) -> Collection[str] | None:
        """Return the names under which the wrapped callback logs."""
        return self.callback.logged_names(metrics)

    def watched_names(self) -> Collection[str]:
        """Return the names of logged values that the wrapped callback reads."""
        return self.callback.watched_names()

    def handlers(self) -> list[Handler]:
        """Return the wrapped callback's handlers, replaced by those of this class where these apply.

        A handler of this class has its own schedules and those of the handler that it replaces.
        """
        wrapped = [
            replace(handler, owner=self.callback) if handler.owner is None else handler
            for handler in self.callback.handlers()
        ]
        own = super().handlers()
        return in_place_of(wrapped, own, type(self)) if own else wrapped

    def forward(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Run the wrapped callback's handler of a moment, if there is one, even if it is not due."""
        moment = (type(event), type(phase))
        if self._fluxcb_forwarded is None or moment not in self._fluxcb_forwarded:
            handler = handler_at(self.callback.handlers(), *moment, type(self.callback))
            bound = None if handler is None else handler.bind(self.callback)
            self._fluxcb_forwarded = {**(self._fluxcb_forwarded or {}), moment: bound}
        function = self._fluxcb_forwarded[moment]
        if function is not None:
            function(event, phase, learner)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.callback!r})"


def access_declarer(callback: Callback) -> Callback:
    """Return the callback or the wrapper whose `stateaccess` declares the access of a wrapped callback."""
    while isinstance(callback, ProxyCallback) and type(callback).stateaccess is ProxyCallback.stateaccess:
        callback = callback.callback
    return callback


def in_place_of(wrapped: list[Handler], own: list[Handler], cls: type) -> list[Handler]:
    """Return the handlers of a wrapper: its own ones at the moments that they fit, and the wrapped ones elsewhere.

    Args:
        wrapped: Handlers of the wrapped callback.
        own: Handlers of the wrapper. Where one replaces a wrapped handler, it also gets the schedules of that handler.
        cls: The wrapper's class, for messages.

    Raises:
        AmbiguityError: Two of the handlers in one of the lists fit equally well.
    """
    # Two handlers may overlap only partly, as those of (Trigger, Phase) and (HostEvent, TrainingPhase) do. Then the own
    # one replaces the other at (Trigger, TrainingPhase), the more specific event and phase of both.
    overlaps = ((_narrower(a.event, b.event), _narrower(a.phase, b.phase)) for a in wrapped for b in own)
    listed: list[Pair] = [(handler.event, handler.phase) for handler in (*wrapped, *own)]
    found: list[Handler] = []
    for event, phase in dict.fromkeys([*listed, *(pair for pair in overlaps if None not in pair)]):
        first, mine = handler_at(wrapped, event, phase, cls), handler_at(own, event, phase, cls)
        if mine is not None:
            when = (*(first.when if first is not None else ()), *mine.when)
            found.append(replace(mine, event=event, phase=phase, when=when))
        elif first is not None:
            found.append(first)
    return found


def _narrower(a: type, b: type) -> Any:
    """Return the one of two classes that is derived from the other, or None."""
    return next((one for one, other in ((a, b), (b, a)) if issubclass(one, other)), None)
