"""`HyperParamSetter`, which sets hyperparameters from Python code between epochs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from fluxcb._declare.access import Permission, Write
from fluxcb._declare.callback import Callback
from fluxcb._declare.events import Event, FitBegin, Trigger
from fluxcb._declare.handlers import on
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._declare.signatures import parameter_names
from fluxcb._declare.state import RATE_FIX, RATE_WHY, is_negative_rate
from fluxcb._errors import DeclarationError
from fluxcb._tracebacks import warn_user
from fluxcb._typing import StatePath
from fluxcb.callbacks.arguments import function_of
from fluxcb.callbacks.hyperparams.hyperparameter import ObjAttrParam, hyperparameter_name, shown_hyperparameter
from fluxcb.callbacks.hyperparams.lost_changes import LostChanges

__all__ = ["FLOAT32_MAX", "HyperParamSetter", "HyperParamSetterWithFunc", "TriggerSetter"]

_EPOCH_NAMES = frozenset(("epoch", "epochs", "epoch_num", "epoch_number"))
"""Names of parameters that receive the number of the epoch."""

FLOAT32_MAX = 3.4028234663852886e38
"""The largest finite number of float32, the dtype of hyperparameters."""


class TriggerSetter(Callback):
    """Base class of callbacks that set one hyperparameter at Trigger. Users subclass `HyperParamSetter` instead.

    Args:
        param: A `HyperParameter` class, a name in `hyperparams`, or an `ObjAttrParam`.

    Raises:
        DeclarationError: `param` is none of these.
    """

    def __init__(self, param: Any) -> None:
        self.param = param
        self.param_name = param.name if isinstance(param, ObjAttrParam) else hyperparameter_name(param)
        self._changes = LostChanges()

    def stateaccess(self) -> Mapping[str, Any]:
        """Return the paths that the callback reads and writes."""
        if isinstance(self.param, ObjAttrParam):
            return {"cbstate": {"attributes": {self.param_name: Write()}}}
        return {"hyperparams": {self.param_name: Write()}}

    def how_to_declare(self, path: StatePath, permission: Permission) -> str:
        """Return the edit that declares a path: for a hyperparameter, the argument of the constructor."""
        if path[0] == "hyperparams" and len(path) == 2:
            return f"write `{type(self).__name__}({shown_hyperparameter(path[1])}, ...)`"
        return super().how_to_declare(path, permission)

    def init(self, learner: LearnerView) -> None:
        """Create `cbstate.attributes.<name>` for an attribute of a Python object."""
        if isinstance(self.param, ObjAttrParam):
            learner.cbstate.attributes[self.param_name] = self.param.value

    def state_dict(self) -> dict[str, Any]:
        """Return the value of an attribute, and the last change of a hyperparameter if another callback can undo it.

        The value of a hyperparameter is part of the train state.
        """
        return {"value": self.param.value} if isinstance(self.param, ObjAttrParam) else self._changes.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> str | None:
        """Set an attribute to its saved value, and restore the last change."""
        if isinstance(self.param, ObjAttrParam):
            self.param.value = state["value"]
        else:
            self._changes.load_state_dict(state)

    def next_value(self, learner: LearnerView) -> Any:
        """Return the value to set now, or None to keep the current value. Subclasses override this method."""
        raise DeclarationError(
            f"`{type(self).__name__}` has no `next_value(self, learner)`, so it sets nothing.",
            fix="define it, and return the new value, or None to keep the current one",
        )

    def current(self, learner: LearnerView) -> Any:
        """Return the current value of the hyperparameter or attribute."""
        if isinstance(self.param, ObjAttrParam):
            return self.param.value
        return float(learner.hyperparams[self.param_name])

    def set_value(self, learner: LearnerView) -> None:
        """Set the hyperparameter or attribute to what `next_value` returns, unless that is None.

        Raises:
            DeclarationError: `next_value` returned a value that is not a finite number, or a negative learning rate.
        """
        value = self.next_value(learner)
        if value is None:
            return
        if isinstance(self.param, ObjAttrParam):
            self.param.value = value
            learner.cbstate.attributes[self.param_name] = value
            return
        number = self._number(value)
        # Reading the value waits for the device, so setters without a rival do not read it.
        if self._changes.can_occur(self, self.param_name):
            self._changes.note(self, self.param_name, learner, self.current(learner), number)
        learner.hyperparams[self.param_name] = number

    def _number(self, value: Any) -> float:
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if isinstance(value, bool | str) or not abs(number) <= FLOAT32_MAX:  # NaN included
            raise DeclarationError(
                f"{self!r} would set `hyperparams.{self.param_name}` to {value!r}, "
                "which is not a finite float32 number.",
                why="the next step would fail or make every parameter NaN",
                fix="return a finite number, or None to keep the current value",
            )
        if is_negative_rate(self.param_name, number):
            raise DeclarationError(
                f"{self!r} would set `hyperparams.{self.param_name}` to {value!r}, which is negative.",
                why=RATE_WHY,
                fix=f"return {RATE_FIX}, or None to keep the current value",
            )
        return number

    @on(Trigger, AbstractTrainingPhase)
    def set_at_trigger(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Set the value for the next epochs."""
        self.set_value(learner)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.param_name})"


