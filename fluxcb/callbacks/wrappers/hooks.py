"""`HookToCallback`: call hooks that were written for other training loops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fluxcb._declare.access import Read
from fluxcb._declare.callback import Callback
from fluxcb._declare.events import EpochEnd, Event, FitBegin, FitEnd, StepEnd
from fluxcb._declare.handlers import Handler
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._declare.signatures import accepts
from fluxcb._errors import DeclarationError
from fluxcb.callbacks.arguments import name_of, require

__all__ = ["HookToCallback"]

# The methods of a hook, each with its number of arguments, its event and its phase.
_METHODS = {
    "before_training": (0, FitBegin, Phase),
    "after_step": (1, StepEnd, AbstractTrainingPhase),
    "after_epoch": (1, EpochEnd, AbstractTrainingPhase),
    "after_training": (0, FitEnd, Phase),
}


class HookToCallback(Callback):
    """Call a hook that was written for another training loop.

    A hook is a function that is called as `hook(step)` after each step, with the number of the step as an `int`. The
    periodic actions of CLU are such functions. A hook can also be an object with any of the methods
    `before_training()`, `after_step(step)` (which replaces the call), `after_epoch(epoch)` and `after_training()`. The
    last one is called even if training fails. The results are ignored.

    The device may already be running later steps of the window when the hook is called for a step.

    Args:
        hook: The hook.
        values: Names of step values to pass as a second argument: `hook(step, {"loss": ...})`, or `after_step(step,
            {...})`.
        name: The name of the callback in messages. By default, the name of the hook or of its class.

    Access:
        step: Read, for the values in `values`.

    Runs:
        FitBegin, FitEnd x Phase (host); StepEnd, EpochEnd x AbstractTrainingPhase (host). Only events for which the
        hook has a method.

    Cost:
        Fetches the values in `values`. Does not shorten windows. To call the hook less often, write
        `every(HookToCallback(hook), steps=100)`.

    Raises:
        DeclarationError: The hook is not callable and has none of the methods, or it takes other arguments, or `values`
            is not a list of names.

    Example:
        >>> from fluxcb.callbacks import HookToCallback
        >>> from fluxcb.testing import testlearner
        >>> def hook(step):
        ...     print("step", step)
        >>> history = testlearner(HookToCallback(hook), batches=2).fit(1)
        step 1
        step 2

    Source:
        tensorpack, `HookToCallback`, for the session hooks of TensorFlow. For the other direction, see
        `fluxcb.callbacks_as_hook`.
    """

    def __init__(self, hook: Any, values: Sequence[str] = (), *, name: str | None = None) -> None:
        methods = {name: getattr(hook, name) for name in _METHODS if callable(getattr(hook, name, None))}
        if "after_step" not in methods and callable(hook):
            methods["after_step"] = hook
        if isinstance(hook, type) or not methods:
            raise DeclarationError(
                f"`HookToCallback` requires a function of the step number, or an object with methods, not {hook!r}.",
                why=f"a hook is callable or has one of {', '.join(f'`{method}`' for method in _METHODS)}",
                fix=f"pass an instance: `HookToCallback({hook.__name__}(...))`"
                if isinstance(hook, type)
                else "write e.g. `HookToCallback(lambda step: ...)`",
            )
        fits = isinstance(values, list | tuple) and all(isinstance(value, str) for value in values)
        require(fits, values, "`values` of `HookToCallback`", "a list of names", 'values=["loss"]')
        if values and "after_step" not in methods:
            raise DeclarationError(
                f"The hook {hook!r} cannot receive `values`, because it is not callable and has no `after_step`.",
                fix="remove `values=`, or define a method `after_step(self, step, values)`",
            )
        self.name = name or name_of(hook)
        self.hook, self.values = hook, tuple(values)
        for method, function in methods.items():
            self._check(method, function)
        self._methods = methods
        self._handlers = [
            Handler(event, phase, method, access=None if method == "after_step" else {})
            for method, (_, event, phase) in _METHODS.items()
            if method in methods
        ]

    def _check(self, method: str, function: Any) -> None:
        count = _METHODS[method][0] + (method == "after_step" and bool(self.values))
        if not accepts(function, count):
            arguments = {"after_step": "step, values" if self.values else "step", "after_epoch": "epoch"}.get(
                method, ""
            )
            called = name_of(function) if function is self.hook else f"{self.name}.{method}"
            raise DeclarationError(
                f"The hook `{called}` cannot be called as `{called}({arguments})`.",
                why="`HookToCallback` calls the hook with these arguments",
                fix=f"wrap the hook in a function that takes {f'`({arguments})`' if arguments else 'no arguments'}",
            )

    def stateaccess(self) -> Mapping[str, Any]:
        """Return the access to the step values that are passed to the hook."""
        return {"step": dict.fromkeys(self.values, Read())} if self.values else {}

    def before_training(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Call `before_training`."""
        self._methods["before_training"]()

    def after_step(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Call the hook or its method `after_step`."""
        values = ({name: learner.step[name] for name in self.values},) if self.values else ()
        self._methods["after_step"](learner.progress.step, *values)

    def after_epoch(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Call `after_epoch`."""
        self._methods["after_epoch"](learner.progress.epoch)

    def after_training(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Call `after_training`."""
        self._methods["after_training"]()

    # The handlers depend on the hook.

    def handlers(self) -> list[Handler]:
        """Return a handler for each method of the hook."""
        return [*super().handlers(), *self._handlers]

    def __repr__(self) -> str:
        return f"HookToCallback({self.name})"
