"""The base class of metrics, and the built-in metrics that are averages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from fluxcb._calls import Constructed
from fluxcb._declare.losses import warn_about_order
from fluxcb._declare.padded_batch import mask_of
from fluxcb._declare.phases import Phase
from fluxcb._errors import DeclarationError
from fluxcb._traced_values import describe
from fluxcb.callbacks.arguments import finite_number, require
from fluxcb.callbacks.metrics.padding import held, masked_mean, reads_mask, warn_of_unmasked
from fluxcb.callbacks.metrics.step_functions import (
    needs_of,
    options_shown,
    phase_classes,
    step_function,
    warn_about_count,
    warn_about_pairs,
    warn_about_weights,
    weight_function,
    weights_of,
)

__all__ = ["AbstractMetric", "Loss", "Metric", "SmoothLoss", "checked_shape", "compensated"]


class AbstractMetric(Constructed):
    """Base class of metrics, which consist of three pure functions: `init`, `update` and `compute`.

    The state of a metric is a pytree of arrays or numbers with a fixed structure, fixed shapes and fixed dtypes. Each
    epoch starts from the result of `init`. `Metrics` calls `update` inside the compiled step, so `update` must be
    written in `jax.numpy`.

    Attributes:
        name: The name of the metric in `cbstate.metrics_epoch`, in tables and in logs.
        needs: Names of the step values that `update` reads.
        phases: The phase classes in which the metric is computed, including their subclasses; `(Phase,)` for all.
        shape: The shape of the value; `()` for a number. With any other shape, the value of an epoch is a NumPy array,
            and there are no values of single steps. Callbacks that print, log or compare numbers ignore such a metric.

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
    shape: tuple[int, ...] = ()

    @property
    def has_step_values(self) -> bool:
        """Whether the metric has a value for each training step, which must be a number."""
        return self.shape == ()

    def init(self) -> Any:
        """Return the state at the start of an epoch."""
        raise self._missing("init(self)")

    def update(self, state: Any, step: Any, samples: int) -> Any:
        """Return the state after one more step.

        Args:
            state: The state before this step.
            step: An object with the step values in `needs` as attributes.
            samples: Number of samples in the batch.
        """
        raise self._missing("update(self, state, step, samples)")

    def compute(self, state: Any) -> Any:
        """Return the value of the metric, an array of shape `shape`.

        Args:
            state: The state after at least one step.
        """
        raise self._missing("compute(self, state)")

    def step_value(self, state: Any, step: Any, samples: int) -> Any:
        """Return the value of the metric for a single step; by default, its value for this batch alone.

        Args:
            state: The state after this step.
            step: An object with the step values in `needs` as attributes.
            samples: Number of samples in the batch.
        """
        return self.compute(self.update(self.init(), step, samples))

    def value_of(self, state: Any) -> Any:
        """Return the value for a state on the host, as a float or a read-only NumPy array.

        Raises:
            DeclarationError: `compute` returned an array whose shape is not `shape`.
        """
        import numpy as np

        value = np.array(self.compute(state))
        self.check_shape(value.shape)
        if self.shape == ():
            return float(value)
        value.flags.writeable = False
        return value

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Check the shape of the array that `compute` returned.

        Raises:
            DeclarationError: The shape is not `self.shape`.
        """
        if shape == self.shape:
            return
        expected = "one number" if self.shape == () else f"one of shape {self.shape}"
        name = type(self).__name__
        raise DeclarationError(
            f"The value of the metric `{self.name}` is an array of shape {shape}, not {expected}.",
            why="the shape of a metric is declared, so that callbacks that need numbers can ignore arrays",
            fix=[
                f"write `shape = {shape}` in the class {name}",
                f"return an array of shape {self.shape} from `{name}.compute`"
                if self.shape
                else f"return a scalar from `{name}.compute`",
            ],
        )

    def _missing(
        self, method: str, methods: str = "init, update and compute", base: str = "AbstractMetric"
    ) -> DeclarationError:
        return DeclarationError(
            f"The metric `{type(self).__name__}` has no `{method}`.",
            fix=f"define {methods}, as described in `fluxcb.callbacks.{base}`",
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class Metric(AbstractMetric):
    """Average a function of outputs and targets over the samples of an epoch.

    The mean of each batch is weighted by its number of samples, so a smaller last batch does not distort the average.
    Sums use Kahan compensation, so float32 is accurate enough for long epochs.

    If batches are padded or masked, pass `weight`. The metric is then `sum(weights * values) / sum(weights)` over all
    examples of the epoch. There are two forms:

    - `fn` returns one value per example, and `weight` returns one weight per example, in the same shape.
    - `fn` returns the mean of a batch, which already takes the mask into account. This mean is weighted by the sum of
      what `weight` returns, a number or an array of weights.

    A value with weight 0 is ignored even if it is NaN. If all weights of an epoch are 0, the metric is NaN. If a weight
    is negative or NaN, the metric is NaN with a warning.

    Args:
        fn: `fn(outputs, ys) -> float[]`, the mean over the batch. With `weight`, it may return values per example,
            such as `float[batch]` or `float[batch, tokens]`.
        name: The name of the metric; by default, the name of the function.
        needs: Names of the step values that are passed to `fn`, in order.
        phase: The phase or phases (a tuple) in which the metric is computed and reported. A phase is an instance, or a
            class, which includes its subclasses. By default, all phases.
        weight: `weight(batch) -> float[]`, the weight of the batch, or the weights of its examples. The default is the
            number of samples. Weights must not be negative. A typical weight is a mask of zeros and ones.
        weight_needs: Names of the step values that are passed to `weight`, in order.
        shape: Shape of the metric if it is an array. `fn` then returns `float[*shape]` for a batch (or, with `weight`,
            an array of this shape per example), and each element is averaged separately.

    Raises:
        DeclarationError: `fn` does not take the step values in `needs`, or `weight` those in `weight_needs`; `fn` has
            no name and `name` is missing; `phase` is not a phase; `shape` is not a shape.

    Warns:
        UserWarning: `fn` broadcasts outputs and targets of shapes [N, 1] and [N] to all pairs, or returns an integer
            (when the step is traced).

    Example:
        >>> from fluxcb.callbacks import accuracy
        >>> from fluxcb.phases import ValidationPhase
        >>> Metric(accuracy, phase=ValidationPhase), Metric(lambda aux: aux["kl"], name="kl", needs=("aux",))
        (Metric(accuracy, phase=ValidationPhase), Metric(kl))
        >>> def mask(batch):
        ...     return batch["mask"]
        >>> Metric(lambda outputs, ys: abs(outputs - ys), name="error", weight=mask)
        Metric(error, weight=mask)
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        name: str | None = None,
        needs: tuple[str, ...] = ("outputs", "ys"),
        *,
        phase: Phase | type[Phase] | tuple[Phase | type[Phase], ...] = Phase,
        weight: Callable[..., Any] | None = None,
        weight_needs: tuple[str, ...] = ("batch",),
        shape: tuple[int, ...] = (),
    ) -> None:
        require(callable(fn), fn, "`fn` of `Metric`", "a function of outputs and targets", "Metric(accuracy)")
        called: str = name or getattr(fn, "__name__", "<lambda>")
        if called == "<lambda>":
            raise DeclarationError(
                "The function of this metric has no name.", fix='name it: `Metric(fn, name="top5_accuracy")`'
            )
        require(isinstance(called, str), name, "`name` of `Metric`", "a string", 'name="top5_accuracy"')
        self.fn = fn
        self._function = step_function(fn, needs, f"The function of the metric `{called}`", "Metric")
        if tuple(needs) == ("outputs", "ys"):
            warn_about_order(fn, "The metric", f'Metric({{}}, "{called}", ("ys", "outputs"))')
        self.name = called
        self.weight = weight_function(weight, weight_needs, called, "Metric")
        self.needs = needs_of(self._function, self.weight)
        self.phases = phase_classes(phase, "Metric", "accuracy")
        self.shape = checked_shape(shape, "`shape` of `Metric`")

    def init(self) -> Any:
        """Return zeros: the sum and its compensation, float32[*shape], and the number of samples, float32[].

        With `weight`, the sum of the weights and its compensation replace the number of samples.
        """
        import numpy as np

        zeros = np.zeros(self.shape, np.float32)[()]
        if self.weight is None:
            return zeros, zeros, np.float32(0)
        return zeros, zeros, np.float32(0), np.float32(0)

    def update(self, state: Any, step: Any, samples: int) -> Any:
        """Add the mean of one batch, weighted by the number of samples or by `weight`."""
        import jax.numpy as jnp

        if self.weight is None:
            total, error, count = state
            return *compensated(total, error, self.batch_value(step) * samples), count + jnp.float32(samples)
        given, step = self.weight, held(step, self.needs)
        value, masked = reads_mask(step, self.batch_value)
        weights, masked_weight = reads_mask(step, lambda step: weights_of(given, step, self.name))
        if not masked and value.shape == self.shape:
            warn_of_unmasked("The function", self.name)
        if not masked_weight and not weights.shape:
            warn_of_unmasked("`weight`", self.name)
        term, weight = self._weighted(value, weights)
        total, error, count, count_error = state
        return *compensated(total, error, term), *compensated(count, count_error, weight)

    def batch_value(self, step: Any) -> Any:
        """Return what `fn` returns for one batch: float32[*shape], or with `weight` also the values of the examples.

        Raises:
            DeclarationError: It is not a number, or has another shape.
        """
        import jax.numpy as jnp

        value = self._function(step)
        if not hasattr(value, "dtype") and not isinstance(value, int | float):
            raise DeclarationError(
                f"The metric `{self.name}` returned {describe(value)} for one batch.",
                why="the values of batches are averaged, so each must be one number, the mean over the batch",
                fix="return a number, e.g. `jnp.mean(...)`",
            )
        warn_about_pairs(self._function, step, self.name)
        if self.weight is not None:
            return jnp.asarray(value, jnp.float32)
        if self.needs != ("loss",):  # in a hand-written loop, the loss may be announced as 0
            warn_about_count(value, self.name)
        value = jnp.asarray(value, jnp.float32)
        if value.shape != self.shape:
            raise self._wrong_shape(value.shape)
        mask = mask_of(getattr(step, "batch", None))
        return value if mask is None else masked_mean(value, self._function, step, mask, self.name)

    def _wrong_shape(self, shape: tuple[int, ...]) -> DeclarationError:
        if self.shape == ():
            return DeclarationError(
                f"The metric `{self.name}` returned an array of shape {shape} for one batch.",
                why="the values of batches are averaged, so each must be one number, the mean over the batch",
                fix="take the mean over the batch: `jnp.mean(...)`",
            )
        return DeclarationError(
            f"The metric `{self.name}` returned an array of shape {shape} for one batch, but its `shape` is "
            f"{self.shape}.",
            why="the values of batches are averaged element by element",
            fix=f"return the means over the batch, or pass `shape={shape}`",
        )

    def _weighted(self, value: Any, weight: Any) -> tuple[Any, Any]:
        """Return the weighted sum of the values of one batch, and the sum of its weights."""
        import jax.numpy as jnp

        if value.shape == (*weight.shape, *self.shape):
            weights = weight.reshape(*weight.shape, *(1 for _ in self.shape))
            # A value with weight 0 is often 0 / 0, and 0 * NaN would make the sum NaN.
            terms = jnp.where(weights != 0, weights * value, 0)
            return jnp.sum(terms, axis=tuple(range(weight.ndim))), jnp.sum(weight)
        if value.shape == self.shape:
            weight = jnp.sum(weight)
            return jnp.where(weight != 0, weight * value, 0), weight
        each = f", or {(*weight.shape, *self.shape)}, one value per weight" if weight.shape else ""
        raise DeclarationError(
            f"The metric `{self.name}` returned an array of shape {value.shape} for one batch, but its weights have "
            f"shape {weight.shape}.",
            why=f"the values must have shape {self.shape}, the mean over the batch{each}",
            fix=[
                "take the mean over the batch, with the mask: `jnp.sum(values * mask) / jnp.sum(mask)`",
                "return an array with one weight per value from `weight`",
            ],
        )

    def compute(self, state: Any) -> Any:
        """Return the mean over the samples."""
        import numpy as np

        if self.weight is not None:
            warn_about_weights(state[2], self.name)
        with np.errstate(invalid="ignore"):  # 0 / 0, if all weights of an epoch are 0
            return state[0] / state[2]

    def __repr__(self) -> str:
        return f"Metric({', '.join([self.name, *self.options()])})"

    @property
    def fn_needs(self) -> tuple[str, ...]:
        """Names of the step values that are passed to `fn`; `needs` also contains those for `weight`."""
        return self._function.needs

    def options(self) -> list[str]:
        """Return the keyword-only arguments as code, except those with default values."""
        shape = [] if self.shape == () else [f"shape={self.shape}"]
        return [*options_shown(self.phases, (Phase,), self.weight), *shape]


