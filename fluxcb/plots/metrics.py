"""`plot_metrics`: curves of the metrics that `Metrics` has stored."""

from __future__ import annotations

from typing import Any

from fluxcb._calls import entry_point
from fluxcb._errors import DataError, DeclarationError
from fluxcb.plots.curves import chosen, plot_curves
from fluxcb.plots.panel import Points

__all__ = ["plot_metrics"]

_IMAGES = ("gif", "jpeg", "jpg", "pdf", "png", "svg", "webp")


@entry_point
def plot_metrics(source: Any, *names: str, ax: Any = None) -> Any:
    """Draw the metrics of a training over epochs or over steps, such as the loss curve.

    Use the command `fluxcb plot` for runs on disk.

    Args:
        source: A Learner that has trained with `Metrics` or an `InferenceRunner`, or a `History`.
        *names: The names under which the metrics are logged: `validation/loss` for values of epochs,
            `training/step/loss` for values of steps. `loss` selects the losses of all phases. Patterns such as
            `validation/*` also work. The default is all losses.
        ax: The matplotlib axes to draw into, or the rich console to print to. The default is a new matplotlib figure.
            If matplotlib is not installed, it is an SVG image in a notebook, and a chart in a terminal.

    Returns:
        The matplotlib axes. Without matplotlib, an object that a notebook displays as an SVG image, and that can be
        saved; see `plot_curves`. None if `ax` is a console.

    Raises:
        DataError: A name matches nothing, or there are no values.
        DeclarationError: The names select both values of epochs and values of steps.

    Example:
        >>> from rich.console import Console
        >>> from fluxcb.callbacks import Metrics
        >>> from fluxcb.plots import plot_metrics
        >>> from fluxcb.testing import testlearner
        >>> learner = testlearner(Metrics())
        >>> history = learner.fit(20)
        >>> plot_metrics(learner, "validation/loss", ax=Console(width=60))
        ■ validation/loss
        ...
    """
    for name in names:
        if not isinstance(name, str):
            raise DeclarationError(
                f"Metrics to plot are given by name, not as {name!r}.",
                fix='write e.g. `history.plot("loss", "accuracy")`',
            )
        if name.rpartition(".")[2].lower() in _IMAGES:
            raise DeclarationError(
                f'`plot_metrics` takes names of metrics, and "{name}" is the name of a file.',
                fix=f'save the figure: `history.plot().figure.savefig("{name}")`, which needs matplotlib',
            )
    of_steps = [name for name in names if "/step/" in name]
    if of_steps and len(of_steps) < len(names):
        raise DeclarationError(
            f"`plot_metrics` was given names of steps' values ({', '.join(of_steps)}) and others.",
            why="a figure shows values either over steps or over epochs",
            fix="call it once for each kind",
        )
    history = getattr(source, "history", source)
    curves = _flat(history.per_step, "/step/") if of_steps else _flat(history.per_epoch, "/")
    if not curves and (of_each_step := _flat(history.per_step, "/step/")):
        raise DataError(
            "There are no metrics of epochs to draw, because no epoch has ended.",
            fix=f'draw the values of the steps: `history.plot("{next(iter(of_each_step))}")`',
        )
    if not curves:
        raise DataError(
            "There are no metrics to draw.",
            why="`Metrics` keeps values of each epoch, and of each step",
            fix=["put `Metrics()` into the list of callbacks", "train first: `learner.fit(1)`"],
        )
    found = chosen(curves, names, "The Learner")
    loss = all(name.endswith("loss") for name in found)
    return plot_curves(found, x_label="step" if of_steps else "epoch", y_label="loss" if loss else "value", ax=ax)


def _flat(series: dict[str, dict[str, Points]], between: str) -> dict[str, Points]:
    """Return the curves by name, without metrics whose values are arrays."""
    return {
        f"{phase}{between}{name}": points
        for phase, metrics in series.items()
        for name, points in metrics.items()
        if not any(getattr(value, "shape", ()) for _, value in points)
    }
