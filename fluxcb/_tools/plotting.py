"""`fluxcb plot`: the curves of a run, in the terminal or in a file."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fluxcb._errors import DataError, DeclarationError, did_you_mean
from fluxcb._tools.curve import curve_svg
from fluxcb._tools.runs import Curves, read_run

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["plot"]

# Okabe and Ito's palette, as in the SVG, brighter where a dark terminal would swallow a colour.
_COLOURS = ("#56B4E9", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#0072B2")
_HEIGHT = 12


def plot(path: Path, names: Sequence[str], out: Path | None, console: Console) -> None:
    """Draw curves of a run.

    Args:
        path: The run's folder, or a file of it.
        names: Patterns of the curves to draw, as for file names; empty for all whose name ends in `loss`, or all.
        out: An SVG file to write, or None to draw in the terminal.
        console: The terminal.

    Raises:
        DataError: There is no run, or nothing to draw.
        DeclarationError: A pattern fits no curve, or the file is no SVG.
    """
    if out is not None and out.suffix != ".svg":
        raise DeclarationError(f"{out} is no SVG file, and nothing else can be written.", fix="name a file `*.svg`")
    curves = _chosen(read_run(path), names)
    if out is not None:
        out.write_text(curve_svg(curves, title=str(path), x_label="step", y_label=_unit(curves)), encoding="utf-8")
        console.print(f"wrote {out}", highlight=False, soft_wrap=True)
        return
    groups = [curves] if console.color_system else [{name: points} for name, points in curves.items()]
    for group in groups:  # without colours, curves in one chart could not be told apart
        _draw(group, console)


def _chosen(curves: Curves, names: Sequence[str]) -> Curves:
    if not names:
        losses = {name: points for name, points in curves.items() if name.split("/")[-1].endswith("loss")}
        return losses or curves
    chosen: Curves = {}
    for pattern in names:
        fitting = fnmatch.filter(curves, pattern) or fnmatch.filter(curves, f"*/{pattern}")
        if not fitting:
            near = did_you_mean(pattern, [*curves, *(name.split("/")[-1] for name in curves)])
            raise DataError(f"The run has no values {pattern!r}.{near}", fix=f"it has {', '.join(curves)}")
        chosen.update((name, curves[name]) for name in fitting)
    return chosen


def _draw(curves: Curves, console: Console) -> None:
    from rich.text import Text

    from fluxcb._tools.chart import chart

    colours = [_COLOURS[number % len(_COLOURS)] for number in range(len(curves))]
    legend = Text()
    for (name, points), colour in zip(curves.items(), colours, strict=True):
        legend.append("■ ", style=colour)
        legend.append(f"{name}  last {points[-1][1]:.4g}   ")
    console.print(legend, soft_wrap=True)
    for line in chart(
        [(points, colour) for points, colour in zip(curves.values(), colours, strict=True)],
        width=min(console.width, 100),
        height=_HEIGHT,
    ):
        console.print(line, soft_wrap=True, highlight=False)


def _unit(curves: Curves) -> str:
    return "loss (nats)" if all(name.endswith("loss") for name in curves) else "value"
