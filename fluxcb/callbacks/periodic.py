"""`PeriodicTrigger`, `PeriodicCallback`, `EnableCallbackIf`: tensorpack's wrappers, spelt on fluxcb's schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from fluxcb._declare.callback import Callback
from fluxcb._declare.dispatch import Entry
from fluxcb._declare.events import Event, FitBegin, FitEnd, FitStopping, StepBegin, StepEnd, TracedEvent, Trigger
from fluxcb._declare.phases import Phase
from fluxcb._declare.proxy import ProxyCallback
from fluxcb._declare.schedules import (
    EveryEpochs,
    EverySteps,
    Periodic,
    Predicate,
    Schedule,
    StepsOrEpochs,
    positive,
)
from fluxcb._declare.wrappers import OnSchedule, Scheduled, refuse_traced_only
from fluxcb._errors import DeclarationError

__all__ = ["EnableCallbackIf", "PeriodicCallback", "PeriodicTrigger"]


class PeriodicTrigger(Scheduled):
    """Trigger a callback every so many steps or epochs, and no longer after each epoch.

    Only the callback's handler of Trigger is moved: saving, validating, drawing. Its other handlers run as ever. The
    period is the only one: one that the callback, or a wrapper in it, has for Trigger no longer counts.
    `every(callback, steps=...)` sets the period of all its host handlers.

    Args:
        callback: The callback; it has a handler of Trigger.
        every_k_steps: Trigger it after steps whose number is a multiple of this (steps).
        every_k_epochs: Trigger it after epochs whose number is a multiple of this (epochs). Where both periods meet,
            it is triggered once.
        before_train: Whether to trigger it at the beginning of each fit, too; not where a fit is resumed.

    Access:
        The callback's.

    Runs:
        Trigger x the callback's phases (host, by the periods); FitBegin x Phase (host) with `before_train`; its other
        handlers as they are.

    Cost:
        A Trigger after a step ends a window there.

    Raises:
        DeclarationError: No callback instance, no handler of Trigger in it, another PeriodicTrigger in it, neither a
            period nor `before_train`, or a period that is no whole number of at least 1.

    Example:
        >>> from fluxcb.callbacks import CallbackFactory, PeriodicTrigger
        >>> from fluxcb.testing import testlearner
        >>> save = CallbackFactory(trigger=lambda learner: print("step", learner.progress.step), name="save")
        >>> history = testlearner(PeriodicTrigger(save, every_k_steps=3), batches=4).fit(2)
        step 3
        step 6

    Source:
        tensorpack, `PeriodicTrigger`; there, two periods that meet trigger twice, and a callback without a trigger is
        accepted and does nothing.
    """

    def __init__(
        self,
        callback: Callback,
        every_k_steps: int | None = None,
        every_k_epochs: int | None = None,
        before_train: bool = False,
    ) -> None:
        super().__init__(callback)
        steps, epochs = _periods("PeriodicTrigger", every_k_steps, every_k_epochs)
        if not isinstance(before_train, bool):
            raise DeclarationError(f"`before_train` of `PeriodicTrigger` must be True or False, not {before_train!r}.")
        if steps is None and epochs is None and not before_train:
            raise DeclarationError(
                "`PeriodicTrigger` needs `every_k_steps`, `every_k_epochs` or `before_train`.",
                why="without any of them the callback would never be triggered",
                fix="write e.g. `PeriodicTrigger(callback, every_k_epochs=5)`",
            )
        handled = dict.fromkeys(entry.event.__name__ for entry in callback.handlers())
        if not any(issubclass(Trigger, entry.event) for entry in callback.handlers()):
            raise DeclarationError(
                f"{callback!r} has no handler of Trigger, and that is all that `PeriodicTrigger` schedules.",
                why=f"it handles {', '.join(handled) or 'nothing'}",
                fix="write `every(callback, steps=...)` or `every(callback, epochs=...)`, which schedules all its "
                "host handlers",
            )
        for inner in _wrapped(callback):
            if isinstance(inner, PeriodicTrigger):
                raise DeclarationError(
                    f"`PeriodicTrigger` wraps {inner!r}, which says already when it is triggered.",
                    why="there is one period of steps and one of epochs",
                    fix="use one `PeriodicTrigger`, with `every_k_steps` and `every_k_epochs`",
                )
        self.every_k_steps, self.every_k_epochs, self.before_train = steps, epochs, before_train
        self._schedule = _of_trigger(steps, epochs)

    def schedule_for(self, event: type[Event], phase: type[Phase]) -> Schedule | None:
        """Return the periods, for Trigger."""
        return self._schedule if issubclass(event, Trigger) else None

    def handlers(self) -> list[Entry]:
        """Return the callback's handlers, and that of FitBegin if there is one."""
        return [*super().handlers(), *([_AT_FIT_BEGIN] if self.before_train else [])]

    def entry_for(self, event: type[Event], phase: type[Phase]) -> tuple[Callback, Entry, tuple[Schedule, ...]] | None:
        """Return who handles a moment: Trigger on this schedule alone, FitBegin with a Trigger behind it."""
        if self.before_train and issubclass(event, FitBegin):
            return self, _AT_FIT_BEGIN, ()
        found = super().entry_for(event, phase)
        if found is None or not issubclass(event, Trigger):
            return found
        return found[0], found[1], (self._schedule,)

    def begin(self, event: FitBegin, phase: Phase, learner: Any) -> None:
        """Run the callback's handler of FitBegin, then that of Trigger, which a fit that goes on has had."""
        self.forward(event, phase, learner)
        if not event.resumes:
            self.forward(Trigger(), phase, learner)

    def __repr__(self) -> str:
        given = {"every_k_steps": self.every_k_steps, "every_k_epochs": self.every_k_epochs}
        shown = [f"{name}={value}" for name, value in given.items() if value is not None]
        return (
            f"PeriodicTrigger({', '.join([repr(self.callback), *shown, *['before_train=True'] * self.before_train])})"
        )


