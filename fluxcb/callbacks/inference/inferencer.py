"""Inferencers, which compute statistics from the values of an `InferenceRunner`, batch by batch on the host."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from fluxcb._calls import Constructed
from fluxcb._errors import DeclarationError
from fluxcb.callbacks.arguments import require

__all__ = ["BinaryClassificationStats", "ClassificationError", "Inferencer", "ScalarStats"]


class Inferencer(Constructed):
    """Base class of inferencers, which compute statistics from the values of an `InferenceRunner`.

    Each round over the data calls `before`, then `on_fetches` for each batch in order, then `after`. If the round
    fails, `abandon` is called instead of `after`. Each round starts again from `before`, so checkpoints do not save
    inferencers.

    Attributes:
        keeps_order: Whether the order of the examples matters. If so, an `InferenceRunner` refuses an `ArrayLoader`
            that shuffles.

    Example:
        >>> import numpy as np
        >>> from fluxcb.callbacks import Inferencer, InferenceRunner
        >>> from fluxcb.testing import testlearner
        >>> class LargestOutput(Inferencer):
        ...     def fetches(self):
        ...         return ("outputs",)
        ...
        ...     def before(self):
        ...         self.largest = float("-inf")
        ...
        ...     def on_fetches(self, values, samples):
        ...         self.largest = max(self.largest, float(values["outputs"].max()))
        ...
        ...     def after(self):
        ...         return {"largest": self.largest}
        >>> xs = np.float32([[0], [1], [2]])
        >>> batches = [(xs[:2], xs[:2]), (xs[2:], xs[2:])]
        >>> learner = testlearner(InferenceRunner(batches, LargestOutput()))
        >>> history = learner.fit(30)
        >>> round(learner.cbstate["metrics_epoch"]["inference"].last("largest"))  # of 3 x - 1
        5

    Source:
        tensorpack, `Inferencer`.
    """

    keeps_order: ClassVar[bool] = False

    def fetches(self) -> Sequence[str]:
        """Return the names of the values to fetch: step values, parts of them such as `aux.logits`, or `batch`."""
        raise DeclarationError(
            f"`{type(self).__name__}` has no `fetches(self)`, so it would get no values.",
            fix='define it, and return the names of step values, e.g. `("outputs", "ys")`',
        )

    def output_locations(self) -> Iterable[Path | str]:
        """Return the paths of files and directories that the inferencer writes."""
        return ()

    def before(self) -> None:
        """Start a round."""

    def on_fetches(self, values: Mapping[str, Any], samples: int) -> None:
        """Process the values of a batch.

        Args:
            values: The values by the names that `fetches` returned: NumPy arrays, or containers of them.
            samples: Number of samples in the batch.
        """

    def after(self) -> Mapping[str, float]:
        """End a round, and return its statistics by name."""
        return {}

    def statistics(self) -> Collection[str] | None:
        """Return the names of the statistics that `after` returns, or None if they are unknown before a round.

        If the names are known, a callback that watches a missing statistic is reported when the Learner is built.
        """
        # The default `after` returns no statistics. For any other `after`, the names are unknown.
        return () if type(self).after is Inferencer.after else None

    def abandon(self) -> None:
        """Clean up after a failed round."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class ScalarStats(Inferencer):
    """Average scalar step values, such as the loss, over all batches, weighted by the number of samples per batch.

    If a value is a mean over the batch, its average is the mean over all samples, even if batch sizes differ.

    Args:
        names: The name or names of the values. The statistics have the same names.

    Raises:
        DeclarationError: There are no names. During training: a value is not a scalar.

    Example:
        >>> from fluxcb.callbacks import ScalarStats
        >>> stats = ScalarStats(["loss"])
        >>> stats.before()
        >>> stats.on_fetches({"loss": 1.0}, 3)
        >>> stats.on_fetches({"loss": 5.0}, 1)
        >>> stats.after()
        {'loss': 2.0}

    Source:
        tensorpack, `ScalarStats`, which averages over batches.
    """

    def __init__(self, names: str | Sequence[str]) -> None:
        self.names = tuple(names) if isinstance(names, Sequence) and not isinstance(names, str) else (names,)
        for name in self.names or (None,):
            checked_name(name, "ScalarStats", "the names of step values")
        self.before()

    def statistics(self) -> Collection[str] | None:
        """Return the names of the values."""
        return self.names if type(self).after is ScalarStats.after else None

    def fetches(self) -> Sequence[str]:
        """Return the names of the values."""
        return self.names

    def before(self) -> None:
        """Start a round."""
        self._sums = dict.fromkeys(self.names, 0.0)
        self._samples = 0

    def on_fetches(self, values: Mapping[str, Any], samples: int) -> None:
        """Add the values of a batch to the sums.

        Raises:
            DeclarationError: A value is not a scalar.
        """
        import numpy as np

        for name in self.names:
            if np.ndim(values[name]) != 0:
                raise DeclarationError(
                    f"`{name}` has shape {np.shape(values[name])}, but `ScalarStats` averages one number per batch.",
                    fix="reduce the value in the step that computes it, or write your own `Inferencer`",
                )
            self._sums[name] += float(values[name]) * samples
        self._samples += samples

    def after(self) -> Mapping[str, float]:
        """Return the averages."""
        averages = {name: total / self._samples for name, total in self._sums.items()}
        self.before()
        return averages

    def __repr__(self) -> str:
        return f"ScalarStats({', '.join(map(repr, self.names))})"


