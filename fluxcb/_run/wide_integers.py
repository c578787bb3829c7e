"""Warnings about integers that JAX changes when it converts a batch to 32 bits."""

from __future__ import annotations

import jax
import numpy as np

from fluxcb._run.known_batches import known_batch
from fluxcb._run.learner_core import LearnerCore
from fluxcb._tracebacks import warn_user

__all__ = ["warn_about_wide_integers"]


def warn_about_wide_integers(core: LearnerCore) -> None:
    """Warn if a data source has integers that do not fit in the dtype to which JAX converts them.

    JAX keeps the lower 32 bits of a NumPy array of 64-bit integers, without a word. Identifiers and hashes become other
    numbers. The examples that are checked are those of `known_batch`.
    """
    for phase in core.phases:
        name = type(phase).name
        batch = known_batch(core, phase) if name in core.streams else None  # None has no leaves
        for path, leaf in jax.tree.leaves_with_path(batch):
            changed = _changed_integer(leaf)
            if changed is not None:
                warn_user(
                    f"Integers in `data.{name}` do not fit in the 32 bits to which JAX converts them: "
                    f"{changed[0]} in `batch{jax.tree_util.keystr(path)}` becomes {changed[1]}. Map them to small "
                    f"numbers, for example with `np.unique(values, return_inverse=True)[1]`, or write "
                    f'`jax.config.update("jax_enable_x64", True)` at the start of the program.',
                    UserWarning,
                )
                # The fix is the same for all arrays of a source, so one warning is enough.
                break


def _changed_integer(leaf: object) -> tuple[int, int] | None:
    """Return an integer of an array that JAX would change, and what it would become, or None."""
    # An empty array has no extremes. JAX arrays have been converted already.
    if not (isinstance(leaf, np.ndarray) and leaf.size and np.issubdtype(leaf.dtype, np.integer)):
        return None
    dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
    limits = np.iinfo(dtype)
    # With `jax_enable_x64`, JAX keeps the dtype, and the array is not read.
    for extreme in (leaf.max(), leaf.min()) if dtype != leaf.dtype else ():
        if not limits.min <= extreme <= limits.max:
            return int(extreme), int(extreme.astype(dtype))
    return None