_AT_FIT_BEGIN = Entry(FitBegin, Phase, "begin", function=PeriodicTrigger.begin)


class PeriodicCallback(Scheduled):
    """Run a callback's host handlers only every k steps or epochs, and at the end of the fit.

    The wrapper only skips calls and does not add any: Trigger is still emitted after epochs. With `every_k_steps`,
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
        every_k_epochs: Period (epochs). With both, what either allows runs.

    Access:
        The callback's.

    Runs:
        As the callback does, in the periods; FitBegin, FitStopping, FitEnd and traced handlers always.

    Cost:
        The callback's. With `every_k_epochs`, a handler that ends windows ends one at each step; under
        `every(callback, epochs=k)` it does so in every k-th epoch only.

    Raises:
        DeclarationError: No callback instance, no period, one that is no whole number of at least 1, or nothing but
            traced handlers.

    Example:
        >>> from fluxcb.callbacks import CallbackFactory, PeriodicCallback
        >>> from fluxcb.testing import testlearner
        >>> save = CallbackFactory(trigger=lambda learner: print("epoch", learner.progress.epoch), name="save")
        >>> history = testlearner(PeriodicCallback(save, every_k_epochs=2)).fit(5)
        epoch 2
        epoch 4
        epoch 5

    Source:
        tensorpack, `PeriodicCallback`; there, handlers before and after a step run at different steps, and the previous
        epoch decides whether the beginning of the last epoch is handled.
    """

    def __init__(self, callback: Callback, every_k_steps: int | None = None, every_k_epochs: int | None = None) -> None:
        super().__init__(callback)
        steps, epochs = _periods("PeriodicCallback", every_k_steps, every_k_epochs)
        if steps is None and epochs is None:
            raise DeclarationError(
                "`PeriodicCallback` needs `every_k_steps` or `every_k_epochs`.",
                fix="write e.g. `PeriodicCallback(callback, every_k_epochs=5)`",
            )
        refuse_traced_only("PeriodicCallback", callback)
        self.every_k_steps, self.every_k_epochs = steps, epochs
        self._schedule = Periodic(steps, epochs)
        # A period in steps alone is one that windows know of.
        alone = EverySteps(steps) if steps is not None and epochs is None else None
        self._at_begin = alone or Periodic(steps, epochs, remaining=1)
        self._at_end = alone or Periodic(steps, epochs, remaining=0)

    def schedule_for(self, event: type[Event], phase: type[Phase]) -> Schedule | None:
        """Return the periods, for host handlers inside the fit."""
        if issubclass(event, TracedEvent | FitBegin | FitStopping | FitEnd):
            return None
        if issubclass(event, StepBegin):
            return self._at_begin
        return self._at_end if issubclass(event, StepEnd) else self._schedule

    def __repr__(self) -> str:
        given = {"every_k_steps": self.every_k_steps, "every_k_epochs": self.every_k_epochs}
        shown = [f"{name}={value}" for name, value in given.items() if value is not None]
        return f"PeriodicCallback({', '.join([repr(self.callback), *shown])})"


class EnableCallbackIf(OnSchedule):
    """Run a callback's host handlers only while a predicate holds; another spelling of `fluxcb.when`.

    Where the callback has handlers for both StepBegin and StepEnd, or EpochBegin and EpochEnd, the predicate is asked
    at the first, and the answer holds for both: what was begun is ended.

    Args:
        callback: The callback.
        pred: `pred(learner) -> bool`; it sees what the callback may see, and depends on nothing else.

    Access:
        The callback's; so is the predicate's.

    Runs:
        As the callback does, while the predicate holds; FitBegin, FitStopping, FitEnd and traced handlers always.

    Cost:
        The callback's. The predicate is asked at each step, so that a handler that ends windows ends one at each.

    Raises:
        DeclarationError: No callback instance, the predicate is no function, or the callback has nothing but traced
            handlers.

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
        tensorpack, `EnableCallbackIf`; there, the predicate is asked for each handler.
    """

    def __init__(self, callback: Callback, pred: Callable[[Any], bool]) -> None:
        ProxyCallback.__init__(self, callback)
        if not callable(pred):
            raise DeclarationError(
                f"`EnableCallbackIf` takes a function of the learner, not {pred!r}.",
                fix="write e.g. `EnableCallbackIf(callback, lambda learner: learner.progress.epoch > 3)`",
            )
        refuse_traced_only("EnableCallbackIf", callback)
        super().__init__(callback, Predicate(pred))
        self.pred = pred

    def __repr__(self) -> str:
        return f"EnableCallbackIf({self.callback!r}, {getattr(self.pred, '__name__', repr(self.pred))})"


def _periods(who: str, steps: Any, epochs: Any) -> tuple[int | None, int | None]:
    return (
        None if steps is None else positive(steps, f"`every_k_steps` of `{who}`"),
        None if epochs is None else positive(epochs, f"`every_k_epochs` of `{who}`"),
    )


def _of_trigger(steps: int | None, epochs: int | None) -> Schedule:
    if steps is not None:
        return EverySteps(steps) if epochs is None else StepsOrEpochs(steps, epochs)
    return Periodic() if epochs is None else EveryEpochs(epochs)


def _wrapped(callback: Callback) -> Iterator[Callback]:
    inner: Any = callback
    while isinstance(inner, Callback):
        yield inner
        inner = getattr(inner, "callback", None)
