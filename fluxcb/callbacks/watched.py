"""`Watched`: one metric of one phase, as callbacks look at it after each epoch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from fluxcb._declare.phases import Phase, ValidationPhase
from fluxcb._errors import DeclarationError, did_you_mean

__all__ = ["Watched", "phase_name", "requested_mode"]

# A bare "score" is in neither list: a Brier score or an FID score is good when it is low.
_HIGH_IS_GOOD = frozenset(
    ("acc", "accuracy", "auc", "auroc", "bleu", "dice", "f1", "iou", "map", "miou", "ndcg", "precision", "r2", "recall")
)
_LOW_IS_GOOD = frozenset(("err", "error", "loss"))  # `dice_loss`, `iou_loss`, `recall_error`


@dataclass(frozen=True)
class Watched:
    """A metric that decides about something, by the name under which it is logged: `validation/loss`.

    A callback makes one with `Watched.named` from what its user wrote, declares `Read()` on `cbstate.metrics_epoch`,
    and calls `at` at Trigger, after the epoch's validation and every `InferenceRunner`. It returns the metric from
    `watched_metrics`, so that a metric without a provider is an error when the Learner is built.

    Attributes:
        phase: The phase's name; of an `InferenceRunner`, the runner's.
        metric: The metric's name.
        owner: Who looks at it, for messages.

    Raises:
        DeclarationError: `metric` is no name.

    Example:
        >>> from fluxcb import Callback, Read, on
        >>> from fluxcb.callbacks import Metrics, Watched
        >>> from fluxcb.events import Trigger
        >>> from fluxcb.phases import AbstractTrainingPhase
        >>> from fluxcb.testing import testlearner
        >>> class ShowIt(Callback):
        ...     def __init__(self, metric="loss", *, phase=None):
        ...         self.watched = Watched.named(metric, phase, "ShowIt")
        ...
        ...     def stateaccess(self):
        ...         return {"cbstate": {"metrics_epoch": Read()}}
        ...
        ...     def watched_metrics(self):
        ...         return (self.watched,)
        ...
        ...     @on(Trigger, AbstractTrainingPhase)
        ...     def show(self, event, phase, learner):
        ...         value = self.watched.at(learner.cbstate.metrics_epoch, learner.progress.epoch)
        ...         print(self.watched, value is not None)
        >>> history = testlearner(Metrics(), ShowIt("training/loss"), ShowIt()).fit(1)
        training/loss True
        validation/loss True
    """

    phase: str
    metric: str
    owner: str

    def __post_init__(self) -> None:
        if not isinstance(self.metric, str) or not self.metric:
            raise _no_name(self.metric, self.owner)

    @classmethod
    def named(
        cls,
        text: str,
        phase: Phase | type[Phase] | str | None,
        owner: str,
        *,
        default: Phase | type[Phase] | str = ValidationPhase,
    ) -> Watched:
        """Return the metric that a user has named.

        Args:
            text: A metric's name, `loss`; or with its phase in front, `training/loss`, as `LogMetrics` and
                `InferenceRunner` log it. What stands before the first slash is the phase.
            phase: The phase that the user has given beside it (class, instance or name), or None for none.
            owner: The callback's name, for messages.
            default: The phase where neither says one.

        Raises:
            DeclarationError: `text` is no name, `phase` is no phase, or they name two phases.

        Example:
            >>> from fluxcb.phases import TrainingPhase
            >>> for text, phase in [("loss", None), ("loss", TrainingPhase), ("inference/top/5", None)]:
            ...     print(repr(Watched.named(text, phase, "MyCallback")))
            Watched(phase='validation', metric='loss', owner='MyCallback')
            Watched(phase='training', metric='loss', owner='MyCallback')
            Watched(phase='inference', metric='top/5', owner='MyCallback')
        """
        given = None if phase is None else phase_name(phase, owner)
        if not isinstance(text, str):
            raise _no_name(text, owner)
        named, slash, metric = text.partition("/")
        if not slash:
            return cls(phase_name(default, owner) if given is None else given, text, owner)
        if not named or not metric:
            raise _no_name(text, owner)
        if given is not None and given != named:
            raise DeclarationError(
                f'`{owner}` was given the metric "{text}" and beside it the phase {given}.',
                why="what stands before the first slash is the phase, so these are two",
                fix=[
                    f'name the phase once: leave out the one beside the metric, or write "{given}/{metric}"',
                    f'write "{given}/{text}" if the metric itself is called "{text}"',
                ],
            )
        return cls(named, metric, owner)

    @property
    def default_mode(self) -> Literal["min", "max"]:
        """Whether low (`min`) or high (`max`) values are good, derived from the metric's name.

        The part of the name after the last slash is split into lowercase words at underscores, dashes and other
        punctuation. High values are good if one of the words is `acc`, `accuracy`, `auc`, `auroc`, `bleu`, `dice`,
        `f1`, `iou`, `map`, `miou`, `ndcg`, `precision`, `r2` or `recall`, unless another one is `loss`, `error` or
        `err`. Low values are good for every other name. `EarlyStopping`, `ReduceLROnPlateau` and `Checkpointer` use
        this mode if their `mode` argument is not given.

        Example:
            >>> for name in ("validation/accuracy", "top5_acc", "precision@5", "loss", "dice_loss"):
            ...     print(name, Watched.named(name, None, "MyCallback").default_mode)
            validation/accuracy max
            top5_acc max
            precision@5 max
            loss min
            dice_loss min
        """
        words = set(re.split(r"[\W_]+", self.metric.rpartition("/")[2].lower()))
        return "max" if words & _HIGH_IS_GOOD and not words & _LOW_IS_GOOD else "min"

    def at(self, metrics_epoch: Any, epoch: int) -> float | None:
        """Return the value of an epoch, or None in an epoch without one.

        Args:
            metrics_epoch: `cbstate.metrics_epoch`.
            epoch: Number of the epoch.

        Raises:
            DeclarationError: There has never been a value, and nothing is there that would bring one.
        """
        values = metrics_epoch[self.phase]
        if self.metric in values:
            return values.at(epoch).get(self.metric)
        if self.phase in metrics_epoch and not len(values):
            return None  # an `InferenceRunner` that has not been due yet
        if not any(metrics_epoch[phase].at(epoch) for phase in metrics_epoch):
            return None  # the epoch has not ended
        raise self._missing(metrics_epoch, epoch)

    def _missing(self, metrics_epoch: Any, epoch: int) -> DeclarationError:
        metrics = {phase: list(metrics_epoch[phase]) for phase in metrics_epoch}
        known = [f"{phase}/{name}" for phase, names in metrics.items() for name in names]
        fix = ["name one of these"] if known else []
        if metrics.get(self.phase):
            near = did_you_mean(self.metric, metrics[self.phase])
            fix.append(f'add it: `Metrics(Metric(fn, name="{self.metric}"))`')
        else:
            whole = [name for name in known if name.endswith(f"/{self}")]  # a metric with a slash in its own name
            near = f" Did you mean `{whole[0]}`?" if whole else did_you_mean(self.phase, metrics)
            if self.phase == ValidationPhase.name:
                fix.insert(0, "give the Learner validation data: `data=(training, validation)`")
            else:
                fix.append(f'add what runs it, e.g. `InferenceRunner(data, ScalarStats("loss"), name="{self.phase}")`')
        return DeclarationError(
            f"{self.owner} watches `{self}`, which has no value in epoch {epoch}.{near}",
            where=f"there are {', '.join(f'`{name}`' for name in known) or 'none'}",
            why="without it nothing would ever happen",
            fix=fix,
        )

    def __str__(self) -> str:
        return f"{self.phase}/{self.metric}"


def phase_name(phase: Any, owner: str) -> str:
    """Return the name of a phase given as a class, an instance or a name.

    Raises:
        DeclarationError: It is none of these.
    """
    if isinstance(phase, str) and phase:
        return phase
    if (isinstance(phase, Phase) or (isinstance(phase, type) and issubclass(phase, Phase))) and phase.name:
        return phase.name
    raise DeclarationError(
        f"`{owner}` takes a phase class with a name, not {phase!r}.", fix="e.g. `phase=ValidationPhase`"
    )


def requested_mode(mode: Any, owner: str) -> Literal["min", "max"] | None:
    """Return the mode that a user requested, or None if `Watched.default_mode` decides.

    Raises:
        DeclarationError: `mode` is not `min`, `max`, `auto` or None.
    """
    if mode is None or (isinstance(mode, str) and mode in ("min", "max", "auto")):
        return None if mode == "auto" else mode
    raise DeclarationError(
        f'`mode` of `{owner}` must be "min", "max" or "auto", not {mode!r}.',
        why="it says whether low or high values of the metric are good",
        fix=[
            'write `mode="max"` if high values are good, `mode="min"` if low values are good',
            "leave it out: the name of the metric then decides",
        ],
    )


def _no_name(text: Any, owner: str) -> DeclarationError:
    return DeclarationError(
        f"`{owner}` takes the name of a metric, not {text!r}.",
        fix='e.g. "loss", or "training/loss", or "accuracy" if there is a `Metrics(accuracy)`',
    )
