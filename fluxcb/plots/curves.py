"""`plot_curves`: points over common axes, drawn with matplotlib, as an SVG image, or in the terminal."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fluxcb._calls import entry_point
from fluxcb._errors import DataError, DeclarationError, did_you_mean
from fluxcb._terminal import escape_line
from fluxcb.plots.chart import Line, chart
from fluxcb.plots.panel import COLORS, DOTTED, Panel, Points, shared_x
from fluxcb.plots.picture import Picture

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

__all__ = ["chosen", "matplotlib_axes", "plot_curves", "print_panels", "show_panels"]

# The colors of the SVG image, ordered so that the first ones are bright enough for a dark terminal.
_TERMINAL_COLORS = (COLORS[5], *COLORS[1:5], COLORS[0])
_MARKERS = "ox+*#@"
_WIDTH, _HEIGHT = 100, 12


@entry_point
def plot_curves(
    curves: Mapping[str, Points],
    *,
    x_label: str,
    y_label: str,
    log_x: bool = False,
    marks: Mapping[str, float] | None = None,
    ax: Any = None,
) -> Any:
    """Draw curves over common axes, with matplotlib, as an SVG image, or in the terminal.

    Args:
        curves: Points `(x, y)` by name. A point that is not finite leaves a gap. A terminal chart skips it.
        x_label: Name of the horizontal axis, with its unit.
        y_label: Name of the vertical axis, with its unit. The terminal shows only the names of the curves.
        log_x: Whether the horizontal axis is logarithmic.
        marks: Positions on the horizontal axis, by name. Each is drawn as a vertical line.
        ax: The matplotlib axes to draw into, or the rich console to print to. The default is a new matplotlib figure.
            If matplotlib is not installed, it is an SVG image in a notebook, and a chart in a terminal.

    Returns:
        The matplotlib axes (`axes.figure.savefig(...)` writes a file). Without matplotlib, an object that a notebook
        displays as an SVG image (`.save("curves.svg")` writes a file). None if `ax` is a console.

    Raises:
        DataError: A curve has no point that can be drawn.
        DeclarationError: `ax` is neither axes nor a console.

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
    panel = Panel(curves, x_label, y_label, log_x, marks or {})
    for name, points in panel.drawable().items():
        if not points:
            raise _nothing_to_draw(name, curves[name], log_x)
    if ax is None:
        axes = matplotlib_axes(1)
        if axes is None:
            return show_panels([panel])
        return _draw_with_matplotlib(panel, axes[0], legend_above=True)
    if _is_console(ax):
        print_panels([panel], ax)
        return None
    if not callable(getattr(ax, "plot", None)):
        raise DeclarationError(
            f"`ax` takes matplotlib axes or a rich console, not {ax!r}.",
            fix="write e.g. `ax=plt.figure().add_subplot()`",
        )
    return _draw_with_matplotlib(panel, ax, legend_above=False)


# -- matplotlib --------------------------------------------------------------------------------


def matplotlib_axes(number: int) -> list[Any] | None:
    """Return the axes of a new figure, one below the other, or None if matplotlib is not installed."""
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        return None
    axes = list(plt.figure(layout="constrained").subplots(number, sharex=True, squeeze=False)[:, 0])
    for each in axes:
        each.xaxis.get_major_locator().set_params(integer=True)  # epochs and steps are integers
    return axes


