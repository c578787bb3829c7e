"""Stopping criteria, which decide from a series of losses when a training should stop.

A criterion is a frozen value without state of its own. `update(state, loss)` returns the next state, which is plain
data (None, numbers, lists and dicts of these), so a training that is saved and resumed stops at the same loss as an
uninterrupted one. `fluxcb.callbacks.EarlyStopping` applies a criterion to the metrics of a fit, and `stopping_time`
applies it to a list of losses. Importing this package does not import JAX.
"""

from fluxcb.stopping.criterion import ComparingCriterion, Criterion, Disjunction
from fluxcb.stopping.limits import InvalidValue, Never, NumberLimit, Threshold, TimeLimit
from fluxcb.stopping.prechelt import GL, PQ
from fluxcb.stopping.progress import NumberSinceBest, Patience
from fluxcb.stopping.times import stopping_time

__all__ = [
    "GL",
    "PQ",
    "ComparingCriterion",
    "Criterion",
    "Disjunction",
    "InvalidValue",
    "Never",
    "NumberLimit",
    "NumberSinceBest",
    "Patience",
    "Threshold",
    "TimeLimit",
    "stopping_time",
]
