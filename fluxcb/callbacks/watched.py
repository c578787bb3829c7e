"""`Watched`, a metric of a phase whose epoch values a callback reads, such as `validation/loss`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from fluxcb._calls import Constructed
from fluxcb._declare.phases import Phase, ValidationPhase
from fluxcb._errors import DeclarationError, did_you_mean
from fluxcb._tracebacks import warn_user
from fluxcb.callbacks.metrics.metric_values import EpochValues

__all__ = [
    "Watched",
    "is_metric_name",
    "note_of_changed_metric",
    "phase_name",
    "requested_mode",
    "resolved_mode",
    "warn_if_contradictory",
]

# fmt: off
_HIGH_IS_GOOD = frozenset((
    "acc", "accuracy", "ami", "ap", "ari", "auc", "auprc", "auroc", "bertscore", "bleu", "chrf", "cider", "correct",
    "dice", "exactmatch", "f1", "f2", "fbeta", "fscore", "hit", "hits", "iou", "jaccard", "kappa", "kendall",
    "likelihood", "map", "mcc", "meteor", "miou", "mrr", "ndcg", "nmi", "passk", "pearson", "pearsonr", "prec",
    "precision", "psnr", "r2", "recall", "return", "returns", "reward", "rewards", "rouge", "rougel", "sacrebleu",
    "sdr", "sensitivity", "silhouette", "sisdr", "sisnr", "snr", "spearman", "spearmanr", "specificity", "ssim",
    "success", "successes", "tnr", "topk", "tpr", "win", "winrate", "wins",
))
# `dice_loss`, `recall_error`, `negative_log_likelihood`, `one_minus_accuracy`
_LOW_IS_GOOD = frozenset((
    "aic", "bce", "bic", "bpb", "bpc", "bpd", "brier", "ce", "cer", "chamfer", "crossentropy", "ece", "eer", "err",
    "error", "errors", "failure", "failures", "false", "fdr", "fid", "fnr", "fpr", "fvd", "hausdorff", "inaccuracy",
    "incorrect", "kid", "kl", "kld", "logloss", "loss", "losses", "lpips", "mae", "mape", "minus", "miss", "misses",
    "mmd", "mse", "msle", "neg", "negative", "nll", "nrmse", "perplexity", "ppl", "regret", "rmse", "rmsle", "smape",
    "wer", "xent",
))
# fmt: on
# These words have a usual direction, which a `mode` does not contradict: a low anomaly score is good, a high survival
# time as well. Words of the other lists take precedence, as in `brier_score`.
_USUALLY_HIGH = frozenset(("corr", "correlation", "em", "score", "scores", "sim", "similarity", "throughput"))
_USUALLY_LOW = frozenset(
    ("cost", "costs", "dist", "distance", "divergence", "duration", "gap", "latency", "penalty", "runtime", "time")
)
_NEGATIONS = frozenset(("minus", "neg", "negative"))
# Names of several words, or of a word and a number.
_PHRASES = (
    (re.compile(r"cross[\W_]*entropy"), "crossentropy"),
    (re.compile(r"exact[\W_]*match"), "exactmatch"),
    (re.compile(r"\btop[\W_]*(\d+|k\b)"), "topk "),
    (re.compile(r"\bpass[\W_]*(@|at\b|rate\b)"), "passk "),
)
_QUALIFIERS = frozenset(("val", "validation", "valid", "test", "train", "training", "top1", "top5"))


@dataclass(frozen=True)
class Watched(Constructed):
    """A metric whose epoch values a callback reads, with the name that it has in logs: `validation/loss`.

    A callback that watches a metric does four things:

    - It creates the object with `Watched.named` from its constructor arguments.
    - It declares `Read()` for `cbstate.metrics_epoch`.
    - It returns the object from `watched_metrics`. If no callback provides the metric, building the Learner then raises
      an error.
    - It calls `at` at Trigger, which comes after validation and after every `InferenceRunner`.

    Attributes:
        phase: The name of the phase, or of an `InferenceRunner`.
        metric: The name of the metric.
        owner: The name of the callback, for messages.
        mode_warning: A warning that the Learner gives when it is built, or None; see `with_mode_warning`.

    Raises:
        DeclarationError: `metric` is not a name.

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
    mode_warning: str | None = field(default=None, repr=False, compare=False)

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
        """Return the metric with a given name.

        Args:
            text: The name of a metric, such as `loss`, or its name in logs, such as `training/loss`. The part before
                the first slash is the phase.
            phase: The phase that the user passed as a separate argument (class, instance or name), or None.
            owner: The name of the callback, for messages.
            default: The phase if neither `text` nor `phase` names one.

        Raises:
            DeclarationError: `text` is not a name, `phase` is not a phase, or they name different phases.

        Example:
            >>> from fluxcb.phases import TrainingPhase
            >>> for text, phase in [("loss", None), ("loss", TrainingPhase), ("inference/top/5", None)]:
            ...     print(repr(Watched.named(text, phase, "MyCallback")))
            Watched(phase='validation', metric='loss', owner='MyCallback')
            Watched(phase='training', metric='loss', owner='MyCallback')
            Watched(phase='inference', metric='top/5', owner='MyCallback')
        """
        phase_argument = None if phase is None else phase_name(phase, owner)
        if not isinstance(text, str):
            raise _no_name(text, owner)
        named, slash, metric = text.partition("/")
        if not slash:
            return cls(phase_name(default, owner) if phase_argument is None else phase_argument, text, owner)
        if not named or not metric:
            raise _no_name(text, owner)
        if phase_argument is not None and phase_argument != named:
            raise DeclarationError(
                f'`{owner}` was given the metric "{text}" and the phase {phase_argument}.',
                why="the part before the first slash is a phase, so two different phases are named",
                fix=[
                    f'name only one phase: leave out `phase=`, or write `"{phase_argument}/{metric}"`',
                    f'write `"{phase_argument}/{text}"` if the metric itself is called "{text}"',
                ],
            )
        return cls(named, metric, owner)

    @property
    def default_mode(self) -> Literal["min", "max"]:
        """Whether low (`min`) or high (`max`) values are good, derived from the metric's name.

        The part of the name after the last slash is split into lowercase words at underscores, dashes and other
        punctuation, and between letters and digits. High values are good if one of the words is the usual name of a
        score, such as `acc`, `accuracy`, `auc`, `f1`, `iou`, `recall`, `reward`, `top5` or `score`. Low values are good
        if one of the words is `loss`, `error`, `mse`, `perplexity` or similar, also in `dice_loss` or `brier_score`,
        and if the name begins as `1-accuracy` does. Low values also count as good for all names without such a word,
        and the Learner then warns. `EarlyStopping`, `ReduceLROnPlateau` and `Checkpointer` use this mode if their
        `mode` argument is not given.

        Example:
            >>> for name in ("validation/accuracy", "top5_acc", "precision@5", "score", "loss", "dice_loss"):
            ...     print(name, Watched.named(name, None, "MyCallback").default_mode)
            validation/accuracy max
            top5_acc max
            precision@5 max
            score max
            loss min
            dice_loss min
        """
        return self.known_mode or "min"

    @property
    def known_mode(self) -> Literal["min", "max"] | None:
        """The mode that the metric's name implies, or None for a name that `default_mode` does not know."""
        return _implied_mode(self.metric)[0]

    @property
    def certain_mode(self) -> Literal["min", "max"] | None:
        """The same, but None for words whose direction is not always the same, such as `score` or `distance`."""
        mode, is_certain = _implied_mode(self.metric)
        return mode if is_certain else None

    def with_mode_warning(self, calls: Mapping[Literal["min", "max"], str] | None = None) -> Watched:
        """Return the metric for a callback that uses `default_mode`, with a warning if its name implies no mode.

        Args:
            calls: For each mode, how the user passes it. By default, the name of the callback with a `mode` argument.

        Example:
            >>> print(Watched.named("sharpness", None, "MyCallback").with_mode_warning().mode_warning)
            The name of `validation/sharpness` does not say whether low or high values are good, so low values count ...
        """
        if self.known_mode is not None:
            return self
        low, high = (
            calls[mode] if calls is not None else f'{self.owner}(..., mode="{mode}")' for mode in ("min", "max")
        )
        text = (
            f"The name of `{self}` does not say whether low or high values are good, so low values count as good in "
            f"`{self.owner}`. Write `{high}` if high values are good, or `{low}` if low values are good."
        )
        return replace(self, mode_warning=text)

    def at(self, metrics_epoch: Any, epoch: int) -> float | None:
        """Return the value of an epoch, or None if the epoch has no value.

        Args:
            metrics_epoch: `cbstate.metrics_epoch`.
            epoch: Number of the epoch.

        Raises:
            DeclarationError: The metric has never had a value and is not expected to get one, or its value is an
                array.
        """
        values = metrics_epoch[self.phase] if self.phase in metrics_epoch else EpochValues()
        if self.metric in values.arrays_at(epoch):
            raise DeclarationError(
                f"{self.owner} watches `{self}`, whose values are arrays.",
                why="it compares values of different epochs, so they must be numbers",
                fix="watch a metric whose values are numbers",
            )
        if self.metric in values:
            return values.at(epoch).get(self.metric)
        if self.phase in metrics_epoch and not len(values):
            return None  # the empty entry of an `InferenceRunner` that has not been due yet
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
            full = [name for name in known if name.endswith(f"/{self}")]  # the name of the metric contains a slash
            near = f" Did you mean `{full[0]}`?" if full else did_you_mean(self.phase, metrics)
            if self.phase == ValidationPhase.name:
                fix.insert(0, "give the Learner validation data: `data=(training, validation)`")
            else:
                fix.append(f'add a callback for it: `InferenceRunner(data, ScalarStats("loss"), name="{self.phase}")`')
        return DeclarationError(
            f"{self.owner} watches `{self}`, which has no value in epoch {epoch}.{near}",
            where=f"available metrics: {', '.join(f'`{name}`' for name in known) or 'none'}",
            why="without a value of its metric, the callback would do nothing",
            fix=fix,
        )

    def __str__(self) -> str:
        return f"{self.phase}/{self.metric}"


