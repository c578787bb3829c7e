"""`PeriodicTrigger`, `PeriodicCallback` and `EnableCallbackIf`: the wrappers of tensorpack."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from fluxcb._declare.callback import Callback
from fluxcb._declare.events import Event, FitBegin, FitEnd, FitStopping, StepBegin, StepEnd, TracedEvent, Trigger
from fluxcb._declare.handlers import Handler
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import Phase
from fluxcb._declare.proxy import ProxyCallback, in_place_of
from fluxcb._declare.schedules import (
    EveryEpochs,
    EverySteps,
    Periodic,
    Predicate,
    Schedule,
    StepsOrEpochs,
    positive,
)
from fluxcb._declare.wrappers import (
    BY_SWITCHING,
    OnSchedule,
    Scheduled,
    refuse_gaps,
    refuse_ineffective,
    refuse_traced_only,
    warn_about_traced,
)
from fluxcb._errors import DeclarationError
from fluxcb.callbacks.arguments import flag, function_of

__all__ = ["EnableCallbackIf", "PeriodicCallback", "PeriodicTrigger"]


class _WithPeriods(Scheduled):
    """A wrapper with a period in steps, a period in epochs, or both."""

    def __init__(self, callback: Callback, every_k_steps: Any, every_k_epochs: Any) -> None:
        super().__init__(callback)
        steps, epochs = every_k_steps, every_k_epochs
        owner = type(self).__name__
        self.every_k_steps = None if steps is None else positive(steps, f"`every_k_steps` of `{owner}`")
        self.every_k_epochs = None if epochs is None else positive(epochs, f"`every_k_epochs` of `{owner}`")

    def __repr__(self) -> str:
        names = ("every_k_steps", "every_k_epochs", "before_train")
        arguments = [f"{name}={value}" for name in names if (value := getattr(self, name, None))]
        return f"{type(self).__name__}({', '.join([repr(self.callback), *arguments])})"


class PeriodicTrigger(_WithPeriods):
    """Trigger a callback every `every_k_steps` steps or every `every_k_epochs` epochs instead of after each epoch.

    The wrapper only changes the schedule of the handler of Trigger, which for example saves, validates or plots. It
    replaces any other schedule of this handler, including that of an inner wrapper. To set the period of all host
    handlers, use `every(callback, steps=...)`.

    Args:
        callback: The callback, which must have a handler of Trigger.
        every_k_steps: Trigger after steps whose number is a multiple of this (steps).
        every_k_epochs: Trigger after epochs whose number is a multiple of this (epochs). If both periods coincide, the
            callback is triggered once.
        before_train: Whether to also trigger at the beginning of each fit, unless the fit resumes a run.

    Access:
        That of the callback.

    Runs:
        Trigger x the phases of the callback (host, at the periods); FitBegin x Phase (host) with `before_train`. Other
        handlers run as usual.

    Cost:
        A Trigger after a step ends a window there.

    Raises:
        DeclarationError: `callback` is not a callback, has no handler of Trigger, or contains another PeriodicTrigger;
            there is neither a period nor `before_train`; or a period is not a positive integer.

    Example:
        >>> from fluxcb.callbacks import CallbackFactory, PeriodicTrigger
        >>> from fluxcb.testing import testlearner
        >>> save = CallbackFactory(trigger=lambda learner: print("step", learner.progress.step), name="save")
        >>> history = testlearner(PeriodicTrigger(save, every_k_steps=3), batches=4).fit(2)
        step 3
        step 6

    Source:
        tensorpack, `PeriodicTrigger`, which triggers twice if both periods coincide, and accepts a callback without a
        trigger, which does nothing.
    """

    def __init__(
        self,
        callback: Callback,
        every_k_steps: int | None = None,
        every_k_epochs: int | None = None,
        before_train: bool = False,
    ) -> None:
        super().__init__(callback, every_k_steps, every_k_epochs)
        flag(before_train, "`before_train` of `PeriodicTrigger`")
        if every_k_steps is None and every_k_epochs is None and not before_train:
            raise DeclarationError(
                "`PeriodicTrigger` requires `every_k_steps`, `every_k_epochs` or `before_train`.",
                why="without any of them, the callback would never be triggered",
                fix="write e.g. `PeriodicTrigger(callback, every_k_epochs=5)`",
            )
        handled = dict.fromkeys(entry.event.__name__ for entry in callback.handlers())
        if not any(issubclass(Trigger, entry.event) for entry in callback.handlers()):
            raise DeclarationError(
                f"{callback!r} has no handler of Trigger, which is the only event that `PeriodicTrigger` schedules.",
                why=f"it handles {', '.join(handled) or 'nothing'}",
                fix="write `every(callback, steps=...)` or `every(callback, epochs=...)`, which schedules all its "
                "host handlers",
            )
        for inner in _wrapped(callback):
            if isinstance(inner, PeriodicTrigger):
                raise DeclarationError(
                    f"`PeriodicTrigger` wraps {inner!r}, which already has a period.",
                    why="a callback can only have one period in steps and one in epochs",
                    fix="use a single `PeriodicTrigger` with `every_k_steps` and `every_k_epochs`",
                )
        self.before_train = before_train
        self._schedule = _of_trigger(self.every_k_steps, self.every_k_epochs)

    def schedule_for(self, event: type[Event], phase: type[Phase]) -> Schedule | None:
        """Return the schedule of Trigger, or None for other events."""
        return self._schedule if issubclass(event, Trigger) else None

    def handlers(self) -> list[Handler]:
        """Return the handlers of the callback with the new schedule of Trigger, and `begin` for `before_train`."""
        handlers: list[Handler] = []
        for handler in super().handlers():
            if not issubclass(handler.event, Trigger):
                handlers.append(handler)
            if issubclass(handler.event, Trigger):
                handlers.append(replace(handler, when=self._schedule))
            elif issubclass(Trigger, handler.event):  # a handler of all host events
                handlers.append(replace(handler, event=Trigger, when=self._schedule))
        if not self.before_train:
            return handlers
        begin = Handler(FitBegin, Phase, "begin", owner=self)
        # `begin` always runs, even if the handler of FitBegin that it replaces has a schedule.
        return [replace(h, when=()) if h.owner is self else h for h in in_place_of(handlers, [begin], type(self))]

    def begin(self, event: FitBegin, phase: Phase, learner: LearnerView) -> None:
        """Run the handler of FitBegin, and then that of Trigger."""
        self.forward(event, phase, learner)
        if not event.resumes:  # a resumed run has already been triggered
            self.forward(Trigger(), phase, learner)


class PeriodicCallback(_WithPeriods):
    """Run the host handlers of a callback only every k steps or epochs, and at the end of the fit.

    The wrapper skips calls but does not add any: Trigger is still emitted after epochs. With `every_k_steps`,
    handlers of steps run at steps whose number is a multiple of `every_k_steps`. Handlers of epochs and of Trigger run
    if the number of finished steps is a multiple of `every_k_steps`.

    With `every_k_epochs`, all handlers run in every k-th epoch. They also run at the end of the fit, for example to
    save the final parameters. In the last epoch, the handlers of StepBegin and StepEnd run only at its last step, and
    the handlers of EpochBegin, EpochEnd and Trigger run as usual.

    The last epoch is only known if the fit counts epochs, not if it counts steps. The last step is only known if the
    data has a length. If it is not known, or is never reached because steps were cancelled, handlers of steps do not
    run in the last epoch.

    Args:
        callback: The callback.
        every_k_steps: Period (steps).
        every_k_epochs: Period (epochs). With both periods, a handler runs if either of them allows it.

    Access:
        That of the callback.

    Runs:
        Like the callback, at the periods. Handlers of FitBegin, FitStopping and FitEnd and traced handlers always run.

    Cost:
        That of the callback. With `every_k_epochs`, a handler that ends windows ends one at each step. With
        `every(callback, epochs=k)`, it only does so in every k-th epoch.

    Raises:
        DeclarationError: `callback` is not a callback, only has traced handlers, or needs every step; there is no
            period; or a period is not a positive integer.

    Warns:
        UserWarning: A traced handler that changes the training still runs at every step.

    Example:
        >>> from fluxcb.callbacks import CallbackFactory, PeriodicCallback
        >>> from fluxcb.testing import testlearner
        >>> save = CallbackFactory(trigger=lambda learner: print("epoch", learner.progress.epoch), name="save")
        >>> history = testlearner(PeriodicCallback(save, every_k_epochs=2)).fit(5)
        epoch 2
        epoch 4
        epoch 5

    Source:
        tensorpack, `PeriodicCallback`, where the handlers before and after a step run at different steps, and where the
        previous epoch decides whether the handlers run at the beginning of the last epoch.
    """

    def __init__(self, callback: Callback, every_k_steps: int | None = None, every_k_epochs: int | None = None) -> None:
        super().__init__(callback, every_k_steps, every_k_epochs)
        steps, epochs = self.every_k_steps, self.every_k_epochs
        if steps is None and epochs is None:
            raise DeclarationError(
                "`PeriodicCallback` requires `every_k_steps` or `every_k_epochs`.",
                fix="write e.g. `PeriodicCallback(callback, every_k_epochs=5)`",
            )
        refuse_gaps("PeriodicCallback", callback)
        refuse_traced_only("PeriodicCallback", callback)
        warn_about_traced(
            "PeriodicCallback", callback, "To schedule it as well, write `every(callback, steps=..., traced=True)`."
        )
        self._schedule = Periodic(steps, epochs)
        # Without a period in epochs, use `EverySteps`, because windows can be planned for it.
        only_steps = EverySteps(steps) if steps is not None and epochs is None else None
        self._at_begin = only_steps or Periodic(steps, epochs, remaining=1)
        self._at_end = only_steps or Periodic(steps, epochs, remaining=0)

    def schedule_for(self, event: type[Event], phase: type[Phase]) -> Schedule | None:
        """Return the schedule of a host handler, or None for handlers that always run."""
        if issubclass(event, TracedEvent | FitBegin | FitStopping | FitEnd):
            return None
        if issubclass(event, StepBegin):
            return self._at_begin
        return self._at_end if issubclass(event, StepEnd) else self._schedule


class EnableCallbackIf(OnSchedule):
    """Run the host handlers of a callback only while a predicate is true. This is equivalent to `fluxcb.when`.

    If the callback has handlers for both StepBegin and StepEnd, or for both EpochBegin and EpochEnd, the predicate is
    evaluated at the first event and its result is used for both. Therefore, both handlers run or neither does.

    Args:
        callback: The callback.
        pred: `pred(learner) -> bool`. It can read the same state as the callback and should not depend on anything
            else.

    Access:
        That of the callback, which also applies to the predicate.

    Runs:
        Like the callback, while the predicate is true. Handlers of FitBegin, FitStopping and FitEnd and traced handlers
        always run.

    Cost:
        That of the callback. The predicate is evaluated at each step. Therefore, a handler that ends windows ends one
        at each step.

    Raises:
        DeclarationError: `callback` is not a callback, only has traced handlers, or needs every step; or `pred` is not
            a function.

    Warns:
        UserWarning: A traced handler that changes the training still runs at every step.

    Example:
        >>> from fluxcb.callbacks import CustomCallback, EnableCallbackIf
        >>> from fluxcb.events import StepEnd
        >>> from fluxcb.testing import testlearner
        >>> show = CustomCallback(lambda learner: print("step", learner.progress.step), StepEnd, name="show")
        >>> rarely = EnableCallbackIf(show, lambda learner: learner.progress.step in (2, 3))
        >>> history = testlearner(rarely, validation_batches=0).fit(1)
        step 2
        step 3

    Source:
        tensorpack, `EnableCallbackIf`, which evaluates the predicate for each handler.
    """

    def __init__(self, callback: Callback, pred: Callable[[Any], bool]) -> None:
        ProxyCallback.__init__(self, callback)
        function_of(
            pred, "`pred` of `EnableCallbackIf`", "learner", example="lambda learner: learner.progress.epoch > 3"
        )
        refuse_gaps("EnableCallbackIf", callback)
        refuse_traced_only("EnableCallbackIf", callback)
        warn_about_traced("EnableCallbackIf", callback, BY_SWITCHING)
        super().__init__(callback, Predicate(pred))
        refuse_ineffective("EnableCallbackIf", self)
        self.pred = pred

    def __repr__(self) -> str:
        return f"EnableCallbackIf({self.callback!r}, {getattr(self.pred, '__name__', repr(self.pred))})"


def _of_trigger(steps: int | None, epochs: int | None) -> Schedule:
    if steps is not None:
        return EverySteps(steps) if epochs is None else StepsOrEpochs(steps, epochs)
    return Periodic() if epochs is None else EveryEpochs(epochs)


def _wrapped(callback: Callback) -> Iterator[Callback]:
    inner: Any = callback
    while isinstance(inner, Callback):
        yield inner
        inner = getattr(inner, "callback", None)
