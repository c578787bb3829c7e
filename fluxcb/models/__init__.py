"""Models of any library, as the training step sees them.

In comes what the user calls a model; out comes a `ModelAdapter`: `init` gives the arrays of the carry as plain pytrees,
`apply` is a pure function of them, `rebuild` turns them back into a model of the user's kind. `adapt` chooses; `nnx`,
`linen`, `equinox` and `pair` choose by hand and take options. A library is imported when one of its models is adapted,
not before. The user's own module and its arrays are never changed.
"""

from fluxcb._typing import ModelAdapter
from fluxcb.models.detect import adapt
from fluxcb.models.equinox import equinox
from fluxcb.models.linen import linen
from fluxcb.models.nnx import nnx
from fluxcb.models.pair import pair

__all__ = ["ModelAdapter", "adapt", "equinox", "linen", "nnx", "pair"]
