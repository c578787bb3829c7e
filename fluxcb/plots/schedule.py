"""`plot_schedule`: hyperparameters over the steps of a training that has not begun."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from fluxcb._calls import entry_point
from fluxcb._declare.schedules import positive
from fluxcb._errors import DeclarationError, TraceError
from fluxcb.plots.curves import matplotlib_axes, plot_curves, show_panels
from fluxcb.plots.panel import Panel, Points

__all__ = ["plot_schedule"]

_MOST = 2000  # maximum number of points, which is more than the width of a screen in pixels


@entry_point
def plot_schedule(
    schedule: Callable[[Any], Any] | float | Mapping[Any, Callable[[Any], Any] | float], steps: int, *, ax: Any = None
) -> Any:
    """Draw a schedule over the steps of a training, before it begins.

    Args:
        schedule: The argument of `Scheduler`, a mapping such as `{LearningRate: schedule}`, or a single schedule. A
            schedule is an Optax schedule, another `schedule(step) -> float[]` in `jax.numpy`, or a number.
        steps: Number of steps to draw, starting at step 0 (steps). At most 2000 points are computed.
        ax: The matplotlib axes to draw into, or the rich console to print to. The default is a new matplotlib figure.
            If matplotlib is not installed, it is an SVG image in a notebook, and a chart in a terminal.

    Returns:
        The matplotlib axes, or a list of axes if several hyperparameters are drawn into a new figure. Without
        matplotlib, an object that a notebook displays as an SVG image, and that can be saved; see `plot_curves`. None
        if `ax` is a console.

    Raises:
        DeclarationError: There is no schedule, a key is not a hyperparameter, a schedule does not return a single
            number, or `steps` is not an integer of at least 1.
        TraceError: A schedule has Python control flow that depends on the step, so it cannot be compiled.

    Example:
        >>> import optax
        >>> from rich.console import Console
        >>> from fluxcb.callbacks import LearningRate
        >>> from fluxcb.plots import plot_schedule
        >>> schedule = optax.warmup_cosine_decay_schedule(0.0, 0.1, warmup_steps=100, decay_steps=1000)
        >>> plot_schedule({LearningRate: schedule}, 1000, ax=Console(width=60))
        ■ learning_rate
        ...

    Source:
        fastai, `plot_sched`; ignite, `simulate_values`.
    """
    positive(steps, "`steps` of `plot_schedule`")
    if isinstance(schedule, Mapping):
        named = _named(schedule)
        curves = {name: _points(one, steps, f"The schedule of `{name}`") for name, one in named.items()}
    else:
        curves = {"schedule": _points(schedule, steps, "The schedule")}
    if ax is not None or len(curves) == 1:
        return plot_curves(curves, x_label="step", y_label=_label(curves), ax=ax)
    axes = matplotlib_axes(len(curves))  # separate axes, because a learning rate would look flat next to a momentum
    if axes is None:
        return show_panels([Panel({name: points}, "step", _label([name])) for name, points in curves.items()])
    for (name, points), each in zip(curves.items(), axes, strict=True):
        plot_curves({name: points}, x_label="step", y_label=_label([name]), ax=each)
        each.label_outer()  # only the last axes show the numbers of steps
    return axes


def _label(names: Collection[str]) -> str:
    return next(iter(names)).replace("_", " ") if len(names) == 1 else "value"


def _named(schedules: Mapping[Any, Any]) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for key, schedule in schedules.items():
        name = key if isinstance(key, str) else getattr(key, "name", None)  # a `HyperParameter` has one
        if not isinstance(name, str) or not name or name in named:
            raise DeclarationError(
                f"`plot_schedule` was given a schedule for {key!r}, which is not a hyperparameter or already has a "
                "schedule.",
                fix="use LearningRate, a subclass of HyperParameter with a `name`, or a name, each once",
            )
        named[name] = schedule
    if not named:
        raise DeclarationError(
            "`plot_schedule` was given no schedule.", fix="write e.g. `plot_schedule({LearningRate: schedule}, 1000)`"
        )
    return named


def _points(schedule: Any, steps: int, what: str) -> Points:
    """Return the values at some steps, computed by tracing the schedule, as `Scheduler` does."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    def value(step: Any) -> Any:
        found = schedule(step) if callable(schedule) else schedule
        shape = getattr(found, "shape", None)
        number = isinstance(found, int | float) and not isinstance(found, bool)
        if not number and shape != ():
            kind = f"a {type(found).__name__}" if shape is None else f"an array of shape {shape}"
            raise DeclarationError(
                f"{what} must be a number, or a function that returns one for a step, not {kind}.",
                fix="write e.g. `optax.cosine_decay_schedule(1e-3, 1000)`",
            )
        return jnp.asarray(found, jnp.float32)

    at = np.unique(np.linspace(0, steps - 1, min(steps, _MOST)).round().astype(np.int32))
    try:
        values = jax.vmap(value)(jnp.asarray(at))
    except jax.errors.JAXTypeError as error:
        raise TraceError(
            f"{what} cannot be compiled, because Python control flow depends on the step.",
            where=str(error).partition("\n")[0],
            why="`Scheduler` traces it into the compiled step, where the step has no concrete value",
            fix="write it in `jax.numpy`, e.g. `jnp.where(step < 100, 0.1, 0.01)` instead of `if`",
        ) from error
    return list(zip(at.tolist(), np.asarray(values, np.float64).tolist(), strict=True))
