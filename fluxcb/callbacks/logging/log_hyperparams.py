"""`LogHyperParams`: log the hyperparameters of the optimizer when they change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fluxcb._declare.access import Append, Permission, Read
from fluxcb._declare.callback import Callback
from fluxcb._declare.events import Event, StepEnd
from fluxcb._declare.handlers import on
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._errors import DeclarationError
from fluxcb._typing import StatePath
from fluxcb.callbacks.hyperparams.hyperparameter import hyperparameter_name, shown_hyperparameter

__all__ = ["LogHyperParams"]


class LogHyperParams(Callback):
    """Log hyperparameters at the first step and whenever their values change, as `hyperparams/learning_rate`.

    The value logged at a step is the one that its update used. `every(LogHyperParams(), steps=50)` checks every 50th
    step.

    Args:
        *params: `HyperParameter` classes or names. By default, all hyperparameters of the optimizer.

    Access:
        hyperparams: Read. If names are given, only hyperparams.<name>.
        cbstate.monitors: Append.

    Runs:
        StepEnd x AbstractTrainingPhase (host).

    Cost:
        Fetches one number per hyperparameter, which takes about a microsecond per step. Does not shorten windows.

    Raises:
        DeclarationError: An argument is not a hyperparameter, or the optimizer has no hyperparameters (when the Learner
            is built).
        MissingStateError: The optimizer does not have one of the given hyperparameters, or there is no `Monitors` (when
            the Learner is built).

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
        FluxTraining.jl, `LogHyperParams`, which logs at every step.
    """

    def __init__(self, *params: Any) -> None:
        self.params = tuple(hyperparameter_name(param) for param in params)
        for name in self.params:
            if self.params.count(name) > 1:
                raise DeclarationError(f"`LogHyperParams` received `{name}` twice.", fix="name it once")
        self._logged: dict[str, float] = {}

    def stateaccess(self) -> Mapping[str, Any]:
        """Return the declared access; see the class docstring."""
        named = {name: Read() for name in self.params}
        return {"hyperparams": named or Read(), "cbstate": {"monitors": Append()}}

    def how_to_declare(self, path: StatePath, permission: Permission) -> str:
        """Return the edit that declares a path. Hyperparameters are declared by constructor arguments."""
        if path[0] == "hyperparams" and len(path) == 2:
            return f"write `LogHyperParams({shown_hyperparameter(path[1])})`"
        return super().how_to_declare(path, permission)

    def init(self, learner: LearnerView) -> None:
        """Check that there is something to log."""
        names = self.params or tuple(learner.hyperparams)
        for name in names:
            learner.hyperparams[name]  # raises an error if the name is missing or ambiguous
        if not names:
            raise DeclarationError(
                "`LogHyperParams` has nothing to log: this optimizer has no hyperparameters.",
                why="only hyperparameters injected by Optax are stored in the optimizer state, where they can change",
                fix=[
                    "build the optimizer with `fluxcb.inject`, e.g. `fluxcb.inject(optax.adam, learning_rate=1e-3)`",
                    "remove `LogHyperParams`",
                ],
            )

    @on(StepEnd, AbstractTrainingPhase)
    def log(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Log the hyperparameters that have changed."""
        hyperparams = learner.hyperparams
        for name in self.params or hyperparams:
            value = float(hyperparams[name])
            if self._logged.get(name) != value:
                self._logged[name] = value
                learner.cbstate.monitors.put_scalar(f"hyperparams/{name}", value)

    def state_dict(self) -> dict[str, Any]:
        """Return the last logged values."""
        return {"logged": dict(self._logged)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the last logged values."""
        self._logged = dict(state["logged"])

    def __repr__(self) -> str:
        return f"LogHyperParams({', '.join(self.params)})"
