"""`plot_metrics`: what `Metrics` has kept, as curves."""

from __future__ import annotations

from typing import Any

from fluxcb._errors import DataError, DeclarationError
from fluxcb.plots.curves import chosen, plot_curves
from fluxcb.plots.panel import Points

__all__ = ["plot_metrics"]


def plot_metrics(source: Any, *names: str, ax: Any = None) -> Any:
    """Draw the metrics of a training over epochs, or over steps: the loss curve.

    For runs on disk there is `fluxcb plot`.

    Args:
        source: A Learner that has trained with `Metrics` or an `InferenceRunner`, or a `History`.
        *names: Which, by the names under which they are logged: `validation/loss`; `training/step/loss` for the values
            of steps. A plain `loss` is that of all phases, and there are patterns: `validation/*`. All losses if no
            name is given.
        ax: The matplotlib axes to draw into, or the rich console to print to. The default is a new matplotlib figure.
            If matplotlib is not installed, it is an SVG image in a notebook, and a chart in a terminal.

    Returns:
        The matplotlib axes. Without matplotlib, an object that a notebook displays as an SVG image, or None in a
        terminal; see `plot_curves`.

    Raises:
        DataError: A name fits nothing, or there are no values.
        DeclarationError: Names of epochs' and of steps' values stand side by side.

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
    of_steps = [name for name in names if "/step/" in name]
    if of_steps and len(of_steps) < len(names):
        raise DeclarationError(
            f"`plot_metrics` was given names of steps' values ({', '.join(of_steps)}) and others.",
            why="those are over steps, and these over epochs",
            fix="call it for each kind",
        )
    history = getattr(source, "history", source)
    curves = _flat(history.per_step, "/step/") if of_steps else _flat(history.per_epoch, "/")
    if not curves:
        raise DataError(
            "There are no metrics to draw.",
            why="`Metrics` keeps values of each epoch, and of each step",
            fix=["put `Metrics()` into the list of callbacks", "train before: `learner.fit(1)`"],
        )
    found = chosen(curves, names, "The Learner")
    loss = all(name.endswith("loss") for name in found)
    return plot_curves(found, x_label="step" if of_steps else "epoch", y_label="loss" if loss else "value", ax=ax)


def _flat(series: dict[str, dict[str, Points]], between: str) -> dict[str, Points]:
    return {f"{phase}{between}{name}": points for phase, metrics in series.items() for name, points in metrics.items()}
