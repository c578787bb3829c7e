"""`fluxcb plot`: the curves of a run, in the terminal or in a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fluxcb._errors import DeclarationError
from fluxcb._tools.curve import curve_svg
from fluxcb._tools.runs import read_run
from fluxcb.plots.chart import Points
from fluxcb.plots.curves import chosen, print_curves

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["plot"]


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
    curves = chosen(read_run(path), names, "The run")
    if out is not None:
        out.write_text(curve_svg(curves, title=str(path), x_label="step", y_label=_unit(curves)), encoding="utf-8")
        console.print(f"wrote {out}", highlight=False, soft_wrap=True)
        return
    print_curves({f"{name}  last {points[-1][1]:.4g}": points for name, points in curves.items()}, console)


def _unit(curves: Mapping[str, Points]) -> str:
    return "loss (nats)" if all(name.endswith("loss") for name in curves) else "value"
