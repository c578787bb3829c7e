"""`HyperParamSetter`: hyperparameters that Python code sets, between epochs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from fluxcb._declare.access import Permission, Write
from fluxcb._declare.callback import Callback
from fluxcb._declare.events import Event, FitBegin, Trigger
from fluxcb._declare.handlers import on
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._errors import DeclarationError
from fluxcb._typing import StatePath
from fluxcb.callbacks.hyperparameter import ObjAttrParam, hyperparameter_name, shown_hyperparameter

__all__ = ["HyperParamSetter", "HyperParamSetterWithFunc", "TriggerSetter"]


class TriggerSetter(Callback):
    """Base of what sets one hyperparameter at Trigger; `HyperParamSetter` is the one to derive from.

    Args:
        param: A `HyperParameter` class, a name in `hyperparams`, or an `ObjAttrParam`.

    Raises:
        DeclarationError: `param` is none of these.
    """

    def __init__(self, param: Any) -> None:
        self.param = param
        self.param_name = param.name if isinstance(param, ObjAttrParam) else hyperparameter_name(param)

    def stateaccess(self) -> Mapping[str, Any]:
        """Return what it reads and writes; see the class."""
        if isinstance(self.param, ObjAttrParam):
            return {"cbstate": {"attributes": {self.param_name: Write()}}}
        return {"hyperparams": {self.param_name: Write()}}

    def how_to_declare(self, path: StatePath, permission: Permission) -> str:
        """Return the edit that adds a path: hyperparameters are named in an argument."""
        if path[0] == "hyperparams" and len(path) == 2:
            return f"write `{type(self).__name__}({shown_hyperparameter(path[1])}, ...)`"
        return super().how_to_declare(path, permission)

    def init(self, learner: Any) -> None:
        """Create `cbstate.attributes.<name>` for an attribute of a Python object."""
        if isinstance(self.param, ObjAttrParam):
            learner.cbstate.attributes[self.param_name] = self.param.value

    def state_dict(self) -> dict[str, Any]:
        """Return the value of an attribute; that of a hyperparameter is a part of the train state."""
        return {"value": self.param.value} if isinstance(self.param, ObjAttrParam) else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set an attribute to the value it had."""
        if isinstance(self.param, ObjAttrParam):
            self.param.value = state["value"]

    def next_value(self, learner: Any) -> Any:
        """Return the value to set now, or None to leave it as it is; for subclasses."""
        raise DeclarationError(
            f"`{type(self).__name__}` has no `next_value(self, learner)`, so it sets nothing.",
            fix="return the new value from it, or None to leave the old one",
        )

    def current(self, learner: Any) -> Any:
        """Return the hyperparameter's value."""
        if isinstance(self.param, ObjAttrParam):
            return self.param.value
        return float(learner.hyperparams[self.param_name])

    def set_value(self, learner: Any) -> None:
        """Set the hyperparameter to what `next_value` returns, if it returns anything.

        Raises:
            DeclarationError: It returns something that no hyperparameter can be.
        """
        value = self.next_value(learner)
        if value is None:
            return
        if isinstance(self.param, ObjAttrParam):
            self.param.value = value
            learner.cbstate.attributes[self.param_name] = value
            return
        learner.hyperparams[self.param_name] = self._number(value)

    def _number(self, value: Any) -> float:
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if isinstance(value, bool | str) or not math.isfinite(number):
            raise DeclarationError(
                f"{self!r} would set `hyperparams.{self.param_name}` to {value!r}, which is no finite number.",
                why="the next step would make every parameter NaN, or fail",
                fix="return a number, or None to leave the value as it is",
            )
        return number

    @on(Trigger, AbstractTrainingPhase)
    def set_at_trigger(self, event: Event, phase: Phase, learner: Any) -> None:
        """Set the value for the epochs to come."""
        self.set_value(learner)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.param_name})"


