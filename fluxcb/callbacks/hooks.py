"""`HookToCallback`: hooks of other training code as callbacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fluxcb._declare.access import Read
from fluxcb._declare.callback import Callback
from fluxcb._declare.dispatch import Entry
from fluxcb._declare.events import EpochEnd, Event, FitBegin, FitEnd, StepEnd
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._declare.schedules import Schedule
from fluxcb._declare.signatures import accepts
from fluxcb._errors import DeclarationError
from fluxcb.callbacks.functions import name_of

__all__ = ["HookToCallback"]

# The methods that a hook may have: how many arguments each takes, and the moment at which it is called.
_METHODS = {
    "before_training": (0, FitBegin, Phase),
    "after_step": (1, StepEnd, AbstractTrainingPhase),
    "after_epoch": (1, EpochEnd, AbstractTrainingPhase),
    "after_training": (0, FitEnd, Phase),
}


class HookToCallback(Callback):
    """Call a hook of other training code: a function of the step number, or an object with methods.

    A hook is called with the number of each finished step, in order, as a Python `int`: `hook(step)`. So are the
    periodic actions of CLU. An object may have any of the methods `before_training()`, `after_step(step)` (in the place
    of a call), `after_epoch(epoch)` and `after_training()`, the last of which is called whatever happened. What they
    return is ignored.

    The host may be a window of steps behind the device when a hook is called.

    Args:
        hook: The hook.
        values: Names of step values that it gets, too: `hook(step, {"loss": ...})`, or `after_step(step, {...})`.
        name: What it is called in messages; the hook's own name, or that of its class, by default.

    Access:
        step: Read of what `values` names.

    Runs:
        FitBegin, FitEnd x Phase (host); StepEnd, EpochEnd x AbstractTrainingPhase (host): those that the hook has a
        method for.

    Cost:
        Fetches what `values` names. Bounds no window. `every(HookToCallback(hook), steps=100)` calls it more rarely.

    Raises:
        DeclarationError: The hook cannot be called and has none of the methods, or takes other arguments; `values` is
            no list of names.

    Example:
        >>> from fluxcb.callbacks import HookToCallback
        >>> from fluxcb.testing import testlearner
        >>> def hook(step):
        ...     print("step", step)
        >>> history = testlearner(HookToCallback(hook), batches=2).fit(1)
        step 1
        step 2

    Source:
        tensorpack, `HookToCallback`, for TensorFlow's session hooks; for the other direction, see
        `fluxcb.callbacks_as_hook`.
    """

    def __init__(self, hook: Any, values: Sequence[str] = (), *, name: str | None = None) -> None:
        methods = {name: getattr(hook, name) for name in _METHODS if callable(getattr(hook, name, None))}
        if "after_step" not in methods and callable(hook):
            methods["after_step"] = hook
        if isinstance(hook, type) or not methods:
            raise DeclarationError(
                f"`HookToCallback` takes a function of the step number, or an object with methods, not {hook!r}.",
                why=f"a hook has one of {', '.join(f'`{method}`' for method in _METHODS)}, or can be called",
                fix=f"construct it: `HookToCallback({hook.__name__}(...))`"
                if isinstance(hook, type)
                else "write e.g. `HookToCallback(lambda step: ...)`",
            )
        if not isinstance(values, list | tuple) or not all(isinstance(value, str) for value in values):
            raise DeclarationError(
                f"`values` of `HookToCallback` must be a list of names, not {values!r}.",
                fix='write e.g. `HookToCallback(hook, values=["loss"])`',
            )
        if values and "after_step" not in methods:
            raise DeclarationError(
                f"The hook {hook!r} gets no values: it cannot be called, and has no `after_step`.",
                fix="drop `values=`, or give it a method `after_step(step, values)`",
            )
        self.name = name or name_of(hook)
        self.hook, self.values = hook, tuple(values)
        for method, function in methods.items():
            self._check(method, function)
        self._methods = methods
        self._entries = {
            event: Entry(event, phase, method, access=None if method == "after_step" else {})
            for method, (_, event, phase) in _METHODS.items()
            if method in methods
        }

    def _check(self, method: str, function: Any) -> None:
        count = _METHODS[method][0] + (method == "after_step" and bool(self.values))
        if not accepts(function, count):
            arguments = {"after_step": "step, values" if self.values else "step", "after_epoch": "epoch"}.get(
                method, ""
            )
            called = name_of(function) if function is self.hook else f"{self.name}.{method}"
            raise DeclarationError(
                f"The hook `{called}` cannot be called as `{called}({arguments})`.",
                why="that is what `HookToCallback` does",
                fix=f"wrap it in a function that takes {f'`({arguments})`' if arguments else 'no arguments'}",
            )

    def stateaccess(self) -> Mapping[str, Any]:
        """Return the step values that the hook gets."""
        return {"step": dict.fromkeys(self.values, Read())} if self.values else {}

    def before_training(self, event: Event, phase: Phase, learner: Any) -> None:
        """Call `before_training`."""
        self._methods["before_training"]()

    def after_step(self, event: Event, phase: Phase, learner: Any) -> None:
        """Call the hook, or its `after_step`."""
        values = ({name: learner.step[name] for name in self.values},) if self.values else ()
        self._methods["after_step"](learner.progress.step, *values)

    def after_epoch(self, event: Event, phase: Phase, learner: Any) -> None:
        """Call `after_epoch`."""
        self._methods["after_epoch"](learner.progress.epoch)

    def after_training(self, event: Event, phase: Phase, learner: Any) -> None:
        """Call `after_training`."""
        self._methods["after_training"]()

    # Which handlers there are differs from instance to instance.

    def handlers(self) -> list[Entry]:
        """Return the handlers that the hook has a method for."""
        return [*super().handlers(), *self._entries.values()]

    def entry_for(self, event: type[Event], phase: type[Phase]) -> tuple[Callback, Entry, tuple[Schedule, ...]] | None:
        """Return the handler of a moment that the hook has a method for."""
        for entry in self._entries.values():
            if issubclass(event, entry.event) and issubclass(phase, entry.phase):
                return self, entry, ()
        return super().entry_for(event, phase)

    def __repr__(self) -> str:
        return f"HookToCallback({self.name})"