def is_metric_name(text: Any) -> bool:
    """Return whether a string is clearly the name of a common metric, such as `val_loss` or `top5_acc`."""
    if not isinstance(text, str):
        return False
    words = set(re.split(r"[\W_]+", text.lower()))
    common = _HIGH_IS_GOOD | _LOW_IS_GOOD
    return bool(words & common) and words <= common | _QUALIFIERS


def _implied_mode(metric: str) -> tuple[Literal["min", "max"] | None, bool]:
    """Return the mode that the name of a metric implies, and whether it is certain enough to contradict a `mode`."""
    last = metric.rpartition("/")[2]
    name = (last if re.search(r"[^\W\d_]", last) else metric).lower()  # `top/5`
    subtracted = re.match(r"1\s*-\s*([^\W_]+)", name)  # not "shot" in `1-shot_accuracy`
    if subtracted and subtracted[1] in _HIGH_IS_GOOD:
        return "min", True
    words = _words(name)
    usually_low = bool(words & _USUALLY_LOW)
    if words & _LOW_IS_GOOD:
        # In scikit-learn, high values of `neg_mean_squared_error` are good.
        is_reversed = bool(words & _NEGATIONS and words & _LOW_IS_GOOD - _NEGATIONS)
        return (None, False) if is_reversed else ("min", True)
    if words & _HIGH_IS_GOOD:
        return (None, False) if usually_low else ("max", True)  # `accuracy_gap`
    usually_high = bool(words & _USUALLY_HIGH)
    if usually_high == usually_low:
        return None, False
    return ("max" if usually_high else "min"), False


