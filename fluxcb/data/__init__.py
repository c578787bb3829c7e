"""Batches: where they come from, and what is done to them before a step.

Anything that yields batches again when iterated again is a data source: a list, a Grain dataset, `ArrayLoader`. What
wraps one is a source too: `map` prepares batches and `place` puts them on devices, while they are fed. A source may
also have `len`, `element_spec` (the shape of a batch, before one is made) and `set_epoch`; the engine uses what it
finds. Importing this package does not import JAX.
"""

from fluxcb.data.digits import digits
from fluxcb.data.loader import ArrayLoader
from fluxcb.data.sources import map, place

__all__ = ["ArrayLoader", "digits", "map", "place"]
