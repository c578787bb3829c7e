"""`EarlyStopping`: end the fit when the metrics say so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeGuard

from fluxcb._declare.access import Append, Read
from fluxcb._declare.callback import Callback
from fluxcb._declare.control import CancelFitting
from fluxcb._declare.events import Event, FitBegin, Trigger
from fluxcb._declare.handlers import on
from fluxcb._declare.phases import AbstractTrainingPhase, Phase, TrainingPhase
from fluxcb._declare.signatures import explained
from fluxcb._errors import DeclarationError
from fluxcb.callbacks.watched import Watched, phase_name, requested_mode
from fluxcb.stopping.criterion import Criterion, Mode
from fluxcb.stopping.progress import NumberSinceBest

__all__ = ["EarlyStopping"]

_EXAMPLE = 'e.g. `EarlyStopping(3)`, `EarlyStopping(GL(5), TimeLimit(3600))`, `EarlyStopping(("accuracy", 3))`'


class EarlyStopping(Callback):
    """End the fit when a metric stops getting better, or another criterion of `fluxcb.stopping` says so.

    It looks once per epoch, after the validation; `learner.stop_reason` says which criterion stopped. What it has seen
    is saved with a checkpoint. A later `fit` of the same Learner goes on with it, and so ends after one epoch if there
    is still no reason to go on; a new instance begins anew.

    An epoch without a value, because nothing was validated in it, does not count. The metrics' own epoch values of
    training are handed to the criteria as training losses, one before each out-of-sample value.

    Args:
        *criteria: Each a criterion; or a number `n` for `NumberSinceBest(n)`: no better value for `n` epochs; or a pair
            of the name of another metric and one of these. The first that is done ends the fit.
        patience: Number of epochs without an improvement; `EarlyStopping(patience=3)` is `EarlyStopping(3)` (epochs).
        metric: The metric that criteria without a name of their own look at: `loss`, or as it is logged,
            `training/loss`.
        phase: The phase whose values count where the metric's name does not say it: class, instance or name;
            `ValidationPhase` if not given.
        mode: `max` if high values of `metric` are good, `min` if low values are good. If None or `auto`, a number `n`
            maximizes a metric with a name such as `accuracy`, `auc` or `f1` and minimizes every other one, see
            `Watched.default_mode`. A number in a pair follows this rule for any `mode`. A criterion object has a mode
            of its own, `min` by default: `GL(5, mode="max")`. `mode="max"` overrides it, except in pairs.
        train_metric: The metric whose training values count as training losses; the same one by default.
        train_phase: The phase whose values are training losses; `TrainingPhase` if not given.

    Access:
        cbstate.metrics_epoch: Read.
        control: Append; so it runs after what else is done at Trigger.

    Runs:
        FitBegin x Phase, Trigger x AbstractTrainingPhase (host).

    Cost:
        A few Python operations per epoch. Fetches nothing, and bounds no window.

    Raises:
        DeclarationError: There is no criterion, or an argument is not a criterion; a metric or phase has no name; two
            phases are given for one metric; a criterion that needs training losses is applied to training losses;
            `mode` is unknown, or is given although every criterion is in a pair.
        MissingStateError: No callback provides the metric, or its phase has no data (when the Learner is built).

    Example:
        >>> import jax.numpy as jnp, optax, fluxcb
        >>> from fluxcb.callbacks import EarlyStopping, Metrics
        >>> learner = fluxcb.Learner.from_loss(
        ...     {"w": jnp.float32(4.0)},
        ...     lambda params, batch, key: jnp.mean((params["w"] - batch) ** 2),
        ...     optax.sgd(0.25),  # halves the distance to 0: 2, 1, 0.5, 0.25; the best for validation is 1
        ...     data=([jnp.zeros(1)], [jnp.ones(1)]),
        ...     callbacks=[Metrics(), EarlyStopping(2)],
        ...     default_callbacks=False,
        ... )
        >>> history = learner.fit(100)
        >>> learner.epoch, learner.stop_reason
        (4, 'validation/loss: no improvement on 0 for 2 epochs')

    Source:
        FluxTraining.jl, `EarlyStopping`, where a number means `Patience`; Keras, `EarlyStopping`.
    """

    @explained({"min_delta": "write a criterion of `fluxcb.stopping`, e.g. `EarlyStopping(PQ(2))`"})
    def __init__(
        self,
        *criteria: Criterion | int | tuple[str, Criterion | int],
        patience: int | None = None,
        metric: str = "loss",
        phase: Phase | type[Phase] | str | None = None,
        mode: Literal["min", "max", "auto"] | None = None,
        train_metric: str | None = None,
        train_phase: Phase | type[Phase] | str | None = None,
    ) -> None:
        if patience is not None:
            if not isinstance(patience, int):
                raise DeclarationError(
                    f"`patience` of `EarlyStopping` must be a number of epochs, not {patience!r}.", fix=_EXAMPLE
                )
            criteria = (*criteria, patience)
        if not criteria:
            raise DeclarationError("`EarlyStopping` was given no criterion.", fix=_EXAMPLE)
        requested = requested_mode(mode, "EarlyStopping")
        # A pair has its own metric, so `metric` and `mode` do not apply to it.
        pairs = [given if _is_pair(given) else (metric, given) for given in criteria]
        modes: list[Mode | None] = [None if _is_pair(given) else requested for given in criteria]
        self._watched = tuple(Watched.named(name, phase, "EarlyStopping") for name, _ in pairs)
        self.criteria = tuple(
            _criterion(given, wanted, watched)
            for (_, given), wanted, watched in zip(pairs, modes, self._watched, strict=True)
        )
        if requested is not None and all(map(_is_pair, criteria)):
            name = pairs[0][0]
            raise DeclarationError(
                f'`EarlyStopping` was given `mode="{requested}"`, which applies to none of its criteria.',
                why="it is the mode of `metric`, and every criterion is in a pair with a metric of its own",
                fix=[
                    f'give the criterion its mode: `EarlyStopping(("{name}", NumberSinceBest(3, mode="{requested}")))`',
                    f'name the metric outside the pair: `EarlyStopping(3, metric="{name}", mode="{requested}")`',
                ],
            )
        self._training = tuple(_training(watched, train_metric, train_phase) for watched in self._watched)
        for criterion, watched, training in zip(self.criteria, self._watched, self._training, strict=True):
            if criterion.needs_training and training is None:
                raise DeclarationError(
                    f"{criterion!r} needs training losses beside the values it judges, and `EarlyStopping` was told to "
                    f"judge those of {watched.phase}.",
                    fix="let it judge those of a validation, or give another criterion",
                )
        self.states: list[Any] = [None] * len(self.criteria)

    def stateaccess(self) -> Mapping[str, Any]:
        """Return what it reads and writes; see the class."""
        return {"cbstate": {"metrics_epoch": Read()}, "control": Append()}

    def watched_metrics(self) -> Iterable[Watched]:
        """Return the metrics that the criteria read, and the training metrics that some of them need."""
        needed = [
            training
            for criterion, training in zip(self.criteria, self._training, strict=True)
            if criterion.needs_training and training is not None
        ]
        return (*self._watched, *needed)

    def state_dict(self) -> dict[str, Any]:
        """Return what each criterion has seen."""
        return {"states": list(self.states)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what each criterion had seen.

        Raises:
            DeclarationError: There were more criteria, or fewer.
        """
        if len(state["states"]) != len(self.criteria):
            raise DeclarationError(
                f"{self!r} has {len(self.criteria)} criteria; the saved state is that of {len(state['states'])}.",
                fix="restore it into the same criteria as it was saved from",
            )
        self.states = list(state["states"])

    @on(FitBegin, Phase, access={})
    def start(self, event: Event, phase: Phase, learner: Any) -> None:
        """Start the clocks of the criteria that have one."""
        self.states = [c.start(state) for c, state in zip(self.criteria, self.states, strict=True)]

    @on(Trigger, AbstractTrainingPhase)
    def judge(self, event: Event, phase: Phase, learner: Any) -> None:
        """Hand the epoch's values to the criteria, and end the fit if one is done."""
        metrics, epoch = learner.cbstate.metrics_epoch, learner.progress.epoch
        reasons = []
        for i, (criterion, watched) in enumerate(zip(self.criteria, self._watched, strict=True)):
            value = watched.at(metrics, epoch)
            if value is None:
                continue
            state = self.states[i]
            loss = self._training_loss(i, metrics, epoch)
            if loss is not None:
                state = criterion.update(state, loss, training=True)
            self.states[i] = state = criterion.update(state, value)
            if criterion.done(state):
                reasons.append(f"{watched}: {criterion.message(state)}")
        if reasons:
            raise CancelFitting("; ".join(reasons))

    def _training_loss(self, i: int, metrics: Any, epoch: int) -> float | None:
        watched = self._training[i]
        if watched is None:
            return None
        if self.criteria[i].needs_training:
            return watched.at(metrics, epoch)
        return metrics[watched.phase].at(epoch).get(watched.metric)

    def __repr__(self) -> str:
        parts = [
            repr(criterion) if str(watched) == "validation/loss" else f"({str(watched)!r}, {criterion!r})"
            for criterion, watched in zip(self.criteria, self._watched, strict=True)
        ]
        return f"EarlyStopping({', '.join(parts)})"


def _training(watched: Watched, metric: str | None, phase: Any) -> Watched | None:
    """Return whose values count as training losses beside a metric; None if it is one of training itself."""
    if metric is None:
        name = phase_name(TrainingPhase if phase is None else phase, watched.owner)
        found = Watched(name, watched.metric, watched.owner)
    else:
        found = Watched.named(metric, phase, watched.owner, default=TrainingPhase)
    return None if found.phase == watched.phase else found


def _is_pair(given: Any) -> TypeGuard[tuple[str, Any]]:
    return isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], str)


def _criterion(given: Any, mode: Mode | None, watched: Watched) -> Criterion:
    if isinstance(given, int) and not isinstance(given, bool):
        return NumberSinceBest(given, mode=mode or watched.default_mode)
    if not isinstance(given, Criterion):
        raise DeclarationError(f"`EarlyStopping` takes criteria and numbers of epochs, not {given!r}.", fix=_EXAMPLE)
    return given.with_mode(mode) if mode == "max" else given
