"""Classification metrics: `accuracy`, `ConfusionMatrix`, `PerClassAccuracy` and `AUROC`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from fluxcb._declare.phases import AbstractValidationPhase, Phase
from fluxcb._declare.schedules import positive
from fluxcb._errors import DeclarationError
from fluxcb.callbacks.arguments import require
from fluxcb.callbacks.metrics.gathered import AbstractGatheredMetric
from fluxcb.callbacks.metrics.metric import AbstractMetric, compensated
from fluxcb.callbacks.metrics.step_functions import (
    needs_of,
    options_shown,
    phase_classes,
    step_function,
    warn_about_weights,
    weight_function,
    weights_of,
)

__all__ = ["AUROC", "ConfusionMatrix", "PerClassAccuracy", "accuracy"]


def accuracy(outputs: Any, ys: Any) -> Any:
    """Return the fraction of samples whose largest output is at the correct class.

    Args:
        outputs: Scores, `float[batch, ..., classes]`, of two or more classes.
        ys: Class ids, `int[batch, ...]`, or one-hot, `[batch, ..., classes]`.

    Returns:
        `float32[]`, between 0 and 1.

    Raises:
        DeclarationError: The shapes of the outputs and the targets do not match, or there is only one class.

    Example:
        >>> import jax.numpy as jnp
        >>> scores = jnp.array([[0.1, 0.9], [0.8, 0.2]])
        >>> float(accuracy(scores, jnp.array([1, 1]))), float(accuracy(scores, jnp.array([[0, 1], [1, 0]])))
        (0.5, 1.0)
    """
    import jax.numpy as jnp

    if isinstance(outputs, tuple | dict):
        raise _several_outputs(outputs)
    shape, targets = jnp.shape(outputs), jnp.shape(ys)
    # Without this check, `argmax` over an axis of length 1 would give class 0 for each sample, and a wrong accuracy.
    if len(shape) < 2 or shape[-1] < 2 or targets not in (shape, shape[:-1]):
        raise DeclarationError(
            f"`accuracy` was given outputs of shape {shape} and targets of shape {targets}.",
            why="it needs scores float[batch, ..., classes] of two or more classes, and classes int[batch, ...] or "
            "one-hot",
            fix=_accuracy_fix(shape, targets),
        )
    if targets == shape:
        ys = jnp.argmax(ys, axis=-1)
    return jnp.mean((jnp.argmax(outputs, axis=-1) == ys).astype(jnp.float32))


def _several_outputs(outputs: tuple[Any, ...] | dict[Any, Any]) -> DeclarationError:
    """Return the error for a model with several outputs, of which one has the scores."""
    is_dict = isinstance(outputs, dict)
    entries = f"dict with {', '.join(map(repr, outputs))}" if is_dict else f"tuple of {len(outputs)}"
    metric = f"lambda outputs, ys: accuracy(outputs[{next(iter(outputs), '') if is_dict else 0!r}], ys)"
    return DeclarationError(
        f"`accuracy` was given outputs that are a {entries}.",
        why="it needs one array of scores, float[batch, ..., classes]",
        fix=f'select the scores: `Metrics(Metric({metric}, name="accuracy"))`',
    )


def _accuracy_fix(outputs: tuple[int, ...], ys: tuple[int, ...]) -> str:
    if math.prod(outputs) == math.prod(ys) and (outputs[-1:] == (1,) or len(outputs) == 1):
        metric = "lambda outputs, ys: ((outputs > 0).reshape(ys.shape) == ys).mean()"
        return f'for two classes and one logit per sample, write `Metrics(Metric({metric}, name="accuracy"))`'
    if (*outputs[:-1], 1) == ys:
        metric = "lambda outputs, ys: accuracy(outputs, ys.squeeze(-1))"
        return f'write `Metrics(Metric({metric}, name="accuracy"))`'
    return "name the step values with the scores and the classes: `Metrics(Metric(accuracy, needs=(..., ...)))`"


class _ClassCounts(AbstractMetric):
    """Base class of metrics that count examples in a table `counts[class, column]`, where `class` is the true class.

    Subclasses choose the size of the table in `sizes`, and the column of an example in `column`.
    """

    def __init__(
        self,
        classes: int,
        name: str | None = None,
        needs: tuple[str, ...] = ("outputs", "ys"),
        *,
        phase: Phase | type[Phase] | tuple[Phase | type[Phase], ...] = Phase,
        weight: Callable[..., Any] | None = None,
        weight_needs: tuple[str, ...] = ("batch",),
    ) -> None:
        owner = type(self).__name__
        self.classes = positive(classes, f"`classes` of {owner}")
        self.name = type(self).name if name is None else name
        self._outputs_and_ys = step_function(_both, needs, f"The metric `{self.name}`", owner)
        self.weight = weight_function(weight, weight_needs, self.name, owner)
        self.needs = needs_of(self._outputs_and_ys, self.weight)
        self.phases = phase_classes(phase, owner, "10")
        self.columns, self.shape = self.sizes()

    def sizes(self) -> tuple[int, tuple[int, ...]]:
        """Return the number of columns, and the shape of the metric's value."""
        raise NotImplementedError

    def column(self, ids: Any, predicted: Any) -> Any:
        """Return the column in which each example is counted."""
        raise NotImplementedError

    def init(self) -> Any:
        """Return zero counts, int32[classes, columns]; with `weight`, float32 sums and their Kahan compensation."""
        import numpy as np

        shape = self.classes, self.columns
        if self.weight is None:
            return np.zeros(shape, np.int32)
        return np.zeros(shape, np.float32), np.zeros(shape, np.float32)

    def update(self, state: Any, step: Any, samples: int) -> Any:
        """Count the examples of one batch."""
        import jax.numpy as jnp

        ids, predicted = self._classes_of(*self._outputs_and_ys(step))
        # Examples with an unknown class get an index beyond the end, which `mode="drop"` ignores. A negative index
        # would wrap around instead.
        known = (ids >= 0) & (ids < self.classes)
        size = self.classes * self.columns
        cells = jnp.where(known, ids * self.columns + self.column(ids, predicted), size).reshape(-1)
        if self.weight is None:
            counts = jnp.zeros(size, jnp.int32).at[cells].add(1, mode="drop")
            return state + counts.reshape(state.shape)
        weights = weights_of(self.weight, step, self.name)
        if weights.shape != ids.shape:
            raise DeclarationError(
                f"The weights of the metric `{self.name}` have shape {weights.shape}, but its examples have shape "
                f"{ids.shape}.",
                why="each example is counted with its own weight",
                fix="return one weight per example from `weight`, such as a mask",
            )
        sums = jnp.zeros(size, jnp.float32).at[cells].add(weights.reshape(-1), mode="drop")
        total, error = state
        return compensated(total, error, sums.reshape(total.shape))

    def _classes_of(self, outputs: Any, ys: Any) -> tuple[Any, Any]:
        """Return the true and the predicted classes as int32 arrays of the same shape.

        Raises:
            DeclarationError: The shapes of the outputs and the classes do not match.
        """
        import jax.numpy as jnp

        if jnp.ndim(ys) == jnp.ndim(outputs) and jnp.shape(ys)[-1:] == (self.classes,):  # one-hot
            ys = jnp.argmax(ys, axis=-1)
        if jnp.shape(outputs) != (*jnp.shape(ys), self.classes):
            raise DeclarationError(
                f"The metric `{self.name}` was given outputs of shape {jnp.shape(outputs)} and classes of shape "
                f"{jnp.shape(ys)}.",
                why=f"it needs scores float[batch, ..., {self.classes}], one per class, and classes int[batch, ...] or "
                "one-hot",
                fix=[
                    f"pass the number of classes of the model: `{type(self).__name__}(classes)`",
                    "name the step values with the scores and the classes: `needs=(..., ...)`",
                ],
            )
        return jnp.asarray(ys).astype(jnp.int32), jnp.argmax(outputs, axis=-1).astype(jnp.int32)

    def counts(self, state: Any) -> Any:
        """Return the counts of a state."""
        if self.weight is None:
            return state
        warn_about_weights(state[0], self.name)
        return state[0]

    def __repr__(self) -> str:
        name = [] if self.name == type(self).name else [f'name="{self.name}"']
        needs = self._outputs_and_ys.needs
        named = [] if needs == ("outputs", "ys") else [f"needs={needs!r}"]
        options = options_shown(self.phases, (Phase,), self.weight)
        return f"{type(self).__name__}({', '.join([str(self.classes), *name, *named, *options])})"


