"""`PopulationBasedTraining`: the worst members continue from the best ones, with other hyperparameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import numpy as np

from fluxcb._declare.access import Permission, Read, Write
from fluxcb._declare.events import Event, Trigger
from fluxcb._declare.handlers import on
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._typing import StatePath
from fluxcb.callbacks.arguments import finite_number, require, whole_number
from fluxcb.callbacks.hyperparams.hyperparameter import HyperParameter, hyperparameter_name
from fluxcb.callbacks.watched import Watched, resolved_mode
from fluxcb.populations.callback import PopulationCallback
from fluxcb.populations.ranking import ranked

__all__ = ["PopulationBasedTraining"]

_NAME = "PopulationBasedTraining"
_STATE = {"params": Write(), "model_state": Write(), "opt_state": Write()}


class PopulationBasedTraining(PopulationCallback):
    """Replace the worst members of a population by copies of the best ones, and perturb their hyperparameters.

    After every `epochs` epochs, the members are ranked by a metric. Each of the worst `fraction` of them copies the
    parameters, the model state and the optimizer state of one of the best `fraction`, which is drawn at random. Each of
    its hyperparameters is the one of that member, multiplied by a random one of `factors`. This is the truncation
    selection of the paper. A member whose metric is NaN is ranked last.

    Other state of callbacks, such as the average of `ParameterEMA`, is not copied.

    The random numbers depend on `key`, the epoch, and the number of the member only. The same program therefore makes
    the same decisions, also if it was killed and resumed.

    Args:
        metric: The metric to rank by: its name, such as `loss`, or its name in logs, such as `training/loss`.
        hyperparams: The hyperparameters to perturb: names, or subclasses of `HyperParameter`.
        phase: The phase of the metric if its name does not contain it. `ValidationPhase` by default.
        mode: `max` if high values of `metric` are good, `min` if low values are good. If None, the name of the metric
            decides; see `Watched.default_mode`. A UserWarning is issued for a mode that the name contradicts, and
            without a mode for a name that implies none (when the members are built).
        epochs: Length of training between two rankings (epochs).
        fraction: The share of members to replace, and of members to copy, above 0 and at most 0.5. It is rounded down
            to whole members, but at least one member is replaced.
        factors: The factors of the hyperparameters.
        key: Seed of the random numbers.

    Attributes:
        decisions: All replacements so far, in order: mappings with the keys `epoch`, `member`, `source` and
            `hyperparams`.

    Access:
        params: Write.
        model_state: Write.
        opt_state: Write.
        hyperparams.<name>: Write, for each name in `hyperparams`.
        cbstate.metrics_epoch: Read.

    Runs:
        Trigger x AbstractTrainingPhase (host).

    Cost:
        Copies the state of each member that another one copies. Fetches nothing otherwise.

    Raises:
        DeclarationError: An argument is not valid.

    Example:
        >>> import fluxcb
        >>> from fluxcb.callbacks import Metrics
        >>> from fluxcb.populations import PopulationBasedTraining
        >>> from fluxcb.testing import testlearner
        >>> def make_learner(learning_rate):
        ...     return testlearner(Metrics(), learning_rate=learning_rate)
        >>> population = fluxcb.Population(
        ...     make_learner,
        ...     learning_rate=[1e-5, 1e-2],
        ...     callbacks=[PopulationBasedTraining("loss", ["learning_rate"], fraction=0.5)],
        ...     default_callbacks=False,
        ... )
        >>> histories = population.fit(1)
        >>> decision = population.callbacks[0].decisions[0]
        >>> decision["member"], decision["source"]
        (0, 1)

    Source:
        Jaderberg et al. 2017, Population Based Training of Neural Networks, arXiv:1711.09846, sections 3 and 4.1.1.
    """

    def __init__(
        self,
        metric: str,
        hyperparams: Iterable[str | HyperParameter | type[HyperParameter]],
        *,
        phase: Phase | type[Phase] | str | None = None,
        mode: Literal["min", "max", "auto"] | None = None,
        epochs: int = 1,
        fraction: float = 0.2,
        factors: Iterable[float] = (0.8, 1.2),
        key: int = 0,
    ) -> None:
        self._mode: Literal["min", "max"]
        self._watched, self._mode = resolved_mode(mode, Watched.named(metric, phase, _NAME))
        listed = not isinstance(hyperparams, str | type) and isinstance(hyperparams, Iterable)
        require(
            listed,
            hyperparams,
            f"`hyperparams` of `{_NAME}`",
            "a list of names of hyperparameters",
            'hyperparams=["learning_rate"]',
        )
        self.hyperparams = tuple(map(hyperparameter_name, hyperparams))
        self.epochs = whole_number(epochs, f"`epochs` of `{_NAME}`", 1)
        self.fraction = finite_number(fraction, f"`fraction` of `{_NAME}`", above=0)
        require(
            self.fraction <= 0.5,
            fraction,
            f"`fraction` of `{_NAME}`",
            "at most 0.5",
            "fraction=0.2",
            why="a member cannot be among the best and the worst ones",
        )
        self.factors = tuple(finite_number(of, f"A factor of `{_NAME}`", above=0) for of in factors)
        require(bool(self.factors), factors, f"`factors` of `{_NAME}`", "a list of numbers", "factors=(0.8, 1.2)")
        self.key = whole_number(key, f"`key` of `{_NAME}`", 0)
        self.decisions: list[dict[str, Any]] = []

    def stateaccess(self) -> Mapping[str, Any]:
        """Return the paths that the callback reads and writes."""
        perturbed = {"hyperparams": {name: Write() for name in self.hyperparams}} if self.hyperparams else {}
        return {**_STATE, **perturbed, "cbstate": {"metrics_epoch": Read()}}

    def how_to_declare(self, path: StatePath, permission: Permission) -> str:
        """Return the edit that declares a path: for a hyperparameter, the argument of the constructor."""
        if path[0] == "hyperparams" and len(path) == 2:
            return f'write `PopulationBasedTraining("{self._watched}", ["{path[1]}"])`'
        return super().how_to_declare(path, permission)

    def watched_metrics(self) -> Iterable[Watched]:
        """Return the metric by which the members are ranked."""
        return (self._watched,)

    def state_dict(self) -> dict[str, Any]:
        """Return the decisions so far."""
        return {"decisions": self.decisions}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the decisions."""
        self.decisions = list(state["decisions"])

    @on(Trigger, AbstractTrainingPhase)
    def exploit_and_explore(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Rank the members, and replace this member if it is among the worst."""
        epoch = learner.progress.epoch
        if epoch % self.epochs:
            return
        score = self._watched.at(learner.cbstate.metrics_epoch, epoch)
        own = {name: float(getattr(learner.hyperparams, name)) for name in self.hyperparams}
        shared = self.share_in_epoch(epoch, (score, own))
        decisions = self._decisions(epoch, shared)
        sources = {decision["source"] for decision in decisions}
        if not sources:
            return
        state = (learner.params, learner.model_state, learner.opt_state) if self.member in sources else None
        states = self.share(state)
        for decision in decisions:
            if decision["member"] == self.member:
                learner.params, learner.model_state, learner.opt_state = states[decision["source"]]
                for name, value in decision["hyperparams"].items():
                    setattr(learner.hyperparams, name, value)
        self.decisions += decisions

    def _decisions(
        self, epoch: int, shared: Mapping[int, tuple[float | None, dict[str, float]]]
    ) -> list[dict[str, Any]]:
        """Return the replacements after an epoch. Every member computes them, and comes to the same result."""
        order = ranked({m: score for m, (score, _) in shared.items() if score is not None}, self._mode)
        count = min(max(1, int(self.fraction * len(order))), len(order) // 2)
        decisions = []
        for member in order[len(order) - count :]:
            random = np.random.default_rng((self.key, epoch, member))
            source = order[random.integers(count)]
            hyperparams = {
                name: value * self.factors[random.integers(len(self.factors))]
                for name, value in shared[source][1].items()
            }
            decisions.append({"epoch": epoch, "member": member, "source": source, "hyperparams": hyperparams})
        return decisions

    def __repr__(self) -> str:
        return f"{_NAME}({str(self._watched)!r}, {list(self.hyperparams)})"
