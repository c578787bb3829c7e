"""Base class of metrics that are computed on the host from all samples of an epoch, and the store of the samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fluxcb._declare.phases import AbstractTrainingPhase, AbstractValidationPhase, Phase
from fluxcb._errors import DeclarationError
from fluxcb.callbacks.metrics.metric import AbstractMetric

__all__ = ["AbstractGatheredMetric", "Samples"]


class AbstractGatheredMetric(AbstractMetric):
    """Base class of metrics that cannot be accumulated batch by batch, such as the area under a ROC curve.

    `gather` is traced and returns the arrays to copy to the host. `compute` runs on the host, once at the end of an
    epoch, with the arrays of all batches. Samples are gathered only in phases that do not train. To compute such a
    metric on training data, call `learner.evaluate(data, metrics=[...])`.

    Attributes:
        phases: The phase classes in which the metric is computed, including their subclasses; by default, all
            validation phases.

    Example:
        >>> import numpy as np
        >>> from fluxcb.callbacks import AbstractGatheredMetric, Metrics
        >>> from fluxcb.testing import testlearner
        >>> class MedianError(AbstractGatheredMetric):
        ...     name = "median_error"
        ...     needs = ("outputs", "ys")
        ...
        ...     def gather(self, step):
        ...         return {"errors": abs(step.outputs - step.ys)}
        ...
        ...     def compute(self, samples):
        ...         return np.median(samples["errors"])
        >>> history = testlearner(Metrics(MedianError())).fit(2)
        >>> list(history)
        ['training/loss', 'validation/loss', 'validation/median_error']
    """

    phases: tuple[type[Phase], ...] = (AbstractValidationPhase,)

    @property
    def has_step_values(self) -> bool:
        """Always False, because the metric has values for epochs only."""
        return False

    def refuse_training(self) -> None:
        """Check that no phase of the metric trains.

        Raises:
            DeclarationError: A phase trains.
        """
        for phase in self.phases:
            if phase.trains or issubclass(AbstractTrainingPhase, phase):
                raise DeclarationError(
                    f"The metric `{self.name}` gathers samples, but {phase.__name__} "
                    f"{'trains' if phase.trains else 'includes the phases that train'}.",
                    why="samples are gathered only in phases that do not train",
                    fix="leave out the phase, and evaluate a trained model: `learner.evaluate(data, metrics=[...])`",
                )

    def init(self) -> Any:
        """Return an empty state, because the samples are stored on the host."""
        return ()

    def update(self, state: Any, step: Any, samples: int) -> Any:
        """Return the empty state."""
        return ()

    def gathered(self, step: Any) -> Mapping[str, Any]:
        """Call `gather` for a step, and check the result.

        Raises:
            DeclarationError: `gather` did not return a mapping of names to arrays that have at least one axis.
        """
        import jax.numpy as jnp

        arrays = self.gather(step)
        if isinstance(arrays, Mapping) and all(jnp.ndim(array) for array in arrays.values()):
            return arrays
        shown = {name: jnp.shape(array) for name, array in arrays.items()} if isinstance(arrays, Mapping) else arrays
        raise DeclarationError(
            f"`{type(self).__name__}.gather` returned {'arrays of shapes ' if shown is not arrays else ''}{shown}.",
            why="the arrays of all batches are concatenated along their first axes",
            fix='return a dict of arrays with the samples along their first axes: `{"scores": step.outputs[:, 1]}`',
        )

    def gather(self, step: Any) -> Mapping[str, Any]:
        """Return a dict of arrays of one batch, with the samples along their first axes.

        Args:
            step: An object with the step values in `needs` as attributes.
        """
        raise self._missing("gather(self, step)", "gather and compute", "AbstractGatheredMetric")

    def compute(self, state: Mapping[str, Any]) -> Any:
        """Return the value of the metric for an epoch.

        Args:
            state: The arrays that `gather` returned, as NumPy arrays, concatenated over all batches.
        """
        raise self._missing("compute(self, samples)", "gather and compute", "AbstractGatheredMetric")


class Samples:
    """The arrays that metrics have gathered in an epoch, by metric and by name."""

    def __init__(self) -> None:
        self._parts: dict[str, dict[str, list[Any]]] = {}

    def add(self, gathered: Mapping[str, Any]) -> None:
        """Add the arrays of a step, unless its update was skipped.

        Args:
            gathered: The value of `step.gathered`: `counts`, which is false for a skipped step, and `values`, the
                arrays by metric and by name.
        """
        import numpy as np

        if not gathered["counts"]:
            return
        for metric, arrays in gathered["values"].items():
            for name, array in arrays.items():
                # A copy, because fetched arrays are views, which would keep the values of the whole window in memory.
                self._parts.setdefault(metric, {}).setdefault(name, []).append(np.array(array))

    def of(self, metric: str) -> dict[str, Any]:
        """Return the arrays of a metric, concatenated over all steps."""
        import numpy as np

        return {name: np.concatenate(parts) for name, parts in self._parts.get(metric, {}).items()}

    def clear(self) -> None:
        """Drop the arrays."""
        self._parts = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the arrays by metric and by name."""
        return {metric: self.of(metric) for metric in self._parts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._parts = {m: {name: [array] for name, array in arrays.items()} for m, arrays in state.items()}