def _both(outputs: Any, ys: Any) -> tuple[Any, Any]:
    return outputs, ys


class ConfusionMatrix(_ClassCounts):
    """Count the examples of an epoch by true and predicted class.

    The value is an `int32[classes, classes]` array with true classes as rows and predicted classes as columns. With
    `weight`, it contains the `float32` sums of the weights. The predicted class is the class with the largest output.
    Examples whose class is not in `0 ... classes - 1`, such as -1, are ignored. The counts are exact even if batch
    sizes differ. They are part of the carry, so each step copies `classes * classes` numbers.

    Args:
        classes: Number of classes.
        name: The name of the metric.
        needs: Names of two step values: the scores, `float[batch, ..., classes]`, and the classes, `int[batch, ...]` or
            one-hot.
        phase: The phase or phases (a tuple) in which the metric is computed. By default, all phases.
        weight: `weight(batch) -> float[batch, ...]`, the weights of the examples, such as a mask.
        weight_needs: Names of the step values that are passed to `weight`, in order.

    Raises:
        DeclarationError: `classes` is not positive, or another argument is invalid.

    Example:
        >>> import jax.numpy as jnp
        >>> from types import SimpleNamespace
        >>> matrix = ConfusionMatrix(2)
        >>> scores = jnp.array([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4]])
        >>> step = SimpleNamespace(outputs=scores, ys=jnp.array([0, 1, 1]))
        >>> matrix.value_of(matrix.update(matrix.init(), step, 3)).tolist()
        [[1, 0], [1, 1]]

    Source:
        scikit-learn, `confusion_matrix`, with the same rows and columns.
    """

    name = "confusion_matrix"

    def sizes(self) -> tuple[int, tuple[int, ...]]:
        """Return one column per predicted class, and the shape of the whole table."""
        return self.classes, (self.classes, self.classes)

    def column(self, ids: Any, predicted: Any) -> Any:
        """Return the predicted class."""
        return predicted

    def compute(self, state: Any) -> Any:
        """Return the counts."""
        return self.counts(state)