def compensated(total: Any, error: Any, value: Any) -> tuple[Any, Any]:
    """Add a value to a Kahan sum, and return the new sum and its rounding error."""
    import jax.numpy as jnp
    import numpy as np
    from jax import lax

    term = value - error
    new = total + term
    error = (new - total) - term
    # An infinite value makes the compensation NaN. Without this, the next value would change the sum from infinity to
    # NaN.
    return new, lax.select(jnp.isfinite(error), error, np.zeros(error.shape, np.float32))


def checked_shape(shape: Any, what: str) -> tuple[int, ...]:
    """Return a shape as a tuple.

    Raises:
        DeclarationError: `shape` is not a tuple of positive integers.
    """
    fits = isinstance(shape, tuple | list) and all(type(size) is int and size > 0 for size in shape)
    require(fits, shape, what, "a tuple of positive integers", "shape=(5,)")
    return tuple(shape)


class Loss(Metric):
    """Average the loss over the samples of an epoch.

    The loss of each batch is weighted by the number of samples. If the loss is a masked mean, return the mask from
    `weight`. The loss is then weighted by the sum of the mask.

    Args:
        weight: `weight(batch) -> float[]`, the weight of the batch, or the weights of its examples, which are summed.
            The default is the number of samples.
        weight_needs: Names of the step values that are passed to `weight`, in order.

    Raises:
        DeclarationError: `weight` is not a function of the step values in `weight_needs`.

    Example:
        >>> from fluxcb.callbacks import Loss, Metrics
        >>> Metrics(Loss(weight=lambda batch: batch["mask"]))
        Metrics(loss)
    """

    name = "loss"
    needs: tuple[str, ...] = ("loss",)

    def __init__(self, *, weight: Callable[..., Any] | None = None, weight_needs: tuple[str, ...] = ("batch",)) -> None:
        super().__init__(_identity, name="loss", needs=("loss",), weight=weight, weight_needs=weight_needs)

    def __repr__(self) -> str:
        return f"Loss({', '.join(self.options())})"


