"""`fluxcb plot`: the curves of a run, in the terminal or in a file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fluxcb._errors import DataError
from fluxcb._tools.runs import read_run
from fluxcb.logging.consoles import print_line
from fluxcb.plots.curves import chosen, print_panels
from fluxcb.plots.panel import Panel, Points, shared_x
from fluxcb.plots.picture import Picture

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["plot"]


def plot(path: Path, names: Sequence[str], out: Path | None, console: Console) -> None:
    """Draw the curves of a run: one chart for each quantity, with a common axis of steps.

    Args:
        path: The run's folder, or a file of it.
        names: Patterns of the names of the curves to draw, as for file names. By default, all curves whose name ends in
            `loss`, or all curves if there are none.
        out: An SVG file to write, or None to draw in the terminal.
        console: The terminal.

    Raises:
        DataError: There is no run, or no finite value to draw.
        DeclarationError: A pattern matches no curve, or the name of the file does not end in `.svg`.
    """
    panels = _panels(chosen(read_run(path), names, "The run"))
    if not any(points for panel in panels for points in panel.drawable().values()):
        raise _nothing_to_draw({name: points for panel in panels for name, points in panel.curves.items()})
    if out is None:
        print_panels([replace(panel, curves=_with_last_values(panel.curves)) for panel in panels], console)
        return
    Picture(*panels, title=str(path)).save(out)
    print_line(console, f"wrote {out}")


def _panels(curves: Mapping[str, Points]) -> list[Panel]:
    """Return a panel for each quantity. Training and validation share a panel, and all losses share a panel."""
    found: dict[str, dict[str, Points]] = {}
    for name, points in curves.items():
        quantity = name.rpartition("/")[2]
        found.setdefault("loss" if quantity.endswith("loss") else quantity, {})[name] = points
    panels = [Panel(members, "step", quantity.replace("_", " ")) for quantity, members in found.items()]
    shared = shared_x(panels)
    return [replace(panel, x_scale=shared) for panel in panels]


def _with_last_values(curves: Mapping[str, Points]) -> dict[str, Points]:
    return {f"{name}  last {points[-1][1]:.4g}": points for name, points in curves.items()}


def _nothing_to_draw(curves: Mapping[str, Points]) -> DataError:
    counts = []
    for name, points in curves.items():
        nans = sum(math.isnan(value) for _, value in points)
        kind = "NaN" if nans == len(points) else "infinite" if nans == 0 else "NaN or infinite"
        counts.append(f"`{name}` has {len(points)} {'value' if len(points) == 1 else 'values'}, {kind}")
    why = "only finite numbers have a place on an axis"
    return DataError("The run has no finite value to draw.", where=counts, why=why)