class PerClassAccuracy(_ClassCounts):
    """Compute the accuracy of each class: the fraction of the examples of a class that are predicted correctly.

    The value is a `float32[classes]` array, which is NaN for classes without examples. Examples whose class is not in
    `0 ... classes - 1`, such as -1, are ignored. The accuracy of a class is also called its recall.

    Args:
        classes: Number of classes.
        name: The name of the metric.
        needs: Names of two step values: the scores, `float[batch, ..., classes]`, and the classes, `int[batch, ...]` or
            one-hot.
        phase: The phase or phases (a tuple) in which the metric is computed. By default, all phases.
        weight: `weight(batch) -> float[batch, ...]`, the weights of the examples, such as a mask.
        weight_needs: Names of the step values that are passed to `weight`, in order.

    Raises:
        DeclarationError: `classes` is not positive, or another argument is invalid.

    Example:
        >>> import jax.numpy as jnp
        >>> from types import SimpleNamespace
        >>> metric = PerClassAccuracy(3)
        >>> step = SimpleNamespace(outputs=jnp.eye(3)[jnp.array([0, 1, 0])], ys=jnp.array([0, 1, 1]))
        >>> metric.value_of(metric.update(metric.init(), step, 3)).tolist()
        [1.0, 0.5, nan]

    Source:
        scikit-learn, `recall_score(average=None)`.
    """

    name = "per_class_accuracy"

    def sizes(self) -> tuple[int, tuple[int, ...]]:
        """Return two columns, for wrong and correct predictions, and the shape of one value per class."""
        return 2, (self.classes,)

    def column(self, ids: Any, predicted: Any) -> Any:
        """Return 1 for an example that is predicted correctly, and 0 for the others."""
        return (ids == predicted).astype("int32")

    def compute(self, state: Any) -> Any:
        """Return the fraction of correct predictions of each class."""
        import numpy as np

        counts = self.counts(state).astype(np.float32)
        with np.errstate(invalid="ignore"):  # 0 / 0 in a class without examples
            return counts[:, 1] / (counts[:, 0] + counts[:, 1])


