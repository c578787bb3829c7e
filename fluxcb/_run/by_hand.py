"""`callbacks_as_hook`: callbacks inside a training loop that is not fluxcb's."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

from fluxcb._declare.access import dotted, writes
from fluxcb._declare.control import Cancel, CancelEpoch, CancelFitting, CancelStep
from fluxcb._declare.declared import Declared, declare
from fluxcb._declare.events import ComputeEnd, EpochBegin, EpochEnd, Event, FitBegin, FitEnd, StepBegin
from fluxcb._declare.phases import Emit, Phase, TrainingPhase
from fluxcb._errors import DeclarationError
from fluxcb._run.fitting import describe_error
from fluxcb._run.learner import Learner
from fluxcb._run.loop_values import announced, handed_over
from fluxcb._tracebacks import entry_point

__all__ = ["CallbacksHook", "callbacks_as_hook"]

# What there is without a model, an optimizer and data.
_THERE = ("step", "cbstate", "progress", "control", "key", "callbacks")
_IN_STEP = ("batch", "skip")


@entry_point
def callbacks_as_hook(callbacks: Iterable[Any], values: Mapping[str, Any], *, key: Any = 0) -> CallbacksHook:
    """Make callbacks a hook for a training loop of your own, which keeps its model, optimizer and step function.

    The loop tells what it has done, and the callbacks see it as they see a Learner's training: the values that the loop
    hands over are `step.<name>`, and there are `cbstate`, `progress` and `control`. Host handlers run in order of the
    callback graph, and traced handlers of ComputeEnd are compiled into a program of their own, which takes the values.
    Parameters, gradients, hyperparameters and batches stay with the loop; a callback that declares them is refused.

    Handing values over waits for them; a loop may do so after every k-th step only.

    Args:
        callbacks: Callback instances, and `in_order(...)` groups of them.
        values: What the loop will hand over after a step, by name: examples of it, or `jax.ShapeDtypeStruct`s.
        key: Seed (int) or typed random key, for callbacks that draw numbers.

    Returns:
        The hook. As a context manager it begins and ends the training, and a `CancelFitting` of a callback leaves the
        `with` block without an error.

    Raises:
        DeclarationError: A callback touches what is not there, or acts inside the loop's own step; a value is no array.
        FluxcbError: The callbacks do not fit together, as for `Learner`.

    Example:
        >>> import jax, jax.numpy as jnp, fluxcb
        >>> from fluxcb.callbacks import EarlyStopping, Metrics
        >>> train_step = jax.jit(lambda w: (w - 0.25 * (w - 1), (w - 1) ** 2))
        >>> stop = EarlyStopping(fluxcb.stopping.Threshold(0.1), metric="loss", phase="training")
        >>> w = jnp.float32(3.0)
        >>> with fluxcb.callbacks_as_hook([Metrics(), stop], {"loss": 0.0}) as hook:
        ...     for epoch in range(1, 100):
        ...         w, loss = train_step(w)
        ...         hook.after_step(epoch, {"loss": loss})
        ...         hook.after_epoch()
        >>> epoch, hook.stop_reason
        (8, 'training/loss: 0.0712718 is below 0.1')

    Source:
        tensorpack, `CallbackToHook`, which hands on what happens around a step only.
    """
    items: Any = list(callbacks) if isinstance(callbacks, Iterable) else callbacks
    names = announced(values)
    phase = _phase_of(tuple(names))
    for declared in declare(items)[0]:
        _refuse_foreign(declared, type(phase), names)
    learner = Learner.from_loss(
        {"loop": jnp.zeros(())},  # a Learner has parameters; nobody sees these
        None,
        optax.identity(),
        callbacks=items,
        key=key,
        phases=(phase,),
        default_callbacks=False,
        example_batch=names,
    )
    return CallbacksHook(learner, names)


class CallbacksHook:
    """Callbacks as a hand-written training loop calls them; made by `callbacks_as_hook`.

    Args:
        learner: Runs the callbacks.
        values: The specs of the values, by name.

    Attributes:
        stop_reason: Why a callback ended the training that a `with` block holds, or None.
    """

    def __init__(self, learner: Learner, values: Mapping[str, Any]) -> None:
        self._learner, self._values = learner, values
        self._parts = learner._parts
        self._phase = learner.phases[0]
        self._in_epoch = False
        self.stop_reason: str | None = None

    @property
    def cbstate(self) -> Mapping[str, Any]:
        """What the callbacks share, by name."""
        return self._learner.cbstate

    @entry_point
    def before_training(self, step: int = 0, epoch: int = 0) -> None:
        """Emit FitBegin.

        Args:
            step: Steps that the loop has finished before, where it goes on with a training.
            epoch: Epochs that it has finished before.
        """
        self._set(step=max(step, self._learner.step), epoch=max(epoch, self._learner.epoch), step_in_epoch=0)
        self._in_epoch, self.stop_reason = False, None
        with contextlib.suppress(CancelEpoch, CancelStep):
            self._emit(FitBegin())

    @entry_point
    def before_epoch(self) -> None:
        """Emit EpochBegin; a loop that does not call it has its epochs begin with their first `after_step`."""
        self._set(epoch=self._learner.epoch + 1, step_in_epoch=0)
        self._in_epoch = True
        with contextlib.suppress(CancelStep):
            self._emit(EpochBegin())

    @entry_point
    def after_step(self, step: int, values: Mapping[str, Any]) -> None:
        """Emit what belongs to a step that the loop has finished.

        Args:
            step: Its number, from 1 and rising; steps may be left out.
            values: Its values, of the names, shapes and dtypes that were announced.

        Raises:
            CancelEpoch: A callback wants the epoch to end.
            CancelFitting: A callback wants the training to end.
            DeclarationError: The step does not come after the last one, or other values are handed over.
        """
        last = self._learner.step
        if not isinstance(step, int | np.integer) or isinstance(step, bool) or step <= last:
            raise DeclarationError(
                f"`after_step` was called with step {step!r} after step {last}.",
                why="steps are numbered from 1, and periods of callbacks speak of these numbers",
                fix="give the number of finished steps, e.g. `hook.after_step(index + 1, values)`",
            )
        batch = handed_over(values, self._values)
        if not self._in_epoch:
            self.before_epoch()
        if step != last + 1:
            self._set(step=int(step) - 1, step_in_epoch=self._parts.state.step_in_epoch + int(step) - 1 - last)
        self._learner.run_step(self._phase, batch)

    @entry_point
    def after_epoch(self) -> None:
        """Emit EpochEnd and Trigger.

        Raises:
            CancelFitting: A callback wants the training to end.
        """
        if not self._in_epoch:
            self.before_epoch()
        self._in_epoch = False
        with contextlib.suppress(CancelEpoch, CancelStep):
            self._emit(EpochEnd())
        self._learner.trigger()

    @entry_point
    def after_training(self) -> None:
        """Emit FitEnd; one callback's failure does not stop the others'.

        Raises:
            Exception: What failed.
        """
        self._end(FitEnd())

    def _end(self, event: FitEnd) -> None:
        self._in_epoch = False
        engine = self._parts.engine
        failures: list[Exception] = []
        for call in engine.plan.calls(FitEnd, type(self._phase)):
            try:
                engine.run_calls((call,), event, self._phase)
            except Cancel:
                continue
            except Exception as error:
                failures.append(error)
        if len(failures) == 1:
            raise failures[0]
        if failures:
            raise ExceptionGroup("several callbacks failed at FitEnd", failures)

    def __enter__(self) -> CallbacksHook:
        try:
            self.before_training()
        except BaseException as error:
            self._end(_end_of(error))
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> bool:
        self._end(_end_of(error))
        if not isinstance(error, CancelFitting):
            return False
        self.stop_reason = str(error) or "CancelFitting"
        return True

    def _emit(self, event: Event) -> None:
        self._parts.engine.emit(event, self._phase)

    def _set(self, **counters: int) -> None:
        state = self._parts.state
        for name, value in counters.items():
            setattr(state, name, value)
        state.set_counters()


def _end_of(error: BaseException | None) -> FitEnd:
    """Return the event that ends the training when this exception leaves the hand-written loop."""
    if isinstance(error, CancelFitting):
        return FitEnd("stopped", str(error) or "CancelFitting", advice=error.advice)
    return FitEnd() if error is None else FitEnd("failed", describe_error(error), error=error)


class _LoopPhase(TrainingPhase):
    """A step that a loop has run: its values are what it was handed."""

    provides = {}  # subclasses know the names

    def step(self, learner: Any, emit: Emit) -> None:
        """Take the values over."""
        for name, value in learner.step.batch.items():
            setattr(learner.step, name, value)


def _phase_of(names: tuple[str, ...]) -> TrainingPhase:
    body = {"provides": {ComputeEnd: names}, "__module__": __name__}
    return types.new_class("LoopPhase", (_LoopPhase,), exec_body=lambda space: space.update(body))()


def _refuse_foreign(declared: Declared, phase: type[Phase], names: Iterable[str]) -> None:
    """Refuse a callback that touches what stays with the loop, or acts inside its step."""
    for path, permission, where in declared.accesses():
        kept = path[0] not in _THERE and (path != ("data",) or writes(permission))  # `data` is empty, but readable
        overwrites = path[0] == "step" and writes(permission) and (len(path) == 1 or path[1] in (*names, *_IN_STEP))
        if kept or overwrites:
            raise DeclarationError(
                f"{declared.label} {'writes' if writes(permission) else 'reads'} `{dotted(path)}`, which stays with "
                "the hand-written loop.",
                where=where,
                why="`callbacks_as_hook` sees the values that the loop hands over, and changes nothing of its training",
                fix="train with a `Learner`, or do in the loop what this callback does",
            )
    for entry in declared.callback.handlers():
        inside = entry.traced and not issubclass(ComputeEnd, entry.event)
        if issubclass(phase, entry.phase) and (inside or entry.event is StepBegin):
            raise DeclarationError(
                f"{declared.label} has a handler of {entry.event.__name__}, which no hand-written loop emits.",
                where=declared.place_of(entry),
                why="the loop tells what it has done after its step; there are StepEnd and, traced, ComputeEnd",
                fix="train with a `Learner`, or do in the loop what this callback does",
            )
