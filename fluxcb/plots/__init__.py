"""Plots of schedules before a training, of metrics after it, and of other curves.

Curves are drawn with matplotlib (`pip install 'fluxcb[plots]'`). If matplotlib is not installed, they are printed to
the terminal. Importing this package imports neither matplotlib nor JAX.
"""

from fluxcb.plots.curves import plot_curves
from fluxcb.plots.metrics import plot_metrics
from fluxcb.plots.schedule import plot_schedule

__all__ = ["plot_curves", "plot_metrics", "plot_schedule"]