def _draw_with_matplotlib(panel: Panel, target: Any, *, legend_above: bool) -> Any:
    for name, points in panel.curves.items():
        dot = "." if len(points) <= DOTTED else None
        target.plot([x for x, _ in points], [y for _, y in points], label=name, marker=dot)
    for name, place in panel.marks.items():
        target.axvline(place, linestyle="--", color="0.5", label=name)
    target.set(xlabel=panel.x_label, ylabel=panel.y_label, **({"xscale": "log"} if panel.log_x else {}))
    names = [*panel.curves, *panel.marks]
    if len(names) > 1:
        # Above the axes, a legend does not hide a curve. Figures that fluxcb creates have room for it. The user's
        # figures may not have room, so their legends are inside the axes.
        columns = max(1, 72 // (max(map(len, names)) + 8))
        above = {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": min(columns, len(names)), "frameon": False}
        target.legend(**above if legend_above else {})
    return target


# -- without matplotlib ------------------------------------------------------------------------


def show_panels(panels: Sequence[Panel]) -> Picture:
    """Return an image, which a notebook displays. Outside a notebook, print charts to the terminal as well."""
    import rich

    console = rich.get_console()
    if not console.is_jupyter:
        print_panels(panels, console)
    return Picture(*panels)


def print_panels(panels: Sequence[Panel], console: Console) -> None:
    """Print each panel as a chart, with a common horizontal axis and an empty line between charts.

    A panel in which no point can be drawn has an empty chart.
    """
    shared = shared_x(panels)
    for number, panel in enumerate(panels):
        if number:
            console.print()
        _print_chart(replace(panel, x_scale=shared), console)


def _print_chart(panel: Panel, console: Console) -> None:
    curves = panel.drawable()
    ys = [y for points in curves.values() for _, y in points] or [0.0, 1.0]
    colors = [_TERMINAL_COLORS[number % len(_TERMINAL_COLORS)] for number in range(len(curves) + len(panel.marks))]
    # For example with the encoding ASCII or Latin-1, which have no braille characters.
    ascii_only = console.options.ascii_only
    # Without colors, markers distinguish the curves of a chart.
    marked = len(curves) > 1 and console.color_system is None
    markers = [_MARKERS[number % len(_MARKERS)] if marked else "" for number in range(len(curves))]
    marks = [
        Line([(x, min(ys)), (x, max(ys))], color, ascii_path="|")
        for x, color in zip(panel.marks.values(), colors[len(curves) :], strict=True)
    ]
    lines = [
        Line(points, color, marker, "." if marked else "*")
        for points, color, marker in zip(curves.values(), colors, markers, strict=False)
    ]
    curve_sign, mark_sign = "*|" if ascii_only else "■│"
    entries = [
        (marker or curve_sign, _shown(name, console), color)
        for marker, name, color in zip(markers, curves, colors, strict=False)
    ]
    entries += [(mark_sign, _shown(name, console), line.style) for name, line in zip(panel.marks, marks, strict=True)]
    texts = chart(
        [*marks, *lines],
        width=min(console.width, _WIDTH),
        height=_HEIGHT,
        x=panel.horizontal,
        x_label=_shown(panel.x_label, console),
        ascii_only=ascii_only,
    )
    for text in [*_legend(entries, console.width), *texts]:
        console.print(text, soft_wrap=True, highlight=False)


def _legend(entries: Sequence[tuple[str, str, str]], width: int) -> list[Text]:
    """Return the entries (a sign, an escaped name and a color) on as many lines as they need."""
    from rich.text import Text

    rows: list[Text] = []
    for sign, name, color in entries:
        entry = Text.assemble((sign, color), f" {name}")
        if rows and rows[-1].cell_len + 3 + entry.cell_len <= width:
            rows[-1].append("   ").append_text(entry)
        else:
            rows.append(entry)
    return rows


def _shown(text: str, console: Console) -> str:
    """Return a text with escapes for control characters, and for characters that the console's encoding lacks."""
    encoding = console.encoding
    return escape_line(text).encode(encoding, "backslashreplace").decode(encoding)


# -- choosing ----------------------------------------------------------------------------------


def chosen(curves: Mapping[str, Points], names: Sequence[str], owner: str) -> dict[str, Points]:
    """Return the curves whose names match patterns (shell-style). Without patterns, return all losses, or all curves.

    Args:
        curves: The curves by name, which contains slashes.
        names: Patterns for whole names, or for the part after the phase.
        owner: The object that has the curves, for messages.

    Raises:
        DataError: A pattern matches no name.
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


def _nothing_to_draw(name: str, points: Points, log_x: bool) -> DataError:
    return DataError(
        f"`{name}` has no point that can be drawn.",
        where=f"it has {len(points)} points",
        why="only finite numbers have a place on an axis" + (", and above 0 on a logarithmic one" if log_x else ""),
    )


def _is_console(target: Any) -> bool:
    from rich.console import Console

    return isinstance(target, Console)