class HyperParamSetter(TriggerSetter):
    """Set a hyperparameter before the first step of a fit and after each epoch, to what `next_value` returns.

    Subclasses implement `next_value(learner)`. It can read `learner.progress` and the state that the subclass declares
    in addition to the hyperparameter. `self.current(learner)` is the current value.

    The value is also set at the beginning of each later fit, but not if that fit resumes a run. Therefore, compute the
    value from the counters in `learner.progress`, not from the number of calls. If another callback sets the same
    hyperparameter, that is a conflict until `in_order` declares their order. If another callback overwrites a value,
    a UserWarning is issued when the setter next sets one.

    Args:
        param: A `HyperParameter` class, a name in `hyperparams`, or an `ObjAttrParam`.

    Access:
        hyperparams.<name>: Write (if `param` is not an `ObjAttrParam`).
        cbstate.attributes.<name>: Write (if `param` is an `ObjAttrParam`). The value last set.

    Runs:
        FitBegin, Trigger x AbstractTrainingPhase (host).

    Cost:
        A few Python operations per epoch. Setting a value writes one number to the device and does not recompile.

    Raises:
        DeclarationError: `param` does not name a hyperparameter. During training: `next_value` returned something other
            than a finite number or None.
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
    def set_at_begin(self, event: FitBegin, phase: Phase, learner: LearnerView) -> None:
        """Set the value for the first epoch of a fit."""
        if not event.resumes:  # a resumed fit has restored its value
            self.set_value(learner)


class HyperParamSetterWithFunc(HyperParamSetter):
    """Set a hyperparameter to the result of a function of the epoch and of the current value.

    `func(epoch, current)` is called with epoch 0 before the first epoch, and after each epoch with the number of that
    epoch. It returns the new value, or None to keep the current value. It is not called again when a run resumes or
    when `fit` is called again, so a function of the current value is applied exactly once per epoch.

    Args:
        param: A `HyperParameter` class, a name in `hyperparams`, or an `ObjAttrParam`.
        func: `func(epoch, current) -> float | None`.

    Access:
        hyperparams.<name>: Write (cbstate.attributes.<name> for an `ObjAttrParam`).

    Runs:
        FitBegin, Trigger x AbstractTrainingPhase (host).

    Cost:
        One call of the function and one read of a number per epoch. Does not recompile.

    Raises:
        DeclarationError: `param` does not name a hyperparameter, or `func` cannot be called with two arguments. During
            training: `func` returned something other than a finite number or None.
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
        tensorpack, `HyperParamSetterWithFunc`, which calls the function again at every resume.
    """

    def __init__(self, param: Any, func: Callable[[int, Any], Any]) -> None:
        super().__init__(param)
        example = "lambda epoch, current: 0.9 * current"
        self.func = function_of(func, "`func` of `HyperParamSetterWithFunc`", "epoch", "current value", example=example)
        names = parameter_names(func)[:2]
        if len(names) == 2 and names[1] in _EPOCH_NAMES and names[0] not in _EPOCH_NAMES:
            warn_user(
                f"The function of `HyperParamSetterWithFunc` gets the number of the epoch as `{names[0]}`, and the "
                f"current value as `{names[1]}`. Swap the parameters: `{names[1]}, {names[0]}`.",
                UserWarning,
            )
        self._begun = False

    def state_dict(self) -> dict[str, Any]:
        """Return whether the function has been called before the first epoch."""
        return {**super().state_dict(), "begun": self._begun}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        super().load_state_dict(state)
        self._begun = state["begun"]

    def next_value(self, learner: LearnerView) -> Any:
        """Return the result of the function."""
        return self.func(learner.progress.epoch, self.current(learner))

    @on(FitBegin, AbstractTrainingPhase)
    def set_at_begin(self, event: FitBegin, phase: Phase, learner: LearnerView) -> None:
        """Call the function before the first epoch of the first fit."""
        if learner.progress.epoch == 0 and not self._begun:
            self._begun = True
            self.set_value(learner)
