"""`CallbackFactory`: build a callback from up to four functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fluxcb._declare.callback import Callback
from fluxcb._declare.events import Event, FitBegin, FitEnd, Trigger
from fluxcb._declare.handlers import Handler
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import Phase
from fluxcb._errors import DeclarationError
from fluxcb.callbacks.arguments import function_of, name_of, result_of

__all__ = ["CallbackFactory"]

_EVENTS = {"before_train": FitBegin, "trigger": Trigger, "after_train": FitEnd}


class CallbackFactory(Callback):
    """Build a callback from functions for setup, before training, at each Trigger, and after training.

    Args:
        init: `init(learner)` creates missing entries of `cbstate`. It runs when the Learner is built, and can run more
            than once.
        before_train: `before_train(learner)` runs at FitBegin, even if the fit resumes a run.
        trigger: `trigger(learner)` runs at Trigger, which is emitted after each epoch unless a wrapper changes it
            (`PeriodicTrigger`, `every`).
        after_train: `after_train(learner)` runs at FitEnd, even if training fails.
        access: The state that the functions read and write, in the format of `stateaccess`.
        name: The name of the callback in messages. By default, the name of the first function that has one.

    Access:
        The paths in `access`.

    Runs:
        FitBegin, Trigger, FitEnd x Phase (host, if there is a function for the event).

    Cost:
        That of handlers with this access.

    Raises:
        DeclarationError: No function is given, or a function does not take one argument. During training: a function
            other than a lambda returns a value.

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
        tensorpack, `CallbackFactory`, where `init` is called `setup_graph`.
    """

    access_argument = "access"

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
        roles = {"init": init, "before_train": before_train, "trigger": trigger, "after_train": after_train}
        functions = {role: function for role, function in roles.items() if function is not None}
        if not functions:
            raise DeclarationError(
                "`CallbackFactory` requires at least one of `init`, `before_train`, `trigger` and `after_train`.",
                fix="write e.g. `CallbackFactory(trigger=lambda learner: ...)`",
            )
        for role, function in functions.items():
            function_of(function, f"`{role}` of `CallbackFactory`", "learner")
        names = [name_of(function) for function in functions.values()]
        self.name = name or next((found for found in names if found != "<lambda>"), names[0])
        self.access = {} if access is None else access
        self._functions = functions
        self._handlers = [Handler(event, Phase, role) for role, event in _EVENTS.items() if role in functions]

    def stateaccess(self) -> Mapping[str, Any]:
        """Return the `access` argument."""
        return self.access

    def init(self, learner: LearnerView) -> None:
        """Call `init`."""
        if "init" in self._functions:
            self._functions["init"](learner)

    def before_train(self, event: Event, phase: Phase, learner: LearnerView) -> Any:
        """Call `before_train`."""
        return result_of(self._functions["before_train"], self._functions["before_train"](learner))

    def trigger(self, event: Event, phase: Phase, learner: LearnerView) -> Any:
        """Call `trigger`."""
        return result_of(self._functions["trigger"], self._functions["trigger"](learner))

    def after_train(self, event: Event, phase: Phase, learner: LearnerView) -> Any:
        """Call `after_train`."""
        return result_of(self._functions["after_train"], self._functions["after_train"](learner))

    # The handlers depend on the arguments.

    def handlers(self) -> list[Handler]:
        """Return a handler for each function."""
        return [*super().handlers(), *self._handlers]

    def __repr__(self) -> str:
        return f"CallbackFactory({self.name})"
