"""Metrics as pure functions of their own small state: the base class, and those that are built in."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar

from fluxcb._declare.phases import Phase
from fluxcb._declare.signatures import accepts, explained
from fluxcb._errors import DeclarationError
from fluxcb.callbacks.arguments import number_between

__all__ = ["AbstractMetric", "Loss", "Metric", "SmoothLoss", "accuracy"]


class AbstractMetric:
    """Base class of metrics: three pure functions, which `Metrics` runs inside the compiled step.

    The state is a pytree of arrays or numbers that keeps its structure, shapes and dtypes. `update` is traced: it stays
    in `jax.numpy`. It starts anew at every epoch.

    Attributes:
        name: What the metric is called in `cbstate.metrics_epoch`, in tables and in logs.
        needs: Names of the step values that `update` reads.
        phases: The phase classes in which the metric is computed, including their subclasses; `(Phase,)` for all.

    Example:
        >>> import jax.numpy as jnp
        >>> class LargestOutput(AbstractMetric):
        ...     name = "largest"
        ...     needs = ("outputs",)
        ...
        ...     def init(self):
        ...         return jnp.float32(-jnp.inf)
        ...
        ...     def update(self, state, step, samples):
        ...         return jnp.maximum(state, jnp.max(step.outputs))
        ...
        ...     def compute(self, state):
        ...         return state
        >>> from types import SimpleNamespace
        >>> metric = LargestOutput()
        >>> float(metric.compute(metric.update(metric.init(), SimpleNamespace(outputs=jnp.arange(3.0)), 3)))
        2.0
    """

    name: str = "metric"
    needs: tuple[str, ...] = ("loss",)
    phases: tuple[type[Phase], ...] = (Phase,)

    def init(self) -> Any:
        """Return the state of a metric that has seen nothing."""
        raise self._missing("init(self)")

    def update(self, state: Any, step: Any, samples: int) -> Any:
        """Return the state after one more step.

        Args:
            state: The state.
            step: Has the step values that `needs` names, as attributes.
            samples: Samples in the batch.
        """
        raise self._missing("update(self, state, step, samples)")

    def compute(self, state: Any) -> Any:
        """Return the metric's value, a scalar, of a state that has seen at least one step."""
        raise self._missing("compute(self, state)")

    def step_value(self, state: Any, step: Any, samples: int) -> Any:
        """Return the value that stands for one step alone; by default, the metric of this batch.

        Args:
            state: The state after this step.
            step: The step's values.
            samples: Samples in the batch.
        """
        return self.compute(self.update(self.init(), step, samples))

    def _missing(self, method: str) -> DeclarationError:
        return DeclarationError(
            f"The metric `{type(self).__name__}` has no `{method}`.",
            fix="define init, update and compute; see fluxcb.callbacks.AbstractMetric",
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class Metric(AbstractMetric):
    """Average a function of outputs and targets over the samples of an epoch.

    Each batch counts with its number of samples, so that a shorter last batch does not distort the mean. Sums are
    compensated (Kahan), so that float32 is enough for long epochs.

    Args:
        fn: `fn(outputs, ys) -> float[]`, the mean over the batch.
        name: What it is called; the function's name by default.
        needs: Names of the step values that are passed to `fn`, in order.
        phase: The phase or phases (a tuple) in which the metric is computed and reported. A phase is an instance, or a
            class, which includes its subclasses. By default, all phases.

    Raises:
        DeclarationError: `fn` does not take the step values in `needs`; `fn` has no name and `name` is missing; `phase`
            is not a phase.

    Example:
        >>> from fluxcb.phases import ValidationPhase
        >>> Metric(accuracy), Metric(lambda aux: aux["kl"], name="kl", needs=("aux",))
        (Metric(accuracy), Metric(kl))
        >>> Metric(accuracy, phase=ValidationPhase)
        Metric(accuracy, phase=ValidationPhase)
    """

    @explained()
    def __init__(
        self,
        fn: Callable[..., Any],
        name: str | None = None,
        needs: tuple[str, ...] = ("outputs", "ys"),
        *,
        phase: Phase | type[Phase] | tuple[Phase | type[Phase], ...] = Phase,
    ) -> None:
        if not callable(fn):
            raise DeclarationError(
                f"`Metric` takes a function of outputs and targets, not {fn!r}.", fix="e.g. `Metric(accuracy)`"
            )
        called: str = name or getattr(fn, "__name__", "<lambda>")
        if called == "<lambda>":
            raise DeclarationError("This metric's function has no name.", fix='name it: `Metric(fn, name="top5")`')
        if not isinstance(called, str):
            raise DeclarationError(f"`name` of `Metric` must be a text, not {name!r}.", fix='e.g. `name="top5"`')
        if not isinstance(needs, tuple | list) or not needs or not all(isinstance(need, str) for need in needs):
            raise DeclarationError(
                f"`needs` of `Metric` must be a tuple of names of step values, not {needs!r}.",
                fix='e.g. `needs=("outputs", "ys")`',
            )
        if not accepts(fn, len(needs)):
            raise DeclarationError(
                f"The function of the metric `{called}` takes {inspect.signature(fn)}, "
                f"and is called with {', '.join(needs)}.",
                fix="let it take as many arguments, or name others in `needs=`",
            )
        self.fn = fn
        self.name = called
        self.needs = tuple(needs)
        self.phases = _phase_classes(phase)

    def init(self) -> Any:
        """Return the sum, its compensation and the number of samples: three zeros, float32[]."""
        import numpy as np

        return np.float32(0), np.float32(0), np.float32(0)

    def update(self, state: Any, step: Any, samples: int) -> Any:
        """Add one batch's mean, weighted by its samples."""
        import jax.numpy as jnp
        from jax import lax

        value = self._value(step)
        if not hasattr(value, "dtype") and not isinstance(value, int | float):
            raise DeclarationError(
                f"The metric `{self.name}` returned {type(value).__name__} {value!r} for one batch.",
                why="the values of batches are averaged, so each must be one number: the mean over its batch",
                fix="return a number, e.g. `jnp.mean(...)`",
            )
        if jnp.shape(value) != ():
            raise DeclarationError(
                f"The metric `{self.name}` returned an array of shape {jnp.shape(value)} for one batch.",
                why="the values of batches are averaged, so each must be one number: the mean over its batch",
                fix="take the mean over the batch: `jnp.mean(...)`",
            )
        total, error, weight = state
        term = jnp.asarray(value, jnp.float32) * samples - error
        new = total + term
        error = (new - total) - term
        # An infinite value would make the compensation NaN, and infinity should stay infinity.
        return new, lax.select(jnp.isfinite(error), error, jnp.float32(0)), weight + jnp.float32(samples)

    def _value(self, step: Any) -> Any:
        return self.fn(*[getattr(step, name) for name in self.needs])

    def compute(self, state: Any) -> Any:
        """Return the mean over the samples."""
        return state[0] / state[2]

    def __repr__(self) -> str:
        names = [phase.__name__ for phase in self.phases]
        if names == ["Phase"]:
            return f"Metric({self.name})"
        shown = names[0] if len(names) == 1 else f"({', '.join(names)})"
        return f"Metric({self.name}, phase={shown})"


def _phase_classes(phase: Any) -> tuple[type[Phase], ...]:
    given = phase if isinstance(phase, tuple) else (phase,)
    classes = tuple(type(member) if isinstance(member, Phase) else member for member in given)
    if not classes or not all(isinstance(member, type) and issubclass(member, Phase) for member in classes):
        raise DeclarationError(
            f"`phase` of `Metric` must be a phase class, or a tuple of phase classes, not {phase!r}.",
            fix="e.g. `Metric(accuracy, phase=ValidationPhase)`",
        )
    return classes


class Loss(Metric):
    """Average the loss over the samples of an epoch (each batch's loss being a mean over its samples)."""

    name = "loss"
    needs: tuple[str, ...] = ("loss",)

    def __init__(self) -> None:
        super().__init__(_same, name="loss", needs=("loss",))

    def __repr__(self) -> str:
        return "Loss()"


def _same(loss: Any) -> Any:
    return loss


class SmoothLoss(AbstractMetric):
    """Smooth the loss: an exponential moving average over the steps of an epoch, corrected for its start at zero.

    `value = m / (1 - beta**n)` with `m <- beta * m + (1 - beta) * loss`, after `n` steps.

    Args:
        beta: Weight of the past, at least 0 and below 1.

    Raises:
        DeclarationError: `beta` is outside [0, 1).

    Source:
        FluxTraining.jl, `SmoothLoss`; the correction is that of Kingma and Ba (2015), algorithm 1.
    """

    name = "smooth_loss"
    needs: ClassVar[tuple[str, ...]] = ("loss",)  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, beta: float = 0.98) -> None:
        self.beta = number_between(0, 1, beta, "`beta` of SmoothLoss")

    def init(self) -> Any:
        """Return the average and the number of steps: two zeros, float32[]."""
        import numpy as np

        return np.float32(0), np.float32(0)

    def update(self, state: Any, step: Any, samples: int) -> Any:
        """Take in one step's loss."""
        import jax.numpy as jnp

        average, count = state
        return self.beta * average + (1 - self.beta) * jnp.asarray(step.loss, jnp.float32), count + 1

    def compute(self, state: Any) -> Any:
        """Return the corrected average."""
        average, count = state
        return average / (1 - self.beta**count)

    def step_value(self, state: Any, step: Any, samples: int) -> Any:
        """Return the smoothed loss after this step, not the step's own."""
        return self.compute(state)

    def __repr__(self) -> str:
        return f"SmoothLoss({self.beta})"


def accuracy(outputs: Any, ys: Any) -> Any:
    """Return the share of samples whose largest output is the right class.

    Args:
        outputs: Scores, `float[batch, ..., classes]`.
        ys: Class ids, `int[batch, ...]`, or one-hot, `[batch, ..., classes]`.

    Returns:
        `float32[]`, between 0 and 1.

    Example:
        >>> import jax.numpy as jnp
        >>> scores = jnp.array([[0.1, 0.9], [0.8, 0.2]])
        >>> float(accuracy(scores, jnp.array([1, 1]))), float(accuracy(scores, jnp.array([[0, 1], [1, 0]])))
        (0.5, 1.0)
    """
    import jax.numpy as jnp

    if jnp.ndim(ys) == jnp.ndim(outputs):
        ys = jnp.argmax(ys, axis=-1)
    return jnp.mean((jnp.argmax(outputs, axis=-1) == ys).astype(jnp.float32))
