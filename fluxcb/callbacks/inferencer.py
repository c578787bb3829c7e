"""Inferencers: what is made of the values that `InferenceRunner` computes, batch by batch, on the host."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fluxcb._errors import DeclarationError

__all__ = ["BinaryClassificationStats", "ClassificationError", "Inferencer", "ScalarStats"]


class Inferencer:
    """Base class of what an `InferenceRunner` makes of the values it computes.

    A round over the data calls `before`, then `on_fetches` for each batch, in order, then `after`. If the round fails,
    `abandon` is called instead of `after`. An inferencer begins anew with each round, so none of it is saved.

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

    def fetches(self) -> Sequence[str]:
        """Return which values it needs: names of step values, parts of them (`aux.logits`), or `batch`."""
        raise DeclarationError(
            f"`{type(self).__name__}` has no `fetches(self)`, so it would get no values.",
            fix='return names of step values, e.g. `("outputs", "ys")`',
        )

    def output_locations(self) -> Iterable[Path | str]:
        """Return the paths of files and directories that the inferencer writes."""
        return ()

    def before(self) -> None:
        """Begin a round."""

    def on_fetches(self, values: Mapping[str, Any], samples: int) -> None:
        """Take in the values of a batch.

        Args:
            values: What `fetches` named, by these names: numpy arrays, or containers of them.
            samples: How many samples the batch has.
        """

    def after(self) -> Mapping[str, float]:
        """End a round, and return its statistics: numbers by name."""
        return {}

    def statistics(self) -> Collection[str] | None:
        """Return the names of the statistics that `after` returns, or None if they are only known after a round.

        If the names are known, construction of the Learner checks that the names that other callbacks watch exist.
        """
        return () if type(self).after is Inferencer.after else None

    def abandon(self) -> None:
        """Drop what was gathered: the round failed."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class ScalarStats(Inferencer):
    """Average step values that are one number per batch, such as the loss, weighted by the batches' samples.

    For a value that is a mean over the batch, that is the mean over all samples, whatever the size of the last batch.

    Args:
        names: Name or names of the values, which are also those of the statistics.

    Raises:
        DeclarationError: No names. While training: a value is not one number.

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
        """Return the names."""
        return self.names if type(self).after is ScalarStats.after else None

    def fetches(self) -> Sequence[str]:
        """Return the names."""
        return self.names

    def before(self) -> None:
        """Begin a round."""
        self._sums = dict.fromkeys(self.names, 0.0)
        self._samples = 0

    def on_fetches(self, values: Mapping[str, Any], samples: int) -> None:
        """Add a batch's values.

        Raises:
            DeclarationError: A value is not one number.
        """
        import numpy as np

        for name in self.names:
            if np.ndim(values[name]) != 0:
                raise DeclarationError(
                    f"`{name}` has shape {np.shape(values[name])}; `ScalarStats` averages one number per batch.",
                    fix="reduce it where it is computed, or write an `Inferencer` of your own",
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
    """Count wrong classifications, and give their share of all samples: exact, whatever the sizes of the batches.

    Args:
        wrong_vector_name: Name of a step value that is 1 (or true) for each wrong sample of the batch and 0 for the
            others, one axis. None: a sample is wrong if the largest of its `outputs` (last axis) is not at index `ys`.
        summary_name: Name of the statistic.

    Raises:
        DeclarationError: A name is none. While training: the vector has not one axis, or other values than 0 and 1.

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
        """Return the name of the vector, or what it is computed from."""
        return ("outputs", "ys") if self.wrong_vector_name is None else (self.wrong_vector_name,)

    def before(self) -> None:
        """Begin a round."""
        self._wrong = self._samples = 0

    def on_fetches(self, values: Mapping[str, Any], samples: int) -> None:
        """Count a batch's errors.

        Raises:
            DeclarationError: There is no vector of 0 and 1.
        """
        import numpy as np

        if self.wrong_vector_name is None:
            predicted, labels = np.argmax(values["outputs"], axis=-1), np.asarray(values["ys"])
            _require_same_shape(predicted, "the largest `outputs`", labels, "ys", "ClassificationError")
            wrong = (predicted != labels).reshape(-1)
        else:
            wrong = _zeros_and_ones(values[self.wrong_vector_name], self.wrong_vector_name, "ClassificationError")
            if wrong.ndim != 1:
                raise DeclarationError(
                    f"`{self.wrong_vector_name}` has shape {wrong.shape}; "
                    "`ClassificationError` takes a vector, one number per sample.",
                    fix="do not reduce it over the batch: the counts of batches of different sizes would be lost",
                )
        self._wrong += int(np.count_nonzero(wrong))
        self._samples += wrong.size

    def after(self) -> Mapping[str, float]:
        """Return the share of errors."""
        share = self._wrong / self._samples
        self.before()
        return {self.summary_name: share}

    def __repr__(self) -> str:
        return f"ClassificationError({self.wrong_vector_name or 'outputs'!r})"


class BinaryClassificationStats(Inferencer):
    """Compute precision and recall over all data: statistics `precision` and `recall`.

    Where nothing was predicted as positive the precision is 0, where nothing is positive the recall is.

    Args:
        pred_name: Name of the predictions, a step value.
        label_name: Name of the labels, of the same shape: 0 and 1, or false and true.
        threshold: Predictions above it are positive: 0 for logits, 0.5 for probabilities. None if they are 0 and 1.
        prefix: What the statistics' names begin with, followed by `_`; nothing by default.

    Raises:
        DeclarationError: A name is none, or the threshold no number. While training: the shapes differ, or there are
            other values than 0 and 1.

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
            number = isinstance(threshold, int | float) and not isinstance(threshold, bool)
            if not number or math.isnan(threshold):
                raise DeclarationError(
                    f"`threshold` of `BinaryClassificationStats` must be a number, not {threshold!r}.",
                    fix="e.g. `threshold=0.5`",
                )
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
        """Begin a round."""
        self._predicted = self._positive = self._both = 0

    def on_fetches(self, values: Mapping[str, Any], samples: int) -> None:
        """Count a batch's positives.

        Raises:
            DeclarationError: The shapes differ, or there are other values than 0 and 1.
        """
        import numpy as np

        owner = type(self).__name__
        labels = _zeros_and_ones(values[self.label_name], self.label_name, owner)
        if self.threshold is None:
            predictions = _zeros_and_ones(values[self.pred_name], self.pred_name, owner)
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
    """Return a name that was given.

    Raises:
        DeclarationError: It is none.
    """
    if isinstance(name, str) and name:
        return name
    raise DeclarationError(f"`{owner}` takes {what}, not {name!r}.", fix='a text such as "loss"')


def _zeros_and_ones(value: Any, name: str, owner: str) -> Any:
    import numpy as np

    array = np.asarray(value)
    if not np.isin(array, (0, 1)).all():
        strange = array[~np.isin(array, (0, 1))].flat[0]
        raise DeclarationError(
            f"`{name}` has the value {strange}; `{owner}` takes 0 and 1, or false and true.",
            fix="compare where it is computed: `outputs > 0`"
            if owner == "ClassificationError"
            else "say from where on a prediction is positive: `threshold=0` for logits",
        )
    return array.astype(bool)


def _require_same_shape(predictions: Any, what: str, labels: Any, label_name: str, owner: str) -> None:
    if predictions.shape != labels.shape:
        raise DeclarationError(
            f"`{owner}` compares predictions and labels one by one, and their shapes differ: "
            f"{predictions.shape} of {what}, {labels.shape} of `{label_name}`.",
            fix="bring both to one shape in the model or the data",
        )