class ClassificationError(Inferencer):
    """Compute the classification error rate: the fraction of wrong samples, exact even if batch sizes differ.

    Args:
        wrong_vector_name: Name of a step value of shape `[batch]` that is 1 or true for wrong samples and 0 or false
            for the others. If None, a sample is wrong if the index of its largest `outputs` (last axis) is not `ys`.
        summary_name: Name of the statistic.

    Raises:
        DeclarationError: A name is not a string or is empty. During training: the vector does not have exactly one
            axis, or has values other than 0 and 1.

    Example:
        >>> import numpy as np
        >>> from fluxcb.callbacks import ClassificationError
        >>> errors = ClassificationError("aux.wrong")
        >>> errors.before()
        >>> errors.on_fetches({"aux.wrong": np.array([1, 0, 1, 1])}, 4)
        >>> errors.on_fetches({"aux.wrong": np.array([0])}, 1)
        >>> errors.after()
        {'error': 0.6}

    Source:
        tensorpack, `ClassificationError`.
    """

    def __init__(self, wrong_vector_name: str | None = None, summary_name: str = "error") -> None:
        if wrong_vector_name is not None:
            checked_name(wrong_vector_name, "ClassificationError", "the name of a step value")
        self.wrong_vector_name = wrong_vector_name
        self.summary_name = checked_name(summary_name, "ClassificationError", "the name of its statistic")
        self.before()

    def statistics(self) -> Collection[str] | None:
        """Return the name of the error rate."""
        return (self.summary_name,) if type(self).after is ClassificationError.after else None

    def fetches(self) -> Sequence[str]:
        """Return the name of the vector, or `outputs` and `ys` if there is none."""
        return ("outputs", "ys") if self.wrong_vector_name is None else (self.wrong_vector_name,)

    def before(self) -> None:
        """Start a round."""
        self._wrong = self._samples = 0

    def on_fetches(self, values: Mapping[str, Any], samples: int) -> None:
        """Count the errors of a batch.

        Raises:
            DeclarationError: The value is not a vector of 0 and 1, or the shapes of `outputs` and `ys` do not match.
        """
        import numpy as np

        if self.wrong_vector_name is None:
            outputs = np.asarray(values["outputs"])
            if outputs.ndim < 2 or outputs.shape[-1] < 2:  # `argmax` would be 0 for each sample
                raise DeclarationError(
                    f"`ClassificationError` was given `outputs` of shape {outputs.shape}.",
                    why="it needs scores float[batch, ..., classes] of two or more classes",
                    fix="return one number per sample from the step, 1 for a wrong prediction, and pass its name: "
                    '`ClassificationError("aux.wrong")`',
                )
            predicted, labels = np.argmax(outputs, axis=-1), np.asarray(values["ys"])
            _require_same_shape(predicted, "the largest `outputs`", labels, "ys", "ClassificationError")
            wrong = (predicted != labels).reshape(-1)
        else:
            fix = "compute it with a comparison, e.g. `predicted != ys`"
            wrong = _zeros_and_ones(values[self.wrong_vector_name], self.wrong_vector_name, "ClassificationError", fix)
            if wrong.ndim != 1:
                raise DeclarationError(
                    f"`{self.wrong_vector_name}` has shape {wrong.shape}, but "
                    "`ClassificationError` takes a vector, one number per sample.",
                    fix="return one number per sample from the step, without reducing over the batch",
                )
        self._wrong += int(np.count_nonzero(wrong))
        self._samples += wrong.size

    def after(self) -> Mapping[str, float]:
        """Return the error rate."""
        error_rate = self._wrong / self._samples
        self.before()
        return {self.summary_name: error_rate}

    def __repr__(self) -> str:
        return f"ClassificationError({self.wrong_vector_name or 'outputs'!r})"


