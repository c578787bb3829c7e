"""Adapters that connect models of different libraries to the training step.

A `ModelAdapter` has three main methods. `init` returns the arrays of the model as plain pytrees, `apply` is a pure
function of these arrays, and `rebuild` turns them back into a model of the user's library. `adapt` selects the adapter
for a model. `nnx`, `linen`, `equinox` and `pair` create a specific adapter and accept options. A library is imported
only when one of its models is adapted. The user's module and its arrays are never changed.
"""

from fluxcb._typing import ModelAdapter
from fluxcb.models.detect import adapt
from fluxcb.models.equinox import equinox
from fluxcb.models.linen import linen
from fluxcb.models.nnx import nnx
from fluxcb.models.pair import pair

__all__ = ["ModelAdapter", "adapt", "equinox", "linen", "nnx", "pair"]
