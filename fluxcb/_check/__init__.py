"""Stage 2, check: problems and the order of callbacks, derived from the declarations alone.

The input is a set of declarations. The output is a `CallbackGraph`, which has the order of the handlers at each moment,
and a reason for each edge. The next stage can rely on three properties: an order exists at every known moment, no two
writers of the same state are unordered, and everything that is read is provided. Nothing in this package imports JAX.
"""