class BinaryClassificationStats(Inferencer):
    """Compute the precision and recall of a binary classifier over all samples.

    The statistics are called `precision` and `recall`. If no sample is predicted as positive, the precision is 0. If no
    sample is positive, the recall is 0.

    Args:
        pred_name: Name of the step value with the predictions.
        label_name: Name of the step value with the labels, 0 and 1 or false and true, in the shape of the predictions.
        threshold: Predictions above this number are positive: 0 for logits, 0.5 for probabilities. If None, predictions
            must be 0 and 1.
        prefix: Prefix of the names of the statistics, which is followed by `_`. No prefix by default.

    Raises:
        DeclarationError: A name is not a string or is empty, or the threshold is not a number. During training: the
            shapes differ, or there are values other than 0 and 1.

    Example:
        >>> import numpy as np
        >>> from fluxcb.callbacks import BinaryClassificationStats
        >>> stats = BinaryClassificationStats("outputs", threshold=0)
        >>> stats.before()
        >>> stats.on_fetches({"outputs": np.array([2.0, 0.5, -1.0, -3.0]), "ys": np.array([1, 0, 1, 0])}, 4)
        >>> stats.after()
        {'precision': 0.5, 'recall': 0.5}

    Source:
        tensorpack, `BinaryClassificationStats`.
    """

    def __init__(
        self, pred_name: str, label_name: str = "ys", *, threshold: float | None = None, prefix: str = ""
    ) -> None:
        self.pred_name = checked_name(pred_name, "BinaryClassificationStats", "the name of the predictions")
        self.label_name = checked_name(label_name, "BinaryClassificationStats", "the name of the labels")
        if threshold is not None:
            # Infinite thresholds are allowed, because they are the ends of a threshold sweep.
            fits = isinstance(threshold, int | float) and not isinstance(threshold, bool) and not math.isnan(threshold)
            require(fits, threshold, "`threshold` of `BinaryClassificationStats`", "a number", "threshold=0.5")
        self.threshold = threshold
        self.prefix = f"{checked_name(prefix, 'BinaryClassificationStats', 'a prefix of names')}_" if prefix else ""
        self.before()

    def statistics(self) -> Collection[str] | None:
        """Return the names of precision and recall."""
        names = (f"{self.prefix}precision", f"{self.prefix}recall")
        return names if type(self).after is BinaryClassificationStats.after else None

    def fetches(self) -> Sequence[str]:
        """Return the names of predictions and labels."""
        return self.pred_name, self.label_name

    def before(self) -> None:
        """Start a round."""
        self._predicted = self._positive = self._both = 0

    def on_fetches(self, values: Mapping[str, Any], samples: int) -> None:
        """Count the predicted, actual and true positives of a batch.

        Raises:
            DeclarationError: The shapes differ, or there are values other than 0 and 1.
        """
        import numpy as np

        owner = type(self).__name__
        fix = "convert the labels in the data source, e.g. with `ys > 0`"
        labels = _zeros_and_ones(values[self.label_name], self.label_name, owner, fix)
        if self.threshold is None:
            fix = "pass the number above which a prediction is positive: `threshold=0` for logits"
            predictions = _zeros_and_ones(values[self.pred_name], self.pred_name, owner, fix)
        else:
            predictions = np.asarray(values[self.pred_name]) > self.threshold
        _require_same_shape(predictions, f"`{self.pred_name}`", labels, self.label_name, owner)
        self._predicted += int(np.count_nonzero(predictions))
        self._positive += int(np.count_nonzero(labels))
        self._both += int(np.count_nonzero(predictions & labels))

    def after(self) -> Mapping[str, float]:
        """Return precision and recall."""
        statistics = {
            f"{self.prefix}precision": self._both / self._predicted if self._predicted else 0.0,
            f"{self.prefix}recall": self._both / self._positive if self._positive else 0.0,
        }
        self.before()
        return statistics

    def __repr__(self) -> str:
        return f"BinaryClassificationStats({self.pred_name!r}, {self.label_name!r})"


def checked_name(name: Any, owner: str, what: str) -> str:
    """Return a name, which must be a string that is not empty.

    Raises:
        DeclarationError: `name` is something else.
    """
    if isinstance(name, str) and name:
        return name
    raise DeclarationError(f"`{owner}` takes {what}, not {name!r}.", fix='write e.g. `"loss"`')


def _zeros_and_ones(value: Any, name: str, owner: str, fix: str) -> Any:
    import numpy as np

    array = np.asarray(value)
    if not np.isin(array, (0, 1)).all():
        strange = array[~np.isin(array, (0, 1))].flat[0]
        raise DeclarationError(
            f"`{name}` has the value {strange}, but `{owner}` takes 0 and 1, or false and true.",
            fix=fix,
        )
    return array.astype(bool)


def _require_same_shape(predictions: Any, what: str, labels: Any, label_name: str, owner: str) -> None:
    if predictions.shape != labels.shape:
        raise DeclarationError(
            f"`{owner}` compares predictions and labels element by element, but their shapes differ: "
            f"{predictions.shape} of {what}, {labels.shape} of `{label_name}`.",
            fix="change the model or the data so that both have the same shape",
        )