def _words(name: str) -> set[str]:
    """Return the words of a lowercase name, and without their digits unless the lists have them: `acc1`, but `f1`."""
    name = name.replace("_", " ")
    for phrase, word in _PHRASES:
        name = phrase.sub(word, name)
    words: set[str] = set()
    for word in re.findall(r"\w+", name):
        words.update([word] if word in _HIGH_IS_GOOD else re.findall(r"[^\W\d]+", word))
    return words


def phase_name(phase: Any, owner: str) -> str:
    """Return the name of a phase that is given as a class, an instance or a name.

    Raises:
        DeclarationError: `phase` is none of these.
    """
    if isinstance(phase, str) and phase:
        return phase
    if (isinstance(phase, Phase) or (isinstance(phase, type) and issubclass(phase, Phase))) and phase.name:
        return phase.name
    raise DeclarationError(
        f"`{owner}` takes a phase class with a name, not {phase!r}.", fix="write e.g. `phase=ValidationPhase`"
    )


def requested_mode(mode: Any, owner: str) -> Literal["min", "max"] | None:
    """Return the mode that a user requested, or None to use `Watched.default_mode`.

    Raises:
        DeclarationError: `mode` is not `min`, `max`, `auto` or None.
    """
    if mode is None or (isinstance(mode, str) and mode in ("min", "max", "auto")):
        return None if mode == "auto" else mode
    raise DeclarationError(
        f'`mode` of `{owner}` must be "min", "max" or "auto", not {mode!r}.',
        why="it says whether low or high values of the metric are good",
        fix=[
            'write `mode="max"` if high values are good, or `mode="min"` if low values are good',
            "leave it out, so that the name of the metric decides",
        ],
    )


