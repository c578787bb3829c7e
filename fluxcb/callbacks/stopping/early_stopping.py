"""`EarlyStopping`, which ends a fit when a metric stops improving."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeGuard

from fluxcb._calls import entry_point
from fluxcb._declare.access import Append, Read
from fluxcb._declare.callback import Callback
from fluxcb._declare.control import CancelFitting
from fluxcb._declare.events import Event, FitBegin, Trigger
from fluxcb._declare.handlers import on
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import AbstractTrainingPhase, Phase, TrainingPhase
from fluxcb._declare.schedules import positive
from fluxcb._errors import DeclarationError
from fluxcb.callbacks.keyword_fixes import EARLY_STOPPING_FIXES
from fluxcb.callbacks.watched import Watched, note_of_changed_metric, phase_name, requested_mode, warn_if_contradictory
from fluxcb.stopping.criterion import Criterion, Disjunction, Mode
from fluxcb.stopping.progress import NumberSinceBest

__all__ = ["EarlyStopping"]

_EXAMPLE = 'write e.g. `EarlyStopping(3)`, `EarlyStopping(GL(5), TimeLimit(3600))`, `EarlyStopping(("accuracy", 3))`'


class EarlyStopping(Callback):
    """End the fit when a metric stops improving, or when another criterion of `fluxcb.stopping` is met.

    The criteria are checked once per epoch, after validation. `learner.stop_reason` contains the reason of the
    criterion that ended the fit.

    The state of the criteria is saved in checkpoints. It is also kept for a later `fit` of the same Learner, which
    therefore ends after one epoch if the metric has still not improved. Its `stop_reason` then ends in "counted since
    an earlier fit". To start over, as in Keras, write `learner.callbacks.replace(EarlyStopping(...))` before `fit`.

    Epochs without a validation value do not count. Some criteria also need training losses. These are the epoch values
    of the same metric in training, and each is passed to the criteria before the validation value of the same epoch.

    Args:
        *criteria: Criteria. A number `n` means `NumberSinceBest(n)`: no improvement for `n` epochs. A pair of a metric
            name and a criterion or number applies to that metric. The first criterion that is met ends the fit.
        patience: Number of epochs without an improvement. `EarlyStopping(patience=3)` is the same as
            `EarlyStopping(3)` (epochs).
        metric: The metric for all criteria that are not in a pair: its name, such as `loss`, or its name in logs, such
            as `training/loss`.
        phase: The phase of the metric, as a class, an instance or a name, if the name of the metric does not contain
            it. `ValidationPhase` by default.
        mode: `max` if high values of `metric` are good, `min` if low values are good. If None or `auto`, it is `max`
            for metrics with a name such as `accuracy`, `auc` or `score`, and `min` for all others; see
            `Watched.default_mode`. For criteria in pairs, this rule applies with any `mode`. A criterion that was
            constructed with a mode, such as `GL(5, mode="min")`, keeps it. Only `mode="max"` overrides it, except in
            pairs. A UserWarning is issued for a mode that the name contradicts, and without a mode for a name that
            implies none (when the Learner is built).
        train_metric: The metric to use as the training loss, for criteria that need one. By default, the same metric.
        train_phase: The phase of the training losses. `TrainingPhase` by default.

    Access:
        cbstate.metrics_epoch: Read.
        control: Append. It therefore runs after the other handlers of Trigger.

    Runs:
        FitBegin x Phase, Trigger x AbstractTrainingPhase (host).

    Cost:
        A few Python operations per epoch. Fetches nothing and does not shorten windows.

    Raises:
        DeclarationError: There is no criterion, or an argument is not a criterion; a metric or a phase has no name;
            `metric` and `phase` name different phases; a criterion that needs training losses watches a training
            phase; `mode` is unknown, or is given although every criterion is in a pair.
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

    @entry_point(fixes=EARLY_STOPPING_FIXES)
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
            named = f'write e.g. `EarlyStopping(3, metric="{metric}")`'
            fix = named if isinstance(metric, str) and metric != "loss" else _EXAMPLE
            raise DeclarationError("`EarlyStopping` has no criterion.", fix=fix)
        requested = requested_mode(mode, "EarlyStopping")
        # A pair has its own metric, so `metric` and `mode` do not apply to it.
        pairs = [criterion if _is_pair(criterion) else (metric, criterion) for criterion in criteria]
        modes: list[Mode | None] = [None if _is_pair(criterion) else requested for criterion in criteria]
        self._watched = tuple(Watched.named(name, phase, "EarlyStopping") for name, _ in pairs)
        self.criteria = tuple(
            _criterion(criterion, criterion_mode, watched)
            for (_, criterion), criterion_mode, watched in zip(pairs, modes, self._watched, strict=True)
        )
        if requested is not None and all(map(_is_pair, criteria)):
            name = pairs[0][0]
            raise DeclarationError(
                f'`EarlyStopping` was given `mode="{requested}"`, which applies to none of its criteria.',
                why="it is the mode of `metric`, but every criterion is in a pair with its own metric",
                fix=[
                    f'give the criterion a mode: `EarlyStopping(("{name}", NumberSinceBest(3, mode="{requested}")))`',
                    f'name the metric outside the pair: `EarlyStopping(3, metric="{name}", mode="{requested}")`',
                ],
            )
        for watched, criterion_mode in zip(self._watched, modes, strict=True):
            warn_if_contradictory(watched, criterion_mode)
        self._watched = tuple(
            _with_mode_warning(watched, criterion) if criterion_mode is None else watched
            for watched, criterion, criterion_mode in zip(self._watched, criteria, modes, strict=True)
        )
        self._training = tuple(_training(watched, train_metric, train_phase) for watched in self._watched)
        for criterion, watched, training in zip(self.criteria, self._watched, self._training, strict=True):
            if criterion.needs_training and training is None:
                raise DeclarationError(
                    f"{criterion!r} needs training losses in addition to the values that it watches, but "
                    f"`EarlyStopping` watches the {watched.phase} phase itself.",
                    fix="watch a validation phase, or use a criterion that needs no training losses",
                )
        self.states: list[Any] = [None] * len(self.criteria)
        # The states that the criteria would have if they had started with this fit, for the reason of the stop.
        self._of_fit: list[Any] = [None] * len(self.criteria)

    def stateaccess(self) -> Mapping[str, Any]:
        """Return the paths that the callback reads and writes."""
        return {"cbstate": {"metrics_epoch": Read()}, "control": Append()}

    def watched_metrics(self) -> Iterable[Watched]:
        """Return the metrics of the criteria, and the training metrics that some criteria need."""
        needed = [
            training
            for criterion, training in zip(self.criteria, self._training, strict=True)
            if criterion.needs_training and training is not None
        ]
        return (*self._watched, *needed)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each criterion, over all fits and for the current fit alone, and what it has seen."""
        return {"states": list(self.states), "of_fit": list(self._of_fit), "watched": self._described()}

    def load_state_dict(self, state: dict[str, Any]) -> str | None:
        """Restore the state of each criterion. Criteria that get another metric or direction now start over.

        Raises:
            DeclarationError: The state is that of another number of criteria.
        """
        if len(state["states"]) != len(self.criteria):
            raise DeclarationError(
                f"{self!r} has {len(self.criteria)} criteria, but the saved state has {len(state['states'])}.",
                fix="construct `EarlyStopping` with the same criteria as in the run that saved the state",
            )
        self.states, self._of_fit = list(state["states"]), list(state["of_fit"])
        notes = []
        saved = state.get("watched", [None] * len(self.criteria))
        for i, (then, now) in enumerate(zip(saved, self._described(), strict=True)):
            note = note_of_changed_metric(then, now, "its criterion starts")
            if note is not None:  # the best value of another metric would count as one of this metric
                self.states[i] = self._of_fit[i] = None
                notes.append(note)
        return "; ".join(notes) or None

    def _described(self) -> list[str]:
        """Return the metric of each criterion, and what makes its state differ from that of another criterion."""
        described = []
        for criterion, watched, training in zip(self.criteria, self._watched, self._training, strict=True):
            metrics = f"{watched} and {training}" if criterion.needs_training else str(watched)
            described.append(f"{metrics} ({_kind(criterion)})")
        return described

    @on(FitBegin, Phase, access={})
    def start(self, event: FitBegin, phase: Phase, learner: LearnerView) -> None:
        """Start the clocks of criteria with a time limit."""
        of_fit = self._of_fit if event.resumes else [None] * len(self.criteria)
        self.states = [c.start(state) for c, state in zip(self.criteria, self.states, strict=True)]
        self._of_fit = [c.start(state) for c, state in zip(self.criteria, of_fit, strict=True)]

    @on(Trigger, AbstractTrainingPhase)
    def judge(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Pass the values of the epoch to the criteria, and end the fit if one of them is met."""
        metrics, epoch = learner.cbstate.metrics_epoch, learner.progress.epoch
        reasons = []  # all criteria are updated before the fit ends, so that none misses a value
        for i, (criterion, watched) in enumerate(zip(self.criteria, self._watched, strict=True)):
            value = watched.at(metrics, epoch)
            if value is None:
                continue
            loss = self._training_loss(i, metrics, epoch)
            for states in (self.states, self._of_fit):
                state = states[i] if loss is None else criterion.update(states[i], loss, training=True)
                states[i] = criterion.update(state, value)
            if criterion.done(self.states[i]):
                since = "" if criterion.done(self._of_fit[i]) else ", counted since an earlier fit"
                unknown = watched.known_mode is None and getattr(criterion, "mode", None) == "min"
                mode = " (low values count as good)" if unknown else ""
                reasons.append(f"{watched}: {criterion.message(self.states[i])}{since}{mode}")
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
    """Return the metric of the training losses for a watched metric, or None if both are of the same phase."""
    if metric is None:
        name = phase_name(TrainingPhase if phase is None else phase, watched.owner)
        training = Watched(name, watched.metric, watched.owner)
    else:
        training = Watched.named(metric, phase, watched.owner, default=TrainingPhase)
    return None if training.phase == watched.phase else training


