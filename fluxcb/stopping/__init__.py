"""Criteria for stopping: what a series of losses must do for a training to end.

In come losses, one at a time; out comes whether to stop, and why. A criterion is a frozen value without a memory of its
own: `update(state, loss)` returns the next state, which is plain data (None, numbers, lists and dicts of them), so a
training that is saved and resumed stops where it would have stopped. `fluxcb.callbacks.EarlyStopping` feeds them the
metrics of a fit; `stopping_time` a list of losses. Importing this package does not import JAX.
"""

from fluxcb.stopping.criterion import ComparingCriterion, Criterion
from fluxcb.stopping.disjunction import Disjunction
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
