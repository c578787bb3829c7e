"""`CallbackFactory`: a callback from up to four functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fluxcb._declare.access import Permission, line_to_add
from fluxcb._declare.callback import Callback
from fluxcb._declare.dispatch import Entry
from fluxcb._declare.events import Event, FitBegin, FitEnd, Trigger
from fluxcb._declare.phases import Phase
from fluxcb._declare.schedules import Schedule
from fluxcb._errors import DeclarationError
from fluxcb._typing import StatePath
from fluxcb.callbacks.functions import function_of_learner

__all__ = ["CallbackFactory"]

_EVENTS = {"before_train": FitBegin, "trigger": Trigger, "after_train": FitEnd}


class CallbackFactory(Callback):
    """Make a callback of functions: one to set up, one before training, one for each Trigger, one after training.

    Args:
        init: `init(learner)`: creates what is missing in `cbstate`; runs when the Learner is built, and may run again.
        before_train: `before_train(learner)`, at FitBegin, and so again when a fit is resumed.
        trigger: `trigger(learner)`, at Trigger: after each epoch, or when a wrapper says (`PeriodicTrigger`, `every`).
        after_train: `after_train(learner)`, at FitEnd, whatever happened.
        access: What the functions touch, as `stateaccess` would return it.
        name: What it is called in messages; by default, the name of the first function that has one.

    Access:
        What `access` says.

    Runs:
        FitBegin, Trigger, FitEnd x Phase (host), those that have a function.

    Cost:
        That of handlers with this access.

    Raises:
        DeclarationError: No function at all, or something that does not take one argument.

    Example:
        >>> from fluxcb import Read
        >>> from fluxcb.callbacks import CallbackFactory
        >>> from fluxcb.testing import testlearner
        >>> slope = CallbackFactory(
        ...     trigger=lambda learner: print(f"w = {learner.params['w']:.2f}"),
        ...     after_train=lambda learner: print("done"),
        ...     access={"params": Read()},
        ...     name="slope",
        ... )
        >>> history = testlearner(slope).fit(2)
        w = 1.57
        w = 2.32
        done

    Source:
        tensorpack, `CallbackFactory`; its `setup_graph` is `init` here.
    """

    def __init__(
        self,
        init: Callable[[Any], None] | None = None,
        before_train: Callable[[Any], None] | None = None,
        trigger: Callable[[Any], None] | None = None,
        after_train: Callable[[Any], None] | None = None,
        *,
        access: Mapping[str, Any] | None = None,
        name: str | None = None,
    ) -> None:
        given = {"init": init, "before_train": before_train, "trigger": trigger, "after_train": after_train}
        functions = {role: function for role, function in given.items() if function is not None}
        if not functions:
            raise DeclarationError(
                "`CallbackFactory` needs a function: `init`, `before_train`, `trigger` or `after_train`.",
                fix="write e.g. `CallbackFactory(trigger=lambda learner: ...)`",
            )
        names = [
            function_of_learner(function, f"`{role}` of `CallbackFactory`") for role, function in functions.items()
        ]
        self.name = name or next((found for found in names if found != "<lambda>"), names[0])
        self.access = {} if access is None else access
        self._functions = functions
        self._entries = {event: Entry(event, Phase, role) for role, event in _EVENTS.items() if role in functions}

    def stateaccess(self) -> Mapping[str, Any]:
        """Return what the functions touch, as it was given."""
        return self.access

    def how_to_declare(self, path: StatePath, permission: Permission) -> str:
        """Return the edit of the argument `access` that adds a path."""
        added = line_to_add(path, permission)
        return f"add `{added}` to the argument `access`" if self.access else f"pass the argument `access={added}`"

    def init(self, learner: Any) -> None:
        """Call `init`."""
        if "init" in self._functions:
            self._functions["init"](learner)

    def before_train(self, event: Event, phase: Phase, learner: Any) -> None:
        """Call `before_train`."""
        self._functions["before_train"](learner)

    def trigger(self, event: Event, phase: Phase, learner: Any) -> None:
        """Call `trigger`."""
        self._functions["trigger"](learner)

    def after_train(self, event: Event, phase: Phase, learner: Any) -> None:
        """Call `after_train`."""
        self._functions["after_train"](learner)

    # Which handlers there are differs from instance to instance.

    def handlers(self) -> list[Entry]:
        """Return the handlers that have a function."""
        return [*super().handlers(), *self._entries.values()]

    def entry_for(self, event: type[Event], phase: type[Phase]) -> tuple[Callback, Entry, tuple[Schedule, ...]] | None:
        """Return the handler of a moment that has a function."""
        for of, entry in self._entries.items():
            if issubclass(event, of):
                return self, entry, ()
        return super().entry_for(event, phase)

    def __repr__(self) -> str:
        return f"CallbackFactory({self.name})"
