"""`LogHyperParams`: the optimizer's hyperparameters, where they change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fluxcb._declare.access import Append, Permission, Read
from fluxcb._declare.callback import Callback
from fluxcb._declare.events import Event, StepEnd
from fluxcb._declare.handlers import on
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._errors import DeclarationError
from fluxcb._typing import StatePath
from fluxcb.callbacks.hyperparameter import hyperparameter_name, shown_hyperparameter

__all__ = ["LogHyperParams"]


class LogHyperParams(Callback):
    """Log hyperparameters as `hyperparams/learning_rate`: at the first step, and at each one with another value.

    What is logged at a step is what its update used. `every(LogHyperParams(), steps=50)` looks at every 50th step.

    Args:
        *params: `HyperParameter` classes or names; all that the optimizer has by default.

    Access:
        hyperparams: Read; hyperparams.<name> of those that are given.
        cbstate.monitors: Append.

    Runs:
        StepEnd x AbstractTrainingPhase (host).

    Cost:
        Fetches a number per hyperparameter, and bounds no window. About a microsecond per step and hyperparameter.

    Raises:
        DeclarationError: Something given is no hyperparameter, or the optimizer has none (when the Learner is built).
        MissingStateError: The optimizer does not have one of those that are given, or there is no `Monitors` (when the
            Learner is built).

    Example:
        >>> import optax
        >>> from fluxcb.callbacks import LearningRate, LogHyperParams, Monitors, Scheduler
        >>> from fluxcb.testing import testlearner
        >>> schedule = optax.piecewise_constant_schedule(0.5, {3: 0.5})
        >>> learner = testlearner(Scheduler({LearningRate: schedule}), LogHyperParams(), Monitors())
        >>> history = learner.fit(2)
        >>> learner.cbstate["monitors"].history("hyperparams/learning_rate")
        [(1, 0.5), (4, 0.25)]

    Source:
        FluxTraining.jl, `LogHyperParams`, which logs every step.
    """

    def __init__(self, *params: Any) -> None:
        self.params = tuple(hyperparameter_name(param) for param in params)
        for name in self.params:
            if self.params.count(name) > 1:
                raise DeclarationError(f"`LogHyperParams` is given `{name}` twice.", fix="name each once")
        self._logged: dict[str, float] = {}

    def stateaccess(self) -> Mapping[str, Any]:
        """Return what it reads and writes; see the class."""
        named = {name: Read() for name in self.params}
        return {"hyperparams": named or Read(), "cbstate": {"monitors": Append()}}

    def how_to_declare(self, path: StatePath, permission: Permission) -> str:
        """Return the edit that adds a path: hyperparameters are named in an argument."""
        if path[0] == "hyperparams" and len(path) == 2:
            return f"write `LogHyperParams({shown_hyperparameter(path[1])})`"
        return super().how_to_declare(path, permission)

    def init(self, learner: Any) -> None:
        """Check that there is something to log."""
        names = self.params or tuple(learner.hyperparams)
        for name in names:
            learner.hyperparams[name]  # an error where it cannot be told which one is meant
        if not names:
            raise DeclarationError(
                "`LogHyperParams` has nothing to log: this optimizer has no hyperparameters.",
                why="only hyperparameters that optax injected live on the device, where they can change",
                fix=[
                    "build the optimizer with `fluxcb.inject(optax.adam, learning_rate=1e-3)`",
                    "leave `LogHyperParams` out",
                ],
            )

    @on(StepEnd, AbstractTrainingPhase)
    def log(self, event: Event, phase: Phase, learner: Any) -> None:
        """Log those that have changed."""
        hyperparams = learner.hyperparams
        for name in self.params or hyperparams:
            value = float(hyperparams[name])
            if self._logged.get(name) != value:
                self._logged[name] = value
                learner.cbstate.monitors.put_scalar(f"hyperparams/{name}", value)

    def state_dict(self) -> dict[str, Any]:
        """Return what was logged last."""
        return {"logged": dict(self._logged)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it back."""
        self._logged = dict(state["logged"])

    def __repr__(self) -> str:
        return f"LogHyperParams({', '.join(self.params)})"
