"""Curves: schedules before a training, metrics after it, and any other points.

They are drawn with matplotlib (`pip install 'fluxcb[plots]'`), or where that is not installed, printed to the terminal.
Importing this package imports neither matplotlib nor JAX.
"""

from fluxcb.plots.curves import plot_curves
from fluxcb.plots.metrics import plot_metrics
from fluxcb.plots.schedule import plot_schedule

__all__ = ["plot_curves", "plot_metrics", "plot_schedule"]