class AUROC(AbstractGatheredMetric):
    """Compute the area under the ROC curve from the scores of all examples of an epoch.

    The area is the probability that a random positive example has a higher score than a random negative example, where
    equal scores count half. It is NaN if there are no positive or no negative examples. The value is exact even if
    batch sizes differ, because all scores and labels are gathered on the host. For this, the scores, labels and weights
    of each step are fetched in the phases of the metric, usually 8 to 12 bytes per example.

    Args:
        fn: `fn(outputs, ys) -> (scores, labels)`, two arrays of the same shape, with labels 0 and 1. By default, the
            scores are the outputs if they have the shape of `ys` (a last axis of length 1 is removed), and
            `outputs[..., 1] - outputs[..., 0]` if there are two classes.
        name: The name of the metric.
        needs: Names of the step values that are passed to `fn`, in order.
        phase: The phase or phases (a tuple) in which the metric is computed. By default, all validation phases.
        weight: `weight(batch) -> float[batch]`, the weights of the examples, such as a mask. Examples with weight 0 are
            ignored.
        weight_needs: Names of the step values that are passed to `weight`, in order.

    Raises:
        DeclarationError: An argument is invalid, or `phase` includes a phase that trains. At the end of an epoch: a
            label is neither 0 nor 1.

    Example:
        >>> import numpy as np
        >>> AUROC().compute({"scores": np.array([0.1, 0.4, 0.35, 0.8]), "labels": np.array([0, 0, 1, 1])})
        0.75
        >>> AUROC(lambda outputs, ys: (outputs[:, 2], ys == 2), name="auroc_of_class_2")
        AUROC(..., name="auroc_of_class_2")

    Source:
        scikit-learn, `roc_auc_score`; Hanley and McNeil (1982), The meaning and use of the area under a ROC curve.
    """

    name = "auroc"

    def __init__(
        self,
        fn: Callable[..., Any] | None = None,
        name: str | None = None,
        needs: tuple[str, ...] = ("outputs", "ys"),
        *,
        phase: Phase | type[Phase] | tuple[Phase | type[Phase], ...] = AbstractValidationPhase,
        weight: Callable[..., Any] | None = None,
        weight_needs: tuple[str, ...] = ("batch",),
    ) -> None:
        example = "lambda outputs, ys: (outputs[:, 1], ys)"
        require(fn is None or callable(fn), fn, "`fn` of `AUROC`", "a function of step values", example)
        self.name = type(self).name if name is None else name
        what = f"The function of the metric `{self.name}`"
        self._function = step_function(_binary if fn is None else fn, needs, what, "AUROC")
        self.weight = weight_function(weight, weight_needs, self.name, "AUROC")
        self.needs = needs_of(self._function, self.weight)
        self.phases = phase_classes(phase, "AUROC", "")

    def gather(self, step: Any) -> Mapping[str, Any]:
        """Return the scores and labels of a batch, and the weights if `weight` is given."""
        import jax.numpy as jnp

        scores, labels = self._function(step)
        if jnp.shape(scores) != jnp.shape(labels):
            fix = "return two arrays of the same shape: `AUROC(lambda outputs, ys: (outputs[:, 1], ys))`"
            if jnp.ndim(scores) == 2 and jnp.shape(scores)[1] > 2 and jnp.ndim(labels) == 1:
                fix = "for one class against the others, write `AUROC(lambda outputs, ys: (outputs[:, 1], ys == 1))`"
            raise DeclarationError(
                f"The metric `{self.name}` has scores of shape {jnp.shape(scores)}, but labels of shape "
                f"{jnp.shape(labels)}.",
                why="each example has one score and one label",
                fix=fix,
            )
        arrays = {"scores": jnp.asarray(scores, jnp.float32), "labels": jnp.asarray(labels)}
        if self.weight is not None:
            arrays["weights"] = weights_of(self.weight, step, self.name)
        if any(array.shape != arrays["scores"].shape for array in arrays.values()):
            raise DeclarationError(
                f"The weights of the metric `{self.name}` have shape {arrays['weights'].shape}, but its scores have "
                f"shape {arrays['scores'].shape}.",
                why="each example is counted with its own weight",
                fix="return one weight per example from `weight`, such as a mask",
            )
        return {name: array.reshape(-1) for name, array in arrays.items()}

    def compute(self, state: Mapping[str, Any]) -> Any:
        """Return the area, computed from all scores, labels and weights of an epoch."""
        import numpy as np

        weights = state.get("weights", np.ones(len(state["labels"]))).astype(np.float64)
        if warn_about_weights(weights, self.name):
            return float("nan")
        counted = weights != 0
        scores, labels, weights = state["scores"][counted], state["labels"][counted], weights[counted]
        if not np.isin(labels, (0, 1)).all():
            wrong = sorted({label.item() for label in labels} - {0, 1})
            raise DeclarationError(
                f"The labels of the metric `{self.name}` must be 0 and 1, but one is {wrong[0]}.",
                why="the area under the ROC curve is defined for two classes",
                fix="for labels -1 and 1, write `AUROC(lambda outputs, ys: (outputs.reshape(ys.shape), ys > 0))`"
                if np.isin(labels, (-1, 1)).all()
                else "for one class against the others, write `AUROC(lambda outputs, ys: (outputs[:, 2], ys == 2))`",
            )
        if np.isnan(scores).any():
            return float("nan")
        # Sum the weights of equal scores. For each score, in ascending order, `below` is then the weight of the
        # negative examples with a lower score.
        _, group = np.unique(scores, return_inverse=True)
        positive_weights = np.bincount(group, weights * labels)
        negative_weights = np.bincount(group, weights * (1 - labels))
        below = np.cumsum(negative_weights) - negative_weights / 2  # equal scores count half
        pairs = positive_weights.sum() * negative_weights.sum()
        return float((positive_weights * below).sum() / pairs) if pairs else float("nan")

    def __repr__(self) -> str:
        function = [] if self._function.fn is _binary else [repr(self._function)]
        name = [] if self.name == type(self).name else [f'name="{self.name}"']
        needs = self._function.needs
        named = [] if needs == ("outputs", "ys") else [f"needs={needs!r}"]
        options = options_shown(self.phases, (AbstractValidationPhase,), self.weight)
        return f"AUROC({', '.join([*function, *name, *named, *options])})"


def _binary(outputs: Any, ys: Any) -> tuple[Any, Any]:
    """Return the scores of the positive class, and the labels."""
    import jax.numpy as jnp

    shape = jnp.shape(ys)
    if jnp.shape(outputs) == (*shape, 2):
        return outputs[..., 1] - outputs[..., 0], ys
    if jnp.shape(outputs) == (*shape, 1):
        return outputs[..., 0], ys
    return outputs, ys
