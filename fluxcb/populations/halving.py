"""`SuccessiveHalving`: members that are worse than the others stop early."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from fluxcb._declare.access import Append, Read
from fluxcb._declare.control import CancelFitting
from fluxcb._declare.events import Event, Trigger
from fluxcb._declare.handlers import on
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb.callbacks.arguments import whole_number
from fluxcb.callbacks.watched import Watched, resolved_mode
from fluxcb.populations.callback import PopulationCallback
from fluxcb.populations.ranking import ranked

__all__ = ["SuccessiveHalving"]

_NAME = "SuccessiveHalving"


class SuccessiveHalving(PopulationCallback):
    """Keep the best members of a population at each rung, and stop the others.

    With `eta=2`, half of the members stop after `epochs` epochs, half of the remaining ones after `2 * epochs`, and so
    on until one remains. In general, rung `k` (from 0) is at the end of epoch `epochs * eta**k`. After it, the best
    `floor(n / eta**(k + 1))` of the `n` members of the population continue, but at least one. A member that has stopped
    for another reason counts as one of the worst. A member whose metric is NaN is ranked last.

    A stopped member keeps its state: `learner.stop_reason` names the rung, and its parameters no longer change.

    Args:
        metric: The metric to rank by: its name, such as `loss`, or its name in logs, such as `training/loss`.
        phase: The phase of the metric if its name does not contain it. `ValidationPhase` by default.
        mode: `max` if high values of `metric` are good, `min` if low values are good. If None, the name of the metric
            decides; see `Watched.default_mode`. A UserWarning is issued for a mode that the name contradicts, and
            without a mode for a name that implies none (when the members are built).
        eta: One of `eta` members continues after each rung; at least 2.
        epochs: Epoch of the first rung.

    Attributes:
        rungs: All rungs so far: mappings with the keys `epoch`, `kept` and `stopped`, which list members from the best
            to the worst.

    Access:
        cbstate.metrics_epoch: Read.
        control: Append. It therefore runs after the other handlers of Trigger.

    Runs:
        Trigger x AbstractTrainingPhase (host).

    Cost:
        Fetches nothing, because `Metrics` keeps the values of epochs on the host.

    Raises:
        DeclarationError: An argument is not valid.

    Example:
        >>> import fluxcb
        >>> from fluxcb.callbacks import Metrics
        >>> from fluxcb.populations import SuccessiveHalving
        >>> from fluxcb.testing import testlearner
        >>> def make_learner(learning_rate):
        ...     return testlearner(Metrics(), learning_rate=learning_rate)
        >>> population = fluxcb.Population(
        ...     make_learner,
        ...     learning_rate=[1e-5, 1e-4, 1e-3, 1e-2],
        ...     callbacks=[SuccessiveHalving("loss")],
        ...     default_callbacks=False,
        ... )
        >>> histories = population.fit(4)
        >>> [history.epoch for history in histories]
        [1, 1, 2, 4]
        >>> population[2].stop_reason
        'SuccessiveHalving: rank 2 of 2 by validation/loss after epoch 2'

    Source:
        Jamieson and Talwalkar 2016, Non-stochastic Best Arm Identification and Hyperparameter Optimization,
        arXiv:1502.07943, figure 1; the rungs are those of Li et al. 2018, Hyperband, arXiv:1603.06560.
    """

    def __init__(
        self,
        metric: str,
        *,
        phase: Phase | type[Phase] | str | None = None,
        mode: Literal["min", "max", "auto"] | None = None,
        eta: int = 2,
        epochs: int = 1,
    ) -> None:
        self._mode: Literal["min", "max"]
        self._watched, self._mode = resolved_mode(mode, Watched.named(metric, phase, _NAME))
        self.eta = whole_number(eta, f"`eta` of `{_NAME}`", 2)
        self.epochs = whole_number(epochs, f"`epochs` of `{_NAME}`", 1)
        self.rungs: list[dict[str, Any]] = []

    def stateaccess(self) -> Mapping[str, Any]:
        """Return the paths that the callback reads and writes."""
        return {"cbstate": {"metrics_epoch": Read()}, "control": Append()}

    def watched_metrics(self) -> Iterable[Watched]:
        """Return the metric by which the members are ranked."""
        return (self._watched,)

    def state_dict(self) -> dict[str, Any]:
        """Return the rungs so far."""
        return {"rungs": self.rungs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the rungs."""
        self.rungs = list(state["rungs"])

    @on(Trigger, AbstractTrainingPhase)
    def halve(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """At a rung, rank the members, and end the fit of this member unless it is among the best."""
        epoch = learner.progress.epoch
        rung = self._rung(epoch)
        if rung is None:
            return
        score = self._watched.at(learner.cbstate.metrics_epoch, epoch)
        scores = self.share_in_epoch(epoch, float("nan") if score is None else score)
        order = ranked(scores, self._mode)
        keep = max(1, self.members // self.eta ** (rung + 1))
        self.rungs.append({"epoch": epoch, "kept": order[:keep], "stopped": order[keep:]})
        if self.member in order[keep:]:
            rank = order.index(self.member) + 1
            raise CancelFitting(f"{_NAME}: rank {rank} of {len(order)} by {self._watched} after epoch {epoch}")

    def _rung(self, epoch: int) -> int | None:
        """Return the number of the rung at the end of an epoch, or None."""
        rung = 0
        while self.epochs * self.eta**rung < epoch:
            rung += 1
        return rung if self.epochs * self.eta**rung == epoch else None

    def __repr__(self) -> str:
        return f"{_NAME}({str(self._watched)!r}, eta={self.eta}, epochs={self.epochs})"
