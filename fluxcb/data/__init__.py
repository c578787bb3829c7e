"""Data sources and functions that prepare batches for a step.

A data source is any object that yields batches each time it is iterated over: a list, a Grain dataset, an
`ArrayLoader`. `map` and `place` wrap a source and return another source. While steps run, `map` prepares batches and
`place` transfers them to devices. A source can also have `len`, `element_spec` (the shape of a batch) and `set_epoch`,
which fluxcb uses if they exist. Importing this package does not import JAX.
"""

from fluxcb.data.digits import digits
from fluxcb.data.loader import ArrayLoader
from fluxcb.data.sources import map, place

__all__ = ["ArrayLoader", "digits", "map", "place"]