def _identity(loss: Any) -> Any:
    return loss


class SmoothLoss(AbstractMetric):
    """Compute an exponential moving average of the loss over the steps of an epoch, corrected for its start at zero.

    After `n` steps, `value = m / (1 - beta**n)`, where `m <- beta * m + (1 - beta) * loss` at each step.

    Args:
        beta: Weight of the previous average, at least 0 and below 1.

    Raises:
        DeclarationError: `beta` is outside [0, 1).

    Source:
        FluxTraining.jl, `SmoothLoss`; for the correction, Kingma and Ba (2015), algorithm 1.
    """

    name = "smooth_loss"
    needs: ClassVar[tuple[str, ...]] = ("loss",)  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, beta: float = 0.98) -> None:
        self.beta = finite_number(beta, "`beta` of SmoothLoss", least=0, below=1)

    def init(self) -> Any:
        """Return the average and the number of steps: two zeros, float32[]."""
        import numpy as np

        return np.float32(0), np.float32(0)

    def update(self, state: Any, step: Any, samples: int) -> Any:
        """Update the average with the loss of one step."""
        import jax.numpy as jnp

        average, count = state
        return self.beta * average + (1 - self.beta) * jnp.asarray(step.loss, jnp.float32), count + 1

    def compute(self, state: Any) -> Any:
        """Return the corrected average."""
        average, count = state
        return average / (1 - self.beta**count)

    def step_value(self, state: Any, step: Any, samples: int) -> Any:
        """Return the smoothed loss after this step, instead of the loss of the step alone."""
        return self.compute(state)

    def __repr__(self) -> str:
        return f"SmoothLoss({self.beta})"