class HyperParamSetter(TriggerSetter):
    """Set a hyperparameter before the first step of a fit and after each epoch; derive and write `next_value`.

    `next_value(learner)` sees `learner.progress` and what the subclass declares beside the hyperparameter;
    `self.current(learner)` is the value at hand. Setting it writes one number to the device: nothing is recompiled.

    FitBegin comes once per `fit`, so also between two fits, but nothing is set at that of a fit that goes on: what is
    returned should follow from the counters, and not from how often it was asked. Another callback that sets the same
    hyperparameter is a conflict until `in_order` says who comes last.

    Args:
        param: A `HyperParameter` class, a name in `hyperparams`, or an `ObjAttrParam`.

    Access:
        hyperparams.<name>: Write; for an `ObjAttrParam` instead:
        cbstate.attributes.<name>: Write; the value last set.

    Runs:
        FitBegin, Trigger x AbstractTrainingPhase (host).

    Cost:
        A few Python operations per epoch; setting writes one number to the device. Nothing is recompiled.

    Raises:
        DeclarationError: `param` names no hyperparameter. While training: `next_value` returns no finite number.
        MissingStateError: The optimizer was not built with `fluxcb.inject` (when the Learner is built).

    Example:
        >>> from fluxcb.callbacks import HyperParamSetter, LearningRate
        >>> from fluxcb.testing import testlearner
        >>> class Halving(HyperParamSetter):
        ...     def next_value(self, learner):
        ...         return 0.5**learner.progress.epoch
        >>> learner = testlearner(Halving(LearningRate))
        >>> history = learner.fit(2)  # with 1.0 and 0.5
        >>> learner.hyperparams
        {'learning_rate': 0.25}

    Source:
        tensorpack, `HyperParamSetter`.
    """

    @on(FitBegin, AbstractTrainingPhase)
    def set_at_begin(self, event: FitBegin, phase: Phase, learner: Any) -> None:
        """Set the value for the first epoch; where a fit goes on, the value that it has is restored."""
        if not event.resumes:
            self.set_value(learner)


class HyperParamSetterWithFunc(HyperParamSetter):
    """Set a hyperparameter to what a function of the epoch and of its value returns.

    `func(epoch, current)` is called once before the first epoch, with 0, and after each epoch with its number; it
    returns the new value, or None. It is not called again when a training is resumed or `fit` is called anew, so
    that a function of the current value is applied once per epoch.

    Args:
        param: A `HyperParameter` class, a name in `hyperparams`, or an `ObjAttrParam`.
        func: `func(epoch, current) -> float | None`.

    Access:
        hyperparams.<name>: Write (cbstate.attributes.<name> for an `ObjAttrParam`).

    Runs:
        FitBegin, Trigger x AbstractTrainingPhase (host).

    Cost:
        A call of the function per epoch, and a read of one number. Nothing is recompiled.

    Raises:
        DeclarationError: `param` names no hyperparameter, or `func` cannot be called with two arguments. While
            training: it returns no finite number.
        MissingStateError: The optimizer was not built with `fluxcb.inject` (when the Learner is built).

    Example:
        >>> from fluxcb.callbacks import HyperParamSetterWithFunc, LearningRate
        >>> from fluxcb.testing import testlearner
        >>> def every_second(epoch, current):
        ...     return current / 2 if epoch and epoch % 2 == 0 else None
        >>> learner = testlearner(HyperParamSetterWithFunc(LearningRate, every_second), learning_rate=1.0)
        >>> history = learner.fit(4)
        >>> learner.hyperparams
        {'learning_rate': 0.25}

    Source:
        tensorpack, `HyperParamSetterWithFunc`, which calls the function once more at every resume.
    """

    def __init__(self, param: Any, func: Callable[[int, Any], Any]) -> None:
        import inspect

        super().__init__(param)
        try:
            inspect.signature(func).bind(0, 0.0)
        except TypeError as error:
            raise DeclarationError(
                f"`HyperParamSetterWithFunc` takes a function of the epoch and the current value, not {func!r}.",
                why=str(error),
                fix="write `HyperParamSetterWithFunc(LearningRate, lambda epoch, current: 0.9 * current)`",
            ) from None
        except ValueError:  # a builtin without a signature
            pass
        self.func = func
        self._begun = False

    def state_dict(self) -> dict[str, Any]:
        """Return whether the call before the first epoch is done."""
        return {**super().state_dict(), "begun": self._begun}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it back."""
        super().load_state_dict(state)
        self._begun = state["begun"]

    def next_value(self, learner: Any) -> Any:
        """Return what the function returns."""
        return self.func(learner.progress.epoch, self.current(learner))

    @on(FitBegin, AbstractTrainingPhase)
    def set_at_begin(self, event: FitBegin, phase: Phase, learner: Any) -> None:
        """Call the function before the first epoch of all."""
        if learner.progress.epoch == 0 and not self._begun:
            self._begun = True
            self.set_value(learner)