def _with_mode_warning(watched: Watched, criterion: Any) -> Watched:
    """Return the metric of a criterion that was given no mode, with a warning if the criterion uses one."""
    in_pair = _is_pair(criterion)
    inner = criterion[1] if in_pair else criterion
    inner = inner if isinstance(inner, Criterion) else NumberSinceBest(inner)
    high = inner.with_default_mode("max")
    if high == inner.with_default_mode("min"):  # such as `NumberLimit(5)`, or `GL(5, mode="min")`
        return watched
    if not in_pair:
        return watched.with_mode_warning()
    # `mode=` of `EarlyStopping` does not apply to pairs.
    call = f'EarlyStopping(("{criterion[0]}", {high!r}))'
    return watched.with_mode_warning({"min": call.replace("mode='max'", "mode='min'"), "max": call})


def _kind(criterion: Criterion) -> str:
    """Return the class and the mode of a criterion. Its numbers, such as the patience, can change in a run."""
    if isinstance(criterion, Disjunction):
        return " | ".join(map(_kind, criterion.criteria))
    mode = getattr(criterion, "mode", None)
    return type(criterion).__name__ if mode is None else f"{type(criterion).__name__}, {mode}"


def _is_pair(criterion: Any) -> TypeGuard[tuple[str, Any]]:
    return isinstance(criterion, tuple) and len(criterion) == 2 and isinstance(criterion[0], str)


def _criterion(criterion: Any, mode: Mode | None, watched: Watched) -> Criterion:
    if isinstance(criterion, int) and not isinstance(criterion, bool):
        patience = positive(criterion, "`patience` of EarlyStopping (epochs)")
        return NumberSinceBest(patience, mode=mode or watched.default_mode)
    if not isinstance(criterion, Criterion):
        raise DeclarationError(
            f"`EarlyStopping` takes criteria and numbers of epochs, not {criterion!r}.", fix=_EXAMPLE
        )
    return criterion.with_mode(mode) if mode == "max" else criterion.with_default_mode(mode or watched.default_mode)