def warn_if_contradictory(watched: Watched, requested: str | None) -> None:
    """Warn if the user has requested a mode that the metric's name contradicts, often because `metric` is missing."""
    certain = watched.certain_mode
    if requested is None or certain in (None, requested):
        return
    good, bad, other = ("low", "high", "accuracy") if certain == "min" else ("high", "low", "loss")
    warn_user(
        f'`{watched.owner}(..., mode="{requested}")` treats {bad} values of `{watched}` as good, but according to its '
        f'name, {good} values are good. Leave out `mode`, or name another metric, e.g. `metric="{other}"`.',
        UserWarning,
    )


def resolved_mode(mode: Any, watched: Watched) -> tuple[Watched, Literal["min", "max"]]:
    """Return the metric of a callback and its mode: the one that a user requested, or `Watched.default_mode`.

    Raises:
        DeclarationError: `mode` is not `min`, `max`, `auto` or None.
    """
    requested = requested_mode(mode, watched.owner)
    warn_if_contradictory(watched, requested)
    return (watched.with_mode_warning(), watched.default_mode) if requested is None else (watched, requested)


def note_of_changed_metric(saved: str | None, now: str, restarts: str) -> str | None:
    """Return what `load_state_dict` reports if the saved values are those of another metric or mode, otherwise None.

    Args:
        saved: The metric and the mode of the saved values, such as `validation/loss (min)`. It is None in checkpoints
            of versions that did not save it, whose values are then used.
        now: The metric and the mode of this callback.
        restarts: What starts over.
    """
    return None if saved in (None, now) else f"{saved} became {now}, so {restarts} over"


def _no_name(text: Any, owner: str) -> DeclarationError:
    return DeclarationError(
        f"`{owner}` takes the name of a metric, not {text!r}.",
        fix='write e.g. `"loss"`, `"training/loss"`, or `"accuracy"` with a `Metrics(accuracy)`',
    )
