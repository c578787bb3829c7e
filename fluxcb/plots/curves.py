"""`plot_curves`: points over common axes, drawn with matplotlib or printed."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fluxcb._errors import DataError, DeclarationError, did_you_mean
from fluxcb.plots.chart import Points, chart

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["chosen", "plot_curves", "print_curves", "separate_axes"]

# Okabe and Ito's palette, as in the SVG, brighter where a dark terminal would swallow a colour.
_COLOURS = ("#56B4E9", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#0072B2")
_WIDTH, _HEIGHT = 100, 12


def plot_curves(
    curves: Mapping[str, Points],
    *,
    x_label: str,
    y_label: str,
    log_x: bool = False,
    marks: Mapping[str, float] | None = None,
    ax: Any = None,
) -> Any:
    """Draw curves over common axes, with matplotlib or in the terminal.

    In a terminal without colours, or a file, each curve has a chart of its own.

    Args:
        curves: Points `(x, y)` by name. Those that are not finite leave a gap, or are passed over in the terminal.
        x_label: Name of the horizontal axis, with its unit.
        y_label: Name of the vertical axis, with its unit; the terminal shows the curves' names only.
        log_x: Whether the horizontal axis is logarithmic.
        marks: Places on the horizontal axis, by name; each is a vertical line.
        ax: The matplotlib axes to draw into, or the rich console to print to. If not given, a new figure of matplotlib,
            which `plt.show()` shows; or the terminal, where matplotlib is not installed.

    Returns:
        The matplotlib axes (`axes.figure.savefig(...)` writes a file), or None where curves were printed.

    Raises:
        DataError: A curve has no point that can be drawn.
        DeclarationError: `ax` is something else.

    Example:
        >>> from rich.console import Console
        >>> line = [(x, 2 * x) for x in range(11)]
        >>> plot_curves({"twice": line}, x_label="x", y_label="2 x", ax=Console(width=24))
        ■ twice
        20 ┤                  ⢠⠊
           ...
         0 ┤⡠⠃
           └────────────────────
            0        x        10
    """
    shown = {name: _drawable(name, points, log_x) for name, points in curves.items()}
    target = separate_axes(1)[0] if ax is None else ax
    if _is_console(target):
        print_curves(shown, target, x_label=x_label, log_x=log_x, marks=marks)
        return None
    if not callable(getattr(target, "plot", None)):
        raise DeclarationError(
            f"`ax` takes matplotlib axes or a rich console, not {ax!r}.", fix="e.g. `ax=plt.figure().add_subplot()`"
        )
    for name, points in curves.items():
        target.plot([x for x, _ in points], [y for _, y in points], label=name)
    for name, place in (marks or {}).items():
        target.axvline(place, linestyle="--", color="0.5", label=name)
    target.set(xlabel=x_label, ylabel=y_label, **({"xscale": "log"} if log_x else {}))
    if len(curves) > 1 or marks:
        target.legend()
    return target


def print_curves(
    curves: Mapping[str, Points],
    console: Console,
    *,
    x_label: str = "",
    log_x: bool = False,
    marks: Mapping[str, float] | None = None,
) -> None:
    """Print curves as charts: one with colours, or one for each curve.

    Args:
        curves: Finite points `(x, y)` by name, at least one each.
        console: Where to.
        x_label: Name of the horizontal axis.
        log_x: Whether the horizontal axis is logarithmic.
        marks: Places on the horizontal axis, by name.
    """
    groups = [curves] if console.color_system else [{name: points} for name, points in curves.items()]
    for group in groups:  # without colours, curves in one chart could not be told apart
        _print_chart(group, console, x_label, log_x, marks or {})


def _print_chart(
    curves: Mapping[str, Points], console: Console, x_label: str, log_x: bool, marks: Mapping[str, float]
) -> None:
    from rich.text import Text

    ys = [y for points in curves.values() for _, y in points]
    lines = {name: [(x, min(ys)), (x, max(ys))] for name, x in marks.items()}
    colours = {name: _COLOURS[number % len(_COLOURS)] for number, name in enumerate([*curves, *lines])}
    legend = Text()
    for name, colour in colours.items():
        legend.append("■ ", style=colour)
        legend.append(f"{name}   ")
    legend.rstrip()
    console.print(legend, soft_wrap=True)
    series = [(points, colours[name]) for name, points in [*lines.items(), *curves.items()]]
    for line in chart(series, width=min(console.width, _WIDTH), height=_HEIGHT, x_label=x_label, log_x=log_x):
        console.print(line, soft_wrap=True, highlight=False)


def separate_axes(number: int) -> list[Any]:
    """Return matplotlib axes, one below the other in a new figure; or without matplotlib, as often the terminal."""
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        import rich

        return [rich.get_console()] * number
    axes = list(plt.figure(layout="constrained").subplots(number, sharex=True, squeeze=False)[:, 0])
    for each in axes:
        each.xaxis.get_major_locator().set_params(integer=True)  # there is no epoch 2.5
    return axes


def chosen(curves: Mapping[str, Points], names: Sequence[str], owner: str) -> dict[str, Points]:
    """Return the curves that patterns fit, as those of file names; without a pattern, all losses, or all.

    Args:
        curves: The curves by name, with slashes in it.
        names: Patterns of whole names, or of what follows the phase.
        owner: What has the curves, for messages.

    Raises:
        DataError: A pattern fits none.
    """
    if not names:
        losses = {name: points for name, points in curves.items() if name.split("/")[-1].endswith("loss")}
        return losses or dict(curves)
    found: dict[str, Points] = {}
    for pattern in names:
        fitting = fnmatch.filter(curves, pattern) or fnmatch.filter(curves, f"*/{pattern}")
        if not fitting:
            near = did_you_mean(pattern, [*curves, *(name.split("/")[-1] for name in curves)])
            raise DataError(f"{owner} has no values {pattern!r}.{near}", fix=f"it has {', '.join(curves)}")
        found.update((name, curves[name]) for name in fitting)
    return found


def _drawable(name: str, points: Points, log_x: bool) -> Points:
    """Return the points of a curve that have a place in a chart."""
    found = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y) and (x > 0 or not log_x)]
    if not found:
        raise DataError(
            f"`{name}` has no point that can be drawn.",
            where=f"it has {len(points)} points",
            why="only finite numbers have a place on an axis" + (", and above 0 on a logarithmic one" if log_x else ""),
        )
    return found


def _is_console(target: Any) -> bool:
    from rich.console import Console

    return isinstance(target, Console)
